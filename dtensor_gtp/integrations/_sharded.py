"""What the integrations ask of a model (where ``gtp_shard`` was called, not to reduce gradients for a while), how they
move it, and how a rank goes on with random numbers of another one."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn as nn
from torch import Tensor

from .._modules.binding import managed_params, outermost_calls
from .._modules.gtp_module import GTPModule


@contextmanager
def without_gradient_sync(model: nn.Module) -> Iterator[None]:
    """Backward within sums gradients on each rank, until a backward outside of this reduces them."""
    modules = [group.module for group in outermost_calls(model)]
    try:
        _set_requires_gradient_sync(modules, False)
        yield
    finally:
        _set_requires_gradient_sync(modules, True)


def _set_requires_gradient_sync(modules: list[nn.Module], is_required: bool) -> None:
    for module in modules:
        assert isinstance(module, GTPModule)
        GTPModule.set_requires_gradient_sync(module, is_required)  # not the method of an outer fully_shard


def is_offloaded(model: nn.Module) -> bool:
    """Whether an ``offload_policy`` keeps shards on the host."""
    return any(param.policies.offload is not None for _, param in managed_params(model))


def move_unsharded(model: nn.Module, device: torch.device) -> None:
    """As ``model.to(device)``, except for the modules that keep their shards on the host."""
    if isinstance(model, GTPModule) and is_offloaded(model):
        return
    for child in model.children():
        move_unsharded(child, device)
    model._apply(lambda tensor: tensor.to(device), recurse=False)


def take_gpu_generator(states: Tensor | list[Tensor], saved_rank: int) -> None:
    """Give this rank's GPU the random numbers of that of another rank, which saved the ``states`` of all GPUs of its
    host. Libraries restore each under its own index, which is right only for the same rank."""
    if torch.cuda.is_available():
        torch.cuda.set_rng_state(states if isinstance(states, Tensor) else states[saved_rank % len(states)])
