"""Collectives without state: tensors, group and reduction are arguments, the current stream is the caller's.

With ``stream`` the collective is ordered on the current stream. Without, as with gloo on a CPU, it runs in the
background and the returned ``Work`` says when it is complete.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch_compat as compat

# Not every backend knows every float.
_WIRE_DTYPES = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def as_integers(tensor: Tensor) -> Tensor:
    """The same bits as integers, for which every backend has collectives."""
    return tensor.view(_WIRE_DTYPES[tensor.dtype.itemsize])


class ReduceScale(NamedTuple):
    """How a sum over ranks becomes the gradient: the operation of the collective, and divisions around it."""

    op: dist.ReduceOp.RedOpType
    predivide: float | None
    postdivide: float | None


@functools.lru_cache(maxsize=64)  # the factor may change in each step
def reduce_scale(dtype: torch.dtype, num_ranks: int, factor: float | None) -> ReduceScale:
    """Average over ``num_ranks``, or divide the sum by ``factor`` if one is given.

    float16 divides by about the root before and after the sum, because the sum of many ranks overflows it: the same
    split as in torch's ``fully_shard`` (``_get_gradient_divide_factors``).
    """
    if dtype != torch.float16:
        if factor is None:
            return ReduceScale(dist.ReduceOp.AVG, None, None)
        return ReduceScale(dist.ReduceOp.SUM, None, factor if factor != 1 else None)
    factor = float(num_ranks) if factor is None else factor
    predivide = 1.0
    while factor % predivide == 0 and factor / predivide > predivide:
        predivide *= 2
    return ReduceScale(dist.ReduceOp.SUM, predivide, factor / predivide)


class Works:
    """Background works that several callers wait for together. The first one releases them, because a work keeps its
    tensors alive also when it is complete."""

    def __init__(self, works: Iterable[dist.Work | None]) -> None:
        self._works = [work for work in works if work is not None]

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()


def all_gather(output: Tensor, shard: Tensor, group: dist.ProcessGroup, stream: bool) -> dist.Work | None:
    """Gather ``shard`` of each rank, shape ``(rows, ...)``, into ``output``, shape ``(world * rows, ...)``; both are
    contiguous and of one dtype. ``shard`` may be this rank's slice of ``output``."""
    return compat.all_gather_base(output, shard, group, not stream)


def reduce_scatter(
    output: Tensor, full: Tensor, scale: ReduceScale, group: dist.ProcessGroup, stream: bool
) -> dist.Work | None:
    """Reduce ``full``, shape ``(world * rows, ...)``, over the ranks and leave this rank's rows in ``output``, shape
    ``(rows, ...)``; both are contiguous and of one dtype. ``full`` may be divided in place."""
    if scale.predivide is not None:
        full.div_(scale.predivide)
    return compat.reduce_scatter_base(output, full, scale.op, group, not stream)


def reduce_scatter_many(
    outputs: list[Tensor], fulls: list[Tensor], scale: ReduceScale, group: dist.ProcessGroup, stream: bool
) -> dist.Work | None:
    """Several :func:`reduce_scatter` of one group and dtype, as one launch."""
    if len(outputs) == 1:
        return reduce_scatter(outputs[0], fulls[0], scale, group, stream)
    if scale.predivide is not None:
        for full in fulls:
            full.div_(scale.predivide)
    return compat.reduce_scatter_coalesced(outputs, fulls, scale.op, group, not stream)


def all_to_all(output: Tensor, input: Tensor, group: dist.ProcessGroup, stream: bool) -> dist.Work | None:
    """Send the i-th of equal slices of ``input`` to rank i, and receive rank i's as the i-th of ``output``; both are
    contiguous, of one shape ``(world * rows, ...)`` and dtype."""
    return compat.all_to_all_base(output, input, group, not stream)


def all_reduce(tensor: Tensor, scale: ReduceScale, group: dist.ProcessGroup, stream: bool) -> dist.Work | None:
    """Reduce ``tensor`` over the ranks in place, without the divisions of ``scale``."""
    return compat.all_reduce(tensor, scale.op, group, not stream)
