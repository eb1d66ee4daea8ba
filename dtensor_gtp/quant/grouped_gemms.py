"""Grouped products in 8 bits: each group's rows with the group's weight, one class for each format.

Forward and dgrad multiply quantized operands, wgrad those of the compute dtype. Group sizes stay on
the device. Without the hardware the reference arithmetic multiplies dequantized values in float32.

``mxfp8`` has never run on a GPU: it needs Blackwell and a torch that was built with such kernels.
So only a recipe that asks for it by ``compute="float8"`` takes it.

Sources: ``torch.nn.functional.scaled_grouped_mm`` and its checks of shapes (2.11 to 2.15); cuBLAS
12.9 documentation, "1D block scaling factors layout", for the order of block scales.
"""

from __future__ import annotations

import itertools
from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.functional import ScalingType, SwizzleType

from . import cast
from .casts import casts_for
from .float8_gemms import ALIGNMENT, Granularity, Operand, RowwiseGEMMs, Tensors, product
from .planes import Quantized

# Scales lie in tiles of this many rows and columns, and a tile holds rows of one group.
TILE_ROWS = 128
TILE_COLUMNS = 4


@dataclass(frozen=True)
class GroupedGEMMs(RowwiseGEMMs):
    """How a grouped layer multiplies. Rows beyond the last group are not defined in what it returns."""

    # Major compute capability of the GPUs that have the kernel, and their name.
    capability: ClassVar[tuple[int, str]]
    alignment: ClassVar[int]  # of the rows and columns of each group's weight on hardware
    has_run: ClassVar[bool]  # on a GPU: else only a recipe that asks for it takes it
    needs_columnwise: ClassVar[bool]  # whether dgrad takes other data than forward

    @abstractmethod
    def grouped_output(self, x_TK: Tensor, weight: Quantized, ends_G: Tensor, dtype: torch.dtype) -> Tensor:
        """``x[rows of g] @ w[g].T``, shape ``(num_rows, N)``. ``weight`` has the planes of
        ``(num_groups, N, K)`` for forward; ``ends_G`` says where each group ends, int32."""

    @abstractmethod
    def grouped_grad_input(self, grad_TN: Tensor, weight: Quantized, ends_G: Tensor, dtype: torch.dtype) -> Tensor:
        """``g[rows of g] @ w[g]``, shape ``(num_rows, K)``, by the planes for dgrad."""


@dataclass(frozen=True)
class GroupedRowwiseGEMMs(GroupedGEMMs):
    """One scale for each row of each operand, as in ``RowwiseGEMMs``."""

    capability = (9, "Hopper")
    alignment = ALIGNMENT
    has_run = True
    needs_columnwise = False

    def grouped_output(self, x_TK: Tensor, weight: Quantized, ends_G: Tensor, dtype: torch.dtype) -> Tensor:
        data, scale = weight.planes  # scale: (num_groups, N, 1)
        return self._grouped(self.cast_input(x_TK), data, scale.squeeze(-1), ends_G, dtype, is_forward=True)

    def grouped_grad_input(self, grad_TN: Tensor, weight: Quantized, ends_G: Tensor, dtype: torch.dtype) -> Tensor:
        data, scale = weight.planes
        # Each row is multiplied by its group's scales of the weight, which lie along the
        # contraction.
        group_T = group_of_rows(ends_G, grad_TN.shape[0])
        left = [*casts_for(grad_TN).cast_rows(grad_TN, factor=scale.squeeze(-1), group=group_T)]
        # The weight's own scales are in the gradient now.
        ones_GK = torch.ones((data.shape[0], data.shape[2]), dtype=torch.float32, device=data.device)
        return self._grouped(left, data.mT, ones_GK, ends_G, dtype, is_forward=False)

    def _grouped(
        self, left: Tensors, data_GRC: Tensor, scale_GR: Tensor, ends_G: Tensor, dtype: torch.dtype, *, is_forward: bool
    ) -> Tensor:
        """Quantized rows times the transpose of each group's matrix."""
        left_data, left_scale = left
        if self.on_hardware:
            data_GCR = casts_for(data_GRC).row_major(data_GRC).mT  # the kernel wants the right matrices column-major
            result: Tensor = F.scaled_grouped_mm(  # type: ignore[attr-defined]
                left_data, data_GCR, left_scale.view(-1), ScalingType.RowWise, scale_GR.contiguous(),
                ScalingType.RowWise, offs=ends_G, output_dtype=dtype, use_fast_accum=is_forward,
            )  # fmt: skip
            return result
        output = left_scale.new_zeros(left_data.shape[0], data_GRC.shape[1], dtype=dtype)
        for group, (begin, end) in enumerate(itertools.pairwise([0, *ends_G.tolist()])):
            of_group = Operand(left_data[begin:end], left_scale[begin:end], Granularity.ROW)
            right = Operand(data_GRC[group], scale_GR[group].unsqueeze(-1), Granularity.ROW)
            output[begin:end] = product(of_group, right, dtype, on_hardware=False)
        return output


@dataclass(frozen=True)
class GroupedMXGEMMs(GroupedGEMMs):
    """A power-of-two scale for 32 elements along the contraction of each operand. So dgrad takes
    the columnwise data of the weight."""

    scale_rounding: str = "rceil"  # of activations and gradients, as of the weight

    capability = (10, "Blackwell")
    alignment = cast.MX_BLOCK
    has_run = False
    needs_columnwise = True

    def grouped_output(self, x_TK: Tensor, weight: Quantized, ends_G: Tensor, dtype: torch.dtype) -> Tensor:
        data, scale = weight.planes
        return self._grouped(x_TK, data, scale, ends_G, dtype)

    def grouped_grad_input(self, grad_TN: Tensor, weight: Quantized, ends_G: Tensor, dtype: torch.dtype) -> Tensor:
        data, scale = weight.planes
        return self._grouped(grad_TN, data.mT, scale.mT, ends_G, dtype)

    def _grouped(
        self, rows_TC: Tensor, data_GRC: Tensor, scale_GRB: Tensor, ends_G: Tensor, dtype: torch.dtype
    ) -> Tensor:
        """Rows times the transpose of each group's matrix, whose scales are for ``B`` blocks of its
        columns."""
        left_data, left_scale = casts_for(rows_TC).cast_mx(rows_TC, (1, cast.MX_BLOCK), self.scale_rounding)
        if self.on_hardware:
            return _multiply_tiles(left_data, left_scale, data_GRC, scale_GRB, ends_G, dtype)
        output = rows_TC.new_zeros(rows_TC.shape[0], data_GRC.shape[1], dtype=dtype)
        left = _dequantize(left_data, left_scale)
        for group, (begin, end) in enumerate(itertools.pairwise([0, *ends_G.tolist()])):
            right = _dequantize(data_GRC[group], scale_GRB[group])
            output[begin:end] = left[begin:end].mm(right.t()).to(dtype)
        return output


def group_of_rows(ends_G: Tensor, num_rows: int) -> Tensor:
    """The group of each row; the last one for rows beyond it."""
    rows = torch.arange(num_rows, device=ends_G.device, dtype=ends_G.dtype)
    return torch.searchsorted(ends_G, rows, right=True).clamp_(max=ends_G.shape[0] - 1)


def _dequantize(data: Tensor, scale: Tensor) -> Tensor:
    factor = cast.spread(cast.e8m0_to_float(scale.contiguous()), (1, cast.MX_BLOCK), data.shape)
    return data.to(torch.float32) * factor


def _multiply_tiles(
    left_TC: Tensor, scale_TB: Tensor, right_GRC: Tensor, scale_GRB: Tensor, ends_G: Tensor, dtype: torch.dtype
) -> Tensor:
    """By torch's kernel. Rows of a group are moved to whole tiles, because the kernel looks for a
    group's scales at its next tile; torch's own tests have no groups of odd sizes. The host needs
    no sizes: all groups together are at most a tile each longer."""
    num_rows = left_TC.shape[0]
    num_groups = ends_G.shape[0]
    sizes_G = ends_G.diff(prepend=ends_G.new_zeros(1))
    tiles_G = (sizes_G + TILE_ROWS - 1) // TILE_ROWS * TILE_ROWS
    tile_ends_G = tiles_G.cumsum(0, dtype=torch.int32)
    shift_G = (tile_ends_G - tiles_G) - (ends_G - sizes_G)  # how far each group moves
    places_T = torch.arange(num_rows, device=ends_G.device) + shift_G[group_of_rows(ends_G, num_rows)]
    num_padded = -(-num_rows // TILE_ROWS) * TILE_ROWS + num_groups * TILE_ROWS
    result: Tensor = F.scaled_grouped_mm(  # type: ignore[attr-defined]
        _spread_rows(left_TC, places_T, num_padded),
        casts_for(right_GRC).row_major(right_GRC).mT,
        in_tiles(_spread_rows(scale_TB, places_T, num_padded)).view(num_padded, -1),
        ScalingType.BlockWise1x32,
        in_tiles(scale_GRB).flatten(1),
        ScalingType.BlockWise1x32,
        swizzle_a=SwizzleType.SWIZZLE_32_4_4,
        swizzle_b=SwizzleType.SWIZZLE_32_4_4,
        offs=tile_ends_G,
        output_dtype=dtype,
    )
    return result[places_T]  # without the rows between the groups


def _spread_rows(matrix: Tensor, places: Tensor, num_rows: int) -> Tensor:
    """A matrix of bytes whose row ``places[i]`` is row ``i`` of ``matrix``, all others zero."""
    plain = matrix.view(torch.uint8)
    return plain.new_zeros(num_rows, plain.shape[1]).index_copy_(0, places, plain).view(matrix.dtype)


def in_tiles(scale: Tensor) -> Tensor:
    """Scales of shape ``(*, rows, blocks)`` in the order in which tensor cores read them, filled up
    with zeros: tile by tile, and in a tile rows 0, 32, 64, 96, then 1, 33... each with its four
    blocks."""
    plain = scale.view(torch.uint8)
    plain = F.pad(plain, (0, -plain.shape[-1] % TILE_COLUMNS, 0, -plain.shape[-2] % TILE_ROWS))
    rows = plain.shape[-2] // TILE_ROWS
    columns = plain.shape[-1] // TILE_COLUMNS
    tiles = plain.view(*plain.shape[:-2], rows, 4, TILE_ROWS // 4, columns, TILE_COLUMNS)
    return tiles.transpose(-4, -2).contiguous().flatten(-5).view(scale.dtype)
