"""Records CUDA graphs and replays them, for ``capture_step`` and ``capture_blocks``."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TypeVar

import torch

from .. import _torch_compat as compat
from .._howto import see

R = TypeVar("R")


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
