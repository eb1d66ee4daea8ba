"""Gathers that are launched ahead of their uses, as the plan says."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Collection, Sequence

from .. import _torch_compat as compat
from .._comm.collectives import Groups
from .._comm.context import CommContext
from .._comm.debug import DebugFlags
from .._params import gather
from .._params.gathered import Gathered
from .._params.managed_param import ManagedParam
from .._params.pack_planes import QuantizedWire, agree_on_amax
from .._params.sharded_weight import Gatherable, ShardedWeight
from ..policy import SchedulePolicy
from .keep_and_free import KeepAndFree
from .order_of_uses import Chain

logger = logging.getLogger(__name__)


class Prefetch(KeepAndFree):
    """Launches gathers, and knows those in flight."""

    def __init__(self, comm: CommContext, schedule: SchedulePolicy, debug: DebugFlags) -> None:
        super().__init__(comm, schedule, debug)
        self._gaps: set[int] = set()  # lanes in which a gather that the plan expects is not in flight
        # Since the last forward began, by mesh: weights whose ranks have yet to agree on a statistic, and the meshes of
        # which some have agreed.
        self._disagreeing: dict[Groups, list[ShardedWeight]] = {}
        self._agreeing: set[Groups] = set()

    def _begin_chain(self, chain: Chain) -> None:
        chain.begin()
        self._fill(chain)

    def _advance(self, target: Gatherable) -> None:
        """Take note of a use, and launch the gathers that the plan has next."""
        chain = self._backward_chain if self._is_in_backward else self._forward_chain
        if chain is None:
            return
        lane = target.lane
        launches = chain.advance(target.index, lane)
        if launches is None:
            fqn = target.weight.fqn
            logger.debug("use of %s was not expected next; %d deviations so far", fqn, chain.num_deviations)
            self._drop_prefetched(chain, target)
            self._fill(chain, None if lane == 0 else (lane,))
            return
        if self._gaps:
            self._fill(chain, [gap for gap in self._gaps if lane in (0, gap)])
        for launch in launches:
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
        missing, uses = [], chain.plan.uses
        for position in positions:
            target = self.gatherables[uses[position]]
            if target.weight.is_cut_again and not target.weight.is_readable:
                self._gaps.add(target.lane)  # until an outer fully_shard has gathered it
            elif not (target.live or target.kept or target.pending) or self._is_missing(chain, target, position):
                missing.append(target)
        if missing:
            for target, gathered in zip(missing, self._gather(missing), strict=True):
                target.pending.append(gathered)

    def _is_missing(self, chain: Chain, target: Gatherable, position: int) -> bool:
        if self._stays(target):
            return target.is_absent
        available = len(target.pending) + (target.kept is not None)
        return available == 0 or available < chain.num_expected(target.index, position)

    def _gather(self, targets: Sequence[Gatherable]) -> list[Gathered]:
        """Launch one gather of present shards."""
        if not (compat.num_dispatch_modes() or self._disagreeing):
            return gather.launch(targets, self.comm)
        # Checkpoint policies ask about ops; but a recomputation may launch other gathers than the forward did.
        with compat.unseen_by_checkpoint_policies():
            self._agree(targets)
            return gather.launch(targets, self.comm)

    def _gather_now(self, target: Gatherable) -> Gathered:
        """For a use that nothing was launched for; with its companions."""
        others = [other for other in target.companions if other is not target and other.is_absent]
        others = [other for other in others if not other.weight.is_cut_again or other.weight.is_readable]
        first, *rest = self._gather([target, *others])
        for other, gathered in zip(others, rest, strict=True):
            other.pending.append(gathered)
        return first

    def _take_prefetched(self, target: Gatherable) -> Gathered | None:
        while target.pending:
            gathered = target.pending.popleft()
            if target.weight.is_fresh(gathered):
                return gathered
            self._discard(gathered)
        return None

    def _drop_prefetched(self, chain: Chain | None = None, used: Gatherable | None = None) -> None:
        """Drop gathers in flight, except those that ``chain`` still expects.

        With ``used``, the weight in use now, keep its companions as well; and leave other lanes alone unless its lane
        is the outermost one, because the other ranks of another mesh may use something else now.
        """
        expected: Counter[int] = Counter()
        if chain is not None:
            expected.update(chain.plan.uses[position] for positions in chain.expected() for position in positions)
        if used is not None:
            expected.update(other.index for other in used.companions)
        for target in self.gatherables:
            if target.pending and (used is None or used.lane in (0, target.lane)):
                self._drop_pending(target, expected[target.index])

    def drop_prefetched_of(self, params: Sequence[ManagedParam]) -> None:
        """Drop gathers in flight of shards that are about to be freed."""
        for param in params:
            for target in param.gatherables if isinstance(param, ShardedWeight) else ():
                self._drop_pending(target, 0)

    def _drop_pending(self, target: Gatherable, num_left: int) -> None:
        while len(target.pending) > num_left:
            self._gaps.add(target.lane)  # for the pass, if any, that this one interrupts
            self._discard(target.pending.pop())

    def _begin_quantized(self, weights: Sequence[ShardedWeight]) -> None:
        """A forward begins: the ranks agree on the statistics of quantized shards that have changed.

        If all that runs on streams beside compute, they agree with the first gathers of each mesh. Otherwise they agree
        at once: later, compute or the host would wait for ranks of other meshes, whose plans gather other weights by
        then.
        """
        self._disagreeing.clear()
        self._agreeing.clear()
        now = []
        for weight in weights:
            wire = weight.wire
            if isinstance(wire, QuantizedWire) and wire.begin_forward():
                if wire.is_within_mesh and weight.groups.casts_shards:
                    self._disagreeing.setdefault(weight.groups, []).append(weight)
                else:
                    now.append(weight)
        agree_on_amax(now, self.comm)

    def _agree(self, targets: Sequence[Gatherable]) -> None:
        """Before a gather, on the stream of casts: the ranks of the mesh agree on statistics.

        Before the first gather, on those of the weights that it sends, so that it waits for no others; before the
        second one on all the rest.
        """
        groups = targets[0].weight.groups
        waiting = self._disagreeing.get(groups, [])
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
