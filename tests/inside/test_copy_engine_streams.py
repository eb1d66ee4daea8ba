"""The streams of the copy engine's gathers: in whatever order they get on, nothing is read too early or overwritten.

Streams are queues here, which a drawn order works off: an operation runs when all before it in its stream have, a wait
when its event has been recorded, and a barrier when all ranks have come to it. In a step that a CUDA graph records a
stream belongs to the graph once it has waited for one that does, and then must not wait for any other.

Barriers of streams have a generator that does what a GPU's front end would do for each rank.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from dtensor_gtp import _torch_compat as compat
from dtensor_gtp._comm import copy_engine
from dtensor_gtp._comm.copy_engine import CopyEngine
from dtensor_gtp._torch_compat import driver
from dtensor_gtp._torch_compat.driver import SignalBarrier

NUM_RANKS, NUM_WEIGHTS, NUMEL = 3, 5, 4
CPU = torch.device("cpu")


class Event:
    is_recorded = False

    def __init__(self, is_of_graph: bool) -> None:
        self.is_of_graph = is_of_graph


class Stream:
    """A queue of operations: functions that run, or say that they have to wait by returning False."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.queue: list[Callable[[], object]] = []

    def wait_event(self, event: Event) -> None:
        graph = self.machine.graph
        if graph is not None:
            assert event.is_of_graph or self not in graph, "a graph would wait for what is not in it"
            graph.update([self] * event.is_of_graph)
        self.queue.append(lambda: event.is_recorded)

    def record_event(self) -> Event:
        event = Event(self.machine.graph is not None and self in self.machine.graph)
        self.queue.append(lambda: setattr(event, "is_recorded", True))
        return event

    def __enter__(self) -> None:
        self.machine.current.append(self)

    def __exit__(self, *exception: object) -> None:
        self.machine.current.pop()


class Machine:
    """All ranks: their streams and stages, and the stream that is current where operations are queued."""

    def __init__(self) -> None:
        self.streams: list[Stream] = []
        self.current: list[Stream] = []
        self.stages: dict[int, torch.Tensor] = {}
        self.arrived: Counter[int] = Counter()
        self.graph: set[Stream] | None = None  # the streams of the graph that is recorded
        self.num_graphs = 0

    def stream(self) -> Stream:
        self.streams.append(Stream(self))
        return self.streams[-1]

    def current_stream(self, index: int | None) -> Stream:
        return self.current[-1]

    def queue(self, operation: Callable[[], object]) -> None:
        self.current[-1].queue.append(lambda: (operation(), True)[1])

    def run(self, dice: random.Random) -> None:
        """Work off all queues."""
        while any(stream.queue for stream in self.streams):
            candidates = [stream for stream in self.streams if stream.queue]
            dice.shuffle(candidates)
            # One stream gets on for a while, as far as it can, before others do.
            for stream in candidates:
                steps = 0
                while stream.queue and steps < dice.randint(1, 8) and stream.queue[0]() is not False:
                    stream.queue.pop(0)
                    steps += 1
                if steps:
                    break
            else:
                raise AssertionError("all streams wait for each other")

    def copy_all(self, targets: list[torch.Tensor], sources: list[torch.Tensor]) -> None:
        for target, source in zip(targets, sources, strict=True):
            self.queue(lambda target=target, source=source: target.copy_(source))


class Stage:
    """Stands for ``SymmetricBuffer``."""

    def __init__(self, machine: Machine, rank: int, nbytes: int) -> None:
        self.machine, self.nbytes, self._num_barriers = machine, nbytes, 0
        machine.stages[rank] = torch.full((nbytes,), 0x7F, dtype=torch.uint8)

    def view(self, rank: int, offset: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        nbytes = shape.numel() * dtype.itemsize
        return self.machine.stages[rank][offset : offset + nbytes].view(dtype).view(shape)

    def fetch(self, rows: Sequence[tuple[int, int]], fetches: Sequence[compat.Fetch]) -> None:
        for rank, row in rows:
            for one in fetches:
                self.machine.queue(partial(self._copy, rank, row, one))

    def _copy(self, rank: int, row: int, one: compat.Fetch) -> None:
        source = self.machine.stages[rank].data_ptr() + one.offset
        ctypes.memmove(one.target + row * one.stride, source, one.nbytes)

    def barrier(self, turn: int) -> None:
        number, arrived = self._num_barriers, self.machine.arrived
        self._num_barriers += 1
        self.machine.queue(lambda: arrived.update([number]))
        self.machine.current[-1].queue.append(lambda: arrived[number] == NUM_RANKS)


class Engine(CopyEngine):
    def __init__(self, machine: Machine, rank: int, round_nbytes: int | None) -> None:
        self._machine = machine
        super().__init__(mock.Mock(rank=lambda: rank, size=lambda: NUM_RANKS), CPU, round_nbytes)
        self.cast_stream = machine.stream()  # type: ignore[assignment]

    def _allocate(self, nbytes: int) -> Any:
        return Stage(self._machine, self.rank, max(nbytes, 4096))  # never grows: that waits for all streams

    def _wait_on_host(self) -> None:
        raise AssertionError("the stage has grown")

    def _is_capturing(self) -> bool:
        return self._machine.graph is not None

    def _recording(self) -> int | None:
        return self._machine.num_graphs if self._is_capturing() else None


@contextmanager
def on_machine(machine: Machine) -> Any:
    with (
        mock.patch.object(copy_engine, "refuse_without_symmetric_memory"),
        mock.patch.object(compat, "copy_all", machine.copy_all),
        mock.patch.object(copy_engine.torch.accelerator, "current_stream", machine.current_stream),
    ):
        yield


class Rank:
    """A training loop: forward and backward gather all weights. Shards are written to after every other step, and in
    the forward that follows the others, each right before it is gathered. If ``packs``, what is sent is made of the
    shard in forward, on the stream of casts, where the last forward's has been. If ``records``, a graph records the
    second step, another one the third; each is replayed once."""

    def __init__(self, machine: Machine, rank: int, packs: bool, records: bool, round_nbytes: int | None) -> None:
        self.machine, self.rank, self.records = machine, rank, records
        self.packed = [torch.empty(NUMEL) for _ in range(NUM_WEIGHTS)] if packs else None
        self.engine = Engine(machine, rank, round_nbytes)
        self.compute, self.gathers = machine.stream(), machine.stream()
        self.shards = [self._value(weight, 0) for weight in range(NUM_WEIGHTS)]
        # As an allocator has it: what is freed is the next to be used, in the order of the compute stream.
        self.free = [torch.empty(NUM_RANKS * NUMEL, dtype=torch.float64) for _ in range(3)]

    def _value(self, weight: int, step: int, rank: int | None = None) -> torch.Tensor:
        return torch.full((NUMEL,), float(100 * step + 10 * weight + (self.rank if rank is None else rank)))

    def _write(self, weight: int, step: int) -> None:
        with self.compute:
            self.machine.copy_all([self.shards[weight]], [self._value(weight, step)])

    def train(self, num_steps: int) -> None:
        for step in range(num_steps):
            if self.records and step in (1, 2):
                self.machine.graph, self.machine.num_graphs = {self.compute}, step
            for is_forward in (True, False):
                self.engine.begin_pass()
                weights = list(range(NUM_WEIGHTS))
                self._run_pass(weights if is_forward else weights[::-1], step, is_forward)
            self.machine.graph = None
            if step % 2 == 1:
                for weight in range(NUM_WEIGHTS):
                    self._write(weight, step + 1)

    def _run_pass(self, weights: list[int], step: int, is_forward: bool) -> None:
        """Each use is that of the gather before last: two are ahead."""
        launched: list[tuple[int, torch.Tensor, Event]] = []
        for weight in weights:
            if is_forward and step % 2 == 1:
                self._write(weight, step)
            launched.append((weight, *self._launch(weight, step, is_first=is_forward)))
            if len(launched) > 2:
                self._use(*launched.pop(0), step)
        for one in launched:
            self._use(*one, step)

    def _launch(self, weight: int, step: int, is_first: bool) -> tuple[torch.Tensor, Event]:
        output, sent = self.free.pop(), self.shards[weight]
        if self.packed is not None:
            sent = self.packed[weight]
            if is_first:
                self._pack(sent, self.shards[weight])
        ready = self.compute.record_event()
        self.gathers.wait_event(ready)
        with self.gathers:
            self.engine.all_gather([output], [sent], ready)  # type: ignore[arg-type, list-item]
        return output, self.gathers.record_event()

    def _pack(self, target: torch.Tensor, shard: torch.Tensor) -> None:
        stream: Any = self.engine.cast_stream
        stream.wait_event(self.compute.record_event())
        with stream:
            self.machine.queue(lambda: target.fill_(float("nan")))
            self.machine.copy_all([target], [shard])

    def _use(self, weight: int, output: torch.Tensor, done: Event, step: int) -> None:
        want = torch.cat([self._value(weight, step, rank) for rank in range(NUM_RANKS)])

        def check() -> None:
            assert torch.equal(output, want.double()), f"rank {self.rank}, step {step}, weight {weight}: {output}"
            output.fill_(float("nan"))

        self.compute.wait_event(done)
        with self.compute:
            self.machine.queue(check)
        self.free.append(output)


@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 40), marks=pytest.mark.long)], ids=["some", "many"])
@pytest.mark.parametrize("round_nbytes", [None, 3 * 8], ids=["whole", "in rounds"])
def test_gathers_of_ranks_that_get_on_in_any_order(seeds: range, round_nbytes: int | None) -> None:
    for seed, packs, records in itertools.product(seeds, (False, True), (False, True)):
        machine = Machine()
        with on_machine(machine):
            for rank in range(NUM_RANKS):
                Rank(machine, rank, packs, records, round_nbytes).train(4)
        machine.run(random.Random(seed))


# --- barriers and copies of the driver --------------------------------------------------------------------------------

NUM_AT_BARRIER, NUM_BARRIERS = 4, 60
# Several times as many as the slowest order takes.
MANY_TURNS = 100_000


def execute(operations: Any, memory: dict[int, int]) -> Iterator[None]:
    """As a GPU's front end: one operation, or one look at what it waits for, at a time."""
    for operation in operations:
        if operation.operation == driver._WRITE_VALUE:
            memory[operation.address] = operation.value
        else:
            assert (operation.operation, operation.flags) == (driver._WAIT_VALUE, driver._WAIT_EQUAL)
            while memory.get(operation.address, 0) != operation.value:
                yield
        yield


@pytest.mark.parametrize("seed", range(5))
def test_nobody_passes_before_all_have_come(seed: int) -> None:
    """In many orders: each rank has a speed of its own, up to ten times that of others."""
    dice, arrived = random.Random(seed), [0] * NUM_AT_BARRIER
    memory: dict[int, int] = {}  # of all ranks

    def run(rank: int) -> Iterator[None]:
        barrier = SignalBarrier([1000 * (other + 1) for other in range(NUM_AT_BARRIER)], rank)
        for index in range(NUM_BARRIERS):
            arrived[rank] += 1
            yield from execute(barrier._turns[index % 2], memory)
            assert min(arrived) > index

    ranks = [run(rank) for rank in range(NUM_AT_BARRIER)]
    speeds = [10 ** dice.random() for _ in ranks]
    for rank in dice.choices(range(NUM_AT_BARRIER), speeds, k=MANY_TURNS):
        next(ranks[rank], None)
    assert arrived == [NUM_BARRIERS] * NUM_AT_BARRIER, "somebody waits without end"
    # As at the begin: what is recorded once can be repeated.
    assert set(memory.values()) == {0}
    nbytes = driver.num_flag_bytes(NUM_AT_BARRIER)
    assert all(0 <= address % 1000 < nbytes for address in memory)


def test_layout_is_that_of_the_driver() -> None:
    """``CUstreamBatchMemOpParams`` is a union of 6 words of 64 bits."""
    assert ctypes.sizeof(driver._Operation) == 48
    offsets = {name: getattr(driver._Operation, name).offset for name in ("address", "value", "flags", "alias")}
    assert offsets == {"address": 8, "value": 16, "flags": 24, "alias": 32}


def test_a_refusal_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refuses:
        @staticmethod
        def cuStreamBatchMemOp_v2(*arguments: Any) -> int:
            return 801

    monkeypatch.setattr(driver, "_driver", Refuses)
    with pytest.raises(RuntimeError, match="failed with CUresult 801"):
        SignalBarrier([0, 1000], 0).wait(0, 7)


class Library:
    """Stands for the driver and the runtime: notes their calls, and what each copies."""

    def __init__(self, status: int = 0) -> None:
        self.status = status
        self.calls: list[tuple[str, list[int]]] = []

    def cuMemcpyBatchAsync_v2(self, targets: Any, sources: Any, sizes: Any, number: Any, *rest: Any) -> int:
        self.calls.append(("batch", [number.value, *targets, *sources, *sizes]))
        return self.status

    def cuMemcpyAsync(self, target: Any, source: Any, nbytes: Any, stream: Any) -> int:
        self.calls.append(("driver", [target.value, source.value, nbytes.value]))
        return 0

    def cudaMemcpyAsync(self, target: Any, source: Any, nbytes: Any, kind: Any, stream: Any) -> int:
        self.calls.append(("runtime", [target.value, source.value, nbytes.value, kind.value]))
        return self.status


# The empty one is left out: a batch may have none.
COPIES = [(1, 11, 5), (2, 12, 0), (3, 13, 6)]
BATCH, EACH = ("batch", [2, 1, 3, 11, 13, 5, 6]), [("driver", [1, 11, 5]), ("driver", [3, 13, 6])]


@pytest.mark.parametrize(
    ("status", "is_capturing", "calls"), [(0, False, [BATCH]), (801, False, [BATCH, *EACH]), (0, True, EACH)]
)
def test_copies_are_one_call_where_that_can_be(
    status: int, is_capturing: bool, calls: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    library = Library(status)
    monkeypatch.setattr(driver, "_driver", lambda: library)
    monkeypatch.setattr(driver, "_has_batches", lambda: True)
    monkeypatch.setattr(torch.cuda.graphs, "is_current_stream_capturing", lambda: is_capturing)
    driver.enqueue_copies(COPIES, 7)
    assert library.calls == calls


def test_copies_are_calls_of_the_runtime_while_a_profiler_records(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those have a launch in a trace, whose range is that of the copy."""
    monkeypatch.setattr(driver, "_has_batches", lambda: False)
    by_runtime = [("runtime", [1, 11, 5, 4]), ("runtime", [3, 13, 6, 4])]
    for has_runtime, calls in ((True, by_runtime), (False, EACH)):
        library = Library()
        monkeypatch.setattr(driver, "_driver", lambda library=library: library)
        monkeypatch.setattr(driver, "_runtime", lambda library=library if has_runtime else None: library)
        with torch.profiler.profile():
            driver.enqueue_copies(COPIES, 7)
        driver.enqueue_copies(COPIES[:1], 7)
        assert library.calls == [*calls, EACH[0]]
    monkeypatch.setattr(driver, "_runtime", lambda: Library(1))
    with torch.profiler.profile(), pytest.raises(RuntimeError, match="cudaMemcpyAsync failed with error 1"):
        driver.enqueue_copies(COPIES, 7)
