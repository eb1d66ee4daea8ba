"""What users do to parameters between and around steps: each counts as in one process, or is refused by name."""

from __future__ import annotations

import copy
import functools
import weakref
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from common import ALL, GlooTest, assert_same_params, full, rows_of_rank
from pairs_common import CHOSEN, MIXED, Pair, PairTest, blocks, replace_data
from passes_common import Model, mean, usual
from runtime_common import WIDTH, Raw, make_rows, shard_copy, small_model, square_loss, square_step
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.func import functional_call

from dtensor_gtp import MixedPrecisionPolicy, gtp_shard
from dtensor_gtp._schedule.attribute_reads import AttributeReads


def doubled(model: nn.Module) -> dict[str, nn.Parameter]:
    """Other parameters for a model."""
    return {name: nn.Parameter(param.detach() * 2) for name, param in model.named_parameters()}


def assign(model: nn.Module) -> None:
    model.load_state_dict(doubled(model), assign=True)


class TestReplacedParameters(PairTest):
    MESSAGE = "'.*' of shape .* was replaced between a forward and its backward"

    def test_each_use_notes_it(self) -> None:
        """Also where the weight has no part in the gradient of the input, and whole parameters."""
        linear = nn.Linear(WIDTH, WIDTH, bias=False)
        for made in (linear, nn.Embedding(8, WIDTH), nn.LayerNorm(WIDTH), Raw(), small_model()):
            model = gtp_shard(made, self.gtp_mesh(), schedule=ALL)
            given = torch.tensor([1, 2]) if isinstance(model, nn.Embedding) else make_rows(0)
            loss = mean(model(given))
            assign(model)
            model(given)  # the new parameters are in use
            with self.assertRaisesRegex(RuntimeError, self.MESSAGE):
                loss.backward()
            mean(model(given)).backward()

    def test_groups_note_it(self) -> None:
        """Torch would compute with memory that is free by now."""

        def put(model: Any) -> None:
            model[1].up.weight = nn.Parameter(model[1].up.weight.detach() * 2)

        def set_data(model: Any) -> None:
            replace_data(model[1].up.weight)

        for pair in self.pairs(blocks, (CHOSEN, MIXED)):
            for change in (assign, put, set_data):
                losses = self.run_both(pair, lambda each, x: mean(each(x)))
                for each in pair:
                    change(each)
                self.run_both(pair, lambda each, x: each(x))  # takes them over
                with self.assertRaisesRegex(RuntimeError, self.MESSAGE):
                    losses[0].backward()
                pair[0].zero_grad()
                self.check(pair)

    def test_between_microbatches(self) -> None:
        """The next parameter would get the gradient of the one before."""

        def swap(model: Any) -> None:
            model.first.weight, model.last.weight = model.last.weight, model.first.weight

        def swap_in_blocks(model: Any) -> None:
            first, second = model.blocks
            first.up.weight, second.up.weight = second.up.weight, first.up.weight

        def swap_whole(model: Any) -> None:
            first, second = model.blocks
            first.norm.weight, second.norm.weight = second.norm.weight, first.norm.weight

        def tie(model: Any) -> None:
            model.first.weight = model.last.weight

        def renew(model: Any) -> None:
            model.blocks[0].down.weight = nn.Parameter(model.blocks[0].down.weight.detach().clone())

        message = "was replaced while gradients of earlier microbatches"
        for change in (swap, swap_in_blocks, swap_whole, tie, renew):
            for pair in self.pairs(Model, (ALL, CHOSEN, MIXED)):
                with self.subTest(change=change):
                    model, reference = pair
                    model.set_requires_gradient_sync(False)
                    self.run_both(pair)
                    for each in pair:
                        change(each)
                    model.set_requires_gradient_sync(True)
                    with self.assertRaisesRegex(RuntimeError, message):
                        usual(model, torch.randn(4, self.width))
                    model.reset_iter_state()
                    reference.zero_grad()
                    self.check(pair)

    def test_loaded_between_microbatches(self) -> None:
        for pair in self.pairs(Model, (ALL, CHOSEN, MIXED)):
            pair[0].set_requires_gradient_sync(False)
            self.run_both(pair)
            with self.assertRaisesRegex(RuntimeError, "was replaced while gradients of earlier microbatches"):
                assign(pair[0])
            pair[0].set_requires_gradient_sync(True)
            self.check(pair)  # both microbatches

    def test_functional_call_beside_a_forward(self) -> None:
        model, x = gtp_shard(small_model(), self.gtp_mesh(), schedule=ALL), make_rows(0)
        others = doubled(model)
        loss = square_loss(model, x)
        beside = functional_call(model, others, (x,)).square().mean()
        with self.assertRaisesRegex(RuntimeError, "functional_call with other parameters"):
            (loss + beside).backward()
        model.zero_grad()
        torch.manual_seed(0)
        functional_call(model, others, (x,)).square().mean().backward()
        assert all(param.grad is not None for param in others.values())
        assert all(param.grad is None for param in model.parameters())


class TestParameterHooks(GlooTest):
    world_size = 2

    def test_hooks_from_before_sharding_run(self) -> None:
        reference = small_model()
        model, seen = copy.deepcopy(reference), []
        handles = []
        for each in (reference, model):
            for name, param in each.named_parameters():
                handles.append(param.register_hook(lambda grad: grad * 2))
                handles.append(param.register_post_accumulate_grad_hook(lambda param, n=name: seen.append(n)))
        gtp_shard(model, self.gtp_mesh(), schedule=ALL)
        for is_hooked in (True, False):
            for each, rows in ((reference, make_rows(0)), (model, rows_of_rank(make_rows(0), self.gtp_mesh()))):
                each.zero_grad()
                square_step(each, rows)
            assert_same_params(model, reference, "grad")
            assert sorted(seen) == sorted(is_hooked * 2 * list(dict(model.named_parameters())))
            for handle in handles:
                handle.remove()
            seen.clear()

    def test_a_hook_that_changes_hooks(self) -> None:
        """Those that run behind it are the ones that it leaves, as in autograd."""

        def log_of(root: nn.Module) -> list[str]:
            log: list[str] = []
            for name, param in root.named_parameters():
                old = param.register_post_accumulate_grad_hook(lambda param, n=name: log.append(f"old {n}"))

                def change(grad: Any, n: str = name, param: Any = param, old: Any = old) -> None:
                    old.remove()
                    param.register_post_accumulate_grad_hook(lambda param: log.append(f"new {n}"))

                param.register_hook(change)
            return log

        reference = small_model()
        model = gtp_shard(copy.deepcopy(reference), self.gtp_mesh(), schedule=ALL)
        logs = [log_of(reference), log_of(model)]
        for _ in range(2):
            square_step(reference, make_rows(0))
            square_step(model, make_rows(0))
        assert sorted(logs[0]) == sorted(logs[1])
        assert logs[0]

    def test_what_a_hook_gets_is_said_where_it_fails(self) -> None:
        model = gtp_shard(nn.Linear(WIDTH, WIDTH), self.gtp_mesh(), schedule=ALL)
        handle = model.weight.register_hook(lambda grad: torch.eye(WIDTH) @ grad)
        with self.assertRaisesRegex(RuntimeError, "mixed") as caught:
            square_step(model, make_rows(0))
        (note,) = [note for note in caught.exception.__notes__ if note.startswith("dtensor_gtp: ")]
        self.assertRegex(note, "A hook of parameter 'weight' gets the gradient as a DTensor")
        handle.remove()

        def fail(grad: torch.Tensor) -> None:
            raise RuntimeError("of the user")

        model.weight.register_hook(fail)
        with self.assertRaisesRegex(RuntimeError, "of the user") as caught:
            square_step(model, make_rows(0))
        assert not getattr(caught.exception, "__notes__", [])

    def test_hooks_of_several_parameters_are_refused(self) -> None:
        """They count nodes of autograd's graph, in which no sharded parameter is."""
        for schedule, make in ((ALL, small_model), (CHOSEN, blocks)):
            model = gtp_shard(make(), self.gtp_mesh(), schedule=schedule)
            x = make_rows(0, 8, next(model.parameters()).shape[-1])
            handle = register_multi_grad_hook(list(model.parameters()), lambda grads: None)
            with self.assertRaisesRegex(RuntimeError, "register_multi_grad_hook.*register_post_accumulate_grad_hook"):
                square_step(model, x)
            handle.remove()
            square_step(model, x)
            assert all(param.grad is not None for param in model.parameters())

    def test_hooks_at_the_node_of_a_parameter_are_refused(self) -> None:
        """Its node gets no gradient any more. The optimizer in backward of torch.distributed registers such hooks."""
        for name, register in (("0.weight", "register_hook"), ("2.bias", "register_prehook")):
            model = small_model()
            param = model.get_parameter(name)
            node = param.expand_as(param).grad_fn.next_functions[0][0]
            message = f"hook on the autograd node.*'{name}'.*post_accumulate"
            with getattr(node, register)(lambda *grads: None), self.assertRaisesRegex(ValueError, message):
                gtp_shard(model, self.gtp_mesh(), schedule=ALL)
            assert model.get_parameter(name) is param
            square_step(gtp_shard(model, self.gtp_mesh(), schedule=ALL), make_rows(0))

    def test_hooks_at_the_node_of_a_sharded_parameter_are_refused(self) -> None:
        """As optimizers in backward register them: in the next forward that looks at all of them."""
        message = "no hook on the autograd node.*'0.weight'.*register_post_accumulate_grad_hook"
        for schedule in (ALL, CHOSEN):
            model = gtp_shard(small_model(), self.gtp_mesh(), schedule=schedule)
            square_loss(model, make_rows(0)).backward()
            _apply_optimizer_in_backward(torch.optim.SGD, model.parameters(), {"lr": 0.1})
            with self.assertRaisesRegex(RuntimeError, message):
                model(make_rows(0))

    def test_hook_on_what_a_fused_layer_does_not_read(self) -> None:
        class Hooked(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer = nn.Linear(WIDTH, WIDTH)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                self.layer.weight.register_hook(lambda grad: grad * 2)
                return self.layer(x)

        model = gtp_shard(Hooked(), self.gtp_mesh(), schedule=ALL)
        with self.assertRaisesRegex(RuntimeError, "hook on .*'layer.weight'.* named_parameters"):
            model(make_rows(0))
        seen: list[torch.Tensor] = []
        model = gtp_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH)), self.gtp_mesh(), schedule=ALL)
        next(model.parameters()).register_hook(lambda grad: seen.append(grad))
        square_loss(model, make_rows(0)).backward()
        assert len(seen) == 1


def set_trained(pair: Pair, names: tuple[str, ...], is_trained: bool) -> None:
    """Parameters whose names begin with one of ``names``."""
    for each in pair:
        for name, param in each.named_parameters():
            if name.startswith(names):
                param.requires_grad_(is_trained)


class TestFreezing(PairTest):
    def test_gradients_of_a_weight_that_is_frozen_later(self) -> None:
        """In the microbatch that syncs, or earlier: some of a block, a whole block, all blocks. Afterwards they train
        again."""
        cases = (
            (("first.weight", "blocks.1.up"), "set_requires_gradient_sync", False),
            (("last.bias", "blocks.0.norm", "blocks.1.up.bias"), "set_is_last_backward", False),
            (("blocks.1.",), "set_requires_all_reduce", False),
            (("blocks.",), "set_requires_gradient_sync", False),
            (("blocks.0.", "blocks.1.up"), "set_requires_gradient_sync", True),
        )
        for pair in self.pairs():
            for names, switch, is_frozen_first in cases:
                for seed, is_last in enumerate((False, True)):
                    getattr(pair[0], switch)(is_last)
                    set_trained(pair, names, is_last == is_frozen_first)
                    self.run_both(pair, seed=seed)
                self.check_grads(pair)
                set_trained(pair, names, True)
                self.check(pair)

    def test_a_frozen_model_has_no_graph(self) -> None:
        for pair in self.pairs():
            for is_trained in (False, True):
                set_trained(pair, ("",), is_trained)
                outputs = self.run_both(pair, lambda each, x: each(x))
                self.assertEqual([output.requires_grad for output in outputs], [is_trained] * 2)

    def test_frozen_between_forward_and_backward(self) -> None:
        for pair in self.pairs():
            losses = self.run_both(pair, lambda each, x: mean(each(x)))
            set_trained(pair, ("first.", "blocks.0.", "blocks.1.up"), False)
            for loss in losses:
                loss.backward()
            self.check_grads(pair)

    def test_frozen_between_forward_and_backward_of_the_last_microbatch(self) -> None:
        """Its gradients are dropped, those of the earlier one are not."""
        names = "first.", "blocks.0.", "blocks.1.up"
        for pair in self.pairs():
            pair[0].set_requires_gradient_sync(False)
            self.run_both(pair, seed=1)
            pair[0].set_requires_gradient_sync(True)
            losses = self.run_both(pair, lambda each, x: mean(each(x)), seed=2)
            set_trained(pair, names, False)
            for loss in losses:
                loss.backward()
            self.check_grads(pair)
            set_trained(pair, names, True)
            self.check(pair)

    def test_frozen_for_a_forward_in_between(self) -> None:
        """As adapters that are off while a reference model runs, and a discriminator while the generator trains. In the
        middle of microbatches, too, of which one was frozen. Some weights of a block, and all."""

        def evaluate(each: Any, x: torch.Tensor) -> None:
            with torch.no_grad():
                each(x)

        def train_input(each: Any, x: torch.Tensor) -> None:
            mean(each(x.clone().requires_grad_())).backward()

        for pair in self.pairs():
            for names in (("blocks.1.up",), ("blocks.", "first.", "last.")):
                for between in (evaluate, train_input):
                    pair[0].set_requires_gradient_sync(False)
                    self.run_both(pair, seed=1)
                    pair[0].set_requires_gradient_sync(True)
                    losses = self.run_both(pair, lambda each, x: mean(each(x)), seed=2)
                    set_trained(pair, names, False)
                    self.run_both(pair, between, seed=3)
                    set_trained(pair, names, True)
                    for loss in losses:
                        loss.backward()
                    self.check_grads(pair)
                    self.check(pair)

    def test_switched_in_a_forward(self) -> None:
        """Of single weights, a forward has copies."""

        class Switching(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.first, self.last = (
                    nn.Linear(WIDTH, WIDTH),
                    nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)),
                )
                self.switch: Any = None

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                if self.switch is not None:
                    self.switch(self.last)
                return self.last(self.first(x))

        x = make_rows(0)
        for switch, is_trained in (
            (lambda last: last[0].weight.requires_grad_(True), False),
            (lambda last: last.requires_grad_(True), False),
            (lambda last: last[1].requires_grad_(False), True),
        ):
            for policy in ({}, {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}):
                model = Switching()
                model.last.requires_grad_(is_trained)
                model = gtp_shard(model, self.gtp_mesh(), schedule=ALL, **policy)
                mean(model(x)).backward()
                model.switch = switch
                with self.assertRaisesRegex(RuntimeError, "in a forward froze or unfroze .*'last|leaf variables"):
                    model(x)
                model.switch = None
                mean(model(x)).backward()
                self.assertEqual([param.requires_grad for param in model.last.parameters()], [is_trained] * 4)

    def test_parameters_themselves_are_switched_in_a_forward(self) -> None:
        """By who holds them; and to what they are."""
        model: Any = gtp_shard(nn.Sequential(Raw(), nn.LayerNorm(WIDTH)), self.gtp_mesh(), schedule=ALL)
        held = list(model.parameters())

        def switch(module: Any, args: Any, output: Any) -> None:
            for param in held:
                param.requires_grad_(False)

        handle = model[0].register_forward_hook(switch)  # which has read its weights
        model(make_rows(0))
        handle.remove()
        for param in held:
            param.requires_grad_(True)
        model[0].register_forward_hook(
            torch.no_grad()(lambda module, args, output: model.requires_grad_(True) and None)
        )
        mean(model(make_rows(0))).backward()
        self.assertTrue(all(param.grad is not None for param in held))

    def test_a_forward_reads_no_weight_that_is_unsharded(self) -> None:
        model: Any = gtp_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH)), self.gtp_mesh(), schedule=ALL)
        with mock.patch.object(AttributeReads, "read_pinned") as read:
            model.unshard()
            mean(model(make_rows(0))).backward()
            model.reshard()
        read.assert_not_called()

    def test_frozen_in_between_and_named_as_inputs(self) -> None:
        for pair in self.pairs():
            losses = self.run_both(pair, lambda each, x: mean(each(x)))
            set_trained(pair, ("blocks.", "first.", "last."), False)
            self.run_both(pair, lambda each, x: each(x).detach())
            set_trained(pair, ("blocks.", "first.", "last."), True)
            for each, loss in zip(pair, losses, strict=True):
                loss.backward(inputs=list(each.parameters()))
            self.check_grads(pair)


class TestDirectReads(PairTest):
    """Parameters that are read outside of forward."""

    def test_whole_parameter_read_outside_of_forward(self) -> None:
        """Its gradient is averaged as that of uses in forward, beside one and without any."""

        def read(each: Any, x: torch.Tensor) -> torch.Tensor:
            norm = each.blocks[0].norm
            return x * full(norm.weight) + full(norm.bias).exp() * full(each.blocks[1].down.bias)

        for pair in self.pairs():
            set_trained(pair, ("blocks.0.norm.weight",), False)
            self.run_both(pair, lambda each, x: each(x))
            set_trained(pair, ("blocks.0.norm.weight",), True)
            for seed, is_last in enumerate((True, False, True)):
                pair[0].set_requires_gradient_sync(is_last)
                self.run_both(pair, lambda each, x: mean(each(x) * read(each, x)).backward(), seed)
                if is_last:
                    self.check_grads(pair)
            self.check(pair, lambda each, x: mean(read(each, x)).backward())

    def test_sharded_parameter_read_outside_of_forward(self) -> None:
        """As whole ones: single weights and groups, over replicas, without sync, and beside a use in forward."""

        def loss(each: nn.Module, rows: torch.Tensor) -> torch.Tensor:
            weight, first = full(each[0].weight), full(each[1].first)
            y = each(rows) + rows @ weight @ first
            return y.square().mean() + weight.square().sum() + first.exp().mean()

        for mesh, schedule in ((self.gtp_mesh(), ALL), (self.gtp_mesh(), CHOSEN), (self.hsdp_mesh(2), ALL)):
            reference = nn.Sequential(nn.Linear(WIDTH, WIDTH), Raw())
            model = shard_copy(reference, mesh, schedule=schedule)
            for step, is_last in enumerate((True, False, True)):
                x = make_rows(step)
                model.set_requires_gradient_sync(is_last)
                loss(model, rows_of_rank(x, mesh)).backward()
                loss(reference, x).backward()
                if is_last:
                    assert_same_params(model, reference, "grad")
            with torch.no_grad():
                torch.testing.assert_close(model[0].weight.full_tensor(), reference[0].weight)

    def test_full_tensors_for_which_a_kernel_has_no_gradient(self) -> None:
        """As TRL's distillation reads the head of a teacher that was not frozen: sharded and whole parameters."""
        mesh, x = self.gtp_mesh(), make_rows(0)
        reference = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        model, teacher = shard_copy(reference, mesh), shard_copy(reference, mesh)
        for each, head, rows in ((model, teacher, rows_of_rank(x, mesh)), (reference, reference, x)):
            read = [head[0].weight, head[0].bias, head[1].weight]
            whole = [full(param) if each is model else param.detach() for param in read]
            Scaled.apply(each(rows), *whole).square().mean().backward()
        assert_same_params(model, reference, "grad")
        self.assertEqual([param.grad for param in teacher.parameters()], [None] * 4)


class Scaled(torch.autograd.Function):
    """Has no gradient with respect to the factors."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *factors: torch.Tensor) -> torch.Tensor:
        ctx.factor, ctx.num_factors = sum(factor.sum().item() for factor in factors), len(factors)
        return x * ctx.factor

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        return grad * ctx.factor, *[None] * ctx.num_factors


class Held(nn.Module):
    """Computes with a weight of its layer that it keeps in another way."""

    def __init__(self, keep: Callable[[nn.Parameter], Callable[[torch.Tensor], torch.Tensor]]) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.kept = keep(self.layer.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kept(self.layer(x))


def in_list(weight: nn.Parameter) -> Callable[[torch.Tensor], torch.Tensor]:
    weights = [weight]
    return lambda x: x @ weights[0]


class InSlot:
    __slots__ = ("weight",)

    def __init__(self, weight: nn.Parameter) -> None:
        self.weight = weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


class TestEscapedParameters(GlooTest):
    """What is trained beside the sharded parameters, or with the parameters that they have replaced."""

    world_size = 2

    def check_refused(self, model: nn.Module, change: Callable[[], Any], name: str) -> None:
        x = make_rows(0)
        square_loss(model, x).backward()
        change()
        with self.assertRaisesRegex(RuntimeError, f"Parameter '{name}' .* was added after gtp_shard"):
            square_loss(model, x)
        with torch.no_grad():
            model(x)

    def make(self) -> nn.Sequential:
        return gtp_shard(small_model(), self.gtp_mesh(), schedule=ALL)  # type: ignore[return-value]

    def test_modules_that_come_later(self) -> None:
        # Made before: a new module would count as a registration.
        model, late = self.make(), nn.Linear(WIDTH, WIDTH)
        self.check_refused(model, lambda: model.insert(1, late), "1.weight")
        model, other = self.make(), nn.Linear(WIDTH, WIDTH)
        self.check_refused(model, lambda: model._modules.update({"0": other}), "0.weight")
        inner = nn.Module()
        inner.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH)])
        inner.forward = lambda x: functools.reduce(lambda x, layer: layer(x), inner.layers, x)
        gtp_shard(inner, self.gtp_mesh(), schedule=ALL)
        self.check_refused(inner, lambda: inner.layers.insert(0, late), "layers.0.weight")

    def test_modules_that_are_removed_are_freed(self) -> None:
        model = self.make()
        model.append(nn.Dropout(0.0))
        for _ in range(2):
            square_step(model, make_rows(0))
        removed = weakref.ref(model[-1])
        del model[-1]
        assert removed() is None
        square_step(model, make_rows(0))

    def test_scripted_modules(self) -> None:
        """Torch keeps their parameters and children in C++."""
        traced = torch.jit.trace(nn.GELU(), make_rows(0))
        for scripted in (torch.jit.script(nn.ReLU()), torch.jit.script(nn.Linear(WIDTH, WIDTH)), traced):
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH), scripted)
            gtp_shard(model, self.gtp_mesh(), schedule=ALL, ignored_params=set(scripted.parameters()))
            for _ in range(2):
                square_step(model, make_rows(0))

    def test_unfrozen_later(self) -> None:
        for is_stepped in (True, False):
            model, frozen = self.make(), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            model.append(frozen)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            square_step(model, make_rows(0))
            if is_stepped:
                optimizer.step()
            self.check_refused(model, lambda f=frozen: f.requires_grad_(True), "4.weight")

    def test_held_in_another_way(self) -> None:
        keeps: dict[str, Callable[..., Any]] = {
            "a list of 1 items": in_list,
            "a partial": lambda weight: functools.partial(torch.matmul, weight),
            "a cell": lambda weight: lambda x: x @ weight,
            "a InSlot": InSlot,
        }
        for holder, keep in keeps.items():
            model = gtp_shard(Held(keep), self.gtp_mesh(), schedule=ALL)
            with self.assertLogs("dtensor_gtp", "WARNING") as logs:
                loss = square_loss(model, make_rows(0, WIDTH))
            self.assertRegex(logs.output[0], f"{holder} still holds old parameters .*'layer.weight'")
            with self.assertRaisesRegex(RuntimeError, f"replaced by 'layer.weight'.*{holder} still uses the old one"):
                loss.backward()

    def test_in_one_memory(self) -> None:
        """Tied by ``.data``, or by a view that shall follow the weight."""
        mesh = self.gtp_mesh()
        model = small_model()
        model[3].weight.data = model[0].weight.data[: WIDTH // 2].t().t()  # a part of it
        with self.assertRaisesRegex(ValueError, "'3.weight' of shape .* lies in the memory of parameter '0.weight'"):
            gtp_shard(model, mesh, schedule=ALL)
        assert type(model) is nn.Sequential
        model.requires_grad_(False)
        gtp_shard(model, mesh, schedule=ALL)  # they stay equal
        model = small_model()
        model[1].register_buffer("view", model[0].weight.detach())
        with self.assertLogs("dtensor_gtp", "WARNING") as logs:
            gtp_shard(model, mesh, schedule=ALL)
        assert "tensor '1.view' of shape (12, 12) lies in the memory of parameter '0.weight'" in logs.output[0]
        model = small_model()
        torch.nn.utils.vector_to_parameters(torch.zeros(1000), model.parameters())  # beside each other
        with self.assertNoLogs("dtensor_gtp", "WARNING"):
            gtp_shard(model, mesh, schedule=ALL)

    def test_tied_outside_of_the_root(self) -> None:
        body, head = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        head.weight = body.weight
        gtp_shard(body, self.gtp_mesh(), schedule=ALL)
        with self.assertLogs("dtensor_gtp", "WARNING") as logs:
            loss = head(body(make_rows(0))).sum()
        assert "a Linear still holds old parameters" in logs.output[0]
        with self.assertRaisesRegex(RuntimeError, "replaced by 'weight'.*a Linear still uses the old one"):
            loss.backward()
        gtp_shard(head, self.gtp_mesh(), schedule=ALL)  # the remedy
        head(body(make_rows(0))).sum().backward()
        assert head.weight is body.weight
