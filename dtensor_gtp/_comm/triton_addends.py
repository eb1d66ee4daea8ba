"""The sum over ranks as one Triton kernel, see ``addends``.

Each addend is read once, from where it is, and each sum written once. The order is that of torch's sum over dim 0 on
CUDA: the addend of rank ``r`` goes to partial sum ``r % 4``, all four begin at zero, and they are added one after the
other. Nothing is multiplied before it is added, so nothing can fuse.

What is known of alignment at compile time is one constant, and no number is compiled in as it happens to be: so there
are two kernels for a number of ranks and a dtype, and none is compiled later, in a CUDA graph.
"""


# No `from __future__ import annotations`: Triton reads them.

from collections.abc import Sequence
from itertools import accumulate

import triton
import triton.language as tl
from torch import Tensor

from .._torch_compat.kernel_trial import on_device_of

_BLOCK = 1024
# Gradients of one launch.
_PARCELS = 4
# In elements: what vectors of loads and stores need.
_ALIGNMENT = 16


@triton.jit(
    do_not_specialize=[
        "out_ptr",
        "rows_ptr",
        "own0_ptr",
        "own1_ptr",
        "own2_ptr",
        "own3_ptr",
        "begin0",
        "begin1",
        "begin2",
        "begin3",
        "end",
        "first1",
        "first2",
        "first3",
        "row_numel",
        "rank",
        "factor",
    ]
)
def sum_over_ranks(
    out_ptr,
    rows_ptr,
    own0_ptr,
    own1_ptr,
    own2_ptr,
    own3_ptr,
    begin0,
    begin1,
    begin2,
    begin3,
    end,
    first1,
    first2,
    first3,
    row_numel,
    rank,
    factor,
    NUM: tl.constexpr,
    ALIGNED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """``factor`` times the sum of ``NUM`` addends, of up to four gradients that lie one behind the other in ``out``.

    The addend of ``rank`` lies at ``own{i}_ptr``, the others in rows of ``row_numel`` elements, without one for
    ``rank``. Gradient i begins at element ``begin{i}``, and with program ``first{i}``.
    """
    block = tl.program_id(0)
    own_ptr, begin, end_, first = own0_ptr, begin0, begin1, 0
    if block >= first1:
        own_ptr, begin, end_, first = own1_ptr, begin1, begin2, first1
    if block >= first2:
        own_ptr, begin, end_, first = own2_ptr, begin2, begin3, first2
    if block >= first3:
        own_ptr, begin, end_, first = own3_ptr, begin3, end, first3
    start = (block - first).to(tl.int64) * BLOCK
    left = tl.minimum(end_ - begin - start, BLOCK).to(tl.int32)
    if ALIGNED:
        left = tl.multiple_of(left, 16)
    lane = tl.arange(0, BLOCK)
    is_inside = lane < left
    own_ptr += start
    rows_ptr += begin + start
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(NUM if NUM < 4 else 4):
        partial = tl.zeros((BLOCK,), tl.float32)
        for row in tl.static_range(part, NUM, 4):
            at = row - (rank < row).to(tl.int64)
            addend_ptr = tl.where(rank == row, own_ptr, rows_ptr + at * row_numel) + lane
            if ALIGNED:
                addend_ptr = tl.multiple_of(addend_ptr, 16)
            partial += tl.load(addend_ptr, mask=is_inside, other=0.0).to(tl.float32)
        total += partial
    result_ptr = out_ptr + begin + start + lane
    if ALIGNED:
        result_ptr = tl.multiple_of(result_ptr, 16)
    tl.store(result_ptr, total * factor, mask=is_inside)


def add(out: Tensor, rows: Tensor, own: Sequence[Tensor], rank: int, num_ranks: int, factor: float) -> None:
    """``addends.Sum``, for any factor."""
    sizes = [addend.numel() for addend in own] or [out.numel()]
    own = own or [rows]  # never read
    rank = rank if rows.shape[0] < num_ranks else num_ranks
    begins = [0, *accumulate(sizes)]
    is_aligned = all(tensor.data_ptr() % _ALIGNMENT == 0 for tensor in (out, rows, *own))
    is_aligned = is_aligned and all(begin % _ALIGNMENT == 0 for begin in begins)
    for at in range(0, len(sizes), _PARCELS):
        missing = _PARCELS - len(own[at : at + _PARCELS])
        blocks = [-(-size // _BLOCK) for size in sizes[at : at + _PARCELS]]
        _, *firsts, num_blocks = accumulate([*blocks, *[0] * missing], initial=0)
        if num_blocks == 0:
            continue
        with on_device_of(out):
            sum_over_ranks[(num_blocks,)](
                out,
                rows,
                *own[at : at + _PARCELS],
                *[own[at]] * missing,
                *begins[at : at + _PARCELS + 1],
                *[begins[-1]] * missing,
                *firsts,
                rows.shape[1],
                rank,
                factor,
                NUM=num_ranks,
                ALIGNED=is_aligned,
                BLOCK=_BLOCK,
            )
