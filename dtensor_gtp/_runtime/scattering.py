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
    uses.
    """

    @property
    def slot(self) -> torch.Tensor: ...

    @property
    def keep(self) -> tuple[torch.Tensor, ...]: ...

    def launch(self, scale: ReduceScale, groups: Groups, comm: CommContext) -> dist.Work | None:
        """Launch the collective: on the current stream, or in the background where there are no streams."""

    def finish(self, scale: ReduceScale) -> None:
        """After the collective: what is left until ``slot`` is the sum (the mean, if that is the operation)."""


def make_scattering(kind: ReduceScatterKind, full: torch.Tensor, num_ranks: int) -> Scattering:
    """A scattering of ``full``, on the current stream.

    Args:
        kind: Which one.
        full: A gradient of shape ``(num_ranks * rows, ...)``, contiguous; it may be written to.
        num_ranks: Size of the group.
    """
    if num_ranks == 1:
        return _Alone(full, sum_dtype(kind, full.dtype))
    return _Ring(full, num_ranks) if kind == "ring" else _AllToAll(full, num_ranks, sum_dtype(kind, full.dtype))


def can_travel_together(scattering: Scattering) -> bool:
    """Whether :func:`launch_together` takes it."""
    return isinstance(scattering, _Ring)


def launch_together(
    scatterings: Sequence[Scattering], scale: ReduceScale, group: dist.ProcessGroup, stream: bool
) -> dist.Work | None:
    """Launch several scatterings of one dtype as one operation."""
    fulls, slots = zip(*(scattering.keep for scattering in scatterings), strict=True)
    return collectives.reduce_scatter_many(list(slots), list(fulls), scale, group, stream)


def _empty_slot(full: torch.Tensor, num_ranks: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(full.shape[0] // num_ranks, *full.shape[1:], dtype=dtype, device=full.device)


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

    def __init__(self, full: torch.Tensor, num_ranks: int) -> None:
        self.slot = _empty_slot(full, num_ranks, full.dtype)
        self.keep = (full, self.slot)

    def launch(self, scale: ReduceScale, groups: Groups, comm: CommContext) -> dist.Work | None:
        (full, slot) = self.keep
        return collectives.reduce_scatter(slot, full, scale, groups.scatter, comm.has_streams)

    def finish(self, scale: ReduceScale) -> None:
        pass


class _AllToAll:
    """Each rank receives the addends of its rows and adds them in a wider dtype, see [Note: error of a reduction]."""

    def __init__(self, full: torch.Tensor, num_ranks: int, dtype: torch.dtype) -> None:
        self.slot = _empty_slot(full, num_ranks, dtype)
        self._received = torch.empty_like(full)
        self._num_ranks = num_ranks
        self.keep = (full, self._received, self.slot)

    def launch(self, scale: ReduceScale, groups: Groups, comm: CommContext) -> dist.Work | None:
        assert scale.predivide is None, "a sum in float32 does not overflow"
        return comm.all_to_all(groups, self._received, self.keep[0])

    def finish(self, scale: ReduceScale) -> None:
        addends = self._received.view(self._num_ranks, *self.slot.shape)
        reduce = torch.mean if scale.op == dist.ReduceOp.AVG else torch.sum
        reduce(addends, 0, dtype=self.slot.dtype, out=self.slot)
