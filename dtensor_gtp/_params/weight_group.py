"""Small weights of one block, which are gathered, held, freed and reduced together: a *group*.

[Note: groups]
A group costs the host once per block what single weights cost it each. The full weights of a group are leaves of
autograd that view one storage. It is resized to be filled and to be freed, as in torch's ``fully_shard``
(``FSDPParam.unsharded_param``), so stock forwards, stock backwards and torch.compile run on plain tensors. No function
of ours runs for a layer or a saved tensor. Parameters that stay whole (biases, norms) have a place in the storage, too:
their values in the compute dtype, copied with each gather.

Memory that is freed must not be read. So modules read leaves through ``FullParams``, which gathers the group of a
weight that other code than its block reads, and keeps it until the end of backward. A leaf that code keeps beyond its
forward must not be read while the group is freed: as with ``fully_shard``, it has no memory then.

Gradients arrive in ``.grad`` of the leaves. When the backward of the block is done, one kernel packs those of sharded
weights into the buffer that is reduce-scattered. A rank without a gradient for a weight sends zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, Protocol, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor

from .. import _torch_compat as compat
from .._comm.send_ring import SendRing
from .gathered import Gathered, Version
from .layout import WeightLayout
from .managed_param import ManagedParam, Site
from .sharded_weight import Gatherable, ShardedWeight
from .whole_param import WholeParam

_ALIGNMENT = 128  # bytes: GEMMs and copies are fastest on aligned rows


class ReadsWeights(Protocol):
    """The runtime, for code outside of a use that reads weights."""

    @property
    def gives_full_params(self) -> bool: ...
    @property
    def is_in_backward(self) -> bool: ...
    def hold_until_end(self, group: WeightGroup) -> None: ...


class FullParams(dict[str, Any]):
    """``nn.Module._parameters`` of a module during a pass: the full weights, which are gathered if they are not."""

    def __init__(self, params: dict[str, Any], group: WeightGroup, grouped: set[str], sharded: dict[str, Any]) -> None:
        super().__init__(params)
        self._group, self._grouped, self._sharded = group, grouped, sharded

    def __getitem__(self, name: str) -> Any:
        value = super().__getitem__(name)
        group = self._group
        if group.live is None and name in self._grouped:
            group.reader.hold_until_end(group)
        return value

    def get(self, name: str, default: Any = None) -> Any:
        if name not in self:
            return default
        return self[name]

    def __setitem__(self, name: str, value: Any) -> None:
        if self._group.is_pinned and not self._group.is_in_pass and value is not self.get(name):
            raise RuntimeError(
                f"Parameter '{name}' of block '{self._group.fqn}' was replaced between unshard() and reshard() (rank "
                f"{dist.get_rank()}). Call reshard() before you replace parameters."
            )
        super().__setitem__(name, value)

    def items(self) -> Any:
        # After ``unshard``, optimizers and state dicts get the sharded parameters.
        if not (self._group.is_in_pass and self._group.reader.gives_full_params):
            return self._sharded.items()
        return ((name, self[name]) for name in self)

    def values(self) -> Any:
        return (value for _, value in self.items())


class WeightGroup(Gatherable):
    """The weights and whole parameters of one ``module``, all of one mesh, dtype and ``gtp_shard`` call."""

    # What a single weight may have and a group never has: the schedule asks both.
    is_cut_again = False
    is_plain = False
    fixed = None
    wire = None
    offload = None
    group = None

    def __init__(
        self, fqn: str, module: nn.Module, weights: Sequence[ShardedWeight], whole: Sequence[WholeParam]
    ) -> None:
        super().__init__(cast("ShardedWeight", self))  # the schedule asks a group what it asks a weight
        self.fqn, self.module = fqn, module
        self.sites = [Site(module, "")]
        self.weights, self.whole = list(weights), list(whole)
        self.members: list[ManagedParam] = [*self.weights, *self.whole]
        first = self.weights[0]
        self.mesh, self.num_ranks, self.device = first.mesh, first.num_ranks, first.device
        self.compute_dtype, self.reduce_dtype = first.compute_dtype, first.reduce_dtype
        self.flags = first.flags
        self.is_pinned = self.is_in_pass = False
        self.on_dissolved: Callable[[], None]  # makes modules of single weights of the modules again
        self._hooks: list[Any] = []
        self.ring: SendRing | None = None
        self.num_updates = 0  # writes to members that leave no version behind
        # Whether all ranks know which members get gradients. ``reduced_weights`` are those, or all that may get some.
        self.is_agreed = False
        self.asked_for: set[int] | None = None  # ids of the leaves to which the running backward is confined; None: all
        self._owed: set[ShardedWeight] = set()  # that were trained since gradients moved into ``.grad``
        self._is_layout_old = False  # from before weights were frozen, for gradients of earlier microbatches
        self.unsharded_grad: Tensor | None = None
        self.unreplicated_grad: Tensor | None = None
        self.uses_in_backward: set[object] = set()  # forwards of the module whose backward runs
        self.held: Gathered | None = None  # for them
        self.has_second_backward = False  # whether the running backward creates a graph that needs the weights
        self.reader: ReadsWeights
        for member in self.members:
            member.flags, member.group = self.flags, self
        self._shards = self._find_shards()
        self._make_leaves()
        self.reduce_only(weight for weight in self.weights if weight.param.requires_grad)

    @property
    def groups(self) -> Any:
        return self.weights[0].groups

    @property
    def for_backward(self) -> Gatherable:
        return self

    @property
    def nbytes(self) -> int:
        return self._nbytes

    @property
    def kept_nbytes(self) -> int:
        return self._nbytes

    def _find_shards(self) -> list[Tensor]:
        """The parameters and their local tensors, whose versions count writes to them."""
        return [tensor for member in self.members for tensor in (member.param, member.shard)]

    # The full weights.

    def _make_leaves(self) -> None:
        """Make the storage, the leaves in it, and the views of it that gathers write."""
        step = _ALIGNMENT // self.compute_dtype.itemsize
        shapes: list[tuple[int, ...]] = [weight.layout.buffer_shape for weight in self.weights]
        shapes += [tuple(param.shard.shape) for param in self.whole]
        offsets, end = [], 0
        for shape in shapes:
            offsets.append(end)
            end += -(-math.prod(shape) // step) * step
        with torch.inference_mode(False):
            whole = torch.empty(end, dtype=self.compute_dtype, device=self.device)
            self.storage = whole.untyped_storage()
            self._nbytes = self.storage.nbytes()
            # Gathers write through views with versions of their own: a gather of the same values is no modification.
            places = list(zip(shapes, offsets, strict=True))
            self.outputs = [_view(self.storage, whole, *place) for place in places]
            self.slots = [w.layout.slot(output) for w, output in zip(self.weights, self.outputs, strict=False)]
            views = [_view(self.storage, whole, *place) for place in places]
            num_weights = len(self.weights)
            fulls = [w.layout.full_view(v) for w, v in zip(self.weights, views[:num_weights], strict=True)]
            fulls += views[num_weights:]
            self._fulls = fulls
            self.leaves = [_leaf_of(member, full) for member, full in zip(self.members, fulls, strict=True)]
        self._leaf_by_member = dict(zip(self.members, self.leaves, strict=True))
        words = torch.empty(0, dtype=torch.int64, device=self.device)
        self._bits = words.set_(self.storage, 0, (self._nbytes // 8,), (1,))
        self.storage.resize_(0)
        self._version_of_leaves: Version | None = None
        self._written = self._versions()
        self._views = self._make_views()

    def _make_views(self) -> list[tuple[nn.Module, dict[str, Any], dict[str, Any], FullParams]]:
        """For each module its dict of parameters outside of passes, for compiled code, and for other code."""
        leaf_of = {site: leaf for member, leaf in zip(self.members, self.leaves, strict=True) for site in member.sites}
        views = []
        for module in dict.fromkeys(site.module for site in leaf_of):
            sharded = module._parameters
            full = {name: leaf_of.get(Site(module, name), param) for name, param in sharded.items()}
            grouped = {name for name in full if Site(module, name) in leaf_of}
            views.append((module, sharded, full, FullParams(full, self, grouped, sharded)))
        return views

    def show(self, *, is_compiled: bool = False, is_in_pass: bool = True) -> None:
        """Let the modules read the full weights. In a pass (a forward), they are their parameters, too."""
        self.is_in_pass = is_in_pass
        for module, _, plain, full in self._views:
            module.__dict__["_parameters"] = plain if is_compiled else full

    def hide(self) -> None:
        """Let the modules have the sharded parameters again. After ``pin``, and in a backward, where activation
        checkpointing calls modules, they still read the full ones."""
        self.is_in_pass = False
        reads_full = self.is_pinned or self.reader.is_in_backward
        for module, sharded, _, full in self._views:
            module.__dict__["_parameters"] = full if reads_full else sharded

    def pin(self, note_backward: Callable[[], None]) -> None:
        """Let modules read full weights outside of passes, too. ``note_backward`` is called with each gradient."""
        if not self.is_pinned:
            self.is_pinned = True
            self.note_gradients(note_backward)
            self.hide()

    def note_gradients(self, note_backward: Callable[[], None]) -> None:
        """Call ``note_backward`` with each gradient that comes outside of the backward of a block, until the next
        forward."""
        if not self._hooks:
            self._hooks = [
                leaf.register_post_accumulate_grad_hook(lambda _: note_backward())
                for leaf in self.leaves
                if leaf.requires_grad
            ]

    def _forget_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def unpin(self) -> None:
        """The counterpart of ``pin``."""
        self.is_pinned = False
        self._forget_hooks()
        self.hide()

    def allocate(self) -> None:
        """Give the leaves memory, on the current stream, for a gather of the present shards."""
        self.storage.resize_(self._nbytes)
        version = self.version
        if self._version_of_leaves not in (None, version):
            # Autograd shall refuse a backward through what was computed with the values before.
            torch.autograd.graph.increment_version(self.leaves)
            self._written = self._versions()
        self._version_of_leaves = version

    @property
    def gathered_version(self) -> Version:
        """Of the shards that the leaves have, or are being filled with."""
        assert self._version_of_leaves is not None
        return self._version_of_leaves

    def free(self) -> None:
        """Free the leaves' memory, and carry what was written to them to the shards."""
        if self._versions() != self._written:
            self._carry_writes()
        self.storage.resize_(0)

    @property
    def values_of_whole(self) -> list[tuple[WholeParam, Tensor]]:
        """The whole parameters, and where a gather copies their values."""
        return list(zip(self.whole, self.outputs[len(self.weights) :], strict=True))

    def dissolve(self) -> None:
        """Let each member be gathered by itself again."""
        self.is_pinned = False
        self.hide()
        self.on_dissolved()
        for member in self.members:
            member.group, member.flags = None, replace(member.flags)

    def seen(self) -> tuple[list[int], Tensor]:
        """The versions of the leaves, and a sum of their bits, for ``untraced_write``. They have memory."""
        with compat.unseen_by_checkpoint_policies():
            return self._versions(), self._bits.sum()

    def untraced_write(self, seen: tuple[list[int], Tensor], where: str = "in a forward") -> RuntimeError | None:
        """An error if somebody has written to leaves and has left no version. The host waits."""
        versions, bits = self.seen()
        is_elsewhere = self._put_back()
        if not is_elsewhere and (versions != seen[0] or torch.equal(bits, seen[1])):
            return None
        return RuntimeError(
            f"A write {where} has changed weights of block '{self.fqn}' through .data, but the shards keep their "
            f"values (rank {dist.get_rank()}). Write to the weight itself under torch.no_grad(), or outside of "
            "forwards to the parameter."
        )

    def _put_back(self) -> bool:
        """Let leaves be views of the storage again. Returns whether ``set_`` or ``.data = ...`` had changed that."""
        moved = [pair for pair in zip(self.leaves, self._fulls, strict=True) if not pair[0].is_set_to(pair[1])]
        for leaf, full in moved:
            leaf.data = full
        return bool(moved)

    def note_read_outside(self) -> None:
        """Code outside of passes reads the weights that ``unshard`` keeps, and may write to them."""
        if self.kept is not None and self.kept.seen is None:
            self.kept.seen = self.seen()

    @property
    def write_outside(self) -> RuntimeError | None:
        """An error if a write between ``unshard`` and ``reshard`` is lost."""
        if self.kept is None or self.kept.seen is None:
            return None
        return self.untraced_write(self.kept.seen, "between unshard() and reshard()")

    def _versions(self) -> list[int]:
        return [leaf._version for leaf in self.leaves]

    @torch.no_grad()
    def _carry_writes(self) -> None:
        """A forward wrote to full weights, as weight clipping does. Without a trace it would be lost."""
        versions = self._versions()
        for member, leaf, before, now in zip(self.members, self.leaves, self._written, versions, strict=True):
            if before == now:
                continue
            part: Tensor = leaf.detach()
            if isinstance(member, ShardedWeight):
                layout = member.layout
                part = part.narrow(layout.dim, min(layout.local_offset, layout.num_rows), layout.local_rows)
            member.shard.copy_(part)
        self._put_back()
        self._written = versions
        self.num_updates += 1
        self._version_of_leaves = self.version  # a gather gives the values that were written

    @property
    def version(self) -> Version:
        return self.num_updates + sum([tensor._version for tensor in self._shards]), 0, 0

    def is_fresh(self, gathered: Gathered) -> bool:
        """Whether ``gathered`` has the present values of all shards. One in use has those of the begin of its use."""
        return gathered is self.live or gathered.version == self.version

    # The gradients.

    def reduce_only(self, weights: Any) -> None:
        """Reduce gradients of these weights from now on. Sums of earlier microbatches keep their values."""
        before = getattr(self, "reduced_weights", [])
        self.reduced_weights: list[ShardedWeight] = list(weights)
        world, rank = self.weights[0].layout.world, self.weights[0].layout.rank
        self._slot_numels = [math.prod(weight.layout.slot_shape) for weight in self.reduced_weights]
        shapes = [weight.layout.slot_shape for weight in self.reduced_weights]
        self._slots_like = [compat.template(shape, self.reduce_dtype, self.device) for shape in shapes]
        numel = world * sum(self._slot_numels)
        self.layout = WeightLayout(torch.Size((numel,)), 0, world, rank)
        self.sent_nbytes = numel * self.reduce_dtype.itemsize
        if before:
            old = [math.prod(weight.layout.slot_shape) for weight in before]
            self.unsharded_grad = self._laid_out_anew(self.unsharded_grad, before, old, world)
            self.unreplicated_grad = self._laid_out_anew(self.unreplicated_grad, before, old, 1)

    def _laid_out_anew(
        self, total: Tensor | None, weights: list[ShardedWeight], numels: list[int], num_rows: int
    ) -> Tensor | None:
        if total is None:
            return None
        parts = dict(zip(weights, total.view(num_rows, -1).split(numels, 1), strict=True))
        new = zip(self.reduced_weights, self._slot_numels, strict=True)
        rows = [parts[weight] if weight in parts else total.new_zeros(num_rows, numel) for weight, numel in new]
        return torch.cat(rows, 1).flatten()

    def leaf_of(self, member: ManagedParam) -> nn.Parameter:
        return self._leaf_by_member[member]

    @property
    def has_gradient(self) -> bool:
        """Whether a backward may reduce gradients of it."""
        return bool(self.reduced_weights) or any(weight.param.requires_grad for weight in self.weights)

    @property
    def has_gradients(self) -> bool:
        """Whether gradients of weights have arrived that are not reduced yet."""
        return any(leaf.grad is not None for leaf in self.leaves[: len(self.weights)])

    @property
    def has_new_gradients(self) -> bool:
        """Whether a weight got a gradient that is not known to get one."""
        if len(self.reduced_weights) == len(self.weights):
            return False
        known = set(self.reduced_weights)
        return any(leaf.grad is not None and w not in known for w, leaf in zip(self.weights, self.leaves, strict=False))

    @property
    def members_with_gradients(self) -> list[bool]:
        """For each member whether it gets gradients, as far as this rank knows."""
        known = {*self.reduced_weights} if self.is_agreed else self._owed
        return [member in known or self.leaf_of(member).grad is not None for member in self.members]

    @property
    def is_left_out(self) -> bool:
        """Whether the running backward is confined to other parameters, on all ranks."""
        asked = self.asked_for
        return asked is not None and not any(id(leaf) in asked for leaf in self.leaves)

    def settle(self) -> None:
        """All gradients have moved into ``.grad``."""
        if self.unsharded_grad is None and self.unreplicated_grad is None:
            self._owed.clear()

    def agree(self, found: Sequence[bool]) -> None:
        """All ranks know which members get gradients."""
        used = [member for member, is_used in zip(self.members, found, strict=True) if is_used]
        weights = [member for member in used if isinstance(member, ShardedWeight)]
        if weights != self.reduced_weights:
            self.reduce_only(weights)
        self.is_agreed = True

    def pack(self, buffer: Tensor) -> None:
        """Move the gradients of the leaves into ``buffer`` (shape ``layout.buffer_shape``), cast, rank by rank."""
        grads, asked = [], self.asked_for
        for weight in self.reduced_weights:
            leaf = self._leaf_by_member[weight]
            grad, leaf.grad = leaf.grad, None
            # Autograd, too, skips a leaf that was frozen after its forward.
            if weight.param.requires_grad and (asked is None or id(leaf) in asked):
                self._owed.add(weight)
            else:
                grad = None
            grads.append(
                torch.zeros(leaf.shape, dtype=leaf.dtype, device=self.device) if grad is None else grad.detach()
            )
        compat.chunk_cat(grads, self.layout.world, buffer.view(self.layout.world, -1))

    def accumulate(self, slot: Tensor) -> None:
        """Hand this rank's rows of all reduced gradients to the weights."""
        for weight, rows in zip(self.reduced_weights, compat.unflatten(slot, self._slots_like), strict=True):
            if weight in self._owed:
                weight.accumulate(rows if weight.layout.is_as_buffer else weight.layout.shard_of_rows(rows))

    def send_buffer(self) -> Tensor:
        """An uninitialized buffer for the packed gradients of this rank."""
        return torch.empty(self.layout.buffer_shape, dtype=self.reduce_dtype, device=self.device)

    def new_slot(self) -> Tensor:
        """An uninitialized buffer for this rank's rows of the packed gradients."""
        return torch.empty(self.layout.slot_shape, dtype=self.reduce_dtype, device=self.device)

    def reset_grads(self) -> None:
        """Forget gradients of a backward that raised."""
        self.unsharded_grad = self.unreplicated_grad = None
        self._owed.clear()
        for leaf in self.leaves:
            leaf.grad = None

    # The user's changes between passes.

    def begin_forward(self) -> None:
        """Follow parameter objects that were replaced or frozen since the last pass, or raise."""
        # After ``unshard``, or if the last ``show`` or ``hide`` was interrupted, modules have the full weights.
        for module, sharded, *_ in self._views:
            module.__dict__["_parameters"] = sharded
        is_replaced = is_frozen = False
        for index, member in enumerate(self.members):
            param, leaf = member.param, self.leaves[index]
            module, name = member.sites[0]
            is_known = self._shards[2 * index] is param and self._shards[2 * index + 1] is member.shard
            is_registered = module._parameters.get(name) is param
            if not (is_known and is_registered and compat.local_part(param) is member.shard):
                member.begin_forward(False)
                for site in member.sites:
                    member.follow(site)
                is_replaced = True
            if member._wide_grad is not None and member.param.grad is None:
                member._wide_grad = None
            is_frozen = is_frozen or leaf.requires_grad is not member.param.requires_grad
        if is_replaced:
            self._follow_replaced()
        if is_frozen:
            for member, leaf in zip(self.members, self.leaves, strict=True):
                if leaf.requires_grad is not member.param.requires_grad:
                    member.follow_frozen()
                    leaf.requires_grad_(member.param.requires_grad)
            self.is_agreed = False
        self._is_layout_old = self._is_layout_old or is_frozen
        if self._is_layout_old and not self._owed:  # otherwise sums and gradients in flight have this layout
            self.is_agreed = self._is_layout_old = False
            self.reduce_only(weight for weight in self.weights if weight.param.requires_grad)
        if self._hooks and not self.is_pinned:
            self._forget_hooks()
        if self.is_pinned:
            self.hide()

    def _follow_replaced(self) -> None:
        """Other objects are registered as parameters, perhaps of another dtype (``to``, ``load_state_dict``)."""
        self.num_updates += 1
        self._shards = self._find_shards()
        dtypes = {(member.compute_dtype, member.reduce_dtype) for member in self.members}
        if len(dtypes) > 1:
            raise RuntimeError(
                f"gtp_shard expects one dtype for all parameters of block '{self.fqn}', which are gathered together, "
                f"but got {sorted(str(member.param.dtype) for member in self.members)}. Cast the whole module with "
                "module.to(dtype)."
            )
        ((self.compute_dtype, self.reduce_dtype),) = dtypes
        self._make_leaves()
        self.reduce_only(self.reduced_weights)


def _view(storage: torch.UntypedStorage, like: Tensor, shape: tuple[int, ...], offset: int) -> Tensor:
    """A contiguous tensor in ``storage`` that shares no version with others."""
    stride = torch.empty(shape, device="meta").stride()
    return like.new_empty(0).set_(storage, offset, shape, stride)


def _leaf_of(member: ManagedParam, full: Tensor) -> nn.Parameter:
    leaf = nn.Parameter(full, requires_grad=member.param.requires_grad)
    own = member.param.detach().__dict__
    leaf.__dict__.update({key: value for key, value in member.param.__dict__.items() if key not in own})
    return leaf


Reducible = ShardedWeight | WeightGroup  # whose gradients are reduce-scattered
