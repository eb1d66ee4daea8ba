"""Class attributes in the place of managed parameters."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from .._dtensor.random_init import zero_row
from .._params.managed_param import Site
from .._params.sharded_weight import ShardedWeight
from .._params.whole_param import WholeParam
from ..ops.compiled_lookup import materialize
from .binding import binding_of


class ParamAccess:
    """Class attribute in the place of a managed parameter."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Any:
        if module is None:
            return self
        params = module.__dict__["_parameters"]
        if self._name not in params:
            raise AttributeError(f"'{type(module).__name__}' object has no attribute '{self._name}'")
        registered = params[self._name]
        binding = binding_of(module)
        managed = binding.params.get(self._name) if binding is not None else None
        if managed is None or registered is None:
            return registered
        assert binding is not None
        if torch.compiler.is_compiling():
            return managed.value() if isinstance(managed, WholeParam) else materialize(binding.compiled[self._name])
        runtime = binding.group.runtime
        if runtime.is_materializing:
            managed.follow(Site(module, self._name))
            # Not gathered by the outer fully_shard: it is the one who asks.
            is_absent = managed.is_cut_again and not managed.is_readable
            return registered if is_absent else runtime.reads.read(managed)
        if not managed.is_pinned:
            return registered
        managed.follow(Site(module, self._name))
        return runtime.reads.read_pinned(managed) if isinstance(managed, ShardedWeight) else runtime.reads.read(managed)


class FlatWeights:
    """``nn.RNNBase._flat_weights``: the list of parameters that recurrent layers pass on, read afresh each time."""

    def __get__(self, module: nn.Module | None, owner: type | None = None) -> Any:
        if module is None:
            return self
        return [getattr(module, name) if hasattr(module, name) else None for name in module._flat_weights_names]  # type: ignore[union-attr]

    def __set__(self, module: nn.Module, value: list[Any]) -> None:
        """RNNBase assigns the list when a parameter changes; it is derived here."""


def zero_padding_row(module: nn.Embedding | nn.EmbeddingBag) -> None:
    """In the place of torch's method, by which ``reset_parameters`` zeros the row of ``padding_idx``."""
    weight = module._parameters["weight"]
    if module.padding_idx is not None and isinstance(weight, DTensor):
        zero_row(weight, module.padding_idx)
