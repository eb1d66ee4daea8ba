"""The ranks that are left find each other again, in the processes that they are, and take in those that wait to join.

Each rank that noticed a failure writes its name into a store that no rank hosts. The first one that sees all names of
those that are alive writes down who goes on; all go by that list. So also a rank that hangs is left behind, even if it
wakes up later: then it finds that it is not on the list.

Who is alive tell the beats of a :class:`RankWatch`. Without one only time can tell: that of grace. Ranks come late for
two reasons: gloo raises on a rank that has no connection to the one that died only when the time limit of the
collective has passed, and with several collectives in flight once for each.
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
from . import clock
from .replicas import Place, ReplicaLayout, format_place, replicas_of

POLL_SECONDS = 0.05


_LOG = logging.getLogger(__name__)


@dataclass(frozen=True)
class Survivors:
    """Who is left, in new ranks.

    Args:
        rank: This process's rank from now on.
        replicas: For ``nonuniform_mesh(replicas=...)``: the ranks of each replica; an empty one is gone.
        dead: The ranks that are gone, as they were counted before, and where they stood.
        joined: New ranks that were not part of the job before: they hold nothing.
        generation: For the next :func:`regroup`.
    """

    rank: int
    replicas: tuple[tuple[int, ...], ...]
    dead: dict[int, Place]
    joined: tuple[int, ...] = ()
    generation: int = 0

    @property
    def num_ranks(self) -> int:
        return sum(map(len, self.replicas))

    def __str__(self) -> str:
        lost = ", ".join(format_place(rank, place) for rank, place in self.dead.items())
        new = f", with new ranks {list(self.joined)}" if self.joined else ""
        return f"{self.num_ranks} ranks are left, without {lost or 'any loss'}{new}"


class Membership(NamedTuple):
    """What the first rank that sees everybody writes down, and all go by.

    Args:
        alive: Ranks that go on, as they were counted before, ascending: their places here are their new ranks.
        tickets: Of processes that join: they come after those.
        replicas: New ranks of each replica.
        tp: Largest size of the tp axis, for the layout that they make.
        dead: (rank, replica, gtp, tp) as counted before.
        generation: Of the next regroup.
    """

    alive: tuple[int, ...]
    tickets: tuple[int, ...]
    replicas: tuple[tuple[int, ...], ...]
    tp: int
    dead: tuple[tuple[int, int, int, int], ...]
    generation: int

    @property
    def num_ranks(self) -> int:
        return len(self.alive) + len(self.tickets)

    @property
    def layout(self) -> ReplicaLayout:
        return replicas_of(self.replicas, tp=self.tp)

    def seen_by(self, rank: int) -> Survivors:
        dead = {old: Place(*place) for old, *place in self.dead}
        joined = tuple(range(len(self.alive), self.num_ranks))
        return Survivors(rank, self.replicas, dead, joined, self.generation)


class Watch(Protocol):
    """Tells who is alive: a ``RankWatch``."""

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
    """Leave the process groups of a job that lost ranks, and make one of those that are left and of those that join.

    Call it on each rank on which a collective raised, after :func:`hold_state`; or on all ranks between two steps, to
    take in those that wait (:func:`num_waiting`). All process groups of before are destroyed. Meshes and sharded
    modules of before are of no use afterwards: build them anew on ``nonuniform_mesh(replicas=survivors.replicas)``.
    Ranks that are lost while the new group is made are left out in turn.

    Args:
        layout: The layout of before, ``mesh.layout``.
        rank: This process's rank in it.
        store: A store that outlives the ranks, e.g. ``dist.TCPStore`` at the address of a launcher.
        generation: 0 at first, then ``survivors.generation``.
        grace: How long to wait at most for ranks that do not come. Without ``watch`` that is how long one waits for
            those that are gone: several times the time limit of the process group, because a rank without a connection
            to them notices only then, and may have more than one collective in flight. Who comes later is left behind.
        backend: For ``init_process_group``; the one of before by default.
        timeout: For ``init_process_group``.
        num_replicas: Replicas to have, if ranks join: a joining rank goes to the smallest one, an empty one included.
        watch: Tells who is alive; only those are waited for. Watches over the new ranks afterwards.

    Raises:
        RuntimeError: The others went on without this rank.
    """
    backend = backend or dist.get_backend()
    while True:
        shared = _shared(store, generation)
        decide = _Decision(layout, store, num_replicas, generation)
        is_alive = None if watch is None else watch.is_alive
        members = agree_on_survivors(layout.num_ranks, rank, shared, grace, is_alive=is_alive, decide=decide)
        if rank not in members.alive:
            raise RuntimeError(
                f"rank {rank} came to regroup when ranks {list(members.alive)} had gone on without it, after "
                f"{grace.total_seconds():g} seconds of grace or because it was silent for too long. End this process; "
                "it may join again as a new one."
            )
        _admit(store, members)
        rank = members.alive.index(rank)
        # After the list is written: to end collectives with ranks that are gone may take as long as their time limit.
        if dist.is_initialized():
            compat.leave_process_groups()
        layout, generation = members.layout, members.generation
        if watch is not None:
            watch.move_to(layout, rank, generation)
        if start_regrouped(store, members, rank, backend, timeout):
            return members.seen_by(rank)


def num_waiting(store: compat.Store) -> int:
    """Processes that wait in :func:`join`. Ranks may see another number at another time: let one decide for all."""
    return len(_waiting_tickets(waiting_store(store)))


def agree_on_survivors(
    num_ranks: int,
    rank: int,
    store: compat.Store,
    grace: timedelta,
    *,
    is_alive: Callable[[int], bool] | None = None,
    decide: Callable[[Sequence[int]], Membership],
) -> Membership:
    """What the first rank writes down that sees everybody who is alive; the same on all who ask."""
    store.set(f"alive/{rank}", "1")
    end = clock.now() + grace.total_seconds()
    names = [f"alive/{other}" for other in range(num_ranks)]
    while clock.now() < end and not store.check(["members"]) and not store.check(names):
        # A rank that has come and died since is found when the new group is made.
        absent = [other for other in range(num_ranks) if not store.check([names[other]])]
        if is_alive is not None:
            alive = [is_alive(other) for other in absent]  # of each: to look is to begin to listen
            if not any(alive):
                break
        clock.sleep(POLL_SECONDS)
    if not store.check(["members"]):
        present = [other for other in range(num_ranks) if store.check([names[other]])]
        # Whoever is first decides: the others find its list there.
        store.compare_set("members", "", json.dumps(decide(present)))
    return parse_members(store.get("members").decode())


class _Decision:
    """From the ranks that have come to who goes on as what."""

    def __init__(self, layout: ReplicaLayout, store: compat.Store, num_replicas: int, generation: int) -> None:
        self._layout, self._store = layout, store
        self._num_replicas, self._generation = num_replicas, generation

    def __call__(self, alive: Sequence[int]) -> Membership:
        return members_of(
            self._layout, alive, _waiting_tickets(waiting_store(self._store)), self._num_replicas, self._generation + 1
        )


def members_of(
    layout: ReplicaLayout, alive: Sequence[int], tickets: Sequence[int] = (), num_replicas: int = 1, generation: int = 1
) -> Membership:
    """Count ``alive`` (ascending) anew and put each rank into the replica that it was in; those that join go, one after
    the other, to the smallest replica."""
    new_rank = {old: new for new, old in enumerate(alive)}
    replicas = [[new_rank[r] for r in replica.ranks if r in new_rank] for replica in layout.replicas]
    replicas += [[] for _ in range(num_replicas - len(replicas))] if tickets else []
    for position in range(len(tickets)):
        min(replicas, key=len).append(len(alive) + position)
    dead = tuple((r, *_fields(layout.places[r])) for r in sorted(layout.places) if r not in new_rank)
    tp = max(replica.tp for replica in layout.replicas)
    return Membership(tuple(alive), tuple(tickets), tuple(map(tuple, replicas)), tp, dead, generation)


def _fields(place: Place) -> tuple[int, int, int]:
    return place.replica, place.gtp, place.tp


def parse_members(text: str) -> Membership:
    alive, tickets, replicas, tp, dead, generation = json.loads(text)
    return Membership(
        tuple(alive), tuple(tickets), tuple(map(tuple, replicas)), tp, tuple(map(tuple, dead)), generation
    )


def start_regrouped(
    store: compat.Store, members: Membership, rank: int, backend: str, timeout: timedelta | None
) -> bool:
    """Make the default group; False if some of its ranks are lost by now."""
    compat.restart_group_names()
    try:
        dist.init_process_group(
            backend,
            store=compat.PrefixStore("group", _shared(store, members.generation)),
            rank=rank,
            world_size=members.num_ranks,
            timeout=timeout,
        )
    except RuntimeError as error:
        _LOG.warning("rank %d of %d could not connect to the others: %s", rank, members.num_ranks, error)
        if dist.is_initialized():
            compat.leave_process_groups()
        return False
    return True


def _shared(store: compat.Store, generation: int) -> compat.Store:
    return compat.PrefixStore(f"dtensor_gtp_regroup_{generation}", store)


def waiting_store(store: compat.Store) -> compat.Store:
    return compat.PrefixStore("dtensor_gtp_join", store)


def _waiting_tickets(waiting: compat.Store) -> list[int]:
    return [t for t in range(1, waiting.add("tickets", 0) + 1) if not waiting.check([f"admitted/{t}"])]


def _admit(store: compat.Store, members: Membership) -> None:
    """By all members, alike: whoever decided may be gone."""
    for ticket in members.tickets:
        waiting_store(store).set(f"admitted/{ticket}", json.dumps(members))
