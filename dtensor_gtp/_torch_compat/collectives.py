"""Collectives without their checks, differentiable ones, tensors that wait for one, and dtypes that can be sent."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import _functional_collectives as funcol
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, AllToAllOptions, ReduceScatterOptions  # type: ignore[attr-defined]
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from .dtensor import dtensor_spec, local_part, local_tensor, wrap_local

# torch 2.11 has these collectives under other names, which later releases warn of.
_all_gather: Any = getattr(funcol, "all_gather_single_autograd", None) or funcol.all_gather_tensor_autograd
_reduce_scatter: Any = getattr(funcol, "reduce_scatter_single_autograd", None) or funcol.reduce_scatter_tensor_autograd

Work = dist.Work | None
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by bytes of an element


@functools.cache
def _options(kind: Any, async_op: bool, op: Any = None) -> Any:
    options = kind()  # one object for all calls: nobody changes it later
    options.asyncOp = async_op
    if op is not None:
        options.reduceOp = op
    return options


def all_gather_base(output: Tensor, input: Tensor, group: dist.ProcessGroup, async_op: bool) -> Work:
    """``dist.all_gather_into_tensor`` without its argument checks, which cost as much as the launch."""
    return group._allgather_base(output, input, _options(AllgatherOptions, async_op))


def all_gather_coalesced(outputs: list[Tensor], inputs: list[Tensor], group: dist.ProcessGroup, async_op: bool) -> Work:
    """Several ``all_gather_base`` in one call; dtypes and shapes may differ."""
    return group.allgather_into_tensor_coalesced(outputs, inputs, _options(AllgatherOptions, async_op))


def all_gather_by_dtype(outputs: list[Tensor], inputs: list[Tensor], group: dist.ProcessGroup) -> list[Work]:
    """As ``all_gather_coalesced`` in the background, with a call for each dtype: gloo would make one tensor of all."""
    by_dtype: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = {}
    for output, input in zip(outputs, inputs, strict=True):
        into, sent = by_dtype.setdefault(input.dtype, ([], []))
        into.append(output)
        sent.append(input)
    return [all_gather_coalesced(into, sent, group, True) for into, sent in by_dtype.values()]


def reduce_scatter_base(output: Tensor, input: Tensor, op: Any, group: dist.ProcessGroup, async_op: bool) -> Work:
    """``dist.reduce_scatter_tensor`` without its argument checks."""
    return group._reduce_scatter_base(output, input, _options(ReduceScatterOptions, async_op, op))


def reduce_scatter_coalesced(
    outputs: list[Tensor], inputs: list[Tensor], op: Any, group: dist.ProcessGroup, async_op: bool
) -> Work:
    """Several ``reduce_scatter_base`` in one call."""
    return group.reduce_scatter_tensor_coalesced(outputs, inputs, _options(ReduceScatterOptions, async_op, op))


def all_to_all_base(output: Tensor, input: Tensor, group: dist.ProcessGroup, async_op: bool) -> Work:
    """``dist.all_to_all_single`` of equal slices, without its argument checks."""
    return group.alltoall_base(output, input, [], [], _options(AllToAllOptions, async_op))  # no sizes: equal parts


def all_to_all_of_peers(output: Tensor, input: Tensor, group: dist.ProcessGroup, async_op: bool) -> Work:
    """``all_to_all_base`` of rows, but the own one stays where it is: ``output`` has no row for it. gloo lacks it."""
    # row views: what arrives goes into ``output``
    received = list(output)
    sent = list(input)
    rank = group.rank()
    nothing = input.new_empty(0)  # which NCCL does not send
    received.insert(rank, nothing)
    sent[rank] = nothing  # the own row is neither sent nor received
    return group.alltoall(received, sent, _options(AllToAllOptions, async_op))


def all_reduce(tensor: Tensor, op: Any, group: dist.ProcessGroup, async_op: bool) -> Work:
    return group.allreduce([tensor], _options(AllreduceOptions, async_op, op))


def all_to_all_rows(
    rows: Tensor, received: list[int] | None, sent: list[int] | None, group: dist.ProcessGroup
) -> Tensor:
    """Differentiable exchange of rows (dim 0): so many from and to each rank of the group, or equal parts if None."""
    return _with_contiguous_grad(funcol.all_to_all_single_autograd(rows, received, sent, group))


def all_gather_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Differentiable gather of as many rows (dim 0) of each rank; its gradient is the sum over the ranks."""
    return _with_contiguous_grad(_all_gather(rows, 0, group))


def reduce_scatter_rows(rows: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Differentiable sum over the ranks; each keeps its equal part of the rows (dim 0)."""
    return _with_contiguous_grad(_reduce_scatter(rows, "sum", 0, group))


def complete_collectives(tree: Any) -> Any:
    """``tree`` after a wait for its tensors: compiled code drops gradients of pending ones (pytorch 191113, 180614)."""

    def completed(tensor: Tensor) -> Any:
        # torch's functional collectives return such tensors: they wait only when an op uses them.
        is_pending = isinstance(local_part(tensor), AsyncCollectiveTensor)
        # Autograd records the wait as an op, so the gradient passes through it.
        return _Completed.apply(tensor) if is_pending else tensor  # type: ignore[no-untyped-call]

    return tree_map_only(Tensor, completed, tree)


def completed_local(tensor: DTensor) -> Tensor:
    """The local tensor of ``tensor``, without a wrapper around it that would wait when it is used first."""
    local = local_tensor(tensor)
    return local.trigger_wait() if isinstance(local, AsyncCollectiveTensor) else local


def _with_contiguous_grad(result: Tensor) -> Tensor:
    """The result of a differentiable collective, waited for. torch 2.11 communicates its gradient as it lies."""
    completed: Tensor = _ContiguousGrad.apply(complete_collectives(result))  # type: ignore[no-untyped-call]
    return completed


class _ContiguousGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Tensor) -> Tensor:
        return tensor.view_as(tensor)  # forward changes nothing

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad.contiguous()


class _Completed(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, tensor: Any) -> Tensor:
        if isinstance(tensor, DTensor):
            return wrap_local(completed_local(tensor), dtensor_spec(tensor))  # a new DTensor around the completed shard
        completed: Tensor = tensor.trigger_wait()
        return completed.view_as(completed)  # a new tensor for autograd's metadata: the wrapper holds the old one

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


def as_integers(tensor: Tensor) -> Tensor:
    """The same bits as integers."""
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


def as_sendable(tensor: Tensor) -> Tensor:
    """The same bits in a dtype that all backends gather: neither gloo nor NCCL has all float dtypes, or int16."""
    if tensor.dtype.itemsize == 2:
        return tensor.view(torch.bfloat16)
    return as_integers(tensor)
