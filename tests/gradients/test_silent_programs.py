"""Programs and derivatives that would be wrong without a word: recordings, double backward, parts of backward.

Each is computed as in one process, or refused by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from common import ALL, GlooTest, assert_same_params, full, rows_of_rank
from pairs_common import CHOSEN, MIXED, POLICIES, PairTest, blocks
from passes_common import WIDTH as ROW_WIDTH
from passes_common import Model, mean
from runtime_common import VOCABULARY, WIDTH, Raw, counted, make_rows, small_model, square_loss
from schedules import explicit
from torch.autograd.functional import hvp
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from dtensor_gtp import gtp_shard, quantize_
from dtensor_gtp.quant import RECIPES


class Around(nn.Module):
    """A module that is not sharded, around one that is."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * self.inner(x)


class Penalized(nn.Module):
    """Reads its parameters in a loop."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) + sum(param.square().sum() for param in self.parameters())


class TestRecordings(PairTest):
    def test_programs_without_our_modules_are_refused(self) -> None:
        """They would hold numbers that name weights of this process, or values of now."""
        made = (nn.Linear(WIDTH, WIDTH), Raw(), nn.LayerNorm(WIDTH), nn.Embedding(WIDTH, 4), Penalized())
        linear, raw, norm, table, penalized = (gtp_shard(each, self.gtp_mesh(), schedule=ALL) for each in made)
        part: Any = gtp_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH)), self.gtp_mesh(), schedule=ALL)
        x = make_rows(0)
        for module in (linear, Around(part[0]), Around(linear), raw, norm, table):
            given = torch.tensor([1, 2]) if module is table else x
            with self.assertRaisesRegex(RuntimeError, "torch.export cannot record a use of parameter .*torch.compile"):
                torch.export.export(module, (given,))
        for module in (linear, Around(linear), raw, norm):
            for pre_dispatch in (False, True):
                with self.assertRaisesRegex(RuntimeError, "torch.fx cannot record a use of parameter"):
                    make_fx(module, pre_dispatch=pre_dispatch)(x)
        for module in (raw, penalized):
            with self.assertRaisesRegex(RuntimeError, "torch.fx.symbolic_trace cannot record a use of parameter"):
                torch.fx.symbolic_trace(Around(module))
            module(x).sum().backward()
        torch.testing.assert_close(torch.fx.symbolic_trace(Around(linear))(x), 2 * linear(x))  # it runs our module
        torch.export.export(Around(nn.Linear(WIDTH, WIDTH)), (x,))

    def test_recordings_of_blocks_are_refused(self) -> None:
        for pair in self.pairs(blocks, (CHOSEN, MIXED)):
            model = pair[0]
            x = make_rows(0, 2, model[0].up.in_features)
            for module in (model, model[0], model[0].up):
                with self.assertRaisesRegex(RuntimeError, "torch.export cannot record a use of parameter '0"):
                    torch.export.export(module, (x,))
            with self.assertRaisesRegex(RuntimeError, "torch.jit.trace cannot record a .* after gtp_shard"):
                torch.jit.trace(model[0], x)
            with self.assertRaisesRegex(RuntimeError, "torch.fx cannot record a use of parameter '0"):
                make_fx(model[0])(x)
            self.check(pair)


class Embedded(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(VOCABULARY, WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        embedded = self.embedding(tokens)
        return embedded, self.head(embedded)


def penalized(each: nn.Module, x: torch.Tensor) -> None:
    """A step with a gradient penalty, as that of a critic or of a force field."""
    x = x.double().requires_grad_()
    energy = each(x).square()
    (slope,) = torch.autograd.grad(energy.sum(), x, create_graph=True)
    (energy.mean() + slope.square().mean() + slope.sin().mean()).backward()


class Wide(nn.Module):
    """Linear layers that run several times, without a bias, frozen, with more dims; and weights that code reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(ROW_WIDTH, ROW_WIDTH), nn.Linear(ROW_WIDTH, ROW_WIDTH, bias=False)
        self.frozen = nn.Linear(ROW_WIDTH, ROW_WIDTH).requires_grad_(False)
        self.norm = nn.LayerNorm(ROW_WIDTH, eps=0.1)  # well-conditioned
        self.raw = nn.Parameter(torch.randn(ROW_WIDTH, ROW_WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x[:, None].expand(-1, 3, -1)).tanh()
        x = self.norm(self.frozen(self.second(x).tanh())).sum(1)
        return self.first(x).tanh() @ self.raw


class TestSecondDerivatives(PairTest):
    def test_gradient_penalties(self) -> None:
        for make in (Wide, Model):
            for policy in POLICIES:
                pair = self.pair(lambda make=make: make().double(), policy)
                for seed in range(3):
                    self.check(pair, penalized, seed)
                    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in pair]
                    self.run_both(pair, penalized, seed)
                    for optimizer in optimizers:
                        optimizer.step()
                    assert_same_params(*pair, rtol=1e-4, atol=1e-5)
                    self.check_grads(pair)

    def test_gradient_penalties_of_microbatches_under_checkpointing(self) -> None:
        for policy in (ALL, CHOSEN):
            pair = self.pair(lambda: Wide().double(), policy)

            def step(each: nn.Module, x: torch.Tensor) -> None:
                for rows in x.chunk(2):
                    penalized(lambda rows: checkpoint(each, rows, use_reentrant=False), rows)  # type: ignore[arg-type]

            self.check(pair, step)
            pair[0].set_requires_gradient_sync(False)
            self.run_both(pair, penalized)
            pair[0].set_requires_gradient_sync(True)
            self.check(pair, penalized, seed=1)

    def test_what_is_not_computed_raises(self) -> None:
        """Also where the gradient that arrives is a constant, so that autograd sees nothing to differentiate."""
        for *first, last in ([nn.Linear(16, 16)], [nn.Linear(16, 16), nn.Dropout(0.5)]):
            model: Any = nn.Sequential(*first, last)
            quantize_(model, RECIPES["float8_rowwise"](compute="float8"))
            gtp_shard(model, self.gtp_mesh(), schedule=ALL)
            x = make_rows(0, 16, 16).requires_grad_()
            output = model(x)
            (grad,) = torch.autograd.grad(output.sum(), x, create_graph=True)
            with self.assertRaisesRegex(RuntimeError, "does not compute second derivatives.*F.linear"):
                (output.square().mean() + grad.square().mean()).backward()
            # Torch would find no way from a gradient to the input, and give zeros.
            with self.assertRaisesRegex(RuntimeError, "does not compute second derivatives"):
                hvp(lambda x, model=model: mean(model(x)), x, torch.ones_like(x))

    def test_by_an_embedding(self) -> None:
        model: Any = gtp_shard(Embedded(), self.gtp_mesh(), schedule=ALL)
        embedded, logits = model(torch.tensor([1, 2]))
        (grad,) = torch.autograd.grad(logits.sum(), embedded, create_graph=True)
        want = model.head.weight.full_tensor().sum(0).expand(2, -1)
        torch.testing.assert_close(grad, want)
        (logits.square().mean() + grad.square().mean()).backward()
        assert model.embedding.weight.grad is not None

    def test_by_an_input(self) -> None:
        for pair in self.pairs(is_first=True):
            x = make_rows(0, 4, pair[0].first.in_features)
            (want, curved), (got, is_curved) = (
                hvp(lambda x, model=model: mean(model(x)), x, torch.ones_like(x)) for model in reversed(pair)
            )
            torch.testing.assert_close((got, is_curved), (want, curved))
            assert is_curved.abs().max() > 0

    def test_gradients_of_parameters_are_not_constants(self) -> None:
        for model in (small_model(), nn.LayerNorm(WIDTH), Raw()):
            gtp_shard(model, self.gtp_mesh(), schedule=ALL)
            x = make_rows(0).requires_grad_()
            square_loss(model, x).backward(create_graph=True)
            loss = square_loss(model, x)
            penalty = torch.stack([param.grad.to_local().square().sum() for param in model.parameters()]).sum()
            with self.assertRaisesRegex(RuntimeError, "does not compute second derivatives"):
                (loss + penalty).backward()
            model.zero_grad()
            square_loss(model, x).backward()
            assert all(not param.grad.requires_grad for param in model.parameters())


def into(*names: str) -> Callable[[nn.Module, torch.Tensor], None]:
    """A step that asks for the gradients of some parameters."""
    return lambda each, x: mean(each(x)).backward(inputs=[each.get_parameter(name) for name in names])


class TestInputsOfBackward(PairTest):
    def test_inputs_get_their_gradients(self) -> None:
        """Others get None, not zeros, with which an optimizer would decay and move weights."""

        def of_input(each: nn.Module, x: torch.Tensor) -> torch.Tensor:
            loss = mean(each(x.requires_grad_()))
            (grad,) = torch.autograd.grad(loss, x)
            return grad

        def of_input_and_parameters(each: nn.Module, x: torch.Tensor) -> None:
            loss = mean(each(x.requires_grad_()))
            loss.backward(inputs=[x, *each.parameters()])

        some = into("blocks.0.up.weight", "blocks.1.norm.bias", "first.weight")
        for pair in self.pairs():
            with counted() as counts:
                grad, expected = self.run_both(pair, of_input)
            assert counts()[1:] == (0, 0), counts()  # nothing is reduced
            torch.testing.assert_close(grad, rows_of_rank(expected, self.gtp_mesh()) * 2)  # the mean of fewer rows
            self.check_grads(pair)
            for step in (some, into("blocks.0.down.bias"), into("first.weight"), of_input_and_parameters):
                self.check(pair, step)
            for seed, is_last in enumerate((False, True)):  # the sum of two microbatches that ask for different ones
                pair[0].set_requires_gradient_sync(is_last)
                self.run_both(pair, some if is_last else into("blocks.0.up.weight", "last.weight"), seed)
            self.check_grads(pair)
            self.check((nn.Sequential(pair[0]), nn.Sequential(pair[1])))  # ours below a module that is not

    def test_grad_of_a_parameter_is_refused(self) -> None:
        model = gtp_shard(small_model(), self.gtp_mesh(), schedule=ALL)
        loss, params = square_loss(model, make_rows(0)), dict(model.named_parameters())
        for name in ("0.weight", "1.first", "2.bias"):
            for options in ({}, {"allow_unused": True}, {"materialize_grads": True}):
                with self.assertRaisesRegex(NotImplementedError, f"gradient of parameter '{name}'.*inputs="):
                    torch.autograd.grad(loss, params[name], retain_graph=True, **options)
        loss.backward()  # the graph is as it was
        param = params["0.weight"]
        (grad,) = torch.autograd.grad(param.square().sum(), param)  # outside of the model it is a DTensor
        torch.testing.assert_close(full(grad), 2 * full(param.detach()))
        (grad,) = torch.autograd.grad(make_rows(0).requires_grad_().sum(), param, materialize_grads=True)
        assert not full(grad).any()

    def test_a_parameter_that_computes_in_a_wider_dtype_is_refused(self) -> None:
        wide = MixedPrecisionPolicy(param_dtype=torch.float32)
        model = gtp_shard(small_model().bfloat16(), self.gtp_mesh(), schedule=ALL, mp_policy=wide)
        loss, params = square_loss(model, make_rows(0)), dict(model.named_parameters())
        told = "cannot name parameter '2.bias' .* is torch.bfloat16 and computes in torch.float32.*requires_grad_"
        with self.assertRaisesRegex(NotImplementedError, told):
            loss.backward(inputs=[params["2.bias"]])
        loss.backward(inputs=[params["0.weight"]])  # sharded ones can be named
        self.assertEqual([name for name, param in params.items() if param.grad is not None], ["0.weight"])


class Choice(nn.Module):
    """Layers of one shape, in an order that the caller chooses."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH) for _ in range(3)])

    def forward(self, x: torch.Tensor, order: tuple[int, ...]) -> torch.Tensor:
        for number in order:
            x = self.layers[number](x)
        return x


class TestOrderOfUses(GlooTest):
    world_size = 2

    def test_another_order_on_another_rank_is_refused(self) -> None:
        x, rank = make_rows(0), self.gtp_mesh().get_local_rank()
        orders = (((0, 1), (0, 2)), ((0, 0, 1), (0, 0, 2)))  # with as many gathers, so that nothing hangs
        for is_grad_enabled in (True, False):
            for order in orders:
                model = gtp_shard(Choice(), self.gtp_mesh(), schedule=ALL)
                message = r"rank 0 has 'layers...weight' where rank 1 has 'layers...weight'.*Run the same modules"
                with torch.set_grad_enabled(is_grad_enabled), self.assertRaisesRegex(RuntimeError, message):
                    model(x, order[rank])

    def test_another_order_in_a_later_step_is_refused(self) -> None:
        """Layers of one shape: all collectives fit together. The all-reduce of biases, made anyhow, carries marks."""
        x, rank = make_rows(0), self.gtp_mesh().get_local_rank()
        for dtype in (torch.float32, torch.bfloat16):
            model = gtp_shard(
                Choice(),
                self.gtp_mesh(),
                schedule=explicit(0, min_shard_numel=WIDTH + 1, keep_last=False),
                mp_policy=MixedPrecisionPolicy(reduce_dtype=dtype),
            )
            for orders in (((0, 1), (0, 1)), ((1, 0), (1, 0)), ((2, 1), (2, 1))):  # on both ranks alike
                with counted() as counts:
                    model(x, orders[rank]).sum().backward()
                self.assertEqual(counts()[2], 1)
            before = {name: full(param.grad) for name, param in model.named_parameters()}
            loss = model(x, ((1, 2), (2, 1))[rank]).sum()
            message = (
                r"in a step rank 0 has all_gather of layers.1.weight where rank 1 has all_gather of layers.2.weight"
            )
            with self.assertRaisesRegex(RuntimeError, message):
                loss.backward()
            for name, param in model.named_parameters():
                self.assertEqual(full(param.grad), before[name])
            model(x, (2, 1)).sum().backward()

    def test_weights_that_all_ranks_have_may_be_used_in_any_order(self) -> None:
        rank = self.gtp_mesh().get_local_rank()
        model = gtp_shard(Choice(), self.gtp_mesh(), schedule=ALL)
        model.unshard()
        with torch.no_grad():
            model(make_rows(0), ((0, 1, 2), (2, 1))[rank])


class TestOrderOfReplicas(GlooTest):
    def test_a_replica_may_evaluate_alone(self) -> None:
        model = gtp_shard(Choice(), self.hsdp_mesh(), schedule=explicit(0, min_shard_numel=WIDTH + 1))
        for step in range(3):
            if step and self.hsdp_mesh().get_local_rank("replicate") == 0:
                with torch.no_grad():
                    model(make_rows(0), (0, step))
            model(make_rows(0), (0, 1, 2)).sum().backward()
