"""The planes that quantized data consist of: matrices of elements or of scales."""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch
from torch import Tensor


class Direction(enum.Enum):
    """Which data of a weight of shape ``(out_features, in_features)`` a GEMM needs.

    ``ROWWISE`` has blocks along in_features, for forward. ``COLUMNWISE`` has blocks along
    out_features, for the gradient of the input.

    Example:
        >>> [MXFP8().scale_block(direction) for direction in Direction]
        [(1, 32), (32, 1)]
    """

    ROWWISE = enum.auto()  # blocks along in_features: forward
    COLUMNWISE = enum.auto()  # blocks along out_features: the gradient of the input


class PlaneSpec(NamedTuple):
    """One plane of a quantized weight.

    Args:
        dtype: Of its elements.
        rows: How many rows of the weight one step takes; None for all.
        columns: How many columns of the weight one step takes; None for all.
        packed: Elements of the plane for each step along the dim whose steps are longer than 1.

    Example:
        >>> elements, scales = NVFP4().planes(Direction.ROWWISE)
        >>> elements.shape(torch.Size([64, 128])), scales.shape(torch.Size([64, 128]))
        (torch.Size([64, 64]), torch.Size([64, 8]))
        >>> scales.period(-1), scales.size(-1, 128)
        (16, 8)
    """

    dtype: torch.dtype
    rows: int | None
    columns: int | None
    packed: int = 1

    def period(self, dim: int) -> int | None:
        """Elements of the weight for one of the plane; None for all of them.

        Args:
            dim: Counted from the end: -2 are rows, -1 columns.
        """
        return {-2: self.rows, -1: self.columns}.get(dim, 1)  # 1: dims in front number the matrices

    def size(self, dim: int, size: int) -> int:
        """Size of the plane along a dim.

        Args:
            dim: Counted from the end: -2 are rows, -1 columns.
            size: Elements of a weight along ``dim``, which begin with a whole period.
        """
        period = self.period(dim)
        if period is None:
            return 1
        steps = -(-size // period)  # the last one may be short
        if period > 1:  # e.g. 8 bytes for 16 elements of nvfp4
            steps *= self.packed
        return steps

    def shape(self, weight: torch.Size) -> torch.Size:
        """Shape of the plane of a weight.

        Args:
            weight: Shape of the weight.
        """
        return torch.Size(self.size(dim - len(weight), size) for dim, size in enumerate(weight))


class Quantized(NamedTuple):
    """Quantized matrices.

    Args:
        planes: As ``Recipe.planes`` describes them.
        amax: What ``Recipe.amax`` gave, over whole matrices; None for recipes that need none.

    Example:
        >>> planes, amax = MXFP8().quantize(torch.randn(64, 128), Direction.ROWWISE)
        >>> len(planes), amax
        (2, None)
    """

    planes: tuple[Tensor, ...]  # as ``Recipe.planes`` describes them
    # What ``Recipe.amax`` gave, over whole matrices; None for recipes that need none.
    amax: Tensor | None
