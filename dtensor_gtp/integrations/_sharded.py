"""What the integrations ask of a model: where ``gtp_shard`` was called, and not to reduce gradients for a while."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.nn as nn

from .._modules.binding import ShardGroup, binding_of
from ..api import GTPModule


def outermost(model: nn.Module) -> list[ShardGroup]:
    """The calls of ``gtp_shard`` on ``model`` or below that no other call is around."""
    binding = binding_of(model)
    if binding is not None and isinstance(model, GTPModule):
        return [binding.group]
    return [group for child in model.children() for group in outermost(child)]


@contextmanager
def without_gradient_sync(model: nn.Module) -> Iterator[None]:
    """Backward within sums gradients on each rank, until a backward outside of this reduces them."""
    modules = [group.module for group in outermost(model)]
    _set_requires_gradient_sync(modules, False)
    try:
        yield
    finally:
        _set_requires_gradient_sync(modules, True)


def _set_requires_gradient_sync(modules: list[nn.Module], is_required: bool) -> None:
    for module in modules:
        assert isinstance(module, GTPModule)
        GTPModule.set_requires_gradient_sync(module, is_required)  # not the method of an outer fully_shard
