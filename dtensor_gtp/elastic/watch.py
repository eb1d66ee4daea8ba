"""Detects lost ranks: every rank sends heartbeats, its neighbours read them, and an error names the lost ranks.

The error of a collective does not name the lost rank, and a stopped process breaks no connection. So a thread of each
rank counts up a number in a store and reads the numbers of the next ranks in a ring. A rank whose number stands still
for longer than the limit, by the reader's clock, is lost: the reader writes it into the store, and all read it.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import re
import threading
from collections.abc import Mapping
from datetime import timedelta

import torch
import torch.distributed as dist

from .. import _torch_compat as compat
from .._comm.process_groups import job_store
from . import clock
from .regroup import GAVE_UP, POLL_SECONDS, Membership, Survivors, admit, regroup, start_regrouped, waiting_store
from .replicas import Place, ReplicaLayout

logger = logging.getLogger(__name__)

# Unless these are 0, torch's watchdog of NCCL ends a process in which a collective has failed, or sleeps for a minute
# after the failure while leaving the process group waits for it.
_WATCHDOG = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC", "TORCH_NCCL_DUMP_ON_TIMEOUT")
_BEATS_PER_LIMIT = 6  # and looks at the beats of others
_NUM_NEIGHBOURS = 2  # that each rank listens to: all ranks are found if at most so many neighbours fail together
# Values in the store: a last beat, the start of a reason, and decisions about an update.
_DONE = b"done"
_SILENT = "was silent"
_CLOSED = "has closed its watch"
_UPDATE = "update"
_KEEP = "keep"
_ENDED = "ended"  # key of the last rank that is done
# What gloo, NCCL and the stores say when a peer is gone, in errors that have no type of their own.
_PEER_LOST = re.compile("gloo|nccl|closed by peer|reset by peer|broken pipe|timed out|timeout", re.IGNORECASE)


class RanksLostError(RuntimeError):
    """Ranks are gone: those in ``lost``. Take what is left with :func:`hold_state`, then :meth:`RankWatch.regroup`.

    Example:
        >>> places = replicas_of([[0, 1], [2, 3]]).places
        >>> error = RanksLostError({3: places[3]}, {3: "was silent for 10 seconds"})
        >>> list(error.lost), str(error)
        ([3], 'rank 3 (replica 1, gtp 1, tp 0) was silent for 10 seconds. Hold ...')
    """

    def __init__(self, lost: Mapping[int, Place], reasons: Mapping[int, str]) -> None:
        self.lost = dict(lost)
        named = [f"rank {rank} ({place}) {reasons[rank]}" for rank, place in lost.items()]
        remedy = "Hold the state and regroup without the lost ranks, or restart from a checkpoint."
        super().__init__(f"{'; '.join(named)}. {remedy}")


class RankWatch:
    """Watches over the ranks of a job, from a thread of this process, until :meth:`close`.

    Make one on each rank when the process group is there. ``with watch:`` around what trains turns the error of a
    collective into one that names the ranks that are gone, and tells the others when this rank raises. It may be
    entered again after :meth:`regroup`, which renumbers ranks.

    Args:
        layout: Where each rank stands; assign ``layout`` when a mesh is made that places them otherwise.
        rank: This process's rank.
        store: A store that outlives the ranks, e.g. ``dist.TCPStore`` at the address of a launcher.
        limit: How long a rank may be silent, and its Python held: so make a tensor on the device before, because its
            start takes seconds. NCCL's collectives are aborted within this time; those of other backends end by the
            time limit of the process group.
        generation: How often there was a failure before.

    Raises:
        ValueError: ``limit`` is not positive.

    Example:
        >>> from datetime import timedelta
        >>> store = torch.distributed.TCPStore("localhost", 0, is_master=True)
        >>> watch = RankWatch(replicas_of([[0]]), 0, store, limit=timedelta(seconds=60))
        >>> with watch:
        ...     loss = nn.Linear(4, 1)(torch.randn(2, 4)).sum()
        ...     loss.backward()
        ...     watch.commit()  # all ranks have their gradients; then optimizer.step()
        >>> watch.is_alive(0)
        True
        >>> watch.close()
    """

    def __init__(
        self, layout: ReplicaLayout, rank: int, store: compat.Store, *, limit: timedelta, generation: int = 0
    ) -> None:
        self.store = store
        self.limit = limit.total_seconds()
        if self.limit <= 0:
            raise ValueError(f"RankWatch expects a positive limit, but got {limit}.")
        missing = [f"{name}=0" for name in _WATCHDOG if os.environ.get(name) != "0"]
        if missing and dist.is_initialized() and "nccl" in dist.get_backend_config():
            logger.warning(
                "RankWatch expects %s in the environment before NCCL's process group is created. Otherwise torch's "
                "watchdog may end this process, or block it for minutes, when a peer is lost.",
                ", ".join(missing),
            )
        self._interval = self.limit / _BEATS_PER_LIMIT  # seconds from beat to beat
        self._listener: _Listener | None = None  # None when closed
        self.move_to(layout, rank, generation)

    def move_to(self, layout: ReplicaLayout, rank: int, generation: int) -> None:
        """Watch over other ranks from now on.

        Args:
            layout: Where each rank stands.
            rank: This process's rank in it.
            generation: How often there was a failure before.
        """
        if self._listener is not None:
            self._listener.stop()  # its thread ends before another one begins
        self.layout = layout
        self.rank = rank
        self.generation = generation
        self._num_commits = 0
        name = f"dtensor_gtp_watch_{generation}"
        # A client for each thread: a client serves one request at a time, and some requests wait.
        self._own, store = (job_store(name, compat.clone_store(self.store)) for _ in range(2))
        self._pulse = _Pulse(self._own, self.limit)
        self._listener = _Listener(store, layout.num_ranks, rank, self.limit)
        self._is_lost = self._listener.is_lost  # kept after ``close``

    def is_alive(self, rank: int) -> bool:
        """Whether ``rank`` beat within the limit and nobody has reported it as silent or closed. For one thread.

        Args:
            rank: Of ``layout``.
        """
        # A rank that raised is reported as well, but it is alive.
        lost = f"lost/{rank}"
        if self._own.check([lost]) and self._own.get(lost).decode().startswith((_SILENT, _CLOSED)):
            return False
        return self._pulse.is_alive(rank)

    def commit(self) -> None:
        """Wait until all ranks have the gradients of this step; if a rank is lost before, raise on all of them.

        Call it on all ranks right before ``optimizer.step()``, after all that communicates (``clip_grad_norm_``), where
        the state is to be recovered from memory. A failure may leave whole gradients on some ranks only (an aborted
        collective on a device leaves garbage and no error); if those updated, only parts of two steps would be left. So
        the store holds one decision: all ranks that are left update, or none and all raise.

        Raises:
            RanksLostError: A rank is gone, and none updates.
        """
        # The listener sets ``is_lost`` before it aborts collectives. So an abort until here is seen below.
        if torch.accelerator.is_available():
            torch.accelerator.synchronize()
        own = self._own
        name = f"commit/{self._num_commits}"
        earlier = f"commit/{self._num_commits - 1}"
        self._num_commits += 1
        # A rank that knows of a loss may have incomplete gradients: it is never ready.
        if not self._is_lost.is_set() and own.add(f"{name}/ready", 1) == self.layout.num_ranks:
            own.compare_set(name, "", _UPDATE)  # unless another decision stands
            for key in (earlier, f"{earlier}/ready"):  # no rank reads them any more
                own.delete_key(key)
        while not own.check([name]):
            # A rank that is done neither beats nor is missed: without this it would be waited for without end.
            has_ended = own.check([_ENDED])
            is_hopeless = has_ended or self._is_lost.is_set()
            # ``compare_set`` returns the decision that stands, which may be to update.
            if is_hopeless and own.compare_set(name, "", _KEEP).decode() == _KEEP and has_ended:
                _report_lost(own, int(own.get(_ENDED)), _CLOSED)
            clock.wait_for_key(own, name, self._interval)  # or look again after a beat
        if own.get(name).decode() != _UPDATE:
            raise self._error()

    def regroup(
        self, *, grace: timedelta, backend: str | None = None, timeout: timedelta | None = None, num_replicas: int = 1
    ) -> Survivors:
        """:func:`regroup` of the remaining ranks and of those that wait to join; they are watched over then.

        Args:
            grace, backend, timeout, num_replicas: As for :func:`regroup`.

        Returns:
            Who is left, and this process's new rank.
        """
        return regroup(
            self.layout, self.rank, self.store, generation=self.generation, grace=grace, backend=backend,
            timeout=timeout, num_replicas=num_replicas, watch=self,
        )  # fmt: skip

    def close(self) -> None:
        """End the thread. The others no longer expect this rank to beat."""
        if self._listener is not None:
            self._listener.stop()
            self._listener = None
            self._own.set(f"beat/{self.rank}", _DONE.decode())
            self._own.set(_ENDED, str(self.rank))

    def __enter__(self) -> RankWatch:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        # No error, the end of the process, or an error that names the ranks already.
        if not isinstance(error, Exception) or isinstance(error, RanksLostError):
            return
        # A peer that is gone is found within the limit.
        if is_peer_lost(error) and clock.wait(self._is_lost, self.limit + 3 * self._interval):
            raise self._error() from error
        if not self._is_lost.is_set():  # nobody is gone: tell the others that this rank raised
            _report_lost(self._own, self.rank, f"raised {type(error).__name__}: {error}")

    def _error(self) -> RanksLostError:
        clock.sleep(2 * self._interval)  # ranks that failed at the same time are found until then
        keys = {rank: f"lost/{rank}" for rank in self.layout.places}
        reasons = {rank: self._own.get(key).decode() for rank, key in keys.items() if self._own.check([key])}
        return RanksLostError({rank: self.layout.places[rank] for rank in reasons}, reasons)


class _Listener:
    """The thread of a watch."""

    def __init__(self, store: compat.Store, num_ranks: int, rank: int, limit: float) -> None:
        self.is_lost = threading.Event()
        self._store = store
        self._limit = limit
        self._own_beat = f"beat/{rank}"
        self._neighbours = [(rank + step) % num_ranks for step in range(1, min(_NUM_NEIGHBOURS + 1, num_ranks))]
        self._pulse = _Pulse(store, limit)  # of this thread alone
        self._is_stopped = threading.Event()
        store.set(self._own_beat, "0")  # the first beat is there when the constructor returns
        self._thread = threading.Thread(target=self._run, name="dtensor_gtp watch", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._is_stopped.set()
        self._thread.join()  # it wakes up when the flag is set

    def _run(self) -> None:
        numbers = itertools.count(1)
        try:
            while not clock.wait(self._is_stopped, self._limit / _BEATS_PER_LIMIT):
                self._store.set(self._own_beat, str(next(numbers)))
                self._look()
        except RuntimeError:
            self.is_lost.set()  # the store is gone, and with it the job

    def _look(self) -> None:
        for rank in self._neighbours:
            if self._store.check([f"beat/{rank}"]) and not self._pulse.is_alive(rank):
                _report_lost(self._store, rank, f"{_SILENT} for {self._limit:g} seconds")
        if not self.is_lost.is_set() and self._store.check(["any"]):
            self.is_lost.set()  # before the abort, see ``commit``
            # Without waiting: this thread must go on beating, or the others take this rank for lost as well.
            compat.abort_device_groups(wait=False)


class _Pulse:
    """The beats of ranks as one thread sees them. ``limit``: seconds that a number may stand still."""

    def __init__(self, store: compat.Store, limit: float) -> None:
        self._store = store
        self._limit = limit
        self._seen: dict[int, tuple[bytes, float]] = {}  # of each rank the last number and when it was seen first

    def is_alive(self, rank: int) -> bool:
        """Whether the number has changed, or was seen first, within the limit."""
        key = f"beat/{rank}"
        number = b""  # empty before the first beat
        if self._store.check([key]):
            number = self._store.get(key)
        if rank not in self._seen or self._seen[rank][0] != number:
            self._seen[rank] = (number, clock.now())  # by the clock of this process
        return number == _DONE or clock.now() - self._seen[rank][1] <= self._limit


def is_peer_lost(error: BaseException) -> bool:
    """Whether a collective or a store raised ``error`` because of another rank."""
    named = isinstance(error, RuntimeError) and _PEER_LOST.search(str(error)) is not None
    return named or isinstance(error, dist.DistError)


def _report_lost(store: compat.Store, rank: int, reason: str) -> None:
    """The first reason is kept: a rank that raises and ends is silent afterwards."""
    store.compare_set(f"lost/{rank}", "", reason)
    store.set("any", "1")  # one key that all listeners look at


def join(
    store: compat.Store,
    *,
    grace: timedelta,
    backend: str,
    timeout: timedelta | None = None,
    limit: timedelta | None = None,
    num_replicas: int = 1,
) -> tuple[Survivors, RankWatch | None]:
    """Wait until the ranks of a job admit this process, e.g. that of a repaired GPU. They do so when they regroup.

    Args:
        store, backend, timeout, num_replicas: As for :func:`regroup`, which the others call.
        grace: How long to wait for that before TimeoutError, and as for :func:`regroup` if ranks are lost meanwhile.
        limit: Of the :class:`RankWatch` that is made for this rank and returned, if the others have one.

    Returns:
        Who is in the job now, with this process's rank; and the watch, None without ``limit``.

    Raises:
        TimeoutError: The job did not admit this process within ``grace``.

    Example:
        >>> from datetime import timedelta
        >>> store = torch.distributed.TCPStore("localhost", 0, is_master=True)
        >>> join(store, grace=timedelta(seconds=0.1), backend="gloo")
        Traceback (most recent call last):
        TimeoutError: no rank of the job admitted this process within 0.1 seconds.
    """
    waiting = waiting_store(store)
    ticket = waiting.add("tickets", 1)  # 1 for the first process
    name = f"admitted/{ticket}"
    end = clock.now() + grace.total_seconds()
    while not waiting.check([name]):
        # Nobody is to admit it later. ``compare_set`` keeps an admission that has just come, which the loop then sees.
        if clock.now() > end and waiting.compare_set(name, "", GAVE_UP).decode() == GAVE_UP:
            raise TimeoutError(f"no rank of the job admitted this process within {grace.total_seconds():g} seconds.")
        clock.sleep(POLL_SECONDS)
    members = Membership(*json.loads(waiting.get(name)))
    rank = len(members.alive) + members.tickets.index(ticket)
    layout = members.layout
    generation = members.generation
    # Before the start: the others hear this rank while it connects.
    if limit is None:
        watch = None
    else:
        watch = RankWatch(layout, rank, store, limit=limit, generation=generation)
    if admit(store, members) and start_regrouped(store, members, rank, backend, timeout):
        return members.seen_by(rank), watch
    # A rank of the list was lost meanwhile: join the others in the next round.
    survivors = regroup(
        layout, rank, store, generation=generation, grace=grace, backend=backend, timeout=timeout,
        num_replicas=num_replicas, watch=watch,
    )  # fmt: skip
    return survivors, watch
