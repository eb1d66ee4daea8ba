"""In which form a weight is sent and received: as it is, or packed into planes, and into which buffer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from .. import _torch_compat as compat
from .._comm.context import CommContext
from ..quant.float8_gemms import Float8GEMMs
from ..quant.planes import Direction, Quantized
from .layout import WeightLayout


class Packed(NamedTuple):
    """What a rank sends of its shard, and what is made of all gathered planes."""

    planes: list[tuple[WeightLayout, Tensor]]  # tensors to gather, each with the layout of its rows
    unpack: Callable[[list[Tensor]], Tensor]  # makes the full weight
    quantized: Callable[[list[Tensor]], Quantized] | None = None  # the quantized weight, if GEMMs use it


class Wire(ABC):
    """How one weight is gathered."""

    has_columnwise = False  # backward gathers columnwise data

    @abstractmethod
    def pack(self, direction: Direction, comm: CommContext) -> Packed:
        """Pack this rank's shard on the current stream (see ``CommContext.packing``)."""

    @abstractmethod
    def describe(self, not_fused: str) -> str:
        """For the report; ``not_fused`` says why no fused layer uses the weight (empty if one does)."""

    def gemms(self) -> Float8GEMMs | None:
        """How linear layers multiply with the gathered planes; None if they need the full weight."""
        return None

    def num_bytes(self) -> int | None:
        """Bytes that are gathered of the whole weight in forward; None if only ``pack`` knows."""
        return None

    def note_read(self) -> None:
        """Called when code other than fused layers gets the full weight."""
        return

    def forget(self) -> None:
        """Drop the data that were made from the shard, see [Note: data made from a shard]."""
        return


class FixedBuffers(NamedTuple):
    """Where a recorded block reads a full weight and writes its gradient, see [Note: fixed buffers]."""

    gathered: Tensor
    grad: Tensor


class GatherForm:
    """That of one weight. A group has one, too, in which nothing is set: its weights are sent as they are."""

    rows: Tensor  # the shard with the sharded dim in front
    is_sendable: bool  # whether ``rows`` are sent as they are, or copied into their slot of the buffer first
    full_like: Tensor  # template of the buffer

    def __init__(self, *, is_plain: bool = False) -> None:
        self.is_plain = is_plain  # what other ranks have of the weight is gathered as it is
        self.wire: Wire | None = None
        self.gemms: Float8GEMMs | None = None  # multiply with the quantized weight; None: with the full weight
        self.fixed: FixedBuffers | None = None  # set for weights of recorded blocks

    def set_wire(self, wire: Wire | None) -> None:
        """Gather the weight as ``wire`` says; None gathers the weight itself."""
        self.wire = wire
        self.is_plain = self.is_plain and wire is None
        self.gemms = None if wire is None else wire.gemms()

    def follow(self, layout: WeightLayout, shard: Tensor, dtype: torch.dtype, device: torch.device) -> None:
        """The weight has this shard from now on, and is gathered in this dtype."""
        self.rows = layout.rows_of(shard)
        self.full_like = compat.template(layout.buffer_shape, dtype, device)
        self.is_sendable = layout.is_sendable(self.rows, dtype)
        self.gemms = None if self.wire is None else self.wire.gemms()

    def new_buffer(self) -> Tensor:
        """An uninitialized buffer for the full weight."""
        return torch.empty_like(self.full_like)

    def gather_buffer(self) -> Tensor:
        """A buffer to gather into: the fixed one, if the weight has one that nobody holds."""
        if self.fixed is not None and self.fixed.gathered.dtype == self.full_like.dtype:
            buffer = self.fixed.gathered
            # Two owners are ``buffer`` and the Python object of its storage. A third one would be another gather.
            if compat.storage_use_count(buffer.untyped_storage()) <= 2:
                return buffer.view(buffer.shape)
        return self.new_buffer()
