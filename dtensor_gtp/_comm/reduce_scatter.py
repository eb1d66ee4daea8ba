"""Kinds of reduce-scatter: how the full gradients of all ranks become the reduced rows of each.

A *scattering* reduces one gradient, or several that travel together. It allocates its buffers on the compute stream, is
launched on the scatter stream, and is finished after the collective (without streams: after the background work).

[Note: error of a reduction]
A ring adds in the dtype of the wire, one rank after the other: with bf16, whose rounding is 2^-9, the error of the sum
grows with the number of ranks. ``all_to_all`` sends the same bytes, but every rank receives the addends of its rows
from all ranks and adds them in float32; ``copy_engine`` does the same with another carrier. What is left is the
rounding of each addend to the dtype of the wire, which does not grow with the axis. It costs a buffer as large as the
gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import NamedTuple

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


def can_travel_together(kind: ReduceScatterKind, num_ranks: int) -> bool:
    """Whether one scattering takes several gradients."""
    return num_ranks > 1 and kind != "all_to_all"


class Sending(NamedTuple):
    """From where copy engines fetch gradients."""

    ring: SendRing
    places: list[Place]


class Scattering:
    """One reduce-scatter. In the end ``slots`` hold this rank's rows of each gradient, in the dtype of the sum."""

    slots: list[Tensor]

    def launch(self, scale: ReduceScale, groups: Groups, comm: CommContext) -> dist.Work | None:
        """Launch the collective: on the current stream, or in the background where there are no streams."""
        raise NotImplementedError

    def keep(self) -> tuple[Tensor, ...]:
        """After the launch, the buffers that the communication stream uses: those that are sent, and the slots, from
        which shards are made there."""
        raise NotImplementedError

    def finish(self, scale: ReduceScale) -> None:
        """After the collective, perhaps on another stream: make ``slots`` the sums (or the means, if ``scale``
        says)."""


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
        fulls: Gradients of shape ``(num_ranks * rows, ...)``; they may be written to. If one is not contiguous or of
            another dtype, the launch makes a copy and sends that. Several only if they can travel together.
        num_ranks: Size of the group.
        wire_dtype: What they are sent in.
        sending: For ``"copy_engine"``: from where.
    """
    dtype = sum_dtype(kind, wire_dtype)
    if num_ranks == 1:
        return _Alone(fulls[0], dtype)
    if kind == "ring":
        return _Ring(fulls, num_ranks, wire_dtype)
    rooms: Sequence[Tensor | None] = [None] * len(fulls)
    if sending is not None:
        ring, pairs = sending.ring, zip(sending.places, fulls, strict=True)
        rooms = [None if ring.is_in(place, full) else ring.room(place, full.shape, wire_dtype) for place, full in pairs]
    return _Exchange(fulls, rooms, num_ranks, wire_dtype, dtype, sending)


class _Alone(Scattering):
    """One rank: nothing is sent, the sum has one addend."""

    def __init__(self, full: Tensor, dtype: torch.dtype) -> None:
        self._full = full
        self.slots = [full if full.dtype == dtype else full.to(dtype)]

    def launch(self, scale: ReduceScale, groups: Groups, comm: CommContext) -> None:
        if scale.predivide is not None:
            self.slots[0].div_(scale.predivide)

    def keep(self) -> tuple[Tensor, ...]:
        return self._full, *self.slots


class _Sent(Scattering):
    """Gradients as they are sent: themselves if they can be, else copies, which the scatter stream makes behind the
    compute that follows. A copy lies in its ``room``, if it has one."""

    def __init__(
        self, fulls: Sequence[Tensor], rooms: Sequence[Tensor | None], num_ranks: int, dtype: torch.dtype
    ) -> None:
        self._num_ranks = num_ranks
        self._sent: list[Tensor] = []
        self._copies: list[tuple[Tensor, Tensor]] = []  # target and source
        self._slot_shapes: list[tuple[int, ...]] = []
        for full, room in zip(fulls, rooms, strict=True):
            self._slot_shapes.append((full.shape[0] // num_ranks, *full.shape[1:]))
            if room is None and full.dtype == dtype and full.is_contiguous():
                self._sent.append(full)
                continue
            target = torch.empty(full.shape, dtype=dtype, device=full.device) if room is None else room
            self._sent.append(target)
            self._copies.append((target, full))

    def _pack(self) -> list[Tensor]:
        """What to send, on the current stream."""
        for target, source in self._copies:
            target.copy_(source)
        if not self._sent[0].is_cuda:  # else the stream may still read the sources
            self._copies.clear()
        return self._sent

    def keep(self) -> tuple[Tensor, ...]:
        return (*self._sent, *(source for _, source in self._copies), *self.slots)


class _Ring(_Sent):
    """The backend's own reduce-scatter, in the dtype of the gradients."""

    def __init__(self, fulls: Sequence[Tensor], num_ranks: int, dtype: torch.dtype) -> None:
        super().__init__(fulls, [None] * len(fulls), num_ranks, dtype)
        self.slots = []
        for sent, shape in zip(self._sent, self._slot_shapes, strict=True):
            self.slots.append(sent.new_empty(shape))

    def launch(self, scale: ReduceScale, groups: Groups, comm: CommContext) -> dist.Work | None:
        return collectives.reduce_scatter_many(self.slots, self._pack(), scale, groups.scatter, comm.has_streams)


class _Exchange(_Sent):
    """Each rank receives the addends of its rows and adds them in a wider dtype, see [Note: error of a reduction].

    What comes from one rank lies in one piece, so that one kernel adds everything: each kernel on the scatter stream
    waits until a GEMM leaves room for it. Copy engines leave out this rank's own addend if that kernel can read it
    where it was sent.
    """

    def __init__(
        self,
        fulls: Sequence[Tensor],
        rooms: Sequence[Tensor | None],
        num_ranks: int,
        wire_dtype: torch.dtype,
        dtype: torch.dtype,
        sending: Sending | None,
    ) -> None:
        super().__init__(fulls, rooms, num_ranks, wire_dtype)
        self._sending = sending
        self._sizes = [math.prod(shape) for shape in self._slot_shapes]
        like, numel = self._sent[0], sum(self._sizes)
        self._add = fused_sum(like, num_ranks)
        self._sum = like.new_empty(numel, dtype=dtype)
        num_rows = num_ranks if sending is None or self._add is None else num_ranks - 1
        self._received = like.new_empty(num_rows, numel)
        parts = zip(self._sum.split(self._sizes), self._slot_shapes, strict=True)
        self.slots = [part.view(shape) for part, shape in parts]

    def keep(self) -> tuple[Tensor, ...]:
        return (*super().keep(), self._received)

    def launch(self, scale: ReduceScale, groups: Groups, comm: CommContext) -> dist.Work | None:
        assert scale.predivide is None, "a sum in float32 does not overflow"
        if self._sending is not None:
            if self._copies:
                comm.wait_finished()  # an earlier gradient may still be read where a copy goes
            self._pack()
            self._sending.ring.exchange(self._received, self._sizes, self._sending.places)
            return None
        (sent,) = self._pack()
        return collectives.all_to_all(self._received, sent.view_as(self._received), groups.scatter, comm.has_streams)

    def finish(self, scale: ReduceScale) -> None:
        is_mean, own, rank = scale.op == dist.ReduceOp.AVG, [], 0
        if self._sending is not None:
            rank = self._sending.ring.rank
            own = [sent.view(self._num_ranks, -1)[rank] for sent in self._sent]
        if self._add is not None:
            factor = 1 / self._num_ranks if is_mean else 1.0
            self._add(self._sum, self._received, own, rank, self._num_ranks, factor)
            return
        if own:
            for part, row in zip(self._received[rank].split(self._sizes), own, strict=True):
                part.copy_(row)
        (torch.mean if is_mean else torch.sum)(self._received, 0, dtype=self._sum.dtype, out=self._sum)
