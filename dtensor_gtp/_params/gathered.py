"""A gathered weight: its buffer, when it may be read, and what it was made of."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from torch import Tensor

from .. import _torch_compat as compat
from .._comm.streams import Done
from ..quant.planes import Quantized
from .layout import WeightLayout

# Differs once a shard has been written to: counts of in-place ops on the DTensor and on its local tensor, and of
# optimizer steps, because fused and foreach optimizers count in neither.
Version = tuple[int, int, int]


class ShardState(NamedTuple):
    """Differs once what was made of a shard is stale, see [Note: what is made of a shard]."""

    version: Version
    edition: int


class Gathered:
    """A full weight in a buffer.

    Args:
        buffer: The memory.
        value: The full weight, a view of ``buffer``; what came over the wire as long as ``unpack`` is set.
        done: When the gather is complete.
        source: The shard that was gathered, and its version then.
        is_alias: The buffer is the shard itself, or a fixed buffer: it is not freed with this object.

    Attributes:
        holds: Who uses it now: a running op, the forward of a module, saved tensors in backward.
        unpack: Makes the full weight of what came over the wire, if that is not the weight itself.
        quantized: Gives what came over the wire to GEMMs that multiply with just that.
    """

    unpack: Callable[[], Tensor] | None = None
    quantized: Callable[[], Quantized] | None = None
    _contiguous: Tensor | None = None

    def __init__(
        self,
        buffer: Tensor,
        value: Tensor,
        done: Done,
        source: Tensor,
        version: Version,
        is_alias: bool = False,
        holds: int = 0,
    ) -> None:
        self.buffer, self.value, self.done = buffer, value, done
        self.source, self.version, self.is_alias = source, version, is_alias
        self.holds = holds

    @property
    def full(self) -> Tensor:
        """The full weight, after the wait for ``done``."""
        if self.unpack is not None:
            self.complete()
        return self.value

    def complete(self) -> None:
        """Make the full weight of what came over the wire, after the wait. Only the first call does."""
        if self.unpack is None:
            return
        # This drops what came over the wire, unless the weight is a view of it or GEMMs may ask for it.
        unpack, self.unpack = self.unpack, None
        with compat.unseen_by_checkpoint_policies():
            self.value = unpack()
        if type(self.value) is Tensor:
            self.buffer, self.is_alias = self.value, False

    def forget(self) -> None:
        """Drop all references but that of the buffer."""
        self.done = Done()  # a background work keeps its tensors also when it is complete
        self.value, self._contiguous, self.unpack, self.quantized = self.buffer, None, None, None

    def is_in(self, buffer: Tensor) -> bool:
        return self.buffer.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()

    def move(self, buffer: Tensor, layout: WeightLayout) -> None:
        """Go to another buffer, after the wait for ``done``."""
        buffer.copy_(self.buffer)
        self.buffer, self.value, self._contiguous = buffer, layout.full_view(buffer), None

    def contiguous(self) -> Tensor:
        """The full weight contiguous: the buffer itself if dim 0 is sharded, else one copy for all callers."""
        if self._contiguous is None:
            is_plain = type(self.full) is Tensor
            with compat.unseen_by_checkpoint_policies():
                self._contiguous = self.full.contiguous() if is_plain else self.full
        return self._contiguous
