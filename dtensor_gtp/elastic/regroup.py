"""The ranks that are left find each other again, in the processes that they are.

What tells that a rank is gone is a collective that raises: because a connection broke or the time limit of the process
group passed. Whoever sees that comes here. Each rank writes its name into a store that no rank hosts (the agent of
``torchrun`` does, or a file system); when all have come, or the time of grace is over, the first one that sees so
writes down who is there. All go by that list. So also a rank that hangs is left behind, even if it wakes up later: then
it finds that it is not on the list.
"""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist

from .. import _torch_compat as compat
from .replicas import Place, ReplicaLayout

_POLL_SECONDS = 0.05


@dataclass(frozen=True)
class Survivors:
    """Who is left, in new ranks.

    Args:
        rank: This process's rank from now on.
        replicas: For ``nonuniform_mesh(replicas=...)``: the ranks that are left of each replica; an empty one is gone.
        dead: The ranks that are gone, as they were counted before, and where they stood.
    """

    rank: int
    replicas: tuple[tuple[int, ...], ...]
    dead: dict[int, Place]

    @property
    def num_ranks(self) -> int:
        return sum(map(len, self.replicas))

    def __str__(self) -> str:
        lost = ", ".join(
            f"rank {rank} (replica {place.replica}, gtp {place.gtp}, tp {place.tp})"
            for rank, place in self.dead.items()
        )
        return f"{self.num_ranks} ranks are left, without {lost or 'any loss'}"


def regroup(
    layout: ReplicaLayout,
    rank: int,
    store: compat.Store,
    *,
    generation: int,
    grace: timedelta,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> Survivors:
    """Leave the process groups of a job that lost ranks, and make one of those that are left.

    Call it on each rank on which a collective raised, after :func:`hold_state`. All process groups of before are
    destroyed. Meshes and sharded modules of before
    are of no use afterwards: build them anew on ``nonuniform_mesh(replicas=survivors.replicas)``.

    Args:
        layout: The layout of before, ``mesh.layout``.
        rank: This process's rank in it.
        store: A store that outlives the ranks, e.g. ``dist.TCPStore`` at the address of torchrun's agent.
        generation: How often there was a failure before, counted alike on all ranks.
        grace: How long to wait for ranks that do not come. Several times the time limit of the process group: a rank
            without a connection to those that are gone notices only then, and may have more than one collective in
            flight. Who comes later is left behind.
        backend: For ``init_process_group``; the one of before by default.
        timeout: For ``init_process_group``.

    Raises:
        RuntimeError: The others went on without this rank.
    """
    backend = backend or dist.get_backend()
    shared = compat.PrefixStore(f"dtensor_gtp_regroup_{generation}", store)
    alive = agree_on_survivors(layout.num_ranks, rank, shared, grace)
    if rank not in alive:
        raise RuntimeError(
            f"rank {rank} came to regroup after the {grace.total_seconds():g} seconds of grace: ranks {alive} went on "
            "without it. End this process; it may rejoin at the next restart."
        )
    # After the list is written: to end collectives with ranks that are gone may take as long as their time limit.
    compat.leave_process_groups()
    dist.init_process_group(
        backend,
        store=compat.PrefixStore("group", shared),
        rank=alive.index(rank),
        world_size=len(alive),
        timeout=timeout,
    )
    return survivors_of(layout, rank, alive)


def agree_on_survivors(num_ranks: int, rank: int, store: compat.Store, grace: timedelta) -> list[int]:
    """The ranks that are left, ascending; the same list on all who ask."""
    store.set(f"alive/{rank}", "1")
    end = time.monotonic() + grace.total_seconds()
    names = [f"alive/{other}" for other in range(num_ranks)]
    while time.monotonic() < end and not store.check(names) and not store.check(["members"]):
        time.sleep(_POLL_SECONDS)
    present = [other for other in range(num_ranks) if store.check([names[other]])]
    # Whoever is first decides: the others find its list there.
    agreed = store.compare_set("members", "", json.dumps(present))
    members: list[int] = json.loads(agreed)
    return members


def survivors_of(layout: ReplicaLayout, rank: int, alive: list[int]) -> Survivors:
    """Count ``alive`` (ascending) anew and put each rank into the replica that it was in."""
    new_rank = {old: new for new, old in enumerate(alive)}
    replicas = tuple(tuple(new_rank[r] for r in replica.ranks if r in new_rank) for replica in layout.replicas)
    dead = {r: layout.places[r] for r in sorted(layout.places) if r not in new_rank}
    return Survivors(new_rank[rank], replicas, dead)


__all__ = ["Survivors", "agree_on_survivors", "regroup", "survivors_of"]
