"""The runtime of one root module: begins and ends its forwards and backwards."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial

import torch
import torch.distributed as dist
import torch.nn as nn

from .. import _torch_compat as compat
from .._comm.context import CommContext
from .._comm.debug import DebugFlags
from .._params.managed_param import ManagedParam
from .._params.sharded_weight import ShardedWeight
from .._params.weight_group import WeightGroup
from .._params.whole_param import WholeParam
from ..policy import SchedulePolicy
from .attribute_reads import AttributeReads, Frame
from .first_forward import Setup, agree_on_order
from .gathering import Gathering
from .keep_and_free import Keeper
from .lost_writes import LostWrites, count_writes, refuse_hooks_at_nodes
from .members import Members
from .passes import Chain, Entry, OneThread, Passes
from .reduce_gradients import Gradients
from .steps import Steps, optimizer_steps

logger = logging.getLogger(__name__)
# To users, where a backward does not come through the outputs of a block.
RETURN_IT = "Return each tensor that a loss uses from the forward of the block, also one that a hook collects there."


class Runtime:
    """Runtime of a root module and everything below it."""

    def __init__(self, device: torch.device, policy: SchedulePolicy, debug: DebugFlags) -> None:
        self.device = device
        self.policy = policy
        self.comm = comm = CommContext(device, debug)
        self.grads = grads = Gradients(comm)
        self.members = members = Members()
        self.passes = passes = Passes(members)
        self.setup = setup = Setup(policy, members, passes, comm, grads)
        self.keeper = keeper = Keeper(members, passes, setup, comm, grads)
        self.gathering = gathering = Gathering(members, passes, setup, keeper, comm, grads)
        # Errors of collectives that this rank waits for name where ranks have parted.
        comm.streams.explain = gathering.parted.explain
        self.reads = AttributeReads(gathering, keeper, grads, self.note_backward)
        self.lost_writes = LostWrites(members, passes, keeper, gathering, self.reads)
        self.steps = Steps(members, comm, grads)
        # Autograd alone holds the callback: if it is gone, that backward has failed.
        self._end_of_backward: weakref.ref[partial[None]] | None = None
        self._records_graph = False  # whether the running backward has ``create_graph=True``
        # Ids of the tensors to which the running backward is confined (``inputs=``).
        self.asked_for: set[int] | None = None
        self._thread = OneThread()
        optimizer_steps().watchers.add(self)  # a weak set: it keeps no runtime alive

    def hold_until_end(self, group: WeightGroup) -> None:
        self.gathering.hold_until_end(group)
        self.lost_writes.note_read(group)

    def note_step(self, updated: set[int]) -> None:
        """An optimizer has written to the parameters with these ids. There may be very many
        optimizers."""
        written = self.members.among(updated)
        self.steps.count_step(is_ours=bool(written) or self.members.is_cut_again)
        weights = [param for param in written if isinstance(param, ShardedWeight)]
        errors = self.lost_writes.written_outside(weights)  # before what was kept is dropped
        count_writes(written)  # fused and foreach optimizers change no version of a shard
        for group in dict.fromkeys(param.group for param in written):  # each once
            if group is not None:
                self.keeper.forget_kept(group.for_forward)
                if (lost := group.outdate_saved()) is not None:
                    errors.append(lost)
        for weight in weights:
            if weight.group is None:
                self.keeper.drop_kept(weight)
        for param in written:
            if isinstance(param, WholeParam) and param.group is None:
                param.follow_writes()  # now: no frame is around a model in a compiled function
        if errors:  # last: what was gathered before the step is dropped in any case
            raise errors[0]

    def add(self, params: Sequence[ManagedParam]) -> None:
        """Take over the parameters of one ``gtp_shard`` call. The outermost call must come last."""
        self.members.add(params)
        for param in params:
            if isinstance(param, WholeParam):
                param.on_local_grad = self.note_backward
            elif isinstance(param, ShardedWeight) and param.has_parts:
                self.gathering.parts.weights.append(param)

    @property
    def is_materializing(self) -> bool:
        """Whether module attributes are full weights now, as in a forward or backward."""
        return bool(self.reads.frames) or compat.current_graph_task_id() != -1  # -1: no backward here

    def depth_of_call(self) -> int:
        """How many frames run. Call it before ``enter``, and ``leave`` with the result after
        ``exit``, whatever happens in between: a KeyboardInterrupt may be raised between any two
        lines."""
        self._thread.enter()
        return len(self.reads.frames)

    def enter(self, module: nn.Module, needs_hooks: Callable[[int], bool], method: str = "forward") -> Frame:
        """Begin a forward. ``needs_hooks`` of the number of optimizer steps: whether saved weights
        become handles."""
        if not self.is_materializing:  # neither in a frame nor in a backward
            self._begin_forward(Entry(module, method))
        needs_handles = torch.is_grad_enabled() and needs_hooks(self.steps.num_steps)
        frame = self.reads.push(needs_handles and compat.saved_tensors_hooks_enabled())
        if len(self.reads.frames) == 1:
            for group in self.members.groups:
                group.views.show()
        return frame

    def exit(self, frame: Frame, is_complete: bool) -> None:
        """End a forward; ``is_complete`` is False if it raised."""
        misuse = None
        if is_complete and frame.seen:  # before ``end`` forgets what was seen
            misuse = self.reads.misuse_in(frame)
        if len(self.reads.frames) == 1:
            replaced = [error for group in self.members.groups if (error := group.views.replaced_in_forward())]
            if is_complete:
                misuse = misuse or self.lost_writes.found() or next(iter(replaced), None)
        self.reads.end(frame)
        if len(self.reads.frames) == 1:
            for group in self.members.groups:
                group.views.hide()
            if not torch.is_grad_enabled():  # otherwise the end of backward releases them
                self.gathering.release_read_outside()
            if self.passes.forward is not None:  # None in a recomputation
                self._end_forward(self.passes.forward, is_complete)
        # Last: ``leave`` takes a frame that is left for one that has not ended.
        self.reads.frames.pop()
        if misuse is not None:
            raise misuse

    def _end_forward(self, chain: Chain, is_complete: bool) -> None:
        if not is_complete:
            self._drop_broken_forward()
            return
        # The optimizer may write to shards from now on: no gather may read them.
        self.gathering.drop_prefetched()
        self.keeper.end_stays()
        self.comm.host_copies.finish_uploads()  # nor uploads from the host
        self.gathering.parts.finish()
        uses = chain.observed  # ``chain.end`` forgets them
        chain.end()
        # The host waits for the comparison, which a recording cannot.
        if not (chain.is_compared or self.comm.streams.is_capturing):
            self._compare_order(chain, uses)
        self.passes.end_forward()

    def leave(self, depth: int) -> None:
        """After ``exit``. If that or ``enter`` has not run to its end, end the frames behind
        ``depth``."""
        while len(self.reads.frames) > depth:
            self.reads.end(self.reads.frames[-1])
            self.reads.frames.pop()
            self._hide_groups()
        if depth == 0:
            if self.passes.forward is not None:
                self._drop_broken_forward()
            self._thread.leave()

    def _drop_broken_forward(self) -> None:
        """After a forward that did not complete: nothing uses a weight any more."""
        self._drop_gathers()
        self.comm.host_copies.finish_uploads()
        for group in self.members.groups:
            group.views.hide()
        if self.reads.is_differentiated:  # an evaluation is no part of a step
            self.steps.forget_interrupted()
        if self.passes.forward is not None:
            self.passes.forward.begin()  # its plan stays that of the last complete pass
        self.passes.end_forward()

    def _drop_gathers(self, *, is_in_forward: bool = False) -> None:
        """Nobody uses a weight any more, though uses may not have ended: free all but what the user
        asks to keep. With ``is_in_forward``, a forward runs around the broken backward, and has
        weights in use."""
        self.gathering.release_read_outside(is_in_forward=is_in_forward)
        self.gathering.release_blocks()
        self.gathering.drop_prefetched()
        if not is_in_forward:
            self.keeper.end_uses()
        self.keeper.end_keeps()

    def _compare_order(self, chain: Chain, uses: Sequence[int]) -> None:
        """After a first forward, raise on all ranks if they have used other weights, or in another
        order."""
        chain.is_compared = True
        what = "a forward"
        for key, known in self.passes.chains.items():
            if known is chain and key.entry is not None:
                what = f"the first {key.entry.method} of a {type(key.entry.module).__name__}"
        weights = [self.members.gatherables[use].weight for use in uses]
        agree_on_order(weights, self.members.weights, what)

    def _begin_forward(self, entry: Entry) -> None:
        self._thread.begin_forward(self._is_backward_running)
        self.drop_broken_backward()
        self.steps.forget_what_was_given_up()
        self.setup.ensure()  # collective in the first forward
        self.gathering.release_read_outside()  # of a forward without a backward
        self.gathering.release_blocks()
        self.comm.begin_pass()
        self.keeper.end_keeps()
        self.gathering.free_saved()
        self.lost_writes.begin_forward()
        is_power = self.steps.count_forward()
        self.reads.is_differentiated = torch.is_grad_enabled()
        self.reads.looks_at_bits = is_power and self.comm.streams.may_wait_on_host
        is_captured = self.comm.streams.is_capturing
        for param in self.members.params:
            if param.group is None:
                param.begin_forward(is_captured)
        for group in self.members.groups:
            group.begin_forward(is_captured)
        if self.members.is_offloaded:
            self.comm.host_copies.note_uploads()  # ``begin_forward`` has copied whole parameters
        if self.reads.looks_at_bits and torch.is_grad_enabled() and not compat.in_func_transform():
            refuse_hooks_at_nodes(self.members.weights)
        # First: statistics are of whole shards, with the rows of all replicas.
        self.gathering.parts.begin(self.setup.schedule.coalesce_nbytes)
        self.gathering.statistics.begin_forward(self.members.weights)
        self.gathering.gather_for_any_use(is_in_backward=False)
        self.steps.note_begin()
        chain = self.passes.begin_forward(entry)
        self.keeper.choose(entry)
        if chain.may_guess and entry.method == "forward":
            chain.guess(self.setup.guesses.forward(entry.module))
        self.gathering.begin(chain)

    def note_backward(self, entry: Entry | None = None) -> None:
        """Begin a backward, unless it has begun: e.g. the output of an ``entry`` gets its
        gradient."""
        if self.grads.recording is not None:
            return  # the backward of a block that is recorded is not one of this runtime
        is_running = self._is_backward_running
        if self.device.type == "cpu":  # elsewhere autograd has threads of its own
            self._thread.begin_backward(is_running)
        if is_running:
            return
        self.drop_broken_backward()  # if the last one raised, and no forward came in between
        self.passes.begin_backward(entry)
        self.follow_frozen()
        # All ranks reduce these at the end, whether or not they have used them.
        left_out = [weight for weight in self.members.weights if weight.flags.reduce_scatter_unused_params]
        for param in (*self.members.whole, *left_out):
            if param.param.requires_grad and self._is_asked_for(param):
                param.gradient.awaits_reduction = True
        for group in self.members.groups:
            group.pending_grad.asked_for = self.asked_for
        self._records_graph = torch.is_grad_enabled()  # the engine sets it to ``create_graph``
        self.comm.begin_pass()
        self.lost_writes.gather_written()
        end = partial(self._finish_backward)
        try:
            self._end_of_backward = weakref.ref(end)
            compat.queue_backward_callback(end)
        finally:
            del end  # a traceback would keep it
        self.gathering.gather_for_any_use(is_in_backward=True)
        self.gathering.begin(self.passes.backward)
        self._hide_groups()

    def follow_frozen(self) -> None:
        """Before a backward: a forward in between may have followed a freeze that the user has taken back."""
        for group in self.members.groups:
            group.begin_backward()
        for param in self.members.params:
            if param.group is None:
                param.begin_backward()

    def _is_asked_for(self, param: ManagedParam) -> bool:
        """Whether the running backward is not confined to others."""
        leaf = param.leaf
        if param.group is not None:
            leaf = param.group.leaves.by_member[param]
        return self.asked_for is None or id(leaf) in self.asked_for

    def arrived(self) -> tuple[int, list[int]]:
        """How many backwards have begun here, and how many weights of each group have a gradient."""
        return self.passes.num_backwards, [group.leaves.num_gradients for group in self.members.groups]

    def refuse_lost_gradients(self, before: tuple[int, list[int]]) -> None:
        """After a run of autograd: raise for gradients of groups that came without a backward of a
        block, so that nobody reduces them. The next step would have them."""
        num_backwards, counts = before
        if self.passes.num_backwards != num_backwards:
            return
        groups = zip(self.members.groups, counts, strict=False)
        lost = [group for group, number in groups if group.leaves.num_gradients > number]
        for group in lost:
            group.pending_grad.forget()
        if lost:
            raise RuntimeError(
                f"Gradients of weights of block '{lost[0].fqn}' did not come through an output of the block, so they "
                f"are lost (rank {dist.get_rank()}). {RETURN_IT}"
            )

    def use_groups(self, groups: Sequence[WeightGroup]) -> None:
        """Gather and reduce the members of ``groups`` together from now on, and each other weight
        by itself. No gather may be in memory or in flight."""
        for group in groups:
            group.reader = self
        self.members.use_groups(groups)
        self.passes.chains.clear()  # plans name gatherables by their index
        self._hide_groups()  # now, because the first call may be that of a layer alone, which is no pass

    def split_groups(self) -> None:
        """Gather and reduce each weight by itself from now on, as graphs of single blocks need it."""
        self.setup.make_groups_by(None)  # nor does a first forward make any
        for group in self.members.groups:
            self.keeper.forget_kept(group.for_forward)
            group.leaves.refuse_graphs(
                f"The weights of block '{group.fqn}' were gathered together in this forward, but gtp_shard, "
                "shard_added or capture_blocks was called before its backward. Call it before the forward."
            )
            group.dissolve()
        self.use_groups([])

    def gather_kept(self, weight: ShardedWeight) -> None:
        """Gather a weight, or its group, ahead of any use, for ``unshard``."""
        self.setup.ensure()
        self.gathering.parts.begin(self.setup.schedule.coalesce_nbytes)
        self.gathering.parts.finish()  # no forward would launch the rest
        group = weight.group
        if group is None:
            self.gathering.gather_kept(weight)
            return
        if not (group.is_pinned or self.reads.frames):
            group.begin_forward()  # follows parameters that were replaced
        group.views.pin(self.note_backward)
        self.gathering.gather_kept(group)

    @property
    def _is_backward_running(self) -> bool:
        if not self.passes.is_in_backward or self._end_of_backward is None:
            return False
        return self._end_of_backward() is not None  # the callback lives as long as its backward

    def _hide_groups(self) -> None:
        """Let modules have what they have outside of forwards, unless one runs."""
        if not self.reads.frames:
            for group in self.members.groups:
                group.views.hide()

    def _finish_backward(self) -> None:
        """End a backward, on the caller's stream. When this returns, all gradients are in ``.grad``."""
        with self.steps.forgetting_on_failure():
            misuse = self.reads.misuse_in(self.reads.in_backward, "in a backward")  # raised last
            self.reads.release_read_in_backward()
            self._finish_blocks()
            misuse = misuse or self.lost_writes.found("in a backward")
            self.gathering.release_read_outside(is_in_forward=bool(self.reads.frames))
            self.gathering.drop_prefetched()  # as at the end of a forward
            self.keeper.end_keeps()
            self.gathering.free_saved()
            self.comm.host_copies.finish_uploads()
            self.passes.backward.end()
            self.passes.end_backward()
            self._hide_groups()
            self.steps.complete()
            if self._records_graph:
                for param in filter(self._is_asked_for, self.members.params):
                    param.mark_undifferentiable()
            if misuse is not None:
                raise misuse

    def _finish_blocks(self) -> None:
        """At the end of a backward: reduce what has arrived late, and free the blocks."""
        for group in self.members.groups:
            has_begun = bool(group.in_backward.uses)  # in a forward whose ``BlockUse.end`` has not come
            group.in_backward.uses.clear()
            self.lost_writes.check(group)
            self.gathering.release_block(group)
            if has_begun or group.pending_grad.have_arrived:  # on other ranks gradients may have arrived
                self.grads.reduce_group(group)

    def drop_broken_backward(self) -> None:
        """If the last backward raised before its end, drop its prefetched weights and its
        gradients."""
        if not self.passes.is_in_backward:
            return
        others = ""
        if self.steps.has_unsynced:
            others = ", with those of earlier microbatches that were not synced"
        text = "the last backward did not complete; its gradients are dropped%s (rank %d)"
        logger.warning(text, others, dist.get_rank())
        self.steps.forget()
        self.lost_writes.forget_backward(is_in_forward=bool(self.reads.frames))
        self.reads.release_read_in_backward()
        self._drop_gathers(is_in_forward=bool(self.reads.frames))
        self.passes.backward.begin()
        self.passes.end_backward()  # late, so that nothing is left if this is interrupted
        self._hide_groups()

    def abandon(self) -> None:
        """After an exception: drop a backward that did not complete, and gradients in flight."""
        self.drop_broken_backward()
        self.steps.forget()

    def forget_recording(self) -> None:
        """After a failed recording into a CUDA graph: nobody can wait for its collectives, because
        they never ran."""
        self.comm.forget_recording()  # first: ``abandon`` would wait for its reductions
        self.keeper.forget_recording()
        self.passes.end_backward()
        self._hide_groups()
        self.reads.release_read_in_backward()
        self.passes.backward.begin()
        self.abandon()
