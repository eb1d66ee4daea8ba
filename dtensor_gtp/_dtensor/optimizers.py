"""Gradient scaling over shards: what ``torch.amp.GradScaler`` runs on all gradients at once."""

from __future__ import annotations

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from .. import _torch_compat as compat

aten = torch.ops.aten


@functools.cache
def install() -> None:
    """Replace DTensor's handler of the op, once in a process."""
    compat.set_dtensor_handler(aten._amp_foreach_non_finite_check_and_unscale_.default, unscale)


def unscale(op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Unscale local shards in place; ``found_inf`` is the maximum over every axis on which any gradient is sharded.
    ``args`` are ``(grads, found_inf, inv_scale)`` as the op takes them; ``grads`` may lie on different meshes."""
    grads, found_inf, inv_scale = args
    op([compat.local_part(grad) for grad in grads], found_inf, inv_scale)
    groups: dict[str, dist.ProcessGroup] = {}
    for grad in grads:
        for axis, placement in enumerate(grad.placements if isinstance(grad, DTensor) else ()):
            if not isinstance(placement, Replicate) and grad.device_mesh.size(axis) > 1:
                group = grad.device_mesh.get_group(axis)
                groups[group.group_name] = group
    for group in groups.values():
        dist.all_reduce(found_inf, dist.ReduceOp.MAX, group=group)
