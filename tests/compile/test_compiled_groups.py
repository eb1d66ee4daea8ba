"""``torch.compile`` and wrappers that come after ``gtp_shard``, where blocks are gathered as groups."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from common import GlooTest, check_training
from runtime_common import members_of
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from dtensor_gtp import GTPModule, SchedulePolicy, gtp_shard, sharding_report

WIDTH = 8
CHOSEN = SchedulePolicy(min_shard_numel=0)  # as the default, but tiny weights are sharded, too
compiled = partial(torch.compile, backend="aot_eager")


class Inner(nn.Module):
    """A part of a block without parameters of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x)))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.inner = Inner()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.inner(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(3))
        self.last = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return self.last(x)


def square(model: Callable[[torch.Tensor], torch.Tensor], batch: torch.Tensor) -> torch.Tensor:
    return model(batch).square().mean()


def rows(generator: torch.Generator) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=generator)


def in_place(module: nn.Module, **options: Any) -> nn.Module:
    module.compile(backend="aot_eager", **options)
    return module


def in_memory(model: nn.Module) -> list[bool]:
    return [group.leaves.storage.nbytes() > 0 for group in members_of(model).groups]


class TestCompiledGroups(GlooTest):
    world_size = 2

    def train(
        self,
        change: Callable[[Any], object] = lambda model: None,
        loss: Any = square,
        make: Callable[[], nn.Module] = Model,
    ) -> Any:
        """A model that is changed after ``gtp_shard`` trains as in one process."""
        torch._dynamo.reset()
        torch.manual_seed(7)

        def shard(model: nn.Module) -> nn.Module:
            gtp_shard(model, self.gtp_mesh(), schedule=CHOSEN)
            change(model)
            return model

        tolerance = {"rtol": 1e-4, "atol": 1e-5}
        return check_training(make(), shard, self.gtp_mesh(), rows, loss, tolerance=tolerance)

    def test_blocks_wrapped_after_sharding_are_freed_after_their_use(self) -> None:
        def freed(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            loss = square(model, batch)
            if isinstance(model, GTPModule):
                self.assertEqual(in_memory(model), [False] * 3)
            return loss

        def wrap_by(wrap: Callable[[nn.Module], Any], model: Any) -> None:
            for index, layer in enumerate(model.layers):
                model.layers[index] = wrap(layer)

        for wrap in (checkpoint_wrapper, compiled, lambda layer: checkpoint_wrapper(compiled(layer))):
            model = self.train(partial(wrap_by, wrap), freed)
            self.assertEqual(in_memory(model), [False] * 3)
        # Its graph has no place for the frame of a block.
        model = self.train(partial(wrap_by, lambda layer: in_place(checkpoint_wrapper(layer), fullgraph=True)))
        self.assertEqual(members_of(model).groups, [])
        self.assertIn("was added after gtp_shard", str(sharding_report(model, verbose=True)))

    def test_parts_of_blocks_compiled_after_sharding(self) -> None:
        def compile_parts(replaces: bool, compiles_blocks: bool, model: Any) -> None:
            for layer in model.layers:
                if replaces:
                    layer.inner = compiled(layer.inner)
                else:
                    in_place(layer.inner)
                if compiles_blocks:
                    in_place(layer, fullgraph=True)

        for replaces in (False, True):
            for compiles_blocks in (False, True):
                model = self.train(partial(compile_parts, replaces, compiles_blocks))
                self.assertEqual(in_memory(model), [False] * 3)

    def test_parts_of_blocks_compiled_before_sharding_stay_so(self) -> None:
        torch._dynamo.reset()
        graphs = []

        def backend(graph: Any, inputs: Any) -> Any:
            graphs.append(graph)
            return graph.forward

        model = Model()
        for layer in model.layers:
            layer.inner.compile(backend=backend)
        gtp_shard(model, self.gtp_mesh(), schedule=CHOSEN)
        square(model, torch.ones(2, WIDTH)).backward()
        self.assertEqual(len(members_of(model).groups), 3)
        self.assertTrue(graphs)

    def test_compiled_blocks_that_share_a_part(self) -> None:
        """Each graph would have a weight of its own, and its gradient."""

        class Shared(Model):
            def __init__(self, part: str) -> None:
                super().__init__()
                setattr(self.layers[1], part, getattr(self.layers[0], part))
                self.more = nn.ModuleList([self.layers[2], Block()])  # one block in two containers

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.more[1](super().forward(x))

        def compile_blocks(model: Any) -> None:
            for layer in {*model.layers, *model.more}:
                in_place(layer)

        for part in ("norm", "inner"):
            for change in (compile_blocks, in_place, lambda model: None):
                model = self.train(change, make=partial(Shared, part))
                self.assertEqual([group.fqn for group in members_of(model).groups], ["layers.2", "more.1"])
                self.assertIn("is shared with other blocks", str(sharding_report(model, verbose=True)))

    def test_a_compiled_model_reads_weights_of_its_blocks(self) -> None:
        """After the graph break at a block, too: the compiler must not trace the gather."""

        class Reads(Model):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                y = super().forward(x.to(self.layers[0].inner.up.weight.dtype))
                return (
                    y
                    + self.layers[1].inner.up(x).mean(-1, keepdim=True)
                    + self.layers[2].inner.down.weight.square().mean()
                )

        self.train(in_place, make=Reads)

    def test_a_compiled_function_is_the_first_call(self) -> None:
        """Its graph has single weights. Calls of the model that follow use them, too."""
        function = compiled(lambda model, batch: square(model, batch), fullgraph=True)

        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            if isinstance(model, GTPModule):
                return function(model, batch)
            return square(model, batch)

        model = self.train(loss=loss)
        self.assertIn("no group: the first call was compiled", str(sharding_report(model, verbose=True)))
        torch.testing.assert_close(function(model, torch.ones(2, WIDTH)), square(model, torch.ones(2, WIDTH)))

    def test_full_graphs_around_blocks_are_refused(self) -> None:
        model = gtp_shard(Model(), self.gtp_mesh(), schedule=CHOSEN)
        in_place(model, fullgraph=True)
        with self.assertRaisesRegex(RuntimeError, r"Compile each block instead, .* block\.compile\(fullgraph=True\)"):
            model(torch.ones(2, WIDTH))
