"""Embedding by exchange of activations: the table stays where it is.

Each rank looks up its own rows for the tokens of all ranks: an all-gather of token ids, a lookup, and a reduce-scatter
that gives every rank the activations of its tokens. Backward all-gathers the gradient of the activations, and each rank
adds up what belongs to its rows. That moves ``world * tokens * dim`` elements in each direction, where a gather moves
``rows * dim``.

Exact: of the ranks one holds the row of a token, all others contribute zero bits, and the sum is one of integers, so
that the activations are the table's bits, whatever they are. The gradient is summed on the rank that owns a row, in
float32 or wider. An all-to-all of only those activations that a rank has would move less, by the size of the axis; but
how many there are depends on the tokens, so the host would have to wait for them.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .. import _torch_compat as compat
from .._comm import collectives
from .._comm.collectives import ReduceScale
from .._comm.debug import profiler_range
from .._comm.tokens import TokenExchange
from .._params.sharded_weight import ShardedWeight
from .._schedule.runtime import Runtime

SUM = ReduceScale(dist.ReduceOp.SUM, None, None)


_ID_NBYTES = 8


def token_exchange(runtime: Runtime, weight: ShardedWeight) -> TokenExchange | None:
    """What ranks have agreed on for lookups in the table ``weight``; None where it is gathered in any case.

    A function of what all ranks see alike.
    """
    policy = runtime.schedule
    if policy.embedding == "gather" or weight.is_pinned or not can_exchange(runtime, weight):
        return None
    if weight.lookups is None:
        is_asked_for = policy.embedding == "exchange"

        def is_worth(capacity: int) -> bool:
            return is_asked_for or _exchanged_nbytes(weight, capacity) < _gathered_nbytes(weight)

        weight.lookups = weight.exchange("lookup", policy.exchange_tokens, is_worth)
    return weight.lookups


def can_exchange(runtime: Runtime, weight: ShardedWeight) -> bool:
    """Whether each rank has whole rows of the plain matrix ``weight``, and all ranks count alike."""
    layout = weight.layout
    has_rows = len(layout.shape) == 2 and layout.dim == 0 and layout.world > 1
    is_plain = weight.wire is None and weight.tp_spec is None and weight.param.is_floating_point()
    return has_rows and is_plain and runtime.grads.replicas is None


def _exchanged_nbytes(weight: ShardedWeight, capacity: int) -> int:
    """What the exchange of a lookup, and of its gradient, moves to all ranks."""
    num_passes = 2 if weight.param.requires_grad else 1
    width = weight.layout.shape[1] * weight.compute_dtype.itemsize
    return weight.layout.world * capacity * (num_passes * width + _ID_NBYTES)


def _gathered_nbytes(weight: ShardedWeight) -> int:
    """What a gather, and the reduce-scatter of its gradient, move to all ranks."""
    itemsize = weight.compute_dtype.itemsize + (weight.reduce_dtype.itemsize if weight.param.requires_grad else 0)
    return weight.layout.shape.numel() * itemsize


def exchanged_lookup(indices: Tensor, runtime: Runtime, weight: ShardedWeight) -> tuple[Tensor, Tensor] | None:
    """Rows of the table for the tokens of this rank, or None where the table is to be gathered.

    Args:
        indices: Integers of any shape.
        runtime: Streams and policy.
        weight: Logical shape ``(num_embeddings, embedding_dim)``.

    Returns:
        Activations of shape ``(*indices.shape, embedding_dim)``, and the ids of all ranks, shape ``(world, capacity)``.
    """
    ids = exchanged_ids(indices, runtime, weight)
    if ids is None:
        return None
    comm, layout = runtime.comm, weight.layout
    with profiler_range("GTP::exchange", weight.fqn), compat.unseen_by_checkpoint_policies():
        rows = _own_rows(ids, weight)
        output = rows.new_empty((ids.shape[1], layout.shape[1]))
        with comm.scattering():  # not behind the weights that are gathered ahead
            comm.before_collective("reduce_scatter", f"{ids.shape[1]} tokens of {weight.fqn}", weight.groups)
            work = collectives.reduce_scatter(
                _as_integers(output), _as_integers(rows), SUM, weight.groups.scatter, comm.has_streams
            )
            done = comm.scatter_done(work)
        comm.wait(done)
    return output[: indices.numel()].view(*indices.shape, layout.shape[1]), ids


def exchanged_ids(indices: Tensor, runtime: Runtime, weight: ShardedWeight) -> Tensor | None:
    """The ids of all ranks, shape ``(world, capacity)``, or None where the table is to be gathered."""
    exchange = token_exchange(runtime, weight)
    if exchange is None:
        return None
    runtime.ensure_initialized()
    weight.check_readable()
    with profiler_range("GTP::exchange", weight.fqn), compat.unseen_by_checkpoint_policies():
        return exchange.gather(indices.reshape(-1), 0, runtime.comm, weight.groups)


def _own_rows(ids: Tensor, weight: ShardedWeight) -> Tensor:
    """For each token the row of the table if this rank has it, else zeros: shape ``(world * capacity, dim)``."""
    layout = weight.layout
    ids = ids.reshape(-1)
    check_range(ids, layout.shape[0])
    if not layout.local_rows:
        return torch.zeros((ids.numel(), layout.shape[1]), dtype=weight.compute_dtype, device=ids.device)
    local = ids - layout.local_offset
    is_other = (local < 0) | (local >= layout.local_rows)
    rows = weight.shard.detach().index_select(0, local.masked_fill(is_other, 0)).to(weight.compute_dtype)
    return rows.masked_fill_(is_other.unsqueeze(1), 0)


def check_range(ids: Tensor, num_rows: int) -> None:
    """Fail as a lookup in a whole table fails on an id that it does not have: on the host, or on the device."""
    torch.zeros(1, dtype=torch.uint8, device=ids.device).expand(num_rows).index_select(0, ids)


def _as_integers(rows: Tensor) -> Tensor:
    """The bits of ``rows``, as integers that every backend can add."""
    return rows.view(torch.int32 if rows.shape[-1] * rows.element_size() % 4 == 0 else torch.uint8)


def exchanged_grad(runtime: Runtime, weight: ShardedWeight, grad_output: Tensor, ids: Tensor, padding_idx: int) -> None:
    """Add up the gradient of this rank's rows over the tokens of all ranks.

    Args:
        runtime: Takes the gradient.
        weight: The table.
        grad_output: Gradient of this rank's activations, shape ``(*, embedding_dim)``.
        ids: Of all ranks, as the lookup returned them.
        padding_idx: Row without gradient, -1 if there is none.
    """
    layout, comm = weight.layout, runtime.comm
    # Hidden behind this: the table's gradient is as a rule the last. (A gathered table may be in a recorded block, that
    # other ranks replay: they have to launch alike.)
    runtime.grads.launch_waiting()
    sent = grad_output.reshape(-1, layout.shape[1])
    # Tokens that a rank does not have add zeros to row 0.
    sent = F.pad(sent, (0, 0, 0, ids.shape[1] - sent.shape[0])).contiguous()
    received = sent.new_empty((ids.numel(), layout.shape[1]))
    with profiler_range("GTP::exchange", weight.fqn), comm.gathering(weight.groups):
        comm.before_collective("all_gather", f"gradients of {ids.shape[1]} tokens of {weight.fqn}", weight.groups)
        work = collectives.all_gather(received, sent, weight.groups.gather, comm.has_streams)
        done = comm.gather_done(work, weight.groups)
    comm.wait(done)
    flat = ids.reshape(-1)
    local = flat - layout.local_offset
    is_other = (local < 0) | (local >= layout.local_rows) | (flat == padding_idx)
    # One row more than the slot has takes what is not for this rank, as a padding row: nothing.
    grad = torch.ops.aten.embedding_dense_backward(
        received.to(torch.promote_types(weight.reduce_dtype, torch.float32)),
        local.masked_fill(is_other, layout.chunk_rows),
        layout.chunk_rows + 1,
        layout.chunk_rows,
        False,
    )
    runtime.grads.add_rows(weight, grad[: layout.chunk_rows])
