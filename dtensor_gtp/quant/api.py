"""``quantize_``: gives weights a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from . import cast
from .master import dense_of, hook, in_place_of, with_recipe
from .native import NativeWeight
from .native_parts import PLANE_NAMES, NativeInfo, groups_of, native_planes, quantize_parts
from .native_state import hook_native, unhook_native
from .placement import check_slices
from .planes import Quantized
from .recipes import Recipe, resolve_recipe


def quantize_(
    module: nn.Module,
    recipe: str | Recipe | Mapping[str, str | Recipe],
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    storage: str | Mapping[str, str] = "master",
) -> nn.Module:
    """Let linear layers compute with, and ``gtp_shard`` and ``fully_shard`` gather, quantized weights. In place.

    With *master* storage the parameters keep their values, dtype and names: they stay what optimizers update and
    checkpoints hold. The quantized weight is made of them when they are used; under sharding, of each rank's shard
    before it is gathered. With *native* storage the parameters become the quantized (rowwise) data, and nothing is left
    in high precision: for frozen weights, inference, and training with :class:`dtensor_gtp.optim.MasterOptimizer`.

    Output and gradient of the input are those of the dequantized weight, or of float8 GEMMs where the recipe and the
    hardware have them (``compute`` of the recipe); the gradient passes to the weight as if it had not been quantized
    (straight-through), in high precision. docs/low_precision.md has the formats.

    Call it before :func:`gtp_shard` or ``fully_shard`` and before the optimizer is created; with tensor parallelism,
    after ``parallelize_module``. A second call replaces the recipe of what it matches. Tied weights stay tied, and all
    their uses are quantized.

    Args:
        module: Changed in place.
        recipe: One of ``"float8_tensorwise"``, ``"float8_rowwise"``, ``"float8_blockwise"``, ``"mxfp8"``, ``"nvfp4"``,
            a recipe object of ``dtensor_gtp.quant``, or a mapping from names of modules to either. Modules that a
            mapping does not name stay as they are.
        filter_fn: Called with each candidate and its name; quantizes the candidate's ``weight`` if it returns True.
            Without it, all instances of ``nn.Linear`` and ``GroupedLinear`` are quantized; with it, every module with a
            ``weight`` of two dims or more is a candidate.
        storage: ``"master"``, ``"native"``, or a mapping from names of modules to either; modules that a mapping does
            not name get ``"master"``. Native storage of weights that tensor parallelism has cut is collective over
            their meshes.

    Returns:
        ``module``.

    Raises:
        TypeError: An argument is of the wrong kind, or a matching weight has a dtype that cannot be quantized.
        ValueError: There is no such recipe or storage, nothing matches, a mapping names a module that does not match,
            a matching weight has been sharded already, or tensor parallelism cuts blocks of native storage.
        NotImplementedError: A matching weight has more than two dims and is not that of a ``GroupedLinear``, or a
            ``GroupedLinear`` has a weight for each group.

    The name and the filter follow ``torchao.quantization.quantize_``.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"quantize_ expects an nn.Module, but got {type(module).__name__}: {module!r}.")
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"quantize_ expects a callable as filter_fn, but got {filter_fn!r}.")
    recipes = (
        {name: resolve_recipe(value) for name, value in recipe.items()}
        if isinstance(recipe, Mapping)
        else resolve_recipe(recipe)
    )
    storages = _storages(storage)
    chosen: dict[nn.Parameter, _Choice] = {}
    matched: set[str] = set()
    sharded = [f"{name}." if name else "" for name, m in module.named_modules() if isinstance(m, FSDPModule)]
    for name, submodule in module.named_modules():
        weight = _candidate(submodule, name, filter_fn)
        found = recipes if isinstance(recipes, Recipe) else recipes.get(name)
        if weight is None or found is None:
            continue
        is_sharded = any(f"{name}.".startswith(prefix) for prefix in sharded)
        _check(name, weight, is_sharded or "_gtp_binding" in submodule.__dict__)
        matched.add(name)
        choice = chosen.setdefault(weight, _Choice(f"{name}.weight" if name else "weight", found, storages(name)))
        if (choice.recipe, choice.storage) != (found, storages(name)):
            raise ValueError(f"quantize_ expects one recipe for the tied weight of '{name}', but got several.")
    for names in (recipes, storage):
        if isinstance(names, Mapping) and (missing := names.keys() - matched):
            raise ValueError(
                f"quantize_ expects names of modules with a weight to quantize, but {sorted(missing)} are none of "
                f"{type(module).__name__}."
            )
    if not chosen:
        raise ValueError(f"quantize_ found no weight to quantize in {type(module).__name__}. Check filter_fn.")
    _replace(module, chosen)
    return module


def _candidate(module: nn.Module, name: str, filter_fn: Callable[[nn.Module, str], bool] | None) -> nn.Parameter | None:
    weight = module._parameters.get("weight")
    is_grouped = getattr(type(module), "has_grouped_weight", False)  # a GroupedLinear
    is_known = is_grouped or isinstance(module, nn.Linear)
    if not is_known and (filter_fn is None or weight is None or weight.ndim < 2 or weight.numel() == 0):
        return None
    if filter_fn is not None and not filter_fn(module, name):
        return None
    if weight is None:
        raise NotImplementedError(
            f"quantize_ supports a GroupedLinear with one weight for all groups, but '{name}' has one for each. Build "
            "it with single_grouped_weight=True, or leave it out with filter_fn."
        )
    if weight.ndim != 2 and not is_grouped:
        raise NotImplementedError(
            f"quantize_ supports weights with 2 dims, but '{name}.weight' of {type(module).__name__} has shape "
            f"{tuple(weight.shape)}. Leave it out with filter_fn."
        )
    return weight if weight.numel() else None


def _check(name: str, weight: nn.Parameter, is_sharded: bool) -> None:
    if is_sharded:
        raise ValueError(
            f"quantize_ expects weights that are not sharded yet, but '{name}.weight' of shape {tuple(weight.shape)} "
            "is. Call quantize_ before gtp_shard and fully_shard."
        )
    if weight.dtype not in cast.WIDENS:
        raise TypeError(
            f"quantize_ expects weights in float32, bfloat16 or float16, but '{name}.weight' of shape "
            f"{tuple(weight.shape)} has {weight.dtype}. Convert it first, or leave it out with filter_fn."
        )


class _Choice(NamedTuple):
    """What becomes of a parameter; ``name`` is its first."""

    name: str
    recipe: Recipe
    storage: str


def _storages(storage: Any) -> Callable[[str], str]:
    """The storage for each name of a module.

    Raises:
        ValueError: There is no such storage.
    """
    for value in storage.values() if isinstance(storage, Mapping) else (storage,):
        if value not in ("master", "native"):
            raise ValueError(f"quantize_ expects storage 'master' or 'native', but got {value!r}.")
    return (lambda name: storage.get(name, "master")) if isinstance(storage, Mapping) else (lambda name: storage)


def _replace(module: nn.Module, chosen: dict[nn.Parameter, _Choice]) -> None:
    native = {choice.name: param for param, choice in chosen.items() if choice.storage == "native"}
    for name, param in native.items():
        if isinstance(param, DTensor):
            check_slices("quantize_", name, param, chosen[param].recipe, is_native=True)
    made = to_native(native, {name: chosen[param].recipe for name, param in native.items()})
    new = {
        param: made[choice.name] if choice.storage == "native" else with_recipe(param, choice.recipe)
        for param, choice in chosen.items()
    }
    for submodule in list(module.modules()):
        for name, registered in submodule._parameters.items():
            if registered is None or registered not in new:
                continue
            submodule._parameters[name] = new[registered]
            choice = chosen[registered]
            if choice.storage == "native":
                hook_native(submodule, name, choice.recipe)
            else:
                unhook_native(submodule, name)
                hook(submodule, name, choice.recipe)


def blank_native(values: Tensor, shape: torch.Size, info: NativeInfo) -> NativeWeight:
    """A native weight without values, for one on the meta device.

    Args:
        values: Of its dtype and device.
        shape: Of this part.
    """
    specs = native_planes(info.recipe)
    stored = {n: torch.empty(s.shape(shape), dtype=s.dtype, device=values.device) for n, s in specs.items()}
    if "amax" in stored:  # one for each matrix
        stored["amax"] = torch.empty((*shape[:-2], 1, 1), dtype=torch.float32, device=values.device)
    planes = tuple(stored[name] for name in PLANE_NAMES if name in stored)
    return NativeWeight(Quantized(planes, stored.get("amax")), shape, values.dtype, info)


def to_native(params: dict[str, nn.Parameter], recipes: dict[str, Recipe]) -> dict[str, nn.Parameter]:
    """Native parameters with the values of ``params``, in the same places.

    Args:
        params: By name.
        recipes: By the same names.
    """
    infos = {
        name: NativeInfo(recipes[name], name, torch.Size(param.shape), groups_of(param, recipes[name]))
        for name, param in params.items()
    }
    values = {name: dense_of(param).detach() for name, param in params.items()}
    real = [name for name, value in values.items() if not value.is_meta]
    quantized = dict(
        zip(real, quantize_parts([values[name] for name in real], [infos[name] for name in real]), strict=True)
    )
    new = {}
    for name, param in params.items():
        value, info = values[name], infos[name]
        local = blank_native(value, value.shape, info)
        if name in quantized:
            local = NativeWeight(quantized[name], value.shape, value.dtype, info)
        new[name] = in_place_of(param, local)
    return new
