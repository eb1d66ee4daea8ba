"""Replicas of unequal sizes train as one process on the whole batch does: gradients, and parameters after each step."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from checkpoint_common import make, shard
from common import GlooTest, assert_same_params
from torch.testing._internal.common_utils import run_tests

from dtensor_gtp.elastic import (
    ElasticMesh,
    ReplicaSync,
    nonuniform_mesh,
    synchronize_replicas,
)

# Small enough that a bucket is sent within backward, large enough that it holds several segments.
BUCKET_NBYTES = 300


def tokens_of(step: int, rows: int) -> torch.Tensor:
    return torch.randint(0, 11, (rows, 5), generator=torch.Generator().manual_seed(step))


def token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=1e-2)


class Elastic:
    """A model on unequal replicas beside the same model in one process."""

    def __init__(
        self,
        mesh: ElasticMesh,
        reference: nn.Module | None = None,
        apply: Callable[..., Any] = shard,
        make_optimizer: Callable[[nn.Module], torch.optim.Optimizer] = adamw,
        **options: Any,
    ) -> None:
        self.mesh = mesh
        self.reference = make(0) if reference is None else reference
        self.model = copy.deepcopy(self.reference)
        apply(self.model, mesh.weights, **options)
        self.sync: ReplicaSync = synchronize_replicas(self.model, mesh, bucket_nbytes=BUCKET_NBYTES)
        self.optimizers = [make_optimizer(self.reference), make_optimizer(self.model)]

    def backward(self, batch: torch.Tensor, scale: float = 1.0) -> None:
        share = self.mesh.rebalance_batch(len(batch))
        self.sync.set_batch(share)
        (token_loss(self.reference, batch) * scale).backward()
        (token_loss(self.model, batch[share.rows]) * scale).backward()

    def step(self, **tolerance: float) -> None:
        assert_same_params(self.model, self.reference, "grad", **tolerance)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_params(self.model, self.reference, "param", **tolerance)

    def train(self, steps: int = 3, rows: int = 17, **tolerance: float) -> None:
        for step in range(steps):
            self.backward(tokens_of(step, rows + step))
            self.step(**tolerance)


class TestSixRanks(GlooTest):
    world_size = 6

    def replicas(self, *ranks: Sequence[int], tp: int = 1) -> ElasticMesh:
        return nonuniform_mesh("cpu", replicas=ranks, tp=tp)

    def test_patterns_of_failures(self) -> None:
        for sizes in ((4, 2), (1, 4, 1), (3, 2, 1), (5, 1), (3, 3)):
            ends = torch.tensor(sizes).cumsum(0).tolist()
            mesh = self.replicas(*(range(end - size, end) for size, end in zip(sizes, ends, strict=True)))
            elastic = Elastic(mesh)
            elastic.train()
            elastic.sync.check_values()

    def test_launcher_order_of_ranks(self) -> None:
        Elastic(self.replicas([5, 0, 3], [], [4, 2], [1])).train()


if __name__ == "__main__":
    run_tests()
