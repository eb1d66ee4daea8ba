"""Sums gradients of replicas of unequal sizes segment by segment, during backward.

A reduce-scatter leaves each rank the average of its replica for the rows that it holds. Every set of owners of their
segments (see ``plan``) has a *channel*, which collects segments until they fill a bucket that one all-reduce sums.

[Note: order of channels]
All ranks complete the gradients of the same weights in the same order. So every owner of a channel sees its bucket full
at the same weight. Where one weight fills several buckets, they are sent in the order of the plan. Whole parameters
follow at the end of backward. So there is one global order of all sums: no ranks wait for each other in a circle, and
no two sums meet in one group.

Models of one mesh share its groups. Between two gradients of different models in one backward, the first model
completes its reduce-scatters (``Turns``), so that its buckets fill at the same point on all ranks: how long gradients
wait differs between replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat
from .._comm.agreement import device_of, digests
from .._comm.context import CommContext
from .._comm.debug import profiler_range
from .._howto import see
from .._params.managed_param import ManagedParam
from .._params.sharded_weight import ShardedWeight
from .._params.whole_param import WholeParam
from .._schedule.launch_reductions import WholeBucket, accumulate_whole, with_zeros
from .mesh import ElasticMesh
from .plan import Bucket, SyncPlan, box_of_rank
from .replicas import BatchShare


@dataclass(eq=False)
class _Entry:
    """A reduced gradient of one weight that waits for the sums of its segments."""

    weight: ShardedWeight
    slot: Tensor  # this rank's rows, with padding; sums arrive in it
    num_waiting: int  # segments without a sum so far


@dataclass(eq=False)
class Channel:
    """One set of owners that this rank is part of, and the segments that are collected for their next sums."""

    group_name: str  # see ``Groups`` for why it is not the group
    scale: float  # of each copy where a replica has several
    pending: dict[torch.dtype, list[tuple[_Entry, Tensor]]] = field(default_factory=dict)  # views of slots

    def nbytes(self, dtype: torch.dtype) -> int:
        return sum(part.numel() for _, part in self.pending.get(dtype, ())) * dtype.itemsize


class ReplicaSync:
    """Sums the gradients of one module over replicas of unequal sizes. Made by :func:`synchronize_replicas`.

    ``plan`` is the :class:`SyncPlan`, ``num_all_reduces`` counts the sums so far.

    Example:
        >>> mesh = nonuniform_mesh("cpu", replicas=[[0], [1, 2, 3]])
        >>> model = gtp_shard(nn.Linear(64, 64), mesh.weights)
        >>> sync = synchronize_replicas(model, mesh)
        >>> share = mesh.rebalance_batch(10)
        >>> sync.set_batch(share)
        >>> model(torch.ones(share.num_samples, 64)).mean(0).sum().backward()
        >>> model.bias.grad.to_local()[0]  # of the mean over all ten samples
        tensor(1.)
    """

    def __init__(
        self, mesh: ElasticMesh, plan: SyncPlan, params: Sequence[ManagedParam], comm: CommContext, bucket_nbytes: int
    ) -> None:
        self.mesh, self.plan, self.num_all_reduces = mesh, plan, 0
        self._params, self._comm, self._bucket_nbytes = list(params), comm, bucket_nbytes
        self._place = mesh.place
        self._tp = mesh.layout.replicas[self._place.replica].tp
        self._world_name = mesh.world.get_group().group_name  # a name, as in ``Channel``
        self._channels: list[Channel] = []
        boxes = [box_of_rank(weight, mesh.layout, dist.get_rank()) for weight in plan.weights]
        # Of each weight: its segments on this rank, as a channel and slices of the shard.
        self._parts: dict[ManagedParam, list[tuple[Channel, tuple[slice, ...]]]] = {}
        for channel, bucket in self._make_channels():
            self._channels.append(channel)
            for index, box in bucket.segments:
                self._parts.setdefault(self._params[index], []).append((channel, box.within(boxes[index])))
        # Of whole parameters that tensor parallelism cuts: the slices that it leaves this rank.
        self._tp_slices = {
            param: box.slices
            for param, weight, box in zip(params, plan.weights, boxes, strict=True)
            if weight.dim is None and weight.tp_dim is not None and self._tp > 1
        }
        # NCCL connects the ranks of a group in its first collective: do it here, not within the first backward.
        for channel in self._channels if comm.streams.has_streams else ():
            probe = torch.zeros(1, device=device_of(mesh.world))
            compat.all_reduce(probe, dist.ReduceOp.SUM, compat.resolve_group(channel.group_name), False)
        self._keep: list[Tensor] = []  # slots that the communication stream may still read
        self._weigh(tuple((1,) * replica.gtp for replica in mesh.layout.replicas))  # equal shares

    def _make_channels(self) -> Iterator[tuple[Channel, Bucket]]:
        """In the order of the plan. Only the owners of a channel take part in making its process group."""
        world, device = self.mesh.world.get_group(), device_of(self.mesh.world)
        generation = compat.agreed_name(world, device, "elastic_owners")
        names = {tuple(range(self.mesh.layout.num_ranks)): self._world_name}  # all ranks have a group already
        for bucket in self.plan.of_rank(dist.get_rank()):
            owners = bucket.owners
            if len(owners) == 1:
                continue  # there is one replica: nothing to sum
            if owners not in names:
                ranks = "_".join(map(str, owners))
                description = f"elastic_owners {ranks} of {self.mesh.generation}"  # one for all models on this mesh
                group = compat.described_group(description)
                if group is None:
                    group = compat.named_group(list(owners), f"{generation}_{ranks}", description, world)
                names[owners] = group.group_name
            yield Channel(names[owners], 1 / len(bucket.holders[self._place.replica])), bucket

    def set_batch(self, share: BatchShare | int) -> None:
        """Say how many samples (or tokens) this rank's next losses are means of. At first all ranks count alike.

        The gradient is that of ``sum(count * loss) / sum(count)`` over all ranks that see different data, until the
        next call. With gradient accumulation call it before the first microbatch, or before each if the shares change
        and each backward reduces.

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
            raise ValueError(f"set_batch expects a share of this mesh, {layout}, but got {counts} of another one.")
        if counts == self._counts:
            return
        waiting = [param.fqn for param in self._params if _has_unreduced_grad(param)]
        if waiting:
            raise RuntimeError(
                f"set_batch expects the same shares for all microbatches whose gradients are reduced together, but got "
                f"{counts} after {self._counts} while {len(waiting)} parameters ('{waiting[0]}', ...) have "
                "gradients that are not reduced yet. Reduce in each backward, or keep the shares."
            )
        self._weigh(counts)

    def _exchange(self, count: int) -> tuple[tuple[int, ...], ...]:
        layout, world = self.mesh.layout, self.mesh.world
        is_valid = not isinstance(count, bool) and isinstance(count, int) and count >= 0
        # An invalid number is sent as -1, so that all ranks raise.
        own = torch.tensor([count if is_valid else -1], device=device_of(world))
        gathered = own.new_empty(layout.num_ranks)
        dist.all_gather_into_tensor(gathered, own, group=world.get_group())
        numbers = gathered.tolist()
        by_place = [[[numbers[rank] for rank in row] for row in replica.grid] for replica in layout.replicas]
        if min(numbers) < 0 or not any(numbers):
            got = f"{numbers} by rank (-1 is an invalid number)" if is_valid else repr(count)
            raise ValueError(f"set_batch expects numbers of samples >= 0 that are not all 0, but got {got}.")
        if any(len(set(row)) > 1 for replica in by_place for row in replica):
            raise ValueError(
                f"set_batch expects the same number on all ranks of a tp group, because they see the same data, but "
                f"got {by_place} by replica, gtp and tp coordinate."
            )
        return tuple(tuple(row[0] for row in replica) for replica in by_place)

    def _weigh(self, counts: tuple[tuple[int, ...], ...]) -> None:
        """Make the sum over replicas the mean over the whole batch. ``counts``: by replica and gtp coordinate."""
        self._counts = counts
        own = counts[self._place.replica]
        total = sum(own)
        # The factor of this rank's gradient in the average over its replica, and of the average in the sum.
        self._of_rank = own[self._place.gtp] * len(own) / total if total else 0.0
        self._of_replica = total / sum(map(sum, counts))  # the sum over replicas is 1

    def take_turn(self, settle: Callable[[], None]) -> None:
        """Called by backward before each gradient."""
        self.mesh._turns.take(settle)

    def share(self, factor: float | None) -> float:
        """A divide factor that the user has set replaces the weights: then gradients are summed as they are."""
        return self._of_replica if factor is None else 1.0

    def weigh_full(self, grad: Tensor, factor: float | None) -> Tensor:
        """A full gradient with the weight of this rank's samples. Called by backward."""
        if factor is not None or self._of_rank == 1.0:
            return grad
        # Not in place: others may read it. A NaN times 0 would stay a NaN.
        return grad * self._of_rank if self._of_rank else torch.zeros_like(grad)

    def add(self, weight: ShardedWeight, slot: Tensor, share: float) -> None:
        """Take a reduced gradient, which is sent when its bucket is full. Called by backward."""
        _scale(slot, share)  # from the mean of this replica to its part of the sum
        parts = self._parts.get(weight, [])
        entry = _Entry(weight, slot, len(parts))
        if not parts:  # no other replica, or a shard without rows
            self._accumulate(entry)
            return
        rows = weight.layout.filled(slot)  # a view, so sums go into the slot
        for channel, slices in parts:
            # Slices have the order of the weight's dims, ``rows`` has the sharded one in front.
            dim = weight.layout.dim
            part = rows[(slices[dim], *slices[:dim], *slices[dim + 1 :])]
            if channel.scale != 1:
                part.mul_(channel.scale)  # each copy of this replica adds its part
            channel.pending.setdefault(slot.dtype, []).append((entry, part))
        # A weight may have several segments in one channel: look at each channel once, in the order of the plan.
        for channel in dict.fromkeys(channel for channel, _ in parts):
            if channel.nbytes(slot.dtype) >= self._bucket_nbytes:
                self._send(channel, slot.dtype)

    def _send(self, channel: Channel, dtype: torch.dtype) -> None:
        """Sum a bucket over the owners, on the stream of reductions. See [Note: order of channels]."""
        bucket = channel.pending.pop(dtype)  # a later segment begins a new one
        parts = [part for _, part in bucket]
        is_alone = len(parts) == 1 and parts[0].is_contiguous()  # summed where it is, without copies
        flat = parts[0] if is_alone else torch.cat([part.reshape(-1) for part in parts])
        self.num_all_reduces += 1
        comm = self._comm
        with profiler_range("GTP::all_reduce", f"{len(parts)} segments"):
            comm.streams.delay()
            group = compat.resolve_group(channel.group_name)
            # With streams, the sum runs on the current one, that of reductions. Without, it runs in the background.
            work = compat.all_reduce(flat, dist.ReduceOp.SUM, group, not comm.streams.has_streams)
        arrived = partial(self._arrived, bucket, None if is_alone else flat)
        # With streams, a new ``flat`` is memory of the stream that sums it, so nobody has to keep it alive.
        if comm.streams.has_streams:
            arrived()  # the stream orders it; the caller that sends the last gradient records the event
        else:
            comm.reductions.launched(work, arrived, (flat,))  # keeps ``flat`` until the sum is there

    def _arrived(self, bucket: list[tuple[_Entry, Tensor]], flat: Tensor | None) -> None:
        if flat is not None:  # otherwise the sum is in its slot
            parts = [part for _, part in bucket]
            pieces = flat.split([part.numel() for part in parts])
            compat.copy_all(parts, [piece.view(part.shape) for piece, part in zip(pieces, parts, strict=True)])
        for entry, _ in bucket:
            entry.num_waiting -= 1
            if entry.num_waiting == 0:
                self._accumulate(entry)

    def _accumulate(self, entry: _Entry) -> None:
        # The sum that it is added to may be in another slot, and compute is not behind the addition yet.
        self._keep.append(entry.slot)
        entry.weight.accumulate(entry.slot)

    def reduce_whole(self, dtype: torch.dtype, factor: float | None, bucket: WholeBucket) -> None:
        """One sum over all ranks: each puts what it holds into its place in the whole parameter, zeros elsewhere."""
        num_data_ranks = len(self._counts[self._place.replica])
        # This rank's samples, divided by those of the whole batch.
        of_rank = self._of_rank * self._of_replica / num_data_ranks if factor is None else 1 / factor
        grads, used = with_zeros(bucket)
        params = [param for param, _ in bucket]
        sent = [self._spread(param, grad.to(dtype)) for param, grad in zip(params, grads, strict=True)]
        flat = torch.cat([part.reshape(-1) for part in (*sent, used.to(dtype))])
        wire = torch.view_as_real(flat) if flat.is_complex() else flat  # the same memory

        def complete() -> None:
            *parts, used_by_any = compat.unflatten(flat, [*sent, used])
            sums = [self._own_part(param, part) for param, part in zip(params, parts, strict=True)]
            accumulate_whole(bucket, sums, used_by_any)

        comm = self._comm
        if not comm.streams.has_streams:
            # Reduce-scatters in flight, unequally many on ranks, may fill a bucket of a channel of all ranks: see
            # [Note: order of channels].
            comm.reductions.retire_all()
        with profiler_range("GTP::all_reduce", f"{len(bucket)} whole parameters"), comm.reductions.reducing():
            comm.streams.delay()
            # Not the marks: those of a rank without samples count. The ranks of a tp group all add it.
            _scale(wire[: -len(used)], of_rank / self._tp)
            self.num_all_reduces += 1
            world = compat.resolve_group(self._world_name)
            work = compat.all_reduce(wire, dist.ReduceOp.SUM, world, not comm.streams.has_streams)
            comm.reductions.launched(work, complete, (flat,))  # with streams, ``complete`` runs now

    def _spread(self, param: WholeParam, grad: Tensor) -> Tensor:
        """The gradient in its place of the whole parameter; the mean of them over tp is the whole gradient."""
        slices = self._tp_slices.get(param)
        if slices is None:
            return grad
        whole = grad.new_zeros(param.param.shape)
        whole[slices] = grad * self._tp  # the other tp ranks add zeros here
        return whole

    def _own_part(self, param: WholeParam, whole: Tensor) -> Tensor:
        slices = self._tp_slices.get(param)
        return whole if slices is None else whole[slices].contiguous()

    def finish(self) -> None:
        """Send what is left, and wait for it. Called at the end of backward."""
        with self._comm.reductions.reducing():
            for channel in self._channels:
                for dtype in list(channel.pending):
                    self._send(channel, dtype)
            # No collective: with streams, its event stands behind the last sums, so that compute waits for them.
            self._comm.reductions.launched(None, lambda: None, ())
        self._comm.reductions.retire_all()
        self._keep.clear()  # compute has waited for their readers

    def reset(self) -> None:
        """Drop what was not sent. Called after a backward that raised."""
        for channel in self._channels:
            channel.pending.clear()
        self._keep.clear()

    @torch.no_grad()
    def check_values(self) -> None:
        """Compare the parameters of all replicas, bit by bit. Collective over all ranks.

        Raises:
            RuntimeError: They differ. All ranks name the first parameter that does.
        """
        # Of each group, in the same order on all ranks: indices of parameters, and what its ranks share of them.
        shared: dict[str, list[tuple[int, Tensor]]] = {}
        for index, (param, weight) in enumerate(zip(self._params, self.plan.weights, strict=True)):
            param.follow(param.registration.sites[0])  # values may have been assigned since
            for channel, slices in self._parts.get(param, []):
                shared.setdefault(channel.group_name, []).append((index, param.shard[slices]))
            # Whole parameters that tensor parallelism cuts differ along tp: the weights beside them are compared.
            if isinstance(param, WholeParam) and weight.tp_dim is None:
                shared.setdefault(self._world_name, []).append((index, param.shard))
        device = device_of(self.mesh.world)
        first = torch.tensor(len(self._params), device=device)  # no parameter differs
        for group_name, compared in shared.items():
            own = digests([values for _, values in compared], device)
            extremes = torch.stack([own, ~own])  # the largest and, as its complement, the smallest
            dist.all_reduce(extremes, dist.ReduceOp.MAX, group=compat.resolve_group(group_name))
            for (index, _), differs in zip(compared, (extremes[0] != ~extremes[1]).tolist(), strict=True):
                if differs:
                    first.clamp_(max=index)
        dist.all_reduce(first, dist.ReduceOp.MIN, group=self.mesh.world.get_group())  # all ranks name the same one
        if int(first) < len(self._params):
            raise RuntimeError(
                "ReplicaSync.check_values expects equal parameters in all replicas, but "
                f"'{self._params[int(first)].fqn}' differs. Use one seed, or load one checkpoint, for all of them. "
                + see("ranks_diverge")
            )


def clip_grad_norm_(
    parameters: Iterable[nn.Parameter] | nn.Parameter, max_norm: float, mesh: ElasticMesh, **options: Any
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` with the same bits in all replicas. Collective over all ranks.

    Each replica can compute the norm of the whole model, but in another order of sums. So all replicas use the norm of
    the first one: otherwise parameters would differ in the last bits.

    Args:
        parameters: Those of the model, or one.
        max_norm: The largest norm that is left.
        mesh: That of the replicas.
        options: ``norm_type``, ``error_if_nonfinite`` and ``foreach`` of torch's function.

    Returns:
        The norm before clipping, a scalar.

    Example:
        >>> mesh = nonuniform_mesh("cpu", replicas=[[0], [1, 2, 3]])
        >>> model = gtp_shard(nn.Linear(64, 64, bias=False), mesh.weights)
        >>> sync = synchronize_replicas(model, mesh)
        >>> model(torch.ones(1, 64)).sum().backward()
        >>> clip_grad_norm_(model.parameters(), 1.0, mesh)  # 64 x 64 ones
        tensor(64.)
    """
    params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    foreach = options.pop("foreach", None)
    grads = [param.grad for param in params if param.grad is not None]
    total = torch.nn.utils.get_total_norm(grads, foreach=foreach, **options)
    total = total.full_tensor() if isinstance(total, DTensor) else total  # collective, over the ranks of this replica
    dist.broadcast(total, group_src=mesh.layout.replicas[0].ranks[0], group=mesh.world.get_group())
    torch.nn.utils.clip_grads_with_norm_(params, max_norm, total, foreach=foreach)
    return total


def _has_unreduced_grad(param: ManagedParam) -> bool:
    if isinstance(param, ShardedWeight):
        return not param.pending_grad.is_empty
    return isinstance(param, WholeParam) and param.unsynced_grad is not None


def _scale(tensor: Tensor, factor: float) -> None:
    """In place. A factor of 0 makes zeros also of NaN and infinity."""
    if factor == 0:
        tensor.zero_()
    elif factor != 1:
        tensor *= factor
