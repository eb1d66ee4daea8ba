"""``nvfp4``: e2m1 elements, two to a byte; an e4m3 scale for each 16 of them; one float32 scale for the whole weight.

1/2 + 1/16 = 0.5625 bytes an element in each direction: the float32 scale follows from the weight's largest magnitude,
on which all ranks agree before they quantize. Blocks lie along the contraction of the GEMM, 1 x 16 for forward and
16 x 1 for dgrad, and so do the pairs that share a byte. Blocks at the ends of a weight are filled up with zeros.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch

from . import cast
from .base import Direction, PlaneSpec, Quantized, Recipe


@dataclass(frozen=True)
class NVFP4(Recipe):
    """4-bit elements, scales in two levels."""

    name: ClassVar[str] = "nvfp4"
    block: ClassVar[tuple[int, int]] = (16, 16)
    amax_dims: ClassVar[tuple[int, ...]] = (-2, -1)
    has_columnwise: ClassVar[bool] = True

    @staticmethod
    def _dim(direction: Direction) -> int:
        """The dim of the GEMM's contraction."""
        return -1 if direction is Direction.ROWWISE else -2

    @classmethod
    def _block(cls, direction: Direction) -> tuple[int, int]:
        return (1, 16) if cls._dim(direction) == -1 else (16, 1)

    def planes(self, direction: Direction) -> tuple[PlaneSpec, ...]:
        block = self._block(direction)
        return PlaneSpec(torch.uint8, *block, packed=8), PlaneSpec(torch.float8_e4m3fn, *block)

    def quantize(self, weight: torch.Tensor, direction: Direction, amax: torch.Tensor | None = None) -> Quantized:
        amax = self.amax(weight) if amax is None else amax
        assert amax is not None
        block = self._block(direction)
        tensor_scale = cast.nvfp4_tensor_scale(amax)
        scale = cast.nvfp4_block_scale(cast.block_amax(weight, block), tensor_scale)
        padded = cast.pad_to_blocks(cast.wide(weight), block)
        spread = cast.spread(scale.to(torch.float32) * tensor_scale, block, padded.shape)
        packed = cast.pack_nibbles(cast.to_e2m1(padded / spread), self._dim(direction))
        return Quantized((packed, scale), amax)

    def dequantize(
        self, quantized: Quantized, shape: torch.Size, direction: Direction, dtype: torch.dtype
    ) -> torch.Tensor:
        assert quantized.amax is not None
        packed, scale = quantized.planes
        elements = cast.from_e2m1(cast.unpack_nibbles(packed, self._dim(direction)))
        total = scale.to(torch.float32) * cast.nvfp4_tensor_scale(quantized.amax)
        spread = cast.spread(total, self._block(direction), elements.shape)
        return (elements * spread)[..., : shape[-2], : shape[-1]].to(dtype)
