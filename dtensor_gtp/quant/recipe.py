"""What a recipe is: the base of all recipes.

A quantized weight is one or two *planes* (matrices of elements or of scales; as many of each as the
weight has matrices), and for some recipes the largest magnitude of the whole matrix, which every
rank knows before it quantizes. Where shards hold whole blocks, what is gathered equals the
quantized whole weight, bit for bit.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import lcm
from typing import ClassVar

import torch
from torch import Tensor

from .casts import casts_for
from .float8_gemms import Float8GEMMs
from .grouped_gemms import GroupedGEMMs
from .planes import Direction, PlaneSpec, Quantized


@dataclass(frozen=True)
class Recipe(ABC):
    """Base of the recipes, which are frozen dataclasses.

    Args:
        compute: How linear layers multiply. ``"auto"`` (default): by GEMMs of the format where the
            hardware has them and shape and dtype allow, else with the dequantized weight.
            ``"dequantize"``: always the latter. ``"float8"``: by float8 GEMMs, or ValueError; on
            CPU by the reference arithmetic, with a warning.

    Raises:
        ValueError: ``compute`` is none of these, or the recipe has no float8 GEMMs.

    Example:
        >>> recipe, weight = MXFP8(), torch.randn(64, 128)
        >>> quantized = recipe.quantize(weight, Direction.ROWWISE)
        >>> [tuple(plane.shape) for plane in quantized.planes]  # elements, scales
        [(64, 128), (64, 4)]
        >>> recipe.dequantize(quantized, weight.shape, Direction.ROWWISE, torch.bfloat16).shape
        torch.Size([64, 128])
        >>> values = torch.empty(64, 128, dtype=torch.bfloat16)
        >>> recipe.round_together([weight], [None], [values])  # fills ``values``
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
    # For dgrad; without any it takes the transpose of rowwise data.
    columnwise: ClassVar[tuple[PlaneSpec, ...]] = ()
    # The ranks must agree on the largest magnitude over these dims before they quantize.
    amax_dims: ClassVar[tuple[int, ...]] = ()
    has_gemms: ClassVar[bool] = False  # whether linear layers may multiply in the format

    def __post_init__(self) -> None:
        cls = type(self).__name__
        if self.compute not in ("auto", "dequantize", "float8"):
            raise ValueError(f"{cls} expects compute 'auto', 'dequantize' or 'float8', but got {self.compute!r}.")
        if self.compute == "float8" and not self.has_gemms and self.grouped_gemms(on_hardware=False) is None:
            raise ValueError(
                f"{cls} expects compute 'auto' or 'dequantize', but got 'float8': GEMMs of "
                f"{self.name} need a Blackwell GPU, and this package does not have them; it "
                "dequantizes the weight for the GEMM."
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
        if self.columnwise:
            return direction
        return Direction.ROWWISE

    def planes(self, direction: Direction) -> tuple[PlaneSpec, ...]:
        """What a quantized weight consists of: the plane of elements, then that of scales.

        Args:
            direction: Which data.
        """
        if direction is Direction.COLUMNWISE and self.columnwise:
            return self.columnwise
        return self.rowwise

    def scale_block(self, direction: Direction) -> tuple[int, int]:
        """Rows and columns of the weight that share a scale; 0 for all of them.

        Args:
            direction: Which data.
        """
        scales = self.planes(direction)[-1]
        return scales.rows or 0, scales.columns or 0

    def amax(self, weight: Tensor) -> Tensor | None:
        """The statistic that ranks must agree on before they quantize. That of a whole is the
        maximum over its parts.

        Args:
            weight: Shape ``(*, out_features, in_features)``, a whole weight or a part.

        Returns:
            Largest magnitudes, float32; None if the recipe needs none.
        """
        if not self.amax_dims:
            return None
        return casts_for(weight).amax(weight, self.amax_dims)

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
        casts = casts_for(quantized.planes[0])
        return casts.dequantize(quantized, self.scale_block(direction), shape, dtype)

    def round_together(
        self, weights: Sequence[Tensor], amaxes: Sequence[Tensor | None], outputs: Sequence[Tensor]
    ) -> None:
        """Fill ``outputs`` with what :meth:`dequantize` makes of rowwise data, of several weights:
        the values that a layer multiplies with.

        Args:
            weights: Parts of whole blocks, as for :meth:`quantize`.
            amaxes: What :meth:`amax` gives for each whole weight; None stands for that of the part.
            outputs: Contiguous, of the shapes of ``weights`` and of one dtype, that of the values.
        """
        for weight, amax, output in zip(weights, amaxes, outputs, strict=True):
            quantized = self.quantize(weight, Direction.ROWWISE, amax)
            output.copy_(self.dequantize(quantized, weight.shape, Direction.ROWWISE, output.dtype))

    def block_of(self, dim: int, block_size: int = 1, *, is_native: bool = False) -> int:
        """The smallest block size for a shard of ``dim`` that keeps its blocks, and those of
        ``block_size``, whole.

        Args:
            dim: -2 are rows, -1 columns.
            block_size: Rows or columns that stay together for another reason, such as a head.
            is_native: Native storage has rowwise data alone, so rows of mxfp8 and nvfp4 may be cut
                anywhere.
        """
        specs = self.rowwise
        if not is_native:
            specs += self.columnwise
        # A period of None is cut nowhere: each rank has the whole plane.
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
