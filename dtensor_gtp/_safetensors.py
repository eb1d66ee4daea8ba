"""The safetensors format: eight bytes with the length of a header, the header as JSON, then the raw tensors.

Files are mapped into memory: of a tensor that is sliced, the system reads the pages of the slice.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F8_E8M0": torch.float8_e8m0fnu,
    "C64": torch.complex64,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "U16": torch.uint16,
    "U32": torch.uint32,
    "U64": torch.uint64,
    "BOOL": torch.bool,
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_MOST_HEADER = 100 << 20  # as the format's own library has it


class Stored(NamedTuple):
    """A tensor in a file; ``begin`` is its first byte."""

    path: Path
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def stored_in(path: str | os.PathLike[str]) -> dict[str, Stored]:
    """All tensors of a file, or of a folder as ``save_pretrained`` of transformers writes it.

    Raises:
        FileNotFoundError: There is no such file.
        ValueError: A file is of another format, or two have a tensor of one name.
    """
    found: dict[str, Stored] = {}
    for file in _files(Path(path)):
        for name, stored in _header(file).items():
            if name in found:
                raise ValueError(f"{path} has {name!r} twice, in {found[name].path.name} and in {file.name}.")
            found[name] = stored
    return found


def _files(path: Path) -> list[Path]:
    if path.is_file() and path.suffix != ".json":
        return [path]
    if path.is_file():
        index = path
    else:
        index = path / INDEX
    if index.is_file():
        match _json(index.read_bytes(), index):
            case {"weight_map": dict(names)} if all(isinstance(name, str) for name in names.values()):
                return [index.parent / name for name in sorted(set(names.values()))]
        raise ValueError(f"{index} is no index of safetensors files: it has no weight_map with their names.")
    files = sorted(path.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{path} is no safetensors file and no folder with such files.")
    return files


def _header(path: Path) -> dict[str, Stored]:
    size = path.stat().st_size
    with path.open("rb") as file:
        begin = file.read(8)
        if len(begin) == 8:
            length = struct.unpack("<Q", begin)[0]
        else:
            length = _MOST_HEADER + 1
        if length > min(_MOST_HEADER, size - 8):
            raise ValueError(f"{path} is no safetensors file: its header would have {length} bytes.")
        header = _json(file.read(length), path)
    if not isinstance(header, dict):
        raise ValueError(f"{path} is no safetensors file: its header is no table of tensors.")
    header.pop("__metadata__", None)
    return {name: _entry(path, name, entry, 8 + length, size) for name, entry in header.items()}


def _json(text: bytes, path: Path) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} cannot be read as JSON: {error}.") from None


def _entry(path: Path, name: str, entry: Any, begin: int, size: int) -> Stored:
    """One tensor of a header; tensors begin at byte ``begin`` of a file of ``size`` bytes."""
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(first), int(last)]} if first >= 0:
            is_shape = all(isinstance(length, int) and length >= 0 for length in shape)
        case _:
            is_shape = False
    if not is_shape:
        raise ValueError(f"{path} is damaged: the header has no dtype, shape and place of {name!r}.")
    if dtype not in DTYPES:
        raise ValueError(f"{path} has {name!r} in a dtype that torch does not know: {dtype}.")
    stored = Stored(path, begin + first, DTYPES[dtype], tuple(shape))
    if stored.nbytes != last - first or begin + last > size:
        raise ValueError(f"{path} is damaged or cut off: {name!r} has other bytes than its shape.")
    return stored


class SafetensorsReader(StorageReader):
    """Lets ``torch.distributed.checkpoint`` read these tensors, each rank the parts that it asks for. Others than
    ``Stored`` have its fields, and a method ``region(offsets, sizes)``."""

    def __init__(self, stored: Mapping[str, Any]) -> None:
        self._stored = stored

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return True

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        pass

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        metadata = {}
        for name, stored in self._stored.items():
            size = torch.Size(stored.shape)
            chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
            metadata[name] = TensorStorageMetadata(TensorProperties(dtype=stored.dtype), size, [chunk])
        return Metadata(dict(metadata), storage_meta=StorageMeta())

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        pass

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        items = sorted(plan.items, key=lambda item: self._place(item.storage_index.fqn))
        # one file at a time
        path = None
        data = torch.UntypedStorage()
        for item in items:
            stored = self._stored[item.storage_index.fqn]
            if not isinstance(stored, Stored):
                part = stored.region(item.storage_offsets, item.lengths)
            else:
                if path != stored.path:
                    path = stored.path
                    data = mapped(stored.path)
                part = region_of(data, stored, item.storage_offsets, item.lengths)
            target = planner.resolve_tensor(item).detach()
            target.copy_(part)
            planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _place(self, name: str) -> tuple[str, int]:
        stored = self._stored[name]
        return str(stored.path), stored.begin


def mapped(path: Path) -> torch.UntypedStorage:
    """The bytes of a file, which the system reads as they are used."""
    data = torch.UntypedStorage.from_file(str(path), shared=False, nbytes=path.stat().st_size)
    assert isinstance(data, torch.UntypedStorage)
    return data


def region_of(storage: torch.UntypedStorage, stored: Stored, offsets: Iterable[int], sizes: Iterable[int]) -> Tensor:
    """A part of a tensor, of whose file ``storage`` is the bytes. Nothing is read yet, unless rows are not aligned."""
    offsets = tuple(offsets)
    sizes = tuple(sizes)
    begin = stored.begin
    shape = stored.shape
    if shape:  # whole rows: what is before and after them need not be aligned
        row = torch.Size(shape[1:]).numel() * stored.dtype.itemsize
        begin = begin + offsets[0] * row
        shape = (sizes[0], *shape[1:])
    nbytes = torch.Size(shape).numel() * stored.dtype.itemsize
    flat = torch.empty(0, dtype=torch.uint8).set_(storage, begin, (nbytes,), (1,))
    if begin % stored.dtype.itemsize:
        flat = flat.clone()
    part: Tensor = flat.view(stored.dtype).view(shape)
    for dim, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        part = part.narrow(dim, offset if dim else 0, size)
    return part


def write_header(file: BinaryIO, tensors: Mapping[str, tuple[torch.dtype, torch.Size]]) -> None:
    """The head of a file; the tensors follow in this order."""
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        begin = end
        end = end + shape.numel() * dtype.itemsize
        header[name] = {"dtype": NAMES[dtype], "shape": list(shape), "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)  # so that tensors are aligned
    file.write(struct.pack("<Q", len(text)))
    file.write(text)
