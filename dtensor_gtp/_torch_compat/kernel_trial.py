"""Triton's kernels in place of torch's ops: tried once on their device, and used if they work there."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import _torch_compat as compat

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
Verdict = tuple[T, str]  # what runs, and why it is not Triton (empty if it is)


def decided(
    verdicts: dict[K, Verdict[T]], key: K, otherwise: T, attempt: Callable[[], Verdict[T]], warn: Callable[[str], None]
) -> Verdict[T]:
    """``verdicts`` has earlier results by ``key``: all that a kernel is compiled for. ``attempt`` compiles, loads and
    compares the kernels, ``otherwise`` does the same without Triton, ``warn`` is called once with the reason."""
    found = verdicts.get(key)
    if found is None:
        if compat.is_stream_capturing():
            # Kernels must be compiled and loaded outside of graphs. A step has run eagerly before it is captured.
            return otherwise, "first used in a CUDA graph"  # not remembered: a later eager call tries
        with compat.without_dispatch_modes(), torch.no_grad():  # a checkpoint's policy must not count these ops
            found = verdicts[key] = attempt()
        if found[1]:
            warn(found[1])
    return found


def failure(error: Exception) -> str:
    """The reason: what it raises without Triton, a C compiler for its launchers, support of the GPU."""
    return f"Triton does not work ({type(error).__name__}: {error})"


def has_same_bits(actual: Tensor, expected: Tensor) -> bool:
    # On the host, where nothing has to be loaded for it. They may lie column by column.
    pair = [tensor.cpu().contiguous().view(torch.uint8) for tensor in (actual, expected)]
    return actual.shape == expected.shape and torch.equal(*pair)


def on_device_of(tensor: Tensor) -> AbstractContextManager[Any]:
    """Where kernels of ``tensor`` are launched."""
    if not tensor.is_cuda or tensor.device.index == torch.cuda.current_device():
        return nullcontext()
    return torch.cuda.device(tensor.device)  # Triton launches on the current device
