"""``GroupedLinear`` for ``torch.compile``: the grouped GEMM with the weight's gather as one opaque op.

As in ``compiled``, whose handles it uses: see [Note: effects of opaque ops] there. Nothing of the full weight is saved
for backward, and the compiler need not know the shapes of grouped GEMMs.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import _torch_compat as compat
from .._params.saved_for_backward import check_unmodified
from .compiled_weight import CompiledWeight, ask_policy, gradient_of, handles
from .grouped import add_bias, multiply, multiply_grad, reduce_wgrad


def grouped_linear(
    x: Tensor, bias: Tensor | None, split_sizes: Tensor, scales: Tensor | None, compiled: CompiledWeight
) -> Tensor:
    """``grouped_linear`` as one op of the compiled graph, and its bias."""
    ends = split_sizes.cumsum(0, dtype=torch.int32)
    out_features = compiled.weight.layout.shape[1]
    output: Tensor = _grouped(x, compiled.weight.stand_in.leaf, ends, compiled.handle, out_features)
    return add_bias(output, bias, ends, scales)


@torch.library.custom_op("dtensor_gtp::grouped_linear", mutates_args=())
def _grouped(x: Tensor, leaf: Tensor, ends: Tensor, handle: Tensor, out_features: int) -> Tensor:
    runtime, weight = handles()[handle].resolve_in_forward()
    return multiply(x, ends, runtime, weight)


@_grouped.register_fake
def _(x: Tensor, leaf: Tensor, ends: Tensor, handle: Tensor, out_features: int) -> Tensor:
    return x.new_empty(x.shape[0], out_features)


@torch.library.custom_op("dtensor_gtp::grouped_linear_backward", mutates_args=())
def _grouped_backward(
    grad: Tensor,
    x: Tensor | None,
    leaf: Tensor,
    ends: Tensor,
    handle: Tensor,
    in_features: int,
    needs_input: bool,
    call: int,
) -> tuple[Tensor, Tensor]:
    """``x`` is None if the weight is frozen."""
    runtime, weight = handles()[handle].resolve_in_backward()
    grad = grad.contiguous()
    job = None
    if x is not None and weight.stand_in.is_awaited:
        job = partial(reduce_wgrad, runtime, weight, grad, x, ends)
    grad_x = grad.new_empty(0)
    with runtime.grads.beside_dgrad(job):
        if needs_input:
            check_unmodified(weight, weight.compiled_version)
            grad_x = multiply_grad(grad, ends, runtime, weight)
    return grad_x, gradient_of(leaf)


@_grouped_backward.register_fake
def _(
    grad: Tensor,
    x: Tensor | None,
    leaf: Tensor,
    ends: Tensor,
    handle: Tensor,
    in_features: int,
    needs_input: bool,
    call: int,
) -> tuple[Tensor, Tensor]:
    return grad.new_empty((grad.shape[0], in_features) if needs_input else 0), gradient_of(leaf)


def _setup(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, leaf, ends, handle, _ = inputs
    ctx.in_features = x.shape[1]
    # Of a frozen weight nothing is saved but its name.
    ctx.save_for_backward(x if leaf.requires_grad else None, leaf, ends, handle)


def _grad(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    x, leaf, ends, handle = ctx.saved_tensors
    needs_input, needs_weight = ctx.needs_input_grad[:2]
    grad_x = grad_leaf = None
    if needs_input or needs_weight:
        call = handles().next_call()
        grad_x, grad_leaf = _grouped_backward(grad, x, leaf, ends, handle, ctx.in_features, needs_input, call)
    return grad_x if needs_input else None, grad_leaf if needs_weight else None, None, None, None


_grouped.register_autograd(_grad, setup_context=_setup)


for _mode in compat.POLICY_MODES:
    _grouped.register_torch_dispatch(_mode, ask_policy)
