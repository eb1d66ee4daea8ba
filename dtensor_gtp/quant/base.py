"""What a recipe is: how one weight matrix becomes the planes that are gathered, and what it needs of its shards.

A *plane* is a matrix of elements or of scales; a weight of several matrices (``GroupedLinear``) has as many of each. A
quantized weight is one or two planes, and for some formats the largest magnitude of the whole matrix, which every rank
knows before it quantizes. One row of a plane stands for ``rows`` rows of the weight and one column for ``columns``;
where shards hold whole blocks, the planes of a shard are the shard of the planes. So what is gathered equals what the
whole weight would have been quantized to, bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from math import lcm
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from .casts import casts_for
from .planes import Direction, PlaneSpec, Quantized

if TYPE_CHECKING:
    from .float8_gemms import Float8GEMMs


@dataclass(frozen=True)
class Recipe(ABC):
    """Base of the recipes, each a frozen dataclass in a file of its own.

    Args:
        compute: How linear layers multiply. ``"auto"`` (default): by GEMMs of the format where the hardware has them
            and shape and dtype allow, else with the dequantized weight. ``"dequantize"``: always the latter.
            ``"float8"``: by float8 GEMMs, or an error; on CPU by the reference arithmetic, with a warning.

    Raises:
        ValueError: ``compute`` is none of these, or there are no GEMMs of the format.
    """

    compute: str = field(default="auto", kw_only=True)

    name: ClassVar[str]
    # Rows and columns that share a scale, in either direction: a shard must not cut through them.
    block: ClassVar[tuple[int, int]] = (1, 1)
    # Dims, counted from the end, over which the statistic runs that all ranks must agree on before they quantize.
    amax_dims: ClassVar[tuple[int, ...]] = ()
    # Whether dgrad takes other data than forward; else it takes the transpose of the same bytes.
    has_columnwise: ClassVar[bool] = False
    # Whether linear layers may multiply in the format.
    has_gemms: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if self.compute not in ("auto", "dequantize", "float8"):
            raise ValueError(
                f"{self._class} expects compute 'auto', 'dequantize' or 'float8', but got {self.compute!r}."
            )
        if self.compute == "float8" and not self.has_gemms:
            raise ValueError(
                f"{self._class} expects compute 'auto' or 'dequantize', but got 'float8': GEMMs of {self.name} need a "
                "Blackwell GPU, and this package has none for it; the weight is dequantized for the GEMM."
            )

    @property
    def _class(self) -> str:
        return type(self).__name__

    def gemms(self, *, on_hardware: bool) -> Float8GEMMs:
        """The GEMMs of the format.

        Raises:
            NotImplementedError: It has none.
        """
        raise NotImplementedError(f"{self.name} has no GEMMs of its own.")

    def grouped_gemms(self, *, on_hardware: bool) -> Float8GEMMs | None:
        """The GEMMs of a grouped layer; None if there are none."""
        return None

    def is_capable(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU of that compute capability has the GEMMs."""
        return False

    def direction(self, direction: Direction) -> Direction:
        """The data that serves ``direction``."""
        return direction if self.has_columnwise else Direction.ROWWISE

    @abstractmethod
    def planes(self, direction: Direction) -> tuple[PlaneSpec, ...]:
        """What a quantized weight consists of."""

    def amax(self, weight: Tensor) -> Tensor | None:
        """The statistic of a weight or of a part of it, float32; maxima of parts are the maximum of the whole."""
        return casts_for(weight).amax(weight, self.amax_dims) if self.amax_dims else None

    @abstractmethod
    def quantize(self, weight: Tensor, direction: Direction, amax: Tensor | None = None) -> Quantized:
        """Quantize a matrix, or each of several.

        Args:
            weight: Shape ``(*, out_features, in_features)`` or a part of whole blocks; float32, bfloat16 or float16.
            amax: The statistic over the whole weight if ``weight`` is a part of it.
        """

    @abstractmethod
    def dequantize(self, quantized: Quantized, shape: torch.Size, direction: Direction, dtype: torch.dtype) -> Tensor:
        """The weight of ``shape``, computed in float32 and rounded once to ``dtype``."""

    def block_of(self, dim: int, block_size: int = 1) -> int:
        """The smallest block size for a shard of ``dim`` that keeps its blocks, and those of ``block_size``, whole.

        Args:
            dim: Counted from the end: -2 are rows, -1 columns.
        """
        return lcm(self.block[dim], block_size) if dim >= -2 else block_size

    def num_bytes(self, shape: torch.Size, direction: Direction) -> int:
        """Bytes of the planes of a whole weight: what crosses the wire for one gather of it, but for the scales that
        all ranks know (``amax``)."""
        return sum(spec.shape(shape).numel() * spec.dtype.itemsize for spec in self.planes(direction))

    def bytes_per_element(self, direction: Direction = Direction.ROWWISE) -> float:
        """Bytes for each element of a large weight; scales of whole rows or weights count as 0."""
        return sum(spec.bytes_per_element for spec in self.planes(direction))
