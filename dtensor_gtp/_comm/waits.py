"""How long compute waits for collectives: what of communication is exposed.

On a GPU two events stand around each wait of the compute stream. The time between them is what the stream stood still,
because it did nothing else in between. On a CPU the host waits, and its clock is read.
"""

from __future__ import annotations

import time

import torch


class Waits:
    """The waits of a device. Nothing is measured unless ``is_on``: the events of a wait take the host microseconds."""

    def __init__(self, device: torch.device) -> None:
        self.is_on = False
        self._device = device
        self._seconds = 0.0
        self._events: list[tuple[torch.Event, torch.Event]] = []

    def begin(self, stream: torch.Stream | None) -> torch.Event | float:
        """Just before the wait of ``stream``, or of the host."""
        return time.perf_counter() if stream is None else self._recorded(stream)

    def end(self, stream: torch.Stream | None, began: torch.Event | float) -> None:
        """Just after it."""
        if isinstance(began, float):
            self._seconds += time.perf_counter() - began
        elif stream is not None:
            self._events.append((began, self._recorded(stream)))

    def read(self) -> float:
        """Milliseconds since the last call. The host waits for the last of these waits."""
        if self._events:
            self._events[-1][1].synchronize()
        milliseconds = self._seconds * 1e3 + sum(begin.elapsed_time(end) for begin, end in self._events)
        self._seconds = 0.0
        self._events.clear()
        return milliseconds

    def _recorded(self, stream: torch.Stream) -> torch.Event:
        event = torch.Event(self._device, enable_timing=True)
        stream.record_event(event)
        return event
