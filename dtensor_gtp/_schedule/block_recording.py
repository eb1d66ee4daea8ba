"""What a runtime must know of a block that is recorded into a CUDA graph, see ``graphs.record_block``."""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .._params.sharded_weight import ShardedWeight


class Written(NamedTuple):
    """A gradient that a recorded block leaves in a buffer."""

    weight: ShardedWeight
    buffer: Tensor
    bundle: int | None  # gradients with the same number are sent together
