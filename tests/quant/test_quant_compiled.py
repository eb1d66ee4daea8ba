"""Casts that the compiler has fused equal the reference bit for bit; weights that it takes apart."""

import unittest
from collections.abc import Callable

import pytest
import torch
import torch.nn as nn

from dtensor_gtp import quantize_
from dtensor_gtp.quant import MXFP8, NVFP4, Direction, Float8Blockwise, Float8Rowwise, Float8Tensorwise, Recipe
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
    def _check(self, function: Callable[[torch.Tensor], list[torch.Tensor]], inputs: list[torch.Tensor]) -> None:
        def with_bytes(matrix: torch.Tensor) -> list[torch.Tensor]:
            # inductor has no e8m0 on CPU
            return [each.view(torch.uint8) if each.itemsize == 1 else each for each in function(matrix)]

        torch._dynamo.reset()
        compiled = torch.compile(with_bytes, fullgraph=True, dynamic=False)
        for matrix in inputs:
            for index, (a, b) in enumerate(zip(compiled(matrix), with_bytes(matrix), strict=True)):
                self.assertEqual((a.dtype, a.shape), (b.dtype, b.shape))
                self.assertTrue(torch.equal(bits(a), bits(b)), (function, matrix.shape, index))

    def _check_weights(self, *recipes: tuple[Recipe, Direction]) -> None:
        def casts(matrix: torch.Tensor) -> list[torch.Tensor]:
            results: list[torch.Tensor] = []
            for recipe, direction in recipes:
                quantized = recipe.quantize(matrix, direction)
                dtype = torch.float32 if direction is Direction.ROWWISE else torch.bfloat16
                results += [*quantized.planes, recipe.dequantize(quantized, matrix.shape, direction, dtype)]
            return results

        self._check(casts, matrices())

    def test_mxfp8_and_nvfp4(self) -> None:
        self._check_weights((MXFP8(), Direction.ROWWISE), (NVFP4(), Direction.ROWWISE), (NVFP4(), Direction.COLUMNWISE))

    @pytest.mark.soak  # what these casts consist of is in the others
    def test_float8_and_columns_of_mxfp8(self) -> None:
        for recipe in (Float8Tensorwise(), Float8Rowwise(), Float8Blockwise()):
            self._check_weights((recipe, Direction.ROWWISE))
        self._check_weights((MXFP8(), Direction.COLUMNWISE))

    def test_activations_and_gradients(self) -> None:
        all_gemms = [cls(False, False) for cls in (TensorwiseGEMMs, RowwiseGEMMs, BlockwiseGEMMs)]

        def casts(matrix: torch.Tensor) -> list[torch.Tensor]:
            results: list[torch.Tensor] = []
            for gemms in all_gemms:
                grad = gemms.cast_grad(matrix)
                results += [*gemms.cast_input(matrix), *grad, *gemms.cast_wgrad(matrix, matrix, grad)]
            return results

        self._check(casts, [matrix.bfloat16() for matrix in matrices()])


def test_a_view_of_a_native_weight_keeps_its_shape_where_it_is_taken_apart() -> None:
    weight = quantize_(nn.Linear(40, 33), "mxfp8", storage="native").weight.detach()
    for shape in ((-1,), (11, 3, 40), (33, 40)):
        view = weight.view(shape)
        names, context = view.__tensor_flatten__()
        parts = {name: getattr(view, name) for name in names}
        back = type(weight).__tensor_unflatten__(parts, context, view.size(), view.stride())
        assert torch.equal(back.dense(), view.dense())
