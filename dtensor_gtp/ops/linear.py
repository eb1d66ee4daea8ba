"""``F.linear`` on a sharded weight: gather, GEMM, free; in backward wgrad into the send buffer, gather, dgrad, free.

Wgrad comes first by default: it needs no weight, so it hides the end of the gather, and its scatter hides behind dgrad.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .. import _torch_compat as compat
from .._comm.debug import profiler_range
from .._params.saved_for_backward import check_differentiable, check_unmodified, refuse_partial_recording
from .._params.sharded_weight import ShardedWeight
from .._schedule.runtime import Runtime
from ..placement import GTPShard
from ..quant.float8_gemms import Float8GEMMs
from . import float8
from .ungathered import using


def linear(input: Tensor, bias: Tensor | None, runtime: Runtime, weight: ShardedWeight) -> Tensor:
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
        if weight.gemms is not None:
            return float8.multiply(weight.gemms, input, bias, runtime, weight)
        with runtime.using(weight) as full:
            return F.linear(input, full, bias)
    check_differentiable(weight)
    result: Tensor = _Linear.apply(input, weight.leaf, bias, runtime, weight)  # type: ignore[no-untyped-call]
    return result


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, input: Tensor, leaf: Tensor, bias: Tensor | None, runtime: Runtime, weight: ShardedWeight
    ) -> Tensor:
        return _forward(ctx, input, bias, runtime, weight)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        grad_input, grad_bias = _backward(ctx, grad_output)
        return grad_input, None, grad_bias, None, None


def _forward(ctx: Any, input: Tensor, bias: Tensor | None, runtime: Runtime, weight: ShardedWeight) -> Tensor:
    ctx.runtime, ctx.weight, ctx.version = runtime, weight, weight.version
    ctx.gemms = weight.gemms
    if ctx.gemms is not None:
        output = float8.multiply(ctx.gemms, input, bias, runtime, weight)
    else:
        with using(runtime, weight) as full:
            output = F.linear(input, full, bias)
    if ctx.needs_input_grad[1]:
        ctx.save_for_backward(input)
    else:
        # Frozen weight: dgrad needs the weight alone. Saving nothing still detects a second backward.
        ctx.save_for_backward()
    return output


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of input and bias; that of the weight is on its way to the shard."""
    runtime: Runtime = ctx.runtime
    weight: ShardedWeight = ctx.weight
    needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    if needs_weight and not compat.is_awaited(ctx, 1):
        refuse_partial_recording(weight, runtime.comm.is_capturing)
        needs_weight = False
    runtime.note_backward()
    saved = ctx.saved_tensors
    grad_2d = grad_output.reshape(-1, grad_output.shape[-1])
    grad_input = grad_bias = None
    if ctx.gemms is not None:
        grad_input = _backward_float8(ctx, grad_2d, saved, needs_input, needs_weight)
        return (
            None if grad_input is None else grad_input.view(*grad_output.shape[:-1], grad_input.shape[-1]),
            grad_2d.sum(0) if needs_bias else None,
        )
    job = None
    if needs_weight:
        input_2d = saved[0].reshape(-1, saved[0].shape[-1])
        job = partial(runtime.grads.compute, partial(wgrad, runtime, weight, grad_2d, input_2d))
    with runtime.grads.beside_dgrad(job):
        if needs_input:
            check_unmodified(weight, ctx.version)
            grad_input = dgrad(runtime, weight, grad_output)
    if needs_bias:
        grad_bias = grad_2d.sum(0)
    return grad_input, grad_bias


def _backward_float8(
    ctx: Any, grad_MN: Tensor, saved: tuple[Tensor, ...], needs_input: bool, needs_weight: bool
) -> Tensor | None:
    """The input's gradient, shape ``(M, K)``, and that of the weight on its way."""
    runtime: Runtime = ctx.runtime
    weight: ShardedWeight = ctx.weight
    gemms: Float8GEMMs = ctx.gemms
    is_cast = needs_input or (needs_weight and not gemms.high_precision_wgrad)
    grad = gemms.cast_grad(grad_MN) if is_cast else []
    job = None
    if needs_weight:
        input_MK = saved[0].reshape(-1, saved[0].shape[-1])
        if gemms.high_precision_wgrad:
            compute = partial(wgrad, runtime, weight, grad_MN, input_MK)
        else:
            compute = partial(float8.wgrad, gemms, grad, grad_MN, input_MK, runtime, weight)
        job = partial(runtime.grads.compute, compute)
    grad_input = None
    with runtime.grads.beside_dgrad(job):
        if needs_input:
            check_unmodified(weight, ctx.version)
            grad_input = float8.multiply_grad(gemms, grad, runtime, weight)
    return grad_input


class ParallelPlan(NamedTuple):
    """How a linear layer whose weight tp has cut runs on local tensors.

    Args:
        output: Placement of the output on tp.
        grad_input: Placement of the input's gradient.
        shape: Logical shape of the output.
    """

    output: Placement
    grad_input: Placement
    shape: torch.Size


def parallel_plan(input: Tensor, bias: Tensor | None, weight: ShardedWeight) -> ParallelPlan | None:
    """The plan of a layer in which the local tensors are all there is to it, None where DTensor has more to do.

    Column-wise, each rank of tp has the whole input and some of the output's features; the input's gradient is a
    partial sum. Row-wise, it has some of the input's features, and the output is a partial sum.
    """
    spec = weight.tp_spec
    if spec is None or spec.mesh.ndim != 1 or not isinstance(input, DTensor):
        return None
    if input.device_mesh != spec.mesh or input.shape[-1] != spec.shape[1]:
        return None
    shape = torch.Size((*input.shape[:-1], spec.shape[0]))
    of_weight, of_input = spec.placements[0], input.placements[0]
    of_bias = bias.placements[0] if isinstance(bias, DTensor) else None
    if not isinstance(of_weight, Shard | GTPShard) or getattr(of_weight, "split_factor", 1) != 1:
        return None
    # The features of the input or the output are cut as the weight is: at rows, or at blocks of them.
    block_size = getattr(of_weight, "block_size", 1)
    last: Placement = Shard(input.ndim - 1) if block_size == 1 else GTPShard(input.ndim - 1, block_size=block_size)
    if of_weight.dim == 0 and of_input == Replicate() and (bias is None or of_bias == of_weight):
        return ParallelPlan(last, Partial(), shape)
    if of_weight.dim == 1 and of_input == last and (bias is None or of_bias == Replicate()):
        return ParallelPlan(Partial(), last, shape)
    return None


def parallel_linear(input: Tensor, bias: Tensor | None, runtime: Runtime, weight: ShardedWeight) -> Tensor | None:
    """``F.linear`` of DTensors on their local tensors, or None without a plan for it.

    All that DTensor would do besides is to find out the plan, op by op, which takes the host longer than a small GEMM.

    Args:
        input: Logical shape ``(*, in_features)``.
        bias: Logical shape ``(out_features,)`` or None.
        runtime: Gathers the weight and reduces its gradient.
        weight: Logical shape ``(out_features, in_features)``.
    """
    plan = parallel_plan(input, bias, weight)
    if plan is None:
        return None
    if torch.is_grad_enabled():
        check_differentiable(weight)
    # To a partial sum the bias is to be added once: DTensor does that.
    is_sum = plan.output == Partial()
    output: Tensor = _ParallelLinear.apply(  # type: ignore[no-untyped-call]
        input, weight.leaf, None if is_sum else bias, runtime, weight, plan
    )
    return output + bias if is_sum and bias is not None else output


class _ParallelLinear(torch.autograd.Function):
    """Takes DTensors apart on the way in and makes DTensors on the way out, in both directions."""

    @staticmethod
    def forward(
        ctx: Any,
        input: DTensor,
        leaf: Tensor,
        bias: DTensor | None,
        runtime: Runtime,
        weight: ShardedWeight,
        plan: ParallelPlan,
    ) -> DTensor:
        given = compat.dtensor_spec(input)
        ctx.grad_specs = (
            compat.make_spec(given.mesh, (plan.grad_input,), given.shape, input.dtype),
            compat.dtensor_spec(bias) if bias is not None else None,
        )
        # The gradient of a partial sum is the same for all terms.
        ctx.placements = (Replicate() if plan.output == Partial() else plan.output,)
        local_bias = compat.completed_local(bias) if bias is not None else None
        output = _forward(ctx, compat.completed_local(input), local_bias, runtime, weight)
        return compat.wrap_local(output, compat.make_spec(given.mesh, (plan.output,), plan.shape, output.dtype))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_output: DTensor) -> tuple[Tensor | None, ...]:
        if grad_output.placements != ctx.placements:
            grad_output = grad_output.redistribute(placements=ctx.placements)
        grads = _backward(ctx, compat.completed_local(grad_output))
        wrapped = (
            grad if grad is None else compat.wrap_local(grad, spec)
            for grad, spec in zip(grads, ctx.grad_specs, strict=True)
        )
        grad_input, grad_bias = wrapped
        return grad_input, None, grad_bias, None, None, None


def dgrad(runtime: Runtime, weight: ShardedWeight, grad_output: Tensor) -> Tensor:
    """The input's gradient. A function, so that nothing holds the gathered weight afterwards, see ``wgrad_first``."""
    with runtime.using(weight.for_backward) as full:
        return grad_output.matmul(full)


def wgrad(runtime: Runtime, weight: ShardedWeight, grad_MN: Tensor, input_MK: Tensor) -> None:
    """The weight's gradient, by the GEMM's own output into the buffer that the reduce-scatter sends."""
    buffer, is_accumulating = runtime.grads.target(weight)
    with profiler_range("GTP::wgrad", weight.fqn):
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
