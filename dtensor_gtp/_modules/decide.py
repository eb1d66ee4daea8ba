"""Which parameter of a module is sharded how, and why. It only looks; ``make_param`` builds once all ranks agree."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .. import _torch_compat as compat
from .._params.managed_param import ManagedParam, Site
from .._params.ties import check_tie, manager_of_replaced
from ..placement import GTPShard
from ..policy import SchedulePolicy
from ..quant.master import place_quantized
from ..quant.recipes import Recipe
from .binding import binding_of


@dataclass
class Decision:
    """What happens to one parameter.

    Args:
        fqn: First fully qualified name.
        sites: All modules and names under which the very same parameter is registered.
        param: The parameter before sharding.
        placement: Placement on the gtp axis.
        reason: Why a parameter stays whole; empty for a shard.
        recipe: The recipe that ``quantize_`` gave it.
        existing: Set if an earlier call on a submodule manages the parameter already (tied across calls).
    """

    fqn: str
    sites: list[Site]
    param: nn.Parameter
    placement: Placement
    reason: str = ""
    recipe: Recipe | None = None
    existing: ManagedParam | None = None

    def describe(self) -> str:
        """What must be equal on all ranks: else one rank would wait for a collective that another never launches."""
        placements = (*(self.param.placements if isinstance(self.param, DTensor) else ()), self.placement)
        return (
            f"parameter '{self.fqn}' of shape {tuple(self.param.shape)} and {self.param.dtype} with placements "
            f"{placements}, requires_grad={self.param.requires_grad}, at {len(self.sites)} sites, recipe={self.recipe}"
        )


class Decisions(NamedTuple):
    """About all parameters below a module.

    Args:
        params: One for each parameter that no earlier call manages, or that is tied to one.
        unmanaged: Where ignored parameters are registered.
    """

    params: list[Decision]
    unmanaged: set[Site]


class _Asked(NamedTuple):
    """The arguments of ``gtp_shard`` that say how parameters are sharded."""

    mesh: DeviceMesh
    placement_fn: Callable[[nn.Parameter], Placement | None] | None
    schedule: SchedulePolicy
    mp_policy: MixedPrecisionPolicy


def decide(
    module: nn.Module,
    mesh: DeviceMesh,
    placement_fn: Callable[[nn.Parameter], Placement | None] | None,
    schedule: SchedulePolicy,
    mp_policy: MixedPrecisionPolicy,
    ignored: set[nn.Parameter],
) -> Decisions:
    """Decide about each parameter of ``module`` that no earlier call manages.

    Raises:
        TypeError, ValueError, NotImplementedError: A parameter or what ``placement_fn`` says of it is not supported.
    """
    asked = _Asked(mesh, placement_fn, schedule, mp_policy)
    decisions: dict[int, Decision] = {}
    unmanaged: set[Site] = set()
    managed = {id(p.param): p for m in module.modules() if (b := binding_of(m)) for p in b.params.values()}
    for module_name, submodule in module.named_modules():
        binding = binding_of(submodule)
        if binding is not None:
            unmanaged |= {site for site in binding.group.unmanaged if site.module is submodule}
            continue
        for name, param in submodule._parameters.items():
            site = Site(submodule, name)
            if param is None or param in ignored:
                unmanaged |= set() if param is None else {site}
            elif id(param) in decisions:
                decisions[id(param)].sites.append(site)
            else:
                fqn = f"{module_name}.{name}" if module_name else name
                existing = managed.get(id(param)) or manager_of_replaced(param)
                decisions[id(param)] = _decide(fqn, site, param, existing, asked)
    for decision in decisions.values():
        _check_sites(decision)
    return Decisions(list(decisions.values()), unmanaged)


def _decide(fqn: str, site: Site, param: nn.Parameter, existing: ManagedParam | None, asked: _Asked) -> Decision:
    if existing is not None:
        check_tie(fqn, existing, asked.mesh)
        return Decision(fqn, [site], param, Replicate(), existing=existing)
    check_param(fqn, param, asked.mesh)
    placement = _asked_placement(fqn, param, asked)
    recipe: Recipe | None = getattr(compat.local_part(param), "recipe", None)
    if recipe is None:
        placement, reason = _place(site, param, placement, asked.schedule)
        return Decision(fqn, [site], param, placement, reason)
    device, dtype = torch.device(asked.mesh.device_type), asked.mp_policy.param_dtype or param.dtype
    asked_or_own = placement or _placement_of_module(site)
    placement = place_quantized(fqn, param, recipe, asked_or_own, device, dtype)
    return Decision(fqn, [site], param, placement, recipe=recipe)


def _asked_placement(fqn: str, param: nn.Parameter, asked: _Asked) -> Placement | None:
    """What ``shard_placement_fn`` says of a parameter; a shard as a ``GTPShard``."""
    try:
        placement = asked.placement_fn(param) if asked.placement_fn is not None else None
    except Exception as error:
        error.add_note(f"shard_placement_fn raised this when it was asked about {_described(fqn, param, asked.mesh)}.")
        raise
    if placement is None or isinstance(placement, Replicate):
        return placement
    if not isinstance(placement, Shard | GTPShard):
        raise TypeError(
            f"gtp_shard expects shard_placement_fn to return a GTPShard, a Shard, a Replicate or None, but got "
            f"{placement!r} for {_described(fqn, param, asked.mesh)}. Return None where the default is right."
        )
    if not -param.ndim <= placement.dim < param.ndim:
        raise ValueError(
            f"gtp_shard expects a dim in [{-param.ndim}, {param.ndim}) for {_described(fqn, param, asked.mesh)}, but "
            f"shard_placement_fn returned {placement!r}. Name a dim that it has, or return None for the default."
        )
    if getattr(placement, "split_factor", 1) != 1:
        raise ValueError(
            f"gtp_shard derives the split factor from the tensor-parallel placements of "
            f"{_described(fqn, param, asked.mesh)}, but shard_placement_fn returned {placement!r}. Leave split_factor "
            "out."
        )
    return GTPShard(placement.dim % param.ndim, block_size=getattr(placement, "block_size", 1))


def _place(site: Site, param: nn.Parameter, asked: Placement | None, schedule: SchedulePolicy) -> tuple[Placement, str]:
    """The placement of a parameter, and why it stays whole if it does."""
    if isinstance(asked, Replicate):
        return asked, "asked for"
    if not param.is_floating_point():
        return Replicate(), "not floating point"
    if asked is not None:
        return asked, ""
    if param.ndim < 2:
        return Replicate(), f"{param.ndim}-D"
    if param.numel() == 0:
        return Replicate(), "no elements"
    if param.numel() < schedule.min_shard_numel:
        return Replicate(), f"below min_shard_numel={schedule.min_shard_numel}"
    own = _placement_of_module(site)
    if own is not None:
        return own, f"by {type(site.module).__name__}" if isinstance(own, Replicate) else ""
    return GTPShard(_default_dim(param)), ""


def _default_dim(param: nn.Parameter) -> int:
    """0; 1 where tp has cut dim 0 in blocks, which must be the last to cut their dim."""
    in_blocks = isinstance(param, DTensor) and any(
        isinstance(p, GTPShard) and p.block_size > 1 and p.dim % param.ndim == 0 for p in param.placements
    )
    return int(in_blocks)


def _placement_of_module(site: Site) -> Placement | None:
    """What a module says of its own parameter, as ``GroupedLinear`` does."""
    if not hasattr(type(site.module), "default_gtp_placement"):
        return None
    own: Placement = site.module.default_gtp_placement(site.name)  # type: ignore[operator]
    return own


def check_param(fqn: str, param: nn.Parameter, mesh: DeviceMesh) -> None:
    """Raises:
    ValueError: The parameter has no shape yet, or is a DTensor that cannot be cut again over ``mesh``.
    NotImplementedError: It is a sparse tensor.
    """
    if isinstance(param, nn.UninitializedParameter):
        raise ValueError(
            f"gtp_shard expects parameters with a shape, but '{fqn}' of a lazy module has none yet. Run one forward "
            "before gtp_shard, or build the module with its input size."
        )
    if param.layout != torch.strided:
        raise NotImplementedError(
            f"gtp_shard does not support parameter '{fqn}' of shape {tuple(param.shape)} and layout {param.layout}. "
            "Convert it with to_dense() or pass it in ignored_params."
        )
    if isinstance(param, DTensor):
        _check_meshes(fqn, param, mesh)


def _check_meshes(fqn: str, param: DTensor, mesh: DeviceMesh) -> None:
    axes, gtp_axes = param.device_mesh.mesh_dim_names, mesh.mesh_dim_names
    what = (
        f"parameter '{fqn}' of shape {tuple(param.shape)} is a DTensor with placements {param.placements} on mesh axes "
        f"{axes}"
    )
    if axes is None or gtp_axes is None:
        raise ValueError(
            f"gtp_shard expects meshes with named axes, but {what} and its own mesh has axes {gtp_axes} (rank "
            f"{dist.get_rank()}). Pass mesh_dim_names to init_device_mesh."
        )
    # Roots with equal ranks in an equal order are the same, even if they are different objects: DTensor may have
    # replaced the parameter's mesh by an equal one of an earlier root.
    if not torch.equal(*(compat.root_mesh(m).mesh.flatten() for m in (param.device_mesh, mesh))):
        raise ValueError(
            f"gtp_shard expects parameters on meshes with the same root as its own, but {what} of another root than "
            f"axis '{axis_name(mesh)}' (rank {dist.get_rank()}). Build one mesh with init_device_mesh and pass its "
            "sub-meshes to parallelize_module and gtp_shard."
        )
    is_overlapping = bool(set(axes) & set(gtp_axes))
    try:
        compat.concatenate_meshes([param.device_mesh, mesh])
    except RuntimeError:
        is_overlapping = True
    if is_overlapping:
        raise ValueError(
            f"gtp_shard expects a mesh whose axes no parameter uses yet, but {what}, which overlap with {gtp_axes} "
            f"(rank {dist.get_rank()}). Pass a mesh of other axes, e.g. mesh['gtp'] beside mesh['tp']."
        )


def _check_sites(decision: Decision) -> None:
    """Refuse embeddings whose forward writes the weight, or whose gradient is not dense or depends on the tokens of all
    ranks; and what a module itself refuses of its parameters."""
    for module, _ in decision.sites:
        if isinstance(decision.placement, GTPShard) and hasattr(type(module), "check_gtp_placement"):
            module.check_gtp_placement(decision.fqn, decision.param, decision.placement)  # type: ignore[operator]
        if not isinstance(module, nn.Embedding | nn.EmbeddingBag):
            continue
        for option in ("max_norm", "sparse", "scale_grad_by_freq"):
            if getattr(module, option):
                raise NotImplementedError(
                    f"gtp_shard does not support {type(module).__name__}({option}={getattr(module, option)}) for "
                    f"parameter '{decision.fqn}' of shape {tuple(decision.param.shape)}: ranks see different tokens, "
                    "so their copies of the weight or its gradient would differ. Build the module without it or pass "
                    "the parameter in ignored_params."
                )


def _described(fqn: str, param: nn.Parameter, mesh: DeviceMesh) -> str:
    return f"parameter '{fqn}' of shape {tuple(param.shape)} on mesh axis '{axis_name(mesh)}' (rank {dist.get_rank()})"


def axis_name(mesh: DeviceMesh) -> str:
    """Name of the gtp axis: the last one."""
    return mesh.mesh_dim_names[-1] if mesh.mesh_dim_names else "gtp"
