"""The fullest moment of a step: worked out by hand for three layers, and held against what H200s have measured."""

import dataclasses
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from common import fake_mesh
from schedules import explicit
from torch._C._distributed_c10d import FakeWork
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_gtp import gtp_shard, sharding_report
from dtensor_gtp.planner import memory
from dtensor_gtp.policy import Schedule
from dtensor_gtp.report import PassReport

SCRIPTS = Path(__file__).resolve().parents[2] / "examples" / "benchmarks"


@pytest.fixture(scope="module")
def scripts() -> Any:
    names = ("explain_memory", "llama", "modes", "report")
    with mock.patch.object(sys, "path", [str(SCRIPTS), *sys.path]):
        return SimpleNamespace(**{name: import_module(name) for name in names})


def use(name: str, **parts: Any) -> memory.Use:
    """A use with the same amounts all the time, unless they are given one by one."""
    for kind in ("gathered", "activations"):
        parts[kind] = memory.Amounts(*((parts[kind],) * 5 if isinstance(parts[kind], int) else parts[kind]))
    return memory.Use(name, **{"wgrad": 0, "sent": 0, "grad": 0, **parts})


def waiting_for(max_inflight: int, together: int = 0) -> Schedule:
    return Schedule(max_inflight_reduce_scatters=max_inflight, coalesce_grad_nbytes=together)


def test_what_an_exchange_receives() -> None:
    """Gradients of 2 bytes an element from four ranks, or from three: a kernel that adds reads the own addend."""
    amounts = memory.Amounts(0, 0, 0, 0, 0)
    for numel, num_senders in ((1 << 20, 4), (32 << 20, 3)):
        weight = SimpleNamespace(numel=numel, is_table=False, is_frozen=False, amounts=amounts)
        item: Any = SimpleNamespace(name="w", weight=weight, axis=SimpleNamespace(size=4), state_numel=numel // 4)
        assert memory.make_use(item, amounts, 2, "all_to_all").sent == num_senders * 2 * numel // 4
        assert memory.make_use(item, amounts, 2, "copy_engine").sent == 3 * 2 * numel // 4


def test_every_moment_of_two_uses() -> None:
    first = use("a", gathered=(1, 2, 3, 4, 5), activations=(10, 20, 30, 40, 50), wgrad=100, sent=7, grad=1000)
    second = use("b", gathered=(6, 7, 8, 9, 10), activations=(60, 70, 80, 90, 99), wgrad=200, sent=8, grad=2000)
    assert [moment[2:] for moment in memory.moments([first, second], 5, waiting_for(1))] == [
        (0, 1, 0, 10),
        (0, 2, 0, 20),
        (0, 6, 0, 60),
        (0, 7, 0, 70),
        (0, 8, 0, 80),
        (0, 9, 200 + 8 + 2000, 90),
        (2000, 10, 200 + 8, 99),
        (2000, 3, 200 + 8, 30),
        (2000, 4, (200 + 8) + 100 + 7 + 1000, 40),  # that of b is in flight until a's buffers are there
        (3000, 5, 100 + 7, 50),
    ]


def test_gradients_and_sends_pile_up_towards_the_end() -> None:
    uses = [use(name, gathered=20, activations=1, wgrad=10, grad=5) for name in "abc"]
    expected = {1: 10 + 10, 2: 20 + 10, 3: 20 + 10}  # sends of b, or of c and b, and the gradient of a
    for max_inflight, wgrad in expected.items():
        peak = memory.predict_peak(uses, 0, waiting_for(max_inflight))
        assert peak == ("in backward of a", 0, 10, 20, wgrad + 5, 1)
    table = [use("table", gathered=0, activations=1, wgrad=10, grad=5, unreduced=100), *uses]
    assert memory.predict_peak(table, 0, waiting_for(1)) == ("in backward of table", 0, 15, 0, 10 + 110 + 5, 1)


def test_gradients_that_still_wait_are_reduced_at_the_end() -> None:
    uses = [use(name, gathered=(20, 20, 20, 20, 3), activations=1, wgrad=10, sent=2, grad=5) for name in "ab"]
    *_, last = memory.moments(uses, 7, waiting_for(1, 100))
    # Both are computed, and as their rows arrive the shards' gradients are made.
    assert last == ("after backward of a", 7, 0, 3, 2 * 10 + 2 * (2 + 5), 1)
    assert [moment[0] for moment in memory.moments(uses, 7, waiting_for(1))].count(last[0]) == 0


def test_gradients_in_the_ring_and_of_exchanged_tables() -> None:
    """Of what is in symmetric memory only what the allocator has beside it; a table has no full gradient."""
    table = use("table", gathered=0, activations=1, wgrad=0, grad=50, unreduced=300, is_exchanged=True)
    layer = use("a", gathered=0, activations=1, wgrad=10, sent=10, grad=5, is_in_ring=True)
    wgrads = [moment.wgrad for moment in memory.moments([table, layer], 0, waiting_for(2))]
    # Forward; before, in and after the layer; before, in and after the table.
    assert wgrads == [0, 0, 0, 0, 0, 10 + 5, 10, 10, 10 + 300 + 50, 10]
    assert memory.moments([table, layer], 0, waiting_for(2))[-1].gradients == 5 + 50
    waiting = [moment.wgrad for moment in memory.moments([table, layer], 0, waiting_for(2, 100))]
    assert waiting == [0, 0, 0, 0, 0, 0, 0, 0, 300 + 50, 0, 10 + 5]


def test_dgrad_before_wgrad() -> None:
    first = use("a", gathered=(1, 2, 3, 4, 5), activations=(10, 20, 30, 40, 50), wgrad=100, sent=7, grad=1000)
    second = use("b", gathered=(6, 7, 8, 9, 10), activations=(60, 70, 80, 90, 99), wgrad=200, sent=8, grad=2000)
    assert [
        moment[2:]
        for moment in memory.moments([first, second], 5, dataclasses.replace(waiting_for(1), wgrad_first=False))[4:]
    ] == [
        (0, 8, 0, 80),
        (0, 10, 0, 99),
        (0, 3, 200 + 8 + 2000, 99),  # of gathered weights what is there before a, of activations b's gradient too
        (2000, 3, 200 + 8, 30),
        (2000, 5, 200 + 8, 50),
        (2000, 4, (200 + 8) + 100 + 7 + 1000, 50),
    ]


def test_peaks_outside_of_backward() -> None:
    small = use("b", gathered=1, activations=1, wgrad=1, grad=1)
    in_forward = use("a", gathered=(500, 1, 1, 1, 1), activations=1)
    assert memory.predict_peak([in_forward, small], 7, waiting_for(2)) == ("in forward of a", 7, 0, 500, 0, 1)
    in_loss = use("c", gathered=10, activations=(1, 1, 900, 1, 1), wgrad=100)
    assert memory.predict_peak([small, in_loss], 7, waiting_for(2)) == ("before backward of c", 7, 0, 10, 0, 900)


def test_without_uses() -> None:
    with pytest.raises(ValueError, match="predict_peak expects at least one use"):
        memory.predict_peak([], 0, Schedule())


def test_description_beside_a_measurement(scripts: Any) -> None:
    peak, describe = memory.Peak("in backward of a", 2**30, 0, 2**29, 2**28, 2**28), scripts.report.describe_peak
    assert describe(peak, 2**31 + 2**30).endswith("measured 3072.0 MiB (+50.0%)")
    text = describe(peak)
    parts = "state 1024.0, gradients 0.0, gathered 512.0, wgrad 256.0, activations 256.0"
    assert text.startswith(f"peak in backward of a: 2048.0 MiB = {parts}")
    assert text.endswith("(predicted for a GPU; there is no counter here)")


class Silence(TorchDispatchMode):
    """Collectives of fake tensors, which torch does not know, do nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace != "c10d":
            return func(*args, **(kwargs or {}))
        work = FakeWork().boxed()
        return work if len(func._schema.returns) == 1 else (args[0], work)


class Planned(NamedTuple):
    """A model that has done a step, of which all but memory was real."""

    model: torch.nn.Module
    workload: Any
    num_ranks: int


@pytest.fixture(scope="module", params=(8, 2))
def planned(request: pytest.FixtureRequest, scripts: Any) -> Iterator[Planned]:
    """The benchmark's default model on some ranks."""
    preset = dataclasses.asdict(scripts.modes.PRESETS["llama8b-width"])
    layers, seq_lens = preset.pop("layers"), preset.pop("seq_lens")
    config = scripts.llama.LlamaConfig(num_layers=layers, max_seq_len=seq_lens[-1], **preset)
    num_ranks: int = request.param
    with fake_mesh(num_ranks) as mesh:
        with torch.device("meta"):
            model = scripts.llama.Llama(config)
        schedule = explicit(coalesce_nbytes=64 << 20, coalesce_grad_nbytes=TOGETHER)
        gtp_shard(model, mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32), schedule=schedule)
        with FakeTensorMode(allow_non_fake_inputs=True), Silence():
            model.to_empty(device="cpu")
            tokens = torch.zeros(1, 16, dtype=torch.int64)
            F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        yield Planned(model, scripts.modes.Workload(config, 1, 0, {}), num_ranks)


class Measured(NamedTuple):
    """``torch.cuda.max_memory_allocated`` in steps of ``train_step.py`` less the state, in bytes, and where it is."""

    mode: str
    seq_len: int
    above_state: tuple[float, ...]
    moment: str


GIB = 2**30

# Gradients of so many bytes travelled together in these measurements; weights of 64 MiB.
TOGETHER = 4 << 20

# torch 2.11.0+cu130, 2026-11-20. 8 H200s, to the byte: forward and backward, then the full step.
# One H200 as one of two ranks, whose collectives communicate nothing.
MEASURED = {
    8: [
        Measured("gtp-fp32", 2048, (9850373632, 9851496884), "in backward of output.weight"),
        Measured("gtp-bf16", 2048, (8931034624, 8933206452), "in backward of output.weight"),
        Measured("gtp-fp32", 8192, (29518849536, 29519972788), "before backward of output.weight"),
        Measured("gtp-bf16", 8192, (29518849536, 29521021364), "before backward of output.weight"),
    ],
    2: [
        Measured("gtp-bf16", 512, (9.98 * GIB,), "in backward of embedding.weight"),
        Measured("gtp-bf16", 2048, (9.99 * GIB,), "in backward of embedding.weight"),
        Measured("gtp-bf16", 8192, (27.49 * GIB,), "before backward of output.weight"),
    ],
}


def test_prediction_is_what_gpus_have_measured(scripts: Any, planned: Planned) -> None:
    model, workload, num_ranks = planned
    for mode, seq_len, above_state, moment in MEASURED[num_ranks]:
        uses = scripts.explain_memory.explain_uses(model, mode, workload, seq_len, num_ranks)
        found = memory.predict_peak(uses, 0, waiting_for(2, TOGETHER))
        assert found.moment == moment
        for measured in above_state:
            # Asked for are 5%. But nothing is fitted: what is not understood shows up as a whole buffer.
            assert found.total == pytest.approx(measured, rel=2e-3), (mode, seq_len)


def test_table_that_is_not_gathered(scripts: Any, planned: Planned) -> None:
    """The plan of a gathered one, less its use: what comes in its place is made of tokens."""
    model, workload, num_ranks = planned
    report = sharding_report(model)
    forward, backward = report.passes
    later = [column[1:] for column in (forward.uses, forward.gathered_nbytes, forward.between_nbytes)]
    plans = [dataclasses.replace(report.plans[0], memory=PassReport(False, *later)), *report.plans[1:]]
    report = dataclasses.replace(report, plans=tuple(plans))
    assert report.passes == (PassReport(False, *later), backward)
    recorded = scripts.explain_memory.weights_of(workload, 16)
    weights = {name: weight._replace(amounts=memory.Amounts(1, 1, 1, 1, 1)) for name, weight in recorded.items()}
    table, layer, *_ = scripts.explain_memory.plan_uses(report, weights, num_ranks, 2, "copy_engine", 2048)
    received = num_ranks * 2048 * 4096
    assert (table.name, table.is_exchanged, table.wgrad, table.sent) == ("embedding.weight", True, 0, 0)
    assert table.activations == (1 + 6 * received, 1, 1, 1, 1)
    assert table.gathered == (later[2][0], later[2][0], 0, 0, 0)
    assert table.unreduced == 6 * received + 2048 * 4096 * 2
    assert table.grad == (-(-128256 // num_ranks) + 1) * 4096 * 4
    assert (layer.name, layer.is_in_ring, layer.buffer) == ("layers.0.attention.wq.weight", True, 0)
    assert layer.sent == 4096 * 4096 * 2 * (num_ranks - 1) // num_ranks


def test_modes_that_are_not_explained(scripts: Any, planned: Planned) -> None:
    of_gtp = ("-exchange", "-compiled", "-blockgraphs", "@float8_tensorwise")
    for mode in ("fsdp2-fp32", *(f"gtp-bf16{kind}" for kind in of_gtp)):
        assert scripts.explain_memory.explain_uses(planned.model, mode, planned.workload, 16, planned.num_ranks) is None
