"""Gradients that peers fetch by copy engines, from where the GEMM has written them.

[Note: places in the ring]
Gradients are sent from the *ring*, symmetric memory of this rank. The place (slot) of a gradient
follows from the sizes of those that were submitted before it in this backward. These are the same
on all ranks, so peers find it without a message. A GEMM is *offered* the next place, to write its
gradient there, if the place is free. Otherwise, and if a gradient was made elsewhere (added to
those of earlier microbatches, say), the scatter stream copies it into its place. Ranks may differ
in this, because they may differ in which places are in use.

A place is in use at least until compute has waited for the exchange that reads it
(``ReductionsInFlight`` retires it). An exchange ends with a barrier, so by then all peers have read
it. It is, in the order of the scatter stream:

1. a barrier: all ranks have written what they send;
2. a copy of every peer's addend for this rank;
3. a barrier: all ranks have read.

The kernel that adds reads this rank's own addend where it is (see [Note: kernels after an exchange]).

Waiting gradients that cannot be sent with the next one are launched before that one gets a place.
If a gradient does not fit beside those that it is sent with, all of them get new places at the
launch, in a ring that grows if it must: the first time to what the sizes of all weights ask for.
After each backward the ring grows to the size that would have avoided that, up to
``enough_nbytes``. [Note: rules of the copy engine] holds for growth and CUDA graphs. Each backward
starts at the first place, so addresses repeat from step to step.

torch's ``_low_contention_reduce_scatter`` exchanges in the same way, but returns the sum in the
dtype that is sent: for bf16 it rounds once more, by up to 2^-8. It copies this rank's own addend,
too (4 bytes for each element of its rows), and lends no places: two gradients in flight would need
symmetric memory that the caller manages, as here.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch_compat as compat
from .copy_engine import ALIGNMENT, PeerCopies, offsets

_ALIGNMENT = 512  # that of torch's allocator: GEMMs choose their kernels by it


class Place:
    """A range of the ring in bytes, in use for as long as the object lives."""

    __slots__ = ("__weakref__", "begin", "end")

    def __init__(self, begin: int, end: int) -> None:
        self.begin = begin
        self.end = end

    def overlaps(self, begin: int, end: int) -> bool:
        return self.begin < end and begin < self.end


class SendRing(PeerCopies):
    """Exchanges of one communicator, see [Note: places in the ring].

    Args:
        group, device, nbytes: As in ``PeerCopies``.
        enough_nbytes: The size up to which it grows so that more is in flight. It grows further by
            a gradient of more than half that size (a head), because later gradients would otherwise
            find their places in use.
    """

    def __init__(
        self, group: dist.ProcessGroup, device: torch.device, enough_nbytes: int, nbytes: int = ALIGNMENT
    ) -> None:
        super().__init__(group, device, nbytes)
        self._enough_nbytes = enough_nbytes
        self._head = 0  # where the next gradient begins
        # Places of this backward. Weak: a place is in use for as long as somebody holds it, which
        # is until compute has waited for the exchange.
        self._used: list[weakref.ref[Place]] = []
        self._waiting: list[Place] = []  # for their launch
        self._offered: Tensor | None = None  # memory for the gradient that is computed now
        # Bytes of this backward:
        self._submitted_nbytes = 0  # of all gradients
        self._largest_nbytes = 0  # of the largest
        self._wanted_nbytes = 0  # the size that would have avoided ``lay_out``
        self._expected_nbytes = 0  # the size that ``expect`` has found

    def expect(self, sizes: Sequence[int]) -> None:
        """Before the first backward: it will have gradients of these sizes in bytes, so that the
        ring grows once."""
        self._expected_nbytes = ring_nbytes(sizes, self._enough_nbytes)

    @property
    def _nbytes(self) -> int:
        if self._stage is None:
            return 0
        return self._stage.nbytes

    def _next(self, numel: int, dtype: torch.dtype) -> tuple[int, int]:
        """Where the next gradient begins and ends, perhaps beyond the end of the ring."""
        size = offsets([numel * dtype.itemsize], _ALIGNMENT)[-1]
        begin = self._head
        if begin + size > self._nbytes:
            begin = 0  # a gradient does not wrap around
        return begin, begin + size

    def offer(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor | None:
        """Memory for the next gradient to be submitted; None if it is still in use."""
        shape = torch.Size(shape)
        begin, end = self._next(shape.numel(), dtype)
        self._offered = None
        self._used = [ref for ref in self._used if ref() is not None]
        for ref in self._used:
            place = ref()
            if place is not None and place.overlaps(begin, end):
                return None  # peers may still read it
        if end <= self._nbytes:
            self._offered = self.room(Place(begin, end), shape, dtype)  # not in use: ``take`` makes the place that is
        return self._offered

    def has_offered(self, buffer: Tensor) -> bool:
        """Whether ``buffer`` was offered last, and nothing has been submitted since."""
        return buffer is self._offered

    def withdraw(self) -> None:
        """What was offered last is not submitted."""
        self._offered = None

    def take(self, buffer: Tensor, dtype: torch.dtype) -> Place | None:
        """The place of a gradient that is submitted now, to be sent in ``dtype``; None if it has no
        room beside those that wait for their launch.

        Raises:
            RuntimeError: The last place was offered to another gradient.
        """
        offered = self._offered
        self._offered = None
        if offered is not None and offered is not buffer:
            raise RuntimeError("the send ring reserved memory for another gradient than the one submitted")
        begin, end = self._next(buffer.numel(), dtype)
        self._submitted_nbytes += end - begin
        self._largest_nbytes = max(self._largest_nbytes, end - begin)
        # ``lay_out`` gives it one at the launch.
        if end > self._nbytes or any(place.overlaps(begin, end) for place in self._waiting):
            return None
        self._head = end
        return self._new_place(begin, end)

    def _new_place(self, begin: int, end: int) -> Place:
        place = Place(begin, end)
        self._waiting.append(place)
        self._used.append(weakref.ref(place))
        return place

    def lay_out(self, fulls: list[Tensor], dtype: torch.dtype) -> list[Place]:
        """New places for gradients that are launched together and do not all have one. On the
        scatter stream. Replaces ``fulls`` in the ring by copies; their old places must live until
        the launch is retired."""
        if self._stage is not None:
            begin = self._stage.address(self.rank)
            end = begin + self._nbytes
            for index, full in enumerate(fulls):
                # The new places may overlap the old ones, and a ring that grows is freed.
                if begin <= full.data_ptr() < end:
                    fulls[index] = full.clone()
        ends = offsets([full.numel() * dtype.itemsize for full in fulls], _ALIGNMENT)
        self._wanted_nbytes = max(self._wanted_nbytes, self._head + ends[-1])
        if ends[-1] > self._nbytes:
            self.grow(max(ends[-1], self._expected_nbytes))  # on all ranks: their sizes are the same
        self._head = ends[-1]
        self._waiting.clear()
        return [self._new_place(begin, end) for begin, end in pairwise(ends)]

    def is_in(self, place: Place, full: Tensor) -> bool:
        """Whether ``full`` was written to its place, which was offered."""
        assert self._stage is not None
        return full.data_ptr() == self._stage.address(self.rank) + place.begin

    def room(self, place: Place, shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The memory of a place on this rank, as a new tensor object."""
        assert self._stage is not None
        return self._stage.view(self.rank, place.begin, shape, dtype).view(shape)

    def rewind(self) -> None:
        """Begin again. Call it when nothing waits or is in flight."""
        self._head = 0
        self._submitted_nbytes = 0
        self._largest_nbytes = 0
        self._wanted_nbytes = 0
        self._offered = None
        self._waiting.clear()
        self._used.clear()

    @property
    def missing_nbytes(self) -> int:
        """The size that the ring should have had in this backward; 0 if it has that size."""
        wanted = _wanted(self._largest_nbytes, self._submitted_nbytes, self._enough_nbytes)
        wanted = max(wanted, self._wanted_nbytes)
        if wanted <= self._nbytes:
            return 0
        return wanted

    def exchange(self, received: Tensor, sizes: Sequence[int], places: Sequence[Place]) -> None:
        """Copy the row for this rank out of every peer's gradients, on the current stream.

        Args:
            received: Shape ``(world, numel)``, contiguous: row i comes from rank i, this rank's is
                not written. Or shape ``(world - 1, numel)``, without this rank's row. A row has its
                part of each gradient in turn.
            sizes: Elements of a row of each gradient; their sum is ``numel``.
            places: Of all gradients that wait, each of shape ``(world, size)``; row i is for rank i.
        """
        assert places == self._waiting, "gradients must be launched in the order of submission"
        self._waiting = []
        stage = self._used_stage()
        stage.barrier(0)  # all peers have filled their places
        target = received.data_ptr()
        stride = received.shape[1] * received.itemsize
        fetches = []
        for size, place in zip(sizes, places, strict=True):
            nbytes = size * received.itemsize
            # Row ``rank`` of each peer's gradient goes to the row of that peer in ``received``.
            fetches.append(compat.Fetch(place.begin + self.rank * nbytes, target, stride, nbytes))
            target += nbytes
        rows = [(rank, rank) for rank in self._peers()]
        if received.shape[0] < self._num_ranks:  # there is none for this rank
            rows = [(rank, rank - (rank > self.rank)) for rank in self._peers()]
        stage.fetch(rows, fetches)
        stage.barrier(1)  # all peers have read this rank's places, which may be written again


def ring_nbytes(sizes: Sequence[int], enough_nbytes: int) -> int:
    """How large a ring gets for backwards with gradients of these sizes in bytes; ``enough_nbytes``
    as in ``SendRing``."""
    aligned = [offsets([nbytes], _ALIGNMENT)[-1] for nbytes in sizes]
    return _wanted(max(aligned, default=0), sum(aligned), enough_nbytes)


def _wanted(largest_nbytes: int, total_nbytes: int, enough_nbytes: int) -> int:
    if largest_nbytes > enough_nbytes // 2:
        enough_nbytes += largest_nbytes  # a head, see ``SendRing``
    return min(enough_nbytes, total_nbytes)
