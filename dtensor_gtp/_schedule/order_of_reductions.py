"""Which gradients travel in one reduce-scatter, as plain arithmetic. No torch in here.

A gradient below the limit waits for others. Those that wait are launched when the next one does not fit, or may not
join them.
"""

from __future__ import annotations


def may_wait(nbytes: int, limit: int) -> bool:
    """Whether a gradient of so many bytes waits for others to travel with."""
    return nbytes < limit


def fits(waiting_nbytes: int, nbytes: int, limit: int) -> bool:
    """Whether a gradient joins those that wait."""
    return waiting_nbytes + nbytes <= limit
