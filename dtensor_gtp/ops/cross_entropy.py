"""Cross entropy of a linear layer whose vocabulary stays sharded: neither the logits nor the weight
are ever whole.

The hidden states of all ranks are all-gathered in chunks of some tokens of each rank, while each
rank computes the logits of its own rows of the vocabulary for the chunk before. The largest logit,
the sum of exponentials and the target's logit of each token are all-reduced in float32. Backward
computes the logits again, and reduce-scatters the gradient of the hidden states in float32. The
gradient of the own rows stays on the rank.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from .. import _torch_compat as compat
from .._comm.debug import profiler_range
from .._comm.streams import Done
from .._comm.tokens import TokenExchange
from .._params.refusals import check_differentiable, check_unmodified
from .._params.sharded_weight import ShardedWeight
from .._schedule.runtime import Runtime
from .embedding import can_exchange, check_range, local_ids, new_exchange, padded

# Size of a chunk's float32 logits on a rank: large enough for efficient products, small beside a
# layer's activations. Hidden states of all ranks are kept for backward if they are no larger.
CHUNK_NBYTES = 256 * 2**20

# Replaces a target without a loss: no row, and none that a mistaken target could be.
IGNORED = -(2**62)


def loss_exchange(runtime: Runtime, weight: ShardedWeight) -> TokenExchange | None:
    """What ranks have agreed on for losses over the rows of ``weight``; None where it is always
    gathered."""
    choice = runtime.policy.head
    if choice == "gather" or (choice != "exchange" and not can_exchange(runtime, weight)):
        return None
    if not can_exchange(runtime, weight):
        raise NotImplementedError(
            "linear_cross_entropy expects whole rows of a plain matrix on each rank, but got "
            f"parameter '{weight.fqn}' of shape {tuple(weight.param.shape)} with placements "
            f"{weight.placements} on mesh axes {weight.mesh.mesh_dim_names}. Leave it out of "
            "tensor parallelism, quantize_, unequal replicas and placements on other dims, or pass "
            "SchedulePolicy(head='auto') or 'gather' to gtp_shard."
        )
    if weight.fused.losses is None:
        # A token's hidden states in forward and backward, and their gradient in float32.
        token_nbytes = weight.layout.shape[1] * (2 * weight.compute_dtype.itemsize + 4)
        weight.fused.losses = new_exchange(runtime, weight, "loss", choice, lambda: token_nbytes)
    return weight.fused.losses


def vocabulary_parallel_loss(
    hidden: Tensor,
    target: Tensor,
    bias: Tensor | None,
    runtime: Runtime,
    weight: ShardedWeight,
    exchange: TokenExchange,
    label_smoothing: float,
) -> Tensor | None:
    """The loss of each token of this rank in float32 or wider, or None where ranks have agreed to
    gather the weight. ``hidden`` is in the compute dtype; ``target`` is ``IGNORED`` for tokens
    without a loss, whose loss is zero."""
    check_differentiable(weight)
    runtime.setup.ensure()
    weight.check_readable()
    with torch.no_grad(), compat.unseen_by_checkpoint_policies():
        runtime.gathering.parts.complete([weight])
        targets = exchange.gather(target, IGNORED, runtime.comm, weight.groups)
        if targets is None:
            return None
        check_range(targets.masked_fill(targets == IGNORED, 0).view(-1), weight.layout.shape[0])
    job = _Job(runtime, weight, targets, target.shape[0], label_smoothing)
    losses: Tensor = _VocabularyParallelLoss.apply(hidden, weight.leaf, bias, job)  # type: ignore[no-untyped-call]
    return losses


@dataclass(frozen=True)
class _Job:
    """One loss, and what its forward and backward both compute."""

    runtime: Runtime
    weight: ShardedWeight
    targets: Tensor  # of all ranks, shape (world, capacity)
    num_tokens: int  # of this rank
    label_smoothing: float

    def chunks(self) -> list[slice]:
        """Tokens of each rank that are computed together, the same on all ranks."""
        layout = self.weight.layout
        capacity = self.targets.shape[1]
        # Of logits in float32, on this rank, for the tokens of all ranks. ``chunk_rows`` is the same on
        # all ranks, unlike ``local_rows``.
        size = max(1, CHUNK_NBYTES // (4 * layout.world * layout.chunk_rows))
        return [slice(begin, min(begin + size, capacity)) for begin in range(0, capacity, size)]

    def logits(self, hidden: Tensor, rows: Tensor, bias: Tensor | None) -> Tensor:
        """Those of the own rows, computed in the dtype of ``hidden``, returned in float32 or wider."""
        own_bias = None
        if bias is not None:
            own_bias = self.weight.layout.part_of(bias).to(hidden.dtype)
        logits = F.linear(hidden, rows, own_bias)
        return logits.to(torch.promote_types(logits.dtype, torch.float32))

    def local_targets(self, chunk: slice) -> tuple[Tensor, Tensor]:
        """The targets of a chunk as indices of the own rows, and which are no own rows (then 0)."""
        layout = self.weight.layout
        local, is_other = local_ids(self.targets[:, chunk].reshape(-1), layout)
        return local.masked_fill(is_other, 0), is_other

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        comm = self.runtime.comm
        what = f"logits' statistics of {self.weight.fqn}"
        comm.streams.wait(comm.launch(compat.all_reduce, what, self.weight.groups, values, op))

    def all_gather(self, part: Tensor, what: str) -> tuple[Tensor, Done]:
        """Gather contiguous rows of this rank, shape ``(n, ...)``, to ``(world * n, ...)``. Not in
        the gather group, where the weights of earlier layers are on their way when backward
        begins."""
        received = part.new_empty((self.weight.layout.world * part.shape[0], *part.shape[1:]))
        what = f"{what} for the loss over {self.weight.fqn}"
        gather = compat.all_gather_base
        return received, self.runtime.comm.launch(gather, what, self.weight.groups, received, part)

    def hidden_of_all(self, hidden: Tensor) -> Iterator[tuple[slice, Tensor]]:
        """Each chunk with its hidden states of all ranks, while those of the next chunk are gathered."""
        hidden = padded(hidden, self.targets.shape[1]).contiguous()  # so chunks are contiguous, too
        chunks = self.chunks()
        ahead = self.all_gather(hidden[chunks[0]], "hidden states")  # holds the memory until compute has waited
        for index, chunk in enumerate(chunks):
            received, done = ahead
            if index + 1 < len(chunks):
                ahead = self.all_gather(hidden[chunks[index + 1]], "hidden states")
            self.runtime.comm.streams.wait(done)
            yield chunk, received

    def reduce_scatter(self, full: Tensor, target: Tensor) -> None:
        """Reduce a chunk's gradient of the hidden states of all ranks into ``target``, behind the
        next product."""
        weight = self.weight
        comm = self.runtime.comm
        slot = full.new_empty((full.shape[0] // weight.layout.world, full.shape[1]))

        def complete() -> None:
            target.copy_(slot[: target.shape[0]])  # a rank may have fewer tokens than the chunk

        with comm.reductions.reducing():
            what = f"hidden states for the loss over {weight.fqn}"
            comm.before_collective("reduce_scatter", what, weight.groups)
            args = (slot, full, dist.ReduceOp.SUM, weight.groups.scatter)
            work = compat.reduce_scatter_base(*args, not comm.streams.has_streams)
            # They stay alive until compute has waited for the reduction.
            comm.reductions.launched(work, complete, (full, slot, target))


class _VocabularyParallelLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, hidden: Tensor, leaf: Tensor, bias: Tensor | None, job: _Job) -> Tensor:
        ctx.job = job
        ctx.version = job.weight.version  # backward reads the shard again
        with (
            profiler_range("GTP::loss", job.weight.fqn),
            compat.unseen_by_checkpoint_policies(),
            torch.autocast(hidden.device.type, enabled=False),  # ``hidden`` is cast already
        ):
            losses, normalizers, kept = _forward(job, hidden, bias)
        ctx.save_for_backward(hidden, bias, normalizers, *kept)
        return losses

    @staticmethod
    @compat.once_differentiable
    def backward(ctx: Any, grad_losses: Tensor) -> tuple[Tensor | None, ...]:
        job: _Job = ctx.job
        hidden, bias, normalizers, *kept = ctx.saved_tensors
        job.runtime.note_backward()
        check_unmodified(job.weight, ctx.version)
        job.weight.check_readable()
        needs_hidden, needs_weight, needs_bias = ctx.needs_input_grad[:3]
        # ``torch.autograd.grad`` may ask for other gradients alone.
        needs = (needs_hidden, needs_weight and compat.is_awaited(ctx, 1), needs_bias)
        no_autocast = torch.autocast(hidden.device.type, enabled=False)
        with profiler_range("GTP::loss", job.weight.fqn), no_autocast:
            args = (hidden, bias, grad_losses, normalizers, kept, needs)
            grad_hidden, grad_bias = _backward(job, *args)
        return grad_hidden, None, grad_bias, None


def _forward(job: _Job, hidden: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Losses of this rank's tokens, shape ``(num_tokens,)``; the logarithm of each token's sum of
    exponentials, shape ``(world, capacity)``; and the hidden states that are kept, by chunk."""
    layout = job.weight.layout
    shape = job.targets.shape
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    rows = job.weight.shard.detach().to(hidden.device, hidden.dtype)
    largest = torch.full(shape, -torch.inf, dtype=dtype, device=hidden.device)  # stays -inf if this rank has no rows
    # One tensor of three, so that one all_reduce sums them: sums of exponentials relative to the
    # largest logit of this rank; logits of targets; sums of logits.
    sums = torch.zeros((3, *shape), dtype=dtype, device=hidden.device)
    exponentials, at_target, totals = sums  # views: what fills them fills ``sums``
    is_kept = job.targets.numel() * hidden.shape[1] * hidden.element_size() <= CHUNK_NBYTES
    kept = []
    # A rank without rows also takes part in the collectives.
    for chunk, received in job.hidden_of_all(hidden):
        if is_kept:
            kept.append(received)
        # Earlier ranks have all rows of the vocabulary.
        if not layout.local_rows:
            continue
        logits = job.logits(received, rows, bias)
        local, is_other = job.local_targets(chunk)
        target = logits.gather(1, local.unsqueeze(1)).squeeze(1)
        at_target[:, chunk] = target.masked_fill(is_other, 0).view(layout.world, -1)
        if job.label_smoothing:
            totals[:, chunk] = logits.sum(1).view(layout.world, -1)
        peak = logits.amax(1)
        # A row of -inf would give NaN: -inf - (-inf).
        logits -= peak.clamp(min=torch.finfo(dtype).min).unsqueeze(1)
        largest[:, chunk] = peak.view(layout.world, -1)
        exponentials[:, chunk] = logits.exp_().sum(1).view(layout.world, -1)
        del logits  # before the next logits
    own = largest.clone()  # the all_reduce overwrites ``largest``
    job.all_reduce(largest, dist.ReduceOp.MAX)
    # From now on relative to the largest logit of all ranks.
    exponentials *= (own - largest).exp_()
    job.all_reduce(sums, dist.ReduceOp.SUM)
    normalizers = largest + exponentials.log()
    losses = normalizers - at_target
    if job.label_smoothing:
        uniform = normalizers - totals / layout.num_rows
        losses = (1 - job.label_smoothing) * losses + job.label_smoothing * uniform
    losses = losses.masked_fill_(job.targets == IGNORED, 0)
    return losses[layout.rank, : job.num_tokens].clone(), normalizers, kept  # not a view of all ranks' losses


def _backward(
    job: _Job,
    hidden: Tensor,
    bias: Tensor | None,
    grad_losses: Tensor,
    normalizers: Tensor,
    kept: list[Tensor],
    needs: tuple[bool, bool, bool],
) -> tuple[Tensor | None, Tensor | None]:
    """The gradients of hidden states and bias, chunk by chunk. That of the weight is reduced."""
    layout = job.weight.layout
    comm = job.runtime.comm
    device = hidden.device
    dtype = torch.promote_types(hidden.dtype, torch.float32)
    wgrad_dtype = torch.promote_types(job.weight.reduce_dtype, torch.float32)
    rows = job.weight.shard.detach().to(hidden.device, hidden.dtype)
    grad_hidden = None
    if needs[0]:
        grad_hidden = torch.empty_like(hidden)
    wgrad = None
    if needs[1]:
        wgrad = torch.zeros(layout.slot_shape, dtype=wgrad_dtype, device=device)
    grad_bias = None
    if needs[2]:
        grad_bias = torch.zeros(layout.num_rows, dtype=dtype, device=device)
    own_grads = padded(grad_losses.to(dtype), job.targets.shape[1]).contiguous()
    grads, done = job.all_gather(own_grads, "gradients")
    comm.streams.wait(done)
    grads = grads.view(job.targets.shape).masked_fill(job.targets == IGNORED, 0)  # their loss is a constant
    chunks: Iterable[tuple[slice, Tensor]] = zip(job.chunks(), kept, strict=True)
    if not kept:
        chunks = job.hidden_of_all(hidden)  # gathered again
    for chunk, received in chunks:
        logits = job.logits(received, rows, bias)
        of_chunk = (grads[:, chunk].reshape(-1), normalizers[:, chunk].reshape(-1))
        grad_logits = _grad_logits(job, chunk, logits, *of_chunk)
        if grad_bias is not None:
            layout.part_of(grad_bias).add_(grad_logits.sum(0))
        grad_logits = grad_logits.to(received.dtype)
        if grad_hidden is not None:
            job.reduce_scatter(_product(grad_logits, rows, dtype), grad_hidden[chunk])
        if wgrad is not None and layout.local_rows:
            # All tokens of all ranks have been seen here: nothing is to be reduced over gtp.
            layout.filled(wgrad).add_(_product(grad_logits.t(), received, wgrad_dtype))
        del logits, grad_logits  # before the next logits
    if wgrad is not None:
        job.runtime.grads.add_rows(job.weight, wgrad)
    comm.reductions.retire_all()  # the gradient of the hidden states is complete
    if grad_bias is not None and bias is not None:
        grad_bias = grad_bias.to(bias.dtype)
    return grad_hidden, grad_bias


def _grad_logits(job: _Job, chunk: slice, logits: Tensor, grads: Tensor, normalizers: Tensor) -> Tensor:
    """The gradient of the logits of this rank's rows for a chunk of tokens, in the memory of
    ``logits``."""
    local, is_other = job.local_targets(chunk)
    logits -= normalizers.unsqueeze(1)
    grad = logits.exp_().mul_(grads.unsqueeze(1))
    if not grad.shape[1]:  # without rows there is no index 0 to add to
        return grad
    if job.label_smoothing:
        grad -= (grads * (job.label_smoothing / job.weight.layout.num_rows)).unsqueeze(1)
    at_target = (grads * (1 - job.label_smoothing)).masked_fill(is_other, 0)
    return grad.scatter_add_(1, local.unsqueeze(1), -at_target.unsqueeze(1))


def _product(left: Tensor, right: Tensor, dtype: torch.dtype) -> Tensor:
    """``left @ right`` in ``dtype``, also where the factors are narrower."""
    if left.dtype == dtype:
        return left @ right
    if left.is_cuda and dtype == torch.float32:
        return torch.mm(left, right, dtype)  # cuBLAS accumulates in float32 anyway
    return left.to(dtype) @ right.to(dtype)
