"""``capture_step`` without a GPU: what a training loop changes around recorded steps, and what steps do that no replay
would. Either a graph sees it, or it is recorded anew, or the step is refused."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from capture_common import OnHost, Setting, rows
from common import ALL, fake_world
from runtime_common import assert_idle, local, members_of, runtime_of
from torch.distributed.device_mesh import init_device_mesh

from dtensor_gtp import MixedPrecisionPolicy, gtp_shard
from dtensor_gtp import _torch_compat as compat
from dtensor_gtp.graphs import recorder
from dtensor_gtp.graphs.capture_step import check_optimizer
from dtensor_gtp.graphs.record_step import Surroundings
from dtensor_gtp.quant import Float8Tensorwise, quantize_
from dtensor_gtp.quant.master_optimizer import MasterOptimizer

Refused = tuple[Callable[..., Any], list[Any], Callable[[], list[Any]]]


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(world_size=1):
        yield


# Steps that no replay would repeat: the step, its optimizers, and what is as before when it has been refused.


def schedules_its_rate(setting: Setting) -> Refused:
    def step(x: torch.Tensor) -> None:
        setting.run(setting.model, setting.optimizers[1], x, 1.0)
        setting.optimizers[1].param_groups[0]["lr"] *= 0.5

    setting.is_stepping = False
    return step, [setting.optimizers[1]], lambda: [param.grad for param in setting.model.parameters()]


def has_an_optimizer_that_was_not_passed(setting: Setting) -> Refused:
    return lambda x: setting.run(setting.model, setting.optimizers[1], x, 1.0), [], list


def has_two_optimizers(setting: Setting) -> Refused:
    params = list(setting.model.parameters())
    setting.optimizers[1].param_groups[0]["params"] = params[:2]
    other = torch.optim.SGD(params[2:], lr=0.1)

    def step(x: torch.Tensor) -> None:
        setting.model(x).square().mean().backward()
        for optimizer in (setting.optimizers[1], other):
            optimizer.step()

    return step, [setting.optimizers[1]], list


def makes_state_anew(setting: Setting) -> Refused:
    param = setting.model[0].bias

    class Averaging(torch.optim.Optimizer):
        def step(self, closure: Any = None) -> None:
            earlier = self.state[param].get("average", torch.zeros_like(param))
            self.state[param]["average"] = 0.9 * earlier + 0.1 * param.grad

    optimizer = Averaging([param], {})

    def step(x: torch.Tensor) -> None:
        setting.model(x).square().mean().backward()
        optimizer.step()
        setting.model.zero_grad()

    return step, [optimizer], lambda: [optimizer.state[param]["average"]]


def writes_to_its_input(setting: Setting) -> Refused:
    count = torch.zeros(3)

    def step(x: torch.Tensor, count: torch.Tensor = count) -> None:
        setting.model(x).square().mean().backward()
        setting.model.zero_grad()
        count[:1] += 1

    return step, [setting.optimizers[1]], lambda: [count]


def leaves_gradients_in_flight(setting: Setting) -> Refused:
    def step(x: torch.Tensor) -> None:
        setting.model.set_is_last_backward(setting.recorder.events[-1] != "record")
        setting.model(x).square().mean().backward()
        setting.model.set_is_last_backward(True)

    return step, [], list


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        (schedules_its_rate, RuntimeError, "AdamW's lr has changed from 0.025 to 0.0125 within the step"),
        (has_an_optimizer_that_was_not_passed, ValueError, "expects all optimizers that the step uses"),
        (has_two_optimizers, ValueError, "expects all optimizers that the step uses. Pass them"),
        (makes_state_anew, RuntimeError, "replaced 'average' in the state of Averaging"),
        (writes_to_its_input, ValueError, r"only reads its inputs, but this one writes to one of shape \(3,\)"),
        (leaves_gradients_in_flight, RuntimeError, "could not record .*: capture_step expects .* in flight when it"),
    ],
)
def test_steps_that_no_replay_would_repeat_are_refused(make: Any, error: type[Exception], match: str) -> None:
    setting = Setting()
    step, optimizers, state = make(setting)
    captured = setting.captured_as(step, optimizers)
    args = state() if make is writes_to_its_input else []
    for seed in range(2):
        captured(rows(seed), *args)
        setting.model.zero_grad()
    before = [(value, value if value is None else value.clone()) for value in state()]
    with pytest.raises(error, match=match):
        captured(rows(2), *args)
    for now, (value, kept) in zip(state(), before, strict=True):
        assert now is value
        assert value is None or torch.equal(value, kept)
    assert_idle(setting.model)


class TestGradients:
    def test_a_gradient_that_is_gone_is_not_taken_for_another(self) -> None:
        """Python uses ids again: each call finds gradients that no call has seen."""
        setting = Setting(is_stepping=False)
        step = setting.captured(warmup_steps=2)
        for seed in range(20):
            setting.model.zero_grad()
            for param in setting.model.parameters():
                param.grad = compat.wrap_local(torch.zeros_like(local(param)), compat.dtensor_spec(param))
            step(rows(seed))
        assert set(setting.recorder.events) == {"eager"}

    def test_combinations_that_never_come_again_are_not_remembered_for_ever(self) -> None:
        step = Setting().captured(warmup_steps=2)
        with mock.patch.object(recorder, "MOST_SEEN", 5):
            for index in range(8):
                step(rows(0, 1), float(index))
        assert len(step._calls.seen) == 5

    def test_gradients_that_are_dropped_at_the_begin_of_a_step_are_told(self, caplog: pytest.LogCaptureFixture) -> None:
        """Each call finds others: it runs eagerly, and says why, once."""
        setting = Setting()

        def step(x: torch.Tensor) -> torch.Tensor:
            setting.optimizers[1].zero_grad()
            loss = setting.model(x).square().mean()
            loss.backward()
            setting.optimizers[1].step()
            return loss

        captured = setting.captured_as(step)
        for seed in range(12):
            captured(rows(seed))
        assert set(setting.recorder.events) == {"eager"}
        assert caplog.text.count("recorded nothing in 7 steps: each had other gradients that are there before") == 1
        assert "call zero_grad() at the end of the step" in caplog.text

    def test_two_captured_steps_of_one_model(self) -> None:
        """One for microbatches, one for the optimizer; evaluation, loading and eager steps in between."""
        setting = Setting(is_stepping=False)
        models, optimizers = (setting.plain, setting.model), setting.optimizers
        recorders = [OnHost(setting.model, [optimizers[1]]) for _ in range(2)]

        def update(which: int) -> None:
            optimizers[which].step()
            optimizers[which].zero_grad()

        setting.recorder = recorders[0]
        micro = setting.captured_as(lambda x: setting.run(setting.model, optimizers[1], x, 1.0), [])
        setting.recorder = recorders[1]
        step = setting.captured_as(lambda: update(1))
        for outer in range(9):
            for index in range(2):
                micro(rows(10 * outer + index))
                setting.run(setting.plain, optimizers[0], rows(10 * outer + index), 1.0)
            setting.compare()
            step()
            update(0)
            setting.compare()
            with torch.no_grad():
                torch.testing.assert_close(setting.model(rows(7)), setting.plain(rows(7)))
            if outer == 5:
                for model in models:
                    model.load_state_dict({name: 0.5 * value for name, value in model.state_dict().items()})
            if outer == 7:
                for which, model in enumerate(models):
                    setting.run(model, optimizers[which], rows(3), 1.0)
                    update(which)
        assert [recorder.events[-1] for recorder in recorders] == ["replay"] * 2
        assert (micro.num_graphs, step.num_graphs) == (2, 1)


class TestOptimizers:
    def test_a_tensor_in_the_place_of_a_hyperparameter_raises(self) -> None:
        """The graph would go on with the learning rate that is gone."""
        setting = Setting(is_stepping=False)
        step = setting.captured_as(lambda x: setting.run(setting.model, setting.optimizers[1], x, 1.0))
        group = setting.optimizers[1].param_groups[0]
        group["lr"] = torch.tensor(0.1, device="meta")  # as one on the GPU: its value is not read
        group["betas"] = (torch.tensor(0.9, device="meta"), 0.95)
        for seed in range(4):
            setting.model.zero_grad()
            step(rows(seed))
        assert setting.recorder.events[-1] == "replay"
        setting.model.zero_grad()
        before = dict(group)
        for name, value in (("lr", torch.tensor(0.2, device="meta")), ("betas", (before["lr"], 0.95))):
            group[name] = value
            match = rf"AdamW's {name} has changed .* since the step .* fill it in place"
            with pytest.raises(RuntimeError, match=match):
                step(rows(0))
            group[name] = before[name]
        step(rows(0))

    def test_a_step_that_raised_does_not_count(self) -> None:
        """It has not come to the optimizer, whose state a graph would make anew each time."""
        setting = Setting()
        is_broken = True

        def run(x: torch.Tensor) -> Any:
            if is_broken:
                raise ValueError("a batch that is not good")
            return setting.run(setting.model, setting.optimizers[1], x, 1.0)

        step = setting.captured_as(run)
        for _ in range(3):
            with pytest.raises(ValueError, match="not good"):
                step(rows(0))
        is_broken = False
        setting.check_steps(step, 5)
        assert setting.recorder.events[3:] == ["eager", "last", "record", *["replay"] * 3]

    def test_masters_of_native_weights_stay_where_they_are(self) -> None:
        """Their optimizer makes tensors of its state anew in each step, of the same memory."""
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("gtp",))
        model = quantize_(nn.Sequential(nn.Linear(64, 64)), Float8Tensorwise(), storage="native")
        gtp_shard(model, mesh, schedule=ALL)
        optimizer = MasterOptimizer(model.parameters(), torch.optim.SGD, lr=0.1, momentum=0.9)

        def take_step() -> tuple[torch.Tensor, Surroundings]:
            model(torch.ones(2, 64)).sum().backward()
            optimizer.step()
            around = Surroundings(model, [optimizer], [runtime_of(model)])
            return optimizer.state[model[0].weight]["master"], around

        master, around = take_step()
        other, _ = take_step()
        assert master is not other
        assert around.moved() is None
        assert around.is_in_place()
        optimizer.state[model[0].weight]["momentum_buffer"] = torch.zeros_like(master)
        assert around.moved() == "'momentum_buffer' in the state of MasterOptimizer"
        assert not around.is_in_place()

    def test_states_in_containers_and_states_that_are_moved_away(self) -> None:
        setting = Setting()
        model, optimizer = setting.model, setting.optimizers[1]
        param = next(model.parameters())
        parts = [torch.zeros(3), torch.ones(2)]
        optimizer.state[param] = {"parts": parts, "nested": {"x": torch.zeros(4)}, "last": torch.zeros(5)}
        around = Surroundings(model, [optimizer], [runtime_of(model)])
        for put in (
            lambda: parts.__setitem__(0, torch.zeros(3)),
            lambda: optimizer.state[param]["nested"].update(x=torch.zeros(4)),
            lambda: optimizer.state[param].update(last=torch.zeros(5)),
            lambda: parts.append(torch.zeros(1)),
        ):
            assert around.is_in_place()
            kept = [*parts, optimizer.state[param]["nested"]["x"], optimizer.state[param]["last"]]
            put()
            assert not around.is_in_place()
            del kept
            around = around.renewed()
        moved = weakref.ref(optimizer.state[param].pop("last"))
        assert moved() is None, "whoever moves a state away wants its memory"

    def test_parameters_of_the_optimizer_outside_of_the_module(self) -> None:
        """Graphs find their gradients, a change of them is seen, and a recording that failed leaves them."""
        setting = Setting()
        gain = nn.Parameter(torch.ones(12))
        optimizer = torch.optim.SGD([*setting.model.parameters(), gain], lr=0.1, foreach=False)
        is_failing = False

        def step(x: torch.Tensor) -> None:
            (setting.model(x) * gain).square().mean().backward()
            if is_failing and setting.recorder.events[-1] == "record":
                raise RuntimeError("in vain")

        captured = setting.captured_as(step, [optimizer])
        for seed in range(3):
            captured(rows(seed))
            optimizer.zero_grad()
        assert captured._around is not None
        assert any(owner is gain and name == "grad" for owner, name in captured._around.places)
        assert setting.recorder.events[-2:] == ["record", "replay"]
        gain.data = gain.data.clone()
        captured(rows(3))
        assert setting.recorder.events[-1] == "eager"
        optimizer.zero_grad()
        is_failing = True
        captured(rows(4))
        optimizer.zero_grad()
        with pytest.raises(RuntimeError, match="in vain"):
            captured(rows(5))
        assert gain.grad is None

    def test_sharded_parameters_outside_of_the_module_are_refused(self) -> None:
        setting, other = Setting(), Setting()
        optimizer = torch.optim.SGD([*setting.model.parameters(), *other.model.parameters()], lr=0.1)
        check_optimizer(optimizer, nn.ModuleList([setting.model, other.model]))
        with pytest.raises(ValueError, match=r"all sharded parameters of SGD, but one of shape \(12, 12\) is outside"):
            check_optimizer(optimizer, setting.model)


class Head(nn.Module):
    """A trunk that is sharded, and beside it a layer and a table that are not."""

    def __init__(self, trunk: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.trunk, self.head = trunk, head
        self.register_buffer("table", torch.ones(12))
        self.is_replacing = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.is_replacing:
            self.table = 0.5 * self.table + 0.1
        if x.shape[0] > self.table.shape[0] // 3:
            self.table = torch.ones(3 * x.shape[0])
        return self.head(self.trunk(x)) * self.table[:12]


def beside() -> Setting:
    return Setting(plain=lambda: Head(nn.Linear(12, 12), nn.Linear(12, 12)), sharded="trunk")


class TestAroundTheShardedModule:
    def test_parameters_that_nobody_manages_are_seen_to_change(self) -> None:
        both = beside()
        step = both.captured()
        models = (both.plain, both.model)

        def move() -> None:
            both.model.head.weight.data = both.model.head.weight.detach().clone()

        def replace() -> None:
            for model, optimizer in zip(models, both.optimizers, strict=True):
                params, param = optimizer.param_groups[0]["params"], nn.Parameter(torch.full((12,), 0.5))
                params[[p is model.head.bias for p in params].index(True)] = model.head.bias = param

        for change in (
            lambda: [model.head.weight.requires_grad_(False) for model in models],
            lambda: [model.head.weight.requires_grad_() for model in models],
            move,
            replace,
        ):
            both.check_steps(step, 5)
            assert both.recorder.events[-1] == "replay"
            change()
            both.check(step, rows(7))
            assert both.recorder.events[-1] == "eager"

    def test_a_table_that_grows_is_not_read_where_it_was(self) -> None:
        both = beside()
        step = both.captured(steps=5)
        both.check(step, rows(5, 6))
        assert step.num_graphs == 0, "the graph of four rows reads a table that is gone"
        for seed in range(3):
            both.check(step, rows(seed))
            both.check(step, rows(seed, 6))
        assert step.num_graphs == 2

    def test_a_buffer_that_is_replaced_in_each_step_is_refused_and_put_back(self) -> None:
        both = beside()
        step = both.captured()
        both.model.is_replacing = both.plain.is_replacing = True
        both.check_steps(step, 3)
        table = both.model.table
        with pytest.raises(RuntimeError, match=r"replaced buffer 'table'. A replay would still use the old one"):
            step(rows(3))
        assert both.model.table is table
        both.model.is_replacing = False

        def overwrite(x: torch.Tensor) -> Any:
            if both.recorder.events[-1] == "record":
                table.data = 0.5 * table
                both.model.head.bias.data = both.model.head.bias.detach() + 1.0
            return both.run(both.model, both.optimizers[1], x, 1.0)

        values = [table.clone(), both.model.head.bias.detach().clone()]
        with (
            mock.patch.object(step, "_fn", overwrite),
            pytest.raises(RuntimeError, match="A replay would still use the old one"),
        ):
            step(rows(3))
        for now, before in zip((both.model.table, both.model.head.bias), values, strict=True):
            assert torch.equal(now, before)


class TestSteps:
    def test_eager_code_sees_what_a_step_writes_without_an_optimizer(self) -> None:
        """Averages of weights, say, in the same module."""
        setting = Setting(policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), is_stepping=False)
        setting.model.set_reshard_after_backward(False)
        runtime = runtime_of(setting.model)

        def run(x: torch.Tensor) -> None:
            setting.model(x).square().mean().backward()
            with torch.no_grad():
                for param in setting.model.parameters():
                    param -= param.grad
            setting.model.zero_grad()

        step = setting.captured_as(run, [])
        for seed in range(6):
            step(rows(seed))
            output = setting.model(rows(7))
            for weight in runtime.members.weights:
                runtime.keeper.drop_kept(weight)
            assert torch.equal(output, setting.model(rows(7))), setting.recorder.events[-1]
        assert setting.recorder.events[-1] == "replay"

    def test_whole_gradients_in_a_wider_dtype_are_seen_in_flight(self) -> None:
        """Parameters that are stored in another dtype than they compute in, with nothing else to train."""
        setting = Setting(torch.bfloat16, MixedPrecisionPolicy(param_dtype=torch.float32))
        step = setting.captured(warmup_steps=2)
        for weight in members_of(setting.model).weights:
            weight.param.requires_grad_(False)
        for seed in range(3):
            step(rows(seed))
        setting.model.set_is_last_backward(False)
        setting.model(rows(5)).square().mean().backward()
        setting.model.set_is_last_backward(True)
        with pytest.raises(RuntimeError, match="without gradients in flight before it is replayed"):
            step(rows(6))

    def test_eager_steps_beyond_the_graphs_drop_what_is_kept(self) -> None:
        """As steps of ranks do that record or replay meanwhile, so that all gather the same."""
        setting = Setting()
        setting.model.set_reshard_after_backward(False)
        step = setting.captured(warmup_steps=2, max_graphs=1)
        for seed in range(4):
            step(rows(seed))
        weights = members_of(setting.model).weights
        for seed in range(2):
            before = [weight.for_forward.num_gathers for weight in weights]
            step(rows(seed, 7))
            assert setting.recorder.events[-1] in ("eager", "last")
            assert all(weight.for_forward.num_gathers > num for weight, num in zip(weights, before, strict=True))
