"""What gradients are given to beside the usual reduce-scatter: unequal replicas, a block that is recorded."""

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
        """What the gradient that this replica has reduced counts in the sum over replicas."""

    def weigh_full(self, grad: Tensor, factor: float | None) -> Tensor:
        """A gradient of this rank as it enters the average over its replica."""

    def add(self, weight: ShardedWeight, slot: Tensor, share: float) -> None:
        """Take what the reduce-scatter left; accumulated into ``weight`` when the sum over replicas is there."""

    def reduce_whole(self, dtype: torch.dtype, factor: float | None, bucket: WholeBucket) -> None:
        """Sum the local gradients of whole parameters over all ranks."""

    def finish(self) -> None:
        """Complete all sums on the compute stream."""

    def reset(self) -> None:
        """Forget what has been taken but not summed."""


WholeBucket = list[tuple[WholeParam, Tensor]]


class Written(NamedTuple):
    """Where the gradient of one use is, and the number of the bundle that it travels in, None if in none."""

    weight: ShardedWeight
    buffer: Tensor
    bundle: int | None


class BlockRecording(Protocol):
    """Takes the place of gathers and reductions while a pass of a block is recorded, see ``graphs.record_block``."""

    def acquire(self, target: Gatherable) -> Gathered:
        """The weight where the graph will find it."""

    def target(self, weight: ShardedWeight) -> Tensor:
        """Where the gradient of a use is to be."""

    def keep(self, weight: ShardedWeight, rows: Tensor) -> Tensor:
        """A gradient that would be sent as it is, in the same dtype, where it may stay."""

    def submit(self, weight: ShardedWeight, buffer: Tensor) -> None:
        """The gradient is there."""

    def together(self) -> AbstractContextManager[None]:
        """Gradients that are submitted in the context are a bundle."""
