"""Kinds of reduce-scatter: how the full gradients of all ranks become the reduced rows of each.

A *scattering* is one of them in flight. It is made on the compute stream, where it allocates its buffers, launched on
the scatter stream, and finished there after the collective (without streams: after the background work).

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
from typing import Protocol

import torch
import torch.distributed as dist

from ..policy import ReduceScatterKind
from . import collectives
from .collectives import ReduceScale
from .comm_context import CommContext, Groups


@functools.cache
def sum_dtype(kind: ReduceScatterKind, wire_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the sum over ranks of gradients that are sent in ``wire_dtype``."""
    return wire_dtype if kind == "ring" else torch.promote_types(wire_dtype, torch.float32)


class Scattering(Protocol):
    """One reduce-scatter.

    ``slot`` holds this rank's rows in the end, in the dtype of the sum. ``keep`` are the buffers that the communication
    uses, after the launch; the first is what is sent.
    """

    @property
    def slot(self) -> torch.Tensor: ...

    @property
    def keep(self) -> tuple[torch.Tensor, ...]: ...

    def launch(self, scale: ReduceScale, groups: Groups, comm: CommContext) -> dist.Work | None:
        """Launch the collective: on the current stream, or in the background where there are no streams."""

    def finish(self, scale: ReduceScale) -> None:
        """After the collective: what is left until ``slot`` is the sum (the mean, if that is the operation)."""


def make_scattering(
    kind: ReduceScatterKind, full: torch.Tensor, num_ranks: int, wire_dtype: torch.dtype | None = None
) -> Scattering:
    """A scattering of ``full``, on the current stream.

    Args:
        kind: Which one.
        full: A gradient of shape ``(num_ranks * rows, ...)``; it may be written to. If it is not contiguous or has
            another dtype, what is sent is a copy, which the launch makes.
        num_ranks: Size of the group.
        wire_dtype: What it is sent in; by default its own dtype.
    """
    wire_dtype = wire_dtype or full.dtype
    dtype = sum_dtype(kind, wire_dtype)
    if num_ranks == 1:
        return _Alone(full, dtype)
    parcel = _Parcel(full, wire_dtype)
    return _Ring(parcel, num_ranks) if kind == "ring" else _AllToAll(parcel, num_ranks, dtype)


def can_travel_together(scattering: Scattering) -> bool:
    """Whether :func:`launch_together` takes it."""
    return isinstance(scattering, _Ring)


def launch_together(
    scatterings: Sequence[Scattering], scale: ReduceScale, group: dist.ProcessGroup, stream: bool
) -> dist.Work | None:
    """Launch several scatterings of one dtype as one operation."""
    rings = [scattering for scattering in scatterings if isinstance(scattering, _Ring)]
    fulls, slots = [ring.parcel.packed() for ring in rings], [ring.slot for ring in rings]
    return collectives.reduce_scatter_many(slots, fulls, scale, group, stream)


def _empty_slot(full: torch.Tensor, num_ranks: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(full.shape[0] // num_ranks, *full.shape[1:], dtype=dtype, device=full.device)


class _Parcel:
    """A gradient as it is sent: itself if it can, else a copy of its own that is made on the scatter stream, behind
    the compute that follows."""

    def __init__(self, full: torch.Tensor, dtype: torch.dtype) -> None:
        is_ready = full.is_contiguous() and full.dtype == dtype
        self._sent = full if is_ready else torch.empty(full.shape, dtype=dtype, device=full.device)
        self._source = None if is_ready else full

    @property
    def keep(self) -> tuple[torch.Tensor, ...]:
        return (self._sent,) if self._source is None else (self._sent, self._source)

    def packed(self) -> torch.Tensor:
        """What to send, on the current stream."""
        if self._source is not None:
            self._sent.copy_(self._source)
            if self._source.device.type == "cpu":
                self._source = None  # where there are streams, this one may still read it
        return self._sent


class _Alone:
    """One rank: nothing is sent, the sum has one addend."""

    def __init__(self, full: torch.Tensor, dtype: torch.dtype) -> None:
        self.slot = full if full.dtype == dtype else full.to(dtype)
        self.keep = (full,)

    def launch(self, scale: ReduceScale, groups: Groups, comm: CommContext) -> None:
        if scale.predivide is not None:
            self.slot.div_(scale.predivide)

    def finish(self, scale: ReduceScale) -> None:
        pass


class _Ring:
    """The backend's own reduce-scatter, in the dtype of the gradient."""

    def __init__(self, parcel: _Parcel, num_ranks: int) -> None:
        self.parcel = parcel
        sent = parcel.keep[0]
        self.slot = _empty_slot(sent, num_ranks, sent.dtype)

    @property
    def keep(self) -> tuple[torch.Tensor, ...]:
        return (*self.parcel.keep, self.slot)

    def launch(self, scale: ReduceScale, groups: Groups, comm: CommContext) -> dist.Work | None:
        return collectives.reduce_scatter(self.slot, self.parcel.packed(), scale, groups.scatter, comm.has_streams)

    def finish(self, scale: ReduceScale) -> None:
        pass


class _AllToAll:
    """Each rank receives the addends of its rows and adds them in a wider dtype, see [Note: error of a reduction]."""

    def __init__(self, parcel: _Parcel, num_ranks: int, dtype: torch.dtype) -> None:
        self._parcel = parcel
        sent = parcel.keep[0]
        self.slot = _empty_slot(sent, num_ranks, dtype)
        self._received = torch.empty_like(sent)
        self._num_ranks = num_ranks

    @property
    def keep(self) -> tuple[torch.Tensor, ...]:
        return (*self._parcel.keep, self._received, self.slot)

    def launch(self, scale: ReduceScale, groups: Groups, comm: CommContext) -> dist.Work | None:
        assert scale.predivide is None, "a sum in float32 does not overflow"
        return comm.all_to_all(groups, self._received, self._parcel.packed())

    def finish(self, scale: ReduceScale) -> None:
        addends = self._received.view(self._num_ranks, *self.slot.shape)
        reduce = torch.mean if scale.op == dist.ReduceOp.AVG else torch.sum
        reduce(addends, 0, dtype=self.slot.dtype, out=self.slot)
