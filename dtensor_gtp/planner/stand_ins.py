"""Stand-ins for what GPUs have fused kernels for, and for collectives: they save and return what those do.

:func:`recording` runs code with them. Only the reference model (``reference``) calls collectives; on fake tensors they
change shapes and communicate nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
import torch.nn.functional as F

from .recorder import Kind, Op, Recorder

_BACKWARD_OF_ATTENTION = 2.5  # five GEMMs instead of two


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
    """What ``F.rms_norm`` is on a GPU: one kernel that saves its input and an fp32 factor for each row. Backward reads
    gradient and input twice: for the input's gradient, and for the weight's."""

    @staticmethod
    def forward(ctx: Any, input: torch.Tensor, weight: torch.Tensor, recorder: Recorder) -> torch.Tensor:
        ctx.recorder = recorder
        ctx.save_for_backward(input, weight, input.new_empty(input.shape[:-1], dtype=torch.float32))
        recorder.note(Op(Kind.MEMORY, nbytes=2 * input.nbytes))
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        _saved = ctx.saved_tensors
        ctx.recorder.note(Op(Kind.MEMORY, nbytes=5 * grad.nbytes))
        return torch.empty_like(grad), None, None


class _Attention(torch.autograd.Function):
    """What scaled dot product attention is on a GPU, flash attention: it saves its inputs and its output, in fp32 a
    number for each row of each head, and the state of a random generator."""

    @staticmethod
    def forward(
        ctx: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, share: float, recorder: Recorder
    ) -> torch.Tensor:
        # In the layout of the query, as the kernel's: what follows is a view of it then.
        batch, heads, tokens, _ = query.shape
        is_alike = query.shape[-1] == value.shape[-1]
        other = (batch, tokens, heads, value.shape[-1])
        output = torch.empty_like(query) if is_alike else query.new_empty(other).transpose(1, 2)
        row_sums = query.new_empty(query.shape[:-1], dtype=torch.float32)
        seed, offset = (query.new_empty((), dtype=torch.int64) for _ in range(2))
        ctx.save_for_backward(query, key, value, output, row_sums, seed, offset)
        ctx.recorder = recorder
        ctx.flops = share * 2 * query[..., 0].numel() * key.shape[-2] * (query.shape[-1] + value.shape[-1])
        recorder.note(Op(Kind.ATTENTION, flops=ctx.flops))
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        query, key, value, *_saved = ctx.saved_tensors
        ctx.recorder.note(Op(Kind.ATTENTION, flops=_BACKWARD_OF_ATTENTION * ctx.flops))
        grad_query = torch.empty_like(query)
        # Sums in fp32, and for grouped heads first gradients of keys and values for each head of queries.
        _sums = (
            query.new_empty(query.shape, dtype=torch.float32),
            query.new_empty(query.shape[:-1], dtype=torch.float32),
        )
        _grouped = [torch.empty_like(query) for _ in (key, value) if key.shape[1] != query.shape[1]]
        return grad_query, torch.empty_like(key), torch.empty_like(value), None, None


class _VocabularyLoss(torch.autograd.Function):
    """What torch's ``loss_parallel`` computes on this rank's columns of the logits: its kernels are not fused, so
    backward holds four tensors of their size at once."""

    @staticmethod
    def forward(ctx: Any, logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
        shifted = logits_TV - logits_TV.amax(-1, keepdim=True)
        result = shifted - shifted.exp().sum(-1, keepdim=True).log()
        ctx.save_for_backward(result)
        return -result.gather(-1, targets_T.unsqueeze(-1)).mean()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (result,) = ctx.saved_tensors
        of_targets = torch.zeros_like(result)
        return (of_targets + result.exp()) * grad, None


def vocabulary_loss(logits_TV: torch.Tensor, targets_T: torch.Tensor) -> torch.Tensor:
    """The loss of this rank's columns of the logits."""
    loss: torch.Tensor = _VocabularyLoss.apply(logits_TV, targets_T)  # type: ignore[no-untyped-call]
    return loss


class _Exchange(torch.autograd.Function):
    """A collective that makes a tensor of ``scale`` times as many rows along ``dim``; backward does the opposite."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, recorder: Recorder, kind: Kind, dim: int, sizes: tuple[int, int]
    ) -> torch.Tensor:
        ctx.recorder, ctx.kind, ctx.dim, ctx.sizes = recorder, kind, dim, sizes
        return _exchanged(input, recorder, kind, dim, sizes)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        new, old = ctx.sizes
        return _exchanged(grad, ctx.recorder, ctx.kind, ctx.dim, (old, new)), None, None, None, None


def _exchanged(input: torch.Tensor, recorder: Recorder, kind: Kind, dim: int, sizes: tuple[int, int]) -> torch.Tensor:
    new, old = sizes
    shape = list(input.shape)
    shape[dim] = shape[dim] * new // old
    output = input.new_empty(shape)
    recorder.note(Op(kind, nbytes=max(input.nbytes, output.nbytes)))
    return output


class Collectives:
    """The collectives of a layer, as the reference model calls them: an axis of one rank does nothing."""

    def __init__(self, recorder: Recorder, tp: int, cp: int, ep: int) -> None:
        self._recorder, self._tp, self._cp, self._ep = recorder, tp, cp, ep

    def gather_sequence(self, x_BTC: torch.Tensor) -> torch.Tensor:
        """All-gather along the sequence over tp; its backward is a reduce-scatter."""
        return self._exchange(x_BTC, Kind.TP, 1, (self._tp, 1), self._tp)

    def scatter_sequence(self, x_BTC: torch.Tensor) -> torch.Tensor:
        """Reduce-scatter along the sequence over tp; its backward is an all-gather."""
        return self._exchange(x_BTC, Kind.TP, 1, (1, self._tp), self._tp)

    def gather_keys(self, x_BHTD: torch.Tensor) -> torch.Tensor:
        """All-gather of keys or values along the sequence over cp; its backward is a reduce-scatter."""
        return self._exchange(x_BHTD, Kind.CP, 2, (self._cp, 1), self._cp)

    def exchange_tokens(self, x_TC: torch.Tensor) -> torch.Tensor:
        """All-to-all of tokens over ep, in both directions of the same size."""
        return self._exchange(x_TC, Kind.EP, 0, (1, 1), self._ep)

    def _exchange(self, input: torch.Tensor, kind: Kind, dim: int, sizes: tuple[int, int], world: int) -> torch.Tensor:
        if world == 1:
            return input
        output: torch.Tensor = _Exchange.apply(input, self._recorder, kind, dim, sizes)  # type: ignore[no-untyped-call]
        return output


class Experts(nn.Module):
    """The matrices of this rank's experts, in one tensor: a grouped GEMM."""

    def __init__(self, num: int, in_features: int, out_features: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(num, out_features, in_features))

    def forward(self, x_ETK: torch.Tensor) -> torch.Tensor:
        return self.weight.new_empty(0)  # replaced: see ``recording``


def _grouped(input: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return torch.bmm(input, weight.transpose(1, 2))


def is_known(module: nn.Module) -> bool:
    """Whether :func:`use_matrices` knows what it computes: not where a subclass has its own forward."""
    forward = type(module).forward
    return isinstance(module, Experts) or forward in (nn.Linear.forward, nn.Embedding.forward)


def use_matrices(model: nn.Module, mark: Callable[[str, str], None]) -> None:
    """Replaces what linear layers, embeddings and experts compute by a use that marks."""
    for name, module in model.named_modules():
        function: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
        if not is_known(module):
            continue
        if isinstance(module, nn.Linear):
            function = F.linear
        elif isinstance(module, nn.Embedding):
            function = F.embedding
        else:
            function = _grouped

        def forward(
            input: torch.Tensor, module: nn.Module = module, function: Any = function, name: str = name
        ) -> torch.Tensor:
            output: torch.Tensor = _Use.apply(input, module.weight, function, lambda kind: mark(kind, name))  # type: ignore[no-untyped-call]
            bias = getattr(module, "bias", None)
            return output if bias is None else output + bias.detach().to(output.dtype)

        module.forward = forward


@contextmanager
def recording(recorder: Recorder) -> Iterator[None]:
    """Record what runs in the context, with the kernels of GPUs."""

    def rms_norm(
        input: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
    ) -> torch.Tensor:
        # gtp_shard leaves the weight whole in fp32, and casts it at each use.
        factor = input.new_ones(()) if weight is None else weight.detach().to(input.dtype)
        output: torch.Tensor = _RMSNorm.apply(input, factor, recorder)  # type: ignore[no-untyped-call]
        return output

    def attention(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attn_mask: torch.Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        **options: Any,
    ) -> torch.Tensor:
        # The planner's own mask of one element stands for a causal one. Kernels with another mask compute all scores.
        is_ours = attn_mask is not None and attn_mask.shape[-2:] == (1, 1)
        share = 0.5 if is_causal or is_ours else 1.0
        output: torch.Tensor = _Attention.apply(query, key, value, share, recorder)  # type: ignore[no-untyped-call]
        return output

    patches = (
        mock.patch.object(F, "rms_norm", rms_norm),
        mock.patch.object(F, "scaled_dot_product_attention", attention),
    )
    with patches[0], patches[1], recorder:
        yield
