"""Groups in memory for code outside of their blocks.

[Note: how long a group is held]
The backward of a block gathers its group when it begins, see ``block_uses``. It does not see what
other code does with the weights: a penalty that reads them in the root's forward, a block that
returns its output in an object, the graph of a second derivative. Autograd may have saved them there
and reads them in any later backward; memory that was freed by then would end the process. So such a
group stays in memory until its weights get new values, which makes those graphs invalid, as in one
process. That does not depend on whether a graph is still there: ranks must gather alike, and each
knows only its own.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .._comm.context import CommContext
from .._params.gathered import Gathered
from .._params.weight_group import WeightGroup
from .gathering import Gathering

_OUTDATED = (-1, -1, -1)  # a version that no shard has


@dataclass(slots=True)
class _Hold:
    gathered: Gathered
    is_captured: bool  # whether a CUDA graph has gathered it
    has_graph: bool = False  # whether autograd may have saved what was read


class Holds:
    """Those of one runtime."""

    def __init__(self, gathering: Gathering, comm: CommContext) -> None:
        self._gathering = gathering
        self._comm = comm
        self._holds: dict[WeightGroup, _Hold] = {}

    def hold(self, group: WeightGroup) -> None:
        """Gather the weights of ``group``, which code reads next, and keep them; see the note above."""
        kept = group.for_forward.kept
        if group.is_pinned and kept is not None and group.is_fresh(kept):
            self._comm.streams.wait(kept.done)  # as ``acquire`` does
            group.note_read_outside()
            return
        hold = self._holds.get(group)
        if hold is None:
            gathered = self._gathering.acquire(group.for_forward)
            hold = self._holds[group] = _Hold(gathered, self._comm.streams.is_capturing)
            group.is_held = True
        else:
            self._comm.streams.wait(hold.gathered.done)
        hold.has_graph |= torch.is_grad_enabled()

    def doubt(self, group: WeightGroup) -> None:
        """Somebody may write to shards of ``group`` and leave no version: the next forward gathers it anew."""
        if (hold := self._holds.get(group)) is not None:
            hold.gathered.version = _OUTDATED

    def end_pass(self) -> None:
        """End holds of what no graph has. Shards get what was written to the others."""
        for group, hold in list(self._holds.items()):
            if not hold.has_graph:
                self.release(group)
                continue
            was_fresh = hold.gathered.version == group.version
            if group.carry_writes() and was_fresh:
                hold.gathered.version = group.version

    def begin_forward(self) -> None:
        """End holds of what no graph has, and of old values."""
        if not self._holds:
            return
        self.end_pass()
        is_capturing = self._comm.streams.is_capturing
        for group, hold in list(self._holds.items()):
            # What a CUDA graph has gathered is nothing for other passes, nor the other way round.
            if hold.gathered.version != group.version or hold.is_captured != is_capturing:
                self.release(group)

    def release_all(self) -> None:
        for group in list(self._holds):
            self.release(group)

    def release(self, group: WeightGroup) -> None:
        """End the hold of a group, if it has one."""
        hold = self._holds.pop(group, None)
        if hold is None:
            return
        group.is_held = False
        self._gathering.release(group.for_forward, hold.gathered)
        if hold.has_graph:
            group.leaves.count_write()  # autograd refuses a backward through what is left of the graph
