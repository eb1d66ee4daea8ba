"""Tied weights: all sites of one parameter share one ``ManagedParam``, and so its gradient, also across calls."""

from __future__ import annotations

import weakref

import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from .managed_param import ManagedParam


class ReplacedParam(weakref.ref[nn.Parameter]):
    """Leads from a parameter that ``gtp_shard`` has replaced to the manager of the new one: a module outside of the
    sharded one may still hold the old parameter (a tied weight), and a later call on that module must find the tie."""

    manager: ManagedParam


def manager_of_replaced(param: nn.Parameter) -> ManagedParam | None:
    """The manager of the parameter that replaced ``param`` in an earlier call."""
    refs = (ref for ref in weakref.getweakrefs(param) if isinstance(ref, ReplacedParam))
    return next((ref.manager for ref in refs), None)


def check_tie(fqn: str, existing: ManagedParam, mesh: DeviceMesh) -> None:
    """Raise a ValueError if a later call shards a tied parameter over other ranks: its gradient has one average."""
    before, now = (sorted(m.mesh.flatten().tolist()) for m in (existing.mesh, mesh))
    if before != now:
        raise ValueError(
            f"gtp_shard expects a parameter that modules of two calls share to have the same ranks in both, but "
            f"parameter '{fqn}' of shape {tuple(existing.param.shape)} is '{existing.fqn}' of an earlier call on ranks "
            f"{before} of mesh axes {existing.mesh.mesh_dim_names}, and this call's mesh axes {mesh.mesh_dim_names} "
            f"have ranks {now} (rank {dist.get_rank()}). Shard both modules over the same mesh, put tied weights on "
            "one pipeline stage, or untie them and add up their gradients."
        )
