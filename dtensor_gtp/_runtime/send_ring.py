"""Gradients that peers fetch by copy engines, from where the GEMM has written them.

[Note: places in the ring]
A gradient is sent from the *ring*, symmetric memory of this rank. Peers must know where it lies, without a word: a
place follows from the sizes of what was submitted before in this backward, which is the same on all ranks, as the order
of collectives is. Whether the gradient was written there to begin with is another matter, and each rank's own: a GEMM
is *offered* the place that comes next if nobody uses it any more. Else, and for a gradient that was made elsewhere, the
scatter stream copies it there, by a kernel, when all before it has been read. Microbatches, or a branch that only some
ranks have taken, make no difference to places.

A place is taken until compute has waited for the exchange that has read it (``CommContext`` retires it) or longer. An
exchange ends with a barrier, so then all peers have read it.

An exchange, in the order of the scatter stream, is

1. a copy of the rank's own addend, while others may still be busy;
2. a barrier: all ranks have written what they send;
3. a copy of every peer's addend for this rank;
4. a barrier: all ranks have read.

Gradients that have no room get it when they are launched, together, in a ring that grows if it must, on all ranks
alike; the rules for that, and for CUDA graphs, are those of [Note: rules of the copy engine]. Up to ``enough_nbytes``
it grows instead of turning round. Places begin anew with each backward, so addresses repeat from step to step.
"""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from itertools import pairwise

import torch
import torch.distributed as dist

from .copy_engine import PeerCopies, offsets


class Place:
    """A range of the ring in bytes, taken for as long as the object lives."""

    __slots__ = ("__weakref__", "begin", "end", "is_launched")

    def __init__(self, begin: int, end: int) -> None:
        self.begin, self.end = begin, end
        self.is_launched = False


class SendRing(PeerCopies):
    """Exchanges of one communicator, see [Note: places in the ring]. Collective over ``group``.

    Args:
        group, device: As for ``PeerCopies``.
        enough_nbytes: Up to where it grows for more to be in flight. A larger gradient makes it as large as that is.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device, enough_nbytes: int = 0) -> None:
        super().__init__(group, device)
        self._enough_nbytes = enough_nbytes
        self._head = 0
        self._taken: list[weakref.ref[Place]] = []
        self._offered: torch.Tensor | None = None

    # --- places -------------------------------------------------------------------------------------------------------

    def _next(self, nbytes: int) -> tuple[int, int]:
        """Where the next gradient begins and ends; beyond the end of the ring if it has no room there."""
        size = offsets([nbytes])[-1]
        turns_round = self._head + size > self._nbytes and self._nbytes >= self._enough_nbytes
        begin = 0 if turns_round else self._head
        return begin, begin + size

    @property
    def _nbytes(self) -> int:
        return 0 if self._stage is None else self._stage.nbytes

    def _users(self, begin: int, end: int) -> list[Place]:
        alive = [(ref, place) for ref in self._taken if (place := ref()) is not None]
        self._taken = [ref for ref, _ in alive]
        return [place for _, place in alive if place.begin < end and begin < place.end]

    def offer(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
        """Memory for a gradient that is the next one to be submitted; None if it is still in use."""
        shape = torch.Size(shape)
        begin, end = self._next(shape.numel() * dtype.itemsize)
        is_free = end <= self._nbytes and not self._users(begin, end)
        self._offered = self._view(self._rank, begin, shape, dtype) if is_free else None
        return self._offered

    def take(self, buffer: torch.Tensor, dtype: torch.dtype) -> Place | None:
        """The place of a gradient that is submitted now, to be sent in ``dtype``; None if it has no room.

        Raises:
            RuntimeError: It is not the one that the last place was offered to.
        """
        offered, self._offered = self._offered, None
        if offered is not None and offered is not buffer:
            raise RuntimeError("a place of the send ring was offered to a gradient, but another one was submitted")
        begin, end = self._next(buffer.numel() * dtype.itemsize)
        # What waits with others for its launch has not been read yet: it is as if there was no room.
        if end > self._nbytes or not all(place.is_launched for place in self._users(begin, end)):
            return None
        self._head = end
        place = Place(begin, end)
        self._taken.append(weakref.ref(place))
        return place

    def rewind(self) -> None:
        """Everything has been sent and waited for: begin anew."""
        self._head = 0
        self._offered = None

    # --- exchanges ----------------------------------------------------------------------------------------------------

    def settle(self, given: Sequence[Place | None], fulls: list[torch.Tensor], dtype: torch.dtype) -> list[Place]:
        """The places of gradients that are launched together, on the scatter stream.

        If one has none, all get others, for which the ring may grow, and those of ``fulls`` that lie in the ring are
        replaced by copies. Their own places must be held until the scatter stream has made these.
        """
        places = [place for place in given if place is not None]
        if len(places) < len(given):
            fulls[:] = [full.clone() if self._is_inside(full) else full for full in fulls]
            ends = offsets([full.numel() * dtype.itemsize for full in fulls])
            needed = max(ends[-1], min(self._enough_nbytes, 2 * (self._head + ends[-1])))
            if needed > self._nbytes:
                self._grow(needed)
            places = [Place(begin, end) for begin, end in pairwise(ends)]
            self._taken += [weakref.ref(place) for place in places]
            self._head = ends[-1]
        for place in places:
            place.is_launched = True
        return places

    def _is_inside(self, tensor: torch.Tensor) -> bool:
        if not self._nbytes:
            return False
        begin = self._view(self._rank, 0, torch.Size((1,)), torch.uint8).data_ptr()
        return begin <= tensor.data_ptr() < begin + self._nbytes

    def _view(self, rank: int, begin: int, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        assert self._stage is not None
        view = self._stage.view(rank, begin, shape, dtype)
        return view.view(shape)  # an object of its own

    def room(self, place: Place, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
        """The memory of a place, on this rank."""
        return self._view(self._rank, place.begin, shape, dtype)

    def exchange(self, outputs: list[torch.Tensor], places: Sequence[Place]) -> None:
        """Copy the row for this rank out of every rank's gradients, on the current stream.

        Args:
            outputs: Shape ``(world, numel)``; row i comes from rank i. Each row contiguous.
            places: Where gradients of shape ``(world, numel)`` lie; row i is for rank i.
        """
        stage = self._reserve(max(place.end for place in places))

        def copy_from(rank: int) -> None:
            for output, place in zip(outputs, places, strict=True):
                row = output[rank]
                at = place.begin + self._rank * row.nbytes
                row.copy_(stage.view(rank, at, row.shape, row.dtype))

        copy_from(self._rank)
        stage.barrier(0)
        for rank in self._peers():
            copy_from(rank)
        stage.barrier(1)


__all__ = ["Place", "SendRing"]
