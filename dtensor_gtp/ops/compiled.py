"""The ops for ``torch.compile``: opaque custom ops, so that a block compiles with ``fullgraph=True``.

The compiler sees an op with an input, an output and a gradient; gathers, streams and send buffers stay inside. A weight
is named by a 0-dim tensor on the host. Tensors are inputs of a compiled graph, hence all layers of one shape run the
same compiled code, where a Python number would be compiled in, once for each layer.

``leaf``, empty, stands for the weight in autograd's graph. Its empty gradient keeps the backward op alive where no
gradient of the input is wanted.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Iterator
from typing import Any
from weakref import WeakValueDictionary

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from .._runtime.param import ShardedWeight
from .._runtime.state import Runtime
from .embedding import embedding_grad
from .linear import parallel_plan, wgrad


class Handles:
    """Weights by the number that their handle tensor holds. Does not keep them alive."""

    def __init__(self) -> None:
        self._uses: WeakValueDictionary[int, CompiledWeight] = WeakValueDictionary()
        self._numbers: Iterator[int] = itertools.count()

    def add(self, weight: CompiledWeight) -> Tensor:
        number = next(self._numbers)
        self._uses[number] = weight
        return torch.tensor(number)

    def __getitem__(self, handle: Tensor) -> CompiledWeight:
        return self._uses[int(handle)]


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


def linear(input: Tensor, bias: Tensor | None, compiled: CompiledWeight) -> Tensor:
    """``F.linear`` as one op of the compiled graph."""
    out_features = compiled.weight.layout.shape[0]
    output: Tensor = _linear(input, compiled.weight.leaf, bias, compiled.handle, out_features)
    return output


def parallel_linear(input: Tensor, bias: Tensor | None, compiled: CompiledWeight) -> Tensor | None:
    """``linear`` of DTensors on their local tensors, or None without a plan for it."""
    plan = parallel_plan(input, bias, compiled.weight)
    if plan is None or not isinstance(input, DTensor):
        return None
    local = input.to_local(grad_placements=[plan.grad_input])
    output = linear(local, bias.to_local() if isinstance(bias, DTensor) else None, compiled)
    stride = tuple(math.prod(plan.shape[dim + 1 :]) for dim in range(len(plan.shape)))
    return DTensor.from_local(
        output, input.device_mesh, [plan.output], run_check=False, shape=plan.shape, stride=stride
    )


def embedding(indices: Tensor, padding_idx: int | None, compiled: CompiledWeight) -> Tensor:
    """``F.embedding`` as one op of the compiled graph."""
    padding = -1 if padding_idx is None else padding_idx
    dim = compiled.weight.layout.shape[1]
    output: Tensor = _embedding(
        indices, compiled.weight.leaf, compiled.handle, dim, padding, compiled.weight.compute_dtype
    )
    return output


def materialize(compiled: CompiledWeight) -> Tensor:
    """The full weight as one op of the compiled graph; a DTensor around it where the module is tensor-parallel."""
    weight = compiled.weight
    full: Tensor = _materialize(weight.leaf, compiled.handle, list(weight.layout.shape), weight.compute_dtype)
    spec = weight.tp_spec
    if spec is None:
        return full
    # The slices of the ranks may differ in size, so from_local must be told the logical shape.
    return DTensor.from_local(full, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride)


# --- linear -----------------------------------------------------------------------------------------------------------


@torch.library.custom_op("dtensor_gtp::linear", mutates_args=())
def _linear(input: Tensor, leaf: Tensor, bias: Tensor | None, handle: Tensor, out_features: int) -> Tensor:
    runtime, weight = handles()[handle].resolve()
    with runtime.using(weight) as full:
        return F.linear(input, full, bias)


@_linear.register_fake
def _(input: Tensor, leaf: Tensor, bias: Tensor | None, handle: Tensor, out_features: int) -> Tensor:
    return input.new_empty((*input.shape[:-1], out_features))


@torch.library.custom_op("dtensor_gtp::linear_backward", mutates_args=())
def _linear_backward(
    grad: Tensor, input: Tensor, leaf: Tensor, handle: Tensor, needs_input: bool, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    runtime, weight = handles()[handle].resolve()
    runtime.note_backward()
    if needs_weight:
        wgrad(runtime, weight, grad.reshape(-1, grad.shape[-1]), input.reshape(-1, input.shape[-1]))
    grad_input = grad.new_empty(0)
    if needs_input:
        with runtime.using(weight) as full:
            grad_input = grad.matmul(full)
    return grad_input, torch.empty_like(leaf)


@_linear_backward.register_fake
def _(
    grad: Tensor, input: Tensor, leaf: Tensor, handle: Tensor, needs_input: bool, needs_weight: bool
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(input, memory_format=torch.contiguous_format) if needs_input else grad.new_empty(0), (
        torch.empty_like(leaf)
    )


def _linear_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    input, leaf, _, handle, _ = inputs
    ctx.save_for_backward(input, leaf, handle)


def _linear_grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    input, leaf, handle = ctx.saved_tensors
    needs_input, needs_weight, needs_bias = ctx.needs_input_grad[:3]
    grad_input, grad_leaf = _linear_backward(grad, input, leaf, handle, needs_input, needs_weight)
    grad_bias = grad.reshape(-1, grad.shape[-1]).sum(0) if needs_bias else None
    return grad_input if needs_input else None, grad_leaf if needs_weight else None, grad_bias, None, None


_linear.register_autograd(_linear_grad, setup_context=_linear_setup)


# --- embedding --------------------------------------------------------------------------------------------------------


@torch.library.custom_op("dtensor_gtp::embedding", mutates_args=())
def _embedding(indices: Tensor, leaf: Tensor, handle: Tensor, dim: int, padding_idx: int, dtype: torch.dtype) -> Tensor:
    runtime, weight = handles()[handle].resolve()
    with runtime.using(weight) as full:
        return F.embedding(indices, full)


@_embedding.register_fake
def _(indices: Tensor, leaf: Tensor, handle: Tensor, dim: int, padding_idx: int, dtype: torch.dtype) -> Tensor:
    return leaf.new_empty((*indices.shape, dim), dtype=dtype)


@torch.library.custom_op("dtensor_gtp::embedding_backward", mutates_args=())
def _embedding_backward(grad: Tensor, indices: Tensor, leaf: Tensor, handle: Tensor, padding_idx: int) -> Tensor:
    runtime, weight = handles()[handle].resolve()
    runtime.note_backward()
    embedding_grad(runtime, weight, grad, indices, padding_idx)
    return torch.empty_like(leaf)


@_embedding_backward.register_fake
def _(grad: Tensor, indices: Tensor, leaf: Tensor, handle: Tensor, padding_idx: int) -> Tensor:
    return torch.empty_like(leaf)


def _embedding_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    indices, leaf, handle, _, ctx.padding_idx, _ = inputs
    ctx.save_for_backward(indices, leaf, handle)


def _embedding_grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    indices, leaf, handle = ctx.saved_tensors
    return None, _embedding_backward(grad, indices, leaf, handle, ctx.padding_idx), None, None, None, None


_embedding.register_autograd(_embedding_grad, setup_context=_embedding_setup)


# --- any other use ----------------------------------------------------------------------------------------------------


@torch.library.custom_op("dtensor_gtp::materialize", mutates_args=())
def _materialize(leaf: Tensor, handle: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    runtime, weight = handles()[handle].resolve()
    with runtime.using(weight) as full:
        # An op must not return memory that it owns: on an axis of one rank that would be the shard itself.
        return full.clone() if weight.layout.world == 1 else full.contiguous()


@_materialize.register_fake
def _(leaf: Tensor, handle: Tensor, shape: list[int], dtype: torch.dtype) -> Tensor:
    return leaf.new_empty(shape, dtype=dtype)


@torch.library.custom_op("dtensor_gtp::reduce_grad", mutates_args=())
def _reduce_grad(grad: Tensor, leaf: Tensor, handle: Tensor) -> Tensor:
    runtime, weight = handles()[handle].resolve()
    runtime.note_backward()
    runtime.grads.add_full(weight, grad, is_owned=False)
    return torch.empty_like(leaf)


@_reduce_grad.register_fake
def _(grad: Tensor, leaf: Tensor, handle: Tensor) -> Tensor:
    return torch.empty_like(leaf)


def _materialize_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    leaf, handle, _, _ = inputs
    ctx.save_for_backward(leaf, handle)


def _materialize_grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    leaf, handle = ctx.saved_tensors
    return _reduce_grad(grad, leaf, handle), None, None, None


_materialize.register_autograd(_materialize_grad, setup_context=_materialize_setup)
