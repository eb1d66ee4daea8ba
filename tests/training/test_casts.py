"""``module.to`` and the like after ``gtp_shard``: without effect in loops and forwards, and of frozen modules."""

from __future__ import annotations

import copy

import torch
import torch.nn as nn
from common import ALL, GlooTest, assert_same_params, rows_of_rank
from runtime_common import square_loss

from dtensor_gtp import SchedulePolicy, gtp_shard

SINGLE, GROUPS = ALL, SchedulePolicy(min_shard_numel=0)


class Casting(nn.Module):
    """Casts a layer in its forward, as routers of Switch Transformers do."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.up, self.down, self.dtype = nn.Linear(8, 12), nn.Linear(12, 8), dtype

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.down = self.down.to(self.dtype)
        return x + self.down(torch.relu(self.up(x)).to(self.dtype)).to(x.dtype)


def make(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Casting(dtype) for _ in range(3)))


class TestCasts(GlooTest):
    world_size = 2

    def test_without_effect_in_forwards_and_before_backwards(self) -> None:
        rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
        for policy in (SINGLE, GROUPS):
            reference = make()
            model = gtp_shard(copy.deepcopy(reference), self.gtp_mesh(), schedule=policy)
            before = list(model.parameters())
            for trained, batch in ((reference, rows), (model, rows_of_rank(rows, self.gtp_mesh()))):
                optimizer = torch.optim.SGD(trained.parameters(), lr=0.1, momentum=0.9)
                for _ in range(2):
                    optimizer.zero_grad()
                    losses = [square_loss(trained.to("cpu"), part) for part in (batch, batch + 1)]
                    trained.float()
                    sum(losses).backward()
                    optimizer.step()
            assert_same_params(model, reference, "grad")
            assert_same_params(model, reference)
            for param, same in zip(model.parameters(), before, strict=True):
                self.assertIs(param, same)

    def test_with_effect_in_a_forward(self) -> None:
        rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
        reference = make(torch.float64)
        model = gtp_shard(copy.deepcopy(reference), self.gtp_mesh(), schedule=SINGLE)
        for trained, batch in ((reference, rows), (model, rows_of_rank(rows, self.gtp_mesh()))):
            square_loss(trained, batch.float()).backward()
        self.assertEqual(model[0].down.weight.dtype, torch.float64)
        assert_same_params(model, reference, "grad")
        grouped = gtp_shard(make(torch.float64), self.gtp_mesh(), schedule=GROUPS)
        with self.assertRaisesRegex(RuntimeError, r"'0\.down\.weight' cannot be cast .*with block '0'.*before"):
            grouped(rows.float())

    def test_of_frozen_modules(self) -> None:
        rows = torch.randn(4, 8, generator=torch.Generator().manual_seed(1))
        for policy in (SINGLE, GROUPS):
            reference = nn.Sequential(*(nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2)))
            model = gtp_shard(copy.deepcopy(reference), self.gtp_mesh(), schedule=policy)
            for trained, batch in ((reference, rows), (model, rows_of_rank(rows, self.gtp_mesh()))):
                trained.requires_grad_(False)
                trained.to(torch.float64)
                self.assertFalse(any(param.requires_grad for param in trained.parameters()))
                trained(batch.double())
                trained.requires_grad_(True)
                for _ in range(2):
                    square_loss(trained, batch.double()).backward()
            assert_same_params(model, reference, "grad")
