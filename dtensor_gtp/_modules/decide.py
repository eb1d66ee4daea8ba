"""Decides how each parameter of a module is sharded. ``shard_module`` builds it once all ranks agree."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .. import _torch_compat as compat
from .._comm.collectives import has_replicas
from .._howto import printable, see
from .._params.managed_param import ManagedParam, Site
from .._params.refusals import hook_at_node
from .._params.ties import check_tie, manager_of_replaced
from ..placement import GTPShard
from ..quant.master import master_of, place_quantized
from ..quant.recipe import Recipe
from .bad_arguments import in_rank_order, validate_mesh
from .binding import Arguments, binding_of, bindings_of, join_name, params_of


@dataclass
class Decision:
    """How one parameter is sharded, or why it stays whole."""

    fqn: str  # the first one, if the parameter is tied
    sites: list[Site]
    param: nn.Parameter  # before sharding
    mesh: DeviceMesh
    placement: Placement  # on the gtp axis
    reason: str = ""  # why the parameter stays whole; empty for a shard
    recipe: Recipe | None = None  # given by ``quantize_``
    # Set if an earlier call on a submodule manages the parameter (a tie).
    existing: ManagedParam | None = None

    def describe(self) -> str:
        """What must be equal on all ranks; otherwise one rank would wait for a collective that
        another never starts."""
        placements: tuple[Placement, ...] = (self.placement,)
        if isinstance(self.param, DTensor):
            placements = (*self.param.placements, self.placement)
        return (
            f"parameter '{self.fqn}' of shape {tuple(self.param.shape)} and {self.param.dtype} "
            f"with placements {placements} on axes {self.mesh.mesh_dim_names} of sizes "
            f"{tuple(self.mesh.shape)}, requires_grad={self.param.requires_grad}, at "
            f"{len(self.sites)} sites, recipe={self.recipe}"
        )


def decide(module: nn.Module, arguments: Arguments) -> tuple[list[Decision], set[Site]]:
    """Decide about each parameter of a module that no earlier call manages. Also return where
    ignored ones are."""
    decisions: dict[int, Decision] = {}
    unmanaged: set[Site] = set()
    managed = {id(p.param): p for p in params_of(bindings_of(module.modules()))}
    for prefix, submodule in module.named_modules():
        if (binding := binding_of(submodule)) is not None:
            # An earlier call has decided about this module. Keep what it ignores.
            unmanaged |= {site for site in binding.group.unmanaged if site.module is submodule}
            continue
        for name, param in submodule._parameters.items():
            site = Site(submodule, name)
            if param is None:
                continue
            if param in arguments.ignored_params:
                unmanaged.add(site)
            elif id(param) in decisions:
                decisions[id(param)].sites.append(site)  # tied within this call
            else:
                # Tied with an earlier call: the module has our parameter, or still the one that ours
                # has replaced.
                existing = managed.get(id(param)) or manager_of_replaced(param)
                fqn = printable(join_name(prefix, name))
                decisions[id(param)] = _decide(fqn, site, param, existing, arguments)
    for decision in decisions.values():
        _check_sites(decision)
    return list(decisions.values()), unmanaged


def _decide(fqn: str, site: Site, param: nn.Parameter, existing: ManagedParam | None, arguments: Arguments) -> Decision:
    mp_policy = arguments.mp_policy
    if existing is not None:
        check_tie(fqn, existing, arguments.mesh)
        # ``existing`` keeps its own placement: the one given here shards nothing.
        return Decision(fqn, [site], param, arguments.mesh, Replicate(), existing=existing)
    asked, mesh = _asked_placement(fqn, param, arguments)
    _check_param(fqn, param, mesh)  # first, as the rest needs a plain layout and a known shape
    recipe: Recipe | None = getattr(compat.local_part(param), "recipe", None)
    if arguments.shard_optimizer and has_replicas(mesh):
        _check_states(fqn, param, mesh)
    local = compat.local_part(param)
    # ``detach`` of an nn.Parameter has the class of its data.
    if arguments.offload is not None and type(local.detach()) is not torch.Tensor:
        raise NotImplementedError(
            f"gtp_shard does not support offload_policy for parameter '{fqn}' of shape "
            f"{tuple(param.shape)}, a {type(local).__name__} (rank {dist.get_rank()}): quantized "
            "shards stay on the device. Leave out offload_policy, or quantize_ of this weight. "
            f"{see('offload')}"
        )
    if recipe is None:
        placement, reason = _place(site, param, asked, arguments.schedule.min_shard_numel)
        if placement.is_shard() and asked is None and _has_whole_groups(site, param, mesh):
            placement = GTPShard(0)  # between groups, whatever the module's default is
        return Decision(fqn, [site], param, mesh, placement, reason)
    device = torch.device(mesh.device_type)
    dtype = mp_policy.param_dtype or param.dtype
    asked = asked or _placement_of_module(site)
    placement = place_quantized(fqn, param, recipe, asked, device, dtype)
    return Decision(fqn, [site], param, mesh, placement, recipe=recipe)


def _check_states(fqn: str, param: nn.Parameter, mesh: DeviceMesh) -> None:
    """Refuse what replicas cannot split: shards that are no plain tensors, and axes without names."""
    kind = type(master_of(compat.local_part(param)).detach())
    what = f"parameter '{fqn}' of shape {tuple(param.shape)}"
    if param.requires_grad and kind is not torch.Tensor:
        raise NotImplementedError(
            f"gtp_shard does not support shard_optimizer=True for {what}, a {kind.__name__} (rank "
            f"{dist.get_rank()}): replicas split plain tensors. Use quantize_(storage='master'), "
            "freeze the parameter before, or leave out shard_optimizer."
        )
    if mesh.mesh_dim_names is None:
        raise ValueError(
            "gtp_shard expects a mesh with named axes for shard_optimizer=True, but the mesh of "
            f"{what} has none (rank {dist.get_rank()}). Pass mesh_dim_names to init_device_mesh."
        )


def _asked_placement(fqn: str, param: nn.Parameter, arguments: Arguments) -> tuple[Placement | None, DeviceMesh]:
    """What ``shard_placement_fn`` returns for a parameter, a shard as a ``GTPShard``; and its mesh."""
    if arguments.shard_placement_fn is None:
        return None, arguments.mesh

    def on(mesh: DeviceMesh) -> str:
        axis = (mesh.mesh_dim_names or ("gtp",))[-1]
        what = f"parameter '{fqn}' of shape {tuple(param.shape)}"
        return f"{what} on mesh axis '{axis}' (rank {dist.get_rank()})"

    what = on(arguments.mesh)
    try:
        returned = arguments.shard_placement_fn(param)
    except Exception as error:
        error.add_note(f"shard_placement_fn raised this when it was asked about {what}.")
        raise
    placement, mesh = _own_mesh(returned, arguments.mesh, what)
    what = on(mesh)  # of the mesh that was returned
    if placement is None or isinstance(placement, Replicate):
        return placement, mesh
    if not isinstance(placement, Shard | GTPShard):
        raise TypeError(
            "gtp_shard expects shard_placement_fn to return a GTPShard, a Shard, a Replicate or "
            f"None, or a pair of one of these and a DeviceMesh, but got {placement!r} for {what}. "
            "Return None where the default is right."
        )
    returned = f"{what}, but shard_placement_fn returned {placement!r}"
    if not -param.ndim <= placement.dim < param.ndim:
        limits = f"[{-param.ndim}, {param.ndim})"
        raise ValueError(f"gtp_shard expects a dim in {limits} for {returned}. Name a dim that it has, or return None.")
    if getattr(placement, "split_factor", 1) != 1:
        rule = "gtp_shard derives the split factor from the tensor-parallel placements"
        raise ValueError(f"{rule} of {returned}. Leave split_factor out.")
    block_size = getattr(placement, "block_size", 1)
    return GTPShard(placement.dim % param.ndim, block_size=block_size), mesh  # a dim may count from the end


def _own_mesh(returned: Any, default: DeviceMesh, what: str) -> tuple[Any, DeviceMesh]:
    """The placement and the mesh in what ``shard_placement_fn`` has returned."""
    if isinstance(returned, tuple) and len(returned) == 2:
        placement, mesh = returned
    elif hasattr(returned, "mesh_info"):  # torch's ShardPlacementResult
        info = returned.mesh_info
        placement = returned.placement
        mesh = info.mesh
        if info.shard_mesh_dim != mesh.ndim - 1:
            raise ValueError(
                "gtp_shard expects shards on the last axis of a mesh, but shard_placement_fn "
                f"returned axis {info.shard_mesh_dim} of {mesh.ndim} for {what}. Return a pair "
                "(placement, mesh['replicate', 'gtp'])."
            )
    else:
        return returned, default  # a placement alone, or None
    if mesh is default:  # ``gtp_shard`` has checked it and put it in order
        return placement, default
    validate_mesh(mesh)
    if mesh.device_type != default.device_type:
        raise ValueError(
            f"gtp_shard expects one device type, '{default.device_type}', but shard_placement_fn "
            f"returned a mesh of '{mesh.device_type}' for {what}. Build all meshes for the device "
            "of the module."
        )
    return placement, in_rank_order(mesh)


def _place(site: Site, param: nn.Parameter, asked: Placement | None, min_numel: int) -> tuple[Placement, str]:
    """The placement of a parameter, and why it stays whole if it does."""
    if isinstance(asked, Replicate):
        return asked, "asked for"
    if not param.is_floating_point():
        return Replicate(), "not floating point"
    # What was asked for goes before the size limits below and the module's default.
    if asked is not None:
        return asked, ""
    if param.ndim < 2:
        return Replicate(), f"{param.ndim}-D"
    if param.numel() == 0:
        return Replicate(), "no elements"
    if param.numel() < min_numel:
        return Replicate(), f"below min_shard_numel={min_numel}"
    own = _placement_of_module(site)
    if isinstance(own, Replicate):
        return own, f"by {type(site.module).__name__}"
    if own is not None:
        return own, ""
    # A cut in blocks, as by tensor parallelism, must be the last one of its dim.
    for earlier in getattr(param, "placements", ()):
        if isinstance(earlier, GTPShard) and earlier.block_size > 1 and earlier.dim % param.ndim == 0:
            return GTPShard(1), ""
    return GTPShard(0), ""


def _placement_of_module(site: Site) -> Placement | None:
    """What a module such as ``GroupedLinear`` says of its own parameter."""
    if not hasattr(type(site.module), "default_gtp_placement"):
        return None
    own: Placement = site.module.default_gtp_placement(site.name)  # type: ignore[operator]
    return own


def _has_whole_groups(site: Site, param: nn.Parameter, mesh: DeviceMesh) -> bool:
    """Whether each rank can have as many groups of a grouped weight. Then their gradients, which
    are made group by group, are sent without a copy."""
    # A weight of all groups has the shape (groups, out, in).
    if param.ndim != 3 or not getattr(type(site.module), "has_grouped_weight", False):
        return False
    num_groups: int = compat.local_part(param).shape[0]
    return num_groups % mesh.size(mesh.ndim - 1) == 0


def _check_param(fqn: str, param: nn.Parameter, mesh: DeviceMesh) -> None:
    if isinstance(param, nn.UninitializedParameter):
        what = f"parameters with a shape, but '{fqn}' of a lazy module has none yet"
        raise ValueError(f"gtp_shard expects {what}. Run one forward before, or build the module with its input size.")
    if param.layout != torch.strided:
        what = f"parameter '{fqn}' of shape {tuple(param.shape)} and layout {param.layout}"
        advice = "Convert it with to_dense() or pass it in ignored_params"
        raise NotImplementedError(f"gtp_shard does not support {what}. {advice}.")
    if compat.has_hooks_at_node(param):  # no gradient of a shard comes through that node
        raise ValueError(hook_at_node(fqn, param))
    if not isinstance(param, DTensor):
        return
    axes = param.device_mesh.mesh_dim_names
    gtp_axes = mesh.mesh_dim_names
    cut = f"DTensor with placements {param.placements} on mesh axes {axes}"
    what = f"parameter '{fqn}' of shape {tuple(param.shape)} is a {cut}"
    if axes is None or gtp_axes is None:  # ``DeviceMesh._concatenate`` joins axes by their names
        what = f"{what} and its own mesh has axes {gtp_axes} (rank {dist.get_rank()})"
        raise ValueError(
            f"gtp_shard expects meshes with named axes, but {what}. Pass mesh_dim_names to init_device_mesh."
        )
    # Compare the ranks of the roots, not the objects: DTensor may have replaced the parameter's
    # mesh by an equal one.
    own_ranks = compat.root_mesh(param.device_mesh).mesh.flatten()
    if not torch.equal(own_ranks, compat.root_mesh(mesh).mesh.flatten()):
        raise ValueError(
            f"gtp_shard expects parameters on meshes with the same root as its own, but {what} of "
            f"another root than axis '{gtp_axes[-1]}' (rank {dist.get_rank()}). Build one mesh "
            "with init_device_mesh and pass its sub-meshes to parallelize_module and gtp_shard."
        )
    is_overlapping = bool(set(axes) & set(gtp_axes))
    # Axes of other names may have the same ranks, e.g. flattened ones. Torch finds these overlaps.
    try:
        compat.concatenate_meshes([param.device_mesh, mesh])  # only for its checks
    except RuntimeError:
        is_overlapping = True
    if is_overlapping:
        raise ValueError(
            f"gtp_shard expects a mesh whose axes no parameter uses yet, but {what}, which overlap "
            f"with {gtp_axes} (rank {dist.get_rank()}). Pass a mesh of other axes, e.g. "
            "mesh['gtp'] beside mesh['tp']."
        )


def _check_sites(decision: Decision) -> None:
    """Ask the modules of a parameter, and refuse embeddings whose options write the weight or
    change its gradient."""
    placement = decision.placement
    for module, _ in decision.sites:
        if isinstance(placement, GTPShard) and hasattr(type(module), "check_gtp_placement"):
            module.check_gtp_placement(decision.fqn, decision.param, placement)  # type: ignore[operator]
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        for option in ("max_norm", "sparse", "scale_grad_by_freq"):
            if getattr(module, option):
                raise NotImplementedError(
                    "gtp_shard does not support "
                    f"{type(module).__name__}({option}={getattr(module, option)}) for parameter "
                    f"'{decision.fqn}' of shape {tuple(decision.param.shape)}: ranks see different "
                    "tokens, so their copies of the weight or its gradient would differ. Build the "
                    "module without it or pass the parameter in ignored_params."
                )
