"""Records a forward and backward on fake tensors: what is computed between two uses of weights, and what is in memory.

The model runs on fake CPU tensors, on which its matrices are used as ``gtp_shard`` uses them: backward computes the
gradient of the input alone, and the weight's gradient is none of the activations. Where CPUs have no fused kernel but
GPUs have one, a stand-in of ``stand_ins`` saves and returns what the GPU's does. So the same numbers come out on every
machine, without a GPU.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable
from enum import Enum
from typing import Any, NamedTuple

import torch

from .. import _torch_compat as compat

# The CUDA allocator hands out multiples of it.
_GRANULE = 512


class Kind(Enum):
    GEMM = "gemm"
    ATTENTION = "attention"
    MEMORY = "memory"  # elementwise kernels, copies, reductions
    VIEW = "view"  # takes the host time, and the device none
    TP = "tp"  # collectives of these axes: ``nbytes`` is what the whole group has
    CP = "cp"
    EP = "ep"


class Op(NamedTuple):
    kind: Kind  # what it is bound by
    flops: float = 0  # multiplications and additions of GEMMs and attention
    nbytes: float = 0  # what elementwise kernels read and write, or the result of a gather on all ranks of its axis
    groups: int = 1  # of GEMMs: how many one kernel computes
    is_ragged: bool = False  # whether these have as many rows as a tensor says: torch's ``grouped_mm``


class Stretch(NamedTuple):
    """What lies between two marks: see :meth:`Recorder.mark`."""

    mark: str  # the kind of the first mark
    name: str  # the weight of the first mark
    ops: tuple[Op, ...]  # the operations in order
    most: int  # the most bytes of activations at any moment of it
    live: int  # the bytes of activations at its beginning


class Recorder(compat.TorchDispatchMode):
    """Records operations, and the bytes of all tensors that are made within the context and still alive, but for those
    that share the memory of ``others``."""

    def __init__(self, others: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stretches: list[Stretch] = []
        self._mark = ("", "")
        self._ops: list[Op] = []
        self._live = self._most = self._begin = 0
        self._known = weakref.WeakSet(tensor.untyped_storage() for tensor in others)

    def mark(self, kind: str, name: str = "") -> None:
        """A stretch begins."""
        self.stretches.append(Stretch(*self._mark, tuple(self._ops), self._most, self._begin))
        self._mark, self._most, self._begin, self._ops = (kind, name), self._live, self._live, []

    def note(self, op: Op) -> None:
        """A stand-in says what the kernel in its place would do."""
        self._ops.append(op)

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func is compat.read_number:  # ``Tensor.item``: there is no number
            return torch.zeros((), dtype=args[0].dtype, device="cpu").item()
        result = func(*args, **(kwargs or {}))
        given, results = (
            [t for t in compat.tree_leaves(tree) if isinstance(t, torch.Tensor)] for tree in ((args, kwargs), result)
        )
        for storage in (tensor.untyped_storage() for tensor in results):
            if storage not in self._known:
                self._known.add(storage)
                nbytes = math.ceil(storage.nbytes() / _GRANULE) * _GRANULE
                self._grow(nbytes)
                weakref.finalize(storage, self._grow, -nbytes).atexit = False
        if (op := _op_of(func, given, results)) is not None:
            self._ops.append(op)
        return result

    def _grow(self, nbytes: int) -> None:
        self._live += nbytes
        self._most = max(self._most, self._live)


_GEMMS = {"mm", "addmm", "bmm", "baddbmm", "_grouped_mm", "_scaled_mm"}
# Kernels that do not run, and the GEMMs of a convolution's backward, which are two of its forward.
_NOTHING = {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided", "detach", "_local_scalar_dense"}
_NOTHING |= {"convolution_backward"}
# How often kernels of CUDA read their first input and their last, where that is not once. (Rows longer than shared
# memory: torch's softmax reads them for the maximum, for the sum and for the result.)
_READS = {"_log_softmax": 3, "_softmax": 3, "_log_softmax_backward_data": 2, "_softmax_backward_data": 2}
# They read a few numbers of a large tensor, or write a few.
_SPARSE = {"embedding", "index_select", "gather", "index", "nll_loss_forward", "nll_loss_backward"}


def _op_of(func: Any, given: list[torch.Tensor], results: list[torch.Tensor]) -> Op | None:
    name = func._schema.name.partition("::")[2]
    if name in _NOTHING or not (results or func._schema.is_mutable):  # the latter ask for sizes and devices
        return None
    if name == "convolution":
        weight = given[1]
        return Op(Kind.GEMM, flops=2 * results[0].numel() * weight.numel() / weight.shape[0])
    if name in _GEMMS:
        first, second = [t for t in given if t.ndim > 1][-2:]
        is_ragged = name == "_grouped_mm"
        groups = given[-1].numel() if is_ragged else math.prod(first.shape[:-2])
        return Op(Kind.GEMM, 2 * first.numel() * second.shape[-1], groups=groups, is_ragged=is_ragged)
    storages = {tensor.untyped_storage()._cdata for tensor in given}
    if not func._schema.is_mutable and results and all(t.untyped_storage()._cdata in storages for t in results):
        return Op(Kind.VIEW)
    written = sum(_nbytes(tensor) for tensor in results)
    if name in _SPARSE:
        return Op(Kind.MEMORY, nbytes=2 * written)
    read = sum(_nbytes(tensor) for tensor in {id(tensor): tensor for tensor in given}.values())
    return Op(Kind.MEMORY, nbytes=read * _READS.get(name, 1) + written)


def _nbytes(tensor: torch.Tensor) -> int:
    """What a kernel touches: an expanded tensor has fewer bytes than elements."""
    numel = math.prod(size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride or size == 1)
    return numel * tensor.element_size()
