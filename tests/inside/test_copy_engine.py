"""The copies of the gather backends with a stage, with a thread for each rank: places, growth, padding, dtypes."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from addends_common import add
from timing import HANG_S
from torch.distributed import ReduceOp

from dtensor_gtp import _torch_compat as compat
from dtensor_gtp._comm import copy_engine, reductions
from dtensor_gtp._comm.addends import Sum
from dtensor_gtp._comm.collectives import Groups, ReduceScale, round_nbytes
from dtensor_gtp._comm.context import CommContext
from dtensor_gtp._comm.copy_engine import CopyEngine, offsets
from dtensor_gtp._comm.debug import DebugFlags
from dtensor_gtp._comm.reductions import Scattering
from dtensor_gtp._comm.send_ring import Place, SendRing
from dtensor_gtp._schedule.reduce_gradients import Gradients
from dtensor_gtp.policy import Schedule

NUM_RANKS = 4
CPU = torch.device("cpu")


class Ranks:
    """Threads that act as ranks, and what they share."""

    def __init__(self) -> None:
        self.barrier = threading.Barrier(NUM_RANKS, timeout=HANG_S)
        self.memory: dict[tuple[int, int], torch.Tensor] = {}
        self.num_stages = [0] * NUM_RANKS

    def run(self, job: Callable[[Any], None]) -> None:
        def guarded(rank: int) -> None:
            try:
                job(Group(self, rank))
            except BaseException:
                self.barrier.abort()
                raise

        with (
            mock.patch.object(copy_engine, "refuse_without_symmetric_memory"),
            mock.patch.object(copy_engine.dist, "barrier", lambda group: group.ranks.barrier.wait()),
            mock.patch.object(compat, "resolve_group", lambda name: name),
            mock.patch.object(copy_engine.torch.accelerator, "current_stream"),
            ThreadPoolExecutor(NUM_RANKS) as pool,
        ):
            ended = [pool.submit(guarded, rank) for rank in range(NUM_RANKS)]
        errors = [error for each in ended if (error := each.exception()) is not None]
        for error in sorted(errors, key=lambda error: isinstance(error, threading.BrokenBarrierError)):
            raise error


class Group:
    """Stands for a process group; it is its own name."""

    def __init__(self, ranks: Ranks, rank: int) -> None:
        self.ranks = ranks
        self._rank = rank
        self.group_name = self

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return NUM_RANKS

    def new_stage(self, nbytes: int) -> torch.Tensor:
        """Uninitialized memory that all ranks can find, filled with what must not be read."""
        self.ranks.num_stages[self._rank] += 1
        stage = torch.full((nbytes,), 0x7F, dtype=torch.uint8)
        self.ranks.memory[self._rank, nbytes] = stage
        self.ranks.barrier.wait()
        return stage


def on_each_rank(job: Callable[[Group], None]) -> Callable[[], None]:
    """A test that all ranks run."""

    def run() -> None:
        Ranks().run(job)

    return run


class Shared:
    """Stands for ``SymmetricBuffer``."""

    def __init__(self, nbytes: int, group: Group) -> None:
        self.nbytes, self.group, self.num_barriers = nbytes, group, 0
        group.new_stage(nbytes)

    def view(self, rank: int, offset: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        stage = self.group.ranks.memory[rank, self.nbytes]
        return stage[offset : offset + shape.numel() * dtype.itemsize].view(dtype).view(shape)

    def address(self, rank: int) -> int:
        return self.group.ranks.memory[rank, self.nbytes].data_ptr()

    def fetch(self, rows: Sequence[tuple[int, int]], fetches: Sequence[compat.Fetch]) -> None:
        for rank, row in rows:
            for offset, target, stride, nbytes in fetches:
                ctypes.memmove(target + row * stride, self.address(rank) + offset, nbytes)

    def barrier(self, turn: int) -> None:
        assert turn == self.num_barriers % 2
        self.num_barriers += 1
        self.group.ranks.barrier.wait()


class Engine(CopyEngine):
    def _allocate(self, nbytes: int) -> Any:
        return Shared(nbytes, self._group_name)  # type: ignore[arg-type]

    def _wait_on_host(self) -> None:
        pass


def value(rank: int, shape: tuple[int, ...], dtype: torch.dtype, turn: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * turn + 10 * rank + len(shape))
    return torch.randint(0, 100, shape, generator=generator).to(dtype)


SHARDS = [
    [((3, 5), torch.float32)],
    [((1, 7), torch.bfloat16), ((3,), torch.uint8), ((2, 3, 2), torch.float64)],
    [((200, 3), torch.bfloat16)],
    [((1,), torch.uint8)],
    [((0, 4), torch.float32), ((64, 4), torch.int16)],
    [((3, 100), torch.float32)],
]


@pytest.mark.parametrize(
    ("most", "num_rounds", "num_stages"),
    [
        (None, 12, 4),  # the first stage, and each time that a gather is larger than all before
        # 60, 14 + 3 + 2 x 48, 20 rounds of ten rows of 6 bytes, 1, 8 rounds of eight rows, one for each long row. Two
        # rounds fit into a stage, and then twice a row that is longer than a round.
        (64, 2 * (1 + 3 + 20 + 1 + 8 + 3), 2),
    ],
)
def test_gathers_of_several_tensors(most: int | None, num_rounds: int, num_stages: int) -> None:
    """Cut at rows wherever a round ends, between tensors and within one. The second time in place, as shards that had
    to be cast are, and the last rank has fewer rows."""
    ranks, rounds = Ranks(), [0] * NUM_RANKS

    class Counting(Engine):
        def _gather(self, parts: Any, ready: Any) -> None:
            assert most is None or sum(part.nbytes for part in parts) <= most or len(parts) == 1
            rounds[self.rank] += 1
            super()._gather(parts, ready)

    def job(group: Group) -> None:
        backend = Counting(group, CPU, most)
        for turn, shapes in enumerate(SHARDS * 2):
            wants = [torch.cat([value(rank, *shape, turn) for rank in range(NUM_RANKS)]) for shape in shapes]
            outputs = [torch.full_like(want, 111) for want in wants]
            own = [want.chunk(NUM_RANKS)[group.rank()] if want.numel() else want for want in wants]
            is_again = turn >= len(SHARDS)
            if is_again and group.rank() == NUM_RANKS - 1:
                own = [shard[: len(shard) - 1] for shard in own]
            if is_again:
                places = [
                    output[len(want) // NUM_RANKS * group.rank() :] for output, want in zip(outputs, wants, strict=True)
                ]
                own = [place[: len(shard)].copy_(shard) for place, shard in zip(places, own, strict=True)]
            backend.all_gather(outputs, own)
            for output, want in zip(outputs, wants, strict=True):
                filled = len(want) - (is_again and len(want) > 0)
                assert torch.equal(output[:filled], want[:filled]), f"rank {group.rank()}, turn {turn}"

    ranks.run(job)
    assert rounds == [num_rounds] * NUM_RANKS
    assert ranks.num_stages == [num_stages] * NUM_RANKS


def test_rounds_of_any_number_of_ranks_fill_the_stage() -> None:
    """Else aligned rows of a full round would not fit into its half, which would grow by bytes."""
    for num_ranks in (2, 3, 7, 8):
        assert 0 < round_nbytes(Schedule(), num_ranks) <= Schedule().coalesce_nbytes // num_ranks
        assert round_nbytes(Schedule(), num_ranks) % copy_engine.ALIGNMENT == 0


class Ring(SendRing):
    def _allocate(self, nbytes: int) -> Any:
        if getattr(self, "_last", None) is not None:
            self._last.fill_(0x7F)  # is gone
        stage = Shared(nbytes, self._group_name)  # type: ignore[arg-type]
        self._last = stage.group.ranks.memory[self.rank, nbytes]
        return stage

    def _wait_on_host(self) -> None:
        pass

    def end_backward(self) -> None:
        """What ``CommContext`` does."""
        missing = self.missing_nbytes
        self.rewind()
        if missing:
            self.grow(missing)


def exchange(ring: SendRing, fulls: list[torch.Tensor], given: list[Place | None], op: Any) -> tuple[Any, list[Place]]:
    """What ``Gradients`` does with gradients that travel together."""
    held = [place for place in given if place is not None]
    places = held
    if len(held) < len(given):
        places = ring.lay_out(fulls, torch.bfloat16)
        held = [*held, *places]
    scattering = Scattering("copy_engine", fulls, NUM_RANKS, torch.bfloat16, ring, places)
    in_flight = mock.Mock()
    pairs = zip(places, fulls, strict=True)
    in_place = [ring.room(place, full.shape, torch.bfloat16).data_ptr() == full.data_ptr() for place, full in pairs]
    assert scattering.launch(ReduceScale(op, None, None), mock.Mock(), in_flight, async_op=False) is None
    has_waited = in_flight.wait_finished.called
    assert has_waited != all(in_place), "what a rank copies into the ring waits for its own reads there"
    scattering.finish(ReduceScale(op, None, None))
    return scattering, held


def submit(ring: SendRing, *numels: int) -> tuple[list[bool], list[Place]]:
    """Gradients that travel together, each with a row of so many elements for each rank. Whether each is made in the
    place that was offered for it, and the places that they hold."""
    offers = [ring.offer(torch.Size((NUM_RANKS, numel)), torch.bfloat16) for numel in numels]
    fulls = [
        torch.zeros(NUM_RANKS, numel, dtype=torch.bfloat16) if offered is None else offered.zero_()
        for numel, offered in zip(numels, offers, strict=True)
    ]
    _, held = exchange(ring, fulls, [ring.take(full, torch.bfloat16) for full in fulls], ReduceOp.SUM)
    return [offered is not None for offered in offers], held


def test_a_ring_that_expects_sizes_grows_once() -> None:
    """At the first gradient, to what all of them want: all in flight, or the largest beside what is enough."""
    numels = (15, 200, 7)
    for enough, want in ((100, 100 + 2048), (1 << 20, 512 + 2048 + 512)):
        ranks = Ranks()

        def job(group: Group, enough: int = enough, want: int = want) -> None:
            ring = Ring(group, CPU, enough)
            ring.expect([2 * NUM_RANKS * numel for numel in numels])
            for _ in range(2):
                for numel in numels:
                    submit(ring, numel)
                ring.end_backward()
                assert ring._nbytes == want

        ranks.run(job)
        assert ranks.num_stages == [2] * NUM_RANKS


@pytest.mark.parametrize("seed", [0, 1, *(pytest.param(seed, marks=pytest.mark.long) for seed in range(2, 8))])
@pytest.mark.parametrize(("enough_nbytes", "kernel"), [(0, None), (4000, None), (4000, add), (1 << 20, None)])
def test_gradients_in_the_ring(
    seed: int, enough_nbytes: int, kernel: Sum | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Groups of all sizes. Which gradients are written in place, are of another dtype or layout, and how long a rank
    waits before it retires a reduction is drawn by each rank for itself. With a kernel, what is received has no row of
    this rank."""
    monkeypatch.setattr(reductions, "fused_sum", lambda like, num_ranks: kernel)
    op = ReduceOp.AVG if seed % 2 else ReduceOp.SUM
    in_place = [0] * NUM_RANKS

    def full(rank: int, number: int, shape: tuple[int, ...]) -> torch.Tensor:
        return value(rank, (NUM_RANKS * shape[0], *shape[1:]), torch.bfloat16, number)

    def job(group: Group) -> None:
        ring = Ring(group, CPU, enough_nbytes)
        alike, own = random.Random(seed), random.Random(1000 * seed + group.rank())
        number = 0
        for _ in range(6):  # backwards
            in_flight: list[Any] = []
            for _ in range(alike.randint(1, 12)):
                shapes = [alike.choice([(3, 5), (1, 7, 2), (2,), (200,)]) for _ in range(alike.randint(1, 4))]
                fulls: list[torch.Tensor] = []
                places: list[Place | None] = []
                for index, shape in enumerate(shapes):
                    addend = full(group.rank(), number + index, shape)
                    way = own.choice(["offered", "offered", "own", "float32", "strided"])
                    buffer = ring.offer(addend.shape, torch.bfloat16) if way == "offered" else None
                    if buffer is not None:
                        in_place[group.rank()] += 1
                        buffer.copy_(addend)
                    elif way == "float32":
                        buffer = addend.float()
                    elif way == "strided":
                        buffer = addend.unsqueeze(-1).expand(*addend.shape, 2).contiguous()[..., 0]
                    else:
                        buffer = addend
                    fulls.append(buffer)
                    places.append(ring.take(buffer, torch.bfloat16))
                scattering, held = exchange(ring, fulls, places, op)
                for slot, shape in zip(scattering.slots, shapes, strict=True):
                    addends = [full(rank, number, shape).chunk(NUM_RANKS)[group.rank()] for rank in range(NUM_RANKS)]
                    want = torch.stack(addends).float().sum(0)
                    want /= NUM_RANKS if op == ReduceOp.AVG else 1
                    assert torch.equal(slot, want), f"rank {group.rank()}, {number}, {shape}"
                    number += 1
                in_flight.append((places, held))
                del places, held
                while len(in_flight) > own.randint(0, 3):
                    in_flight.pop(0)
            if own.random() < 0.5:
                in_flight.clear()
            ring.end_backward()

    ranks = Ranks()
    ranks.run(job)
    assert min(in_place) > 5
    assert len(set(ranks.num_stages)) == 1
    assert ranks.num_stages[0] <= 12


@on_each_rank
def test_a_place_is_offered_when_nobody_uses_it(group: Group) -> None:
    ring = Ring(group, CPU, 3 * 512)
    for _ in range(4):
        submit(ring, 64)  # 512 bytes, of which the ring will have room for three
    ring.end_backward()  # it grows
    in_flight = [submit(ring, 64) for _ in range(3)]
    assert [(is_in_place, place.begin) for (is_in_place,), (place,) in in_flight] == [
        (True, 0),
        (True, 512),
        (True, 1024),
    ]
    ((is_in_place,), (place,)) = submit(ring, 64)
    assert (is_in_place, place.begin) == (False, 0), "the first is still in flight"
    del in_flight[0], place
    assert submit(ring, 64)[0] == [False], "and so is the second"
    in_flight.clear()
    assert ring.missing_nbytes == 0
    ring.end_backward()
    assert submit(ring, 64)[0] == [True]


@on_each_rank
def test_what_follows_a_large_gradient_is_written_in_place(group: Group) -> None:
    """While the large one is in flight, as many others are as without it."""
    ring = Ring(group, CPU, 3 * 512)
    for backward in range(3):
        in_flight: list[Any] = []
        for numel in (1024, *[64] * 7):  # one gradient of 8192 bytes, others of 512
            is_in_place, held = submit(ring, numel)
            assert backward == 0 or is_in_place == [True]
            in_flight = [*in_flight[-2:], held]
            del held
        ring.end_backward()
    assert ring.held_nbytes == 8192 + 3 * 512


@on_each_rank
def test_a_group_that_is_too_large_for_the_rest_of_the_ring_has_room_in_the_next_backward(group: Group) -> None:
    ring = Ring(group, CPU, 0)
    for backward in range(4):
        for number in (1, 3, 2):
            buffers = [torch.zeros(NUM_RANKS, 64, dtype=torch.bfloat16) for _ in range(number)]
            places = [ring.take(buffer, torch.bfloat16) for buffer in buffers]
            assert backward < 2 or None not in places
            exchange(ring, buffers, places, ReduceOp.SUM)
        assert backward < 2 or ring.missing_nbytes == 0
        ring.end_backward()


@on_each_rank
def test_another_gradient_than_the_one_that_a_place_was_offered_to(group: Group) -> None:
    ring = Ring(group, CPU, 1 << 10)
    submit(ring, 8)
    ring.end_backward()
    assert ring.offer(torch.Size((NUM_RANKS, 8)), torch.bfloat16) is not None
    with pytest.raises(RuntimeError, match="another gradient than the one submitted"):
        ring.take(torch.zeros(NUM_RANKS, 8, dtype=torch.bfloat16), torch.bfloat16)


@on_each_rank
def test_others_are_launched_once_before_a_gradient_in_the_ring(group: Group) -> None:
    ring = Ring(group, CPU, 1 << 10)
    other = torch.zeros(NUM_RANKS, 8, dtype=torch.bfloat16)
    submit(ring, 8)
    ring.end_backward()
    comm, weight = mock.MagicMock(), mock.MagicMock(reduce_dtype=torch.bfloat16)
    weight.pending_grad = mock.MagicMock(unsharded=None, sent_nbytes=0, ring=ring)
    comm.debug.poison = False
    weight.layout.world, weight.layout.buffer_shape = NUM_RANKS, other.shape
    weight.groups.reduce_scatter = "copy_engine"
    grads = Gradients(comm)
    with mock.patch.object(grads, "_launch_others") as launch, mock.patch.object(grads, "_scale"):
        buffer, _ = grads.target(weight)
        assert launch.call_count == 1
        grads.submit(weight, buffer)
        assert launch.call_count == 1
        grads.submit(weight, other)
        assert launch.call_count == 2, "nobody was offered a place before"


@on_each_rank
def test_what_is_cast_ahead_and_into_which_half(group: Group) -> None:
    """With streams that record whether the cast runs on the one of its own."""
    engine = Engine(group, CPU)
    engine.cast_stream = mock.MagicMock()
    recording: int | None = None
    engine._is_capturing = lambda: recording is not None  # type: ignore[method-assign]
    engine._recording = lambda: recording  # type: ignore[method-assign]
    targets: list[torch.Tensor] = []
    cast = engine._cast
    is_ahead: list[bool] = []

    def noting(pairs: Any) -> None:
        targets.extend(target for target, _ in pairs)
        is_ahead.append(engine.cast_stream.__enter__.call_count > engine.cast_stream.__exit__.call_count)
        cast(pairs)

    engine._cast = noting  # type: ignore[method-assign]

    def gather() -> tuple[bool, int]:
        output = torch.empty(NUM_RANKS * 8)
        engine.all_gather([output], [torch.full((8,), float(group.rank()))], ready=mock.Mock())
        assert torch.equal(output, torch.arange(4.0).repeat_interleave(8))
        stage = group.ranks.memory[group.rank(), engine._stage.nbytes]
        half = 2 * (targets[-1].data_ptr() - stage.data_ptr()) // stage.nbytes
        return is_ahead[-1], half

    assert [gather() for _ in range(3)] == [(False, 0), (True, 1), (True, 0)], "the first one is in its place"
    engine.begin_pass()
    assert [gather() for _ in range(2)] == [(False, 0), (True, 1)]
    recording = 1
    assert [gather() for _ in range(2)] == [(False, 0), (True, 1)], "what is outside of a graph cannot be waited for"
    recording = 2
    assert [gather() for _ in range(3)] == [(False, 0), (True, 1), (True, 0)], "nor is what is in another one"
    recording = None
    engine.begin_pass()
    assert [gather() for _ in range(3)] == [(False, 0), (False, 1), (False, 0)], "a replay may come in between"
    engine.all_gather([torch.empty(NUM_RANKS * 8)], [torch.ones(8)])
    assert gather() == (False, 0)


def test_a_gather_outside_of_a_pass_concerns_its_own_ranks_alone() -> None:
    """Others go on in the pass that they are in, and so must their halves."""
    comm = CommContext(CPU, DebugFlags.from_env())
    engines = {name: mock.Mock(spec=CopyEngine) for name in ("dense", "experts")}
    comm._gather_backends = engines
    comm.begin_pass(Groups("experts", "scatter", None))
    assert [engine.begin_pass.call_count for engine in engines.values()] == [0, 1]
    comm.begin_pass()
    assert [engine.begin_pass.call_count for engine in engines.values()] == [1, 2]


@on_each_rank
def test_a_stage_of_a_graph_does_not_grow_and_outlives_it(group: Group) -> None:
    """But for a recording that failed."""
    engine = Engine(group, CPU)
    assert engine.held_nbytes == 32

    def gather(num_rows: int, is_recorded: bool = False) -> Any:
        engine._is_capturing = lambda: is_recorded  # type: ignore[method-assign]
        engine.all_gather([torch.empty(NUM_RANKS * num_rows)], [torch.ones(num_rows)])
        return engine._stage

    small = gather(8)
    assert engine.held_nbytes == small.nbytes
    engine.begin_recording()
    gather(8, is_recorded=True)
    with pytest.raises(RuntimeError, match="a staging buffer of 256 bytes, but cannot allocate it"):
        gather(32, is_recorded=True)
    assert gather(32) is not small
    engine.begin_recording()
    large = gather(32, is_recorded=True)
    engine.forget_recording()
    assert engine._captured == [small], "the first recording worked"
    assert engine.held_nbytes == small.nbytes + large.nbytes
    gather(64)
    assert engine.held_nbytes == small.nbytes + engine._stage.nbytes


def test_the_step_before_a_recording_is_no_recording(monkeypatch: pytest.MonkeyPatch) -> None:
    """``capture_step`` lets torch's public function say yes in it. The stage grows, and is not kept for a graph."""
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(torch.cuda.graphs, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(copy_engine, "waiting_allowed", nullcontext)

    @on_each_rank
    def gather(group: Group) -> None:
        engine = Engine(group, torch.device("cuda"))
        for num_rows in (8, 32):
            engine.all_gather([torch.empty(NUM_RANKS * num_rows)], [torch.ones(num_rows)])
        assert engine.held_nbytes == engine._stage.nbytes

    gather()


def test_parts_lie_aligned_one_behind_the_other() -> None:
    assert offsets([]) == [0]
    assert offsets([1, 16, 17, 0, 4]) == [0, 16, 32, 64, 64, 80]
