"""What is gathered of a weight instead of the weight itself: quantized data, or what hooks make of it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from .._comm.context import CommContext
from ..quant.float8_gemms import Float8GEMMs
from ..quant.planes import Direction, Quantized
from .layout import WeightLayout


class Packed(NamedTuple):
    """What a rank sends of its shard.

    Args:
        planes: Tensors whose rows are gathered as those of a weight are, each with its layout.
        unpack: Makes the full weight of the gathered planes.
        quantized: Makes the quantized weight of them, if GEMMs multiply with that.
    """

    planes: list[tuple[WeightLayout, Tensor]]
    unpack: Callable[[list[Tensor]], Tensor]
    quantized: Callable[[list[Tensor]], Quantized] | None = None


class Wire(ABC):
    """How one weight is gathered."""

    has_columnwise = False
    # Whether planes that are made serve several microbatches, see [Note: what is made of a shard].
    is_made_once = False

    @abstractmethod
    def pack(self, direction: Direction, comm: CommContext) -> Packed:
        """What this rank sends, made on the current stream (see ``CommContext.packing``)."""

    @abstractmethod
    def num_bytes(self) -> int | None:
        """Bytes of the whole weight on the wire in forward; None if only ``pack`` knows."""

    @abstractmethod
    def describe(self, not_fused: str) -> str:
        """For the report: what is gathered, and what computes with it.

        Args:
            not_fused: Why no fused linear layer uses the weight; empty if one does.
        """

    def gemms(self) -> Float8GEMMs | None:
        """How linear layers multiply with what was gathered; None if they need the full weight."""
        return None

    def note_read(self) -> None:
        """Other code than fused layers gets the full weight."""
        return

    def begin_forward(self) -> bool:
        """Drop what is stale. Returns whether the ranks have to agree on a statistic before the next gather."""
        return False

    def forget(self) -> None:
        """Drop what was made of the shard."""
        return
