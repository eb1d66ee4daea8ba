"""The recorder of CUDA graphs without a GPU: which pool of memory it records into."""

from __future__ import annotations

import gc
import itertools
import weakref
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from unittest import mock

import pytest
import torch

from dtensor_gtp import _torch_compat as compat
from dtensor_gtp.graphs.recorder import CudaRecorder


class Allocator:
    """Counts the graphs of a pool, as that of torch does, and refuses one that had some and has none."""

    def __init__(self) -> None:
        self.numbers = itertools.count()
        self.users: dict[int, weakref.WeakSet[Graph]] = {}

    def new_pool(self) -> int:
        return next(self.numbers)

    @contextmanager
    def graph(self, graph: Graph, pool: int, **options: object) -> Iterator[None]:
        assert pool not in self.users or self.users[pool], "nobody uses this pool any more"
        self.users.setdefault(pool, weakref.WeakSet()).add(graph)
        yield


class Graph:
    def replay(self) -> None:
        pass


@pytest.fixture
def recorder() -> Iterator[tuple[CudaRecorder, Allocator]]:
    allocator = Allocator()
    with (
        mock.patch("torch.cuda.graph_pool_handle", allocator.new_pool),
        mock.patch("torch.cuda.CUDAGraph", Graph),
        mock.patch("torch.cuda.graph", allocator.graph),
        mock.patch("torch.cuda.Stream"),
        mock.patch("torch.cuda.current_stream"),
        mock.patch("torch.cuda.stream", return_value=nullcontext()),
        mock.patch.object(compat, "end_void_recording"),
    ):
        yield CudaRecorder(torch.device("cuda")), allocator


class Garbage:
    def __init__(self) -> None:
        self.itself = self


def collect_often() -> None:
    threshold = gc.get_threshold()
    gc.set_threshold(1, 1, 1)
    try:
        assert [[number] for number in range(1000)]
    finally:
        gc.set_threshold(*threshold)


def test_nothing_is_collected_within_a_recording(recorder: tuple[CudaRecorder, Allocator]) -> None:
    """A destructor of memory that peers map ends the process there."""
    cuda, _ = recorder
    gc.collect()
    alive = weakref.ref(Garbage())
    is_alive = []
    cuda.record(lambda: (collect_often(), is_alive.append(alive() is not None)))
    assert is_alive == [True]
    assert gc.isenabled()
    with pytest.raises(ValueError, match="broken"):
        cuda.record(fail)
    collect_often()
    assert alive() is None
    gc.disable()
    try:
        cuda.record(lambda: None)
        assert not gc.isenabled()
    finally:
        gc.enable()


def fail() -> None:
    raise ValueError("broken")


def test_graphs_share_a_pool_as_long_as_one_is_there_and_none_has_failed(
    recorder: tuple[CudaRecorder, Allocator],
) -> None:
    cuda, allocator = recorder
    replay, _ = cuda.record(lambda: None)
    for _ in range(2):
        replay, _ = cuda.record(lambda: None)
    assert len(allocator.users) == 1
    del replay
    gc.collect()
    replay, _ = cuda.record(lambda: None)
    assert len(allocator.users) == 2
    with pytest.raises(ValueError, match="broken"):
        cuda.record(fail)
    another, _ = cuda.record(lambda: None)
    assert len(allocator.users) == 3
    assert replay is not another
