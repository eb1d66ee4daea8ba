"""Tensor subclasses, storages and single launches."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any, TypeVar, cast

import torch
from torch import Tensor

_T = TypeVar("_T", bound=Tensor)


def without_torch_function(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call ``func`` as if no argument had a ``__torch_function__``; what it returns is not converted to a subclass."""
    with torch._C.DisableTorchFunctionSubclass():
        return func(*args, **kwargs)


def make_wrapper_subclass(cls: type[Tensor], shape: tuple[int, ...], **options: Any) -> Any:
    """A tensor of class ``cls`` that has no memory of its own; the options are strides, dtype and device."""
    return Tensor._make_wrapper_subclass(cls, shape, **options)


def wrapper_tensor(cls: type[_T], like: Tensor, shape: torch.Size, dtype: torch.dtype) -> _T:
    """A contiguous tensor of class ``cls``, a subclass of Tensor, without memory of its own, on the device of ``like``.

    Args:
        like: If it has that shape, its strides count as well.
    """
    stride = like.stride() if like.shape == shape else torch.empty(shape, device="meta").stride()
    return cast("_T", make_wrapper_subclass(cls, shape, strides=stride, dtype=dtype, device=like.device))


def storage_use_count(storage: torch.UntypedStorage) -> int:
    """Number of owners of the memory behind ``storage`` (tensors, autograd nodes, Python storage objects)."""
    return int(torch._C._storage_Use_Count(storage._cdata))


def copy_all(targets: list[Tensor], sources: list[Tensor]) -> None:
    """Copy each source into its target: all of one pair of dtypes in one launch, where shapes and strides allow it.

    (With several dtypes of targets in one call some versions of torch write wrong values: pytorch/pytorch#173531.)
    """
    if len(targets) == 1:
        targets[0].copy_(sources[0])
        return
    pairs: dict[tuple[torch.dtype, torch.dtype], tuple[list[Tensor], list[Tensor]]] = {}
    for target, source in zip(targets, sources, strict=True):
        alike = pairs.setdefault((target.dtype, source.dtype), ([], []))
        alike[0].append(target)
        alike[1].append(source)
    for alike in pairs.values():
        torch._foreach_copy_(*alike)


def assert_on_device(condition: Tensor, message: str) -> None:
    """Fail if ``condition`` is false: at once on a CPU, when the device comes to it elsewhere.

    Kernels take messages of less than 255 characters: what is beyond is left out.
    """
    torch._assert_async(condition, message[:254])


def sleep_stream(cycles: int) -> None:
    """Make the current CUDA stream spin for ``cycles`` of the SM clock."""
    torch.cuda._sleep(cycles)


def muon_orthogonalize(matrix: Tensor, coefficients: tuple[float, float, float], num_steps: int, eps: float) -> Tensor:
    """``torch.optim.Muon``'s Newton-Schulz iteration on a whole matrix; the result is bfloat16."""
    module: Any = import_module("torch.optim._muon")  # here, not at the top: a release may move it
    result: Tensor = module._zeropower_via_newtonschulz(matrix, coefficients, num_steps, eps)
    return result


def muon_adjust_lr(lr: Any, adjust_lr_fn: str | None, shape: torch.Size) -> Any:
    """``torch.optim.Muon``'s learning rate for a matrix of ``shape``."""
    return cast("Any", import_module("torch.optim._muon"))._adjust_lr(lr, adjust_lr_fn, shape)
