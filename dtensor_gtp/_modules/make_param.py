"""Makes the parameter of one decision: cuts it, registers the shard, and attaches what manages it."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Placement, Replicate

from .. import _torch_compat as compat
from .._params.layout import WeightLayout
from .._params.managed_param import ManagedParam
from .._params.pack_planes import make_wire
from .._params.sharded_weight import ShardedWeight
from .._params.ties import ReplacedParam
from .._params.whole_param import WholeParam
from ..placement import GTPShard
from ..quant.master import master_of
from ..quant.native import NativeWeight, recipe_groups
from .decide import Decision


def make_param(
    decision: Decision, mesh: DeviceMesh, device: torch.device, mp_policy: MixedPrecisionPolicy
) -> ManagedParam:
    """Build the DTensor parameter, register it at its sites, and return its manager."""
    old = decision.param
    if decision.existing is not None:
        decision.existing.sites.extend(decision.sites)
        for module, name in decision.sites:
            module._parameters[name] = decision.existing.param
        return decision.existing
    local, tp_spec, spec_mesh, placements = _local_part(old, mesh)
    recipe, local = decision.recipe, master_of(local)
    is_shard = isinstance(decision.placement, GTPShard)
    if is_shard:
        layout = WeightLayout(
            shape=local.shape,
            dim=decision.placement.dim,  # type: ignore[attr-defined]
            world=mesh.size(mesh.ndim - 1),
            rank=mesh.get_local_rank(mesh.ndim - 1),
            block_size=decision.placement.block_size,  # type: ignore[attr-defined]
        )
        shard = layout.shard_of(local.detach())
    else:
        shard = local.detach().clone(memory_format=torch.contiguous_format)
    if not shard.is_meta:
        shard = shard.to(device)
    spec = compat.make_spec(spec_mesh, (*placements, decision.placement), old.shape, old.dtype)
    if isinstance(shard, NativeWeight):
        assert recipe is not None
        shard = shard.like(groups=recipe_groups(spec, recipe))
    new = nn.Parameter(compat.wrap_local(shard, spec), requires_grad=old.requires_grad)
    structural = old.detach().__dict__  # what a tensor subclass needs for itself, its data among it
    for key, value in old.__dict__.items():
        if key not in structural:
            new.__dict__.setdefault(key, value)  # tags that users put on parameters
    for module, name in decision.sites:
        module._parameters[name] = new
    managed: ManagedParam
    if is_shard:
        wire = partial(make_wire, recipe=recipe, mp_policy=mp_policy)
        managed = ShardedWeight(decision.fqn, decision.sites, new, mesh, mp_policy, layout, tp_spec, wire)
    else:
        managed = WholeParam(decision.fqn, decision.sites, new, mesh, mp_policy, tp_spec, decision.reason)
    managed.replaced = replaced = ReplacedParam(old)
    replaced.manager = managed
    return managed


def _local_part(
    param: nn.Parameter, mesh: DeviceMesh
) -> tuple[Tensor, compat.DTensorSpec | None, DeviceMesh, tuple[Placement, ...]]:
    """What gtp cuts, the tp spec, the mesh of the new parameter, and its placements before the gtp axis."""
    replicate = (Replicate(),) * (mesh.ndim - 1)
    if not isinstance(param, DTensor):
        return param, None, mesh, replicate
    spec = compat.dtensor_spec(param)
    # The tp axes come first: placements apply from left to right, so gtp cuts what tp has left, also unevenly.
    spec_mesh = compat.concatenate_meshes([spec.mesh, mesh])
    return compat.local_tensor(param), spec, spec_mesh, (*spec.placements, *replicate)
