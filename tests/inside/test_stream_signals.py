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


class FrontEnds:
    """Memory of all ranks, and who executes operations on it, in order."""

    def __init__(self) -> None:
        self.memory: dict[int, int] = {}

    def execute(self, operations: Any) -> Iterator[None]:
        """One operation, or one look at what it waits for, at a time."""
        for operation in operations:
            if operation.operation == driver._WRITE_VALUE:
                self.memory[operation.address] = operation.value
            else:
                assert (operation.operation, operation.flags) == (driver._WAIT_VALUE, driver._WAIT_EQUAL)
                while self.memory.get(operation.address, 0) != operation.value:
                    yield
            yield


@pytest.mark.parametrize("seed", range(20))
def test_nobody_passes_before_all_have_come(seed: int) -> None:
    """In many orders: each rank has a speed of its own, up to ten times that of others."""
    front_ends, dice = FrontEnds(), random.Random(seed)
    arrived = [0] * NUM_RANKS

    def run(rank: int) -> Iterator[None]:
        barrier = SignalBarrier([1000 * (other + 1) for other in range(NUM_RANKS)], rank)
        for index in range(NUM_BARRIERS):
            arrived[rank] += 1
            yield from front_ends.execute(barrier._turns[index % 2])
            assert min(arrived) > index

    ranks = [run(rank) for rank in range(NUM_RANKS)]
    speeds = [10 ** dice.random() for _ in ranks]
    for rank in dice.choices(range(NUM_RANKS), speeds, k=MANY_TURNS):
        next(ranks[rank], None)
    assert arrived == [NUM_BARRIERS] * NUM_RANKS, "somebody waits without end"
    # As at the begin: what is recorded once can be repeated.
    assert set(front_ends.memory.values()) == {0}
    nbytes = driver.num_flag_bytes(NUM_RANKS)
    assert all(0 <= address % 1000 < nbytes for address in front_ends.memory)


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


@pytest.mark.parametrize(("code", "is_capturing", "calls"), [(0, False, "b"), (801, False, "bcc"), (0, True, "cc")])
def test_copies_are_one_call_where_that_can_be(
    code: int, is_capturing: bool, calls: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Empty ones are left out: a batch may have none."""
    called: list[tuple[str, list[int]]] = []

    class Driver:
        @staticmethod
        def cuMemcpyBatchAsync_v2(targets: Any, sources: Any, sizes: Any, number: Any, *rest: Any) -> int:
            called.append(("b", [number.value, *targets, *sources, *sizes]))
            return code

        @staticmethod
        def cuMemcpyAsync(target: Any, source: Any, nbytes: Any, stream: Any) -> int:
            called.append(("c", [target.value, source.value, nbytes.value]))
            return 0

    monkeypatch.setattr(driver, "_driver", Driver)
    monkeypatch.setattr(driver, "_has_batches", lambda: True)
    monkeypatch.setattr(torch.cuda.graphs, "is_current_stream_capturing", lambda: is_capturing)
    copies = [(1, 11, 5), (2, 12, 0), (3, 13, 6)]
    driver.enqueue_copies(copies, 7)
    assert "".join(name for name, _ in called) == calls
    if calls[0] == "b":
        assert called[0][1] == [2, 1, 3, 11, 13, 5, 6]
    if calls[-1] == "c":
        assert [arguments for _, arguments in called[-2:]] == [[1, 11, 5], [3, 13, 6]]


@pytest.mark.parametrize("has_runtime", [True, False])
def test_copies_are_calls_of_the_runtime_while_a_profiler_records(
    has_runtime: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those have a launch in a trace, whose range is that of the copy."""
    called: list[tuple[str, list[int]]] = []

    class Library:
        @staticmethod
        def cuMemcpyAsync(target: Any, source: Any, nbytes: Any, stream: Any) -> int:
            called.append(("driver", [target.value, source.value, nbytes.value]))
            return 0

        @staticmethod
        def cudaMemcpyAsync(target: Any, source: Any, nbytes: Any, kind: Any, stream: Any) -> int:
            called.append(("runtime", [target.value, source.value, nbytes.value, kind.value]))
            return 1 if nbytes.value == 99 else 0

    monkeypatch.setattr(driver, "_driver", Library)
    monkeypatch.setattr(driver, "_runtime", Library if has_runtime else lambda: None)
    monkeypatch.setattr(driver, "_has_batches", lambda: False)
    copies = [(1, 11, 5), (2, 12, 0), (3, 13, 6)]
    with torch.profiler.profile():
        driver.enqueue_copies(copies, 7)
    driver.enqueue_copies(copies[:1], 7)
    if not has_runtime:
        assert called == [("driver", [1, 11, 5]), ("driver", [3, 13, 6]), ("driver", [1, 11, 5])]
        return
    assert called == [("runtime", [1, 11, 5, 4]), ("runtime", [3, 13, 6, 4]), ("driver", [1, 11, 5])]
    with torch.profiler.profile(), pytest.raises(RuntimeError, match="cudaMemcpyAsync failed with error 1"):
        driver.enqueue_copies([(1, 11, 99)], 7)
