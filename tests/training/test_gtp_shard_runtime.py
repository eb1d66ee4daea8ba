"""Passes that fail, what they leave behind, and what autograd refuses; ``test_unusual_passes.py`` has the others."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from common import ALL, GlooTest, full
from runtime_common import (
    WIDTH,
    Raw,
    assert_idle,
    check_step,
    check_steps,
    make_rows,
    runtime_of,
    shard_copy,
    small_model,
    square_loss,
    square_step,
)
from schedules import explicit
from torch.distributed.device_mesh import init_device_mesh

from dtensor_gtp import gtp_shard
from dtensor_gtp._comm import reductions

# Each gradient travels by itself, and none is waited for before the end of backward.
SEVERAL_IN_FLIGHT = explicit(min_shard_numel=0, coalesce_grad_nbytes=0, max_inflight_reduce_scatters=9)


class TestPasses(GlooTest):
    world_size = 2

    def test_what_inference_mode_has_gathered_is_no_use_for_training(self) -> None:
        """Autograd refuses to save inference tensors."""
        reference = small_model()
        model = shard_copy(reference, self.gtp_mesh(), reshard_after_forward=False)
        for seed in range(2):
            with torch.inference_mode():
                model.unshard()
                torch.testing.assert_close(model(make_rows(seed)), reference(make_rows(seed)))
            check_step(reference, model, self.gtp_mesh(), make_rows(seed), square_step, is_idle=False)
        model.reshard()
        assert_idle(model)

    def test_second_backward_without_retained_graph_raises_torchs_error(self) -> None:
        for reference in (small_model(), nn.Sequential(nn.Linear(WIDTH, WIDTH)), nn.Sequential(Raw())):
            model = shard_copy(reference, self.gtp_mesh())
            loss = square_loss(model, make_rows(0))
            loss.backward()
            grads = {name: full(param.grad).clone() for name, param in model.named_parameters()}
            with self.assertRaisesRegex(RuntimeError, "backward through the graph a second time"):
                loss.backward()
            for name, param in model.named_parameters():
                assert torch.equal(full(param.grad), grads[name]), name
            model.zero_grad()
            check_step(reference, model, self.gtp_mesh(), make_rows(0), square_step)

    def test_gradient_penalty_through_attributes(self) -> None:
        """Double backward works where the ops are those of the module itself."""

        def penalty(model: nn.Module, x: torch.Tensor) -> None:
            x = x.clone().requires_grad_()
            (grad,) = torch.autograd.grad(model(x).square().mean(), x, create_graph=True)
            (grad.square().sum(1).mean() * len(x) ** 2).backward()

        # Each row's gradient is scaled by the number of rows of the loss, which len(x) cancels.
        reference = nn.Sequential(Raw(), nn.LayerNorm(WIDTH), Raw())
        check_steps(reference, self.gtp_mesh(), penalty, tolerance={"rtol": 1e-4, "atol": 1e-4})

    def test_activation_modified_in_place_raises_as_in_plain_torch(self) -> None:
        class InPlace(Raw):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                hidden = torch.tanh(x @ self.first)
                result = hidden @ self.second
                hidden.add_(1)
                return result + hidden

        reference = InPlace()
        model = shard_copy(reference, self.gtp_mesh())
        for module in (reference, model):
            with self.assertRaisesRegex(RuntimeError, r"modified by an inplace operation: .*FloatTensor \[8, 12\]\]"):
                square_step(module, make_rows(0))

    def test_in_place_ops_that_are_allowed(self) -> None:
        class InPlace(Raw):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                hidden = (x @ self.first).exp_()
                return (hidden @ self.second).sigmoid_()

        class OfSequences(nn.Sequential):
            """The output of a linear layer with a bias is a view if its input has more than two dims."""

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x.unsqueeze(1)).squeeze(1)

        for cls in (nn.Sequential, OfSequences):
            reference = cls(InPlace(), nn.Linear(WIDTH, WIDTH), nn.ReLU(inplace=True), InPlace())
            check_steps(reference, self.gtp_mesh())

    def test_loaders_may_fork_this_process(self) -> None:
        """Between steps, and while one runs."""
        # The workers of these tests may have no children, of which they know nothing.
        self.enterContext(mock.patch.dict(multiprocessing.current_process()._config, {"daemon": False}))
        mesh = self.gtp_mesh()
        reference = small_model()
        model = check_steps(reference, mesh, seeds=[0])
        rows = torch.utils.data.TensorDataset(make_rows(1))
        loader = torch.utils.data.DataLoader(rows, batch_size=8, num_workers=1, multiprocessing_context="fork")
        for _ in range(2):
            for (batch,) in loader:
                check_step(reference, model, mesh, batch, square_step)

        def forks(module: Any, args: Any) -> None:
            (batch,) = next(iter(loader))
            self.assertEqual(batch, make_rows(1))

        with model[1].register_forward_pre_hook(forks):
            check_step(reference, model, mesh, make_rows(2), square_step)

    def check_recovery(self, *fails: Callable[[Any, torch.Tensor, Any], Any], **options: Any) -> None:
        """After each ``fail(model, rows, assert_raises)`` a step must be right."""
        reference = small_model()
        model = check_steps(reference, self.gtp_mesh(), seeds=[0], **options)

        def assert_raises() -> Any:
            return self.assertRaisesRegex(RuntimeError, "on purpose|cannot be multiplied|size of tensor")

        for seed, fail in enumerate(fails):
            fail(model, make_rows(seed), assert_raises)
            assert all(param.grad is None for param in model.parameters())
            check_step(reference, model, self.gtp_mesh(), make_rows(seed + 9), square_step)

    def test_exception_in_forward_leaves_nothing_behind(self) -> None:
        def bad_shapes(model: Any, x: torch.Tensor, assert_raises: Any) -> None:
            for module in (model, model[1]):  # a fused op, an attribute
                with assert_raises():
                    module(x[:, :5])
                assert_idle(model)

        def hooks_that_raise(model: Any, x: torch.Tensor, assert_raises: Any) -> None:
            for index in (1, 2, 3):
                for register in (model[index].register_forward_pre_hook, model[index].register_forward_hook):
                    with register(raise_on_purpose), assert_raises():
                        model(x)
                    assert_idle(model)

        self.check_recovery(bad_shapes, hooks_that_raise)

    def test_exception_in_backward_leaves_nothing_behind(self) -> None:
        def fail_in(index: int) -> Callable[[Any, torch.Tensor, Any], None]:
            def fail(model: Any, x: torch.Tensor, assert_raises: Any) -> None:
                with model[index].register_full_backward_hook(raise_on_purpose):
                    loss = square_loss(model, x)
                    with assert_raises():
                        loss.backward()

            return fail

        for reshard in (True, False):
            self.check_recovery(*map(fail_in, range(4)), reshard_after_forward=reshard)

    def test_exception_at_the_end_of_backward_leaves_nothing_behind(self) -> None:
        """When all local gradients are there: in the launch of the last reductions, or where they are waited for."""

        def fail_in(method: str) -> Callable[[Any, torch.Tensor, Any], None]:
            def fail(model: Any, x: torch.Tensor, assert_raises: Any) -> None:
                loss, runtime = square_loss(model, x), runtime_of(model)
                owner: Any = runtime.grads if method == "launch_waiting" else runtime.comm.reductions
                with (
                    mock.patch.object(owner, method, side_effect=raise_on_purpose),
                    mock.patch.object(reductions.logger, "warning") as warning,
                    assert_raises(),
                ):
                    loss.backward()
                assert_idle(model)
                told = [value for call in warning.call_args_list for value in call.args]
                assert not any(isinstance(value, BaseException) for value in told), "its frames hold gradients"

            return fail

        for schedule in (ALL, SEVERAL_IN_FLIGHT):
            self.check_recovery(fail_in("launch_waiting"), fail_in("_wait_for"), schedule=schedule)

    def test_backward_after_a_failed_backward_is_a_new_one(self) -> None:
        """Without a forward in between: the graph of the second backward was there before the first one failed."""
        mesh = self.gtp_mesh()
        reference = small_model()
        model = shard_copy(reference, mesh)

        def step(module: nn.Module, x: torch.Tensor) -> None:
            good = square_loss(module, x)
            if module is model:
                with model[1].register_full_backward_hook(raise_on_purpose):
                    failing = square_loss(model, x + 1)
                    with self.assertRaisesRegex(RuntimeError, "on purpose"):
                        failing.backward()
            good.backward()

        for seed in range(2):
            check_step(reference, model, mesh, make_rows(seed), step)
            check_step(reference, model, mesh, make_rows(seed), square_step)

    def test_weight_modified_between_forward_and_backward_raises(self) -> None:
        """As autograd raises for any saved tensor; also on a mesh of one rank, where nothing is gathered."""
        alone = init_device_mesh("cpu", (2, 1), mesh_dim_names=("rest", "gtp"))["gtp"]
        for mesh in (self.gtp_mesh(), alone):
            model = gtp_shard(small_model(), mesh, schedule=ALL)
            x = make_rows(0).requires_grad_()
            for name in ("0.weight", "1.second", "3.weight"):
                loss = square_loss(model, x)
                with torch.no_grad():
                    dict(model.named_parameters())[name].mul_(2)
                with self.assertRaisesRegex(RuntimeError, f"'{name}' is needed for gradient .* modified by an inplace"):
                    loss.backward()
            params = dict(model.named_parameters())
            for chosen, options in (
                (list(params.values()), {"fused": True}),
                ([params["1.first"]], {"foreach": True}),
                ([params["2.weight"]], {"foreach": True}),
                ([params["2.weight"]], {"fused": True}),
            ):
                optimizer = torch.optim.AdamW(chosen, **options)
                square_step(model, x)
                loss = square_loss(model, x)
                optimizer.step()
                with self.assertRaisesRegex(RuntimeError, "modified by an inplace operation"):
                    loss.backward()
            square_step(model, x)
            assert_idle(model)


def raise_on_purpose(*args: Any) -> None:
    raise RuntimeError("on purpose")
