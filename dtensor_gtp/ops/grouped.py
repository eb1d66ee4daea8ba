"""Grouped matrix products: rows of one input, sorted by group, each group with a weight of its own.

Group sizes stay on the device: nothing here asks the host. Rows beyond the last group, which ``grouped_mm`` leaves
uninitialized, come out as zeros, in the output and in the input's gradient.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _torch_compat as compat
from .._comm.debug import profiler_range
from .._params.saved_for_backward import check_unmodified, refuse_partial_recording
from .._params.sharded_weight import ShardedWeight
from .._schedule.runtime import Runtime
from ..quant.float8_gemms import GroupedRowwiseGEMMs
from ..quant.master import for_product
from ..quant.planes import Direction
from ..quant.weight import WeightWithRecipe, gemms_of
from .float8 import using_quantized


def grouped_linear(
    x_TK: Tensor, weight_GNK: Tensor, bias_GN: Tensor | None, split_sizes_G: Tensor, scales_T: Tensor | None = None
) -> Tensor:
    """``F.linear`` of each group's rows with the group's weight and bias.

    Args:
        x_TK: Rows sorted by group, shape ``(num_rows, in_features)``.
        weight_GNK: Shape ``(num_groups, out_features, in_features)``, dtype of ``x_TK``.
        bias_GN: Shape ``(num_groups, out_features)``.
        split_sizes_G: Rows of each group, integers on the device of ``x_TK``; their sum is at most ``num_rows``.
        scales_T: Factor of the bias of each row, shape ``(num_rows,)``.

    Returns:
        Shape ``(num_rows, out_features)``; zeros beyond the last group.
    """
    ends_G = split_sizes_G.cumsum(0, dtype=torch.int32)
    output: Tensor = _GroupedMM.apply(x_TK, weight_GNK, ends_G)  # type: ignore[no-untyped-call]
    return add_bias(output, bias_GN, ends_G, scales_T)


def sharded_grouped_linear(
    x_TK: Tensor,
    bias_GN: Tensor | None,
    split_sizes_G: Tensor,
    scales_T: Tensor | None,
    runtime: Runtime,
    weight: ShardedWeight,
) -> Tensor:
    """:func:`grouped_linear` on a sharded weight of logical shape ``(num_groups, out_features, in_features)``."""
    ends_G = split_sizes_G.cumsum(0, dtype=torch.int32)
    if torch.is_grad_enabled():
        output: Tensor = _ShardedGroupedMM.apply(x_TK, weight.leaf, ends_G, runtime, weight)  # type: ignore[no-untyped-call]
    else:
        output = multiply(x_TK, ends_G, runtime, weight)
    return add_bias(output, bias_GN, ends_G, scales_T)


def add_bias(output_TN: Tensor, bias_GN: Tensor | None, ends_G: Tensor, scales_T: Tensor | None) -> Tensor:
    """Add to each row of a group the group's bias, times the row's scale."""
    if bias_GN is None:
        return output_TN
    rows = torch.arange(output_TN.shape[0], device=output_TN.device, dtype=ends_G.dtype)
    group_T = torch.searchsorted(ends_G, rows, right=True).clamp_(max=bias_GN.shape[0] - 1)
    bias_TN = bias_GN[group_T]
    if scales_T is not None:
        bias_TN = bias_TN * scales_T.unsqueeze(-1).to(bias_TN.dtype)
    return torch.where((rows < ends_G[-1]).unsqueeze(-1), output_TN + bias_TN, 0)


def grouped_mm(x_TK: Tensor, w_GKN: Tensor, ends_G: Tensor) -> Tensor:
    """``x[rows of g] @ w[g]`` for each group, zeros beyond: shape ``(num_rows, N)``."""
    if not _has_kernel(x_TK):
        output = x_TK.new_zeros(x_TK.shape[0], w_GKN.shape[-1])
        for group, (begin, end) in enumerate(_spans(ends_G)):
            output[begin:end] = x_TK[begin:end] @ w_GKN[group]
        return output
    num_columns = w_GKN.shape[-1]
    pad_K, pad_N = _padding(x_TK), _padding(w_GKN)
    if pad_K or pad_N:
        x_TK, w_GKN = F.pad(x_TK, (0, pad_K)), F.pad(w_GKN, (0, pad_N, 0, pad_K))
    output = F.grouped_mm(x_TK, w_GKN, offs=ends_G)
    return _without_tail(output, ends_G)[:, :num_columns]


def multiply(x_TK: Tensor, ends_G: Tensor, runtime: Runtime, weight: ShardedWeight) -> Tensor:
    """Forward's grouped GEMM, in float8 where the weight's recipe and the hardware have it."""
    gemms = weight.gemms
    if not isinstance(gemms, GroupedRowwiseGEMMs):
        with runtime.using(weight) as full_GNK:
            return grouped_mm(x_TK, full_GNK.mT, ends_G)
    with using_quantized(runtime, weight) as quantized:
        return _without_tail(gemms.grouped_output(x_TK, quantized, ends_G, weight.compute_dtype), ends_G)


def multiply_grad(grad_TN: Tensor, ends_G: Tensor, runtime: Runtime, weight: ShardedWeight) -> Tensor:
    """dgrad's grouped GEMM."""
    gemms = weight.gemms
    if not isinstance(gemms, GroupedRowwiseGEMMs):
        with runtime.using(weight.for_backward) as full_GNK:
            return grouped_mm(grad_TN, full_GNK, ends_G)
    with using_quantized(runtime, weight.for_backward) as quantized:
        return _without_tail(gemms.grouped_grad_input(grad_TN, quantized, ends_G, weight.compute_dtype), ends_G)


def _without_tail(output_TN: Tensor, ends_G: Tensor) -> Tensor:
    """Zeros beyond the last group, which kernels leave uninitialized. Not the very tensor: torch 2.11 compiles a
    Function that returns what it has written to in place without its gradient."""
    rows = torch.arange(output_TN.shape[0], device=output_TN.device, dtype=ends_G.dtype)
    return output_TN.masked_fill_((rows >= ends_G[-1]).unsqueeze(-1), 0)[:]


def grouped_wgrad(grad_TN: Tensor, x_TK: Tensor, ends_G: Tensor) -> Tensor:
    """``grad[rows of g].T @ x[rows of g]`` for each group: shape ``(num_groups, N, K)``, zeros for an empty group."""
    if not _has_kernel(x_TK):
        wgrad = x_TK.new_zeros(ends_G.shape[0], grad_TN.shape[-1], x_TK.shape[-1])
        for group, (begin, end) in enumerate(_spans(ends_G)):
            wgrad[group] = grad_TN[begin:end].t() @ x_TK[begin:end]
        return wgrad
    shape_NK = (grad_TN.shape[-1], x_TK.shape[-1])
    if pad := _padding(grad_TN):
        grad_TN = F.pad(grad_TN, (0, pad))
    if pad := _padding(x_TK):
        x_TK = F.pad(x_TK, (0, pad))
    return F.grouped_mm(grad_TN.t(), x_TK, offs=ends_G)[:, : shape_NK[0], : shape_NK[1]]


def reduce_wgrad(runtime: Runtime, weight: ShardedWeight, grad_TN: Tensor, x_TK: Tensor, ends_G: Tensor) -> None:
    """The weight's gradient, on its way to the shard.

    ``grouped_mm`` writes to no given buffer: what it returns is copied into the send buffer, cast and with the sharded
    dim in front, or added to what earlier microbatches have left there.
    """
    with profiler_range("GTP::wgrad", weight.fqn):
        wgrad_GNK = grouped_wgrad(grad_TN, x_TK, ends_G)
    runtime.grads.add_full(weight, wgrad_GNK, is_owned=True)


def _padding(x: Tensor) -> int:
    """Elements that the last dim lacks: the kernels want rows of whole 16-byte units."""
    return -x.shape[-1] % (16 // x.element_size())


def _has_kernel(x: Tensor) -> bool:
    """torch's kernels know no float64; there a loop of products serves as the reference."""
    return x.dtype != torch.float64


def _spans(ends_G: Tensor) -> list[tuple[int, int]]:
    ends = ends_G.tolist()
    return list(zip([0, *ends[:-1]], ends, strict=True))


def _gemms_of(weight: Tensor | None) -> GroupedRowwiseGEMMs | None:
    """Float8 GEMMs of a weight that is not sharded, if it has a recipe with them."""
    gemms = gemms_of(weight) if isinstance(weight, WeightWithRecipe) else None
    return gemms if isinstance(gemms, GroupedRowwiseGEMMs) else None


class _GroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TK: Tensor, weight_GNK: Tensor, ends_G: Tensor) -> Tensor:
        needs_x, needs_weight = ctx.needs_input_grad[:2]
        # What backward will not use is not saved.
        ctx.save_for_backward(x_TK if needs_weight else None, weight_GNK if needs_x else None, ends_G)
        gemms = _gemms_of(weight_GNK)
        if gemms is not None:
            quantized = weight_GNK.quantized_for(Direction.ROWWISE)  # type: ignore[attr-defined]
            return _without_tail(gemms.grouped_output(x_TK, quantized, ends_G, weight_GNK.dtype), ends_G)
        return grouped_mm(x_TK, for_product(weight_GNK, Direction.ROWWISE).mT, ends_G)

    @staticmethod
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        x_TK, weight_GNK, ends_G = ctx.saved_tensors
        grad_TN = grad_TN.contiguous()
        wgrad = grouped_wgrad(grad_TN, x_TK, ends_G) if x_TK is not None else None
        grad_x = None
        gemms = _gemms_of(weight_GNK)
        if gemms is not None:
            quantized = weight_GNK.quantized_for(Direction.COLUMNWISE)
            grad_x = _without_tail(gemms.grouped_grad_input(grad_TN, quantized, ends_G, weight_GNK.dtype), ends_G)
        elif weight_GNK is not None:
            grad_x = grouped_mm(grad_TN, for_product(weight_GNK, Direction.COLUMNWISE), ends_G)
        return grad_x, wgrad, None


class _ShardedGroupedMM(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x_TK: Tensor, leaf: Tensor, ends_G: Tensor, runtime: Runtime, weight: ShardedWeight
    ) -> Tensor:
        ctx.runtime, ctx.weight, ctx.version = runtime, weight, weight.version
        ctx.save_for_backward(x_TK if ctx.needs_input_grad[1] else None, ends_G)
        return multiply(x_TK, ends_G, runtime, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        runtime: Runtime = ctx.runtime
        weight: ShardedWeight = ctx.weight
        runtime.note_backward()
        x_TK, ends_G = ctx.saved_tensors
        grad_TN = grad_TN.contiguous()
        if x_TK is not None and not compat.is_awaited(ctx, 1):
            refuse_partial_recording(weight, runtime.comm.is_capturing)
            x_TK = None
        grad_x = None
        job = None if x_TK is None else partial(reduce_wgrad, runtime, weight, grad_TN, x_TK, ends_G)
        with runtime.grads.beside_dgrad(job):
            if ctx.needs_input_grad[0]:
                check_unmodified(weight, ctx.version)
                grad_x = multiply_grad(grad_TN, ends_G, runtime, weight)
        return grad_x, None, None, None, None
