"""Where the rows of one weight lie: in the shard, in the gather buffer, and in the gradient to send.

Every buffer has the sharded dim in front. So a gather and a reduce-scatter exchange contiguous
blocks of rows, and the full weight is a view of the buffer: no copy is needed before or after the
GEMM. Each rank has one slot of a buffer. Only slots have rows beyond the end of the weight
(padding).
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..placement import chunk_rows, chunk_size_and_offset


@dataclass(frozen=True)  # so the cached properties stay right
class WeightLayout:
    """Layout of one weight over one gtp axis."""

    shape: torch.Size  # of what the axis shards: the whole weight, or its tp-local slice
    dim: int  # the sharded dim, not negative
    world: int  # size of the axis
    rank: int  # coordinate of this rank on the axis
    block_size: int = 1  # rows that stay together

    @cached_property
    def num_rows(self) -> int:
        return self.shape[self.dim]

    @cached_property
    def chunk_rows(self) -> int:
        """Rows of each slot."""
        return chunk_rows(self.num_rows, self.world, self.block_size)

    @cached_property
    def local_rows(self) -> int:
        """Rows of this rank's shard."""
        return chunk_size_and_offset(self.num_rows, self.world, self.rank, self.block_size)[0]

    @cached_property
    def local_offset(self) -> int:
        return chunk_size_and_offset(self.num_rows, self.world, self.rank, self.block_size)[1]

    @cached_property
    def slot_shape(self) -> tuple[int, ...]:
        return (self.chunk_rows, *self.shape[: self.dim], *self.shape[self.dim + 1 :])

    @cached_property
    def buffer_shape(self) -> tuple[int, ...]:
        return (self.world * self.chunk_rows, *self.slot_shape[1:])

    @cached_property
    def is_as_buffer(self) -> bool:
        """Whether the weight lies in memory as its buffer does: no padding, dims in order."""
        return self.dim == 0 and self.world * self.chunk_rows == self.num_rows

    def shard_of(self, full: Tensor) -> Tensor:
        """A contiguous copy of this rank's part of ``full`` (shape ``shape``)."""
        part = self.part_of(full)
        return part.clone(memory_format=torch.contiguous_format)  # the caller may free ``full``

    def part_of(self, full: Tensor) -> Tensor:
        """This rank's part of ``full``, a view."""
        return full.narrow(self.dim, self.local_offset, self.local_rows)

    def rows_of(self, shard: Tensor) -> Tensor:
        """``shard`` with the sharded dim in front."""
        if self.dim == 0:
            return shard
        return shard.movedim(self.dim, 0)  # a view, as a rule not contiguous

    def is_sendable(self, rows: Tensor, dtype: torch.dtype) -> bool:
        """Whether the rows of a shard are sent as they are. Otherwise they are copied into their
        slot first."""
        # A collective neither casts nor pads, and it takes contiguous memory only.
        return rows.dtype == dtype and rows.shape[0] == self.chunk_rows and rows.is_contiguous()

    def shard_of_rows(self, slot: Tensor) -> Tensor:
        """The inverse of ``rows_of``: the shard, contiguous, from a slot without its padding."""
        rows = self.filled(slot)
        if self.dim == 0:
            return rows
        return rows.movedim(0, self.dim).contiguous()  # ``.grad`` lies in memory as the shard does

    def full_view(self, buffer: Tensor) -> Tensor:
        """The weight (shape ``shape``) as a view of a buffer of ``buffer_shape``."""
        if self.is_as_buffer:
            return buffer
        rows = buffer.narrow(0, 0, self.num_rows)  # without the padding
        if self.dim == 0:
            return rows
        return rows.movedim(0, self.dim)

    def filled(self, slot: Tensor) -> Tensor:
        """The rows of this rank's slot that are not padding."""
        if self.local_rows == self.chunk_rows:
            return slot
        return slot.narrow(0, 0, self.local_rows)

    def slot(self, buffer: Tensor) -> Tensor:
        """This rank's slot of a buffer."""
        return buffer.narrow(0, self.rank * self.chunk_rows, self.chunk_rows)
