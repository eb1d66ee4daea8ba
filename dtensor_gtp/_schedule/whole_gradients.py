"""All-reduces the gradients of parameters that stay whole, coalesced, at the end of backward."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch_compat as compat
from .._comm.collectives import ReduceScale, reduce_scale
from .._comm.context import CommContext
from .._comm.debug import profiler_range
from .._comm.reductions import sum_dtype
from .._params.sharded_weight import ShardedWeight
from .._params.whole_param import WholeParam
from .order_of_launches import OrderOfLaunches

WholeBucket = list[tuple[WholeParam, Tensor]]


class UnequalReplicas(Protocol):
    """Sums gradients with replicas that may have another number of ranks: ``elastic.sync.ReplicaSync``."""

    def share(self, factor: float | None) -> float: ...  # of this replica's gradient in the sum over replicas
    def weigh_full(self, grad: Tensor, factor: float | None) -> Tensor: ...  # for the average over this replica
    def add(self, weight: ShardedWeight, slot: Tensor, share: float) -> None: ...  # reduced rows; accumulated later
    def reduce_whole(self, dtype: torch.dtype, factor: float | None, bucket: WholeBucket) -> None: ...
    def finish(self) -> None: ...  # all sums, on the compute stream
    def reset(self) -> None: ...  # forget gradients that are not summed yet


def reduce_whole(
    params: Iterable[WholeParam], comm: CommContext, replicas: UnequalReplicas | None, order: OrderOfLaunches
) -> None:
    """All-reduce local gradients, in one call for each mesh, dtype and divide factor.

    All trained parameters take part, with zeros where this rank has not used them: other ranks may have used others,
    and nothing else would tell the ranks apart. A parameter that no rank has used gets no gradient, or zeros if the
    user asks for that (``set_reduce_scatter_unused_params``).
    """
    buckets: dict[tuple[Any, ...], list[tuple[WholeParam, Tensor | None]]] = {}
    for param in params:
        grad, flags = param.take_local_grad(), param.flags
        if not (flags.requires_gradient_sync and flags.requires_all_reduce):
            param.unsynced_grad = None if grad is None else grad.to(param.reduce_dtype)
        elif grad is not None or (replicas is None and param.gradient.awaits_reduction):
            key = param.groups, param.reduce_dtype, flags.gradient_divide_factor
            buckets.setdefault(key, []).append((param, grad))
    for (_, dtype, factor), bucket in buckets.items():
        if replicas is None:
            _reduce_bucket(bucket, sum_dtype(bucket[0][0].groups.reduce_scatter, dtype), comm, order)
        else:
            replicas.reduce_whole(
                dtype, factor, [(param, grad.to(dtype)) for param, grad in bucket if grad is not None]
            )
    for bucket in buckets.values():
        for param, _ in bucket:
            param.gradient.awaits_reduction = False


def _reduce_bucket(
    bucket: list[tuple[WholeParam, Tensor | None]], dtype: torch.dtype, comm: CommContext, order: OrderOfLaunches
) -> None:
    first, groups = bucket[0][0], bucket[0][0].groups
    active = [group for group in (groups.scatter, groups.replicate) if group is not None and group.size() > 1]
    if not active:
        bucket = [(param, grad) for param, grad in bucket if grad is not None]
        if not bucket:
            return
    scale = reduce_scale(dtype, first.num_ranks, first.flags.gradient_divide_factor)
    grads = [param.new_zero_grad() if grad is None else grad for param, grad in bucket]
    used = grads[0].new_ones(len(bucket))  # filled on the device, as a graph may record it
    for index, (_, grad) in enumerate(bucket):
        if grad is None:
            used[index].zero_()
    sent = [*grads, used]
    marks = None
    if groups.scatter.size() > 1:
        marks = order.marks(groups, used, dtype, is_recorded=comm.streams.is_capturing)
        sent += [] if marks is None else [marks.values]
    flat = _flatten(sent, dtype)
    wire = torch.view_as_real(flat) if flat.is_complex() else flat

    def complete() -> None:
        if marks is not None and not comm.streams.is_capturing:  # replicas need not launch alike
            order.compare(marks, flat[-len(marks.values) :], first.mesh, groups)
        for group in active[1:]:
            all_reduce_in_order(wire, scale, group, comm)
        if scale.postdivide is not None:
            wire.div_(scale.postdivide)
        *parts, used_by_any = compat.unflatten(flat, [*grads, used])
        for (param, grad), part, is_used in zip(bucket, parts, used_by_any, strict=True):
            if grad is None and not param.flags.reduce_scatter_unused_params:
                param.gradient.note_use_elsewhere(is_used)
            param.gradient.accumulate(part)

    with profiler_range("GTP::all_reduce", f"{len(bucket)} whole parameters"), comm.reductions.reducing():
        if comm.is_debugged:
            comm.before_collective("all_reduce", ", ".join(param.fqn for param, _ in bucket), groups)
            values = [(param.fqn, grad) for (param, _), grad in zip(bucket, grads, strict=True)]
            comm.check_finite("the all_reduce of gradients", values, groups)
        if scale.predivide is not None:
            wire.div_(scale.predivide)
        work = compat.all_reduce(wire, scale.op, active[0], not comm.streams.has_streams) if active else None
        comm.reductions.launched(work, complete, (flat,))


def _flatten(grads: list[Tensor], dtype: torch.dtype) -> Tensor:
    """All gradients one after the other, in the order that all ranks have. Those of one dtype are cast together."""
    flats = []
    for _, alike in groupby(grads, lambda grad: grad.dtype):
        flats.append(torch.cat([grad if grad.ndim == 1 else grad.reshape(-1) for grad in alike]).to(dtype))
    return flats[0] if len(flats) == 1 else torch.cat(flats)


def all_reduce_in_order(tensor: Tensor, scale: ReduceScale, group: dist.ProcessGroup, comm: CommContext) -> None:
    """All-reduce on the current stream. Without streams, wait for the result."""
    work = compat.all_reduce(tensor, scale.op, group, not comm.streams.has_streams)
    if work is not None and not comm.streams.has_streams:
        work.wait()


def reduce_scatter_in_order(rows: Tensor, scale: ReduceScale, group: dist.ProcessGroup, comm: CommContext) -> Tensor:
    """Reduce-scatter one row for each rank on the current stream. Without streams, wait for the result."""
    row = rows.new_empty(rows.shape[1])
    work = compat.reduce_scatter_base(row, rows.reshape(-1), scale.op, group, not comm.streams.has_streams)
    if work is not None and not comm.streams.has_streams:
        work.wait()
    return row
