"""Records a forward and backward on fake tensors: what is computed between two uses of weights, and what is in memory.

The model runs on fake CPU tensors, on which its matrices are used as ``gtp_shard`` uses them: backward computes the
gradient of the input alone, and the weight's gradient is none of the activations. Where CPUs have no fused kernel but
GPUs have one, a stand-in saves and returns what the GPU's does. So the same numbers come out on every
machine, without a GPU.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from enum import Enum
from functools import partial
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

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

    ops: tuple[Op, ...]  # the operations in order
    most: int  # the most bytes of activations at any moment of it
    live: int  # the bytes of activations at its beginning


class Recorder(compat.TorchDispatchMode):
    """Records operations, and the bytes of living tensors made within it that share no memory with ``others``."""

    def __init__(self, others: Iterable[torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.stretches: list[Stretch] = []
        self.uses: list[tuple[int, int, str]] = []  # of matrices: its begin in forward, in backward, the module's name
        self.frozen: set[str] = set()  # names of modules whose matrices are not trained
        self._ops: list[Op] = []
        self._live = self._most = self._begin = 0
        self._known = weakref.WeakSet(tensor.untyped_storage() for tensor in others)

    def mark(self) -> int:
        """A stretch begins; gives its number."""
        self.stretches.append(Stretch(tuple(self._ops), self._most, self._begin))
        self._most, self._begin, self._ops = self._live, self._live, []
        return len(self.stretches)

    def mark_backward(self, name: str, first: int) -> None:
        """Backward computes the gradient of a matrix whose use began at ``first``, then that of the input."""
        self.uses.append((first, self.mark(), name))
        self.mark()

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
        if is_ragged:
            groups = given[-1].numel()
        else:
            groups = math.prod(first.shape[:-2])
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


class _Use(torch.autograd.Function):
    """A matrix in use: its own gradient is not computed, and only the input is saved."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, function: Any, name: str, recorder: Recorder) -> Any:
        if name not in recorder.frozen:  # the weight's gradient needs it
            ctx.save_for_backward(input)
        ctx.weight = weight
        ctx.recorder = recorder
        ctx.use = (name, recorder.mark())
        output = function(input, weight)
        recorder.mark()
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _saved = ctx.saved_tensors
        ctx.recorder.mark_backward(*ctx.use)
        grad_input = None
        if ctx.needs_input_grad[0]:
            grad_input = grad.matmul(ctx.weight)
        ctx.recorder.mark()
        return grad_input, None, None, None, None


class _RMSNorm(torch.autograd.Function):
    """What ``F.rms_norm`` is on a GPU: one kernel that saves its input and an fp32 factor for each row. Backward reads
    gradient and input twice: for the input's gradient, and for the weight's."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, recorder: Recorder) -> Tensor:
        ctx.recorder = recorder
        ctx.save_for_backward(input, weight, input.new_empty(input.shape[:-1], dtype=torch.float32))
        recorder.note(Op(Kind.MEMORY, nbytes=2 * input.nbytes))
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        _saved = ctx.saved_tensors
        ctx.recorder.note(Op(Kind.MEMORY, nbytes=5 * grad.nbytes))
        return torch.empty_like(grad), None, None


class _Attention(torch.autograd.Function):
    """What scaled dot product attention is on a GPU, flash attention: it saves its inputs and its output, in fp32 a
    number for each row of each head, and the state of a random generator."""

    @staticmethod
    def forward(ctx: Any, query: Tensor, key: Tensor, value: Tensor, share: float, recorder: Recorder) -> Tensor:
        # In the layout of the query, as the kernel's: what follows is a view of it then.
        batch, heads, tokens, _ = query.shape
        output = torch.empty_like(query)
        if query.shape[-1] != value.shape[-1]:
            output = query.new_empty(batch, tokens, heads, value.shape[-1]).transpose(1, 2)
        row_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        seed, offset = (query.new_empty((), dtype=torch.int64) for _ in range(2))
        ctx.save_for_backward(query, key, value, output, row_sums, seed, offset)
        ctx.recorder = recorder
        ctx.flops = share * 2 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        recorder.note(Op(Kind.ATTENTION, flops=ctx.flops))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, *_saved = ctx.saved_tensors
        ctx.recorder.note(Op(Kind.ATTENTION, flops=2.5 * ctx.flops))  # five GEMMs instead of two
        grad_query = torch.empty_like(query)
        # Sums in fp32, and for grouped heads first gradients of keys and values for each head of queries.
        _sums = [query.new_empty(shape, dtype=torch.float32) for shape in (query.shape, query.shape[:-1])]
        _grouped = [torch.empty_like(query) for _ in (key, value) if key.shape[1] != query.shape[1]]
        return grad_query, torch.empty_like(key), torch.empty_like(value), None, None


class Experts(nn.Module):
    """The matrices of this rank's experts, in one tensor: a grouped GEMM."""

    def __init__(self, num: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num, out_features, in_features))

    def forward(self, x_ETK: Tensor) -> Tensor:
        return self.weight.new_empty(0)  # replaced: see ``recording``


# What modules compute with their one matrix, by their forward: a subclass may have its own.
_KNOWN: Mapping[Any, Callable[..., Tensor]] = {
    nn.Linear.forward: F.linear,
    nn.Embedding.forward: F.embedding,
    Experts.forward: lambda input, weight: torch.bmm(input, weight.transpose(1, 2)),
}


def _use_matrix(name: str, module: nn.Module, recorder: Recorder) -> None:
    """Makes what a linear layer, an embedding or experts compute a use that marks."""
    function = _KNOWN[type(module).forward]

    def forward(input: Tensor) -> Any:
        output = _Use.apply(input, module.weight, function, name, recorder)  # type: ignore[no-untyped-call]
        bias = getattr(module, "bias", None)
        if bias is None:
            return output
        return output + bias.detach().to(output.dtype)

    module.forward = forward


def matrices_of(module: nn.Module) -> tuple[nn.Parameter, ...]:
    """Those that a use of the module uses. Attention of torch reads the weight of the layer below it."""
    is_attention = isinstance(module, nn.MultiheadAttention)
    return tuple(param for param in module.parameters(recurse=is_attention) if param.ndim > 1)


def shape_of(module: nn.Module) -> tuple[int, ...]:
    """Of the matrix of a module; of several, one of as many elements."""
    matrices = matrices_of(module)
    if len(matrices) == 1 and matrices[0].ndim < 4:
        return tuple(matrices[0].shape)
    if len(matrices) == 1:
        width = matrices[0][0].numel()
    else:
        width = matrices[0].shape[-1]
    return sum(param.numel() for param in matrices) // width, width


def _use_module(name: str, module: nn.Module, recorder: Recorder) -> None:
    """Makes what a module with matrices runs in forward and backward one use; autograd says when backward comes by."""
    forward = module.forward
    for param in matrices_of(module):
        # Its gradient is no activation.
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = through((args, kwargs), recorder.mark)
        first = recorder.mark()
        output = forward(*args, **kwargs)
        recorder.mark()
        return through(output, partial(recorder.mark_backward, name, first))

    module.forward = run


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, in_backward: Callable[[], object], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.in_backward = in_backward
        return tuple(tensor.view_as(tensor) for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.in_backward()
        return None, *grads


def through(values: Any, in_backward: Callable[[], object]) -> Any:
    """The same structure, its tensors that need gradients led through :class:`_Through` together."""
    leaves, spec = compat.tree_flatten(values)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, Tensor) and leaf.requires_grad]
    if places:
        led = _Through.apply(in_backward, *(leaves[place] for place in places))  # type: ignore[no-untyped-call]
        for place, tensor in zip(places, led, strict=True):
            leaves[place] = tensor
    return compat.tree_unflatten(leaves, spec)


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Record what runs in the context, with the kernels of GPUs."""

    def rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Any:
        # gtp_shard leaves the weight whole in fp32, and casts it at each use.
        if weight is None:
            factor = input.new_ones(())
        else:
            factor = weight.detach().to(input.dtype)
        return _RMSNorm.apply(input, factor, recorder)  # type: ignore[no-untyped-call]

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, **options: Any,
    ) -> Any:  # fmt: skip
        # The planner's own mask of one element stands for a causal one. Kernels with another mask compute all scores.
        is_ours = attn_mask is not None and attn_mask.shape[-2:] == (1, 1)
        share = 1.0
        if is_causal or is_ours:
            share = 0.5
        return _Attention.apply(query, key, value, share, recorder)  # type: ignore[no-untyped-call]

    with mock.patch.multiple(F, rms_norm=rms_norm, scaled_dot_product_attention=attention), recorder:
        yield


def recorder_of(model: nn.Module) -> tuple[Recorder, set[nn.Parameter]]:
    """A recorder of a model, which computes in bf16 and marks its uses from now on. A module that has matrices and none
    below it is one use; other matrices, which count as whole, are the second result."""
    known = {}
    owners = {}
    loose = set[nn.Parameter]()
    attentions = [module for module in model.modules() if isinstance(module, nn.MultiheadAttention)]
    parts = {below for module in attentions for below in module.modules() if below is not module}
    for name, module in model.named_modules():
        matrices = matrices_of(module)
        if module in parts:
            continue
        if type(module).forward in _KNOWN:
            known[name] = module
        if any(matrices_of(below) for below in module.modules() if below is not module and below not in parts):
            loose.update(matrices)  # few, as a class token is
        elif matrices and name not in known:
            owners[name] = module
    used = known | owners
    loose -= {param for module in used.values() for param in matrices_of(module)}
    frozen = {name for name, module in used.items() if not any(p.requires_grad for p in matrices_of(module))}
    cast = dict[nn.Parameter, nn.Parameter]()  # what is shared stays so
    for module in model.modules():
        for name, param in list(module.named_parameters(recurse=False, remove_duplicate=False)):
            if param.ndim > 1 or owners:  # their code may not cast: vectors are bf16 too then
                setattr(module, name, cast.setdefault(param, nn.Parameter(param.detach().bfloat16())))
    recorder = Recorder([*model.parameters(), *model.buffers()])
    recorder.frozen = frozen
    for name, module in known.items():
        _use_matrix(name, module, recorder)
    for name, module in owners.items():
        _use_module(name, module, recorder)
    return recorder, loose
