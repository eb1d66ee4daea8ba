"""The NVFP4 casts as Triton kernels, see ``triton_kernels``: also rotated, also rounded at random."""

# No `from __future__ import annotations`: Triton reads them.

import triton
import triton.language as tl

from .triton_arithmetic import _from_e4m3, _magnitude, _scale_of, _to_e2m1, _to_e2m1_stochastic, _to_float8


@triton.jit
def _load_pairs(
    x_ptr, pair, line, num_lines, num_along, x_across, x_along, signs,
    ROTATED: tl.constexpr, ACROSS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """First and second values of the pairs of blocks of 16, shape ``(ACROSS, BLOCKS, 8)``;
    ``num_lines`` and ``num_along`` are what is left of the matrix. ``ROTATED``: after the random
    Hadamard transform."""
    x_ptrs = x_ptr + line * x_across + pair * 2 * x_along
    first = tl.load(x_ptrs, mask=(line < num_lines) & (pair * 2 < num_along), other=0.0).to(tl.float32)
    second = tl.load(x_ptrs + x_along, mask=(line < num_lines) & (pair * 2 + 1 < num_along), other=0.0).to(tl.float32)
    if ROTATED:
        flips = (pair * 0 + signs) >> ((pair % 8) * 2)  # the two lowest bits are those of the pair
        first = _negated(first, flips & 1)
        second = _negated(second, (flips >> 1) & 1)
        # The first stage combines the two values of a pair. Later ones stay within first or second values.
        total = first + second
        difference = first - second
        first = _butterflies(total, ACROSS, BLOCKS) * 0.25  # 1 / 4 makes the matrix orthogonal
        second = _butterflies(difference, ACROSS, BLOCKS) * 0.25
    return first, second


@triton.jit
def _negated(x, flip):
    """``-x`` where ``flip`` is 1, else ``x``. By the bit of the sign: Triton's ``-x`` is ``0 - x``,
    which is 0 of 0."""
    return (x.to(tl.int32, bitcast=True) ^ (flip << 31)).to(tl.float32, bitcast=True)


@triton.jit
def _butterflies(x, ACROSS: tl.constexpr, BLOCKS: tl.constexpr):
    """The stages of a Hadamard transform that are left when neighbours are added: those within 8
    values."""
    x = _butterfly(x, 1, ACROSS, BLOCKS)
    x = _butterfly(x, 2, ACROSS, BLOCKS)
    return _butterfly(x, 4, ACROSS, BLOCKS)


@triton.jit
def _butterfly(x, DISTANCE: tl.constexpr, ACROSS: tl.constexpr, BLOCKS: tl.constexpr):
    """Sums and differences of values that are ``DISTANCE`` apart, in their places."""
    # ``tl.split`` and ``tl.join`` take pairs along the last dim.
    pairs = tl.reshape(x, (ACROSS, BLOCKS, 4 // DISTANCE, 2, DISTANCE))
    first, second = tl.split(tl.permute(pairs, (0, 1, 2, 4, 3)))
    both = tl.permute(tl.join(first + second, first - second), (0, 1, 2, 4, 3))
    return tl.reshape(both, (ACROSS, BLOCKS, 8))


@triton.jit
def nvfp4_amax(
    x_ptr, parts_ptr, signs, num_across, num_along, x_across, x_along, x_matrix, num_tiles,
    ACROSS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """The largest magnitude in each tile after the random Hadamard transform, as integers."""
    matrix = (tl.program_id(0) // num_tiles).to(tl.int64)
    tile = tl.program_id(0) % num_tiles
    in_line = tl.cdiv(tl.cdiv(num_along, 16), BLOCKS)
    line0 = ((tile // in_line) * ACROSS).to(tl.int64)
    block0 = ((tile % in_line) * BLOCKS).to(tl.int64)
    x_ptr += matrix * x_matrix + line0 * x_across + block0 * 16 * x_along
    line = tl.arange(0, ACROSS)[:, None, None]
    pair = tl.arange(0, BLOCKS)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    first, second = _load_pairs(
        x_ptr, pair, line, num_across - line0, num_along - block0 * 16, x_across, x_along, signs, True, ACROSS, BLOCKS
    )
    largest = tl.max(tl.maximum(_magnitude(first), _magnitude(second)), 2)
    tl.store(parts_ptr + tl.program_id(0), tl.max(tl.max(largest, 1), 0))


@triton.jit
def cast_nvfp4(
    x_ptr, amax_ptr, packed_ptr, scale_ptr, num_across, num_along,
    x_across, x_along, x_matrix, p_across, p_along, p_matrix, s_across, s_along, s_matrix, num_tiles,
    signs, seed_ptr, ROTATED: tl.constexpr, STOCHASTIC: tl.constexpr,
    HARDWARE: tl.constexpr, ACROSS: tl.constexpr, BLOCKS: tl.constexpr,
):  # fmt: skip
    """Pairs of e2m1 and an e4m3 scale for each 16 elements along one dim; strides as in
    ``cast_blocks``. ``ROTATED`` by ``signs`` first; ``STOCHASTIC`` rounding by the seed, see
    ``random_casts``."""
    matrix = (tl.program_id(0) // num_tiles).to(tl.int64)
    tile = tl.program_id(0) % num_tiles
    num_blocks = tl.cdiv(num_along, 16)
    in_line = tl.cdiv(num_blocks, BLOCKS)
    line0 = ((tile // in_line) * ACROSS).to(tl.int64)
    block0 = ((tile % in_line) * BLOCKS).to(tl.int64)
    x_ptr += matrix * x_matrix + line0 * x_across + block0 * 16 * x_along
    packed_ptr += matrix * p_matrix + line0 * p_across + block0 * 8 * p_along
    scale_ptr += matrix * s_matrix + line0 * s_across + block0 * s_along
    line = tl.arange(0, ACROSS)[:, None, None]
    block = tl.arange(0, BLOCKS)[None, :, None]
    pair = block * 8 + tl.arange(0, 8)[None, None, :]
    first, second = _load_pairs(
        x_ptr, pair, line, num_across - line0, num_along - block0 * 16, x_across, x_along, signs, ROTATED,
        ACROSS, BLOCKS,
    )  # fmt: skip
    tensor_scale = _scale_of(tl.load(amax_ptr + matrix) & 0x7FFFFFFF, 2688.0, 2.0**-117)  # 448 * 6; at least 2^-117
    largest = tl.max(tl.maximum(_magnitude(first), _magnitude(second)), 2, keep_dims=True)
    relative = tl.div_rn(tl.div_rn(largest.to(tl.float32, bitcast=True), 6.0), tensor_scale)
    relative = tl.where(relative == relative, tl.maximum(relative, 2.0**-9), float("nan"))  # ``tl.maximum`` loses a NaN
    code = _to_float8(relative, False, HARDWARE)
    is_block = (line0 + line < num_across) & (block0 + block < num_blocks)
    tl.store(scale_ptr + line * s_across + block * s_along, code, mask=is_block)
    scale = _from_e4m3(code, HARDWARE) * tensor_scale  # of the rounded scale: what readers multiply by
    first = tl.div_rn(first, scale)
    second = tl.div_rn(second, scale)
    if STOCHASTIC:
        # The counters of ``random_bits``: pair, line, matrix, 0; all of one shape.
        zero = (pair + line) * 0
        words = tl.philox(
            tl.load(seed_ptr), zero + block0.to(tl.int32) * 8 + pair, zero + line0.to(tl.int32) + line,
            zero + matrix.to(tl.int32), zero,
        )[0].to(tl.uint32, bitcast=True)  # fmt: skip
        low = (words & 0xFFFF).to(tl.int32)
        high = (words >> 16).to(tl.int32)
        packed = _to_e2m1_stochastic(first, low) | (_to_e2m1_stochastic(second, high) << 4)
    else:
        packed = _to_e2m1(first) | (_to_e2m1(second) << 4)
    # ``pair >= 0`` gives the mask the shape of the pairs.
    tl.store(packed_ptr + line * p_across + pair * p_along, packed.to(tl.uint8), mask=is_block & (pair >= 0))
