"""``torch.compile``: one graph without breaks for all layers of a shape, and the training of one process.

Dynamo's counters say how much was compiled; ``aot_eager`` runs the graphs that Inductor would get, after the
passes that remove and merge ops. Inductor itself compiles one tiny block.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, NOTHING_STAYS, GlooTest, check_training, environment
from runtime_common import Raw, check_step, gathers, make_rows, shard_copy, square_loss, square_step, token_step
from torch._dynamo.utils import counters
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from dtensor_gtp import GTPModule, SchedulePolicy, gtp_shard

DIM = 8
VOCABULARY = 13

GEMMS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
RECOMPUTE = {"use_reentrant": False}
SAVE_GEMMS = {**RECOMPUTE, "context_fn": partial(create_selective_checkpoint_contexts, GEMMS)}
BF16 = {"rtol": 3e-2, "atol": 2e-2}


class Block(nn.Module):
    """Fused linears, with and without bias, and a norm. It may recompute its feed-forward within the compiled code."""

    def __init__(self, recompute: dict[str, Any] | None = None) -> None:
        super().__init__()
        self.recompute = recompute
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(self.norm(x))))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute is None:
            return x + self.feed_forward(x)
        return x + checkpoint(self.feed_forward, x, **self.recompute)


class Clamped(nn.Linear):
    """Writes to a parameter in each forward."""

    def __init__(self, written: str) -> None:
        super().__init__(DIM, DIM)
        self.written = written

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            getattr(self, self.written).clamp_(-0.01, 0.01)
        return F.linear(x, self.weight) * self.bias


class Scaled(nn.LayerNorm):
    """Has no weight that is sharded."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.01, 0.01)
        return super().forward(x)


class Broken(Scaled):
    """Its graph ends within a context."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = super().forward(x)
            torch._dynamo.graph_break()
            return x


class Model(nn.Module):
    """Blocks between an embedding and a head. ``inside`` recomputes a part of each block, ``outside`` the whole."""

    def __init__(self, num_layers: int = 2, inside: Any = None, outside: Any = None) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList([Block(inside) for _ in range(num_layers)])
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)
        self.outside = outside

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x) if self.outside is None else checkpoint(layer, x, **self.outside)
        return self.head(x)


class UsesTwice(nn.Module):
    """Each weight has two uses with equal inputs and equal gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.linear = nn.Linear(DIM, DIM)
        self.raw = nn.Parameter(torch.randn(DIM, DIM) / DIM**0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.embedding(tokens)
        x = torch.tanh(self.linear(x)) + torch.tanh(self.linear(x))
        return x @ self.raw + x @ self.raw


def tokens_of(generator: torch.Generator, length: int = 6) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (8, length), generator=generator)


def next_token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Unlike AdamW it does not blow up the last bit of a gradient near zero."""
    return torch.optim.SGD(params, lr=0.5)


def wrapped(module: Any, backend: str = "aot_eager") -> Any:
    return torch.compile(module, backend=backend, fullgraph=True)


def in_place(module: Any, backend: str = "aot_eager", **options: Any) -> Any:
    module.compile(backend=backend, fullgraph=True, **options)
    return module


def compile_blocks(model: Any, style: Callable[..., Any] = in_place, **options: Any) -> Any:
    for index, layer in enumerate(model.layers):
        model.layers[index] = style(layer, **options)
    return model


def by_function(function: Callable[[Any, torch.Tensor], torch.Tensor], **options: Any) -> Any:
    """The loss of what a function makes of a model and tokens, compiled where the model is sharded."""
    compiled = wrapped(function, **options)

    def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
        call = compiled if isinstance(model, GTPModule) else function
        return next_token_loss(partial(call, model), batch)

    return loss


class TestCompile(GlooTest):
    world_size = 2

    def fresh(self, make: Callable[[], nn.Module] = Model) -> Any:
        """A model, and a compiler that has not compiled anything yet."""
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        return make()

    def assert_graphs(self, expected: int) -> None:
        self.assertEqual(dict(counters["graph_break"]), {})
        self.assertEqual(counters["stats"]["unique_graphs"], expected)

    def train(
        self,
        reference: nn.Module,
        compile_parts: Callable[[nn.Module], nn.Module] = lambda model: model,
        loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = next_token_loss,
        *,
        compile_first: bool = False,
        steps: int = 2,
        tolerance: dict[str, float] | None = None,
        schedule: SchedulePolicy = ALL,
        **options: Any,
    ) -> Any:
        def shard(model: nn.Module) -> nn.Module:
            if compile_first:
                compile_parts(model)
            gtp_shard(model, self.gtp_mesh(), schedule=schedule, **options)
            return model if compile_first else compile_parts(model)

        how: Any = {"make_optimizer": sgd, "steps": steps, "tolerance": tolerance}
        return check_training(reference, shard, self.gtp_mesh(), tokens_of, loss, **how)

    def gathers_of_a_step(self, model: nn.Module) -> dict[str, int]:
        """Of the weights of each layer; blocks are alike."""
        with gathers(model) as counts:
            next_token_loss(model, tokens_of(torch.Generator().manual_seed(9))).backward()
        used = {(name.split(".")[-2], count) for name, count in counts.items()}
        assert len(used) == len(dict(used)), used
        return dict(used)

    # --- what is compiled ---------------------------------------------------------------------------------------------

    def test_prefetching_and_gather_counts_of_compiled_blocks(self) -> None:
        """The first block's input needs a gradient like that of the others, because it comes from the embedding."""
        model = self.train(self.fresh(), lambda m: compile_blocks(m, wrapped))
        self.assert_graphs(1)
        # The head turns from forward to backward, the embedding's backward needs no weight.
        self.assertEqual(self.gathers_of_a_step(model), {"embedding": 1, "up": 2, "down": 2, "head": 1})

    def test_blocks_compiled_before_sharding(self) -> None:
        for style in (in_place, wrapped):
            self.train(self.fresh(), lambda m, s=style: compile_blocks(m, s), compile_first=True, steps=1)
            self.assert_graphs(1)

    def test_tied_weights_and_recomputation_in_a_compiled_model(self) -> None:
        reference = self.fresh(partial(Model, outside=RECOMPUTE))
        reference.head.weight = reference.embedding.weight
        self.train(reference, in_place)
        self.assert_graphs(1)

    def test_frozen_between_compiled_calls(self) -> None:
        def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
            found = next_token_loss(model, tokens)
            model.requires_grad_(False)
            with torch.no_grad():
                model(tokens)
            model.requires_grad_(True)
            return found

        self.train(self.fresh(), compile_blocks, loss)

    def test_compiled_function_around_the_model(self) -> None:
        """No frame is around it: weights are gathered on demand."""
        for backend in ("eager", "aot_eager"):  # the first saves parameters before it meets a frame of ours
            model = self.train(self.fresh(), loss=by_function(lambda model, tokens: model(tokens), backend=backend))
            self.assert_graphs(1)
        model.requires_grad_(False)
        with self.assertRaisesRegex(RuntimeError, r"'embedding.weight' was frozen or unfrozen .* Compile the module"):
            torch.compile(lambda tokens: model(tokens), backend="aot_eager")(torch.zeros(1, 2, dtype=torch.long))

    def test_compiled_function_of_parts_of_the_model(self) -> None:
        """No call of ours is around them, and types are exact while the compiler traces them."""
        of_parts = by_function(lambda model, tokens: model.head(model.layers[0](model.embedding(tokens))))
        model = self.train(self.fresh(partial(Model, 1)), loss=of_parts)
        assert type(model.layers[0]) is Block
        assert type(model.head) is nn.Linear
        self.assert_graphs(1)

    # --- what the compiler must not optimize away ---------------------------------------------------------------------

    def test_one_weight_used_twice_with_equal_gradients(self) -> None:
        """AOTAutograd merges equal ops, and Inductor drops what it takes for ops without effect."""
        for backend in ("aot_eager", "inductor"):
            self.train(self.fresh(UsesTwice), partial(in_place, backend=backend), square_loss, steps=1)

    @pytest.mark.soak
    def test_inductor_on_blocks_and_recomputation(self) -> None:
        for recompute in (None, RECOMPUTE):
            self.train(self.fresh(partial(Model, inside=recompute)), partial(compile_blocks, backend="inductor"))
            self.assert_graphs(1)

    def test_weights_kept_in_memory_are_not_written_to(self) -> None:
        """With reshard_after_forward=False a gathered weight outlives the op that hands it to compiled code."""

        class Squares(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.raw = nn.Parameter(torch.randn(DIM, DIM))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return x @ (self.raw * 2 + 1).sin() @ (self.raw * 3).cos()

        reference = self.fresh(Squares)
        model = in_place(shard_copy(reference, self.gtp_mesh(), reshard_after_forward=False), backend="inductor")
        x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(model(x), reference(x))

    # --- recomputation ------------------------------------------------------------------------------------------------

    def test_checkpoint_around_compiled_blocks(self) -> None:
        for use_reentrant, style in ((True, in_place), (False, wrapped)):
            reference = self.fresh(partial(Model, outside={"use_reentrant": use_reentrant}))
            model = self.train(reference, lambda m, s=style: compile_blocks(m, s), steps=1, schedule=NOTHING_STAYS)
            self.assertEqual(self.gathers_of_a_step(model), {"embedding": 1, "up": 3, "down": 3, "head": 1})
            self.assertFalse(counters["graph_break"])

    def test_checkpoint_inside_compiled_blocks(self) -> None:
        """A policy that saves what GEMMs return saves what linears return, and spares the recomputation's gather."""
        # Without it: nothing that backward needs is computed from the output of the last linear.
        for inside, num_gathers_of_up in ((RECOMPUTE, 3), (SAVE_GEMMS, 2)):
            model = self.train(
                self.fresh(partial(Model, inside=inside)), compile_blocks, steps=1, schedule=NOTHING_STAYS
            )
            self.assert_graphs(1)
            expected = {"embedding": 1, "up": num_gathers_of_up, "down": 2, "head": 1}
            self.assertEqual(self.gathers_of_a_step(model), expected)

    def test_selective_checkpoint_around_compiled_blocks(self) -> None:
        """Nothing of compiled code is saved: Inductor writes over what our ops have returned once it has used it."""
        reference = self.fresh(partial(Model, 1, outside=SAVE_GEMMS))
        model = self.train(reference, partial(compile_blocks, backend="inductor"), steps=1, schedule=NOTHING_STAYS)
        self.assertEqual(self.gathers_of_a_step(model), {"embedding": 1, "up": 3, "down": 3, "head": 1})

    # --- precision, shapes, modes -------------------------------------------------------------------------------------

    def test_mixed_precision_and_autocast(self) -> None:
        """Also of a whole model, whose frame is opened outside of the compiled code: prefetching, casts and the order
        of backward work."""

        def autocast_loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return next_token_loss(model, batch)

        for compile_parts, policy, loss in (
            (compile_blocks, MixedPrecisionPolicy(torch.bfloat16, torch.float32), next_token_loss),
            (wrapped, MixedPrecisionPolicy(torch.bfloat16, output_dtype=torch.float32), next_token_loss),
            (compile_blocks, MixedPrecisionPolicy(), autocast_loss),
        ):
            self.train(self.fresh(), compile_parts, loss, mp_policy=policy, tolerance=BF16)
            self.assert_graphs(1)

    def test_dynamic_shapes(self) -> None:
        """A second length compiles once more, any further one not at all."""
        for options, num_graphs in (({}, 2), ({"dynamic": True}, 1)):
            reference = self.fresh()
            model = compile_blocks(shard_copy(reference, self.gtp_mesh()), **options)
            for length in (4, 7, 10):  # none as long as a rank's batch: the compiler would take them for one
                tokens = tokens_of(torch.Generator().manual_seed(length), length)
                check_step(reference, model, self.gtp_mesh(), tokens, token_step)
            self.assert_graphs(num_graphs)

    def test_evaluation(self) -> None:
        for compile_parts, context in ((compile_blocks, torch.inference_mode), (in_place, torch.no_grad)):
            reference = self.fresh().eval()
            model = compile_parts(shard_copy(reference, self.gtp_mesh()).eval())
            tokens = tokens_of(torch.Generator().manual_seed(self.rank))
            for _ in range(2):
                with context(), gathers(model) as used:
                    torch.testing.assert_close(model(tokens), reference(tokens))
                self.assertEqual(set(used.values()), {1})

    # --- frozen, modified, not asked for ------------------------------------------------------------------------------

    def test_frozen_weights_later_unfreezing_and_writes(self) -> None:
        """A frozen linear saves nothing for backward, but the compiled code of the others is not in the way. A write
        between forward and backward is refused."""
        reference = self.fresh(partial(Model, 1))
        model = compile_blocks(shard_copy(reference, self.gtp_mesh()))
        for step, is_training in enumerate((False, True, False)):
            for module in (reference, model):
                module.layers[0].up.weight.requires_grad_(is_training)
            check_step(reference, model, self.gtp_mesh(), tokens_of(torch.Generator().manual_seed(step)), token_step)
        loss = next_token_loss(model, tokens_of(torch.Generator().manual_seed(0)))
        with torch.no_grad():
            model.layers[0].down.weight.mul_(2)
        with self.assertRaisesRegex(RuntimeError, r"'layers\.0\.down\.weight' .* modified by an inplace operation"):
            loss.backward()

    def test_writes_in_compiled_code_are_refused(self) -> None:
        """To a single weight and to copies of a whole parameter, in whatever graph. It would lose them, and what reads
        the shard itself would compute with the values of before."""
        whole: dict[str, Any] = {"schedule": SchedulePolicy(min_shard_numel=DIM * DIM)}
        for make, shape, options in (
            (lambda: Clamped("weight"), (DIM, DIM), {"schedule": ALL}),
            (lambda: Clamped("bias"), (DIM,), {**whole, "mp_policy": MixedPrecisionPolicy(torch.bfloat16)}),
            (lambda: Clamped("bias"), (DIM,), {**whole, "offload_policy": CPUOffloadPolicy(pin_memory=False)}),
            (lambda: Scaled(DIM), (DIM,), {**whole, "mp_policy": MixedPrecisionPolicy(torch.bfloat16)}),
            (lambda: Broken(DIM), (DIM,), {**whole, "mp_policy": MixedPrecisionPolicy(torch.bfloat16)}),
        ):
            for backend in ("eager", "aot_eager"):
                torch._dynamo.reset()
                model = shard_copy(self.fresh(make), self.gtp_mesh(), **options)
                # Around the model: its weights are single.
                compiled = torch.compile(lambda x, model=model: model(x), backend=backend)
                for _ in range(2):
                    with self.assertRaisesRegex(Exception, rf"a copy of a parameter of shape {re.escape(str(shape))}"):
                        compiled(torch.randn(4, DIM))
                    # Nothing that the compiler has entered while it traced stays.
                    assert torch.is_grad_enabled()
                    assert not torch.is_autocast_enabled("cpu")

    def test_frozen_linear_saves_no_input(self) -> None:
        x = torch.randn(16, DIM, requires_grad=True)
        for is_training in (True, False):
            linear = self.fresh(lambda: nn.Sequential(nn.Linear(DIM, DIM, bias=False)))
            model = shard_copy(linear, self.gtp_mesh())
            model[0].weight.requires_grad_(is_training)
            in_place(model)
            saved: list[int] = []

            def pack(tensor: torch.Tensor, saved: list[int] = saved) -> torch.Tensor:
                saved.append(tensor.numel())
                return tensor

            with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
                model(x * 1)
            self.assertEqual(x.numel() in saved, is_training, f"saved {saved}")

    def test_gradients_of_inputs_alone_leave_weights_alone(self) -> None:
        reference = self.fresh(Block)
        model = in_place(shard_copy(reference, self.gtp_mesh()))
        x = torch.randn(4, DIM, requires_grad=True)
        torch.testing.assert_close(*(torch.autograd.grad(square_loss(m, x), x) for m in (model, reference)))
        assert all(param.grad is None for param in model.parameters())

    def test_poison_spares_what_compiled_code_has_read(self) -> None:
        """A weight read as an attribute is the compiled code's own, also where the runtime lets go of it at once."""
        reference = self.fresh(lambda: Raw(DIM))
        with environment(DTENSOR_GTP_DEBUG="poison"):
            model = in_place(shard_copy(reference, self.gtp_mesh()))
        check_step(reference, model, self.gtp_mesh(), make_rows(0, 8, DIM), square_step)
