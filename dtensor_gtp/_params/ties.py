"""Parameters that several modules share: which manager they get, also from an earlier call."""

from __future__ import annotations

import weakref

import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from .managed_param import ManagedParam


class ReplacedParam(weakref.ref[nn.Parameter]):
    """From a parameter that ``gtp_shard`` has replaced to what manages the one in its place.

    A module that was tied to it, outside of the module that was passed, still holds it: this is how a later call on
    that module finds the tie. Nothing else keeps it alive.
    """

    manager: ManagedParam


def note_replaced(old: nn.Parameter, manager: ManagedParam) -> None:
    """``manager`` manages the parameter that has taken the place of ``old``."""
    manager.replaced = replaced = ReplacedParam(old)
    replaced.manager = manager


def manager_of_replaced(param: nn.Parameter) -> ManagedParam | None:
    """What manages the parameter that an earlier call has put in the place of ``param``, which it has replaced."""
    refs = (ref for ref in weakref.getweakrefs(param) if isinstance(ref, ReplacedParam))
    return next((ref.manager for ref in refs), None)


def check_tie(fqn: str, existing: ManagedParam, mesh: DeviceMesh) -> None:
    """The gradient of a parameter is averaged over one mesh, that of the first call."""
    before, now = (sorted(m.mesh.flatten().tolist()) for m in (existing.mesh, mesh))
    if before != now:
        raise ValueError(
            f"gtp_shard expects a parameter that modules of two calls share to have the same ranks in both, but "
            f"parameter '{fqn}' of shape {tuple(existing.param.shape)} is '{existing.fqn}' of an earlier call on ranks "
            f"{before} of mesh axes {existing.mesh.mesh_dim_names}, and this call's mesh axes {mesh.mesh_dim_names} "
            f"have ranks {now} (rank {dist.get_rank()}). Shard both modules over the same mesh, put tied weights on "
            "one pipeline stage, or untie them and add up their gradients."
        )
