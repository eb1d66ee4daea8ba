"""Tied weights: all sites of one parameter share one ``ManagedParam``, and so its gradient, also
across calls."""

from __future__ import annotations

import functools
import gc
import logging
import types
import weakref
from collections.abc import Iterable

import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from .managed_param import ManagedParam

logger = logging.getLogger(__name__)

_REMEDY = (
    "Read the parameter from its module when it is used (self.layer.weight); for a tied weight, "
    "call gtp_shard on the module that contains both, or on the other module as well."
)


class ReplacedParam(weakref.ref[nn.Parameter]):
    """Leads from a parameter that ``gtp_shard`` has replaced to the manager of the new one: a
    module outside of the sharded one may still hold the old parameter (a tied weight), and a later
    call on that module must find the tie."""

    manager: ManagedParam


def manager_of_replaced(param: nn.Parameter) -> ManagedParam | None:
    """The manager of the parameter that replaced ``param`` in an earlier call."""
    # ``gtp_shard`` leaves such a reference instead of an attribute on the user's tensor.
    refs = (ref for ref in weakref.getweakrefs(param) if isinstance(ref, ReplacedParam))
    return next((ref.manager for ref in refs), None)


def check_tie(fqn: str, existing: ManagedParam, mesh: DeviceMesh) -> None:
    """Raise a ValueError if a later call shards a tied parameter over other ranks: its gradient has
    one average."""
    before, now = (sorted(m.mesh.flatten().tolist()) for m in (existing.mesh, mesh))  # an average has no order
    if before != now:
        raise ValueError(
            "gtp_shard expects the same ranks in both calls for a parameter that modules of two "
            f"calls share, but parameter '{fqn}' of shape {tuple(existing.param.shape)} is "
            f"'{existing.fqn}' of an earlier call on ranks {before} of mesh axes "
            f"{existing.mesh.mesh_dim_names}, and this call's mesh axes {mesh.mesh_dim_names} have "
            f"ranks {now} (rank {dist.get_rank()}). Shard both modules over the same mesh, put "
            "tied weights on one pipeline stage, or untie them and add up their gradients."
        )


def refuse_gradient_of_replaced(replaced: ReplacedParam, _: object) -> None:
    """A hook of a parameter that ``gtp_shard`` has replaced: something still computes with it, on
    this rank alone."""
    managed = replaced.manager
    holders = _holders_of([replaced()])
    raise RuntimeError(
        "A gradient was computed for the old parameter, which gtp_shard replaced by "
        f"'{managed.fqn}' of shape {tuple(managed.param.shape)} on mesh axes "
        f"{managed.mesh.mesh_dim_names} (rank {dist.get_rank()}): "
        f"{' and '.join(holders) or 'something'} still uses the old one, so the sharded one would "
        f"lose this part of its gradient. {_REMEDY}"
    )


def warn_of_holders(params: Iterable[ManagedParam]) -> None:
    """In the first forward, name what still holds parameters that ``gtp_shard`` has replaced."""
    held = [m for m in params if (old := m.registration.replaced) is not None and old() is not None]
    replaced = [old() for managed in held if (old := managed.registration.replaced) is not None]
    if held and (holders := _holders_of(replaced)):
        names = ", ".join(f"'{managed.fqn}'" for managed in held[:8])
        text = (
            "%s still holds old parameters that gtp_shard has replaced, such as those of %s: they "
            "take memory and are not trained (rank %d). %s"
        )
        logger.warning(text, " and ".join(holders), names, dist.get_rank(), _REMEDY)


def _holders_of(params: list[nn.Parameter | None]) -> list[str]:
    """What holds them, as far as Python tells: modules, containers, partial functions and closures."""
    found: dict[str, None] = {}
    for holder in gc.get_referrers(*params):  # visits all objects that the garbage collector knows
        if holder is params:  # this function's own argument
            continue
        if isinstance(holder, tuple):  # perhaps the arguments of a partial function
            around_tuple = gc.get_referrers(holder)
            holder = next((p for p in around_tuple if isinstance(p, functools.partial)), holder)
        if isinstance(holder, dict):
            # Of a module: its ``__dict__`` has this one as ``_parameters``.
            around = [outer for outer in gc.get_referrers(holder) if isinstance(outer, dict)]
            attributes = [outer for outer in around if outer.get("_parameters") is holder] or [holder]
            owners = gc.get_referrers(*attributes)
            if modules := [owner for owner in owners if isinstance(owner, nn.Module)]:
                found |= {f"a {type(module).__name__}": None for module in modules}
            elif "__builtins__" not in holder:  # with it: the globals of a script or a Python module
                found["a dict"] = None
        elif isinstance(holder, list | tuple | set | frozenset):
            found[f"a {type(holder).__name__} of {len(holder)} items"] = None
        elif not isinstance(holder, types.FrameType | types.GeneratorType):
            # A local variable harms nobody.
            found[f"a {type(holder).__name__}"] = None
    return list(found)
