"""Which gradients wait for others, as plain data. No torch in here.

[Note: which gradients travel together]
A gradient below the limit waits for others. Those that wait are launched when the next one does not
fit, or may not join them. A backward begins with all activations in memory, so launches of groups
begin small: each has at most half of the bytes that were launched before, or what takes no longer
than the launch. What blocks have freed by then makes up for its buffers (wav2vec2-large took 1.05
times the memory of ``fully_shard`` without that rule).
"""

from __future__ import annotations

from typing import Generic, TypeVar

from .plans import QUICK_NBYTES

T = TypeVar("T")


def may_wait(nbytes: int, limit: int) -> bool:
    """Whether a gradient of so many bytes waits for others to travel with."""
    return nbytes < limit


def group_may_wait(nbytes: int, limit: int) -> bool:
    """Whether the gradients of a group wait: it is many weights already, so a second one of its size has to fit."""
    return fits(nbytes, nbytes, limit)


def limit_of_groups(limit: int, launched_nbytes: int) -> int:
    """Bytes of the next launch of groups, after launches of so many bytes in this backward."""
    return min(limit, max(launched_nbytes // 2, QUICK_NBYTES))


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
        self._launched_nbytes = 0  # of groups
        self._are_groups = False  # what waits

    def submit(self, gradient: T, nbytes: int, *, is_group: bool) -> list[list[T]]:
        """What a gradient launches: those that wait and do not take it along, and itself if it travels alone."""
        launches: list[list[T]] = []
        joins = is_group == self._are_groups and fits(self._nbytes, nbytes, self._limit_of(is_group))
        if not (joins and self._may_wait(nbytes, is_group)):
            launches = self.flush()
        self._are_groups = is_group
        self.waiting.append(gradient)
        self._nbytes += nbytes
        if not self._may_wait(nbytes, is_group):
            launches += self.flush()
        return launches

    def _limit_of(self, is_group: bool) -> int:
        if is_group:
            return limit_of_groups(self._limit, self._launched_nbytes)
        return self._limit

    def _may_wait(self, nbytes: int, is_group: bool) -> bool:
        if is_group:
            return group_may_wait(nbytes, self._limit_of(is_group))
        return may_wait(nbytes, self._limit)

    def flush(self) -> list[list[T]]:
        """What waits is launched: backward ends."""
        waiting = self.waiting
        self.waiting = []
        self._launched_nbytes += self._nbytes * self._are_groups
        self._nbytes = 0
        if not waiting:
            return []
        return [waiting]
