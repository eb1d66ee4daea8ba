"""Casts of what modules get and return to the dtypes of their policy.

``fully_shard`` casts the inputs of each module that it is called on, so of each block. Here one call
is for the whole model. Some models add float32 positions to embeddings, and pass the sum on: blocks
cannot multiply it with weights of another dtype. Other models carry a float32 sum from block to
block on purpose, and begin it in the compute dtype. So the first call of a block in a container
decides, for good: a recomputation, another order or a skipped block changes nothing.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from .trees import map_tensors


def cast_floats(tree: Any, dtype: torch.dtype | None) -> Any:
    """All floating-point tensors, as ``fully_shard`` casts them; None: as they are."""
    if dtype is None:
        return tree

    def convert(tensor: Tensor) -> Tensor:
        if not tensor.is_floating_point():
            return tensor
        return tensor.to(dtype)

    return map_tensors(tree, convert)


class InputCasts:
    """Those of the blocks in one container, of which ``first`` is the first one."""

    def __init__(self, first: nn.Module, dtype: torch.dtype) -> None:
        self._first = first
        self._dtype = dtype
        self._is_needed: bool | None = None  # until the first call
        self._is_needed_in_graph = False

    def of(self, block: nn.Module, args: Any, kwargs: Any) -> Any:
        """The inputs of a call of ``block``: as they are if the first call has got its hidden states in
        the compute dtype."""
        if torch.compiler.is_compiling():
            # The first block decides in each graph: what one call left for the next would compile the
            # model again.
            if block is self._first:
                self._is_needed_in_graph = self._are_others(args, kwargs)
            is_needed = self._is_needed_in_graph
        else:
            if self._is_needed is None:
                self._is_needed = self._are_others(args, kwargs)
            is_needed = self._is_needed
        if not is_needed:
            return args, kwargs
        return cast_floats((args, kwargs), self._dtype)

    def _are_others(self, args: Any, kwargs: Any) -> bool:
        """Whether hidden states have another dtype. They come first: positions and masks may be wider."""
        inputs = (value for value in (*args, *kwargs.values()) if isinstance(value, Tensor))
        hidden = next((value for value in inputs if value.is_floating_point()), None)
        return hidden is not None and hidden.dtype != self._dtype
