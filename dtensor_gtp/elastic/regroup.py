"""The remaining ranks find each other again, in the same processes, and admit processes that wait to join.

Each rank that noticed a failure writes its name into a store that no rank hosts. The first rank that sees the names of
all living ranks writes the list of ranks that continue, and all follow it. A rank that hangs is not on the list when it
wakes up. A :class:`RankWatch` tells which ranks are alive; without it, ranks have a grace time to arrive.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NamedTuple, Protocol

import torch.distributed as dist

from .. import _torch_compat as compat
from .._comm.process_groups import job_store
from .._progress import Progress
from . import clock
from .replicas import Place, ReplicaLayout, replicas_of

POLL_SECONDS = 0.05
GAVE_UP = "gave up"  # what a process that waited writes instead of its admission
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Survivors:
    """Who is left, in new ranks.

    Args:
        rank: That of this process.
        replicas: For ``nonuniform_mesh(replicas=...)``; an empty one is gone.
        dead: Old ranks that are gone, and where they stood.
        joined: New ranks, which hold nothing.
        generation: For the next :func:`regroup`.

    Example:
        >>> dead = {1: replicas_of([[0, 1], [2, 3]]).places[1]}
        >>> survivors = Survivors(rank=0, replicas=((0,), (1, 2)), dead=dead, generation=1)
        >>> print(survivors)
        3 ranks are left, without rank 1 (replica 0, gtp 1, tp 0)
        >>> survivors.num_ranks
        3
    """

    rank: int
    replicas: tuple[tuple[int, ...], ...]
    dead: dict[int, Place]
    joined: tuple[int, ...] = ()
    generation: int = 0

    @property
    def num_ranks(self) -> int:
        """Ranks that are left, and those that joined."""
        return sum(map(len, self.replicas))

    def __str__(self) -> str:
        lost = ", ".join(f"rank {rank} ({place})" for rank, place in self.dead.items())
        new = ""
        if self.joined:
            new = f", with new ranks {list(self.joined)}"
        return f"{self.num_ranks} ranks are left, without {lost or 'any loss'}{new}"


class Membership(NamedTuple):
    """The list of those that go on, as it is written into the store (in JSON)."""

    alive: Sequence[int]  # as they were counted before, ascending: their positions here are their new ranks
    tickets: Sequence[int]  # of processes that join: their ranks come after those
    replicas: Sequence[Sequence[int]]  # in new ranks
    tp: int  # the largest size
    dead: Sequence[tuple[int, Place]]  # as they were counted before
    generation: int  # of the next regroup

    @property
    def layout(self) -> ReplicaLayout:
        return replicas_of(self.replicas, tp=self.tp)

    def seen_by(self, rank: int) -> Survivors:
        dead = {old: Place(*place) for old, place in self.dead}  # lists, if they come from the store
        joined = tuple(range(len(self.alive), len(self.alive) + len(self.tickets)))
        return Survivors(rank, tuple(map(tuple, self.replicas)), dead, joined, self.generation)


class Watch(Protocol):  # a ``RankWatch``
    def is_alive(self, rank: int) -> bool: ...

    def move_to(self, layout: ReplicaLayout, rank: int, generation: int) -> None: ...


def regroup(
    layout: ReplicaLayout,
    rank: int,
    store: compat.Store,
    *,
    generation: int,
    grace: timedelta,
    backend: str | None = None,
    timeout: timedelta | None = None,
    num_replicas: int = 1,
    watch: Watch | None = None,
) -> Survivors:
    """Destroy the process groups of a job that lost ranks, and create one of the remaining ranks and of those that
    join.

    Call it on each rank on which a collective raised, after :func:`hold_state`; or on all ranks between two steps, to
    take in those that wait (:func:`num_waiting`). It destroys all process groups, so build meshes and sharded modules
    again on ``nonuniform_mesh(replicas=survivors.replicas)``. Ranks that are lost meanwhile are left out in turn.

    Args:
        layout, rank: Of before: ``mesh.layout``, and this process's rank in it.
        store: A store that outlives the ranks, e.g. ``dist.TCPStore`` at the address of a launcher.
        generation: 0 at first, then ``survivors.generation``.
        grace: How long to wait at most for ranks that do not come; later ones are left behind. Without ``watch``, ranks
            that are gone are waited for that long. Then choose several times the time limit of the process group: a
            rank without a connection to them notices only then, for each collective in flight.
        backend, timeout: For ``init_process_group``; the backend of before by default.
        num_replicas: Replicas to have, if ranks join: a joining rank goes to the smallest one, an empty one included.
        watch: Tells who is alive; only those are waited for. Watches over the new ranks afterwards.

    Returns:
        Who is left, and this process's new rank.

    Raises:
        RuntimeError: The others went on without this rank.

    Example:
        >>> from datetime import timedelta
        >>> store = torch.distributed.TCPStore("localhost", 0, is_master=True)
        >>> layout = replicas_of([[0]])  # a job of one rank, which goes on alone
        >>> grace = timedelta(seconds=60)
        >>> survivors = regroup(layout, 0, store, generation=0, grace=grace, backend="gloo")
        >>> survivors.replicas, survivors.generation
        (((0,),), 1)
    """
    backend = backend or dist.get_backend()  # while there is a group to ask
    is_alive = None if watch is None else watch.is_alive
    with Progress(_LOG, f"regrouping {layout.num_ranks} ranks"):
        while True:  # until a list of ranks makes a group
            members = agree_on_survivors(layout, rank, store, grace, generation, num_replicas, is_alive)
            if rank not in members.alive:
                raise RuntimeError(
                    f"rank {rank} regrouped too late: ranks {list(members.alive)} have continued without it, after "
                    f"{grace.total_seconds():g} seconds of grace or because it sent no sign of life. End this "
                    "process; it may join again as a new one."
                )
            all_come = admit(store, members)
            rank = members.alive.index(rank)  # as the new list counts
            # After the list is written: to end collectives with ranks that are gone may take their whole time limit.
            if dist.is_initialized():
                compat.leave_process_groups()
            layout = members.layout
            generation = members.generation
            # Before the start: if ranks are lost during it, the next round asks this watch.
            if watch is not None:
                watch.move_to(layout, rank, generation)
            # Else a rank of the list is lost by now.
            if all_come and start_regrouped(store, members, rank, backend, timeout):
                return members.seen_by(rank)


def num_waiting(store: compat.Store) -> int:
    """Processes that wait in :func:`join`. The number may change between two calls: let one rank ask for all.

    Args:
        store: That of :func:`regroup` and :func:`join`.

    Returns:
        How many the next :func:`regroup` takes in.

    Example:
        >>> store = torch.distributed.TCPStore("localhost", 0, is_master=True)
        >>> num_waiting(store)
        0
    """
    return len(_waiting_tickets(store))


def agree_on_survivors(
    layout: ReplicaLayout,
    rank: int,
    store: compat.Store,
    grace: timedelta,
    generation: int,
    num_replicas: int,
    is_alive: Callable[[int], bool] | None,
) -> Membership:
    """The list that the first rank writes that sees all that are alive; the same on all ranks that ask."""
    shared = _shared(store, generation)  # each generation has its own keys
    shared.set(f"alive/{rank}", "1")
    end = clock.now() + grace.total_seconds()
    # Ends when nobody is missing, when another rank has written the list, or after the grace.
    while clock.now() < end and not shared.check(["members"]):
        # A rank that has come and died since is found when the new group is made.
        absent = [other for other in range(layout.num_ranks) if not shared.check([f"alive/{other}"])]
        # Ask about all of them: a watch listens to a rank from the first question on.
        if not (absent if is_alive is None else [other for other in absent if is_alive(other)]):
            break
        clock.sleep(POLL_SECONDS)
    if not shared.check(["members"]):
        # Asked again: ranks may have come in the meantime.
        present = [other for other in range(layout.num_ranks) if shared.check([f"alive/{other}"])]
        members = members_of(layout, present, _waiting_tickets(store), num_replicas, generation + 1)
        shared.compare_set("members", "", json.dumps(members))  # which keeps the first list
    return Membership(*json.loads(shared.get("members")))  # perhaps the list of another rank


def members_of(
    layout: ReplicaLayout, alive: Sequence[int], tickets: Sequence[int] = (), num_replicas: int = 1, generation: int = 1
) -> Membership:
    """Renumber ``alive`` (ascending) in the replicas of before. Each that joins goes to the smallest replica."""
    new_rank = {old: new for new, old in enumerate(alive)}
    replicas = [[new_rank[r] for r in replica.ranks if r in new_rank] for replica in layout.replicas]
    # Only ranks that join can fill new replicas.
    replicas += [[] for _ in range(num_replicas - len(replicas))] if tickets else []
    for position in range(len(tickets)):
        min(replicas, key=len).append(len(alive) + position)
    dead = [(rank, place) for rank, place in sorted(layout.places.items()) if rank not in new_rank]
    tp = max(replica.tp for replica in layout.replicas)
    return Membership(list(alive), tickets, replicas, tp, dead, generation)


def start_regrouped(
    store: compat.Store, members: Membership, rank: int, backend: str, timeout: timedelta | None
) -> bool:
    """Make the default group; False if some of its ranks are lost by now."""
    compat.restart_group_names()  # the name is part of addresses in the store
    store = compat.PrefixStore("group", _shared(store, members.generation))
    size = members.layout.num_ranks
    try:
        with compat.gloo_with_one_thread():  # see ``OneThreadGloo``
            dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=timeout)
    except RuntimeError as error:
        _LOG.warning("rank %d of %d could not connect to the others: %s", rank, size, error)
        if dist.is_initialized():  # torch may fail after it has made the group
            compat.leave_process_groups()
        return False
    return True


def _shared(store: compat.Store, generation: int) -> compat.Store:
    return job_store(f"dtensor_gtp_regroup_{generation}", store)


def waiting_store(store: compat.Store) -> compat.Store:
    return job_store("dtensor_gtp_join", store)


def admit(store: compat.Store, members: Membership) -> bool:
    """Tell those that join. False if one of them has given up since the list was made: the same for all that ask."""
    waiting = waiting_store(store)
    text = json.dumps(members)
    # By all members: the rank that decided may be gone. Whoever writes first is heard.
    answers = [waiting.compare_set(f"admitted/{ticket}", "", text).decode() for ticket in members.tickets]
    return GAVE_UP not in answers


def _waiting_tickets(store: compat.Store) -> list[int]:
    waiting = waiting_store(store)
    # ``add`` of 0 reads the number of tickets, which begin at 1. A process that was admitted or gave up has a key.
    return [t for t in range(1, waiting.add("tickets", 0) + 1) if not waiting.check([f"admitted/{t}"])]
