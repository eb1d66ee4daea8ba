"""Weights of groups that autograd reads while nobody uses them, and what a forward changes of its own parameters: as in
one process, or refused by name."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from pairs_common import CHOSEN, MIXED, Pair, PairTest
from passes_common import WIDTH, Block, Model, mean, usual
from test_silent_groups import with_blocks

from dtensor_gtp._params.group_memory import GroupLeaves

TOO_EARLY = "Perhaps a backward came to ops of a block before it came to an output"


class Keeps(Block):
    """``keep`` computes what a loss may take from ``kept``."""

    keep: Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]
    kept: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = super().forward(x)
        self.kept = type(self).keep(self, x, y)
        return y


class AfterTheOutput(Keeps):
    """As a router's loss, behind the output: autograd comes to it before it comes to the output."""

    def keep(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.up(x).square().mean()


class Scaled(Keeps):
    """An op that saves the weight itself."""

    def keep(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return (self.norm.weight * x).square().mean()


class Stop(BaseException):
    """No ``Exception``, as a KeyboardInterrupt."""


def fail(grad: torch.Tensor) -> None:
    raise ValueError("once")


class TestClosedGroups(PairTest):
    def groups_of(self, block: type[nn.Module] = Block) -> Iterator[Pair]:
        return self.pairs(with_blocks(block, num=3), (CHOSEN, MIXED))

    def test_a_loss_on_what_a_block_computes_behind_its_output_is_refused(self) -> None:
        """Also where the weights are gathered ahead by then: memory that a gather fills is not read."""

        def with_kept(each: Any, x: torch.Tensor) -> None:
            (mean(each(x)) + sum(block.kept for block in each.blocks)).backward()

        for block in (AfterTheOutput, Scaled):
            for model, _ in self.groups_of(block):
                with self.subTest(block=block):
                    x = torch.randn(4, WIDTH)
                    usual(model, x)
                    with self.assertRaisesRegex(RuntimeError, TOO_EARLY):
                        with_kept(model, x)

    def test_a_loss_inside_of_a_block_alone_is_refused(self) -> None:
        """The memory is freed: to read it would end the process."""
        for block in (AfterTheOutput, Scaled):
            for pair in self.groups_of(block):
                model, _ = pair
                with self.subTest(block=block):
                    model(torch.randn(4, WIDTH))
                    with self.assertRaisesRegex(RuntimeError, TOO_EARLY):
                        model.blocks[0].kept.backward()
                    self.check(pair)  # it goes on

    def test_a_backward_through_what_a_stopped_forward_has_kept(self) -> None:
        def step(each: Any, x: torch.Tensor) -> None:
            kept = []

            def stop(block: nn.Module, inputs: Any, output: torch.Tensor) -> None:
                kept.append(output)
                raise Stop

            handle = each.blocks[1].register_forward_hook(stop)
            try:
                each(x)
            except Stop:
                mean(kept[0]).backward()
            handle.remove()

        for pair in self.groups_of():
            self.check(pair, step)
            self.check(pair)

    def test_a_backward_in_a_forward_leaves_it_what_it_has_read(self) -> None:
        class Guided(Model):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                scale = self.blocks[1].norm.weight
                z = x.detach().requires_grad_()
                with torch.enable_grad():
                    (slope,) = torch.autograd.grad(self.blocks[0](z).square().sum(), z)
                return super().forward((x + 0.1 * slope) * scale)

        for pair in self.pairs(Guided, (CHOSEN, MIXED)):
            self.check(pair)
            self.check(pair, lambda each, x: each(x).detach())

    def test_a_backward_that_raised_runs_again(self) -> None:
        """Nothing of the first one is compared with the second one, whose memory has other bits between the weights."""
        allocate = GroupLeaves.allocate

        def allocate_other(leaves: GroupLeaves, version: Any) -> None:
            allocate(leaves, version)
            leaves._bits.random_()  # before the gather fills the weights

        def step(each: Any, x: torch.Tensor) -> None:
            handles = []

            def hook(block: nn.Module, inputs: Any, output: torch.Tensor) -> None:
                handles.append(inputs[0].register_hook(fail))

            handles.append(each.blocks[1].up.register_forward_hook(hook))
            loss = mean(each(x))
            with contextlib.suppress(ValueError):
                loss.backward(retain_graph=True)
            for handle in handles:
                handle.remove()
            each.zero_grad()
            loss.backward()

        with mock.patch.object(GroupLeaves, "allocate", allocate_other):
            for pair in self.groups_of():
                for _ in range(4):  # in forwards 1, 2, 4... weights are looked at
                    self.check(pair, step)

    def test_parameters_that_a_forward_replaces_are_refused(self) -> None:
        def replaced(block: Any) -> None:
            block.up.weight = nn.Parameter(torch.zeros(2 * WIDTH, WIDTH))

        def removed(block: Any) -> None:
            block.up.bias = None

        def deleted(block: Any) -> None:
            del block.norm.weight

        def added(block: Any) -> None:
            block.up.extra = nn.Parameter(torch.zeros(WIDTH))

        for change, name in ((replaced, "weight"), (removed, "bias"), (deleted, "weight"), (added, "extra")):

            class Changes(Block):
                change: Any = None

                def forward(self, x: torch.Tensor) -> torch.Tensor:
                    if self.change is not None:
                        self.change(self)
                    return x + self.down(self.up(x))

            for pair in self.groups_of(Changes):
                model, reference = pair
                with self.subTest(change=change.__name__):
                    model.blocks[1].change = change
                    with self.assertRaisesRegex(RuntimeError, f"'blocks.1' registers or removes parameter '{name}'"):
                        model(torch.randn(4, WIDTH))
                    model.blocks[1].change = None
                    self.check((model, reference))  # nothing is left of it

    def test_a_parameter_that_is_replaced_for_a_while(self) -> None:
        """In a block, or by the model around it."""

        def doubled(module: nn.Module, x: torch.Tensor) -> torch.Tensor:
            swapped = {name: param * 2 for name, param in module.named_parameters()}
            return torch.func.functional_call(module, swapped, (x,))

        class Swaps(Block):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.down(doubled(self.up, x)) + self.down(self.up(x))

        for pair in self.groups_of(Swaps):
            self.check(pair)
        for pair in self.groups_of():
            for each in pair:
                each.call = doubled
            self.check(pair)

    def test_a_forward_that_replaces_a_parameter_and_raises(self) -> None:
        """The next one knows nothing of it."""

        def replace_and_raise(block: Any, x: torch.Tensor) -> torch.Tensor:
            block.up.weight = nn.Parameter(torch.zeros(2 * WIDTH, WIDTH))
            raise ValueError("in the forward")

        for pair in self.groups_of():
            call = pair[0].call
            pair[0].call = replace_and_raise
            with self.assertRaisesRegex(ValueError, "in the forward"):
                usual(pair[0], torch.randn(4, WIDTH))
            pair[0].call = call
            self.check(pair)

    def test_a_read_after_a_broken_backward_in_a_forward(self) -> None:
        class Guided(Model):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                x = x + 0.1 * self.slope(x, fails=True)
                scale = self.blocks[1].norm.weight
                return super().forward((x + 0.1 * self.slope(x)) * scale)

            def slope(self, x: torch.Tensor, *, fails: bool = False) -> torch.Tensor:
                z = x.detach().requires_grad_()
                with torch.enable_grad():
                    y = self.blocks[0](z)
                    if fails:
                        y.register_hook(fail)
                    try:
                        (slope,) = torch.autograd.grad(y.square().sum(), z)
                    except ValueError:
                        slope = torch.zeros_like(x)
                return slope

        for pair in self.pairs(Guided, (CHOSEN, MIXED), is_first=True):
            self.check(pair)
            self.check(pair)

    def test_what_unshard_gathers_may_be_read_at_once(self) -> None:
        """Without a wait for its handle."""

        def step(each: Any, x: torch.Tensor) -> None:
            scale = each.blocks[0].norm.weight
            penalty = (scale * scale).sum()
            (mean(each(x)) + penalty).backward()

        for pair in self.groups_of():
            self.check(pair)
            pair[0].unshard(async_op=True)
            self.check(pair, step)
            pair[0].reshard()

    def test_errors_of_others_are_not_explained(self) -> None:
        for model, _ in self.groups_of():
            x = torch.ones(WIDTH, requires_grad=True)
            y = x * 2
            z = y * y
            y.add_(1).mul_(2)
            with self.assertRaises(RuntimeError) as caught:
                (mean(model(torch.randn(4, WIDTH))) + z.sum()).backward()
            self.assertNotIn(TOO_EARLY, str(caught.exception))

    def test_what_a_forward_freezes_and_unfreezes(self) -> None:
        class Freezes(Block):
            """``switch`` for the next forward alone."""

            switch: Any = None

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if self.switch is not None:
                    self.up.requires_grad_(self.switch)
                    self.switch = None
                return super().forward(x)

        for pair in self.groups_of(Freezes):
            for switch in (False, None, True, None):
                for each in pair:
                    each.blocks[1].switch = switch
                self.check(pair)
                self.run_both(pair, lambda each, x: each(x).detach())
                flags = [[param.requires_grad for param in each.parameters()] for each in pair]
                self.assertEqual(*flags)
