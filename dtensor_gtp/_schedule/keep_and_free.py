"""Which gathered weights of one runtime stay in memory, and when their buffers are freed."""

from __future__ import annotations

from collections.abc import Set as AbstractSet

import torch

from .. import _torch_compat as compat
from .._comm.context import CommContext
from .._comm.debug import poison
from .._params.gathered import Gathered
from .._params.sharded_weight import Gatherable, ShardedWeight
from .._params.weight_group import GatherableGroup
from .first_forward import Setup
from .held_weights import choose_kept
from .members import Members
from .passes import Entry, Passes
from .reduce_gradients import Gradients


class Keeper:
    """Keeps gathered weights as the policy and the user ask, and frees all others after their last
    use."""

    def __init__(self, members: Members, passes: Passes, setup: Setup, comm: CommContext, grads: Gradients) -> None:
        self._members = members
        self._passes = passes
        self._setup = setup
        self._comm = comm
        self._grads = grads
        # In the running forward, as indices of gatherables: what ``keep_nbytes`` keeps, and what
        # ``keep_last`` keeps if it is used last.
        self._until_backward: frozenset[int] = frozenset()
        self._if_last: frozenset[int] = frozenset()

    def kept_until_backward(self, entry: Entry | None) -> tuple[int, ...]:
        """The weights that ``keep_nbytes`` keeps from a forward of ``entry`` to its backward."""
        if not self._setup.schedule.keep_nbytes:
            return ()
        forward, backward, turning = self._passes.turning_point(entry)
        sizes = [0] * len(self._members.gatherables)
        for target in self._members.gatherables:
            flags = target.weight.flags
            is_fixed = target.weight.form.fixed is not None
            # What stays anyway has no part in the budget, and what cannot stay has none.
            if flags.reshard_after_forward and not is_fixed and target.index not in turning:
                sizes[target.index] = target.kept_nbytes
        lanes = [target.lane for target in self._members.gatherables]
        budget = self._setup.schedule.keep_nbytes
        return choose_kept(forward, backward, sizes, lanes, budget)

    def kept_from_forward(self, entry: Entry | None) -> frozenset[int]:
        """All weights that are kept from a forward of ``entry`` to its backward, for reports."""
        chosen = set(self.kept_until_backward(entry))
        if self._setup.schedule.keep_last:
            _, _, turning = self._passes.turning_point(entry)
            chosen.update(turning)
        gatherables = self._members.gatherables
        return frozenset(target.index for target in gatherables if self._stays_from_forward(target, chosen))

    def stays(self, target: Gatherable) -> bool:
        """Whether the weight stays gathered after all of its uses in this pass."""
        if not self._passes.is_in_backward:
            return self._stays_from_forward(target, self._until_backward)
        weight = target.weight
        if weight.is_pinned or target.may_be_left_out:
            return True
        return weight.form.fixed is None and not weight.flags.reshard_after_backward

    @staticmethod
    def _stays_from_forward(target: Gatherable, chosen: AbstractSet[int]) -> bool:
        """Whether the weight stays gathered from a forward to its backward, where ``chosen`` do."""
        weight = target.weight
        if weight.is_pinned or target.may_be_left_out:
            return True  # after ``unshard``, or gathered once for the whole pass
        if weight.form.fixed is not None:
            return False  # see [Note: fixed buffers]
        if target.index in chosen:
            return True
        # What the user keeps, in the form that backward uses.
        return not weight.flags.reshard_after_forward and weight.for_backward is target

    def choose(self, entry: Entry) -> None:
        """At the start of a forward, choose the weights that stay for its backward."""
        self._until_backward = self._if_last = frozenset()
        if not torch.is_grad_enabled():
            return
        self._until_backward = frozenset(self.kept_until_backward(entry))
        if self._setup.schedule.keep_last:
            backward = self._passes.chain(entry, is_backward=True).plan
            chosen: set[int] = set()
            for lane in backward.lanes:
                first = backward.first(lane)
                if first is not None:
                    # One launch gathers a weight with its companions, so keep all of them.
                    companions = self._members.gatherables[first].companions
                    chosen.update((first, *(other.index for other in companions)))
            self._if_last = frozenset(chosen)

    def stays_after_use(self, target: Gatherable) -> bool:
        """As ``stays``. What ``keep_last`` keeps stays, too, if it is the last weight of a forward:
        it is the first of the backward, so nothing would hide a gather in between."""
        if self.stays(target):
            return True
        if target.index not in self._if_last or self._passes.is_in_backward:
            return False
        chain = self._passes.forward
        if chain is None or target.weight.form.fixed is not None:
            return False
        return chain.is_at_end(target.lane)

    def take(self, target: Gatherable) -> Gathered | None:
        """The present weight, if it is kept or its gather was launched ahead. Discards stale ones."""
        pending = target.pending
        if target.kept is not None:
            pending.appendleft(target.kept)  # it is older than what is in flight
            target.kept = None
        while pending:
            gathered = pending.popleft()
            if target.weight.is_fresh(gathered):
                return gathered
            self.discard(target, gathered)
        return None

    def end_keeps(self) -> None:
        """Drop kept weights at the end of a backward, unless the user asks to keep them. Between
        passes, writes to shards may leave no trace (kernels of others)."""
        for target in self._members.gatherables:
            if target.kept is not None:
                weight = target.weight
                # If an outer ``fully_shard`` has cut the weight again, its next gather may bring other values.
                if weight.registration.is_cut_again or not (
                    weight.is_pinned or not weight.flags.reshard_after_backward
                ):
                    self.forget_kept(target)

    def end_stays(self) -> None:
        """At the end of a forward, drop what stayed for a use that did not come."""
        for target in self._members.gatherables:
            if target.kept is not None and not self.stays_after_use(target):
                self.forget_kept(target)

    def end_uses(self) -> None:
        """Nobody uses a weight any more, though uses may not have ended: what is present counts as
        kept."""
        for target in self._members.gatherables:
            live = target.live
            target.live = None
            if live is not None:
                live.holds = 0  # of frames and ops that an error has ended
                self.forget_kept(target)
                target.kept = live
            if target.kept is not None and not target.weight.is_fresh(target.kept):
                self.forget_kept(target)

    def forget_recording(self) -> None:
        """After a failed recording into a CUDA graph, whose gathers never ran: nothing may reuse or
        wait for them."""
        for target in self._members.gatherables:
            target.pending.clear()
            target.live = None
            target.kept = None
        for group in self._members.groups:
            group.in_backward.held = None
            group.leaves.drop_writes()  # recorded, so no kernel has written the values
            group.leaves.free()
            # Others may hold gathers of the recording: a new version makes them stale.
            group.shards.num_updates += 1
        for weight in self._members.weights:
            weight.versions.num_updates += 1
            self.drop_kept(weight)

    def wait_kept(self, weight: ShardedWeight) -> None:
        kept = (weight.group or weight).for_forward.kept
        if kept is not None:
            if weight.group is not None:
                weight.group.leaves.open()
            self._comm.streams.wait(kept.done)  # the caller's stream reads the weight next
            self._comm.host_copies.finish_uploads()  # the host may write to its shards next

    def drop_kept(self, weight: ShardedWeight) -> None:
        """Drop everything that was made of a shard."""
        for target in (weight.group or weight).gatherables:
            self.forget_kept(target)
        weight.forget_made()

    def forget_kept(self, target: Gatherable) -> None:
        """Drop what stays in memory of a weight or a group without a use."""
        kept = target.kept
        target.kept = None
        if kept is not None:
            self.discard(target, kept)

    def discard(self, target: Gatherable, gathered: Gathered) -> None:
        """Free the buffer of a gather that is unused."""
        # While the gather runs, its memory must not be reused and nobody may write to the shard.
        self._comm.streams.wait_to_drop(gathered.done, gathered.buffer)
        self.free(target, gathered)

    def free(self, target: Gatherable, gathered: Gathered) -> None:
        """Drop a buffer that this runtime no longer needs. Poison it if nobody else holds it."""
        if self._comm.debug.poison:
            self._comm.streams.wait_for_others()  # they may still read it
        if isinstance(target, GatherableGroup):
            if self._comm.debug.poison and not target.group.leaves.are_saved:
                # Whoever reads the memory before the next gather is complete finds it. What the
                # forward has written to weights goes to the shards first.
                target.group.carry_writes()
                with compat.unseen_by_checkpoint_policies():
                    for output in target.group.leaves.outputs:
                        poison(output)
            target.group.free()  # by resizing the storage: the leaves live on
        # The last reference frees the buffer of a single weight. An alias belongs to the shard or to a graph.
        elif self._comm.debug.poison and not gathered.is_alias:
            gathered.forget()
            # We are two of the owners: the buffer, and the Python object of its storage.
            if compat.storage_use_count(gathered.buffer.untyped_storage()) <= 2:
                with compat.unseen_by_checkpoint_policies():
                    poison(gathered.buffer)

    def place(self, weight: ShardedWeight, gathered: Gathered) -> None:
        """Bring a weight in use to the fixed buffer, where the graph of a recorded block reads
        it."""
        assert weight.form.fixed is not None
        fixed = weight.form.fixed.gathered
        if gathered.is_in(fixed):  # the gather has found it free
            return
        # A gather for a later use may have the fixed buffer, or one for eager code that did not
        # pass the weight on (see ``leave_fixed``). Move those to other buffers.
        for target in self._members.gatherables:
            for other in (*target.pending, target.kept, target.live):
                if other is not None and other is not gathered and other.is_in(fixed):
                    self._comm.streams.wait(other.done)
                    other.move(target.weight.form.new_buffer(), target.weight.layout)
        fixed.copy_(gathered.buffer)  # the caller has waited for the gather

    def leave_fixed(self, weight: ShardedWeight, gathered: Gathered) -> None:
        """Copy the weight out of the fixed buffer before eager code keeps it: the next replay
        overwrites the buffer."""
        fixed = weight.form.fixed
        if fixed is None or self._grads.recording is not None:
            return
        if gathered.is_in(fixed.gathered):
            gathered.move(weight.form.new_buffer(), weight.layout)
