"""``F.linear`` in float8 on a weight with a recipe that ``gtp_shard`` does not manage: alone, under ``fully_shard``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from .base import Direction
from .compute import choose_path
from .float8_gemms import Float8GEMMs

if TYPE_CHECKING:
    from .tensor import WeightWithRecipe


def gemms_of(weight: WeightWithRecipe) -> Float8GEMMs | None:
    """How ``F.linear`` multiplies with ``weight``; None to dequantize it."""
    return choose_path(weight.recipe, weight.device, weight.shape, weight.dtype, "weight").gemms


class Float8Linear(torch.autograd.Function):
    """The three GEMMs in float8."""

    @staticmethod
    def forward(
        ctx: Any, input: torch.Tensor, weight: WeightWithRecipe, bias: torch.Tensor | None, gemms: Float8GEMMs
    ) -> torch.Tensor:
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
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
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


__all__ = ["Float8Linear", "gemms_of"]
