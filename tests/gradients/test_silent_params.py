"""What users do to parameters between and around steps: each counts as in one process, or is refused by name."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from common import ALL, GlooTest, assert_same_params, rows_of_rank
from runtime_common import WIDTH, Raw, make_rows, shard_copy, small_model, square_loss
from schedules import explicit
from torch.autograd.graph import register_multi_grad_hook
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.distributed.tensor import DTensor, Replicate
from torch.func import functional_call

from dtensor_gtp import SchedulePolicy, gtp_shard


class TestReplacedParameters(GlooTest):
    world_size = 2

    def replaced(self) -> tuple[nn.Module, dict[str, Any]]:
        """A model, and other parameters for it."""
        model = gtp_shard(small_model(), self.gtp_mesh(), schedule=ALL)
        return model, {name: nn.Parameter(param.detach() * 2) for name, param in model.named_parameters()}

    def test_load_between_forward_and_backward(self) -> None:
        model, others = self.replaced()
        loss = square_loss(model, make_rows(0))
        model.load_state_dict(others, assign=True)
        square_loss(model, make_rows(0))  # the new parameters are in use
        with self.assertRaisesRegex(RuntimeError, "'.*' of shape .* was replaced between a forward and its backward"):
            loss.backward()
        square_loss(model, make_rows(0)).backward()

    def test_each_use_notes_it(self) -> None:
        """Also where the weight has no part in the gradient of the input, and whole parameters."""
        for made in (nn.Linear(WIDTH, WIDTH, bias=False), nn.Embedding(8, WIDTH), nn.LayerNorm(WIDTH), Raw()):
            model = gtp_shard(made, self.gtp_mesh(), schedule=ALL)
            given = torch.tensor([1, 2]) if isinstance(model, nn.Embedding) else make_rows(0)
            loss = model(given).square().mean()
            state = {name: nn.Parameter(param.detach() * 2) for name, param in model.named_parameters()}
            model.load_state_dict(state, assign=True)
            model(given)
            with self.assertRaisesRegex(RuntimeError, "was replaced between a forward and its backward"):
                loss.backward()

    def test_functional_call_beside_a_forward(self) -> None:
        model, others = self.replaced()
        x = make_rows(0)
        loss = square_loss(model, x)
        beside = functional_call(model, others, (x,)).square().mean()
        with self.assertRaisesRegex(RuntimeError, "functional_call with other parameters"):
            (loss + beside).backward()
        model.zero_grad()
        torch.manual_seed(0)
        functional_call(model, others, (x,)).square().mean().backward()
        assert all(param.grad is not None for param in others.values())
        assert all(param.grad is None for param in model.parameters())


def two_blocks() -> nn.Module:
    """They are groups."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2)))


class TestParameterHooks(GlooTest):
    world_size = 2

    def test_hooks_from_before_sharding_run(self) -> None:
        torch.manual_seed(0)
        reference = small_model()
        model, seen = copy.deepcopy(reference), []
        handles = []
        for each in (reference, model):
            for name, param in each.named_parameters():
                handles.append(param.register_hook(lambda grad: grad * 2))
                handles.append(param.register_post_accumulate_grad_hook(lambda param, n=name: seen.append(n)))
        gtp_shard(model, self.gtp_mesh(), schedule=ALL)
        x = make_rows(0)
        square_loss(reference, x).backward()
        square_loss(model, rows_of_rank(x, self.gtp_mesh())).backward()
        assert_same_params(model, reference, "grad")
        assert sorted(seen) == sorted(2 * list(dict(model.named_parameters())))
        for handle in handles:
            handle.remove()
        seen.clear()
        model.zero_grad()
        reference.zero_grad()
        square_loss(reference, x).backward()
        square_loss(model, rows_of_rank(x, self.gtp_mesh())).backward()
        assert_same_params(model, reference, "grad")
        assert not seen

    def test_hooks_of_several_parameters_are_refused(self) -> None:
        """They count nodes of autograd's graph, in which no sharded parameter is."""
        for schedule, make in ((ALL, small_model), (SchedulePolicy(min_shard_numel=0), two_blocks)):
            model = gtp_shard(make(), self.gtp_mesh(), schedule=schedule)
            handle = register_multi_grad_hook(list(model.parameters()), lambda grads: None)
            with self.assertRaisesRegex(RuntimeError, "register_multi_grad_hook.*register_post_accumulate_grad_hook"):
                square_loss(model, make_rows(0)).backward()
            handle.remove()
            square_loss(model, make_rows(0)).backward()
            assert all(param.grad is not None for param in model.parameters())

    def test_hooks_at_the_node_of_a_parameter_are_refused(self) -> None:
        """Its node gets no gradient any more. The optimizer in backward of torch.distributed registers such hooks."""
        for name in ("0.weight", "2.bias"):
            for register in ("register_hook", "register_prehook"):
                model = small_model()
                param = model.get_parameter(name)
                node = param.expand_as(param).grad_fn.next_functions[0][0]
                handle = getattr(node, register)(lambda *grads: None)
                with self.assertRaisesRegex(ValueError, f"hook on the autograd node.*'{name}'.*post_accumulate"):
                    gtp_shard(model, self.gtp_mesh(), schedule=ALL)
                assert model.get_parameter(name) is param
                handle.remove()
                square_loss(gtp_shard(model, self.gtp_mesh(), schedule=ALL), make_rows(0)).backward()

    def test_hooks_at_the_node_of_a_sharded_parameter_are_refused(self) -> None:
        """As optimizers in backward register them: in the next forward that looks at all of them."""
        message = "no hook on the autograd node.*'0.weight'.*register_post_accumulate_grad_hook"
        for schedule in (ALL, SchedulePolicy(min_shard_numel=0)):
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
                result: torch.Tensor = self.layer(x)
                return result

        model = gtp_shard(Hooked(), self.gtp_mesh(), schedule=ALL)
        with self.assertRaisesRegex(RuntimeError, "hook on .*'layer.weight'.* named_parameters"):
            model(make_rows(0))
        seen: list[torch.Tensor] = []
        model = gtp_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH)), self.gtp_mesh(), schedule=ALL)
        next(model.parameters()).register_hook(lambda grad: seen.append(grad))
        square_loss(model, make_rows(0)).backward()
        assert len(seen) == 1


class TestFreezing(GlooTest):
    world_size = 2

    def test_gradients_of_a_weight_that_is_frozen_later(self) -> None:
        """A microbatch without sync trains the weight; the one that syncs does not."""
        mesh = self.gtp_mesh()
        torch.manual_seed(0)
        for names in (["0.weight"], ["0.bias"], ["1.first", "2.bias"]):
            for switch in ("set_requires_gradient_sync", "set_is_last_backward"):
                reference = small_model()
                model = shard_copy(reference, mesh)
                for step, is_last in enumerate((False, True)):
                    x = make_rows(step)
                    getattr(model, switch)(is_last)
                    for each, rows in ((model, rows_of_rank(x, mesh)), (reference, x)):
                        for name in names:
                            each.get_parameter(name).requires_grad_(not is_last)
                        square_loss(each, rows).backward()
                assert_same_params(model, reference, "grad")

    def test_frozen_between_forward_and_backward(self) -> None:
        mesh, x = self.gtp_mesh(), make_rows(0)
        torch.manual_seed(0)
        reference = small_model()
        model = shard_copy(reference, mesh)
        for each, rows in ((model, rows_of_rank(x, mesh)), (reference, x)):
            loss = square_loss(each, rows)
            for name in ("0.weight", "0.bias", "1.first"):
                each.get_parameter(name).requires_grad_(False)
            loss.backward()
        assert_same_params(model, reference, "grad")


class TestDirectReads(GlooTest):
    world_size = 2

    def test_whole_parameter_read_outside_of_forward(self) -> None:
        """Its gradient is averaged as that of uses in forward."""
        mesh = self.gtp_mesh()
        torch.manual_seed(0)
        for is_frozen_before in (False, True):
            reference = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
            model = shard_copy(reference, mesh)
            for each in (model, reference):
                each[1].weight.requires_grad_(not is_frozen_before)
                square_loss(each, make_rows(9))
                each[1].weight.requires_grad_(True)
            for step in range(2):
                x = make_rows(step)
                for each, rows in ((model, rows_of_rank(x, mesh)), (reference, x)):
                    scale = each[1].weight
                    scale = scale.full_tensor() if isinstance(scale, DTensor) else scale
                    (each(rows) * scale + rows * scale.exp()).square().mean().backward()
                assert_same_params(model, reference, "grad")
            for each, rows in ((model, rows_of_rank(x, mesh)), (reference, x)):  # without any forward
                each.zero_grad()
                scale = each[1].weight
                scale = scale.full_tensor() if isinstance(scale, DTensor) else scale
                (rows * scale).square().mean().backward()
            assert_same_params(model, reference, "grad")

    def test_sharded_parameter_read_outside_of_forward(self) -> None:
        """As whole ones: single weights and groups, over replicas, without sync, and beside a use in forward."""

        def loss(each: nn.Module, rows: torch.Tensor) -> torch.Tensor:
            weight, first = full_of(each[0].weight), full_of(each[1].first)
            y = each(rows) + rows @ weight @ first
            return y.square().mean() + weight.square().sum() + first.exp().mean()

        def full_of(param: torch.Tensor) -> torch.Tensor:
            return param.full_tensor() if isinstance(param, DTensor) else param

        for mesh, schedule in (
            (self.gtp_mesh(), ALL),
            (self.gtp_mesh(), SchedulePolicy(min_shard_numel=0)),
            (self.hsdp_mesh(2), ALL),
        ):
            torch.manual_seed(0)
            reference = nn.Sequential(nn.Linear(WIDTH, WIDTH), Raw())
            model = shard_copy(reference, mesh, schedule=schedule)
            for step, is_last in enumerate((True, False, True)):
                x = make_rows(step)
                model.set_requires_gradient_sync(is_last)
                loss(model, rows_of_rank(x, mesh)).backward()
                loss(reference, x).backward()
                if is_last:
                    assert_same_params(model, reference, "grad")
            model.zero_grad()
            with torch.no_grad():
                torch.testing.assert_close(model[0].weight.full_tensor(), reference[0].weight)

    def test_full_tensors_for_which_a_kernel_has_no_gradient(self) -> None:
        """As TRL's distillation reads the head of a teacher that was not frozen: sharded and whole parameters."""
        mesh, x = self.gtp_mesh(), make_rows(0)
        torch.manual_seed(0)
        reference = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        model, teacher = shard_copy(reference, mesh), shard_copy(reference, mesh)
        for each, head, rows in ((model, teacher, rows_of_rank(x, mesh)), (reference, reference, x)):
            read = [head[0].weight, head[0].bias, head[1].weight]
            whole = [param.full_tensor() if isinstance(param, DTensor) else param.detach() for param in read]
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
        result: torch.Tensor = self.kept(self.layer(x))
        return result


class InList:
    def __init__(self, weight: nn.Parameter) -> None:
        self.weights = [weight]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights[0]


class InClosure:
    def __init__(self, weight: nn.Parameter) -> None:
        self.call = lambda x: x @ weight

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.call(x)


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

    def test_unfrozen_later(self) -> None:
        for switch in ("step", "by hand"):
            model, frozen = self.make(), nn.Linear(WIDTH, WIDTH).requires_grad_(False)
            model.append(frozen)
            x = make_rows(0)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            square_loss(model, x).backward()
            if switch == "step":
                optimizer.step()
            self.check_refused(model, lambda f=frozen: f.requires_grad_(True), "4.weight")

    def test_held_in_another_way(self) -> None:
        keeps: dict[str, Callable[..., Any]] = {
            "a list of 1 items": InList,
            "a partial": lambda weight: functools.partial(torch.matmul, weight),
            "a cell": InClosure,
            "a InSlot": InSlot,
        }
        for holder, keep in keeps.items():
            model = gtp_shard(Held(keep), self.gtp_mesh(), schedule=ALL)
            x = torch.randn(WIDTH, WIDTH)
            with self.assertLogs("dtensor_gtp", "WARNING") as logs:
                loss = square_loss(model, x)
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


class Heads(nn.Module):
    """Small parameters of several kinds, of which each rank uses some."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList([nn.Linear(WIDTH, 2, bias=False) for _ in range(3)])
        self.norms = nn.ModuleList([nn.LayerNorm(WIDTH) for _ in range(3)])
        self.unused = nn.Parameter(torch.randn(3))

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        result: torch.Tensor = self.heads[number](self.norms[number](self.trunk(x)))
        return result


class TestOtherParametersOnOtherRanks(GlooTest):
    world_size = 2

    def test_ranks_use_different_small_heads(self) -> None:
        mesh = self.gtp_mesh()
        torch.manual_seed(0)
        reference = Heads()
        model = gtp_shard(copy.deepcopy(reference), mesh, schedule=explicit(min_shard_numel=64))
        assert "heads.0.weight" in {name for name, p in model.named_parameters() if p.placements == (Replicate(),)}
        optimizers = [torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, reference)]
        rank = mesh.get_local_rank()
        for step in range(4):
            rows = [make_rows(2 * step + number) for number in range(2)]
            heads = [(0, 1), (1, 0), (2, 2), (0, 2)][step]
            for is_last in (False, True):  # a microbatch without sync, too
                model.set_requires_gradient_sync(is_last)
                model(rows[rank], heads[rank]).square().mean().backward()
                for number in range(2):
                    (reference(rows[number], heads[number]).square().mean() / 2).backward()
            assert_same_params(model, reference, "grad")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same_params(model, reference)
