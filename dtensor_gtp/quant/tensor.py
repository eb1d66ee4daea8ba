"""A weight with a recipe: the high-precision values that optimizers update, quantized wherever they are used.

``MasterWeight`` is what ``quantize_`` puts in the place of a weight. Elementwise ops, slices and in-place updates work
on the high-precision values. ``F.linear`` and ``F.embedding`` compute with the quantized weight: the output with the
rowwise data, the gradient of the input with the columnwise data, the gradient of the weight as if it had not been
quantized (straight-through).

``fully_shard`` keeps such a tensor as its shard and calls its hooks (``fsdp``). ``gtp_shard`` takes the recipe and the
values apart and keeps the values as an ordinary shard.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat
from .base import Direction, Quantized, Recipe
from .linear import Float8Linear, gemms_of

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


class WeightWithRecipe(torch.Tensor):
    """What ``F.linear`` and ``F.embedding`` compute with: it can be dequantized in either direction."""

    def dequantize_for(self, direction: Direction) -> torch.Tensor:
        """The quantized weight as an ordinary tensor of this one's dtype."""
        raise NotImplementedError

    def quantized_for(self, direction: Direction) -> Quantized:
        """The quantized weight as it is, for GEMMs that multiply with that."""
        raise NotImplementedError

    @property
    def recipe(self) -> Recipe:
        """How the weight is quantized."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func is F.embedding:
            return _embedding(func, *args, **kwargs)
        return compat.without_torch_function(func, args, kwargs)


def _linear(input: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
    if not isinstance(weight, WeightWithRecipe):
        raise TypeError(f"F.linear expects a weight with a recipe as weight only, but got {type(input).__name__}.")
    gemms = gemms_of(weight)
    if gemms is not None:
        return Float8Linear.apply(input, weight, bias, gemms)  # type: ignore[no-untyped-call]
    return _QuantizedLinear.apply(input, weight, bias)  # type: ignore[no-untyped-call]


def _embedding(func: Any, input: torch.Tensor, weight: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return func(input, _StraightThrough.apply(weight), *args, **kwargs)  # type: ignore[no-untyped-call]


class _StraightThrough(torch.autograd.Function):
    """The rowwise data; its gradient is that of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: WeightWithRecipe) -> torch.Tensor:
        return weight.dequantize_for(Direction.ROWWISE)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: WeightWithRecipe, bias: torch.Tensor | None) -> torch.Tensor:
        # fully_shard keeps the object and fills it again for backward.
        ctx.weight = weight
        ctx.save_for_backward(input)
        return F.linear(input, weight.dequantize_for(Direction.ROWWISE), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        (input,) = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        grad_2d = grad.reshape(-1, grad.shape[-1])
        grad_input = grad.matmul(ctx.weight.dequantize_for(Direction.COLUMNWISE)) if needs_input else None
        grad_weight = grad_2d.t().mm(input.reshape(-1, input.shape[-1])) if needs_weight else None
        return grad_input, grad_weight, grad_2d.sum(0) if needs_bias else None


class StoredWeight(WeightWithRecipe):
    """What ``quantize_`` makes of a parameter: masters with a recipe, or the quantized data itself (``native``)."""

    def dense(self) -> torch.Tensor:
        """The most precise values there are, an ordinary tensor."""
        raise NotImplementedError

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[torch.Tensor, ...], Any]:
        """Called by ``fully_shard``: the quantized bytes of this shard."""
        from .fsdp import pre_all_gather  # not at the top: it needs this class

        inputs, info = pre_all_gather(self, mesh, outer_size)
        return inputs, (info, outer_size)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[torch.Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, ...]] | None:
        """Called by ``fully_shard``: the unsharded parameter."""
        from .fsdp import post_all_gather  # not at the top: it needs this class

        info, outer_size = metadata
        return post_all_gather(all_gather_outputs, info, param_dtype, outer_size, out)


class MasterWeight(StoredWeight):
    """High-precision values and a recipe.

    Args:
        master: The values: float32, bfloat16 or float16.
        recipe: How they are quantized.
    """

    __slots__ = ("_master", "_recipe")
    _master: torch.Tensor
    _recipe: Recipe

    @staticmethod
    def __new__(cls, master: torch.Tensor, recipe: Recipe) -> MasterWeight:
        result = compat.wrapper_tensor(cls, master, master.shape, master.dtype)
        result._master = master.detach()
        result._recipe = recipe
        return result

    @property
    def master(self) -> torch.Tensor:
        """The high-precision values, sharing memory."""
        return self._master

    @property
    def recipe(self) -> Recipe:
        return self._recipe

    def quantized_for(self, direction: Direction) -> Quantized:
        return self._recipe.quantize(self._master, self._recipe.direction(direction))

    def dense(self) -> torch.Tensor:
        return self._master

    def dequantize_for(self, direction: Direction) -> torch.Tensor:
        quantized, direction = self.quantized_for(direction), self._recipe.direction(direction)
        return self._recipe.dequantize(quantized, self._master.shape, direction, self._master.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        recipes: list[Recipe] = []

        def unwrap(tensor: MasterWeight) -> torch.Tensor:
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
        return compat.tree_map_only(torch.Tensor, lambda t: MasterWeight(t, recipes[0]), result)

    def __tensor_flatten__(self) -> tuple[list[str], Recipe]:
        return ["_master"], self._recipe

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, torch.Tensor], recipe: Recipe, size: Any, stride: Any) -> MasterWeight:
        return MasterWeight(inner["_master"], recipe)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"MasterWeight({self._master!r}, {self._recipe!r})"


def recipe_of(param: torch.Tensor) -> Recipe | None:
    """The recipe of a weight or of the local part of a DTensor; None if it has none."""
    local = compat.local_part(param)
    return local.recipe if isinstance(local, StoredWeight) else None


def dense_of(param: torch.Tensor) -> torch.Tensor:
    """The most precise local values of a parameter, an ordinary tensor: masters, or what native data stand for."""
    local = compat.local_part(param)
    return local.dense() if isinstance(local, StoredWeight) else local


def master_of(tensor: torch.Tensor) -> torch.Tensor:
    """The high-precision values of a weight with a recipe; any other tensor itself."""
    return tensor.master if isinstance(tensor, MasterWeight) else tensor


def for_product(weight: torch.Tensor, direction: Direction) -> torch.Tensor:
    """What a product is computed with: a weight with a recipe is dequantized, any other tensor is itself."""
    return weight.dequantize_for(direction) if isinstance(weight, WeightWithRecipe) else weight


def with_recipe(param: nn.Parameter, recipe: Recipe) -> nn.Parameter:
    """A parameter with the values of ``param`` and ``recipe``; a DTensor stays one with the same placements."""
    return in_place_of(param, MasterWeight(dense_of(param).detach(), recipe))


def in_place_of(param: nn.Parameter, local: torch.Tensor) -> nn.Parameter:
    """A parameter of ``local`` (the local part, if ``param`` is a DTensor) that is like ``param`` in all else."""
    if isinstance(param, DTensor):
        local = compat.wrap_local(local, compat.dtensor_spec(param))
    new = nn.Parameter(local, requires_grad=param.requires_grad)
    for key, value in param.__dict__.items():
        if not key.startswith("_"):
            new.__dict__.setdefault(key, value)  # tags that users put on parameters
    return new


__all__ = [
    "MasterWeight",
    "StoredWeight",
    "WeightWithRecipe",
    "dense_of",
    "for_product",
    "in_place_of",
    "master_of",
    "recipe_of",
    "with_recipe",
]
