"""Writes to weights, in forwards and between passes: each counts as in one process, or is refused by name."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, GlooTest, assert_same_params, full, rows_of_rank
from runtime_common import WIDTH, Raw, make_rows, shard_copy, small_model, square_loss
from schedules import explicit

from dtensor_gtp import SchedulePolicy, gtp_shard

Update = Callable[[list[nn.Parameter], list[nn.Parameter]], None]


def by_data(keys: list[nn.Parameter], queries: list[nn.Parameter]) -> None:
    for key, query in zip(keys, queries, strict=True):
        key.data.mul_(0.5).add_(query.data, alpha=0.5)


def by_copy(keys: list[nn.Parameter], queries: list[nn.Parameter]) -> None:
    for key, query in zip(keys, queries, strict=True):
        key.data.copy_(key.data * 0.5 + query.data * 0.5)


def by_foreach(keys: list[nn.Parameter], queries: list[nn.Parameter]) -> None:
    torch._foreach_mul_(keys, 0.5)
    torch._foreach_add_(keys, queries, alpha=0.5)


class Momentum(nn.Module):
    """As MoCo and BYOL: the forward moves the keys' weights towards those of the queries."""

    def __init__(self, update: Update) -> None:
        super().__init__()
        self.queries = nn.Sequential(nn.Linear(WIDTH, WIDTH), Raw(), nn.Linear(WIDTH, WIDTH))
        self.keys = copy.deepcopy(self.queries).requires_grad_(False)
        self.update = update
        with torch.no_grad():
            for param in self.keys.parameters():
                param.mul_(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries = self.queries(x)
        with torch.no_grad():
            self.move()
            keys = self.keys(x)
        result: torch.Tensor = (queries - keys).square().mean()
        return result

    def move(self) -> None:
        self.update(list(self.keys.parameters()), list(self.queries.parameters()))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


class MomentumOfLists(Momentum):
    """Takes the parameters once, before any forward, as trainers do."""

    def __init__(self) -> None:
        super().__init__(by_foreach)
        self.queries = nn.Sequential(Layer(), Layer())
        self.keys = nn.Sequential(Layer(), Layer()).requires_grad_(False)

    def take(self) -> None:
        self.lists = list(self.keys.parameters()), list(self.queries.parameters())

    def move(self) -> None:
        self.update(*self.lists)


class Writes(nn.Module):
    """Writes to its weight, or to that of its layer, and uses it."""

    def __init__(self, write: Callable[[Any], None], is_layer: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.write, self.is_layer = write, is_layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.write(self.layer.weight if self.is_layer else self.weight)
        result: torch.Tensor = self.layer(F.linear(x, self.weight))
        return result


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


class Inverted(Doubled):
    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


class Parametrizes(nn.Module):
    """Reads the weight of its layer, and uses the layer with a parametrization."""

    def __init__(self, parametrization: nn.Module, write: Callable[[Any], object] = lambda weight: None) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.write, self.parametrizations_in_forward = write, [parametrization]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            norm = self.layer.weight.norm()
            self.write(self.layer.weight)
        nn.utils.parametrize.register_parametrization(self.layer, "weight", self.parametrizations_in_forward[0])
        try:
            result: torch.Tensor = self.layer(x) / norm
            return result
        finally:
            nn.utils.parametrize.remove_parametrizations(self.layer, "weight", leave_parametrized=False)


def replace_data(weight: Any) -> None:
    weight.data = weight.data * 0.5


def halve_data(weight: Any) -> None:
    weight.data.mul_(0.5)


class TestWritesInForward(GlooTest):
    world_size = 2

    def check(self, model: Any, reference: Any) -> None:
        """Train the queries beside one process."""
        optimizers = [torch.optim.SGD(each.queries.parameters(), lr=0.1) for each in (model, reference)]
        for step in range(4):
            x = make_rows(step)
            loss, want = model(rows_of_rank(x, self.gtp_mesh())), reference(x)
            loss.backward()
            want.backward()
            assert_same_params(model, reference, "grad")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same_params(model, reference)

    def test_momentum_encoders(self) -> None:
        mesh = self.gtp_mesh()
        for update in (by_data, by_copy, by_foreach):
            torch.manual_seed(0)
            reference = Momentum(update)
            model = shard_copy(reference, mesh)
            self.check(model, reference)

    def test_foreach_on_a_list_made_before_the_forward(self) -> None:
        """Weights of groups, single ones, and such as stay gathered after backward."""
        mesh = self.gtp_mesh()
        for schedule, is_kept in ((SchedulePolicy(min_shard_numel=0), False), (ALL, False), (ALL, True)):
            torch.manual_seed(0)
            reference = MomentumOfLists()
            model = gtp_shard(copy.deepcopy(reference), mesh, schedule=schedule)
            model.set_reshard_after_backward(not is_kept)
            for each in (model, reference):
                each.take()
            self.check(model, reference)

    def test_a_write_to_what_is_read_is_refused(self) -> None:
        writes: list[Callable[[Any], None]] = [
            lambda weight: weight.clamp_(-0.1, 0.1),
            lambda weight: weight.data.clamp_(-0.1, 0.1),
            lambda weight: weight.detach().mul_(0.5),
            lambda weight: torch._foreach_mul_([weight], 0.5),
            lambda weight: weight[0].zero_(),
        ]
        for write in writes:
            for is_layer in (False, True):
                model = gtp_shard(Writes(write, is_layer), self.gtp_mesh(), schedule=ALL)
                name = "layer.weight" if is_layer else "weight"
                with self.assertRaisesRegex(RuntimeError, f"A write in a forward changed only .* parameter '{name}' "):
                    model(make_rows(0))
                model.write = lambda weight: None
                square_loss(model, make_rows(0)).backward()

    def test_whole_parameters_keep_what_a_forward_writes(self) -> None:
        """Running scales, codebooks and the like; alone and in groups."""

        class Scales(Layer):
            def __init__(self) -> None:
                super().__init__()
                self.norm = nn.LayerNorm(WIDTH)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                with torch.no_grad():
                    self.norm.weight.mul_(0.9).add_(0.3)
                    self.up.bias[1] = 0.5
                    torch._foreach_mul_([self.norm.bias, self.down.bias], 1.5)
                return super().forward(self.norm(x))

        mesh = self.gtp_mesh()
        for schedule in (explicit(0, min_shard_numel=4 * WIDTH), SchedulePolicy(min_shard_numel=4 * WIDTH)):
            torch.manual_seed(0)
            reference = nn.Sequential(Scales(), Scales())
            model = shard_copy(reference, mesh, schedule=schedule)
            optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, reference)]
            for step in range(4):
                x = make_rows(step)
                square_loss(model, rows_of_rank(x, mesh)).backward()
                square_loss(reference, x).backward()
                assert_same_params(model, reference, "grad")
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                assert_same_params(model, reference)

    def test_new_data_of_what_is_read_is_refused_in_each_forward(self) -> None:
        model = gtp_shard(Writes(lambda weight: None, False), self.gtp_mesh(), schedule=ALL)
        for number in range(1, 8):
            square_loss(model, make_rows(0)).backward()
            if number in (2, 4, 6):  # forwards of other numbers than those that look at all bits
                model.write = replace_data
                with self.assertRaisesRegex(RuntimeError, "A write in a forward changed only .* parameter 'weight' "):
                    model(make_rows(0))
                model.write = lambda weight: None
            model.zero_grad()

    def test_reading_is_no_write(self) -> None:
        model = gtp_shard(Writes(lambda weight: weight.data.norm(), False), self.gtp_mesh(), schedule=ALL)
        for seed in range(3):
            square_loss(model, make_rows(seed)).backward()
        with torch.no_grad():
            for param in model.parameters():
                param.clamp_(-0.1, 0.1)  # the remedy
        assert full(model.weight).abs().max() <= 0.1

    def test_a_parametrization_that_comes_and_goes_is_no_write(self) -> None:
        """As PEFT's of experts. One whose ``right_inverse`` changes the weight is a write."""
        mesh, x = self.gtp_mesh(), make_rows(0)
        reference = Parametrizes(Doubled())
        model = shard_copy(reference, mesh)
        for _ in range(2):
            square_loss(model, rows_of_rank(x, mesh)).backward()
            square_loss(reference, x).backward()
        assert_same_params(model, reference, "grad")
        wrong = [
            Parametrizes(Doubled(), lambda weight: weight.mul_(0.5)),
            Parametrizes(Doubled(), lambda weight: weight.set_(weight * 0.5)),
            Parametrizes(Inverted()),
        ]
        for module in wrong:
            model = gtp_shard(module, mesh, schedule=ALL)
            with self.assertRaisesRegex(RuntimeError, "A write in a forward changed only .* parameter 'layer.weight'"):
                model(x)


class TestWritesOutside(GlooTest):
    world_size = 2

    def test_in_a_backward(self) -> None:
        """By a hook: to a weight of a group it is kept, otherwise it raises."""
        mesh, x = self.gtp_mesh(), make_rows(0)
        refused = r"A write in a backward .*('1.up.weight'|block '1')"

        def by_version(weight: Any) -> None:
            weight.mul_(0.5)

        for schedule, write in itertools.product((ALL, SchedulePolicy(min_shard_numel=0)), (by_version, halve_data)):
            torch.manual_seed(0)
            reference = nn.Sequential(Layer(), Layer())
            for index in (0, 1):  # the backward of the block has ended, or it runs
                model = shard_copy(reference, mesh, schedule=schedule)
                square_loss(model, make_rows(0)).backward()
                model.zero_grad()
                expected = copy.deepcopy(reference)
                for each, rows in ((model, rows_of_rank(x, mesh)), (expected, x)):

                    def hook(*grads: object, each: Any = each, write: Any = write) -> None:
                        with torch.no_grad():
                            write(each[1].up.weight)

                    handle = each[index].register_full_backward_hook(hook)
                    loss = square_loss(each, rows)
                    if each is expected or (schedule is not ALL and write is by_version):
                        loss.backward()
                    else:
                        with self.assertRaisesRegex(RuntimeError, refused):
                            loss.backward()
                    handle.remove()
                if schedule is not ALL and write is by_version:
                    assert_same_params(model, expected)
                model.zero_grad()
                square_loss(model, make_rows(0)).backward()

    def test_between_unshard_and_reshard(self) -> None:
        writes: list[Callable[[Any], Any]] = [lambda w: w.add_(1), lambda w: w.data.add_(1), replace_data]
        ends: list[Callable[[Any], Any]] = [
            lambda model: model.reshard(),
            lambda model: model(make_rows(0)),
            lambda model: torch.optim.SGD(model.parameters()).step(),
        ]
        for write, end in itertools.product(writes, ends):
            model = gtp_shard(small_model(), self.gtp_mesh(), schedule=ALL)
            model.unshard()
            with torch.set_grad_enabled(write is replace_data):
                write(model[0].weight)
                model[0].weight.norm()  # another read forgets nothing
            with torch.no_grad():
                model[0].bias.add_(1)
            message = r"A write between unshard\(\) and reshard\(\) changed only .* '0.weight' "
            with self.assertRaisesRegex(RuntimeError, message):
                end(model)
            square_loss(model, make_rows(0)).backward()
            model.unshard()
            model[0].weight.detach().clone().add_(1)
            model.reshard()

    def test_shards_of_weights_that_stay_gathered(self) -> None:
        mesh, x = self.gtp_mesh(), make_rows(0)
        torch.manual_seed(0)
        keeps = (lambda model: model.unshard(), lambda model: model.set_reshard_after_backward(False))
        kinds: tuple[tuple[SchedulePolicy, Any], ...] = (
            (ALL, small_model),
            (SchedulePolicy(min_shard_numel=0), lambda: nn.Sequential(Layer(), Layer())),
        )
        for keep, (schedule, make) in itertools.product(keeps, kinds):
            for is_foreach in (False, True):
                reference = make()
                model = shard_copy(reference, mesh, schedule=schedule)
                keep(model)
                for each, rows in ((model, rows_of_rank(x, mesh)), (reference, x)):
                    square_loss(each, rows).backward()
                    each.zero_grad()
                    with torch.no_grad():
                        params = list(each.parameters())
                        if is_foreach:
                            torch._foreach_mul_(params, 0.5)
                        else:
                            for param in params:
                                param.data.mul_(0.5)
                    square_loss(each, rows).backward()
                    loss = square_loss(each, rows)
                    for param in each.parameters():
                        param.data.mul_(0.5)  # as in one process, the backward computes with what was written
                    loss.backward()
                assert_same_params(model, reference, "grad")

    def test_new_data_between_microbatches(self) -> None:
        """Gradients that are not reduced yet stay: of single parameters, and of a group with another weight."""
        mesh = self.gtp_mesh()
        mixed = SchedulePolicy(min_shard_numel=4 * WIDTH)  # biases stay whole
        for make, name in ((small_model, "2.weight"), (lambda: nn.Sequential(Layer(), Layer()), "1.up.weight")):
            torch.manual_seed(0)
            reference = make()
            model = shard_copy(reference, mesh, schedule=mixed)
            for seed, is_last in enumerate((False, True)):
                model.set_is_last_backward(is_last)
                x = make_rows(seed)
                for each, rows in ((model, rows_of_rank(x, mesh)), (reference, x)):
                    square_loss(each, rows).backward()
                    param = each.get_parameter(name)
                    param.data = param.detach() * 0.5
            assert_same_params(model, reference, "grad")


class TestWritesBeforeBackward(GlooTest):
    world_size = 2

    def check(self, reference: nn.Module, name: str, write: Callable[[nn.Parameter], None], **options: Any) -> None:
        """The backward raises, and the next step is right."""
        mesh, x = self.gtp_mesh(), make_rows(0)
        model = shard_copy(reference, mesh, **options)
        reference = copy.deepcopy(reference)
        square_loss(model, x).backward()
        for each in (model, reference):
            each.get_parameter(name).requires_grad_(reference.get_parameter(name).requires_grad)
        loss = square_loss(model, x)
        for each in (model, reference):
            write(each.get_parameter(name))
        with self.assertRaisesRegex(RuntimeError, f"Parameter '{name}' .*(modified|replaced)|has been modified by an"):
            loss.backward()
        for each, rows in ((model, rows_of_rank(x, mesh)), (reference, x)):
            each.zero_grad()
            square_loss(each, rows).backward()
        assert_same_params(model, reference, "grad")

    def test_new_data(self) -> None:
        """Plain torch computes with the old or the new values, as the op has saved the weight or a view of it."""

        def write(param: Any) -> None:
            param.data = param.detach() * 0.5

        torch.manual_seed(0)
        blocks = nn.Sequential(Layer(), Layer())
        for reference, schedule in ((small_model(), ALL), (blocks, SchedulePolicy(min_shard_numel=0))):
            for name, param in reference.named_parameters():
                self.check(reference, name, write, schedule=schedule)
                if name in ("1.first", "2.weight", "3.weight", "1.up.weight"):
                    param.requires_grad_(False)
                    self.check(reference, name, write, schedule=schedule)
                    param.requires_grad_(True)

    def test_in_place(self) -> None:
        def by_version(param: Any) -> None:
            with torch.no_grad():
                param.mul_(0.5)

        def by_foreach(param: Any) -> None:
            with torch.no_grad():
                torch._foreach_mul_([param], 0.5)

        torch.manual_seed(0)
        blocks = nn.Sequential(Layer(), Layer())
        for write in (by_version, by_foreach):
            for name in ("1.first", "2.weight", "3.weight"):
                self.check(small_model(), name, write)
            self.check(blocks, "1.up.weight", write, schedule=SchedulePolicy(min_shard_numel=0))

    def test_other_parameters_and_another_forward(self) -> None:
        """A frozen weight has no leaf in the graph of the forward before."""
        for name in ("1.first", "2.weight", "3.weight"):
            model: Any = gtp_shard(small_model(), self.gtp_mesh(), schedule=ALL)
            model.get_parameter(name).requires_grad_(False)
            loss = square_loss(model, make_rows(0))
            model.load_state_dict({name: model.state_dict()[name] * 0.5}, assign=True, strict=False)
            model(make_rows(0))
            with self.assertRaisesRegex(RuntimeError, "was replaced between|modified by an inplace operation"):
                loss.backward()
