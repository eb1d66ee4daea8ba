"""Where torch alone refuses a sharded tensor, one line says what to write; and what it says works."""

import contextlib
import copy
import io
import logging
import sys
import unittest
from typing import Any

import torch
import torch.nn as nn
from common import ALL, GlooTest, assert_same_params, fake_mesh, full, rows_of_rank
from runtime_common import make_rows, small_model, square_loss
from torch.distributed.tensor import DTensor, distribute_tensor

from dtensor_gtp import SchedulePolicy, gtp_shard, register_gtp_forward_method
from dtensor_gtp._dtensor.remedies import remedy_for
from dtensor_gtp.optim import gathered


class OfColumns(torch.optim.Optimizer):
    """Keeps plain tensors of the size of a column, as Adafactor of transformers does."""

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            torch.zeros(len(param)).add_(param.grad.mean(-1))


class OfNorms(torch.optim.Optimizer):
    """Keeps plain numbers, as NovoGrad of timm does: DTensor ends in an AssertionError without a text."""

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            torch.zeros(()).copy_(param.grad.square().sum())


class OfMaxima(torch.optim.Optimizer):
    """Asks where the largest number is: ATen refuses to on an empty shard."""

    def step(self, closure: Any = None) -> None:
        for param in self.param_groups[0]["params"]:
            param.grad.argmax()


class TestRemedies(unittest.TestCase):
    def setUp(self) -> None:
        self.mesh = self.enterContext(fake_mesh(2))

    def model(self, ignored: tuple[str, ...] = ()) -> nn.Module:
        model = nn.Sequential(nn.Embedding(10, 8), nn.Linear(8, 8))
        ignored_params = {model.get_parameter(name) for name in ignored}
        return gtp_shard(model, self.mesh, schedule=ALL, ignored_params=ignored_params)

    def wide(self) -> nn.Module:
        return gtp_shard(nn.Linear(8, 4), self.mesh, schedule=ALL)

    def check(self, remedy: str, call: Any) -> None:
        try:  # not assertRaises, which clears the frames
            call()
        except (RuntimeError, AssertionError) as error:
            found = remedy_for(error)
        else:
            self.fail("nothing was refused")
        self.assertRegex(found or "", remedy)

    def test_each_kind_of_mixture_has_a_remedy(self) -> None:
        model, ids = self.model(), torch.tensor([1, 2])
        embedding, linear = model[0], model[1]
        self.check("model.embedding", lambda: embedding.weight[ids])
        self.check("model.embedding", lambda: nn.functional.embedding(ids, embedding.weight))
        self.check("register_gtp_forward_method", lambda: torch.ones(2, 8) @ linear.weight)
        with torch.no_grad():
            self.check("distribute_tensor", lambda: linear.weight.copy_(torch.ones(8, 8)))
            self.check("with whole_weights", lambda: nn.init.sparse_(linear.weight, 0.1))
            self.check("with whole_weights", lambda: nn.init.orthogonal_(self.wide().weight))
            self.check("full_tensor", lambda: torch.empty(8, 8).copy_(linear.weight))
            self.check("DTensor found no sharding of this op", lambda: linear.weight.renorm(2, 0, 0.5))
        loss = model(ids).square().mean() + sum(param.square().sum() for param in model.parameters())
        self.check("penalty.full_tensor", loss.backward)
        model = self.model(("1.weight",))
        model(ids).sum().backward()
        self.check("a separate param group", torch.optim.AdamW(model.parameters(), foreach=True).step)
        self.check("a separate clip_grad_norm_", lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0))
        self.assertIsNone(remedy_for(RuntimeError("aten.mm.default: no")))
        of_safetensors = RuntimeError("Attempted to access the data pointer on an invalid python storage.")
        self.assertRegex(remedy_for(of_safetensors), "pretrained.save_pretrained")

    def test_an_error_that_a_program_catches_has_it(self) -> None:
        """Where it passes a frame of this package: those of a backward, of a forward, and of a registered method."""

        class Teacher(nn.Module):
            def __init__(self, other: nn.Module) -> None:
                super().__init__()
                self.layer, self.others = nn.Linear(8, 8), [other]

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.layer(x) @ self.others[0].weight

        model, ids = self.model(), torch.tensor([1, 2])
        loss = model(ids).square().mean() + sum(param.square().sum() for param in model.parameters())
        inputs = list(model.parameters())
        through_op = model(ids).mean() + sum(param.square().sum() for param in inputs)
        student = gtp_shard(Teacher(model[1]), self.mesh, schedule=ALL)
        penalty = "This backward starts from a sharded tensor, .*call penalty.full_tensor"
        cases = (
            (lambda: loss.backward(retain_graph=True), penalty),
            (lambda: loss.backward(inputs=inputs), penalty),
            (through_op.backward, penalty),
            (lambda: student(torch.ones(2, 8)), "^dtensor_gtp: Outside of the forward of its module a weight"),
        )
        for call, remedy in cases:
            with self.assertRaisesRegex(RuntimeError, "got mixed") as caught:
                call()
            (note,) = caught.exception.__notes__
            self.assertRegex(note, remedy)
            with contextlib.redirect_stderr(io.StringIO()) as printed:  # once, if nobody has caught it after all
                sys.excepthook(type(caught.exception), caught.exception, None)
            self.assertEqual(printed.getvalue().count("dtensor_gtp: "), 1)

    def test_an_optimizer_without_a_step_on_shards_names_gathered(self) -> None:
        model = self.model()
        model(torch.tensor([1, 2])).sum().backward()
        remedy = r"dtensor_gtp.optim.gathered\(optimizer_class\)"
        optimizer = torch.optim.Adafactor(model.parameters(), foreach=False)
        self.check(remedy, optimizer.step)
        with self.assertRaisesRegex(RuntimeError, "Sharding propagation failed|placement changes") as caught:
            optimizer.step()
        if (cause := caught.exception.__cause__) is not None:  # torch 2.11 raises it as it is
            self.assertRegex("".join(cause.__notes__), remedy)
        for cls in (OfColumns, OfNorms):
            self.check(remedy, cls(model.parameters(), {}).step)

    def test_a_method_that_is_not_registered_is_named(self) -> None:
        class Encoder(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.layer, self.norm, self.scale = nn.Linear(8, 8), nn.LayerNorm(8), nn.Parameter(torch.ones(8, 8))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.encode(x)

            def encode(this, x: torch.Tensor) -> torch.Tensor:
                return nn.functional.layer_norm(this.layer(x) * this.scale, (8,), this.norm.weight)

        model, x = gtp_shard(Encoder(), self.mesh, schedule=ALL), torch.ones(8, 8)
        self.check(r"encode\(\) \(register_gtp_forward_method\(module, 'encode'\)\)", lambda: model.encode(x))
        register_gtp_forward_method(model, "encode")
        torch.testing.assert_close(model.encode(x), model(x))
        self.check("^This op mixes", lambda: model.scale + x)

    def test_a_method_that_is_not_registered_and_expands_one_row_is_named(self) -> None:
        class WithToken(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.token = nn.Parameter(torch.ones(1, 8))

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return self.features(x)

            def features(self, x: torch.Tensor) -> torch.Tensor:
                return torch.cat([self.token.expand(len(x), -1), x], 1)

        model, x = gtp_shard(WithToken(), self.mesh, schedule=ALL), torch.ones(8, 8)
        remedy = r"features\(\) \(register_gtp_forward_method.*found no sharding.*full_tensor"
        self.check(remedy, lambda: model.features(x))
        optimizer = torch.optim.SGD(model.parameters())
        self.check(remedy, lambda: optimizer.step(lambda: model.features(x)))
        self.check("^DTensor found no sharding of this op", lambda: model.token.expand(8, -1))
        register_gtp_forward_method(model, "features")
        torch.testing.assert_close(model.features(x), model(x))

    def test_formats_and_numpy(self) -> None:
        model = self.model()
        model(torch.tensor([1])).sum().backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        with self.assertRaisesRegex(TypeError, r"Write f'\{norm.full_tensor\(\):.3f\}', on all ranks"):
            f"{norm:.3f}"
        self.assertEqual(f"{norm}", str(norm))
        # A fake group fills nothing: the number may be any.
        self.assertRegex(f"{norm.full_tensor():.3f}", r"^(\d+\.\d{3}|nan|inf)$")
        weight = model[1].weight
        for name in ("numpy", "tolist"):
            with self.assertRaisesRegex(RuntimeError, rf"param.full_tensor\(\).{name}\(\) on all ranks.*histogram"):
                getattr(weight.detach().cpu(), name)()
            getattr(weight.detach().full_tensor(), name)()

    def test_a_field_with_a_typing_error(self) -> None:
        with self.assertRaisesRegex(TypeError, "no field prefetch_bytes. Did you mean prefetch_nbytes?"):
            SchedulePolicy(prefetch_bytes=1)  # type: ignore[call-arg]
        with self.assertRaisesRegex(TypeError, "no field x. The fields are memory, "):
            SchedulePolicy(x=1)  # type: ignore[call-arg]

    def test_it_is_below_the_traceback(self) -> None:
        """Of an error that nobody catches, which Python hands to this hook."""
        model, printed = self.model(), io.StringIO()
        try:
            try:
                model[0].weight[torch.tensor([1, 2])]
            except RuntimeError as error:
                raise ValueError("the step failed") from error
        except ValueError as error:
            with contextlib.redirect_stderr(printed):
                sys.excepthook(type(error), error, error.__traceback__)
        self.assertRegex(
            printed.getvalue(), r"got mixed torch.Tensor and DTensor[^\n]*\n[^\n]*dtensor_gtp: Outside of the"
        )

    def test_causes_that_nobody_raised_and_causes_in_a_circle_are_printed(self) -> None:
        self.model()  # installs the hook
        circle = ValueError("the step failed")
        circle.__cause__ = circle
        made = ValueError("the step failed")
        made.__cause__ = AssertionError()
        for error in (made, circle):
            with contextlib.redirect_stderr(io.StringIO()) as printed:
                sys.excepthook(type(error), error, None)
            self.assertIn("the step failed", printed.getvalue())


class TestWhatTheySay(GlooTest):
    world_size = 2

    def test_a_penalty_and_param_groups_as_said(self) -> None:
        mesh, rows = self.gtp_mesh(), make_rows(0)
        reference = small_model()
        model = copy.deepcopy(reference)
        gtp_shard(model, mesh, schedule=ALL, ignored_params={model[0].bias})
        for trained, batch in ((reference, rows), (model, rows_of_rank(rows, mesh))):
            sharded = [param for param in trained.parameters() if param is not trained[0].bias]
            optimizer = torch.optim.AdamW([{"params": sharded}, {"params": [trained[0].bias]}], lr=0.1, foreach=True)
            for _ in range(2):
                optimizer.zero_grad()
                penalty = sum(param.square().sum() for param in sharded)
                penalty = penalty.full_tensor() if isinstance(penalty, DTensor) else penalty
                (square_loss(trained, batch) + 0.1 * penalty).backward()
                if trained is model:
                    torch.distributed.all_reduce(model[0].bias.grad)
                    model[0].bias.grad /= 2
                optimizer.step()
        assert_same_params(model, reference, "grad")
        assert_same_params(model, reference)
        value = torch.randn(model[3].weight.shape, generator=torch.Generator().manual_seed(0))
        with torch.no_grad():
            weight = model[3].weight
            weight.copy_(distribute_tensor(value, weight.device_mesh, weight.placements))
        self.assertEqual(full(model[3].weight), value)

    def test_a_step_that_fails_on_an_empty_shard_names_gathered(self) -> None:
        model = gtp_shard(nn.Linear(4, 1, bias=False), self.gtp_mesh(), schedule=ALL)
        model(torch.ones(2, 4)).sum().backward()
        if torch.distributed.get_rank() == 1:  # the other rank has the only row, and would wait
            remedy = None
            try:
                OfMaxima(model.parameters(), {}).step()
            except RuntimeError as error:
                remedy = remedy_for(error)
            self.assertRegex(remedy or "", r"dtensor_gtp.optim.gathered\(optimizer_class\)")
        gathered(OfMaxima)(model.parameters(), {}).step()

    def test_a_failed_backward_speaks_of_earlier_microbatches_only_if_there_were_some(self) -> None:
        class Failing(torch.autograd.Function):
            @staticmethod
            def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
                return x.clone()

            @staticmethod
            def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
                raise ValueError("on purpose")

        for num_unsynced in (0, 1):
            model = gtp_shard(small_model(), self.gtp_mesh(), schedule=ALL)
            for is_synced in [True] * 2 + [False] * num_unsynced:
                model.set_requires_gradient_sync(is_synced)
                model(make_rows(0)).sum().backward()
            model.set_requires_gradient_sync(True)
            with self.assertRaisesRegex(ValueError, "on purpose"):
                model(Failing.apply(make_rows(1).requires_grad_())).sum().backward()
            with self.assertLogs("dtensor_gtp", logging.WARNING) as logs:
                model(make_rows(0)).sum().backward()
            self.assertEqual("earlier microbatches" in logs.output[0], num_unsynced == 1, logs.output)
