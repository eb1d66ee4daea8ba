"""Kinds of reduce-scatter: how the full gradients of all ranks become the reduced rows of each.

A *scattering* reduces one gradient, or several that are sent together. It allocates its buffers on the compute stream,
is launched on the scatter stream, and is finished after the collective (without streams: after the background work).

[Note: error of a reduction]
A ring adds in the dtype that is sent, one rank after the other: with bf16, whose rounding is 2^-9, the error grows with
the number of ranks. ``all_to_all`` sends the same bytes, but every rank receives the addends of its rows from all ranks
and adds them in float32. ``copy_engine`` does the same by copies. The error that is left is the rounding of each addend
to the dtype that is sent, which does not grow with the axis. It costs a buffer as large as the gradient.
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
from .addends import add_rows, fused_sum
from .collectives import Groups, ReduceScale
from .context import CommContext
from .send_ring import Place, SendRing


@functools.cache
def sum_dtype(kind: ReduceScatterKind, wire_dtype: torch.dtype) -> torch.dtype:
    """The dtype of the sum over ranks of gradients that are sent in ``wire_dtype``."""
    return wire_dtype if kind == "ring" else torch.promote_types(wire_dtype, torch.float32)


def can_travel_together(kind: ReduceScatterKind, num_ranks: int) -> bool:
    """Whether one scattering takes several gradients."""
    return num_ranks > 1 and kind != "all_to_all"


class Scattering:
    """One reduce-scatter of gradients, made on the current stream. At the end ``slots`` hold this rank's rows of each
    gradient, in the dtype of the sum.

    Args:
        kind: How to reduce.
        fulls: Gradients of shape ``(num_ranks * rows, ...)``; they may be written to. The launch copies one that is not
            contiguous or of another dtype, and sends the copy. Several only if they can be sent together.
        num_ranks: Size of the group. One rank sends nothing: the sum has one addend.
        wire_dtype: The dtype to send.
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
    ) -> None:
        self._num_ranks, self._ring, self._places = num_ranks, ring, places
        self._sent: list[Tensor] = []
        self._copies: list[tuple[Tensor, Tensor]] = []  # target and source
        self._received: Tensor | None = None  # the addends of an exchange
        self.slots: list[Tensor] = []
        if num_ranks == 1:
            dtype = sum_dtype(kind, wire_dtype)
            self._sent.append(fulls[0])
            self.slots.append(fulls[0] if fulls[0].dtype == dtype else fulls[0].to(dtype))
            return
        for index, full in enumerate(fulls):
            target = full
            if ring is not None:
                if not ring.is_in(places[index], full):
                    target = ring.room(places[index], full.shape, wire_dtype)
            elif full.dtype != wire_dtype or not full.is_contiguous():
                target = torch.empty(full.shape, dtype=wire_dtype, device=full.device)
            self._sent.append(target)
            if target is not full:
                self._copies.append((target, full))
            if kind == "ring":
                num_rows, *others = target.shape
                self.slots.append(target.new_empty((num_rows // num_ranks, *others)))
        if kind != "ring":
            self._prepare_exchange(sum_dtype(kind, wire_dtype))

    def _prepare_exchange(self, dtype: torch.dtype) -> None:
        """Allocate what each rank receives: the addends of its rows, to add in a wider dtype.

        The addends of one rank are contiguous, so one kernel adds all gradients: each kernel waits until a GEMM leaves
        room for it. Copy engines do not copy this rank's own addend if the kernel can read it in the ring.
        """
        like, num_ranks = self._sent[0], self._num_ranks
        shapes = [(sent.shape[0] // num_ranks, *sent.shape[1:]) for sent in self._sent]
        self._sizes = [math.prod(shape) for shape in shapes]
        self._add = fused_sum(like, num_ranks)
        self._sum = like.new_empty(sum(self._sizes), dtype=dtype)
        num_rows = num_ranks if self._ring is None or self._add is None else num_ranks - 1
        self._received = like.new_empty(num_rows, self._sum.numel())
        self.slots = [part.view(shape) for part, shape in zip(self._sum.split(self._sizes), shapes, strict=True)]

    def keep(self) -> list[Tensor]:
        """After the launch, the buffers that the communication stream uses. It makes shards of the slots."""
        sources = [source for _, source in self._copies] if self._copies else []
        kept = self._sent + sources + self.slots
        if self._received is not None:
            kept.append(self._received)
        return kept

    def launch(self, scale: ReduceScale, groups: Groups, comm: CommContext) -> dist.Work | None:
        """Launch the collective: on the current stream, or in the background where there are no streams."""
        if self._num_ranks == 1:
            if scale.predivide is not None:
                self.slots[0].div_(scale.predivide)
            return None
        if self._copies:
            if self._ring is not None:
                comm.reductions.wait_finished()  # the sum of an earlier gradient may still read the place of a copy
            for target, source in self._copies:  # on the scatter stream, beside the compute that follows
                target.copy_(source)
            if not self._sent[0].is_cuda:  # on CUDA the stream may still read the sources
                self._copies.clear()
        async_op = not comm.streams.has_streams
        if self._received is None:
            if scale.predivide is not None:
                for sent in self._sent:
                    sent.div_(scale.predivide)
            if len(self.slots) == 1:
                return compat.reduce_scatter_base(self.slots[0], self._sent[0], scale.op, groups.scatter, async_op)
            return compat.reduce_scatter_coalesced(self.slots, self._sent, scale.op, groups.scatter, async_op)
        assert scale.predivide is None, "a sum in float32 does not overflow"
        if self._ring is None:
            (sent,) = self._sent
            return compat.all_to_all_base(self._received, sent.view_as(self._received), groups.scatter, async_op)
        self._ring.exchange(self._received, self._sizes, self._places)
        return None

    def finish(self, scale: ReduceScale) -> None:
        """After the collective, perhaps on another stream: make ``slots`` the sums (or means, as ``scale`` says)."""
        if self._received is None:
            return
        is_mean, own, rank = scale.op == dist.ReduceOp.AVG, [], 0
        if self._ring is not None:
            rank = self._ring.rank
            own = [sent.view(self._num_ranks, -1)[rank] for sent in self._sent]
        if own and self._add is None:
            for part, row in zip(self._received[rank].split(self._sizes), own, strict=True):
                part.copy_(row)
        add_rows(self._add, self._sum, self._received, self._num_ranks, is_mean=is_mean, own=own, rank=rank)
