"""``capture_step`` without a GPU where a recording fails: nothing of it is left, and training goes on. And
``torch.cuda.make_graphed_callables`` on what ``gtp_shard`` manages, which raises instead of training nothing.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from capture_common import Setting, captured_step, rows
from common import ALL, fake_mesh, fake_world
from runtime_common import Raw, assert_idle, local, members_of, runtime_of
from schedules import changed, explicit
from test_capture_blocks import Wire, Work, one_of
from torch.cuda.graphs import make_graphed_callables  # torch's own, if this is imported before any gtp_shard
from torch.distributed.device_mesh import DeviceMesh

from dtensor_gtp import SchedulePolicy, gtp_shard
from dtensor_gtp._comm.copy_engine import CopyEngine
from dtensor_gtp._comm.streams import Streams
from dtensor_gtp._schedule.keep_and_free import Keeper
from dtensor_gtp._schedule.saved_weights import SavedWeights
from dtensor_gtp.graphs.recorder import _refusing_synchronization
from dtensor_gtp.nn import GroupedLinear


class Breaking(nn.Module):
    """Raises where it is told to, in a recording; and what the recording has launched can be waited for in it alone, as
    events can, and not after the error if that has made it void."""

    def __init__(self, where: str, is_void: bool) -> None:
        super().__init__()
        self.where, self.makes_void = where, is_void
        self.is_recording = self.is_void = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.where == "forward":
            self.fail()
        if x.requires_grad and self.where == "backward":
            x.register_hook(lambda grad: self.fail())
        return x

    def fail(self) -> None:
        if self.is_recording:
            self.is_void = self.makes_void
            raise RuntimeError("broken")

    @contextmanager
    def eager(self, *, is_last: bool) -> Iterator[None]:
        yield

    def record(self, step: Callable[[], Any]) -> Any:
        self.is_recording = True
        try:
            step()
        finally:
            self.is_recording, self.is_void = False, True

    def launch(self, wire: Wire) -> Callable[..., Work]:
        launch, breaking = wire.launch, self

        class Captured(Work):
            def wait(self) -> None:
                if breaking.is_void:
                    raise RuntimeError("operation not permitted on an event last recorded in a capturing stream")
                super().wait()

        def launched(*args: Any) -> Work:
            work = launch(*args)
            return Captured(work.complete) if self.is_recording and work.complete else work

        return launched


def test_copy_engines_hear_of_a_recording_that_failed_alone() -> None:
    with one_of(4) as (mesh, wire):
        breaking = Breaking("forward", is_void=False)
        model = gtp_shard(nn.Sequential(nn.Linear(12, 12), breaking), mesh, schedule=ALL)
        engine = mock.Mock(spec=CopyEngine)
        runtime = runtime_of(model)
        captured = captured_step(lambda x: model(x).sum().backward(), model, [], [runtime], breaking, 2, 8)
        with mock.patch.object(runtime.comm, "_peer_copies", return_value=[engine]):
            for seed in range(2):
                captured(rows(seed))
                model.zero_grad()
            assert not engine.mock_calls
            with (
                mock.patch.object(wire, "launch", breaking.launch(wire)),
                pytest.raises(RuntimeError, match="could not record the step: RuntimeError: broken"),
            ):
                captured(rows(2))
            assert engine.mock_calls == [mock.call.begin_recording(), mock.call.forget_recording()]


@pytest.mark.parametrize("is_void", [False, True])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_nothing_is_left_of_a_recording_that_failed(where: str, is_void: bool) -> None:
    with one_of(4) as (mesh, wire):
        models, breaking = [], Breaking(where, is_void)
        schedule = changed(
            ALL, prefetch_depth=2, coalesce_nbytes=0, coalesce_grad_nbytes=0, max_inflight_reduce_scatters=4
        )
        for middle in (breaking, nn.Identity()):
            torch.manual_seed(0)
            layers = (nn.Linear(12, 12), Raw(), nn.LayerNorm(12), middle, nn.Linear(12, 12), Raw(), nn.Linear(12, 12))
            models.append(gtp_shard(nn.Sequential(*layers), mesh, schedule=schedule))

        def step(x: torch.Tensor, model: nn.Module = models[0]) -> torch.Tensor:
            loss = model(x).square().mean()
            loss.backward()
            with torch.no_grad():
                for param in model.parameters():
                    param -= 0.1 * param.grad
            model.zero_grad()
            return loss.detach()

        arguments = (step, models[0], [], [runtime_of(models[0])], breaking)
        captured = captured_step(*arguments, warmup_steps=2, max_graphs=8)
        for seed in range(2):
            assert torch.equal(captured(rows(seed)), step(rows(seed), models[1]))
        with (
            mock.patch.object(wire, "launch", breaking.launch(wire)),
            pytest.raises(
                RuntimeError, match=r"could not record the step: RuntimeError: (broken|operation not permitted)"
            ),
        ):
            captured(rows(2))
        assert_idle(models[0])
        for seed in range(3):
            assert torch.equal(step(rows(seed)), step(rows(seed), models[1]))
        for a, b in zip(*(model.parameters() for model in models), strict=True):
            assert torch.equal(local(a), local(b))


def test_writes_that_no_kernel_has_made_reach_no_shard() -> None:
    """A block clips its weights in the forward, and the recording is void before the block ends: what is left in its
    memory was never computed."""

    class Clipped(nn.Module):
        is_void = False

        def __init__(self) -> None:
            super().__init__()
            self.up = nn.Linear(12, 12)
            self.down = nn.Linear(12, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                self.up.weight.clamp_(-1, 1)
            if self.is_void:
                for full in group.leaves.outputs:
                    full.fill_(float("nan"))
                raise RuntimeError("operation failed due to a previous error during capture")
            out: torch.Tensor = self.down(self.up(x))
            return out

    with fake_mesh(2) as mesh:
        blocks = [Clipped() for _ in range(3)]
        model = gtp_shard(nn.Sequential(*blocks), mesh, schedule=SchedulePolicy(min_shard_numel=0))
        model(rows(0)).sum().backward()
        group, *_ = members_of(model).groups
        before = [local(param).clone() for param in model.parameters()]
        blocks[0].is_void = True
        refused = mock.patch.object(Keeper, "free", side_effect=RuntimeError("operation not permitted"))
        with refused, pytest.raises(RuntimeError, match="operation not permitted"):
            model(rows(1))
        runtime_of(model).forget_recording()
        for param, value in zip(model.parameters(), before, strict=True):
            assert torch.equal(local(param), value)


def test_step_that_cannot_be_recorded_leaves_gradients() -> None:
    with fake_world(world_size=1):
        setting = Setting(is_stepping=False)

        def failing(step: Callable[[], Any]) -> Any:
            step()
            raise RuntimeError("operation not permitted when stream is capturing")

        step = setting.captured(warmup_steps=2)
        for _ in range(2):
            step(rows(0))
            setting.model.zero_grad()
        setting.recorder.record = failing  # type: ignore[method-assign]
        match = r"could not record the step: RuntimeError: operation not permitted.*item\(\)"
        with pytest.raises(RuntimeError, match=match):
            step(rows(0))
        assert all(param.grad is None for param in setting.model.parameters())


def test_code_that_waits_only_outside_of_recordings_passes_the_step_before_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers reads masks there. The streams of the package know that nothing is recorded yet."""
    modes = [0]
    for module in (torch.cuda, torch.cuda.graphs):
        monkeypatch.setattr(module, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)

    def waits() -> None:
        if not torch.cuda.is_current_stream_capturing():
            raise RuntimeError("called a synchronizing CUDA operation")

    with _refusing_synchronization():
        waits()
        assert not torch.cuda.graphs.is_current_stream_capturing()
    with pytest.raises(RuntimeError, match="synchronizing"):
        waits()
    with (
        pytest.raises(RuntimeError, match="capture_step expects a step that does not wait"),
        _refusing_synchronization(),
    ):
        raise RuntimeError("called a synchronizing CUDA operation")
    assert not torch.cuda.is_current_stream_capturing()
    assert modes == [0, "error", 0, "error", 0]


def test_a_recording_of_a_block_that_is_interrupted_at_once_releases_nothing_of_others(mesh: DeviceMesh) -> None:
    reads = runtime_of(gtp_shard(nn.Linear(8, 8), mesh, schedule=ALL)).reads
    of_others = mock.Mock()
    reads.saved_in_backward.append(of_others)
    interrupted = mock.patch.object(SavedWeights, "push", side_effect=KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt), interrupted, reads.apart(is_forward=True):
        pass
    assert reads.saved_in_backward == [of_others]
    of_others.release.assert_not_called()


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh(1) as mesh:
        yield mesh


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.experts = GroupedLinear(2, 8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(self.block(x), torch.tensor([3, 1]))


def test_modules_with_managed_parameters_are_refused(mesh: DeviceMesh) -> None:
    plain = Net()
    model = gtp_shard(copy.deepcopy(plain), mesh, schedule=ALL)
    x = (torch.zeros(4, 8),)
    for callables, name in (
        (model, "block.0.weight"),
        ((torch.tanh, model.block), "0.weight"),
        (model.experts, "weight"),
    ):
        args = (x, x) if isinstance(callables, tuple) else x
        for make in (torch.cuda.make_graphed_callables, torch.cuda.graphs.make_graphed_callables):
            match = rf"does not support a \w+ after gtp_shard: the gradient of '{name}'"
            with pytest.raises(RuntimeError, match=match):
                make(callables, args, allow_unused_input=True)


def test_all_other_callables_are_torchs(mesh: DeviceMesh) -> None:
    gtp_shard(Net(), mesh, schedule=ALL)
    called = torch.cuda.make_graphed_callables
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda *_: None)
    with pytest.raises(AssertionError, match="Modules must not have hooks"):
        called(module, (torch.zeros(2),))
    assert called.__doc__ == make_graphed_callables.__doc__
    gtp_shard(Net(), mesh, schedule=ALL)
    assert torch.cuda.make_graphed_callables is called, "it is replaced once"


def test_a_recorded_backward_without_a_trained_weight_raises(mesh: DeviceMesh) -> None:
    model = gtp_shard(Net(), mesh, schedule=ALL)
    several = gtp_shard(GroupedLinear(2, 8, 8, bias=False, single_grouped_weight=False), mesh, schedule=ALL)
    x = torch.randn(4, 8, requires_grad=True)
    for call, name in (
        (model, "experts.weight"),
        (model.block, "block.0.weight"),
        (lambda x: several(x, torch.tensor([3, 1])), "weight0"),
    ):
        (grad,) = torch.autograd.grad(call(x).sum(), x)
        assert grad is not None
        output = call(x).sum()
        with mock.patch.object(Streams, "is_capturing", True):
            with pytest.raises(RuntimeError, match=rf"records a backward without the gradient of '{name}'"):
                torch.autograd.grad(output, x)
    model.requires_grad_(False)
    output = model(x).sum()
    with mock.patch.object(Streams, "is_capturing", True):
        torch.autograd.grad(output, x)


def test_a_recording_with_more_tokens_than_an_exchange_carries_raises() -> None:
    """Before the host would ask the device how many the others have, which ends a recording."""
    schedule = explicit(min_shard_numel=0, embedding="exchange", exchange_tokens=2)
    with fake_mesh(2) as mesh:
        table = gtp_shard(nn.Embedding(8, 4), mesh, schedule=schedule)
        with mock.patch.object(Streams, "is_capturing", True):
            with pytest.raises(ValueError, match=r"at most 2 tokens on each rank.* but got 3 tokens in a recording"):
                table(torch.tensor([1, 2, 3]))
