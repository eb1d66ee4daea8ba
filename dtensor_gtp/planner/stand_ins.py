"""Stand-ins for what GPUs have fused kernels for, and for collectives: they save and return what those do.

:func:`recording` runs code with them. Only the reference model (``reference``) calls collectives; on fake tensors they
change shapes and communicate nothing.

A module that holds matrices, is no linear layer and no table, and has no module with matrices below it, is one use: its
operations in forward and backward are those of the use, and autograd says when backward comes by.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .. import _torch_compat as compat
from .recorder import Kind, Op, Recorder

_BACKWARD_OF_ATTENTION = 2.5  # five GEMMs instead of two


class _Use(torch.autograd.Function):
    """A matrix in use: its own gradient is not computed, and only the input is saved."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: Tensor, function: Any, mark: Callable[[str], None]) -> Any:
        ctx.weight, ctx.mark = weight, mark
        ctx.save_for_backward(input)
        mark("forward")
        output = function(input, weight)
        mark("after_forward")
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        _saved = ctx.saved_tensors  # the weight's gradient needs the input
        ctx.mark("wgrad")
        ctx.mark("dgrad")
        grad_input = grad.matmul(ctx.weight) if ctx.needs_input_grad[0] else None
        ctx.mark("after_backward")
        return grad_input, None, None, None


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
        ctx.recorder.note(Op(Kind.ATTENTION, flops=_BACKWARD_OF_ATTENTION * ctx.flops))
        grad_query = torch.empty_like(query)
        # Sums in fp32, and for grouped heads first gradients of keys and values for each head of queries.
        _sums = [query.new_empty(shape, dtype=torch.float32) for shape in (query.shape, query.shape[:-1])]
        _grouped = [torch.empty_like(query) for _ in (key, value) if key.shape[1] != query.shape[1]]
        return grad_query, torch.empty_like(key), torch.empty_like(value), None, None


class VocabularyLoss(torch.autograd.Function):
    """What torch's ``loss_parallel`` computes on this rank's columns of the logits: its kernels are not fused, so
    backward holds four tensors of their size at once."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor) -> Tensor:
        shifted = logits_TV - logits_TV.amax(-1, keepdim=True)
        result = shifted - shifted.exp().sum(-1, keepdim=True).log()
        ctx.save_for_backward(result)
        return -result.gather(-1, targets_T.unsqueeze(-1)).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (result,) = ctx.saved_tensors
        of_targets = torch.zeros_like(result)
        return (of_targets + result.exp()) * grad, None


class _Exchange(torch.autograd.Function):
    """A collective that makes ``new`` rows of each ``old`` ones along ``dim``; backward does the opposite."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, recorder: Recorder, kind: Kind, dim: int, new: int, old: int) -> Tensor:
        ctx.others = recorder, kind, dim, old, new
        shape = list(input.shape)
        shape[dim] = shape[dim] * new // old
        output = input.new_empty(shape)
        recorder.note(Op(kind, nbytes=max(input.nbytes, output.nbytes)))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Exchange.forward(ctx, grad, *ctx.others), None, None, None, None, None


class Collectives:
    """The collectives of a layer, as the reference model calls them: an axis of one rank does nothing."""

    def __init__(self, recorder: Recorder, tp: int, cp: int, ep: int) -> None:
        self._recorder, self._tp, self._cp, self._ep = recorder, tp, cp, ep

    def gather_sequence(self, x_BTC: Tensor) -> Tensor:
        """All-gather along the sequence over tp; its backward is a reduce-scatter."""
        return self._exchange(x_BTC, Kind.TP, 1, self._tp, 1)

    def scatter_sequence(self, x_BTC: Tensor) -> Tensor:
        """Reduce-scatter along the sequence over tp; its backward is an all-gather."""
        return self._exchange(x_BTC, Kind.TP, 1, 1, self._tp)

    def gather_keys(self, x_BHTD: Tensor) -> Tensor:
        """All-gather of keys or values along the sequence over cp; its backward is a reduce-scatter."""
        return self._exchange(x_BHTD, Kind.CP, 2, self._cp, 1)

    def exchange_tokens(self, x_TC: Tensor) -> Tensor:
        """All-to-all of tokens over ep, in both directions of the same size."""
        return self._exchange(x_TC, Kind.EP, 0, self._ep, self._ep)

    def _exchange(self, input: Tensor, kind: Kind, dim: int, new: int, old: int) -> Tensor:
        if new == old == 1:
            return input
        return _Exchange.apply(input, self._recorder, kind, dim, new, old)  # type: ignore[no-any-return,no-untyped-call]


class Experts(nn.Module):
    """The matrices of this rank's experts, in one tensor: a grouped GEMM."""

    def __init__(self, num: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num, out_features, in_features))

    def forward(self, x_ETK: Tensor) -> Tensor:
        return self.weight.new_empty(0)  # replaced: see ``recording``


def _grouped(input: Tensor, weight: Tensor) -> Tensor:
    return torch.bmm(input, weight.transpose(1, 2))


def is_known(module: nn.Module) -> bool:
    """Whether :func:`use_matrices` knows what it computes: not where a subclass has its own forward."""
    return type(module).forward in (nn.Linear.forward, nn.Embedding.forward, Experts.forward)


def use_matrices(model: nn.Module, mark: Callable[[str, str], None]) -> None:
    """Replaces what linear layers, embeddings and experts compute by a use that marks."""
    functions = {nn.Linear.forward: F.linear, nn.Embedding.forward: F.embedding, Experts.forward: _grouped}

    def forward(module: nn.Module, name: str, function: Any, input: Tensor) -> Any:
        output = _Use.apply(input, module.weight, function, lambda kind: mark(kind, name))  # type: ignore[no-untyped-call]
        bias = getattr(module, "bias", None)
        return output if bias is None else output + bias.detach().to(output.dtype)

    for name, module in model.named_modules():
        if is_known(module):
            module.forward = partial(forward, module, name, functions[type(module).forward])


def other_owners(model: nn.Module) -> tuple[dict[str, nn.Module], int]:
    """Modules with matrices that are not known and have none with matrices below, by name. Matrices beside such modules
    are few, as a class token is, and count as whole: how many elements they have."""
    owners, loose = {}, 0
    for name, module in model.named_modules():
        if is_known(module):
            continue
        if any(_own_matrices(below) for below in module.modules() if below is not module):
            loose += sum(param.numel() for param in _own_matrices(module))
        elif _own_matrices(module):
            owners[name] = module
    return owners, loose


def _own_matrices(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in module.parameters(recurse=False) if param.ndim > 1]


def shape_of(module: nn.Module) -> tuple[int, ...]:
    """Of the matrix of a module; of several, one of as many elements."""
    matrices = _own_matrices(module)
    if len(matrices) == 1 and matrices[0].ndim < 4:
        return tuple(matrices[0].shape)
    width = matrices[0][0].numel() if len(matrices) == 1 else matrices[0].shape[-1]
    return sum(param.numel() for param in matrices) // width, width


def use_module(name: str, module: nn.Module, recorder: Recorder) -> None:
    forward = module.forward
    for param in _own_matrices(module):
        # Its gradient is no activation.
        param.register_post_accumulate_grad_hook(lambda param: setattr(param, "grad", None))

    def begin_backward() -> None:
        recorder.mark("wgrad", name)
        recorder.mark("dgrad", name)

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = through((args, kwargs), lambda: recorder.mark("after_backward", name))
        recorder.mark("forward", name)
        output = forward(*args, **kwargs)
        recorder.mark("after_forward", name)
        return through(output, begin_backward)

    module.forward = run


class _Through(torch.autograd.Function):
    """Identity on tensors; says when backward comes by."""

    @staticmethod
    def forward(ctx: Any, in_backward: Callable[[], None], *inputs: Tensor) -> tuple[Tensor, ...]:
        ctx.in_backward = in_backward
        return tuple(tensor.view_as(tensor) for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ctx.in_backward()
        return None, *grads


def through(values: Any, in_backward: Callable[[], None]) -> Any:
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
        factor = input.new_ones(()) if weight is None else weight.detach().to(input.dtype)
        return _RMSNorm.apply(input, factor, recorder)  # type: ignore[no-untyped-call]

    def attention(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, **options: Any,
    ) -> Any:  # fmt: skip
        # The planner's own mask of one element stands for a causal one. Kernels with another mask compute all scores.
        is_ours = attn_mask is not None and attn_mask.shape[-2:] == (1, 1)
        share = 0.5 if is_causal or is_ours else 1.0
        return _Attention.apply(query, key, value, share, recorder)  # type: ignore[no-untyped-call]

    with mock.patch.multiple(F, rms_norm=rms_norm, scaled_dot_product_attention=attention), recorder:
        yield
