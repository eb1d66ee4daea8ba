"""Embeddings, and weights that are read as attributes, in compiled code."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.tensor import DTensor

from .compiled_weight import CompiledWeight, gradient_of, handles, show_to_policies
from .embedding import embedding_grad
from .exchange import exchanged_ids, exchanged_lookup


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
    shape, device = list(weight.layout.shape), weight.device
    full: Tensor = _materialize(weight.stand_in.leaf, compiled.handle, shape, weight.compute_dtype, device)
    if (spec := weight.tp_spec) is None:
        return full
    # The slices of the ranks may differ in size, so from_local needs the logical shape.
    return DTensor.from_local(full, spec.mesh, spec.placements, run_check=False, shape=spec.shape, stride=spec.stride)


@torch.library.custom_op("dtensor_gtp::embedding", mutates_args=())
def _embedding(
    indices: Tensor, leaf: Tensor, handle: Tensor, dim: int, padding_idx: int, dtype: torch.dtype, may_exchange: bool
) -> Tensor:
    runtime, weight = handles()[handle].resolve_in_forward()
    found = exchanged_lookup(indices, runtime, weight) if may_exchange else None
    if found is not None:
        return found[0]
    return runtime.gathering.compute(F.embedding, indices, weight.for_forward)


_embedding.register_fake(
    lambda indices, leaf, handle, dim, padding, dtype, *_: indices.new_empty((*indices.shape, dim), dtype=dtype)
)


@torch.library.custom_op("dtensor_gtp::embedding_backward", mutates_args=())
def _embedding_backward(grad: Tensor, indices: Tensor, leaf: Tensor, handle: Tensor, padding: int, call: int) -> Tensor:
    runtime, weight = handles()[handle].resolve_in_backward()
    if weight.stand_in.is_awaited:
        embedding_grad(runtime, weight, grad, indices, exchanged_ids(indices, runtime, weight), padding)
    return gradient_of(leaf)


def _save_lookup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    indices, leaf, handle, _, ctx.padding_idx, _, _ = inputs
    ctx.save_for_backward(indices, leaf, handle)


def _embedding_grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    grad_leaf = _embedding_backward(grad, *ctx.saved_tensors, ctx.padding_idx, handles().next_call())
    return None, grad_leaf, None, None, None, None, None


@torch.library.custom_op("dtensor_gtp::materialize", mutates_args=())
def _materialize(leaf: Tensor, handle: Tensor, shape: list[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    runtime, weight = handles()[handle].resolve_in_forward()
    if weight.form.wire is not None:
        weight.form.wire.note_read()
    gathered = runtime.gathering.acquire(weight.for_forward)
    full = gathered.contiguous().detach()  # owns the memory: without an owner, DTENSOR_GTP_DEBUG=poison overwrites it
    runtime.gathering.release(weight.for_forward, gathered)
    # The compiler may write to what an op returns after its last use.
    is_shared = gathered.is_alias or gathered.holds > 0 or weight.for_forward.kept is gathered
    return full.clone() if is_shared else full


_materialize.register_fake(lambda leaf, handle, shape, dtype, device: leaf.new_empty(shape, dtype=dtype, device=device))


@torch.library.custom_op("dtensor_gtp::reduce_grad", mutates_args=())
def _reduce_grad(grad: Tensor, leaf: Tensor, handle: Tensor, call: int) -> Tensor:
    runtime, weight = handles()[handle].resolve_in_backward()
    if weight.stand_in.is_awaited:
        runtime.grads.add_full(weight, grad, is_owned=False)
    return gradient_of(leaf)


def _full_grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return _reduce_grad(grad, *ctx.saved_tensors, handles().next_call()), None, None, None, None


_embedding_backward.register_fake(lambda grad, indices, leaf, *others: gradient_of(leaf))
_reduce_grad.register_fake(lambda grad, leaf, *others: gradient_of(leaf))
_embedding.register_autograd(_embedding_grad, setup_context=_save_lookup)
_materialize.register_autograd(_full_grad, setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[:2]))
show_to_policies(_embedding, _materialize)
