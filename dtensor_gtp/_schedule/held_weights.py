"""How many bytes of gathered weights a pass holds, by its plan. No torch in here."""

from __future__ import annotations

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
    during, between = [], []
    for cursor in range(len(plan.uses) + 1):
        used = frozenset(plan.uses[:cursor])
        held = kept - used if is_backward else kept & used
        launches = plan.window(plan.cursors(cursor))
        ahead = held | {plan.uses[position] for positions in launches for position in positions}
        between.append(sum(nbytes[index] for index in ahead))
        if cursor:
            during.append(sum(nbytes[index] for index in {plan.uses[cursor - 1], *ahead}))
    return Held(tuple(during), tuple(between))
