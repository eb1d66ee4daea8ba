"""When each weight is gathered, how long it is kept, and what follows from the plan.

[Note: uses and holds]
A *use* acquires a gathered weight and releases it; the last release frees the buffer. Between the two it is *live*.
Gathers that were launched for uses to come are *pending*; a gathered weight without a use may be *kept*.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

from torch import Tensor

from .. import _torch_compat as compat
from .._comm.context import CommContext
from .._comm.debug import DebugFlags, poison, profiler_range
from .._comm.groups import Groups
from .._params import gather
from .._params.gathered import Gathered
from .._params.managed_param import ManagedParam
from .._params.pack_planes import agree_on_amax
from .._params.sharded_weight import Gatherable, ShardedWeight
from ..policy import SchedulePolicy
from .gradient_protocols import BlockRecording
from .order_of_gathers import Plan, Traits, Window, choose_kept
from .order_of_uses import Chain, ChainKey, Entry

logger = logging.getLogger(__name__)


class Use:
    """A use of a weight, as a context. A class, because a generator takes the host several times as long."""

    __slots__ = ("_gathered", "_gathering", "_range", "_target")

    def __init__(self, gathering: Gathering, target: Gatherable) -> None:
        self._gathering, self._target = gathering, target

    def __enter__(self) -> Tensor:
        gathered = self._gathered = self._gathering.acquire(self._target)
        self._range = profiler_range("GTP::compute", self._target.weight.fqn)
        self._range.__enter__()
        try:
            return gathered.full
        except BaseException:
            self.__exit__(None, None, None)
            raise

    def __exit__(self, *exception: Any) -> None:
        self._range.__exit__(*exception)
        self._gathering.release(self._target, self._gathered)


class Gathering:
    """The gathers of one runtime, which tells it what kind of pass runs.

    Args:
        comm: Streams and groups.
        schedule: Policy of the root.
        debug: Debugging aids.
    """

    def __init__(self, comm: CommContext, schedule: SchedulePolicy, debug: DebugFlags) -> None:
        self.comm = comm
        self.schedule = schedule
        self.debug = debug
        self.gatherables: list[Gatherable] = []  # of the weights; a plan names them by index
        self.chains: dict[ChainKey, Chain] = {}
        self.recording: BlockRecording | None = None  # of the block that is recorded now
        self._window = Window(
            schedule.prefetch_depth, schedule.prefetch_nbytes, schedule.coalesce_nbytes, schedule.expert_blocks_ahead
        )
        self._num_calls = 0
        self._gaps: set[int] = set()  # lanes of which something is to be launched again
        # By mesh, weights whose ranks have yet to agree on a statistic; and the meshes of which some have done so since
        # the last forward began.
        self._disagreeing: dict[Groups, list[ShardedWeight]] = {}
        self._agreeing: set[Groups] = set()
        self._kept_until_backward: frozenset[int] = frozenset()
        self._forward_chain: Chain | None = None
        self._forward_entry: Entry | None = None
        self._differentiable_chain: Chain | None = None
        self._is_in_backward = False
        self._backward_chain = Chain(self._window, self._traits)  # until the first backward

    def _add_gatherables(self, weights: Sequence[ShardedWeight]) -> None:
        """Take over the weights of one ``gtp_shard`` call."""
        self._num_calls += 1
        for weight in weights:
            for target in weight.gatherables:
                target.index = len(self.gatherables)
                target.call = self._num_calls
                self.gatherables.append(target)

    def _chain(self, key: ChainKey) -> Chain:
        if key not in self.chains:
            self.chains[key] = Chain(self._window, self._traits)
        return self.chains[key]

    def _traits(self) -> list[Traits]:
        """What plans must know of each gatherable. The same on all ranks of its mesh."""
        return [
            Traits(
                nbytes=target.nbytes,
                lane=target.lane,
                call=target.call,
                bundle=target.companions[0].index if target.companions else -1,
            )
            for target in self.gatherables
        ]

    def _number_lanes(self) -> None:
        """Give the mesh of each gatherable a number, 0 for that of the outermost call."""
        lanes: dict[Groups, int] = {}
        for target in reversed(self.gatherables):  # those of the outermost call come last
            target.lane = lanes.setdefault(target.weight.groups, len(lanes))

    def _active_chain(self) -> Chain | None:
        return self._backward_chain if self._is_in_backward else self._forward_chain

    def _begin_chain(self, chain: Chain) -> None:
        chain.begin()
        self._fill(chain)

    def _advance(self, target: Gatherable) -> None:
        chain = self._active_chain()
        if chain is None:
            return
        lane = target.lane
        if not chain.advance(target.index, lane):
            logger.debug(
                "use of %s was not expected next; %d deviations so far", target.weight.fqn, chain.num_deviations
            )
            self._drop_prefetched(chain, target)
            self._fill(chain, None if lane == 0 else (lane,))
            return
        if self._gaps:
            self._fill(chain, [gap for gap in self._gaps if lane in (0, gap)])
        for launch in chain.due():
            self._prefetch(chain, launch.positions)

    def _fill(self, chain: Chain, lanes: Collection[int] | None = None) -> None:
        """Launch all that the plan expects to be in flight by now; of some lanes, or of all."""
        if lanes is None:
            self._gaps.clear()
        else:
            self._gaps.difference_update(lanes)
        for positions in chain.expected(lanes):
            self._prefetch(chain, positions)

    def _prefetch(self, chain: Chain, positions: Sequence[int]) -> None:
        """Launch together what is neither in memory nor in flight for these uses of the plan."""
        missing = []
        for position in positions:
            target = self.gatherables[chain.plan.uses[position]]
            if target.weight.is_cut_again and not target.weight.is_readable:
                self._gaps.add(target.lane)  # until an outer fully_shard has gathered it
            elif target.is_absent or self._is_missing(chain, target, position):
                missing.append(target)
        if missing:
            for target, gathered in zip(missing, self._gather(missing), strict=True):
                target.pending.append(gathered)

    def _is_missing(self, chain: Chain, target: Gatherable, position: int) -> bool:
        if target.kept is None and not target.pending:
            return target.live is None or not self._stays(target)
        if self._stays(target):
            return False
        available = len(target.pending) + (target.kept is not None)
        return available < chain.num_expected(target.index, position)

    def ensure_initialized(self) -> None:
        """Check that there is something to run on, and make the communicators, in the first forward."""
        raise NotImplementedError

    def acquire(self, target: Gatherable) -> Gathered:
        """Begin a use: the full weight, ready on the current stream. Launches the gathers that the plan has next."""
        if self.recording is not None:
            return self.recording.acquire(target)
        self.ensure_initialized()
        gathered = target.live
        if gathered is None or not target.weight.is_fresh(gathered):
            target.weight.check_readable()
            gathered = self._take_kept(target) or self._take_prefetched(target) or self._gather_now(target)
            target.live = gathered
            self._advance(target)
        gathered.holds += 1
        self.comm.delay()
        self.comm.wait(gathered.done)
        self.comm.note_reading(gathered.done, (gathered.buffer,))
        return gathered

    def using(self, target: Gatherable) -> Use:
        """A use that ends with the context, whose value is the full weight."""
        return Use(self, target)

    def release(self, target: Gatherable, gathered: Gathered) -> None:
        """End a use."""
        if self.recording is not None:
            return
        gathered.holds -= 1
        if gathered.holds:
            return
        if target.live is gathered:
            target.live = None
        if self._is_kept_after_use(target) and target.weight.is_fresh(gathered):
            target.kept = gathered
        else:
            self._free(gathered)

    def place(self, weight: ShardedWeight, gathered: Gathered) -> None:
        """Have the weight of a recorded block, which is in use, where the block's graph reads it."""
        assert weight.fixed is not None
        fixed = weight.fixed.gathered
        if not gathered.is_in(fixed):
            # Its gather has found the buffer taken. By now it may be taken by a gather for later, or by one for eager
            # code that has handed out nothing of it (see ``leave_fixed``), which have to move.
            for target in self.gatherables:
                for other in (*target.pending, *filter(None, (target.kept, target.live))):
                    if other is not gathered and other.is_in(fixed):
                        self.comm.wait(other.done)
                        other.move(target.weight.new_buffer(), target.weight.layout)
            fixed.copy_(gathered.buffer)

    def leave_fixed(self, weight: ShardedWeight, gathered: Gathered) -> None:
        """Before eager code is given the weight to keep: a replay of another block would write over a fixed buffer."""
        if weight.fixed is not None and self.recording is None and gathered.is_in(weight.fixed.gathered):
            gathered.move(weight.new_buffer(), weight.layout)

    def _free(self, gathered: Gathered) -> None:
        """Drop a buffer that this runtime no longer needs; poison it if nobody else holds it either."""
        if self.debug.poison and not gathered.is_alias:
            gathered.forget()
            # Two owners are ours: the buffer and the Python object of its storage that we ask with.
            if compat.storage_use_count(gathered.buffer.untyped_storage()) <= 2:
                with compat.unseen_by_checkpoint_policies():
                    poison(gathered.buffer)

    def _gather_now(self, target: Gatherable) -> Gathered:
        """For a use that nothing was launched for; with what always travels along."""
        others = [other for other in target.companions if other is not target and other.is_absent]
        others = [other for other in others if not other.weight.is_cut_again or other.weight.is_readable]
        first, *rest = self._gather([target, *others])
        for other, gathered in zip(others, rest, strict=True):
            other.pending.append(gathered)
        return first

    def _gather(self, targets: Sequence[Gatherable]) -> list[Gathered]:
        """Launch one gather of present shards. Which gathers a recomputation launches depends on the plan."""
        with compat.unseen_by_checkpoint_policies():
            self._agree(targets)
            return gather.launch(targets, self.comm)

    def _agree(self, targets: Sequence[Gatherable]) -> None:
        """Before a gather, on the stream of casts, for which it waits: the ranks of a mesh agree on the statistics of
        weights that have waited for that. Before the first such gather on those alone that it sends, so that it does
        not wait for others; before the second on all the rest."""
        groups = targets[0].weight.groups
        waiting = self._disagreeing.get(groups)
        if not waiting:
            return
        sent = {target.weight for target in targets}
        if sent.isdisjoint(waiting):
            return
        later: list[ShardedWeight] = []
        if groups not in self._agreeing:
            later = [weight for weight in waiting if weight not in sent]
            waiting = [weight for weight in waiting if weight in sent]
        self._disagreeing[groups] = later
        self._agreeing.add(groups)
        with self.comm.packing(groups):
            agree_on_amax(waiting, self.comm)

    def _take_prefetched(self, target: Gatherable) -> Gathered | None:
        while target.pending:
            gathered = target.pending.popleft()
            if target.weight.is_fresh(gathered):
                return gathered
            self._discard(gathered)
        return None

    def _drop_prefetched(self, chain: Chain | None = None, used: Gatherable | None = None) -> None:
        """Drop gathers that nobody came for, except those that ``chain`` still expects, and those that came with what
        is ``used`` now: of its own lane alone, unless that is the outermost one. Other ranks of another mesh may use
        something else now."""
        expected: Counter[int] = Counter()
        if chain is not None:
            expected.update(chain.plan.uses[position] for positions in chain.expected() for position in positions)
        if used is not None:
            expected.update(other.index for other in used.companions)
        for target in self.gatherables:
            if used is not None and used.lane not in (0, target.lane):
                continue
            while len(target.pending) > expected[target.index]:
                self._gaps.add(target.lane)  # for the pass, if any, that this one interrupts
                self._discard(target.pending.pop())

    def drop_prefetched_of(self, params: Sequence[ManagedParam]) -> None:
        """Their shards are about to be freed: nothing may read them any more."""
        for param in params:
            for target in param.gatherables if isinstance(param, ShardedWeight) else ():
                while target.pending:
                    self._gaps.add(target.lane)
                    self._discard(target.pending.pop())

    def _discard(self, gathered: Gathered) -> None:
        # Its memory must not be reused, nor the shard be written, while the gather still runs.
        self.comm.wait_to_drop(gathered.done, gathered.buffer)
        self._free(gathered)

    def _turning_point(self, entry: Entry | None) -> tuple[Plan, Plan, tuple[int, ...]]:
        """The plans of a forward of ``entry`` and of its backward, and the weights that are last in one and first in
        the other, as far as the ranks of their mesh use weights alike: ``keep_last`` alone says whether they are kept.
        """
        forward, backward = (self._chain(ChainKey(entry, True, is_backward)).plan for is_backward in (False, True))
        first = ((lane, backward.first(lane)) for lane in backward.lanes)
        turning = tuple(use for lane, use in first if use is not None and use == forward.last(lane))
        return forward, backward, turning

    def kept_until_backward(self, entry: Entry | None) -> tuple[int, ...]:
        """What the policy keeps from a forward of ``entry`` to its backward, beside what the user has said of single
        weights and the weight at the turning point."""
        if not self.schedule.keep_nbytes:
            return ()
        forward, backward, turning = self._turning_point(entry)
        sizes = [0] * len(self.gatherables)
        for target in self.gatherables:
            weight = target.weight
            if weight.flags.reshard_after_forward and weight.fixed is None and target.index not in turning:
                sizes[target.index] = target.kept_nbytes
        lanes = [target.lane for target in self.gatherables]
        return choose_kept(forward, backward, sizes, lanes, self.schedule.keep_nbytes)

    def kept_from_forward(self, entry: Entry | None) -> frozenset[int]:
        """All that is kept from a forward of ``entry`` to its backward, for reports."""
        _, _, turning = self._turning_point(entry)
        asked = (
            target.index
            for target in self.gatherables
            if target.weight.is_pinned
            or (not target.weight.flags.reshard_after_forward and target.weight.for_backward is target)
        )
        last = turning if self.schedule.keep_last else ()
        return frozenset((*self.kept_until_backward(entry), *last, *asked))

    def _stays(self, target: Gatherable) -> bool:
        """Whether a policy keeps the weight after each of its uses in this pass."""
        weight = target.weight
        if weight.is_pinned:
            return True
        if weight.fixed is not None:
            return False  # see [Note: fixed buffers]
        if self._is_in_backward:
            return not weight.flags.reshard_after_backward
        if target.index in self._kept_until_backward:
            return True
        return not weight.flags.reshard_after_forward and weight.for_backward is target

    def _is_kept_after_use(self, target: Gatherable) -> bool:
        if self._stays(target):
            return True
        if self._is_in_backward or target.weight.fixed is not None or not self.schedule.keep_last:
            return False
        # The last weight of the forward is the first of backward: to free it between the two puts a gather that
        # nothing hides at the turning point.
        chain = self._forward_chain
        is_last = chain is not None and chain is self._differentiable_chain and chain.is_at_end(target.lane)
        if not is_last:
            return False
        first = self._backward_plan().first(target.lane)
        return first == target.index or any(first == other.index for other in target.companions)

    def _backward_plan(self) -> Plan:
        """That of the backward which follows the present forward."""
        return self._chain(ChainKey(self._forward_entry, True, True)).plan

    def _end_keeps(self) -> None:
        """A weight is kept from a forward to its backward at most, unless the user asks for more: between passes shards
        are also written to in ways that leave no trace (``.data``, foreach functions, ``dcp.load``)."""
        for target in self.gatherables:
            weight = target.weight
            is_lasting = weight.is_pinned or not weight.flags.reshard_after_backward
            if target.kept is not None and (weight.is_cut_again or not is_lasting):
                self._drop_kept(target)

    def _take_kept(self, target: Gatherable) -> Gathered | None:
        kept, target.kept = target.kept, None
        if kept is None or target.weight.is_fresh(kept):
            return kept
        self._discard(kept)
        return None

    def gather_kept(self, weight: ShardedWeight) -> None:
        """Gather a weight ahead of any use, for ``unshard``."""
        self.ensure_initialized()
        if weight.live is None and (weight.kept is None or not weight.is_fresh(weight.kept)):
            self.drop_kept(weight)
            weight.follow(weight.sites[0])
            weight.check_readable()
            self.comm.begin_pass(weight.groups)
            weight.kept = self._take_prefetched(weight) or self._gather([weight])[0]

    def wait_kept(self, weight: ShardedWeight) -> None:
        if weight.kept is not None:
            self.comm.wait(weight.kept.done)

    def drop_kept(self, weight: ShardedWeight) -> None:
        """Keep nothing that was made of a shard."""
        for target in weight.gatherables:
            self._drop_kept(target)
        weight.edition += 1
        if weight.wire is not None:
            weight.wire.forget()

    def _drop_kept(self, target: Gatherable) -> None:
        kept, target.kept = target.kept, None
        if kept is not None:
            self._discard(kept)
