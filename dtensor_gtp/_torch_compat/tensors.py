"""Tensor subclasses, storages and single launches."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

_T = TypeVar("_T", bound=Tensor)

# Makes a tensor of a class and a shape without memory of its own; the options are strides, dtype and device.
make_wrapper_subclass: Callable[..., Any] = Tensor._make_wrapper_subclass


def without_torch_function(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``func`` as if no argument had a ``__torch_function__``. The result is not converted to a subclass."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def wrapper_tensor(cls: type[_T], like: Tensor, shape: torch.Size, dtype: torch.dtype) -> _T:
    """A contiguous tensor of class ``cls`` without memory of its own, on the device of ``like``, whose strides it gets
    if that has its shape."""
    stride = like.stride() if like.shape == shape else torch.empty(shape, device="meta").stride()
    return cast("_T", make_wrapper_subclass(cls, shape, strides=stride, dtype=dtype, device=like.device))


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Number of owners of the memory behind ``storage`` (tensors, autograd nodes, Python storage objects)."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target: all of one pair of dtypes in one launch, where shapes and strides allow it.

    (With several dtypes of targets in one call some versions of torch write wrong values: pytorch/pytorch#173531.)
    """
    pairs: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        alike = pairs.setdefault((target.dtype, source.dtype), ([], []))
        alike[0].append(target)
        alike[1].append(source)
    for alike in pairs.values():
        torch._foreach_copy_(*alike)


def assert_on_device(condition: Tensor, message: str) -> None:
    """Fail if ``condition`` is false: at once on a CPU, elsewhere when the device comes to it. Kernels take messages of
    less than 255 characters."""
    torch._assert_async(condition, message[:254])
