"""The weights of one runtime, and the order in which each kind of pass uses them."""

from __future__ import annotations

from .. import _torch_compat as compat
from .._comm.context import CommContext
from .._comm.debug import DebugFlags
from .._comm.groups import Groups
from .._params.managed_param import ManagedParam
from .._params.sharded_weight import Gatherable, ShardedWeight
from .._params.whole_param import WholeParam
from ..policy import SchedulePolicy
from .first_forward import agree_to_begin
from .gradient_protocols import BlockRecording
from .order_of_gathers import Plan, Traits, Window
from .order_of_uses import Chain, ChainKey, Entry


class Passes:
    """The parameters, which pass runs, and the order of uses in each kind of pass."""

    is_initialized = False

    def __init__(self, comm: CommContext, schedule: SchedulePolicy, debug: DebugFlags) -> None:
        self.comm = comm
        self.schedule = schedule
        self.debug = debug
        self.weights: list[ShardedWeight] = []
        self.whole: list[WholeParam] = []
        self.gatherables: list[Gatherable] = []  # of the weights; plans name them by index
        self.chains: dict[ChainKey, Chain] = {}
        self.recording: BlockRecording | None = None  # set while a block is recorded
        self._window = Window(
            schedule.prefetch_depth, schedule.prefetch_nbytes, schedule.coalesce_nbytes, schedule.expert_blocks_ahead
        )
        self._num_calls = 0  # of ``gtp_shard``
        self._is_in_backward = False
        self._forward_chain: Chain | None = None
        self._backward_chain = Chain(self._window, self._traits)  # until the first backward

    @property
    def params(self) -> list[ManagedParam]:
        return [*self.weights, *self.whole]

    def ensure_initialized(self) -> None:
        """In the first forward, on all ranks alike: check that all ranks can run, and make the communicators."""
        if self.is_initialized:
            return
        with compat.unseen_by_checkpoint_policies():
            agree_to_begin(self.params, self.comm.device)
        for param in self.params:
            param.groups = self.comm.groups(param.mesh)
        lanes: dict[Groups, int] = {}
        for target in reversed(self.gatherables):  # the weights of the outermost call come last: they get lane 0
            target.lane = lanes.setdefault(target.weight.groups, len(lanes))
        self.is_initialized = True

    def _traits(self) -> list[Traits]:
        """Of each gatherable, for plans: the same on all ranks of its mesh."""
        return [
            Traits(t.nbytes, t.lane, t.call, t.companions[0].index if t.companions else -1) for t in self.gatherables
        ]

    def _chain(self, entry: Entry | None, *, is_backward: bool, is_grad_enabled: bool = True) -> Chain:
        key = ChainKey(entry, is_grad_enabled, is_backward)
        if key not in self.chains:
            self.chains[key] = Chain(self._window, self._traits)
        return self.chains[key]

    def _turning_point(self, entry: Entry | None) -> tuple[Plan, Plan, tuple[int, ...]]:
        """The plans of a forward of ``entry`` and of its backward, and the weights that are last in the forward and
        first in the backward, on all ranks of their mesh. Only ``keep_last`` decides whether those are kept."""
        forward, backward = (self._chain(entry, is_backward=is_backward).plan for is_backward in (False, True))
        first = ((lane, backward.first(lane)) for lane in backward.lanes)
        turning = tuple(use for lane, use in first if use is not None and use == forward.last(lane))
        return forward, backward, turning
