"""The ops for ``torch.compile``: opaque custom ops, so that a block compiles with ``fullgraph=True``.

The compiler sees an op with an input, an output and a gradient; gathers, streams and send buffers stay inside. A weight
is named by a 0-dim tensor on the host. Tensors are inputs of a compiled graph, hence all layers of one shape run the
same compiled code, where a Python number would be compiled in, once for each layer.

``leaf``, one number on the host, stands for the weight in autograd's graph.

[Note: effects of opaque ops]
Reducing a gradient is an effect that the compiler does not know of, so two things keep it from optimizing backward ops
away. Each returns a gradient of ``leaf``, a real number: Inductor computes tensors without elements by itself and drops
the op. And each has an argument ``call`` that no other has: two uses of a weight with equal inputs and equal gradients
(``linear(x) + linear(x)``) are two gradients, but to common-subexpression elimination they were one.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor, Partial
from torch.utils.checkpoint import CheckpointPolicy

from .. import _torch_compat as compat
from .._runtime.param import ShardedWeight
from .._runtime.saved import check_unmodified
from .._runtime.state import Runtime
from ..quant.float8_gemms import gemms_of_name
from . import float8
from .embedding import embedding_grad
from .exchange import exchanged_grad, exchanged_ids, exchanged_lookup
from .linear import dgrad, parallel_plan, wgrad


class Handles:
    """Weights by the number that their handle tensor holds. Does not keep them alive."""

    def __init__(self) -> None:
        self._uses: WeakValueDictionary[int, CompiledWeight] = WeakValueDictionary()
        self._numbers: Iterator[int] = itertools.count()
        self._calls: Iterator[int] = itertools.count()

    def add(self, weight: CompiledWeight) -> Tensor:
        number = next(self._numbers)
        self._uses[number] = weight
        return torch.tensor(number, device="cpu")

    def __getitem__(self, handle: Tensor) -> CompiledWeight:
        return self._uses[int(handle)]

    def next_call(self) -> int:
        """A number that makes one call of a backward op unlike any other, see [Note: effects of opaque ops]."""
        return next(self._calls)


@functools.cache
def handles() -> Handles:
    """The one table of this process: custom ops have no other way to find what is not a tensor."""
    return Handles()


class CompiledWeight:
    """What compiled code holds of a weight at one module.

    Args:
        runtime_of: Gives the runtime, which a later ``gtp_shard`` call on an outer module replaces.
        site: Where the parameter is registered.
    """

    def __init__(self, runtime_of: Any, weight: ShardedWeight, site: Any) -> None:
        self._runtime_of = runtime_of
        self.weight = weight
        self.site = site
        self.handle = handles().add(self)

    def resolve(self) -> tuple[Runtime, ShardedWeight]:
        self.weight.follow(self.site)
        return self._runtime_of(), self.weight

    def resolve_in_forward(self) -> tuple[Runtime, ShardedWeight]:
        """For a use of forward, or of its recomputation in backward."""
        weight = self.weight
        is_in_time = weight.stand_in.leaf.requires_grad == weight.param.requires_grad
        runtime, weight = self.resolve()
        if not is_in_time:
            # Frames see to it, but a compiled function that calls the module has none around it.
            raise RuntimeError(
                f"Parameter '{weight.fqn}' was frozen or unfrozen after the function that calls its module was "
                "compiled. Compile the module instead, with module.compile() or torch.compile(module)."
            )
        if compat.current_graph_task_id() != -1:
            runtime.note_backward()
        weight.compiled_version = weight.version
        return runtime, weight

    def resolve_in_backward(self) -> tuple[Runtime, ShardedWeight]:
        runtime, weight = self.resolve()
        runtime.note_backward()
        return runtime, weight


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


def embedding(indices: Tensor, padding_idx: int | None, compiled: CompiledWeight) -> Tensor:
    """``F.embedding`` as one op of the compiled graph."""
    padding = -1 if padding_idx is None else padding_idx
    dim = compiled.weight.layout.shape[1]
    leaf, dtype = compiled.weight.stand_in.leaf, compiled.weight.compute_dtype
    # An op cannot see whether gradients are computed around it.
    output: Tensor = _embedding(indices, leaf, compiled.handle, dim, padding, dtype, torch.is_grad_enabled())
    return output


def materialize(compiled: CompiledWeight) -> Tensor:
    """The full weight as one op of the compiled graph; a DTensor around it where the module is tensor-parallel."""
    weight = compiled.weight
    shape, device = list(weight.layout.shape), weight.shard.device
    full: Tensor = _materialize(weight.stand_in.leaf, compiled.handle, shape, weight.compute_dtype, device)
    spec = weight.tp_spec
    if spec is None:
        return full
    # The slices of the ranks may differ in size, so from_local must be told the logical shape.
    return DTensor.from_local(full, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride)


def _gradient_of(leaf: Tensor) -> Tensor:
    """What backward ops return for ``leaf``, see [Note: effects of opaque ops]."""
    return torch.zeros_like(leaf)


# --- linear -----------------------------------------------------------------------------------------------------------


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
    grad: Tensor,
    input: Tensor | None,
    leaf: Tensor,
    handle: Tensor,
    in_features: int,
    needs_input: bool,
    call: int,
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
    return grad_input, _gradient_of(leaf)


@_linear_backward.register_fake
def _(
    grad: Tensor,
    input: Tensor | None,
    leaf: Tensor,
    handle: Tensor,
    in_features: int,
    needs_input: bool,
    call: int,
) -> tuple[Tensor, Tensor]:
    return grad.new_empty((*grad.shape[:-1], in_features) if needs_input else 0), _gradient_of(leaf)


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


# --- linear in float8 -------------------------------------------------------------------------------------------------


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
    return grad_input, _gradient_of(leaf)


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
    return (grad or for_wgrad)[0].new_empty(shape, dtype=dtype), _gradient_of(leaf)


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


# --- embedding --------------------------------------------------------------------------------------------------------


@torch.library.custom_op("dtensor_gtp::embedding", mutates_args=())
def _embedding(
    indices: Tensor,
    leaf: Tensor,
    handle: Tensor,
    dim: int,
    padding_idx: int,
    dtype: torch.dtype,
    may_exchange: bool,
) -> Tensor:
    runtime, weight = handles()[handle].resolve_in_forward()
    found = exchanged_lookup(indices, runtime, weight) if may_exchange else None
    if found is not None:
        return found[0]
    with runtime.using(weight) as full:
        return F.embedding(indices, full)


@_embedding.register_fake
def _(
    indices: Tensor,
    leaf: Tensor,
    handle: Tensor,
    dim: int,
    padding_idx: int,
    dtype: torch.dtype,
    may_exchange: bool,
) -> Tensor:
    return indices.new_empty((*indices.shape, dim), dtype=dtype)


@torch.library.custom_op("dtensor_gtp::embedding_backward", mutates_args=())
def _embedding_backward(
    grad: Tensor, indices: Tensor, leaf: Tensor, handle: Tensor, padding_idx: int, call: int
) -> Tensor:
    runtime, weight = handles()[handle].resolve_in_backward()
    if weight.stand_in.is_awaited:
        ids = exchanged_ids(indices, runtime, weight)
        if ids is None:
            embedding_grad(runtime, weight, grad, indices, padding_idx)
        else:
            exchanged_grad(runtime, weight, grad, ids, padding_idx)
    return _gradient_of(leaf)


@_embedding_backward.register_fake
def _(grad: Tensor, indices: Tensor, leaf: Tensor, handle: Tensor, padding_idx: int, call: int) -> Tensor:
    return _gradient_of(leaf)


def _embedding_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    indices, leaf, handle, _, ctx.padding_idx, _, _ = inputs
    ctx.save_for_backward(indices, leaf, handle)


def _embedding_grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    indices, leaf, handle = ctx.saved_tensors
    grad_leaf = _embedding_backward(grad, indices, leaf, handle, ctx.padding_idx, handles().next_call())
    return None, grad_leaf, None, None, None, None, None


_embedding.register_autograd(_embedding_grad, setup_context=_embedding_setup)


# --- any other use ----------------------------------------------------------------------------------------------------


@torch.library.custom_op("dtensor_gtp::materialize", mutates_args=())
def _materialize(leaf: Tensor, handle: Tensor, shape: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    runtime, weight = handles()[handle].resolve_in_forward()
    if weight.wire is not None:
        weight.wire.note_read(weight)
    gathered = runtime.acquire(weight)
    full = gathered.contiguous().detach()  # an owner of the memory, also to who poisons what nobody owns any more
    runtime.release(weight, gathered)
    # The compiler takes what an op returns for its own, and may write to it after the last use.
    is_shared = gathered.is_alias or gathered.holds > 0 or weight.kept is gathered
    return full.clone() if is_shared else full


@_materialize.register_fake
def _(leaf: Tensor, handle: Tensor, shape: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    return leaf.new_empty(shape, dtype=dtype, device=device)


@torch.library.custom_op("dtensor_gtp::reduce_grad", mutates_args=())
def _reduce_grad(grad: Tensor, leaf: Tensor, handle: Tensor, call: int) -> Tensor:
    runtime, weight = handles()[handle].resolve_in_backward()
    if weight.stand_in.is_awaited:
        runtime.grads.add_full(weight, grad, is_owned=False)
    return _gradient_of(leaf)


@_reduce_grad.register_fake
def _(grad: Tensor, leaf: Tensor, handle: Tensor, call: int) -> Tensor:
    return _gradient_of(leaf)


def _materialize_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    leaf, handle, _, _, _ = inputs
    ctx.save_for_backward(leaf, handle)


def _materialize_grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    leaf, handle = ctx.saved_tensors
    return _reduce_grad(grad, leaf, handle, handles().next_call()), None, None, None, None


_materialize.register_autograd(_materialize_grad, setup_context=_materialize_setup)


# --- selective activation checkpointing -------------------------------------------------------------------------------


def _ask_policy(mode: Any, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    """While a checkpoint with a policy is compiled: save what a linear layer returns if the policy wants it of the GEMM
    that ``nn.Linear`` is known by."""
    if not compat.is_tracing():
        # Compiled code that runs inside of a checkpoint: it may write to what an op returns, so nothing may be saved.
        return op(*args, **(kwargs or {}))
    ask = getattr(mode, "policy_fn", None)
    if ask is None or op is not torch.ops.dtensor_gtp.linear.default:
        return mode.__torch_dispatch__(op, types, args, kwargs)
    input, _, bias, _, out_features = args

    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> Any:
        answer = ask(context, op, *args, **kwargs)
        if answer in (True, CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE):
            return answer
        weight_t = _shape_only(input.shape[-1], out_features)
        if bias is None:
            return ask(context, torch.ops.aten.mm.default, input, weight_t)
        return ask(context, torch.ops.aten.addmm.default, bias, input, weight_t)

    mode.policy_fn = policy
    try:
        return mode.__torch_dispatch__(op, types, args, kwargs)
    finally:
        mode.policy_fn = ask


def _shape_only(*shape: int) -> Tensor:
    with compat.without_dispatch_modes():
        return torch.empty(tuple(int(size) for size in shape), device="meta")


for _mode in compat.POLICY_MODES:
    for _op in (_linear, _embedding, _materialize):
        _op.register_torch_dispatch(_mode, _ask_policy)
