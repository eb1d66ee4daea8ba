"""``nvfp4``: e2m1 elements, two to a byte; an e4m3 scale for each 16 of them; one float32 scale for the whole weight.

1/2 + 1/16 = 0.5625 bytes an element in each direction: the float32 scale follows from the weight's largest magnitude,
on which all ranks agree before they quantize. Blocks lie along the contraction of the GEMM, 1 x 16 for forward and
16 x 1 for dgrad, and so do the pairs that share a byte. Blocks at the ends of a weight are filled up with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import Direction, PlaneSpec, Quantized, Recipe
from .casts import casts_for


@dataclass(frozen=True)
class NVFP4(Recipe):
    """4-bit elements, scales in two levels."""

    name: ClassVar[str] = "nvfp4"
    block: ClassVar[tuple[int, int]] = (16, 16)
    amax_dims: ClassVar[tuple[int, ...]] = (-2, -1)
    has_columnwise: ClassVar[bool] = True

    @staticmethod
    def _block(direction: Direction) -> tuple[int, int]:
        """Along the GEMM's contraction."""
        return (1, 16) if direction is Direction.ROWWISE else (16, 1)

    def planes(self, direction: Direction) -> tuple[PlaneSpec, ...]:
        block = self._block(direction)
        return PlaneSpec(torch.uint8, *block, packed=8), PlaneSpec(torch.float8_e4m3fn, *block)

    def quantize(self, weight: torch.Tensor, direction: Direction, amax: torch.Tensor | None = None) -> Quantized:
        amax = self.amax(weight) if amax is None else amax
        assert amax is not None
        return Quantized(casts_for(weight).cast_nvfp4(weight, self._block(direction), amax), amax)

    def dequantize(
        self, quantized: Quantized, shape: torch.Size, direction: Direction, dtype: torch.dtype
    ) -> torch.Tensor:
        assert quantized.amax is not None
        packed, scale = quantized.planes
        block = self._block(direction)
        return casts_for(packed).dequantize_nvfp4(packed, scale, quantized.amax, block, shape, dtype)
