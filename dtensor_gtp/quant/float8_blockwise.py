"""``float8_blockwise``: e4m3 elements, one float32 scale ``amax / 448`` for each block of 128 x 128.

1 + 4 / 16384 bytes an element. A square block is square when transposed, too: forward and dgrad use the same bytes.
Blocks at the ends of a weight may be short.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from .base import Direction, PlaneSpec, Quantized, Recipe
from .casts import casts_for
from .float8_gemms import BlockwiseGEMMs


@dataclass(frozen=True)
class Float8Blockwise(Recipe):
    """One scale for each block of 128 x 128.

    Args:
        high_precision_wgrad: Compute wgrad from activations and gradients that are not quantized. False (default), as
            in DeepSeek-V3 (arXiv 2412.19437, section 3.3).
    """

    high_precision_wgrad: bool = field(default=False, kw_only=True)

    name: ClassVar[str] = "float8_blockwise"
    block: ClassVar[tuple[int, int]] = (128, 128)
    has_gemms: ClassVar[bool] = True

    def gemms(self, *, on_hardware: bool) -> BlockwiseGEMMs:
        return BlockwiseGEMMs(self.high_precision_wgrad, on_hardware)

    def is_capable(self, capability: tuple[int, int]) -> bool:
        return capability[0] == 9

    def planes(self, direction: Direction) -> tuple[PlaneSpec, ...]:
        return PlaneSpec(torch.float8_e4m3fn, 1, 1), PlaneSpec(torch.float32, *self.block)

    def quantize(self, weight: torch.Tensor, direction: Direction, amax: torch.Tensor | None = None) -> Quantized:
        return Quantized(casts_for(weight).cast_blocks(weight, self.block), None)

    def dequantize(
        self, quantized: Quantized, shape: torch.Size, direction: Direction, dtype: torch.dtype
    ) -> torch.Tensor:
        data, scale = quantized.planes
        return casts_for(data).dequantize_blocks(data, scale, self.block, dtype)
