"""The passes of one runtime: in which order each kind uses weights, which one runs, in which thread.

The order is recorded in one pass and expected in the next one of its kind, see [Note: what is gathered when].
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple, NoReturn

import torch
import torch.distributed as dist
import torch.nn as nn

from .. import _torch_compat as compat
from .._params.weight_group import GatherableGroup
from ..policy import Schedule
from .guesses import Blocks, reordered
from .held_weights import turning_point
from .members import Members
from .plans import Launch, Plan, Traits, Window

_MOST_REORDERED = 16  # times that a guess is changed: each makes a plan, and blocks may differ


class Entry(NamedTuple):
    """What code outside of the sharded modules calls: the forward of an outermost module, or
    another method of it."""

    module: nn.Module
    method: str = "forward"


class ChainKey(NamedTuple):
    """Names a kind of pass. Stages of a pipeline may share a runtime, so each entry has its own."""

    entry: Entry | None  # None for a backward that did not begin at the output of a module
    is_grad_enabled: bool
    is_backward: bool = False


class Chain:
    """The order of uses of one kind of pass: the plan of the last pass, and the uses of the current
    one. Backward includes the forwards that it recomputes (activation checkpointing)."""

    def __init__(self, window: Window, traits: Callable[[], Sequence[Traits]]) -> None:
        self.window = window
        self.plan = Plan()
        self.is_compared = False  # with those of the other ranks
        self.may_guess = True  # nothing was observed or guessed yet, see [Note: guesses]
        self._guessed: Blocks | None = None  # the plan, if it was not observed
        self._num_reordered = 0
        self.num_deviations = 0  # uses of all passes that were not expected, for logs
        self._traits = traits  # a function, since weights join and leave groups
        self.begin()

    def begin(self) -> None:
        """Start a pass. A pass that did not end (an exception) leaves the plan as it was."""
        self.observed: list[int] = []  # the uses of this pass so far
        self._cursors: dict[int, int] = {}  # how many uses of each lane happened or were left out

    def guess(self, blocks: Blocks, num_past: int = 0) -> None:
        """Expect these uses of lane 0 in a first pass, which has made the first ``num_past``."""
        self.may_guess = False
        self._guessed = blocks
        self.plan = Plan([use for block in blocks for use in block], self._traits(), self.window)
        self._cursors = {0: num_past}

    def advance(self, use: int, lane: int = 0) -> Sequence[Launch] | None:
        """Record a use, and follow the plan in its lane: ranks may mix lanes in other orders. Gives the launches that
        follow the use in the plan, or None if the plan did not expect it."""
        self.observed.append(use)
        cursors = self._cursors
        cursor = cursors.get(lane, 0)
        uses = self.plan.uses_of.get(lane, ())
        if cursor < len(uses) and uses[cursor] == use:
            cursors[lane] = cursor + 1
            return self.plan.launches[self.plan.lanes[lane][cursor] + 1]
        self.num_deviations += 1
        if use in uses[cursor:]:
            position = uses.index(use, cursor)
            if not (self._guessed and self._reorder(self._guessed, cursor, position)):
                cursors[lane] = position + 1  # this pass has left out the uses before it
        elif self._guessed and use in uses:  # behind its block
            self.guess([])  # a wrong guess: this pass goes on without a plan
        return None

    def _reorder(self, guessed: Blocks, cursor: int, position: int) -> bool:
        """Change a guess to what its block has shown, unless the use is in another block."""
        blocks = reordered(guessed, cursor, position)
        if blocks is not None:
            self._num_reordered += 1
            if self._num_reordered > _MOST_REORDERED:
                blocks = []  # no guess any more
            self.guess(blocks, cursor + 1)
        return blocks is not None

    def expected(self, lanes: Container[int] | None = None) -> list[tuple[int, ...]]:
        """Positions of later uses, in these lanes or all, whose weights should already be in memory
        or in flight. One tuple a launch."""
        return self.plan.window(self._cursors, lanes)

    def num_expected(self, use: int, position: int) -> int:
        """How many of the uses to come, up to ``position``, are ``use`` and need a gather."""
        plan = self.plan
        lane, number = plan.places[position]
        to_come = plan.lanes[lane][plan.num_past(lane, self._cursors) : number + 1]
        return sum(plan.uses[each] == use and each not in plan.served for each in to_come)

    def next_use(self, use: int, lane: int) -> int | None:
        """The position of the next use of a weight that is used several times in this pass."""
        return self.plan.next_use(use, lane, self._cursors)

    def stays(self, use: int, lane: int) -> bool:
        """Whether the plan has a weight that was used stay in memory until its next use."""
        return self.next_use(use, lane) in self.plan.served

    def is_at_end(self, lane: int = 0) -> bool:
        """Whether all planned uses of a lane and of lane 0 have happened. False if the plan does
        not have the lane."""
        lanes = self.plan.lanes
        if lane not in lanes:
            return False
        cursors = self._cursors
        return all(cursors.get(key, 0) == len(lanes.get(key, ())) for key in {0, lane})

    def sizes(self) -> list[int]:
        """Bytes of each gathered weight, by index."""
        return [traits.nbytes for traits in self._traits()]

    def plan_again(self) -> None:
        """Other weights may stay between two uses from now on."""
        self.plan = Plan(self.plan.uses, self._traits(), self.window)

    def end(self) -> None:
        """The pass is complete: its uses are the plan of the next one."""
        observed = tuple(self.observed)
        if observed != self.plan.uses:  # else the plan stays, with all that was computed for it
            self.plan = Plan(observed, self._traits(), self.window)
        self.may_guess = False
        self._guessed = None  # an observed plan is never reordered
        self.begin()


def window_of(schedule: Schedule, *, is_backward: bool) -> Window:
    return Window(
        depth=schedule.prefetch_depth,
        nbytes=schedule.prefetch_nbytes,
        together_nbytes=schedule.coalesce_nbytes,
        num_blocks=schedule.expert_blocks_ahead,
        is_backward=is_backward,
    )


class Passes:
    """Knows the order of uses in each kind of pass."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self.chains: dict[ChainKey, Chain] = {}
        self.is_in_backward = False  # whether a backward has begun and not ended
        self.num_backwards = 0  # that have begun
        self.forward: Chain | None = None  # of the running forward
        self.forward_of_backward: Chain | None = None  # of the running or last backward
        self.look_ahead(Schedule())  # until one is chosen

    def look_ahead(self, schedule: Schedule) -> None:
        """Let new plans gather as far ahead as ``schedule`` says."""
        self._schedule = schedule
        self.backward = Chain(window_of(schedule, is_backward=True), self._traits)  # until the first backward

    def _traits(self) -> list[Traits]:
        """Of each gatherable, for plans: the same on all ranks of its mesh."""
        traits = []
        for target in self._members.gatherables:
            bundle = -1  # none
            if target.companions:
                bundle = target.companions[0].index
            # A bundle is gathered as one.
            may_stay = bundle == -1 and target.may_stay
            is_group = isinstance(target, GatherableGroup)
            traits.append(Traits(target.nbytes, target.lane, target.call, bundle, may_stay, is_group))
        return traits

    @property
    def running(self) -> Chain | None:
        # First: a backward may recompute forwards, whose uses are in its plan.
        if self.is_in_backward:
            return self.backward
        return self.forward

    def chain(self, entry: Entry | None, *, is_backward: bool, is_grad_enabled: bool = True) -> Chain:
        key = ChainKey(entry, is_grad_enabled, is_backward)
        if key not in self.chains:
            self.chains[key] = Chain(window_of(self._schedule, is_backward=is_backward), self._traits)
        return self.chains[key]

    def turning_point(self, entry: Entry | None) -> tuple[Plan, Plan, tuple[int, ...]]:
        """The plans of a forward of ``entry`` and of its backward, and the weights that are last in
        the forward and first in the backward, on all ranks of their mesh. Only ``keep_last``
        decides whether those are kept."""
        forward = self.chain(entry, is_backward=False).plan
        backward = self.chain(entry, is_backward=True).plan
        return forward, backward, turning_point(forward, backward)

    def begin_forward(self, entry: Entry) -> Chain:
        self.forward = self.chain(entry, is_backward=False, is_grad_enabled=torch.is_grad_enabled())
        return self.forward

    def end_forward(self) -> None:
        self.forward = None

    def begin_backward(self, entry: Entry | None) -> None:
        self.is_in_backward = True
        self.num_backwards += 1
        self.backward = self.chain(entry, is_backward=True)
        self.forward_of_backward = None
        if entry is not None:
            self.forward_of_backward = self.chain(entry, is_backward=False)

    def end_backward(self) -> None:
        self.is_in_backward = False


class OneThread:
    """Refuses a second thread: two passes at a time would take each other's weights and gradients."""

    def __init__(self) -> None:
        # Idents of threads; 0: none.
        self._in_frame = 0  # that is in a frame now
        self._of_forward = 0  # that began the last one
        self._of_backward = 0

    def enter(self) -> None:
        """Before a frame."""
        thread = threading.get_ident()
        # In a backward, the threads of autograd recompute forwards for the one that waits for them.
        if self._in_frame != thread and compat.current_graph_task_id() == -1:
            if self._in_frame:  # another thread is
                _refuse("forward")
            self._in_frame = thread

    def leave(self) -> None:
        """After the outermost frame."""
        self._in_frame = 0

    def begin_forward(self, is_backward_running: bool) -> None:
        thread = threading.get_ident()
        if is_backward_running and self._of_forward != thread:
            _refuse("forward")
        self._of_forward = thread

    def begin_backward(self, is_running: bool) -> None:
        """A backward begins; it may be running already. On a CPU autograd runs in the thread that
        calls it."""
        thread = threading.get_ident()
        if self._in_frame not in (0, thread) or (is_running and self._of_backward != thread):
            _refuse("backward")
        self._of_backward = thread


def _refuse(what: str) -> NoReturn:
    raise RuntimeError(
        f"Thread '{threading.current_thread().name}' began a {what} of a module that gtp_shard has sharded while "
        f"another thread is in a forward or backward of it (rank {dist.get_rank()}). Run one pass at a time: let "
        "one thread train the module, or give each a module of its own."
    )
