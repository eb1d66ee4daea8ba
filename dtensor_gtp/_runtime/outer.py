"""Inside of ``fully_shard``: what it gathers is our shard, and it reads ``.grad`` when its module's backward ends.

``fully_shard`` outside of ``gtp_shard`` cuts our parameters once more, over a data-parallel axis. During a module's
forward and backward it registers what it has gathered: a DTensor just like ours, which the runtime follows. Two things
need care. A gather must not read a shard that is not there yet or no longer: the plan skips weights that are not
registered as ours. And gradients must be complete when the post-backward of their ``fully_shard`` module reads them.
That is an autograd node on the module's inputs; a node of ours right inside of it moves the gradients of that module
into ``.grad`` first. Modules whose inputs need no gradient are post-processed by a callback at the end of backward;
ours is queued before it, by a node around the outputs.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule

from .. import _torch_compat as compat


class _Marker(torch.autograd.Function):
    """Identity on tensors that runs ``note()`` when their gradients pass."""

    @staticmethod
    def forward(ctx: Any, note: Callable[[], None], *tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.note = note
        # Views keep the memory; as new tensors they get a node of their own.
        return tuple(tensor.view_as(tensor) for tensor in tensors)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.note()
        return (None, *grads)


def mark(tree: Any, note: Callable[[], None]) -> Any:
    """``tree`` (nested containers) with a node around its differentiable tensors that calls ``note`` in backward."""
    flat, structure = compat.tree_flatten(tree)
    indices = [i for i, leaf in enumerate(flat) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if not indices or not torch.is_grad_enabled():
        return tree
    for i, marked in zip(indices, _Marker.apply(note, *(flat[i] for i in indices)), strict=True):  # type: ignore[no-untyped-call]
        flat[i] = marked
    return compat.tree_unflatten(flat, structure)


def is_outer_module(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on ``module``."""
    return isinstance(module, FSDPModule)


def modules_of_unit(module: nn.Module) -> list[nn.Module]:
    """The modules whose parameters the ``fully_shard`` call on ``module`` manages: all below, up to inner calls."""
    modules, stack = [], [module]
    while stack:
        current = stack.pop()
        modules.append(current)
        stack.extend(child for child in current.children() if not is_outer_module(child))
    return modules


def hook_unit(module: nn.Module, end_of_unit: Callable[[], None], before_reshard: Callable[[], None]) -> None:
    """Hook one ``fully_shard`` module.

    Args:
        end_of_unit: Called in backward before its post-backward.
        before_reshard: Called after its forward, before it frees what it gathered.
    """

    def pre_forward(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return mark((args, kwargs), end_of_unit)

    def post_forward(module: nn.Module, args: Any, output: Any) -> None:
        before_reshard()

    # After fully_shard's own hook, so that in backward our node runs before its node; and before its own hook.
    module.register_forward_pre_hook(pre_forward, with_kwargs=True)
    module.register_forward_hook(post_forward, prepend=True)
