"""The same runtime on GPUs with NCCL: results, races, host synchronization, memory.

Needs 2 to 8 GPUs of one host; uses as many as there are.
"""

import copy
import gc
import unittest
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, assert_same_params, check_training, environment, rows_of_rank
from cuda_common import (
    BF16,
    COPY_ENGINES,
    NUM_RANKS,
    CudaTest,
    assert_same,
    assert_same_grads,
    captured,
    drawn,
    no_waits,
    square_loss,
)
from schedules import explicit
from test_gtp_shard_training import Zoo, next_token_loss
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard

from dtensor_gtp import SchedulePolicy, gtp_shard


class Stack(nn.Module):
    """Same-shape layers, wide enough that a GEMM outlasts a launch."""

    def __init__(self, width: int = 1024, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width, bias=False) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + F.gelu(layer(x))
        return x


def trained(
    rank: int, mesh: DeviceMesh, between: Callable[[nn.Module, int], None] | None = None, **options: Any
) -> list[torch.Tensor]:
    """Parameters after four steps, of rows of its own for each rank."""
    torch.manual_seed(0)
    model = gtp_shard(Stack().cuda(), mesh, schedule=explicit(**options), mp_policy=BF16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    for step in range(4):
        square_loss(model, drawn(step * 100 + rank, 256, 1024)).backward()
        if between is not None:
            between(model, step)
        optimizer.step()
        optimizer.zero_grad()
    return [param.full_tensor() for param in model.parameters()]


@unittest.skipIf(NUM_RANKS < 2, "needs at least 2 GPUs")
class TestCuda(CudaTest):
    def check_zoo(self, mesh: DeviceMesh, schedule: SchedulePolicy, **options: int) -> None:
        def batch(generator: torch.Generator) -> torch.Tensor:
            return torch.randint(0, 33, (self.world_size * 2, 6), generator=generator).cuda()

        torch.manual_seed(0)
        shard = partial(gtp_shard, mesh=mesh, schedule=schedule)
        tolerance = {"rtol": 1e-4, "atol": 1e-5}
        check_training(Zoo().cuda(), shard, mesh, batch, next_token_loss, tolerance=tolerance, **options)

    def test_zoo_equals_one_process(self) -> None:
        for depth in (0, 2):
            self.check_zoo(self.gtp_mesh(), explicit(min_shard_numel=0, prefetch_depth=depth), num_microbatches=2)

    @unittest.skipIf(NUM_RANKS % 2 or NUM_RANKS < 4, "needs an even number of at least 4 GPUs")
    def test_zoo_with_replicas(self) -> None:
        self.check_zoo(self.two_by_half("replicate", "gtp"), ALL)

    def test_finite_names_rank_and_weight(self) -> None:
        """The step after the one that raised has the gradients that it has without the aid."""
        x = drawn(self.rank, 64, 1024)
        bad = x.clone()
        if self.rank == self.world_size - 1:
            bad[3] = float("nan")
        told = rf"the reduce_scatter of gradients \(rank {self.world_size - 1}: 'layers\.7\.weight' has 1048576 NaN"
        for options in ({}, COPY_ENGINES):
            grads = []
            for debug in ("", "finite"):
                torch.manual_seed(0)
                with environment(DTENSOR_GTP_DEBUG=debug):
                    model = gtp_shard(Stack().cuda(), self.gtp_mesh(), schedule=explicit(**options), mp_policy=BF16)
                if debug:
                    with self.assertRaisesRegex(RuntimeError, told):
                        square_loss(model, bad).backward()
                square_loss(model, x).backward()
                grads.append([param.grad.full_tensor() for param in model.parameters()])
            torch.testing.assert_close(grads[1], grads[0])

    def test_prefetch_delays_and_poison_change_no_bit(self) -> None:
        """Same-shape layers share memory of freed buffers: any overtaking would show as NaN or as other bits."""
        mesh = self.gtp_mesh()
        expected = trained(self.rank, mesh, prefetch_depth=0)
        one_by_one = {"prefetch_nbytes": 0, "coalesce_nbytes": 0}
        for seed in range(8):
            # With one at a time, with several in one launch, with all of them ahead, and with some kept.
            options = (
                one_by_one,
                {"prefetch_nbytes": 5 << 20, "coalesce_nbytes": 4 << 20},
                {},
                {"keep_nbytes": 5 << 20},
            )
            with environment(DTENSOR_GTP_DEBUG=f"poison,delay={seed}"):
                actual = trained(self.rank, mesh, prefetch_depth=1 + seed % 3, **options[seed % 4])
            assert_same(actual, expected, f"seed {seed}")

    def test_next_forward_uses_the_new_weight(self) -> None:
        """A prefetch must not read what a late optimizer is still to write."""
        mesh = self.gtp_mesh()
        torch.manual_seed(0)
        model = gtp_shard(Stack().cuda(), mesh)
        x = torch.randn(64, 1024, device="cuda")
        square_loss(model, x).backward()
        torch.cuda._sleep(200_000_000)
        with torch.no_grad():
            for param in model.parameters():
                param.zero_()
        torch.testing.assert_close(model(x), x, rtol=0, atol=0)

    def test_steady_state_never_waits_on_the_host(self) -> None:
        mesh = self.gtp_mesh()
        torch.manual_seed(0)
        model = gtp_shard(Zoo().cuda(), mesh, schedule=ALL, mp_policy=BF16)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        tokens = torch.randint(0, 33, (4, 6), device="cuda")

        def step() -> None:
            next_token_loss(model, tokens).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()

        for _ in range(2):
            step()
        with no_waits():
            step()

    def test_memory_is_that_of_the_window(self) -> None:
        """Above shards and gradients: the weights of the window, and two send buffers; nothing grows."""
        gc.collect()  # the models of earlier tests, which would be freed while memory is measured
        mesh = self.gtp_mesh()
        width, depth, prefetch = 2048, 16, 2
        one_by_one = {"prefetch_nbytes": 0, "coalesce_nbytes": 0, "coalesce_grad_nbytes": 0}
        schedule = explicit(prefetch_depth=prefetch, **one_by_one)
        model = gtp_shard(Stack(width, depth).cuda(), mesh, schedule=schedule)
        x = torch.randn(8, width, device="cuda")

        def step() -> None:
            square_loss(model, x).backward()
            model.zero_grad()

        for _ in range(3):
            step()
        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        for _ in range(5):
            step()
        torch.cuda.synchronize()
        weight = width * width * 4
        gradients = depth * weight // self.world_size
        # in use, prefetched, being computed and two in flight; activations are small here
        limit = (1 + prefetch + 3) * weight + 2 * gradients + 16 * 2**20
        self.assertLess(torch.cuda.max_memory_allocated() - before, limit)
        self.assertEqual(torch.cuda.memory_allocated(), before)

    def test_no_further_from_the_truth_than_fully_shard(self) -> None:
        """bf16 compute with fp32 reduction. The two round at other places (fully_shard rounds each rank's gradient to
        bf16), so both are compared with the gradient of one process in float64."""
        mesh = self.gtp_mesh()
        torch.manual_seed(0)
        reference = Stack().cuda()
        ours = gtp_shard(copy.deepcopy(reference), mesh, mp_policy=BF16)
        theirs = fully_shard(copy.deepcopy(reference), mesh=mesh, mp_policy=BF16)
        x = torch.randn(self.world_size * 64, 1024, device="cuda")
        for model in (ours, theirs):
            square_loss(model, rows_of_rank(x, mesh)).backward()
        exact = reference.double()
        exact(x.double()).pow(2).mean().backward()
        for (name, a), b, c in zip(ours.named_parameters(), theirs.parameters(), exact.parameters(), strict=True):
            errors = [(p.grad.full_tensor() - c.grad).norm() / c.grad.norm() for p in (a, b)]
            self.assertLess(errors[1].item(), 1e-2, name)
            self.assertLess(errors[0].item(), 1.01 * errors[1].item(), name)

    def test_step_in_a_cuda_graph(self) -> None:
        """A captured forward and backward replays to the same bits as eager, with changing data and weights."""
        mesh = self.gtp_mesh()
        torch.manual_seed(0)
        model = gtp_shard(Stack().cuda(), mesh, mp_policy=BF16)
        eager = gtp_shard(_same_weights(Stack().cuda(), model), mesh, mp_policy=BF16)
        x = torch.randn(256, 1024, device="cuda")
        graph, _ = captured(model, lambda: square_loss(model, x).backward())
        for replay in range(5):
            x.copy_(drawn(replay * 100 + self.rank, 256, 1024))
            graph.replay()
            square_loss(eager, x).backward()
            assert_same_grads(model, eager, f"replay {replay}")
            with torch.no_grad():
                for param in (*model.parameters(), *eager.parameters()):
                    param -= 0.1 * param.grad
            eager.zero_grad()
        assert_same_params(model, _same_weights(Stack().cuda(), eager), rtol=0, atol=0)


def _same_weights(target: nn.Module, source: nn.Module) -> nn.Module:
    """``target`` (unsharded) with the logical weights of ``source`` (sharded)."""
    with torch.no_grad():
        for a, b in zip(target.parameters(), source.parameters(), strict=True):
            a.copy_(b.full_tensor())
    return target
