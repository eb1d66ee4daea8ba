"""``gtp_shard(shard_optimizer=True)`` on GPUs: two replicas, whose optimizers each have a part of the states.

New beside the tests on CPUs are streams (what replicas gather runs ahead of copy engines or of NCCL, while compute
goes on), fused kernels, and memory. Two ranks may share a GPU: RANKS_PER_GPU=2.
"""

import copy
import gc
import unittest
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from common import ALL, assert_same_params, environment, full, rows_of_rank
from cuda_common import BF16, COPY_ENGINES, NUM_RANKS, CudaTest, assert_same, drawn, square_loss
from fsdp_common import (
    OPTIMIZERS,
    VOCABULARY,
    check,
    check_checkpoints,
    make,
    mesh_of,
    next_token_loss,
    tensor_parallel,
)
from fsdp_common import token_batch as tokens_of
from runtime_common import assert_idle, members_of
from schedules import explicit
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from dtensor_gtp import SchedulePolicy, gtp_shard, quantize_

RANKS = NUM_RANKS // 4 * 4
WIDTH = 256
SCHEDULES = {
    "process group": explicit(min_shard_numel=0, gather_backend="process_group"),
    "copy engines": explicit(min_shard_numel=0, **COPY_ENGINES),
    "chosen": SchedulePolicy(min_shard_numel=0),
}


class Mlp(nn.Module):
    """Blocks large enough that gathers take longer than their launches."""

    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)) for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


def mlp() -> nn.Module:
    torch.manual_seed(0)
    return Mlp().cuda()


@unittest.skipIf(RANKS < 4, "needs four ranks: RANKS_PER_GPU=2 on two GPUs")
class TestCudaShardOptimizer(CudaTest):
    world_size = RANKS

    @property
    def mesh(self) -> DeviceMesh:
        return mesh_of((2, RANKS // 2), ("replicate", "gtp"), "cuda")

    def shard(self, model: Any, **options: Any) -> Any:
        return gtp_shard(model, self.mesh, shard_optimizer=True, **({"schedule": ALL} | options))

    def rows(self, step: int) -> torch.Tensor:
        return drawn(step, 4 * RANKS, WIDTH)

    def train(self, model: Any, steps: int = 6, *, is_clipped: bool = False, **options: Any) -> list[torch.Tensor]:
        """What of the parameters this rank has after some steps."""
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, **options)
        for step in range(steps):
            for rows in rows_of_rank(self.rows(step), self.mesh).chunk(2):
                square_loss(model, rows).backward()
            if is_clipped:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        return [full(param.detach()) for param in model.parameters()]

    def test_trains_as_one_process(self) -> None:
        for name, schedule in SCHEDULES.items():
            for optimizer in ("SGD", "AdamW fused", "AdamW foreach"):
                with self.subTest(f"{name}, {optimizer}"):
                    model = check(
                        make(),
                        partial(self.shard, schedule=schedule),
                        self.mesh,
                        make_optimizer=OPTIMIZERS[optimizer],
                        num_microbatches=2,
                        steps=3,
                    )
                    assert_idle(model)

    def test_groups_have_the_results_of_whole_states(self) -> None:
        for policy in (MixedPrecisionPolicy(), BF16):
            whole, split = (
                gtp_shard(mlp(), self.mesh, mp_policy=policy, shard_optimizer=value) for value in (False, True)
            )
            found = [self.train(model, is_clipped=True, fused=True) for model in (whole, split)]
            # A fifth of a step: four ranks and more have sums in another order, which AdamW enlarges.
            torch.testing.assert_close(*found, rtol=1e-4, atol=2e-4)
            self.assertEqual(len(members_of(split).groups), len(members_of(whole).groups))

    def test_late_streams_and_poisoned_memory_change_no_bit(self) -> None:
        """What is read before a replica has sent it is NaN, or of the step before."""
        for name, schedule in SCHEDULES.items():
            for policy in (MixedPrecisionPolicy(), BF16):
                expected = self.train(self.shard(mlp(), schedule=schedule, mp_policy=policy), fused=True)
                for seed in range(3):
                    with self.subTest(f"{name}, delay {seed}"), environment(DTENSOR_GTP_DEBUG=f"poison,delay={seed}"):
                        found = self.train(self.shard(mlp(), schedule=schedule, mp_policy=policy), fused=True)
                    assert_same(found, expected, f"{name}, delay {seed}")

    def test_a_huge_step_counts_in_the_next_forward(self) -> None:
        """The optimizer's kernels are still queued when the host launches the next forward."""
        for name, schedule in SCHEDULES.items():
            reference, model = mlp(), self.shard(mlp(), schedule=schedule)
            for each, x in ((model, rows_of_rank(self.rows(0), self.mesh)), (reference, self.rows(0))):
                optimizer = torch.optim.SGD(each.parameters(), lr=50.0, fused=True)
                square_loss(each, x).backward()
                torch.cuda._sleep(20_000_000)
                optimizer.step()
            torch.testing.assert_close(
                model(self.rows(1)), reference(self.rows(1)), rtol=1e-2, atol=1e-2, msg=lambda m, n=name: f"{n}: {m}"
            )

    def test_exchanges_read_what_replicas_have_sent(self) -> None:
        schedule = explicit(min_shard_numel=0, embedding="exchange")
        for seed in range(2):
            with environment(DTENSOR_GTP_DEBUG=f"poison,delay={seed}"):
                check(make(), partial(self.shard, schedule=schedule), self.mesh, steps=3)

    def test_gtp_of_one_rank(self) -> None:
        mesh = mesh_of((RANKS, 1), ("replicate", "gtp"), "cuda")
        for seed in range(2):
            with environment(DTENSOR_GTP_DEBUG=f"poison,delay={seed}"):
                shard = partial(gtp_shard, mesh=mesh, schedule=ALL, shard_optimizer=True)
                check(make(), shard, mesh, steps=3)

    def test_tensor_parallel_compiled_and_quantized(self) -> None:
        mesh = mesh_of((2, RANKS // 4, 2), ("replicate", "gtp", "tp"), "cuda")

        def parallel(model: Any) -> Any:
            tensor_parallel(model, mesh["tp"])
            return gtp_shard(model, mesh["replicate", "gtp"], schedule=ALL, shard_optimizer=True)

        check(make(), parallel, mesh["replicate", "gtp"])
        trained = []
        for split in (False, True):
            model = mlp()
            quantize_(model.layers, "float8_tensorwise")
            gtp_shard(model, self.mesh, mp_policy=BF16, shard_optimizer=split)
            for layer in model.layers:
                layer.compile()
            trained.append(self.train(model, 3, fused=True))
        torch.testing.assert_close(*trained, rtol=1e-2, atol=1e-3)

    def test_gradient_scaler(self) -> None:
        """Its factor is on the device, and an overflow of one rank skips the step of all."""
        model = self.shard(make().float().cuda())
        reference = copy.deepcopy(make().float().cuda())
        scaler = torch.amp.GradScaler("cuda", init_scale=64.0)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        tokens = tokens_of(torch.Generator().manual_seed(0)).cuda()
        scaler.scale(next_token_loss(model, rows_of_rank(tokens, self.mesh))).backward()
        if self.rank == 3:
            model.head.weight.grad.to_local().view(-1)[0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        self.assertEqual(scaler.get_scale(), 32.0)
        assert_same_params(model, reference, rtol=0, atol=0)

    def test_checkpoints(self) -> None:
        check_checkpoints(self.mesh, self.shard)

    def test_memory(self) -> None:
        """States take the half of what whole ones take, and nothing else takes more."""
        found = []
        for split in (False, True):
            model = gtp_shard(mlp(), self.mesh, shard_optimizer=split)
            gc.collect()  # models of other tests
            before = torch.cuda.memory_allocated()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
            square_loss(model, rows_of_rank(self.rows(0), self.mesh)).backward()
            optimizer.step()
            optimizer.zero_grad()
            states = [value for state in optimizer.state.values() for value in state.values()]
            local = [value.to_local() if isinstance(value, DTensor) else value for value in states]
            found.append((sum(value.numel() for value in local), torch.cuda.memory_allocated() - before))
            del model, optimizer, states, local
        self.assertLess(found[1][0], 0.52 * found[0][0])
        self.assertLess(found[1][1], 0.75 * found[0][1])


assert VOCABULARY % 4  # uneven rows
