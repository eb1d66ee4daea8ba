"""State dicts of modules with quantized weights hold the high-precision values, as ordinary tensors.

So a checkpoint does not know the recipe: it loads into a module with another one or with none, and theirs into this.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat
from .fsdp import StoredWeight
from .planes import Direction, Quantized
from .recipes import Recipe
from .weight import WeightWithRecipe


class StateDictHooks:
    """Hooks of one parameter: the plain values go out; what ``assign=True`` puts in gets the recipe again.

    Args:
        name: Of the parameter.
        recipe: Its recipe.
    """

    def __init__(self, name: str, recipe: Recipe) -> None:
        self.name = name
        self.recipe = recipe

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        """After ``state_dict``."""
        key = prefix + self.name
        value = state_dict.get(key)
        if isinstance(value, DTensor) and isinstance(compat.local_tensor(value), MasterWeight):
            state_dict[key] = compat.wrap_local(master_of(compat.local_tensor(value)), compat.dtensor_spec(value))
        elif isinstance(value, MasterWeight):
            state_dict[key] = value.master

    def load(self, module: nn.Module, incompatible_keys: Any) -> None:
        """After ``load_state_dict``. What ``gtp_shard`` manages has its recipe elsewhere."""
        param = module._parameters.get(self.name)
        if param is not None and recipe_of(param) is None and "_gtp_binding" not in module.__dict__:
            module._parameters[self.name] = with_recipe(param, self.recipe)


def hook(module: nn.Module, name: str, recipe: Recipe) -> None:
    """Register the hooks of one parameter; a second time, give those that there are another recipe."""
    for existing in module._state_dict_hooks.values():
        if isinstance(existing, StateDictHooks) and existing.name == name:
            existing.recipe = recipe
            return
    hooks = StateDictHooks(name, recipe)
    module.register_state_dict_post_hook(hooks)
    module.register_load_state_dict_post_hook(hooks.load)


aten = torch.ops.aten


# Ops that give another view or copy of a weight: fully_shard cuts, pads and moves it with them.
_PRESERVING = {
    aten._pin_memory.default,
    aten._to_copy.default,
    aten.alias.default,
    aten.as_strided.default,
    aten.clone.default,
    aten.detach.default,
    aten.empty_like.default,
    aten.new_zeros.default,
    aten.permute.default,
    aten.slice.Tensor,
    aten.split.Tensor,
    aten.split_with_sizes.default,
    aten.t.default,
    aten.transpose.int,
    aten.view.default,
}


# Ops that would compute with values that are not quantized.
_PRODUCTS = {
    aten._grouped_mm.default,
    aten.addmm.default,
    aten.addmv.default,
    aten.baddbmm.default,
    aten.bmm.default,
    aten.convolution.default,
    aten.embedding.default,
    aten.linear.default,
    aten.mm.default,
    aten.mv.default,
}


class MasterWeight(StoredWeight):
    """High-precision values and a recipe.

    Args:
        master: The values: float32, bfloat16 or float16.
        recipe: How they are quantized.
    """

    __slots__ = ("_master", "_recipe")
    _master: Tensor
    _recipe: Recipe

    @staticmethod
    def __new__(cls, master: Tensor, recipe: Recipe) -> MasterWeight:
        result = compat.wrapper_tensor(cls, master, master.shape, master.dtype)
        result._master = master.detach()
        result._recipe = recipe
        return result

    @property
    def master(self) -> Tensor:
        """The high-precision values, sharing memory."""
        return self._master

    @property
    def recipe(self) -> Recipe:
        return self._recipe

    def quantized_for(self, direction: Direction) -> Quantized:
        return self._recipe.quantize(self._master, self._recipe.direction(direction))

    def dense(self) -> Tensor:
        return self._master

    @property
    def row_block(self) -> int:
        return self._recipe.block[0]

    def sent_direction(self, direction: Direction) -> Direction:
        return self._recipe.direction(direction)

    def amax_over(self, group: dist.ProcessGroup) -> Tensor | None:
        amax = self._recipe.amax(self._master)
        if amax is not None and -2 in self._recipe.amax_dims and group.size() > 1:
            # As integers, which are ordered like floats that are not negative, except that a NaN is the largest.
            dist.all_reduce(amax.view(torch.int32), dist.ReduceOp.MAX, group=group)
        return amax

    def sent_planes(self, direction: Direction, amax: Tensor | None) -> tuple[Tensor, ...]:
        return self._recipe.quantize(self._master, direction, amax).planes

    def dequantize_for(self, direction: Direction) -> Tensor:
        quantized, direction = self.quantized_for(direction), self._recipe.direction(direction)
        return self._recipe.dequantize(quantized, self._master.shape, direction, self._master.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        recipes: list[Recipe] = []

        def unwrap(tensor: MasterWeight) -> Tensor:
            recipes.append(tensor._recipe)
            return tensor._master

        if func in _PRODUCTS:
            raise NotImplementedError(
                f"A weight with a recipe is used by {func}, which knows nothing of quantization, where quantize_ "
                "supports F.linear and F.embedding. Under tensor parallelism, call gtp_shard on the module; else leave "
                "the weight out with filter_fn."
            )
        inner = compat.tree_map_only(MasterWeight, unwrap, (args, kwargs or {}))
        result = func(*inner[0], **inner[1])
        if inner[0] and result is inner[0][0]:
            return args[0]  # in place
        if func not in _PRESERVING:
            return result
        return compat.tree_map_only(Tensor, lambda t: MasterWeight(t, recipes[0]), result)

    def __tensor_flatten__(self) -> tuple[list[str], Recipe]:
        return ["_master"], self._recipe

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], recipe: Recipe, size: Any, stride: Any) -> MasterWeight:
        return MasterWeight(inner["_master"], recipe)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"MasterWeight({self._master!r}, {self._recipe!r})"


def recipe_of(param: Tensor) -> Recipe | None:
    """The recipe of a weight or of the local part of a DTensor; None if it has none."""
    local = compat.local_part(param)
    return local.recipe if isinstance(local, StoredWeight) else None


def dense_of(param: Tensor) -> Tensor:
    """The most precise local values of a parameter, an ordinary tensor: masters, or what native data stand for."""
    local = compat.local_part(param)
    return local.dense() if isinstance(local, StoredWeight) else local


def master_of(tensor: Tensor) -> Tensor:
    """The high-precision values of a weight with a recipe; any other tensor itself."""
    return tensor.master if isinstance(tensor, MasterWeight) else tensor


def for_product(weight: Tensor, direction: Direction) -> Tensor:
    """What a product is computed with: a weight with a recipe is dequantized, any other tensor is itself."""
    return weight.dequantize_for(direction) if isinstance(weight, WeightWithRecipe) else weight


def with_recipe(param: nn.Parameter, recipe: Recipe) -> nn.Parameter:
    """A parameter with the values of ``param`` and ``recipe``; a DTensor stays one with the same placements."""
    return in_place_of(param, MasterWeight(dense_of(param).detach(), recipe))


def in_place_of(param: nn.Parameter, local: Tensor) -> nn.Parameter:
    """A parameter of ``local`` (the local part, if ``param`` is a DTensor) that is like ``param`` in all else."""
    if isinstance(param, DTensor):
        local = compat.wrap_local(local, compat.dtensor_spec(param))
    new = nn.Parameter(local, requires_grad=param.requires_grad)
    for key, value in param.__dict__.items():
        if not key.startswith("_"):
            new.__dict__.setdefault(key, value)  # tags that users put on parameters
    return new
