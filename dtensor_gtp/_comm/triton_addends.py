"""The sum over ranks as one Triton kernel, see ``addends``.

The kernel reads each addend once, this rank's own where it was sent, and writes each sum once. The
order is that of torch's sum over dim 0 on CUDA: the addend of rank ``r`` goes to partial sum
``r % 4``; the four begin at zero and are added one after the other. Nothing is multiplied before it
is added, so nothing can fuse.

Triton specializes no argument; only whether all are aligned is a constant. So there are two kernels
for a number of ranks and a dtype, and none is compiled later, in a CUDA graph.
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
# In elements: vectors of loads and stores need it.
_ALIGNMENT = 16


@triton.jit(do_not_specialize=list(range(17)))  # all but the constants
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
    """``factor`` times the sum of ``NUM`` addends, of up to four gradients that lie one behind the
    other in ``out``.

    The addend of ``rank`` is at ``own{i}_ptr``. The others are rows of ``row_numel`` elements,
    without a row for ``rank``. Gradient i begins at element ``begin{i}`` and at program
    ``first{i}``.
    """
    block = tl.program_id(0)  # of one gradient, found below; a missing one has no programs
    own_ptr, begin, end_, first = own0_ptr, begin0, begin1, 0
    if block >= first1:
        own_ptr, begin, end_, first = own1_ptr, begin1, begin2, first1
    if block >= first2:
        own_ptr, begin, end_, first = own2_ptr, begin2, begin3, first2
    if block >= first3:
        own_ptr, begin, end_, first = own3_ptr, begin3, end, first3
    start = (block - first).to(tl.int64) * BLOCK  # a large gradient has more elements than int32 counts
    left = tl.minimum(end_ - begin - start, BLOCK).to(tl.int32)  # elements, to the end of the gradient
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
            at = row - (rank < row).to(tl.int64)  # ``rows`` lacks the row of ``rank``
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
    """``factor`` times the sum over ranks, on the current stream.

    Args:
        out: The result, shape ``(numel,)``, float32.
        rows: Addends of the other ranks in their order, shape ``(num_ranks - 1, numel)``.
        own: This rank's addend: contiguous parts, one behind the other in ``out``.
    """
    sizes = [addend.numel() for addend in own]
    begins = [0, *accumulate(sizes)]
    is_aligned = all(tensor.data_ptr() % _ALIGNMENT == 0 for tensor in (out, rows, *own))
    is_aligned = is_aligned and all(begin % _ALIGNMENT == 0 for begin in begins)
    for at in range(0, len(sizes), _PARCELS):
        missing = _PARCELS - len(own[at : at + _PARCELS])
        blocks = [-(-size // _BLOCK) for size in sizes[at : at + _PARCELS]]
        _, *firsts, num_blocks = accumulate([*blocks, *[0] * missing], initial=0)
        if num_blocks == 0:  # these gradients have no elements
            continue
        # What is missing has no programs: any pointer will do.
        parcels = [*own[at : at + _PARCELS], *[own[at]] * missing]
        numbers = [*begins[at : at + _PARCELS + 1], *[begins[-1]] * missing, *firsts, rows.shape[1], rank, factor]
        with on_device_of(out):  # Triton launches on the current device
            launch = sum_over_ranks[(num_blocks,)]
            launch(out, rows, *parcels, *numbers, NUM=num_ranks, ALIGNED=is_aligned, BLOCK=_BLOCK)
