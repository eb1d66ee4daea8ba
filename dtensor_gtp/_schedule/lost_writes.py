"""Writes to parameters and to gathered weights that leave no version, or that would reach no shard.

``.data`` of a full weight, foreach functions and optimizers of others write so. Writes to parameters
are counted, which makes gathers of the old values stale. Others are found afterwards and raise.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from .. import _torch_compat as compat
from .._params.managed_param import ManagedParam
from .._params.refusals import hook_at_node, written_to_no_effect
from .._params.sharded_weight import ShardedWeight
from .._params.weight_group import WeightGroup
from .attribute_reads import AttributeReads
from .gathering import Gathering
from .keep_and_free import Keeper
from .members import Members
from .passes import Passes


class LostWrites:
    """Looks for them in one runtime."""

    def __init__(
        self, members: Members, passes: Passes, keeper: Keeper, gathering: Gathering, reads: AttributeReads
    ) -> None:
        self._members = members
        self._passes = passes
        self._keeper = keeper
        self._gathering = gathering
        self._reads = reads
        # Groups that a forward reads outside of their blocks, and that a backward uses, as they
        # were then; only if ``reads.looks_at_bits``.
        self._seen_outside: dict[WeightGroup, Any] = {}

    def begin_forward(self) -> None:
        """Raise for writes to what ``unshard`` keeps."""
        errors = self.written_outside(self._members.weights)
        misuse = self._reads.misuse_outside()
        if misuse is not None:
            errors.append(misuse)
        self._seen_outside.clear()
        if not errors:
            return
        for weight in self._members.weights:
            if weight.is_pinned:
                self._keeper.drop_kept(weight)  # the values that were written to no effect
        raise errors[0]  # last: the next forward shall find nothing stale

    def gather_written(self) -> None:
        """Before a backward, which computes with what was written through ``.data``, as in one process."""
        for group in self._members.groups:
            kept = group.for_forward.kept
            if group.is_pinned and kept is not None and not group.is_fresh(kept):
                # What was read outside of the block is in the memory of the group, so that has to
                # be full.
                self._gathering.gather_and_keep([group.for_forward])
                self._keeper.wait_kept(group.weights[0])  # no use waits before autograd reads it

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

    def note_written(self, params: Iterable[object]) -> None:
        """Somebody writes to these, if they are ours, and leaves no version."""
        count_writes(self._members.among(set(map(id, params))))

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

    def forget_backward(self, *, is_in_forward: bool) -> None:
        """A backward has raised: nobody holds what it used, but a forward around it may hold what it has read."""
        for group in list(self._seen_outside):
            if not is_in_forward or group.in_backward.held is not None:
                del self._seen_outside[group]

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
        if group.version == group.leaves.version:  # shards now, and as gathered
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


def refuse_hooks_at_nodes(weights: Sequence[ShardedWeight]) -> None:
    """Raise if code has registered hooks where autograd would bring gradients to the parameters:
    they never run."""
    with compat.unseen_by_checkpoint_policies():
        for weight in weights:
            if not weight.registration.is_cut_again and compat.has_hooks_at_node(weight.param):
                raise RuntimeError(hook_at_node(weight.fqn, weight.param))
