"""Weights in places where models rarely have them, and what happens in the middle of a pass: views in another dtype,
tables that are convolved, optimizer steps within a forward, hooks that raise, an optimizer for each parameter."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, GROUPS, GlooTest, assert_same_params, full, rows_of_rank
from runtime_common import WIDTH, Calls, check_steps, make_rows, members_of, runtime_of, shard_copy, square_loss
from schedules import explicit
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from dtensor_gtp import SchedulePolicy, gtp_shard
from dtensor_gtp._modules.binding import binding_of
from dtensor_gtp._schedule.members import Members


def filtered(own: Any, x: torch.Tensor) -> torch.Tensor:
    """By a filter of frequencies whose complex weight is kept as pairs of real numbers, as GFNet has it."""
    spectrum = torch.fft.fft(x) * torch.view_as_complex(own.weight)
    return torch.fft.ifft(spectrum * torch.view_as_complex(own.weight).conj()).real


def convolved_table(weight_of: Callable[[torch.Tensor], torch.Tensor], is_trained: bool) -> nn.Module:
    """A table that is the input of a convolution; ``weight_of`` is what is done with it before."""

    def convolved(own: Any, x: torch.Tensor) -> torch.Tensor:
        y = F.conv1d(weight_of(own.table)[None], own.filters, padding=1)
        return x + own.out(y[0].t()).mean(0)

    table = nn.Parameter(torch.randn(WIDTH, 6), requires_grad=is_trained)
    return Calls(convolved, table=table, filters=torch.randn(4, WIDTH, 3), out=nn.Linear(4, WIDTH))


def convolved_with_itself(own: Any, x: torch.Tensor) -> torch.Tensor:
    """A filter whose correlation with itself, as a constant, is penalized (orthogonality of filters)."""
    return x * F.conv1d(own.weight.detach(), own.weight, padding=2).sum(0).mean(1)


def sliced(own: Any, x: torch.Tensor) -> torch.Tensor:
    """Three weights in one parameter, of which each is used by itself."""
    first, second, third = own.weight.chunk(3)
    return F.linear(x, first) * F.linear(x, second).tanh() + F.linear(x, third)


class Containers(nn.Module):
    """Makes containers of parameters in its forward, of parts of others and of single parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.listed = nn.ParameterList(torch.randn(WIDTH, WIDTH) / 4 for _ in range(3))
        self.named = nn.ParameterDict({"a": torch.randn(WIDTH, WIDTH) / 4})
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in (*self.listed[:2], *nn.ParameterList([self.listed[2], self.weight])):
            x = torch.tanh(x @ weight)
        rest = self.listed[1:]
        rest.append(self.weight)
        both = self.named | {"b": self.weight}
        return x @ self.named.copy()["a"] + x @ both["a"] @ both["b"] @ rest[-1] @ rest[0]


def sparse_lookup(own: Any, x: torch.Tensor) -> torch.Tensor:
    """The gradient of one process is dense, because fused SGD takes no other."""
    ids = (x[:, 0] * 3).long() % WIDTH
    return x + F.embedding(ids, own.table, sparse=binding_of(own) is not None) @ own.weight


def seen_by_numpy(own: Any, x: torch.Tensor) -> torch.Tensor:
    return x @ own.table.t() @ own.weight / float(own.weight.detach().numpy().max() + 9.0)


def as_jagged(own: Any, x: torch.Tensor) -> torch.Tensor:
    """Samples of different lengths, as a nested tensor, through a layer."""
    nested = torch.nested.as_nested_tensor([x[:1], x[1:]], layout=torch.jagged)
    return own.layer(nested).values() + own.layer(x.to_sparse())


class StepsWithin(nn.Module):
    """Trains a weight in the middle of a forward that has read it, and reads it again."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.optimizer: torch.optim.Optimizer | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = x @ self.weight
        if self.optimizer is not None:
            before.square().mean().backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        return x @ self.weight


def linears(number: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(number)))


class TestReads(GlooTest):
    world_size = 2

    def test_views_slices_and_convolved_tables(self) -> None:
        """Backward needs the very rows that forward has used: what is saved of a slice begins in the middle."""
        for model in (
            Calls(filtered, weight=torch.randn(WIDTH, 2)),
            Calls(sliced, weight=torch.randn(3 * WIDTH, WIDTH) / WIDTH),
            convolved_table(torch.clone, is_trained=True),
            convolved_table(lambda table: table, is_trained=True),
            convolved_table(lambda table: table, is_trained=False),
            convolved_table(torch.detach, is_trained=True),
            Calls(convolved_with_itself, weight=torch.randn(WIDTH, 2, 3)),
        ):
            reference = nn.Sequential(nn.Linear(WIDTH, WIDTH), model, nn.Linear(WIDTH, WIDTH))
            check_steps(reference, self.gtp_mesh(), tolerance={"atol": 1e-4, "rtol": 1e-4})

    def test_containers_that_a_forward_makes(self) -> None:
        """Torch makes new parameters of tensors that are none, which no gradient leaves."""
        for schedule in (ALL, GROUPS):
            check_steps(nn.Sequential(*(Containers() for _ in range(2))), self.gtp_mesh(), schedule=schedule)
        frozen = gtp_shard(Containers().requires_grad_(False), self.gtp_mesh(), schedule=ALL)
        self.assertFalse(frozen(torch.ones(2, WIDTH)).requires_grad)
        plain = nn.ParameterList([torch.ones(2), torch.ones(2, requires_grad=True) * 2])
        self.assertTrue(all(isinstance(param, nn.Parameter) and param.is_leaf for param in plain))

    def test_sparse_gradients_numpy_and_inputs_that_are_not_dense(self) -> None:
        for make in (
            lambda: Calls(sparse_lookup, table=torch.randn(WIDTH, WIDTH), weight=torch.randn(WIDTH, WIDTH)),
            lambda: Calls(seen_by_numpy, table=torch.randn(WIDTH, WIDTH), weight=torch.randn(WIDTH, WIDTH)),
            lambda: Calls(as_jagged, layer=nn.Linear(WIDTH, WIDTH), weight=torch.ones(2, 2)),
        ):
            for schedule in (ALL, GROUPS, explicit(), SchedulePolicy()):  # sharded, and whole in groups or not
                check_steps(nn.Sequential(*(make() for _ in range(3))), self.gtp_mesh(), schedule=schedule)

    def test_step_in_the_middle_of_a_forward(self) -> None:
        mesh = self.gtp_mesh()
        reference = StepsWithin()
        model = shard_copy(reference, mesh)
        batch = make_rows(0)
        for one in (reference, model):
            one.optimizer = torch.optim.SGD(one.parameters(), lr=0.1)
        expected, actual = reference(batch), model(rows_of_rank(batch, mesh))
        assert_same_params(model, reference)
        torch.testing.assert_close(actual, rows_of_rank(expected, mesh))

    def test_ranks_that_begin_with_other_values_are_refused(self) -> None:
        """On all ranks, by name: a bias that one rank has drawn alone, and a weight along replicas."""
        told = "'{}' of shape .* has different values on ranks .* with the same seed on all ranks"
        for mesh, name in ((self.gtp_mesh(), "1.bias"), (self.hsdp_mesh(), "1.bias"), (self.hsdp_mesh(), "0.weight")):
            model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
            with torch.no_grad():
                model.get_parameter(name).add_(float(self.rank == 1))
            gtp_shard(model, mesh, schedule=ALL)
            with self.assertRaisesRegex(RuntimeError, told.format(name)):
                model(torch.ones(1, WIDTH))
            with torch.no_grad():
                param = model.get_parameter(name)
                for axis in reversed(range(mesh.ndim)) if name == "1.bias" else (0,):
                    dist.broadcast(param.to_local(), group_src=0, group=mesh.get_group(axis))
            model(torch.ones(1, WIDTH))

    def test_unsharded_parameters_outside_of_a_forward(self) -> None:
        """Weights and parameters that stay whole read as what code computes with, and train."""
        reference = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH))
        model = shard_copy(reference, self.gtp_mesh())
        batch = make_rows(0)

        def loss_of(one: nn.Sequential, rows: torch.Tensor) -> torch.Tensor:
            linear, norm = one
            y = F.linear(rows, linear.weight, linear.bias)
            return F.layer_norm(y, (WIDTH,), norm.weight, norm.bias).pow(3).mean()

        model.unshard()
        for _ in range(2):
            for one, rows in ((reference, batch), (model, rows_of_rank(batch, self.gtp_mesh()))):
                loss_of(one, rows).backward()
        assert_same_params(model, reference, "grad")
        self.assertTrue(all(isinstance(param, DTensor) for param in model.parameters()))
        model.reshard()
        self.assertIsInstance(model[1].bias, DTensor)

    def test_a_broken_backward_says_what_else_is_lost(self) -> None:
        x = rows_of_rank(make_rows(0), self.gtp_mesh())
        for is_synced in (True, False):
            model = gtp_shard(linears(2), self.gtp_mesh(), schedule=ALL)
            model.set_requires_gradient_sync(is_synced)
            square_loss(model, x).backward()
            output = model(x)
            output.register_hook(lambda _: 1 / 0)
            with self.assertRaises(ZeroDivisionError):
                output.sum().backward()
            model.set_requires_gradient_sync(True)
            with self.assertLogs("dtensor_gtp._schedule.runtime", "WARNING") as logs:
                model(x)
            self.assertEqual("with those of earlier microbatches that were not synced" in logs.output[0], not is_synced)

    def test_an_optimizer_for_each_parameter(self) -> None:
        """Each step costs what it updates, and parameters that were replaced are known."""
        reference = linears(3)
        model = shard_copy(reference, self.gtp_mesh())
        model.set_reshard_after_backward(False)  # stays gathered: a step that is not seen leaves old weights
        batch = make_rows(0)
        for round_ in range(2):
            if round_:
                model.load_state_dict({n: p.detach().clone() for n, p in model.state_dict().items()}, assign=True)
            pairs = [[torch.optim.SGD([p], lr=0.1) for p in one.parameters()] for one in (reference, model)]
            for _ in range(2):
                square_loss(reference, batch).backward()
                square_loss(model, rows_of_rank(batch, self.gtp_mesh())).backward()
                for optimizer in (*pairs[0], *pairs[1]):
                    optimizer.step()
                    optimizer.zero_grad()
                assert_same_params(model, reference)
                torch.testing.assert_close(full(model(batch)), reference(batch))
        others = [nn.Parameter(torch.ones(1)) for _ in range(2)]
        own = [torch.optim.SGD([p], lr=0.1) for p in model.parameters()]
        with mock.patch.object(Members, "params", new_callable=mock.PropertyMock) as walked:
            for optimizer in (*own, *(torch.optim.SGD([other], lr=0.1) for other in others)):
                optimizer.step()
        walked.assert_not_called()

    def test_steps_are_told_to_the_runtime_that_has_taken_over(self) -> None:
        """To it alone: the earlier one would not know which parameters were replaced since."""
        model = linears(2)
        gtp_shard(model[0], self.gtp_mesh(), schedule=ALL)
        earlier = runtime_of(model[0])
        gtp_shard(model, self.gtp_mesh(), schedule=ALL)
        with mock.patch.object(earlier, "note_step") as told:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
        told.assert_not_called()
        self.assertEqual([weight.versions.num_updates for weight in members_of(model).weights], [1, 1])

    def test_a_step_on_what_was_replaced_and_unsharded_before_any_forward(self) -> None:
        model = gtp_shard(nn.Linear(WIDTH, WIDTH, bias=False), self.gtp_mesh(), schedule=ALL)
        model(torch.ones(1, WIDTH)).sum().backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        model.load_state_dict({n: p.detach().clone() for n, p in model.state_dict().items()}, assign=True)
        model.unshard()
        (param,) = model.parameters()
        expected = full(param).detach() - 0.5
        param.grad = torch.full_like(param, 0.5)
        torch.optim.SGD([param], lr=1.0, fused=True).step()  # which leaves no trace in the tensor
        torch.testing.assert_close(model(torch.eye(WIDTH)), expected.t())

    def test_tie_to_a_module_of_several_calls(self) -> None:
        """One runtime serves them all: with two, both would reduce the weight that they share."""
        alone = explicit(min_shard_numel=0, coalesce_grad_nbytes=0, max_inflight_reduce_scatters=1)
        first = nn.Sequential(*linears(3), linears(1))
        second = linears(1)
        second[0].weight = first[3][0].weight
        reference = nn.ModuleList([second, first])
        model = copy.deepcopy(reference)
        for module in (model[1][3], model[1], model[0]):
            gtp_shard(module, self.gtp_mesh(), schedule=alone)
        self.assertEqual(len({id(binding_of(part).group.runtime) for part in (*model, model[1][3])}), 1)
        seen = []
        model[0][0].weight.register_post_accumulate_grad_hook(lambda param: seen.append(full(param.grad).clone()))
        batch = make_rows(0)
        for part in (reference, model):
            rows = batch if part is reference else rows_of_rank(batch, self.gtp_mesh())
            square_loss(nn.Sequential(*part), rows).backward()
        self.assertEqual(len(seen), 1)
        torch.testing.assert_close(seen[0], reference[0][0].weight.grad)
        assert_same_params(model, reference, "grad")

    def test_data_of_parameters(self) -> None:
        """``param.data = tensor`` as on plain parameters: averages are swapped in, trained on, and swapped out."""
        for mesh in (self.gtp_mesh(), self.hsdp_mesh()):
            reference = nn.Sequential(nn.Linear(WIDTH, 7), nn.LayerNorm(7), nn.Linear(7, WIDTH))
            # DTensor keeps one spec for equal placements: with this one, ours have torch's ``Shard``.
            fully_shard(copy.deepcopy(reference), mesh=mesh)
            model = shard_copy(reference, mesh)
            models, optimizers = (reference, model), [torch.optim.Adam(m.parameters()) for m in (reference, model)]
            averages = [torch.randn(param.shape, dtype=torch.float64) for param in reference.parameters()]
            x, kept = make_rows(0), [[param.data for param in m.parameters()] for m in models]

            def step(x: torch.Tensor = x, mesh: Any = mesh, models: Any = models, optimizers: Any = optimizers) -> None:
                for m, rows, optimizer in zip(models, (x, rows_of_rank(x, mesh)), optimizers, strict=True):
                    m(rows).square().mean().backward()
                    optimizer.step()
                assert_same_params(models[1], models[0], "grad")
                assert_same_params(models[1], models[0])

            step()
            before = [param.detach().clone() for param in reference.parameters()]
            for m in models:
                for param, average in zip(m.parameters(), averages, strict=True):
                    param.data = given = average.float()
                    if m is model:
                        given.zero_()
            self.assertEqual(full(model(x)), reference(x))
            step()
            for m, values in zip(models, kept, strict=True):
                for param, value in zip(m.parameters(), values, strict=True):
                    param.data = value  # the memory that the first step wrote to, as it was
            for param, value in zip(reference.parameters(), before, strict=True):
                self.assertEqual(param, value)
            self.assertEqual(model(x), reference(x))
            step()
            for param, average in zip(model[0].parameters(), averages, strict=False):
                param.data = average  # in another dtype
            self.assertEqual(model[0](x.double()), F.linear(x.double(), *averages[:2]))
