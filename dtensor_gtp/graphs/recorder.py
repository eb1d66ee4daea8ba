"""What ``capture_step`` and ``capture_blocks`` share: CUDA graphs, and which calls are recorded."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from .. import _torch_compat as compat
from .._howto import see

R = TypeVar("R")
Graph = TypeVar("Graph")

MOST_SEEN = 256  # kinds of calls that are remembered, so that one that comes again is recorded


class CudaRecorder:
    """Records with ``torch.cuda.graph``, all graphs in one pool; they are never replayed at the same time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        # Warm-up and recording share a stream, because autograd remembers streams.
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def eager(self, *, is_last: bool) -> Iterator[None]:
        """Around an eager step before a recording; ``is_last`` if the next call of its kind is recorded."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)
        try:
            with torch.cuda.stream(self._stream), _refusing_synchronization() if is_last else nullcontext():
                yield
        finally:
            current.wait_stream(self._stream)

    def record(self, step: Callable[[], R]) -> tuple[Callable[[], None], R]:
        """Run ``step`` once without computing. Returns what replays it, and its result, to be read after a replay."""
        if not self._graphs:
            # The allocator refuses a pool without graphs while memory in it is in use, such as a gradient.
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                _without_collection(),
                compat.regions_recorded(graph),
                # If the recording fails, torch.cuda.graph leaves its stream current: this restores the other one.
                torch.cuda.stream(torch.cuda.current_stream()),
                # thread_local: a thread that pins the memory of the next batch does not disturb.
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                result = step()
        except BaseException:
            with suppress(RuntimeError):  # the first error is the one to report
                compat.end_void_recording(self._stream.device, self._pool)
            # The allocator may still hold the pool for the void recording, and refuse it to another one.
            self._pool = torch.cuda.graph_pool_handle()
            raise
        self._graphs.add(graph)
        return graph.replay, result


@contextmanager
def _without_collection() -> Iterator[None]:
    """No garbage collection: to free a model whose memory peers map waits for the GPU, which a recording must not."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _refusing_synchronization() -> Iterator[None]:
    """Waiting for the GPU raises, with the traceback of who waits. In a recording it would only make it fail. Code that
    waits only where nothing is recorded (checks of masks in transformers) finds that something is."""
    before, is_capturing = torch.cuda.get_sync_debug_mode(), torch.cuda.is_current_stream_capturing
    torch.cuda.set_sync_debug_mode("error")
    torch.cuda.is_current_stream_capturing = lambda: True  # our own code asks ``compat``
    try:
        yield
    except RuntimeError as error:
        if "synchronizing" not in str(error):
            raise
        what = f"a step that does not wait for the GPU, but it does where this error comes from: {error}"
        advice = f"Read tensors outside of the step. {see('capture_a_step')}"
        raise RuntimeError(f"capture_step expects {what}. {advice}") from error
    finally:
        torch.cuda.is_current_stream_capturing = is_capturing
        torch.cuda.set_sync_debug_mode(before)


class KnownCalls(Generic[Graph]):
    """The graphs of one function by the kind of call, and the kinds that ran eagerly."""

    def __init__(self, num_warmup: int, max_graphs: int) -> None:
        self.num_warmup, self.max_graphs = num_warmup, max_graphs
        self.graphs: dict[Hashable, Graph] = {}
        self.seen: dict[Hashable, Any] = {}  # with a value for each kind; the oldest first
        self.num_eager = 0

    def forget(self) -> None:
        self.graphs.clear()
        self.seen.clear()
        self.num_eager = 0

    @property
    def is_full(self) -> bool:
        return len(self.graphs) >= self.max_graphs

    def may_record(self, kind: Hashable, num_more: int = 0) -> bool:
        """Whether to record a call of this kind, perhaps after some more eager calls."""
        return self.num_eager + num_more >= self.num_warmup and kind in self.seen and not self.is_full

    def note_eager(self, kind: Hashable, value: Any = None) -> Any:
        """A call of this kind ran eagerly. Returns the value that its first call gave the kind."""
        self.num_eager += 1
        value = self.seen.setdefault(kind, value)
        if len(self.seen) > MOST_SEEN:
            del self.seen[next(iter(self.seen))]
        return value


def signature(leaf: Any) -> Hashable:
    """What two arguments must have in common for one graph to serve both."""
    if isinstance(leaf, Tensor):
        return type(leaf), leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    try:
        hash(leaf)
    except TypeError:
        what = type(leaf).__name__
        raise ValueError(f"A captured step expects tensors and hashable values, but got a {what}.") from None
    return type(leaf), leaf


def with_tensors(leaves: list[Any], tensors: Sequence[Tensor]) -> list[Any]:
    """``leaves`` with others instead of its tensors."""
    remaining = iter(tensors)
    return [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def versions_of(tensors: list[Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
