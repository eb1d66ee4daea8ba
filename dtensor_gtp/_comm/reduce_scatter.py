"""Kinds of reduce-scatter: how the full gradients of all ranks become the reduced rows of each.

A *scattering* reduces one gradient, or several that travel together. It allocates its buffers on the compute stream, is
launched on the scatter stream, and is finished after the collective (without streams: after the background work).

[Note: error of a reduction]
A ring adds in the dtype of the wire, one rank after the other: with bf16, whose rounding is 2^-9, the error grows with
the number of ranks. ``all_to_all`` sends the same bytes, but every rank receives the addends of its rows from all ranks
and adds them in float32. ``copy_engine`` does the same by copies. The error that is left is the rounding of each addend
to the dtype of the wire, which does not grow with the axis. It costs a buffer as large as the gradient.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch_compat as compat
from ..policy import ReduceScatterKind
from . import collectives
from .addends import fused_sum
from .collectives import Groups, ReduceScale
from .context import CommContext
from .send_ring import Place, SendRing

_Pair = tuple[Tensor, Tensor]  # target and source of a copy


@functools.cache
def sum_dtype(kind: ReduceScatterKind, wire_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the sum over ranks of gradients that are sent in ``wire_dtype``."""
    return wire_dtype if kind == "ring" else torch.promote_types(wire_dtype, torch.float32)


def can_travel_together(kind: ReduceScatterKind, num_ranks: int) -> bool:
    """Whether one scattering takes several gradients."""
    return num_ranks > 1 and kind != "all_to_all"


class Scattering:
    """One reduce-scatter. At the end ``slots`` hold this rank's rows of each gradient, in the dtype of the sum."""

    slots: list[Tensor]

    def __init__(self, sent: list[Tensor], copies: list[_Pair]) -> None:
        self._sent, self._copies = sent, copies

    def launch(self, scale: ReduceScale, groups: Groups, comm: CommContext) -> dist.Work | None:
        """Launch the collective: on the current stream, or in the background where there are no streams."""
        raise NotImplementedError

    def keep(self) -> tuple[Tensor, ...]:
        """After the launch, the buffers that the communication stream uses. It makes shards of the slots."""
        return (*self._sent, *(source for _, source in self._copies), *self.slots)

    def finish(self, scale: ReduceScale) -> None:
        """After the collective, perhaps on another stream: make ``slots`` the sums (or means, as ``scale`` says)."""

    def _pack(self) -> list[Tensor]:
        """Fill the buffers to send, on the scatter stream, beside the compute that follows."""
        for target, source in self._copies:
            target.copy_(source)
        if not self._sent[0].is_cuda:  # on CUDA the stream may still read the sources
            self._copies.clear()
        return self._sent


def make_scattering(
    kind: ReduceScatterKind,
    fulls: Sequence[Tensor],
    num_ranks: int,
    wire_dtype: torch.dtype,
    ring: SendRing | None = None,
    places: Sequence[Place] = (),
) -> Scattering:
    """A scattering of gradients, on the current stream.

    Args:
        kind: How to reduce.
        fulls: Gradients of shape ``(num_ranks * rows, ...)``; they may be written to. The launch copies one that is not
            contiguous or of another dtype, and sends the copy. Several only if they can travel together.
        num_ranks: Size of the group.
        wire_dtype: The dtype to send.
        ring, places: For ``"copy_engine"``: where peers fetch each gradient.
    """
    dtype = sum_dtype(kind, wire_dtype)
    if num_ranks == 1:
        return _Alone(fulls[0], dtype)
    sent: list[Tensor] = []
    copies: list[_Pair] = []
    for index, full in enumerate(fulls):
        target = full
        if ring is not None:
            if not ring.is_in(places[index], full):
                target = ring.room(places[index], full.shape, wire_dtype)
        elif full.dtype != wire_dtype or not full.is_contiguous():
            target = torch.empty(full.shape, dtype=wire_dtype, device=full.device)
        sent.append(target)
        if target is not full:
            copies.append((target, full))
    shapes = [(full.shape[0] // num_ranks, *full.shape[1:]) for full in fulls]
    if kind == "ring":
        return _Ring(sent, copies, shapes)
    return _Exchange(sent, copies, shapes, num_ranks, dtype, ring, places)


class _Alone(Scattering):
    """One rank: nothing is sent, the sum has one addend."""

    def __init__(self, full: Tensor, dtype: torch.dtype) -> None:
        super().__init__([full], [])
        self.slots = [full if full.dtype == dtype else full.to(dtype)]

    def launch(self, scale: ReduceScale, groups: Groups, comm: CommContext) -> None:
        if scale.predivide is not None:
            self.slots[0].div_(scale.predivide)


class _Ring(Scattering):
    """The backend's own reduce-scatter, in the dtype of the gradients."""

    def __init__(self, sent: list[Tensor], copies: list[_Pair], shapes: list[tuple[int, ...]]) -> None:
        super().__init__(sent, copies)
        self.slots = [full.new_empty(shape) for full, shape in zip(sent, shapes, strict=True)]

    def launch(self, scale: ReduceScale, groups: Groups, comm: CommContext) -> dist.Work | None:
        return collectives.reduce_scatter(self.slots, self._pack(), scale, groups.scatter, not comm.has_streams)


class _Exchange(Scattering):
    """Each rank receives the addends of its rows and adds them in a wider dtype, see [Note: error of a reduction].

    What comes from one rank is contiguous, so one kernel adds everything: each kernel on the scatter stream waits until
    a GEMM leaves room for it. Copy engines do not copy this rank's own addend if that kernel can read it in the ring.
    """

    def __init__(
        self,
        sent: list[Tensor],
        copies: list[_Pair],
        shapes: list[tuple[int, ...]],
        num_ranks: int,
        dtype: torch.dtype,
        ring: SendRing | None,
        places: Sequence[Place],
    ) -> None:
        super().__init__(sent, copies)
        self._num_ranks, self._ring, self._places = num_ranks, ring, places
        self._sizes = [math.prod(shape) for shape in shapes]
        self._add = fused_sum(sent[0], num_ranks)
        self._sum = sent[0].new_empty(sum(self._sizes), dtype=dtype)
        num_rows = num_ranks if ring is None or self._add is None else num_ranks - 1
        self._received = sent[0].new_empty(num_rows, self._sum.numel())
        self.slots = [part.view(shape) for part, shape in zip(self._sum.split(self._sizes), shapes, strict=True)]

    def keep(self) -> tuple[Tensor, ...]:
        return (*super().keep(), self._received)

    def launch(self, scale: ReduceScale, groups: Groups, comm: CommContext) -> dist.Work | None:
        assert scale.predivide is None, "a sum in float32 does not overflow"
        if self._ring is not None:
            if self._copies:
                comm.wait_finished()  # the sum of an earlier gradient may still read the place of a copy
            self._pack()
            self._ring.exchange(self._received, self._sizes, self._places)
            return None
        (sent,) = self._pack()
        sent = sent.view_as(self._received)
        return compat.all_to_all_base(self._received, sent, groups.scatter, not comm.has_streams)

    def finish(self, scale: ReduceScale) -> None:
        is_mean, own, rank = scale.op == dist.ReduceOp.AVG, [], 0
        if self._ring is not None:
            rank = self._ring.rank
            own = [sent.view(self._num_ranks, -1)[rank] for sent in self._sent]
        if self._add is not None:
            factor = 1 / self._num_ranks if is_mean else 1.0
            self._add(self._sum, self._received, own, rank, self._num_ranks, factor)
            return
        if own:
            for part, row in zip(self._received[rank].split(self._sizes), own, strict=True):
                part.copy_(row)
        (torch.mean if is_mean else torch.sum)(self._received, 0, dtype=self._sum.dtype, out=self._sum)
