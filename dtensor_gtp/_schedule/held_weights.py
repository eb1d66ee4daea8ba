"""How many bytes of gathered weights a pass holds, by its plan. No torch in here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from .order_of_gathers import Plan


class Held(NamedTuple):
    """Bytes of full weights that are in memory or on their way.

    Args:
        during: At each use: the weight in use, those that are gathered ahead, and those that are kept from forward to
            backward.
        between: The same before each use and after the last one.
    """

    during: tuple[int, ...]
    between: tuple[int, ...]


def held_nbytes(plan: Plan, kept: AbstractSet[int], nbytes: Sequence[int], *, is_backward: bool) -> Held:
    """What a pass holds. ``kept`` are the weights that stay from forward to backward; ``nbytes`` is by weight index."""
    reasons: Counter[int] = Counter()  # by weight: how many gathers ahead are for it, and whether it is kept
    during, between = [], []
    ahead: set[int] = set()  # positions whose gathers have been launched
    used: set[int] = set()
    total = 0

    def change(index: int, number: int) -> None:
        nonlocal total
        was_held = reasons[index] > 0
        reasons[index] += number
        total += nbytes[index] * ((reasons[index] > 0) - was_held)

    for index in kept if is_backward else ():
        change(index, 1)
    for step, launches in enumerate(plan.launches):
        if step:
            index = plan.uses[step - 1]
            change(index, -(step - 1 in ahead))
            if index in kept and index not in used:
                change(index, -1 if is_backward else 1)
            used.add(index)
        for position in (position for launch in launches for position in launch.positions):
            ahead.add(position)
            change(plan.uses[position], 1)
        between.append(total)
        if step:
            during.append(total if reasons[index] else total + nbytes[index])
    return Held(tuple(during), tuple(between))
