"""Names the weights at which ranks have parted, after a collective of gloo has failed because of it.

Gloo ends the process of a rank that receives more than it expects, without an error in Python. The others get a broken
connection. So a rank whose use of a weight is not the planned one writes it into the job's store before it launches the
gather. A rank whose collective fails reads there what its peers have written, and compares it with its own uses.
Nothing is written while passes go as planned.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Iterable, Sequence

import torch.distributed as dist

from .. import _torch_compat as compat
from .._howto import see
from .members import Members
from .passes import Chain

_MOST_WRITTEN = 8  # uses of one pass that has a plan; each costs a message to the store
_NUM_PASSES = 4  # that are remembered: what was launched ahead fails in a later pass


class _Pass:
    """A forward or backward, and the plan that it follows."""

    def __init__(self, number: int, chain: Chain) -> None:
        self.number, self.chain = number, chain
        self.planned = chain.plan.uses
        self.lines: list[str] = []  # what was written
        self.last_written = -1
        self._uses: tuple[int, ...] | None = None  # once it has ended

    def end(self) -> None:
        self._uses = self.chain.plan.uses

    @property
    def uses(self) -> Sequence[int]:
        """Its uses, as far as it is."""
        return self.chain.observed if self._uses is None else self._uses


class PartedRanks:
    """What this rank uses against its plan, for its peers, and what they have written."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._passes: deque[_Pass] = deque(maxlen=_NUM_PASSES)
        self._num_passes = 0
        self._stores: list[tuple[compat.Store, list[int]]] = []  # with the peers, as global ranks, that share it

    def _watch(self) -> None:
        """From now on, write for the other ranks of the weights' meshes."""
        me, weights = dist.get_rank(), self._members.weights
        title = f"{weights[0].fqn} {len(weights)}" if weights else ""  # tells models on one mesh apart
        for mesh in {weight.mesh for weight in weights}:
            group = mesh.get_group(mesh.ndim - 1)
            peers = [rank for rank in dist.get_process_group_ranks(group) if rank != me]
            if peers and dist.get_backend(group) == "gloo":
                store = compat.PrefixStore(f"dtensor_gtp parted {title}", compat.store_of(group))
                store.delete_key(str(me))  # of an earlier model of this process
                self._stores.append((store, peers))

    def begin(self, chain: Chain) -> None:
        """A pass begins."""
        if self._passes:
            self._passes[-1].end()
        else:
            self._watch()
        self._num_passes += 1
        self._passes.append(_Pass(self._num_passes, chain))

    def note(self, chain: Chain, use: int, position: int) -> None:
        """Call before anything is launched for a use, the one at ``position`` of a pass, that was not planned so."""
        if not self._stores or not self._passes:
            return
        running = self._passes[-1]
        if running.chain is not chain or running.last_written >= position:
            return
        if running.planned and len(running.lines) >= _MOST_WRITTEN:
            return
        running.lines.append(json.dumps([running.number, position, self._name_of(use)]))
        running.last_written = position
        try:
            for store, _ in self._stores:
                store.set(str(dist.get_rank()), "\n".join(line for each in self._passes for line in each.lines))
        except RuntimeError:  # the job's store is gone with its rank: there is nobody to tell
            self._stores.clear()

    def explain(self, error: RuntimeError) -> RuntimeError:
        """An error that says where ranks have parted, or ``error`` itself if they have not as far as one knows."""
        if not self._stores or not self._passes:
            return error
        parted = self._find()
        if parted is None:
            error.add_note(
                "A collective of weights or gradients failed. If no other rank raised another error, the ranks use "
                f"different weights: DTENSOR_GTP_DEBUG=order names them. {see('ranks_diverge')}"
            )
            return error
        return RuntimeError(
            f"The ranks of one mesh use different weights ({parted}), so their collectives do not fit together. If "
            "another rank raised an error of its own, that is the cause. Else: all ranks must use the same weights in "
            "the same order: a branch that depends on a rank's data or random numbers must not decide whether a layer "
            f"runs. {see('ranks_diverge')}"
        )

    def _find(self) -> str | None:
        """The first use in which two ranks differ."""
        me = dist.get_rank()
        written = {peer: _written_by(peer, store) for store, peers in self._stores for peer in peers}
        for each in self._passes:
            of_peers = {peer: notes.get(each.number, {}) for peer, notes in written.items()}
            own = _read(each.lines).get(each.number, {})
            for position in sorted({*own, *(number for notes in of_peers.values() for number in notes)}):
                mine = self._name_at(each, position)
                for peer, notes in of_peers.items():
                    other = notes.get(position)
                    if other is None and not any(number < position for number in notes):
                        other = self._planned_at(each, position)  # it has gone by the plan so far
                    if mine is not None and other is not None and mine != other:
                        return f"as use {position + 1} of a pass, rank {me} has {mine}, rank {peer} has {other}"
        return None

    def _name_of(self, use: int) -> str:
        return self._members.gatherables[use].weight.fqn

    def _name_at(self, each: _Pass, position: int) -> str | None:
        """What this rank has used, or None if it has not come so far."""
        if position < len(each.uses):
            return self._name_of(each.uses[position])
        own = _read(each.lines).get(each.number, {})  # among them the use that waits
        return own.get(position, None if each is self._passes[-1] else "none")

    def _planned_at(self, each: _Pass, position: int) -> str | None:
        if not each.planned:
            return None
        return self._name_of(each.planned[position]) if position < len(each.planned) else "none"


def _written_by(rank: int, store: compat.Store) -> dict[int, dict[int, str]]:
    try:
        if not store.check([str(rank)]):
            return {}
        return _read(store.get(str(rank)).decode().splitlines())
    except RuntimeError:  # the store is gone with its rank
        return {}


def _read(lines: Iterable[str]) -> dict[int, dict[int, str]]:
    """Names of weights, by the number of a pass and the position in it."""
    passes: dict[int, dict[int, str]] = {}
    for line in lines:
        number, position, name = json.loads(line)
        passes.setdefault(number, {})[position] = name
    return passes
