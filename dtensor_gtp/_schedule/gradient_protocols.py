"""Where gradients go instead of the usual reduction: to unequal replicas, or to the recording of a block."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from .._params.gathered import Gathered
from .._params.sharded_weight import Gatherable, ShardedWeight
from .._params.whole_param import WholeParam


class UnequalReplicas(Protocol):
    """Sums gradients with replicas that may have another number of ranks, see ``dtensor_gtp.elastic``."""

    def share(self, factor: float | None) -> float:
        """The factor of this replica's gradient in the sum over replicas."""

    def weigh_full(self, grad: Tensor, factor: float | None) -> Tensor:
        """This rank's gradient times its factor in the average over its replica."""

    def add(self, weight: ShardedWeight, slot: Tensor, share: float) -> None:
        """Take the result of a reduce-scatter; accumulate its sum over replicas into ``weight`` later."""

    def reduce_whole(self, dtype: torch.dtype, factor: float | None, bucket: WholeBucket) -> None:
        """Sum the local gradients of whole parameters over all ranks."""

    def finish(self) -> None:
        """Complete all sums on the compute stream."""

    def reset(self) -> None:
        """Forget gradients that are not summed yet."""


WholeBucket = list[tuple[WholeParam, Tensor]]


class Written(NamedTuple):
    """A gradient that a recorded block leaves in a buffer."""

    weight: ShardedWeight
    buffer: Tensor
    bundle: int | None  # gradients with the same number travel together


class BlockRecording(Protocol):
    """Takes the place of gathers and reductions while a pass of a block is recorded, see ``graphs.record_block``."""

    def acquire(self, target: Gatherable) -> Gathered:
        """The weight where the graph will read it."""

    def target(self, weight: ShardedWeight) -> Tensor:
        """The buffer for the gradient of a use."""

    def keep(self, weight: ShardedWeight, rows: Tensor) -> Tensor:
        """A copy, in the same dtype, of a gradient that would be sent as it is."""

    def submit(self, weight: ShardedWeight, buffer: Tensor) -> None:
        """Take note of a gradient."""

    def together(self) -> AbstractContextManager[None]:
        """Bundle the gradients that are submitted in the context."""
