"""The prefetch plan, as plain data.

A *use* is one consumption of a weight and is named by the weight's index. A chain records the uses of one pass in the
order in which they happen, and takes them as the plan of the next pass: after each use it says which ones are expected
next. The order is re-checked at every use. A pass that deviates is never wrong, only slower: the window of expected
uses moves to where the plan meets reality again, or closes until it does.

There is one chain for each kind of pass: the forward of each outermost module, with and without gradients, and the
backward. Recomputation in backward (activation checkpointing) is part of the backward chain, in the order in which the
backward really interleaves it.

No torch in here.
"""

from __future__ import annotations

from collections.abc import Sequence


class Chain:
    """Order of uses of one kind of pass: what was seen last time, and where this time stands.

    Args:
        depth: Number of uses to look ahead.
    """

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self.plan: tuple[int, ...] = ()
        self.num_deviations = 0
        self._observed: list[int] = []
        self._cursor = 0

    def begin(self) -> Sequence[int]:
        """Start a pass; returns the uses expected first."""
        self._observed = []
        self._cursor = 0
        return self.window()

    def advance(self, use: int) -> Sequence[int]:
        """Record a use; returns the uses expected next, at most ``depth``."""
        self._observed.append(use)
        if self._cursor < len(self.plan) and self.plan[self._cursor] == use:
            self._cursor += 1
            return self.window()
        self.num_deviations += 1
        try:
            # Uses of the plan in between did not happen this time.
            self._cursor = self.plan.index(use, self._cursor) + 1
        except ValueError:
            return ()
        return self.window()

    def window(self) -> Sequence[int]:
        return self.plan[self._cursor : self._cursor + self.depth]

    @property
    def is_at_end(self) -> bool:
        """Whether the plan expects no further use in this pass."""
        return bool(self.plan) and self._cursor == len(self.plan)

    def end(self) -> None:
        """The pass is complete: what was seen is the plan of the next one."""
        self.plan = tuple(self._observed)
        self._observed = []
        self._cursor = 0

    def cancel(self) -> None:
        """The pass broke off (an exception): keep the plan."""
        self._observed = []
        self._cursor = 0


def format_plan(name: str, plan: Sequence[int], names: Sequence[str], depth: int) -> str:
    """The plan as text: one line a use, with the uses whose gather it launches.

    Args:
        name: Heading.
        plan: Uses in order, as indices into ``names``.
        names: Fully qualified parameter names.
        depth: Prefetch depth.
    """
    lines = [f"{name}: {len(plan)} uses, prefetch depth {depth}"]
    if plan and depth:
        lines.append(f"  begin                      gather {', '.join(names[i] for i in plan[:depth])}")
    for position, use in enumerate(plan):
        # Using the weight at `position` moves the window by one, so exactly one gather enters it.
        ahead = position + depth
        launched = f"gather {names[plan[ahead]]}" if depth and ahead < len(plan) else ""
        if depth == 0:
            launched = f"gather {names[use]}"
        lines.append(f"  use {names[use]:<40} {launched}".rstrip())
    return "\n".join(lines)
