"""Ranks of one mesh of experts use others than those of another: what is gathered ahead or kept of a mesh must follow
from what its own ranks do alike.

Four ranks share the dense layers. Experts ``e`` are sharded over neighbours, experts ``f`` across them, so each rank is
in one mesh of both, with other ranks. In each step each mesh draws which of its experts it uses where.
"""

from __future__ import annotations

import copy
import random
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from common import GlooTest, _mesh, check_update
from runtime_common import assert_idle
from schedules import explicit

from dtensor_gtp import gtp_shard

WIDTH = 8
DENSE = ("d0", "d1", "d2", "d3")
EXPERTS = ("e0", "e1", "f0", "f1")
# A pass: what is used in which order, if at all. Experts come early, last, and more than once; but first what all ranks
# use, since backward needs a weight if something before it is trained.
ORDER = ("d0", "e0", "f0", "e0", "d1", "e1", "f1", "d2", "f0", "e0", "d3", "e1", "f1")
LR = 0.1


class Model(nn.Module):
    def __init__(self, layers: dict[str, nn.Module]) -> None:
        super().__init__()
        self.layers = nn.ModuleDict(layers)

    def forward(self, x: torch.Tensor, uses: tuple[str, ...]) -> torch.Tensor:
        for name in uses:
            x = x + torch.tanh(self.layers[name](x))
        return x


def number_of(kind: str, rank: int) -> int:
    """Which mesh of experts of a kind the rank is in."""
    return {"d": 0, "e": rank // 2, "f": rank % 2}[kind]


def uses_of(rank: int, step: int) -> tuple[str, ...]:
    """Steps 0 to 1 are alike, so that there is a plan; in others each mesh of experts leaves out some."""

    def is_used(place: int, name: str) -> bool:
        drawn = random.Random(f"{step}, {place}, {name[0]}, {number_of(name[0], rank)}").random()
        return name in DENSE or step < 2 or drawn < 0.6

    return tuple(name for place, name in enumerate(ORDER) if is_used(place, name))


class Reference:
    """All four ranks in one process: the dense layers once, experts once for each mesh."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        drawn = {name: nn.Linear(WIDTH, WIDTH, bias=False).double() for name in (*DENSE, *EXPERTS)}
        self.layers: dict[tuple[str, int], nn.Module] = {}
        for name, layer in drawn.items():
            for number in {number_of(name[0], rank) for rank in range(4)}:
                self.layers[name, number] = copy.deepcopy(layer)
        self.optimizer = torch.optim.SGD([p for layer in self.layers.values() for p in layer.parameters()], lr=LR)

    def of_rank(self, rank: int) -> dict[str, nn.Module]:
        return {name: self.layers[name, number_of(name[0], rank)] for name in (*DENSE, *EXPERTS)}

    def backward(self, step: int) -> None:
        """Dense gradients are averaged over four ranks, those of experts over the two of their mesh."""
        for rank in range(4):
            model = Model(self.of_rank(rank))
            loss_of(model, rank, step).backward()
        for (name, _), layer in self.layers.items():
            for param in layer.parameters():
                if param.grad is not None:
                    param.grad /= 4 if name in DENSE else 2


def loss_of(model: nn.Module, rank: int, step: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    x = torch.randn(3, WIDTH, dtype=torch.double, generator=generator)
    return model(x, uses_of(rank, step)).square().mean()


class TestLanes(GlooTest):
    def check(self, num_steps: int = 6, first_step: int = 0, **options: Any) -> None:
        rank = dist.get_rank()
        root = _mesh((2, 2), ("ep", "egtp"))
        outer = root["ep", "egtp"]._flatten("gtp")
        reference = Reference()
        mine = Model(reference.of_rank(rank))
        model = copy.deepcopy(mine)
        schedule = explicit(min_shard_numel=0, **options)
        for name in EXPERTS:
            gtp_shard(model.layers[name], root["egtp" if name[0] == "e" else "ep"], schedule=schedule)
        gtp_shard(model, outer, schedule=schedule)
        optimizer = torch.optim.SGD(model.parameters(), lr=LR)
        for step in range(first_step, first_step + num_steps):
            loss_of(model, rank, step).backward()
            reference.backward(step)
            check_update(model, mine, (optimizer, reference.optimizer))
        assert_idle(model)

    def test_first_passes_that_leave_out_experts(self) -> None:
        """What is guessed of the dense weights, two in a launch, does not depend on experts."""
        nbytes = WIDTH * WIDTH * 8
        for first_step in (2, 3, 5):
            self.check(2, first_step, prefetch_depth=1, prefetch_nbytes=nbytes, coalesce_nbytes=2 * nbytes)

    def test_schedules(self) -> None:
        """The default; two dense weights kept until backward, and an expert of each kind; nothing kept at the turning
        point; and other collectives."""
        nbytes = WIDTH * WIDTH * 8
        self.check()
        self.check(prefetch_depth=1, coalesce_nbytes=0, keep_nbytes=6 * nbytes)
        self.check(prefetch_depth=2, coalesce_nbytes=2 * nbytes, keep_last=False, expert_blocks_ahead=2)
        self.check(reduce_scatter="all_to_all", expert_blocks_ahead=0)

    @pytest.mark.long
    def test_more_schedules(self) -> None:
        """Each by itself; and two dense weights kept."""
        self.check(prefetch_depth=3, prefetch_nbytes=0, coalesce_nbytes=0)
        self.check(prefetch_depth=1, coalesce_nbytes=0, keep_nbytes=2 * WIDTH * WIDTH * 8)
