"""The arithmetic of every cast, in plain torch: any faster path must equal it bit for bit.

A cast reads the weight in float32, divides by a scale in float32 and rounds to nearest, ties to
even. Values beyond the largest finite value saturate to it. A value is ``element * scale``.

- *Zero*: a block of zeros gets the smallest scale and elements of zero; signs of zeros are kept.
- *NaN and Inf* make their scale NaN, hence all its values: diverged weights must not come back as
  plausible numbers.
- *Denormals* are exact. Scales are so large that dividing by one stays in the range of normal
  float32 numbers: devices that flush denormals agree for every normal weight.

Sources: OCP OFP8 1.0 for e4m3 and e5m2 in saturating mode; OCP Microscaling Formats (MX) 1.0,
section 6.3, for the power-of-two scale (``floor``); arXiv 2506.08027 for rounding it up
(``rceil``); NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149); DeepSeek-V3
(arXiv 2412.19437), section 3.3, for blocks of 128 x 128.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from .planes import Quantized
from .random_casts import random_bits, rotate, to_e2m1_stochastic

E4M3_MAX = 448.0
E4M3_MIN = 2.0**-9  # the smallest, a denormal
E5M2_MAX = 57344.0
E2M1_MAX = 6.0
MX_BLOCK = 32  # elements of a row that share a scale
SMALLEST_SCALE = 2.0**-126  # the smallest normal float32
# A block scale of nvfp4 may be as small as E4M3_MIN: their product is still normal.
SMALLEST_TENSOR_SCALE = SMALLEST_SCALE / E4M3_MIN
WIDENS = (torch.float32, torch.bfloat16, torch.float16)  # dtypes that widen to float32
_E8M0_NAN = 0xFF
_NAN = float("nan")


def wide(weight: Tensor) -> Tensor:
    """``weight`` in float32; TypeError if its dtype does not widen to it."""
    if weight.dtype not in WIDENS:
        raise TypeError(
            "Quantization expects a weight in float32, bfloat16 or float16, but got "
            f"{weight.dtype} of shape {tuple(weight.shape)}. Convert the weight first."
        )
    return weight.to(torch.float32)


def largest_magnitude(weight: Tensor, dims: tuple[int, ...]) -> Tensor:
    """float32 maximum over ``dims``, which are negative and stay with size 1; 0 of nothing, NaN if
    there is a NaN."""
    values = wide(weight).abs()
    if values.numel() == 0:  # amax() of nothing raises
        shape = list(values.shape)
        for dim in dims:
            shape[dim] = 1
        return values.new_zeros(shape)
    return values.amax(dims, keepdim=True)


def block_amax(weight: Tensor, block: tuple[int, int]) -> Tensor:
    """Largest magnitude of each block of matrices; float32 of shape
    ``(*, row blocks, column blocks)``."""
    padded = pad_to_blocks(wide(weight), block)
    # Of blocks.
    rows, columns = (size // b for size, b in zip(padded.shape[-2:], block, strict=True))
    return padded.view(*padded.shape[:-2], rows, block[0], columns, block[1]).abs().amax((-3, -1))


def pad_to_blocks(matrix: Tensor, block: tuple[int, int]) -> Tensor:
    """Matrices with zeros at their ends up to whole blocks; ``matrix`` itself if there is nothing
    to add."""
    missing = [-size % b for size, b in zip(matrix.shape[-2:], block, strict=True)]
    if not any(missing):
        return matrix.contiguous()
    return F.pad(matrix, (0, missing[1], 0, missing[0]))


def spread(scale: Tensor, block: tuple[int, int], shape: torch.Size) -> Tensor:
    """A scale for each element of matrices of ``shape`` from one for each block. By index: with
    ``repeat_interleave``, torch 2.13's inductor leaves out the short block at the end when it fuses
    a cast on CPU."""
    for dim, b in zip((-2, -1), block, strict=True):
        if b > 1:
            index = torch.arange(shape[dim], device=scale.device) // b
            scale = scale.index_select(dim, index)
    return scale


def float8_scale(largest: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """Scale that maps ``largest`` (float32 magnitudes) to the largest value of a float8 dtype, at
    least 2^-126."""
    return _scale(largest, E5M2_MAX if dtype == torch.float8_e5m2 else E4M3_MAX, SMALLEST_SCALE)


def _scale(largest: Tensor, element_max: float, smallest: float) -> Tensor:
    scale = _divided(largest, element_max).clamp(min=smallest)
    return torch.where(largest.isfinite(), scale, _NAN)


def _divided(values: Tensor, divisor: float) -> Tensor:
    """``values / divisor``, rounded once. By a tensor: to divide by a number, CUDA multiplies with
    its reciprocal."""
    return values / torch.full((), divisor, dtype=values.dtype, device=values.device)


def to_float8(values: Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> Tensor:
    """float32 to float8: nearest, ties to even, saturating; every NaN becomes the positive one."""
    largest = E4M3_MAX
    if dtype == torch.float8_e5m2:
        largest = E5M2_MAX
    # torch's own cast makes NaN or infinity of what rounds to more than the largest.
    saturated = values.clamp(-largest, largest)
    return torch.where(saturated.isnan(), _NAN, saturated).to(dtype)


def e8m0_scale(largest: Tensor, rounding: str) -> Tensor:
    """Power-of-two scales of MX blocks of e4m3 elements, float8_e8m0fnu, at least 2^-127; NaN if
    ``largest`` is not finite. ``"floor"``, as in the MX specification: ``2**(k - 8)`` for
    ``largest = m * 2**k``, ``1 <= m < 2``, so that elements beyond 448 saturate. ``"rceil"``: the
    smallest power of two with ``largest / scale <= 448``."""
    bits = largest.contiguous().view(torch.int32)
    # Biased by 127, as e8m0 is; a denormal counts as 2^-127, far below the clamp.
    exponent = (bits >> 23) - 8
    if rounding == "rceil":
        exponent = exponent + ((bits & 0x7FFFFF) > 0x600000)  # 448 is 1.75 * 2**8
    code = torch.where(largest.isfinite(), exponent.clamp(min=0), _E8M0_NAN)
    return code.to(torch.uint8).view(torch.float8_e8m0fnu)


def e8m0_to_float(scale: Tensor) -> Tensor:
    """float8_e8m0fnu to float32, exact."""
    code = scale.view(torch.uint8).to(torch.int32)
    bits = torch.where(code == 0, 0x00400000, code << 23)  # 2^-127 is denormal
    return torch.where(code == _E8M0_NAN, _NAN, bits.view(torch.float32))


def e8m0_reciprocal(scale: Tensor) -> Tensor:
    """``1 / scale`` in float32, exact: a multiplication by it is the division. Codes above 253 do
    not occur."""
    code = scale.view(torch.uint8).to(torch.int32)
    return torch.where(code == _E8M0_NAN, _NAN, ((254 - code) << 23).view(torch.float32))


def nvfp4_tensor_scale(largest: Tensor) -> Tensor:
    """The float32 scale of a whole weight: maps ``largest`` to 448 * 6, at least 2^-117."""
    return _scale(largest, E4M3_MAX * E2M1_MAX, SMALLEST_TENSOR_SCALE)


def nvfp4_block_scale(largest: Tensor, tensor_scale: Tensor) -> Tensor:
    """e4m3 scales of blocks, relative to that of the weight: ``largest / 6 / tensor_scale``, at
    least 2^-9."""
    return to_float8((_divided(largest, E2M1_MAX) / tensor_scale).clamp(min=E4M3_MIN))


def to_e2m1(values: Tensor) -> Tensor:
    """float32 to the 4-bit codes of e2m1 (sign, then 0, .5, 1, 1.5, 2, 3, 4, 6) in uint8: nearest,
    ties to even, saturating at 6. e2m1 has no NaN: a NaN becomes 0, and its scale is NaN."""
    magnitude = values.abs()
    code = (magnitude > 0.25).to(torch.uint8)
    # A tie goes to the code that is even: down at .25, 1.25, 2.5 and 5, up at .75, 1.75 and 3.5.
    for bound in (1.25, 2.5, 5.0):
        # Not in place, which a checkpoint that saves everything does not allow.
        code = code + (magnitude > bound)
    for bound in (0.75, 1.75, 3.5):
        code = code + (magnitude >= bound)
    code = code | (values.signbit().to(torch.uint8) << 3)
    return torch.where(values.isnan(), 0, code).to(torch.uint8)


def from_e2m1(codes: Tensor) -> Tensor:
    """4-bit codes in uint8 to float32. Without a table, which a CUDA graph could not copy from the
    host."""
    wide_codes = codes.to(torch.int32)
    exponent = (wide_codes >> 1) & 3
    mantissa = wide_codes & 1
    normal = (((exponent + 126) << 23) | (mantissa << 22)).view(torch.float32)
    magnitude = torch.where(exponent == 0, mantissa * 0.5, normal)
    return torch.where((wide_codes & 8) == 8, -magnitude, magnitude)


def pack_nibbles(codes: Tensor, dim: int) -> Tensor:
    """Two codes to a byte along ``dim``, of even size: the first in the low half."""
    dim %= codes.ndim
    pairs: Tensor = codes.unflatten(dim, (-1, 2))
    return pairs.select(dim + 1, 0) | (pairs.select(dim + 1, 1) << 4)


def unpack_nibbles(packed: Tensor, dim: int) -> Tensor:
    """The inverse of :func:`pack_nibbles`."""
    dim %= packed.ndim
    return torch.stack((packed & 0xF, packed >> 4), dim + 1).flatten(dim, dim + 1)


def dim_along(block: tuple[int, int]) -> int:
    """The dim along which blocks ``(1, size)`` or ``(size, 1)`` lie."""
    if block[0] == 1:
        return -1
    return -2


class Casts:
    """The reference. Matrices have shape ``(*, rows, columns)``; a cast returns elements and
    scales. Magnitudes and scales are float32 if nothing else is said."""

    def amax(self, weight: Tensor, dims: tuple[int, ...]) -> Tensor:
        """Largest magnitude over ``dims``: ``(-1,)`` or ``(-2, -1)``."""
        return largest_magnitude(weight, dims)

    def magnitudes(self, matrix: Tensor) -> Tensor:
        """Of each matrix, for the ``amax`` of its casts: the largest magnitude, or those of parts."""
        return largest_magnitude(matrix, (-2, -1))

    def e4m3_scale(self, largest: Tensor) -> Tensor:
        return float8_scale(largest)

    def cast_matrix(
        self, matrix: Tensor, dtype: torch.dtype = torch.float8_e4m3fn, amax: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """A scale for each matrix, shape ``(*, 1, 1)``; so is ``amax``, unless it is that of
        :meth:`magnitudes`. Default: the matrix's own."""
        if amax is None:
            amax = largest_magnitude(matrix, (-2, -1))
        scale = float8_scale(amax, dtype)
        return to_float8(wide(matrix) / scale, dtype), scale

    def round_together(
        self,
        matrices: Sequence[Tensor],
        amaxes: Sequence[Tensor],
        outputs: Sequence[Tensor],
        mx_rounding: str | None = None,
    ) -> None:
        """e4m3 and back: fills each output, contiguous, with what :meth:`dequantize` makes of the
        cast of its matrix. Scales are those of ``amaxes``, of shape ``(*, 1, 1)`` or
        ``(*, rows, 1)``; or with ``mx_rounding`` powers of two for each 32 elements of a row, whose
        number is a multiple of 32."""
        for index, (matrix, output) in enumerate(zip(matrices, outputs, strict=True)):
            if mx_rounding is None:
                block = (1, 0)  # of whole rows
                scale = float8_scale(amaxes[index])
                planes = (to_float8(wide(matrix) / scale), scale)
            else:
                block = (1, MX_BLOCK)
                planes = self.cast_mx(matrix, block, mx_rounding)
            output.copy_(self.dequantize(Quantized(planes, None), block, matrix.shape, output.dtype))

    def cast_matrix_turned(self, matrix: Tensor, multiple: int, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """:meth:`turned` of the e4m3 elements, and the scale; ``amax`` as for :meth:`cast_matrix`."""
        data, scale = self.cast_matrix(matrix, amax=amax)
        return self.turned(data, multiple), scale

    def cast_rows(
        self, matrix: Tensor, *, factor: Tensor | None = None, group: Tensor | None = None, amax: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """e4m3 with a scale for each row, shape ``(*, rows, 1)``; so is ``amax``, by default the
        matrix's own. Columns are multiplied by ``factor``, shape ``(columns,)``, first; with
        ``group``, shape ``(rows,)``, each row by its group's row of ``factor``, shape
        ``(groups, columns)``."""
        values = wide(matrix)
        if factor is not None and group is not None:
            factor = factor[group]
        if factor is not None:
            values = values * factor
        if amax is None:
            amax = largest_magnitude(values, (-1,))
        scale = float8_scale(amax)
        return to_float8(values / scale), scale

    def cast_blocks(self, matrix: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """e4m3 with a scale for each block: of columns ``(1, size)``, or square."""
        scale = float8_scale(block_amax(matrix, block))
        return to_float8(wide(matrix) / spread(scale, block, matrix.shape)), scale

    def cast_blocks_turned(self, matrix: Tensor, block: tuple[int, int], multiple: int) -> tuple[Tensor, Tensor]:
        """:meth:`cast_blocks` of the transpose, whose columns are filled up with zeros to a multiple."""
        return self.cast_blocks(self.turned(matrix, multiple), block)

    def cast_mx(self, matrix: Tensor, block: tuple[int, int], rounding: str) -> tuple[Tensor, Tensor]:
        """e4m3 with an e8m0 scale for each block ``(1, size)`` or ``(size, 1)``."""
        scale = e8m0_scale(block_amax(matrix, block), rounding)
        factor = spread(e8m0_reciprocal(scale), block, matrix.shape)  # exact, as a power of two
        return to_float8(wide(matrix) * factor), scale

    def nvfp4_amax(self, matrix: Tensor, block: tuple[int, int], signs: int) -> Tensor:
        """Largest magnitude of each matrix after the random Hadamard transform of each ``block``,
        shape (*, 1, 1)."""
        padded = pad_to_blocks(wide(matrix), block)
        return largest_magnitude(rotate(padded, dim_along(block), signs), (-2, -1))

    def cast_nvfp4(
        self,
        matrix: Tensor,
        block: tuple[int, int],
        amax: Tensor,
        *,
        signs: int | None = None,
        seed: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """Pairs of e2m1 with an e4m3 scale for each block ``(1, 16)`` or ``(16, 1)``; ``amax`` has
        shape (*, 1, 1). With ``signs`` each block is transformed first (``amax`` is
        :meth:`nvfp4_amax`), with a ``seed``, an int64 tensor with one element, rounding is
        stochastic: see ``random_casts``."""
        dim = dim_along(block)
        padded = pad_to_blocks(wide(matrix), block)
        if signs is not None:
            padded = rotate(padded, dim, signs)
        tensor_scale = nvfp4_tensor_scale(amax)
        scale = nvfp4_block_scale(block_amax(padded, block), tensor_scale)
        values = padded / spread(scale.to(torch.float32) * tensor_scale, block, padded.shape)
        if seed is None:
            codes = to_e2m1(values)
        else:
            codes = to_e2m1_stochastic(values, random_bits(seed, values.shape, dim))
        return pack_nibbles(codes, dim), scale

    def dequantize(self, quantized: Quantized, block: tuple[int, int], shape: torch.Size, dtype: torch.dtype) -> Tensor:
        """The values of a weight of ``shape``: of e4m3 elements alone, whose scale follows from
        ``amax``; of e4m3 elements and scales; or of pairs of e2m1 (uint8), scales and ``amax``.
        ``block``: rows and columns that share a scale, ``(1, 0)`` for whole rows."""
        data, *scales = quantized.planes
        amax = quantized.amax
        if not scales:
            assert amax is not None
            return (data.to(torch.float32) * float8_scale(amax)).to(dtype)
        (scale,) = scales
        if data.dtype != torch.uint8:
            if scale.dtype == torch.float8_e8m0fnu:
                scale = e8m0_to_float(scale)
            return (data.to(torch.float32) * spread(scale, block, data.shape)).to(dtype)
        assert amax is not None
        elements = from_e2m1(unpack_nibbles(data, dim_along(block)))
        factor = spread(scale.to(torch.float32) * nvfp4_tensor_scale(amax), block, elements.shape)
        return (elements * factor)[..., : shape[-2], : shape[-1]].to(dtype)

    def turned(self, matrix: Tensor, multiple: int = 1) -> Tensor:
        """The transpose, row-major, its columns filled up with zeros to a multiple."""
        dtype = matrix.dtype
        missing = -matrix.shape[-2] % multiple
        if dtype.itemsize == 1:
            matrix = matrix.view(torch.uint8)  # compilers know how to move bytes, but not float8
        turned = matrix.mT
        if missing:
            turned = F.pad(turned, (0, missing))
        return turned.contiguous().view(dtype)

    def row_major(self, matrix: Tensor) -> Tensor:
        """``matrix`` itself or a contiguous copy."""
        return matrix.contiguous()
