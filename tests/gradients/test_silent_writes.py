"""Writes to weights, in forwards and between passes: each counts as in one process, or is refused by name."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, assert_same_params, check_update, fake_mesh, full, rows_of_rank
from pairs_common import CHOSEN, Pair, PairTest, halve_data, replace_data
from runtime_common import WIDTH, Raw, make_rows, small_model, square_loss, square_step
from schedules import explicit
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy

from dtensor_gtp import SchedulePolicy, gtp_shard, quantize_

MIXED = SchedulePolicy(min_shard_numel=4 * WIDTH)  # biases stay whole
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

    lists: Any = None  # of both, taken once, before any forward, as trainers do

    def __init__(self, update: Update, queries: nn.Module) -> None:
        super().__init__()
        self.queries = queries
        self.keys = copy.deepcopy(queries).requires_grad_(False)
        self.update = update
        with torch.no_grad():
            for param in self.keys.parameters():
                param.mul_(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        queries = self.queries(x)
        with torch.no_grad():
            self.update(*(self.lists or self.both()))
            keys = self.keys(x)
        return (queries - keys).square().mean()

    def both(self) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
        return list(self.keys.parameters()), list(self.queries.parameters())


class Layer(nn.Module):
    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * width)
        self.down = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.up(x).relu())


def layers() -> nn.Sequential:
    """Each is a group."""
    return nn.Sequential(Layer(), Layer())


def nothing(weight: Any) -> None:
    pass


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
        return self.layer(F.linear(x, self.weight))


class Scaled(nn.Module):
    """Reads its scale, which stays whole, several times, and may write to it."""

    def __init__(self, write: Callable[[Any], object]) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.randn(WIDTH))
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.write = write

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.write(self.scale)
        return self.layer(x * self.scale) * self.scale


class Doubled(nn.Module):
    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight * 2


class Inverted(Doubled):
    def right_inverse(self, weight: torch.Tensor) -> torch.Tensor:
        return weight / 2


class Parametrizes(nn.Module):
    """Reads the weight of its layer, and uses the layer with a parametrization."""

    def __init__(self, parametrization: nn.Module, write: Callable[[Any], object] = nothing) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.write, self.parametrizations_in_forward = write, [parametrization]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            norm = self.layer.weight.norm()
            self.write(self.layer.weight)
        nn.utils.parametrize.register_parametrization(self.layer, "weight", self.parametrizations_in_forward[0])
        try:
            return self.layer(x) / norm
        finally:
            nn.utils.parametrize.remove_parametrizations(self.layer, "weight", leave_parametrized=False)


class WriteTest(PairTest):
    width = WIDTH

    def train(self, pair: Pair, step: Callable[[Any, torch.Tensor], Any], steps: int = 3) -> None:
        """Gradients and parameters after each step are those of one process."""
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in pair]
        for seed in range(steps):
            self.run_both(pair, step, seed)
            check_update(*pair, optimizers)


class TestWritesInForward(WriteTest):
    def test_momentum_encoders(self) -> None:
        """Of single weights, and of groups."""
        for schedule, make in ((ALL, lambda: nn.Sequential(nn.Linear(WIDTH, WIDTH), Raw())), (CHOSEN, layers)):
            for update in (by_data, by_copy, by_foreach):
                pair = self.pair(lambda make=make, update=update: Momentum(update, make()), schedule)
                self.train(pair, lambda each, x: each(x).backward())

    def test_foreach_on_a_list_made_before_the_forward(self) -> None:
        """Weights of groups, single ones, and such as stay gathered after backward."""
        for schedule, is_kept in ((CHOSEN, False), (ALL, False), (ALL, True)):
            pair = self.pair(lambda: Momentum(by_foreach, layers()), schedule)
            pair[0].set_reshard_after_backward(not is_kept)
            for each in pair:
                each.lists = each.both()
            self.train(pair, lambda each, x: each(x).backward())

    def test_a_write_to_what_is_read_is_refused(self) -> None:
        writes: list[Callable[[Any], None]] = [
            lambda weight: weight.clamp_(-0.1, 0.1),
            lambda weight: weight.data.clamp_(-0.1, 0.1),
            lambda weight: weight.detach().mul_(0.5),
            lambda weight: torch._foreach_mul_([weight], 0.5),
            lambda weight: weight[0].zero_(),
        ]
        for is_layer, name in ((False, "weight"), (True, "layer.weight")):
            for write in writes:
                model = gtp_shard(Writes(write, is_layer), self.gtp_mesh(), schedule=ALL)
                with self.assertRaisesRegex(RuntimeError, f"A write in a forward changed only .* parameter '{name}' "):
                    model(make_rows(0))
                model.write = nothing
                square_step(model, make_rows(0))

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

        for schedule in (explicit(0, min_shard_numel=4 * WIDTH), MIXED):
            self.train(self.pair(lambda: nn.Sequential(Scales(), Scales()), schedule), square_step)

    def test_a_write_to_a_copy_of_a_whole_parameter_is_refused(self) -> None:
        """In the compute dtype or on another device. What only reads one is right, whoever updates the parameter."""
        bf16 = {"mp_policy": MixedPrecisionPolicy(torch.bfloat16)}
        offload = {"offload_policy": CPUOffloadPolicy(pin_memory=False)}
        for options in (bf16, offload, {**bf16, **offload}):
            model: Any = Scaled(nothing)
            gtp_shard(model, self.gtp_mesh(), schedule=explicit(0, min_shard_numel=4 * WIDTH), **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
            x = make_rows(0, 4, WIDTH)
            for write in (lambda scale: scale.clamp_(-0.1, 0.1), lambda scale: torch._foreach_mul_([scale], 0.5)):
                model.write = write
                with self.assertRaisesRegex(RuntimeError, "A write in a forward changed only a copy .* 'scale' "):
                    model(x)
                model.write = nothing
                square_step(model, x)
                optimizer.step()
            if "offload_policy" in options:
                continue  # after ``unshard`` its copy is that of the last forward
            model.unshard()
            with torch.no_grad():
                model.scale.mul_(2)
            with self.assertRaisesRegex(
                RuntimeError, r"A write between unshard\(\) and reshard\(\) changed only a copy"
            ):
                model.reshard()
            square_step(model, x)

    def test_a_write_to_one_element_of_a_group_leaves_the_others(self) -> None:
        """Though their values have more bits than the compute dtype."""

        class Writes(Layer):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                with torch.no_grad():
                    self.down.bias[0] = self.up.weight[0, 0] = 50.0  # the largest by far
                return super().forward(x)

        for recipe in (None, "float8_tensorwise", "float8_rowwise", "mxfp8"):
            with self.subTest(recipe=recipe):
                torch.manual_seed(0)
                made = nn.Sequential(Writes(64), Writes(64))
                model: Any = copy.deepcopy(made)
                if recipe is not None:
                    quantize_(model, recipe)
                gtp_shard(model, self.gtp_mesh(), mp_policy=MixedPrecisionPolicy(torch.bfloat16), schedule=MIXED)
                model(make_rows(0, 4, 64))
                for before, now in zip(made.parameters(), model.parameters(), strict=True):
                    is_same = before == full(now)
                    assert is_same.flatten()[1:].all(), is_same
                assert full(model[1].down.bias)[0] == full(model[1].up.weight)[0, 0] == 50.0

    def test_new_data_of_what_is_read_is_refused_in_each_forward(self) -> None:
        model = gtp_shard(Writes(nothing, False), self.gtp_mesh(), schedule=ALL)
        for number in range(1, 8):
            square_step(model, make_rows(0))
            if number in (2, 4, 6):  # forwards of other numbers than those that look at all bits
                model.write = replace_data
                with self.assertRaisesRegex(RuntimeError, "A write in a forward changed only .* parameter 'weight' "):
                    model(make_rows(0))
                model.write = nothing
            model.zero_grad()

    def test_reading_is_no_write(self) -> None:
        model = gtp_shard(Writes(lambda weight: weight.data.norm(), False), self.gtp_mesh(), schedule=ALL)
        for seed in range(3):
            square_step(model, make_rows(seed))
        with torch.no_grad():
            for param in model.parameters():
                param.clamp_(-0.1, 0.1)  # the remedy
        assert full(model.weight).abs().max() <= 0.1

    def test_a_parametrization_that_comes_and_goes_is_no_write(self) -> None:
        """As PEFT's of experts. One whose ``right_inverse`` changes the weight is a write."""
        pair = self.pair(lambda: Parametrizes(Doubled()))
        for _ in range(2):
            self.run_both(pair)
        assert_same_params(*pair, "grad")
        wrong = [
            Parametrizes(Doubled(), lambda weight: weight.mul_(0.5)),
            Parametrizes(Doubled(), lambda weight: weight.set_(weight * 0.5)),
            Parametrizes(Inverted()),
        ]
        for module in wrong:
            model = gtp_shard(module, self.gtp_mesh(), schedule=ALL)
            with self.assertRaisesRegex(RuntimeError, "A write in a forward changed only .* parameter 'layer.weight'"):
                model(make_rows(0))


def by_version(weight: Any) -> None:
    with torch.no_grad():
        weight.mul_(0.5)


def by_foreach_op(weight: Any) -> None:
    with torch.no_grad():
        torch._foreach_mul_([weight], 0.5)


class TestWritesOutside(WriteTest):
    def test_in_a_backward(self) -> None:
        """By a hook: to a weight of a group it is kept, otherwise it raises."""
        for schedule, write in itertools.product((ALL, CHOSEN), (by_version, halve_data)):
            is_kept = schedule is CHOSEN and write is by_version
            for index in (0, 1):  # the backward of the block has ended, or it runs
                pair = self.pair(layers, schedule)
                square_step(pair[0], make_rows(0))
                pair[0].zero_grad()
                for each, rows in ((pair[0], rows_of_rank(make_rows(0), self.gtp_mesh())), (pair[1], make_rows(0))):

                    def hook(*grads: object, each: Any = each, write: Any = write) -> None:
                        write(each[1].up.weight)

                    message = r"A write in a backward .*('1.up.weight'|block '1')"
                    refused = self.assertRaisesRegex(RuntimeError, message)
                    with each[index].register_full_backward_hook(hook):
                        loss = square_loss(each, rows)
                        with nullcontext() if each is pair[1] or is_kept else refused:
                            loss.backward()
                if is_kept:
                    assert_same_params(*pair)
                pair[0].zero_grad()
                square_step(pair[0], make_rows(0))

    def test_between_unshard_and_reshard(self) -> None:
        writes: list[Callable[[Any], Any]] = [lambda w: w.add_(1), lambda w: w.data.add_(1), replace_data]
        ends: list[Callable[[Any], Any]] = [
            lambda model: model.reshard(),
            lambda model: model(make_rows(0)),
            lambda model: torch.optim.SGD(model.parameters()).step(),
        ]
        model: Any = gtp_shard(small_model(), self.gtp_mesh(), schedule=ALL)
        for write, end in itertools.product(writes, ends):
            model.unshard()
            with torch.set_grad_enabled(write is replace_data):
                write(model[0].weight)
                model[0].weight.norm()  # another read forgets nothing
            with torch.no_grad():
                model[0].bias.add_(1)
            message = r"A write between unshard\(\) and reshard\(\) changed only .* '0.weight' "
            with self.assertRaisesRegex(RuntimeError, message):
                end(model)
            square_step(model, make_rows(0))
            model.unshard()
            model[0].weight.detach().clone().add_(1)
            model.reshard()

    def test_shards_of_weights_that_stay_gathered(self) -> None:
        keeps = (lambda model: model.unshard(), lambda model: model.set_reshard_after_backward(False))

        def halve_all(params: list[Any]) -> None:
            for param in params:
                halve_data(param)

        def write_all(params: list[Any]) -> None:
            with torch.no_grad():
                torch._foreach_mul_(params, 0.5)

        for keep, (schedule, make) in itertools.product(keeps, ((ALL, small_model), (CHOSEN, layers))):
            for write in (halve_all, write_all):
                pair = self.pair(make, schedule)
                keep(pair[0])

                def step(each: nn.Module, rows: torch.Tensor, write: Any = write) -> None:
                    square_step(each, rows)
                    each.zero_grad()
                    write(list(each.parameters()))
                    square_step(each, rows)
                    loss = square_loss(each, rows)
                    halve_all(list(each.parameters()))  # as in one process, the backward computes with this
                    loss.backward()

                self.run_both(pair, step)
                assert_same_params(*pair, "grad")

    def test_new_data_between_microbatches(self) -> None:
        """Gradients that are not reduced yet stay: of single parameters, and of a group with another weight."""
        for make, name in ((small_model, "2.weight"), (layers, "1.up.weight")):
            pair = self.pair(make, MIXED)
            for seed, is_last in enumerate((False, True)):
                pair[0].set_is_last_backward(is_last)
                self.run_both(pair, seed=seed)
                for each in pair:
                    replace_data(each.get_parameter(name))
            assert_same_params(*pair, "grad")


class TestWritesBeforeBackward(WriteTest):
    def check_write(self, pair: Pair, name: str, write: Callable[[Any], None]) -> None:
        """The backward raises, and the next step is right."""
        model = pair[0]
        square_step(model, make_rows(0))
        loss = square_loss(model, make_rows(0))
        for each in pair:
            write(each.get_parameter(name))
        with self.assertRaisesRegex(RuntimeError, f"Parameter '{name}' .*(modified|replaced)|has been modified by an"):
            loss.backward()
        for each in pair:
            each.zero_grad()
        self.check(pair)

    def test_new_data(self) -> None:
        """Plain torch computes with the old or the new values, as the op has saved the weight or a view of it."""
        for make, schedule in ((small_model, ALL), (layers, CHOSEN)):
            pair = self.pair(make, schedule)
            for name, _ in pair[1].named_parameters():
                self.check_write(pair, name, replace_data)
                if name in ("1.first", "2.weight", "3.weight", "1.up.weight"):
                    for is_trained in (False, True):
                        for each in pair:
                            each.get_parameter(name).requires_grad_(is_trained)
                        if not is_trained:
                            self.check_write(pair, name, replace_data)

    def test_in_place(self) -> None:
        for make, schedule, names in (
            (small_model, ALL, ("1.first", "2.weight", "3.weight")),
            (layers, CHOSEN, ("1.up.weight",)),
        ):
            pair = self.pair(make, schedule)
            for name, write in itertools.product(names, (by_version, by_foreach_op)):
                self.check_write(pair, name, write)

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


class Clipped(nn.Module):
    """Writes its weight, which it has read, and reads it again: twice, so that autograd saves it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.weight.clamp_(-0.1, 0.1)
        return F.linear(F.linear(x, self.weight).tanh(), self.weight)


def test_a_forward_that_writes_the_shard_itself() -> None:
    """On an axis of one rank nothing is gathered: what modules read is the shard."""
    torch.manual_seed(0)
    reference = nn.Sequential(Clipped(), nn.Linear(WIDTH, WIDTH))
    with fake_mesh(1) as mesh:
        model = gtp_shard(copy.deepcopy(reference), mesh, schedule=ALL)
        for step in range(2):
            for one in (reference, model):
                square_loss(one, torch.full((2, WIDTH), 1.0 + step)).backward()
        for mine, theirs in zip(reference.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad.to_local())
