"""Linear layers in compiled code."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from .. import _torch_compat as compat
from .._params.saved_for_backward import check_unmodified
from ..quant.float8_gemms import gemms_of_name
from . import float8
from .compiled_lookup import _embedding, _materialize
from .compiled_weight import CompiledWeight, ask_policy, gradient_of, handles
from .linear import dgrad, parallel_plan, wgrad


def linear(input: Tensor, bias: Tensor | None, compiled: CompiledWeight) -> Tensor:
    """``F.linear`` as one op of the compiled graph; in float8 with casts before it that are the compiler's."""
    out_features, leaf = compiled.weight.layout.shape[0], compiled.weight.stand_in.leaf
    output: Tensor
    gemms = compiled.weight.gemms
    if gemms is not None:
        float8.check_dtype(input, compiled.weight)
        operands = gemms.cast_input(input.detach().reshape(-1, input.shape[-1]))
        output = _float8_linear(input, operands, leaf, compiled.handle, out_features, gemms.name)
        return output if bias is None else output + bias
    output = _linear(input, leaf, bias, compiled.handle, out_features)
    return output


def parallel_linear(input: Tensor, bias: Tensor | None, compiled: CompiledWeight) -> Tensor | None:
    """``linear`` of DTensors on their local tensors, or None without a plan for it."""
    plan = parallel_plan(input, bias, compiled.weight)
    if plan is None or not isinstance(input, DTensor):
        return None
    is_sum = plan.output == Partial()
    local = input.to_local(grad_placements=[plan.grad_input])
    output = linear(local, bias.to_local() if isinstance(bias, DTensor) and not is_sum else None, compiled)
    stride = tuple(math.prod(plan.shape[dim + 1 :]) for dim in range(len(plan.shape)))
    result = DTensor.from_local(
        output, input.device_mesh, [plan.output], run_check=False, shape=plan.shape, stride=stride
    )
    return result + bias if is_sum and bias is not None else result


@torch.library.custom_op("dtensor_gtp::linear", mutates_args=())
def _linear(input: Tensor, leaf: Tensor, bias: Tensor | None, handle: Tensor, out_features: int) -> Tensor:
    runtime, weight = handles()[handle].resolve_in_forward()
    with runtime.using(weight) as full:
        return F.linear(input, full, bias)


@_linear.register_fake
def _(input: Tensor, leaf: Tensor, bias: Tensor | None, handle: Tensor, out_features: int) -> Tensor:
    return input.new_empty((*input.shape[:-1], out_features))


@torch.library.custom_op("dtensor_gtp::linear_backward", mutates_args=())
def _linear_backward(
    grad: Tensor, input: Tensor | None, leaf: Tensor, handle: Tensor, in_features: int, needs_input: bool, call: int
) -> tuple[Tensor, Tensor]:
    """``input`` is None if the weight is frozen."""
    runtime, weight = handles()[handle].resolve_in_backward()
    job = None
    if input is not None and weight.stand_in.is_awaited:
        job = partial(wgrad, runtime, weight, grad.reshape(-1, grad.shape[-1]), input.reshape(-1, in_features))
    grad_input = grad.new_empty(0)
    with runtime.grads.beside_dgrad(job):
        if needs_input:
            check_unmodified(weight, weight.compiled_version)
            grad_input = dgrad(runtime, weight, grad)
    return grad_input, gradient_of(leaf)


@_linear_backward.register_fake
def _(
    grad: Tensor, input: Tensor | None, leaf: Tensor, handle: Tensor, in_features: int, needs_input: bool, call: int
) -> tuple[Tensor, Tensor]:
    return grad.new_empty((*grad.shape[:-1], in_features) if needs_input else 0), gradient_of(leaf)


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, leaf, _, handle, _ = inputs
    ctx.in_features = input.shape[-1]
    # Of a frozen weight nothing is saved but its name.
    ctx.save_for_backward(input if leaf.requires_grad else None, leaf, handle)


def _linear_grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    input, leaf, handle = ctx.saved_tensors
    needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    grad_input = grad_leaf = None
    if needs_input or needs_weight:
        call = handles().next_call()
        grad_input, grad_leaf = _linear_backward(grad, input, leaf, handle, ctx.in_features, needs_input, call)
    grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if needs_bias else None
    return grad_input if needs_input else None, grad_leaf if needs_weight else None, grad_bias, None, None


_linear.register_autograd(_linear_grad, setup_context=_linear_setup)


@torch.library.custom_op("dtensor_gtp::float8_linear", mutates_args=())
def _float8_linear(
    input: Tensor, operands: list[Tensor], leaf: Tensor, handle: Tensor, out_features: int, gemms: str
) -> Tensor:
    """``operands`` are the casts of ``input``, which is here to be differentiated."""
    runtime, weight = handles()[handle].resolve_in_forward()
    with float8.using_quantized(runtime, weight) as quantized:
        output = gemms_of_name(gemms).output(operands, quantized, weight.compute_dtype)
    return output.view(*input.shape[:-1], out_features)


@_float8_linear.register_fake
def _(input: Tensor, operands: list[Tensor], leaf: Tensor, handle: Tensor, out_features: int, gemms: str) -> Tensor:
    return input.new_empty((*input.shape[:-1], out_features))


@torch.library.custom_op("dtensor_gtp::float8_linear_backward", mutates_args=())
def _float8_backward(
    grad: list[Tensor],
    for_wgrad: list[Tensor],
    leaf: Tensor,
    handle: Tensor,
    in_features: int,
    dtype: torch.dtype,
    gemms: str,
    call: int,
) -> tuple[Tensor, Tensor]:
    """``grad`` are the casts of the output's gradient, empty if the input needs none; ``for_wgrad`` are the casts for
    wgrad, both matrices as they are if it does not quantize, or empty if the weight is frozen."""
    runtime, weight = handles()[handle].resolve_in_backward()
    multiply = gemms_of_name(gemms)
    job = None
    if for_wgrad and weight.stand_in.is_awaited:
        if multiply.high_precision_wgrad:
            job = partial(wgrad, runtime, weight, *for_wgrad)
        else:
            job = partial(float8.wgrad_of, multiply, for_wgrad, runtime, weight)
    with runtime.grads.beside_dgrad(job):
        if grad:
            check_unmodified(weight, weight.compiled_version)
            grad_input = float8.multiply_grad(multiply, grad, runtime, weight)
        else:
            grad_input = for_wgrad[0].new_empty(0, dtype=dtype)
    return grad_input, gradient_of(leaf)


@_float8_backward.register_fake
def _(
    grad: list[Tensor],
    for_wgrad: list[Tensor],
    leaf: Tensor,
    handle: Tensor,
    in_features: int,
    dtype: torch.dtype,
    gemms: str,
    call: int,
) -> tuple[Tensor, Tensor]:
    shape = (grad[0].shape[0], in_features) if grad else (0,)
    return (grad or for_wgrad)[0].new_empty(shape, dtype=dtype), gradient_of(leaf)


def _float8_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, operands, leaf, handle, _, ctx.gemms = inputs
    ctx.in_features, ctx.num_operands = input.shape[-1], len(operands)
    ctx.save_for_backward(input if leaf.requires_grad else None, leaf, handle)


def _float8_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """The casts are traced into the compiled backward, where they fuse with what comes before them."""
    input, leaf, handle = ctx.saved_tensors
    needs_input, needs_weight = ctx.needs_input_grad[0], ctx.needs_input_grad[2]
    gemms = gemms_of_name(ctx.gemms)
    grad_2d = grad.reshape(-1, grad.shape[-1])
    casts = gemms.cast_grad(grad_2d) if needs_input or not gemms.high_precision_wgrad else []
    for_wgrad: list[Tensor] = []
    if needs_weight:
        input_2d = input.reshape(-1, ctx.in_features)
        for_wgrad = [grad_2d, input_2d] if gemms.high_precision_wgrad else gemms.cast_wgrad(grad_2d, input_2d, casts)
    grad_input, grad_leaf = _float8_backward(
        casts if needs_input else [],
        for_wgrad,
        leaf,
        handle,
        ctx.in_features,
        grad.dtype,
        ctx.gemms,
        handles().next_call(),
    )
    return (
        grad_input.view(*grad.shape[:-1], ctx.in_features) if needs_input else None,
        [None] * ctx.num_operands,
        grad_leaf if needs_weight else None,
        None,
        None,
        None,
    )


_float8_linear.register_autograd(_float8_grad, setup_context=_float8_setup)


for _mode in compat.POLICY_MODES:
    for _op in (_linear, _embedding, _materialize):
        _op.register_torch_dispatch(_mode, ask_policy)
