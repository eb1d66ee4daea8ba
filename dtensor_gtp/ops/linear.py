"""``F.linear`` on a sharded weight: gather, GEMM, free; in backward wgrad into the send buffer, gather, dgrad, free."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F

from .. import _torch_compat as compat
from .._runtime.param import ShardedWeight
from .._runtime.saved import check_unmodified
from .._runtime.state import Runtime


def linear(input: torch.Tensor, bias: torch.Tensor | None, runtime: Runtime, weight: ShardedWeight) -> torch.Tensor:
    """``F.linear(input, weight, bias)``.

    Args:
        input: Shape ``(*, in_features)``.
        bias: Shape ``(out_features,)`` or None.
        runtime: Gathers the weight and reduces its gradient.
        weight: Logical shape ``(out_features, in_features)``.

    Returns:
        Shape ``(*, out_features)``.
    """
    if not torch.is_grad_enabled():
        with runtime.using(weight) as full:
            return F.linear(input, full, bias)
    result: torch.Tensor = _Linear.apply(input, weight.leaf, bias, runtime, weight)  # type: ignore[no-untyped-call]
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        leaf: torch.Tensor,
        bias: torch.Tensor | None,
        runtime: Runtime,
        weight: ShardedWeight,
    ) -> torch.Tensor:
        ctx.runtime, ctx.weight, ctx.version = runtime, weight, weight.version
        with runtime.using(weight) as full:
            output = F.linear(input, full, bias)
        if ctx.needs_input_grad[1]:
            ctx.save_for_backward(input)
        else:
            # Frozen weight: dgrad needs the weight alone. Saving nothing still detects a second backward.
            ctx.save_for_backward()
        return output

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        runtime: Runtime = ctx.runtime
        weight: ShardedWeight = ctx.weight
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        needs_weight = needs_weight and compat.is_awaited(ctx, 1)
        runtime.note_backward()
        saved = ctx.saved_tensors
        grad_2d = grad_output.reshape(-1, grad_output.shape[-1])
        grad_input = grad_bias = None
        if needs_weight:
            # wgrad first: it needs no weight, so it hides this gather, and its scatter then hides behind dgrad.
            wgrad(runtime, weight, grad_2d, saved[0].reshape(-1, saved[0].shape[-1]))
        if needs_input:
            check_unmodified(weight, ctx.version)
            with runtime.using(weight) as full:
                grad_input = grad_output.matmul(full)
        if needs_bias:
            grad_bias = grad_2d.sum(0)
        return grad_input, None, grad_bias, None, None


def wgrad(runtime: Runtime, weight: ShardedWeight, grad_MN: torch.Tensor, input_MK: torch.Tensor) -> None:
    """The weight's gradient, by the GEMM's own output into the buffer that the reduce-scatter sends."""
    buffer, is_accumulating = runtime.grads.target(weight)
    view_NK = weight.layout.full_view(buffer)
    if is_accumulating:
        view_NK += grad_MN.t().mm(input_MK)
    elif buffer.dtype == grad_MN.dtype:
        torch.mm(grad_MN.t(), input_MK, out=view_NK)
    elif buffer.dtype == torch.float32 and grad_MN.is_cuda and grad_MN.dtype in (torch.bfloat16, torch.float16):
        # cuBLAS accumulates in fp32 anyway: keep those bits instead of rounding them away and widening again.
        torch.mm(grad_MN.t(), input_MK, torch.float32, out=view_NK)
    else:
        view_NK.copy_(grad_MN.t().mm(input_MK))
    runtime.grads.submit(weight, buffer)
