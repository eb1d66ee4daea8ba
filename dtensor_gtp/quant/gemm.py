"""Products of two float8 matrices with scales: on hardware that multiplies them, or by the reference arithmetic.

The contraction is the last dim of both operands: on Hopper, ``torch.nn.functional.scaled_mm`` takes a row-major and a
column-major matrix only. Other operands (a weight for dgrad, both of wgrad) need a transposing copy of bytes.

Sources: documentation and checks of ``torch.nn.functional.scaled_mm`` (2.11 to 2.15); cuBLAS 12.9 documentation, "1D
and 2D block scaling for FP8 data types", for the layout of block scales.
"""

from __future__ import annotations

import enum
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, scaled_mm

from . import cast
from .casts import casts_for

ALIGNMENT = 16  # of rows and columns of an operand on hardware
BLOCK = 128


class Granularity(enum.Enum):
    """Which elements of an operand share a scale, by the name in torch's ``ScalingType``."""

    TENSOR = "TensorWise"  # all: scale of shape (1, 1)
    ROW = "RowWise"  # a row: (rows, 1)
    ROW_BLOCK = "BlockWise1x128"  # 128 elements of a row: (rows, blocks)
    SQUARE_BLOCK = "BlockWise128x128"  # (blocks of rows, blocks)

    @property
    def block(self) -> tuple[int, int]:
        """Rows and columns of a block; 1 where the shape of the scale broadcasts."""
        return {Granularity.ROW_BLOCK: (1, BLOCK), Granularity.SQUARE_BLOCK: (BLOCK, BLOCK)}.get(self, (1, 1))


class Operand(NamedTuple):
    """A quantized matrix; a value is ``data * scale``."""

    data: Tensor  # shape (rows, contraction), float8_e4m3fn or float8_e5m2
    scale: Tensor  # float32
    granularity: Granularity

    def dequantize(self) -> Tensor:
        """The values in float32."""
        return self.data.to(torch.float32) * cast.spread(self.scale, self.granularity.block, self.data.shape)


def product(
    left: Operand, right: Operand, dtype: torch.dtype, *, on_hardware: bool, use_fast_accum: bool = False
) -> Tensor:
    """``left @ right.T``.

    Args:
        left: Shape ``(M, K)``.
        right: Shape ``(N, K)``; on hardware N and K are multiples of 16.
        dtype: Of the result, to which sums in float32 are rounded.
        on_hardware: Multiply float8; else multiply the dequantized values in float32.
        use_fast_accum: On Hopper, sum in the tensor cores' own precision; not with scales of blocks.

    Returns:
        Shape ``(M, N)``.
    """
    rows = left.data.shape[0]
    if not on_hardware:
        return left.dequantize().mm(right.dequantize().t()).to(dtype)
    if rows == 0 or left.data.shape[1] == 0:
        return left.data.new_zeros((rows, right.data.shape[0]), dtype=dtype)
    is_blockwise = left.granularity is Granularity.ROW_BLOCK
    # The kernel wants the columns of block scales aligned.
    missing = -rows % ALIGNMENT if is_blockwise else 0
    if missing:
        left = left._replace(data=_pad_rows(left.data, missing), scale=_pad_rows(left.scale, missing))
    result = scaled_mm(
        casts_for(left.data).row_major(left.data),
        casts_for(right.data).row_major(right.data).t(),
        left.scale.t().contiguous().t() if is_blockwise else left.scale,
        ScalingType.__members__[left.granularity.value],
        _right_scale(right),
        ScalingType.__members__[right.granularity.value],
        output_dtype=dtype,
        use_fast_accum=use_fast_accum and not is_blockwise,
    )
    return result[:rows] if missing else result


def _pad_rows(matrix: Tensor, missing: int) -> Tensor:
    """Zeros below: in bytes, because padding is not defined for every float8."""
    plain = matrix.view(torch.uint8) if matrix.itemsize == 1 else matrix
    return F.pad(plain, (0, 0, 0, missing)).view(matrix.dtype)


def _right_scale(operand: Operand) -> Tensor:
    scale = operand.scale
    if operand.granularity is Granularity.ROW:
        return scale.reshape(1, -1)
    if operand.granularity is Granularity.ROW_BLOCK:
        return scale.t().contiguous().t()
    if operand.granularity is Granularity.SQUARE_BLOCK:
        # Rows of four scales, along the contraction.
        return F.pad(scale, (0, -scale.shape[1] % 4)).contiguous().t()
    return scale
