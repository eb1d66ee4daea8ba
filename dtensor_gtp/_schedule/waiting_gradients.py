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

# Bytes of a gradient of a group from which it travels without a copy. Qwen3-MoE (0.4 and 0.2 GB in each
# block) took 78.9 ms with copies and 77.0 without, Llama (0.1 GB) 64.7 and 64.5 (2 x H200).
_NOT_PACKED = 128 << 20
T = TypeVar("T")


def travels_as_it_is(nbytes: int) -> bool:
    """Whether a group sends a gradient of so many bytes itself, not packed with the small ones."""
    return nbytes >= _NOT_PACKED


def may_wait(nbytes: int, limit: int) -> bool:
    """Whether a gradient of so many bytes, not of a group, waits for others to travel with."""
    return nbytes < limit


class Together(Generic[T]):
    """The gradients of one lane in one backward, see [Note: which gradients travel together]. Those of groups may join
    each other, and so may all others: only those of groups are packed."""

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self.waiting: list[T] = []
        self._nbytes = 0  # of those that wait
        self._launched_nbytes = 0  # of groups
        self._are_groups = False  # what waits

    def _limit_of(self, is_group: bool) -> int:
        """Bytes of the next launch."""
        if is_group:
            return min(self._limit, max(self._launched_nbytes // 2, QUICK_NBYTES))
        return self._limit

    def may_wait(self, nbytes: int, *, is_group: bool) -> bool:
        """Whether a gradient of so many bytes waits for others to travel with."""
        if is_group:  # it is many weights already, so a second one of its size has to fit
            return 2 * nbytes <= self._limit_of(is_group)
        return may_wait(nbytes, self._limit)

    def takes(self, nbytes: int, *, is_group: bool) -> bool:
        """Whether a gradient may join those that wait."""
        fits = self._nbytes + nbytes <= self._limit_of(is_group)
        return fits and is_group == self._are_groups and self.may_wait(nbytes, is_group=is_group)

    def add(self, gradient: T, nbytes: int, *, is_group: bool) -> None:
        """A gradient waits, with those that ``takes`` it or alone."""
        self.waiting.append(gradient)
        self._nbytes += nbytes
        self._are_groups = is_group

    def alone(self, gradient: T, nbytes: int, *, is_group: bool) -> list[T]:
        """What is launched with a gradient that may not wait."""
        self._launched_nbytes += nbytes * is_group
        return [gradient]

    def flush(self) -> list[T]:
        """What waits is launched."""
        waiting = self.waiting
        self._launched_nbytes += self._nbytes * self._are_groups
        self.waiting = []
        self._nbytes = 0
        return waiting

    def submit(self, gradient: T, nbytes: int, *, is_group: bool) -> list[list[T]]:
        """What a gradient launches: those that wait and do not take it along, and itself if it travels alone."""
        launches: list[list[T]] = []
        if self.waiting and not self.takes(nbytes, is_group=is_group):
            launches.append(self.flush())
        if self.may_wait(nbytes, is_group=is_group):
            self.add(gradient, nbytes, is_group=is_group)
        else:
            launches.append(self.alone(gradient, nbytes, is_group=is_group))
        return launches
