"""What native storage keeps of a weight, and how ranks quantize their parts of weights alike."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat
from .planes import Direction, PlaneSpec, Quantized
from .recipe import Recipe

PLANE_NAMES = ("elements", "scales")
STORED_NAMES = (*PLANE_NAMES, "amax")
_AMAX = PlaneSpec(torch.float32, None, None)  # one for each matrix


class NativeInfo(NamedTuple):
    """What a native weight knows beside its data."""

    recipe: Recipe
    name: str  # of the parameter, for messages
    whole: torch.Size  # shape of the weight of which this may be a part
    # Shape that the planes describe; a view of the native weight may have another.
    matrix: torch.Size
    # Process groups over which a statistic of the whole runs; None if not known.
    groups: tuple[str, ...] | None


def _stores_amax(recipe: Recipe) -> bool:
    return -2 in recipe.amax_dims  # dequantizing takes the largest magnitude of the whole weight


def native_planes(recipe: Recipe) -> dict[str, PlaneSpec]:
    """What is stored of a weight, by name."""
    planes = dict(zip(PLANE_NAMES, recipe.rowwise, strict=False))  # without a plane of scales they follow from amax
    if _stores_amax(recipe):
        planes["amax"] = _AMAX
    return planes


def quantized_of(stored: Mapping[str, Tensor]) -> Quantized:
    """What the tensors of a native weight are, given by name."""
    planes = tuple(stored[name] for name in PLANE_NAMES if name in stored)
    return Quantized(planes, stored.get("amax"))


def quantize_parts(values: Sequence[Tensor], infos: Sequence[NativeInfo]) -> list[Quantized]:
    """Quantize this rank's parts of weights: one all-reduce of maxima for all of them on each mesh
    axis. NotImplementedError if a recipe needs a statistic of the whole weight and it is not known
    which ranks hold it."""
    maxima = [info.recipe.amax(value) for value, info in zip(values, infos, strict=True)]
    by_groups: dict[tuple[str, ...], list[Tensor]] = {}
    for amax, info in zip(maxima, infos, strict=True):
        if amax is None or amax.is_meta or info.groups == ():  # (): no axis cuts what the maximum runs over
            continue
        if info.groups is None:
            raise NotImplementedError(
                f"Native parameter '{info.name}' of shape {tuple(info.whole)} cannot be written by "
                f"copy_ under fully_shard, because {info.recipe.name} has one scale for the whole "
                "weight, and fully_shard does not pass the group of its shards. Use "
                "load_state_dict or dtensor_gtp.optim.MasterOptimizer."
            )
        by_groups.setdefault(info.groups, []).append(amax)
    # One collective for all weights that the same axes cut.
    for names, members in by_groups.items():
        _all_reduce_max(members, names)
    results = []
    for value, info, amax in zip(values, infos, maxima, strict=True):
        quantized = info.recipe.quantize(value, Direction.ROWWISE, amax)
        if not _stores_amax(info.recipe):
            quantized = Quantized(quantized.planes, None)  # its scales are stored
        results.append(quantized)
    return results


def _all_reduce_max(maxima: Sequence[Tensor], groups: Sequence[str]) -> None:
    """Replace magnitudes by their maximum over all ranks, in place, on the current stream.

    [Note: magnitudes as integers]
    The integers with the bits of non-negative floats have their order, with NaN as the largest. A
    maximum of floats may lose a NaN.
    """
    flat = torch.cat([amax.reshape(-1) for amax in maxima])
    for name in groups:
        dist.all_reduce(flat.view(torch.int32), dist.ReduceOp.MAX, group=compat.resolve_group(name))
    for amax, part in zip(maxima, flat.split([amax.numel() for amax in maxima]), strict=True):
        amax.copy_(part.view(amax.shape))  # into the caller's tensors


def groups_of(param: Tensor, recipe: Recipe) -> tuple[str, ...]:
    """The process groups over which the recipe's statistic of a parameter runs."""
    if not isinstance(param, DTensor):
        return ()
    return recipe_groups(compat.dtensor_spec(param), recipe)


def recipe_groups(spec: compat.DTensorSpec, recipe: Recipe) -> tuple[str, ...]:
    """Those of the mesh axes that cut a dim over which the recipe's statistic runs, hence never of
    replicas."""
    mesh = spec.mesh
    ndim = len(spec.shape)
    names = []
    for axis, placement in enumerate(spec.placements):
        dim = getattr(placement, "dim", ndim)  # without one it cuts nothing
        if mesh.size(axis) > 1 and dim - ndim in recipe.amax_dims:
            names.append(mesh.get_group(axis).group_name)
    return tuple(names)
