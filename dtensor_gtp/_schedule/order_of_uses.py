"""The order in which the weights of a pass are used: what was seen last time, and where this time stands."""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Container, Sequence
from typing import NamedTuple

import torch.nn as nn

from .._comm.debug import format_nbytes
from .order_of_gathers import Launch, Plan, Traits, Window


class Entry(NamedTuple):
    """What code outside of the sharded modules calls: an outermost module, or a method of it beside its forward."""

    module: nn.Module
    method: str = "forward"


class ChainKey(NamedTuple):
    """Which order of uses: that of one entry's forward or backward; stages of a pipeline may share a runtime. The entry
    is None in a backward that no module's output announced."""

    entry: Entry | None
    is_grad_enabled: bool
    is_backward: bool = False


_PLAN_WIDTH = 120  # columns of a printed plan


class Chain:
    """Order of uses of one kind of pass: what was seen last time, and where this time stands.

    Args:
        window: How far to look ahead.
        traits: Gives what a plan must know of each weight, by index.
    """

    def __init__(self, window: Window, traits: Callable[[], Sequence[Traits]]) -> None:
        self.window = window
        self.plan = Plan()
        self.num_deviations = 0
        self._traits = traits
        self._observed: list[int] = []
        self._cursors: dict[int, int] = {}  # by lane
        self._step: int | None = 0  # of the plan, at the last use that it expected

    def begin(self) -> None:
        """Start a pass."""
        self._observed = []
        self._cursors = {}
        self._step = 0

    def advance(self, use: int, lane: int = 0) -> bool:
        """Record a use; returns whether the plan expected it now, in its lane."""
        self._observed.append(use)
        plan, cursor = self.plan, self._cursors.get(lane, 0)
        uses = plan.uses_of.get(lane, ())
        if cursor < len(uses) and uses[cursor] == use:
            self._cursors[lane] = cursor + 1
            self._step = plan.lanes[lane][cursor] + 1
            return True
        self.num_deviations += 1
        self._step = None
        # Uses of the plan in between, if it is found, did not happen this time.
        if use in uses[cursor:]:
            self._cursors[lane] = uses.index(use, cursor) + 1
        return False

    def due(self) -> tuple[Launch, ...]:
        """What is to be launched after the last use, if the plan expected it and all that was due before has been."""
        return () if self._step is None else self.plan.launches[self._step]

    def expected(self, lanes: Container[int] | None = None) -> list[tuple[int, ...]]:
        """All that should be in memory or in flight for uses to come, as positions, as launched together; of some
        lanes, or of all."""
        return self.plan.window(self._cursors, lanes)

    def num_expected(self, use: int, position: int) -> int:
        """How many of the uses to come, up to ``position``, are ``use``."""
        lane, number = self.plan.place(position)
        return self.plan.uses_of[lane][self.plan.num_past(lane, self._cursors) : number + 1].count(use)

    def is_at_end(self, lane: int = 0) -> bool:
        """Whether the plan has uses of a lane, and expects none of it or of the outermost one any more in this pass."""
        lanes, cursors = self.plan.lanes, self._cursors
        if lane not in lanes or cursors.get(lane, 0) != len(lanes[lane]):
            return False
        return lane == 0 or cursors.get(0, 0) == len(lanes.get(0, ()))

    def end(self) -> None:
        """The pass is complete: what was seen is the plan of the next one."""
        if tuple(self._observed) != self.plan.uses:
            self.plan = Plan(self._observed, self._traits(), self.window)
        self.begin()

    def cancel(self) -> None:
        """The pass broke off (an exception): keep the plan."""
        self.begin()


def format_plan(name: str, chain: Chain, names: Sequence[str]) -> str:
    """The plan as text: one line a use, with the gathers that are launched when it has begun, ``+`` between those that
    travel together.

    Args:
        name: Heading.
        chain: Whose plan.
        names: Fully qualified parameter names, by index.
    """
    plan, traits = chain.plan, chain._traits()
    lines = [f"{name}: {len(plan.uses)} uses, {chain.window}"]
    for step, launches in enumerate(plan.launches):
        texts = []
        for _, positions in launches:
            members = [plan.uses[position] for position in positions]
            nbytes = sum(traits[member].nbytes for member in members)
            texts.append(f"{' + '.join(names[member] for member in members)} ({format_nbytes(nbytes)})")
        use = f"use {names[plan.uses[step - 1]]}" if step else "begin"
        launched = f"gather {', '.join(texts)}" if texts else ""
        if step and chain.window.depth == 0:
            launched = f"gather {names[plan.uses[step - 1]]}"
        if step or launched:
            # Small weights may all travel together: their names take several lines.
            lines += textwrap.wrap(
                f"  {use:<44} {launched}", _PLAN_WIDTH, subsequent_indent=" " * 54, break_long_words=False
            )
    return "\n".join(lines)
