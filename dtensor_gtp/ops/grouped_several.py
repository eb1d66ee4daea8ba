"""``GroupedLinear`` with a weight for each group: all are gathered into one buffer, which is the operand as it is.

What a grouped GEMM takes is one tensor. The weights travel in one launch, each into its slice of one buffer, so that
their stack is a view. Where they come from elsewhere (one rank, a recipe, gathers at different times) it is a copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from .. import _torch_compat as compat
from .._comm.debug import profiler_range
from .._params.saved_for_backward import check_unmodified, refuse_partial_recording
from .._params.sharded_weight import Gatherable, ShardedWeight
from .._schedule.runtime import Runtime
from .grouped import add_bias, grouped_mm, grouped_wgrad


def several_grouped_linear(
    x_TK: Tensor,
    bias_GN: Tensor | None,
    split_sizes_G: Tensor,
    scales_T: Tensor | None,
    runtime: Runtime,
    weights: Sequence[ShardedWeight],
) -> Tensor:
    """``grouped_linear`` on a sharded weight of logical shape ``(out_features, in_features)`` for each group."""
    ends_G = split_sizes_G.cumsum(0, dtype=torch.int32)
    if torch.is_grad_enabled():
        leaves = [weight.leaf for weight in weights]
        output: Tensor = _SeveralGroupedMM.apply(x_TK, ends_G, runtime, tuple(weights), *leaves)  # type: ignore[no-untyped-call]
    else:
        output = _multiply(x_TK, ends_G, runtime, weights)
    return add_bias(output, bias_GN, ends_G, scales_T)


def stacked(parts: Sequence[Tensor]) -> Tensor:
    """``torch.stack(parts)``, as a view if they lie at equal distances in one storage."""
    first = parts[0]
    distance = int(parts[-1].storage_offset() - first.storage_offset()) // max(len(parts) - 1, 1)
    storage = first.untyped_storage().data_ptr()
    is_regular = distance >= first.numel() > 0 and all(
        part.untyped_storage().data_ptr() == storage
        and part.storage_offset() == first.storage_offset() + number * distance
        and part.shape == first.shape
        and part.stride() == first.stride()
        and part.dtype == first.dtype
        for number, part in enumerate(parts)
    )
    if not is_regular:
        return torch.stack(list(parts))
    return first.as_strided((len(parts), *first.shape), (distance, *first.stride()), first.storage_offset())


@contextmanager
def _using(runtime: Runtime, targets: Sequence[Gatherable]) -> Iterator[Tensor]:
    """A use of all of them at once: the stack of the full weights."""
    with ExitStack() as stack:
        yield stacked([stack.enter_context(runtime.using(target)) for target in targets])


def _multiply_grad(grad_TN: Tensor, ends_G: Tensor, runtime: Runtime, weights: tuple[ShardedWeight, ...]) -> Tensor:
    with _using(runtime, [weight.for_backward for weight in weights]) as full_GNK:
        return grouped_mm(grad_TN, full_GNK, ends_G)


def _multiply(x_TK: Tensor, ends_G: Tensor, runtime: Runtime, weights: Sequence[ShardedWeight]) -> Tensor:
    """Forward's grouped GEMM."""
    with _using(runtime, weights) as full_GNK:
        return grouped_mm(x_TK, full_GNK.mT, ends_G)


def _reduce_wgrads(
    runtime: Runtime,
    weights: Sequence[ShardedWeight],
    awaited: Sequence[bool],
    grad_TN: Tensor,
    x_TK: Tensor,
    ends_G: Tensor,
) -> None:
    """The gradients of those weights that are awaited, on their way to the shards."""
    with profiler_range("GTP::wgrad", ", ".join(weight.fqn for weight in weights)):
        wgrad_GNK = grouped_wgrad(grad_TN, x_TK, ends_G)
    with runtime.grads.together():
        for weight, wgrad_NK, is_awaited in zip(weights, wgrad_GNK.unbind(0), awaited, strict=True):
            if is_awaited:
                runtime.grads.add_full(weight, wgrad_NK, is_owned=True)


class _SeveralGroupedMM(torch.autograd.Function):
    """As ``_ShardedGroupedMM``, for weights of logical shape ``(out_features, in_features)``, one for each group."""

    @staticmethod
    def forward(
        ctx: Any, x_TK: Tensor, ends_G: Tensor, runtime: Runtime, weights: tuple[ShardedWeight, ...], *leaves: Tensor
    ) -> Tensor:
        ctx.runtime, ctx.weights, ctx.versions = runtime, weights, [weight.version for weight in weights]
        ctx.save_for_backward(x_TK if any(ctx.needs_input_grad[4:]) else None, ends_G)
        return _multiply(x_TK, ends_G, runtime, weights)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_TN: Tensor) -> tuple[Tensor | None, ...]:
        runtime: Runtime = ctx.runtime
        weights: tuple[ShardedWeight, ...] = ctx.weights
        runtime.note_backward()
        x_TK, ends_G = ctx.saved_tensors
        grad_TN = grad_TN.contiguous()
        # Autograd counts tensors alone: x, ends, leaves.
        needs_grad = ctx.needs_input_grad[4:]
        awaited = [needs and compat.is_awaited(ctx, index) for index, needs in enumerate(needs_grad, 2)]
        for weight, needs, is_awaited in zip(weights, needs_grad, awaited, strict=True):
            if needs and not is_awaited:
                refuse_partial_recording(weight, runtime.comm.is_capturing)
        job = partial(_reduce_wgrads, runtime, weights, awaited, grad_TN, x_TK, ends_G) if any(awaited) else None
        grad_x = None
        with runtime.grads.beside_dgrad(job):
            if ctx.needs_input_grad[0]:
                for weight, version in zip(weights, ctx.versions, strict=True):
                    check_unmodified(weight, version)
                grad_x = _multiply_grad(grad_TN, ends_G, runtime, weights)
        return grad_x, None, None, None, *(None for _ in weights)
