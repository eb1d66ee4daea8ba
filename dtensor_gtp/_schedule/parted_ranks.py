"""Finds ranks that use or launch other things than their peers, which no collective may notice.

[Note: marks of launches]
Ranks that use weights of one shape in different orders get parts of different weights, and no
collective fails. So in each step the all-reduce of whole parameters carries a few marks: the bits
of a digest of what this rank has launched since the last one, as 1 and -1. Where ranks differ in a
bit, the sum has a smaller absolute value than that of a bit that is always 1. The rest of the
arithmetic (scales, rounding) is the same for all marks.

[Note: uses in the store]
Gloo ends the process of a rank that receives more than it expects, without an error in Python. The
others get a broken connection. So a rank whose use of a weight is not the planned one writes it
into the job's store before it launches the gather. A rank whose collective fails reads there what
its peers have written, and compares it with its own uses. Nothing is written while passes go as
planned.
"""

from __future__ import annotations

import json
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch_compat as compat
from .._comm.agreement import by_rank, first_difference
from .._comm.collectives import Groups
from .._howto import see
from .._params.sharded_weight import Gatherable
from .members import Members
from .passes import Chain

NUM_MARKS = 25  # the first one is always 1
_NUM_NAMED = 4096  # launches that an error can name: more than a step of a large model has
_MOST_WRITTEN = 8  # uses of one pass that has a plan; each costs a message to the store
_NUM_PASSES = 4  # that are remembered: what was launched ahead fails in a later pass


@dataclass
class _Launches:
    """Of one mesh since the last comparison."""

    code: int = 0  # digest of all of them
    # What was launched for which weights and groups.
    last: deque[tuple[str, Sequence[Gatherable]]] = field(default_factory=lambda: deque(maxlen=_NUM_NAMED))


class Marks(NamedTuple):
    """Of these launches."""

    launches: _Launches
    values: Tensor  # shape (NUM_MARKS,)


class _Comparison(NamedTuple):
    """One whose result the host has not read."""

    launches: _Launches
    mesh: DeviceMesh
    groups: Groups
    sums: Tensor  # of the marks, on the host
    arrived: torch.Event | None  # when ``sums`` can be read; None if they can at once


class OrderOfLaunches:
    """What this rank has launched, and comparisons with the others, see [Note: marks of launches]."""

    def __init__(self) -> None:
        self._launches: dict[str, _Launches] = {}  # by the name of the group along gtp
        self._running: list[_Comparison] = []

    def note(self, kind: str, targets: Sequence[Gatherable]) -> None:
        """One collective for these weights or groups of one mesh is launched."""
        name = targets[0].weight.groups.scatter_name
        if (launches := self._launches.get(name)) is None:
            launches = self._launches[name] = _Launches()
        numbers = [target.number for target in targets]
        # Of numbers alone: hashes of strings differ between processes.
        launches.code = hash((launches.code, len(kind), *numbers))
        launches.last.append((kind, targets))

    def marks(self, groups: Groups, like: Tensor, dtype: torch.dtype) -> Marks | None:
        """What to send in an all-reduce in ``dtype`` over the gtp axis, as ``like``: what has been
        launched since the last call. None if the sums would be too coarse, on all ranks alike. A
        graph sends marks, too: its peers may run eagerly."""
        num_ranks = groups.scatter.size()
        launches = self._launches.pop(groups.scatter_name, None) or _Launches()  # the next call starts anew
        # Each of ``num_ranks`` additions rounds by up to ``num_ranks * eps / 2``. Together they
        # must not exceed the half of a rank by which ``check`` decides.
        if dtype.is_complex or num_ranks**2 * torch.finfo(dtype).eps > 1:
            return None
        return Marks(launches, _signs(launches.code, like))

    def compare(self, marks: Marks, sums: Tensor, mesh: DeviceMesh, groups: Groups) -> None:
        """Take the sums of ``marks`` over the gtp axis, on the current stream."""
        if type(sums) is not Tensor:
            return  # a fake one
        arrived = None
        if sums.is_cuda:
            # The host waits for this event in the next step, see ``check``.
            host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
            host.copy_(sums, non_blocking=True)
            arrived = torch.cuda.current_stream().record_event()
        else:
            host = sums.clone()  # the caller divides the memory of ``sums`` next
        self._running.append(_Comparison(marks.launches, mesh, groups, host, arrived))

    def check(self, *, is_next_step: bool) -> None:
        """Raise a RuntimeError on all ranks that have launched different collectives. On a GPU in
        the next step, so that the host does not wait. Not while a graph is recorded: it may wait
        for no event, nor free pinned memory."""
        while self._running and (is_next_step or self._running[0].arrived is None):
            compared = self._running.pop(0)  # first: one that raises is not read again
            if compared.arrived is not None:
                compared.arrived.synchronize()
            always, *bits = compared.sums.abs().tolist()
            # Half a rank, because the sums are rounded. One rank that differs takes away two.
            group = compared.groups.scatter
            if min(bits) < always * (1 - 0.5 / group.size()):
                names = []
                for kind, targets in compared.launches.last:
                    fqns = ", ".join(target.weight.fqn for target in targets)
                    names.append(f"{kind} of {fqns}")
                names.append(f"{compared.launches.code:x}")  # of those before, which have no names
                raise parted(compared.mesh, "a step", names, group)


def parted(mesh: DeviceMesh, what: str, names: Sequence[str], group: dist.ProcessGroup) -> RuntimeError:
    """The error for ranks of ``group`` that differ in what they have used or launched.
    Collective."""
    difference = first_difference(by_rank(names, [group]))
    return RuntimeError(
        f"gtp_shard expects that all ranks of mesh axes {mesh.mesh_dim_names} use the same weights "
        f"in the same order, because each use is a collective, but in {what} {difference}: ranks "
        "received parts of different weights. Run the same modules in the same order on all ranks "
        "(a rank without data on an empty input), or call set_reduce_scatter_unused_params(True) "
        f"on modules that may differ. {see('ranks_diverge')}"
    )


def _signs(code: int, like: Tensor) -> Tensor:
    """Made on the device, as a graph may record it."""
    bits = torch.arange(NUM_MARKS, device=like.device)
    code = (code % 2 ** (NUM_MARKS - 1)) << 1
    return (1 - 2 * (code >> bits & 1)).to(like.dtype)


class _Pass:
    """A forward or backward, and the plan that it follows."""

    def __init__(self, number: int, chain: Chain) -> None:
        self.number = number
        self.chain = chain
        self.planned = chain.plan.uses  # before the pass; the plan becomes its uses when it ends
        self.uses = chain.observed  # grows with the pass; the next one has a list of its own
        self.written: dict[int, str] = {}  # names of weights, by position


class PartedRanks:
    """What this rank uses against its plan, and what its peers have written, see
    [Note: uses in the store]."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self._passes: deque[_Pass] = deque(maxlen=_NUM_PASSES)
        self._num_passes = 0
        # Each with the peers that share it, as global ranks.
        self._stores: list[tuple[compat.Store, list[int]]] = []

    def _watch(self) -> None:
        """From now on, write for the other ranks of the weights' meshes."""
        me = dist.get_rank()
        weights = self._members.weights
        if not weights:
            return
        title = f"{weights[0].fqn} {len(weights)}"  # tells models on one mesh apart
        for mesh in {weight.mesh for weight in weights}:
            group = mesh.get_group(mesh.ndim - 1)
            peers = [rank for rank in dist.get_process_group_ranks(group) if rank != me]
            if peers and dist.get_backend(group) == "gloo":
                store = compat.PrefixStore(f"dtensor_gtp parted {title}", compat.store_of(group))
                store.delete_key(str(me))  # of an earlier model of this process
                self._stores.append((store, peers))

    def begin(self, chain: Chain) -> None:
        """A pass begins."""
        if not self._passes:
            self._watch()  # not earlier: now all parameters are registered
        self._num_passes += 1
        self._passes.append(_Pass(self._num_passes, chain))

    def note(self, chain: Chain, use: int, position: int) -> None:
        """Call before anything is launched for a use, the one at ``position`` of a pass, that was
        not planned so."""
        if not self._stores or not self._passes:
            return
        running = self._passes[-1]
        # ``Gathering`` may note a use twice: before its gather, and when the chain has recorded it.
        if running.chain is not chain or position <= next(reversed(running.written), -1):
            return
        # Without a plan peers know no use, so all are written.
        if running.planned and len(running.written) >= _MOST_WRITTEN:
            return
        running.written[position] = self._name_of(use)
        written = [(each.number, *note) for each in self._passes for note in each.written.items()]
        notes = json.dumps(written)
        try:
            for store, _ in self._stores:
                store.set(str(dist.get_rank()), notes)
        except RuntimeError:  # the job's store is gone with its rank: there is nobody to tell
            self._stores.clear()

    def explain(self, error: RuntimeError) -> RuntimeError:
        """An error that says where ranks have parted. ``error`` itself if they have not, as far as
        one knows."""
        if not self._stores or not self._passes:
            return error
        parted = self._find()
        if parted is None:
            error.add_note(
                "A collective of weights or gradients failed. If no other rank raised another "
                "error, the ranks use different weights: DTENSOR_GTP_DEBUG=order names them. "
                f"{see('ranks_diverge')}"
            )
            return error
        return RuntimeError(
            f"The ranks of one mesh use different weights ({parted}), so their collectives do not "
            "fit together. If another rank raised an error of its own, that is the cause. Else: "
            "all ranks must use the same weights in the same order: a branch that depends on a "
            "rank's data or random numbers must not decide whether a layer runs. "
            f"{see('ranks_diverge')}"
        )

    def _find(self) -> str | None:
        """The first use in which two ranks differ."""
        me = dist.get_rank()
        written = {peer: _written_by(peer, store) for store, peers in self._stores for peer in peers}
        for each in self._passes:
            of_peers = {peer: notes.get(each.number, {}) for peer, notes in written.items()}
            positions = set(each.written).union(*of_peers.values())
            for position in sorted(positions):
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
        if position in each.written:  # the use that waits
            return each.written[position]
        if each is self._passes[-1]:
            return None
        return "none"  # that pass has ended

    def _planned_at(self, each: _Pass, position: int) -> str | None:
        if not each.planned:
            return None
        if position >= len(each.planned):
            return "none"
        return self._name_of(each.planned[position])


def _written_by(rank: int, store: compat.Store) -> dict[int, dict[int, str]]:
    """Names of weights, by the number of a pass and the position in it."""
    passes: dict[int, dict[int, str]] = {}
    try:
        if not store.check([str(rank)]):  # ``get`` would wait for the key
            return passes
        notes = json.loads(store.get(str(rank)))
    except RuntimeError:  # the store is gone with its rank
        return passes
    for number, position, name in notes:
        passes.setdefault(number, {})[position] = name
    return passes
