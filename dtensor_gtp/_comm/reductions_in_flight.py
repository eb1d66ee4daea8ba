"""Reductions in flight: how many there are, and who waits for them.

[Note: kernels after an exchange]
Copy engines exchange gradients without a kernel, but the sum that follows is a kernel, which waits behind a GEMM for
SMs. On the scatter stream the next exchange would wait with it, and the wire would be idle. So all that follows a
reduction (sum, division, replicas, accumulation) runs on the *finish stream*, which waits for the scatter stream. It
reads what the exchange has received and, in the send ring, this rank's own addend. Call ``wait_finished`` before the
scatter stream writes to the ring or lets it grow. With any other kind of reduction the finish stream is the scatter
stream.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from ..policy import Waitable
from .debug import DebugFlags, Delays
from .send_ring import Place
from .streams import Done, Streams


class Reduction(NamedTuple):
    """A reduction in flight.

    ``complete`` runs on the host once the background work has ended (None where streams order it). ``keep`` holds the
    buffers that the communication stream uses, ``places`` what peers read. ``origins`` are the compute streams from
    whose memory these are.
    """

    done: Done
    complete: Callable[[], None] | None
    keep: tuple[Tensor, ...]
    places: Sequence[Place] = ()
    origins: tuple[torch.Stream, ...] = ()


class ReductionsInFlight(Streams):
    """The scatter stream of one device and the reductions on it.

    Args:
        most: Reductions in flight before compute waits for the oldest.
        has_finish_stream: See [Note: kernels after an exchange].
    """

    def __init__(self, device: torch.device, debug: DebugFlags, most: int, has_finish_stream: bool) -> None:
        super().__init__(device)
        self.debug = debug
        self.is_debugged = debug.order or debug.delay_seed is not None
        self._most = most
        self._is_bounded = True
        self._reductions: deque[Reduction] = deque()
        self._scatter_stream = self._new_stream()
        self._finish_stream = self._new_stream() if has_finish_stream else self._scatter_stream
        self._delays = None
        if debug.delay_seed is not None:
            rank = dist.get_rank() if dist.is_initialized() else 0
            self._delays = Delays(debug.delay_seed * 1009 + rank, device)

    def delay(self) -> None:
        """Debugging aid: sleep a while, on the current stream."""
        if self._delays is not None:
            self._delays.sleep()

    def scattering(self) -> AbstractContextManager[Any]:
        """Context on the scatter stream, after all compute streams: for gradients, and for any other collective of the
        scatter group."""
        stream = self._scatter_stream
        if stream is None:
            return self._fork(None)
        fork = self._fork(stream)
        for other in self._beside():
            stream.wait_event(other.record_event())
        return fork

    def scatter_done(self, work: Waitable | None) -> Done:
        """When the collective that was just launched on the scatter stream is complete."""
        return Done(work=work) if self._scatter_stream is None else Done(self._scatter_stream.record_event())

    def reducing(self) -> AbstractContextManager[Any]:
        """Context in which a reduction is launched, on the scatter stream. Bounds how many are in flight."""
        while self._is_bounded and len(self._reductions) >= self._most:
            self._retire_oldest()
        return self.scattering()

    @contextmanager
    def unbounded(self) -> Iterator[None]:
        """Launch any number of reductions in this context: those of a recorded block come all at once."""
        self._is_bounded = False
        try:
            yield
        finally:
            self._is_bounded = True

    def reduction_launched(
        self,
        work: dist.Work | None,
        complete: Callable[[], None],
        keep: tuple[Tensor, ...],
        places: Sequence[Place] = (),
    ) -> None:
        """Within ``reducing``, after the launch of the collective.

        ``complete()`` works on its result (sum, replicas, division, accumulation): at once on the finish stream, or,
        without streams, when the reduction is retired. ``keep`` and ``places`` stay alive until then.
        """
        scatter, finish = self._scatter_stream, self._finish_stream
        if scatter is None or finish is None:
            self._reductions.append(Reduction(Done(work=work), complete, keep, places))
            return
        if finish is scatter:
            complete()
        else:
            finish.wait_event(scatter.record_event())
            with finish:
                self.delay()
                complete()
        self._reductions.append(Reduction(Done(finish.record_event()), None, keep, places, tuple(self._computing)))

    def _retire_oldest(self) -> None:
        reduction = self._reductions.popleft()
        self._wait_for(reduction)
        if reduction.complete is not None:
            reduction.complete()

    def _wait_for(self, reduction: Reduction) -> None:
        """Let all compute streams wait, so that the memory of ``keep`` can be reused in their order."""
        self.wait(reduction.done)
        if (event := reduction.done.event) is not None:
            for other in {*reduction.origins, *self._beside()} - {self._computing[-1]}:
                other.wait_event(event)

    def wait_finished(self) -> None:
        """Let the scatter stream (without streams: the host) wait for all that follows the reductions so far, see
        [Note: kernels after an exchange]."""
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
        while any(
            kept.untyped_storage().data_ptr() in used for reduction in self._reductions for kept in reduction.keep
        ):
            self._retire_oldest()

    def retire_all(self) -> None:
        """Make compute wait for every reduction in flight and drop their buffers."""
        while self._reductions:
            self._retire_oldest()

    @property
    def is_reducing(self) -> bool:
        """Whether there are reductions that compute has not waited for."""
        return bool(self._reductions)

    def _abandon_reductions(self) -> None:
        """After an exception: wait for what was launched, forget its results."""
        while self._reductions:
            self._wait_for(self._reductions.popleft())
