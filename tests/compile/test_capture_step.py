"""``capture_step`` without a GPU: inputs, keys, gradients, the runtime around recordings; and what it refuses.
The graphs are those of a stand-in, see ``capture_common``.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from capture_common import OnHost, Setting, captured_step, rows
from common import ALL, environment, fake_mesh, fake_world
from runtime_common import assert_idle, members_of, runtime_of
from script_jobs import run_forked
from test_gtp_shard_groups import CHOSEN, WIDTH, Model
from torch.distributed.device_mesh import init_device_mesh

from dtensor_gtp import MixedPrecisionPolicy, capture_step, gtp_shard
from dtensor_gtp._params import gather
from dtensor_gtp.graphs.capture_step import check_inputs, check_optimizer, check_state

BF16 = torch.bfloat16


@pytest.fixture
def world() -> Iterator[None]:
    with fake_world(world_size=1):
        yield


@pytest.mark.usefixtures("world")
class TestCaptureStep:
    def test_each_call_is_one_step(self) -> None:
        setting = Setting()
        step = setting.captured()
        results = [setting.check(step, rows(seed)) for seed in range(7)]
        kept = [result["loss"].clone() for result in results]
        setting.check(step, rows(7))
        assert all(torch.equal(result["loss"], loss) for result, loss in zip(results, kept, strict=True))
        assert setting.recorder.events == ["eager", "eager", "last", "record", *["replay"] * 5]
        assert step.num_graphs == 1
        assert_idle(setting.model)

    def test_other_shapes_and_values_get_graphs_of_their_own(self) -> None:
        setting = Setting()
        step = setting.captured(steps=5)
        del setting.recorder.events[:]
        for seed, num in enumerate((6, 4, 6, 6, 4)):
            setting.check(step, rows(seed, num))
        assert setting.recorder.events == ["eager", "replay", "record", "replay", "replay", "replay"]
        for seed, scale in ((0, 2.0), (1, 2.0), (1, 3.0)):
            setting.check(step, rows(seed), scale)
        assert step.num_graphs == 3
        setting.check(step, rows(0, 8)[::2])
        assert setting.recorder.events[-1] == "eager"

    def test_no_more_graphs_than_allowed(self, caplog: pytest.LogCaptureFixture) -> None:
        setting = Setting()
        step = setting.captured(max_graphs=1, steps=4)
        setting.check_steps(step, 3, num_rows=6)
        assert step.num_graphs == 1
        assert setting.recorder.events[-3:] == ["eager"] * 3
        assert "capture_step runs eagerly: it has reached the limit of 1 graphs" in caplog.text

    @pytest.mark.parametrize(("dtype", "num_graphs"), [(torch.float32, 2), (BF16, 3)])
    def test_gradients_that_a_step_leaves_accumulate(self, dtype: torch.dtype, num_graphs: int) -> None:
        """Microbatches as calls of their own; zero_grad in between, outside."""
        setting = Setting(dtype, MixedPrecisionPolicy(reduce_dtype=torch.float32), is_stepping=False)
        setting.model.set_reshard_after_backward(False)  # what is kept must not get into a graph, nor out of it
        step = setting.captured()
        for outer in range(5):
            for index in range(3):
                x = rows(10 * outer + index, dtype=dtype)
                step(x)
                setting.run(setting.plain, setting.optimizers[0], x, 1.0)
            setting.compare(**({"rtol": 0.05, "atol": 0.05} if dtype == BF16 else {}))
            for model in (setting.model, setting.plain):
                model.zero_grad()
        assert setting.recorder.events[-3:] == ["replay"] * 3
        assert step.num_graphs == num_graphs  # in bf16 each microbatch finds its sum in another tensor

    def test_wide_sums_of_bf16_gradients_survive_replays(self) -> None:
        """Four times 2**-9 are lost one by one on top of a bf16 one, but not together."""
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("gtp",))
        policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
        model = gtp_shard(nn.Linear(4, 4, bias=False).to(BF16), mesh, schedule=ALL, mp_policy=policy)
        recorder, runtimes = OnHost(model, []), [runtime_of(model)]
        captured = captured_step(lambda x: model(x).sum().backward(), model, [], runtimes, recorder, 2, 8)
        for _ in range(8):
            for scale in (1.0, 2.0**-9, 2.0**-9, 2.0**-9, 2.0**-9):
                captured(torch.full((1, 4), scale, dtype=BF16))
            assert model.weight.grad.to_local().eq(1 + 2.0**-7).all()
            model.zero_grad()
        assert captured.num_graphs == 5, "one for each of the five calls"
        assert recorder.events[-1] == "replay"

    def test_gradients_in_flight_are_refused(self) -> None:
        """A graph would leave them for a later step; eager code adds them."""
        setting = Setting()
        step = setting.captured(warmup_steps=2, steps=2)
        for when in ("recorded", "replayed"):
            setting.model.set_is_last_backward(False)
            setting.model(rows(5)).square().mean().backward()
            setting.model.set_is_last_backward(True)
            setting.plain(rows(5)).square().mean().backward()
            with pytest.raises(RuntimeError, match=f"without gradients in flight before it is {when}, but set_is_last"):
                step(rows(6))
            for model, optimizer in zip((setting.plain, setting.model), setting.optimizers, strict=True):
                setting.run(model, optimizer, rows(6), 1.0)
            setting.compare()
            setting.check(step, rows(7))
        assert step.num_graphs == 1

    def test_eager_steps_between_replays_see_new_weights(self) -> None:
        """A weight that is kept, or read before a replay, is not taken for fresh after it."""
        setting = Setting()
        setting.model.set_reshard_after_backward(False)
        step = setting.captured()
        for seed in range(4):
            setting.check(step, rows(seed))
            with torch.no_grad():
                torch.testing.assert_close(setting.model(rows(7)), setting.plain(rows(7)))
            weight = members_of(setting.model).weights[0]
            before = weight.versions.num_updates
            setting.check(step, rows(seed))
            assert weight.versions.num_updates > before
        output = setting.model(rows(0))
        step(rows(1))
        with pytest.raises(RuntimeError, match=r"modified|written|changed"):
            output.sum().backward()

    def test_changes_that_graphs_do_not_know_start_anew(self) -> None:
        setting = Setting()
        step = setting.captured()
        models, optimizers = (setting.plain, setting.model), setting.optimizers

        def replace_params() -> None:
            state = {name: value.clone() for name, value in setting.model.state_dict().items()}
            setting.model.load_state_dict(state, assign=True)
            params, states = list(setting.model.parameters()), list(optimizers[1].state.values())
            optimizers[1].param_groups[0]["params"] = params
            optimizers[1].state.clear()
            optimizers[1].state.update(zip(params, states, strict=False))

        def replace_state() -> None:
            """As code does that puts it on the host for a while."""
            for state in optimizers[1].state.values():
                state.update({name: value.clone() for name, value in state.items()})

        def add_group() -> None:
            for optimizer, model in zip(optimizers, models, strict=True):
                optimizer.add_param_group({**optimizer.param_groups[0], "params": [list(model.parameters())[-1]]})

        changes: list[Callable[[], Any]] = [
            lambda: [model[0].weight.requires_grad_(False) for model in models],
            lambda: [model.train(False) for model in models],
            replace_params,
            lambda: setting.model.set_gradient_divide_factor(1.0),
            lambda: optimizers[1].load_state_dict(copy.deepcopy(optimizers[1].state_dict())),
            replace_state,
            lambda: [optimizer.param_groups[0]["params"].pop() for optimizer in optimizers],
            add_group,
        ]
        for change in changes:
            setting.check_steps(step, 5)
            assert step.num_graphs == 1
            assert setting.recorder.events[-1] == "replay"
            change()
            setting.check(step, rows(9))
            assert step.num_graphs == 0

    def test_autocast_around_a_step_is_seen(self) -> None:
        setting = Setting()
        step = setting.captured(steps=5)
        with torch.autocast("cpu", BF16):
            setting.check(step, rows(5))
        setting.check(step, rows(6))
        assert setting.recorder.events[-2:] == ["eager", "replay"]

    def test_baked_in_hyperparameters_must_stay(self) -> None:
        setting = Setting()
        step = setting.captured(steps=4)
        group = setting.optimizers[1].param_groups[0]
        # The tensor is on the CPU: read when it is recorded.
        for value, match in ((0.05, "0.05 since the step was recorded"), (torch.tensor(0.1), "0.1000000")):
            group["lr"] = value
            with pytest.raises(RuntimeError, match=f"AdamW's lr has changed from 0.1 to {match}"):
                step(rows(0))
        step.reset()
        for seed in range(4):
            step(rows(seed))
        group["lr"].fill_(0.2)
        with pytest.raises(RuntimeError, match=r"AdamW's lr has changed from 0.1"):
            step(rows(0))

    def test_weights_that_stay_gathered_are_refused(self) -> None:
        setting = Setting()
        step = setting.captured(steps=3)
        setting.model.unshard()
        with pytest.raises(RuntimeError, match=r"unshard\(\) keeps 3 of them \('0.weight', ...\)"):
            step(rows(0))
        setting.model.reshard()
        setting.check(step, rows(4))

    def test_a_recording_gathers_what_the_step_before_has_gathered(self) -> None:
        """A frozen weight that is kept from step to step, too: copy engines need room for all that a launch gathers,
        which they cannot make in a recording."""
        setting = Setting()
        for model, optimizer in zip((setting.plain, setting.model), setting.optimizers, strict=True):
            model[1].requires_grad_(False)
            optimizer.param_groups[0]["params"] = [param for param in model.parameters() if param.requires_grad]
        setting.model.set_reshard_after_backward(False)
        step = setting.captured()
        launches: list[tuple[str, ...]] = []
        launch, record = gather.launch, setting.recorder.record
        recorded: list[tuple[str, ...]] = []

        def watched(targets: Any, comm: Any) -> Any:
            launches.append(tuple(target.weight.fqn for target in targets))
            return launch(targets, comm)

        def recording(run: Callable[[], Any]) -> Any:
            launches.clear()
            result = record(run)
            recorded.extend(launches)
            return result

        with mock.patch.object(gather, "launch", watched), mock.patch.object(setting.recorder, "record", recording):
            setting.check_steps(step, 2)
            launches.clear()
            setting.check(step, rows(2))
            eager = list(launches)
            setting.check(step, rows(3))
        assert any("1.first" in names for names in recorded)
        assert eager == recorded

    def test_what_cannot_be_captured_is_refused_at_once(self) -> None:
        model, linear = Setting().model, nn.Linear(2, 2)
        cases: list[tuple[tuple[Any, ...], dict[str, Any], type[Exception], str]] = [
            ((print, model), {}, RuntimeError, r"records CUDA graphs, but the weights of the .* are on 'cpu'"),
            ((print, linear), {}, ValueError, r"expects a module that gtp_shard was called on"),
            ((3, model), {}, TypeError, r"expects a function as fn, but got int"),
            ((print, "model"), {}, TypeError, r"expects an nn.Module as module, but got str"),
            ((linear, lambda: None), {}, TypeError, r"expects an nn.Module as module, but got function"),
            ((print, linear, linear), {}, TypeError, r"expects optimizers as optimizer, but got Linear"),
            ((print, model, [3]), {}, TypeError, r"expects optimizers as optimizer, but got int"),
            ((print, model), {"warmup_steps": 1}, ValueError, r"expects warmup_steps >= 2, but got 1"),
            ((print, model), {"max_graphs": 2.0}, TypeError, r"expects an int as max_graphs, but got 2.0"),
        ]
        for args, options, error, match in cases:
            with pytest.raises(error, match=match):
                capture_step(*args, **options)
        for aid in ("order", "finite"):
            with environment(DTENSOR_GTP_DEBUG=aid):
                setting = Setting()
            with pytest.raises(RuntimeError, match=f"DTENSOR_GTP_DEBUG={aid}, because the host waits"):
                capture_step(print, setting.model)

    def test_tensors_that_an_argument_hides_are_refused(self) -> None:
        """The same object with another batch in it would look the same."""
        step = Setting().captured()

        class Slotted:
            __slots__ = ("tokens",)

        class Batch:
            tokens: Any

        nested = [{"first": rows(0)}]
        for cls, tokens in ((Batch, rows(0)), (Batch, nested), (Batch, Result(nested)), (Slotted, rows(0))):
            batch = cls()
            batch.tokens = tokens
            with pytest.raises(ValueError, match=rf"but got a {cls.__name__} with one as 'tokens'.*Pass its tensors"):
                step(batch)

        cache = Batch()
        cache.tokens = [SimpleNamespace(keys=rows(0), model=nn.Linear(2, 2))]  # as a cache of transformers has layers
        with pytest.raises(ValueError, match=r"but got a Batch with one as 'tokens.keys'.*Pass its tensors"):
            step(cache)
        del cache.tokens[0].keys
        cache.tokens[0].around = cache  # a cycle
        Setting().captured_as(lambda batch: None)(cache)  # hides no tensor: a module is none

    def test_tensors_that_a_step_returns_in_a_dataclass_are_copied_and_detached(self) -> None:
        setting = Setting()

        def step(x: torch.Tensor) -> Any:
            return {"result": Result(setting.run(setting.model, setting.optimizers[1], x, 1.0)["loss"])}

        captured = setting.captured_as(step)
        results = [captured(rows(seed))["result"] for seed in range(6)]
        assert setting.recorder.events == ["eager", "last", "record", *["replay"] * 4]
        for seed, result in enumerate(results):
            want = setting.run(setting.plain, setting.optimizers[0], rows(seed), 1.0)["loss"]
            torch.testing.assert_close(result.loss, want.detach())
            assert not result.loss.requires_grad
            assert result.name == "loss"

    @pytest.mark.parametrize("hide", [lambda loss: SimpleNamespace(loss=loss), lambda loss: Own(loss=loss)])
    @pytest.mark.parametrize("wrap", [lambda hidden: hidden, lambda hidden: Result([hidden])])
    def test_tensors_that_a_result_hides_are_refused(self, hide: Any, wrap: Any) -> None:
        """The next replay would overwrite them."""
        setting = Setting()
        is_hiding = True

        def step(x: torch.Tensor) -> Any:
            loss = setting.run(setting.model, setting.optimizers[1], x, 1.0)["loss"]
            return wrap(hide(loss)) if is_hiding else loss

        captured = setting.captured_as(step)
        with pytest.raises(ValueError, match=r"but returned a \w+ with one as 'loss'.*Return its tensors"):
            captured(rows(0))
        is_hiding = False
        for seed in range(2):
            captured(rows(seed))
        is_hiding = True
        with pytest.raises(RuntimeError, match=r"could not record the step.*returned a \w+ with one as 'loss'"):
            captured(rows(2))


@dataclass
class Result:
    loss: Any
    name: str = "loss"


class Own(dict[str, Any]):
    """What pytree does not know."""


def test_optimizers_that_cannot_be_captured_are_named() -> None:
    params = [nn.Parameter(torch.ones(2, device="meta"))]
    with pytest.raises(ValueError, match=r"group 0 of AdamW has capturable=False. Create it with capturable=True"):
        check_optimizer(torch.optim.AdamW(params), nn.ParameterList(params))
    check_optimizer(torch.optim.SGD(params, momentum=0.9), nn.ParameterList(params))
    device = torch.device("meta")
    adagrad = torch.optim.Adagrad(params)
    with pytest.raises(ValueError, match=r"whose state is on 'meta', but 'step' of Adagrad is on 'cpu'"):
        check_state(adagrad, device)
    sgd = torch.optim.SGD(params, momentum=0.9)
    sgd.state[params[0]] = {"momentum_buffer": torch.ones(2, device="meta")}
    check_state(sgd, device)
    sgd.state[params[0]]["count"] = 3
    with pytest.raises(ValueError, match=r"'count' of SGD is a Python number"):
        check_state(sgd, device)


def test_inputs_that_a_graph_cannot_read_are_refused() -> None:
    with pytest.raises(ValueError, match=r"expects tensors on 'meta', but got one of shape \(2,\) on 'cpu'"):
        check_inputs([3, torch.ones(2)], torch.device("meta"))
    with pytest.raises(ValueError, match=r"inputs that need no gradient, but one of shape \(2,\) does"):
        check_inputs([torch.ones(2, requires_grad=True)], torch.device("cpu"))


def test_example_runs() -> None:
    root = Path(__file__).parents[2]
    job = run_forked([root / "examples" / "cuda_graph_step.py", "--steps", "2"], None, CUDA_VISIBLE_DEVICES="")
    assert job.status == 0, job.output
    assert "2 steps, eager" in job.output


def test_unsynced_gradients_of_blocks_survive_replays() -> None:
    """A recorded microbatch leaves the sum of each group of weights where its replays find it."""
    with fake_mesh(2) as mesh:
        torch.manual_seed(0)
        plain = Model()
        captured, eager = (gtp_shard(copy.deepcopy(plain), mesh, schedule=CHOSEN) for _ in range(2))

        def microbatch(model: nn.Module, x: torch.Tensor) -> None:
            model(x).square().mean().backward()

        recorder = OnHost(captured, [])
        step = captured_step(lambda x: microbatch(captured, x), captured, [], [runtime_of(captured)], recorder, 2, 8)
        for outer in range(5):
            for index in range(3):
                x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(10 * outer + index))
                for model in (captured, eager):
                    model.set_requires_gradient_sync(index == 2)
                    # In some steps, only recorded microbatches use the blocks.
                    model.call = (lambda layer, x: x) if index == 2 and outer % 2 else (lambda layer, x: layer(x))
                microbatch(eager, x)
                if index == 2:
                    microbatch(captured, x)
                else:
                    step(x)
            for (name, a), b in zip(captured.named_parameters(), eager.parameters(), strict=True):
                assert (a.grad is None) == (b.grad is None) == ("unused" in name), name
                if a.grad is not None:
                    torch.testing.assert_close(a.grad.to_local(), b.grad.to_local(), msg=lambda m, n=name: f"{n}: {m}")
                    a.grad = b.grad = None
        assert len(members_of(captured).groups) == 3
        assert recorder.events.count("replay") > 2
