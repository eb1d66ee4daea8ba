"""The kinds of passes of one runtime with their plans, and the pass that runs."""

from __future__ import annotations

import torch

from ..policy import Schedule
from .members import Members
from .order_of_gathers import Plan, Traits, Window, turning_point
from .order_of_uses import Chain, ChainKey, Entry
from .parted_ranks import PartedRanks


class Passes:
    """Knows the order of uses in each kind of pass."""

    def __init__(self, members: Members) -> None:
        self._members = members
        self.chains: dict[ChainKey, Chain] = {}
        self.parted = PartedRanks(lambda index: members.gatherables[index].weight.fqn)
        self.is_in_backward = False  # whether a backward has begun and not ended
        self.forward: Chain | None = None  # of the running forward
        self.forward_of_backward: Chain | None = None  # of the running or last backward
        self.look_ahead(Schedule())  # until one is chosen

    def look_ahead(self, schedule: Schedule) -> None:
        """Let new plans gather as far ahead as ``schedule`` says."""
        self._window = Window(
            schedule.prefetch_depth, schedule.prefetch_nbytes, schedule.coalesce_nbytes, schedule.expert_blocks_ahead
        )
        self.backward = Chain(self._window, self._traits)  # until the first backward

    def _traits(self) -> list[Traits]:
        """Of each gatherable, for plans: the same on all ranks of its mesh."""
        targets = self._members.gatherables
        return [Traits(t.nbytes, t.lane, t.call, t.companions[0].index if t.companions else -1) for t in targets]

    @property
    def running(self) -> Chain | None:
        return self.backward if self.is_in_backward else self.forward

    def chain(self, entry: Entry | None, *, is_backward: bool, is_grad_enabled: bool = True) -> Chain:
        key = ChainKey(entry, is_grad_enabled, is_backward)
        if key not in self.chains:
            self.chains[key] = Chain(self._window, self._traits)
        return self.chains[key]

    def turning_point(self, entry: Entry | None) -> tuple[Plan, Plan, tuple[int, ...]]:
        """The plans of a forward of ``entry`` and of its backward, and the weights that are last in the forward and
        first in the backward, on all ranks of their mesh. Only ``keep_last`` decides whether those are kept."""
        forward, backward = (self.chain(entry, is_backward=is_backward).plan for is_backward in (False, True))
        return forward, backward, turning_point(forward, backward)

    def begin_forward(self, entry: Entry) -> Chain:
        self.forward = self.chain(entry, is_backward=False, is_grad_enabled=torch.is_grad_enabled())
        return self.forward

    def end_forward(self) -> None:
        self.forward = None

    def begin_backward(self, entry: Entry | None) -> None:
        self.is_in_backward = True
        self.backward = self.chain(entry, is_backward=True)
        self.forward_of_backward = None if entry is None else self.chain(entry, is_backward=False)

    def end_backward(self) -> None:
        self.is_in_backward = False
