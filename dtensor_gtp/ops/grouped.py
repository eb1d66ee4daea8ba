"""Grouped matrix products: rows of one input, sorted by group, each group with its own weight.

Group sizes stay on the device, so the host never waits for them. Rows beyond the last group, which
``F.grouped_mm`` leaves uninitialized, are zeros in the output and in the input's gradient. A
sharded layer has one weight of logical shape ``(num_groups, N, K)``, or one of shape ``(N, K)`` for
each group. The latter are gathered in one launch into slices of one buffer, so that their stack is
a view; it is a copy where they come from elsewhere (one rank, a recipe).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from functools import partial
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _torch_compat as compat
from .._comm.debug import profiler_range
from .._params.refusals import check_unmodified, wants_wgrad
from .._params.sharded_weight import ShardedWeight
from .._schedule.runtime import Runtime
from ..quant.grouped_gemms import GroupedGEMMs, group_of_rows
from ..quant.master import for_product
from ..quant.planes import Direction
from ..quant.weight import WeightWithRecipe, gemms_of

Weights = tuple[ShardedWeight, ...]  # of one layer


def grouped_linear(
    x_TK: Tensor, weight_GNK: Tensor, bias_GN: Tensor | None, split_sizes_G: Tensor, scales_T: Tensor | None = None
) -> Tensor:
    """``F.linear`` of each group's rows with the group's weight and bias, which is multiplied by
    the row's scale. Under autocast as well, which does not know ``F.grouped_mm``."""
    ends_G = split_sizes_G.cumsum(0, dtype=torch.int32)
    if bias_GN is not None:
        bias_GN = compat.autocast_operand(bias_GN)
    dtype = compat.autocast_dtype(weight_GNK.dtype, weight_GNK.device)
    args = (compat.autocast_operand(x_TK), weight_GNK, ends_G, dtype)
    output: Tensor = _GroupedMM.apply(*args)  # type: ignore[no-untyped-call]
    return add_bias(output, bias_GN, ends_G, scales_T)


def sharded_grouped_linear(
    x_TK: Tensor, bias_GN: Tensor | None, sizes_G: Tensor, scales_T: Tensor | None, runtime: Runtime, weights: Weights
) -> Tensor:
    """:func:`grouped_linear` on the sharded weights of one layer."""
    ends_G = sizes_G.cumsum(0, dtype=torch.int32)
    if torch.is_grad_enabled():
        leaves = [weight.leaf for weight in weights]  # stand for the parameters in autograd's graph
        args = (x_TK, ends_G, runtime, weights, *leaves)
        output: Tensor = _ShardedGroupedMM.apply(*args)  # type: ignore[no-untyped-call]
    else:
        output = multiply(x_TK, ends_G, runtime, weights, Direction.ROWWISE)
    return add_bias(output, bias_GN, ends_G, scales_T)


def add_bias(output_TN: Tensor, bias_GN: Tensor | None, ends_G: Tensor, scales_T: Tensor | None) -> Tensor:
    """Add to each row of a group the group's bias, times the row's scale."""
    if bias_GN is None:
        return output_TN
    bias_TN = bias_GN[group_of_rows(ends_G, output_TN.shape[0])]
    if scales_T is not None:
        bias_TN = bias_TN * scales_T.unsqueeze(-1).to(bias_TN.dtype)
    return _without_tail(output_TN + bias_TN, ends_G)


def grouped_mm(x_TK: Tensor, w_GKN: Tensor, ends_G: Tensor) -> Tensor:
    """``x[rows of g] @ w[g]`` for each group, zeros beyond: shape ``(num_rows, N)``."""
    num_columns = w_GKN.shape[-1]
    if x_TK.dtype == torch.float64:  # torch has no kernel: this loop is the reference
        output = x_TK.new_zeros(x_TK.shape[0], num_columns)
        for group, (begin, end) in enumerate(pairwise([0, *ends_G.tolist()])):
            output[begin:end] = x_TK[begin:end] @ w_GKN[group]
        return output
    _refuse_in_a_graph(x_TK)
    pad_K, pad_N = _paddings(x_TK, w_GKN)
    if pad_K or pad_N:
        x_TK = F.pad(x_TK, (0, pad_K))
        w_GKN = F.pad(w_GKN, (0, pad_N, 0, pad_K))
    output = F.grouped_mm(x_TK, w_GKN, offs=ends_G)
    return _without_tail(output, ends_G)[:, :num_columns]


def grouped_wgrad(grad_TN: Tensor, x_TK: Tensor, ends_G: Tensor) -> Tensor:
    """``grad[rows of g].T @ x[rows of g]`` for each group: shape ``(num_groups, N, K)``, zeros for
    an empty group."""
    N = grad_TN.shape[-1]
    K = x_TK.shape[-1]
    if x_TK.dtype == torch.float64:
        wgrad = x_TK.new_zeros(ends_G.shape[0], N, K)
        for group, (begin, end) in enumerate(pairwise([0, *ends_G.tolist()])):
            wgrad[group] = grad_TN[begin:end].t() @ x_TK[begin:end]
        return wgrad
    _refuse_in_a_graph(x_TK)
    pad_N, pad_K = _paddings(grad_TN, x_TK)
    if pad_N:
        grad_TN = F.pad(grad_TN, (0, pad_N))
    if pad_K:
        x_TK = F.pad(x_TK, (0, pad_K))
    return F.grouped_mm(grad_TN.t(), x_TK, offs=ends_G)[:, :N, :K]


def _refuse_in_a_graph(x_TK: Tensor) -> None:
    """torch's kernel takes bfloat16 alone, also in 2.13; its loop for others reads ``ends_G`` on
    the host."""
    is_eager = x_TK.is_cuda and not torch.compiler.is_compiling()
    if is_eager and x_TK.dtype != torch.bfloat16 and compat.is_stream_capturing():
        raise RuntimeError(
            f"GroupedLinear expects bfloat16 in a CUDA graph, but got {x_TK.dtype}, for which "
            "torch's grouped product waits on the host. Pass "
            "mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16), or leave the layer out of "
            "the graph."
        )


def _paddings(left: Tensor, right: Tensor) -> tuple[int, int]:
    """Elements to add to the last dim of each: the kernels want rows of whole 16-byte units."""
    unit = 16 // left.element_size()
    return -left.shape[-1] % unit, -right.shape[-1] % unit


def _without_tail(output_TN: Tensor, ends_G: Tensor) -> Tensor:
    """Write zeros beyond the last group. Returns a view: torch 2.11 compiles no gradient for what
    was written to."""
    rows = torch.arange(output_TN.shape[0], device=output_TN.device, dtype=ends_G.dtype)
    return output_TN.masked_fill_((rows >= ends_G[-1]).unsqueeze(-1), 0)[:]


def multiply(rows: Tensor, ends_G: Tensor, runtime: Runtime, weights: Weights, direction: Direction) -> Tensor:
    """The grouped GEMM of forward (ROWWISE) or dgrad, in float8 where the weight's recipe and the
    hardware have it."""
    gemms: GroupedGEMMs | None = None
    if isinstance(weights[0].form.gemms, GroupedGEMMs):
        gemms = weights[0].form.gemms
    if direction is Direction.ROWWISE:
        targets = [weight.for_forward for weight in weights]
    else:
        targets = [weight.for_backward for weight in weights]
    with ExitStack() as stack:  # releases all weights after the product
        gathered = [stack.enter_context(runtime.gathering.using(target)) for target in targets]
        if gemms is not None:
            operand: Any = gathered[0].for_gemms()
        elif len(weights[0].layout.shape) == 3:
            operand = gathered[0].full
        else:
            operand = stacked([each.full for each in gathered])
        return _product(rows, operand, ends_G, direction, gemms, weights[0].compute_dtype)


def _product(
    rows: Tensor, operand: Any, ends_G: Tensor, direction: Direction, gemms: GroupedGEMMs | None, dtype: torch.dtype
) -> Tensor:
    """``operand``: the weight of shape ``(num_groups, N, K)``, in the quantized form that ``gemms``
    take if there are any."""
    is_forward = direction is Direction.ROWWISE
    if gemms is None:
        return grouped_mm(rows, operand.mT if is_forward else operand, ends_G)
    product = gemms.grouped_output if is_forward else gemms.grouped_grad_input
    return _without_tail(product(rows, operand, ends_G, dtype), ends_G)


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """``torch.stack(parts)``, as a view if they lie at equal distances in one storage."""
    first = parts[0]
    if len(parts) == 1:
        return first.unsqueeze(0)
    # As ``_side_by_side`` in ``_params/gather.py`` lays them out.
    distance = int(parts[-1].storage_offset() - first.storage_offset()) // (len(parts) - 1)
    storage = first.untyped_storage().data_ptr()
    is_regular = distance >= first.numel() > 0 and all(
        part.untyped_storage().data_ptr() == storage
        and part.storage_offset() == first.storage_offset() + number * distance
        and part.shape == first.shape
        and part.stride() == first.stride()
        and part.dtype == first.dtype
        for number, part in enumerate(parts)
    )
    # They come from elsewhere: one rank, a recipe, fixed buffers.
    if not is_regular:
        return torch.stack(list(parts))
    strides = (distance, *first.stride())
    return first.as_strided((len(parts), *first.shape), strides, first.storage_offset())


def reduce_wgrad(
    runtime: Runtime, weights: Weights, awaited: Sequence[bool], grad_TN: Tensor, x_TK: Tensor, ends_G: Tensor
) -> None:
    """Compute the gradients of all weights, and send those that are awaited to the shards."""
    with profiler_range("GTP::wgrad", ", ".join([weight.fqn for weight in weights])):
        wgrad_GNK = grouped_wgrad(grad_TN, x_TK, ends_G)
    # One weight of all groups. It is awaited, or nobody would have called this.
    if len(weights[0].layout.shape) == 3:
        runtime.grads.add_full(weights[0], wgrad_GNK, is_owned=True)
        return
    # One launch for all weights of the layer, where the kind of reduction allows it.
    with runtime.grads.together():
        for weight, wgrad_NK, is_awaited in zip(weights, wgrad_GNK.unbind(0), awaited, strict=True):
            if is_awaited:
                runtime.grads.add_full(weight, wgrad_NK, is_owned=True)


class _ShardedGroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, ends_G: Tensor, runtime: Runtime, weights: Weights, *leaves: Tensor) -> Tensor:
        ctx.runtime = runtime
        ctx.weights = weights
        ctx.versions = [weight.version for weight in weights]  # compared before dgrad
        # Wgrad alone reads the input.
        ctx.save_for_backward(x_TK if any(ctx.needs_input_grad[4:]) else None, ends_G)
        return multiply(x_TK, ends_G, runtime, weights, Direction.ROWWISE)

    @staticmethod
    @compat.once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        runtime: Runtime = ctx.runtime
        weights: Weights = ctx.weights
        runtime.note_backward()
        x_TK, ends_G = ctx.saved_tensors
        grad_TN = grad_TN.contiguous()
        awaited = [
            ctx.needs_input_grad[4 + index] and wants_wgrad(ctx, 2 + index, weight, runtime.comm.streams)
            for index, weight in enumerate(weights)  # 2: only x and ends are tensors before the leaves
        ]
        job = None
        if any(awaited):  # a stage of a pipeline may put it off
            args = (runtime, weights, awaited, grad_TN, x_TK, ends_G)
            job = partial(runtime.grads.compute, reduce_wgrad, *args)
        dgrad = None
        if ctx.needs_input_grad[0]:
            for weight, version in zip(weights, ctx.versions, strict=True):
                check_unmodified(weight, version)  # dgrad needs the values of forward
            dgrad = partial(multiply, grad_TN, ends_G, runtime, weights, Direction.COLUMNWISE)
        grad_x = runtime.grads.in_order(job, dgrad)
        return grad_x, *[None] * (3 + len(weights))  # gradients of weights went to the shards


class _GroupedMM(torch.autograd.Function):
    """With a weight that is not sharded, in ``dtype``. The cast is not saved, but made again."""

    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_GNK: Tensor, ends_G: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.dtype = dtype
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        # saved only for the gradient that needs it
        saved_x = None
        if needs_weight:
            saved_x = x_TK
        saved_weight = None
        if needs_x:
            saved_weight = weight_GNK
        ctx.save_for_backward(saved_x, saved_weight, ends_G)
        return _product_with(weight_GNK, x_TK, ends_G, Direction.ROWWISE, dtype)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        x_TK, weight_GNK, ends_G = ctx.saved_tensors
        grad_TN = grad_TN.contiguous()
        wgrad = None
        dgrad = None
        if x_TK is not None:
            wgrad = grouped_wgrad(grad_TN, x_TK, ends_G)
        if weight_GNK is not None:
            dgrad = _product_with(weight_GNK, grad_TN, ends_G, Direction.COLUMNWISE, ctx.dtype)
        return dgrad, wgrad, None, None


def _product_with(weight_GNK: Tensor, rows: Tensor, ends_G: Tensor, direction: Direction, dtype: torch.dtype) -> Tensor:
    """As ``multiply``, with a weight that is not sharded."""
    if isinstance(weight_GNK, WeightWithRecipe):
        gemms = gemms_of(weight_GNK)
        if isinstance(gemms, GroupedGEMMs):
            quantized = weight_GNK.quantized_for(direction)
            return _product(rows, quantized, ends_G, direction, gemms, dtype)
    operand = for_product(weight_GNK, direction).to(dtype)
    return _product(rows, operand, ends_G, direction, None, dtype)
