"""Values that ranks send each other: JSON, and the bytes of tensors behind it.

Torch's collectives of objects pickle, and to unpickle is to run what the sender chose. What is read here makes numbers,
strings, lists, tuples, dicts, dtypes and tensors, nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch_compat as compat

_END = b"\0"  # of the JSON text, which has no such byte


def all_gather_values(own: Any, group: dist.ProcessGroup) -> list[Any]:
    """``own`` of each rank of ``group``, by group rank. Collective."""
    device = compat.device_of_objects(group)
    payload = _encode(own).to(device)
    numels = torch.stack(_all_gather(torch.tensor(payload.numel(), device=device), group)).tolist()
    padded = payload.new_zeros(max(numels))
    padded[: payload.numel()] = payload
    return [_decode(row[:numel].cpu()) for row, numel in zip(_all_gather(padded, group), numels, strict=True)]


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
    payload, has_failed = torch.empty(0, dtype=torch.uint8, device=device), False
    if dist.get_rank(group) == source:
        try:
            payload = _encode(own).to(device)
        except TypeError as error:
            payload, has_failed = _encode(str(error)).to(device), True
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
    parts = [torch.frombuffer(bytearray(text), dtype=torch.uint8)]
    parts += [tensor.detach().cpu().contiguous().flatten().view(torch.uint8) for tensor in tensors if tensor.numel()]
    return torch.cat(parts)


def _decode(payload: Tensor) -> Any:
    """The value of a payload; ValueError or TypeError if it is none, e.g. a pickle."""
    text, end, rest = payload.numpy().tobytes().partition(_END)
    if not end:
        raise ValueError("ranks sent each other text that is not JSON")
    return _untagged(json.loads(text), memoryview(bytearray(rest)), [0])


def _tagged(value: Any, name: str, tensors: list[Tensor]) -> Any:
    """``value`` as JSON has it. An object of JSON has one key, which says what it stands for."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    kind = type(value)
    if kind in (list, tuple, torch.Size):
        items = [_tagged(item, f"{name}[{index}]", tensors) for index, item in enumerate(value)]
        return items if kind is list else {"tuple": items}
    if isinstance(value, Mapping):
        return {"dict": [[_tagged(k, name, tensors), _tagged(v, f"{name}[{k!r}]", tensors)] for k, v in value.items()]}
    if kind is torch.dtype:
        return {"dtype": str(value).removeprefix("torch.")}
    if kind in (Tensor, torch.nn.Parameter) and value.layout == torch.strided and not value.is_quantized:
        tensors.append(value.resolve_conj().resolve_neg())
        return {"tensor": [str(value.dtype).removeprefix("torch."), list(value.shape)]}
    raise TypeError(
        f"ranks send each other tensors and plain values, but {name} is a {kind.__name__}. Keep it out of the state, "
        "or put what it consists of there: numbers, strings, tuples, dicts, lists."
    )


def _untagged(value: Any, data: memoryview, begin: list[int]) -> Any:
    """``begin``: of the next tensor in ``data``."""
    if isinstance(value, list):
        return [_untagged(item, data, begin) for item in value]
    if not isinstance(value, dict):
        return value
    ((kind, content),) = value.items()
    if kind == "tuple":
        return tuple(_untagged(content, data, begin))
    if kind == "dict":
        return {_untagged(key, data, begin): _untagged(item, data, begin) for key, item in content}
    if kind == "dtype":
        return _dtype(content)
    if kind == "tensor":
        dtype, shape = _dtype(content[0]), torch.Size(content[1])
        start, begin[0] = begin[0], begin[0] + shape.numel() * dtype.itemsize
        if not shape.numel():
            return torch.empty(shape, dtype=dtype)
        part = torch.frombuffer(data[start : begin[0]], dtype=torch.uint8)
        return part.clone().view(dtype).view(shape)  # a copy: the start need not be aligned
    raise ValueError(f"ranks sent each other a value of the unknown kind {kind!r}")


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise ValueError(f"ranks sent each other {name!r} as the name of a dtype")
    return dtype
