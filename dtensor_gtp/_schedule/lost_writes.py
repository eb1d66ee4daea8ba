"""Writes to parameters and to gathered weights that leave no version behind, or that would reach no shard.

``.data``, foreach functions and optimizers of others write so. Whoever may do it is noted before, and what was gathered
of the old values is dropped; where that comes too late, the write is found afterwards and raises.
"""

from __future__ import annotations

from typing import Any

import torch.distributed as dist

from .._params.managed_param import ManagedParam
from .._params.sharded_weight import ShardedWeight
from .._params.weight_group import WeightGroup
from .attribute_reads import AttributeReads
from .gathering import Gathering


class LostWrites:
    """Looks for them in one runtime."""

    def __init__(self, runtime: Gathering, reads: AttributeReads) -> None:
        self._runtime, self._reads = runtime, reads
        self._outdated: set[ShardedWeight] = set()  # unsharded, and perhaps written since without a trace
        # Groups that a forward reads outside of their blocks, as they were then; only if ``reads.looks_at_bits``.
        self._seen_outside: dict[WeightGroup, Any] = {}

    def begin_forward(self) -> None:
        """Gather anew what may have been written since the last pass."""
        for weight in self._outdated:
            self._runtime.drop_kept(weight)
        self._outdated.clear()
        self._seen_outside.clear()

    def note_handed_out(self, member: ManagedParam) -> None:
        """Somebody has got hold of a parameter in a way in which writes to it leave no version."""
        group: WeightGroup | None = member.group
        if isinstance(member, ShardedWeight):
            weight = member
        elif group is not None:
            weight = group.weights[0]  # the values of a whole parameter are gathered with these weights
        else:
            return
        if self._reads.frames:
            self._drop_in_forward(weight, group)
        elif member.is_pinned:
            self._outdated.add(weight)  # until the next forward, as one rank alone may read it until then
        else:
            for target in weight.gatherables if group is None else (group,):
                self._runtime.forget_kept(target)

    def _drop_in_forward(self, weight: ShardedWeight, group: WeightGroup | None) -> None:
        """Drop what was gathered of a shard that is about to be written, and gather it at its next use alone."""
        runtime = self._runtime
        if group is not None:
            runtime.handed_out.add(group.weight)
            runtime.forget_pending(group)
            runtime.forget_kept(group)
            return
        runtime.handed_out.add(weight)
        runtime.drop_prefetched_of([weight])
        for target in weight.gatherables:
            target.live = None  # whoever uses it keeps it
        self._reads.forget(weight)
        runtime.drop_kept(weight)

    def refuse_new_data(self, member: ManagedParam) -> None:
        """``param.data = ...`` in a forward: the leaves of a group would keep the old values until the next one."""
        if member.group is not None:
            raise RuntimeError(
                f"A forward replaces the data of parameter '{member.fqn}' of shape {tuple(member.param.shape)}, which "
                f"is gathered together with block '{member.group.fqn}' (rank {dist.get_rank()}). Write to it under "
                "torch.no_grad(): param.copy_(value)."
            )

    def note_read(self, group: WeightGroup) -> None:
        """A forward reads a weight of ``group`` outside of its block."""
        if self._reads.frames and self._reads.looks_at_bits and group not in self._seen_outside:
            self._seen_outside[group] = group.leaves.seen()

    def found(self) -> RuntimeError | None:
        """What a forward has written to weights, outside of the blocks whose groups they are in, to no effect."""
        if not self._reads.looks_at_bits:
            return None
        found = [group.untraced_write(seen) for group, seen in self._seen_outside.items()]
        self._seen_outside.clear()
        found += [param.take_back() for param in self._runtime.whole]
        return next(filter(None, found), None)
