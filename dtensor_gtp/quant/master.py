"""A weight in high precision with a recipe, what parameters with a recipe stand for, and where they
may be cut."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate

from .. import _torch_compat as compat
from ..placement import GTPShard
from .compute import choose_path
from .planes import Direction, Quantized
from .recipe import Recipe
from .weight import StoredWeight, WeightWithRecipe

aten = torch.ops.aten

# Ops that give another view or copy of a weight: fully_shard cuts, pads and moves it with them.
_VIEWS = (aten.alias.default, aten.as_strided.default, aten.detach.default, aten.t.default, aten.view.default)
_PARTS = (aten.permute.default, aten.slice.Tensor, aten.split.Tensor, aten.split_with_sizes.default, aten.transpose.int)
_COPIES = (aten._to_copy.default, aten.clone.default, aten.empty_like.default, aten.new_zeros.default)
_PRESERVING = {*_VIEWS, *_PARTS, *_COPIES, aten._pin_memory.default}

# Ops that would compute with values that are not quantized.
_MATRIX_PRODUCTS = (aten.addmm.default, aten.baddbmm.default, aten.bmm.default, aten.linear.default, aten.mm.default)
_PRODUCTS = {
    *_MATRIX_PRODUCTS,
    *(aten.addmv.default, aten.mv.default, aten.convolution.default, aten.embedding.default, aten._grouped_mm.default),
}


class MasterWeight(StoredWeight):
    """High-precision values (float32, bfloat16 or float16) and the recipe by which they are quantized."""

    __slots__ = ("master",)
    master: Tensor  # shares memory with what was given

    @staticmethod
    def __new__(cls, master: Tensor, recipe: Recipe) -> MasterWeight:
        result = compat.wrapper_tensor(cls, master, master.shape, master.dtype)
        result.master = master.detach()
        result.recipe = recipe
        return result

    def dense(self) -> Tensor:
        return self.master

    def quantized_for(self, direction: Direction, amax: Tensor | None = None) -> Quantized:
        return self.recipe.quantize(self.master, self.recipe.direction(direction), amax)

    def amax_over(self, group: dist.ProcessGroup) -> Tensor | None:
        amax = self.recipe.amax(self.master)
        # fully_shard leaves rows whole here, so what runs over single rows is complete.
        if amax is not None and -2 in self.recipe.amax_dims and group.size() > 1:
            # See [Note: magnitudes as integers].
            dist.all_reduce(amax.view(torch.int32), dist.ReduceOp.MAX, group=group)
        return amax

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        recipes: list[Recipe] = []  # of the weights among the arguments

        def unwrap(tensor: MasterWeight) -> Tensor:
            recipes.append(tensor.recipe)
            return tensor.master

        # They would multiply values that are not quantized.
        if func in _PRODUCTS:
            raise NotImplementedError(
                f"{func} does not support a weight with a quantization recipe. Use F.linear or "
                "F.embedding. Under tensor parallelism, call gtp_shard on the module; else leave "
                "it out with filter_fn."
            )
        inner, options = compat.tree_map_only(MasterWeight, unwrap, (args, kwargs or {}))
        result = func(*inner, **options)
        if inner and result is inner[0]:
            return args[0]  # in place
        # Any other op computes with the high-precision values.
        if func not in _PRESERVING:
            return result
        return compat.tree_map_only(Tensor, lambda t: MasterWeight(t, recipes[0]), result)

    def __tensor_flatten__(self) -> tuple[list[str], Recipe]:
        return ["master"], self.recipe

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], recipe: Recipe, size: Any, stride: Any) -> MasterWeight:
        return MasterWeight(inner["master"], recipe)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"MasterWeight({self.master!r}, {self.recipe!r})"


def recipe_of(param: Tensor) -> Recipe | None:
    """The recipe of a weight or of the local part of a DTensor; None if it has none."""
    local = compat.local_part(param)
    if isinstance(local, StoredWeight):
        return local.recipe
    return None


def dense_of(param: Tensor) -> Tensor:
    """The most precise local values of a parameter, an ordinary tensor: masters, or what native
    data stand for."""
    local = compat.local_part(param)
    if isinstance(local, StoredWeight):
        return local.dense()
    return local


def master_of(tensor: Tensor) -> Tensor:
    """The high-precision values of a weight with a recipe; any other tensor itself."""
    if isinstance(tensor, MasterWeight):
        return tensor.master
    return tensor


def for_product(weight: Tensor, direction: Direction) -> Tensor:
    """What a product is computed with: a weight with a recipe is dequantized, any other tensor is
    itself."""
    if isinstance(weight, WeightWithRecipe):
        return weight.dequantize_for(direction)
    return weight


def placed_like(tensor: Tensor, local: Tensor) -> Tensor:
    """``local``, or the DTensor of it that lies as ``tensor`` if that is a DTensor."""
    if isinstance(tensor, DTensor):
        return compat.wrap_local(local, compat.dtensor_spec(tensor))
    return local


def with_recipe(param: nn.Parameter, recipe: Recipe) -> nn.Parameter:
    """A parameter with the values of ``param`` and ``recipe``; a DTensor stays one with the same
    placements."""
    return in_place_of(param, MasterWeight(dense_of(param).detach(), recipe))


def in_place_of(param: nn.Parameter, local: Tensor) -> nn.Parameter:
    """A parameter of ``local`` (the local part, if ``param`` is a DTensor) that is like ``param``
    in all else."""
    new = nn.Parameter(placed_like(param, local), requires_grad=param.requires_grad)
    for key, value in param.__dict__.items():
        if not key.startswith("_"):
            new.__dict__.setdefault(key, value)  # tags that users put on parameters
    return new


def place_quantized(
    fqn: str, param: nn.Parameter, recipe: Recipe, asked: Placement | None, device: torch.device, dtype: torch.dtype
) -> GTPShard:
    """The placement on the gtp axis: on dim 0 or the one that is asked for, in whole blocks of the
    recipe. A weight with a recipe is sharded however small it is, because a weight that stays whole
    is not quantized.

    ValueError if the weight is to stay whole, tensor parallelism cuts its blocks, or the recipe
    asks for GEMMs that ``device``, where a layer computes in ``dtype``, does not have.
    """
    local = compat.local_part(param)
    is_native = isinstance(local, StoredWeight) and local.is_native
    if recipe.compute == "float8":
        choose_path(recipe, device, local.shape, dtype, fqn, is_native=is_native)  # raises if there are none
    if isinstance(asked, Replicate):
        raise ValueError(
            f"gtp_shard expects to shard parameter '{fqn}' of shape {tuple(param.shape)}, because "
            f"quantize_ gave it the recipe {recipe}, but shard_placement_fn returned {asked!r}. "
            "Leave it out of quantize_, or return None or a GTPShard for it."
        )
    if isinstance(param, DTensor):
        check_slices("gtp_shard", fqn, param, recipe, is_native=is_native)
    dim = getattr(asked, "dim", 0)  # rows, if nothing is asked for
    block_size = recipe.block_of(dim - param.ndim, getattr(asked, "block_size", 1), is_native=is_native)
    return GTPShard(dim, block_size=block_size)


def check_slices(caller: str, fqn: str, param: DTensor, recipe: Recipe, *, is_native: bool) -> None:
    """Raise ValueError if tensor parallelism cuts the blocks of a weight."""
    shape = list(param.shape)
    for axis, placement in enumerate(param.placements):
        dim = getattr(placement, "dim", None)
        if dim is None:
            continue
        mesh = param.device_mesh
        block = recipe.block_of(dim - param.ndim, is_native=is_native)  # rows or columns that a cut keeps together
        size = mesh.size(axis)
        rows = -(-shape[dim] // size)  # of a slice
        if rows < shape[dim] and rows % block:
            if mesh.mesh_dim_names:
                name = mesh.mesh_dim_names[axis]
            else:
                name = str(axis)
            raise ValueError(
                f"{caller} expects slices of whole {recipe.name} blocks of {block} along dim "
                f"{dim}, but mesh axis '{name}' of size {size} splits parameter '{fqn}' of shape "
                f"{tuple(param.shape)} into slices of {rows}. Choose a size that is a multiple of "
                f"{block * size}, another recipe, or leave it out of quantize_."
            )
        shape[dim] = rows  # of what the next axis splits
