"""How transformers stores its models: under other names than in memory, and with tensors that are merged when they are
loaded, such as those of experts. Its own conversions (``transformers.conversion_mapping``, since 5.0) say which.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn as nn
from torch import Tensor

from ._safetensors import Stored, mapped, region_of


class Part(NamedTuple):
    """A stored tensor, and the pattern by which a conversion knows it."""

    pattern: str
    name: str
    stored: Stored


class Converted(NamedTuple):
    """A tensor that a conversion makes of stored ones. As ``Stored``, it has a first file and a place in it."""

    path: Path
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    parts: tuple[Part, ...]
    convert: Callable[[Iterable[tuple[Part, Tensor]]], Tensor]
    has_part_a_row: bool  # of each pattern, as for experts: row k is made of the k-th tensors alone

    def region(self, offsets: Iterable[int], sizes: Iterable[int]) -> Tensor:
        """A part of it. Where each tensor makes a row, only those rows are read; elsewhere all parts."""
        regions = list(zip(offsets, sizes, strict=True))
        parts = self.parts
        if self.has_part_a_row:
            first, number = regions[0]
            regions[0] = (0, number)
            parts = tuple(part for alike in _by_pattern(parts) for part in alike[first : first + number])
        files = {path: mapped(path) for path in {part.stored.path for part in parts}}
        whole = self.convert((part, _read(part.stored, files[part.stored.path])) for part in parts)
        for dim, (offset, size) in enumerate(regions):
            whole = whole.narrow(dim, offset, size)
        return whole


def _read(stored: Stored, file: torch.UntypedStorage) -> Tensor:
    return region_of(file, stored, [0] * len(stored.shape), stored.shape)


def _by_pattern(parts: Iterable[Part]) -> list[list[Part]]:
    alike: dict[str, list[Part]] = {}
    for part in parts:
        alike.setdefault(part.pattern, []).append(part)
    return list(alike.values())


def has_conversions(model: nn.Module) -> bool:
    """Whether ``model`` is one of a transformers that can say how it stores it."""
    is_pretrained = any(cls.__module__ == "transformers.modeling_utils" for cls in type(model).__mro__)
    return is_pretrained and find_spec("transformers.conversion_mapping") is not None


def published(
    model: nn.Module, keys: Mapping[str, Any], stored: Mapping[str, Stored]
) -> tuple[dict[str, Stored | Converted], set[str]]:
    """For each key of a state dict that the files have, under whatever name or in other tensors: where its values are.
    And the names of all tensors in the files that are read for that.

    Raises:
        ValueError: The files lack a part of a tensor.
    """
    from transformers import conversion_mapping, core_model_loading  # type: ignore[import-not-found, unused-ignore]

    transforms = conversion_mapping.get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, core_model_loading.WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, core_model_loading.WeightConverter)]
    of_pattern = {pattern: converter for converter in converters for pattern in converter.source_patterns}
    found: dict[str, Stored | Converted] = {}
    used: set[str] = set()
    merged: dict[str, list[Part]] = {}  # by the first key that a conversion makes
    prefix: Any = model.base_model_prefix
    for name in sorted(stored, key=_with_numbers):  # experts in their order
        key, pattern = core_model_loading.rename_source_key(name, renamings, converters, prefix, keys)
        if key not in keys and name in keys:  # as in memory
            key = name
            pattern = None
        if key not in keys:
            continue
        used.add(name)
        if pattern is None:
            found[key] = stored[name]
        else:
            merged.setdefault(key, []).append(Part(pattern, name, stored[name]))
    for key, parts in merged.items():
        made = _conversion(model, of_pattern[parts[0].pattern], key)
        found.update(_converted(made, parts))
    return found, used


def _with_numbers(name: str) -> list[tuple[int, str]]:
    """For sorting: parts of a name, numbers by their value."""
    return [(int(part), "") if part.isdigit() else (-1, part) for part in name.split(".")]


def _conversion(model: Any, converter: Any, key: str) -> Callable[[Iterable[tuple[Part, Tensor]]], dict[str, Tensor]]:
    """What makes tensors of parts, all that are named ``key`` and after it."""

    def convert(tensors: Iterable[tuple[Part, Tensor]]) -> dict[str, Tensor]:
        work = copy.deepcopy(converter)  # it collects tensors, and forgets them
        for part, tensor in tensors:
            work.add_tensor(key, part.name, part.pattern, tensor)
        made = work.convert(key, model=model, config=model.config)
        if isinstance(made, tuple):  # transformers 5.0.0 adds what went wrong
            made = made[0]
        return {name: tensor[0] if isinstance(tensor, list) else tensor for name, tensor in made.items()}

    return convert


def _converted(
    convert: Callable[[Iterable[tuple[Part, Tensor]]], dict[str, Tensor]], parts: list[Part]
) -> dict[str, Converted]:
    """All tensors that a conversion makes of ``parts``; on the meta device it says their shapes."""

    def on_meta(some: Iterable[Part]) -> dict[str, Tensor]:
        return convert((part, torch.empty(part.stored.shape, dtype=part.stored.dtype, device="meta")) for part in some)

    try:
        made = on_meta(parts)
    except Exception as error:
        names = ", ".join(repr(part.name) for part in parts[:3])
        raise ValueError(
            f"load_pretrained cannot merge {len(parts)} tensors of {parts[0].stored.path.parent} ({names}...), "
            f"perhaps because some are missing: {error}"
        ) from error
    alike = _by_pattern(parts)
    has_rows = False
    if len(made) == 1:
        ((name, whole),) = made.items()
        if all(whole.shape[:1] == (len(each),) for each in alike):
            with suppress(Exception):  # an operation may need all
                has_rows = on_meta(each[0] for each in alike)[name].shape == (1, *whole.shape[1:])
    first = parts[0].stored

    def converted(name: str, whole: Tensor) -> Converted:
        def of(tensors: Iterable[tuple[Part, Tensor]]) -> Tensor:
            return convert(tensors)[name]

        return Converted(first.path, first.begin, whole.dtype, tuple(whole.shape), tuple(parts), of, has_rows)

    return {name: converted(name, whole) for name, whole in made.items()}


def as_published(model: nn.Module, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """These tensors of a state dict as transformers stores them."""
    from transformers.core_model_loading import revert_weight_conversion  # type: ignore[import-not-found, unused-ignore]

    made: dict[str, Tensor] = revert_weight_conversion(model, dict(tensors))
    return made


def published_parts(model: nn.Module, tensors: dict[str, Tensor]) -> dict[str, dict[str, Tensor]]:
    """What transformers makes of these tensors on the meta device, each by itself; without those that stay as they are,
    and those that it converts only together with others."""
    if not has_conversions(model):
        return {}
    try:
        wanted = as_published(model, tensors)
    except Exception:  # what ``from_pretrained`` did has no way back
        return {}
    parts: dict[str, dict[str, Tensor]] = {}
    for key, tensor in tensors.items():
        if wanted.get(key) is tensor:
            continue
        with suppress(Exception):  # others are missing
            made = as_published(model, {key: tensor})
            if all(name in wanted and wanted[name].shape == part.shape for name, part in made.items()):
                parts[key] = made
    names = [name for key in tensors for name in parts.get(key, [key])]
    if len(set(names)) < len(names):
        return {}
    return parts
