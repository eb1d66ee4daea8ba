"""What native storage keeps of a weight, and how parts of weights are quantized to it.

[Note: native blocks]
Rowwise data alone ask less of a shard than a recipe with two directions: its rows may be cut anywhere where a block is
one row high, as those of mxfp8 and nvfp4 are.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import lcm
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat
from .planes import Direction, PlaneSpec, Quantized
from .recipes import Recipe

PLANE_NAMES = ("elements", "scales")


_AMAX = PlaneSpec(torch.float32, None, None)  # one for each matrix


class NativeInfo(NamedTuple):
    """What a native weight knows beside its data.

    Args:
        recipe: The format.
        name: Of the parameter, for messages.
        whole: Shape of the weight of which this may be a part.
        groups: Names of the process groups over which a statistic of the whole weight runs; None if not known.
    """

    recipe: Recipe
    name: str
    whole: torch.Size
    groups: tuple[str, ...] | None = ()


def stores_amax(recipe: Recipe) -> bool:
    """Whether the data mean nothing without the largest magnitude of the whole weight."""
    return -2 in recipe.amax_dims


def native_planes(recipe: Recipe) -> dict[str, PlaneSpec]:
    """What is stored of a weight, by name."""
    planes = dict(zip(PLANE_NAMES, recipe.planes(Direction.ROWWISE), strict=False))
    return planes | {"amax": _AMAX} if stores_amax(recipe) else planes


def native_block_of(recipe: Recipe, dim: int, block_size: int = 1) -> int:
    """As ``Recipe.block_of``, for rowwise data alone. See [Note: native blocks]."""
    steps = [spec.step(dim) or 1 for spec in recipe.planes(Direction.ROWWISE)]
    return lcm(block_size, *steps)


def quantize_parts(values: Sequence[Tensor], infos: Sequence[NativeInfo]) -> list[Quantized]:
    """Quantize this rank's parts of weights: one all-reduce of maxima for all of them on each mesh axis.

    Args:
        values: High-precision values.
        infos: What they are parts of.

    Raises:
        NotImplementedError: A statistic over the whole weight is needed, and it is not known which ranks hold it.
    """
    maxima: list[Tensor | None] = []
    by_groups: dict[tuple[str, ...], list[Tensor]] = {}
    for value, info in zip(values, infos, strict=True):
        amax = info.recipe.amax(value)
        if amax is not None and info.groups is None:
            raise NotImplementedError(
                f"Native parameter '{info.name}' of shape {tuple(info.whole)} cannot be written by copy_ under "
                f"fully_shard, because {info.recipe.name} has a scale of the whole weight and a shard does not know "
                "who has the others. Use load_state_dict or dtensor_gtp.optim.MasterOptimizer."
            )
        if amax is not None and info.groups:
            by_groups.setdefault(info.groups, []).append(amax)
        maxima.append(amax)
    for names, members in by_groups.items():
        agree(members, names)
    return [_rowwise(info.recipe, value, amax) for value, info, amax in zip(values, infos, maxima, strict=True)]


def _rowwise(recipe: Recipe, values: Tensor, amax: Tensor | None) -> Quantized:
    quantized = recipe.quantize(values, Direction.ROWWISE, amax)
    return quantized if stores_amax(recipe) else Quantized(quantized.planes, None)


def agree(maxima: Sequence[Tensor], groups: Sequence[str]) -> None:
    """Replace magnitudes by their maximum over all ranks, in place, on the current stream. As integers: for floats that
    are not negative the order is the same, but a NaN is the largest of all."""
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
