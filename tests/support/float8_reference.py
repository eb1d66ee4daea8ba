"""What float8 compute means, spelled out with values instead of codes: each GEMM's operands, and a linear layer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from dtensor_gtp.quant import Direction, Float8Rowwise, Float8Tensorwise, Recipe, cast


def rounded(values: torch.Tensor, dims: tuple[int, ...], gradient: bool = False) -> torch.Tensor:
    """Values as dynamic scaling over ``dims`` leaves them."""
    dtype = torch.float8_e5m2 if gradient else torch.float8_e4m3fn
    scale = cast.float8_scale(values.abs().amax(dims, keepdim=True), dtype)
    return cast.to_float8(values / scale, dtype).float() * scale


def in_blocks(values: torch.Tensor) -> torch.Tensor:
    """The same with a scale for each 128 elements of a row."""
    return torch.cat([rounded(part, (-1,)) for part in values.split(128, -1)], -1)


class Values(NamedTuple):
    """What a weight (or a slice of it) stands for: its values; elements and scale of each row for rowwise recipes."""

    values: torch.Tensor
    elements: torch.Tensor
    row_scale: torch.Tensor | None

    @classmethod
    def of(cls, weight: torch.Tensor, recipe: Recipe) -> Values:
        quantized = recipe.quantize(weight, Direction.ROWWISE)
        values = recipe.dequantize(quantized, weight.shape, Direction.ROWWISE, torch.float32)
        scale = quantized.planes[1] if isinstance(recipe, Float8Rowwise) else None
        return cls(values, quantized.planes[0].float(), scale)

    def chunk(self, num: int, dim: int) -> list[Values]:
        scales = [self.row_scale] * num if dim == 1 or self.row_scale is None else self.row_scale.chunk(num)
        parts = zip(self.values.chunk(num, dim), self.elements.chunk(num, dim), scales, strict=True)
        return [Values(*part) for part in parts]


def forward_operands(recipe: Recipe, x: torch.Tensor, weight: Values) -> tuple[torch.Tensor, torch.Tensor]:
    """What forward multiplies: ``left @ right.T``."""
    if isinstance(recipe, Float8Tensorwise):
        return rounded(x, (0, 1)), weight.values
    return (rounded(x, (1,)) if isinstance(recipe, Float8Rowwise) else in_blocks(x)), weight.values


def dgrad_operands(recipe: Recipe, g: torch.Tensor, weight: Values) -> tuple[torch.Tensor, torch.Tensor]:
    if isinstance(recipe, Float8Tensorwise):
        return rounded(g, (0, 1), gradient=True), weight.values.t()
    if weight.row_scale is not None:
        return rounded(g * weight.row_scale.view(1, -1), (1,)), weight.elements.t()
    return in_blocks(g), weight.values.t()


def wgrad_operands(recipe: Recipe, g: torch.Tensor, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if recipe.high_precision_wgrad:  # type: ignore[attr-defined]
        return g.t(), x.t()
    if isinstance(recipe, Float8Tensorwise):
        return rounded(g, (0, 1), gradient=True).t(), rounded(x, (0, 1)).t()
    if isinstance(recipe, Float8Rowwise):
        return rounded(g.t(), (1,)), rounded(x.t(), (1,))
    return in_blocks(g.t()), in_blocks(x.t())


class Float8Product(torch.autograd.Function):
    """One rank's linear layer: its rows of the batch, its slice of the weight."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, values: Values, recipe: Recipe) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.values, ctx.recipe = values, recipe
        left, right = forward_operands(recipe, x.flatten(0, -2), values)
        return left.mm(right.t()).unflatten(0, x.shape[:-1])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        (x,) = ctx.saved_tensors
        g = grad.flatten(0, -2)
        left, right = dgrad_operands(ctx.recipe, g, ctx.values)
        grad_x = left.mm(right.t()).view(x.shape)
        left, right = wgrad_operands(ctx.recipe, g, x.flatten(0, -2))
        return grad_x, left.mm(right.t()), None, None


class Linear(nn.Linear):
    """The reference of a float8 linear layer.

    Args:
        cut: Dim of the weight that tensor parallelism cuts, and into how many slices; activations and gradients are
            scaled for each slice.
    """

    recipe: Recipe
    cut: tuple[int, int] = (0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        dim, num = self.cut
        weights = self.weight.chunk(num, dim)
        slices = Values.of(self.weight.detach(), self.recipe).chunk(num, dim)
        inputs = x.chunk(num, -1) if dim == 1 else [x] * num
        parts: list[torch.Tensor] = [
            Float8Product.apply(part, weight, values, self.recipe)
            for part, weight, values in zip(inputs, weights, slices, strict=True)
        ]
        y = torch.cat(parts, -1) if dim == 0 else sum(parts[1:], parts[0])
        return y if self.bias is None else y + self.bias


def float8_reference(
    model: nn.Module,
    recipe: Recipe,
    names: Callable[[nn.Module, str], bool],
    num_slices: int = 1,
    cut: tuple[str, ...] = ("up", "down"),
) -> nn.Module:
    """A copy of ``Net`` in which matching layers compute in float8; of those in ``cut``, ``up`` is cut by rows and
    ``down`` by columns."""
    reference = copy.deepcopy(model)
    for name, module in reference.named_modules():
        if isinstance(module, nn.Linear) and names(module, name):
            module.__class__ = Linear
            module.recipe = recipe
            module.cut = (1 if name.endswith("down") else 0, num_slices if name.endswith(cut) else 1)
    return reference
