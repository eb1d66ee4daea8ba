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
    """Sums gradients with replicas that may have another number of ranks: ``elastic.sync.ReplicaSync``."""

    def share(self, factor: float | None) -> float: ...  # of this replica's gradient in the sum over replicas
    def weigh_full(self, grad: Tensor, factor: float | None) -> Tensor: ...  # for the average over this replica
    def add(self, weight: ShardedWeight, slot: Tensor, share: float) -> None: ...  # reduced rows; accumulated later
    def reduce_whole(self, dtype: torch.dtype, factor: float | None, bucket: WholeBucket) -> None: ...
    def finish(self) -> None: ...  # all sums, on the compute stream
    def reset(self) -> None: ...  # forget gradients that are not summed yet


WholeBucket = list[tuple[WholeParam, Tensor]]


class Written(NamedTuple):
    """A gradient that a recorded block leaves in a buffer."""

    weight: ShardedWeight
    buffer: Tensor
    bundle: int | None  # gradients with the same number travel together


class BlockRecording(Protocol):
    """Replaces gathers and reductions while a pass of a block is recorded: ``graphs.record_block.Recording``."""

    def acquire(self, target: Gatherable) -> Gathered: ...  # the weight where the graph will read it
    def target(self, weight: ShardedWeight) -> Tensor: ...  # a buffer for the gradient of a use
    def keep(self, weight: ShardedWeight, rows: Tensor) -> Tensor: ...  # a copy of a gradient, in the same dtype
    def submit(self, weight: ShardedWeight, buffer: Tensor) -> None: ...
    def together(self) -> AbstractContextManager[None]: ...  # bundles the gradients that are submitted in it
