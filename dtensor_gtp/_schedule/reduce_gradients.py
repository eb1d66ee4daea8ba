"""Where gradients go: send buffers, reduce-scatter behind compute, replicas, accumulation, ``.grad``.

Ops write a full gradient into a send buffer, ``submit`` reduce-scatters it (see ``scattering``) on the scatter stream
and adds the rows of this rank to those of the same backward. Parameters that stay whole are reduced at the end of
backward, all in one coalesced call for each mesh and dtype. Only then is anything put into ``.grad``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .._comm import collectives
from .._comm.collectives import ReduceScale
from .._comm.context import CommContext
from .._comm.debug import poison, profiler_range
from .._comm.groups import Groups
from .._comm.reduce_scatter import Scattering, Sending, can_travel_together, make_scattering, sum_dtype
from .._comm.send_ring import Place, SendRing
from .._params.managed_param import ManagedParam
from .._params.sharded_weight import ShardedWeight
from .._params.whole_param import WholeParam
from ..policy import ReduceScatterKind
from .gradient_protocols import BlockRecording, UnequalReplicas, WholeBucket, Written


class _Job(NamedTuple):
    """One weight's reduction after its reduce-scatter: everything is fixed when the reduction is launched."""

    weight: ShardedWeight
    scale: ReduceScale
    replicate: dist.ProcessGroup | None
    requires_all_reduce: bool
    share: float


class _Submitted(NamedTuple):
    """A gradient on its way to the scatter stream."""

    job: _Job
    buffer: Tensor
    place: Place | None  # from where copy engines fetch it, if it has room there
    bundle: object | None  # of those that travel together whatever they are

    @property
    def key(self) -> tuple[Any, ...]:
        """What is alike in gradients that travel together."""
        return self.job.weight.groups, self.job.weight.reduce_dtype, self.job.scale, self.bundle


@dataclass
class _Waiting:
    """Gradients that are submitted and not launched."""

    submitted: list[_Submitted]
    nbytes: int


class Gradients:
    """Reduces the gradients of one runtime.

    Args:
        comm: Streams and groups.
        kind: How gradients are reduce-scattered.
        together_nbytes: Up to how many bytes gradients that are computed one after the other travel in one launch.
        wgrad_first: Whether a layer computes its weight's gradient before that of its input.
    """

    def __init__(
        self, comm: CommContext, kind: ReduceScatterKind, together_nbytes: int = 0, wgrad_first: bool = True
    ) -> None:
        self._comm = comm
        self._kind = kind
        self._wgrad_first = wgrad_first
        self._together_nbytes = together_nbytes
        # Gradients of each scatter group that wait for others to travel with. What is done in another group has no part
        # in it: its ranks are others, and may have used what these have not.
        self._waiting: dict[str, _Waiting] = {}
        self._bundle: object | None = None
        # Set where the mesh is one replica of several that need not be alike.
        self.replicas: UnequalReplicas | None = None
        self._postponed: list[Callable[[], None]] | None = None
        self.recording: BlockRecording | None = None  # of the block that is recorded now

    def compute(self, job: Callable[[], None]) -> None:
        """Compute and submit a weight's gradient with ``job()``: now, or after a backward that leaves it for later."""
        if self._postponed is None:
            job()
        else:
            self._postponed.append(job)

    @contextmanager
    def beside_dgrad(self, job: Callable[[], None] | None) -> Iterator[None]:
        """Run ``job``, if any, which computes and submits a weight's gradient, before what runs in the context, the
        gradient of the layer's input, or, if the policy says so, after it."""
        if job is not None and self._wgrad_first:
            job()
        yield
        if job is not None and not self._wgrad_first:
            job()

    @contextmanager
    def postponing(self) -> Iterator[list[Callable[[], None]]]:
        """A backward inside of the context leaves the jobs that it is given for later, in this list."""
        postponed: list[Callable[[], None]] = []
        self._postponed = postponed
        try:
            yield postponed
        finally:
            self._postponed = None

    @contextmanager
    def together(self) -> Iterator[None]:
        """Gradients that are submitted in the context travel in one launch, where their kind of reduction can."""
        if self.recording is not None:
            with self.recording.together():
                yield
            return
        self._bundle = bundle = object()
        try:
            yield
        finally:
            self._bundle = None
        for name, waiting in list(self._waiting.items()):
            if waiting.submitted[0].bundle is bundle:
                self._launch_waiting_in(name)

    def target(self, weight: ShardedWeight) -> tuple[Tensor, bool]:
        """A gradient buffer, and whether it holds a gradient already that the new one is to be added to."""
        if self.recording is not None:
            return self.recording.target(weight), False
        self._comm.note_compute()
        if weight.unsharded_grad is not None:
            return weight.unsharded_grad, True
        ring = self._ring_of(weight)
        if ring is None or not weight.flags.requires_gradient_sync:
            return weight.send_buffer(), False
        self._launch_others(weight)
        buffer = ring.offer(weight.layout.buffer_shape, weight.reduce_dtype)
        if buffer is None:
            return weight.send_buffer(), False
        if self._comm.debug.poison:
            poison(buffer)
        return buffer, False

    def _ring_of(self, weight: ShardedWeight) -> SendRing | None:
        """Where its gradients are sent from, if copy engines fetch them."""
        is_fetched = self._kind == "copy_engine" and weight.layout.world > 1
        return self._comm.send_ring(weight.groups) if is_fetched else None

    def add_full(self, weight: ShardedWeight, grad: Tensor, is_owned: bool) -> None:
        """Take a full gradient that autograd or an op has computed.

        Args:
            grad: Shape of the gathered weight.
            is_owned: Nobody else reads ``grad``, so that it may be sent as it is and written to.
        """
        layout = weight.layout
        if is_owned and self._can_send(weight, grad):
            self._comm.note_compute()
            rows = layout.rows_of(grad)
            self.submit(weight, rows if self.recording is None else self.recording.keep(weight, rows))
            return
        buffer, is_accumulating = self.target(weight)
        view = layout.full_view(buffer)
        if is_accumulating:
            view += grad
        else:
            view.copy_(grad)
        self.submit(weight, buffer)

    def _can_send(self, weight: ShardedWeight, grad: Tensor) -> bool:
        """Whether a gradient can be submitted without a copy, the sharded dim not in front and cast by the scattering
        if need be."""
        layout = weight.layout
        is_recorded = self.recording is not None  # for microbatches of any kind
        if (weight.unsharded_grad is not None and not is_recorded) or not grad.is_contiguous():
            return False
        if grad.shape[layout.dim] != layout.buffer_shape[0]:
            return False
        is_cast = grad.dtype != weight.reduce_dtype
        if layout.dim == 0 and not is_cast:
            return True
        # Microbatches are summed in the dtype of the reduction; an all-reduce over replicas takes contiguous tensors,
        # which the slot of a reduce-scatter is.
        has_replicas = self.replicas is not None or (layout.world == 1 and weight.groups.replicate is not None)
        return not has_replicas and (weight.flags.requires_gradient_sync or is_recorded or not is_cast)

    def submit(self, weight: ShardedWeight, buffer: Tensor) -> None:
        """Reduce-scatter a gradient buffer behind compute, or keep it for a later microbatch.

        Args:
            buffer: Of the layout's ``buffer_shape``, not necessarily contiguous; in the dtype of the reduction, or, if
                gradients are synced, another one.
        """
        if self.recording is not None:
            self.recording.submit(weight, buffer)
            return
        flags = weight.flags
        if not flags.requires_gradient_sync:
            weight.unsharded_grad = buffer
            return
        weight.unsharded_grad = None
        share, factor = 1.0, flags.gradient_divide_factor
        if self.replicas is not None:
            share = self.replicas.share(factor)
            buffer = self.replicas.weigh_full(buffer, factor)
        job = _Job(weight, self._scale(weight), weight.groups.replicate, flags.requires_all_reduce, share)
        ring = self._ring_of(weight)
        if ring is None or not ring.has_offered(buffer):  # where it has, ``target`` has launched others before
            self._launch_others(weight)
        place = None if ring is None else ring.take(buffer, weight.reduce_dtype)
        name = weight.groups.scatter_name
        waiting = self._waiting.setdefault(name, _Waiting([], 0))
        waiting.submitted.append(_Submitted(job, buffer, place, self._bundle))
        waiting.nbytes += weight.sent_nbytes
        if not self._may_wait(weight):
            self._launch_waiting_in(name)

    def _scale(self, weight: ShardedWeight) -> ReduceScale:
        dtype = sum_dtype(self._kind, weight.reduce_dtype)
        return collectives.reduce_scale(dtype, weight.num_ranks, weight.flags.gradient_divide_factor)

    def _may_wait(self, weight: ShardedWeight) -> bool:
        """Whether its gradient may travel with others."""
        is_small = self._bundle is not None or weight.sent_nbytes < self._together_nbytes
        return is_small and can_travel_together(self._kind, weight.layout.world)

    def _launch_others(self, weight: ShardedWeight) -> None:
        """Launch what waits in its scatter group, unless the gradient of ``weight``, which comes next, may travel with
        it."""
        waiting = self._waiting.get(weight.groups.scatter_name)
        if waiting is None:
            return
        is_alike = waiting.submitted[0].key == (weight.groups, weight.reduce_dtype, self._scale(weight), self._bundle)
        fits = self._bundle is not None or waiting.nbytes + weight.sent_nbytes <= self._together_nbytes
        if not (is_alike and fits and self._may_wait(weight)):
            self._launch_waiting_in(weight.groups.scatter_name)

    def submit_recorded(self, written: Sequence[Written]) -> None:
        """Reduce the gradients that a recorded block has left in these buffers, behind all that follows."""
        for bundle, members in groupby(written, lambda one: one.bundle):
            with self._comm.unbounded(), nullcontext() if bundle is None else self.together():
                self._submit_recorded(members)

    def _submit_recorded(self, written: Iterable[Written]) -> None:
        """Those of one bundle, or of none."""
        for weight, buffer, _ in written:
            if weight.unsharded_grad is not None or not weight.flags.requires_gradient_sync:
                self.add_full(weight, weight.layout.full_view(buffer), is_owned=False)
                continue
            # What would become the gradient, or wait for others, would be written to before it is read.
            is_passing = weight.layout.world > 1 and not self._may_wait(weight)
            self.submit(weight, buffer if is_passing else buffer.clone())

    def launch_waiting(self) -> None:
        """Launch what waits for others to travel with."""
        for name in list(self._waiting):
            self._launch_waiting_in(name)

    def _launch_waiting_in(self, name: str) -> None:
        self._launch(self._waiting.pop(name).submitted)

    def _launch(self, together: list[_Submitted]) -> None:
        comm, (weight, scale, *_) = self._comm, together[0].job
        jobs = [submitted.job for submitted in together]
        names = ", ".join(job.weight.fqn for job in jobs)
        fulls = [submitted.buffer for submitted in together]
        held = [submitted.place for submitted in together if submitted.place is not None]
        sending = None
        if (ring := self._ring_of(weight)) is not None:
            places = held
            if len(held) < len(together):
                with comm.scattering():
                    comm.wait_finished()
                    places = ring.lay_out(fulls, weight.reduce_dtype)
                held = [*held, *places]  # what was left is read until then
            sending = Sending(ring, places)
        scattering = make_scattering(self._kind, fulls, weight.layout.world, weight.reduce_dtype, sending)
        with profiler_range("GTP::reduce_scatter", names), comm.reducing():
            comm.before_collective("reduce_scatter", names, weight.groups)
            work = scattering.launch(scale, weight.groups, comm)
            complete = partial(self._scattered, jobs, scattering)
            keep = (*scattering.keep, *_taken_along(jobs))
            comm.reduction_launched(work, complete, keep, held)

    def add_rows(self, weight: ShardedWeight, rows: Tensor) -> None:
        """Take a gradient that an op has summed over the gtp axis: of this rank's rows, for the tokens of all ranks.

        It goes through all that follows a reduce-scatter. Without gradient sync it waits for a later microbatch.

        Args:
            rows: Shape of a slot, in the dtype of the sum or a wider one; nobody else reads it.
        """
        flags, layout = weight.flags, weight.layout
        dtype = sum_dtype(self._kind, weight.reduce_dtype)
        scale = collectives.reduce_scale(dtype, weight.num_ranks, flags.gradient_divide_factor)
        # What the reduce-scatter divides by.
        divisor = layout.world if scale.op == dist.ReduceOp.AVG else scale.predivide
        slot = (rows if divisor is None else rows.div_(divisor)).to(dtype)
        is_synced = flags.requires_gradient_sync and flags.requires_all_reduce
        job = _Job(weight, scale, weight.groups.replicate, is_synced, 1.0)
        with self._comm.reducing():
            self._comm.reduction_launched(None, partial(self._complete, job, slot), (slot, *_taken_along([job])))

    def _scattered(self, jobs: list[_Job], scattering: Scattering) -> None:
        scattering.finish(jobs[0].scale)
        for job, slot in zip(jobs, scattering.slots, strict=True):
            self._complete(job, slot)

    def _complete(self, job: _Job, slot: Tensor) -> None:
        """What follows the reduce-scatter, on its stream: replicas, division, accumulation."""
        weight = job.weight
        earlier, weight.unreplicated_grad = weight.unreplicated_grad, None
        if earlier is not None:
            slot += earlier
        if not job.requires_all_reduce:
            weight.unreplicated_grad = slot
            return
        if self.replicas is not None:
            if job.scale.postdivide is not None:
                slot /= job.scale.postdivide  # of this replica alone
            self.replicas.add(weight, slot, job.share)
            return
        if job.replicate is not None:
            self._all_reduce(slot, job.scale, job.replicate)
        if job.scale.postdivide is not None:
            slot /= job.scale.postdivide
        weight.accumulate(weight.layout.shard_of_rows(slot))

    def _all_reduce(self, tensor: Tensor, scale: ReduceScale, group: dist.ProcessGroup) -> None:
        work = collectives.all_reduce(tensor, scale, group, self._comm.has_streams)
        if work is not None and not self._comm.has_streams:
            work.wait()

    def flush(self, weights: Iterable[ShardedWeight]) -> None:
        """Reduce what earlier microbatches left of weights that the last one did not use."""
        synced = [weight for weight in weights if weight.flags.requires_gradient_sync]
        for weight in synced:
            if weight.unsharded_grad is not None:
                self.submit(weight, weight.unsharded_grad)
        self.launch_waiting()
        if not self._comm.has_streams:
            self._comm.retire_all()  # only then is there what they leave, and gone what they have taken along
        for weight in synced:
            slot = weight.unreplicated_grad
            if slot is None or not weight.flags.requires_all_reduce:
                continue
            weight.unreplicated_grad = None
            factor = weight.flags.gradient_divide_factor
            scale = collectives.reduce_scale(slot.dtype, weight.num_ranks, factor)
            share = 1.0 if self.replicas is None else self.replicas.share(factor)
            job = _Job(weight, scale, weight.groups.replicate, True, share)
            with self._comm.reducing():
                self._comm.reduction_launched(None, partial(self._complete, job, slot), (slot,))

    def reduce_whole(self, params: Iterable[WholeParam]) -> None:
        """All-reduce the local gradients of whole parameters, coalesced by mesh, dtype and divide factor."""
        buckets: dict[tuple[Any, ...], WholeBucket] = {}
        for param in params:
            grad = param.take_local_grad()
            if grad is None:
                continue
            if not (param.flags.requires_gradient_sync and param.flags.requires_all_reduce):
                param.unsynced_grad = grad
                continue
            buckets.setdefault((param.groups, grad.dtype, param.flags.gradient_divide_factor), []).append((param, grad))
        for (groups, dtype, factor), bucket in buckets.items():
            if self.replicas is not None:
                self.replicas.reduce_whole(dtype, factor, bucket)
            else:
                self._reduce_bucket(groups, dtype, factor, bucket)

    def _reduce_bucket(self, groups: Groups, dtype: torch.dtype, factor: float | None, bucket: WholeBucket) -> None:
        flat = torch.cat([grad.reshape(-1) for _, grad in bucket]).to(sum_dtype(self._kind, dtype))
        wire = torch.view_as_real(flat) if flat.is_complex() else flat
        num_ranks = bucket[0][0].num_ranks
        scale = collectives.reduce_scale(flat.dtype, num_ranks, factor)
        active = [group for group in (groups.scatter, groups.replicate) if group is not None and group.size() > 1]

        def complete() -> None:
            for group in active[1:]:
                self._all_reduce(wire, scale, group)
            if scale.postdivide is not None:
                wire.div_(scale.postdivide)
            parts = flat.split([grad.numel() for _, grad in bucket])
            for (param, grad), part in zip(bucket, parts, strict=True):
                param.accumulate(part.view(grad.shape))

        comm, work = self._comm, None
        with profiler_range("GTP::all_reduce", f"{len(bucket)} whole parameters"), comm.reducing():
            comm.before_collective("all_reduce", f"{', '.join(param.fqn for param, _ in bucket)}", groups)
            if scale.predivide is not None:
                wire.div_(scale.predivide)
            if active:
                work = collectives.all_reduce(wire, scale, active[0], comm.has_streams)
            comm.reduction_launched(work, complete, (flat,))

    def publish(self, params: Iterable[ManagedParam]) -> None:
        """Wait for all reductions on the current stream and move their results into ``.grad``."""
        self.launch_waiting()
        self._comm.end_backward()
        if self.replicas is not None:
            self.replicas.finish()
        for param in params:
            param.publish_grad()

    def abandon(self) -> None:
        """After an exception: wait for what was launched, forget its results."""
        self._waiting.clear()
        self._comm.abandon()
        if self.replicas is not None:
            self.replicas.reset()


def _taken_along(jobs: Iterable[_Job]) -> list[Tensor]:
    """What earlier reductions have left, which these add to their results: the communication stream reads it."""
    return [grad for job in jobs if (grad := job.weight.unreplicated_grad) is not None]
