"""``float8_tensorwise``: e4m3 elements, one float32 scale ``amax / 448`` for the whole weight.

The scale is a function of the weight's largest magnitude, on which all ranks agree before they quantize, so only
elements are gathered: 1 byte each. Forward and dgrad use the same bytes.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import torch

from .base import Direction, PlaneSpec, Quantized, Recipe
from .casts import casts_for
from .float8_gemms import TensorwiseGEMMs


@dataclass(frozen=True)
class Float8Tensorwise(Recipe):
    """One scale for the whole weight.

    Args:
        high_precision_wgrad: Compute wgrad from activations and gradients that are not quantized. False (default), as
            in torchao's recipe ``tensorwise``.
    """

    high_precision_wgrad: bool = field(default=False, kw_only=True)

    name: ClassVar[str] = "float8_tensorwise"
    amax_dims: ClassVar[tuple[int, ...]] = (-2, -1)
    has_gemms: ClassVar[bool] = True

    def gemms(self, *, on_hardware: bool) -> TensorwiseGEMMs:
        return TensorwiseGEMMs(self.high_precision_wgrad, on_hardware)

    def is_capable(self, capability: tuple[int, int]) -> bool:
        return capability >= (8, 9)

    def planes(self, direction: Direction) -> tuple[PlaneSpec, ...]:
        return (PlaneSpec(torch.float8_e4m3fn, 1, 1),)

    def quantize(self, weight: torch.Tensor, direction: Direction, amax: torch.Tensor | None = None) -> Quantized:
        amax = self.amax(weight) if amax is None else amax
        assert amax is not None
        data, _ = casts_for(weight).cast_matrix(weight, amax=amax)
        return Quantized((data,), amax)

    def dequantize(
        self, quantized: Quantized, shape: torch.Size, direction: Direction, dtype: torch.dtype
    ) -> torch.Tensor:
        assert quantized.amax is not None
        (data,) = quantized.planes
        return casts_for(data).dequantize_matrix(data, quantized.amax, dtype)
