"""The streams of the copy engine's gathers: in whatever order they get on, nothing is read too early or overwritten.

Streams are queues here, which a drawn order works off: an operation runs when all before it in its stream have, a wait
when its event has been recorded, and a barrier when all ranks have come to it. In a step that a CUDA graph records a
stream belongs to the graph once it has waited for one that does, and then must not wait for any other.
"""

from __future__ import annotations

import ctypes
import itertools
import random
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch

from dtensor_gtp import _torch_compat as compat
from dtensor_gtp._comm import copy_engine
from dtensor_gtp._comm.copy_engine import CopyEngine

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
