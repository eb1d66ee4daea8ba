"""Writes to parameters and to gathered weights that leave no version, or that would reach no shard.

``.data``, foreach functions and optimizers of others write so. Whoever may do it is noted before,
and what was gathered of the old values is dropped; where that comes too late, the write is found
afterwards and raises.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch_compat as compat
from .._comm.context import CommContext
from .._params.managed_param import ManagedParam
from .._params.refusals import hook_at_node
from .._params.sharded_weight import ShardedWeight
from .._params.weight_group import WeightGroup
from .attribute_reads import AttributeReads, is_changed, sum_of_bits, written_to_no_effect
from .gathering import Gathering
from .keep_and_free import Keeper
from .members import Members
from .passes import Passes


class LostWrites:
    """Looks for them in one runtime."""

    def __init__(
        self,
        members: Members,
        passes: Passes,
        keeper: Keeper,
        gathering: Gathering,
        reads: AttributeReads,
        comm: CommContext,
    ) -> None:
        self._members = members
        self._passes = passes
        self._keeper = keeper
        self._gathering = gathering
        self._reads = reads
        self._comm = comm
        # Weights that are unsharded, and that somebody may have written since without a trace.
        self._outdated: set[ShardedWeight] = set()
        # Groups that a forward reads outside of their blocks, and that a backward uses, as they
        # were then; only if ``reads.looks_at_bits``.
        self._seen_outside: dict[WeightGroup, Any] = {}
        # The shards of groups whose full weights are in use, when somebody got hold of these shards.
        self._seen_shards: dict[WeightGroup, list[Tensor | None]] = {}

    def begin_forward(self) -> None:
        """Gather anew what may have been written since the last pass."""
        errors = self.written_outside(self._members.weights)  # before what was kept is dropped
        stale: Iterable[ShardedWeight] = self._outdated
        if errors:  # drop the values that were written to no effect
            stale = [weight for weight in self._members.weights if weight.is_pinned]
        for weight in stale:
            self._keeper.drop_kept(weight)
        self._outdated.clear()
        self._seen_outside.clear()
        self._seen_shards.clear()
        if errors:
            raise errors[0]  # last: the next forward shall find nothing stale

    def gather_outdated(self) -> None:
        """Before a backward, which computes with what was written through ``.data``, as in one process."""
        if not self._outdated:
            return
        for weight in self._outdated:
            if weight.group is None:
                self._keeper.drop_kept(weight)  # its next use gathers it
        groups = {weight.group for weight in self._outdated}
        for group in self._members.groups:  # in one order on all ranks
            if group in groups:
                # What was read outside of the block is in the memory of the group, so that has to
                # be full.
                self._gathering.gather_and_keep([group.for_forward])
                self._keeper.wait_kept(group.weights[0])  # no use waits before autograd reads it
        self._outdated.clear()

    def written_outside(self, weights: Iterable[ShardedWeight]) -> list[RuntimeError]:
        """Errors of writes to full weights that ``unshard`` keeps, outside of forwards and to no effect."""
        where = "between unshard() and reshard()"
        errors = []
        groups: dict[WeightGroup, None] = {}  # each once, in order
        for weight in weights:
            if not weight.is_pinned:
                continue
            if weight.group is not None:
                groups[weight.group] = None
            elif self._reads.is_written_outside(weight):
                errors.append(written_to_no_effect(weight, where))
        for group in groups:
            error = group.write_outside()
            if error is not None:
                errors.append(error)
        return errors

    def note_handed_out(self, param: object) -> None:
        """Somebody has got hold of a parameter in a way in which writes to it leave no version."""
        if (member := self._members.member_of(param)) is None:
            return
        group: WeightGroup | None = member.group
        if isinstance(member, ShardedWeight):
            weight = member
        elif group is not None:
            weight = group.weights[0]  # with which the values of a whole parameter are gathered
        else:
            return
        if self._reads.frames:
            self._drop_in_forward(weight, group)
        elif member.is_pinned:
            # Until the next forward: before it one rank alone may read the weight, and a gather
            # would wait for the others.
            self._outdated.add(weight)
        else:
            # No forward runs, and it is not unsharded: what is kept of it is gathered anew
            # at its next use.
            for target in (group or weight).gatherables:
                self._keeper.forget_kept(target)

    def note_untraced_write(self, param: object) -> None:
        """As ``note_handed_out``, where it is likely that all ranks do so."""
        self.note_handed_out(param)
        # ``ReplicaGathers.begin`` gathers again if this has changed: a collective of all replicas.
        self._gathering.parts.num_writes += self._members.member_of(param) is not None

    def note_written(self, params: Iterable[object]) -> None:
        """Somebody writes to these, if they are ours, and leaves no version."""
        count_writes(self._members.among(set(map(id, params))))

    def _drop_in_forward(self, weight: ShardedWeight, group: WeightGroup | None) -> None:
        """Drop what was gathered of a shard that is about to be written, and gather it at its next
        use alone."""
        gathering = self._gathering
        if group is not None:
            # A block that runs now has read the old values: ``written_in_use`` compares these bits.
            is_new = group.for_forward.live is not None and group not in self._seen_shards
            if is_new and self._comm.streams.may_wait_on_host:
                self._seen_shards[group] = _bits_of_shards(group)
            gathering.handed_out.add(group.for_forward.weight)
            gathering.forget_pending(group.for_forward)
            self._keeper.forget_kept(group.for_forward)
            return
        gathering.handed_out.add(weight)  # this pass does not gather it ahead any more
        gathering.drop_prefetched_of([weight])
        for target in weight.gatherables:
            target.live = None  # whoever uses it keeps it
        self._reads.forget(weight)
        self._keeper.drop_kept(weight)

    def refuse_new_data(self, param: object) -> None:
        """``param.data = ...`` in a forward: the leaves of a group would keep the old values until
        the next one."""
        if not self._reads.frames:
            return
        member = self._members.member_of(param)
        if member is not None and member.group is not None:
            raise RuntimeError(
                f"A forward replaces the data of parameter '{member.fqn}' of shape "
                f"{tuple(member.param.shape)}, which is gathered together with block "
                f"'{member.group.fqn}' (rank {dist.get_rank()}). Write to it under "
                "torch.no_grad(): param.copy_(value)."
            )

    def note_new_data(self, param: object) -> None:
        """After ``param.data = ...``."""
        member = self._members.member_of(param)
        if member is None or member.registration.is_cut_again:
            return
        member.refuse_graphs()  # the backward of an earlier forward raises
        if member.group is not None:
            member.group.leaves.refuse_graphs(member.replaced_before_backward())

    def note_read(self, group: WeightGroup) -> None:
        """A forward reads a weight of ``group`` outside of its block, or a backward uses the group."""
        is_in_pass = self._reads.frames or self._passes.is_in_backward
        if is_in_pass and self._reads.looks_at_bits and group not in self._seen_outside:
            self._seen_outside[group] = group.leaves.seen()  # the caller holds the group: it has memory

    def check(self, group: WeightGroup) -> None:
        """Before the backward of a block frees ``group``: raise if it has written to weights to no
        effect."""
        seen = self._seen_outside.pop(group, None)  # popped, because the memory is freed next
        if seen is None:
            return
        misuse = group.untraced_write(seen, "in a backward")
        if misuse is not None:
            raise misuse

    def written_in_use(self, group: WeightGroup) -> RuntimeError | None:
        """At the end of a use of ``group``: an error if somebody wrote to its shards meanwhile. The
        block has computed with the values of before."""
        bits = self._seen_shards.pop(group, None)
        if bits is None and not self._reads.looks_at_bits:
            return None
        is_written = group.version != group.leaves.version  # shards now, and as gathered
        if not is_written and bits is not None:
            is_written = any(map(is_changed, bits, _bits_of_shards(group)))
        if not is_written:
            return None
        return RuntimeError(
            f"Parameters of block '{group.fqn}' were written while its forward runs, which "
            f"computes with their values from before (rank {dist.get_rank()}). Write to the "
            "attributes of its modules, e.g. self.weight, under torch.no_grad(), or before the "
            "forward of the block."
        )

    def found(self, where: str = "in a forward") -> RuntimeError | None:
        """What a pass has written to weights to no effect, outside of the blocks whose groups they
        are in."""
        if not self._reads.looks_at_bits:
            return None
        found = [group.untraced_write(seen, where) for group, seen in self._seen_outside.items()]
        self._seen_outside.clear()
        found += [param.take_back() for param in self._members.whole]  # repairs each of them
        return next(filter(None, found), None)


def count_writes(written: Sequence[ManagedParam]) -> None:
    """Of what leaves no version: autograd shall refuse a backward through what was computed with
    the values before."""
    for group in {param.group for param in written if param.group is not None}:
        group.shards.num_updates += 1  # the next gather counts a write to all leaves
    for param in written:
        if isinstance(param, ShardedWeight):
            param.versions.num_updates += 1  # in a group, of what a recipe has made of the shard
        elif param.group is None:
            torch.autograd.graph.increment_version(param.leaf)


def _bits_of_shards(group: WeightGroup) -> list[Tensor | None]:
    return [sum_of_bits(member.local) for member in group.members]


def refuse_hooks_at_nodes(weights: Sequence[ShardedWeight]) -> None:
    """Raise if code has registered hooks where autograd would bring gradients to the parameters:
    they never run."""
    with compat.unseen_by_checkpoint_policies():
        for weight in weights:
            if not weight.registration.is_cut_again and compat.has_hooks_at_node(weight.param):
                raise RuntimeError(hook_at_node(weight.fqn, weight.param))
