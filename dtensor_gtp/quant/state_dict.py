"""State dicts of modules with quantized weights.

With master storage they hold the high-precision values, as ordinary tensors: a checkpoint loads
into a module with another recipe or with none. With native storage the planes go out and come in
bit for bit, under their own keys: ``up.weight`` with recipe ``mxfp8`` becomes
``up.weight_mxfp8.elements`` and ``up.weight_mxfp8.scales`` (and ``.amax``, for recipes with a scale
of the whole weight). Of a sharded weight they are DTensors on the memory of the shard, placed as
its blocks are, so that any topology whose cuts lie between blocks loads them. Elements and scales
of 8 bits appear as uint8, because not every backend and tool knows every float of that size.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor, Placement, Replicate

from .. import _torch_compat as compat
from .._howto import see
from ..placement import GTPShard
from .master import MasterWeight, placed_like, recipe_of, with_recipe
from .native import NativeWeight, native_of
from .native_data import STORED_NAMES, groups_of, native_planes, quantize_parts, quantized_of
from .planes import PlaneSpec
from .recipe import Recipe
from .recipes import RECIPES


class StateDictHooks:
    """Hooks of the parameter ``name`` of a module."""

    def __init__(self, name: str) -> None:
        self.name = name
        # Of master storage: for what ``load_state_dict(assign=True)`` puts in.
        self.recipe: Recipe | None = None

    def __call__(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: Any) -> None:
        """After ``state_dict``: put the plain values in. Native planes are there already, see
        :class:`NativePlanes`."""
        key = prefix + self.name
        value = state_dict.get(key)
        if native_of(module._parameters.get(self.name)) is not None:
            state_dict.pop(key, None)  # its planes stand for it
        elif isinstance(value, Tensor):
            local = compat.local_part(value)
            if isinstance(local, MasterWeight):
                state_dict[key] = placed_like(value, local.master)

    def before_load(self, module: nn.Module, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        """Make one native value of planes or of a high-precision weight. Functions for full state
        dicts put the module's own values beside what is loaded: the parameter does not count, nor
        do its planes beside a weight."""
        param = module._parameters.get(self.name)
        key = prefix + self.name
        errors = args[-1]  # what ``load_state_dict`` raises together
        native = native_of(param)
        if param is None or native is None:
            return
        found = _take_planes(state_dict, key, native.recipe)
        value = state_dict.get(key)
        weight = None if value is param else value  # the module's own value was not loaded
        # Planes win, unless they are the module's own beside a weight that is loaded.
        if found is not None and (weight is None or not _is_own(found[1], native)):
            try:
                state_dict[key] = _assemble(param, native, *found)
            except ValueError as error:
                errors.append(str(error))
                state_dict[key] = param  # else the key would be missing, too
        elif weight is not None and _is_alike(weight, param, param.shape):
            state_dict[key] = _quantized_like(param, native, weight)

    def after_load(self, module: nn.Module, incompatible_keys: Any) -> None:
        """Give a plain parameter its recipe again. Parameters that ``gtp_shard`` manages have
        theirs elsewhere."""
        param = module._parameters.get(self.name)
        if self.recipe is None or param is None or "_gtp_binding" in module.__dict__:
            return
        if recipe_of(param) is None:
            module._parameters[self.name] = with_recipe(param, self.recipe)


def hook_state_dict(module: nn.Module, name: str, recipe: Recipe, *, is_native: bool) -> None:
    """Register what the state dict of ``module`` needs for its parameter ``name``, or change it to
    another recipe."""
    # Of another recipe, which this one replaces.
    for child_name, child in list(module._modules.items()):
        if isinstance(child, NativePlanes) and child.source[1] == name:
            del module._modules[child_name]
    if is_native:
        module.add_module(f"{name}_{recipe.name}", NativePlanes(module, name))
    # A second ``quantize_`` of the module changes the hooks of the first.
    hooks: StateDictHooks | None = None
    for registered in module._state_dict_hooks.values():
        if isinstance(registered, StateDictHooks) and registered.name == name:
            hooks = registered
    if hooks is None:
        hooks = StateDictHooks(name)
        module.register_state_dict_post_hook(hooks)
        module.register_load_state_dict_pre_hook(hooks.before_load)
        module.register_load_state_dict_post_hook(hooks.after_load)
    if is_native:
        hooks.recipe = None
    else:
        hooks.recipe = recipe


class NativePlanes(nn.Module):
    """The planes of the native parameter ``name`` of ``owner`` in the module tree: torch's
    functions for distributed state dicts walk the tree by the names of the keys. It has no
    parameters, and no call."""

    def __init__(self, owner: nn.Module, name: str) -> None:
        super().__init__()
        self.source = (owner, name)  # in a tuple, lest the owner become a child of its child

    def planes(self) -> dict[str, Tensor]:
        """By name, as in the state dict; they share the memory of the parameter."""
        owner, name = self.source
        param = owner._parameters.get(name)
        native = native_of(param)
        if native is None:
            return {}
        planes = {}
        specs = native_planes(native.recipe)
        for plane_name, plane in native.stored.items():
            if plane.itemsize == 1:
                plane = plane.view(torch.uint8)
            if isinstance(param, DTensor):
                spec = _plane_spec(param, specs[plane_name], plane.dtype)
                plane = compat.wrap_local(plane, spec)
            planes[plane_name] = plane
        return planes

    def named_buffers(self, prefix: str = "", *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """For torch's functions for distributed state dicts, which ask each module for its own
        tensors; ``named_buffers`` of a module around this one does not come here."""
        for name, plane in self.planes().items():
            yield f"{prefix}.{name}" if prefix else name, plane

    # ``torch.distributed.checkpoint.state_dict`` looks each part of a key up as an attribute.
    def __getattr__(self, name: str) -> Any:
        if name in STORED_NAMES:
            planes = self.planes()
            if name in planes:
                return planes[name]
        return super().__getattr__(name)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        for name, plane in self.planes().items():
            destination[prefix + name] = plane

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        """Does nothing: the hooks of the owner have taken the planes."""

    def extra_repr(self) -> str:
        owner, name = self.source
        native = native_of(owner._parameters.get(name))
        if native is None:
            return ""
        return f"{name}: {native.recipe}, {', '.join(native.stored)}"


def _plane_spec(param: DTensor, plane: PlaneSpec, dtype: torch.dtype) -> compat.DTensorSpec:
    """How a plane lies where the weight lies as ``param`` does."""
    mesh = param.device_mesh
    placements = list(param.placements)
    shape = list(param.shape)  # of what the next axis cuts
    for axis, placement in enumerate(param.placements):
        dim = getattr(placement, "dim", None)
        if dim is not None:
            size = shape[dim]
            world = mesh.size(axis)
            placements[axis] = _placement(placement, size, world, plane, dim - param.ndim)
            shape[dim] = -(-size // world)
    return compat.make_spec(mesh, tuple(placements), plane.shape(param.shape), dtype)


def _placement(placement: Placement, size: int, world: int, plane: PlaneSpec, dim: int) -> Placement:
    """Placement of a plane along a dim of the weight, counted from its end, of which there are
    ``size`` elements."""
    step = plane.period(dim)
    block_size = getattr(placement, "block_size", 1)
    if step is None:  # one number for all: every rank has it
        return Replicate()
    if step == 1:
        return placement
    own: int = placement.dim  # type: ignore[attr-defined]
    if block_size > 1:
        return GTPShard(own, block_size=plane.size(dim, block_size))
    steps = plane.size(dim, -(-size // world))
    # torch cuts a plane into equal parts: where those are not the parts of the weight, say how long
    # a part is
    if -(-plane.size(dim, size) // world) == steps:
        return placement
    return GTPShard(own, block_size=steps)


def _take_planes(state_dict: dict[str, Any], key: str, own: Recipe) -> tuple[Recipe, dict[str, Tensor]] | None:
    """Remove the planes of the weight ``key`` from a state dict; None if there are none. Under the
    name of the weight's ``own`` recipe they are of that recipe, with its arguments: it may be one
    that a user has written."""
    for name in dict.fromkeys((own.name, *RECIPES)):  # the own recipe first, each once
        prefix = f"{key}_{name}."
        present = [plane for plane in STORED_NAMES if prefix + plane in state_dict]
        planes = {plane: state_dict.pop(prefix + plane) for plane in present}
        if planes and name == own.name:
            return own, planes
        if planes:
            return RECIPES[name](), planes
    return None


def _is_own(planes: Mapping[str, Tensor], native: NativeWeight) -> bool:
    # By address: what ``planes()`` gives shares the memory of the weight.
    own = {name: tensor.data_ptr() for name, tensor in native.stored.items()}
    given = {name: compat.local_part(plane).data_ptr() for name, plane in planes.items()}
    return all(own.get(name) == address for name, address in given.items())


def _is_alike(tensor: Tensor | None, param: Tensor, shape: torch.Size) -> bool:
    """Whether ``tensor`` has that shape and is a DTensor as ``param`` is."""
    if tensor is None or tensor.shape != shape:
        return False
    return isinstance(tensor, DTensor) == isinstance(param, DTensor)


def _assemble(param: Tensor, native: NativeWeight, recipe: Recipe, planes: Mapping[str, Tensor]) -> Tensor:
    """A native weight placed as ``param`` of planes from a state dict; planes of another recipe are
    quantized again. ValueError if planes are missing, or are not those of a weight placed so."""
    stored = {}
    for name, spec in native_planes(recipe).items():
        plane = planes.get(name)
        shape = spec.shape(param.shape)
        placed = ""
        is_fit = _is_alike(plane, param, shape)
        if isinstance(param, DTensor):
            expected = _plane_spec(param, spec, torch.uint8)
            placed = f" with placements {expected.placements}"
            # The logical shape says nothing about the cuts.
            if isinstance(plane, DTensor):
                is_fit &= plane.device_mesh == expected.mesh
                is_fit &= plane.placements == expected.placements
        if plane is None or not is_fit:
            got = "none"
            if plane is not None:
                got = f"a {type(plane).__name__} of shape {tuple(plane.shape)}"
            raise ValueError(
                f"Native parameter '{native.info.name}' of shape {tuple(param.shape)} expects "
                f"{recipe.name} {name} of shape {tuple(shape)}{placed}, but got {got}. Load full "
                "tensors with set_model_state_dict, and other topologies with "
                f"torch.distributed.checkpoint. {see('resume_on_other_gpus')}"
            )
        local = compat.local_part(plane)
        if local.dtype != spec.dtype:
            local = local.view(spec.dtype)  # from uint8
        stored[name] = local
    value = placed_like(param, native.like(quantized_of(stored), recipe=recipe))  # of the recipe that was saved
    if recipe.name != native.recipe.name:
        return _quantized_like(param, native, value)
    return value


def _quantized_like(param: Tensor, native: NativeWeight, value: Tensor) -> Tensor:
    """Values on the mesh of ``param`` as a native weight like it; collective for a scale of the
    whole weight."""
    if isinstance(value, DTensor) and isinstance(param, DTensor) and value.placements != param.placements:
        value = value.redistribute(placements=param.placements)  # e.g. whole on each rank
    local = compat.local_part(value)
    if isinstance(local, NativeWeight):
        local = local.dequantized_to(torch.float32)
    info = native.info._replace(groups=groups_of(param, native.recipe))
    return placed_like(param, native.like(quantize_parts([local], [info])[0]))
