"""The casts by Triton's kernels: which kernel, with which tiles."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import accumulate, chain
from math import prod
from typing import Any

import torch
import triton
from torch import Tensor

from .. import _torch_compat as compat
from . import triton_kernels as kernels
from . import triton_nvfp4
from .cast import MX_BLOCK, Casts, dim_along
from .planes import Quantized

_BLOCK = 4096  # elements of a tile of flat kernels
_PARTS = 512  # in which the maximum of a large matrix is found
_PROGRAMS = 2048  # that share a matrix in a flat cast: a few for each processor of a large GPU
_TOGETHER = 4  # tensors that one launch rounds
_LONGEST_ROW = 16384  # that stays in registers


class TritonCasts(Casts):
    """The casts on CUDA, outside of compilers. Never given matrices without elements."""

    def __init__(self, has_float8: bool) -> None:
        self._has_float8 = has_float8  # the GPU converts to float8 itself

    def amax(self, weight: Tensor, dims: tuple[int, ...]) -> Tensor:
        weight = weight.contiguous()
        with _on(weight):
            if dims == (-1,):
                return self._rows(weight, None, None, None, None)
            parts = _partial_amax(weight)
            amax = weight.new_empty((*weight.shape[:-2], 1, 1), dtype=torch.float32)
            num_matrices = amax.numel()
            kernels.finish_amax[(num_matrices,)](parts, amax.view(torch.int32), NUM=parts.numel() // num_matrices)
        return amax

    def magnitudes(self, matrix: Tensor) -> Tensor:
        with _on(matrix):
            return _partial_amax(matrix.contiguous()).view(torch.float32)

    def e4m3_scale(self, largest: Tensor) -> Tensor:
        with _on(largest):
            scale = torch.empty_like(largest, memory_format=torch.contiguous_format)
            num = scale.numel()
            kernels.scales_of[(triton.cdiv(num, 128),)](_as_bits(largest), scale, num, BLOCK=128)
        return scale

    def cast_matrix(
        self, matrix: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, amax: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        matrix = matrix.contiguous()
        with _on(matrix):
            known = _known(matrix, amax)
            data = torch.empty(matrix.shape, dtype=torch.uint8, device=matrix.device)
            scale = matrix.new_empty((*matrix.shape[:-2], 1, 1), dtype=torch.float32)
            num_matrices = scale.numel()
            numel = matrix.shape[-2] * matrix.shape[-1]
            programs = min(triton.cdiv(numel, _BLOCK), _PROGRAMS)
            num = known.numel() // num_matrices
            is_e5m2 = dtype == torch.float8_e5m2
            kernels.cast_matrix[(num_matrices * programs,)](
                matrix, known, data, scale, numel, programs, num, E5M2=is_e5m2, HARDWARE=self._has_float8, BLOCK=_BLOCK
            )
        return data.view(dtype), scale

    def cast_matrix_turned(self, matrix: Tensor, multiple: int, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
        matrix = matrix.contiguous()
        with _on(matrix):
            scale = matrix.new_empty((*matrix.shape[:-2], 1, 1), dtype=torch.float32)
            return self._turn(matrix, multiple, _known(matrix, amax), scale).view(torch.float8_e4m3fn), scale

    def round_together(
        self,
        matrices: Sequence[Tensor],
        amaxes: Sequence[Tensor],
        outputs: Sequence[Tensor],
        mx_rounding: str | None = None,
    ) -> None:
        matrices = [matrix.contiguous() for matrix in matrices]
        with _on(matrices[0]):
            for at in range(0, len(matrices), _TOGETHER):
                four = slice(at, at + _TOGETHER)
                self._round_four(matrices[four], [*outputs[four]], amaxes[four], mx_rounding)

    def _round_four(
        self, inputs: list[Tensor], outputs: list[Tensor], amaxes: Sequence[Tensor], mx_rounding: str | None
    ) -> None:
        """One launch. Where there are fewer than four, the first stands for those that are missing,
        without a program."""
        missing = _TOGETHER - len(inputs)
        numels = [tensor.numel() for tensor in inputs]
        ends = [*accumulate(triton.cdiv(numel, _BLOCK) for numel in numels)]
        firsts = (ends + missing * ends[-1:])[: _TOGETHER - 1]
        size = 0
        if mx_rounding is None:
            largest = [_as_bits(amax) for amax in amaxes]
            lines = [numel // amax.numel() for numel, amax in zip(numels, amaxes, strict=True)]
        else:
            size = MX_BLOCK
            largest = inputs  # the kernel does not read them
            lines = numels
        columns = [each + missing * each[:1] for each in (inputs, outputs, largest)]
        numbers = [each + missing * each[:1] for each in (numels, lines)]
        kernels.round_together[(ends[-1],)](
            *chain(*columns, *numbers), *firsts, IS_ONE=lines == numels, SIZE=size, CEIL=mx_rounding == "rceil",
            HARDWARE=self._has_float8, BLOCK=_BLOCK,
        )  # fmt: skip

    def cast_rows(
        self, matrix: Tensor, *, factor: Tensor | None = None, group: Tensor | None = None, amax: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        matrix = matrix.contiguous()
        with _on(matrix):
            data = torch.empty(matrix.shape, dtype=torch.uint8, device=matrix.device)
            return data.view(torch.float8_e4m3fn), self._rows(matrix, factor, group, amax, data)

    def _rows(
        self, matrix: Tensor, factor: Tensor | None, group: Tensor | None, amax: Tensor | None, data: Tensor | None
    ) -> Tensor:
        """The kernel of rows: it fills ``data``, and the result is scales. Without ``data`` it is
        magnitudes."""
        num_columns = matrix.shape[-1]
        num_rows = matrix.numel() // num_columns
        block = min(triton.next_power_of_2(num_columns), _LONGEST_ROW)
        rows = max(_BLOCK // block, 1)
        result = matrix.new_empty((*matrix.shape[:-1], 1), dtype=torch.float32)
        if factor is not None:
            factor = factor.contiguous()
        if group is not None:
            group = group.contiguous()
        if amax is not None:
            amax = _as_bits(amax)
        scales = result
        if data is None:
            scales = result.view(torch.int32)
        kernels.cast_rows[(triton.cdiv(num_rows, rows),)](
            matrix, factor, group, amax, data, scales, num_rows, num_columns,
            IS_SINGLE=num_columns <= block, HARDWARE=self._has_float8, ROWS=rows, BLOCK=block,
            num_warps=rows * block // 1024,
        )  # fmt: skip
        return result

    def cast_blocks(self, matrix: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
        matrix = matrix.contiguous()
        if block[0] == 1:
            return self._blocks(matrix, matrix.shape[-1], -1, block[1])
        with _on(matrix):
            data = torch.empty(matrix.shape, dtype=torch.uint8, device=matrix.device)
            num_blocks = [triton.cdiv(size, block[0]) for size in matrix.shape[-2:]]
            scale = matrix.new_empty((*matrix.shape[:-2], *num_blocks), dtype=torch.float32)
            kernels.cast_squares[(scale.numel(),)](
                matrix, data, scale, *matrix.shape[-2:], HARDWARE=self._has_float8, SIZE=block[0], num_warps=8
            )
        return data.view(torch.float8_e4m3fn), scale

    def cast_blocks_turned(self, matrix: Tensor, block: tuple[int, int], multiple: int) -> tuple[Tensor, Tensor]:
        padded = triton.cdiv(matrix.shape[-2], multiple) * multiple
        return self._blocks(matrix.contiguous(), padded, -2, block[1], is_turned=True)

    def cast_mx(self, matrix: Tensor, block: tuple[int, int], rounding: str) -> tuple[Tensor, Tensor]:
        along = dim_along(block)
        return self._blocks(matrix.contiguous(), matrix.shape[along], along, max(block), rounding)

    def _blocks(
        self, matrix: Tensor, padded: int, along: int, size: int, rounding: str | None = None, is_turned: bool = False
    ) -> tuple[Tensor, Tensor]:
        """The kernel of blocks along dim ``along`` of a row-major matrix, or of its transpose
        (``is_turned``). Along the blocks ``padded`` elements are written. Scales are float32, or
        e8m0 if a ``rounding`` is given."""
        num_lines = matrix.shape[-3 - along]
        num_blocks = triton.cdiv(padded, size)
        is_e8m0 = rounding is not None
        written = along  # the dim of the results along which the blocks lie
        if is_turned:
            written = -1
        with _on(matrix):
            data = _empty(matrix, num_lines, padded, written, torch.uint8)
            if is_e8m0:
                scale = _empty(matrix, num_lines, num_blocks, written, torch.uint8)
            else:
                # Of an operand: blocks lie along dim -1, and the GEMM wants one column of scales
                # after the other.
                scale = _empty(matrix, num_lines, num_blocks, -2, torch.float32).mT
            tensors = (matrix, data, scale)
            sizes = (num_lines, matrix.shape[along], padded)
            options = {"E8M0": is_e8m0, "CEIL": rounding == "rceil", "SIZE": size}
            self._launch(kernels.cast_blocks, tensors, sizes, (along, written), size, **options)
        if is_e8m0:
            scale = scale.view(torch.float8_e8m0fnu)
        return data.view(torch.float8_e4m3fn), scale

    def nvfp4_amax(self, matrix: Tensor, block: tuple[int, int], signs: int) -> Tensor:
        matrix = matrix.contiguous()
        along = dim_along(block)
        num_lines = matrix.shape[-3 - along]
        num_along = matrix.shape[along]
        lines, blocks = _tile(matrix.stride(along) == 1, 16)
        num_tiles = triton.cdiv(num_lines, lines) * triton.cdiv(triton.cdiv(num_along, 16), blocks)
        with _on(matrix):
            parts = matrix.new_empty((*matrix.shape[:-2], num_tiles), dtype=torch.int32)
            triton_nvfp4.nvfp4_amax[(parts.numel(),)](
                matrix, parts, signs, num_lines, num_along, matrix.stride(-3 - along), matrix.stride(along),
                matrix.shape[-2] * matrix.shape[-1], num_tiles, ACROSS=lines, BLOCKS=blocks,
            )  # fmt: skip
            return parts.amax(-1)[..., None, None].view(torch.float32)

    def cast_nvfp4(
        self,
        matrix: Tensor,
        block: tuple[int, int],
        amax: Tensor,
        *,
        signs: int | None = None,
        seed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        matrix = matrix.contiguous()
        along = dim_along(block)
        num_lines = matrix.shape[-3 - along]
        num_along = matrix.shape[along]
        num_blocks = triton.cdiv(num_along, 16)
        options: dict[str, Any] = {"signs": signs or 0, "seed_ptr": seed}
        flags = {"ROTATED": signs is not None, "STOCHASTIC": seed is not None}
        with _on(matrix):
            packed = _empty(matrix, num_lines, num_blocks * 8, along, torch.uint8)
            scale = _empty(matrix, num_lines, num_blocks, along, torch.uint8)
            tensors = (matrix, _as_bits(amax), packed, scale)
            sizes = (num_lines, num_along)
            self._launch(triton_nvfp4.cast_nvfp4, tensors, sizes, (along, along), 16, **options, **flags)
        return packed, scale.view(torch.float8_e4m3fn)

    def _launch(
        self, kernel: Any, tensors: Sequence[Tensor], sizes: Sequence[int], dims: Sequence[int], size: int, **flags: Any
    ) -> None:
        """A kernel of blocks of ``size`` elements, which lie along the first of ``dims`` in the
        first tensor, and along the second in the last two: elements and scales."""
        matrix = tensors[0]
        data, scale = tensors[-2:]
        along, written = dims
        lines, blocks = _tile(matrix.stride(along) == 1, size)
        num_tiles = triton.cdiv(sizes[0], lines) * triton.cdiv(scale.shape[written], blocks)
        strides: list[int] = []  # across and along the blocks, and from matrix to matrix
        for tensor, dim in ((matrix, along), (data, written), (scale, written)):
            strides += (tensor.stride(-3 - dim), tensor.stride(dim), tensor.shape[-2] * tensor.shape[-1])
        kernel[(prod(matrix.shape[:-2]) * num_tiles,)](
            *tensors, *sizes, *strides, num_tiles, HARDWARE=self._has_float8, ACROSS=lines, BLOCKS=blocks, **flags
        )

    def dequantize(self, quantized: Quantized, block: tuple[int, int], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        data = quantized.planes[0]
        scale = quantized.planes[1] if len(quantized.planes) == 2 else None
        amax = quantized.amax
        kind = "amax"
        packed = 0
        if scale is not None and data.dtype == torch.uint8:
            kind = "nvfp4"
            packed = 2 if block[0] == 1 else 1  # pairs of columns or of rows share a byte
        elif scale is not None:
            amax = None
            kind = "e8m0" if scale.dtype == torch.float8_e8m0fnu else "float32"
        num_rows, num_columns = shape[-2:]
        rows = 64  # of a tile
        columns = 64
        if num_columns > 64:
            rows = 16
            columns = 256
        with _on(data):
            data = data.contiguous().view(torch.uint8)
            if scale is not None:
                scale = scale.contiguous().view(torch.uint8 if scale.itemsize == 1 else scale.dtype)
            result = torch.empty(shape, dtype=dtype, device=data.device)
            tiles = triton.cdiv(num_rows, rows) * triton.cdiv(num_columns, columns)
            largest = None if amax is None else _as_bits(amax)
            scale_rows = scale_columns = 0
            if scale is not None:
                scale_rows, scale_columns = scale.shape[-2:]
            kernels.dequantize[(prod(shape[:-2]) * tiles,)](
                data, scale, largest, result, num_rows, num_columns, data.shape[-1], scale_columns,
                1 if block[1] else 0, data.shape[-2] * data.shape[-1], scale_rows * scale_columns, tiles,
                KIND=kind, BLOCK_ROWS=block[0], BLOCK_COLUMNS=block[1] or 1, PACKED=packed, HARDWARE=self._has_float8,
                ROWS=rows, COLUMNS=columns,
            )  # fmt: skip
        return result

    def turned(self, matrix: Tensor, multiple: int = 1) -> Tensor:
        matrix = matrix.contiguous()
        with _on(matrix):
            plain = matrix.view({1: torch.uint8, 2: torch.int16, 4: torch.int32}[matrix.itemsize])
            return self._turn(plain, multiple, None, None).view(matrix.dtype)

    def row_major(self, matrix: Tensor) -> Tensor:
        if matrix.is_contiguous() or not matrix.mT.is_contiguous():
            return matrix.contiguous()
        return self.turned(matrix.mT)  # the transpose of the transpose

    def _turn(self, matrix: Tensor, multiple: int, known: Tensor | None, scale: Tensor | None) -> Tensor:
        """The kernel of transposes; with ``known`` magnitudes it casts to e4m3."""
        num_rows, num_columns = matrix.shape[-2:]
        padded = triton.cdiv(num_rows, multiple) * multiple
        num_matrices = prod(matrix.shape[:-2])
        dtype = matrix.dtype
        num = 1  # magnitudes of each matrix
        if known is not None:
            dtype = torch.uint8
            num = known.numel() // num_matrices
        data = torch.empty((*matrix.shape[:-2], num_columns, padded), dtype=dtype, device=matrix.device)
        # Lines of 128 bytes on both sides.
        rows = 128 // dtype.itemsize
        columns = 128 // matrix.itemsize
        tiles = triton.cdiv(padded, rows) * triton.cdiv(num_columns, columns)
        sizes = (num_rows, num_columns, padded, tiles)
        warps = 8 if rows * columns > 4096 else 4
        kernels.turn[(num_matrices * tiles,)](
            matrix, known, data, scale, *sizes, num, self._has_float8, ROWS=rows, COLUMNS=columns, num_warps=warps
        )
        return data


def _tile(is_row: bool, size: int) -> tuple[int, int]:
    """Lines and blocks of a tile of 4096 or 8192 elements, with 128 of them in a row of memory or
    64; ``is_row``: the blocks lie along a row."""
    if is_row:
        blocks = max(128 // size, 1)
        return 4096 // (blocks * size), blocks
    return 64, max(64 // size, 1)


def _partial_amax(matrix: Tensor) -> Tensor:
    """Magnitudes of parts of each matrix, as integers; their number is a power of two."""
    num_matrices = prod(matrix.shape[:-2])
    numel = matrix.shape[-2] * matrix.shape[-1]
    num_parts = 16 if numel <= 64 * _BLOCK else _PARTS
    parts = torch.empty(num_matrices * num_parts, dtype=torch.int32, device=matrix.device)
    # The kernel does little but load: large blocks fill the memory's pipeline.
    kernels.partial_amax[(parts.numel(),)](matrix, parts, numel, NUM=num_parts, BLOCK=2 * _BLOCK, num_warps=8)
    return parts


def _known(matrix: Tensor, amax: Tensor | None) -> Tensor:
    """Magnitudes as integers: those of ``amax``, or of parts of ``matrix``."""
    if amax is None:
        return _partial_amax(matrix)
    return _as_bits(amax)


def _as_bits(amax: Tensor) -> Tensor:
    return amax.contiguous().view(torch.int32)


def _empty(matrix: Tensor, num_lines: int, num_along: int, along: int, dtype: torch.dtype) -> Tensor:
    """For results that lie in lines along dim ``along``."""
    sizes = (num_lines, num_along) if along == -1 else (num_along, num_lines)
    return torch.empty((*matrix.shape[:-2], *sizes), dtype=dtype, device=matrix.device)


def _on(matrix: Tensor) -> AbstractContextManager[Any]:
    """Runs kernels on the device of ``matrix``, unseen by checkpoint policies, which may skip ops
    that make results but not the kernels that fill them."""
    unseen = compat.unseen_by_checkpoint_policies()
    # The usual case needs no device context.
    if not matrix.is_cuda or matrix.device.index == torch.cuda.current_device():
        return unseen
    stack = ExitStack()
    stack.enter_context(torch.cuda.device(matrix.device))
    stack.enter_context(unseen)
    return stack
