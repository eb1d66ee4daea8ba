"""A clock that runs what is timed, and says fixed times: no test of calibration reads real ones."""

from __future__ import annotations

import torch

from dtensor_gtp.planner.clock import Clock, Work


class FixedClock(Clock):
    """Each measurement takes a little longer than the one before."""

    def __init__(self) -> None:
        self.device = torch.device("cpu")
        self._seconds = 1e-4

    def time(self, work: Work, calls: int = 1, *, is_sustained: bool = False) -> float:
        work()
        self._seconds *= 1.01
        return self._seconds

    def time_host(self, work: Work) -> float:
        return self.time(work)

    def time_with(self, work: Work, calls: int, other: Work, other_calls: int, *, joins: bool) -> float | None:
        other()
        return 1.5 * calls * self.time(work)
