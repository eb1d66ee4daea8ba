"""What a recipe is, and the recipes.

A quantized weight is one or two *planes* (matrices of elements or of scales; as many of each as the weight has
matrices), and for some recipes the largest magnitude of the whole matrix, which every rank knows before it quantizes.
Where shards hold whole blocks, what is gathered equals the quantized whole weight, bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm
from types import MappingProxyType
from typing import ClassVar

import torch
from torch import Tensor

from .cast import MX_BLOCK
from .casts import casts_for, round_together
from .float8_gemms import BlockwiseGEMMs, Float8GEMMs, RowwiseGEMMs, TensorwiseGEMMs
from .grouped_gemms import GroupedGEMMs, GroupedMXGEMMs, GroupedRowwiseGEMMs
from .planes import Direction, PlaneSpec, Quantized

_E4M3 = PlaneSpec(torch.float8_e4m3fn, 1, 1)


@dataclass(frozen=True)
class Recipe(ABC):
    """Base of the recipes, which are frozen dataclasses.

    Args:
        compute: How linear layers multiply. ``"auto"`` (default): by GEMMs of the format where the hardware has them
            and shape and dtype allow, else with the dequantized weight. ``"dequantize"``: always the latter.
            ``"float8"``: by float8 GEMMs, or ValueError; on CPU by the reference arithmetic, with a warning.

    Raises:
        ValueError: ``compute`` is none of these, or the recipe has no float8 GEMMs.

    Example:
        >>> recipe, weight = MXFP8(), torch.randn(64, 128)
        >>> quantized = recipe.quantize(weight, Direction.ROWWISE)
        >>> [tuple(plane.shape) for plane in quantized.planes]  # elements, scales
        [(64, 128), (64, 4)]
        >>> recipe.dequantize(quantized, weight.shape, Direction.ROWWISE, torch.bfloat16).shape
        torch.Size([64, 128])
        >>> recipe.round_together([weight], [None], torch.bfloat16)[0].shape
        torch.Size([64, 128])
        >>> recipe.num_bytes(weight.shape, Direction.ROWWISE), recipe.bytes_per_element()
        (8448, 1.03125)
        >>> recipe.scale_block(Direction.ROWWISE)
        (1, 32)
        >>> recipe.block_of(-2)  # rows that a shard keeps together
        32
        >>> recipe.has_columnwise, recipe.amax(weight), recipe.is_capable((9, 0))
        (True, None, False)
    """

    compute: str = field(default="auto", kw_only=True)
    name: ClassVar[str]
    rowwise: ClassVar[tuple[PlaneSpec, ...]]  # the planes for forward: elements, then scales
    columnwise: ClassVar[tuple[PlaneSpec, ...]] = ()  # for dgrad; without any it takes the transpose of rowwise data
    # The ranks must agree on the largest magnitude over these dims before they quantize.
    amax_dims: ClassVar[tuple[int, ...]] = ()
    has_gemms: ClassVar[bool] = False  # whether linear layers may multiply in the format

    def __post_init__(self) -> None:
        cls = type(self).__name__
        if self.compute not in ("auto", "dequantize", "float8"):
            raise ValueError(f"{cls} expects compute 'auto', 'dequantize' or 'float8', but got {self.compute!r}.")
        if self.compute == "float8" and not self.has_gemms and self.grouped_gemms(on_hardware=False) is None:
            raise ValueError(
                f"{cls} expects compute 'auto' or 'dequantize', but got 'float8': GEMMs of {self.name} need a "
                "Blackwell GPU, and this package does not have them; it dequantizes the weight for the GEMM."
            )

    @property
    def has_columnwise(self) -> bool:
        """Whether dgrad takes other data than forward."""
        return bool(self.columnwise)

    def gemms(self, *, on_hardware: bool) -> Float8GEMMs:
        """The GEMMs of the format. Called by linear layers.

        Args:
            on_hardware: Whether the GPU has them; else the reference arithmetic.

        Raises:
            NotImplementedError: The format has none.
        """
        raise NotImplementedError(f"{self.name} has no low-precision GEMMs.")

    def grouped_gemms(self, *, on_hardware: bool) -> GroupedGEMMs | None:
        """The GEMMs of a grouped layer; None if there are none. Called by ``GroupedLinear``.

        Args:
            on_hardware: Whether the GPU has them; else the reference arithmetic.
        """
        return None

    def is_capable(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU has the GEMMs of the format.

        Args:
            capability: The compute capability, as ``torch.cuda.get_device_capability`` returns it.
        """
        return False

    def direction(self, direction: Direction) -> Direction:
        """The data that serves a direction: rowwise data for both if there is no other.

        Args:
            direction: What a GEMM needs.
        """
        return direction if self.columnwise else Direction.ROWWISE

    def planes(self, direction: Direction) -> tuple[PlaneSpec, ...]:
        """What a quantized weight consists of: the plane of elements, then that of scales.

        Args:
            direction: Which data.
        """
        return (self.columnwise or self.rowwise) if direction is Direction.COLUMNWISE else self.rowwise

    def scale_block(self, direction: Direction) -> tuple[int, int]:
        """Rows and columns of the weight that share a scale; 0 for all of them.

        Args:
            direction: Which data.
        """
        spec = (self.columnwise or self.rowwise)[-1] if direction is Direction.COLUMNWISE else self.rowwise[-1]
        return spec.rows or 0, spec.columns or 0

    def amax(self, weight: Tensor) -> Tensor | None:
        """The statistic that ranks must agree on before they quantize. That of a whole is the maximum over its parts.

        Args:
            weight: Shape ``(*, out_features, in_features)``, a whole weight or a part.

        Returns:
            Largest magnitudes, float32; None if the recipe needs none.
        """
        return casts_for(weight).amax(weight, self.amax_dims) if self.amax_dims else None

    @abstractmethod
    def quantize(self, weight: Tensor, direction: Direction, amax: Tensor | None = None) -> Quantized:
        """Quantize a weight, or a part of whole blocks.

        Args:
            weight: Shape ``(*, out_features, in_features)``, float32, bfloat16 or float16.
            direction: Which data.
            amax: What ``Recipe.amax`` gives for the whole weight, if ``weight`` is a part of it.

        Returns:
            The planes that ``Recipe.planes`` describes.
        """

    def dequantize(self, quantized: Quantized, shape: torch.Size, direction: Direction, dtype: torch.dtype) -> Tensor:
        """The values that quantized data stand for, computed in float32 and rounded once.

        Args:
            quantized: What :meth:`quantize` has returned.
            shape: That of the weight.
            direction: Which data these are.
            dtype: Of the result.
        """
        return casts_for(quantized.planes[0]).dequantize(quantized, self.scale_block(direction), shape, dtype)

    def round_together(
        self, weights: Sequence[Tensor], amaxes: Sequence[Tensor | None], dtype: torch.dtype
    ) -> list[Tensor]:
        """What :meth:`dequantize` makes of rowwise data, of several weights: the values that a layer multiplies with.

        Args:
            weights: Parts of whole blocks, as for :meth:`quantize`.
            amaxes: What :meth:`amax` gives for each whole weight; None stands for that of the part.
            dtype: Of the results.
        """
        direction = Direction.ROWWISE
        quantized = [self.quantize(weight, direction, amax) for weight, amax in zip(weights, amaxes, strict=True)]
        return [self.dequantize(q, w.shape, direction, dtype) for q, w in zip(quantized, weights, strict=True)]

    def block_of(self, dim: int, block_size: int = 1, *, is_native: bool = False) -> int:
        """The smallest block size for a shard of ``dim`` that keeps its blocks, and those of ``block_size``, whole.

        Args:
            dim: -2 are rows, -1 columns.
            block_size: Rows or columns that stay together for another reason, such as a head.
            is_native: Native storage has rowwise data alone, so rows of mxfp8 and nvfp4 may be cut anywhere.
        """
        specs = self.rowwise if is_native else self.rowwise + self.columnwise
        return lcm(block_size, *(spec.period(dim) or 1 for spec in specs))

    def num_bytes(self, shape: torch.Size, direction: Direction) -> int:
        """Bytes of the planes of a whole weight: what one gather of it sends, without ``amax``.

        Args:
            shape: That of the weight.
            direction: Which data.
        """
        return sum(spec.shape(shape).numel() * spec.dtype.itemsize for spec in self.planes(direction))

    def bytes_per_element(self, direction: Direction = Direction.ROWWISE) -> float:
        """Bytes for each element of a large weight; scales of whole rows or weights count as 0.

        Args:
            direction: Which data.
        """
        specs = self.planes(direction)
        return sum(s.dtype.itemsize * s.packed / (s.rows * s.columns) for s in specs if s.rows and s.columns)


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
        self, weights: Sequence[Tensor], amaxes: Sequence[Tensor | None], dtype: torch.dtype
    ) -> list[Tensor]:
        known = [amax for amax in amaxes if amax is not None]
        if not self.amax_dims or len(known) < len(weights):
            return super().round_together(weights, amaxes, dtype)
        return round_together(weights, known, dtype)


@dataclass(frozen=True)
class Float8Blockwise(_Float8Recipe):
    """One scale for each block of 128 x 128, as in DeepSeek-V3 (arXiv 2412.19437, section 3.3).

    Args:
        compute: As in :class:`Recipe`.
        high_precision_wgrad: Compute wgrad from activations and gradients that are not quantized. Default: False.

    Example:
        >>> quantized = Float8Blockwise().quantize(torch.randn(256, 128), Direction.ROWWISE)
        >>> [(plane.dtype, tuple(plane.shape)) for plane in quantized.planes]
        [(torch.float8_e4m3fn, (256, 128)), (torch.float32, (2, 1))]
    """

    name = "float8_blockwise"
    rowwise = (_E4M3, PlaneSpec(torch.float32, 128, 128))
    gemms_class = BlockwiseGEMMs

    def is_capable(self, capability: tuple[int, int]) -> bool:
        return capability[0] == 9

    def quantize(self, weight: Tensor, direction: Direction, amax: Tensor | None = None) -> Quantized:
        return Quantized(casts_for(weight).cast_blocks(weight, (128, 128)), None)


@dataclass(frozen=True)
class Float8Rowwise(_Float8Recipe):
    """One scale for each row.

    Args:
        compute: As in :class:`Recipe`.
        high_precision_wgrad: Compute wgrad from activations and gradients that are not quantized. Default: True, as in
            torchao's ``rowwise_with_gw_hp``: wgrad in float8 needs other scales, so two more casts of transposes.

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
        high_precision_wgrad: Compute wgrad from activations and gradients that are not quantized. Default: False.

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
        amax = self.amax(weight) if amax is None else amax
        return Quantized(casts_for(weight).cast_matrix(weight, amax=amax)[:1], amax)


@dataclass(frozen=True)
class MXFP8(Recipe):
    """Power-of-two scales for each 32 elements, as in the OCP Microscaling Formats (MX) specification 1.0.

    Args:
        compute: As in :class:`Recipe`; ``"float8"`` for grouped layers alone. ``"auto"`` dequantizes, because torch's
            kernel needs Blackwell, where this package never ran.
        scale_rounding: ``"rceil"`` (default) takes the smallest scale with which no element saturates; ``"floor"`` is
            the conversion of the specification.

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
        return Quantized(casts_for(weight).cast_mx(weight, self.scale_block(direction), self.scale_rounding), None)

    def round_together(
        self, weights: Sequence[Tensor], amaxes: Sequence[Tensor | None], dtype: torch.dtype
    ) -> list[Tensor]:
        if any(weight.shape[-1] % MX_BLOCK for weight in weights):
            return super().round_together(weights, amaxes, dtype)
        return round_together(weights, [], dtype, self.scale_rounding)


@dataclass(frozen=True)
class NVFP4(Recipe):
    """Pairs of 4-bit elements, a scale for each 16 of them, and one for the whole weight (arXiv 2509.25149).

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
        amax = self.amax(weight) if amax is None else amax
        assert amax is not None
        return Quantized(casts_for(weight).cast_nvfp4(weight, self.scale_block(direction), amax), amax)


RECIPES = MappingProxyType({cls.name: cls for cls in (Float8Tensorwise, Float8Rowwise, Float8Blockwise, MXFP8, NVFP4)})
"""The classes of all recipes by the name that :func:`~dtensor_gtp.quantize_` takes.

Example:
    >>> list(RECIPES)
    ['float8_tensorwise', 'float8_rowwise', 'float8_blockwise', 'mxfp8', 'nvfp4']
"""
