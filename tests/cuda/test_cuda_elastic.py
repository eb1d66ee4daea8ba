"""Replicas of unequal sizes on GPUs with NCCL: results, races, recovery in memory, and a rank that is killed.

Needs at least 4 GPUs of one host; uses an even number of those that there are.
"""

import copy
import functools
import unittest
from typing import Any

import pytest
import test_elastic_plan
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from checkpoint_common import adamw, job_state, make, shard
from common import assert_same_params, environment, full, shared_directory
from cuda_common import BF16, NUM_RANKS, CudaTest, assert_same
from elastic_faults import Fault, FaultyJob
from test_elastic import HEAD_DIM, Elastic, Heads, shard_heads, token_loss, tokens_of
from test_elastic_checkpoint import Job
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.state_dict import set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dtensor_gtp import gtp_shard
from dtensor_gtp.elastic import (
    ElasticMesh,
    HeldState,
    ReplicaSavePlanner,
    WeightSpec,
    clip_grad_norm_,
    hold_state,
    nonuniform_mesh,
    synchronize_replicas,
)

DEVICE = "cuda"
EVEN = NUM_RANKS - NUM_RANKS % 2
HALF = EVEN // 2
# A bucket is sent in the midst of backward.
BUCKET_NBYTES = 1 << 20

Ranks = tuple[tuple[int, ...], ...]


class Stack(nn.Module):
    """Same-shape layers, wide enough that a GEMM outlasts a launch, and whole parameters between them."""

    def __init__(self, width: int = 1024, depth: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(width, width) for _ in range(depth)])
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(depth)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer, norm in zip(self.layers, self.norms, strict=True):
            x = x + F.gelu(layer(norm(x)))
        return x


def consecutive(*sizes: int) -> Ranks:
    return tuple(map(tuple, test_elastic_plan.consecutive(sizes)))


def reference() -> nn.Module:
    """In float64, so that three steps of AdamW do not depend on the order of sums."""
    return make(0).double().to(DEVICE)


def train(elastic: Elastic, rows: int) -> None:
    for step in range(3):
        elastic.backward(tokens_of(step, rows + step).to(DEVICE))
        elastic.step()
    elastic.sync.check_values()


@unittest.skipIf(NUM_RANKS < 4, "needs at least 4 GPUs")
class TestCudaElastic(CudaTest):
    world_size = EVEN

    def test_equal_replicas_equal_one_process_on_either_way(self) -> None:
        elastic = Elastic(_replicas(consecutive(HALF, HALF)), reference())
        mesh = init_device_mesh(DEVICE, (2, HALF), mesh_dim_names=("replicate", "gtp"))
        uniform = shard(copy.deepcopy(elastic.reference), mesh)  # type: ignore[arg-type]
        optimizer = torch.optim.AdamW(uniform.parameters(), lr=1e-2)
        for step in range(3):
            batch = tokens_of(step, 2 * EVEN).to(DEVICE)
            token_loss(uniform, batch.chunk(EVEN)[self.rank]).backward()
            elastic.backward(batch)
            assert_same_params(uniform, elastic.reference, "grad")
            elastic.step()
            optimizer.step()
            optimizer.zero_grad()
            assert_same_params(uniform, elastic.reference)
        elastic.sync.check_values()

    def test_unequal_replicas_equal_one_process(self) -> None:
        for ranks in (
            consecutive(HALF + 1, HALF - 1),
            consecutive(1, EVEN - 1),
            consecutive(EVEN - 2, 1, 1),
            (tuple(range(EVEN - 1, 0, -2)), (0, *range(2, EVEN, 2))),
        ):
            train(Elastic(_replicas(ranks), reference()), 3 * EVEN)

    def test_numbers_of_samples_and_one_norm(self) -> None:
        """Both are exchanged between all ranks."""
        elastic = Elastic(_replicas(consecutive(HALF + 1, HALF - 1)), reference())
        counts = [rank % 3 + (rank == 0) for rank in range(EVEN)]
        batch = tokens_of(0, sum(counts)).to(DEVICE)
        own = batch[sum(counts[: self.rank]) :][: counts[self.rank]] if counts[self.rank] else batch[:1]
        elastic.sync.set_batch(counts[self.rank])
        token_loss(elastic.reference, batch).backward()
        token_loss(elastic.model, own).backward()
        norm = clip_grad_norm_(elastic.model.parameters(), 0.1, elastic.mesh)
        torch.testing.assert_close(norm, nn.utils.clip_grad_norm_(elastic.reference.parameters(), 0.1))
        elastic.step()
        elastic.sync.check_values()

    def _steps(self, mesh: ElasticMesh) -> list[torch.Tensor]:
        torch.manual_seed(0)
        model = gtp_shard(Stack().float().to(DEVICE), mesh.weights, mp_policy=BF16)
        sync = synchronize_replicas(model, mesh, bucket_nbytes=BUCKET_NBYTES)
        sync.set_batch(mesh.rebalance_batch(64 * EVEN))
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for step in range(4):
            generator = torch.Generator().manual_seed(step)
            x = torch.randn(64 * EVEN, 1024, generator=generator, dtype=torch.float32)
            model(x[mesh.rebalance_batch(64 * EVEN).rows].to(DEVICE)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        self.assertGreater(sync.num_all_reduces, 4 * len(sync.plan.of_rank(self.rank)))
        sync.check_values()
        return [full(param).detach().clone() for param in model.parameters()]

    def test_delays_and_poison_change_no_bit(self) -> None:
        mesh = _replicas(consecutive(HALF + 1, HALF - 1))
        expected = self._steps(mesh)
        for flags in ("poison", "delay", "poison,delay"):
            with environment(DTENSOR_GTP_DEBUG=flags):
                assert_same(self._steps(mesh), expected, flags)

    # --- state --------------------------------------------------------------------------------------------------------

    def test_recovery_in_memory_is_bit_equal(self) -> None:
        """The last rank is lost, on another layout: parameters, moments and steps come back."""
        job = Job(_replicas(consecutive(HALF, HALF)))
        job.train(range(2))
        state = job_state(job.model, job.optimizer)
        before = _values(state)
        held = hold_state(state, step=2)
        for value in held.plain.values():
            if isinstance(value, torch.Tensor):
                self.assertEqual(value.device.type, "cpu")
        layouts: tuple[tuple[Ranks, int], ...] = (
            (consecutive(HALF, HALF), 64),
            (consecutive(HALF + 1, HALF - 1), 1 << 20),
            (consecutive(1, EVEN - 1), 1 << 20),
        )
        for ranks, chunk_nbytes in layouts:
            resumed = Job(_replicas(ranks), seed=1)
            kept: HeldState | None = held if self.rank < EVEN - 1 else None
            step, recovered = resumed.recover(kept, chunk_nbytes=chunk_nbytes)
            self.assertEqual(step, 2)
            for name, value in _values(recovered).items():
                self.assertTrue(torch.equal(value, before[name]), name)
            for param in resumed.model.parameters():
                self.assertEqual(resumed.optimizer.state[param]["step"].device.type, DEVICE)
                self.assertEqual(float(resumed.optimizer.state[param]["step"]), 2.0)
            resumed.train([2])
            resumed.sync.check_values()

    def test_checkpoint_of_unequal_replicas_loads_on_one_mesh(self) -> None:
        mesh = _replicas(consecutive(HALF + 1, HALF - 1))
        job = Job(mesh)
        job.train(range(2))
        state = job_state(job.model, job.optimizer)
        with shared_directory() as path:
            dcp.save(state, checkpoint_id=path, planner=ReplicaSavePlanner(mesh))
            model = shard(make(1).to(DEVICE), self.gtp_mesh())
            optimizer = adamw(model)
            loaded = job_state(model, optimizer)
            dcp.load(loaded, checkpoint_id=path)
            dist.barrier()
        set_state_dict(model, optimizer, model_state_dict=loaded["model"], optim_state_dict=loaded["optimizer"])
        before = _values(state)
        for name, value in _values(loaded).items():
            self.assertTrue(torch.equal(value, before[name]), name)


@unittest.skipIf(NUM_RANKS < 4, "needs at least 4 GPUs")
class TestCudaElasticWithoutOneRank(CudaTest):
    """As many processes as are left of two equal replicas when one rank has failed."""

    world_size = EVEN - 1

    def test_equals_one_process(self) -> None:
        mesh = nonuniform_mesh(DEVICE, replicate=2, gtp=HALF, failed={(1, HALF - 1, 0)})
        self.assertEqual([replica.gtp for replica in mesh.layout.replicas], [HALF, HALF - 1])
        train(Elastic(mesh, reference()), 3 * self.world_size)


@unittest.skipIf(NUM_RANKS < 6, "needs at least 6 ranks")
class TestCudaElasticTensorParallel(CudaTest):
    """A replica of tp 4, and one that has lost half of its ranks."""

    world_size = 6

    def test_equals_one_process(self) -> None:
        num_heads = 8
        weights = [WeightSpec("wq", (num_heads * HEAD_DIM, 6), tp_dim=0, tp_block_size=HEAD_DIM)]
        mesh = nonuniform_mesh(DEVICE, replicas=consecutive(4, 2), tp=4, weights=weights)
        self.assertEqual([replica.tp for replica in mesh.layout.replicas], [4, 2])
        torch.manual_seed(3)
        train(Elastic(mesh, Heads(num_heads).double().to(DEVICE), shard_heads), 17)


@functools.cache
def _replicas(ranks: Ranks) -> ElasticMesh:
    """Each mesh once: to connect its process groups takes longer than a test."""
    return nonuniform_mesh(DEVICE, replicas=ranks)


def _values(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Full values of all DTensors."""
    flat, _ = flatten_state_dict(state)
    return {name: full(value).clone() for name, value in flat.items() if isinstance(value, DTensor)}


# --- processes of their own -------------------------------------------------------------------------------------------


@pytest.mark.skipif(NUM_RANKS < 4, reason="needs at least 4 GPUs")
@pytest.mark.parametrize("point", ["backward", "sync", "updated"])
def test_a_killed_rank_is_left_behind(point: str) -> None:
    """The others' collectives hang until the watch aborts them; then they go on in their processes, and each compares
    itself with an undisturbed run. In the last case a new process takes the place of the one that is gone."""
    last = EVEN - 1
    joins = point == "updated"
    faults, min_ranks = [Fault(2, last, point)], EVEN if joins else 1
    job = FaultyJob(consecutive(HALF, HALF), faults, device=DEVICE, min_ranks=min_ranks)
    if joins:
        job.wait_for(job.processes[last])
        job.add(place=last)
    codes = job.wait()
    assert codes == [*[0] * last, -9, *[0] * joins], codes
    errors = job.errors()
    assert set(errors) == set(range(last))
    for text in errors.values():
        assert text.startswith(f"rank {last} (replica 1, gtp {HALF - 1}, tp 0) was silent for 3 seconds")
