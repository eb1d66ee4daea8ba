"""Where the rows of one weight lie: in the shard, in the gather buffer, in the gradient to send. Plain arithmetic.

The sharded dim is moved to the front in every buffer, so that a gather and a reduce-scatter always exchange contiguous
blocks of rows and no copy is needed before or after the GEMM: the full weight is a view of the buffer. Rows beyond the
logical end exist in buffers only.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from ..placement import chunk_rows, chunk_size_and_offset


@dataclass(frozen=True)
class WeightLayout:
    """Layout of one weight over one gtp axis.

    Args:
        shape: Shape of what the axis shards: the whole weight, or its tp-local slice.
        dim: Sharded dim, not negative.
        world: Size of the gtp axis.
        rank: This rank's coordinate on it.
        block_size: Rows that stay together.
    """

    shape: torch.Size
    dim: int
    world: int
    rank: int
    block_size: int = 1

    @cached_property
    def num_rows(self) -> int:
        return self.shape[self.dim]

    @cached_property
    def chunk_rows(self) -> int:
        """Rows of each rank's slot in a buffer."""
        return chunk_rows(self.num_rows, self.world, self.block_size)

    @cached_property
    def local_rows(self) -> int:
        """Rows that this rank really holds."""
        return chunk_size_and_offset(self.num_rows, self.world, self.rank, self.block_size)[0]

    @cached_property
    def local_offset(self) -> int:
        return chunk_size_and_offset(self.num_rows, self.world, self.rank, self.block_size)[1]

    @cached_property
    def row_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], *self.shape[self.dim + 1 :])

    @cached_property
    def slot_shape(self) -> tuple[int, ...]:
        return (self.chunk_rows, *self.row_shape)

    @cached_property
    def buffer_shape(self) -> tuple[int, ...]:
        return (self.world * self.chunk_rows, *self.row_shape)

    @cached_property
    def buffer_numel(self) -> int:
        return math.prod(self.buffer_shape)

    @cached_property
    def local_shape(self) -> tuple[int, ...]:
        return (*self.shape[: self.dim], self.local_rows, *self.shape[self.dim + 1 :])

    @cached_property
    def is_as_buffer(self) -> bool:
        """Whether the weight lies in memory as its buffer does, without padding and with its dims in order."""
        return self.dim == 0 and self.world * self.chunk_rows == self.num_rows

    def shard_of(self, full: Tensor) -> Tensor:
        """This rank's part of ``full`` (shape ``shape``), contiguous, in memory of its own."""
        part = full.narrow(self.dim, min(self.local_offset, self.num_rows), self.local_rows)
        return part.clone(memory_format=torch.contiguous_format)

    def rows_of(self, shard: Tensor) -> Tensor:
        """``shard`` (shape ``local_shape``) as rows: the sharded dim in front."""
        return shard.movedim(self.dim, 0) if self.dim else shard

    def is_sendable(self, rows: Tensor, dtype: torch.dtype) -> bool:
        """Whether the rows of a shard are sent as they are. Else they are cast and padded in their slot of the
        buffer."""
        return rows.dtype == dtype and rows.shape[0] == self.chunk_rows and rows.is_contiguous()

    def shard_of_rows(self, slot: Tensor) -> Tensor:
        """The inverse: a slot of a buffer as this rank's shard, contiguous; the slot's tail is dropped."""
        rows = self.filled(slot)
        return rows.movedim(0, self.dim).contiguous() if self.dim else rows

    def full_view(self, buffer: Tensor) -> Tensor:
        """The logical weight (shape ``shape``) as a view of a buffer of ``buffer_shape``."""
        if self.is_as_buffer:
            return buffer
        rows = buffer.narrow(0, 0, self.num_rows)
        return rows.movedim(0, self.dim) if self.dim else rows

    def filled(self, slot: Tensor) -> Tensor:
        """The rows of this rank's slot that are not padding."""
        return slot if self.local_rows == self.chunk_rows else slot.narrow(0, 0, self.local_rows)

    def slot(self, buffer: Tensor) -> Tensor:
        """This rank's slot of a buffer."""
        return buffer.narrow(0, self.rank * self.chunk_rows, self.chunk_rows)
