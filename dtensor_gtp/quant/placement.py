"""Where a quantized weight may be cut: between blocks, by tensor parallelism as by gtp."""

from __future__ import annotations

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor, Placement, Replicate

from .. import _torch_compat as compat
from ..placement import GTPShard
from .compute import choose_path
from .native import native_of
from .recipes import Recipe


def place_quantized(
    fqn: str, param: nn.Parameter, recipe: Recipe, asked: Placement | None, device: torch.device, dtype: torch.dtype
) -> GTPShard:
    """The placement on the gtp axis: on dim 0 or the one that is asked for, in whole blocks of the recipe.

    A weight with a recipe is sharded however small it is: a whole weight is not gathered, so it would not be quantized.

    Args:
        device, dtype: Where and in which dtype a layer computes with the weight.

    Raises:
        ValueError: The weight is to stay whole, tensor parallelism cuts its blocks, or the recipe asks for GEMMs that
            the device does not have.
    """
    if recipe.compute == "float8":
        choose_path(recipe, device, compat.local_part(param).shape, dtype, fqn)
    if isinstance(asked, Replicate):
        raise ValueError(
            f"gtp_shard expects to shard parameter '{fqn}' of shape {tuple(param.shape)}, because quantize_ gave it "
            f"the recipe {recipe}, but shard_placement_fn returned {asked!r}. Leave it out of quantize_, or return "
            "None or a GTPShard for it."
        )
    is_native = native_of(param) is not None
    if isinstance(param, DTensor):
        check_slices("gtp_shard", fqn, param, recipe, is_native=is_native)
    dim = getattr(asked, "dim", 0)
    block_size = recipe.block_of(dim - param.ndim, getattr(asked, "block_size", 1), is_native=is_native)
    return GTPShard(dim, block_size=block_size)


def check_slices(caller: str, fqn: str, param: DTensor, recipe: Recipe, *, is_native: bool) -> None:
    """Raises:
    ValueError: Tensor parallelism cuts the blocks of a weight.
    """
    shape = list(param.shape)
    for axis, placement in enumerate(param.placements):
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue
        mesh, block = param.device_mesh, recipe.block_of(dim - param.ndim, is_native=is_native)
        size, rows = mesh.size(axis), -(-shape[dim] // mesh.size(axis))
        if rows < shape[dim] and rows % block:
            name = mesh.mesh_dim_names[axis] if mesh.mesh_dim_names else str(axis)
            raise ValueError(
                f"{caller} expects slices of whole {recipe.name} blocks of {block} along dim {dim}, but mesh axis "
                f"'{name}' of size {size} cuts parameter '{fqn}' of shape {tuple(param.shape)} into slices of {rows}. "
                f"Choose a size that is a multiple of {block * size}, another recipe, or leave it out of quantize_."
            )
        shape[dim] = rows
