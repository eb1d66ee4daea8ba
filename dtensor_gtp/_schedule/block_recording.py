"""What a runtime must know of a block that is recorded into a CUDA graph, see ``graphs.record_block``."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

from torch import Tensor

from .._params.gathered import Gathered
from .._params.sharded_weight import Gatherable, ShardedWeight


class Written(NamedTuple):
    """A gradient that a recorded block leaves in a buffer."""

    weight: ShardedWeight
    buffer: Tensor
    bundle: int | None  # gradients with the same number are sent together


class BlockRecording(Protocol):
    """Replaces gathers and reductions while a pass of a block is recorded:
    ``graphs.record_block.Recording``."""

    def acquire(self, target: Gatherable) -> Gathered: ...  # the weight where the graph will read it
    def target(self, weight: ShardedWeight) -> Tensor: ...  # a buffer for the gradient of a use
    def keep(self, weight: ShardedWeight, rows: Tensor) -> Tensor: ...  # a copy of a gradient, in the same dtype
    def submit(self, weight: ShardedWeight, buffer: Tensor) -> None: ...
    # Bundles the gradients that are submitted in it.
    def together(self) -> AbstractContextManager[None]: ...
