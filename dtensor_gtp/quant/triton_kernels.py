"""The casts as Triton kernels: the arithmetic of ``cast``, bit for bit, in one pass over memory.

The bits are equal, because magnitudes are compared as integers, which keeps a NaN; quotients are
rounded as IEEE says; no product is part of a sum that could fuse with it; float8 comes from the
hardware (``HARDWARE``: compute capability 8.9 and later) or from integers. float8 and e8m0 are
passed as uint8: Triton cannot name the types on every GPU. Matrices are row-major, several of them
one after the other. Offsets within a tile are int32, those of tiles int64.
"""

# No `from __future__ import annotations`: Triton reads them.

import triton
import triton.language as tl

from .triton_arithmetic import (
    _INFINITY,
    _divided,
    _e8m0_of,
    _from_e2m1,
    _from_e4m3,
    _from_e8m0,
    _magnitude,
    _reciprocal_of_e8m0,
    _scale_of,
    _to_float8,
)


@triton.jit
def partial_amax(x_ptr, parts_ptr, numel, NUM: tl.constexpr, BLOCK: tl.constexpr):
    """The largest magnitude of each of ``NUM`` parts of each matrix, as integers."""
    program = tl.program_id(0)
    x_ptr += (program // NUM).to(tl.int64) * numel  # a matrix has numel elements
    largest = tl.zeros((BLOCK,), tl.int32)
    # Parts interleave: each program takes every NUM-th block.
    for start in range((program % NUM) * BLOCK, numel, NUM * BLOCK):
        index = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + index, mask=index < numel, other=0.0)  # 0 changes no maximum
        largest = tl.maximum(largest, _magnitude(x))
    tl.store(parts_ptr + program, tl.max(largest, 0))


@triton.jit
def finish_amax(parts_ptr, amax_ptr, NUM: tl.constexpr):
    """The largest of the parts of each matrix."""
    matrix = tl.program_id(0)
    tl.store(amax_ptr + matrix, tl.max(tl.load(parts_ptr + matrix * NUM + tl.arange(0, NUM)), 0))


@triton.jit
def scales_of(amax_ptr, scale_ptr, num, BLOCK: tl.constexpr):
    """e4m3 scales of magnitudes."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    # Without the sign, which a NaN may have.
    largest = tl.load(amax_ptr + index, mask=index < num, other=0) & 0x7FFFFFFF
    tl.store(scale_ptr + index, _scale_of(largest), mask=index < num)


@triton.jit
def cast_matrix(
    x_ptr, amax_ptr, q_ptr, scale_ptr, numel, num_programs,
    NUM: tl.constexpr, E5M2: tl.constexpr, HARDWARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """float8 and the scale of each matrix; ``NUM`` magnitudes of each are given."""
    matrix = tl.program_id(0) // num_programs
    program = tl.program_id(0) % num_programs
    # Each program finds the maximum of the parts again, which needs no launch in between.
    largest = tl.max(tl.load(amax_ptr + matrix * NUM + tl.arange(0, NUM)) & 0x7FFFFFFF, 0)
    scale = _scale_of(largest, 57344.0 if E5M2 else 448.0)
    if program == 0:
        tl.store(scale_ptr + matrix, scale)
    base = matrix.to(tl.int64) * numel
    if largest < _INFINITY:
        for start in range(program * BLOCK, numel, num_programs * BLOCK):
            index = start + tl.arange(0, BLOCK)
            x = tl.load(x_ptr + base + index, mask=index < numel, other=0.0).to(tl.float32)
            code = _to_float8(_divided(x, scale, HARDWARE), E5M2, HARDWARE, False)  # False: there is no NaN
            tl.store(q_ptr + base + index, code, mask=index < numel)
    else:
        for start in range(program * BLOCK, numel, num_programs * BLOCK):
            index = start + tl.arange(0, BLOCK)
            # The scale is NaN, and so is each element.
            tl.store(q_ptr + base + index, tl.full((BLOCK,), 0x7F, tl.uint8), mask=index < numel)


@triton.jit
def round_together(
    x0_ptr, x1_ptr, x2_ptr, x3_ptr, out0_ptr, out1_ptr, out2_ptr, out3_ptr, amax0_ptr, amax1_ptr, amax2_ptr, amax3_ptr,
    numel0, numel1, numel2, numel3, line0, line1, line2, line3, first1, first2, first3,
    IS_ONE: tl.constexpr, SIZE: tl.constexpr, CEIL: tl.constexpr, HARDWARE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Up to four tensors in e4m3 and back, rounded once more to the dtype of the output.

    A magnitude of ``amax{i}_ptr`` gives the scale of ``line{i}`` elements (``IS_ONE``: of all).
    With a ``SIZE`` each ``SIZE`` elements have a power of two of their own instead. Tensor i begins
    at program ``first{i}``.
    """
    program = tl.program_id(0)
    x_ptr, out_ptr, amax_ptr, numel, line, first = x0_ptr, out0_ptr, amax0_ptr, numel0, line0, 0
    # The last one that begins at or before this program.
    if program >= first1:
        x_ptr, out_ptr, amax_ptr, numel, line, first = x1_ptr, out1_ptr, amax1_ptr, numel1, line1, first1
    if program >= first2:
        x_ptr, out_ptr, amax_ptr, numel, line, first = x2_ptr, out2_ptr, amax2_ptr, numel2, line2, first2
    if program >= first3:
        x_ptr, out_ptr, amax_ptr, numel, line, first = x3_ptr, out3_ptr, amax3_ptr, numel3, line3, first3
    index = (program - first) * BLOCK + tl.arange(0, BLOCK)
    is_inside = index < numel
    x = tl.load(x_ptr + index, mask=is_inside, other=0.0).to(tl.float32)
    # BLOCK is a multiple of SIZE, so the elements that share a scale belong to one program.
    if SIZE > 0:
        blocks = tl.reshape(x, (BLOCK // SIZE, SIZE))
        exponent = _e8m0_of(tl.max(_magnitude(blocks), 1, keep_dims=True), CEIL)
        code = _to_float8(blocks * _reciprocal_of_e8m0(exponent), False, HARDWARE)
        result = tl.reshape(_from_e4m3(code, HARDWARE) * _from_e8m0(exponent), (BLOCK,))
    else:
        if IS_ONE:
            largest = tl.load(amax_ptr)  # one scale for all
        else:
            largest = tl.load(amax_ptr + index // line, mask=is_inside, other=0)  # one for each line
        scale = _scale_of(largest & 0x7FFFFFFF)
        code = _to_float8(_divided(x, scale, HARDWARE), False, HARDWARE)
        result = _from_e4m3(code, HARDWARE) * scale
    tl.store(out_ptr + index, result.to(out_ptr.dtype.element_ty), mask=is_inside)


@triton.jit
def turn(
    x_ptr, amax_ptr, q_ptr, scale_ptr, num_rows, num_columns, padded_rows, num_tiles,
    NUM: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The transpose of each matrix, its columns filled up with zeros; given magnitudes, it is cast
    to e4m3."""
    matrix = tl.program_id(0) // num_tiles
    tile = tl.program_id(0) % num_tiles
    in_row = tl.cdiv(num_columns, COLUMNS)
    row0 = (tile // in_row) * ROWS
    column0 = (tile % in_row) * COLUMNS
    row = row0 + tl.arange(0, ROWS)[:, None]
    column = column0 + tl.arange(0, COLUMNS)[None, :]
    x_ptr += (matrix.to(tl.int64) * num_rows + row0) * num_columns
    is_inside = (row < num_rows) & (column < num_columns)
    x = tl.load(x_ptr + (row - row0) * num_columns + column, mask=is_inside, other=0)
    if amax_ptr is not None:  # else elements are moved as they are
        largest = tl.max(tl.load(amax_ptr + matrix * NUM + tl.arange(0, NUM)) & 0x7FFFFFFF, 0)
        scale = _scale_of(largest)
        if tile == 0:
            tl.store(scale_ptr + matrix, scale)
        code = _to_float8(_divided(x.to(tl.float32), scale, HARDWARE), False, HARDWARE)
        x = tl.where(is_inside, code, 0).to(tl.uint8)  # padding is 0, also if the scale is NaN
    q_ptr += (matrix.to(tl.int64) * num_columns + column0) * padded_rows
    tl.store(q_ptr + (column - column0) * padded_rows + row, x, mask=(row < padded_rows) & (column < num_columns))


@triton.jit
def _row_values(x_ptr, factor_ptr, offset, group, column, is_row, num_columns):
    is_inside = is_row & (column < num_columns)
    value = tl.load(x_ptr + offset + column, mask=is_inside, other=0.0).to(tl.float32)
    if factor_ptr is not None:
        value = value * tl.load(factor_ptr + group * num_columns + column, mask=is_inside, other=0.0)
    return value


@triton.jit
def cast_rows(
    x_ptr, factor_ptr, group_ptr, amax_ptr, q_ptr, scale_ptr, num_rows, num_columns,
    IS_SINGLE: tl.constexpr, HARDWARE: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """e4m3 and the scale of each row, or without ``q_ptr`` its largest magnitude, as an integer in
    place of the scale.

    Columns are multiplied by the factors of a row's group, if given. ``IS_SINGLE``: a row is one
    block, read once.
    """
    row = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)[:, None]
    is_row = row < num_rows
    column = tl.arange(0, BLOCK)[None, :]
    offset = row * num_columns
    group = tl.load(group_ptr + row, mask=is_row, other=0).to(tl.int64) if group_ptr is not None else 0
    value = tl.zeros((ROWS, BLOCK), tl.float32)
    if IS_SINGLE:  # loaded once, and kept in registers
        value = _row_values(x_ptr, factor_ptr, offset, group, column, is_row, num_columns)
    if amax_ptr is not None:
        largest = tl.load(amax_ptr + row, mask=is_row, other=0) & 0x7FFFFFFF
    else:
        most = _magnitude(value)
        if not IS_SINGLE:
            for start in range(0, num_columns, BLOCK):  # a first pass for the maximum
                part = _row_values(x_ptr, factor_ptr, offset, group, start + column, is_row, num_columns)
                most = tl.maximum(most, _magnitude(part))
        largest = tl.max(most, 1, keep_dims=True)
    if q_ptr is None:
        tl.store(scale_ptr + row, largest, mask=is_row)  # magnitudes are all that was asked for
    else:
        scale = _scale_of(largest)
        tl.store(scale_ptr + row, scale, mask=is_row)
        if IS_SINGLE:
            code = _to_float8(_divided(value, scale, HARDWARE), False, HARDWARE)
            tl.store(q_ptr + offset + column, code, mask=is_row & (column < num_columns))
        else:
            for start in range(0, num_columns, BLOCK):  # a second pass for the elements
                part = _row_values(x_ptr, factor_ptr, offset, group, start + column, is_row, num_columns)
                code = _to_float8(_divided(part, scale, HARDWARE), False, HARDWARE)
                tl.store(q_ptr + offset + start + column, code, mask=is_row & (start + column < num_columns))


@triton.jit
def cast_blocks(
    x_ptr, q_ptr, scale_ptr, num_across, num_along, padded_along,
    x_across, x_along, x_matrix, q_across, q_along, q_matrix, s_across, s_along, s_matrix, num_tiles,
    E8M0: tl.constexpr, CEIL: tl.constexpr, HARDWARE: tl.constexpr,
    ACROSS: tl.constexpr, BLOCKS: tl.constexpr, SIZE: tl.constexpr,
):  # fmt: skip
    """e4m3 with a scale for each ``SIZE`` elements along one dim: float32, or a power of two in e8m0.

    ``x_``, ``q_`` and ``s_`` are the strides of input, elements and scales: across the blocks,
    along them, and from matrix to matrix. Beyond ``num_along`` the input counts as zeros; elements
    are written up to ``padded_along``.
    """
    matrix = (tl.program_id(0) // num_tiles).to(tl.int64)
    tile = tl.program_id(0) % num_tiles
    num_blocks = tl.cdiv(padded_along, SIZE)
    in_line = tl.cdiv(num_blocks, BLOCKS)
    line0 = ((tile // in_line) * ACROSS).to(tl.int64)
    block0 = ((tile % in_line) * BLOCKS).to(tl.int64)
    x_ptr += matrix * x_matrix + line0 * x_across + block0 * SIZE * x_along
    q_ptr += matrix * q_matrix + line0 * q_across + block0 * SIZE * q_along
    scale_ptr += matrix * s_matrix + line0 * s_across + block0 * s_along
    line = tl.arange(0, ACROSS)[:, None, None]
    block = tl.arange(0, BLOCKS)[None, :, None]
    along = block * SIZE + tl.arange(0, SIZE)[None, None, :]
    is_line = line0 + line < num_across
    x_ptrs = x_ptr + line * x_across + along * x_along
    scale_ptrs = scale_ptr + line * s_across + block * s_along
    # Zeros beyond the end: they change no maximum, and fill the last block up.
    x = tl.load(x_ptrs, mask=is_line & (block0 * SIZE + along < num_along), other=0.0).to(tl.float32)
    largest = tl.max(_magnitude(x), 2, keep_dims=True)
    is_block = is_line & (block0 + block < num_blocks)
    if E8M0:
        exponent = _e8m0_of(largest, CEIL)
        tl.store(scale_ptrs, exponent.to(tl.uint8), mask=is_block)
        value = x * _reciprocal_of_e8m0(exponent)
    else:
        scale = _scale_of(largest)
        tl.store(scale_ptrs, scale, mask=is_block)
        value = _divided(x, scale, HARDWARE)
    is_written = is_line & (block0 * SIZE + along < padded_along)
    tl.store(q_ptr + line * q_across + along * q_along, _to_float8(value, False, HARDWARE), mask=is_written)


@triton.jit
def cast_squares(x_ptr, q_ptr, scale_ptr, num_rows, num_columns, HARDWARE: tl.constexpr, SIZE: tl.constexpr):
    """e4m3 with a float32 scale for each ``SIZE x SIZE`` elements."""
    in_row = tl.cdiv(num_columns, SIZE)
    in_matrix = tl.cdiv(num_rows, SIZE) * in_row
    matrix = tl.program_id(0) // in_matrix
    tile = tl.program_id(0) % in_matrix
    row0 = (tile // in_row) * SIZE
    row = tl.arange(0, SIZE)[:, None]
    column = (tile % in_row) * SIZE + tl.arange(0, SIZE)[None, :]
    base = (matrix.to(tl.int64) * num_rows + row0) * num_columns
    is_inside = (row0 + row < num_rows) & (column < num_columns)
    x = tl.load(x_ptr + base + row * num_columns + column, mask=is_inside, other=0.0).to(tl.float32)
    scale = _scale_of(tl.max(tl.max(_magnitude(x), 1), 0))
    tl.store(scale_ptr + tl.program_id(0), scale)  # scales lie in the order of programs
    code = _to_float8(_divided(x, scale, HARDWARE), False, HARDWARE)
    tl.store(q_ptr + base + row * num_columns + column, code, mask=is_inside)


@triton.jit
def dequantize(
    q_ptr, scale_ptr, amax_ptr, out_ptr, num_rows, num_columns,
    q_row, s_row, s_column, q_matrix, s_matrix, num_tiles,
    KIND: tl.constexpr, BLOCK_ROWS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, PACKED: tl.constexpr,
    HARDWARE: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """The values of quantized matrices, rounded once to the dtype of the output.

    ``KIND`` of scale: ``amax`` (the scale follows from the magnitude of each matrix), ``float32``,
    ``e8m0``, ``nvfp4``.
    ``PACKED``: 1 if pairs of rows share a byte, 2 if pairs of columns do.
    """
    matrix = (tl.program_id(0) // num_tiles).to(tl.int64)
    tile = tl.program_id(0) % num_tiles
    in_row = tl.cdiv(num_columns, COLUMNS)
    row0 = (tile // in_row) * ROWS
    row = row0 + tl.arange(0, ROWS)[:, None]
    column = (tile % in_row) * COLUMNS + tl.arange(0, COLUMNS)[None, :]
    is_inside = (row < num_rows) & (column < num_columns)
    q_ptr += matrix * q_matrix
    # The first element of a pair is in the low half of the byte.
    if PACKED == 1:
        byte = tl.load(q_ptr + (row // 2).to(tl.int64) * q_row + column, mask=is_inside, other=0).to(tl.int32)
        value = _from_e2m1((byte >> ((row & 1) * 4)) & 0xF)
    elif PACKED == 2:
        byte = tl.load(q_ptr + row.to(tl.int64) * q_row + column // 2, mask=is_inside, other=0).to(tl.int32)
        value = _from_e2m1((byte >> ((column & 1) * 4)) & 0xF)
    else:
        value = _from_e4m3(tl.load(q_ptr + row.to(tl.int64) * q_row + column, mask=is_inside, other=0), HARDWARE)
    if KIND == "amax":
        scale = _scale_of(tl.load(amax_ptr + matrix) & 0x7FFFFFFF)
    else:
        scale_ptr += matrix * s_matrix
        if BLOCK_ROWS % ROWS == 0:  # the rows of a tile have their scales in common
            offset = (row0 // BLOCK_ROWS).to(tl.int64) * s_row + (column // BLOCK_COLUMNS) * s_column
            scale = tl.load(scale_ptr + offset, mask=column < num_columns, other=0)
        else:
            offset = (row // BLOCK_ROWS).to(tl.int64) * s_row + (column // BLOCK_COLUMNS) * s_column
            scale = tl.load(scale_ptr + offset, mask=is_inside, other=0)
        if KIND == "e8m0":
            scale = _from_e8m0(scale.to(tl.int32))
        elif KIND == "nvfp4":  # 448 * 6 and the smallest scale, as in the cast
            scale = _from_e4m3(scale, HARDWARE) * _scale_of(tl.load(amax_ptr + matrix) & 0x7FFFFFFF, 2688.0, 2.0**-117)
    out_ptr += (matrix * num_rows + row0) * num_columns
    result = (value * scale).to(out_ptr.dtype.element_ty)
    tl.store(out_ptr + (row - row0) * num_columns + column, result, mask=is_inside)
