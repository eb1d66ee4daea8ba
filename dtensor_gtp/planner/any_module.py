"""Uses of matrices in modules that are neither linear layers nor tables: convolutions, experts, code of users.

A module that holds matrices and has no module with matrices below it is one use: its operations in forward are those of
the use, and autograd says when backward comes by. Experts of transformers choose rows by data, which fake tensors have
not: a stand-in computes as much as equally loaded experts do.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn

from .. import _torch_compat as compat
from .recorder import Kind, Op, Recorder

IsKnown = Callable[[nn.Module], bool]


def other_owners(model: nn.Module, is_known: IsKnown) -> dict[str, nn.Module]:
    """Modules with their own matrices that are not known, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if not is_known(module) and _own_matrices(module) and not _has_matrices_below(module)
    }


def loose_numel(model: nn.Module, is_known: IsKnown) -> int:
    """Elements of matrices beside modules that have some too, as a class token is. They are few and count as whole."""
    return sum(
        param.numel()
        for module in model.modules()
        if not is_known(module) and _has_matrices_below(module)
        for param in _own_matrices(module)
    )


def _own_matrices(module: nn.Module) -> list[nn.Parameter]:
    return [param for param in module.parameters(recurse=False) if param.ndim > 1]


def _has_matrices_below(module: nn.Module) -> bool:
    return any(_own_matrices(below) for below in module.modules() if below is not module)


def shape_of(module: nn.Module) -> tuple[int, ...]:
    """Of the matrix of a module; of several, one of as many elements."""
    matrices = _own_matrices(module)
    if len(matrices) == 1:
        param = matrices[0]
        return tuple(param.shape) if param.ndim < 4 else (param.shape[0], param.numel() // param.shape[0])
    width = matrices[0].shape[-1]
    return sum(param.numel() for param in matrices) // width, width


def use_module(name: str, module: nn.Module, recorder: Recorder) -> None:
    """Let a module mark its use."""
    forward = module.forward
    names = list(inspect.signature(forward).parameters)
    if names[1:3] == ["top_k_index", "top_k_weights"]:
        forward = _equal_loads(module, recorder)

    def begin_backward() -> None:
        recorder.mark("wgrad", name)
        recorder.mark("dgrad", name)

    def run(*args: Any, **kwargs: Any) -> Any:
        args, kwargs = _through((args, kwargs), lambda: recorder.mark("after_backward", name))
        recorder.mark("forward", name)
        output = forward(*args, **kwargs)
        recorder.mark("after_forward", name)
        return _through(output, begin_backward)

    module.forward = run


class _Through(torch.autograd.Function):
    """Identity on tensors; says when backward comes by."""

    @staticmethod
    def forward(ctx: Any, in_backward: Callable[[], None], *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.in_backward = in_backward
        return tuple(tensor.view_as(tensor) for tensor in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        ctx.in_backward()
        return None, *grads


def _through(values: Any, in_backward: Callable[[], None]) -> Any:
    """The same structure, its tensors that need gradients led through :class:`_Through` together."""
    leaves, spec = compat.tree_flatten(values)
    places = [place for place, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.requires_grad]
    if places:
        led = _Through.apply(in_backward, *(leaves[place] for place in places))  # type: ignore[no-untyped-call]
        for place, tensor in zip(places, led, strict=True):
            leaves[place] = tensor
    return compat.tree_unflatten(leaves, spec)


class _Routed(torch.autograd.Function):
    """Rows through equally loaded experts: what is saved, and the GEMMs of forward."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weights: torch.Tensor, kept: int, flops: float, recorder: Recorder
    ) -> Any:
        ctx.save_for_backward(input, weights, input.new_empty(kept))
        recorder.note(Op(Kind.GEMM, flops=flops))
        recorder.note(Op(Kind.MEMORY, nbytes=2 * kept * input.element_size()))
        return torch.empty_like(input)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        _input, weights, kept = ctx.saved_tensors
        _grads = torch.empty_like(kept)
        return torch.empty_like(grad), torch.empty_like(weights), None, None, None


def _equal_loads(module: nn.Module, recorder: Recorder) -> Callable[..., torch.Tensor]:
    def forward(hidden_NC: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor) -> torch.Tensor:
        rows = top_k_index.numel()
        matrices = [param for param in _own_matrices(module) if param.ndim == 3]
        flops = sum(2 * rows * param.numel() / param.shape[0] for param in matrices)
        width = hidden_NC.shape[-1]
        inner = sum(param.numel() // param.shape[0] // width for param in matrices)
        return _Routed.apply(hidden_NC, top_k_weights, rows * (width + inner), flops, recorder)  # type: ignore[no-any-return,no-untyped-call]

    return forward
