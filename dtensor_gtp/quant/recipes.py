"""The recipes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from .cast import MX_BLOCK
from .casts import casts_for, round_together
from .float8_gemms import BlockwiseGEMMs, Float8GEMMs, RowwiseGEMMs, TensorwiseGEMMs
from .grouped_gemms import GroupedMXGEMMs, GroupedRowwiseGEMMs
from .planes import Direction, PlaneSpec, Quantized
from .recipe import Recipe

_E4M3 = PlaneSpec(torch.float8_e4m3fn, 1, 1)


@dataclass(frozen=True)
class _Float8Recipe(Recipe):
    """Base of the recipes that linear layers can multiply in."""

    high_precision_wgrad: bool = field(default=False, kw_only=True)
    has_gemms = True
    gemms_class: ClassVar[type[Float8GEMMs]]

    def gemms(self, *, on_hardware: bool) -> Float8GEMMs:
        return self.gemms_class(self.high_precision_wgrad, on_hardware)

    def is_capable(self, capability: tuple[int, int]) -> bool:
        return capability >= (8, 9)

    def round_together(
        self, weights: Sequence[Tensor], amaxes: Sequence[Tensor | None], outputs: Sequence[Tensor]
    ) -> None:
        known = [amax for amax in amaxes if amax is not None]
        if not self.amax_dims or len(known) < len(weights):
            super().round_together(weights, amaxes, outputs)
        else:
            round_together(weights, known, outputs)


@dataclass(frozen=True)
class Float8Blockwise(_Float8Recipe):
    """One scale for each block of 128 x 128, as in DeepSeek-V3 (arXiv 2412.19437, section 3.3).

    Args:
        compute: As in :class:`Recipe`.
        high_precision_wgrad: Compute wgrad from activations and gradients that are not quantized.
            Default: False.

    Example:
        >>> quantized = Float8Blockwise().quantize(torch.randn(256, 128), Direction.ROWWISE)
        >>> [(plane.dtype, tuple(plane.shape)) for plane in quantized.planes]
        [(torch.float8_e4m3fn, (256, 128)), (torch.float32, (2, 1))]
    """

    name = "float8_blockwise"
    rowwise = (_E4M3, PlaneSpec(torch.float32, 128, 128))
    gemms_class = BlockwiseGEMMs

    def is_capable(self, capability: tuple[int, int]) -> bool:
        return capability[0] == 9  # Hopper alone has the kernel

    def quantize(self, weight: Tensor, direction: Direction, amax: Tensor | None = None) -> Quantized:
        return Quantized(casts_for(weight).cast_blocks(weight, (128, 128)), None)


@dataclass(frozen=True)
class Float8Rowwise(_Float8Recipe):
    """One scale for each row.

    Args:
        compute: As in :class:`Recipe`.
        high_precision_wgrad: Compute wgrad from activations and gradients that are not quantized.
            Default: True, as in torchao's ``rowwise_with_gw_hp``: wgrad in float8 needs other
            scales, so two more casts of transposes.

    Example:
        >>> quantized = Float8Rowwise().quantize(torch.randn(256, 128), Direction.ROWWISE)
        >>> [(plane.dtype, tuple(plane.shape)) for plane in quantized.planes]
        [(torch.float8_e4m3fn, (256, 128)), (torch.float32, (256, 1))]
    """

    high_precision_wgrad: bool = field(default=True, kw_only=True)
    name = "float8_rowwise"
    rowwise = (_E4M3, PlaneSpec(torch.float32, 1, None))
    amax_dims = (-1,)
    gemms_class = RowwiseGEMMs

    def grouped_gemms(self, *, on_hardware: bool) -> GroupedRowwiseGEMMs:
        return GroupedRowwiseGEMMs(True, on_hardware)

    def quantize(self, weight: Tensor, direction: Direction, amax: Tensor | None = None) -> Quantized:
        return Quantized(casts_for(weight).cast_rows(weight, amax=amax), None)


@dataclass(frozen=True)
class Float8Tensorwise(_Float8Recipe):
    """One scale for the whole weight, as in torchao's recipe ``tensorwise``.

    Args:
        compute: As in :class:`Recipe`.
        high_precision_wgrad: Compute wgrad from activations and gradients that are not quantized.
            Default: False.

    Example:
        >>> weight = torch.randn(256, 128)
        >>> quantized = Float8Tensorwise().quantize(weight, Direction.ROWWISE)
        >>> quantized.amax.shape  # the scale follows from the largest magnitude
        torch.Size([1, 1])
    """

    name = "float8_tensorwise"
    rowwise = (_E4M3,)
    amax_dims = (-2, -1)
    gemms_class = TensorwiseGEMMs

    def quantize(self, weight: Tensor, direction: Direction, amax: Tensor | None = None) -> Quantized:
        if amax is None:
            amax = self.amax(weight)
        elements, _ = casts_for(weight).cast_matrix(weight, amax=amax)
        return Quantized((elements,), amax)  # the scale follows from ``amax``


@dataclass(frozen=True)
class MXFP8(Recipe):
    """Power-of-two scales for each 32 elements, as in the OCP Microscaling Formats (MX)
    specification 1.0.

    Args:
        compute: As in :class:`Recipe`; ``"float8"`` for grouped layers alone. ``"auto"``
            dequantizes, because torch's kernel needs Blackwell, where this package never ran.
        scale_rounding: ``"rceil"`` (default) takes the smallest scale with which no element
            saturates; ``"floor"`` is the conversion of the specification.

    Raises:
        ValueError: ``scale_rounding`` is neither.

    Example:
        >>> recipe = MXFP8(scale_rounding="floor")
        >>> quantized = recipe.quantize(torch.randn(64, 128), Direction.COLUMNWISE)
        >>> [(plane.dtype, tuple(plane.shape)) for plane in quantized.planes]
        [(torch.float8_e4m3fn, (64, 128)), (torch.float8_e8m0fnu, (2, 128))]
    """

    scale_rounding: str = "rceil"
    name = "mxfp8"
    rowwise = (_E4M3, PlaneSpec(torch.float8_e8m0fnu, 1, 32))
    columnwise = (_E4M3, PlaneSpec(torch.float8_e8m0fnu, 32, 1))

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.scale_rounding not in ("rceil", "floor"):
            raise ValueError(f"MXFP8 expects scale_rounding 'rceil' or 'floor', but got {self.scale_rounding!r}.")

    def grouped_gemms(self, *, on_hardware: bool) -> GroupedMXGEMMs:
        return GroupedMXGEMMs(True, on_hardware, self.scale_rounding)

    def quantize(self, weight: Tensor, direction: Direction, amax: Tensor | None = None) -> Quantized:
        block = self.scale_block(direction)
        return Quantized(casts_for(weight).cast_mx(weight, block, self.scale_rounding), None)

    def round_together(
        self, weights: Sequence[Tensor], amaxes: Sequence[Tensor | None], outputs: Sequence[Tensor]
    ) -> None:
        # The kernel knows whole blocks alone.
        if any(weight.shape[-1] % MX_BLOCK for weight in weights):
            super().round_together(weights, amaxes, outputs)
        else:
            round_together(weights, [], outputs, self.scale_rounding)


@dataclass(frozen=True)
class NVFP4(Recipe):
    """Pairs of 4-bit elements, a scale for each 16 of them, and one for the whole weight (arXiv
    2509.25149).

    Args:
        compute: As in :class:`Recipe`.

    Example:
        >>> quantized = NVFP4().quantize(torch.randn(64, 128), Direction.ROWWISE)
        >>> [(plane.dtype, tuple(plane.shape)) for plane in quantized.planes]
        [(torch.uint8, (64, 64)), (torch.float8_e4m3fn, (64, 8))]
    """

    name = "nvfp4"
    rowwise = (PlaneSpec(torch.uint8, 1, 16, packed=8), PlaneSpec(torch.float8_e4m3fn, 1, 16))
    columnwise = (PlaneSpec(torch.uint8, 16, 1, packed=8), PlaneSpec(torch.float8_e4m3fn, 16, 1))
    amax_dims = (-2, -1)

    def quantize(self, weight: Tensor, direction: Direction, amax: Tensor | None = None) -> Quantized:
        if amax is None:
            amax = self.amax(weight)
        assert amax is not None
        return Quantized(casts_for(weight).cast_nvfp4(weight, self.scale_block(direction), amax), amax)


RECIPES = MappingProxyType({cls.name: cls for cls in (Float8Tensorwise, Float8Rowwise, Float8Blockwise, MXFP8, NVFP4)})
"""The classes of all recipes by the name that :func:`~dtensor_gtp.quantize_` takes.

Example:
    >>> list(RECIPES)
    ['float8_tensorwise', 'float8_rowwise', 'float8_blockwise', 'mxfp8', 'nvfp4']
"""
