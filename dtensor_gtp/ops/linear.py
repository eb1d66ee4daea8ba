"""``F.linear`` on a sharded weight: gather, GEMM, free; in backward wgrad into the send buffer, gather, dgrad, free.

Wgrad comes first by default: it needs no weight, so it hides the end of the gather, and its reduce-scatter hides behind
dgrad. In float8 the GEMMs multiply with the planes that were gathered.

The policy of a selective activation checkpoint sees the GEMM (``aten.mm``, ``aten.addmm``) or the lookup on an
``UngatheredWeight``: if the output was saved, the recomputation does not gather the weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

from .. import _torch_compat as compat
from .._comm.debug import profiler_range
from .._params.refusals import check_differentiable, check_unmodified, refuse_partial_recording
from .._params.sharded_weight import Gatherable, ShardedWeight
from .._schedule.runtime import Runtime
from ..placement import GTPShard
from ..quant.float8_gemms import Float8GEMMs, Tensors
from ..quant.planes import Quantized


def linear(input: Tensor, bias: Tensor | None, runtime: Runtime, weight: ShardedWeight) -> Tensor:
    """``F.linear(input, weight, bias)`` for a weight of logical shape ``(out_features, in_features)``."""
    if torch.is_grad_enabled():
        check_differentiable(weight)
        # ``quick_apply`` wants it unwrapped.
        result: Tensor = _apply_linear(compat.unwrap_if_dead(input), weight.leaf, bias, runtime, weight)
        return result
    return _product(input, bias, runtime, weight, compat.asks_checkpoint_policy())


def _forward(
    ctx: Any, input: Tensor, leaf: Tensor, bias: Tensor | None, runtime: Runtime, weight: ShardedWeight
) -> Tensor:
    ctx.use = runtime, weight, weight.version, weight.form.gemms
    is_policy_asked = compat.asks_checkpoint_policy()
    output = _product(input, bias, runtime, weight, is_policy_asked)
    if not is_policy_asked:  # torch must see writes to what a policy has saved
        output = compat.no_view(output)
    # The gradient of a frozen weight is not computed, so its input is not saved.
    ctx.save_for_backward(input if ctx.needs_input_grad[1] else None)
    return output


def _product(
    input: Tensor, bias: Tensor | None, runtime: Runtime, weight: ShardedWeight, is_policy_asked: bool
) -> Tensor:
    if weight.form.gemms is not None:
        check_float8_input(input, weight)
    if is_policy_asked:  # about the GEMM of nn.Linear, also in float8
        return F.linear(input, UngatheredWeight(runtime, weight), bias)
    if weight.form.gemms is None:
        return runtime.gathering.compute(F.linear, input, weight.for_forward, bias)
    output = float8_product(input.reshape(-1, input.shape[-1]), runtime, weight)
    output = output.view(*input.shape[:-1], output.shape[-1])
    return output if bias is None else output + bias


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
    if needs_weight and not compat.is_awaited(ctx, 1):
        refuse_partial_recording(weight, runtime.comm.streams.is_capturing)
        needs_weight = False
    runtime.note_backward()
    (input,) = ctx.saved_tensors
    grads, grad_MN = runtime.grads, as_matrix(grad_output)
    float8 = None if gemms is None or gemms.high_precision_wgrad else gemms  # for wgrad
    casts: Tensors = []
    if gemms is not None and (needs_input or (needs_weight and float8 is not None)):
        casts = gemms.cast_grad(grad_MN)
    job = None
    product = None
    if needs_weight and float8 is None:
        job = partial(grads.compute, wgrad, runtime, weight, grad_MN, as_matrix(input))
    elif needs_weight:
        job = partial(grads.compute, _cast_and_wgrad, runtime, weight, grad_MN, as_matrix(input), float8, casts)
    if needs_input:
        check_unmodified(weight, version)
        product = partial(dgrad, runtime, weight, grad_output)
        if gemms is not None:
            product = partial(float8_dgrad, runtime, weight, gemms, casts)
    grad_input = grads.in_order(job, product)
    if grad_input is not None and gemms is not None:
        grad_input = grad_input.view(*grad_output.shape[:-1], grad_input.shape[-1])
    return grad_input, None, grad_MN.sum(0) if needs_bias else None, None, None


class _Linear(torch.autograd.Function):
    forward = staticmethod(_forward)
    backward = staticmethod(compat.once_differentiable(_backward))


_apply_linear = compat.quick_apply(_Linear)


# Functions, so that nothing holds the gathered weight after dgrad: wgrad may come next, see ``wgrad_first``.
def dgrad(runtime: Runtime, weight: ShardedWeight, grad_output: Tensor) -> Tensor:
    return runtime.gathering.compute(torch.matmul, grad_output, weight.for_backward)


def float8_dgrad(runtime: Runtime, weight: ShardedWeight, gemms: Float8GEMMs, casts: Tensors) -> Tensor:
    """``casts`` are those of ``gemms.cast_grad``. Shape ``(M, K)``."""
    with using_quantized(runtime, weight.for_backward) as quantized:
        return gemms.grad_input(casts, quantized, weight.compute_dtype)


def wgrad(runtime: Runtime, weight: ShardedWeight, grad_MN: Tensor, input_MK: Tensor) -> None:
    """Compute the weight's gradient, written by the GEMM into the buffer that the reduce-scatter sends."""
    with profiler_range("GTP::wgrad", weight.fqn):
        buffer, is_accumulating = runtime.grads.target(weight)
        _multiply_into(weight.layout.full_view(buffer), grad_MN.t(), input_MK, is_accumulating)
    runtime.grads.submit(weight, buffer)


def _keeps_wide_sum(dtype: torch.dtype, operand: Tensor) -> bool:
    """Whether a GEMM of 16-bit operands is to give a gradient of ``dtype`` itself. cuBLAS accumulates in fp32 anyway:
    keep those bits instead of rounding them away and widening again."""
    return dtype == torch.float32 and operand.is_cuda and operand.dtype in (torch.bfloat16, torch.float16)


def _multiply_into(target: Tensor, left: Tensor, right: Tensor, is_accumulating: bool) -> None:
    is_wide = _keeps_wide_sum(target.dtype, left)
    if is_accumulating:
        target += torch.mm(left, right, torch.float32) if is_wide else left.mm(right)
    elif target.dtype == left.dtype:
        torch.mm(left, right, out=target)
    elif is_wide:
        torch.mm(left, right, torch.float32, out=target)
    else:
        target.copy_(left.mm(right))


def as_matrix(x: Tensor) -> Tensor:
    """``x`` with all dims but the last one as rows."""
    return x if x.ndim == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])


def _cast_and_wgrad(
    runtime: Runtime, weight: ShardedWeight, grad_MN: Tensor, input_MK: Tensor, gemms: Float8GEMMs, casts: Tensors
) -> None:
    float8_wgrad(runtime, weight, gemms, gemms.cast_wgrad(grad_MN, input_MK, casts))


def float8_wgrad(runtime: Runtime, weight: ShardedWeight, gemms: Float8GEMMs, casts: Tensors) -> None:
    """``casts`` are those of ``gemms.cast_wgrad``."""
    runtime.grads.add_full(weight, gemms.grad_weight(casts, weight.reduce_dtype), is_owned=True)


@contextmanager
def using_quantized(runtime: Runtime, target: Gatherable) -> Iterator[Quantized]:
    """A use of a weight in the form in which it was gathered."""
    gathered = runtime.gathering.acquire(target)
    try:
        assert gathered.quantized is not None
        yield gathered.quantized()
    finally:
        runtime.gathering.release(target, gathered)


def float8_product(input_MK: Tensor, runtime: Runtime, weight: ShardedWeight) -> Tensor:
    """``input @ weight.T`` in float8. The cast comes before the wait for the gather, which it helps to hide."""
    assert weight.form.gemms is not None
    operands = weight.form.gemms.cast_input(input_MK)
    with using_quantized(runtime, weight.for_forward) as quantized:
        return weight.form.gemms.output(operands, quantized, weight.compute_dtype)


class UngatheredWeight(Tensor):
    """Stands for the full weight, or its transpose, in the arguments of an op; the op itself gets the real one."""

    _runtime: Runtime
    _weight: ShardedWeight
    _is_transposed: bool

    @staticmethod
    def __new__(cls, runtime: Runtime, weight: ShardedWeight, is_transposed: bool = False) -> UngatheredWeight:
        shape = weight.layout.shape[::-1] if is_transposed else weight.layout.shape
        strides = (1, shape[0]) if is_transposed else (shape[1], 1)
        dtype, device = weight.compute_dtype, weight.device
        self = compat.make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype, device=device)
        self._runtime, self._weight, self._is_transposed = runtime, weight, is_transposed
        return self  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.t.default, torch.ops.aten.detach.default):
            (weight,) = args
            return cls(weight._runtime, weight._weight, weight._is_transposed != (func is torch.ops.aten.t.default))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) and isinstance(args[-1], cls):
            *bias, matrix, weight = args
            if weight._weight.form.gemms is not None and weight._is_transposed:
                output = float8_product(matrix, weight._runtime, weight._weight)
                return output + bias[0] if bias else output
        with ExitStack() as stack:
            real = compat.tree_map_only(cls, lambda weight: weight._gathered(stack), (args, kwargs or {}))
            return func(*real[0], **real[1])

    def _gathered(self, stack: ExitStack) -> Tensor:
        full = stack.enter_context(self._runtime.gathering.using(self._weight.for_forward))
        return full.t() if self._is_transposed else full


class TPPlan(NamedTuple):
    """How a linear layer whose weight is sharded over tp runs on local tensors."""

    output: Placement
    grad_input: Placement
    shape: torch.Size  # logical, of the output


def parallel_plan(input: Tensor, bias: Tensor | None, weight: ShardedWeight) -> TPPlan | None:
    """The plan of a layer that can run on its local tensors alone, None where DTensor has more to do."""
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
    # Features of the input or the output are cut at the same places as the weight.
    block_size = getattr(of_weight, "block_size", 1)
    last: Placement = Shard(input.ndim - 1) if block_size == 1 else GTPShard(input.ndim - 1, block_size=block_size)
    if of_weight.dim == 0 and of_input == Replicate() and (bias is None or of_bias == of_weight):
        return TPPlan(last, Partial(), shape)
    if of_weight.dim == 1 and of_input == last and (bias is None or of_bias == Replicate()):
        return TPPlan(Partial(), last, shape)
    return None


def parallel_linear(input: Tensor, bias: Tensor | None, runtime: Runtime, weight: ShardedWeight) -> Tensor | None:
    """``F.linear`` of DTensors on their local tensors, without DTensor's slow dispatch; None without a plan for it."""
    plan = parallel_plan(input, bias, weight)
    if plan is None:
        return None
    if torch.is_grad_enabled():
        check_differentiable(weight)
    # DTensor adds the bias to a partial sum, because only one rank may do so.
    is_sum = plan.output == Partial()
    output: Tensor = _ParallelLinear.apply(input, weight.leaf, None if is_sum else bias, runtime, weight, plan)  # type: ignore[no-untyped-call]
    return output + bias if is_sum and bias is not None else output


class _ParallelLinear(torch.autograd.Function):
    """Takes DTensors apart on the way in and makes DTensors on the way out, in both directions. With ``to_local`` and
    ``from_local`` around ``linear``, as compiled code has it, the host needs an eighth more (0.80 ms, not 0.71, for
    forward and backward of a layer on a busy CPU)."""

    @staticmethod
    def forward(
        ctx: Any, input: DTensor, _: Tensor, bias: DTensor | None, runtime: Runtime, weight: ShardedWeight, plan: TPPlan
    ) -> DTensor:
        given = compat.dtensor_spec(input)
        input_spec = compat.make_spec(given.mesh, (plan.grad_input,), given.shape, input.dtype)
        ctx.grad_specs = (input_spec, None if bias is None else compat.dtensor_spec(bias))
        # The gradient of a partial sum is the gradient of each term.
        ctx.placements = (Replicate() if plan.output == Partial() else plan.output,)
        local_bias = None if bias is None else compat.completed_local(bias)
        output = _forward(ctx, compat.completed_local(input), weight.leaf, local_bias, runtime, weight)
        return compat.wrap_local(output, compat.make_spec(given.mesh, (plan.output,), plan.shape, output.dtype))

    @staticmethod
    @compat.once_differentiable
    def backward(ctx: Any, grad_output: DTensor) -> tuple[Tensor | None, ...]:
        if grad_output.placements != ctx.placements:
            grad_output = grad_output.redistribute(placements=ctx.placements)
        local_input, _, local_bias, *_ = _backward(ctx, compat.completed_local(grad_output))
        grads = zip((local_input, local_bias), ctx.grad_specs, strict=True)
        grad_input, grad_bias = [None if grad is None else compat.wrap_local(grad, spec) for grad, spec in grads]
        return grad_input, None, grad_bias, None, None, None
