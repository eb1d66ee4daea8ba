"""Blocks whose weights are a group, and layers of them, where others call them than the model."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from pairs_common import CHOSEN, MIXED, Pair, PairTest, blocks
from passes_common import Block, mean, usual
from runtime_common import members_of
from torch.utils.checkpoint import checkpoint


@dataclass
class Output:
    x: torch.Tensor


class Holder:
    """A container that nobody knows."""

    def __init__(self, x: torch.Tensor) -> None:
        self.x = x


class Wraps(Block):
    wrap: Callable[[torch.Tensor], Any] = Output

    def forward(self, x: Any) -> Any:
        return Wraps.wrap(super().forward(x.x if isinstance(x, Output | Holder) else x))


class Unwraps(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(Wraps(), Wraps())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x).x


class TestPartsOfBlocks(PairTest):
    def check_without_grad_too(self, pair: Pair, forward: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        with torch.no_grad():
            torch.testing.assert_close(*(forward(each, torch.ones(4, 8)) for each in pair))
        self.check(pair, lambda each, x: mean(forward(each, x)).backward())

    def test_layers_that_are_called_alone(self) -> None:
        """Before and between forwards of the model, beside one, in a checkpoint, compiled, and after ``unshard``."""

        def alone(each: Any, x: torch.Tensor) -> torch.Tensor:
            return each[1].up(each[1].norm(x))

        def beside(each: Any, x: torch.Tensor) -> torch.Tensor:
            early = each[1].up(x)
            return torch.cat([early, each(x), each[0].down(early)], 1)

        def recomputed(each: Any, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(each[1].up, x, use_reentrant=False)

        def compiled(each: Any, x: torch.Tensor) -> torch.Tensor:
            return torch.compile(each[1].up, backend="aot_eager")(x)

        def as_usual(each: Any, x: torch.Tensor) -> torch.Tensor:
            return each(x)

        for policy, is_first in ((CHOSEN, True), (MIXED, False)):
            for pair in self.pairs(blocks, (policy,), is_first=is_first):
                for forward in (alone, beside, recomputed, compiled, as_usual):
                    self.check_without_grad_too(pair, forward)
                pair[0].unshard()
                self.check_without_grad_too(pair, alone)
                pair[0].reshard()
                self.check_without_grad_too(pair, alone)

    def test_outputs_in_objects(self) -> None:
        """Nothing that pytree finds shows when the backward of a block begins."""
        for policy in (CHOSEN, MIXED):
            for Wraps.wrap in (Output, Holder):
                for pair in self.pairs(Unwraps, (policy,)):
                    self.check(pair)
            for pair in self.pairs(blocks, (policy,)):
                self.check(pair, lambda each, x: mean(torch.vmap(each)(x)).backward())

    def test_a_block_that_returns_a_detached_tensor_is_refused(self) -> None:
        for pair in self.pairs(blocks, (CHOSEN, MIXED)):
            hook = pair[0][1].register_forward_hook(lambda _, args, y: y.detach().requires_grad_())
            with self.assertRaisesRegex(NotImplementedError, "'1' returns a detached tensor"):
                pair[0](torch.randn(2, 8))
            hook.remove()
            self.check(pair)

    def test_the_first_use_of_all(self) -> None:
        """Makes the groups while a layer runs."""
        for pair in self.pairs(blocks, (CHOSEN, MIXED), is_first=True):
            self.run_both(pair, lambda each, x: usual(each[0].up, x))
            assert members_of(pair[0]).groups
            self.check_grads(pair)
