"""``StepMetrics`` on GPUs: what compute waits for a late rank is exposed, and rates agree with each other."""

import unittest

import torch
import torch.distributed as dist
import torch.nn as nn
from cuda_common import BF16, NUM_RANKS, CudaTest

from dtensor_gtp import gtp_shard
from dtensor_gtp.metrics import StepMetrics

WIDTH, DEPTH, ROWS = 1024, 4, 256
LATE = 200_000_000  # cycles of the SM clock: 100 ms, or more
LATE_MS = 50  # less than that on any GPU, as clocks stay below 4 GHz


@unittest.skipIf(NUM_RANKS < 2, "needs at least 2 GPUs")
class TestCudaMetrics(CudaTest):
    def test_waits_for_a_late_rank_are_exposed(self) -> None:
        model = gtp_shard(
            nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH))).cuda(),
            self.gtp_mesh(),
            mp_policy=BF16,
        )
        rows = torch.randn(ROWS, WIDTH, device="cuda")

        def step() -> None:
            model(rows).float().square().mean().backward()
            model.zero_grad()

        for _ in range(5):  # with the three below, the last forward in which the host waits for long
            step()
        metrics = StepMetrics(model, machine="h100")
        if self.rank == 1:
            torch.cuda._sleep(LATE)  # within the first step of the reading, so on the stream of its compute
        for _ in range(3):
            step()
            metrics.count(ROWS)
        values = metrics.read(loss=torch.tensor(2.0, device="cuda"))
        if self.rank == 0:
            self.assertGreater(values["exposed_ms"], LATE_MS)
        self.assertGreater(3 * values["step_ms"], max(values["exposed_ms"], LATE_MS))
        rate = values["tokens_per_s_per_device"]
        self.assertAlmostEqual(rate * values["step_ms"] / 1e3, ROWS, places=2)
        self.assertAlmostEqual(values["tokens_per_s"], rate * self.world_size, places=2)
        assert metrics.flops_per_s is not None
        flops = 6 * DEPTH * WIDTH**2
        self.assertAlmostEqual(values["mfu"], rate * flops / metrics.flops_per_s, places=6)
        self.assertEqual(values["peak_memory_gib"], torch.cuda.max_memory_allocated() / 2**30)
        self.assertEqual(values["loss"], 2.0)
        # All ranks are late together, by so much that their hosts launch both steps meanwhile: that is compute.
        dist.all_reduce(torch.zeros(1, device="cuda"))
        torch.cuda._sleep(8 * LATE)
        for _ in range(2):
            step()
            metrics.count(ROWS)
        values = metrics.read()
        self.assertGreater(2 * values["step_ms"], 8 * LATE_MS)
        # Not a number of ms: where processes share a GPU, its time slices make one rank late.
        self.assertLess(values["exposed_ms"], values["step_ms"])
