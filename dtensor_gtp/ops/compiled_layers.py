"""Linear and grouped layers and embeddings in compiled code: each op gathers the weight, uses and
frees it."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial

from .._params.refusals import check_unmodified
from .._params.sharded_weight import ShardedWeight
from .._schedule.runtime import Runtime
from ..quant.float8_gemms import gemms_of_name
from ..quant.planes import Direction
from .compiled_weight import CompiledWeight, gradient_of, handles, show_to_policies
from .embedding import embedding_grad, exchanged_ids, exchanged_lookup
from .grouped import add_bias, multiply, reduce_wgrad
from .linear import check_float8_input, dgrad, float8_dgrad, float8_wgrad, parallel_plan, wgrad


def linear(input: Tensor, bias: Tensor | None, compiled: CompiledWeight) -> Tensor:
    """``F.linear`` as one op of the compiled graph. In float8 the casts before the op are the
    compiler's."""
    weight = compiled.weight
    leaf = weight.stand_in.leaf
    out_features = weight.layout.shape[0]
    output: Tensor
    if weight.form.gemms is None:
        output = _linear(input, leaf, bias, compiled.handle, out_features)
        return output
    check_float8_input(input, weight)
    # Detached: ``_float8_grad`` gives the gradient of the input, not of its cast.
    casts = weight.form.gemms.cast_input(input.detach().reshape(-1, input.shape[-1]))
    gemms = weight.form.gemms.name
    output = _float8_linear(input, leaf, casts, compiled.handle, out_features, gemms)
    if bias is not None:
        output = output + bias  # the op has casts in the place of a bias
    return output


def parallel_linear(input: Tensor, bias: Tensor | None, compiled: CompiledWeight) -> Tensor | None:
    """``linear`` of DTensors on their local tensors, or None without a plan for it."""
    plan = parallel_plan(input, bias, compiled.weight)
    if plan is None or not isinstance(input, DTensor):
        return None
    is_sum = plan.output == Partial()
    local_bias = None
    if isinstance(bias, DTensor) and not is_sum:
        local_bias = bias.to_local()
    local = linear(input.to_local(grad_placements=[plan.grad_input]), local_bias, compiled)
    mesh = input.device_mesh
    # The slices of the ranks may differ in size, so from_local needs the logical shape.
    shape = plan.shape
    stride = tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))
    result: Tensor = DTensor.from_local(local, mesh, [plan.output], run_check=False, shape=shape, stride=stride)
    if is_sum and bias is not None:
        result = result + bias  # DTensor lets only one rank add it
    return result


def grouped_linear(
    x: Tensor, bias: Tensor | None, split_sizes: Tensor, scales: Tensor | None, compiled: CompiledWeight
) -> Tensor:
    """A grouped layer as one op of the compiled graph, and its bias."""
    weight = compiled.weight
    # Group sizes stay on the device: the op gets where each group ends.
    ends = split_sizes.cumsum(0, dtype=torch.int32)
    out_features = weight.layout.shape[1]
    output: Tensor = _grouped_linear(x, weight.stand_in.leaf, ends, compiled.handle, out_features)
    return add_bias(output, bias, ends, scales)


def embedding(indices: Tensor, padding_idx: int | None, compiled: CompiledWeight) -> Tensor:
    """``F.embedding`` as one op of the compiled graph."""
    weight = compiled.weight
    padding = padding_idx
    if padding_idx is None:
        padding = -1  # as aten wants it
    # An op cannot see whether gradients are computed around it.
    may_exchange = torch.is_grad_enabled()
    about = (weight.layout.shape[1], padding, weight.compute_dtype, may_exchange)
    output: Tensor = _embedding(indices, weight.stand_in.leaf, compiled.handle, *about)
    return output


# The third argument is a bias, the ends of groups, or casts of the input, which is here to be
# differentiated.
@torch.library.custom_op("dtensor_gtp::linear", mutates_args=())
def _linear(input: Tensor, leaf: Tensor, bias: Tensor | None, handle: Tensor, out_features: int) -> Tensor:
    runtime, weight = handles()[handle].resolve_in_forward()
    return runtime.gathering.compute(F.linear, input, weight.for_forward, bias)


@torch.library.custom_op("dtensor_gtp::grouped_linear", mutates_args=())
def _grouped_linear(input: Tensor, leaf: Tensor, ends: Tensor, handle: Tensor, out_features: int) -> Tensor:
    runtime, weight = handles()[handle].resolve_in_forward()
    return multiply(input, ends, runtime, (weight,), Direction.ROWWISE)


@torch.library.custom_op("dtensor_gtp::float8_linear", mutates_args=())
def _float8_linear(
    input: Tensor, leaf: Tensor, casts: list[Tensor], handle: Tensor, out_features: int, gemms: str
) -> Tensor:
    runtime, weight = handles()[handle].resolve_in_forward()
    with runtime.gathering.using(weight.for_forward) as gathered:
        output = gemms_of_name(gemms).output(casts, gathered.for_gemms(), weight.compute_dtype)
    return output.view(*input.shape[:-1], out_features)


# In backward the input is None if the weight is frozen.
@torch.library.custom_op("dtensor_gtp::linear_backward", mutates_args=())
def _linear_backward(
    grad: Tensor, input: Tensor | None, leaf: Tensor, handle: Tensor, width: int, needs_input: bool, call: int
) -> tuple[Tensor, Tensor]:
    runtime, weight = handles()[handle].resolve_in_backward()
    job = None
    product = None
    if input is not None:
        grad_2d = grad.reshape(-1, grad.shape[-1])
        job = partial(wgrad, runtime, weight, grad_2d, input.reshape(-1, width))
    if needs_input:
        product = partial(dgrad, runtime, weight, grad)
    return _gradients(job, product, runtime, weight, leaf, grad.dtype)


@torch.library.custom_op("dtensor_gtp::grouped_linear_backward", mutates_args=())
def _grouped_backward(
    grad: Tensor,
    input: Tensor | None,
    leaf: Tensor,
    ends: Tensor,
    handle: Tensor,
    width: int,
    needs_input: bool,
    call: int,
) -> tuple[Tensor, Tensor]:
    runtime, weight = handles()[handle].resolve_in_backward()
    grad = grad.contiguous()  # autograd gives any strides, e.g. of an expanded scalar
    job = None
    product = None
    if input is not None:
        # True: ``_gradients`` asks whether the gradient is awaited.
        job = partial(reduce_wgrad, runtime, (weight,), (True,), grad, input, ends)
    if needs_input:
        product = partial(multiply, grad, ends, runtime, (weight,), Direction.COLUMNWISE)
    return _gradients(job, product, runtime, weight, leaf, grad.dtype)


@torch.library.custom_op("dtensor_gtp::float8_linear_backward", mutates_args=())
def _float8_backward(
    casts: list[Tensor],
    for_wgrad: list[Tensor],
    leaf: Tensor,
    handle: Tensor,
    width: int,
    dtype: torch.dtype,
    gemms: str,
    call: int,
) -> tuple[Tensor, Tensor]:
    """``casts`` are those of the output's gradient, empty if the input needs none. ``for_wgrad``
    are the casts for wgrad, both matrices as they are if it does not quantize, or empty if the
    weight is frozen."""
    runtime, weight = handles()[handle].resolve_in_backward()
    float8 = gemms_of_name(gemms)
    job = None
    product = None
    if for_wgrad and float8.high_precision_wgrad:
        job = partial(wgrad, runtime, weight, *for_wgrad)
    elif for_wgrad:
        job = partial(float8_wgrad, runtime, weight, float8, lambda: for_wgrad)
    if casts:
        product = partial(float8_dgrad, runtime, weight, float8, casts)
    return _gradients(job, product, runtime, weight, leaf, dtype)


def _gradients(
    job: Any, product: Any, runtime: Runtime, weight: ShardedWeight, leaf: Tensor, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Run ``job`` (wgrad) and ``product`` (dgrad), where they are needed. Returns what a backward
    op does: the gradient of the input, of this dtype and empty if it is not needed, and that of
    ``leaf``."""
    # Dgrad alone reads the weight again.
    if product is not None:
        check_unmodified(weight, weight.versions.compiled)
    if not weight.stand_in.is_awaited:
        job = None  # this backward is for other tensors, as in ``torch.autograd.grad``
    grad_input = runtime.grads.in_order(job, product)
    if grad_input is None:
        grad_input = torch.empty(0, dtype=dtype, device=weight.device)
    return grad_input, gradient_of(leaf)


@_linear.register_fake
@_grouped_linear.register_fake
@_float8_linear.register_fake
def _(input: Tensor, leaf: Tensor, other: Any, handle: Tensor, out_features: int, *_: Any) -> Tensor:
    return input.new_empty((*input.shape[:-1], out_features))


@_linear_backward.register_fake
@_grouped_backward.register_fake
def _(grad: Tensor, input: Tensor | None, leaf: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    width, needs_input, _ = others[-3:]  # as in both ops
    shape: tuple[int, ...] = (0,)  # of a gradient that is not needed, as ``_gradients`` returns it
    if needs_input:
        shape = (*grad.shape[:-1], width)
    return grad.new_empty(shape), gradient_of(leaf)


@_float8_backward.register_fake
def _(casts: list[Tensor], for_wgrad: list[Tensor], leaf: Tensor, *others: Any) -> tuple[Tensor, Tensor]:
    _, width, dtype, *_ = others
    shape: tuple[int, ...] = (0,)
    if casts:
        shape = (casts[0].shape[0], width)
    # One of them is not empty: the op runs for at least one of the two gradients.
    return (casts or for_wgrad)[0].new_empty(shape, dtype=dtype), gradient_of(leaf)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor, *ends: Tensor) -> None:
    input, leaf, _, handle, *_ = inputs
    ctx.width = input.shape[-1]
    # The gradient of a frozen weight is not computed, so its input is not saved.
    ctx.save_for_backward(input if leaf.requires_grad else None, leaf, *ends, handle)


def _save_float8(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    ctx.num_casts = len(inputs[2])  # each gets a gradient of None
    ctx.gemms = inputs[5]
    _save(ctx, inputs, output)


def _grad(backward: Any, ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    grads: list[Tensor | None] = [None] * 5  # both ops have five arguments
    if needs_input or needs_weight:
        call = handles().next_call()  # see [Note: effects of opaque ops]
        grad_input, grad_leaf = backward(grad, *ctx.saved_tensors, ctx.width, needs_input, call)
        if needs_input:
            grads[0] = grad_input
        if needs_weight:
            grads[1] = grad_leaf
    if needs_bias:
        grads[2] = grad.reshape(-1, grad.shape[-1]).sum(0)  # the bias is an input of the op
    return tuple(grads)


def _float8_grad(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    """The casts are traced into the compiled backward, where they fuse with the ops before them."""
    input, leaf, handle = ctx.saved_tensors
    needs_input, needs_weight = ctx.needs_input_grad[:2]
    gemms = gemms_of_name(ctx.gemms)
    grad_2d = grad.reshape(-1, grad.shape[-1])
    casts: list[Tensor] = []
    for_wgrad: list[Tensor] = []
    if needs_input or not gemms.high_precision_wgrad:
        casts = gemms.cast_grad(grad_2d)
    if needs_weight:
        input_2d = input.reshape(-1, ctx.width)
        for_wgrad = [grad_2d, input_2d]
        if not gemms.high_precision_wgrad:
            for_wgrad = gemms.cast_wgrad(grad_2d, input_2d, casts)
    if not needs_input:
        casts = []  # wgrad alone has read them
    about = (leaf, handle, ctx.width, grad.dtype, ctx.gemms, handles().next_call())
    grad_input, grad_leaf = _float8_backward(casts, for_wgrad, *about)
    grads: list[Any] = [None, None, [None] * ctx.num_casts, None, None, None]  # one for each argument
    if needs_input:
        grads[0] = grad_input.view(*grad.shape[:-1], ctx.width)
    if needs_weight:
        grads[1] = grad_leaf
    return tuple(grads)


def _save_grouped(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _save(ctx, inputs, output, inputs[2])


_linear.register_autograd(partial(_grad, _linear_backward), setup_context=_save)
_grouped_linear.register_autograd(partial(_grad, _grouped_backward), setup_context=_save_grouped)
_float8_linear.register_autograd(_float8_grad, setup_context=_save_float8)


@torch.library.custom_op("dtensor_gtp::embedding", mutates_args=())
def _embedding(
    indices: Tensor, leaf: Tensor, handle: Tensor, dim: int, padding_idx: int, dtype: torch.dtype, may_exchange: bool
) -> Tensor:
    runtime, weight = handles()[handle].resolve_in_forward()
    if may_exchange and (found := exchanged_lookup(indices, runtime, weight)) is not None:
        return found[0]
    return runtime.gathering.compute(F.embedding, indices, weight.for_forward)  # padding_idx concerns backward


@_embedding.register_fake
def _(indices: Tensor, leaf: Tensor, handle: Tensor, dim: int, padding: int, dtype: torch.dtype, *_: Any) -> Tensor:
    return indices.new_empty((*indices.shape, dim), dtype=dtype)


@torch.library.custom_op("dtensor_gtp::embedding_backward", mutates_args=())
def _embedding_backward(grad: Tensor, indices: Tensor, leaf: Tensor, handle: Tensor, padding: int, call: int) -> Tensor:
    runtime, weight = handles()[handle].resolve_in_backward()
    if weight.stand_in.is_awaited:  # ``torch.autograd.grad`` may ask for others alone
        # Asked of all ranks again: the op of forward returns its output alone.
        ids = exchanged_ids(indices, runtime, weight)
        embedding_grad(runtime, weight, grad, indices, ids, padding)
    return gradient_of(leaf)


def _save_lookup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    indices, leaf, handle, _, ctx.padding_idx, _, _ = inputs
    ctx.save_for_backward(indices, leaf, handle)


def _embedding_grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_leaf = _embedding_backward(grad, *ctx.saved_tensors, ctx.padding_idx, handles().next_call())
    return None, grad_leaf, None, None, None, None, None


_embedding_backward.register_fake(lambda grad, indices, leaf, *others: gradient_of(leaf))
_embedding.register_autograd(_embedding_grad, setup_context=_save_lookup)
show_to_policies(_linear, _grouped_linear, _embedding)
