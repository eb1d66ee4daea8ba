"""Gradients of replicas of unequal sizes are summed segment by segment, behind backward.

A reduce-scatter leaves each rank the average of its replica for the rows that it holds. Those rows are parts of
segments (see ``plan``), each with other owners in the other replicas. Every set of owners has a *channel*: segments are
collected there until they fill a bucket, which is then summed in one all-reduce.

[Note: order of channels]
All ranks complete the gradients of the same weights in the same order, so every owner of a channel collects the same
segments and sees its bucket full at the same weight. Where one weight fills several buckets, the order of channels in
the plan decides. Whole parameters, which all ranks sum at the end of backward, come after what has filled its bucket by
then. So all ranks go through the sums that they take part in in one global order, and none waits for another in a
circle, nor do two sums meet in one group.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat
from .._comm import collectives
from .._comm.agreement import device_of
from .._comm.collectives import ReduceScale
from .._comm.context import CommContext
from .._comm.debug import profiler_range
from .._comm.digest import digest
from .._params.managed_param import ManagedParam
from .._params.sharded_weight import ShardedWeight
from .._params.whole_param import WholeParam
from .._schedule.gradient_protocols import WholeBucket
from .mesh import ElasticMesh
from .plan import Box, SyncPlan, box_of_rank
from .replicas import BatchShare

_SUM = ReduceScale(dist.ReduceOp.SUM, None, None)


class _Weights(NamedTuple):
    """How gradients are weighed so that the sum over replicas is the mean over the whole batch.

    Args:
        counts: Samples of every data rank, by replica and gtp coordinate.
        of_rank: Factor of this rank's gradient within the average over its replica.
        of_replica: Factor of that average in the sum over replicas.
    """

    counts: tuple[tuple[int, ...], ...]
    of_rank: float
    of_replica: float


class _Entry:
    """A reduced gradient of one weight that waits for the sums of its segments."""

    def __init__(self, weight: ShardedWeight, slot: Tensor, num_waiting: int) -> None:
        self.weight = weight
        self.slot = slot
        self.num_waiting = num_waiting


class Channel:
    """One set of owners that this rank is part of: their communicator, and what is collected for it.

    Args:
        group_name: Name of the process group; see ``Groups`` for why it is not the group.
        scale: What a copy counts where a replica has several of them.
    """

    def __init__(self, group_name: str, scale: float) -> None:
        self.group_name = group_name
        self.scale = scale
        self.pending: dict[torch.dtype, list[tuple[_Entry, Tensor]]] = {}

    def nbytes(self, dtype: torch.dtype) -> int:
        return sum(part.numel() for _, part in self.pending.get(dtype, ())) * dtype.itemsize


class ReplicaSync:
    """Sums the gradients of one module over replicas of unequal sizes. Made by :func:`synchronize_replicas`.

    Args:
        mesh: All replicas.
        plan: Who owns what.
        params: The parameters, in the order of ``plan.weights``.
        comm: The runtime's streams and reductions in flight.
        bucket_nbytes: Size at which a bucket is sent.
    """

    def __init__(
        self, mesh: ElasticMesh, plan: SyncPlan, params: Sequence[ManagedParam], comm: CommContext, bucket_nbytes: int
    ) -> None:
        self.mesh = mesh
        self.plan = plan
        self.num_all_reduces = 0
        self._params = list(params)
        self._specs = dict(zip(params, plan.weights, strict=True))
        self._comm = comm
        self._bucket_nbytes = bucket_nbytes
        self._place = mesh.place
        self._world_name = mesh.world.get_group().group_name
        self._channels: list[Channel] = []
        # Of each weight: its segments on this rank, as a channel and slices of the shard.
        self._parts: dict[ManagedParam, list[tuple[Channel, tuple[slice, ...]]]] = {}
        # Slots that the communication stream may still read.
        self._keep: list[Tensor] = []
        self._make_channels()
        self._weights = self._weigh(tuple((1,) * replica.gtp for replica in mesh.layout.replicas))

    def _make_channels(self) -> None:
        """Communicators in the order of the plan; only the owners of a channel take part in making its."""
        rank = dist.get_rank()
        world = self.mesh.world.get_group()
        generation = compat.agreed_name(world, device_of(self.mesh.world), "elastic_owners")
        names: dict[tuple[int, ...], str] = {tuple(self.mesh.layout.places): self._world_name}
        for bucket in self.plan.of_rank(rank):
            if len(bucket.owners) == 1:
                continue
            if bucket.owners not in names:
                name = f"{generation}_{'_'.join(map(str, bucket.owners))}"
                group = compat.named_group(list(bucket.owners), name, "elastic_owners", world)
                names[bucket.owners] = group.group_name
            channel = Channel(names[bucket.owners], 1 / len(bucket.holders[self._place.replica]))
            self._channels.append(channel)
            for index, box in bucket.segments:
                outer = box_of_rank(self.plan.weights[index], self.mesh.layout, rank)
                self._parts.setdefault(self._params[index], []).append((channel, box.within(outer)))
        self._connect()

    def _connect(self) -> None:
        """NCCL connects the ranks of a group in its first collective: here, and not within the first backward."""
        if not self._comm.has_streams:
            return
        for channel in self._channels:
            probe = torch.zeros(1, device=device_of(self.mesh.world))
            collectives.all_reduce(probe, _SUM, compat.resolve_group(channel.group_name), True)

    def set_batch(self, share: BatchShare | int) -> None:
        """Say how many samples (or tokens) this rank's next losses are means of. Until told, all ranks count alike.

        The gradient is that of ``sum(count * loss) / sum(count)`` over all ranks that see different data. It holds for
        all backwards until the next call; with gradient accumulation call it before the first microbatch, or before
        each if the shares change and each backward reduces.

        Args:
            share: What :meth:`ElasticMesh.rebalance_batch` returned, or a number, which is then exchanged: collective
                over all ranks. 0 drops this rank's gradient.

        Raises:
            ValueError: The numbers are negative, all 0, or differ along tp.
            RuntimeError: Gradients of earlier shares wait for their reduction.
        """
        counts = share.counts if isinstance(share, BatchShare) else self._exchange(share)
        layout = self.mesh.layout
        if tuple(map(len, counts)) != tuple(replica.gtp for replica in layout.replicas):
            raise ValueError(
                f"set_batch expects a share of a batch over {layout}, but got counts {counts} of another mesh."
            )
        if counts == self._weights.counts:
            return
        waiting = [p.fqn for p in self._params if _has_unreduced_grad(p)]
        if waiting:
            raise RuntimeError(
                f"set_batch expects the same shares for all microbatches whose gradients are reduced together, but got "
                f"{counts} after {self._weights.counts} while {len(waiting)} parameters ('{waiting[0]}', ...) have "
                "gradients that are not reduced yet. Reduce in each backward, or keep the shares."
            )
        self._weights = self._weigh(counts)

    def _exchange(self, count: int) -> tuple[tuple[int, ...], ...]:
        layout, world = self.mesh.layout, self.mesh.world
        is_valid = not isinstance(count, bool) and isinstance(count, int) and count >= 0
        # An invalid number is made known to all ranks, so that all of them raise.
        mine = torch.tensor([count if is_valid else -1], device=device_of(world))
        gathered = torch.empty(layout.num_ranks, dtype=mine.dtype, device=mine.device)
        dist.all_gather_into_tensor(gathered, mine, group=world.get_group())
        numbers = gathered.tolist()
        by_place = [[[numbers[rank] for rank in row] for row in replica.grid] for replica in layout.replicas]
        if not is_valid or min(numbers) < 0 or not any(numbers):
            got = repr(count) if not is_valid else f"{numbers} by rank (-1 is an invalid number)"
            raise ValueError(f"set_batch expects numbers of samples >= 0 that are not all 0, but got {got}.")
        if any(len(set(row)) > 1 for replica in by_place for row in replica):
            raise ValueError(
                f"set_batch expects the same number on all ranks of a tp group, because they see the same data, but "
                f"got {by_place} by replica, gtp and tp coordinate."
            )
        return tuple(tuple(row[0] for row in replica) for replica in by_place)

    def _weigh(self, counts: tuple[tuple[int, ...], ...]) -> _Weights:
        own = counts[self._place.replica]
        total = sum(own)
        of_rank = own[self._place.gtp] * len(own) / total if total else 0.0
        return _Weights(counts, of_rank, total / sum(map(sum, counts)))

    def share(self, factor: float | None) -> float:
        """A divide factor that the user has set replaces the weights: then gradients are summed as they are."""
        return self._weights.of_replica if factor is None else 1.0

    def weigh_full(self, grad: Tensor, factor: float | None) -> Tensor:
        of_rank = self._weights.of_rank
        if factor is not None or of_rank == 1.0:
            return grad
        # Not in place: others may read it. Times 0 a NaN would stay one.
        return grad * of_rank if of_rank else torch.zeros_like(grad)

    def add(self, weight: ShardedWeight, slot: Tensor, share: float) -> None:
        _scale(slot, share)
        parts = self._parts.get(weight, [])
        entry = _Entry(weight, slot, len(parts))
        if not parts:
            self._accumulate(entry)
            return
        rows = weight.layout.filled(slot)
        for channel, slices in parts:
            dim = weight.layout.dim
            part = rows[(slices[dim], *slices[:dim], *slices[dim + 1 :])]
            if channel.scale != 1:
                part.mul_(channel.scale)
            channel.pending.setdefault(slot.dtype, []).append((entry, part))
        # A channel has one segment of a weight at most twice (several boxes): look at each once, in plan order.
        for channel in dict.fromkeys(channel for channel, _ in parts):
            if channel.nbytes(slot.dtype) >= self._bucket_nbytes:
                self._send(channel, slot.dtype)

    def _send(self, channel: Channel, dtype: torch.dtype) -> None:
        """Sum a bucket over the owners, on the stream of reductions. See [Note: order of channels]."""
        bucket = channel.pending.pop(dtype)
        parts = [part for _, part in bucket]
        is_alone = len(parts) == 1 and parts[0].is_contiguous()
        flat = parts[0] if is_alone else torch.cat([part.reshape(-1) for part in parts])
        self.num_all_reduces += 1
        comm = self._comm
        with profiler_range("GTP::all_reduce", f"{len(parts)} segments"):
            comm.delay()
            group = compat.resolve_group(channel.group_name)
            work = collectives.all_reduce(flat, _SUM, group, comm.has_streams)
        arrived = partial(self._arrived, bucket, None if is_alone else flat)
        if comm.has_streams:
            arrived()  # ordered by the stream; its event is recorded by whoever sent the last gradient
        else:
            comm.reduction_launched(work, arrived, (flat,))

    def _arrived(self, bucket: list[tuple[_Entry, Tensor]], flat: Tensor | None) -> None:
        if flat is not None:
            parts = [part for _, part in bucket]
            pieces = flat.split([part.numel() for part in parts])
            shaped = [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)]
            compat.copy_all(parts, shaped)
        for entry, _ in bucket:
            entry.num_waiting -= 1
            if entry.num_waiting == 0:
                self._accumulate(entry)

    def _accumulate(self, entry: _Entry) -> None:
        # The sum that it is added to may be in another slot, and compute is not behind the addition yet.
        self._keep.append(entry.slot)
        entry.weight.accumulate(entry.weight.layout.shard_of_rows(entry.slot))

    def reduce_whole(self, dtype: torch.dtype, factor: float | None, bucket: WholeBucket) -> None:
        """One sum over all ranks: each puts what it holds into its place in the whole parameter, zeros elsewhere."""
        tp = self.mesh.layout.replicas[self._place.replica].tp
        counts = self._weights.counts[self._place.replica]
        of_rank = self._weights.of_rank * self._weights.of_replica / len(counts) if factor is None else 1 / factor
        boxes = [self._box_of(param) for param, _ in bucket]
        flat = torch.cat(
            [_spread(grad, param, box, tp).reshape(-1) for (param, grad), box in zip(bucket, boxes, strict=True)]
        )
        wire = torch.view_as_real(flat) if flat.is_complex() else flat

        def complete() -> None:
            parts = flat.split([param.param.numel() for param, _ in bucket])
            for (param, grad), box, part in zip(bucket, boxes, parts, strict=True):
                whole = part.view(param.param.shape)
                own = whole if box is None else whole[box.within(_whole_box(whole.shape))].contiguous()
                param.accumulate(own.view(grad.shape))

        comm = self._comm
        if not comm.has_streams:
            # A gradient whose reduce-scatter is still in flight may fill a bucket of a channel of all ranks, and
            # ranks have unequal numbers in flight: see [Note: order of channels].
            comm.retire_all()
        with profiler_range("GTP::all_reduce", f"{len(bucket)} whole parameters"), comm.reducing():
            comm.delay()
            _scale(wire, of_rank / tp)
            self.num_all_reduces += 1
            work = collectives.all_reduce(wire, _SUM, compat.resolve_group(self._world_name), comm.has_streams)
            comm.reduction_launched(work, complete, (flat,))

    def _box_of(self, param: WholeParam) -> Box | None:
        """The part of a whole parameter that tensor parallelism leaves this rank; None if that is all of it."""
        weight = self._specs[param]
        is_cut = weight.tp_dim is not None and self.mesh.layout.replicas[self._place.replica].tp > 1
        return box_of_rank(weight, self.mesh.layout, dist.get_rank()) if is_cut else None

    def finish(self) -> None:
        with self._comm.reducing():
            for channel in self._channels:
                for dtype in list(channel.pending):
                    self._send(channel, dtype)
            self._comm.reduction_launched(None, _nothing, ())
        self._comm.retire_all()
        self._keep.clear()

    def reset(self) -> None:
        for channel in self._channels:
            channel.pending.clear()
        self._keep.clear()

    @torch.no_grad()
    def check_values(self) -> None:
        """Compare the parameters of all replicas, bit by bit. Collective over all ranks.

        Raises:
            RuntimeError: They differ; raised on all ranks, names the first parameter.
        """
        digests: dict[Channel, list[Tensor]] = {}
        names: dict[Channel, list[int]] = {}
        for index, param in enumerate(self._params):
            param.follow(param.sites[0])
            for channel, slices in self._parts.get(param, []):
                digests.setdefault(channel, []).append(digest(param.shard[slices]))
                names.setdefault(channel, []).append(index)
        worst = len(self._params)
        for channel in self._channels:
            worst = min(worst, self._first_difference(digests[channel], names[channel], channel.group_name))
        worst = min(worst, self._compare_whole())
        verdict = torch.tensor(worst, device=device_of(self.mesh.world))
        dist.all_reduce(verdict, dist.ReduceOp.MIN, group=self.mesh.world.get_group())
        if int(verdict) < len(self._params):
            raise RuntimeError(
                f"ReplicaSync.check_values expects equal parameters in all replicas, but "
                f"'{self._params[int(verdict)].fqn}' differs. Initialize all replicas with one seed, or load one "
                "checkpoint into all of them."
            )

    def _compare_whole(self) -> int:
        # Parameters that tensor parallelism cuts differ along tp: those are left to the sharded ones beside them.
        indices = [
            i for i, p in enumerate(self._params) if isinstance(p, WholeParam) and self.plan.weights[i].tp_dim is None
        ]
        digests = [digest(self._params[i].shard) for i in indices]
        return self._first_difference(digests, indices, self._world_name)

    def _first_difference(self, digests: list[Tensor], indices: list[int], group_name: str) -> int:
        if not digests:
            return len(self._params)
        own = torch.stack(digests)
        both = torch.stack([own, ~own])  # the largest and, as its complement, the smallest
        dist.all_reduce(both, dist.ReduceOp.MAX, group=compat.resolve_group(group_name))
        differ = (both[0] != ~both[1]).tolist()
        return min((i for i, is_other in zip(indices, differ, strict=True) if is_other), default=len(self._params))


def clip_grad_norm_(
    parameters: Iterable[nn.Parameter] | nn.Parameter, max_norm: float, mesh: ElasticMesh, **options: Any
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` with the same bits in all replicas.

    Each replica holds all gradients, so its norm is that of the whole model; but replicas of other sizes add up in
    another order. One norm, that of the first replica, is taken by all: else parameters would drift apart in the last
    bits. Collective over all ranks.

    Args:
        parameters, max_norm: As in torch.
        mesh: All replicas.
        options: ``norm_type``, ``error_if_nonfinite`` and ``foreach`` as in torch.

    Returns:
        The norm before clipping.
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    foreach = options.pop("foreach", None)
    grads = [param.grad for param in params if param.grad is not None]
    total = torch.nn.utils.get_total_norm(grads, foreach=foreach, **options)
    total = total.full_tensor() if isinstance(total, DTensor) else total
    group = mesh.world.get_group()
    dist.broadcast(total, group_src=mesh.layout.replicas[0].ranks[0], group=group)
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, total, foreach=foreach)
    return total


def _has_unreduced_grad(param: ManagedParam) -> bool:
    if isinstance(param, ShardedWeight):
        return param.unsharded_grad is not None or param.unreplicated_grad is not None
    return isinstance(param, WholeParam) and param.unsynced_grad is not None


def _scale(tensor: Tensor, factor: float) -> None:
    """In place; times 0 also what is not a number is 0."""
    if factor == 0:
        tensor.zero_()
    elif factor != 1:
        tensor *= factor


def _spread(grad: Tensor, param: WholeParam, box: Box | None, tp: int) -> Tensor:
    """The local gradient in its place of the whole parameter, such that the sum over tp, divided by its size, is the
    whole gradient."""
    if box is None:
        return grad
    whole = torch.zeros(param.param.shape, dtype=grad.dtype, device=grad.device)
    whole[box.within(_whole_box(whole.shape))] = grad * tp
    return whole


def _whole_box(shape: Sequence[int]) -> Box:
    return Box((0,) * len(shape), tuple(shape))


def _nothing() -> None:
    pass
