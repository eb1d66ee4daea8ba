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
from .._comm.reduce_scatter import sum_dtype
from .._params.sharded_weight import ShardedWeight
from .._params.whole_param import WholeParam

WholeBucket = list[tuple[WholeParam, Tensor]]


class UnequalReplicas(Protocol):
    """Sums gradients with replicas that may have another number of ranks: ``elastic.sync.ReplicaSync``."""

    def share(self, factor: float | None) -> float: ...  # of this replica's gradient in the sum over replicas
    def weigh_full(self, grad: Tensor, factor: float | None) -> Tensor: ...  # for the average over this replica
    def add(self, weight: ShardedWeight, slot: Tensor, share: float) -> None: ...  # reduced rows; accumulated later
    def reduce_whole(self, dtype: torch.dtype, factor: float | None, bucket: WholeBucket) -> None: ...
    def finish(self) -> None: ...  # all sums, on the compute stream
    def reset(self) -> None: ...  # forget gradients that are not summed yet


def reduce_whole(params: Iterable[WholeParam], comm: CommContext, replicas: UnequalReplicas | None) -> None:
    """All-reduce local gradients, in one call for each mesh, dtype and divide factor."""
    buckets: dict[tuple[Any, ...], WholeBucket] = {}
    for param in params:
        if (grad := param.take_local_grad()) is None:
            continue
        flags = param.flags
        if flags.requires_gradient_sync and flags.requires_all_reduce:
            kind = param.groups, param.reduce_dtype, flags.gradient_divide_factor
            buckets.setdefault(kind, []).append((param, grad))
        else:
            param.unsynced_grad = grad.to(param.reduce_dtype)
    for (_, dtype, factor), bucket in buckets.items():
        if replicas is not None:
            replicas.reduce_whole(dtype, factor, [(param, grad.to(dtype)) for param, grad in bucket])
        else:
            _reduce_bucket(bucket, sum_dtype(bucket[0][0].groups.reduce_scatter, dtype), comm)


def _reduce_bucket(bucket: WholeBucket, dtype: torch.dtype, comm: CommContext) -> None:
    first, groups = bucket[0][0], bucket[0][0].groups
    scale = reduce_scale(dtype, first.num_ranks, first.flags.gradient_divide_factor)
    flat = _flatten(bucket, dtype)
    wire = torch.view_as_real(flat) if flat.is_complex() else flat
    active = [group for group in (groups.scatter, groups.replicate) if group is not None and group.size() > 1]

    def complete() -> None:
        for group in active[1:]:
            all_reduce_in_order(wire, scale, group, comm)
        if scale.postdivide is not None:
            wire.div_(scale.postdivide)
        for (param, _), part in zip(bucket, compat.unflatten(flat, [grad for _, grad in bucket]), strict=True):
            param.accumulate(part)

    with profiler_range("GTP::all_reduce", f"{len(bucket)} whole parameters"), comm.reducing():
        if comm.is_debugged:
            comm.before_collective("all_reduce", ", ".join(param.fqn for param, _ in bucket), groups)
            comm.check_finite("the all_reduce of gradients", [(param.fqn, grad) for param, grad in bucket], groups)
        if scale.predivide is not None:
            wire.div_(scale.predivide)
        work = compat.all_reduce(wire, scale.op, active[0], not comm.has_streams) if active else None
        comm.reduction_launched(work, complete, (flat,))


def _flatten(bucket: WholeBucket, dtype: torch.dtype) -> Tensor:
    """All gradients one after the other, cast. Sorts the bucket: those of one dtype are copied and cast together."""
    bucket.sort(key=lambda item: str(item[1].dtype))
    flats = []
    for _, alike in groupby((grad for _, grad in bucket), lambda grad: grad.dtype):
        flats.append(torch.cat([grad if grad.ndim == 1 else grad.reshape(-1) for grad in alike]).to(dtype))
    return flats[0] if len(flats) == 1 else torch.cat(flats)


def all_reduce_in_order(tensor: Tensor, scale: ReduceScale, group: dist.ProcessGroup, comm: CommContext) -> None:
    """All-reduce on the current stream. Without streams, wait for the result."""
    work = compat.all_reduce(tensor, scale.op, group, not comm.has_streams)
    if work is not None and not comm.has_streams:
        work.wait()
