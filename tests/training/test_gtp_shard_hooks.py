"""What users attach to modules and parameters: hooks, parametrizations, transforms of ``torch.func``.

Each acts as it does on the unsharded model, or is refused with what to do instead.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.utils.parametrize as parametrize
from checkpoint_common import PLAIN, check_reload, topology
from common import ALL, GlooTest, assert_same_params, full, rows_of_rank
from runtime_common import WIDTH, Raw, assert_idle, make_rows, shard_copy, small_model, square_loss, square_step
from torch.distributed.tensor import DTensor
from torch.nn.utils import parametrizations, prune
from torch.testing._internal.common_utils import run_tests
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


def attach(root: nn.Module, seen: Values) -> None:
    """Module hooks of every kind on every module: each notes what it is given."""

    def keep(what: str, *trees: Any) -> None:
        leaves = torch.utils._pytree.tree_leaves(trees)
        seen.extend((what, leaf.detach().clone()) for leaf in leaves if isinstance(leaf, torch.Tensor))

    for name, module in root.named_modules():
        module.register_forward_pre_hook(
            lambda m, args, kwargs, n=name: keep(f"forward_pre {n}", args, kwargs), with_kwargs=True
        )
        module.register_forward_hook(lambda m, args, output, n=name: keep(f"forward {n}", args, output))
        module.register_full_backward_pre_hook(lambda m, grads, n=name: keep(f"full_backward_pre {n}", grads))
        module.register_full_backward_hook(
            lambda m, inputs, outputs, n=name: keep(f"full_backward {n}", inputs, outputs)
        )


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


class Scaled(nn.Module):
    """A parametrization with a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.rand(WIDTH, WIDTH) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.scale


class CachedParametrization(nn.Module):
    """Uses its parametrized weight twice, and computes it once."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with parametrize.cached():
            result: torch.Tensor = self.linear(torch.tanh(self.linear(x)))
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
    "custom with a parameter": lambda: linear(Scaled()),
    "two in a row": lambda: linear(Scaled(), Symmetric()),
    "cached": CachedParametrization,
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

    # --- module hooks -------------------------------------------------------------------------------------------------

    def test_module_hooks_see_what_they_see_in_one_process(self) -> None:
        """Fused and generic modules, recomputed or not: as many calls, in the same order, with the same values."""
        mesh = self.gtp_mesh()
        for use_reentrant in (None, True, False):
            torch.manual_seed(0)
            reference = Checkpointed(small_model(), use_reentrant)
            model = shard_copy(reference, mesh)
            expected: Values = []
            actual: Values = []
            attach(reference, expected)
            attach(model, actual)
            for seed in range(2):
                # The same rows as this rank has, so that the same values come by.
                rows = rows_of_rank(make_rows(seed), mesh)
                for module in (reference, model):
                    square_step(module, rows)
                assert [what for what, _ in actual] == [what for what, _ in expected], f"reentrant {use_reentrant}"
                for (what, a), (_, b) in zip(actual, expected, strict=True):
                    torch.testing.assert_close(a, b, msg=lambda m, w=what: f"{w}: {m}")
                actual.clear()
                expected.clear()
            assert_idle(model)

    def test_module_hooks_may_change_values(self) -> None:
        mesh = self.gtp_mesh()

        def attach(root: Any) -> None:
            inner = root.inner
            inner[0].register_forward_pre_hook(lambda m, args: (args[0] * 2,))
            inner[0].register_forward_hook(lambda m, args, output: output + 1)
            inner[1].register_forward_hook(lambda m, args, output: output.sin(), always_call=True)
            inner[3].register_full_backward_pre_hook(lambda m, grads: (grads[0] * 0.5,))
            inner[3].register_full_backward_hook(lambda m, inputs, outputs: (inputs[0] * 3,))

        for use_reentrant in (None, True, False):
            torch.manual_seed(1)
            reference = Checkpointed(small_model(), use_reentrant)
            model = shard_copy(reference, mesh)
            attach(reference)
            attach(model)
            for seed in range(2):
                square_step(reference, make_rows(seed))
                square_step(model, rows_of_rank(make_rows(seed), mesh))
                assert_same_params(model, reference, "grad")
                reference.zero_grad()
                model.zero_grad()

    def test_module_hooks_that_read_the_weight(self) -> None:
        """While the model runs, a hook reads the full weight of a module, as the module itself does."""
        torch.manual_seed(2)
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
        torch.manual_seed(3)
        reference = small_model()
        model = shard_copy(reference, self.gtp_mesh())
        names = {m: name for root in (reference, model) for name, m in root.named_modules()}
        seen: list[str] = []
        handles = [
            torch.nn.modules.module.register_module_forward_pre_hook(lambda m, args: seen.append(f"pre {names[m]}")),
            torch.nn.modules.module.register_module_forward_hook(lambda m, a, o: seen.append(f"forward {names[m]}")),
            torch.nn.modules.module.register_module_full_backward_hook(
                lambda m, inputs, outputs: seen.append(f"backward {names[m]}")
            ),
        ]
        calls = []
        for module in (reference, model):
            square_step(module, make_rows(0))
            calls.append(list(seen))
            seen.clear()
        for handle in handles:
            handle.remove()
        self.assertEqual(calls[1], calls[0])

    def test_hooks_of_activations(self) -> None:
        mesh = self.gtp_mesh()
        torch.manual_seed(4)
        reference = small_model()
        model = shard_copy(reference, mesh)
        seen: list[torch.Tensor] = []
        for module in (reference, model):
            x = module[1](module[0](rows_of_rank(make_rows(0), mesh)))
            x.register_hook(lambda grad: seen.append(grad.clone()))
            x.register_hook(lambda grad: grad * 2)
            square_loss(module[3], x).backward()
        torch.testing.assert_close(seen[1], seen[0])

    # --- hooks of parameters ------------------------------------------------------------------------------------------

    def test_parameter_hooks_fire_once_with_the_reduced_gradient(self) -> None:
        """Tensor hooks before the gradient is accumulated, post-accumulate-grad hooks after it, sharded or whole."""
        mesh = self.gtp_mesh()
        for use_reentrant in (None, True, False):
            torch.manual_seed(5)
            reference = Checkpointed(small_model(), use_reentrant)
            model = shard_copy(reference, mesh)
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
                square_step(model, rows_of_rank(make_rows(seed), mesh))
                expected, actual = (dict(seen[root]) for root in (reference, model))
                assert len(actual) == len(seen[model]), "a hook ran twice"
                assert actual.keys() == expected.keys()
                for what, value in expected.items():
                    torch.testing.assert_close(actual[what], value, msg=lambda m, w=what: f"{w}: {m}")
                for values in seen.values():
                    values.clear()

    def test_parameter_hooks_may_replace_the_gradient(self) -> None:
        mesh = self.gtp_mesh()
        torch.manual_seed(6)
        reference = small_model()
        model = shard_copy(reference, mesh)
        for root in (reference, model):
            for param in root.parameters():
                param.register_hook(lambda grad: grad.clamp(-1e-2, 1e-2))
                param.register_hook(lambda grad: grad * 2)
        for _ in range(2):
            square_step(reference, make_rows(0))
            square_step(model, rows_of_rank(make_rows(0), mesh))
        assert_same_params(model, reference, "grad")

    # --- parametrizations ---------------------------------------------------------------------------------------------

    def test_parametrizations(self) -> None:
        """Beside one process, in training and evaluation, eager, recomputed and compiled."""
        mesh = self.gtp_mesh()
        for name, make in PARAMETRIZED.items():
            for mode in ("eager", *OTHER_MODES.get(name, ())):
                modules = []
                for _ in range(2):  # some of them cannot be copied
                    torch.manual_seed(7)
                    use_reentrant = {"reentrant": True, "non-reentrant": False}.get(mode)
                    modules.append(Checkpointed(nn.Sequential(make(), nn.Tanh(), Raw()), use_reentrant))
                reference, model = modules
                gtp_shard(model, mesh, schedule=ALL)
                if mode == "compiled":
                    torch._dynamo.reset()
                    model.inner[0].compile(backend="aot_eager", fullgraph=True)
                self.check_beside(reference, model, f"{name}, {mode}")

    def check_beside(self, reference: nn.Module, model: nn.Module, what: str) -> None:
        mesh = self.gtp_mesh()
        for seed in range(2):
            rows = make_rows(seed)
            square_step(reference, rows)
            square_step(model, rows_of_rank(rows, mesh))
            try:
                assert_same_params(model, reference, "grad")
                for module in (reference, model):
                    torch.optim.SGD(module.parameters(), lr=0.1).step()
                    module.zero_grad()
                assert_same_params(model, reference)
                with torch.no_grad():
                    torch.testing.assert_close(model.eval()(rows), reference.eval()(rows))
            except AssertionError as error:
                raise AssertionError(f"{what}: {error}") from error
            reference.train()
            model.train()

    def test_checkpoints_of_parametrizations(self) -> None:
        """What a parametrization keeps: parameters, and buffers that change in each forward (spectral norm)."""
        mesh = self.gtp_mesh()
        for name in ("weight_norm", "weight_norm by hook", "spectral_norm", "custom with a parameter"):

            def make_model(seed: int, name: str = name) -> nn.Module:
                torch.manual_seed(seed)
                return nn.Sequential(PARAMETRIZED[name](), nn.Tanh(), Raw()).double()

            check_reload(
                make_model,
                lambda step: make_rows(step, dtype=torch.float64),
                square_loss,
                [topology(lambda model: gtp_shard(model, mesh, schedule=ALL), mesh), PLAIN],
            )

    def test_parametrizations_after_sharding_are_refused(self) -> None:
        """They replace the sharded parameter by others, at which no gradient is reduced."""
        ways: dict[str, Callable[[nn.Module], Any]] = {
            "weight_norm": parametrizations.weight_norm,
            "custom": lambda module: parametrize.register_parametrization(module, "weight", Symmetric()),
            "weight_norm by hook": old_weight_norm,
            "spectral_norm by hook": torch.nn.utils.spectral_norm,
        }
        for name, apply in ways.items():
            for is_used_before in (False, True):
                model = gtp_shard(nn.Sequential(nn.Linear(WIDTH, WIDTH)), self.gtp_mesh(), schedule=ALL)
                if is_used_before:
                    model(make_rows(0))
                apply(model[0])
                message = r"'0\..*weight.*' .* was added after gtp_shard.*Change the module before"
                with self.assertRaisesRegex(RuntimeError, message, msg=name):
                    model(make_rows(0))

    # --- torch.func ---------------------------------------------------------------------------------------------------

    def test_func_transforms(self) -> None:
        """Without gradients vmap runs; derivatives are refused, and what to use instead gives the right ones."""
        x = make_rows(0, rows=3)
        for make in (lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()), Raw):
            torch.manual_seed(8)
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
            assert_idle(model)
            y = x.clone().requires_grad_()
            actual, expected = (torch.autograd.grad(m(y).square().sum(), y)[0] for m in (model, reference))
            torch.testing.assert_close(actual, expected)
            actual, expected = (torch.autograd.functional.jacobian(m, x) for m in (model, reference))
            torch.testing.assert_close(actual, expected)
            assert all(param.grad is None for param in model.parameters())

    def test_func_derivatives_of_parameters_are_refused(self) -> None:
        model = gtp_shard(small_model(), self.gtp_mesh(), schedule=ALL)
        values = {name: param.detach() for name, param in model.named_parameters()}
        with self.assertRaisesRegex(RuntimeError, "was replaced after gtp_shard by .* without functional_call"):
            torch.func.grad(lambda v: torch.func.functional_call(model, v, (make_rows(0),)).sum())(values)


if __name__ == "__main__":
    run_tests()
