"""A gathered weight, and what is in memory of one that can be gathered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from .. import _torch_compat as compat
from .._comm.streams import Done
from ..quant.planes import Quantized
from .layout import WeightLayout


class Version(NamedTuple):
    """What tells that a shard has been written to.

    In-place ops on a DTensor count in the DTensor, those on its local tensor in that; fused and foreach optimizers
    count in neither, so their steps are counted.
    """

    param: int
    shard: int
    num_updates: int


class ShardState(NamedTuple):
    """What tells that something made of a shard is stale, see [Note: what is made of a shard]."""

    version: Version
    edition: int


@dataclass(eq=False)
class Gathered:
    """A full weight in a buffer, and what it was made of.

    ``holds`` counts who uses it right now: a running op, a module's forward, saved tensors in backward. ``unpack``
    makes the full weight of what came over the wire where that is not the weight itself; ``quantized`` gives what came
    over the wire to GEMMs that multiply with just that.
    """

    buffer: Tensor
    value: Tensor
    done: Done
    source: Tensor
    version: Version
    is_alias: bool
    holds: int = 0
    _contiguous: Tensor | None = None
    unpack: Callable[[], Tensor] | None = None
    quantized: Callable[[], Quantized] | None = None

    @property
    def full(self) -> Tensor:
        """The full weight, after the wait for ``done``."""
        self.complete()
        return self.value

    def complete(self) -> None:
        """Make the full weight of what came over the wire, after the wait. Done once, however often it is asked for."""
        if self.unpack is None:
            return
        # With it goes what came over the wire, unless the weight is made of it or GEMMs may ask for it.
        unpack, self.unpack = self.unpack, None
        with compat.unseen_by_checkpoint_policies():
            self.value = unpack()
        if type(self.value) is Tensor:
            self.buffer, self.is_alias = self.value, False

    def forget(self) -> None:
        """Drop all references but that of the buffer."""
        self.done = Done()  # a background work holds its tensors also when it is complete
        self.value, self._contiguous, self.unpack, self.quantized = self.buffer, None, None, None

    def is_in(self, buffer: Tensor) -> bool:
        return self.buffer.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()

    def move(self, buffer: Tensor, layout: WeightLayout) -> None:
        """Go to another buffer, after the wait for ``done``."""
        buffer.copy_(self.buffer)
        self.buffer, self.value, self._contiguous = buffer, layout.full_view(buffer), None

    def contiguous(self) -> Tensor:
        """The full weight contiguous: the buffer itself if dim 0 is sharded, else one copy for all who ask."""
        if self._contiguous is None:
            is_plain = type(self.full) is Tensor
            with compat.unseen_by_checkpoint_policies():
                self._contiguous = self.full.contiguous() if is_plain else self.full
        return self._contiguous
