"""Whether the ranks of a mesh launch the same gathers and reductions, compared in each step without a collective.

Ranks that use weights of one shape in different orders get parts of different weights, and no collective fails. So the
all-reduce of whole parameters carries a few marks: the bits of a digest of what this rank has launched since the last
one, as 1 and -1. Where ranks differ in a bit, the sum has a smaller absolute value than that of a bit that is always 1.
The rest of the arithmetic (scales, rounding) is the same for all marks.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._comm.agreement import by_rank, first_difference
from .._comm.collectives import Groups
from .._howto import see
from .._params.sharded_weight import Gatherable

NUM_MARKS = 25  # the first one is always 1
_NUM_NAMED = 4096  # launches that an error can name: more than a step of a large model has


@dataclass
class _Launches:
    """Of one mesh since the last comparison."""

    code: int = 0
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
    arrived: torch.Event | None


class OrderOfLaunches:
    """What this rank has launched, and comparisons with the others."""

    def __init__(self) -> None:
        self._launches: dict[str, _Launches] = {}  # by the name of the group along gtp
        # The last marks, with their code: a step is like the one before.
        self._values: dict[str, tuple[int, Tensor]] = {}
        self._running: list[_Comparison] = []

    def note(self, kind: str, targets: Sequence[Gatherable]) -> None:
        """One collective for these weights or groups of one mesh is launched."""
        name = targets[0].weight.groups.scatter_name
        if (launches := self._launches.get(name)) is None:
            launches = self._launches[name] = _Launches()
        numbers = [target.number for target in targets]
        launches.code = hash((launches.code, len(kind), *numbers))  # of numbers alone: the same in each process
        launches.last.append((kind, targets))

    def marks(self, groups: Groups, like: Tensor, dtype: torch.dtype, *, is_recorded: bool) -> Marks | None:
        """What to send in an all-reduce in ``dtype`` over the gtp axis, as ``like``: what has been launched since the
        last call. None if the sums would be too coarse, on all ranks alike. A graph sends marks, too: its peers may
        run eagerly."""
        name, num_ranks = groups.scatter_name, groups.scatter.size()
        launches = self._launches.pop(name, None) or _Launches()
        if dtype.is_complex or num_ranks**2 * torch.finfo(dtype).eps > 1:
            return None
        code, values = self._values.get(name, (0, None))
        if is_recorded:  # a graph keeps addresses: it gets marks of its own
            values = _signs(launches.code, like)
        elif values is None or code != launches.code or values.dtype != like.dtype or values.device != like.device:
            values = _signs(launches.code, like)
            self._values[name] = launches.code, values
        return Marks(launches, values)

    def compare(self, marks: Marks, sums: Tensor, mesh: DeviceMesh, groups: Groups) -> None:
        """Take the sums of ``marks`` over the gtp axis, on the current stream."""
        if type(sums) is not Tensor:
            return  # a fake one
        if sums.is_cuda:
            host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True).copy_(sums, non_blocking=True)
            arrived = torch.cuda.current_stream().record_event()
            self._running.append(_Comparison(marks.launches, mesh, groups, host, arrived))
        else:
            self._running.append(_Comparison(marks.launches, mesh, groups, sums.clone(), None))

    def check(self, *, is_next_step: bool) -> None:
        """Raise a RuntimeError on all ranks that have launched different collectives. On a GPU in the next step, so
        that the host does not wait. Not while a graph is recorded: it may wait for no event, nor free pinned memory."""
        while self._running and (is_next_step or self._running[0].arrived is None):
            compared = self._running.pop(0)
            if compared.arrived is not None:
                compared.arrived.synchronize()
            always, *bits = compared.sums.abs().tolist()
            # Half a rank, because the sums are rounded. One rank that differs takes away two.
            if min(bits) < always * (1 - 0.5 / compared.groups.scatter.size()):
                last = compared.launches.last
                names = [f"{kind} of {', '.join(target.weight.fqn for target in targets)}" for kind, targets in last]
                raise parted(compared.mesh, "a step", [*names, f"{compared.launches.code:x}"], compared.groups.scatter)


def parted(mesh: DeviceMesh, what: str, names: Sequence[str], group: dist.ProcessGroup) -> RuntimeError:
    """The error for ranks of ``group`` that differ in what they have used or launched. Collective."""
    return RuntimeError(
        f"gtp_shard expects that all ranks of mesh axes {mesh.mesh_dim_names} use the same weights in the same order, "
        f"because each use is a collective, but in {what} {first_difference(by_rank(names, [group]))}: ranks received "
        "parts of different weights. Run the same modules in the same order on all ranks (a rank without data on an "
        "empty input), or call set_reduce_scatter_unused_params(True) on modules that may differ. "
        f"{see('ranks_diverge')}"
    )


def _signs(code: int, like: Tensor) -> Tensor:
    """Made on the device, as a graph may record it."""
    bits = torch.arange(NUM_MARKS, device=like.device)
    code = (code % 2 ** (NUM_MARKS - 1)) << 1
    return (1 - 2 * (code >> bits & 1)).to(like.dtype)
