"""``F.linear`` on a sharded weight: gather, GEMM, free; in backward wgrad into the send buffer,
gather, dgrad, free.

Wgrad comes first by default: it needs no weight, so it hides the end of the gather, and its
reduce-scatter hides behind dgrad. In float8 the GEMMs multiply with the planes that were gathered.

The policy of a selective activation checkpoint sees the GEMM (``aten.mm``, ``aten.addmm``) or the
lookup on an ``UngatheredWeight``: if the output was saved, the recomputation does not gather it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .. import _torch_compat as compat
from .._comm.debug import profiler_range
from .._params.refusals import check_differentiable, check_unmodified, wants_wgrad
from .._params.sharded_weight import ShardedWeight
from .._schedule.runtime import Runtime
from ..placement import GTPShard
from ..quant.float8_gemms import Float8GEMMs, Tensors


def linear(input: Tensor, bias: Tensor | None, runtime: Runtime, weight: ShardedWeight) -> Tensor:
    """``F.linear(input, weight, bias)`` for a weight of logical shape ``(out_features, in_features)``."""
    if torch.is_grad_enabled():
        check_differentiable(weight)
        # ``quick_apply`` wants it unwrapped.
        result: Tensor = _apply_linear(compat.unwrap_if_dead(input), weight.leaf, bias, runtime, weight)
        return result
    return _product(input, bias, runtime, weight, compat.asks_checkpoint_policy())[0]


def _forward(
    ctx: Any, input: Tensor, leaf: Tensor, bias: Tensor | None, runtime: Runtime, weight: ShardedWeight
) -> Tensor:
    ctx.use = (runtime, weight, weight.version, weight.form.gemms)
    is_policy_asked = compat.asks_checkpoint_policy()
    output, known = _product(input, bias, runtime, weight, is_policy_asked)
    if not is_policy_asked:  # torch must see writes to what a policy has saved
        output = compat.no_view(output)
    # The gradient of a frozen weight is not computed, so its input is not saved.
    if ctx.needs_input_grad[1]:
        ctx.save_for_backward(input, *known)
    else:
        ctx.save_for_backward(None)
    return output


def _product(
    input: Tensor, bias: Tensor | None, runtime: Runtime, weight: ShardedWeight, is_policy_asked: bool
) -> tuple[Tensor, Tensors]:
    """The output, and what a float8 wgrad may know of the input."""
    gemms = weight.form.gemms
    if gemms is not None:
        check_float8_input(input, weight)
    if is_policy_asked:  # about the GEMM of nn.Linear, also in float8
        return F.linear(input, UngatheredWeight(runtime, weight), bias), []
    if gemms is None:
        return runtime.gathering.compute(F.linear, input, weight.for_forward, bias), []
    output, casts = float8_product(input.reshape(-1, input.shape[-1]), runtime, weight)
    output = output.view(*input.shape[:-1], output.shape[-1])
    if bias is not None:
        output = output + bias
    return output, gemms.for_later(casts)


def check_float8_input(input: Tensor, weight: ShardedWeight) -> None:
    """Raise as ``F.linear`` does for an input of another dtype than the layer computes in."""
    if input.dtype != weight.compute_dtype:
        what = f"parameter '{weight.fqn}' of shape {tuple(weight.layout.shape)}"
        got = f"{input.dtype} and {weight.compute_dtype} for {what}"
        raise RuntimeError(f"F.linear expects input and weight of one dtype, but got {got}.")


def _backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
    """The gradients of what ``_forward`` takes: input and bias. That of the weight goes to the shard."""
    runtime: Runtime
    weight: ShardedWeight
    gemms: Float8GEMMs | None
    runtime, weight, version, gemms = ctx.use
    needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
    needs_weight = needs_weight and wants_wgrad(ctx, 1, weight, runtime.comm.streams)
    runtime.note_backward()
    input, *known = ctx.saved_tensors
    grads = runtime.grads
    grad_MN = as_matrix(grad_output)
    is_wgrad_quantized = gemms is not None and not gemms.high_precision_wgrad
    casts: Tensors = []
    if gemms is not None and (needs_input or (needs_weight and is_wgrad_quantized)):
        casts = gemms.cast_grad(grad_MN)  # dgrad and wgrad read the same casts
    # The runtime decides which of the two runs first, see ``in_order``.
    job = None
    product = None
    if needs_weight:
        job = partial(grads.compute, wgrad, runtime, weight, grad_MN, as_matrix(input))
        if is_wgrad_quantized:
            cast = partial(gemms.cast_wgrad, grad_MN, as_matrix(input), casts, known)
            job = partial(grads.compute, float8_wgrad, runtime, weight, gemms, cast)
        if torch.is_grad_enabled():
            job = torch.no_grad()(job)  # a gradient in ``.grad`` is a constant, see ``publish``
    if needs_input:
        # Dgrad alone reads the weight again.
        check_unmodified(weight, version)
        product = partial(dgrad, runtime, weight, grad_output)
        if gemms is not None:
            product = partial(float8_dgrad, runtime, weight, gemms, casts)
        elif torch.is_grad_enabled():
            product = partial(_dgrad_in_graph, runtime, weight, grad_output)
    grad_input = grads.in_order(job, product)
    if grad_input is not None and gemms is not None:
        grad_input = grad_input.view(*grad_output.shape[:-1], grad_input.shape[-1])
    grad_bias = None
    if needs_bias:
        grad_bias = grad_MN.sum(0)
    return grad_input, None, grad_bias, None, None


def _dgrad_in_graph(runtime: Runtime, weight: ShardedWeight, grad_output: Tensor) -> Tensor:
    """For ``create_graph=True``: autograd can differentiate it. The graph keeps the full weight."""
    full, _ = runtime.reads.value_in_passing(weight)
    return torch.matmul(grad_output, full)


_backward_once = compat.once_differentiable(_backward)


class _Linear(torch.autograd.Function):
    forward = staticmethod(_forward)

    @staticmethod
    def backward(ctx: Any, grad_output: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():  # with ``create_graph``
            _, weight, _, gemms = ctx.use
            # Autograd knows no ops of float8, and the local weight of tensor parallelism is a part.
            if gemms is not None or weight.tp_spec is not None or weight.for_backward is not weight.for_forward:
                return _backward_once(ctx, grad_output)
        return _backward(ctx, grad_output)


_apply_linear = compat.quick_apply(_Linear)


# Functions, so that nothing holds the gathered weight after dgrad: wgrad may come next, see
# ``wgrad_first``.
def dgrad(runtime: Runtime, weight: ShardedWeight, grad_output: Tensor) -> Tensor:
    return runtime.gathering.compute(torch.matmul, grad_output, weight.for_backward)


def float8_dgrad(runtime: Runtime, weight: ShardedWeight, gemms: Float8GEMMs, casts: Tensors) -> Tensor:
    """``casts`` are those of ``gemms.cast_grad``. Shape ``(M, K)``."""
    with runtime.gathering.using(weight.for_backward) as gathered:
        return gemms.grad_input(casts, gathered.for_gemms(), weight.compute_dtype)


def wgrad(runtime: Runtime, weight: ShardedWeight, grad_MN: Tensor, input_MK: Tensor) -> None:
    """Compute the weight's gradient, written by the GEMM into the buffer that the reduce-scatter
    sends."""
    # A head, or another layer beside groups, travels as their gradients do: fp32 would take twice the bytes.
    if runtime.members.groups and runtime.grads.travels_narrow(weight, grad_MN.dtype):
        with profiler_range("GTP::wgrad", weight.fqn):
            grad = grad_MN.t().mm(input_MK)
        runtime.grads.add_full(weight, grad, is_owned=True)
        return
    with profiler_range("GTP::wgrad", weight.fqn):
        buffer, is_accumulating = runtime.grads.target(weight)
        # A view of the buffer that is sent, so nothing is copied.
        _multiply_into(weight.layout.full_view(buffer), grad_MN.t(), input_MK, is_accumulating)
    runtime.grads.submit(weight, buffer)


def _keeps_wide_sum(dtype: torch.dtype, operand: Tensor) -> bool:
    """Whether a GEMM of 16-bit operands is to give a gradient of ``dtype`` itself. cuBLAS
    accumulates in fp32 anyway: keep those bits instead of rounding them away and widening again."""
    return dtype == torch.float32 and operand.is_cuda and operand.dtype in (torch.bfloat16, torch.float16)


def _multiply_into(target: Tensor, left: Tensor, right: Tensor, is_accumulating: bool) -> None:
    is_wide = _keeps_wide_sum(target.dtype, left)
    # Without gradient sync: ``target`` holds the sum of earlier microbatches.
    if is_accumulating and is_wide:
        # The GEMM adds: no memory for the product (pytorch/pytorch#167931).
        torch.addmm(target, left, right, torch.float32, out=target)
    elif is_accumulating:
        target += left.mm(right)
    elif target.dtype == left.dtype:
        torch.mm(left, right, out=target)
    elif is_wide:
        torch.mm(left, right, torch.float32, out=target)
    else:
        target.copy_(left.mm(right))


def as_matrix(x: Tensor) -> Tensor:
    """``x`` with all dims but the last one as rows."""
    if x.ndim == 2:
        return x
    # Not -1 for the rows: torch cannot infer them where the last dim is empty.
    return x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def float8_wgrad(runtime: Runtime, weight: ShardedWeight, gemms: Float8GEMMs, cast: Callable[[], Tensors]) -> None:
    """``cast`` makes what ``gemms.cast_wgrad`` does."""
    runtime.grads.add_full(weight, gemms.grad_weight(cast(), weight.reduce_dtype), is_owned=True)


def float8_product(input_MK: Tensor, runtime: Runtime, weight: ShardedWeight) -> tuple[Tensor, Tensors]:
    """``input @ weight.T`` in float8, and the casts of the input. They come before the wait for the
    gather, which they help to hide."""
    assert weight.form.gemms is not None
    casts = weight.form.gemms.cast_input(input_MK)  # before the wait
    with runtime.gathering.using(weight.for_forward) as gathered:
        return weight.form.gemms.output(casts, gathered.for_gemms(), weight.compute_dtype), casts


class UngatheredWeight(Tensor):
    """Stands for the full weight, or its transpose, in the arguments of an op; the op itself gets
    the real one."""

    _runtime: Runtime
    _weight: ShardedWeight
    _is_transposed: bool

    @staticmethod
    def __new__(cls, runtime: Runtime, weight: ShardedWeight, is_transposed: bool = False) -> UngatheredWeight:
        shape = weight.layout.shape
        strides = (shape[1], 1)
        if is_transposed:
            shape = shape[::-1]
            strides = strides[::-1]
        options = {"dtype": weight.compute_dtype, "device": weight.device}
        self = compat.make_wrapper_subclass(cls, shape, strides=strides, **options)
        self._runtime = runtime
        self._weight = weight
        self._is_transposed = is_transposed
        return self  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # ``F.linear`` transposes the weight before the product.
        if func in (torch.ops.aten.t.default, torch.ops.aten.detach.default):
            (weight,) = args
            return cls(weight._runtime, weight._weight, weight._is_transposed != (func is torch.ops.aten.t.default))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) and isinstance(args[-1], cls):
            # aten.addmm has the bias first.
            *bias, matrix, weight = args
            if weight._weight.form.gemms is not None and weight._is_transposed:
                output, _ = float8_product(matrix, weight._runtime, weight._weight)
                return output + bias[0] if bias else output
        with ExitStack() as stack:  # releases the weights after the op
            real = compat.tree_map_only(cls, lambda weight: weight._gathered(stack), (args, kwargs or {}))
            return func(*real[0], **real[1])

    def _gathered(self, stack: ExitStack) -> Tensor:
        full = stack.enter_context(self._runtime.gathering.using(self._weight.for_forward)).full
        if self._is_transposed:
            full = full.t()
        return full


class TPPlan(NamedTuple):
    """How a linear layer whose weight is sharded over tp runs on local tensors."""

    output: Placement
    grad_input: Placement
    shape: torch.Size  # logical, of the output


def parallel_plan(input: Tensor, bias: Tensor | None, weight: ShardedWeight) -> TPPlan | None:
    """The plan of a layer that can run on its local tensors alone, None where DTensor has more to do."""
    spec = weight.tp_spec
    # DTensor handles meshes of several axes, and converts between layouts.
    if spec is None or spec.mesh.ndim != 1 or not isinstance(input, DTensor):
        return None
    if input.device_mesh != spec.mesh or input.shape[-1] != spec.shape[1]:
        return None
    shape = torch.Size((*input.shape[:-1], spec.shape[0]))
    of_weight = spec.placements[0]
    of_input = input.placements[0]
    of_bias: Placement | None = None
    if isinstance(bias, DTensor):
        of_bias = bias.placements[0]
    if not isinstance(of_weight, Shard | GTPShard) or getattr(of_weight, "split_factor", 1) != 1:
        return None
    # Features of the input or the output are cut at the same places as the weight.
    block_size = getattr(of_weight, "block_size", 1)
    last: Placement = Shard(input.ndim - 1)
    if block_size != 1:
        last = GTPShard(input.ndim - 1, block_size=block_size)
    # Column-wise: each rank computes its features of the output.
    if of_weight.dim == 0 and of_input == Replicate() and (bias is None or of_bias == of_weight):
        return TPPlan(last, Partial(), shape)
    # Row-wise: each rank computes a term of the sum.
    if of_weight.dim == 1 and of_input == last and (bias is None or of_bias == Replicate()):
        return TPPlan(Partial(), last, shape)
    return None


def parallel_linear(input: Tensor, bias: Tensor | None, runtime: Runtime, weight: ShardedWeight) -> Tensor | None:
    """``F.linear`` of DTensors on their local tensors, without DTensor's slow dispatch; None
    without a plan for it."""
    plan = parallel_plan(input, bias, weight)
    if plan is None:
        return None
    if torch.is_grad_enabled():
        check_differentiable(weight)
    is_sum = plan.output == Partial()
    output: Tensor = _ParallelLinear.apply(  # type: ignore[no-untyped-call]
        input, weight.leaf, None if is_sum else bias, runtime, weight, plan
    )
    if is_sum and bias is not None:
        output = output + bias  # by DTensor, because only one rank may add it to a partial sum
    return output


class _ParallelLinear(torch.autograd.Function):
    """Takes DTensors apart on the way in and makes DTensors on the way out, in both directions.
    With ``to_local`` and ``from_local`` around ``linear``, as compiled code has it, the host needs
    an eighth more (0.80 ms, not 0.71, for forward and backward of a layer on a busy CPU)."""

    @staticmethod
    def forward(
        ctx: Any, input: DTensor, _: Tensor, bias: DTensor | None, runtime: Runtime, weight: ShardedWeight, plan: TPPlan
    ) -> DTensor:
        given = compat.dtensor_spec(input)
        input_spec = compat.make_spec(given.mesh, (plan.grad_input,), given.shape, input.dtype)
        ctx.grad_specs = (input_spec, None)
        local_bias = None
        if bias is not None:
            ctx.grad_specs = (input_spec, compat.dtensor_spec(bias))
            local_bias = compat.completed_local(bias)
        ctx.placements = (plan.output,)
        if plan.output == Partial():
            ctx.placements = (Replicate(),)  # the gradient of a sum is that of each term
        local_input = compat.completed_local(input)
        output = _forward(ctx, local_input, weight.leaf, local_bias, runtime, weight)
        output_spec = compat.make_spec(given.mesh, (plan.output,), plan.shape, output.dtype)
        return compat.wrap_local(output, output_spec)

    @staticmethod
    @compat.once_differentiable
    def backward(ctx: Any, grad_output: DTensor) -> tuple[Tensor | None, ...]:
        # What follows the layer may have another layout.
        if grad_output.placements != ctx.placements:
            grad_output = grad_output.redistribute(placements=ctx.placements)
        local_input, _, local_bias, *_ = _backward(ctx, compat.completed_local(grad_output))
        input_spec, bias_spec = ctx.grad_specs
        if local_input is not None:
            local_input = compat.wrap_local(local_input, input_spec)
        if local_bias is not None:
            local_bias = compat.wrap_local(local_bias, bias_spec)
        return local_input, None, local_bias, None, None, None
