"""Casts that the compiler has fused equal the reference bit for bit."""

from __future__ import annotations

import unittest
from collections.abc import Callable
from typing import Any

import pytest
import torch

from dtensor_gtp.quant import RECIPES, Direction, Recipe
from dtensor_gtp.quant.float8_gemms import BlockwiseGEMMs, RowwiseGEMMs, TensorwiseGEMMs

NAN, INF = float("nan"), float("inf")


def matrices() -> list[torch.Tensor]:
    """Blocks that end early; ties, what saturates, zeros of both signs and whole blocks of them, denormals of float32
    and of the formats, NaN and infinities in blocks of their own."""
    generator = torch.Generator().manual_seed(0)
    matrix = torch.randn(150, 200, generator=generator) * torch.exp2(
        torch.randint(-12, 3, (150, 200), generator=generator)
    )
    matrix[0, :128] = torch.arange(128) / 16 * 448 / 8  # ties of e4m3 where the scale is a power of two
    matrix[32:64, 32:64] = 0.0
    matrix[40, 40] = -0.0
    matrix[64:96, :32] *= 2.0**-120
    matrix[100] *= 2.0**-149
    broken = matrix.clone()
    broken[5, 7], broken[70, 140], broken[149, 199] = NAN, INF, -INF
    # One shape, to compile once.
    return [matrix, broken, matrix * 2.0**120, torch.zeros_like(matrix)]


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """As integers, with one NaN for all: which of its bits are set is up to the processor."""
    integers = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[tensor.itemsize]
    is_nan = tensor.isnan() if tensor.dtype in (torch.float32, torch.bfloat16) else torch.zeros_like(tensor, dtype=bool)
    return torch.where(is_nan, -1 if tensor.itemsize > 1 else 0, tensor.contiguous().view(integers))


class TestCompiledCasts(unittest.TestCase):
    def _check(self, function: Callable[..., Any], inputs: list[torch.Tensor]) -> None:
        torch._dynamo.reset()
        compiled = torch.compile(function, fullgraph=True, dynamic=False)
        for matrix in inputs:
            for index, (a, b) in enumerate(zip(compiled(matrix), function(matrix), strict=True)):
                self.assertEqual((a.dtype, a.shape), (b.dtype, b.shape))
                self.assertTrue(torch.equal(bits(a), bits(b)), (function, matrix.shape, index))

    def _check_recipe(self, recipe: Recipe) -> None:
        directions = tuple(Direction) if recipe.has_columnwise else (Direction.ROWWISE,)

        def casts(matrix: torch.Tensor) -> list[torch.Tensor]:
            results: list[torch.Tensor] = []
            for direction in directions:
                quantized = recipe.quantize(matrix, direction)
                # inductor has no e8m0 on CPU
                results += [plane.view(torch.uint8) if plane.itemsize == 1 else plane for plane in quantized.planes]
                dtype = torch.float32 if direction is Direction.ROWWISE else torch.bfloat16
                results.append(recipe.dequantize(quantized, matrix.shape, direction, dtype))
            return results

        self._check(casts, matrices())

    @pytest.mark.soak  # what these casts consist of is in the others
    def test_float8(self) -> None:
        for name in ("float8_tensorwise", "float8_rowwise", "float8_blockwise"):
            self._check_recipe(RECIPES[name]())

    def test_mxfp8(self) -> None:
        self._check_recipe(RECIPES["mxfp8"]())

    def test_nvfp4(self) -> None:
        self._check_recipe(RECIPES["nvfp4"]())

    def test_activations_and_gradients(self) -> None:
        all_gemms = [cls(False, False) for cls in (TensorwiseGEMMs, RowwiseGEMMs, BlockwiseGEMMs)]

        def casts(matrix: torch.Tensor) -> list[torch.Tensor]:
            results: list[torch.Tensor] = []
            for gemms in all_gemms:
                grad = gemms.cast_grad(matrix)
                operands = [*gemms.cast_input(matrix), *grad, *gemms.cast_wgrad(matrix, matrix, grad)]
                results += [operand.view(torch.uint8) if operand.itemsize == 1 else operand for operand in operands]
            return results

        self._check(casts, [matrix.bfloat16() for matrix in matrices()])
