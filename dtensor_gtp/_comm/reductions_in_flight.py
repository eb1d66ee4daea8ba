"""Reductions in flight: how many there are, and who waits for them.

[Note: kernels after an exchange]
Copy engines exchange gradients without a kernel. The sum that follows is a kernel, which waits until a GEMM leaves SMs
for it; on the scatter stream it would delay the next exchange. So everything after the exchange (sum, division,
replicas, accumulation) runs on the *finish stream*, which waits for the scatter stream. It reads this rank's own addend
in the send ring: call ``wait_finished`` before the scatter stream writes to the ring or the ring grows. For other kinds
of reduction the finish stream is the scatter stream.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..policy import Waitable
from .send_ring import Place
from .streams import Done, Streams

logger = logging.getLogger(__name__)


class Reduction(NamedTuple):
    """A reduction in flight. ``complete`` runs on the host after the background work (None if streams order it).
    ``origins`` are the compute streams that own the memory of ``keep``."""

    done: Done
    complete: Callable[[], None] | None
    keep: Sequence[Tensor]  # the communication stream uses these
    places: Sequence[Place] = ()  # peers read these
    origins: tuple[torch.Stream, ...] = ()


class ReductionsInFlight:
    """The scatter stream of one device and the reductions on it."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._max_inflight = 2
        self._is_bounded = True
        self._reductions: deque[Reduction] = deque()
        self.num_launched = 0
        self._scatter_stream = self._finish_stream = streams.new_stream()

    def bound(self, most: int) -> None:
        """How many may be in flight before compute waits for the oldest."""
        self._max_inflight = most

    def finish_apart(self) -> None:
        """Copy engines exchange gradients, see [Note: kernels after an exchange]."""
        if self._finish_stream is self._scatter_stream:
            self._finish_stream = self._streams.new_stream()

    def scattering(self) -> AbstractContextManager[Any]:
        """Run on the scatter stream, after all compute streams: for any collective of the scatter group."""
        stream = self._scatter_stream
        fork = self._streams.fork(stream)
        if len(self._streams.computing) > 1 and stream is not None:
            for other in self._streams.other_compute_streams():
                stream.wait_event(other.record_event())
        return fork

    def scatter_done(self, work: Waitable | None) -> Done:
        """When the collective that was just launched on the scatter stream is complete."""
        return Done(work=work) if self._scatter_stream is None else Done(self._scatter_stream.record_event())

    def reducing(self) -> AbstractContextManager[Any]:
        """Launch a reduction in this context, on the scatter stream. Bounds how many are in flight."""
        while self._is_bounded and len(self._reductions) >= self._max_inflight:
            self._retire_oldest()
        return self.scattering()

    @contextmanager
    def unbounded(self) -> Iterator[None]:
        """Launch any number of reductions in this context: a recorded block launches all of its own together."""
        try:
            self._is_bounded = False
            yield
        finally:
            self._is_bounded = True

    def launched(
        self, work: Waitable | None, complete: Callable[[], None], keep: Sequence[Tensor], places: Sequence[Place] = ()
    ) -> None:
        """Call within ``reducing``, after the launch of the collective. ``complete()`` works on the result (sum,
        replicas, division, accumulation): now, on the finish stream; without streams when the reduction is retired.
        ``keep`` and ``places`` stay alive until it is retired."""
        self.num_launched += 1
        scatter, finish = self._scatter_stream, self._finish_stream
        if scatter is None or finish is None:
            self._reductions.append(Reduction(Done(work=work), complete, keep, places))
            return
        if finish is scatter:
            complete()
        else:
            finish.wait_event(scatter.record_event())
            with finish:
                self._streams.delay()
                complete()
        origins = tuple(self._streams.computing)
        self._reductions.append(Reduction(Done(finish.record_event()), None, keep, places, origins))

    def _retire_oldest(self) -> None:
        reduction = self._reductions.popleft()
        self._wait_for(reduction)
        if reduction.complete is not None:
            reduction.complete()

    def _wait_for(self, reduction: Reduction) -> None:
        """Make all compute streams wait, so that each of them may reuse the memory of ``keep``."""
        streams = self._streams
        current, event = streams.wait(reduction.done), reduction.done.event
        if event is not None and (len(streams.computing) > 1 or reduction.origins != (current,)):
            for other in {*reduction.origins, *streams.other_compute_streams()} - {streams.computing[-1]}:
                other.wait_event(event)

    def wait_finished(self) -> None:
        """Make the scatter stream (without streams: the host) wait for the finish stream, see the last note above."""
        if self._scatter_stream is None:
            self.retire_all()
        elif self._scatter_stream is not self._finish_stream and self._reductions:
            # Compute has waited for all earlier ones, and the scatter stream for compute.
            last = self._reductions[-1].done.event
            assert last is not None
            self._scatter_stream.wait_event(last)

    def retire_users(self, buffers: Sequence[Tensor]) -> None:
        """Retire reductions, oldest first, until none in flight uses these buffers."""
        used = {buffer.untyped_storage().data_ptr() for buffer in buffers}
        while any(buffer.untyped_storage().data_ptr() in used for each in self._reductions for buffer in each.keep):
            self._retire_oldest()

    def retire_first(self, number: int) -> None:
        """Retire the first ``number`` reductions that were ever launched."""
        while self.num_launched - len(self._reductions) < number:
            self._retire_oldest()

    def retire_all(self) -> None:
        """Make compute wait for every reduction in flight, and drop their buffers."""
        while self._reductions:
            self._retire_oldest()

    @property
    def is_reducing(self) -> bool:
        """Whether there are reductions that compute has not waited for."""
        return bool(self._reductions)

    def forget(self) -> None:
        """The recording into a graph that launched them has failed: nobody can wait for them."""
        self._reductions.clear()

    def abandon(self) -> None:
        """After an exception: wait for the launched reductions and forget their results. One that has failed, e.g.
        because a peer is gone, is logged: the exception matters more, and the others are still to be forgotten."""
        while self._reductions:
            try:
                self._wait_for(self._reductions.popleft())
            except RuntimeError as error:
                # As text: a handler that keeps the error would keep its frames, and so the gradients.
                logger.warning("a reduction failed in a backward that was dropped: %s", str(error))
