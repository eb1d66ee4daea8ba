"""Reductions of gradients: kinds of reduce-scatter, how many reductions are in flight, and who
waits for them.

A *scattering* reduces one gradient, or several that are sent together. It allocates its buffers on
the compute stream, is launched on the scatter stream, and is finished after the collective (without
streams: after the background work).

[Note: error of a reduction]
A ring adds in the dtype that is sent, one rank after the other: with bf16, whose rounding is 2^-8,
the error grows with the number of ranks. ``all_to_all`` sends the same bytes, but every rank
receives the addends of its rows from all ranks and adds them in float32. ``copy_engine`` does the
same by copies. The error that is left is the rounding of each addend to the dtype that is sent,
which does not grow with the axis. It costs a buffer as large as the gradient.

[Note: kernels after an exchange]
Copy engines exchange gradients without a kernel. The sum that follows is a kernel, which waits
until a GEMM leaves SMs for it; on the scatter stream it would delay the next exchange. So
everything after the exchange (sum, division, replicas, accumulation) runs on the *finish stream*,
which waits for the scatter stream. It reads this rank's own addend in the send ring: call
``wait_finished`` before the scatter stream writes to the ring or the ring grows. For other kinds of
reduction the finish stream is the scatter stream.
"""

from __future__ import annotations

import functools
import logging
import math
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch_compat as compat
from ..policy import ReduceScatterKind, Waitable
from .addends import add_parts, add_rows, fused_sum, is_loaded_ahead
from .collectives import Groups, ReduceScale
from .send_ring import Place, SendRing
from .streams import Done, Streams

logger = logging.getLogger(__name__)


class Reduction(NamedTuple):
    """A reduction in flight. ``complete`` runs on the host after the background work (None if
    streams order it). ``origins`` are the compute streams that own the memory of ``keep``."""

    done: Done
    complete: Callable[[], None] | None
    keep: Sequence[Tensor]  # the communication stream uses these
    places: Sequence[Place] = ()  # peers read these
    origins: tuple[torch.Stream, ...] = ()


class ReductionsInFlight:
    """The scatter stream of one device and the reductions on it."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._max_inflight = 2  # until the first mesh calls ``bound``
        self._is_bounded = True
        self._reductions: deque[Reduction] = deque()  # the oldest first
        self.num_launched = 0
        self.scatter_stream = streams.new_stream()  # None without streams
        self._finish_stream = self.scatter_stream  # unless copy engines exchange gradients

    def bound(self, most: int) -> None:
        """How many may be in flight before compute waits for the oldest."""
        self._max_inflight = most

    def finish_apart(self) -> None:
        """Copy engines exchange gradients, see [Note: kernels after an exchange]."""
        if self._finish_stream is self.scatter_stream:
            self._finish_stream = self._streams.new_stream()  # none without streams

    def scattering(self) -> AbstractContextManager[Any]:
        """Run on the scatter stream, after all compute streams: for any collective of the scatter
        group."""
        stream = self.scatter_stream
        fork = self._streams.fork(stream)
        if len(self._streams.computing) > 1 and stream is not None:
            # Each of them may have written a gradient that travels with this one.
            for other in self._streams.other_compute_streams():
                stream.wait_event(other.record_event())
        return fork

    def reducing(self) -> AbstractContextManager[Any]:
        """Launch a reduction in this context, on the scatter stream. Bounds how many are in flight."""
        # Each keeps its full gradients alive.
        while self._is_bounded and len(self._reductions) >= self._max_inflight:
            self._retire_oldest()
        return self.scattering()

    @contextmanager
    def unbounded(self) -> Iterator[None]:
        """Launch any number of reductions in this context: a recorded block launches all of its own
        together."""
        before = self._is_bounded
        try:
            self._is_bounded = False
            yield
        finally:
            self._is_bounded = before

    def launched(
        self, work: Waitable | None, complete: Callable[[], None], keep: Sequence[Tensor], places: Sequence[Place] = ()
    ) -> None:
        """Call within ``reducing``, after the launch of the collective. ``complete()`` works on the
        result (sum, replicas, division, accumulation): now, on the finish stream; without streams
        when the reduction is retired. ``keep`` and ``places`` stay alive until it is retired."""
        self.num_launched += 1
        scatter = self.scatter_stream
        finish = self._finish_stream
        if scatter is None or finish is None:
            self._reductions.append(Reduction(Done(work=work), complete, keep, places))
            return
        try:
            if finish is scatter:
                complete()  # ``reducing`` has made it current
            else:
                finish.wait_event(scatter.record_event())  # the exchange
                with finish:
                    self._streams.delay()
                    complete()
        finally:  # the collective is launched: whoever drops its memory waits
            # They own the memory of ``keep``: all of them wait when this is retired.
            origins = tuple(self._streams.computing)
            self._reductions.append(Reduction(Done(finish.record_event()), None, keep, places, origins))

    def _retire_oldest(self) -> None:
        # Popped first: if the wait raises, nobody waits for it again.
        reduction = self._reductions.popleft()
        self._wait_for(reduction)
        if reduction.complete is not None:
            reduction.complete()  # without streams, after the background work

    def _wait_for(self, reduction: Reduction) -> None:
        """Make all compute streams wait, so that each of them may reuse the memory of ``keep``."""
        streams = self._streams
        current = streams.wait(reduction.done)
        event = reduction.done.event
        if event is None or (len(streams.computing) == 1 and reduction.origins == (current,)):
            return  # most passes have no other compute stream
        others = {*reduction.origins, *streams.other_compute_streams()}
        for other in others - {streams.computing[-1]}:  # which waits already
            other.wait_event(event)

    def wait_finished(self) -> None:
        """Make the scatter stream (without streams: the host) wait for the finish stream, see the
        last note above."""
        if self.scatter_stream is None:
            self.retire_all()
        elif self.scatter_stream is not self._finish_stream and self._reductions:
            # Compute has waited for all earlier ones, and the scatter stream for compute.
            last = self._reductions[-1].done.event
            assert last is not None
            self.scatter_stream.wait_event(last)

    def retire_users(self, buffers: Sequence[Tensor]) -> None:
        """Retire reductions, oldest first, until none in flight uses these buffers."""
        storages = {buffer.untyped_storage().data_ptr() for buffer in buffers}  # what is kept may be a view
        while any(t.untyped_storage().data_ptr() in storages for each in self._reductions for t in each.keep):
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
        # No wait: the events belong to a recording that never runs.
        self._reductions.clear()

    def abandon(self) -> None:
        """After an exception: wait for the launched reductions and forget their results. One that
        has failed, e.g. because a peer is gone, is logged: the exception matters more, and the
        others are still to be forgotten."""
        while self._reductions:
            try:
                self._wait_for(self._reductions.popleft())
            except RuntimeError as error:
                # As text: a handler that keeps the error would keep its frames, and so the gradients.
                logger.warning("a reduction failed in a backward that was dropped: %s", str(error))


@functools.cache
def sum_dtype(kind: ReduceScatterKind, wire_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the sum over ranks of gradients that are sent in ``wire_dtype``."""
    if kind == "ring":
        return wire_dtype
    return torch.promote_types(wire_dtype, torch.float32)


def can_travel_together(kind: ReduceScatterKind, num_ranks: int) -> bool:
    """Whether one scattering takes several gradients."""
    return num_ranks > 1 and kind != "all_to_all"


class Scattering:
    """One reduce-scatter of gradients, made on the current stream. At the end ``slots`` hold this
    rank's rows of each gradient, in the dtype of the sum.

    Args:
        kind: How to reduce.
        fulls: Gradients of shape ``(num_ranks * rows, ...)``; they may be written to. The launch
            copies one that is not contiguous or of another dtype, and sends the copy. Several only
            if they can be sent together: by ``"all_to_all"`` if ``is_loaded_ahead``.
        num_ranks: Size of the group. One rank sends nothing: the sum has one addend.
        wire_dtype: The dtype to send.
        dtype: Of the sum, if it is wider than ``sum_dtype`` says. Nothing else needs the fused
            kernel then, so torch adds unless the kernel was loaded ahead.
        ring, places: For ``"copy_engine"``: where peers fetch each gradient.
    """

    def __init__(
        self,
        kind: ReduceScatterKind,
        fulls: Sequence[Tensor],
        num_ranks: int,
        wire_dtype: torch.dtype,
        ring: SendRing | None = None,
        places: Sequence[Place] = (),
        *,
        dtype: torch.dtype | None = None,
    ) -> None:
        self._num_ranks = num_ranks
        self._ring = ring
        if ring is None:
            self._rank = 0
        else:
            self._rank = ring.rank
        self._places = places
        self._sent: list[Tensor] = []  # what the collective reads
        self._copies: list[tuple[Tensor, Tensor]] = []  # target and source
        self._received: Tensor | None = None  # the addends of an exchange
        self.slots: list[Tensor] = []
        if num_ranks == 1:
            self._sent.append(fulls[0])  # as it is: nothing is sent
            self.slots.append(fulls[0].to(sum_dtype(kind, wire_dtype)))  # perhaps the gradient itself
            return
        for index, full in enumerate(fulls):
            target = full
            if ring is not None:
                # The GEMM has written it there, if the place was free, see ``SendRing.offer``.
                if not ring.is_in(places[index], full):
                    target = ring.room(places[index], full.shape, wire_dtype)
            elif full.dtype != wire_dtype or not full.is_contiguous():
                # The launch copies, on the scatter stream.
                target = torch.empty(full.shape, dtype=wire_dtype, device=full.device)
            self._sent.append(target)
            if target is not full:
                self._copies.append((target, full))
            if kind == "ring":
                num_rows, *others = target.shape
                self.slots.append(target.new_empty((num_rows // num_ranks, *others)))
        if kind != "ring":
            self._add = None
            if dtype is None or is_loaded_ahead(self._sent[0], num_ranks):
                self._add = fused_sum(self._sent[0], num_ranks)
            if self._add is None and len(self._sent) > 1 and ring is None:
                self._add = add_parts  # the other ranks send parts, too
            self._prepare_exchange(dtype or sum_dtype(kind, wire_dtype))

    def _prepare_exchange(self, dtype: torch.dtype) -> None:
        """Allocate what each rank receives: the addends of its rows, to add in a wider dtype.

        The addends of one rank are contiguous, so one kernel adds all gradients: each kernel waits
        until a GEMM leaves room for it. The kernel reads this rank's own addends where they were
        to be sent.
        """
        like = self._sent[0]
        num_rows = self._num_ranks
        shapes = [(sent.shape[0] // num_rows, *sent.shape[1:]) for sent in self._sent]
        self._sizes = [math.prod(shape) for shape in shapes]  # elements of one rank's rows
        self._sum = like.new_empty(sum(self._sizes), dtype=dtype)
        if self._add is not None:
            num_rows -= 1  # without this rank's
        self._received = like.new_empty(num_rows, self._sum.numel())
        parts = self._sum.split(self._sizes)
        # Views of the sum, so one kernel fills all of them.
        self.slots = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    @property
    def flat(self) -> Tensor:
        """All slots, one behind the other. Of one gradient, or after an exchange."""
        if self._received is None:
            (slot,) = self.slots
            return slot.flatten()
        return self._sum

    def keep(self) -> list[Tensor]:
        """After the launch, the buffers that the communication stream uses. It makes shards of the
        slots."""
        # All of them are memory of the compute stream, which may reuse it only after this
        # reduction.
        kept = self._sent + [source for _, source in self._copies] + self.slots
        if self._received is not None:
            kept.append(self._received)
        return kept

    def launch(
        self, scale: ReduceScale, groups: Groups, reductions: ReductionsInFlight, *, async_op: bool
    ) -> dist.Work | None:
        """Launch the collective in ``reducing``: on the current stream, or without streams in the
        background (``async_op``)."""
        if self._num_ranks == 1:
            if scale.predivide is not None:
                self.slots[0].div_(scale.predivide)
            return None
        if self._copies:
            if self._ring is not None:
                # The sum of an earlier gradient may still read the place of a copy.
                reductions.wait_finished()
            for target, source in self._copies:
                # On the scatter stream, beside the compute that follows.
                target.copy_(source)
            if async_op:  # without streams the copies are complete; a stream may still read the sources
                self._copies.clear()
        if self._received is None:
            if scale.predivide is not None:
                for sent in self._sent:
                    sent.div_(scale.predivide)
            how = (scale.op, groups.scatter, async_op)
            if len(self.slots) == 1:
                return compat.reduce_scatter_base(self.slots[0], self._sent[0], *how)
            return compat.reduce_scatter_coalesced(self.slots, self._sent, *how)
        assert scale.predivide is None, "a sum in float32 does not overflow"
        received = self._received
        if self._ring is not None:
            self._ring.exchange(self._received, self._sizes, self._places)
            return None
        self._rank = groups.scatter.rank()  # ``finish`` finds this rank's own rows by it
        rows = [sent.view(self._num_ranks, -1) for sent in self._sent]
        if self._add is None:
            return compat.all_to_all_base(received, rows[0], groups.scatter, async_op)
        for sent, into in zip(rows, received.split(self._sizes, 1), strict=True):
            work = compat.all_to_all_of_peers(into, sent, groups.scatter, async_op)
        return work  # of the last one: they are in order

    def finish(self, scale: ReduceScale) -> None:
        """After the collective, perhaps on another stream: make ``slots`` the sums (or means, as
        ``scale`` says)."""
        received = self._received
        if received is None:
            return
        is_mean = scale.op == dist.ReduceOp.AVG  # else ``scale`` divides later
        own: list[Tensor] = []  # this rank's addends, if nobody has sent them
        if self._add is not None or self._ring is not None:
            own = [sent.view(self._num_ranks, -1)[self._rank] for sent in self._sent]
        if self._add is None and own:  # torch adds, which wants all addends in one tensor
            for part, row in zip(received[self._rank].split(self._sizes), own, strict=True):
                part.copy_(row)
        add_rows(self._add, self._sum, received, own, self._rank, self._num_ranks, is_mean=is_mean)
