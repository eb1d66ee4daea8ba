"""The planes that quantized data consist of: matrices of elements or of scales."""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch
from torch import Tensor


class Direction(enum.Enum):
    """Which data of a weight of shape ``(out_features, in_features)`` a GEMM needs."""

    ROWWISE = enum.auto()  # blocks along in_features: forward
    COLUMNWISE = enum.auto()  # blocks along out_features: the gradient of the input


class PlaneSpec(NamedTuple):
    """One plane: the ``dtype`` of its elements, how many ``rows`` and ``columns`` of the weight one step takes (None
    for all), and ``packed``, the elements of the plane for each step along the dim whose steps are longer than 1."""

    dtype: torch.dtype
    rows: int | None
    columns: int | None
    packed: int = 1

    def period(self, dim: int) -> int | None:
        """Elements of the weight for one of the plane, along a dim counted from its end: -2 are rows, -1 columns."""
        return {-2: self.rows, -1: self.columns}.get(dim, 1)

    def size(self, dim: int, size: int) -> int:
        """Size of the plane along ``dim`` for ``size`` elements of a weight that begin with a whole period."""
        period = self.period(dim)
        return 1 if period is None else -(-size // period) * (self.packed if period > 1 else 1)

    def shape(self, weight: torch.Size) -> torch.Size:
        """Shape of the plane of a weight of that shape."""
        return torch.Size(self.size(dim - len(weight), size) for dim, size in enumerate(weight))


class Quantized(NamedTuple):
    """Quantized matrices."""

    planes: tuple[Tensor, ...]  # as ``Recipe.planes`` describes them
    amax: Tensor | None  # what ``Recipe.amax`` gave, over whole matrices; None for recipes that need none
