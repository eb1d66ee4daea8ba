"""Ranks compare what each of them has found before anything is changed: all succeed, or all raise.

[Note: values that ranks send each other]
They are JSON, and the bytes of tensors behind it. Torch's collectives of objects pickle, and to
unpickle is to run what the sender chose. What is read here makes numbers, strings, lists, tuples,
dicts, dtypes and tensors, nothing else.
"""

from __future__ import annotations

import hashlib
import json
import socket
from collections.abc import Callable, Mapping, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch_compat as compat
from .._howto import see

T = TypeVar("T")

_END = b"\0"  # of a JSON text, which has no such byte
_WORD = torch.int64
# Words that are mixed at once. Mixing takes about ten times their bytes of memory.
_PIECE = 1 << 20
# The finalizer of SplitMix64 (Steele et al. 2014), in two's complement: each bit of the result
# depends on all bits.
_STEPS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)), (31, 1))
_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device on which this rank's shards live."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    module = torch.get_device_module(mesh.device_type)
    return torch.device(mesh.device_type, module.current_device())


def by_rank(own: T, groups: Sequence[dist.ProcessGroup]) -> dict[int, T]:
    """The value of each rank of a mesh, sorted by global rank. Collective over ``groups``, one for
    each axis of the mesh."""
    known = {dist.get_rank(): own}
    for group in groups:
        parts: list[dict[int, T]] = all_gather_values(known, group)
        # What was learned on earlier axes is sent on, so in the end each rank knows the whole mesh.
        known = {rank: value for part in parts for rank, value in part.items()}
    return dict(sorted(known.items()))


def agree_on_all_ranks(
    mesh: DeviceMesh,
    check: Callable[[], T],
    describe: Callable[[T], Sequence[str]],
    *,
    caller: str = "gtp_shard",
    expected: str = "the same module and policies",
    remedy: str = "Build the same module everywhere; make shard_placement_fn and the policies independent of the rank.",
) -> T:
    """Run ``check`` on each rank of ``mesh``. Raise on all ranks if one raised or if their results
    differ in what ``describe`` says of them. ``caller`` (a public function), ``expected`` and
    ``remedy`` are for messages.

    Raises:
        Exception: Whatever ``check`` raised on this rank.
        RuntimeError: ``check`` raised on another rank (the message says what), or the results differ.
    """
    result: T | None = None
    error: Exception | None = None
    described: Sequence[str] = ()
    try:
        result = check()
        described = describe(result)
    except Exception as caught:  # not raised here: peers would wait for this rank below
        error = caught
    groups = _groups_of(mesh)
    code = _code_of("\n".join(described))
    # One small all_reduce. What ranks say is sent only if something differs.
    own = [error is not None, code, -code]  # the highest -code is minus the lowest code
    has_failed, highest, lowest = highest_of(own, groups, device_of(mesh)).tolist()
    if has_failed:
        if error is None:
            text = ""
        else:
            text = _text_of(error)
        errors = by_rank(text, groups)
        # This rank's own error says more than a summary.
        if error is not None:
            raise error
        messages = "; ".join(f"rank {rank}: {message}" for rank, message in errors.items() if message)
        raise RuntimeError(f"{caller} failed on another rank of the mesh, so it fails on all: {messages}")
    if highest != -lowest:
        difference = first_difference(by_rank(described, groups))
        raise RuntimeError(
            f"{caller} expects {expected} on all ranks of mesh axes {mesh.mesh_dim_names}, but {difference}. {remedy} "
            + see("ranks_diverge")
        )
    return cast("T", result)


def _text_of(error: Exception) -> str:
    return "\n".join((f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())))


def first_difference(described: dict[int, Sequence[str]]) -> str:
    """Where what the ranks say differs first."""
    first_rank, *others = described
    for rank in others:
        for a, b in zip_longest(described[first_rank], described[rank], fillvalue="nothing more"):
            if a != b:
                return f"rank {first_rank} has {a} where rank {rank} has {b}"
    raise AssertionError("the hashes of the ranks differ, but not their descriptions")


def digests(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """One number for the bits of each plain tensor, of any dtype and layout: int64, shape
    ``(len(tensors),)``, on ``device``; 0 for no elements.

    It differs if one element differs and, almost surely, if several elements or their order differ.
    Tensors of one size are mixed together: a model has many small ones, and each kernel costs host
    time.
    """
    alike: dict[tuple[int, torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        alike.setdefault((tensor.numel(), tensor.dtype, tensor.device), []).append(index)
    found = [torch.zeros((), dtype=_WORD, device=device)] * len(tensors)  # of no elements
    for (numel, _, _), indices in alike.items():
        if not numel:
            continue
        num_rows = max(1, _PIECE // numel)  # that are mixed at once
        for begin in range(0, len(indices), num_rows):
            some = indices[begin : begin + num_rows]
            words = [_words_of(tensors[index]) for index in some]
            rows = words[0].unsqueeze(0)  # a large one is not copied
            if len(some) > 1:
                rows = torch.stack(words)
            for index, total in zip(some, _mixed(rows).to(device).unbind(), strict=True):
                found[index] = total
    if not found:
        return torch.zeros(0, dtype=_WORD, device=device)
    return torch.stack(found)


def _words_of(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())  # integers view real numbers alone
    flat = tensor.contiguous().flatten()
    if flat.nbytes % _WORD.itemsize:
        return compat.as_integers(flat)  # of the size of an element
    if flat.storage_offset() * flat.itemsize % _WORD.itemsize:
        flat = flat.clone()  # a view as words must begin at one
    return flat.view(_WORD)


def _mixed(rows: Tensor) -> Tensor:
    """One number for each row of words."""
    totals = torch.zeros(len(rows), dtype=_WORD, device=rows.device)
    for begin in range(0, rows.shape[1], _PIECE):
        piece = rows[:, begin : begin + _PIECE].to(_WORD)
        # As in the generator, the state at each place is a multiple of an odd number.
        places = torch.arange(begin + 1, begin + 1 + piece.shape[1], device=rows.device)
        mixed = piece + places * _STRIDE  # wraps around, as the generator does
        for shift, factor in _STEPS:
            # A shift of a signed number copies the sign into the upper bits.
            without_sign = (mixed >> shift) & ((1 << (64 - shift)) - 1)
            mixed = (mixed ^ without_sign) * factor
        totals += mixed.sum(1)
    return totals


def host_name() -> str:
    """A name of this host that no other host has, even in containers with equal host names."""
    name = socket.gethostname()
    # The kernel draws it when it boots, so hosts with equal names differ in it.
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    if boot_id.exists():
        name = f"{name} {boot_id.read_text()}"
    return name.strip()


def is_one_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks of ``group`` run on one host. Collective; the host waits for the answer."""
    return bool(is_alike(host_name(), group, device))


def is_alike(text: str, group: dist.ProcessGroup, device: torch.device) -> bool | None:
    """Whether all ranks of ``group`` have the same text; None where tensors are fake. Collective;
    the host waits for the answer."""
    # Equal on all ranks if the highest code is the lowest: the highest of -code is minus the
    # lowest.
    code = _code_of(text)
    extremes = highest_of([code, -code], [group], device)
    if type(extremes) is not Tensor:  # in FakeTensorMode, no rank answers
        return None
    highest, lowest = extremes.tolist()
    return bool(highest == -lowest)


def _code_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")  # fits into int64


def highest_of(values: Sequence[int], groups: Sequence[dist.ProcessGroup], device: torch.device) -> Tensor:
    """The highest value of any rank at each place. Collective over ``groups``, one for each axis of
    a mesh."""
    highest = torch.tensor(values, dtype=torch.int64, device=device)
    for group in groups:
        # The highest of one axis after the other is the highest of the mesh.
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=group)
    return highest


def _groups_of(mesh: DeviceMesh) -> list[dist.ProcessGroup]:
    """Of the axes on which ranks have peers."""
    return [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]


def all_gather_values(own: Any, group: dist.ProcessGroup) -> list[Any]:
    """``own`` of each rank of ``group``, by group rank. Collective."""
    device = compat.device_of_objects(group)
    payload = _encode(own).to(device)
    # A collective needs one size on all ranks.
    numels = torch.stack(_all_gather(torch.tensor(payload.numel(), device=device), group)).tolist()
    padded = payload.new_zeros(max(numels))  # the end of a shorter payload is cut off below
    padded[: payload.numel()] = payload
    rows = _all_gather(padded, group)
    return [_decode(row[:numel].cpu()) for row, numel in zip(rows, numels, strict=True)]


def _all_gather(own: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
    gathered = [torch.empty_like(own) for _ in range(group.size())]
    dist.all_gather(gathered, own, group=group)
    return gathered


def broadcast_value(own: Any, group: dist.ProcessGroup, source: int) -> Any:
    """``own`` of the rank ``source`` of ``group``. Collective.

    Raises:
        TypeError: It cannot be sent. Raised on all ranks.
    """
    device = compat.device_of_objects(group)
    payload = torch.empty(0, dtype=torch.uint8, device=device)  # until a receiver knows the size
    has_failed = False
    if dist.get_rank(group) == source:
        try:
            payload = _encode(own).to(device)
        except TypeError as error:  # sent instead, so that all ranks raise it
            payload = _encode(str(error)).to(device)
            has_failed = True
    # The others must know the size before they can receive.
    head = torch.tensor([payload.numel(), has_failed], device=device)
    dist.broadcast(head, group=group, group_src=source)
    numel, has_failed = head.tolist()
    if dist.get_rank(group) != source:
        payload = payload.new_empty(numel)
    dist.broadcast(payload, group=group, group_src=source)
    value = _decode(payload.cpu())
    if has_failed:
        raise TypeError(value)
    return value


def _encode(value: Any) -> Tensor:
    tensors: list[Tensor] = []
    text = json.dumps(_tagged(value, "the value", tensors)).encode() + _END
    parts = [torch.frombuffer(bytearray(text), dtype=torch.uint8)]  # writable: torch warns of bytes
    parts += [tensor.detach().cpu().contiguous().flatten().view(torch.uint8) for tensor in tensors if tensor.numel()]
    return torch.cat(parts)


def _decode(payload: Tensor) -> Any:
    """The value of a payload; ValueError or TypeError if it is none, e.g. a pickle."""
    text, end, rest = payload.numpy().tobytes().partition(_END)
    if not end:
        raise ValueError("ranks sent each other text that is not JSON")
    # The place of the next tensor is in a list, because the calls for nested values advance it.
    return _untagged(json.loads(text), memoryview(bytearray(rest)), [0])


def _tagged(value: Any, name: str, tensors: list[Tensor]) -> Any:
    """``value`` as JSON has it. An object of JSON has one key, which says what it stands for."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = type(value)
    if kind in (list, tuple, torch.Size):
        items = [_tagged(item, f"{name}[{index}]", tensors) for index, item in enumerate(value)]
        if kind is list:
            return items
        return {"tuple": items}
    if isinstance(value, Mapping):
        # Pairs: keys of JSON are strings alone.
        pairs = []
        for key, item in value.items():
            tagged_key = _tagged(key, name, tensors)
            pairs.append([tagged_key, _tagged(item, f"{name}[{key!r}]", tensors)])
        return {"dict": pairs}
    if kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    # A subclass has more to it than its bytes, so it is refused below.
    if kind in (Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_quantized:
        tensors.append(value.resolve_conj().resolve_neg())  # a lazy conj or neg is no part of the bytes
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    raise TypeError(
        f"ranks send each other tensors and plain values, but {name} is a {kind.__name__}. Keep it "
        "out of the state, or put what it consists of there: numbers, strings, tuples, dicts, "
        "lists."
    )


def _untagged(value: Any, data: memoryview, begin: list[int]) -> Any:
    """``begin``: of the next tensor in ``data``."""
    if isinstance(value, list):
        return [_untagged(item, data, begin) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()  # see ``_tagged``
    if kind == "tuple":
        return tuple(_untagged(content, data, begin))
    if kind == "dict":
        return {_untagged(key, data, begin): _untagged(item, data, begin) for key, item in content}
    if kind == "dtype":
        return _dtype(content)
    if kind == "tensor":
        dtype = _dtype(content[0])
        shape = torch.Size(content[1])
        start = begin[0]
        begin[0] += shape.numel() * dtype.itemsize
        if not shape.numel():  # frombuffer takes no empty buffer
            return torch.empty(shape, dtype=dtype)
        part = torch.frombuffer(data[start : begin[0]], dtype=torch.uint8)
        return part.clone().view(dtype).view(shape)  # a copy: the start need not be aligned
    raise ValueError(f"ranks sent each other a value of the unknown kind {kind!r}")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):  # a sender may name any attribute of torch
        raise ValueError(f"ranks sent each other {name!r} as the name of a dtype")
    return dtype
