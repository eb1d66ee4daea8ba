"""Small weights of one block, which are gathered, held, freed and reduced together: a *group*.

[Note: groups]
A group costs the host once per block what single weights cost it each. The full weights of a group
are leaves of autograd that view one storage. It is resized to be filled and to be freed, as in
torch's ``fully_shard`` (``FSDPParam.unsharded_param``), so stock forwards, stock backwards and
torch.compile run on plain tensors. No function of ours runs for a layer or a saved tensor.
Parameters that stay whole (biases, norms) have a place in the storage, too: their values in the
compute dtype, copied with each gather.

Memory that is freed must not be read. So modules read leaves through ``FullParams``, which gathers
the group of a weight that other code than its block reads, and keeps it until the end of backward.
From when that memory is freed until the next use, the leaves are closed: they count as written, so
autograd refuses what it has saved of them.
What autograd may have saved there, or in a backward with ``create_graph=True``, no block gathers
again. So that memory stays while a graph may read it (``GroupLeaves.free``).
A leaf that code keeps beyond its forward must not be read while the group is freed: as with
``fully_shard``, it has no memory then.

Gradients arrive in ``.grad`` of the leaves. When the backward of the block is done, one kernel
packs those of sharded weights into the buffer that is reduce-scattered. A rank without a gradient
for a weight sends zeros.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from .. import _torch_compat as compat
from .gathered import Gathered, GatherForm, Version
from .group_gradients import GroupGradients
from .group_memory import GroupLeaves, GroupShards, is_trained, param_of, version_of
from .group_views import GroupViews
from .layout import WeightLayout
from .managed_param import ManagedParam, Registration, Site
from .pack_planes import round_into
from .sharded_weight import Gatherable, ShardedWeight
from .whole_param import WholeParam


@dataclass(slots=True)
class InBackward:
    """What the running backward of a block needs of its weights, see ``block_uses``."""

    num_reductions_before: int = 0  # launched when it began
    uses: set[object] = field(default_factory=set)  # the forwards of the block whose backward runs
    held: Gathered | None = None  # for them


class GatherableGroup(Gatherable):
    """A group in the place of a weight, for the schedule, which asks a group what it asks a weight."""

    def __init__(self, group: WeightGroup) -> None:
        super().__init__(cast("ShardedWeight", group))  # it answers what the schedule asks of a weight
        self.group = group

    @property
    def kept_nbytes(self) -> int:
        return self.group.leaves.nbytes

    @property
    def may_stay(self) -> bool:
        return True  # its uses read what was gathered


class WeightGroup:
    """Weights and whole parameters of a ``module``, of one mesh and dtype, with the same settings."""

    group = None  # what a single weight may have and a group never has: the schedule asks both

    def __init__(
        self, fqn: str, module: nn.Module, weights: Sequence[ShardedWeight], whole: Sequence[WholeParam]
    ) -> None:
        self.for_forward = self.for_backward = GatherableGroup(self)  # both directions read the same leaves
        self.gatherables: list[Gatherable] = [self.for_forward]
        self.fqn = fqn
        self.registration = Registration([Site(module, "")])  # says which block it is
        self.weights = list(weights)
        self.whole = list(whole)
        self.members: list[ManagedParam] = [*self.weights, *self.whole]
        first = self.weights[0]
        self.flags = first.flags  # one object for all members
        self.policies = first.policies
        self.mesh = first.mesh
        self.num_ranks = first.num_ranks
        self.on_dissolved: Callable[[], None]  # lets the modules gather each weight by itself again
        self.reader: Any  # the runtime, for code outside of a use that reads weights
        self.in_backward = InBackward()
        self.form = GatherForm()
        for member in self.members:
            member.flags = self.flags
            member.group = self
        self.shards = GroupShards(self.members)
        # Their shards are rounded to what a recipe can say, and gathered in the compute dtype.
        self.quantized = [weight for weight in self.weights if weight.form.wire is not None]
        self.leaves = GroupLeaves(self.weights, self.whole, first.compute_dtype, self.device)
        self.pending_grad = GroupGradients(self.leaves, first.reduce_dtype)
        self.pending_grad.reduce_only(weight for weight in self.weights if weight.param.requires_grad)
        self.accumulate = self.pending_grad.accumulate
        self.for_replicas = self.pending_grad.for_replicas
        self.accumulate_part = self.pending_grad.accumulate_part
        self.views = GroupViews(self)
        self._were_trained = self.leaves.are_trained  # when parameters and leaves were last alike

    @property
    def groups(self) -> Any:
        return self.weights[0].groups

    @property
    def device(self) -> torch.device:
        return self.weights[0].device

    @property
    def layout(self) -> WeightLayout:
        """Of the packed gradients."""
        return self.pending_grad.layout

    @property
    def compute_dtype(self) -> torch.dtype:
        return self.leaves.dtype

    @property
    def reduce_dtype(self) -> torch.dtype:
        return self.pending_grad.dtype

    @property
    def is_pinned(self) -> bool:
        return self.views.is_pinned

    def free(self) -> None:
        """Free the leaves' memory, and carry what was written to them to the shards."""
        self.carry_writes()
        self.leaves.free()

    def outdate_saved(self) -> RuntimeError | None:
        """An optimizer has written to the shards. An error if leaves that a graph has kept in memory
        were written before: the shards never got that."""
        leaves = self.leaves
        if not leaves.may_be_saved:
            return None
        is_lost = leaves.versions() != leaves.written
        leaves.outdate()
        if self.for_forward.is_absent:
            leaves.free()
        if is_lost:
            return self._lost_write("before an optimizer step")
        return None

    def carry_writes(self) -> bool:
        """Write to the shards what a forward wrote to full weights, as weight clipping does. Returns
        whether it has."""
        leaves = self.leaves
        versions = leaves.versions()
        if versions == leaves.written:
            return False  # gathers write through other views, which these do not count
        with torch.no_grad():
            for (member, leaf), before, now in zip(leaves.by_member.items(), leaves.written, versions, strict=True):
                if before == now:
                    continue
                part: Tensor = leaf.detach()
                if isinstance(member, ShardedWeight):
                    part = member.layout.part_of(part)  # the rows of this rank
                shard = member.shard  # which may have more bits of what is as it was gathered
                shard.copy_(torch.where(part == self._as_gathered(member), shard, part.to(shard.dtype)))
        leaves.put_back()  # ``set_`` moves a leaf, and counts as a write
        leaves.written = versions
        self.shards.num_updates += 1
        leaves.version = self.version  # a gather gives the values that were written
        return True

    def _as_gathered(self, member: ManagedParam) -> Tensor:
        """This rank's shard with the values that a gather gives it: in the compute dtype, rounded by its recipe."""
        for weight, slot in self.shards.quantized:
            if weight is member:
                rows = torch.empty_like(slot)
                round_into([(weight, rows)])
                return rows
        return member.shard.to(self.compute_dtype)

    def dissolve(self) -> None:
        """Let each member be gathered by itself again."""
        self.views.is_pinned = False
        self.views.show()  # no calls of ours
        self.views.calls.clear()
        self.views.hide()
        self.on_dissolved()
        for member in self.members:
            member.group = None
            member.flags = replace(member.flags)  # a copy for each

    def untraced_write(self, seen: tuple[list[int], Tensor], where: str = "in a forward") -> RuntimeError | None:
        """An error if leaves were written since ``seen``, without a version. The host waits."""
        with compat.unseen_by_checkpoint_policies():
            versions, bits = self.leaves.seen()
            is_elsewhere = self.leaves.put_back()
            if not is_elsewhere and (versions != seen[0] or torch.equal(bits, seen[1])):
                return None
        return self._lost_write(where)

    def _lost_write(self, where: str) -> RuntimeError:
        return RuntimeError(
            f"A write {where} has changed weights of block '{self.fqn}' through .data, but the "
            f"shards keep their values (rank {dist.get_rank()}). Write to the weight itself under "
            "torch.no_grad(), or outside of forwards to the parameter."
        )

    def note_read_outside(self) -> None:
        """Code outside of passes reads the weights that ``unshard`` keeps, and may write to them."""
        kept = self.for_forward.kept
        if kept is not None and kept.seen is None:
            kept.seen = self.leaves.seen()

    def write_outside(self) -> RuntimeError | None:
        """An error if a write between ``unshard`` and ``reshard`` is lost."""
        kept = self.for_forward.kept
        if kept is None or kept.seen is None:
            return None
        return self.untraced_write(kept.seen, "between unshard() and reshard()")

    @property
    def version(self) -> Version:
        shards = self.shards
        with compat.without_torch_function():
            num_writes = shards.num_updates + sum(map(version_of, shards.tensors))
            return num_writes, shards.num_followed, 0, sum(map(version_of, shards.data))

    def is_fresh(self, gathered: Gathered) -> bool:
        """Whether it has the present values of all shards; in use, those of the start of the use."""
        return gathered is self.for_forward.live or gathered.version == self.version

    @property
    def has_gradient(self) -> bool:
        """Whether a backward may reduce gradients of it."""
        return bool(self.pending_grad.expected)

    @property
    def has_parts(self) -> bool:
        """Whether replicas split the optimizer states of members."""
        return any(weight.has_parts for weight in self.weights)

    # The user's changes between passes.

    def begin_forward(self, is_captured: bool = False) -> None:
        """Follow parameter objects that were replaced or frozen since the last pass, or raise."""
        self.views.put_back()  # ``follow`` compares what is registered
        # ``.data = ...`` gave a leaf memory of its own, which no gather fills.
        if self.leaves.are_elsewhere and self.leaves.put_back():
            raise self._lost_write("in an earlier forward")
        replaced = self.shards.replaced()
        for member in replaced:
            member.begin_forward(False)  # ``forget_stale`` below gets ``is_captured``
            for site in member.registration.sites:
                member.follow(site)
        for member in self.members:
            if member.gradient.wide is not None:
                member.gradient.forget_if_cleared()
        have_switched = self._carry_switches()
        if replaced:
            self._follow_replaced(replaced[0])
        for weight in self.quantized:
            weight.forget_stale(self.pending_grad, is_captured)
        if have_switched:
            self._follow_frozen()
        if self.views.is_pinned:
            self.views.hide()  # ``put_back`` has taken the full weights away
        else:
            self.views.forget_hooks()

    def _carry_switches(self) -> bool:
        """Freeze and unfreeze parameters as a forward has done with their full weights. Returns whether any of both was
        frozen or unfrozen."""
        leaves = self.leaves.by_member
        now = self.leaves.are_trained
        is_new = now != self._were_trained
        if is_new:
            for member, after, before in zip(leaves, now, self._were_trained, strict=True):
                if after is not before:
                    member.param.requires_grad_(after)
                    member.follow_frozen()
            self._were_trained = now
        return is_new or now != [*map(is_trained, map(param_of, leaves))]

    def _follow_frozen(self) -> None:
        for member, leaf in self.leaves.by_member.items():
            if leaf.requires_grad is not member.param.requires_grad:
                member.follow_frozen()
                leaf.requires_grad_(member.param.requires_grad)
        self._were_trained = self.leaves.are_trained
        self.pending_grad.note_switched()

    def begin_backward(self) -> None:
        """A forward in between may have followed a freeze that the user has taken back."""
        if self._carry_switches():
            self._follow_frozen()

    def _follow_replaced(self, first: ManagedParam) -> None:
        """Other objects are registered as parameters, perhaps of another dtype (``to``,
        ``load_state_dict``)."""
        self.leaves.refuse_graphs(first.replaced_before_backward())
        for param in self.whole:
            param.set_grad_aside()  # while its old leaf still has the gradient
        self.shards.follow()
        dtypes = {(member.compute_dtype, member.reduce_dtype) for member in self.members}
        if len(dtypes) > 1:
            raise RuntimeError(
                f"gtp_shard expects one dtype for all parameters of block '{self.fqn}', which are "
                "gathered together, but got "
                f"{sorted(str(member.param.dtype) for member in self.members)}. Cast the whole "
                "module with module.to(dtype)."
            )
        ((compute_dtype, reduce_dtype),) = dtypes
        grads = self.pending_grad
        # In memory of their own: graphs of earlier forwards keep the old leaves.
        grads.leaves = self.leaves = GroupLeaves(self.weights, self.whole, compute_dtype, self.device)
        grads.dtype = reduce_dtype
        grads.reduce_only(grads.weights)  # lays them out in the new dtype
        self._were_trained = self.leaves.are_trained
        self.views.make()


Reducible = ShardedWeight | WeightGroup  # whose gradients are reduce-scattered
