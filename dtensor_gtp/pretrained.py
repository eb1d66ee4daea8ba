"""Loads and saves whole models in safetensors, the format of ``save_pretrained``, without a whole model in any process.

:func:`load_pretrained` reads only this rank's rows of each file, into a model that may be on the meta device.
:func:`save_pretrained` gathers one tensor after the other, and rank 0 writes it. Neither needs another library.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from . import _torch_compat as compat
from ._howto import did_you_mean
from ._modules.binding import runtimes_below
from ._progress import Progress
from ._published import as_published, has_conversions, published, published_parts
from ._safetensors import INDEX, NAMES, SINGLE, SafetensorsReader, stored_in, write_header
from .checkpoint import load
from .quant.native import native_of

_LOG = logging.getLogger(__name__)
_MOST_NAMED = 5  # in an error
_INCOMPLETE = ".incomplete"  # ends names of files until all are written; no reader takes them
_OF_A_SAVE = re.compile(rf"model(-\d+-of-\d+)?\.safetensors(\.index\.json)?({re.escape(_INCOMPLETE)})?")


def load_pretrained(
    model: nn.Module, path: str | os.PathLike[str], *, rename: Callable[[str], str] | None = None
) -> tuple[str, ...]:
    """Load the weights of a published model. Each rank reads only its own rows of each weight.

    Call it on all ranks, after ``gtp_shard``. A model on the meta device gets memory for this rank's shards only: no
    process ever holds the whole model. Values are cast to the dtypes of the parameters. Native low-precision weights
    are quantized. Buffers that are not stored (``persistent=False``) and are on the meta device are recomputed by the
    ``_init_weights`` of transformers, or by ``reset_parameters`` of a module without parameters.

    Args:
        model: A module after ``gtp_shard``.
        path: A folder with ``model.safetensors``, or with several files and their index; or one file.
        rename: Maps a name in the model's state dict to the name in the files; None: names are equal, or as
            transformers stores a model of its own (from 5.0), whose conversions also merge tensors. Of merged experts a
            rank reads its own; of what else is merged it reads all.

    Returns:
        Names of tensors in the files that the model does not have.

    Raises:
        ValueError: Tensors of the model, or parts of them, are not in the files; the message names the most similar
            ones. Or shapes differ, a file is damaged or holds quantized elements of a weight, or a buffer cannot be
            recomputed.
        FileNotFoundError: There are no such files.

    Example:
        >>> mesh = init_weight_mesh("cpu", gtp=4).weights
        >>> save_pretrained(gtp_shard(nn.Linear(64, 64), mesh), "published")
        >>> with torch.device("meta"):
        ...     model = nn.Linear(64, 64)
        >>> model = gtp_shard(model, mesh)  # takes no memory
        >>> load_pretrained(model, "published")
        ()
        >>> model.weight.to_local().shape
        torch.Size([16, 64])
    """
    stored: dict[str, Any] = dict(stored_in(path))
    _leave_meta(model)
    state = model.state_dict()
    names = {key: rename(key) if rename is not None else key for key in state}
    planes = _planes(model)
    unused = set(stored) - set(names.values())
    if rename is None and has_conversions(model):
        found, used = published(model, dict.fromkeys([*names, *planes.values()], True), stored)
        unused -= used
        stored |= found
    wanted: dict[str, Any] = {}
    missing = []
    for keys in _by_tensor(model, state, planes):
        weights = {key: planes.get(key.rpartition(".")[0]) for key in keys}
        key = next((key for key in keys if names[key] in stored or weights[key] in stored), keys[0])
        weight = weights[key]
        if names[key] in stored:
            _check_is_value(path, names[key], stored[names[key]].dtype, state[key].dtype, weight is not None)
            wanted[names[key]] = state[key]
        elif weight in stored:
            _check_is_value(path, weight, stored[weight].dtype, torch.float32)
            wanted[names[key]] = state[key]
        else:
            missing.append(names[key])
    if missing:
        raise ValueError(_missing(model, path, missing, stored))
    for name, tensor in wanted.items():
        if name in stored and tuple(tensor.shape) != stored[name].shape:
            raise ValueError(
                f"load_pretrained expects {name!r} of shape {tuple(tensor.shape)}, as {type(model).__name__} has it, "
                f"but {path} has one of shape {stored[name].shape}. Build the model from the configuration beside "
                "the files."
            )
    with Progress(_LOG, f"reading {path}"):
        load(wanted, model=model, storage_reader=SafetensorsReader(stored))
    return tuple(sorted(unused))


def _check_is_value(
    path: str | os.PathLike[str], name: str, found: torch.dtype, dtype: torch.dtype, is_plane: bool = False
) -> None:
    """Elements of 8 bits are no values without their scales, which are tensors of their own in files of others."""
    if dtype.is_floating_point:
        is_cast = found.is_floating_point and found.itemsize > 1
    else:
        is_cast = not found.is_floating_point
    if found != dtype and not is_cast and not is_plane:  # planes are checked where they are read
        raise ValueError(
            f"load_pretrained expects {name!r} as {dtype} or in a dtype that can be cast to it, but {path} has {found}."
            " If the files are quantized, dequantize them first: scales that they may have would not be used."
        )


def _by_tensor(model: nn.Module, state: dict[str, Any], planes: dict[str, str]) -> list[list[str]]:
    """Keys of one tensor together: a tied weight, or a plane of one, may be stored under any of its names."""
    params = dict(model.named_parameters(remove_duplicate=False))
    by_id: dict[tuple[int, str], list[str]] = {}
    for key, value in state.items():
        if isinstance(value, Tensor):
            prefix, _, plane = key.rpartition(".")
            found = (id(params.get(key, value)), "")
            if prefix in planes:
                found = (id(params[planes[prefix]]), plane)
            by_id.setdefault(found, []).append(key)
    return list(by_id.values())


def _planes(model: nn.Module) -> dict[str, str]:
    """What keys of the data of native weights begin with, and the names of the weights."""
    named = ((name, native_of(param)) for name, param in model.named_parameters(remove_duplicate=False))
    return {f"{name}_{native.recipe.name}": name for name, native in named if native is not None}


def save_pretrained(
    model: nn.Module, path: str | os.PathLike[str], *, dtype: torch.dtype | None = None, max_file_nbytes: int = 5 << 30
) -> None:
    """Write the whole model as safetensors, which ``from_pretrained`` and :func:`load_pretrained` read. Tensors of a
    model of transformers (from 5.0) get the names and layout that its own ``save_pretrained`` gives them, except those
    that are converted together with others: they are as in memory.

    Call it on all ranks. They gather one tensor after the other, so rank 0 needs host memory for the largest one, twice
    if that is split.
    A model that was saved in the folder is deleted after this one is written, so the disk needs space for both.

    Args:
        model: A module after ``gtp_shard``.
        path: The folder. ``model.config.save_pretrained(path)`` on rank 0 adds the configuration of transformers.
        dtype: To which floating-point tensors of 16 bits and more are cast; None: as they are.
        max_file_nbytes: A model with more becomes several files and an index.

    Raises:
        ValueError: A dtype has no name in the format.

    Example:
        >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
        >>> save_pretrained(model, "published", dtype=torch.bfloat16)
        >>> from pathlib import Path
        >>> sorted(file.name for file in Path("published").iterdir())
        ['model.safetensors']
    """
    state = model.state_dict()
    tensors = {keys[0]: state[keys[0]] for keys in _by_tensor(model, state, _planes(model))}
    dtypes = {key: _stored_dtype(tensor.dtype, dtype) for key, tensor in tensors.items()}
    on_meta = {key: torch.empty(t.shape, dtype=dtypes[key], device="meta") for key, t in tensors.items()}
    parts = published_parts(model, on_meta)
    for key, stored in dtypes.items():
        if stored not in NAMES:
            raise ValueError(
                f"save_pretrained cannot write {key!r}: safetensors has no name for {stored}. Pass another dtype= for "
                "floating-point tensors; convert other tensors before."
            )
    sizes = {key: tensor.numel() * dtypes[key].itemsize for key, tensor in tensors.items()}
    files = _in_files(sizes, max_file_nbytes)
    folder = Path(path)
    is_writer = dist.get_rank() == 0
    if is_writer:
        folder.mkdir(parents=True, exist_ok=True)
    with Progress(_LOG, f"writing {path}", len(tensors)) as progress:
        for name, keys in files.items():
            file = None
            if is_writer:
                file = folder / f"{name}{_INCOMPLETE}"
            _write(model, file, {key: tensors[key] for key in keys}, on_meta, parts, progress)
    if is_writer:
        names = list(files)
        if len(files) > 1:
            index = {"metadata": {"total_size": sum(sizes.values())}, "weight_map": {}}
            index["weight_map"] = {
                part: name for name, keys in files.items() for key in keys for part in parts.get(key, [key])
            }
            (folder / f"{INDEX}{_INCOMPLETE}").write_text(json.dumps(index, indent=1) + "\n")
            names.append(INDEX)
        _replace_earlier(folder, names)
    _meet(model)


def _replace_earlier(folder: Path, names: list[str]) -> None:
    """Delete the files of earlier saves, then give the new ones their names. After a crash in between, tensors are
    missing, with which loads raise: files of two saves never stand beside each other."""
    new = {f"{name}{_INCOMPLETE}": name for name in names}
    for file in list(folder.iterdir()):
        if _OF_A_SAVE.fullmatch(file.name) and file.name not in new:
            file.unlink()
    for incomplete, name in new.items():
        (folder / incomplete).replace(folder / name)


def _meet(model: nn.Module) -> None:
    """All ranks of the mesh wait until each has come: along one axis after the other."""
    for runtime in runtimes_below(model)[:1]:
        mesh = compat.root_mesh(runtime.members.params[0].mesh)
        for axis in range(mesh.ndim):
            dist.barrier(group=mesh.get_group(axis))


def _write(
    model: nn.Module,
    path: Path | None,
    tensors: dict[str, Tensor],
    on_meta: dict[str, Tensor],
    parts: dict[str, dict[str, Tensor]],
    progress: Progress,
) -> None:
    """Write tensors in the dtypes that they have ``on_meta``, and those that have ``parts`` as these."""
    if path is None:
        file = None
    else:
        file = path.open("wb")
    try:
        if file is not None:
            written = [each for key in tensors for each in parts.get(key, {key: on_meta[key]}).items()]
            write_header(file, {name: (each.dtype, each.shape) for name, each in written})
        for key, tensor in tensors.items():
            whole = tensor
            if isinstance(tensor, DTensor):
                whole = tensor.full_tensor()  # on all ranks
            if file is not None:
                found = {key: whole.detach().to("cpu", on_meta[key].dtype)}
                if key in parts:
                    found = as_published(model, found)
                for name in parts.get(key, [key]):
                    values = found[name].contiguous()
                    file.write((ctypes.c_char * values.nbytes).from_address(values.data_ptr()))  # needs no numpy
            progress.advance(key)
    finally:
        if file is not None:
            file.close()


def _in_files(sizes: dict[str, int], most: int) -> dict[str, list[str]]:
    """Names of files, and what each holds: in the order of the model, and a new file where one is full."""
    groups: list[list[str]] = [[]]
    held = 0
    for key, nbytes in sizes.items():
        if groups[-1] and held + nbytes > most:
            groups.append([])
            held = 0
        groups[-1].append(key)
        held += nbytes
    if len(groups) == 1:
        return {SINGLE: groups[0]}
    return {f"model-{k:05}-of-{len(groups):05}.safetensors": keys for k, keys in enumerate(groups, 1)}


def _stored_dtype(own: torch.dtype, asked: torch.dtype | None) -> torch.dtype:
    if asked is not None and own.is_floating_point and own.itemsize > 1:
        return asked
    return own


# --- the meta device --------------------------------------------------------------------------------------------------


def _leave_meta(model: nn.Module) -> None:
    """Give a model on the meta device memory, and recompute what no file has."""
    params = list(model.parameters())
    on_meta = [param for param in params if param.is_meta]
    if not on_meta:
        return
    if len(on_meta) < len(params):
        raise ValueError(
            f"load_pretrained expects all parameters of {type(model).__name__} on the meta device, or none, but "
            f"{len(on_meta)} of {len(params)} are. Call model.to('meta') before gtp_shard, or to_empty on these "
            "modules."
        )
    runtimes = runtimes_below(model)
    if not runtimes:
        raise ValueError(f"load_pretrained expects a module after gtp_shard, but got a plain {type(model).__name__}.")
    device = runtimes[0].device
    kept = {(module, name): buffer for module, name, buffer in _buffers(model) if not buffer.is_meta}
    computed = {
        module: None
        for module, name, buffer in _buffers(model)
        if buffer.is_meta and name in module._non_persistent_buffers_set
    }
    model.to_empty(device=device)
    for (module, name), buffer in kept.items():
        module._buffers[name] = buffer.to(device)
    if computed:
        _recompute(model, list(computed))


def _recompute(model: nn.Module, modules: list[nn.Module]) -> None:
    """Fill buffers of ``modules`` that no file has: by the ``_init_weights`` of the nearest model of transformers
    around them, as ``from_pretrained`` does, which may also fill those of its parts; or by a reset."""
    names = {module: name for name, module in model.named_modules()}
    initializers: dict[nn.Module, Any] = {}
    waiting: list[tuple[nn.Module, Any]] = [(model, None)]
    while waiting:
        module, initialize = waiting.pop()
        initializers[module] = getattr(module, "_init_weights", initialize)
        waiting += [(child, initializers[module]) for child in module.children()]
    models = [module for module in names if hasattr(module, "_init_weights") and module not in modules]
    unset = [(module, name) for module in modules for name in module._non_persistent_buffers_set]
    unset = [(module, name) for module, name in unset if _mark(module._buffers[name])]
    params = list(model.parameters())
    for param in params:
        param._is_hf_initialized = True  # type: ignore[attr-defined]  # so transformers leaves it alone
    try:
        for module in [*modules, *models]:
            if callable(initialize := initializers[module]):
                with torch.no_grad():
                    initialize(module)
            elif callable(reset := getattr(module, "reset_parameters", None)) and not list(module.parameters()):
                reset()
    finally:
        for param in params:
            del param._is_hf_initialized  # type: ignore[attr-defined]
    for module, name in unset:
        if _is_marked(module._buffers[name]):
            raise ValueError(
                f"load_pretrained cannot recompute the buffers of {names[module]!r} ({type(module).__name__}), which "
                f"are in no file: {name!r}. Call to_empty(device=...) on the model, compute them, then call "
                "load_pretrained."
            )


def _mark(buffer: Tensor | None) -> bool:
    """Fill a buffer with a value that nobody computes. Returns whether there is one."""
    if buffer is None or buffer.dtype == torch.bool or not buffer.numel():
        return False
    if buffer.is_floating_point() or buffer.is_complex():
        buffer.fill_(torch.nan)
    else:
        buffer.fill_(torch.iinfo(buffer.dtype).max)
    return True


def _is_marked(buffer: Tensor | None) -> bool:
    if buffer is None:
        return False
    if buffer.is_floating_point() or buffer.is_complex():
        return bool(buffer.isnan().all())
    return bool((buffer == torch.iinfo(buffer.dtype).max).all())


def _buffers(model: nn.Module) -> Iterable[tuple[nn.Module, str, Tensor]]:
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None:
                yield module, name, buffer


# --- errors -----------------------------------------------------------------------------------------------------------


def _missing(model: nn.Module, path: object, missing: list[str], stored: Iterable[str]) -> str:
    named = "; ".join(f"{name!r}{did_you_mean(name, stored)}" for name in missing[:_MOST_NAMED])
    more = ""
    if len(missing) > _MOST_NAMED:
        more = f"; and {len(missing) - _MOST_NAMED} more"
    return (
        f"load_pretrained does not find {len(missing)} tensors of {type(model).__name__} in {path}: {named}{more}. "
        "If they have other names there, pass rename=. If the files have another layout, load with from_pretrained "
        "before gtp_shard."
    )


__all__ = ["load_pretrained", "save_pretrained"]
