"""Embeddings, and weights that are read as attributes, in compiled code."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from .compiled_weight import CompiledWeight, gradient_of, handles
from .embedding import embedding_grad
from .exchange import exchanged_grad, exchanged_ids, exchanged_lookup


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


@torch.library.custom_op("dtensor_gtp::embedding", mutates_args=())
def _embedding(
    indices: Tensor, leaf: Tensor, handle: Tensor, dim: int, padding_idx: int, dtype: torch.dtype, may_exchange: bool
) -> Tensor:
    runtime, weight = handles()[handle].resolve_in_forward()
    found = exchanged_lookup(indices, runtime, weight) if may_exchange else None
    if found is not None:
        return found[0]
    with runtime.using(weight) as full:
        return F.embedding(indices, full)


@_embedding.register_fake
def _(
    indices: Tensor, leaf: Tensor, handle: Tensor, dim: int, padding_idx: int, dtype: torch.dtype, may_exchange: bool
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
    return gradient_of(leaf)


@_embedding_backward.register_fake
def _(grad: Tensor, indices: Tensor, leaf: Tensor, handle: Tensor, padding_idx: int, call: int) -> Tensor:
    return gradient_of(leaf)


def _embedding_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    indices, leaf, handle, _, ctx.padding_idx, _, _ = inputs
    ctx.save_for_backward(indices, leaf, handle)


def _embedding_grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    indices, leaf, handle = ctx.saved_tensors
    grad_leaf = _embedding_backward(grad, indices, leaf, handle, ctx.padding_idx, handles().next_call())
    return None, grad_leaf, None, None, None, None, None


_embedding.register_autograd(_embedding_grad, setup_context=_embedding_setup)


@torch.library.custom_op("dtensor_gtp::materialize", mutates_args=())
def _materialize(leaf: Tensor, handle: Tensor, shape: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    runtime, weight = handles()[handle].resolve_in_forward()
    if weight.wire is not None:
        weight.wire.note_read()
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
    return gradient_of(leaf)


@_reduce_grad.register_fake
def _(grad: Tensor, leaf: Tensor, handle: Tensor, call: int) -> Tensor:
    return gradient_of(leaf)


def _materialize_setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    leaf, handle, _, _, _ = inputs
    ctx.save_for_backward(leaf, handle)


def _materialize_grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    leaf, handle = ctx.saved_tensors
    return _reduce_grad(grad, leaf, handle, handles().next_call()), None, None, None, None


_materialize.register_autograd(_materialize_grad, setup_context=_materialize_setup)
