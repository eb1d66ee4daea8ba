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
        self.begin()

    def begin(self) -> None:
        """Start a pass."""
        # Uses so far, as long as all came as planned. From the first deviation on: which uses there were, and how many
        # of each lane.
        self._num_as_planned = 0
        self._observed: list[int] | None = None
        self._cursors_after_deviation: dict[int, int] = {}

    def advance(self, use: int, lane: int = 0) -> Sequence[Launch] | None:
        """Record a use.

        Returns:
            What is to be launched now that the plan begins with this use; None if the plan did not expect it.
        """
        number, plan = self._num_as_planned, self.plan
        if self._observed is None:
            if number < len(plan.uses) and plan.uses[number] == use:
                self._num_as_planned = number + 1
                return plan.launches[number + 1]
            self._observed = list(plan.uses[:number])
            self._cursors_after_deviation = plan.cursors(number)
        return self._advance_in_lane(self._observed, use, lane)

    def _advance_in_lane(self, observed: list[int], use: int, lane: int) -> Sequence[Launch] | None:
        """After a deviation, or in another order of lanes: the plan counts in the lane of the use alone."""
        observed.append(use)
        cursors = self._cursors_after_deviation
        uses, cursor = self.plan.uses_of.get(lane, ()), cursors.get(lane, 0)
        if cursor < len(uses) and uses[cursor] == use:
            cursors[lane] = cursor + 1
            return self.plan.launches[self.plan.lanes[lane][cursor] + 1]
        self.num_deviations += 1
        # Uses of the plan in between, if it is found, did not happen this time.
        if use in uses[cursor:]:
            cursors[lane] = uses.index(use, cursor) + 1
        return None

    @property
    def _cursors(self) -> dict[int, int]:
        """How many uses there were of each lane, or were left out."""
        return self.plan.cursors(self._num_as_planned) if self._observed is None else self._cursors_after_deviation

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
        return lane in lanes and all(cursors.get(one, 0) == len(lanes.get(one, ())) for one in {0, lane})

    def end(self) -> None:
        """The pass is complete: what was seen is the plan of the next one."""
        number, uses = self._num_as_planned, self.plan.uses
        observed = uses[:number] if self._observed is None else tuple(self._observed)
        if observed != uses:
            self.plan = Plan(observed, self._traits(), self.window)
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
