"""What native storage keeps of a weight, and how parts of weights are quantized to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat
from .planes import Direction, PlaneSpec, Quantized
from .recipes import Recipe

PLANE_NAMES = ("elements", "scales")
STORED_NAMES = (*PLANE_NAMES, "amax")
_AMAX = PlaneSpec(torch.float32, None, None)  # one for each matrix


class NativeInfo(NamedTuple):
    """What a native weight knows beside its data."""

    recipe: Recipe
    name: str  # of the parameter, for messages
    whole: torch.Size  # shape of the weight of which this may be a part
    matrix: torch.Size  # shape that the planes describe; a view of the native weight may have another
    groups: tuple[str, ...] | None  # process groups over which a statistic of the whole runs; None if not known


def _stores_amax(recipe: Recipe) -> bool:
    """Whether dequantizing takes the largest magnitude of the whole weight."""
    return -2 in recipe.amax_dims


def native_planes(recipe: Recipe) -> dict[str, PlaneSpec]:
    """What is stored of a weight, by name."""
    planes = dict(zip(PLANE_NAMES, recipe.rowwise, strict=False))
    return planes | {"amax": _AMAX} if _stores_amax(recipe) else planes


def quantized_of(stored: Mapping[str, Tensor]) -> Quantized:
    """What the tensors of a native weight are, given by name."""
    return Quantized(tuple(stored[name] for name in PLANE_NAMES if name in stored), stored.get("amax"))


def quantize_parts(values: Sequence[Tensor], infos: Sequence[NativeInfo]) -> list[Quantized]:
    """Quantize this rank's parts of weights: one all-reduce of maxima for all of them on each mesh axis.

    Args:
        values: High-precision values.
        infos: What they are parts of.

    Raises:
        NotImplementedError: A statistic over the whole weight is needed, and it is not known which ranks hold it.
    """
    maxima = [info.recipe.amax(value) for value, info in zip(values, infos, strict=True)]
    by_groups: dict[tuple[str, ...], list[Tensor]] = {}
    for amax, info in zip(maxima, infos, strict=True):
        if amax is None or amax.is_meta or info.groups == ():
            continue
        if info.groups is None:
            raise NotImplementedError(
                f"Native parameter '{info.name}' of shape {tuple(info.whole)} cannot be written by copy_ under "
                f"fully_shard, because {info.recipe.name} has a scale of the whole weight and a shard does not know "
                "who has the others. Use load_state_dict or dtensor_gtp.optim.MasterOptimizer."
            )
        by_groups.setdefault(info.groups, []).append(amax)
    for names, members in by_groups.items():
        _all_reduce_max(members, names)
    results = []
    for value, info, amax in zip(values, infos, maxima, strict=True):
        quantized = info.recipe.quantize(value, Direction.ROWWISE, amax)
        results.append(quantized if _stores_amax(info.recipe) else Quantized(quantized.planes, None))
    return results


def _all_reduce_max(maxima: Sequence[Tensor], groups: Sequence[str]) -> None:
    """Replace magnitudes by their maximum over all ranks, in place, on the current stream.

    [Note: magnitudes as integers]
    For floats that are not negative the order of the integers with the same bits is the same, but a NaN is the largest.
    A maximum of floats may lose a NaN.
    """
    flat = torch.cat([amax.reshape(-1) for amax in maxima])
    for name in groups:
        dist.all_reduce(flat.view(torch.int32), dist.ReduceOp.MAX, group=compat.resolve_group(name))
    for amax, part in zip(maxima, flat.split([amax.numel() for amax in maxima]), strict=True):
        amax.copy_(part.view(amax.shape))


def groups_of(param: Tensor, recipe: Recipe) -> tuple[str, ...]:
    """The process groups over which the recipe's statistic of a parameter runs."""
    return recipe_groups(compat.dtensor_spec(param), recipe) if isinstance(param, DTensor) else ()


def recipe_groups(spec: compat.DTensorSpec, recipe: Recipe) -> tuple[str, ...]:
    """Those of the mesh axes that cut a dim over which the recipe's statistic runs, hence never of replicas."""
    mesh, ndim = spec.mesh, len(spec.shape)
    axes = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    cut = [axis for axis in axes if getattr(spec.placements[axis], "dim", ndim) - ndim in recipe.amax_dims]
    return tuple(mesh.get_group(axis).group_name for axis in cut)
