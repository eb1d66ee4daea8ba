"""A weight with a recipe in stock modules: its products."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .. import _torch_compat as compat
from .compute import choose_path
from .float8_gemms import Float8GEMMs
from .planes import Direction, Quantized
from .recipes import Recipe


def gemms_of(weight: WeightWithRecipe) -> Float8GEMMs | None:
    """How ``F.linear`` multiplies with ``weight``; None to dequantize it."""
    return choose_path(weight.recipe, weight.device, weight.shape, weight.dtype, "weight").gemms


class Float8Linear(torch.autograd.Function):
    """The three GEMMs in float8."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: WeightWithRecipe, bias: Tensor | None, gemms: Float8GEMMs) -> Tensor:
        if input.dtype != weight.dtype:
            raise RuntimeError(
                f"F.linear expects input and weight of one dtype, but got {input.dtype} and {weight.dtype} for a "
                f"weight of shape {tuple(weight.shape)}."
            )
        # fully_shard keeps the object and fills it again for backward.
        ctx.weight, ctx.gemms = weight, gemms
        ctx.save_for_backward(input)
        operands = gemms.cast_input(input.reshape(-1, input.shape[-1]))
        output = gemms.output(operands, weight.quantized_for(Direction.ROWWISE), weight.dtype)
        output = output.view(*input.shape[:-1], output.shape[-1])
        return output if bias is None else output + bias

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (input,) = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        gemms: Float8GEMMs = ctx.gemms
        weight: WeightWithRecipe = ctx.weight
        grad_MN, input_MK = grad.reshape(-1, grad.shape[-1]), input.reshape(-1, input.shape[-1])
        is_cast = needs_input or (needs_weight and not gemms.high_precision_wgrad)
        operands = gemms.cast_grad(grad_MN) if is_cast else []
        grad_weight = grad_input = None
        if needs_weight and gemms.high_precision_wgrad:
            grad_weight = grad_MN.t().mm(input_MK)
        elif needs_weight:
            grad_weight = gemms.grad_weight(gemms.cast_wgrad(grad_MN, input_MK, operands), weight.dtype)
        if needs_input:
            quantized = weight.quantized_for(Direction.COLUMNWISE)
            grad_input = gemms.grad_input(operands, quantized, weight.dtype).view(input.shape)
        return grad_input, grad_weight, grad_MN.sum(0) if needs_bias else None, None


class WeightWithRecipe(Tensor):
    """What ``F.linear`` and ``F.embedding`` compute with: it can be dequantized in either direction."""

    def dequantize_for(self, direction: Direction) -> Tensor:
        """The quantized weight as an ordinary tensor of this one's dtype."""
        raise NotImplementedError

    def quantized_for(self, direction: Direction) -> Quantized:
        """The quantized weight as it is, for GEMMs that multiply with that."""
        raise NotImplementedError

    @property
    def recipe(self) -> Recipe:
        """How the weight is quantized."""
        raise NotImplementedError

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func is F.embedding:
            return _embedding(func, *args, **kwargs)
        return compat.without_torch_function(func, args, kwargs)


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not isinstance(weight, WeightWithRecipe):
        raise TypeError(f"F.linear expects a weight with a recipe as weight only, but got {type(input).__name__}.")
    gemms = gemms_of(weight)
    if gemms is not None:
        return Float8Linear.apply(input, weight, bias, gemms)  # type: ignore[no-untyped-call]
    return _QuantizedLinear.apply(input, weight, bias)  # type: ignore[no-untyped-call]


def _embedding(func: Any, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    return func(input, _StraightThrough.apply(weight), *args, **kwargs)  # type: ignore[no-untyped-call]


class _StraightThrough(torch.autograd.Function):
    """The rowwise data; its gradient is that of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: WeightWithRecipe) -> Tensor:
        return weight.dequantize_for(Direction.ROWWISE)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _QuantizedLinear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, input: Tensor, weight: WeightWithRecipe, bias: Tensor | None) -> Tensor:
        # fully_shard keeps the object and fills it again for backward.
        ctx.weight = weight
        ctx.save_for_backward(input)
        return F.linear(input, weight.dequantize_for(Direction.ROWWISE), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (input,) = ctx.saved_tensors
        needs_input, needs_weight, needs_bias = ctx.needs_input_grad
        grad_2d = grad.reshape(-1, grad.shape[-1])
        grad_input = grad.matmul(ctx.weight.dequantize_for(Direction.COLUMNWISE)) if needs_input else None
        grad_weight = grad_2d.t().mm(input.reshape(-1, input.shape[-1])) if needs_weight else None
        return grad_input, grad_weight, grad_2d.sum(0) if needs_bias else None
