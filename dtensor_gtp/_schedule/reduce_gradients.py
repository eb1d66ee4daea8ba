"""Reduces gradients of sharded weights behind compute, and moves them into ``.grad`` at the end of backward.

An op gets a buffer from ``target``, writes the full gradient into it and calls ``submit``. That launches a
reduce-scatter on the scatter stream, which adds this rank's rows to the gradients of earlier uses.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from itertools import groupby
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .._comm import collectives
from .._comm.context import CommContext
from .._comm.debug import poison
from .._comm.reductions import can_travel_together, sum_dtype
from .._params.gradient import read_marks
from .._params.group_gradients import pack
from .._params.managed_param import ManagedParam
from .._params.sharded_weight import ShardedWeight
from .._params.weight_group import Reducible, WeightGroup
from .._params.whole_param import WholeParam
from ..policy import Schedule
from .launch_reductions import Gradient, ReductionLaunches, Written, single
from .waiting_gradients import Together


class Gradients:
    """Reduces the gradients of one runtime."""

    def __init__(self, comm: CommContext) -> None:
        self._comm = comm
        self.launches = ReductionLaunches(comm)
        self.schedule = Schedule()  # until one is chosen
        # Of this backward, by scatter group: ranks of different meshes may use different weights, so
        # each mesh launches its own.
        self._waiting: dict[str, Together[Gradient]] = {}
        self._bundle: object | None = None  # of the running ``together``
        self._postponed: list[Callable[[], None]] | None = None  # jobs of the running ``postponing``
        self.recording: Any = None  # a ``graphs.record_block.Recording`` while a block is recorded
        # Reductions of the runtime, when the last group had launched its own.
        self._num_launched = 0

    def compute(self, job: Callable[..., None], *args: Any) -> None:
        """Run ``job``, which computes and submits the gradient of a weight; in ``postponing``,
        leave it for later."""
        if self._postponed is None:
            job(*args)
        else:
            self._postponed.append(partial(job, *args))  # the second part of a pipeline's backward runs it

    def in_order(self, wgrad: Callable[[], None] | None, dgrad: Callable[[], Tensor] | None) -> Tensor | None:
        """Run ``wgrad``, which submits the gradient of a layer's weight, and ``dgrad``, whose
        result is returned."""
        if wgrad is not None and self.schedule.wgrad_first:  # it hides the gather for dgrad
            wgrad()
        grad_input = None
        if dgrad is not None:
            grad_input = dgrad()
        if wgrad is not None and not self.schedule.wgrad_first:  # dgrad has freed the weight by now
            wgrad()
        return grad_input

    @contextmanager
    def postponing(self) -> Iterator[list[Callable[[], None]]]:
        """Collect the jobs of a backward in this context in a list, instead of running them."""
        jobs: list[Callable[[], None]] = []
        try:
            self._postponed = jobs
            yield jobs
        finally:
            self._postponed = None

    @contextmanager
    def together(self) -> Iterator[None]:
        """Launch the gradients that are submitted in this context together, if their kind of
        reduction can."""
        if self.recording is not None:
            with self.recording.together():
                yield
            return
        bundle = object()
        try:
            self._bundle = bundle
            yield
        finally:
            self._bundle = None
        for together in self._waiting.values():
            if together.waiting and together.waiting[0].bundle is bundle:
                self._launch(together.flush())

    def target(self, weight: Reducible) -> tuple[Tensor, bool]:
        """A buffer for a gradient, and whether it holds an earlier gradient, to which the new one
        is to be added."""
        if self.recording is not None:
            return self.recording.target(single(weight)), False
        self._comm.streams.note_compute()  # the reduction has to wait for this stream, too
        total = weight.pending_grad.unsharded
        if total is not None and not _is_frozen(weight):
            self._comm.streams.note_reading_earlier((total,))  # another stream may have added to it last
            return total, True
        ring = weight.pending_grad.ring
        buffer = None
        if ring is not None and weight.flags.sends_at_once:
            self._launch_others(weight, self._scale(weight))  # first, see [Note: places in the ring]
            buffer = ring.offer(weight.layout.buffer_shape, weight.reduce_dtype)
        if buffer is None:  # no ring, or no free place in it
            buffer = weight.pending_grad.send_buffer()
        if self._comm.debug.poison:
            poison(buffer)
        return buffer, False

    def add_full(self, weight: Reducible, grad: Tensor, is_owned: bool) -> None:
        """Take a full gradient in the weight's shape. If ``is_owned``, nothing else reads it: it
        need not be copied."""
        layout = weight.layout
        if is_owned and self._can_send(weight, grad):
            self._comm.streams.note_compute()
            rows = layout.rows_of(grad)
            if self.recording is not None:
                rows = self.recording.keep(single(weight), rows)  # a replay finds it at a fixed address
            self.submit(weight, rows)
            return
        buffer, is_accumulating = self.target(weight)
        view = layout.full_view(buffer)
        if is_accumulating:
            view += grad
        else:
            view.copy_(grad)
        self.submit(weight, buffer)

    def _can_send(self, weight: Reducible, grad: Tensor) -> bool:
        """Whether a gradient needs no copy now. The scattering can cast it and move the sharded dim
        to the front."""
        layout = weight.layout
        is_recorded = self.recording is not None  # a recording serves all kinds of microbatches
        if weight.pending_grad.unsharded is not None and not is_recorded:
            return False  # there is a sum to add to
        if not grad.is_contiguous():
            return False
        if grad.shape[layout.dim] != layout.buffer_shape[0]:  # the buffer has padding
            return False
        is_cast = grad.dtype != weight.reduce_dtype
        if layout.dim == 0 and not is_cast:
            return True
        if self.launches.replicas is not None:
            return False
        if layout.world == 1 and weight.groups.replicate is not None:
            return False  # an all-reduce over replicas takes contiguous tensors
        # Sums of microbatches have the dtype of the reduction.
        return weight.flags.sends_at_once or is_recorded or not is_cast

    def travels_narrow(self, weight: ShardedWeight, dtype: torch.dtype) -> bool:
        """Whether a gradient of this dtype, narrower than ``reduce_dtype``, is sent at once as it is. Not in float16,
        which has not the range of what a GEMM adds."""
        layout = weight.layout
        is_sent = weight.flags.sends_at_once and weight.pending_grad.unsharded is None
        is_whole = layout.dim == 0 and layout.shape[0] == layout.buffer_shape[0]  # without padding
        is_narrow = dtype != torch.float16 and self.launches.sends_narrow(weight, dtype)
        return is_sent and is_whole and is_narrow and not self._may_wait(weight)

    def begin_group(self, group: WeightGroup) -> None:
        """The backward of a group begins."""
        group.in_backward.num_reductions_before = self._comm.reductions.num_launched

    def reduce_group(self, group: WeightGroup) -> None:
        """Reduce the gradients that the leaves of a group have got, on all ranks of its mesh."""
        grads = group.pending_grad
        if grads.is_left_out:
            return
        if not grads.is_laid_out:
            self.settle()  # what is in flight has the layout of before
            sums = (grads.unsharded, grads.unreplicated)
            self._comm.streams.note_reading_earlier([each for each in sums if each is not None])
            grads.lay_out_anew()
        if not grads.weights:
            return
        is_sum = grads.unsharded is not None or not group.flags.sends_at_once  # over microbatches
        scale = self._scale(group)
        if not is_sum and self.launches.can_pack(group, scale):
            self._comm.streams.note_compute()
            self._launch_others(group, scale, is_taken=True)
            is_summed = group.flags.requires_all_reduce
            self._join(Gradient(group, None, scale, is_summed, taken=grads.take()))
            return
        self._wait_for_earlier([group])  # before memory for this one is allocated
        buffer, is_accumulating = self.target(group)
        taken = grads.take()
        self._comm.streams.note_reading_earlier(taken)
        if is_accumulating:
            packed = grads.send_buffer()
            pack(taken, group.layout.world, packed)
            buffer += packed
        else:
            pack(taken, group.layout.world, buffer)
        del taken  # with the last reference to what was packed, its memory
        self.submit(group, buffer)
        self._num_launched = self._comm.reductions.num_launched

    def _wait_for_earlier(self, launched: Sequence[Reducible]) -> None:
        """As ``fully_shard``: the buffers of one launch of groups at a time, since that of a block
        is large, and no head from before these blocks. Their experts may go on."""
        groups = [group for group in launched if isinstance(group, WeightGroup)]
        begun = [group.in_backward.num_reductions_before for group in groups]
        self._comm.reductions.retire_first(max(self._num_launched, *begun))

    def _launch(self, together: list[Gradient]) -> None:
        if together[0].taken is None:
            self.launches.launch(together)
            return
        # Before ``launch`` allocates the packed buffer.
        self._wait_for_earlier([gradient.weight for gradient in together])
        self.launches.launch(together)
        self._num_launched = self._comm.reductions.num_launched

    def submit(self, weight: Reducible, buffer: Tensor) -> None:
        """Reduce-scatter a gradient behind compute; without gradient sync, keep it for a later
        microbatch. It has the layout's ``buffer_shape``, perhaps not contiguous, and
        ``reduce_dtype`` (with gradient sync, any dtype)."""
        if self.recording is not None:
            self.recording.submit(single(weight), buffer)
            return
        if _is_frozen(weight):
            if weight.pending_grad.ring is not None:
                weight.pending_grad.ring.withdraw()  # nobody fills the place that was offered
            return  # autograd, too, skips a leaf that was frozen after its forward
        if not weight.flags.sends_at_once:
            weight.pending_grad.unsharded = buffer  # kept until ``_send``
            return
        self._send(weight, buffer)

    def _send(self, weight: Reducible, buffer: Tensor) -> None:
        flags = weight.flags
        self.launches.enter_block(weight)
        self.launches.take_turn(self.settle)
        weight.pending_grad.unsharded = None
        share = self.launches.share(flags.gradient_divide_factor)
        if self.launches.replicas is not None:
            buffer = self.launches.replicas.weigh_full(buffer, flags.gradient_divide_factor)
        scale = self._scale(weight)
        ring = weight.pending_grad.ring
        is_offered = ring is not None and ring.has_offered(buffer)
        if not is_offered:  # otherwise ``target`` has launched them
            self._launch_others(weight, scale)
        place = None
        if ring is not None:
            place = ring.take(buffer, weight.reduce_dtype)  # None: the launch finds new places
        is_summed = flags.requires_all_reduce
        self._join(Gradient(weight, buffer, scale, is_summed, share, place, self._bundle))

    def _join(self, gradient: Gradient) -> None:
        """A gradient waits for others to travel with, or is launched."""
        weight = gradient.weight
        is_group = gradient.taken is not None
        together = self._together_with(weight)
        nbytes = self.sent_nbytes(weight)
        if self._may_wait(weight, is_taken=is_group):
            together.add(gradient, nbytes, is_group=is_group)
        else:
            self._launch(together.alone(gradient, nbytes, is_group=is_group))

    def _together_with(self, weight: Reducible) -> Together[Gradient]:
        name = weight.groups.scatter_name
        if name not in self._waiting:
            self._waiting[name] = Together(self.schedule.coalesce_grad_nbytes)
        return self._waiting[name]

    def _scale(self, weight: Reducible) -> collectives.ReduceScale:
        dtype = sum_dtype(weight.groups.reduce_scatter, weight.reduce_dtype)
        factor = weight.flags.gradient_divide_factor
        return collectives.reduce_scale(dtype, weight.num_ranks, factor)

    def sent_nbytes(self, weight: Reducible) -> int:
        """Bytes of a gradient in a launch. Groups send what autograd gives them, if that is exact."""
        nbytes = weight.pending_grad.sent_nbytes
        if isinstance(weight, WeightGroup) and self.launches.sends_narrow(weight, weight.compute_dtype):
            return nbytes * weight.compute_dtype.itemsize // weight.reduce_dtype.itemsize
        return nbytes

    def _may_wait(self, weight: Reducible, *, is_taken: bool = False, joins: bool = False) -> bool:
        """Whether a gradient may wait for others, to travel with them; or whether it ``joins`` those
        that wait. ``is_taken``: of a group, and not packed yet."""
        together = self._together_with(weight)
        may_wait = partial(together.takes if joins else together.may_wait, self.sent_nbytes(weight))
        if isinstance(weight, WeightGroup):
            # A stream that is new to a backward waits for the one before: with one alone it is safe
            # to pack later.
            has_one_stream = len(self._comm.streams.computing) <= 1
            return is_taken and has_one_stream and may_wait(is_group=True)
        is_small = self._bundle is not None or may_wait(is_group=False)
        return is_small and can_travel_together(weight.groups.reduce_scatter, weight.layout.world)

    def _launch_others(self, weight: Reducible, scale: collectives.ReduceScale, *, is_taken: bool = False) -> None:
        """Launch the gradients that wait in the scatter group, unless the next one, of ``weight``,
        may join them."""
        together = self._together_with(weight)
        if not together.waiting:
            return
        first = together.waiting[0]
        other = first.weight
        # One launch has one communicator, scale, and dtype of what it sends and of the sum.
        is_alike = (first.scale, first.bundle, other.groups) == (scale, self._bundle, weight.groups)
        dtypes = (other.compute_dtype, other.reduce_dtype)
        is_alike = is_alike and dtypes == (weight.compute_dtype, weight.reduce_dtype)
        if not (is_alike and self._may_wait(weight, is_taken=is_taken, joins=True)):
            self._launch(together.flush())

    def submit_recorded(self, written: Sequence[Written]) -> None:
        """Reduce the gradients that the replay of a recorded block has written to these buffers."""
        for bundle, members in groupby(written, lambda gradient: gradient.bundle):
            travelling = nullcontext() if bundle is None else self.together()
            with self._comm.reductions.unbounded(), travelling:
                for weight, buffer, _ in members:
                    self._submit_recorded(weight, buffer)

    def _submit_recorded(self, weight: Reducible, buffer: Tensor) -> None:
        if weight.pending_grad.unsharded is not None or not weight.flags.sends_at_once:
            self.add_full(weight, weight.layout.full_view(buffer), is_owned=False)
            return
        # The next replay overwrites the buffer. So copy a gradient that waits for others, or that
        # becomes ``.grad``.
        is_sent_at_once = weight.layout.world > 1 and not self._may_wait(weight)
        if not is_sent_at_once:
            buffer = buffer.clone()
        self.submit(weight, buffer)

    def launch_waiting(self) -> None:
        """Launch the gradients that wait for others to travel with."""
        for together in self._waiting.values():
            if together.waiting:
                self._launch(together.flush())

    def end_backward(self) -> None:
        """A gradient waits for none of a later backward, whose launches begin small again."""
        self.launch_waiting()
        self._waiting.clear()

    def settle(self) -> None:
        """Launch all gradients so far, and make compute wait for them."""
        self.launch_waiting()
        self._comm.reductions.retire_all()

    def add_rows(self, weight: Reducible, rows: Tensor) -> None:
        """Take this rank's rows of a gradient that an op has summed over the gtp axis, and do what
        follows a reduce-scatter. They have the dtype of the sum or a wider one, and nothing else
        reads them."""
        if _is_frozen(weight):
            return  # as in ``submit``
        flags = weight.flags
        scale = self._scale(weight)
        if self._comm.is_debugged:
            values = [(weight.fqn, weight.layout.filled(rows))]
            self._comm.check_finite("the sum of gradients", values, weight.groups)
        # As the reduce-scatter would do.
        divisor = scale.predivide
        if scale.op == dist.ReduceOp.AVG:
            divisor = weight.layout.world
        if divisor is not None:
            rows.div_(divisor)
        slot = rows.to(sum_dtype(weight.groups.reduce_scatter, weight.reduce_dtype))
        is_synced = flags.requires_gradient_sync and flags.requires_all_reduce
        self.launches.complete_later(Gradient(weight, None, scale, is_synced), slot)

    def complete(self, params: Sequence[ManagedParam], groups: Sequence[WeightGroup] = ()) -> None:
        """Reduce all gradients of ``params`` and ``groups``. Wait for them on the current stream
        and move them into ``.grad``."""
        self.launches.take_turn(self.settle)
        # Earlier microbatches left gradients of weights that the last microbatch did not use. What
        # ranks may use in different ways is reduced here, in the order of registration.
        whole = [param for param in params if isinstance(param, WholeParam)]
        singles = (param for param in params if isinstance(param, ShardedWeight) and param.group is None)
        weights: list[Reducible] = [*singles, *groups]
        synced = [weight for weight in weights if weight.flags.requires_gradient_sync]
        for weight in synced:
            if weight.pending_grad.unsharded is not None:
                self._send(weight, weight.pending_grad.unsharded)
            elif weight.flags.reduce_scatter_unused_params and single(weight).gradient.awaits_reduction:
                self._send(weight, weight.pending_grad.send_buffer().zero_())
            if isinstance(weight, ShardedWeight):
                weight.gradient.awaits_reduction = False
        self.end_backward()
        if not self._comm.streams.has_streams:
            # This completes reductions, which set and clear ``pending_grad.unreplicated``.
            self._comm.reductions.retire_all()
        # Rows of earlier microbatches that are summed over gtp alone: sum them over replicas, too.
        for weight in synced:
            slot = weight.pending_grad.unreplicated
            if slot is not None and weight.flags.requires_all_reduce:
                weight.pending_grad.unreplicated = None
                factor = weight.flags.gradient_divide_factor
                scale = collectives.reduce_scale(slot.dtype, weight.num_ranks, factor)
                gradient = Gradient(weight, None, scale, True, self.launches.share(factor))
                self.launches.complete_later(gradient, slot)
        if not self._comm.streams.is_capturing:
            # Marks of the last step, for which the host did not wait then.
            self.launches.order.check(is_next_step=True)
        self.launches.reduce_whole(whole)
        self._comm.end_backward()  # compute waits for all reductions, whose buffers are dropped
        # Marks of this step, if the host has them already (without a GPU).
        self.launches.order.check(is_next_step=False)
        if self.launches.replicas is not None:
            self.launches.replicas.finish()
        if any(param.policies.offload is not None for param in params):
            # The host reads its copies of gradients as soon as this returns.
            self._comm.host_copies.finish_on_host()
        if not self._comm.streams.is_capturing:  # a graph cannot ask: it does as the last eager step did
            read_marks(param.gradient for param in params)
        for param in params:
            param.gradient.publish(param.fqn, param.flags.all_reduce_hook)
        for group in groups:
            group.pending_grad.settle()

    def abandon(self) -> None:
        """After an exception: wait for the launched reductions and forget their results."""
        self._waiting.clear()  # these were not launched
        self._comm.abandon()
        if self.launches.replicas is not None:
            self.launches.replicas.reset()


def _is_frozen(weight: Reducible) -> bool:
    """Whether a single weight is. A group has left out the gradients of those that are."""
    return isinstance(weight, ShardedWeight) and not weight.param.requires_grad
