"""The time of a job whose ranks are killed or stopped. The test's process gives it, in ticks, to the job's processes.

A tick is over when every process that is alive has done what it does at that time: its watch has beaten. So a rank that
a busy machine runs late is never silent in this time, and one that is gone is found after as many ticks as the limit
has, which may take less than that limit.
"""

from __future__ import annotations

import contextlib
import math
import os
import socket
import threading
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection, Pipe, wait

from clock_common import PackageClock, is_watch

from dtensor_gtp.elastic import RankWatch

# Beats are a whole number of ticks apart. In the job's seconds.
TICK = 0.25
# Between two ticks, in real seconds: they are not to take a processor of their own. Nothing else depends on it.
_PACE = 0.01
_STOPS, _DONE = "stops", "done"


class JobClock(PackageClock):
    """The time of one of the job's processes. Of those whose waits are over at the same time, watches come first.

    Args:
        pacemaker: The process's end of its connection with :class:`Pacemaker`.
    """

    def __init__(self, pacemaker: Connection) -> None:
        self._pacemaker, self._sending = pacemaker, threading.Lock()
        self._changed = threading.Condition()
        self._now = self._now_of_watches = 0.0
        # Until when the threads of watches wait.
        self._watches: dict[threading.Thread, float] = {}
        threading.Thread(target=self._run, name="ticks", daemon=True).start()

    def now(self) -> float:
        return self._now_of_watches if is_watch(threading.current_thread()) else self._now

    def wait_for(self, is_there: Callable[[], bool], seconds: float = math.inf) -> bool:
        """``is_there`` is asked by the thread that waits, once a tick."""
        me = threading.current_thread()
        end = self.now() + seconds
        while not is_there() and self.now() < end:
            with self._changed:
                last = self.now()
                if is_watch(me):
                    self._watches[me] = end
                    self._changed.notify_all()
                while self.now() == last:
                    self._changed.wait()
        with self._changed:
            self._watches.pop(me, None)
        return is_there()

    def announce_stop(self) -> None:
        """Of this process: nobody is to wait for it."""
        self._send(_STOPS)

    def _run(self) -> None:
        with contextlib.suppress(OSError, EOFError):  # the test is at its end
            while True:
                now = self._pacemaker.recv()
                with self._changed:
                    self._now_of_watches = now
                    self._changed.notify_all()
                    while not self._have_watches_beaten():
                        self._changed.wait(_PACE)  # the end of a thread is told to nobody
                    self._now = now
                    self._changed.notify_all()
                self._send(_DONE)

    def _have_watches_beaten(self) -> bool:
        return all(self._watches.get(t, -1.0) > self._now_of_watches for t in threading.enumerate() if is_watch(t))

    def _send(self, what: str) -> None:
        with self._sending:
            self._pacemaker.send(what)


class Pacemaker:
    """Gives the processes of a job their time, from a thread of the test's process, until :meth:`stop`."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._now = 0.0
        self._living: set[Connection] = set()
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="pacemaker", daemon=True)
        self._thread.start()

    def connect(self) -> tuple[Connection, Connection]:
        """For a new process: what :meth:`add` takes, and the end that the process gets and nobody else keeps."""
        mine, theirs = Pipe()
        return mine, theirs

    def add(self, connection: Connection) -> None:
        """A process that has started, or goes on after it was stopped: from now on no time passes without it."""
        with self._changed:
            self._living.add(connection)

    def sleep(self, seconds: float) -> None:
        """Wait until so much of the job's time has passed. None passes where no process is left."""
        with self._changed:
            end = self._now + seconds
            self._changed.wait_for(lambda: self._now >= end or not self._living or self._is_over.is_set())

    def stop(self) -> None:
        self._is_over.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over.wait(_PACE):
            with self._changed:
                living = set(self._living)
            if living:
                self._tick(living)

    def _tick(self, living: set[Connection]) -> None:
        now, left, busy = self._now + TICK, set(), set()
        for connection in living:
            try:
                connection.send(now)
                busy.add(connection)
            except OSError:  # it has ended
                left.add(connection)
        while busy and not self._is_over.is_set():
            for connection in wait(list(busy), 1.0):  # else `stop` would not be seen
                assert isinstance(connection, Connection)
                busy.discard(connection)
                try:
                    if connection.recv() == _STOPS:
                        left.add(connection)
                except (EOFError, OSError):
                    left.add(connection)
        with self._changed:
            self._now = now
            self._living -= left
            self._changed.notify_all()


@contextlib.contextmanager
def ends_collectives(job_clock: JobClock, watch: RankWatch, limit: float, store_port: int) -> Iterator[None]:
    """What a time limit of gloo's collectives would do, in the job's time: when it has passed since ranks of the job
    are known to be lost, collectives of this process in the body end with an error.

    gloo measures with the machine's clock. A limit that a busy machine keeps would be long, and waited for in full.
    """
    is_over, lock = threading.Event(), threading.Lock()
    listener = watch._listener
    assert listener is not None

    def run() -> None:
        job_clock.wait_for(lambda: is_over.is_set() or listener.is_lost.is_set())
        job_clock.wait(is_over, limit)
        with lock:
            if not is_over.is_set():
                _close_connections(store_port)

    threading.Thread(target=run, name="time limit", daemon=True).start()
    try:
        yield
    finally:
        with lock:
            is_over.set()


def _close_connections(but: int) -> None:
    """All of TCP of this process that do not lead to port ``but``."""
    for name in os.listdir("/dev/fd"):
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.getpeername()[1] != but:
                connection.shutdown(socket.SHUT_RDWR)
