"""A gathered weight: its buffer, when it may be read, and which version of the shard it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor

from .. import _torch_compat as compat
from .._comm.streams import Done
from ..quant.planes import Quantized
from .layout import WeightLayout

# Changes with each write to a shard: counts of in-place ops on the DTensor, of in-place ops on its local tensor, and of
# optimizer steps, because fused and foreach optimizers change neither of the first two.
Version = tuple[int, int, int]


class ShardVersions:
    """Counts of writes that leave no other version behind."""

    compiled: Version  # read by the last use in compiled code, which cannot save it for its backward

    def __init__(self) -> None:
        self.num_updates = 0  # optimizer steps that may have written to the shard
        self.replaced_at = 0  # ``num_updates`` when other data took the place of the shard


class Gathered:
    """A full weight in a buffer."""

    # What most objects keep as it is stands at the class, which saves the host the time to set it.
    is_alias = False  # ``buffer`` is the shard itself or a fixed buffer, so it is not freed with this object
    uploaded: Tensor | None = None  # a copy of ``source``, if that is on the host. It is read until ``done``.
    holds = 0  # number of current users: running ops, forwards of modules, saved tensors in backward
    # Makes the full weight from the gathered planes; None if the weight itself was gathered.
    unpack: Callable[[], Tensor] | None = None
    # Gives the gathered planes to GEMMs that multiply with quantized weights.
    quantized: Callable[[], Quantized] | None = None
    _contiguous: Tensor | None = None
    seen: Any = None  # what code outside of forwards has read of it, see ``attribute_reads``

    def __init__(self, buffer: Tensor, value: Tensor, done: Done, source: Tensor, version: Version) -> None:
        self.buffer = buffer
        self.value = value  # the full weight, a view of ``buffer``; with ``unpack`` the first of the gathered planes
        self.done = done  # when the gather is complete
        self.source = source  # the shard that was gathered
        self.version = version  # version of ``source`` that was gathered

    @property
    def full(self) -> Tensor:
        """The full weight. The caller has waited for ``done``."""
        if self.unpack is not None:
            # Dropping ``unpack`` frees the gathered planes, unless the weight is a view of them or GEMMs may read them.
            unpack, self.unpack = self.unpack, None
            with compat.unseen_by_checkpoint_policies():
                self.value = unpack()
            if type(self.value) is Tensor:
                self.buffer, self.is_alias = self.value, False
        return self.value

    def forget(self) -> None:
        """Drop all references except that to the buffer."""
        self.uploaded = None
        self.done = Done()  # a background work keeps its tensors alive even after it is complete
        self.value, self._contiguous, self.unpack, self.quantized = self.buffer, None, None, None

    def is_in(self, buffer: Tensor) -> bool:
        return self.buffer.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()

    def move(self, buffer: Tensor, layout: WeightLayout) -> None:
        """Copy the weight to another buffer. The caller has waited for ``done``."""
        buffer.copy_(self.buffer)
        self.buffer, self.value, self._contiguous = buffer, layout.full_view(buffer), None

    def contiguous(self) -> Tensor:
        """The full weight contiguous: the buffer itself if dim 0 is sharded, otherwise one copy for all callers."""
        if self._contiguous is None:
            is_plain = type(self.full) is Tensor
            with compat.unseen_by_checkpoint_policies():
                self._contiguous = self.full.contiguous() if is_plain else self.full
        return self._contiguous
