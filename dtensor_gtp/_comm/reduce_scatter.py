"""Kinds of reduce-scatter: how the full gradients of all ranks become the reduced rows of each.

A *scattering* is one of them in flight, of one gradient or of several that travel together. It is made on the compute
stream, where it allocates its buffers, launched on the scatter stream, and finished after the collective (without
streams: after the background work), there or on another stream.

[Note: error of a reduction]
A ring adds up in the dtype of the wire, one rank after the other: with bf16, whose rounding is 2^-9, the error of the
sum grows with the number of ranks. ``all_to_all`` sends the same bytes, but every rank receives the addends of its rows
from all ranks and adds them in float32; ``copy_engine`` is the same with another carrier. What is left is the rounding
of each addend to the wire's dtype, which does not grow with the axis. It costs a buffer as large as the gradient.
docs/performance.md has the figures.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from ..policy import ReduceScatterKind
from . import collectives
from .addends import fused_sum
from .collectives import ReduceScale
from .context import CommContext
from .groups import Groups
from .send_ring import Place, SendRing


@functools.cache
def sum_dtype(kind: ReduceScatterKind, wire_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the sum over ranks of gradients that are sent in ``wire_dtype``."""
    return wire_dtype if kind == "ring" else torch.promote_types(wire_dtype, torch.float32)


class Scattering(Protocol):
    """One reduce-scatter, of one gradient or of several.

    ``slots`` hold this rank's rows of each in the end, in the dtype of the sum. ``keep`` are the buffers that the
    communication stream uses, after the launch: those that are sent, and the slots, from which shards are made there.
    """

    @property
    def slots(self) -> list[Tensor]: ...

    @property
    def keep(self) -> tuple[Tensor, ...]: ...

    def launch(self, scale: ReduceScale, groups: Groups, comm: CommContext) -> dist.Work | None:
        """Launch the collective: on the current stream, or in the background where there are no streams."""

    def finish(self, scale: ReduceScale) -> None:
        """After the collective, perhaps on another stream: what is left until ``slots`` are the sums (the means, if
        that is the operation)."""


class Sending(NamedTuple):
    """Where gradients are fetched from by copy engines."""

    ring: SendRing
    places: list[Place]


def can_travel_together(kind: ReduceScatterKind, num_ranks: int) -> bool:
    """Whether one scattering takes several gradients."""
    return num_ranks > 1 and kind != "all_to_all"


def make_scattering(
    kind: ReduceScatterKind,
    fulls: Sequence[Tensor],
    num_ranks: int,
    wire_dtype: torch.dtype,
    sending: Sending | None = None,
) -> Scattering:
    """A scattering of gradients, on the current stream.

    Args:
        kind: Which one.
        fulls: Gradients of shape ``(num_ranks * rows, ...)``; they may be written to. Of those that are not contiguous
            or of another dtype, a copy is sent, which the launch makes. One, or several if they can travel together.
        num_ranks: Size of the group.
        wire_dtype: What they are sent in.
        sending: For ``"copy_engine"``: from where.
    """
    dtype = sum_dtype(kind, wire_dtype)
    if num_ranks == 1:
        return _Alone(fulls[0], dtype)
    rooms: Sequence[Tensor | None] = [None] * len(fulls)
    if sending is not None:
        ring, pairs = sending.ring, zip(sending.places, fulls, strict=True)
        rooms = [None if ring.is_in(place, full) else ring.room(place, full.shape, wire_dtype) for place, full in pairs]
    parcels = [_Parcel(full, wire_dtype, room) for full, room in zip(fulls, rooms, strict=True)]
    if kind == "ring":
        return _Ring(parcels, num_ranks)
    return _Exchange(parcels, num_ranks, dtype, sending)


class _Parcel:
    """A gradient as it is sent: itself if it can, else a copy that is made on the scatter stream, behind the compute
    that follows; in ``room``, if it has to be there."""

    def __init__(self, full: Tensor, dtype: torch.dtype, room: Tensor | None) -> None:
        is_ready = room is None and full.is_contiguous() and full.dtype == dtype
        if room is None:
            room = full if is_ready else torch.empty(full.shape, dtype=dtype, device=full.device)
        self._sent = room
        self._source = None if is_ready else full

    @property
    def keep(self) -> tuple[Tensor, ...]:
        """What the communication uses; the first is what is sent."""
        return (self._sent,) if self._source is None else (self._sent, self._source)

    def slot_shape(self, num_ranks: int) -> torch.Size:
        """Of the rows of one rank."""
        return torch.Size((self._sent.shape[0] // num_ranks, *self._sent.shape[1:]))

    def row(self, rank: int, num_ranks: int) -> Tensor:
        """The rows of one rank, as they are sent."""
        num_rows = self._sent.shape[0] // num_ranks
        return self._sent.narrow(0, rank * num_rows, num_rows)

    @property
    def is_packed(self) -> bool:
        return self._source is None

    def packed(self) -> Tensor:
        """What to send, on the current stream."""
        if self._source is not None:
            self._sent.copy_(self._source)
            if self._source.device.type == "cpu":
                self._source = None  # where there are streams, this one may still read it
        return self._sent


class _Alone:
    """One rank: nothing is sent, the sum has one addend."""

    def __init__(self, full: Tensor, dtype: torch.dtype) -> None:
        self.slots = [full if full.dtype == dtype else full.to(dtype)]
        self.keep = (full, *self.slots)

    def launch(self, scale: ReduceScale, groups: Groups, comm: CommContext) -> None:
        if scale.predivide is not None:
            self.slots[0].div_(scale.predivide)

    def finish(self, scale: ReduceScale) -> None:
        pass


class _Ring:
    """The backend's own reduce-scatter, in the dtype of the gradients."""

    def __init__(self, parcels: list[_Parcel], num_ranks: int) -> None:
        self._parcels = parcels
        self.slots = [parcel.keep[0].new_empty(parcel.slot_shape(num_ranks)) for parcel in parcels]

    @property
    def keep(self) -> tuple[Tensor, ...]:
        return (*(buffer for parcel in self._parcels for buffer in parcel.keep), *self.slots)

    def launch(self, scale: ReduceScale, groups: Groups, comm: CommContext) -> dist.Work | None:
        fulls = [parcel.packed() for parcel in self._parcels]
        return collectives.reduce_scatter_many(self.slots, fulls, scale, groups.scatter, comm.has_streams)

    def finish(self, scale: ReduceScale) -> None:
        pass


class _Exchange:
    """Each rank receives the addends of its rows and adds them in a wider dtype, see [Note: error of a reduction].

    What is received of one rank lies in one piece, so that one kernel adds everything: each kernel on the scatter
    stream waits until a GEMM has left room for it. What copy engines fetch is without this rank's own addend if that
    kernel can read it where it was sent.
    """

    def __init__(
        self, parcels: list[_Parcel], num_ranks: int, dtype: torch.dtype, sending: Sending | None = None
    ) -> None:
        self._parcels = parcels
        self._num_ranks = num_ranks
        shapes = [parcel.slot_shape(num_ranks) for parcel in parcels]
        self._sizes = sizes = [shape.numel() for shape in shapes]
        sent = parcels[0].keep[0]
        self._add = fused_sum(sent, num_ranks)
        self._sum = sent.new_empty(sum(sizes), dtype=dtype)
        num_rows = num_ranks if sending is None or self._add is None else num_ranks - 1
        self._received = sent.new_empty(num_rows, sum(sizes))
        self._sending = sending
        parts = self._sum.split(sizes) if len(sizes) > 1 else [self._sum]
        self.slots = [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]

    @property
    def keep(self) -> tuple[Tensor, ...]:
        return (*(buffer for parcel in self._parcels for buffer in parcel.keep), self._received, self._sum)

    def launch(self, scale: ReduceScale, groups: Groups, comm: CommContext) -> dist.Work | None:
        assert scale.predivide is None, "a sum in float32 does not overflow"
        if self._sending is not None and not all(parcel.is_packed for parcel in self._parcels):
            comm.wait_finished()  # the room may be that of a gradient before
        sent = [parcel.packed() for parcel in self._parcels]
        if self._sending is None:
            (only,) = sent
            sent_rows = only.view_as(self._received)
            return collectives.all_to_all(self._received, sent_rows, groups.scatter, comm.has_streams)
        self._sending.ring.exchange(self._received, self._sizes, self._sending.places)
        return None

    def finish(self, scale: ReduceScale) -> None:
        is_mean = scale.op == dist.ReduceOp.AVG
        rank = 0 if self._sending is None else self._sending.ring.rank
        own = [] if self._sending is None else [parcel.row(rank, self._num_ranks) for parcel in self._parcels]
        if self._add is not None:
            factor = 1 / self._num_ranks if is_mean else 1.0
            self._add(self._sum, self._received, own, rank, self._num_ranks, factor)
            return
        if own:
            for part, row in zip(self._received[rank].split(self._sizes), own, strict=True):
                part.copy_(row.view(-1))
        (torch.mean if is_mean else torch.sum)(self._received, 0, dtype=self._sum.dtype, out=self._sum)
