"""Cross entropy of a linear layer whose vocabulary stays where it is: logits are never whole, nor is the weight.

The hidden states of all ranks are all-gathered chunk by chunk, and each rank computes the logits of its own rows of
the vocabulary for them. The largest logit and the sum of exponentials of a token are reduced over the ranks, in
float32; so is the logit of its target, which one rank has. Backward computes the logits of a chunk again, and from them
the gradient of the hidden states, a partial sum that is reduce-scattered in float32 to the ranks they came from, and
that of the rank's own rows of the weight, which stays there.

Of a chunk a rank holds ``ranks * tokens * own rows`` logits at a time, however long the sequence is. A chunk consists
of some tokens of each rank, so that gathers and scatters of other chunks run behind its products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .. import _torch_compat as compat
from .._comm import collectives
from .._comm.collectives import ReduceScale
from .._comm.debug import profiler_range
from .._comm.streams import Done
from .._comm.tokens import TokenExchange
from .._params.saved_for_backward import check_differentiable, check_unmodified
from .._params.sharded_weight import ShardedWeight
from .._schedule.runtime import Runtime
from .exchange import SUM, can_exchange, check_range

_MAX = ReduceScale(dist.ReduceOp.MAX, None, None)


# float32 logits of a chunk on a rank: large enough for efficient products, small beside a layer's activations. So much
# of hidden states of all ranks is kept for backward, too.
CHUNK_NBYTES = 256 * 2**20


# In the place of a target without a loss: no row, and none that a mistaken target could be.
IGNORED = -(2**62)


def loss_exchange(runtime: Runtime, weight: ShardedWeight) -> TokenExchange | None:
    """What ranks have agreed on for losses over the rows of ``weight``; None where it is gathered in any case.

    Raises:
        NotImplementedError: The policy asks for an exchange, but ranks do not hold whole rows.
    """
    policy = runtime.schedule
    is_asked_for = policy.head == "exchange"
    if policy.head == "gather":
        return None
    if not can_exchange(runtime, weight):
        if not is_asked_for:
            return None
        raise NotImplementedError(
            f"linear_cross_entropy expects whole rows of a plain matrix on each rank, but got parameter '{weight.fqn}' "
            f"of shape {tuple(weight.param.shape)} with placements {weight.placements} on mesh axes "
            f"{weight.mesh.mesh_dim_names}. Leave it out of tensor parallelism, quantize_, unequal replicas and "
            "placements on other dims, or pass SchedulePolicy(head='auto') or 'gather' to gtp_shard."
        )
    if weight.losses is None:

        def is_worth(capacity: int) -> bool:
            return is_asked_for or _exchanged_nbytes(weight, capacity) < _gathered_nbytes(weight)

        weight.losses = weight.exchange("loss", policy.exchange_tokens, is_worth)
    return weight.losses


def _exchanged_nbytes(weight: ShardedWeight, capacity: int) -> int:
    """Hidden states to all ranks in forward and backward, and their gradients back, in float32."""
    return weight.layout.world * capacity * weight.layout.shape[1] * (2 * weight.compute_dtype.itemsize + 4)


def _gathered_nbytes(weight: ShardedWeight) -> int:
    """One gather, since the last weight of forward is kept for backward, and the gradient."""
    itemsize = weight.compute_dtype.itemsize + (weight.reduce_dtype.itemsize if weight.param.requires_grad else 0)
    return weight.layout.shape.numel() * itemsize


def vocabulary_parallel_loss(
    hidden: Tensor,
    target: Tensor,
    bias: Tensor | None,
    runtime: Runtime,
    weight: ShardedWeight,
    exchange: TokenExchange,
    label_smoothing: float,
) -> Tensor | None:
    """The loss of each token of this rank, or None where ranks have agreed to gather the weight.

    Args:
        hidden: Shape ``(tokens, in_features)``, in the compute dtype.
        target: Shape ``(tokens,)``: rows of the weight, or ``IGNORED`` for tokens that have no loss.
        bias: Shape ``(out_features,)`` or None.
        runtime: Streams, and takes the weight's gradient.
        weight: Logical shape ``(out_features, in_features)``.
        exchange: What ranks have agreed on.
        label_smoothing: As in ``F.cross_entropy``.

    Returns:
        Shape ``(tokens,)``, float32 or wider; zero for ignored tokens.
    """
    check_differentiable(weight)
    runtime.ensure_initialized()
    weight.check_readable()
    with torch.no_grad(), compat.unseen_by_checkpoint_policies():
        targets = exchange.gather(target, IGNORED, runtime.comm, weight.groups)
        if targets is None:
            return None
        check_range(targets.masked_fill(targets == IGNORED, 0).view(-1), weight.layout.shape[0])
    job = _Job(runtime, weight, targets, target.shape[0], label_smoothing)
    losses: Tensor = _VocabularyParallelLoss.apply(hidden, weight.leaf, bias, job)  # type: ignore[no-untyped-call]
    return losses


@dataclass(frozen=True)
class _Job:
    """One loss.

    Args:
        targets: Of all ranks, shape ``(world, capacity)``.
        num_tokens: Of this rank.
    """

    runtime: Runtime
    weight: ShardedWeight
    targets: Tensor
    num_tokens: int
    label_smoothing: float

    @property
    def capacity(self) -> int:
        return self.targets.shape[1]

    @property
    def rank(self) -> int:
        return self.weight.layout.rank

    def chunks(self) -> list[slice]:
        """Tokens of each rank that are computed together. Of things that are the same on all ranks."""
        layout = self.weight.layout
        size = max(1, CHUNK_NBYTES // (4 * layout.world * layout.chunk_rows))
        return [slice(begin, min(begin + size, self.capacity)) for begin in range(0, self.capacity, size)]

    def own_rows(self, dtype: torch.dtype) -> Tensor:
        return self.weight.shard.detach().to(dtype)

    def own_part(self, whole: Tensor) -> Tensor:
        """Of a vector over the vocabulary."""
        layout = self.weight.layout
        return whole.narrow(0, min(layout.local_offset, layout.num_rows), layout.local_rows)

    def logits(self, hidden: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Of the own rows, computed in the dtype of ``hidden``."""
        logits = F.linear(hidden, rows, None if bias is None else self.own_part(bias).to(hidden.dtype))
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def local_targets(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """Of the tokens of a chunk: the target as an index of the own rows (0 where it is not), and whether it is."""
        layout = self.weight.layout
        local = self.targets[:, chunk].reshape(-1) - layout.local_offset
        # An ignored target is no row of any rank, also of the one that has row 0.
        is_own = (local >= 0) & (local < layout.local_rows)
        return local.masked_fill(~is_own, 0), is_own

    def reduce(self, values: Tensor, scale: ReduceScale) -> Tensor:
        """All-reduce over the gtp axis, in place, ready on the current stream."""
        weight, comm = self.weight, self.runtime.comm
        with comm.scattering():
            comm.before_collective("all_reduce", f"logits' statistics of {weight.fqn}", weight.groups)
            done = comm.scatter_done(collectives.all_reduce(values, scale, weight.groups.scatter, comm.has_streams))
        comm.wait(done)
        return values

    def gather(self, part: Tensor, what: str) -> tuple[Tensor, Done]:
        """All-gather contiguous rows of this rank, shape ``(n, ...)``, to ``(world * n, ...)``.

        Not in the group that gathers weights: when backward begins, those of the layers before are on their way.
        """
        weight, comm = self.weight, self.runtime.comm
        received = part.new_empty((weight.layout.world * part.shape[0], *part.shape[1:]))
        with comm.scattering():
            comm.before_collective("all_gather", f"{what} for the loss over {weight.fqn}", weight.groups)
            work = collectives.all_gather(received, part, weight.groups.scatter, comm.has_streams)
            return received, comm.scatter_done(work)

    def hidden_of_all(self, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Each chunk with its hidden states of all ranks; the next one is on its way meanwhile."""
        hidden = _padded(hidden, self.capacity)
        chunks = self.chunks()
        ahead = self.gather(hidden[chunks[0]], "hidden states")
        for index, chunk in enumerate(chunks):
            received, done = ahead
            if index + 1 < len(chunks):
                ahead = self.gather(hidden[chunks[index + 1]], "hidden states")
            self.runtime.comm.wait(done)
            yield chunk, received

    def keeps_hidden(self, hidden: Tensor) -> bool:
        """Whether the hidden states of all ranks stay from forward to backward: if they are no more than a chunk is."""
        return self.targets.numel() * hidden.shape[1] * hidden.element_size() <= CHUNK_NBYTES


class _VocabularyParallelLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, leaf: Tensor, bias: Tensor | None, job: _Job) -> Tensor:
        ctx.job, ctx.version = job, job.weight.version
        with (
            profiler_range("GTP::loss", job.weight.fqn),
            compat.unseen_by_checkpoint_policies(),
            torch.autocast(hidden.device.type, enabled=False),
        ):
            losses, normalizers, kept = _forward(job, hidden, bias)
        ctx.save_for_backward(hidden, bias, normalizers, *kept)
        return losses

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        job: _Job = ctx.job
        hidden, bias, normalizers, *kept = ctx.saved_tensors
        job.runtime.note_backward()
        check_unmodified(job.weight, ctx.version)
        job.weight.check_readable()
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        needs_weight = needs_weight and compat.is_awaited(ctx, 1)
        with profiler_range("GTP::loss", job.weight.fqn), torch.autocast(hidden.device.type, enabled=False):
            backward = _Backward(job, hidden, bias, needs_hidden, needs_weight, needs_bias)
            return *backward.run(grad_losses, normalizers, kept), None


def _forward(job: _Job, hidden: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Losses of this rank's tokens, shape ``(num_tokens,)``; the logarithm of each token's sum of exponentials of all
    ranks, shape ``(world, capacity)``; and what is kept of hidden states, by chunk."""
    layout = job.weight.layout
    shape = (layout.world, job.capacity)
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    rows = job.own_rows(hidden.dtype)
    largest = torch.full(shape, -torch.inf, dtype=dtype, device=hidden.device)
    # Sums of exponentials relative to the largest logit of this rank; logits of targets; sums of logits.
    exponentials, at_target, totals = sums = torch.zeros((3, *shape), dtype=dtype, device=hidden.device)
    kept = []
    # A rank without rows takes part in the collectives all the same.
    for chunk, received in job.hidden_of_all(hidden):
        if job.keeps_hidden(hidden):
            kept.append(received)
        if not layout.local_rows:
            continue
        logits = job.logits(received, rows, bias)
        local, is_own = job.local_targets(chunk)
        target = logits.gather(1, local.unsqueeze(1)).squeeze(1)
        at_target[:, chunk] = target.masked_fill(~is_own, 0).view(layout.world, -1)
        if job.label_smoothing:
            totals[:, chunk] = logits.sum(1).view(layout.world, -1)
        peak = logits.amax(1)
        logits -= peak.clamp(min=torch.finfo(dtype).min).unsqueeze(1)
        largest[:, chunk] = peak.view(layout.world, -1)
        exponentials[:, chunk] = logits.exp_().sum(1).view(layout.world, -1)
    own = largest.clone()
    job.reduce(largest, _MAX)
    exponentials *= (own - largest).exp_()
    job.reduce(sums, SUM)
    normalizers = largest + exponentials.log()
    losses = normalizers - at_target
    if job.label_smoothing:
        uniform = normalizers - totals / layout.num_rows
        losses = (1 - job.label_smoothing) * losses + job.label_smoothing * uniform
    losses = losses.masked_fill_(job.targets == IGNORED, 0)
    return losses[job.rank, : job.num_tokens].clone(), normalizers, kept


class _Backward:
    """The gradients of one loss, chunk by chunk."""

    def __init__(
        self, job: _Job, hidden: Tensor, bias: Tensor | None, needs_hidden: bool, needs_weight: bool, needs_bias: bool
    ) -> None:
        self._job, self._hidden, self._bias = job, hidden, bias
        self._rows = job.own_rows(hidden.dtype)
        self._dtype = torch.promote_types(hidden.dtype, torch.float32)
        layout = job.weight.layout
        self._grad_hidden = torch.empty_like(hidden) if needs_hidden else None
        self._wgrad = self._grad_bias = None
        if needs_weight:
            dtype = torch.promote_types(job.weight.reduce_dtype, torch.float32)
            self._wgrad = torch.zeros(layout.slot_shape, dtype=dtype, device=hidden.device)
        if needs_bias:
            assert bias is not None
            self._grad_bias = torch.zeros(layout.num_rows, dtype=self._dtype, device=hidden.device)

    def run(self, grad_losses: Tensor, normalizers: Tensor, kept: list[Tensor]) -> tuple[Tensor | None, ...]:
        job, comm = self._job, self._job.runtime.comm
        own = _padded(grad_losses.to(self._dtype), job.capacity)
        grads, done = job.gather(own, "gradients")
        comm.wait(done)
        grads = grads.view(job.targets.shape).masked_fill(job.targets == IGNORED, 0)
        for chunk, received in zip(job.chunks(), kept, strict=True) if kept else job.hidden_of_all(self._hidden):
            logits = job.logits(received, self._rows, self._bias)
            self._chunk(chunk, received, logits, grads[:, chunk], normalizers[:, chunk])
        if self._wgrad is not None:
            job.runtime.grads.add_rows(job.weight, self._wgrad)
        comm.retire_all()  # the gradient of the hidden states is complete
        grad_bias = None if self._grad_bias is None or self._bias is None else self._grad_bias.to(self._bias.dtype)
        return self._grad_hidden, None, grad_bias

    def _chunk(self, chunk: slice, received: Tensor, logits: Tensor, grads: Tensor, normalizers: Tensor) -> None:
        layout = self._job.weight.layout
        grad_logits = _grad_logits(self._job, chunk, logits, grads.reshape(-1), normalizers.reshape(-1))
        if self._grad_bias is not None:
            self._job.own_part(self._grad_bias).add_(grad_logits.sum(0))
        grad_logits = grad_logits.to(received.dtype)
        if self._grad_hidden is not None:
            self._scatter(chunk, _product(grad_logits, self._rows, self._dtype), self._grad_hidden)
        if self._wgrad is not None and layout.local_rows:
            filled = layout.filled(self._wgrad)
            filled += _product(grad_logits.t(), received, self._wgrad.dtype)

    def _scatter(self, chunk: slice, full: Tensor, grad_hidden: Tensor) -> None:
        """Reduce-scatter a chunk's gradient of the hidden states of all ranks, behind the next product."""
        weight, comm = self._job.weight, self._job.runtime.comm
        slot = full.new_empty((full.shape[0] // weight.layout.world, full.shape[1]))
        target = grad_hidden[chunk]  # shorter than the chunk where this rank has fewer tokens
        with comm.reducing():
            comm.before_collective("reduce_scatter", f"hidden states for the loss over {weight.fqn}", weight.groups)
            work = collectives.reduce_scatter(slot, full, SUM, weight.groups.scatter, comm.has_streams)
            comm.reduction_launched(work, partial(_take, target, slot), (full, slot))


def _take(target: Tensor, slot: Tensor) -> None:
    target.copy_(slot[: target.shape[0]])


def _grad_logits(job: _Job, chunk: slice, logits: Tensor, grads: Tensor, normalizers: Tensor) -> Tensor:
    """The gradient of the logits of this rank's rows, for a chunk of tokens; in the memory of ``logits``."""
    local, is_own = job.local_targets(chunk)
    logits -= normalizers.unsqueeze(1)
    grad = logits.exp_().mul_(grads.unsqueeze(1))
    if not grad.shape[1]:
        return grad
    if job.label_smoothing:
        grad -= (grads * (job.label_smoothing / job.weight.layout.num_rows)).unsqueeze(1)
    at_target = (grads * (1 - job.label_smoothing)).masked_fill(~is_own, 0)
    return grad.scatter_add_(1, local.unsqueeze(1), -at_target.unsqueeze(1))


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """``left @ right`` in ``dtype``, which is the sum's own where the factors are narrower."""
    if left.dtype == dtype:
        return left @ right
    if left.is_cuda and dtype == torch.float32:
        return torch.mm(left, right, dtype)  # what cuBLAS accumulates in anyway
    return left.to(dtype) @ right.to(dtype)


def _padded(rows: Tensor, num_rows: int) -> Tensor:
    """``rows`` and zeros after them."""
    missing = num_rows - rows.shape[0]
    return F.pad(rows, (0, 0) * (rows.ndim - 1) + (0, missing)).contiguous() if missing else rows.contiguous()
