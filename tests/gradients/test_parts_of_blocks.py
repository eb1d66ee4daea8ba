"""Blocks whose weights are a group, and layers of them, where others call, record or change them than the model."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn as nn
from common import GlooTest, assert_same_params, rows_of_rank
from runtime_common import runtime_of
from test_gtp_shard_groups import CHOSEN, WIDTH, Block, Model, rows, seeded, square
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from dtensor_gtp import SchedulePolicy, gtp_shard

MIXED = SchedulePolicy(min_shard_numel=2 * WIDTH)  # groups with parameters that stay whole


class Blocks(nn.Module):
    """Nothing but blocks, so that no single weight raises for them."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


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


class Unwraps(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Wraps() for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = super().forward(x).x  # type: ignore[attr-defined]
        return y


class TestPartsOfBlocks(GlooTest):
    world_size = 2

    def pairs(self, make: Callable[[], nn.Module] = Blocks, *, is_first: bool = False) -> Iterator[tuple[Any, Any]]:
        """Sharded models that have made their groups unless this ``is_first``, and the same in one process."""
        for policy in (CHOSEN, MIXED):
            reference: Any = seeded(make)
            model: Any = gtp_shard(copy.deepcopy(reference), self.gtp_mesh(), schedule=policy)
            if not is_first:
                square(model, torch.randn(2, WIDTH)).backward()
                model.zero_grad()
                assert runtime_of(model).groups
            yield model, reference

    def check(self, model: Any, reference: Any, step: Callable[[Any, torch.Tensor], torch.Tensor]) -> None:
        batch = rows(torch.Generator().manual_seed(3))
        part = rows_of_rank(batch, self.gtp_mesh())
        with torch.no_grad():
            torch.testing.assert_close(step(model, batch), step(reference, batch))
        for each, x in ((model, part), (reference, batch)):
            each.zero_grad()
            step(each, x).backward()
        assert_same_params(model, reference, "grad", rtol=1e-4, atol=1e-5)

    def test_layers_that_are_called_alone(self) -> None:
        """Before and between forwards of the model, beside one, in a checkpoint, compiled, and after ``unshard``."""

        def alone(each: Any, x: torch.Tensor) -> torch.Tensor:
            return each.layers[1].up(each.layers[1].norm(x)).square().mean()

        def beside(each: Any, x: torch.Tensor) -> torch.Tensor:
            early = each.layers[1].up(x)
            y = each(x)
            return early.square().mean() + y.square().mean() + each.layers[2].down(early).square().mean()

        def recomputed(each: Any, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = checkpoint(each.layers[1].up, x, use_reentrant=False)
            return y.square().mean()

        def compiled(each: Any, x: torch.Tensor) -> torch.Tensor:
            y: torch.Tensor = torch.compile(each.layers[1].up, backend="aot_eager")(x)
            return y.square().mean()

        for is_first in (True, False):
            for model, reference in self.pairs(is_first=is_first):
                for step in (alone, beside, recomputed, compiled, square):
                    self.check(model, reference, step)
                model.unshard()
                self.check(model, reference, alone)
                model.reshard()
                self.check(model, reference, alone)

    def test_outputs_in_objects(self) -> None:
        """Nothing that pytree finds shows when the backward of a block begins."""
        for Wraps.wrap in (Output, Holder):
            for model, reference in self.pairs(Unwraps):
                self.check(model, reference, square)
        for model, reference in self.pairs():
            self.check(model, reference, lambda each, x: torch.vmap(each)(x).square().mean())

    def test_a_block_that_returns_a_detached_tensor_is_refused(self) -> None:
        x = torch.randn(2, WIDTH)
        for model, reference in self.pairs():
            hook = model.layers[1].register_forward_hook(lambda _, args, y: y.detach().requires_grad_())
            with self.assertRaisesRegex(NotImplementedError, "'layers.1' returns a detached tensor"):
                model(x)
            hook.remove()
            self.check(model, reference, square)

    def test_the_first_use_of_all(self) -> None:
        """Makes the groups while a layer runs."""
        for model, reference in self.pairs(is_first=True):
            batch = rows(torch.Generator().manual_seed(4))
            for each, x in ((model, rows_of_rank(batch, self.gtp_mesh())), (reference, batch)):
                each.layers[0].up(x).square().mean().backward()
            assert runtime_of(model).groups
            assert_same_params(model, reference, "grad", rtol=1e-4, atol=1e-5)

    def test_recordings_are_refused(self) -> None:
        x = torch.randn(2, WIDTH)
        for model, reference in self.pairs():
            for module in (model, model.layers[0], model.layers[0].up):
                with self.assertRaisesRegex(RuntimeError, "torch.export cannot record a use of parameter 'layers.0"):
                    torch.export.export(module, (x,))
                with self.assertRaisesRegex(RuntimeError, "torch.jit.trace cannot record a .* after gtp_shard"):
                    torch.jit.trace(module, x)
                with self.assertRaisesRegex(RuntimeError, "torch.fx cannot record a use of parameter 'layers.0"):
                    make_fx(module)(x)
            self.check(model, reference, square)

    def test_parameters_that_were_replaced_before_a_backward(self) -> None:
        """Torch would compute with memory that is free by now."""

        def assign(model: Any) -> None:
            model.load_state_dict({n: nn.Parameter(p.detach() * 2) for n, p in model.named_parameters()}, assign=True)

        def put(model: Any) -> None:
            model.layers[1].up.weight = nn.Parameter(model.layers[1].up.weight.detach() * 2)

        def set_data(model: Any) -> None:
            model.layers[1].up.weight.data = model.layers[1].up.weight.data * 2

        x = torch.randn(2, WIDTH)
        for change in (assign, put, set_data):
            for make in (Blocks, Model):
                for model, _ in self.pairs(make):
                    loss = square(model, x)
                    change(model)
                    model(x)  # takes them over
                    with self.assertRaisesRegex(RuntimeError, "Parameter .* was replaced between a forward and its"):
                        loss.backward()
                    model.zero_grad()
                    square(model, x).backward()
