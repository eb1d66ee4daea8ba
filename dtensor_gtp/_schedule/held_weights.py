"""What a pass holds of gathered weights, by its plan: which stay from forward to backward, and how many
bytes that makes. No torch in here.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from collections.abc import Set as AbstractSet
from typing import NamedTuple

from .plans import Plan


def turning_point(forward: Plan, backward: Plan) -> tuple[int, ...]:
    """The weights that are last in a forward and first in its backward, on all ranks of their mesh."""
    first = ((lane, backward.first(lane)) for lane in backward.lanes)
    return tuple(use for lane, use in first if use is not None and use == forward.last(lane))


def choose_kept(
    forward: Plan, backward: Plan, sizes: Sequence[int], lanes: Sequence[int], budget: int
) -> tuple[int, ...]:
    """Which weights stay gathered from a forward to its backward, in the order in which backward uses them.

    Those that backward uses first are kept, up to ``budget`` bytes: they are kept for the shortest
    time, and the least compute hides their gathers. The ranks of a mesh must make the same choice,
    so lane 0 chooses first, and the other lanes share the rest in equal parts. ``sizes`` and
    ``lanes`` are by weight index; a size of 0 is never kept."""
    candidates = set(forward.uses)  # nothing else can be kept from it
    order = [use for use in dict.fromkeys(backward.uses) if use in candidates]
    kept = set()

    def choose(lane: int, left: int) -> int:
        for use in order:
            if lanes[use] == lane and 0 < sizes[use] <= left:
                left -= sizes[use]
                kept.add(use)
        return left

    left = choose(0, budget)
    others = {lane for lane in lanes if lane != 0}
    for lane in others:
        choose(lane, left // len(others))
    return tuple(use for use in order if use in kept)


class Held(NamedTuple):
    """Bytes of full weights that are in memory or on their way.

    Args:
        during: At each use: the weight in use, those that are gathered ahead, and those that are
            kept from forward to backward.
        between: The same before each use and after the last one.
    """

    during: tuple[int, ...]
    between: tuple[int, ...]


def held_nbytes(plan: Plan, kept: AbstractSet[int], nbytes: Sequence[int], *, is_backward: bool) -> Held:
    """What a pass holds. ``kept``: weights that stay from forward to backward. ``nbytes``: by weight index."""
    reasons: Counter[int] = Counter()  # by weight: how many gathers ahead are for it, and whether it is kept
    during = []
    between = []
    ahead: set[int] = set()  # positions whose gathers have been launched
    used: set[int] = set()
    total = 0

    def change(index: int, number: int) -> None:
        nonlocal total
        was_held = reasons[index] > 0
        reasons[index] += number
        total += nbytes[index] * ((reasons[index] > 0) - was_held)

    # In a forward the first use begins to keep a weight. In a backward it ends that.
    at_first_use = 1
    if is_backward:
        at_first_use = -1
        for index in kept:
            change(index, 1)
    for step, launches in enumerate(plan.launches):
        if step:
            index = plan.uses[step - 1]
            change(index, -(step - 1 in ahead))  # it takes the gather that was launched for it
            if step - 1 in plan.stays:  # and leaves it to the next use
                ahead.add(plan.stays[step - 1])
                change(index, 1)
            if index in kept and index not in used:
                change(index, at_first_use)
            used.add(index)
        for launch in launches:
            ahead.update(launch.positions)
            for position in launch.positions:
                change(plan.uses[position], 1)
        between.append(total)
        if step:
            in_use = 0
            if reasons[index] == 0:
                in_use = nbytes[index]  # unless it counts already
            during.append(total + in_use)
    return Held(tuple(during), tuple(between))
