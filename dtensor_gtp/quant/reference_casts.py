"""The casts of each recipe in plain torch operations."""

from __future__ import annotations

import torch
from torch import Tensor

from . import cast
from .planes import Quantized


class Casts:
    """The reference. Matrices have shape ``(*, rows, columns)``; magnitudes and scales are float32 if nothing else is
    said. A cast returns elements and scales."""

    def amax(self, weight: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Largest magnitude over ``dims``: ``(-1,)`` or ``(-2, -1)``."""
        return cast.amax(weight, dims)

    def e4m3_scale(self, largest: Tensor) -> Tensor:
        return cast.float8_scale(largest)

    def cast_matrix(
        self, matrix: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, amax: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """A scale of shape ``(*, 1, 1)`` for each matrix.

        Args:
            dtype: float8_e4m3fn or float8_e5m2.
            amax: Largest magnitude, shape ``(*, 1, 1)``; by default the matrix's own.
        """
        scale = cast.float8_scale(cast.amax(matrix, (-2, -1)) if amax is None else amax, dtype)
        return cast.to_float8(cast.wide(matrix) / scale, dtype), scale

    def cast_matrix_turned(self, matrix: Tensor, multiple: int) -> tuple[Tensor, Tensor]:
        """:meth:`turned` of the e4m3 elements, and the scale."""
        data, scale = self.cast_matrix(matrix)
        return self.turned(data, multiple), scale

    def cast_rows(
        self, matrix: Tensor, *, factor: Tensor | None = None, group: Tensor | None = None, amax: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """e4m3 with a scale of shape ``(*, rows, 1)`` for each row.

        Args:
            factor: What each column is multiplied by first, in float32; shape ``(columns,)``.
            group: Which factors each row takes, shape ``(rows,)``; then ``factor`` has shape ``(groups, columns)``.
            amax: Largest magnitudes, shape ``(*, rows, 1)``; by default the matrix's own.
        """
        values = cast.wide(matrix)
        if factor is not None:
            values = values * (factor if group is None else factor[group])
        scale = cast.float8_scale(cast.amax(values, (-1,)) if amax is None else amax)
        return cast.to_float8(values / scale), scale

    def cast_blocks(self, matrix: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """e4m3 with a scale for each block: of columns ``(1, size)``, or square."""
        scale = cast.float8_scale(cast.block_amax(matrix, block))
        return cast.to_float8(cast.wide(matrix) / cast.spread(scale, block, matrix.shape)), scale

    def cast_blocks_turned(self, matrix: Tensor, block: tuple[int, int], multiple: int) -> tuple[Tensor, Tensor]:
        """:meth:`cast_blocks` of the transpose, whose columns are filled up with zeros to a multiple."""
        return self.cast_blocks(self.turned(matrix, multiple), block)

    def cast_mx(self, matrix: Tensor, block: tuple[int, int], rounding: str) -> tuple[Tensor, Tensor]:
        """e4m3 with an e8m0 scale for each block ``(1, size)`` or ``(size, 1)``."""
        scale = cast.e8m0_scale(cast.block_amax(matrix, block), rounding)
        reciprocal = cast.spread(cast.e8m0_reciprocal(scale), block, matrix.shape)
        return cast.to_float8(cast.wide(matrix) * reciprocal), scale

    def cast_nvfp4(self, matrix: Tensor, block: tuple[int, int], amax: Tensor) -> tuple[Tensor, Tensor]:
        """Pairs of e2m1 with an e4m3 scale for each block ``(1, 16)`` or ``(16, 1)``.

        Args:
            amax: Largest magnitude, shape ``(*, 1, 1)``.
        """
        tensor_scale = cast.nvfp4_tensor_scale(amax)
        scale = cast.nvfp4_block_scale(cast.block_amax(matrix, block), tensor_scale)
        padded = cast.pad_to_blocks(cast.wide(matrix), block)
        spread = cast.spread(scale.to(torch.float32) * tensor_scale, block, padded.shape)
        return cast.pack_nibbles(cast.to_e2m1(padded / spread), -1 if block[0] == 1 else -2), scale

    def dequantize(self, quantized: Quantized, block: tuple[int, int], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The values of a cast, in ``dtype``.

        Args:
            quantized: e4m3 elements alone, whose scale follows from ``amax``, as by :meth:`cast_matrix`; e4m3 elements
                and scales; or pairs of e2m1 (uint8), scales and ``amax``, as by :meth:`cast_nvfp4`.
            block: Rows and columns that share a scale; ``(1, 0)`` for whole rows.
            shape: Of the weight.
        """
        data, *scales = quantized.planes
        amax = quantized.amax
        if not scales:
            assert amax is not None
            return (data.to(torch.float32) * cast.float8_scale(amax)).to(dtype)
        (scale,) = scales
        if data.dtype != torch.uint8:
            wide = cast.e8m0_to_float(scale) if scale.dtype == torch.float8_e8m0fnu else scale
            return (data.to(torch.float32) * cast.spread(wide, block, data.shape)).to(dtype)
        assert amax is not None
        elements = cast.from_e2m1(cast.unpack_nibbles(data, -1 if block[0] == 1 else -2))
        spread = cast.spread(scale.to(torch.float32) * cast.nvfp4_tensor_scale(amax), block, elements.shape)
        return (elements * spread)[..., : shape[-2], : shape[-1]].to(dtype)

    def turned(self, matrix: Tensor, multiple: int = 1) -> Tensor:
        """The transpose, row-major, its columns filled up with zeros to a multiple."""
        # Compilers know how to move bytes, but not float8.
        dtype, plain = matrix.dtype, matrix.view(torch.uint8) if matrix.dtype.itemsize == 1 else matrix
        missing = -matrix.shape[-2] % multiple
        turned = torch.nn.functional.pad(plain.mT, (0, missing)) if missing else plain.mT
        return turned.contiguous().view(dtype)

    def row_major(self, matrix: Tensor) -> Tensor:
        """``matrix`` itself or a contiguous copy."""
        return matrix.contiguous()
