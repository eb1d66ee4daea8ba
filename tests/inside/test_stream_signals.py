"""Barriers of streams, with a generator that does what a GPU's front end would do for each rank."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from dtensor_gtp._torch_compat import driver
from dtensor_gtp._torch_compat.driver import SignalBarrier

NUM_RANKS, NUM_BARRIERS = 4, 60
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
    dice, arrived = random.Random(seed), [0] * NUM_RANKS
    memory: dict[int, int] = {}  # of all ranks

    def run(rank: int) -> Iterator[None]:
        barrier = SignalBarrier([1000 * (other + 1) for other in range(NUM_RANKS)], rank)
        for index in range(NUM_BARRIERS):
            arrived[rank] += 1
            yield from execute(barrier._turns[index % 2], memory)
            assert min(arrived) > index

    ranks = [run(rank) for rank in range(NUM_RANKS)]
    speeds = [10 ** dice.random() for _ in ranks]
    for rank in dice.choices(range(NUM_RANKS), speeds, k=MANY_TURNS):
        next(ranks[rank], None)
    assert arrived == [NUM_BARRIERS] * NUM_RANKS, "somebody waits without end"
    # As at the begin: what is recorded once can be repeated.
    assert set(memory.values()) == {0}
    nbytes = driver.num_flag_bytes(NUM_RANKS)
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
