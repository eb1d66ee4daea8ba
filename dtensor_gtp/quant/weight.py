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


class WeightWithRecipe(Tensor):
    """Base of the tensors that ``F.linear`` and ``F.embedding`` read as their quantized values."""

    __slots__ = ("recipe",)
    recipe: Recipe

    def quantized_for(self, direction: Direction) -> Quantized:
        """The quantized weight, for GEMMs that multiply with it."""
        raise NotImplementedError

    def data_direction(self, direction: Direction) -> Direction:
        """The direction of the data that serve ``direction``."""
        raise NotImplementedError

    def dequantize_for(self, direction: Direction) -> Tensor:
        """The quantized weight as an ordinary tensor of this one's dtype."""
        quantized, direction = self.quantized_for(direction), self.data_direction(direction)
        return self.recipe.dequantize(quantized, self.shape, direction, self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func is F.embedding:
            return _embedding(*args, **kwargs)
        return compat.without_torch_function(func, args, kwargs)


def gemms_of(weight: WeightWithRecipe) -> Float8GEMMs | None:
    """How ``F.linear`` multiplies with ``weight``; None to dequantize it."""
    return choose_path(weight.recipe, weight.device, weight.shape, weight.dtype, "weight").gemms


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not isinstance(weight, WeightWithRecipe):
        raise TypeError(f"F.linear expects a weight with a recipe as weight only, but got {type(input).__name__}.")
    return _Linear.apply(input, weight, bias, gemms_of(weight))  # type: ignore[no-untyped-call]


def _embedding(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    return F.embedding(input, _StraightThrough.apply(weight), *args, **kwargs)  # type: ignore[no-untyped-call]


class _StraightThrough(torch.autograd.Function):
    """The values of the rowwise data; their gradient is that of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: WeightWithRecipe) -> Tensor:
        return weight.dequantize_for(Direction.ROWWISE)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Linear(torch.autograd.Function):
    """By the three GEMMs in float8; without them (``gemms`` is None) with the dequantized weight."""

    @staticmethod
    def forward(
        ctx: Any, input: Tensor, weight: WeightWithRecipe, bias: Tensor | None, gemms: Float8GEMMs | None
    ) -> Tensor:
        # fully_shard keeps the object and fills it again for backward.
        ctx.weight, ctx.gemms = weight, gemms
        ctx.save_for_backward(input)
        if gemms is None:
            return F.linear(input, weight.dequantize_for(Direction.ROWWISE), bias)
        if input.dtype != weight.dtype:
            raise RuntimeError(
                f"F.linear expects input and weight of one dtype, but got {input.dtype} and {weight.dtype} for a "
                f"weight of shape {tuple(weight.shape)}."
            )
        operands = gemms.cast_input(input.reshape(-1, input.shape[-1]))
        output = gemms.output(operands, weight.quantized_for(Direction.ROWWISE), weight.dtype)
        output = output.view(*input.shape[:-1], output.shape[-1])
        return output if bias is None else output + bias

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (input,) = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, _ = ctx.needs_input_grad
        gemms: Float8GEMMs | None = ctx.gemms
        weight: WeightWithRecipe = ctx.weight
        grad_MN = grad.reshape(-1, grad.shape[-1])
        grad_input = grad_weight = None
        operands: list[Tensor] = []
        if gemms is not None and (needs_input or (needs_weight and not gemms.high_precision_wgrad)):
            operands = gemms.cast_grad(grad_MN)
        if needs_weight:
            input_MK = input.reshape(-1, input.shape[-1])
            if gemms is None or gemms.high_precision_wgrad:
                grad_weight = grad_MN.t().mm(input_MK)
            else:
                grad_weight = gemms.grad_weight(gemms.cast_wgrad(grad_MN, input_MK, operands), weight.dtype)
        if needs_input and gemms is None:
            grad_input = grad.matmul(weight.dequantize_for(Direction.COLUMNWISE))
        elif needs_input and gemms is not None:
            quantized = weight.quantized_for(Direction.COLUMNWISE)
            grad_input = gemms.grad_input(operands, quantized, weight.dtype).view(input.shape)
        return grad_input, grad_weight, grad_MN.sum(0) if needs_bias else None, None
