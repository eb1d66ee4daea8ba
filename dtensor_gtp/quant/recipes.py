"""The recipes: which planes they have, how they quantize, which GEMM multiplies them."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from .base import Recipe
from .casts import casts_for
from .float8_gemms import BlockwiseGEMMs, GroupedRowwiseGEMMs, RowwiseGEMMs, TensorwiseGEMMs
from .planes import Direction, PlaneSpec, Quantized


def resolve_recipe(recipe: str | Recipe) -> Recipe:
    """The recipe of that name with its defaults, or the recipe itself.

    Raises:
        TypeError: It is neither a name nor a recipe.
        ValueError: There is none of that name.
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(f"quantize_ expects a recipe or its name, but got {type(recipe).__name__}: {recipe!r}.")
    if recipe not in RECIPES:
        raise ValueError(f"quantize_ expects one of the recipes {', '.join(RECIPES)}, but got {recipe!r}.")
    return RECIPES[recipe]()


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

    def quantize(self, weight: Tensor, direction: Direction, amax: Tensor | None = None) -> Quantized:
        return Quantized(casts_for(weight).cast_blocks(weight, self.block), None)

    def dequantize(self, quantized: Quantized, shape: torch.Size, direction: Direction, dtype: torch.dtype) -> Tensor:
        data, scale = quantized.planes
        return casts_for(data).dequantize_blocks(data, scale, self.block, dtype)


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

    def quantize(self, weight: Tensor, direction: Direction, amax: Tensor | None = None) -> Quantized:
        return Quantized(casts_for(weight).cast_rows(weight, amax=amax), None)

    def dequantize(self, quantized: Quantized, shape: torch.Size, direction: Direction, dtype: torch.dtype) -> Tensor:
        data, scale = quantized.planes
        return casts_for(data).dequantize_blocks(data, scale, (1, 0), dtype)


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

    def quantize(self, weight: Tensor, direction: Direction, amax: Tensor | None = None) -> Quantized:
        amax = self.amax(weight) if amax is None else amax
        assert amax is not None
        data, _ = casts_for(weight).cast_matrix(weight, amax=amax)
        return Quantized((data,), amax)

    def dequantize(self, quantized: Quantized, shape: torch.Size, direction: Direction, dtype: torch.dtype) -> Tensor:
        assert quantized.amax is not None
        (data,) = quantized.planes
        return casts_for(data).dequantize_matrix(data, quantized.amax, dtype)


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

    def quantize(self, weight: Tensor, direction: Direction, amax: Tensor | None = None) -> Quantized:
        return Quantized(casts_for(weight).cast_mx(weight, self._block(direction), self.scale_rounding), None)

    def dequantize(self, quantized: Quantized, shape: torch.Size, direction: Direction, dtype: torch.dtype) -> Tensor:
        data, scale = quantized.planes
        return casts_for(data).dequantize_blocks(data, scale, self._block(direction), dtype)


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

    def quantize(self, weight: Tensor, direction: Direction, amax: Tensor | None = None) -> Quantized:
        amax = self.amax(weight) if amax is None else amax
        assert amax is not None
        return Quantized(casts_for(weight).cast_nvfp4(weight, self._block(direction), amax), amax)

    def dequantize(self, quantized: Quantized, shape: torch.Size, direction: Direction, dtype: torch.dtype) -> Tensor:
        assert quantized.amax is not None
        packed, scale = quantized.planes
        block = self._block(direction)
        return casts_for(packed).dequantize_nvfp4(packed, scale, quantized.amax, block, shape, dtype)


_CLASSES: tuple[type[Recipe], ...] = (Float8Tensorwise, Float8Rowwise, Float8Blockwise, MXFP8, NVFP4)


RECIPES = MappingProxyType({cls.name: cls for cls in _CLASSES})
