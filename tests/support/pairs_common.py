"""Models on two ranks beside the same models in one process, whose weights are single or groups of a block."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn
from common import ALL, GlooTest, assert_same_params, rows_of_rank
from passes_common import NUM_ROWS, WIDTH, Block, Model, usual
from runtime_common import make_rows, members_of, shard_copy

from dtensor_gtp import SchedulePolicy

CHOSEN = SchedulePolicy(min_shard_numel=0)  # as the default, but tiny weights are sharded, too
MIXED = SchedulePolicy(min_shard_numel=4 * WIDTH)  # groups with parameters that stay whole
POLICIES = (ALL, CHOSEN, MIXED)
Pair = tuple[Any, Any]


def blocks() -> nn.Module:
    """Nothing but blocks, so that no single weight raises for them."""
    return nn.Sequential(Block(), Block())


def replace_data(weight: Any) -> None:
    weight.data = weight.data * 0.5


def halve_data(weight: Any) -> None:
    weight.data.mul_(0.5)


class PairTest(GlooTest):
    """A step runs on a model with this rank's rows, and on the reference with all rows."""

    world_size = 2
    width = WIDTH  # of the rows

    def pairs(
        self,
        make: Callable[[], nn.Module] = Model,
        policies: tuple[SchedulePolicy, ...] = POLICIES,
        *,
        is_first: bool = False,
    ) -> Iterator[Pair]:
        """A model and the reference for each policy. The model has made its groups, unless this ``is_first``."""
        for policy in policies:
            pair = self.pair(make, policy)
            if not is_first:
                usual(pair[0], make_rows(9, 4, self.width))
                pair[0].zero_grad()
                assert policy is ALL or members_of(pair[0]).groups
            yield pair

    def pair(self, make: Callable[[], nn.Module], policy: SchedulePolicy = ALL) -> Pair:
        torch.manual_seed(0)
        reference = make()
        return shard_copy(reference, self.gtp_mesh(), schedule=policy), reference

    def run_both(self, pair: Pair, step: Callable[[Any, torch.Tensor], Any] = usual, seed: int = 0) -> tuple[Any, Any]:
        batch = make_rows(seed, NUM_ROWS, self.width)
        return step(pair[0], rows_of_rank(batch, self.gtp_mesh())), step(pair[1], batch)

    def check_grads(self, pair: Pair) -> None:
        """Then there are none."""
        assert_same_params(*pair, "grad", rtol=1e-4, atol=1e-5)
        for each in pair:
            each.zero_grad()

    def check(self, pair: Pair, step: Callable[[Any, torch.Tensor], Any] = usual, seed: int = 0) -> None:
        self.run_both(pair, step, seed)
        self.check_grads(pair)
