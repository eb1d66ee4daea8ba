"""``F.embedding`` on a sharded table: gather, look up, free; or exchange activations, see ``exchange``."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _torch_compat as compat
from .._params.saved_for_backward import check_differentiable
from .._params.sharded_weight import ShardedWeight
from .._schedule.runtime import Runtime
from .exchange import exchanged_grad, exchanged_lookup
from .ungathered import UngatheredWeight


def embedding(indices: Tensor, padding_idx: int | None, runtime: Runtime, weight: ShardedWeight) -> Tensor:
    """``F.embedding(indices, weight, padding_idx)`` for a table of logical shape ``(num_rows, dim)``."""
    if torch.is_grad_enabled() and weight.param.requires_grad:
        check_differentiable(weight)
        result: Tensor = _Embedding.apply(indices, weight.leaf, padding_idx, runtime, weight)  # type: ignore[no-untyped-call]
        return result
    if torch.is_grad_enabled() and (found := exchanged_lookup(indices, runtime, weight)) is not None:
        return found[0]
    return runtime.gathering.compute(F.embedding, indices, weight.for_forward, padding_idx)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, indices: Tensor, leaf: Tensor, padding_idx: int | None, runtime: Runtime, weight: ShardedWeight
    ) -> Tensor:
        ctx.runtime, ctx.weight = runtime, weight
        ctx.padding_idx = -1 if padding_idx is None else padding_idx
        if (found := exchanged_lookup(indices, runtime, weight)) is not None:
            output, ids = found
            ctx.save_for_backward(indices, ids)
            return compat.no_view(output)
        if compat.asks_checkpoint_policy():
            output = F.embedding(indices, UngatheredWeight(runtime, weight), padding_idx)
        else:
            output = runtime.gathering.compute(F.embedding, indices, weight.for_forward, padding_idx)
        ctx.save_for_backward(indices, None)
        return output

    @staticmethod
    @compat.once_differentiable
    def backward(ctx: Any, grad_output: Tensor) -> tuple[None, ...]:
        weight: ShardedWeight = ctx.weight
        ctx.runtime.note_backward()
        indices, ids = ctx.saved_tensors
        args = (ctx.runtime, weight, grad_output, indices, ids, ctx.padding_idx)
        ctx.runtime.grads.compute(embedding_grad, *args)
        return None, None, None, None, None


def embedding_grad(
    runtime: Runtime, weight: ShardedWeight, grad_output: Tensor, indices: Tensor, ids: Tensor | None, padding_idx: int
) -> None:
    """Compute the table's gradient and reduce it. ``ids``: see ``exchange``. ``padding_idx`` is -1 if there is none."""
    if ids is not None:
        exchanged_grad(runtime, weight, grad_output, ids, padding_idx)
        return
    # aten's own backward (a deterministic sort on CUDA, unlike index_add) returns a new, dense gradient.
    num_rows, grad_output = weight.layout.shape[0], grad_output.contiguous()
    grad = torch.ops.aten.embedding_dense_backward(grad_output, indices, num_rows, padding_idx, False)
    runtime.grads.add_full(weight, grad, is_owned=True)
