"""``CPUOffloadPolicy`` on GPUs: the bits of training without it, copies beside compute, memory of the device.

Needs two ranks, which may share one GPU: ``RANKS_PER_GPU=2 pytest tests/cuda/test_cuda_offload.py``.
"""

import copy
import gc
import unittest
from typing import Any

import torch
import torch.nn as nn
from common import ALL
from cuda_common import BF16, NUM_RANKS, CudaTest
from schedules import explicit
from torch.distributed.fsdp import CPUOffloadPolicy
from torch.utils.checkpoint import checkpoint
from trace_common import trace_of

from dtensor_gtp import _torch_compat as compat
from dtensor_gtp import gtp_shard

WIDTH = 512


class Block(nn.Module):
    """A layer, one that is used twice and recomputed, a norm, an attribute read."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = checkpoint(lambda z: self.down(torch.tanh(self.down(self.up(self.norm(z))))), x, use_reentrant=False)
        return x + y @ self.scale


class Sleep(nn.Module):
    """Holds up the compute stream."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        compat.sleep_stream(200_000_000)
        return x


def offload(*, pin_memory: bool = True) -> dict[str, Any]:
    return {"offload_policy": CPUOffloadPolicy(pin_memory=pin_memory)}


@unittest.skipIf(NUM_RANKS < 2, "needs two ranks: 2 GPUs, or one GPU and RANKS_PER_GPU=2")
class TestCudaOffload(CudaTest):
    def test_same_bits_as_without(self) -> None:
        """Gradients of three steps of two microbatches. The optimizer steps on the host; the other model takes over."""
        meshes = [self.gtp_mesh()]
        if self.world_size % 2 == 0 and self.world_size > 2:
            meshes.append(self.two_by_half("replicate", "gtp"))
        for mesh in meshes:
            for options in ({}, {"mp_policy": BF16}, {"mp_policy": BF16, "reshard_after_forward": False}):
                for pin_memory in (True, False):
                    torch.manual_seed(0)
                    plain = nn.Sequential(*(Block() for _ in range(3)))
                    on_gpu = gtp_shard(copy.deepcopy(plain), mesh, schedule=ALL, **options)
                    on_host = gtp_shard(plain, mesh, schedule=ALL, **options, **offload(pin_memory=pin_memory))
                    self.check_training(on_gpu, on_host, is_pinned=pin_memory)

    def check_training(self, on_gpu: nn.Module, on_host: nn.Module, *, is_pinned: bool) -> None:
        optimizer = torch.optim.AdamW(on_host.parameters(), lr=1e-2)
        for step in range(3):
            for microbatch in range(2):
                torch.manual_seed(10 * step + 2 * microbatch + 100 * self.rank)
                x = torch.randn(64, WIDTH, device="cuda")
                losses = []
                for model in (on_gpu, on_host):
                    model.set_requires_gradient_sync(microbatch == 1)
                    loss = model(x).float().square().mean()
                    loss.backward()
                    losses.append(loss.detach())
                torch.testing.assert_close(losses[1], losses[0], rtol=0, atol=0)
            pairs = list(zip(on_gpu.parameters(), on_host.parameters(), strict=True))
            for param, other in pairs:
                self.assertEqual((other.to_local().device.type, other.grad.to_local().device.type), ("cpu", "cpu"))
                self.assertEqual(other.to_local().is_pinned(), is_pinned)
                torch.testing.assert_close(other.grad.to_local(), param.grad.to_local().cpu(), rtol=0, atol=0)
            optimizer.step()
            self.assertEqual({state["exp_avg"].device.type for state in optimizer.state.values()}, {"cpu"})
            for model in (on_gpu, on_host):
                model.zero_grad()
            with torch.no_grad():
                for param, other in pairs:
                    param.to_local().copy_(other.to_local())

    def test_host_writes_only_to_what_is_sent(self) -> None:
        """The host is far ahead of the GPU when a forward returns; a shard that it overwrites must be there already."""
        torch.manual_seed(0)
        layers = [part for _ in range(4) for part in (Sleep(), nn.Linear(2048, 2048, bias=False))]
        model = gtp_shard(nn.Sequential(*layers), self.gtp_mesh(), schedule=ALL, **offload())
        x = torch.randn(8, 2048, device="cuda")
        with torch.no_grad():
            before = model(x)
            output = model(x)
            for param in model.parameters():
                param.to_local().fill_(float("nan"))
        torch.testing.assert_close(output, before, rtol=0, atol=0)

    def test_copies_run_beside_compute(self) -> None:
        """While compute is held up, weights of the layers to come are copied, on no stream that computes. The window
        holds one layer ahead, so that the copies are spread over the forward."""
        torch.manual_seed(0)
        width = 2048
        layers = [part for _ in range(12) for part in (nn.Linear(width, width, bias=False), Sleep())]
        schedule = explicit(prefetch_nbytes=4 * width * width)
        model = gtp_shard(nn.Sequential(*layers), self.gtp_mesh(), schedule=schedule, **offload())
        x = torch.randn(8, width, device="cuda")
        for _ in range(2):
            model(x).sum().backward()
        with torch.no_grad():
            model(x)
            trace = trace_of(lambda: model(x))
        events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
        copies = [e for e in events if e.get("cat") == "gpu_memcpy" and "HtoD" in e["name"].replace(" ", "")]
        sleeps = [e for e in events if e.get("cat") == "kernel" and "spin" in e["name"]]
        self.assertEqual(len(sleeps), 12)
        weights = [e for e in copies if e["args"]["bytes"] >= 4 * width * width // self.world_size]
        self.assertEqual(len(weights), 12)
        streams = {e["args"]["stream"] for e in weights}
        self.assertEqual(len(streams), 1)
        self.assertEqual(streams & {e["args"]["stream"] for e in events if e.get("cat") == "kernel"}, set())

        def time_of(event: dict[str, Any]) -> tuple[float, float]:
            return float(event["ts"]), float(event["ts"]) + float(event["dur"])

        held_up = [time_of(event) for event in sleeps]
        beside = [(a, b) for a, b in map(time_of, weights) if any(a < end and begin < b for begin, end in held_up)]
        self.assertGreaterEqual(len(beside), 3, f"copies {[*map(time_of, weights)]}, held up {held_up}")

    def test_device_memory(self) -> None:
        """Between steps the device holds no shard, no gradient and nothing of the optimizer."""
        gc.collect()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_allocated()
        model = gtp_shard(nn.Sequential(*(nn.Linear(2048, 2048) for _ in range(6))), self.gtp_mesh(), **offload())
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.randn(8, 2048, device="cuda")).sum().backward()
            optimizer.step()
        gc.collect()
        torch.cuda.synchronize()
        shards = sum(param.to_local().nbytes for param in model.parameters())
        self.assertLess(torch.cuda.memory_allocated() - before, shards // 8)

    def test_inputs_on_the_host(self) -> None:
        """They are moved, as ``fully_shard`` moves them, with offload and without."""
        for options in ({}, offload()):
            model = gtp_shard(nn.Sequential(nn.Linear(64, 64)), self.gtp_mesh(), schedule=ALL, **options)
            self.assertEqual(model(torch.ones(1, 64)).device.type, "cuda")

    def test_moved_module(self) -> None:
        model = gtp_shard(nn.Sequential(nn.Linear(64, 64)), self.gtp_mesh(), schedule=ALL, **offload())
        model.cuda()
        with self.assertRaisesRegex(
            RuntimeError, r"'0.weight' .* on the host, as offload_policy says, but it is on cuda"
        ):
            model(torch.ones(1, 64, device="cuda"))
        model.cpu()
        model(torch.ones(1, 64, device="cuda")).sum().backward()
