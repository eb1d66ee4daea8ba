"""``torch.compile``: one graph without breaks for all layers of a shape, and the training of one process.

Dynamo's counters say how much was compiled; ``aot_eager`` runs the graphs that Inductor would get, after the
passes that remove and merge ops. Inductor itself compiles one tiny block.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, GlooTest, assert_same_params, environment, full, rows_of_rank
from runtime_common import Raw, num_gathers, shard_copy
from torch._dynamo.utils import counters
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dtensor_gtp import gtp_shard

DIM = 8
VOCABULARY = 13


def gemm_policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_gemm = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_gemm else CheckpointPolicy.PREFER_RECOMPUTE


save_gemms = {"use_reentrant": False, "context_fn": lambda: create_selective_checkpoint_contexts(gemm_policy)}


class Block(nn.Module):
    """Fused linears, with and without bias, and a norm. It may recompute its feed-forward within the compiled code."""

    recompute: dict[str, Any] | None = None

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM, bias=False)

    def feed_forward(self, x: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down(torch.tanh(self.up(self.norm(x))))
        return result

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.recompute is None:
            return x + self.feed_forward(x)
        result: torch.Tensor = x + checkpoint(self.feed_forward, x, **self.recompute)
        return result


class Model(nn.Module):
    """Blocks between an embedding and a head; ``outside`` recomputes each of them."""

    outside: dict[str, Any] | None = None

    def __init__(self, num_layers: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, DIM)
        self.layers = nn.ModuleList([Block() for _ in range(num_layers)])
        self.head = nn.Linear(DIM, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x) if self.outside is None else checkpoint(layer, x, **self.outside)
        logits: torch.Tensor = self.head(x)
        return logits


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


def mean_square(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(tokens).float().square().mean()


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Unlike AdamW it does not blow up the last bit of a gradient near zero."""
    return torch.optim.SGD(params, lr=0.5)


def in_place(module: Any, backend: str = "aot_eager", **options: Any) -> Any:
    module.compile(backend=backend, fullgraph=True, **options)
    return module


def wrapped(module: nn.Module, backend: str = "aot_eager", **options: Any) -> Any:
    return torch.compile(module, backend=backend, fullgraph=True, **options)


def compile_blocks(model: nn.Module, style: Callable[..., Any] = in_place, **options: Any) -> nn.Module:
    layers: Any = model.layers
    for index, layer in enumerate(layers):
        layers[index] = style(layer, **options)
    return model


def compile_model(model: nn.Module, **options: Any) -> nn.Module:
    return in_place(model, **options)


class TestCompile(GlooTest):
    world_size = 2

    def assert_graphs(self, expected: int) -> None:
        self.assertEqual(dict(counters["graph_break"]), {})
        self.assertEqual(counters["stats"]["unique_graphs"], expected)

    def train(
        self,
        reference: nn.Module,
        compile_parts: Callable[[nn.Module], nn.Module],
        loss: Callable[[nn.Module, torch.Tensor], torch.Tensor] = next_token_loss,
        steps: int = 2,
        tolerance: dict[str, float] | None = None,
        compile_first: bool = False,
        **options: Any,
    ) -> nn.Module:
        """Compare a copy, sharded and compiled, with the reference. The wrapper of ``torch.compile(block)`` adds to the
        names of parameters, so they are compared in order."""
        mesh = self.gtp_mesh()
        model = copy.deepcopy(reference)
        if compile_first:
            compile_parts(model)
        gtp_shard(model, mesh, schedule=ALL, **options)
        used = model if compile_first else compile_parts(model)
        names = {param: name for name, param in reference.named_parameters()}
        optimizers = [sgd(list(module.parameters())) for module in (reference, model)]
        for step in range(steps):
            batch = tokens_of(torch.Generator().manual_seed(step))
            loss(reference, batch).backward()
            loss(used, rows_of_rank(batch, mesh)).backward()
            for what in ("grad", "param"):
                pairs = zip(model.parameters(), reference.parameters(), strict=True)
                for actual, expected in pairs:
                    a, b = (actual, expected) if what == "param" else (actual.grad, expected.grad)
                    message = f"{what} of {names[expected]}"
                    assert (a is None) == (b is None), message
                    if a is not None:
                        torch.testing.assert_close(full(a), b, msg=lambda m, t=message: f"{t}: {m}", **tolerance or {})
                if what == "grad":
                    for optimizer in optimizers:
                        optimizer.step()
            for optimizer in optimizers:
                optimizer.zero_grad()
        return model

    def fresh(self, make: Callable[[], nn.Module]) -> Any:
        """A model, and a compiler that has not compiled anything yet."""
        torch._dynamo.reset()
        counters.clear()
        torch.manual_seed(0)
        return make()

    # --- what is compiled ---------------------------------------------------------------------------------------------

    def test_blocks_wrapped_by_torch_compile_share_graphs(self) -> None:
        """The first block's input needs a gradient like that of the others, because it comes from the embedding."""
        self.train(self.fresh(lambda: Model(4)), lambda m: compile_blocks(m, wrapped))
        self.assert_graphs(1)

    def test_whole_model_wrapped_by_torch_compile(self) -> None:
        """Its frame is opened outside of the compiled code: prefetching, casts and the order of backward work."""
        reference = self.fresh(Model)
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
        self.train(reference, wrapped, mp_policy=policy, tolerance={"rtol": 3e-2, "atol": 2e-2})
        self.assert_graphs(1)

    def test_blocks_compiled_before_sharding(self) -> None:
        for style in (in_place, wrapped):
            self.train(self.fresh(Model), lambda m, s=style: compile_blocks(m, s), compile_first=True)
            self.assert_graphs(1)

    def test_tied_weights_of_a_compiled_model(self) -> None:
        reference = self.fresh(Model)
        reference.head.weight = reference.embedding.weight
        self.train(reference, compile_model)
        self.assert_graphs(1)

    def test_compiled_function_around_the_model(self) -> None:
        """No frame is around it: weights are gathered on demand."""
        reference = self.fresh(Model)

        def compile_function(model: nn.Module) -> Any:
            return torch.compile(lambda tokens: model(tokens), backend="aot_eager", fullgraph=True)

        model = self.train(reference, compile_function)
        self.assert_graphs(1)
        for param in model.parameters():
            param.requires_grad_(False)
        with self.assertRaisesRegex(RuntimeError, r"'embedding.weight' was frozen or unfrozen .* Compile the module"):
            torch.compile(lambda tokens: model(tokens), backend="aot_eager")(torch.zeros(1, 2, dtype=torch.long))

    def test_compiled_function_of_parts_of_the_model(self) -> None:
        """No call of ours is around them, and types are exact while the compiler traces them."""

        def compile_function(model: Any) -> Any:
            return torch.compile(
                lambda tokens: model.head(model.layers[0](model.embedding(tokens))), backend="aot_eager", fullgraph=True
            )

        model: Any = self.train(self.fresh(partial(Model, 1)), compile_function)
        assert type(model.layers[0]) is Block
        assert type(model.head) is nn.Linear
        self.assert_graphs(1)

    def test_prefetching_and_gather_counts_of_compiled_blocks(self) -> None:
        model = compile_blocks(gtp_shard(self.fresh(Model), self.gtp_mesh(), schedule=ALL), wrapped)
        for step in range(3):
            before = num_gathers(model)
            next_token_loss(model, tokens_of(torch.Generator().manual_seed(step))).backward()
            used = {name.split(".")[-2]: count - before[name] for name, count in num_gathers(model).items()}
            # The head turns from forward to backward, the embedding's backward needs no weight.
            self.assertEqual(used, {"embedding": 1, "up": 2, "down": 2, "head": 2 if step == 0 else 1})

    # --- what the compiler must not optimize away ---------------------------------------------------------------------

    def test_one_weight_used_twice_with_equal_gradients(self) -> None:
        self.train(self.fresh(UsesTwice), in_place, mean_square)

    def test_inductor(self) -> None:
        """Inductor drops what it takes for ops without effect; gradients of weights must not be among them."""
        self.train(self.fresh(UsesTwice), lambda m: in_place(m, backend="inductor"), mean_square, steps=1)

    @pytest.mark.soak
    def test_inductor_on_blocks_and_recomputation(self) -> None:
        for recompute in (None, {"use_reentrant": False}):
            reference = self.fresh(Model)
            for layer in reference.layers:
                layer.recompute = recompute
            self.train(reference, lambda m: compile_blocks(m, backend="inductor"))
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
        model = shard_copy(reference, self.gtp_mesh(), reshard_after_forward=False)
        in_place(model, backend="inductor")
        x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            for _ in range(3):
                torch.testing.assert_close(model(x), reference(x))

    # --- recomputation ------------------------------------------------------------------------------------------------

    def gathers_of_blocks(self, model: nn.Module) -> dict[str, int]:
        before = num_gathers(model)
        next_token_loss(model, tokens_of(torch.Generator().manual_seed(9))).backward()
        used = {name: count - before[name] for name, count in num_gathers(model).items() if name.startswith("layers.")}
        by_kind: dict[str, set[int]] = {}
        for name, count in used.items():
            by_kind.setdefault(name.split(".")[-2], set()).add(count)
        return {kind: count for kind, (count,) in by_kind.items()}

    def test_checkpoint_around_compiled_blocks(self) -> None:
        for use_reentrant, style in ((True, in_place), (False, wrapped)):
            reference = self.fresh(Model)
            reference.outside = {"use_reentrant": use_reentrant}
            model = self.train(reference, lambda m, s=style: compile_blocks(m, s))
            self.assertEqual(self.gathers_of_blocks(model), {"up": 3, "down": 3})
            self.assertFalse(counters["graph_break"])

    def test_checkpoint_inside_compiled_blocks(self) -> None:
        reference = self.fresh(Model)
        for layer in reference.layers:
            layer.recompute = {"use_reentrant": False}
        model = self.train(reference, compile_blocks)
        self.assert_graphs(1)
        # Nothing that backward needs is computed from the output of the last linear.
        self.assertEqual(self.gathers_of_blocks(model), {"up": 3, "down": 2})

    def test_selective_checkpoint_around_compiled_blocks(self) -> None:
        """Nothing of compiled code is saved: Inductor writes over what our ops have returned once it has used it."""
        reference = self.fresh(lambda: Model(1))
        reference.outside = save_gemms
        model = self.train(reference, lambda m: compile_blocks(m, backend="inductor"), steps=1)
        self.assertEqual(self.gathers_of_blocks(model), {"up": 3, "down": 3})

    def test_selective_checkpoint_inside_compiled_blocks(self) -> None:
        """A policy that saves what GEMMs return saves what linears return, and spares the recomputation's gather."""
        reference = self.fresh(Model)
        for layer in reference.layers:
            layer.recompute = save_gemms
        model = self.train(reference, compile_blocks)
        self.assertFalse(counters["graph_break"])
        self.assertEqual(self.gathers_of_blocks(model), {"up": 2, "down": 2})

    def test_checkpoint_inside_a_compiled_model(self) -> None:
        reference = self.fresh(Model)
        reference.outside = {"use_reentrant": False}
        self.train(reference, compile_model)
        self.assert_graphs(1)

    # --- precision, shapes, modes -------------------------------------------------------------------------------------

    def test_mixed_precision(self) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        tolerance = {"rtol": 3e-2, "atol": 2e-2}
        self.train(self.fresh(Model), compile_blocks, mp_policy=policy, tolerance=tolerance)
        self.assert_graphs(1)

    def test_autocast(self) -> None:
        def loss(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                return next_token_loss(model, batch)

        self.train(self.fresh(Model), compile_blocks, loss, tolerance={"rtol": 3e-2, "atol": 2e-2})

    def test_dynamic_shapes(self) -> None:
        """A second length compiles once more, any further one not at all."""
        mesh = self.gtp_mesh()
        for options in ({}, {"dynamic": True}):
            reference = self.fresh(Model)
            model = compile_blocks(shard_copy(reference, mesh), **options)
            for length in (4, 7, 10):  # none as long as a rank's batch: the compiler would take them for one
                batch = tokens_of(torch.Generator().manual_seed(length), length)
                for module, rows in ((reference, batch), (model, rows_of_rank(batch, mesh))):
                    module.zero_grad()
                    next_token_loss(module, rows).backward()
                assert_same_params(model, reference, "grad")
            self.assert_graphs(1 if options else 2)

    def test_evaluation(self) -> None:
        reference = self.fresh(Model).eval()
        for compile_parts in (compile_blocks, compile_model):
            model = compile_parts(shard_copy(reference, self.gtp_mesh()).eval())
            tokens = tokens_of(torch.Generator().manual_seed(self.rank))
            for context in (torch.no_grad, torch.inference_mode):
                for _ in range(2):
                    before = num_gathers(model)
                    with context():
                        torch.testing.assert_close(model(tokens), reference(tokens))
                    used = {count - before[name] for name, count in num_gathers(model).items()}
                    self.assertEqual(used, {1})

    # --- frozen, modified, not asked for ------------------------------------------------------------------------------

    def test_frozen_weights_and_later_unfreezing(self) -> None:
        """A frozen linear saves nothing for backward, but the compiled code of the others is not in the way."""
        reference = self.fresh(Model)
        model = compile_blocks(shard_copy(reference, self.gtp_mesh()))
        for step, is_training in enumerate((False, True, False)):
            for module in (reference, model):
                for layer in module.layers:
                    layer.up.weight.requires_grad_(is_training)
            batch = tokens_of(torch.Generator().manual_seed(step))
            for module, rows in ((reference, batch), (model, rows_of_rank(batch, self.gtp_mesh()))):
                module.zero_grad()
                next_token_loss(module, rows).backward()
            assert_same_params(model, reference, "grad")

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

    def test_write_between_forward_and_backward_is_refused(self) -> None:
        model = compile_blocks(gtp_shard(self.fresh(Model), self.gtp_mesh(), schedule=ALL))
        tokens = tokens_of(torch.Generator().manual_seed(0))
        next_token_loss(model, tokens).backward()
        loss = next_token_loss(model, tokens)
        sgd([model.layers[1].down.weight]).step()
        with self.assertRaisesRegex(RuntimeError, r"'layers\.1\.down\.weight' .* modified by an inplace operation"):
            loss.backward()

    def test_poison_spares_what_compiled_code_has_read(self) -> None:
        """A weight read as an attribute is the compiled code's own, also where the runtime lets go of it at once."""
        reference = self.fresh(lambda: Raw(DIM))
        with environment(DTENSOR_GTP_DEBUG="poison"):
            model = in_place(shard_copy(reference, self.gtp_mesh()))
        batch = torch.randn(8, DIM, generator=torch.Generator().manual_seed(0))
        for module, rows in ((reference, batch), (model, rows_of_rank(batch, self.gtp_mesh()))):
            module(rows).square().mean().backward()
        assert_same_params(model, reference, "grad")

    def test_gradients_of_inputs_alone_leave_weights_alone(self) -> None:
        reference = self.fresh(Block)
        model = in_place(gtp_shard(copy.deepcopy(reference), self.gtp_mesh(), schedule=ALL))
        x = torch.randn(4, DIM, generator=torch.Generator().manual_seed(0)).requires_grad_()
        (actual,) = torch.autograd.grad(model(x).square().mean(), x)
        (expected,) = torch.autograd.grad(reference(x).square().mean(), x)
        torch.testing.assert_close(actual, expected)
        assert all(param.grad is None for param in model.parameters())
