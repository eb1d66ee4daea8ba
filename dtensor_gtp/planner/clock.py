"""Times of repeated work on one device: of a CPU by the clock, of a GPU by its events.

On a GPU the work is queued behind GEMMs that keep it busy. So the host's launches do not count, unless it is the host
that is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

Work = Callable[[], object]

_SAMPLES = 10
_SUSTAINED_SECONDS = 0.4  # clocks of a GPU settle within it
_MOST_SAMPLES = 2000
_HEAD_START_DIM = 8192


class Clock:
    """Seconds of one call, medians of several samples. This one is for CPUs, where nothing runs beside."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def time(self, work: Work, calls: int = 1, *, is_sustained: bool = False) -> float:
        """Of the device; ``calls`` are queued for one sample. ``is_sustained``: until clocks have settled, of which the
        second half counts. Each rank then has its own number of samples, so ``work`` must be no collective."""
        samples = []
        for _ in range(_SAMPLES):
            work()
            begin = time.perf_counter()
            for _ in range(calls):
                work()
            samples.append((time.perf_counter() - begin) / calls)
        return statistics.median(samples)

    def time_host(self, work: Work) -> float:
        """Until the call returns, while the device is idle."""
        return self.time(work)

    def time_with(self, work: Work, calls: int, other: Work, other_calls: int, *, joins: bool) -> float | None:
        """Of ``calls``, while ``other`` runs on another stream; with ``joins`` of all calls of both, which begin
        together. None if this device has no streams."""
        return None

    def new_stream(self) -> torch.Stream | None:
        """A further stream of the device; None if it has none."""
        return None


def clock_of(device: torch.device) -> Clock:
    return _EventClock(device) if device.type == "cuda" else Clock(device)


class _EventClock(Clock):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = torch.cuda.Stream(device)
        shape = (_HEAD_START_DIM, _HEAD_START_DIM)
        self._a, self._out = (torch.randn(shape, device=device).to(torch.bfloat16) for _ in range(2))

    def new_stream(self) -> torch.Stream | None:
        return torch.cuda.Stream(self.device)

    def _head_start(self, num: int) -> None:
        for _ in range(num):
            torch.mm(self._a, self._a, out=self._out)

    def _sample(self, work: Work, calls: int) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._head_start(2 + calls // 20)
        work()  # after a collective all ranks begin together
        begin.record()
        for _ in range(calls):
            work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3 / calls

    def time(self, work: Work, calls: int = 1, *, is_sustained: bool = False) -> float:
        work()
        torch.cuda.synchronize(self.device)
        if not is_sustained:
            return statistics.median(self._sample(work, calls) for _ in range(_SAMPLES))
        samples: list[float] = []
        stop = time.perf_counter() + _SUSTAINED_SECONDS
        while len(samples) < _SAMPLES or (len(samples) < _MOST_SAMPLES and time.perf_counter() < stop):
            samples.append(self._sample(work, calls))
        return statistics.median(samples[len(samples) // 2 :])

    def time_host(self, work: Work) -> float:
        work()
        samples = []
        for _ in range(_SAMPLES):
            torch.cuda.synchronize(self.device)
            begin = time.perf_counter()
            work()
            samples.append(time.perf_counter() - begin)
        torch.cuda.synchronize(self.device)
        return statistics.median(samples)

    def time_with(self, work: Work, calls: int, other: Work, other_calls: int, *, joins: bool) -> float | None:
        samples = []
        current = torch.cuda.current_stream(self.device)
        for _ in range(_SAMPLES):
            torch.cuda.synchronize(self.device)
            self._head_start(4 + (calls + other_calls) // 20)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if joins:
                begin.record()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(other_calls):
                    other()
            if not joins:
                work()
                begin.record()
            for _ in range(calls):
                work()
            if joins:
                current.wait_stream(self._stream)
            end.record()
            torch.cuda.synchronize(self.device)
            samples.append(float(begin.elapsed_time(end)) / 1e3)
        return statistics.median(samples)
