"""Saves complete checkpoints or none, and loads checkpoints that store weights in another format than the model.

A native weight (``quantize_(..., storage="native")``) is stored as planes under separate keys, such as
``up.weight_mxfp8.elements``; any other weight as ``up.weight``. If checkpoint and model use the same format, plain
``dcp.load`` works, on any topology that splits between blocks. If not, :func:`load` dequantizes or quantizes on the
way. Each rank reads only the blocks that its shard touches.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from math import prod
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadPlan
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.checkpoint.state_dict_loader import load as load_as_stored
from torch.distributed.checkpoint.storage import StorageReader
from torch.distributed.tensor import DTensor

from . import _load_messages as messages
from . import _torch_compat as compat
from ._howto import see
from ._progress import Progress
from ._saves import async_save, latest, save
from .quant.native import native_of
from .quant.native_data import PLANE_NAMES, groups_of, native_planes, quantize_parts
from .quant.planes import Direction, Quantized
from .quant.recipe import Recipe
from .quant.recipes import RECIPES

_LOG = logging.getLogger(__name__)


def _plane_key(recipes: Iterable[str]) -> re.Pattern[str]:
    """Matches the keys of planes of these recipes, given by name."""
    names = "|".join(map(re.escape, recipes))
    planes = "|".join((*PLANE_NAMES, "amax"))
    return re.compile(rf"(?P<weight>.+)_(?P<recipe>{names})\.(?P<plane>{planes})")


def _by_name(recipes: Iterable[Recipe]) -> dict[str, Recipe]:
    """These recipes, and those of the package that have other names."""
    return {name: cls() for name, cls in RECIPES.items()} | {recipe.name: recipe for recipe in recipes}


def load(
    state_dict: dict[str, Any],
    *,
    model: nn.Module | None = None,
    checkpoint_id: Any = None,
    storage_reader: StorageReader | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
    allow_partial_load: bool = False,
    recipes: Sequence[Recipe] = (),
) -> None:
    """``torch.distributed.checkpoint.load`` that also converts weights which the checkpoint stores in another format.

    A weight that the checkpoint holds as planes is dequantized into an ordinary tensor; a native weight that it holds
    in high precision, or in another recipe, is quantized. Everything else is loaded as ``dcp.load`` does, in place.

    Args:
        state_dict: As for ``dcp.load``.
        model: The module whose native weights are in ``state_dict``; needed only if some must be quantized.
        checkpoint_id, storage_reader, process_group, no_dist: As for ``dcp.load``.
        allow_partial_load: Leave entries as they are that the checkpoint does not have.
        recipes: Your own recipes, if the checkpoint uses them for weights that are not native in ``model``.

    Raises:
        ValueError: A native weight must be quantized but ``model`` does not have it, or shapes differ. Or
            ``checkpoint_id`` is None, as :func:`latest` returns it.
        RuntimeError: The checkpoint has no entry for a key, under any recipe.
        FileNotFoundError: There is no checkpoint.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> mesh = init_weight_mesh("cpu", gtp=4).weights
        >>> model = gtp_shard(nn.Linear(64, 64, bias=False), mesh)
        >>> saved = dcp.save({"model": model.state_dict()}, checkpoint_id="step10")
        >>> native = quantize_(nn.Linear(64, 64, bias=False), "mxfp8", storage="native")
        >>> native = gtp_shard(native.requires_grad_(False), mesh)
        >>> state = {"model": native.state_dict()}
        >>> load(state, model=native, checkpoint_id="step10")  # quantizes
    """
    if checkpoint_id is None and storage_reader is None:
        raise ValueError(messages.NO_PATH)
    planner = ConvertingLoadPlanner(model, allow_partial_load, recipes)
    try:
        load_as_stored(
            state_dict,
            checkpoint_id=checkpoint_id,
            storage_reader=storage_reader,
            planner=planner,
            process_group=process_group,
            no_dist=no_dist,
        )
    except CheckpointException:  # torch would show the traceback of each rank
        if planner.refused is not None:
            raise planner.refused from None
        if storage_reader is None and messages.is_absent(checkpoint_id):
            raise FileNotFoundError(messages.absent(checkpoint_id)) from None
        raise
    planner.finish()


class _Region(NamedTuple):
    """This rank's part of a weight that the checkpoint stores in another way, and what is read for it."""

    target: Tensor  # the weight of the model
    offsets: tuple[int, ...]  # of this rank's part
    sizes: tuple[int, ...]
    begin: tuple[int, ...]  # of the whole blocks that contain the part
    shape: torch.Size
    recipe: Recipe | None  # of the planes in the checkpoint; None if the weight itself is read
    tensors: dict[str, Tensor]  # what is read, by key in the checkpoint

    def values(self, dtype: torch.dtype) -> Tensor:
        """The values of the part; dequantized ones in ``dtype``."""
        if self.recipe is None:
            (value,) = self.tensors.values()
            return value
        if not prod(self.sizes):  # nothing was read for an empty shard
            return torch.empty(self.sizes, dtype=dtype)
        stored = {key.rsplit(".", 1)[1]: tensor for key, tensor in self.tensors.items()}
        whole = _dequantize(self.recipe, stored, self.shape, dtype)
        for dim, (offset, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            whole = whole.narrow(dim, offset - self.begin[dim], size)
        return whole


def _dequantize(recipe: Recipe, stored: Mapping[str, Tensor], shape: torch.Size, dtype: torch.dtype) -> Tensor:
    """A weight of ``shape`` from its planes, which a checkpoint may hold as bytes."""
    specs = native_planes(recipe)
    planes = tuple(stored[name].view(specs[name].dtype) for name in PLANE_NAMES if name in specs)
    return recipe.dequantize(Quantized(planes, stored.get("amax")), shape, Direction.ROWWISE, dtype)


class ConvertingLoadPlanner(DefaultLoadPlanner):
    """The planner of :func:`load`. Call :meth:`finish` when ``dcp.load`` has returned on all ranks.

    Args:
        model, recipes: As in :func:`load`.
        allow_partial_load: As in ``DefaultLoadPlanner``.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
        >>> state = {"model": model.state_dict()}
        >>> saved = dcp.save(state, checkpoint_id="step10")
        >>> planner = ConvertingLoadPlanner(model)
        >>> dcp.load(state, checkpoint_id="step10", planner=planner)
        >>> planner.finish()
    """

    def __init__(
        self, model: nn.Module | None = None, allow_partial_load: bool = False, recipes: Sequence[Recipe] = ()
    ) -> None:
        super().__init__(allow_partial_load=allow_partial_load)
        self._model = model
        natives = [native_of(param) for param in ([] if model is None else model.parameters())]
        own = [native.recipe for native in natives if native is not None]
        self._recipes = _by_name([*recipes, *own])
        self._plane_key = _plane_key(self._recipes)
        self._regions: dict[str, _Region] = {}  # by the key of the weight
        self.refused: Exception | None = None  # why this rank refuses the checkpoint

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Find out which weights the checkpoint stores in another way."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        assert metadata is not None
        self._regions.clear()
        try:
            self._find_regions(metadata.state_dict_metadata)
        except (RuntimeError, ValueError) as error:
            self.refused = error
            raise

    def _find_regions(self, stored: Mapping[str, Any]) -> None:
        for key, value in list(self.state_dict.items()):
            match = self._plane_key.fullmatch(key)
            weight = key
            if match:
                weight = match["weight"]
            if key in stored or not isinstance(value, Tensor):
                entry = stored.get(key)
                is_plane = match and isinstance(value, Tensor) and value.dtype != torch.uint8
                if is_plane and isinstance(entry, TensorStorageMetadata):  # torch would convert the numbers
                    _check_dtype("load", key, entry.properties.dtype, value.dtype)
                continue
            source = _recipe_of(stored, weight, self._recipes)
            if source is None and weight not in stored:
                continue  # it is missing
            del self.state_dict[key]
            if weight not in self._regions:
                target = value
                if match:
                    target = self._native(weight, match["recipe"])
                self._regions[weight] = _region(weight, target, source, stored)
        missing = [key for key in self.state_dict if key not in stored]
        if missing and not self.allow_partial_load:
            raise RuntimeError(messages.missing(missing, stored))
        if differing := messages.differing(self.state_dict, stored):
            raise ValueError(differing)

    def _native(self, weight: str, recipe: str) -> nn.Parameter:
        if self._model is None:
            names = {}
        else:
            names = dict(self._model.named_parameters(remove_duplicate=False))
        for name, param in names.items():
            if (weight == name or weight.endswith(f".{name}")) and native_of(param) is not None:
                return param
        raise ValueError(
            f"load expects the module that has {weight!r} as model, because the checkpoint does not hold this weight "
            f"as data of {recipe}, so load must quantize it. Pass the module as model=. " + see("resume_on_other_gpus")
        )

    def create_local_plan(self) -> LoadPlan:
        """The plan of torch, and what is read for conversions."""
        assert self.metadata is not None
        plan = super().create_local_plan()
        items = list(plan.items)
        for region in self._regions.values():
            for key, tensor in region.tensors.items():
                meta = self.metadata.state_dict_metadata[key]
                assert isinstance(meta, TensorStorageMetadata)
                begin = region.offsets if region.recipe is None else _plane_begin(region, key)
                if tensor.numel():
                    chunk = ChunkStorageMetadata(torch.Size(begin), tensor.shape)
                    items += create_read_items_for_chunk_list(key, meta, [chunk])
        plan.items = items
        return plan

    def lookup_tensor(self, index: Any) -> Tensor:
        """The tensor that an item is read into."""
        match = self._plane_key.fullmatch(index.fqn)
        for weight in (index.fqn, match["weight"] if match else index.fqn):
            region = self._regions.get(weight)
            if region is not None and index.fqn in region.tensors:
                return region.tensors[index.fqn]
        return super().lookup_tensor(index)

    @torch.no_grad()
    def finish(self) -> None:
        """Convert what was read. Collective if a scale covers a whole weight."""
        if not self._regions:
            return
        with Progress(_LOG, "conversion of a checkpoint's weights", len(self._regions)) as progress:
            self._convert(progress)
        self._regions.clear()

    def _convert(self, progress: Progress) -> None:
        values = []
        infos = []
        natives = []
        for _, region in progress.over(sorted(self._regions.items())):
            native = native_of(region.target)
            if native is None:
                local = compat.local_part(region.target)
                local.copy_(region.values(local.dtype))
                continue
            values.append(region.values(torch.float32).to(native.device))
            infos.append(native.info._replace(groups=groups_of(region.target, native.recipe)))
            natives.append((native, region.target))
        for (native, target), part in zip(natives, quantize_parts(values, infos), strict=True):
            native.write(part)
            torch.autograd.graph.increment_version(target)


def _recipe_of(stored: Mapping[str, Any], weight: str, recipes: Mapping[str, Recipe]) -> Recipe | None:
    """The one of these recipes in whose planes a checkpoint or state dict holds a weight; None if it has none of it."""
    return next((recipe for name, recipe in recipes.items() if f"{weight}_{name}.elements" in stored), None)


def _region(weight: str, target: Tensor, source: Recipe | None, stored: Mapping[str, Any]) -> _Region:
    """What this rank reads of a weight."""
    sizes = tuple(target.shape)
    offsets = (0,) * target.ndim
    if isinstance(target, DTensor):
        sizes, offsets = compat.local_shape_and_offset(target)
        offsets = tuple(min(o, s) for o, s in zip(offsets, target.shape, strict=True))
    if source is None or weight in stored:
        meta = _checked(weight, stored, torch.Size(target.shape))
        tensor = torch.empty(sizes, dtype=meta.properties.dtype)
        return _Region(target, offsets, sizes, offsets, torch.Size(sizes), None, {weight: tensor})
    begin = []
    shape = []
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        block = source.block_of(dim - target.ndim, is_native=True)
        whole = target.shape[dim]
        begin.append(offset // block * block)
        end = min(-(-(offset + size) // block) * block, whole)
        shape.append(end - begin[-1] if prod(sizes) else 0)
    region = _Region(target, offsets, sizes, tuple(begin), torch.Size(shape), source, {})
    for name, spec in native_planes(source).items():
        key = f"{weight}_{source.name}.{name}"
        meta = _checked(key, stored, spec.shape(torch.Size(target.shape)), spec.dtype)
        region.tensors[key] = torch.empty(spec.shape(region.shape), dtype=meta.properties.dtype)
    return region


def _plane_begin(region: _Region, key: str) -> tuple[int, ...]:
    """The offset of the read part in its plane."""
    assert region.recipe is not None
    spec = native_planes(region.recipe)[key.rsplit(".", 1)[1]]
    ndim = len(region.begin)
    return tuple(
        0 if spec.period(dim - ndim) is None else spec.size(dim - ndim, begin) for dim, begin in enumerate(region.begin)
    )


def _checked(
    key: str, stored: Mapping[str, Any], shape: torch.Size, dtype: torch.dtype | None = None
) -> TensorStorageMetadata:
    """The entry of a tensor of this shape and, for a plane, this dtype or as bytes."""
    meta = stored.get(key)
    if not isinstance(meta, TensorStorageMetadata) or meta.size != shape:
        got = f"one of shape {tuple(meta.size)}" if isinstance(meta, TensorStorageMetadata) else "none"
        raise ValueError(f"load expects a tensor {key!r} of shape {tuple(shape)} in the checkpoint, but found {got}.")
    if dtype is not None:
        _check_dtype("load", key, meta.properties.dtype, dtype)
    return meta


def _check_dtype(caller: str, key: str, found: torch.dtype, dtype: torch.dtype) -> None:
    if found not in (dtype, torch.uint8) or found.itemsize != dtype.itemsize:
        raise ValueError(f"{caller} expects {dtype} or bytes of it as {key!r}, but found {found}.")


def dequantize_state_dict(
    state_dict: Mapping[str, Any], module: nn.Module, recipes: Sequence[Recipe] = ()
) -> dict[str, Any]:
    """Convert a full state dict with planes to one with a single tensor for each weight.

    Args:
        state_dict: A full state dict of plain tensors.
        module: Its parameters give the shape and dtype of each weight.
        recipes: Your own recipes, if ``state_dict`` uses them.

    Returns:
        A new dict.

    Raises:
        ValueError: ``module`` has no parameter for planes in ``state_dict``, or a plane is missing or has another shape
            or dtype than the recipe's.

    Example:
        >>> native = quantize_(nn.Linear(64, 64), "mxfp8", storage="native")
        >>> sorted(native.state_dict())
        ['bias', 'weight_mxfp8.elements', 'weight_mxfp8.scales']
        >>> state = dequantize_state_dict(native.state_dict(), nn.Linear(64, 64))
        >>> state["weight"].shape
        torch.Size([64, 64])
    """
    params = dict(module.named_parameters(remove_duplicate=False))
    known = _by_name(recipes)
    plane_key = _plane_key(known)
    result = {key: value for key, value in state_dict.items() if not plane_key.fullmatch(key)}
    weights = {match["weight"] for key in state_dict if (match := plane_key.fullmatch(key))}
    with Progress(_LOG, "dequantization of a state dict", len(weights)) as progress:
        for weight in progress.over(weights):
            recipe = _recipe_of(state_dict, weight, known)
            param = params.get(weight)
            if param is None or recipe is None:
                raise ValueError(
                    f"dequantize_state_dict expects parameters for all planes in {type(module).__name__}, but it has "
                    f"no {weight!r}."
                )
            stored = {}
            for name, spec in native_planes(recipe).items():
                key = f"{weight}_{recipe.name}.{name}"
                shape = spec.shape(torch.Size(param.shape))
                plane = state_dict.get(key)
                if not isinstance(plane, Tensor) or plane.shape != shape:
                    got = f"one of shape {tuple(plane.shape)}" if isinstance(plane, Tensor) else "none"
                    raise ValueError(
                        f"dequantize_state_dict expects a tensor {key!r} of shape {tuple(shape)}, but found {got}."
                    )
                _check_dtype("dequantize_state_dict", key, plane.dtype, spec.dtype)
                stored[name] = plane
            result[weight] = _dequantize(recipe, stored, torch.Size(param.shape), param.dtype)
    return result


__all__ = ["ConvertingLoadPlanner", "async_save", "dequantize_state_dict", "latest", "load", "save"]
