"""``SelectiveOffload`` on GPUs: bits, races, and the memory that it frees. Needs two ranks."""

import unittest
from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from cuda_common import BF16, NUM_RANKS, CudaTest, assert_same, drawn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dtensor_gtp import SelectiveOffload, activations, gtp_shard
from dtensor_gtp import _torch_compat as compat

WIDTH, ROWS, DEPTH = 1024, 8192, 8
GEMMS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)


class Block(nn.Module):
    """Two products of ``ROWS`` x ``WIDTH``, each written over by what follows."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(x))).sin()


def save_gemms(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if op in GEMMS else CheckpointPolicy.PREFER_RECOMPUTE


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.context_fn: Callable[[], Any]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False, context_fn=self.context_fn)
        return x


@unittest.skipIf(NUM_RANKS < 2, "needs two ranks")
class TestActivations(CudaTest):
    def steps(self, context_fn: Callable[[], Any]) -> tuple[list[torch.Tensor], int]:
        """Gradients of the third step, and bytes that its forward leaves behind."""
        model = gtp_shard(Model().cuda(), self.gtp_mesh(), mp_policy=BF16)
        model.context_fn = context_fn
        for seed in range(3):
            model.zero_grad()
            x = drawn(10 * seed + self.rank, ROWS, WIDTH).requires_grad_()
            before = torch.cuda.memory_allocated()
            loss = model(x).float().square().mean()
            left = torch.cuda.memory_allocated() - before
            loss.backward()
        return [x.grad, *(param.grad.full_tensor() for param in model.parameters())], left

    def test_bits_and_memory(self) -> None:
        expected, saved_nbytes = self.steps(lambda: create_selective_checkpoint_contexts(save_gemms))
        found, left_nbytes = self.steps(SelectiveOffload(GEMMS))
        assert_same(found, expected)
        product = 2 * ROWS * WIDTH
        self.assertGreater(saved_nbytes - left_nbytes, (2 * DEPTH - activations._MAX_LEAVING - 1) * product)

    def test_late_copies(self) -> None:
        """Copies that begin late read and write memory that nobody else has meanwhile."""
        expected, _ = self.steps(lambda: create_selective_checkpoint_contexts(save_gemms))
        copy = activations._copy

        def late(target: torch.Tensor, source: torch.Tensor, stream: torch.Stream | None) -> Any:
            assert stream is not None
            with stream:
                compat.sleep_stream(5_000_000)
            return copy(target, source, stream)

        with mock.patch.object(activations, "_copy", late):
            found, _ = self.steps(SelectiveOffload(GEMMS))
        assert_same(found, expected)

    def test_a_graph_refuses(self) -> None:
        block, x = Block().cuda(), torch.randn(4, WIDTH, device="cuda", requires_grad=True)
        run = partial(checkpoint, block, x, use_reentrant=False, preserve_rng_state=False)
        run(context_fn=SelectiveOffload(GEMMS)).sum().backward()
        graph = torch.cuda.graph(torch.cuda.CUDAGraph())
        with self.assertRaisesRegex(RuntimeError, "SelectiveOffload cannot be recorded"), graph:
            run(context_fn=SelectiveOffload(GEMMS))
