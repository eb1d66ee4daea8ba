"""A gathered weight, and what is in memory of one that can be gathered."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from .. import _torch_compat as compat
from ..quant.base import Quantized
from .comm_context import Done

if TYPE_CHECKING:
    from .param import ShardedWeight


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

    buffer: torch.Tensor
    value: torch.Tensor
    done: Done
    source: torch.Tensor
    version: Version
    is_alias: bool
    holds: int = 0
    _contiguous: torch.Tensor | None = None
    unpack: Callable[[], torch.Tensor] | None = None
    quantized: Callable[[], Quantized] | None = None

    @property
    def full(self) -> torch.Tensor:
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
        if type(self.value) is torch.Tensor:
            self.buffer, self.is_alias = self.value, False

    def forget(self) -> None:
        """Drop all references but that of the buffer."""
        self.done = Done()  # a background work holds its tensors also when it is complete
        self.value, self._contiguous, self.unpack, self.quantized = self.buffer, None, None, None

    def is_in(self, buffer: torch.Tensor) -> bool:
        return self.buffer.untyped_storage().data_ptr() == buffer.untyped_storage().data_ptr()

    def move(self, buffer: torch.Tensor, weight: ShardedWeight) -> None:
        """Go to another buffer, after the wait for ``done``."""
        buffer.copy_(self.buffer)
        self.buffer, self.value, self._contiguous = buffer, weight.layout.full_view(buffer), None

    def contiguous(self) -> torch.Tensor:
        """The full weight contiguous: the buffer itself if dim 0 is sharded, else one copy for all who ask."""
        if self._contiguous is None:
            is_plain = type(self.full) is torch.Tensor
            with compat.unseen_by_checkpoint_policies():
                self._contiguous = self.full.contiguous() if is_plain else self.full
        return self._contiguous

    def is_fresh(self, weight: ShardedWeight) -> bool:
        """False if the shard has been replaced or written since the gather read it, or if autograd would refuse it."""
        if self.buffer.is_inference() and not torch.is_inference_mode_enabled():
            return False
        return self.source is weight.shard and self.version == weight.version


class Gatherable:
    """What is gathered of a weight, and what of it is in memory.

    That is the weight itself; and for low-precision formats whose backward needs other data, a second one beside it
    (``ShardedWeight.for_backward``).
    """

    def __init__(self) -> None:
        self.index = -1
        self.call = -1  # number of the gtp_shard call
        self.lane = 0  # number of the mesh, see ``schedule``
        # What is always gathered together, itself included, in order of use; empty if it is alone.
        self.companions: tuple[Gatherable, ...] = ()
        self.num_gathers = 0
        self.live: Gathered | None = None
        self.kept: Gathered | None = None
        self.pending: deque[Gathered] = deque()

    @property
    def weight(self) -> ShardedWeight:
        """The weight that it belongs to."""
        raise NotImplementedError

    @property
    def nbytes(self) -> int:
        """What is gathered, in bytes."""
        weight = self.weight
        return (None if weight.wire is None else weight.wire.num_bytes(weight)) or self.kept_nbytes

    @property
    def chunk_nbytes(self) -> int:
        """What one rank sends, in bytes: at most, if the weight is gathered as it is, else about."""
        weight, layout = self.weight, self.weight.layout
        plain = layout.buffer_numel * weight.compute_dtype.itemsize
        return -(-(plain if weight.wire is None else self.nbytes) // layout.world)

    @property
    def kept_nbytes(self) -> int:
        """The full weight in memory, in bytes."""
        return self.weight.layout.shape.numel() * self.weight.compute_dtype.itemsize

    @property
    def is_absent(self) -> bool:
        """Whether there is nothing of it in memory or on its way."""
        return self.live is None and self.kept is None and not self.pending


class Columnwise(Gatherable):
    """What the gradient of the input needs of a weight that forward gathers in other data."""

    def __init__(self, weight: ShardedWeight) -> None:
        super().__init__()
        self._weight = weight

    @property
    def weight(self) -> ShardedWeight:
        return self._weight


def gather_together(weights: Sequence[ShardedWeight]) -> None:
    """When one of these weights of one ``gtp_shard`` call is gathered, so are the others, in the same launch."""
    if len(weights) < 2:
        return
    for number in range(min(len(weight.gatherables) for weight in weights)):
        companions = tuple(weight.gatherables[number] for weight in weights)
        for target in companions:
            target.companions = companions
