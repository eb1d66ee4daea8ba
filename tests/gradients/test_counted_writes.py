"""Writes to parameters through ``.data`` count on all ranks; one rank alone may look, and gathers nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from common import ALL
from pairs_common import CHOSEN, MIXED, Pair, PairTest
from passes_common import WIDTH, Model, mean, usual
from runtime_common import make_rows, members_of
from torch.distributed.tensor import DTensor

Act = Callable[[list[nn.Parameter]], Any]


class ReadsLast(Model):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        scale: torch.Tensor = self.blocks[1].up.weight.square().mean()
        return y * scale


def look(params: list[nn.Parameter]) -> None:
    """As a log of one rank does."""
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            for param in params:
                local_data(param).norm()


def local_data(param: nn.Parameter) -> torch.Tensor:
    data = param.data
    return data.to_local() if isinstance(data, DTensor) else data


def halve(params: list[nn.Parameter]) -> None:
    for param in params:
        param.data.mul_(0.5)


def halve_by_foreach(params: list[nn.Parameter]) -> None:
    torch._foreach_mul_([param.data for param in params], 0.5)


def halve_local(params: list[nn.Parameter]) -> None:
    for param in params:
        local_data(param).mul_(0.5)


def halve_by_view(params: list[nn.Parameter]) -> None:
    for param in params:
        param.data.view(param.shape).mul_(0.5)


def acts_everywhere(each: Any, x: torch.Tensor, act: Act) -> None:
    """``act`` between a forward and its backward, and before the next forward."""
    params = list(each.parameters())
    loss = mean(each(x))
    act(params)
    loss.backward()
    act(params)
    with torch.no_grad():
        each(x)
        act(list(each.parameters()))
    usual(each, x * 0.5)


class TestCountedWrites(PairTest):
    def keeps(self) -> list[Callable[[Any], Any]]:
        def always(model: Any) -> None:
            model.set_reshard_after_forward(False)
            model.set_reshard_after_backward(False)

        return [lambda model: None, always, lambda model: model.unshard()]

    def trained_pairs(
        self, begin: Callable[[Any], Any] = lambda each: None, make: Callable[[], nn.Module] = Model
    ) -> Iterator[Pair]:
        """After a step; ``begin`` runs before it."""
        for policy in (ALL, CHOSEN, MIXED):
            for keep in self.keeps():
                pair = self.pair(make, policy)
                for each in pair:
                    begin(each)
                self.check(pair)
                keep(pair[0])
                yield pair

    def test_one_rank_looks(self) -> None:
        for pair in self.trained_pairs():
            own = look if self.rank == 0 else list
            for act in (own, halve, own):
                self.check(pair, partial(acts_everywhere, act=act))

    def test_one_rank_looks_in_a_forward(self) -> None:
        """At parameters that it has known since before."""
        for pair in self.trained_pairs():
            params = list(pair[0].parameters())
            if self.rank == 0:
                for module in pair[0].modules():
                    module.register_forward_hook(lambda *_, params=params: look(params))
            for _ in range(2):
                self.check(pair)

    def test_ways_to_write(self) -> None:
        for pair in self.trained_pairs():
            for act in (halve, halve_by_foreach, halve_by_view, halve_local):
                self.check(pair, partial(acts_everywhere, act=act))

    def test_the_first_write_is_to_the_local_tensor(self) -> None:
        for pair in self.trained_pairs():
            x = make_rows(1, 4, WIDTH)
            with torch.no_grad():
                for each in pair:
                    each(x)
                    halve_local(list(each.parameters()))
                torch.testing.assert_close(*(each(x) for each in pair))

    def test_weights_that_are_read_outside_of_their_block(self) -> None:
        """Their backward comes before that of the block. After ``unshard`` it computes with what was written."""
        for pair in self.trained_pairs(make=ReadsLast):
            self.check(pair, partial(acts_everywhere, act=look if self.rank == 0 else list))
            if members_of(pair[0]).weights[0].is_pinned:
                self.check(pair, partial(acts_everywhere, act=halve))

    def test_data_that_was_taken_before(self) -> None:
        """As averages of weights keep it: each write counts, whenever the tensor was taken."""
        taken: dict[Any, list[torch.Tensor]] = {}

        def take(each: Any) -> None:
            taken[each] = [param.data for param in each.parameters()]

        def step(each: Any, x: torch.Tensor) -> None:
            loss = mean(each(x))
            for data in taken[each]:
                data.mul_(0.5)
            loss.backward()
            for data in taken[each]:
                data.add_(0.1)
            usual(each, x)

        for pair in self.trained_pairs(take):
            self.check(pair, step)
