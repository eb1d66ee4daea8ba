"""``F.embedding`` on a sharded table: gather, look up, free; or exchange activations, without a gather.

In an exchange each rank looks up its own rows for the tokens of all ranks: an all_gather of token
ids, a lookup, a reduce_scatter of activations. That moves ``world * tokens * dim`` elements, a
gather moves ``rows * dim``. Backward all_gathers the gradient of the activations, and each rank
sums up that of its rows in float32 or wider. The activations are the bits of the table: other ranks
add zero bits, as integers. An all_to_all would move less, but the host would wait for its sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .. import _torch_compat as compat
from .._comm.debug import profiler_range
from .._comm.tokens import TokenExchange
from .._params.layout import WeightLayout
from .._params.refusals import check_differentiable
from .._params.sharded_weight import ShardedWeight
from .._schedule.choose_schedule import is_exchange_worth, is_worth_asking, lookup_nbytes
from .._schedule.runtime import Runtime
from .linear import UngatheredWeight


def embedding(indices: Tensor, padding_idx: int | None, runtime: Runtime, weight: ShardedWeight) -> Tensor:
    """``F.embedding(indices, weight, padding_idx)`` for a table of logical shape ``(num_rows, dim)``."""
    if torch.is_grad_enabled() and weight.param.requires_grad:
        check_differentiable(weight)
        args = (indices, weight.leaf, padding_idx, runtime, weight)
        result: Tensor = _Embedding.apply(*args)  # type: ignore[no-untyped-call]
        return result
    if torch.is_grad_enabled() and (found := exchanged_lookup(indices, runtime, weight)) is not None:
        return found[0]
    return runtime.gathering.compute(F.embedding, indices, weight.for_forward, padding_idx)


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, indices: Tensor, leaf: Tensor, padding_idx: int | None, runtime: Runtime, weight: ShardedWeight
    ) -> Tensor:
        ctx.runtime = runtime
        ctx.weight = weight
        ctx.padding_idx = padding_idx
        if padding_idx is None:
            ctx.padding_idx = -1  # as aten wants it
        found = exchanged_lookup(indices, runtime, weight)
        if found is not None:
            output, ids = found
            ctx.save_for_backward(indices, ids)  # ids of all ranks: backward exchanges no ids
            return compat.no_view(output)  # torch refuses in-place ops on a view from here
        # A selective checkpoint may have saved the output: then nothing is gathered.
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
        ctx.runtime.grads.compute(embedding_grad, *args)  # a stage of a pipeline may put it off
        return None, None, None, None, None


def embedding_grad(
    runtime: Runtime, weight: ShardedWeight, grad_output: Tensor, indices: Tensor, ids: Tensor | None, padding_idx: int
) -> None:
    """Compute the table's gradient and reduce it. ``ids`` are those of ``exchanged_lookup``, if it
    has found any; ``padding_idx`` is -1 if there is none."""
    if ids is not None:
        exchanged_grad(runtime, weight, grad_output, ids, padding_idx)
        return
    # A deterministic sort on CUDA, unlike index_add. It returns a new, dense gradient.
    dense_backward = torch.ops.aten.embedding_dense_backward
    num_rows = weight.layout.shape[0]
    grad = dense_backward(grad_output.contiguous(), indices, num_rows, padding_idx, False)
    runtime.grads.add_full(weight, grad, is_owned=True)


def can_exchange(runtime: Runtime, weight: ShardedWeight) -> bool:
    """Whether each rank has whole rows of the plain matrix ``weight``, and all ranks count alike."""
    layout = weight.layout
    has_rows = len(layout.shape) == 2 and layout.dim == 0 and layout.world > 1
    is_plain = weight.form.wire is None and weight.tp_spec is None and weight.param.is_floating_point()
    # An exchange is a collective: no rank may leave it out.
    is_used_by_all = not weight.flags.reduce_scatter_unused_params
    return has_rows and is_plain and is_used_by_all and runtime.grads.launches.replicas is None


def new_exchange(
    runtime: Runtime, weight: ShardedWeight, purpose: str, choice: str, token_nbytes: Callable[[], int]
) -> TokenExchange:
    """An exchange for ``choice`` "exchange", or if it moves fewer bytes than the gather of the
    weight and the reduce_scatter of its gradient. All ranks decide alike, because all see the same
    numbers."""

    def is_worth(capacity: int) -> bool:
        moved = _moved_nbytes(weight)
        return choice == "exchange" or is_exchange_worth(weight.layout.world, capacity, token_nbytes(), moved)

    declared = runtime.policy.exchange_tokens
    return TokenExchange(weight.fqn, weight.layout.shape, weight.mesh, purpose, declared, is_worth)


def _moved_nbytes(weight: ShardedWeight) -> int:
    """Bytes of the gathered weight and of its gradient."""
    itemsize = weight.compute_dtype.itemsize
    if weight.param.requires_grad:
        itemsize += weight.reduce_dtype.itemsize
    return weight.layout.shape.numel() * itemsize


def _may_ask(runtime: Runtime, weight: ShardedWeight) -> bool:
    """Whether ranks know how many tokens others have, or may ask in each lookup."""
    comm = runtime.comm
    if runtime.policy.exchange_tokens is not None:
        return True
    # Then the most tokens of the first use count, see [Note: ranks with unequal numbers of tokens].
    is_known = comm.may_replay_steps or comm.streams.is_capturing
    return is_known or is_worth_asking(_moved_nbytes(weight))


def exchanged_ids(indices: Tensor, runtime: Runtime, weight: ShardedWeight) -> Tensor | None:
    """The ids of all ranks, shape ``(world, capacity)``, or None where the table is to be gathered."""
    choice = runtime.policy.embedding
    if choice == "gather" or (choice == "auto" and not _may_ask(runtime, weight)):
        return None
    # After ``unshard`` the table is here anyway.
    if weight.is_pinned or not weight.fused.may_exchange or not can_exchange(runtime, weight):
        return None
    if weight.fused.lookups is None:

        def token_nbytes() -> int:
            dim = weight.layout.shape[1]
            has_gradient = weight.param.requires_grad
            return lookup_nbytes(dim, weight.compute_dtype.itemsize, has_gradient=has_gradient)

        weight.fused.lookups = new_exchange(runtime, weight, "lookup", choice, token_nbytes)
    runtime.setup.ensure()
    weight.check_readable()
    with profiler_range("GTP::exchange", weight.fqn), compat.unseen_by_checkpoint_policies():
        runtime.gathering.parts.complete([weight])
        return weight.fused.lookups.gather(indices.reshape(-1), 0, runtime.comm, weight.groups)


def exchanged_lookup(indices: Tensor, runtime: Runtime, weight: ShardedWeight) -> tuple[Tensor, Tensor] | None:
    """The activations of this rank's tokens, shape ``(*indices.shape, embedding_dim)``, and the ids
    of all ranks, shape ``(world, capacity)``. None where the table is to be gathered."""
    ids = exchanged_ids(indices, runtime, weight)
    if ids is None:
        return None
    dim = weight.layout.shape[1]
    with profiler_range("GTP::exchange", weight.fqn), compat.unseen_by_checkpoint_policies():
        # Each rank looks up its own rows for the tokens of all ranks.
        rows = _own_rows(ids.reshape(-1), weight)
        output = rows.new_empty((ids.shape[1], dim))
        # Other ranks add zero bits. Every backend has sums of these integers.
        if dim * rows.element_size() % 4 == 0:
            bits = torch.int32
        else:
            bits = torch.uint8
        what = f"{ids.shape[1]} tokens of {weight.fqn}"
        args = (output.view(bits), rows.view(bits), dist.ReduceOp.SUM)
        done = runtime.comm.launch(compat.reduce_scatter_base, what, weight.groups, *args)
        runtime.comm.streams.wait(done)
    # Without the padding up to the capacity.
    return output[: indices.numel()].view(*indices.shape, dim), ids


def _own_rows(ids: Tensor, weight: ShardedWeight) -> Tensor:
    """For each token the row of the table if this rank has it, else zeros: shape
    ``(world * capacity, dim)``."""
    layout = weight.layout
    check_range(ids, layout.shape[0])
    if not layout.local_rows:  # earlier ranks have all rows
        return torch.zeros((ids.numel(), layout.shape[1]), dtype=weight.compute_dtype, device=ids.device)
    local, is_other = local_ids(ids, layout)
    # What other ranks have is looked up as row 0, and then set to zero.
    rows = weight.shard.detach().index_select(0, local.masked_fill(is_other, 0))
    return rows.to(weight.compute_dtype).masked_fill_(is_other.unsqueeze(1), 0)


def padded(rows: Tensor, num_rows: int) -> Tensor:
    """``rows`` and zeros after them."""
    missing = num_rows - rows.shape[0]
    if missing:
        rows = F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, missing))
    return rows


def check_range(ids: Tensor, num_rows: int) -> None:
    """Fail for an id beyond the table as a lookup in the whole table does: on the host, or on the
    device."""
    torch.zeros(1, dtype=torch.uint8, device=ids.device).expand(num_rows).index_select(0, ids)


def local_ids(ids: Tensor, layout: WeightLayout) -> tuple[Tensor, Tensor]:
    """Ids as indices of this rank's rows, and which of them are not rows of this rank."""
    local = ids - layout.local_offset
    return local, (local < 0) | (local >= layout.local_rows)


def exchanged_grad(runtime: Runtime, weight: ShardedWeight, grad_output: Tensor, ids: Tensor, padding_idx: int) -> None:
    """Sum up the gradient of this rank's rows over the tokens of all ranks, and reduce it.
    ``grad_output`` is of this rank's tokens, ``ids`` are of all ranks, ``padding_idx`` is -1 if
    there is none."""
    layout = weight.layout
    comm = runtime.comm
    # Gradients that wait for others to travel with run behind this exchange: the table's gradient
    # is usually the last. (That of a gathered table launches nothing early: other ranks may replay
    # its block from a recording.)
    runtime.grads.launch_waiting()
    # Tokens that this rank does not have add zeros to row 0.
    sent = padded(grad_output.reshape(-1, layout.shape[1]), ids.shape[1]).contiguous()
    received = sent.new_empty((ids.numel(), layout.shape[1]))
    # In the gather group: the scatter group may be busy with reductions, such as those just launched.
    with profiler_range("GTP::exchange", weight.fqn), comm.gathering(weight.groups):
        what = f"gradients of {ids.shape[1]} tokens of {weight.fqn}"
        comm.before_collective("all_gather", what, weight.groups)
        work = compat.all_gather_base(received, sent, weight.groups.gather, not comm.streams.has_streams)
        done = comm.gather_done(work, weight.groups)
    comm.streams.wait(done)
    flat = ids.reshape(-1)
    local, is_other = local_ids(flat, layout)
    # The padding row behind the slot takes what is not for this rank.
    grad = torch.ops.aten.embedding_dense_backward(
        # Tokens of all ranks are summed here: in float32 or wider.
        received.to(torch.promote_types(weight.reduce_dtype, torch.float32)),
        local.masked_fill(is_other | (flat == padding_idx), layout.chunk_rows),
        layout.chunk_rows + 1,
        layout.chunk_rows,
        False,
    )
    runtime.grads.add_rows(weight, grad[: layout.chunk_rows])
