"""``mxfp8``: e4m3 elements, one power-of-two scale (e8m0) for each 32 elements along the contraction of the GEMM.

1 + 1/32 bytes an element in each direction. Forward contracts over columns, so its blocks are 1 x 32; dgrad contracts
over rows, so its blocks are 32 x 1: another quantization of the weight, not the transpose of the first. Blocks at the
ends of a weight may be short. ``scale_rounding`` says how the scale follows from the largest magnitude of a block
(:func:`cast.e8m0_scale`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from .base import Direction, PlaneSpec, Quantized, Recipe
from .casts import casts_for


@dataclass(frozen=True)
class MXFP8(Recipe):
    """Power-of-two scales for each 32 elements.

    Args:
        scale_rounding: ``"rceil"`` (default) takes the smallest scale with which no element saturates; ``"floor"`` is
            the conversion that the OCP MX specification describes.

    Raises:
        ValueError: ``scale_rounding`` is neither.
    """

    scale_rounding: str = "rceil"

    name: ClassVar[str] = "mxfp8"
    block: ClassVar[tuple[int, int]] = (32, 32)
    has_columnwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale_rounding not in ("rceil", "floor"):
            raise ValueError(f"MXFP8 expects scale_rounding 'rceil' or 'floor', but got {self.scale_rounding!r}.")

    @staticmethod
    def _block(direction: Direction) -> tuple[int, int]:
        return (1, 32) if direction is Direction.ROWWISE else (32, 1)

    def planes(self, direction: Direction) -> tuple[PlaneSpec, ...]:
        return PlaneSpec(torch.float8_e4m3fn, 1, 1), PlaneSpec(torch.float8_e8m0fnu, *self._block(direction))

    def quantize(self, weight: torch.Tensor, direction: Direction, amax: torch.Tensor | None = None) -> Quantized:
        return Quantized(casts_for(weight).cast_mx(weight, self._block(direction), self.scale_rounding), None)

    def dequantize(
        self, quantized: Quantized, shape: torch.Size, direction: Direction, dtype: torch.dtype
    ) -> torch.Tensor:
        data, scale = quantized.planes
        return casts_for(data).dequantize_blocks(data, scale, self._block(direction), dtype)
