"""The passes of one runtime (forward, backward) and what is gathered in them."""

from __future__ import annotations

from collections.abc import Sequence

from .._comm.collectives import Groups
from .._comm.context import CommContext
from .._comm.debug import DebugFlags
from .._params.sharded_weight import Gatherable, ShardedWeight
from ..policy import SchedulePolicy
from .gradient_protocols import BlockRecording
from .order_of_gathers import Plan, Traits, Window
from .order_of_uses import Chain, ChainKey, Entry


class Passes:
    """Which pass runs, and the order of uses in each kind of pass.

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
        self._is_in_backward = False
        self._forward_chain: Chain | None = None
        self._backward_chain = Chain(self._window, self._traits)  # until the first backward

    def _add_gatherables(self, weights: Sequence[ShardedWeight]) -> None:
        """Take over the weights of one ``gtp_shard`` call."""
        self._num_calls += 1
        for weight in weights:
            for target in weight.gatherables:
                target.index, target.call = len(self.gatherables), self._num_calls
                self.gatherables.append(target)

    def _number_lanes(self) -> None:
        """Give the mesh of each gatherable a number, 0 for the mesh of the outermost call."""
        lanes: dict[Groups, int] = {}
        for target in reversed(self.gatherables):  # those of the outermost call come last
            target.lane = lanes.setdefault(target.weight.groups, len(lanes))

    def _traits(self) -> list[Traits]:
        """What plans must know of each gatherable. The same on all ranks of its mesh."""
        return [
            Traits(t.nbytes, t.lane, t.call, t.companions[0].index if t.companions else -1) for t in self.gatherables
        ]

    def _chain(self, entry: Entry | None, *, is_backward: bool, is_grad_enabled: bool = True) -> Chain:
        key = ChainKey(entry, is_grad_enabled, is_backward)
        if key not in self.chains:
            self.chains[key] = Chain(self._window, self._traits)
        return self.chains[key]

    def _turning_point(self, entry: Entry | None) -> tuple[Plan, Plan, tuple[int, ...]]:
        """The plans of a forward of ``entry`` and of its backward; and the weights that are last in the former and
        first in the latter, on all ranks of their mesh. ``keep_last`` alone decides whether those are kept."""
        forward, backward = (self._chain(entry, is_backward=is_backward).plan for is_backward in (False, True))
        first = ((lane, backward.first(lane)) for lane in backward.lanes)
        turning = tuple(use for lane, use in first if use is not None and use == forward.last(lane))
        return forward, backward, turning
