"""A full weight in memory, and what tells whether it still is what its shard holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import torch

from .. import _torch_compat as compat
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


@dataclass(eq=False)
class Gathered:
    """A full weight in a buffer, and what it was made of.

    ``holds`` counts who uses it right now: a running op, a module's forward, saved tensors in backward.
    """

    buffer: torch.Tensor
    full: torch.Tensor
    done: Done
    source: torch.Tensor
    version: Version
    is_alias: bool
    holds: int = 0
    _contiguous: torch.Tensor | None = None

    def contiguous(self) -> torch.Tensor:
        """The full weight contiguous: the buffer itself if dim 0 is sharded, else one copy for all who ask."""
        if self._contiguous is None:
            with compat.unseen_by_checkpoint_policies():
                self._contiguous = self.full.contiguous()
        return self._contiguous

    def is_fresh(self, weight: ShardedWeight) -> bool:
        """False if the shard has been replaced or written since the gather read it, or if autograd would refuse it."""
        if self.buffer.is_inference() and not torch.is_inference_mode_enabled():
            return False
        return self.source is weight.shard and self.version == weight.version
