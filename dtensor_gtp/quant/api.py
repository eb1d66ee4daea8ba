"""``quantize_``: gives weights a recipe."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .._howto import see
from . import cast
from .master import check_slices, dense_of, in_place_of, with_recipe
from .native import NativeWeight
from .native_data import NativeInfo, groups_of, quantize_parts
from .recipe import Recipe
from .recipes import RECIPES
from .state_dict import hook_state_dict

_Choice = tuple[str, Recipe, str]  # of a parameter: its first name, the recipe, the storage


def quantize_(
    module: nn.Module,
    recipe: str | Recipe | Mapping[str, str | Recipe],
    *,
    filter_fn: Callable[[nn.Module, str], bool] | None = None,
    storage: str | Mapping[str, str] = "master",
) -> nn.Module:
    """Quantize the weights of linear layers, for their GEMMs and for gathers of ``gtp_shard`` and
    ``fully_shard``.

    With *master* storage the parameters keep their values, dtype and names, for optimizers and
    checkpoints. They are quantized at each use; under sharding, each rank quantizes its shard
    before the gather. With *native* storage the parameters become the quantized (rowwise) data, and
    nothing is left in high precision: for frozen weights, inference, and training with
    :class:`dtensor_gtp.optim.MasterOptimizer`.

    Output and gradient of the input are those of the dequantized weight, or of float8 GEMMs where
    the recipe and the hardware have them (``compute`` of the recipe). The weight gets its gradient
    in high precision, as if it had not been quantized (straight-through).
    ``python -m dtensor_gtp.help low_precision`` has the formats.

    A shard is quantized once for each optimizer step and direction; microbatches reuse it. Writes
    that torch does not count (``param.data``, foreach functions outside of ``torch.optim``) take
    effect in the first forward after ``zero_grad()`` has set gradients to None; otherwise write by
    ``copy_`` under ``no_grad``. ``copy_`` into a native weight quantizes; other writes to it raise.
    On the meta device native parameters have no values until a state dict fills them.

    Call it before :func:`gtp_shard` or ``fully_shard`` and before the optimizer is created; with
    tensor parallelism, after ``parallelize_module``. A second call replaces recipes. Tied weights
    stay tied, quantized in all their uses.

    Args:
        module: Changed in place, and returned.
        recipe: One of ``"float8_tensorwise"``, ``"float8_rowwise"``, ``"float8_blockwise"``,
            ``"mxfp8"``, ``"nvfp4"``, a recipe object of ``dtensor_gtp.quant``, or a mapping from
            names of modules to either; other modules stay.
        filter_fn: Called with each candidate and its name; quantizes the candidate's ``weight`` if
            it returns True. Without it, all instances of ``nn.Linear`` and ``GroupedLinear`` are
            quantized; with it, every module with a ``weight`` of two dims or more is a candidate.
        storage: ``"master"``, ``"native"``, or a mapping from names of modules to either; modules
            that a mapping does not name get ``"master"``. Native storage of weights that tensor
            parallelism has cut is collective over their meshes.

    Returns:
        ``module``.

    Raises:
        TypeError: An argument is of the wrong kind, or a matching weight has a dtype that cannot be
            quantized.
        ValueError: There is no such recipe or storage, nothing matches, a mapping names a module
            that does not match, a matching weight has been sharded already, or tensor parallelism
            cuts blocks of native storage.
        NotImplementedError: A matching weight has more than two dims and is not that of a
            ``GroupedLinear``, a ``GroupedLinear`` has a weight for each group, or a layer computes
            its weight, e.g. by ``weight_norm``.

    Source: ``torchao.quantization.quantize_`` for the name and the filter.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
        >>> model = quantize_(model, "mxfp8", filter_fn=lambda module, name: name != "2")
        >>> model = gtp_shard(model, init_weight_mesh("cpu", gtp=4).weights)
        >>> model(torch.randn(2, 64)).sum().backward()
        >>> model[0].weight.dtype, model[0].weight.grad.dtype
        (torch.float32, torch.float32)
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"quantize_ expects an nn.Module, but got {type(module).__name__}: {module!r}.")
    if filter_fn is not None and not callable(filter_fn):
        raise TypeError(f"quantize_ expects a callable as filter_fn, but got {filter_fn!r}.")
    if isinstance(recipe, Mapping):
        recipes: Any = {name: resolve_recipe(value) for name, value in recipe.items()}
    else:
        recipes = resolve_recipe(recipe)
    storages = storage.values() if isinstance(storage, Mapping) else (storage,)
    for value in storages:
        if value not in ("master", "native"):
            raise ValueError(f"quantize_ expects storage 'master' or 'native', but got {value!r}.")
    chosen: dict[nn.Parameter, _Choice] = {}
    matched: set[str] = set()  # compared with the names in mappings
    # Names of ``fully_shard`` modules: parameters below them are sharded.
    sharded = [name for name, inner in module.named_modules() if isinstance(inner, FSDPModule)]
    for name, submodule in module.named_modules():
        weight = _candidate(submodule, name, filter_fn)
        found = _at(recipes, name, None)
        if weight is None or found is None:
            continue
        # An empty name is that of the root: all modules are below it.
        is_sharded = any(not outer or f"{name}.".startswith(f"{outer}.") for outer in sharded)
        _check(name, weight, is_sharded or "_gtp_binding" in submodule.__dict__)  # ``gtp_shard`` sets it
        matched.add(name)
        fqn = "weight"
        if name:
            fqn = f"{name}.weight"
        choice = (fqn, found, _at(storage, name, "master"))
        # A tied weight is one parameter: all its modules must agree.
        if chosen.setdefault(weight, choice)[1:] != choice[1:]:
            raise ValueError(f"quantize_ expects one recipe for the tied weight of '{name}', but got several.")
    # A name that matches nothing is likely misspelled.
    for names in (recipes, storage):
        missing = names.keys() - matched if isinstance(names, Mapping) else ()
        if missing:
            raise ValueError(
                "quantize_ expects names of modules with a weight to quantize, but "
                f"{sorted(missing)} are none of {type(module).__name__}."
            )
    if not chosen:
        raise ValueError(f"quantize_ found no weight to quantize in {type(module).__name__}. Check filter_fn.")
    _replace(module, chosen)  # the first change
    return module


def _at(values: Any, name: str, default: Any) -> Any:
    """What a mapping has for a name; anything else is for all names."""
    if isinstance(values, Mapping):
        return values.get(name, default)
    return values


def _candidate(module: nn.Module, name: str, filter_fn: Callable[[nn.Module, str], bool] | None) -> nn.Parameter | None:
    weight = module._parameters.get("weight")
    is_grouped = getattr(type(module), "has_grouped_weight", False)  # a GroupedLinear
    is_known = is_grouped or isinstance(module, nn.Linear)
    if not is_known and (filter_fn is None or weight is None or weight.ndim < 2 or weight.numel() == 0):
        return None
    if filter_fn is not None and not filter_fn(module, name):
        return None
    if weight is None and not is_grouped:
        raise NotImplementedError(
            f"quantize_ supports weights that are parameters, but '{name}' of {type(module).__name__} computes its "
            "'weight' from others, e.g. by weight_norm. Leave it out with filter_fn, or call "
            "torch.nn.utils.parametrize.remove_parametrizations(layer, 'weight') before."
        )
    if weight is None:
        raise NotImplementedError(
            f"quantize_ supports a GroupedLinear with one weight for all groups, but '{name}' has "
            "one for each. Build it with single_grouped_weight=True, or leave it out with "
            "filter_fn."
        )
    if weight.ndim != 2 and not is_grouped:
        raise NotImplementedError(
            f"quantize_ supports weights with 2 dims, but '{name}.weight' of "
            f"{type(module).__name__} has shape {tuple(weight.shape)}. Leave it out with filter_fn."
        )
    if weight.numel() == 0:
        return None  # nothing to quantize
    return weight


def _check(name: str, weight: nn.Parameter, is_sharded: bool) -> None:
    described = f"'{name}.weight' of shape {tuple(weight.shape)}"
    if is_sharded:
        raise ValueError(
            f"quantize_ expects weights that are not sharded yet, but {described} is. Call "
            "quantize_ before gtp_shard and fully_shard."
        )
    if weight.dtype not in cast.WIDENS:
        raise TypeError(
            f"quantize_ expects weights in float32, bfloat16 or float16, but {described} has "
            f"{weight.dtype}. Convert it first, or leave it out with filter_fn."
        )


def _replace(module: nn.Module, chosen: dict[nn.Parameter, _Choice]) -> None:
    native = [param for param, (_, _, kind) in chosen.items() if kind == "native"]
    values = [dense_of(param).detach() for param in native]  # this rank's slice, under tensor parallelism
    infos = []
    for param, value in zip(native, values, strict=True):
        name, recipe, _ = chosen[param]
        if isinstance(param, DTensor):
            # Each rank quantizes its slice: blocks must lie within it.
            check_slices("quantize_", name, param, recipe, is_native=True)
        whole = torch.Size(param.shape)  # logical; that of the value is local
        infos.append(NativeInfo(recipe, name, whole, value.shape, groups_of(param, recipe)))
    new = {}  # by the old parameter, so that tied ones stay tied
    for param, (_, recipe, kind) in chosen.items():
        if kind == "master":
            new[param] = with_recipe(param, recipe)
    parts = quantize_parts(values, infos)  # collective where tensor parallelism cuts a weight
    for param, value, info, part in zip(native, values, infos, parts, strict=True):
        new[param] = in_place_of(param, NativeWeight(part, value.shape, value.dtype, info))
    # A list: ``hook_state_dict`` adds modules.
    for submodule in list(module.modules()):
        for name, old in submodule._parameters.items():
            if old is not None and old in new:
                submodule._parameters[name] = new[old]
                _, recipe, kind = chosen[old]
                hook_state_dict(submodule, name, recipe, is_native=kind == "native")


def resolve_recipe(recipe: str | Recipe) -> Recipe:
    """The recipe of a name.

    Args:
        recipe: One of :data:`RECIPES`, or a recipe.

    Returns:
        The recipe of that name with its defaults, or the recipe itself.

    Raises:
        TypeError, ValueError: ``recipe`` is neither.

    Example:
        >>> resolve_recipe("mxfp8")
        MXFP8(compute='auto', scale_rounding='rceil')
    """
    if isinstance(recipe, Recipe):
        return recipe
    if not isinstance(recipe, str):
        raise TypeError(f"quantize_ expects a recipe or its name, but got {type(recipe).__name__}: {recipe!r}.")
    if recipe not in RECIPES:
        raise ValueError(
            f"quantize_ expects one of the recipes {', '.join(RECIPES)}, but got {recipe!r}. {see('add_a_recipe')}"
        )
    return RECIPES[recipe]()
