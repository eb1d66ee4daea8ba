"""Which gradients travel in one reduce-scatter, as plain data. No torch in here.

A gradient below the limit waits for others. Those that wait are launched when the next one does not fit, or may not
join them.
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
    """The gradients of one lane that wait, where all may join each other."""

    def __init__(self, limit: int, *, of_groups: bool = False) -> None:
        self._limit = limit
        self._may_wait = group_may_wait if of_groups else may_wait
        self.waiting: list[T] = []
        self._nbytes = 0

    def submit(self, gradient: T, nbytes: int) -> list[list[T]]:
        """What a gradient launches: those that wait and do not take it along, and itself if it travels alone."""
        is_alone = not self._may_wait(nbytes, self._limit)
        launches = self.flush() if is_alone or not fits(self._nbytes, nbytes, self._limit) else []
        if is_alone:
            return [*launches, [gradient]]
        self.waiting.append(gradient)
        self._nbytes += nbytes
        return launches

    def flush(self) -> list[list[T]]:
        """What waits is launched: backward ends."""
        waiting, self.waiting, self._nbytes = self.waiting, [], 0
        return [waiting] if waiting else []
