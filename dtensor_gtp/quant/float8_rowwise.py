"""``float8_rowwise``: e4m3 elements, one float32 scale ``amax / 448`` for each row (output feature).

Scales are gathered with the elements: 1 + 4 / in_features bytes an element. dgrad uses the same bytes: the scales lie
along its contraction, where they are a factor of the gradient's columns. torchao's recipe of the same name casts the
weight a second time instead, with a scale for each column.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from .base import Direction, PlaneSpec, Quantized, Recipe
from .casts import casts_for
from .float8_gemms import RowwiseGEMMs
from .grouped_gemms import GroupedRowwiseGEMMs


@dataclass(frozen=True)
class Float8Rowwise(Recipe):
    """One scale for each row.

    Args:
        high_precision_wgrad: Compute wgrad from activations and gradients that are not quantized. True (default), as in
            torchao's recipe ``rowwise_with_gw_hp``: along the tokens both need other scales, so a float8 wgrad costs
            two more casts of transposes.
    """

    high_precision_wgrad: bool = field(default=True, kw_only=True)

    name: ClassVar[str] = "float8_rowwise"
    amax_dims: ClassVar[tuple[int, ...]] = (-1,)
    has_gemms: ClassVar[bool] = True

    def gemms(self, *, on_hardware: bool) -> RowwiseGEMMs:
        return RowwiseGEMMs(self.high_precision_wgrad, on_hardware)

    def grouped_gemms(self, *, on_hardware: bool) -> GroupedRowwiseGEMMs:
        return GroupedRowwiseGEMMs(True, on_hardware)

    def is_capable(self, capability: tuple[int, int]) -> bool:
        return capability >= (8, 9)

    def planes(self, direction: Direction) -> tuple[PlaneSpec, ...]:
        return PlaneSpec(torch.float8_e4m3fn, 1, 1), PlaneSpec(torch.float32, 1, None)

    def quantize(self, weight: torch.Tensor, direction: Direction, amax: torch.Tensor | None = None) -> Quantized:
        return Quantized(casts_for(weight).cast_rows(weight, amax=amax), None)

    def dequantize(
        self, quantized: Quantized, shape: torch.Size, direction: Direction, dtype: torch.dtype
    ) -> torch.Tensor:
        data, scale = quantized.planes
        return casts_for(data).dequantize_blocks(data, scale, (1, 0), dtype)
