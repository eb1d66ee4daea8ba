"""Which gradients wait for others, as plain data. No torch in here.

[Note: which gradients travel together]
A gradient below the limit waits for others. Those that wait are launched when the next one does not
fit, or may not join them.
"""

from __future__ import annotations

from typing import Generic, TypeVar

T = TypeVar("T")


def may_wait(nbytes: int, limit: int) -> bool:
    """Whether a gradient of so many bytes waits for others to travel with."""
    return nbytes < limit


def group_may_wait(nbytes: int, limit: int) -> bool:
    """Whether the gradients of a group wait: it is many weights already, so a second one of its size has to fit."""
    return fits(nbytes, nbytes, limit)


def fits(waiting_nbytes: int, nbytes: int, limit: int) -> bool:
    """Whether a gradient joins those that wait."""
    return waiting_nbytes + nbytes <= limit


class Together(Generic[T]):
    """The gradients of one lane, where all of groups may join each other, and all others, see [Note: which gradients
    travel together].

    The runtime asks the functions above: it launches those that wait before it makes the next one."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.waiting: list[T] = []
        self._nbytes = 0  # of those that wait
        self._are_groups = False  # what waits

    def submit(self, gradient: T, nbytes: int, *, is_group: bool) -> list[list[T]]:
        """What a gradient launches: those that wait and do not take it along, and itself if it travels alone."""
        may_join = may_wait
        if is_group:
            may_join = group_may_wait
        is_alone = not may_join(nbytes, self._limit)
        joins = is_group == self._are_groups and fits(self._nbytes, nbytes, self._limit)
        launches: list[list[T]] = []
        if is_alone or not joins:
            launches = self.flush()
        self._are_groups = is_group
        if is_alone:
            return [*launches, [gradient]]
        self.waiting.append(gradient)
        self._nbytes += nbytes
        return launches

    def flush(self) -> list[list[T]]:
        """What waits is launched: backward ends."""
        waiting = self.waiting
        self.waiting = []
        self._nbytes = 0
        if not waiting:
            return []
        return [waiting]
