"""State dicts of native weights: the planes go out and come in bit for bit, as ordinary tensors under their own keys.

``up.weight`` with recipe ``mxfp8`` becomes ``up.weight_mxfp8.elements`` and ``up.weight_mxfp8.scales`` (and ``.amax``,
for recipes with a scale of the whole weight). Of a sharded weight they are DTensors on the memory of the shard, placed
as its blocks are, so that any topology whose cuts lie between blocks loads them. Elements and scales of 8 bits appear
as uint8, because not every backend and tool knows every float of that size.

``NativePlanes`` is a child module without parameters that stands for these keys in the module tree: torch's functions
for distributed state dicts walk the tree by the names of the keys.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate

from .. import _torch_compat as compat
from ..placement import GTPShard
from .native import NativeWeight, native_of
from .native_parts import PLANE_NAMES, NativeInfo, groups_of, native_planes, quantize_parts
from .planes import PlaneSpec, Quantized
from .recipes import RECIPES, Recipe

_NAMES = (*PLANE_NAMES, "amax")


def planes_of(param: Tensor) -> dict[str, Tensor]:
    """What a state dict holds of a native parameter, by name; shares memory."""
    native = native_of(param)
    assert native is not None
    found = {}
    for name, tensor in native.stored.items():
        value = _as_bytes(tensor)
        if isinstance(param, DTensor):
            value = compat.wrap_local(value, plane_spec(param, native_planes(native.recipe)[name], value.dtype))
        found[name] = value
    return found


def plane_spec(param: DTensor, plane: PlaneSpec, dtype: torch.dtype) -> compat.DTensorSpec:
    """How a plane lies where the weight lies as ``param`` does."""
    mesh, placements = param.device_mesh, []
    shape = list(param.shape)
    for axis, placement in enumerate(param.placements):
        dim = getattr(placement, "dim", None)
        placements.append(
            placement if dim is None else _placement(placement, shape[dim], mesh.size(axis), plane, dim - param.ndim)
        )
        if dim is not None:
            shape[dim] = -(-shape[dim] // mesh.size(axis))
    return compat.make_spec(mesh, tuple(placements), plane.shape(param.shape), dtype)


def _placement(placement: Placement, size: int, world: int, plane: PlaneSpec, dim: int) -> Placement:
    """Placement of a plane along a dim of the weight, counted from its end, of which there are ``size`` elements."""
    step, block_size = plane.step(dim), getattr(placement, "block_size", 1)
    if step is None:
        return Replicate()
    if step == 1:
        return placement
    own: int = placement.dim  # type: ignore[attr-defined]
    if block_size > 1:
        return GTPShard(own, block_size=plane.size(dim, block_size))
    steps = plane.size(dim, -(-size // world))
    # torch cuts a plane into equal parts; where those are not the parts of the weight, say how long a part is
    return placement if -(-plane.size(dim, size) // world) == steps else GTPShard(own, block_size=steps)


def _as_bytes(tensor: Tensor) -> Tensor:
    return tensor.view(torch.uint8) if tensor.itemsize == 1 else tensor


class NativePlanes(nn.Module):
    """Stands for the planes of one native parameter in state dicts; it has no parameters, and no call.

    Args:
        owner: The module of the parameter.
        name: Of the parameter.
    """

    def __init__(self, owner: nn.Module, name: str) -> None:
        super().__init__()
        self._source = (owner, name)  # in a tuple, lest the owner become a child of its child

    def planes(self) -> dict[str, Tensor]:
        """By name, as in the state dict."""
        owner, name = self._source
        param = owner._parameters.get(name)
        return {} if param is None or native_of(param) is None else planes_of(param)

    def named_buffers(
        self, prefix: str = "", recurse: bool = True, remove_duplicate: bool = True
    ) -> Iterator[tuple[str, Tensor]]:
        """The planes, for torch's functions for distributed state dicts, which ask each module for its own tensors.
        ``named_buffers`` of a module around this one does not come here."""
        for name, plane in self.planes().items():
            yield f"{prefix}.{name}" if prefix else name, plane

    def __getattr__(self, name: str) -> Any:
        if name in _NAMES and (planes := self.planes()).keys() >= {name}:
            return planes[name]
        return super().__getattr__(name)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, plane in self.planes().items():
            destination[prefix + name] = plane

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """The owner has taken them, see ``NativeState``."""

    def extra_repr(self) -> str:
        owner, name = self._source
        native = native_of(owner._parameters[name]) if owner._parameters.get(name) is not None else None  # type: ignore[arg-type]
        return "" if native is None else f"{name}: {native.recipe}, {', '.join(native.stored)}"


class NativeState:
    """Hooks of one parameter. Args: ``name`` of the parameter."""

    def __init__(self, name: str) -> None:
        self.name = name

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        """After ``state_dict``: the planes stand for the parameter."""
        if native_of(module._parameters[self.name]) is not None:  # type: ignore[arg-type]
            state_dict.pop(prefix + self.name, None)

    def load(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Before ``load_state_dict``: make one native value of what there is, planes or a high-precision weight.

        Functions for full state dicts put what the module has beside what is loaded, so a value that shares the
        memory of the parameter counts only if there is no other.
        """
        param, key, errors = module._parameters.get(self.name), prefix + self.name, args[-1]
        if param is None or (native := native_of(param)) is None:
            return
        found = take_planes(state_dict, key)
        value = state_dict.get(key)
        weight = None if value is param else value
        if found is not None and not (weight is not None and _is_own(found[1], native)):
            recipe, planes = found
            try:
                state_dict[key] = assemble(param, recipe, planes)
            except ValueError as error:
                errors.append(str(error))
                state_dict[key] = param
        elif (
            weight is not None
            and weight.shape == param.shape
            and isinstance(weight, DTensor) == isinstance(param, DTensor)
        ):
            state_dict[key] = quantized_like(param, weight)


def take_planes(state_dict: dict[str, Any], key: str) -> tuple[Recipe, dict[str, Tensor]] | None:
    """Remove the planes of the weight ``key`` from a state dict; None if there are none."""
    for name, cls in RECIPES.items():
        prefix = f"{key}_{name}."
        planes = {plane: state_dict.pop(prefix + plane) for plane in _NAMES if prefix + plane in state_dict}
        if planes:
            return cls(), planes
    return None


def _is_own(planes: Mapping[str, Tensor], native: NativeWeight) -> bool:
    def address(tensor: Tensor) -> int:
        return compat.local_part(tensor).data_ptr()

    return all(
        name in native.stored and address(plane) == native.stored[name].data_ptr() for name, plane in planes.items()
    )


def assemble(param: Tensor, recipe: Recipe, planes: Mapping[str, Tensor]) -> Tensor:
    """A native weight placed as ``param`` of planes from a state dict; planes of another recipe are quantized again.

    Raises:
        ValueError: Planes are missing, or are not those of a weight placed so.
    """
    native = native_of(param)
    assert native is not None
    specs = native_planes(recipe)
    locals_ = {}
    for name, spec in specs.items():
        plane = planes.get(name)
        expected = plane_spec(param, spec, torch.uint8) if isinstance(param, DTensor) else None
        shape = spec.shape(param.shape)
        is_alike = plane is not None and plane.shape == shape and isinstance(plane, DTensor) == (expected is not None)
        if is_alike and expected is not None:
            actual = compat.dtensor_spec(plane)  # type: ignore[arg-type]
            is_alike = (actual.mesh, actual.placements) == (expected.mesh, expected.placements)
        if plane is None or not is_alike:
            got = "none" if plane is None else f"a {type(plane).__name__} of shape {tuple(plane.shape)}"
            placed = "" if expected is None else f" with placements {expected.placements}"
            raise ValueError(
                f"Native parameter '{native.info.name}' of shape {tuple(param.shape)} expects {recipe.name} "
                f"{name} of shape {tuple(shape)}{placed}, but got {got}. Load full tensors with set_model_state_dict, "
                "and other topologies with torch.distributed.checkpoint."
            )
        local = compat.local_part(plane)
        locals_[name] = local.view(spec.dtype) if local.dtype != spec.dtype else local
    quantized = Quantized(tuple(locals_[name] for name in PLANE_NAMES if name in locals_), locals_.get("amax"))
    local_shape = native.shape
    value: Tensor = NativeWeight(quantized, local_shape, native.dtype, native.info._replace(recipe=recipe))
    if isinstance(param, DTensor):
        value = compat.wrap_local(value, compat.dtensor_spec(param))
    return value if recipe.name == native.recipe.name else quantized_like(param, value)


def quantized_like(param: Tensor, value: Tensor) -> Tensor:
    """High-precision values as a native weight like ``param``; collective where a scale runs over the whole weight.

    Args:
        param: A native parameter.
        value: Of its shape, and, for a DTensor, on its mesh.
    """
    native = native_of(param)
    assert native is not None
    local = value
    if isinstance(value, DTensor):
        assert isinstance(param, DTensor)
        if value.placements != param.placements:
            value = value.redistribute(placements=param.placements)
        local = compat.local_tensor(value)
    if isinstance(local, NativeWeight):
        local = local.dequantized_to(torch.float32)
    info: NativeInfo = native.info._replace(groups=groups_of(param, native.recipe))
    (quantized,) = quantize_parts([local], [info])
    result: Tensor = NativeWeight(quantized, native.shape, native.dtype, native.info)
    return compat.wrap_local(result, compat.dtensor_spec(param)) if isinstance(param, DTensor) else result


def hook_native(module: nn.Module, name: str, recipe: Recipe) -> None:
    """Let the state dict of ``module`` hold the planes of its native parameter ``name``."""
    unhook_native(module, name)
    module.add_module(f"{name}_{recipe.name}", NativePlanes(module, name))
    if not any(isinstance(h, NativeState) and h.name == name for h in module._state_dict_hooks.values()):
        state = NativeState(name)
        module.register_state_dict_post_hook(state)
        module.register_load_state_dict_pre_hook(state.load)


def unhook_native(module: nn.Module, name: str) -> None:
    """Take back what :func:`hook_native` has added; hooks stay, and find nothing to do."""
    for child_name, child in list(module._modules.items()):
        if isinstance(child, NativePlanes) and child._source[1] == name:
            del module._modules[child_name]
