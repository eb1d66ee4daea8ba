"""What a forward and backward have in memory beside weights, counted on tensors that have shapes and no memory.

The model runs on fake CPU tensors, on which its matrices are used as ``gtp_shard`` uses them: backward computes the
gradient of the input alone, and the weight's gradient is none of the activations. Where CPUs have no fused kernel but
GPUs have one, a stand-in saves and returns what the GPU's does (:class:`_RMSNorm`, :class:`_Attention`). So the same
numbers come out on every machine.
"""

import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from memory_model import Amounts

# The CUDA allocator hands out multiples of it.
_GRANULE = 512


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all tensors that are made within the context and still alive, but for those that share the
    memory of ``others``."""

    def __init__(self, others: Iterable[torch.Tensor]) -> None:
        super().__init__()
        # The most bytes between two marks, with the names of the first mark.
        self.stretches: list[tuple[str, str, int]] = []
        self._mark = ("", "")
        self._live = 0
        self._most = 0
        self._known = weakref.WeakSet(tensor.untyped_storage() for tensor in others)

    def mark(self, kind: str, name: str) -> None:
        """A stretch begins."""
        self.stretches.append((*self._mark, self._most))
        self._mark, self._most = (kind, name), self._live

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in torch.utils._pytree.tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                self._count(tensor.untyped_storage())
        return result

    def _count(self, storage: torch.UntypedStorage) -> None:
        if storage in self._known:
            return
        self._known.add(storage)
        nbytes = math.ceil(storage.nbytes() / _GRANULE) * _GRANULE
        self._live += nbytes
        self._most = max(self._most, self._live)
        weakref.finalize(storage, self._free, nbytes).atexit = False

    def _free(self, nbytes: int) -> None:
        self._live -= nbytes


class _Use(torch.autograd.Function):
    """A matrix in use: its own gradient is not computed, and only the input is saved."""

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor,
        function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor],
        mark: Callable[[str], None],
    ) -> torch.Tensor:
        ctx.weight, ctx.mark = weight, mark
        ctx.save_for_backward(input)
        mark("forward")
        output = function(input, weight)
        mark("after_forward")
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _saved = ctx.saved_tensors  # the weight's gradient needs the input
        ctx.mark("wgrad")
        ctx.mark("dgrad")
        grad_input = grad.matmul(ctx.weight) if ctx.needs_input_grad[0] else None
        ctx.mark("after_backward")
        return grad_input, None, None, None


class _RMSNorm(torch.autograd.Function):
    """What ``F.rms_norm`` is on a GPU: one kernel that saves its input and an fp32 factor for each row."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(input, weight, input.new_empty(input.shape[:-1], dtype=torch.float32))
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        _saved = ctx.saved_tensors
        return torch.empty_like(grad), None


class _Attention(torch.autograd.Function):
    """What scaled dot product attention is on a GPU, flash attention: it saves its inputs and its output, in fp32 a
    number for each row of each head, and the state of a random generator."""

    @staticmethod
    def forward(ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        output = torch.empty_like(query)
        row_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        seed, offset = (query.new_empty((), dtype=torch.int64) for _ in range(2))
        ctx.save_for_backward(query, key, value, output, row_sums, seed, offset)
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, ...]:
        query, key, value, *_saved = ctx.saved_tensors
        grad_query = torch.empty_like(query)
        # Sums in fp32, and for grouped heads first gradients of keys and values for each head of queries.
        _sums = (
            query.new_empty(query.shape, dtype=torch.float32),
            query.new_empty(query.shape[:-1], dtype=torch.float32),
        )
        _grouped = [torch.empty_like(query) for _ in (key, value) if key.shape != query.shape]
        return grad_query, torch.empty_like(key), torch.empty_like(value)


def _rms_norm(input: torch.Tensor, normalized_shape: Any, weight: torch.Tensor, eps: float) -> torch.Tensor:
    # gtp_shard leaves it whole in fp32, and casts it at each use.
    output: torch.Tensor = _RMSNorm.apply(input, weight.detach().to(input.dtype))
    return output


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, **options: Any) -> torch.Tensor:
    output: torch.Tensor = _Attention.apply(query, key, value)
    return output


@contextmanager
def _kernels_of_gpus() -> Iterator[None]:
    with mock.patch.object(F, "rms_norm", _rms_norm), mock.patch.object(F, "scaled_dot_product_attention", _attention):
        yield


def _use_matrices(model: nn.Module, mark: Callable[[str, str], None]) -> None:
    """Replaces what linear layers and embeddings compute by :class:`_Use`."""
    for name, module in model.named_modules():
        function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
        if isinstance(module, nn.Linear):
            function = F.linear
        elif isinstance(module, nn.Embedding):
            function = F.embedding
        else:
            continue

        def forward(
            input: torch.Tensor, module: nn.Module = module, function: Any = function, name: str = name
        ) -> torch.Tensor:
            output: torch.Tensor = _Use.apply(input, module.weight, function, lambda kind: mark(kind, name))
            return output

        module.forward = forward


def count_activations(
    make_model: Callable[[], nn.Module], loss_of: Callable[[nn.Module], torch.Tensor]
) -> dict[str, Amounts]:
    """Bytes of activations of a forward in bf16 and its backward.

    Args:
        make_model: Makes the model. Its matrices belong to linear layers without bias and to embeddings; other
            parameters are small.
        loss_of: Computes the loss from tensors that it makes.

    Returns:
        By the name of the module, in the order of the forward.

    Raises:
        ValueError: Backward does not use the matrices in the reverse order of the forward.
    """
    with FakeTensorMode():
        model = make_model()
        for module in model.modules():
            for name, param in list(module.named_parameters(recurse=False)):
                if param.ndim > 1:
                    setattr(module, name, nn.Parameter(param.detach().bfloat16()))
        live = LiveBytes([*model.parameters(), *model.buffers()])
        _use_matrices(model, live.mark)
        with _kernels_of_gpus(), live:
            loss = loss_of(model)
            live.mark("after_backward", "")
            loss.backward()
            live.mark("", "")
    most = {kind: [s[1:] for s in live.stretches if s[0] == kind] for kind, _, _ in live.stretches}
    names = [name for name, _ in most["forward"]]
    if [name for name, _ in most["wgrad"]] != names[::-1]:
        raise ValueError(f"count_activations expects a backward in the order {names[::-1]}, but got {most['wgrad']}.")
    # What comes after one use in backward comes before the next one.
    most["before_backward"] = most.pop("after_backward")[:-1]
    columns = []
    for kind in Amounts._fields:
        column = [nbytes for _, nbytes in most[kind]]
        columns.append(column if kind in ("forward", "after_forward") else column[::-1])
    return {name: Amounts(*row) for name, row in zip(names, zip(*columns, strict=True), strict=True)}
