"""Times in which elastic training waits while the test does not."""

from __future__ import annotations

import math
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any
from unittest import mock

from dtensor_gtp.elastic import clock

# How often who waits looks for what others may have done: events and stores do not know this clock.
_LOOK_SECONDS = 0.005
# Ends the wait of a test that hangs.
HANG_SECONDS = 300


def is_watch(thread: threading.Thread) -> bool:
    return thread.name == "dtensor_gtp watch"


class PackageClock(ABC):
    """What may take the place of the package's clock."""

    def patched(self) -> Any:
        """``with`` it, or from its ``start()`` on, it is the clock of the package."""
        names = ("now", "sleep", "wait", "wait_for_key")
        return mock.patch.multiple(clock, **{name: getattr(self, name) for name in names})

    @abstractmethod
    def now(self) -> float: ...

    @abstractmethod
    def wait_for(self, is_there: Callable[[], bool], seconds: float = math.inf) -> bool:
        """Until ``is_there()`` or the time is over; whether it is there."""

    def sleep(self, seconds: float) -> None:
        self.wait_for(lambda: False, seconds)

    def wait(self, event: threading.Event, seconds: float) -> bool:
        return self.wait_for(event.is_set, seconds)

    def wait_for_key(self, store: Any, name: str, seconds: float) -> None:
        self.wait_for(lambda: store.check([name]), seconds)


class SimulatedClock(PackageClock):
    """Time that passes when every thread waits for it, and then at once, up to the first whose wait is over.

    The threads are that of the test, those that :meth:`run` starts, and those of watches. So however late the machine
    runs a thread, no time passes for the others meanwhile. Of those whose waits are over at the same time, watches come
    first.
    """

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._now = 0.0
        self._threads = {threading.current_thread()}
        # Of each thread that waits: until when, and for what.
        self._waits: dict[threading.Thread, tuple[float, Callable[[], bool]]] = {}

    def now(self) -> float:
        return self._now

    def run(self, *jobs: Callable[[], None]) -> None:
        """Each job in a thread, to the end of all."""
        threads = [threading.Thread(target=job, daemon=True) for job in jobs]
        self._threads |= set(threads)
        for thread in threads:
            thread.start()
        # This thread does not wait for time: without it the others do.
        self._threads.discard(threading.current_thread())
        for thread in threads:
            thread.join(HANG_SECONDS)
            assert not thread.is_alive(), "a thread hangs"
        self._threads.add(threading.current_thread())

    def wait_for(self, is_there: Callable[[], bool], seconds: float = math.inf) -> bool:
        me = threading.current_thread()
        with self._changed:
            end = self._now + seconds
            self._waits[me] = (end, is_there)
            while not is_there() and not (self._now >= end and self._is_next(me)):
                if all(map(self._is_waiting, self._participants())):
                    self._now = min(end for end, _ in self._waits.values())
                    self._changed.notify_all()
                else:
                    self._changed.wait(_LOOK_SECONDS)
            del self._waits[me]
            return is_there()

    def _participants(self) -> list[threading.Thread]:
        return [thread for thread in threading.enumerate() if thread in self._threads or is_watch(thread)]

    def _is_next(self, thread: threading.Thread) -> bool:
        return is_watch(thread) or all(self._is_waiting(t) for t in self._participants() if is_watch(t))

    def _is_waiting(self, thread: threading.Thread) -> bool:
        if thread not in self._waits:
            return False
        end, is_there = self._waits[thread]
        return self._now < end and not is_there()
