"""What a plan of sums between replicas must know of one weight."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class WeightSpec:
    """What the planner must know of a parameter.

    Args:
        name: Fully qualified name.
        shape: Logical shape.
        dim: The dim that gtp cuts; None for a parameter that stays whole.
        block_size: Rows of ``dim`` that stay together on one rank.
        tp_dim: The dim that tensor parallelism cuts, before gtp cuts the slice; None if it does not.
        tp_block_size: Rows of ``tp_dim`` that stay together on one tp rank, e.g. head_dim.
        nbytes: Bytes of an element of the gradient on the wire.
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = 0
    block_size: int = 1
    tp_dim: int | None = None
    tp_block_size: int = 1
    nbytes: int = 4

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def num_tp_blocks(self) -> int:
        """Blocks that tensor parallelism may hand out."""
        assert self.tp_dim is not None
        return self.shape[self.tp_dim] // self.tp_block_size
