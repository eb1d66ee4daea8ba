"""What the benchmark says of memory, held against the allocator: the predicted peak of a step is the measured one.

Needs 2 to 8 GPUs of one host.
"""

import gc
import sys
import unittest
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from cuda_common import COPY_ENGINES, NUM_RANKS, CudaTest

from dtensor_gtp import sharding_report
from dtensor_gtp.policy import Schedule

sys.path.append(str(Path(__file__).resolve().parents[2] / "examples" / "benchmarks"))
from explain_memory import explain_peak
from harness import World, allocate_workspaces
from llama import LlamaConfig
from modes import Mode, Workload, build_model, make_step, shard

SEQ_LEN = 2048
# Weights of 8, 2 and 22 MiB, which the allocator's rounding to a MiB does not matter for, and tables of 192 MiB.
CONFIG = LlamaConfig(
    vocab_size=49152, dim=2048, num_layers=3, num_heads=16, num_kv_heads=4, hidden_dim=5632, max_seq_len=SEQ_LEN
)
ONE_BY_ONE = {
    "prefetch_depth": 1,
    "prefetch_nbytes": 0,
    "coalesce_nbytes": 0,
    "coalesce_grad_nbytes": 0,
    "max_inflight_reduce_scatters": 1,
}
LEAST = {**ONE_BY_ONE, "wgrad_first": False, "keep_last": False}


@unittest.skipIf(NUM_RANKS < 2, "needs at least 2 GPUs")
class TestCudaMemory(CudaTest):
    def check_peak(self, mode: str, schedule: dict[str, Any]) -> int:
        """Compare the measured peak of a forward and backward with the predicted one.

        Returns:
            bytes of symmetric memory.
        """
        device = torch.device("cuda", torch.cuda.current_device())
        world = World(self.rank, self.world_size, device, dist.group.WORLD)
        workload = Workload(CONFIG, 1, 0, schedule)
        allocate_workspaces(world)
        gc.collect()
        before = torch.cuda.memory_allocated()
        model = shard(build_model(workload, world), Mode.parse(mode), workload, world)
        step = make_step(model, mode, workload, world, SEQ_LEN, None)
        for _ in range(3):
            step()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(2):
            step()
        torch.cuda.synchronize()
        measured = torch.cuda.max_memory_allocated() - before
        predicted = explain_peak(model, None, mode, workload, SEQ_LEN, world)
        assert predicted is not None
        self.assertGreater(predicted.total, 1.5 * predicted.state, "what is counted is not the smaller part")
        told = f"{mode}, {schedule}: {predicted.total} bytes predicted, {measured} measured"
        self.assertLess(abs(measured - predicted.total), 0.05 * measured, told)
        return sharding_report(model).symmetric_nbytes

    def test_peak_with_rings(self) -> None:
        for mode in ("gtp-bf16", "gtp-fp32", "gtp-bf16-lookup"):
            self.assertEqual(self.check_peak(mode, {}), 0)
        self.check_peak("gtp-bf16", ONE_BY_ONE)

    def test_peak_with_all_to_all(self) -> None:
        for schedule in ({}, ONE_BY_ONE):
            self.check_peak("gtp-bf16", {"reduce_scatter": "all_to_all", **schedule})

    def test_peak_with_least_memory(self) -> None:
        for mode in ("gtp-bf16", "gtp-bf16-lookup"):
            self.check_peak(mode, LEAST)

    def test_peak_with_copy_engines(self) -> None:
        """What is sent and gathered from is not the allocator's; it is known all the same."""
        head = CONFIG.vocab_size * CONFIG.dim * torch.bfloat16.itemsize
        # (With less in flight a gradient may find its place in the ring in use, which the prediction does not know.)
        symmetric = self.check_peak("gtp-bf16-lookup", COPY_ENGINES)
        # At least the ring of the head's gradient. The head is gathered in rounds, so it does not decide the stage.
        stage = 2 * Schedule().coalesce_nbytes // self.world_size
        self.assertGreaterEqual(symmetric, head + stage)
        self.assertLess(symmetric, 6 * head)
