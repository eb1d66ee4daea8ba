"""The memory of a group: full weights that autograd sees as leaves. See [Note: groups]."""

from __future__ import annotations

import math
from collections.abc import Sequence
from operator import attrgetter, is_
from typing import NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from .. import _torch_compat as compat
from .gathered import Version, is_same_to_autograd
from .layout import WeightLayout
from .managed_param import ManagedParam, counted
from .sharded_weight import ShardedWeight
from .whole_param import WholeParam

# In C: a group asks all its tensors in each launch and at each begin of a forward.
version_of = attrgetter("_version")
param_of = attrgetter("param")
local_of = attrgetter("local")
is_trained = attrgetter("requires_grad")
ALIGNMENT = 128  # bytes: GEMMs and copies are fastest on aligned rows


class Parts(NamedTuple):
    """What one launch gathers: slots of this rank into outputs, after sources were copied to where
    they are sent."""

    outputs: list[Tensor]
    slots: list[Tensor]
    copied: list[Tensor]
    sources: list[Tensor]

    def add(self, layout: WeightLayout, rows: Tensor, output: Tensor, casts_shards: bool) -> None:
        """``casts_shards``: the backend that gathers copies rows itself."""
        if not (casts_shards or layout.is_sendable(rows, output.dtype)):
            self.sources.append(rows)
            rows = layout.slot(output)
            self.copied.append(layout.filled(rows))
        self.slots.append(rows)
        self.outputs.append(output)

    def extend(self, others: Parts) -> None:
        """Gather these parts, too."""
        for own, more in zip(self, others, strict=True):
            own += more


class GroupShards:
    """The shards of the members: which values they have, and what a gather sends of them."""

    def __init__(self, members: Sequence[ManagedParam]) -> None:
        self._members = members
        self.num_updates = 0  # writes to members that leave no version behind
        self.num_followed = 0  # how often members got other tensors, whose versions may be lower
        self.follow()

    def follow(self) -> None:
        """Members may have other parameters or shards than before."""
        self.num_followed += 1
        self._params = [member.param for member in self._members]
        self._locals = [member.local for member in self._members]
        self.tensors = [*self._params, *self._locals]  # their versions count writes
        # What ``param.data`` has given, with versions of its own.
        data = [member.registration.data for member in self._members]
        self.data = [tensor for each in data if each is not None for tensor in counted(each)]
        self._parts: Parts | None = None  # until the first gather of these shards
        # Quantized members, and where a gather sends their values from: slots of its outputs, to be
        # filled before it.
        self.quantized: list[tuple[ShardedWeight, Tensor]] = []

    def replaced(self) -> list[ManagedParam]:
        """Members of which a module has another parameter than at the last ``follow``, or the parameter
        another shard."""
        if self._are_same(self._members, self._params, self._locals):
            return []
        each = zip(self._members, self._params, self._locals, strict=True)
        return [member for member, param, local in each if not self._are_same([member], [param], [local])]

    @staticmethod
    def _are_same(members: Sequence[ManagedParam], params: Sequence[Tensor], locals_: Sequence[Tensor]) -> bool:
        for member, param in zip(members, params, strict=True):
            for module, name in member.registration.sites:  # several, if it is tied
                if module._parameters.get(name) is not param:
                    return False
        is_same = all(map(is_, map(param_of, members), params)) and all(map(is_, map(local_of, members), locals_))
        return is_same and all(map(is_, map(compat.local_part, params), locals_))

    def parts(self, outputs: Sequence[Tensor], casts_shards: bool) -> Parts:
        """What a gather sends and fills, to be read only; sets ``quantized``."""
        if self._parts is not None:
            return self._parts
        parts = self._parts = Parts([], [], [], [])
        with torch.inference_mode(False):
            # Whole parameters have a place among the leaves, where their values are copied.
            for member, output in zip(self._members, outputs, strict=True):
                if not isinstance(member, ShardedWeight):
                    parts.copied.append(output)
                    parts.sources.append(member.shard)
                elif member.form.wire is None:
                    parts.add(member.layout, member.layout.rows_of(member.shard), output, casts_shards)
                else:
                    slot = member.layout.slot(output)
                    self.quantized.append((member, member.layout.filled(slot)))
                    parts.slots.append(slot)
                    parts.outputs.append(output)
        return parts


class GroupLeaves:
    """The full weights: leaves of autograd in one storage, which gathers fill through views of
    their own."""

    def __init__(
        self, weights: Sequence[ShardedWeight], whole: Sequence[WholeParam], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.dtype = dtype
        step = ALIGNMENT // dtype.itemsize
        shapes: list[tuple[int, ...]] = [weight.layout.buffer_shape for weight in weights]
        shapes += [tuple(param.shard.shape) for param in whole]
        offsets = []
        end = 0
        for shape in shapes:
            offsets.append(end)
            end += -(-math.prod(shape) // step) * step
        with torch.inference_mode(False):
            all_bytes = torch.empty(end, dtype=dtype, device=device)
            self.storage = all_bytes.untyped_storage()
            self.nbytes = self.storage.nbytes()
            # Gathers write through views with versions of their own: a gather of the same values is
            # no modification.
            places = list(zip(shapes, offsets, strict=True))
            self.outputs = [_view(self.storage, all_bytes, *place) for place in places]
            views = [_view(self.storage, all_bytes, *place) for place in places]
            fulls = [w.layout.full_view(view) for w, view in zip(weights, views, strict=False)]
            fulls += views[len(weights) :]
            members: list[ManagedParam] = [*weights, *whole]
            self.by_member = {member: _leaf_of(member, full) for member, full in zip(members, fulls, strict=True)}
            self._fulls = fulls  # what the leaves are set to
        # All leaves as integers, to notice writes that leave no version behind.
        words = torch.empty(0, dtype=torch.int64, device=device)
        self._bits = words.set_(self.storage, 0, (self.nbytes // 8,), (1,))
        self.storage.resize_(0)  # the first gather allocates
        self._places = self._addresses()  # without memory: offsets
        # Why no backward may compute with them: parameters were replaced.
        self.refusal: str | None = None
        # Of the shards that the leaves have, or are being filled with.
        self.version: Version | None = None
        self.is_closed = False  # since the memory was freed, until ``open``
        self.written = self.versions()  # those of the leaves, as far as the shards know
        # Whether autograd may have saved leaves where no backward of the block gathers them, see
        # ``note_saved``; and whether in a CUDA graph.
        self.may_be_saved = self._is_captured = False
        self._num_owners: int | None = None  # where nobody has saved any; unknown before the first gather

    def count_owners(self) -> None:
        """Call before the first gather, when all views for it are made: nobody has saved leaves yet."""
        if self._num_owners is None:
            self._num_owners = self._owners()

    def _owners(self) -> int | None:
        return compat.num_owners(self.storage, self.by_member.values())

    @property
    def are_saved(self) -> bool:
        """Whether a graph that no block sees may read the memory."""
        if not self.may_be_saved:
            return False
        owners = self._owners()
        return owners is None or self._num_owners is None or owners > self._num_owners

    def note_saved(self, *, is_captured: bool) -> None:
        """Code outside of the block reads the leaves, or a backward with ``create_graph=True`` does: no
        use of the block comes before autograd reads what it saves there."""
        self.may_be_saved = True
        self._is_captured = is_captured

    def free(self) -> None:
        """Give the memory back to the allocator; leaves keep their shapes. Memory that a graph may
        read stays. That is for each rank to see: gathers do not depend on it."""
        if not self.are_saved:
            self.may_be_saved = False
            if self.storage.resizable():  # not if NumPy has it
                self.storage.resize_(0)
                self._close()

    def open(self) -> None:
        """Somebody uses the weights: autograd may read what it has saved of them."""
        if self.is_closed:
            compat.set_versions(self.by_member.values(), self.versions())
            self.is_closed = False

    def _close(self) -> None:
        """Let autograd refuse what it has saved, until ``open``. A backward that came to ops of the block before its
        outputs would read memory that is freed, or that a gather is filling."""
        if not self.is_closed:
            torch.autograd.graph.increment_version(self.by_member.values())
            self.is_closed = True

    def free_captured(self, is_capturing: bool) -> None:
        """As ``free``, and in any case what a CUDA graph has and other passes would use, or the other
        way round. Autograd refuses graphs that are left."""
        if self.may_be_saved and self._is_captured is not is_capturing:
            self.outdate()
            self.may_be_saved = False
        self.free()

    def outdate(self) -> None:
        """The values are old now: autograd refuses a backward through graphs that have saved them."""
        self._count_write()
        if self._owners() is None:
            self.may_be_saved = False  # nobody knows who reads the memory: autograd refuses them

    def versions(self) -> list[int]:
        """Counts of writes to each leaf."""
        counts = [*map(version_of, self.by_member.values())]
        if self.is_closed:
            return [count - 1 for count in counts]
        return counts

    def allocate(self, version: Version) -> None:
        """Take memory, on the current stream, for a gather of shards of this version."""
        if self.storage.nbytes() != self.nbytes:
            self.storage.resize_(self.nbytes)
        if self.version is not None and not is_same_to_autograd(self.version, version):
            # Autograd shall refuse a backward through what was computed with the values before.
            self._count_write()
        self.version = version

    def has_memory_of(self, tensor: Tensor) -> bool:
        """Whether ``tensor`` is a leaf or a view of leaves."""
        is_plain = type(tensor) in (Tensor, nn.Parameter) and tensor.layout is torch.strided
        is_plain = is_plain and not compat.in_func_transform()  # whose tensors have no storage to see
        return is_plain and tensor.untyped_storage()._cdata == self.storage._cdata

    def outside(self, tensor: Tensor) -> Tensor:
        """What code outside of the block may keep of ``tensor``: a copy of a weight."""
        if self.has_memory_of(tensor):
            return tensor.clone()
        return tensor

    def drop_writes(self) -> None:
        """What was written to leaves goes to no shard."""
        self.put_back()
        self.written = self.versions()

    def refuse_graphs(self, why: str) -> None:
        """No backward through what was computed with the present values."""
        self.refusal = why
        self._count_write()

    def _count_write(self) -> None:
        torch.autograd.graph.increment_version(list(self.by_member.values()))
        self.written = self.versions()

    @property
    def are_elsewhere(self) -> bool:
        """Whether a leaf has memory while the group has none."""
        return self.storage.nbytes() == 0 and self._addresses() != self._places

    def _addresses(self) -> list[int]:
        return [*map(Tensor.data_ptr, self.by_member.values())]

    @property
    def are_trained(self) -> list[bool]:
        return [*map(is_trained, self.by_member.values())]

    @property
    def num_gradients(self) -> int:
        """Of leaves whose gradient has arrived and was not taken yet."""
        return sum(leaf.grad is not None for leaf in self.by_member.values())

    def put_back(self) -> bool:
        """Let leaves be views of the storage again. Returns whether ``set_`` or ``.data = ...`` had
        changed that."""
        leaves = self.by_member.values()
        moved = [(leaf, full) for leaf, full in zip(leaves, self._fulls, strict=True) if not leaf.is_set_to(full)]
        for leaf, full in moved:
            leaf.data = full
        return bool(moved)

    def seen(self) -> tuple[list[int], Tensor]:
        """The versions of the leaves, and a sum of their bits. They have memory."""
        with compat.unseen_by_checkpoint_policies():
            return self.versions(), self._bits.sum()


def _view(storage: torch.UntypedStorage, like: Tensor, shape: tuple[int, ...], offset: int) -> Tensor:
    """A contiguous tensor in ``storage`` that shares no version with others."""
    stride = torch.empty(shape, device="meta").stride()
    return like.new_empty(0).set_(storage, offset, shape, stride)


def _leaf_of(member: ManagedParam, full: Tensor) -> nn.Parameter:
    leaf = nn.Parameter(full, requires_grad=member.param.requires_grad)
    # Attributes that user code has put on the parameter, without those that each DTensor has.
    own = member.param.detach().__dict__
    leaf.__dict__.update({key: value for key, value in member.param.__dict__.items() if key not in own})
    return leaf
