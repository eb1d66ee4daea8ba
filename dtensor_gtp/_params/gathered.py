"""How one weight is gathered, as it is or packed into planes, and what a gather gives: a full
weight in a buffer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _torch_compat as compat
from .._comm.context import CommContext
from .._comm.streams import Done
from ..quant.float8_gemms import Float8GEMMs
from ..quant.planes import Direction, Quantized
from .layout import WeightLayout

# Changes with each write to a shard: counts of in-place ops on the DTensor, of in-place ops on its
# local tensor, of optimizer steps, because fused and foreach optimizers change neither of the
# first two, and of writes through ``param.data``. As in torch, the last ones forbid no backward.
Version = tuple[int, int, int, int]


def is_same_to_autograd(version: Version | None, other: Version | None) -> bool:
    """Whether autograd may go on with values of ``version`` where the shard is at ``other``."""
    return version is not None and other is not None and version[:3] == other[:3]


class ShardVersions:
    """Counts of writes that leave no other version behind."""

    # Read by the last use in compiled code, which cannot save it for its backward.
    compiled: Version

    def __init__(self) -> None:
        self.num_updates = 0  # optimizer steps that may have written to the shard
        self.replaced_at = 0  # ``num_updates`` when other data took the place of the shard


class Gathered:
    """A full weight in a buffer."""

    # What most objects keep as it is stands at the class, which saves the host the time to set it.
    # ``buffer`` is the shard itself or a fixed buffer, so it is not freed with this object.
    is_alias = False
    # A copy of ``source``, if that is on the host. It is read until ``done``.
    uploaded: Tensor | None = None
    # Number of current users: running ops, forwards of modules, saved tensors in backward.
    holds = 0
    # Makes the full weight from the gathered planes; None if the weight itself was gathered.
    unpack: Callable[[], Tensor] | None = None
    # Gives the gathered planes to GEMMs that multiply with quantized weights.
    quantized: Callable[[], Quantized] | None = None
    _contiguous: Tensor | None = None  # made for the first caller of ``contiguous``, then shared
    reader: torch.Stream | None = None  # the compute stream of the last use; None without streams
    seen: Any = None  # what code outside of forwards has read of it, see ``attribute_reads``

    def __init__(self, buffer: Tensor, value: Tensor, done: Done, source: Tensor, version: Version) -> None:
        self.buffer = buffer
        # The full weight, a view of ``buffer``; with ``unpack`` the first of the gathered planes.
        self.value = value
        self.done = done  # when the gather is complete
        self.source = source  # the shard that was gathered
        self.version = version  # version of ``source`` that was gathered

    @property
    def full(self) -> Tensor:
        """The full weight. The caller has waited for ``done``."""
        if self.unpack is not None:
            # Dropping ``unpack`` frees the gathered planes, unless the weight is a view of them or
            # GEMMs may read them.
            unpack = self.unpack
            self.unpack = None
            with compat.unseen_by_checkpoint_policies():  # a recomputation may find the weight unpacked
                self.value = unpack()
            if type(self.value) is Tensor:
                # A tensor of its own, to be freed with this object.
                self.buffer = self.value
                self.is_alias = False
            self._note_copy()
        return self.value

    def for_gemms(self) -> Quantized:
        """The gathered planes, of a weight that ``GatherForm.gemms`` multiply with."""
        assert self.quantized is not None
        return self.quantized()

    def _note_copy(self) -> None:
        """The stream of the last use has made a copy: another one waits for it, not for the gather."""
        if self.reader is not None:
            self.done = Done(origin=self.reader)

    @property
    def memory(self) -> list[Tensor]:
        """What a use may read. Of quantized planes, ``unpack`` and ``quantized`` tell themselves."""
        return [tensor for tensor in (self.buffer, self.uploaded, self._contiguous) if tensor is not None]

    def forget(self) -> None:
        """Drop all references except that to the buffer."""
        self.uploaded = None
        self.done = Done()  # a background work keeps its tensors alive even after it is complete
        self.value = self.buffer
        self._contiguous = None
        self.unpack = None  # it and ``quantized`` hold the gathered planes
        self.quantized = None

    def is_in(self, buffer: Tensor) -> bool:
        return self.buffer.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()

    def move(self, buffer: Tensor, layout: WeightLayout) -> None:
        """Copy the weight to another buffer. The caller has waited for ``done``."""
        buffer.copy_(self.buffer)
        self.buffer = buffer
        self.value = layout.full_view(buffer)
        self._contiguous = None  # in the old buffer

    def contiguous(self) -> Tensor:
        """The full weight contiguous: the buffer itself if dim 0 is sharded, otherwise one copy for
        all callers."""
        if self._contiguous is None:
            self._contiguous = self.full
            if type(self.full) is Tensor:
                with compat.unseen_by_checkpoint_policies():
                    self._contiguous = self.full.contiguous()
                if self._contiguous is not self.full:
                    self._note_copy()
        return self._contiguous


class Packed(NamedTuple):
    """What a rank sends of its shard, and what is made of all gathered planes."""

    planes: list[tuple[WeightLayout, Tensor]]  # tensors to gather, each with the layout of its rows
    unpack: Callable[[list[Tensor]], Tensor]  # makes the full weight
    # The quantized weight, if GEMMs use it.
    quantized: Callable[[list[Tensor]], Quantized] | None = None


class Wire(ABC):
    """How one weight is gathered."""

    has_columnwise = False  # backward gathers columnwise data

    @abstractmethod
    def pack(self, direction: Direction, comm: CommContext) -> Packed:
        """Pack this rank's shard on the current stream (see ``CommContext.packing``)."""

    @abstractmethod
    def describe(self, not_fused: str) -> str:
        """For the report; ``not_fused`` says why no fused layer uses the weight (empty if one does)."""

    def gemms(self) -> Float8GEMMs | None:
        """How linear layers multiply with the gathered planes; None if they need the full weight."""
        return None

    def num_bytes(self) -> int | None:
        """Bytes that are gathered of the whole weight in forward; None if only ``pack`` knows."""
        return None

    def note_read(self) -> None:
        """Called when code other than fused layers gets the full weight."""
        return

    def forget(self) -> None:
        """Drop the data that were made from the shard, see [Note: data made from a shard]."""
        return


class FixedBuffers(NamedTuple):
    """Where a recorded block reads a full weight and writes its gradient, see [Note: fixed buffers]."""

    gathered: Tensor
    grad: Tensor
    block: object  # the recorded block; others share the tensors


class GatherForm:
    """That of one weight. A group has one, too, in which nothing is set: each of its weights has
    its own."""

    full_like: Tensor  # template of the buffer

    def __init__(self) -> None:
        self.wire: Wire | None = None
        # Multiply with the quantized weight; None: with the full weight.
        self.gemms: Float8GEMMs | None = None
        self.fixed: FixedBuffers | None = None  # set for weights of recorded blocks

    def set_wire(self, wire: Wire | None) -> None:
        """Gather the weight as ``wire`` says; None gathers the weight itself."""
        self.wire = wire
        self._choose_gemms()

    def _choose_gemms(self) -> None:
        self.gemms = None
        if self.wire is not None:
            self.gemms = self.wire.gemms()

    def follow(self, layout: WeightLayout, dtype: torch.dtype, device: torch.device) -> None:
        """The weight is gathered in this dtype from now on."""
        self.full_like = compat.template(layout.buffer_shape, dtype, device)
        self._choose_gemms()  # the new dtype may have others

    def new_buffer(self) -> Tensor:
        """An uninitialized buffer for the full weight."""
        return torch.empty_like(self.full_like)

    def gather_buffer(self) -> Tensor:
        """A buffer to gather into: the fixed one, if the weight has one that nobody holds."""
        if self.fixed is not None and self.fixed.gathered.dtype == self.full_like.dtype:
            buffer = self.fixed.gathered
            # Two owners are ``buffer`` and the Python object of its storage. A third one would be
            # another gather.
            if compat.storage_use_count(buffer.untyped_storage()) <= 2:
                return buffer.view(buffer.shape)  # a new tensor: an owner for as long as the gather has it
        return self.new_buffer()
