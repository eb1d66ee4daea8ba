"""The casts by Triton's kernels: which kernel, with which tiles."""

from __future__ import annotations

from contextlib import AbstractContextManager, ExitStack
from math import prod
from typing import Any

import torch
import triton
from torch import Tensor

from .. import _torch_compat as compat
from . import cast
from . import triton_kernels as kernels
from .reference_casts import Casts

# Elements of a tile of flat kernels, and the parts in which the maximum of a large matrix is found.
_BLOCK = 4096


_PARTS = 512


# Programs that share a matrix in a flat cast: a few for each processor of a large GPU.
_PROGRAMS = 2048


# Rows up to this length stay in registers.
_LONGEST_ROW = 16384


class TritonCasts(Casts):
    """The casts on CUDA, outside of compilers. Never given matrices without elements.

    Args:
        has_float8: The GPU converts to float8 itself.
    """

    def __init__(self, has_float8: bool) -> None:
        self._has_float8 = has_float8

    def amax(self, weight: Tensor, dims: tuple[int, ...]) -> Tensor:
        weight = _row_major(weight)
        if dims == (-1,):
            amax = weight.new_empty((*weight.shape[:-1], 1), dtype=torch.float32)
            self._rows(weight, None, None, amax, None, None)
            return amax
        with _on(weight):
            parts = self._parts(weight)
            amax = weight.new_empty((*weight.shape[:-2], 1, 1), dtype=torch.float32)
            num_matrices = amax.numel()
            kernels.finish_amax[(num_matrices,)](parts, amax.view(torch.int32), NUM=parts.numel() // num_matrices)
        return amax

    def e4m3_scale(self, largest: Tensor) -> Tensor:
        with _on(largest):
            scale = torch.empty_like(largest, memory_format=torch.contiguous_format)
            num, block = scale.numel(), 128
            kernels.scales_of[(triton.cdiv(num, block),)](_as_bits(largest), scale, num, E5M2=False, BLOCK=block)
        return scale

    def cast_matrix(
        self, matrix: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, amax: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        matrix = _row_major(matrix)
        with _on(matrix):
            known = self._parts(matrix) if amax is None else _as_bits(amax)
            data = torch.empty(matrix.shape, dtype=torch.uint8, device=matrix.device)
            scale = matrix.new_empty((*matrix.shape[:-2], 1, 1), dtype=torch.float32)
            num_matrices, numel = scale.numel(), matrix.shape[-2] * matrix.shape[-1]
            programs = min(triton.cdiv(numel, _BLOCK), _PROGRAMS)
            kernels.cast_matrix[(num_matrices * programs,)](
                matrix,
                known,
                data,
                scale,
                numel,
                programs,
                NUM=known.numel() // num_matrices,
                E5M2=dtype == torch.float8_e5m2,
                HARDWARE=self._has_float8,
                BLOCK=_BLOCK,
            )
        return data.view(dtype), scale

    def cast_matrix_turned(self, matrix: Tensor, multiple: int) -> tuple[Tensor, Tensor]:
        matrix = _row_major(matrix)
        with _on(matrix):
            scale = matrix.new_empty((*matrix.shape[:-2], 1, 1), dtype=torch.float32)
            data = self._turn(matrix, multiple, self._parts(matrix), scale)
        return data.view(torch.float8_e4m3fn), scale

    def cast_rows(
        self, matrix: Tensor, *, factor: Tensor | None = None, group: Tensor | None = None, amax: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        matrix = _row_major(matrix)
        with _on(matrix):
            data = torch.empty(matrix.shape, dtype=torch.uint8, device=matrix.device)
            scale = matrix.new_empty((*matrix.shape[:-1], 1), dtype=torch.float32)
            factor = None if factor is None else factor.contiguous()
            self._rows(matrix, factor, group, amax, data, scale)
        return data.view(torch.float8_e4m3fn), scale

    def _rows(
        self,
        matrix: Tensor,
        factor: Tensor | None,
        group: Tensor | None,
        amax: Tensor | None,
        data: Tensor | None,
        scale: Tensor | None,
    ) -> None:
        """The kernel of rows; without ``data`` it fills ``amax``."""
        num_columns = matrix.shape[-1]
        num_rows = matrix.numel() // num_columns
        block = min(triton.next_power_of_2(num_columns), _LONGEST_ROW)
        rows = max(_BLOCK // block, 1)
        with _on(matrix):
            kernels.cast_rows[(triton.cdiv(num_rows, rows),)](
                matrix,
                factor,
                None if group is None else group.contiguous(),
                None if amax is None else _as_bits(amax),
                data,
                scale,
                num_rows,
                num_columns,
                HAS_FACTOR=factor is not None,
                HAS_GROUP=group is not None,
                HAS_AMAX=data is not None and amax is not None,
                CAST=data is not None,
                IS_SINGLE=num_columns <= block,
                HARDWARE=self._has_float8,
                ROWS=rows,
                BLOCK=block,
                num_warps=rows * block // 1024,
            )

    def cast_blocks(self, matrix: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
        matrix = _row_major(matrix)
        if block[0] == 1:
            return self._blocks(matrix, matrix.shape[-1], -1, block[1], torch.float32)
        with _on(matrix):
            data = torch.empty(matrix.shape, dtype=torch.uint8, device=matrix.device)
            num_blocks = [cast.num_blocks(size, block[0]) for size in matrix.shape[-2:]]
            scale = matrix.new_empty((*matrix.shape[:-2], *num_blocks), dtype=torch.float32)
            kernels.cast_squares[(scale.numel(),)](
                matrix, data, scale, *matrix.shape[-2:], HARDWARE=self._has_float8, SIZE=block[0], num_warps=8
            )
        return data.view(torch.float8_e4m3fn), scale

    def cast_blocks_turned(self, matrix: Tensor, block: tuple[int, int], multiple: int) -> tuple[Tensor, Tensor]:
        padded = triton.cdiv(matrix.shape[-2], multiple) * multiple
        return self._blocks(_row_major(matrix), padded, -2, block[1], torch.float32, is_turned=True)

    def cast_mx(self, matrix: Tensor, block: tuple[int, int], rounding: str) -> tuple[Tensor, Tensor]:
        along = -1 if block[0] == 1 else -2
        return self._blocks(
            _row_major(matrix),
            matrix.shape[along],
            along,
            max(block),
            torch.float8_e8m0fnu,
            is_ceil=rounding == "rceil",
        )

    def _blocks(
        self,
        matrix: Tensor,
        padded: int,
        along: int,
        size: int,
        scale_dtype: torch.dtype,
        *,
        is_turned: bool = False,
        is_ceil: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """The kernel of blocks along dim ``along`` of a row-major matrix.

        Args:
            padded: Elements to write along the blocks.
            is_turned: Write the transpose of what is asked for.
        """
        across = -3 - along
        outer, num_across = matrix.shape[:-2], matrix.shape[across]
        num_blocks = cast.num_blocks(padded, size)
        written = -1 if is_turned else along  # the dim of the results along which the blocks lie
        tile = _tile(matrix.stride(along), size)
        with _on(matrix):
            is_e8m0 = scale_dtype == torch.float8_e8m0fnu
            data = _empty_like(matrix, (*outer, num_across, padded), written, torch.uint8)
            scale = _empty_like(
                matrix, (*outer, num_across, num_blocks), written, torch.uint8 if is_e8m0 else torch.float32
            )
            if written == -1 and not is_e8m0:
                # As the GEMM wants the scales of its operands: one column after the other.
                scale = torch.empty_like(scale.mT, memory_format=torch.contiguous_format).mT
            tiles = triton.cdiv(num_across, tile[0]) * triton.cdiv(num_blocks, tile[1])
            crossing = -3 - written
            kernels.cast_blocks[(prod(outer) * tiles,)](
                matrix,
                data,
                scale,
                num_across,
                matrix.shape[along],
                padded,
                matrix.stride(across),
                matrix.stride(along),
                data.stride(crossing),
                data.stride(written),
                scale.stride(crossing),
                scale.stride(written),
                matrix.shape[-2] * matrix.shape[-1],
                num_across * padded,
                num_across * num_blocks,
                tiles,
                E8M0=is_e8m0,
                CEIL=is_ceil,
                HARDWARE=self._has_float8,
                ACROSS=tile[0],
                BLOCKS=tile[1],
                SIZE=size,
            )
        return data.view(torch.float8_e4m3fn), scale.view(scale_dtype)

    def cast_nvfp4(self, matrix: Tensor, block: tuple[int, int], amax: Tensor) -> tuple[Tensor, Tensor]:
        matrix = _row_major(matrix)
        along = -1 if block[0] == 1 else -2
        across = -3 - along
        outer, num_across = matrix.shape[:-2], matrix.shape[across]
        num_blocks = cast.num_blocks(matrix.shape[along], 16)
        tile = _tile(matrix.stride(along), 16)
        with _on(matrix):
            packed = _empty_like(matrix, (*outer, num_across, num_blocks * 8), along, torch.uint8)
            scale = _empty_like(matrix, (*outer, num_across, num_blocks), along, torch.uint8)
            tiles = triton.cdiv(num_across, tile[0]) * triton.cdiv(num_blocks, tile[1])
            kernels.cast_nvfp4[(prod(outer) * tiles,)](
                matrix,
                _as_bits(amax),
                packed,
                scale,
                num_across,
                matrix.shape[along],
                matrix.stride(across),
                matrix.stride(along),
                packed.stride(across),
                packed.stride(along),
                scale.stride(across),
                scale.stride(along),
                matrix.shape[-2] * matrix.shape[-1],
                num_across * num_blocks * 8,
                num_across * num_blocks,
                tiles,
                HARDWARE=self._has_float8,
                ACROSS=tile[0],
                BLOCKS=tile[1],
            )
        return packed, scale.view(torch.float8_e4m3fn)

    def dequantize_matrix(self, data: Tensor, amax: Tensor, dtype: torch.dtype) -> Tensor:
        return self._dequantize(data, None, amax, (1, 1), data.shape, dtype)

    def dequantize_blocks(self, data: Tensor, scale: Tensor, block: tuple[int, int], dtype: torch.dtype) -> Tensor:
        return self._dequantize(data, scale, None, block, data.shape, dtype)

    def dequantize_nvfp4(
        self, packed: Tensor, scale: Tensor, amax: Tensor, block: tuple[int, int], shape: torch.Size, dtype: torch.dtype
    ) -> Tensor:
        return self._dequantize(packed, scale, amax, block, shape, dtype)

    def _dequantize(
        self,
        data: Tensor,
        scale: Tensor | None,
        amax: Tensor | None,
        block: tuple[int, int],
        shape: torch.Size,
        dtype: torch.dtype,
    ) -> Tensor:
        kind, packed = "float32", 0
        if amax is not None:
            kind = "amax" if scale is None else "nvfp4"
        elif scale is not None and scale.dtype == torch.float8_e8m0fnu:
            kind = "e8m0"
        if kind == "nvfp4":
            packed = 2 if block[0] == 1 else 1
        num_rows, num_columns = shape[-2:]
        rows, columns = (16, 256) if num_columns > 64 else (64, 64)
        with _on(data):
            data = _row_major(data).view(torch.uint8)
            if scale is not None:
                scale = _row_major(scale)
                scale = scale.view(torch.uint8) if scale.itemsize == 1 else scale
            result = torch.empty(shape, dtype=dtype, device=data.device)
            tiles = triton.cdiv(num_rows, rows) * triton.cdiv(num_columns, columns)
            kernels.dequantize[(prod(shape[:-2]) * tiles,)](
                data,
                scale,
                None if amax is None else _as_bits(amax),
                result,
                num_rows,
                num_columns,
                data.shape[-1],
                0 if scale is None else scale.shape[-1],
                1 if block[1] else 0,
                data.shape[-2] * data.shape[-1],
                0 if scale is None else scale.shape[-2] * scale.shape[-1],
                tiles,
                KIND=kind,
                BLOCK_ROWS=block[0],
                BLOCK_COLUMNS=block[1] or 1,
                PACKED=packed,
                HARDWARE=self._has_float8,
                ROWS=rows,
                COLUMNS=columns,
            )
        return result

    def turned(self, matrix: Tensor, multiple: int = 1) -> Tensor:
        matrix = _row_major(matrix)
        with _on(matrix):
            plain = matrix.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[matrix.itemsize])
            return self._turn(plain, multiple, None, None).view(matrix.dtype)

    def row_major(self, matrix: Tensor) -> Tensor:
        if matrix.is_contiguous() or not matrix.mT.is_contiguous():
            return matrix.contiguous()
        return self.turned(matrix.mT)

    def _turn(self, matrix: Tensor, multiple: int, known: Tensor | None, scale: Tensor | None) -> Tensor:
        """The kernel of transposes; with ``known`` magnitudes it casts to e4m3."""
        num_rows, num_columns = matrix.shape[-2:]
        padded = triton.cdiv(num_rows, multiple) * multiple
        dtype = torch.uint8 if known is not None else matrix.dtype
        data = torch.empty((*matrix.shape[:-2], num_columns, padded), dtype=dtype, device=matrix.device)
        # Lines of 128 bytes on both sides.
        rows, columns = 128 // dtype.itemsize, 128 // matrix.itemsize
        tiles = triton.cdiv(padded, rows) * triton.cdiv(num_columns, columns)
        num_matrices = prod(matrix.shape[:-2])
        kernels.turn[(num_matrices * tiles,)](
            matrix,
            known,
            data,
            scale,
            num_rows,
            num_columns,
            padded,
            tiles,
            NUM=1 if known is None else known.numel() // num_matrices,
            CAST=known is not None,
            E5M2=False,
            HARDWARE=self._has_float8,
            ROWS=rows,
            COLUMNS=columns,
            num_warps=8 if rows * columns > 4096 else 4,
        )
        return data

    @staticmethod
    def _parts(matrix: Tensor) -> Tensor:
        """Magnitudes of parts of each matrix, as integers; their number is a power of two."""
        num_matrices, numel = prod(matrix.shape[:-2]), matrix.shape[-2] * matrix.shape[-1]
        num_parts = 16 if numel <= 64 * _BLOCK else _PARTS
        parts = torch.empty(num_matrices * num_parts, dtype=torch.int32, device=matrix.device)
        # Nothing but loads: as many at a time as it takes to fill the memory's pipeline.
        kernels.partial_amax[(parts.numel(),)](matrix, parts, numel, NUM=num_parts, BLOCK=2 * _BLOCK, num_warps=8)
        return parts


def _row_major(matrix: Tensor) -> Tensor:
    return matrix.contiguous()


def _as_bits(amax: Tensor) -> Tensor:
    return amax.contiguous().view(torch.int32)


def _empty_like(matrix: Tensor, shape: tuple[int, ...], along: int, dtype: torch.dtype) -> Tensor:
    """An empty result whose last dim is ``along`` the blocks; the last two swapped if they lie along dim -2."""
    shape = shape if along == -1 else (*shape[:-2], shape[-1], shape[-2])
    return torch.empty(shape, dtype=dtype, device=matrix.device)


def _tile(stride: int, size: int) -> tuple[int, int]:
    """Lines and blocks of a tile of 4096 or 8192 elements, with 128 of them in a row of memory or 64."""
    if stride == 1:
        blocks = max(128 // size, 1)
        return 4096 // (blocks * size), blocks
    blocks = max(64 // size, 1)
    return 64, blocks


def _on(matrix: Tensor) -> AbstractContextManager[Any]:
    """Where kernels of ``matrix`` run: on its device, and not seen by checkpoint policies, which may skip ops that make
    results but not the kernels that fill them."""
    unseen = compat.unseen_by_checkpoint_policies()
    if not matrix.is_cuda or matrix.device.index == torch.cuda.current_device():
        return unseen
    stack = ExitStack()
    stack.enter_context(torch.cuda.device(matrix.device))
    stack.enter_context(unseen)
    return stack
