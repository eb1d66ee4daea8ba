"""``parameters()`` within a forward: the gathered weights, as the module's own code expects them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from common import GlooTest, check_training
from runtime_common import ALL
from test_gtp_shard_groups import CHOSEN, WIDTH, Block, rows, square

from dtensor_gtp import gtp_shard

SCHEDULES = {"groups": CHOSEN, "single weights": ALL}


class Penalized(nn.Module):
    """Adds a penalty on all of its parameters to each output, as AdaLoRA does."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(WIDTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.layers:
            x = layer(x)
        penalty = sum((name.count(".") * param.float().square()).sum() for name, param in self.named_parameters())
        return x + penalty


def check_schedules(
    test: GlooTest, make: Callable[[], nn.Module], shard: Callable[..., Any] = gtp_shard, seed: int = 7
) -> None:
    """Train beside one process in groups, and by single weights."""
    for name, schedule in SCHEDULES.items():
        with test.subTest(name):
            torch.manual_seed(seed)
            mesh = test.gtp_mesh()
            check_training(make(), partial(shard, mesh=mesh, schedule=schedule), mesh, rows, square)


class TestParametersInForward(GlooTest):
    world_size = 2

    def test_a_penalty_on_all_parameters(self) -> None:
        check_schedules(self, Penalized)
