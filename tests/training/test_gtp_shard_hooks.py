"""What users attach to modules and parameters: hooks, parametrizations, transforms of ``torch.func``.

Each acts as it does on the unsharded model, or is refused with what to do instead.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.utils.parametrize as parametrize
from checkpoint_common import PLAIN, check_reload, topology
from common import ALL, GlooTest, assert_same_params, full, rows_of_rank
from runtime_common import (
    WIDTH,
    Calls,
    Raw,
    assert_idle,
    check_step,
    make_rows,
    shard_copy,
    small_model,
    square_loss,
    square_step,
)
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations, prune
from torch.utils.checkpoint import checkpoint

from dtensor_gtp import gtp_shard

Values = list[tuple[str, torch.Tensor]]


class Checkpointed(nn.Module):
    """Recomputes every child, or none (None)."""

    def __init__(self, inner: nn.Sequential, use_reentrant: bool | None) -> None:
        super().__init__()
        self.inner = inner
        self.use_reentrant = use_reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * 1
        for child in self.inner:
            if self.use_reentrant is None:
                x = child(x)
            else:
                x = checkpoint(child, x.requires_grad_() if x.is_leaf else x, use_reentrant=self.use_reentrant)
        return x


def attach(root: Any) -> Values:
    """Module hooks on every module, some of which change values: the returned list notes what each is given."""
    seen: Values = []

    def keep(what: str, *trees: Any) -> None:
        leaves = torch.utils._pytree.tree_leaves(trees)
        seen.extend((what, leaf.detach().clone()) for leaf in leaves if isinstance(leaf, torch.Tensor))

    inner = root.inner
    inner[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
    inner[0].register_forward_hook(lambda m, args, output: output + 1)
    inner[1].register_forward_hook(lambda m, args, output: output.sin(), always_call=True)
    inner[3].register_full_backward_pre_hook(lambda m, grads: (grads[0] * 0.5,))
    inner[3].register_full_backward_hook(lambda m, inputs, outputs: (inputs[0] * 3,))
    for name, module in root.named_modules():
        for kind in ("forward_pre", "forward", "full_backward_pre", "full_backward"):
            options = {"with_kwargs": True} if kind == "forward_pre" else {}
            note = lambda m, *values, what=f"{kind} {name}": keep(what, values)  # noqa: E731
            getattr(module, f"register_{kind}_hook")(note, **options)
    return seen


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


def scaled() -> nn.Module:
    """A parametrization with a parameter of its own."""
    return Calls(lambda own, x: x * own.scale, scale=torch.rand(WIDTH, WIDTH) + 0.5)


def cached(own: Any, x: torch.Tensor) -> torch.Tensor:
    """Uses its parametrized weight twice, and computes it once."""
    with parametrize.cached():
        result: torch.Tensor = own.linear(torch.tanh(own.linear(x)))
    return result


def linear(*parametrized_by: nn.Module) -> nn.Module:
    module = nn.Linear(WIDTH, WIDTH)
    for each in parametrized_by:
        parametrize.register_parametrization(module, "weight", each)
    return module


def old_weight_norm(module: nn.Module) -> nn.Module:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*weight_norm.*deprecated")
        return torch.nn.utils.weight_norm(module)


def pruned() -> nn.Module:
    return prune.l1_unstructured(nn.Linear(WIDTH, WIDTH), "weight", amount=0.3)


PARAMETRIZED: dict[str, Callable[[], nn.Module]] = {
    "weight_norm": lambda: parametrizations.weight_norm(linear()),
    "weight_norm by columns": lambda: parametrizations.weight_norm(linear(), dim=1),
    "spectral_norm": lambda: parametrizations.spectral_norm(linear()),
    "orthogonal": lambda: parametrizations.orthogonal(linear()),
    "custom": lambda: linear(Symmetric()),
    "custom with a parameter": lambda: linear(scaled()),
    "two in a row": lambda: linear(scaled(), Symmetric()),
    "cached": lambda: Calls(cached, linear=parametrizations.weight_norm(linear())),
    "weight_norm by hook": lambda: old_weight_norm(linear()),
    "spectral_norm by hook": lambda: torch.nn.utils.spectral_norm(linear()),
    "pruned": pruned,
}

OTHER_MODES = {
    "weight_norm": ("compiled",),
    "spectral_norm": ("reentrant",),
    "two in a row": ("reentrant", "non-reentrant"),
    "weight_norm by hook": ("reentrant", "non-reentrant"),
    "spectral_norm by hook": ("non-reentrant",),
}


class TestHooks(GlooTest):
    world_size = 2

    def test_module_hooks_see_and_change_what_they_do_in_one_process(self) -> None:
        """Fused and generic modules, recomputed or not: as many calls, in the same order, with the same values."""
        for use_reentrant in (None, True, False):
            reference = Checkpointed(small_model(), use_reentrant)
            model = shard_copy(reference, self.gtp_mesh())
            expected, actual = attach(reference), attach(model)
            for seed in range(2):
                for module in (reference, model):  # on the same rows, so that the same values come by
                    module.zero_grad()
                    square_step(module, make_rows(seed))
                assert [what for what, _ in actual] == [what for what, _ in expected], f"reentrant {use_reentrant}"
                for (what, a), (_, b) in zip(actual, expected, strict=True):
                    torch.testing.assert_close(a, b, msg=lambda m, w=what: f"{w}: {m}")
                assert_same_params(model, reference, "grad")
                actual.clear()
                expected.clear()
            assert_idle(model)

    def test_module_hooks_that_read_the_weight(self) -> None:
        """While the model runs, a hook reads the full weight of a module, as the module itself does."""
        reference = small_model()
        model = shard_copy(reference, self.gtp_mesh())
        read: dict[str, torch.Tensor] = {}

        def note(what: str, weight: torch.Tensor) -> None:
            assert not isinstance(weight, DTensor)
            read[what] = weight.detach().clone()

        model[0].register_forward_pre_hook(lambda m, args: note("forward_pre", m.weight))
        model[0].register_forward_hook(lambda m, args, output: note("forward", m.weight))
        model[0].register_full_backward_hook(lambda m, inputs, outputs: note("backward", m.weight))
        model(make_rows(0).requires_grad_()).sum().backward()
        assert read.keys() == {"forward_pre", "forward", "backward"}
        for what, weight in read.items():
            torch.testing.assert_close(weight, reference[0].weight.detach(), msg=what)
        assert_idle(model)

    def test_global_module_hooks(self) -> None:
        reference = small_model()
        model = shard_copy(reference, self.gtp_mesh())
        names = {m: name for root in (reference, model) for name, m in root.named_modules()}
        seen: list[str] = []
        calls = []
        with contextlib.ExitStack() as stack:
            for kind in ("forward_pre", "forward", "full_backward"):
                register = getattr(torch.nn.modules.module, f"register_module_{kind}_hook")
                handle = register(lambda m, *values, kind=kind: seen.append(f"{kind} {names[m]}"))
                stack.callback(handle.remove)
            for module in (reference, model):
                square_step(module, make_rows(0))
                calls.append(list(seen))
                seen.clear()
        self.assertEqual(calls[1], calls[0])

    def test_parameter_hooks_fire_once_with_the_reduced_gradient(self) -> None:
        """Tensor hooks before the gradient is accumulated, post-accumulate-grad hooks after it, sharded or whole."""
        for use_reentrant in (None, True, False):
            reference = Checkpointed(small_model(), use_reentrant)
            model = shard_copy(reference, self.gtp_mesh())
            seen: dict[nn.Module, Values] = {reference: [], model: []}
            for root in (reference, model):
                for name, param in root.named_parameters():
                    to = seen[root]
                    param.register_hook(lambda grad, n=name, to=to: to.append((f"hook {n}", full(grad).clone())))
                    param.register_post_accumulate_grad_hook(
                        lambda p, n=name, to=to: to.append((f"accumulated {n}", full(p.grad).clone()))
                    )
            for seed in range(2):  # gradients accumulate over both
                square_step(reference, make_rows(seed))
                square_step(model, rows_of_rank(make_rows(seed), self.gtp_mesh()))
                expected, actual = (dict(seen[root]) for root in (reference, model))
                assert len(actual) == len(seen[model]), "a hook ran twice"
                assert actual.keys() == expected.keys()
                for what, value in expected.items():
                    torch.testing.assert_close(actual[what], value, msg=lambda m, w=what: f"{w}: {m}")
                for values in seen.values():
                    values.clear()

    def test_parameter_hooks_may_replace_the_gradient(self) -> None:
        reference = small_model()
        model = shard_copy(reference, self.gtp_mesh())
        for root in (reference, model):
            for param in root.parameters():
                param.register_hook(lambda grad: grad.clamp(-1e-2, 1e-2))
                param.register_hook(lambda grad: grad * 2)

        def twice(module: nn.Module, rows: torch.Tensor) -> None:
            square_step(module, rows)
            square_step(module, rows)

        check_step(reference, model, self.gtp_mesh(), make_rows(0), twice)

    def test_parametrizations(self) -> None:
        """Beside one process, in training and evaluation, eager, recomputed and compiled."""
        for name, make in PARAMETRIZED.items():
            for mode in ("eager", *OTHER_MODES.get(name, ())):
                modules = []
                for _ in range(2):  # some of them cannot be copied
                    torch.manual_seed(7)
                    use_reentrant = {"reentrant": True, "non-reentrant": False}.get(mode)
                    modules.append(Checkpointed(nn.Sequential(make(), nn.Tanh(), Raw()), use_reentrant))
                reference, model = modules
                gtp_shard(model, self.gtp_mesh(), schedule=ALL)
                if mode == "compiled":
                    torch._dynamo.reset()
                    model.inner[0].compile(backend="aot_eager", fullgraph=True)
                self.check_beside(reference, model, f"{name}, {mode}")

    def check_beside(self, reference: nn.Module, model: nn.Module, what: str) -> None:
        try:
            for seed in range(2):
                check_step(reference.train(), model.train(), self.gtp_mesh(), make_rows(seed), square_step)
                with torch.no_grad():
                    torch.testing.assert_close(model.eval()(make_rows(seed)), reference.eval()(make_rows(seed)))
        except AssertionError as error:
            raise AssertionError(f"{what}: {error}") from error

    def test_checkpoints_of_parametrizations(self) -> None:
        """What a parametrization keeps: parameters, and buffers that change in each forward (spectral norm)."""
        mesh = self.gtp_mesh()
        for name in ("weight_norm by hook", "spectral_norm", "custom with a parameter"):

            def make_model(seed: int, name: str = name) -> nn.Module:
                torch.manual_seed(seed)
                return nn.Sequential(PARAMETRIZED[name](), nn.Tanh(), Raw()).double()

            check_reload(
                make_model,
                lambda step: make_rows(step, dtype=torch.float64),
                square_loss,
                [topology(lambda model: gtp_shard(model, mesh, schedule=ALL), mesh), PLAIN],
            )

    def test_func_transforms(self) -> None:
        """Without gradients vmap runs; derivatives are refused, and what to use instead gives the right ones."""
        x = make_rows(0, rows=3)
        for make in (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), Raw):
            reference = make()
            model = shard_copy(reference, self.gtp_mesh())
            with torch.no_grad():
                torch.testing.assert_close(torch.func.vmap(model)(x), reference(x))
            transforms: dict[str, Callable[[], Any]] = {
                "grad": lambda m=model: torch.func.grad(lambda x: m(x).sum())(x),
                "vmap": lambda m=model: torch.func.vmap(m)(x),
                "jacrev": lambda m=model: torch.func.jacrev(m)(x),
                "jvp": lambda m=model: torch.func.jvp(m, (x,), (x,)),
            }
            for name, transform in transforms.items():
                message = r"torch\.func \(grad, vmap, jacrev, jvp\) .* parameter '.*' .*torch\.autograd\.grad"
                with self.assertRaisesRegex(NotImplementedError, message, msg=name):
                    transform()
            model.unshard()
            name, _ = next(model.named_parameters())
            with self.assertRaisesRegex(NotImplementedError, message):
                torch.func.grad(lambda x, m=model, name=name: (x * m.get_parameter(name).sum()).sum())(x)
            model.reshard()
            assert_idle(model)
            y = x.clone().requires_grad_()
            actual, expected = (torch.autograd.grad(m(y).square().sum(), y)[0] for m in (model, reference))
            torch.testing.assert_close(actual, expected)
            actual, expected = (torch.autograd.functional.jacobian(m, x) for m in (model, reference))
            torch.testing.assert_close(actual, expected)
            assert all(param.grad is None for param in model.parameters())
