"""Uses of weights, and the gathers that are launched ahead of them.

[Note: uses and holds]
A *use* acquires a gathered weight and releases it. In between the weight is *live*. The last
release frees the buffer, or the weight stays in memory without a use: it is *kept*. Gathers that
were launched for uses to come are *pending*.

[Note: weights that a rank may leave out]
A use is a collective, so all ranks must use the same weights. With
``set_reduce_scatter_unused_params`` each rank may use its weights as it likes: all ranks gather all
of them at the start of a pass, and reduce all at its end, with zeros where a rank has no gradient.
In between a use communicates nothing, so no plan contains it. They cost the memory of full weights
and gradients for a pass, as a module of ``fully_shard`` does.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch_compat as compat
from .._comm.collectives import Groups
from .._comm.context import CommContext
from .._comm.debug import profiler_range
from .._params import gather
from .._params.gathered import Gathered
from .._params.managed_param import ManagedParam
from .._params.refusals import refuse_mutable_saves, refuse_recording
from .._params.sharded_weight import Gatherable, ShardedWeight
from .._params.weight_group import GatherableGroup, Reducible, WeightGroup
from .first_forward import Setup
from .guesses import NUM_SEEN, Blocks
from .keep_and_free import Keeper
from .members import Members
from .parted_ranks import PartedRanks
from .passes import Chain, Passes
from .reduce_gradients import Gradients
from .replica_gathers import ReplicaGathers
from .shard_statistics import Statistics

logger = logging.getLogger(__name__)


class ReadOutside(NamedTuple):
    """A group that code outside of its uses reads, until the pass ends."""

    target: Gatherable
    gathered: Gathered
    is_in_backward: bool  # that reads it


class Gathering:
    """Launches the gathers of one runtime, ahead of uses or at a use."""

    def __init__(
        self, members: Members, passes: Passes, setup: Setup, keeper: Keeper, comm: CommContext, grads: Gradients
    ) -> None:
        self._members = members
        self._passes = passes
        self._setup = setup
        self._keeper = keeper
        self._comm = comm
        self._grads = grads
        self.parts = ReplicaGathers(comm)
        self.parted = PartedRanks(members)
        self.statistics = Statistics(comm)
        # What code outside of a use reads in this pass, see ``hold_until_end``.
        self._read_outside: list[ReadOutside] = []
        # Lanes in which a gather that the plan expects is not in flight.
        self._gaps: set[int] = set()

    def acquire(self, target: Gatherable) -> Gathered:
        """Begin a use: the full weight, ready on the current stream. Launch what the plan has next."""
        if self._grads.recording is not None:
            fixed: Gathered = self._grads.recording.acquire(target)  # the graph of a block reads a fixed buffer
            return fixed
        comm = self._comm
        gathered = target.live
        if gathered is None or not target.weight.is_fresh(gathered):  # not fresh: its users go on with it
            gathered = self._begin_use(target)
        gathered.holds += 1
        if comm.is_debugged:
            comm.streams.delay()
        self._wait_for(gathered)
        return gathered

    def share(self, gathered: Gathered) -> None:
        """Code reads once more what a use has acquired, perhaps on another stream."""
        streams = self._comm.streams
        streams.note_compute()
        if len(streams.computing) > 1:
            self._wait_for(gathered)

    def _wait_for(self, gathered: Gathered) -> None:
        comm = self._comm
        done = gathered.done
        stream = comm.streams.wait(done)  # the compute stream waits for the gather (on a CPU: the host)
        gathered.reader = stream
        if done.origin is not stream:
            # Another stream launched the gather, or made a copy, and owns the memory, see [Note:
            # several compute streams] in ``streams``.
            comm.streams.note_reading(done, gathered.memory)
        # With offload, the copy of the shard on the device. The compute stream owns its memory and has waited for the
        # gather that reads it, so it may be freed.
        gathered.uploaded = None

    def _begin_use(self, target: Gatherable) -> Gathered:
        """Take or launch the gather of a weight that is not live, and launch what the plan has
        next."""
        if not self._setup.is_done:  # code outside of a forward may be the first
            self._setup.ensure()
        if compat.is_recording():
            refuse_recording("torch.fx", target.weight.fqn)
        if target.weight.registration.is_cut_again:
            target.weight.check_readable()
        gathered = target.live = self._keeper.take(target) or self._gather_now(target)
        if isinstance(target, GatherableGroup):
            target.group.leaves.open()
        if (chain := self._passes.running) is not None and not target.may_be_left_out:
            launches = chain.advance(target.index, target.lane)
            # None: the plan did not expect this use. As planned and without gaps, nobody looks at what is in flight.
            if launches is None or self._gaps:
                self._catch_up(chain, target, launches is not None)
            for launch in launches or ():
                self._prefetch(chain, launch.positions)
        return gathered

    def compute(self, op: Callable[..., Tensor], input: Tensor, target: Gatherable, *rest: Any) -> Tensor:
        """``op(input, full, *rest)`` with the full weight."""
        with self.using(target) as gathered:
            return op(input, gathered.full, *rest)

    @contextmanager
    def using(self, target: Gatherable) -> Iterator[Gathered]:
        """A use that ends with the context."""
        gathered = self.acquire(target)
        try:
            with profiler_range("GTP::compute", target.weight.fqn):
                yield gathered
        finally:
            # An op may still run: see [Note: streams and memory] for why its input may be freed now.
            self.release(target, gathered)

    def release(self, target: Gatherable, gathered: Gathered) -> None:
        """End a use."""
        if self._grads.recording is not None:
            return  # what ``acquire`` gave is the fixed buffer of a block
        gathered.holds -= 1
        if gathered.holds:
            return
        if target.live is gathered:  # no longer, if the shard was written during the use
            target.live = None
        is_kept = self._keeper.stays_after_use(target) or self._stays_for_next_use(target)
        if is_kept and isinstance(target, GatherableGroup):
            # Now: shards may get newer values before a group that is kept is freed.
            was_fresh = target.group.is_fresh(gathered)
            if target.group.carry_writes() and was_fresh:
                gathered.version = target.group.version
        # What an optimizer step or other code may have outdated meanwhile is gathered again.
        if is_kept and target.weight.is_fresh(gathered):
            target.kept = gathered
        else:
            self._keeper.free(target, gathered)

    def _stays_for_next_use(self, target: Gatherable) -> bool:
        """Whether a weight that was just used is used again soon in this pass."""
        chain = self._passes.running
        if chain is None:
            return False
        position = chain.next_use(target.index, target.lane)
        if position is None:
            return False
        if position in chain.plan.served:
            return True
        # A group has memory for one gather at a time. The next one should be in flight by now, but would have needed
        # the memory of this one.
        is_group = isinstance(target, GatherableGroup)
        return is_group and any(position in launch for launch in chain.expected((target.lane,)))

    def gather_kept(self, weight: Reducible) -> None:
        """Gather a weight or a group ahead of any use, for ``unshard``."""
        target = weight.for_forward
        # If it is in use, the release keeps it: ``unshard`` has pinned the weight.
        if target.live is not None or (target.kept is not None and weight.is_fresh(target.kept)):
            return
        if isinstance(weight, WeightGroup):
            self._keeper.forget_kept(target)  # it is stale
        else:
            self._keeper.drop_kept(weight)
            weight.follow(weight.registration.sites[0])
            weight.check_readable()
        self._comm.begin_pass(weight.groups)  # only the ranks of this mesh need be here
        if (kept := self._keeper.take(target)) is None:
            self._gather([target])
            kept = target.pending.pop()
        target.kept = kept

    def gather_and_keep(self, targets: Sequence[Gatherable]) -> None:
        """Gather weights of one mesh ahead of any use, in one launch."""
        for target in targets:  # what is older than this gather
            self._keeper.forget_kept(target)
            self.forget_pending(target)
        self._gather(targets)
        for target in targets:
            target.kept = target.pending.pop()

    def gather_for_any_use(self, *, is_in_backward: bool) -> None:
        """At the start of a pass, on all ranks alike, gather what is absent of weights that a rank
        may leave out."""
        by_mesh: dict[Groups, list[Gatherable]] = {}
        for target in self._members.gatherables:
            weight = target.weight
            if not target.may_be_left_out:
                continue
            weight.follow(weight.registration.sites[0])
            if weight.registration.is_cut_again:
                raise NotImplementedError(
                    f"set_reduce_scatter_unused_params does not support parameter '{weight.fqn}', which an outer "
                    f"fully_shard has sharded, too (rank {dist.get_rank()}). Pass a (replicate, gtp) mesh to gtp_shard "
                    "instead of the fully_shard around it."
                )
            is_needed = is_in_backward or target is weight.for_forward  # a backward may recompute forwards
            is_kept = target.kept is not None and weight.is_fresh(target.kept)
            if is_needed and not is_kept and target.live is None:
                by_mesh.setdefault(weight.groups, []).append(target)
        for targets in by_mesh.values():
            self.gather_and_keep(targets)

    def hold_until_end(self, group: WeightGroup) -> None:
        """Code outside of a use reads a weight of ``group``: gather it until the pass ends."""
        target = group.for_forward
        if torch.is_grad_enabled():
            refuse_mutable_saves(group.fqn)
            group.leaves.note_saved(is_captured=self._comm.streams.is_capturing)
        if group.is_pinned and target.kept is not None and group.is_fresh(target.kept):
            self._comm.streams.wait(target.kept.done)  # as ``acquire`` does: code reads it next
            group.leaves.open()
            group.note_read_outside()
        else:
            is_in_backward = compat.current_graph_task_id() != -1
            self._read_outside.append(ReadOutside(target, self.acquire(target), is_in_backward))

    def release_read_outside(self, *, is_in_forward: bool = False) -> None:
        """At the end of a pass. With ``is_in_forward`` it is a backward in a forward, which goes on with what it has
        read itself."""
        left: list[ReadOutside] = []
        while self._read_outside:
            read = self._read_outside.pop()
            if is_in_forward and not read.is_in_backward:
                left.insert(0, read)
            else:
                self.release(read.target, read.gathered)
        self._read_outside = left

    def release_block(self, group: WeightGroup) -> None:
        """End the hold of the backward of a block."""
        held = group.in_backward.held
        group.in_backward.held = None
        if held is not None:
            self.release(group.for_forward, held)

    def release_blocks(self) -> None:
        """Before a forward, or after a broken pass: no backward is left that needs a weight at once."""
        for group in self._members.groups:
            group.in_backward.uses.clear()
            self.release_block(group)

    def free_saved(self) -> None:
        """Between passes: free what graphs have kept in memory and read no more."""
        is_capturing = self._comm.streams.is_capturing
        for group in self._members.groups:
            if group.leaves.may_be_saved and group.for_forward.is_absent:
                group.leaves.free_captured(is_capturing)

    def _catch_up(self, chain: Chain, used: Gatherable, is_expected: bool) -> None:
        """After a deviation or a gap, launch every gather that should already be in flight."""
        lane = used.lane
        if not is_expected:
            self.parted.note(chain, used.index, len(chain.observed) - 1)
        if chain.may_guess and self._passes.is_in_backward:
            self._guess_backward(chain)
        # Only a use in lane 0 may launch gathers of other lanes: all ranks of their meshes come to it.
        if is_expected:
            self._fill(chain, [gap for gap in self._gaps if lane in (0, gap)])
            return
        text = "use of %s was not expected next; %d deviations so far"
        logger.debug(text, used.weight.fqn, chain.num_deviations)
        self._drop_unexpected(chain, used)
        if lane == 0:
            self._fill(chain)
        else:
            self._fill(chain, (lane,))

    def _guess_backward(self, chain: Chain) -> None:
        """Guess the rest of a first backward from its first uses."""
        forward = self._passes.forward_of_backward
        blocks: Blocks | None = []  # nothing to guess from
        if forward is not None:
            blocks = self._setup.guesses.backward(forward.plan.uses, chain.observed)
        if blocks is not None:  # None: too few uses yet
            chain.guess(blocks, NUM_SEEN)

    def begin(self, chain: Chain) -> None:
        """Begin a pass, and launch its first gathers."""
        chain.begin()
        self.parted.begin(chain)
        self._gaps.clear()
        for launch in chain.plan.launches[0]:
            self._prefetch(chain, launch.positions)

    def _fill(self, chain: Chain, lanes: Collection[int] | None = None) -> None:
        """Launch every gather that should already be in flight, in these lanes or all."""
        if lanes is None:
            self._gaps = set()  # ``_prefetch`` adds those that remain
        else:
            self._gaps = self._gaps.difference(lanes)
        for positions in chain.expected(lanes):
            self._prefetch(chain, positions)

    def _prefetch(self, chain: Chain, positions: Sequence[int]) -> None:
        """Launch one gather of the weights that are neither in memory nor in flight for these uses
        of the plan."""
        missing = []
        uses = chain.plan.uses
        for position in positions:
            target = self._members.gatherables[uses[position]]
            if target.weight.registration.is_cut_again and not target.weight.is_readable:
                self._gaps.add(target.lane)  # until an outer fully_shard has gathered it
                continue
            if self._is_missing(chain, target, position):
                missing.append(target)
        if missing:
            self._gather(missing)

    def _is_missing(self, chain: Chain, target: Gatherable, position: int) -> bool:
        # One gather serves all uses of a weight that stays. A group has memory for one.
        if self._keeper.stays(target) or isinstance(target, GatherableGroup):
            return target.is_absent
        # Each use to come takes one gather. One that stays serves the use that it stays for.
        available = len(target.pending)
        if target.kept is not None and not chain.stays(target.index, target.lane):
            available += 1
        return available == 0 or available < chain.num_expected(target.index, position)

    def _gather(self, targets: Sequence[Gatherable]) -> None:
        """Launch one gather of shards that are present."""
        self._grads.launches.order.note("all_gather", targets)
        # Policies of activation checkpointing see all ops, but a recomputation may launch other
        # gathers.
        with compat.unseen_by_checkpoint_policies():
            if self.parts.weights:
                for target in targets:
                    self.parts.bring(gather.weights_of(target))
            if self.statistics.waiting:
                self.statistics.agree(targets)
            gather.launch(targets, self._comm)

    def _gather_now(self, target: Gatherable) -> Gathered:
        """Gather for a use that nothing was launched for, together with its companions."""
        if target.may_be_left_out:
            # Outside of a pass: all ranks gather the same, whichever weight they need.
            groups = target.weight.groups
            alike = (each for each in self._members.gatherables if each.may_be_left_out)
            alike = (each for each in alike if each.weight.groups == groups)
            self._gather([each for each in alike if each is target or each.is_absent])
            return target.pending.pop()
        others = []  # of its bundle, which one launch gathers
        for other in target.companions:
            is_readable = not other.weight.registration.is_cut_again or other.weight.is_readable
            if other is not target and other.is_absent and is_readable:
                others.append(other)
        if (chain := self._passes.running) is not None:
            # Before the launch, in which this rank may wait forever or end.
            self.parted.note(chain, target.index, len(chain.observed))
        self._gather([target, *others])
        return target.pending.pop()

    def drop_prefetched(self) -> None:
        for target in self._members.gatherables:
            if target.pending:
                self.forget_pending(target)

    def _drop_unexpected(self, chain: Chain, used: Gatherable) -> None:
        """Drop gathers in flight that ``chain`` does not expect, but keep companions of ``used``,
        the weight in use. If that is not in lane 0, drop only gathers of its lane: ranks of other
        meshes may use other weights now."""
        uses = chain.plan.uses
        expected = Counter(uses[position] for launch in chain.expected() for position in launch)
        expected.update(other.index for other in used.companions)
        for target in self._members.gatherables:
            if target.pending and used.lane in (0, target.lane):
                self.forget_pending(target, expected[target.index])

    def drop_prefetched_of(self, params: Sequence[ManagedParam]) -> None:
        """Drop gathers in flight whose shards are about to be freed."""
        for param in params:
            if isinstance(param, ShardedWeight):
                for target in param.gatherables:
                    self.forget_pending(target)

    def forget_pending(self, target: Gatherable, num_left: int = 0) -> None:
        """Drop what is in flight of a weight or a group, but for the first ``num_left`` gathers."""
        while len(target.pending) > num_left:
            self._gaps.add(target.lane)  # a pass that this one interrupts gathers it again
            self._keeper.discard(target, target.pending.pop())
