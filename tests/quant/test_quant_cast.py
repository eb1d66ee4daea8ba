"""The casts, against definitions of their own: element by element, exactly, from the bit layouts of the formats."""

import bisect
import math
import struct
import unittest
from fractions import Fraction
from itertools import pairwise, product

import torch
from quant_common import all_recipes

from dtensor_gtp import quant
from dtensor_gtp.quant import MXFP8, NVFP4, RECIPES, Direction, Quantized, Recipe, cast, resolve_recipe

NAN, INF = float("nan"), float("inf")


# --- the formats, from their bits -------------------------------------------------------------------------------------


def float_of_bits(code: int, exponent_bits: int, mantissa_bits: int, bias: int) -> Fraction:
    """Value of a code without NaN and infinities."""
    sign = -1 if code >> (exponent_bits + mantissa_bits) else 1
    exponent = (code >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = code & ((1 << mantissa_bits) - 1)
    if exponent == 0:
        return sign * Fraction(mantissa, 1 << mantissa_bits) * Fraction(2) ** (1 - bias)
    return sign * (1 + Fraction(mantissa, 1 << mantissa_bits)) * Fraction(2) ** (exponent - bias)


# Values of the positive codes, which ascend; 0x7F of e4m3 is NaN. All of them are exact in float64, so are midpoints.
E4M3 = [float(float_of_bits(code, 4, 3, 7)) for code in range(0x7F)]
E5M2 = [float(float_of_bits(code, 5, 2, 15)) for code in range(0x7C)]
E2M1 = [float(float_of_bits(code, 2, 1, 1)) for code in range(8)]


def nearest(value: float, positive: list[float], sign_bit: int) -> int:
    """Code of the nearest value, ties to the even code, saturating."""
    sign = sign_bit if math.copysign(1, value) < 0 else 0
    above = bisect.bisect_left(positive, abs(value))
    if above == len(positive) or above == 0:
        return sign | max(above - 1, 0)
    midpoint = (positive[above - 1] + positive[above]) / 2
    is_up = abs(value) > midpoint or (abs(value) == midpoint and above % 2 == 0)
    return sign | (above if is_up else above - 1)


def slow_e4m3(value: float) -> int:
    return 0x7F if math.isnan(value) else nearest(value, E4M3, 0x80)


def slow_e2m1(value: float) -> int:
    return 0 if math.isnan(value) else nearest(value, E2M1, 0x8)


def value_of_e4m3(code: int) -> float:
    return NAN if code & 0x7F == 0x7F else E4M3[code & 0x7F] * (-1 if code & 0x80 else 1)


def f32(value: float) -> float:
    """Rounded to float32 from the float64 that holds the exact or correctly rounded result of one operation."""
    try:
        return struct.unpack("f", struct.pack("f", value))[0]
    except OverflowError:
        return math.copysign(INF, value)


def over(a: float, b: float) -> float:
    """a / b in float32; a and b are float32. Through float64 it is rounded twice, which for a quotient is harmless."""
    return f32(a / b)


def largest(values: list[float]) -> float:
    return NAN if any(not math.isfinite(v) for v in values) else max((abs(v) for v in values), default=0.0)


def slow_scale_e4m3(amax: float) -> float:
    return NAN if math.isnan(amax) else max(over(amax, 448.0), 2.0**-126)


def slow_e8m0(amax: float, rounding: str) -> float:
    """The scale itself."""
    if math.isnan(amax):
        return NAN
    if amax == 0:
        return 2.0**-127
    if rounding == "floor":
        exponent = math.frexp(amax)[1] - 1 - 8
    else:
        about = math.frexp(amax)[1]
        exponent = next(e for e in range(about - 11, about) if Fraction(amax) <= 448 * Fraction(2) ** e)
    return 2.0 ** max(exponent, -127)


def slow_quantize(recipe: Recipe, matrix: torch.Tensor, direction: Direction) -> tuple[list[list[int]], torch.Tensor]:
    """Codes of the elements, and the dequantized matrix in float64, by loops over blocks."""
    rows, columns = matrix.shape
    values = matrix.to(torch.float64).tolist()
    turned = recipe.has_columnwise and direction is Direction.COLUMNWISE
    block = {
        "float8_tensorwise": (rows, columns),
        "float8_rowwise": (1, columns),
        "float8_blockwise": (128, 128),
        "mxfp8": (32, 1) if turned else (1, 32),
        "nvfp4": (16, 1) if turned else (1, 16),
    }[recipe.name]
    whole = largest([v for row in values for v in row])
    codes = [[0] * columns for _ in range(rows)]
    result = torch.zeros(rows, columns, dtype=torch.float64)
    for top in range(0, rows, block[0]):
        for left in range(0, columns, block[1]):
            cells = list(product(range(rows)[top : top + block[0]], range(columns)[left : left + block[1]]))
            amax = largest([values[i][j] for i, j in cells])
            if isinstance(recipe, NVFP4):
                tensor_scale = NAN if math.isnan(whole) else max(over(whole, 448.0 * 6.0), 2.0**-117)
                wanted = over(over(amax, 6.0), tensor_scale)
                level = value_of_e4m3(slow_e4m3(NAN if math.isnan(wanted) else max(wanted, 2.0**-9)))
                scale = f32(level * tensor_scale)
            elif isinstance(recipe, MXFP8):
                scale = slow_e8m0(amax, recipe.scale_rounding)
            else:
                scale = slow_scale_e4m3(amax)
            for i, j in cells:
                quotient = NAN if math.isnan(scale) else over(values[i][j], scale)
                if isinstance(recipe, NVFP4):
                    codes[i][j] = slow_e2m1(quotient)
                    element = E2M1[codes[i][j] & 7] * (-1 if codes[i][j] & 8 else 1)
                else:
                    codes[i][j] = slow_e4m3(quotient)
                    element = value_of_e4m3(codes[i][j])
                result[i, j] = element * scale
    return codes, result


# --- inputs -----------------------------------------------------------------------------------------------------------


def hard_matrix(rows: int, columns: int, seed: int = 0) -> torch.Tensor:
    """Values over the whole range of exponents, ties between neighbours, zeros of both signs, blocks of zeros."""
    generator = torch.Generator().manual_seed(seed)
    matrix = torch.randn(rows, columns, generator=generator)
    matrix *= torch.exp2(torch.randint(-12, 12, (rows, columns), generator=generator).float())
    ties = torch.randint(0, 64, (rows, columns), generator=generator) / 16.0
    matrix = torch.where(torch.rand(rows, columns, generator=generator) < 0.3, ties, matrix)
    matrix[: rows // 3, : columns // 2] = 0.0
    matrix[::5, ::3] = -0.0
    return matrix


def codes_of(recipe: Recipe, data: torch.Tensor, direction: Direction, shape: torch.Size) -> list[list[int]]:
    if isinstance(recipe, NVFP4):
        dim = 1 if direction is Direction.ROWWISE else 0
        return cast.unpack_nibbles(data, dim)[: shape[0], : shape[1]].tolist()
    return data.view(torch.uint8).tolist()


def boundaries(values: list[float], *beyond: float) -> torch.Tensor:
    """Each value, each midpoint between neighbours, and the float32 numbers right beside them, of both signs."""
    exact = torch.tensor([*values, *((a + b) / 2 for a, b in pairwise(values)), *beyond, 1e30, 2.0**-140])
    inputs = torch.cat([exact, exact.nextafter(torch.tensor(INF)), exact.nextafter(torch.tensor(-INF))])
    return torch.cat([inputs, -inputs, torch.tensor([INF, -INF, NAN, -NAN])])


class TestElements(unittest.TestCase):
    def test_float8_at_every_boundary(self) -> None:
        cases = (torch.float8_e4m3fn, E4M3, (464.0, 480.0)), (torch.float8_e5m2, E5M2, (61440.0, 65536.0))
        for dtype, values, beyond in cases:
            inputs = boundaries(values, *beyond)
            codes = cast.to_float8(inputs, dtype).view(torch.uint8).tolist()
            for value, code in zip(inputs.tolist(), codes, strict=True):
                self.assertEqual(code, 0x7F if math.isnan(value) else nearest(value, values, 0x80), (dtype, value))
        scale = cast.float8_scale(torch.tensor([57344.0, 0.0, INF, NAN, 1.0]), torch.float8_e5m2)
        expected = torch.tensor([1.0, 2.0**-126, NAN, NAN, 1 / 57344])
        torch.testing.assert_close(scale, expected, rtol=0, atol=0, equal_nan=True)

    def test_e2m1_at_every_boundary(self) -> None:
        inputs = boundaries(E2M1, 7.0)
        for value, code in zip(inputs.tolist(), cast.to_e2m1(inputs).tolist(), strict=True):
            self.assertEqual(code, slow_e2m1(value), value)
        decoded = cast.from_e2m1(torch.arange(16, dtype=torch.uint8)).tolist()
        self.assertEqual(decoded, [E2M1[c & 7] * (-1 if c & 8 else 1) for c in range(16)])

    def test_e8m0_at_every_exponent(self) -> None:
        exact = torch.tensor([m * 2.0**e for e in range(-149, 128) for m in (1.0, 1.5, 1.75) if m * 2.0**e < 3.4e38])
        inputs = torch.cat([exact, exact.nextafter(torch.tensor(INF)), exact.nextafter(torch.tensor(0.0))])
        inputs = torch.cat([inputs[inputs.isfinite()], torch.tensor([0.0, INF, NAN])])
        for rounding in ("rceil", "floor"):
            scales = cast.e8m0_scale(inputs, rounding)
            as_floats = cast.e8m0_to_float(scales)
            torch.testing.assert_close(as_floats, scales.to(torch.float32), rtol=0, atol=0, equal_nan=True)
            finite = as_floats.isfinite()
            self.assertTrue(torch.equal(cast.e8m0_reciprocal(scales)[finite].double(), 1 / as_floats[finite].double()))
            expected = [slow_e8m0(value if math.isfinite(value) else NAN, rounding) for value in inputs.tolist()]
            torch.testing.assert_close(as_floats, torch.tensor(expected), rtol=0, atol=0, equal_nan=True)

    def test_nibbles(self) -> None:
        codes = torch.arange(64, dtype=torch.uint8).remainder(16).view(4, 16)
        for dim in (0, 1):
            packed = cast.pack_nibbles(codes, dim)
            self.assertEqual(packed.numel(), 32)
            self.assertTrue(torch.equal(cast.unpack_nibbles(packed, dim), codes))
        self.assertEqual(cast.pack_nibbles(torch.tensor([[1, 2]], dtype=torch.uint8), 1).item(), 0x21)


class TestRecipes(unittest.TestCase):
    def _check(self, recipe: Recipe, matrix: torch.Tensor) -> None:
        for direction in {recipe.direction(each) for each in Direction}:
            quantized = recipe.quantize(matrix, direction)
            for plane, spec in zip(quantized.planes, recipe.planes(direction), strict=True):
                self.assertEqual((plane.dtype, plane.shape), (spec.dtype, spec.shape(matrix.shape)))
                self.assertTrue(plane.is_contiguous())
            codes, expected = slow_quantize(recipe, matrix, direction)
            self.assertEqual(codes_of(recipe, quantized.planes[0], direction, matrix.shape), codes)
            for dtype in (torch.float32, torch.bfloat16):
                actual = recipe.dequantize(quantized, matrix.shape, direction, dtype)
                self.assertEqual((actual.dtype, actual.shape), (dtype, matrix.shape))
                rounded = expected.to(torch.float32).to(dtype)
                torch.testing.assert_close(actual, rounded, rtol=0, atol=0, equal_nan=True)

    def _check_all(self, matrix: torch.Tensor) -> None:
        for recipe in all_recipes():
            with self.subTest(recipe=recipe, shape=matrix.shape, dtype=matrix.dtype):
                self._check(recipe, matrix)

    def test_equal_their_definitions(self) -> None:
        for shape in ((33, 35), (1, 16), (5, 1)):
            self._check_all(hard_matrix(*shape))
        self._check_all(hard_matrix(34, 40, seed=1).bfloat16())
        self._check_all((hard_matrix(18, 34, seed=2) / 8).half())
        self._check(RECIPES["float8_blockwise"](), hard_matrix(131, 130, seed=3))

    def test_extreme_magnitudes(self) -> None:
        for scale in (0.0, 2.0**-149, 2.0**-130, 2.0**-126, 2.0**-100, 2.0**100, 2.0**120):
            self._check_all(hard_matrix(17, 18, seed=4).clamp(-100, 100) * scale)

    def test_nan_and_inf_poison_what_shares_their_scale(self) -> None:
        for bad in (NAN, INF, -INF):
            matrix = hard_matrix(34, 36, seed=5)
            matrix[20, 30] = bad
            for recipe in all_recipes():
                for direction in {recipe.direction(each) for each in Direction}:
                    quantized = recipe.quantize(matrix, direction)
                    actual = recipe.dequantize(quantized, matrix.shape, direction, torch.float32)
                    _, expected = slow_quantize(recipe, matrix, direction)
                    torch.testing.assert_close(actual, expected.float(), rtol=0, atol=0, equal_nan=True)
                    self.assertTrue(actual[20, 30].isnan())

    def test_r17_widths_that_are_not_multiples(self) -> None:
        """K of the kind that broke padded gathers elsewhere."""
        for columns in (64, 96, 128, 160, 4096):
            self._check_all(hard_matrix(1, columns, seed=columns))

    def test_a_shard_of_blocks_is_quantized_as_the_whole(self) -> None:
        """Planes of parts, cut at blocks along either dim, are parts of the planes."""
        matrix = hard_matrix(300, 290, seed=7)
        for recipe in all_recipes():
            amax = recipe.amax(matrix)
            for direction in Direction:
                whole = recipe.quantize(matrix, direction)
                for dim in (0, 1):
                    step = recipe.block_of(dim - 2, 32)
                    parts = [
                        recipe.quantize(part, direction, self._amax_of(amax, dim, start, part))
                        for start in range(0, matrix.shape[dim], step)
                        for part in [matrix.narrow(dim, start, min(step, matrix.shape[dim] - start))]
                    ]
                    specs = recipe.planes(recipe.direction(direction))
                    for index, spec in enumerate(specs):
                        is_whole = (spec.rows, spec.columns)[dim] is None
                        planes = [part.planes[index].view(torch.uint8) for part in parts]
                        joined = planes[0] if is_whole else torch.cat(planes, dim)
                        self.assertTrue(torch.equal(joined, whole.planes[index].view(torch.uint8)), (recipe, dim))

    @staticmethod
    def _amax_of(amax: torch.Tensor | None, dim: int, start: int, part: torch.Tensor) -> torch.Tensor | None:
        if amax is None or amax.shape[dim] == 1:
            return amax
        return amax.narrow(dim, start, part.shape[dim])

    def test_nothing_is_quantized_to_nothing(self) -> None:
        for recipe in all_recipes():
            for direction in Direction:
                for shape in ((0, 64), (64, 0)):
                    quantized = recipe.quantize(torch.zeros(shape), direction, recipe.amax(torch.zeros(1, 1)))
                    restored = recipe.dequantize(quantized, torch.Size(shape), direction, torch.float32)
                    self.assertEqual(restored.shape, torch.Size(shape))

    def test_bytes_for_each_element(self) -> None:
        expected = {"float8_tensorwise": 1.0, "float8_rowwise": 1.0, "float8_blockwise": 1.0 + 4 / 128**2}
        expected |= {"mxfp8": 1.0 + 1 / 32, "nvfp4": 0.5625}
        shape = torch.Size((512, 1024))
        for name, nbytes in expected.items():
            recipe = resolve_recipe(name)
            for direction in Direction:
                self.assertEqual(recipe.bytes_per_element(direction), nbytes)
                rest = 4 * 512 if name == "float8_rowwise" else 0
                self.assertEqual(recipe.num_bytes(shape, direction), nbytes * shape.numel() + rest)

    def test_errors(self) -> None:
        for error, call, message in (
            (ValueError, lambda: resolve_recipe("fp7"), "one of the recipes float8_tensorwise, .*nvfp4, but got 'fp7'"),
            (TypeError, lambda: resolve_recipe(8), "expects a recipe or its name, but got int: 8"),
            (ValueError, lambda: MXFP8(scale_rounding="even"), "scale_rounding 'rceil' or 'floor', but got 'even'"),
        ):
            with self.assertRaisesRegex(error, message):
                call()
        for recipe in all_recipes():
            with self.assertRaisesRegex(TypeError, "float32, bfloat16 or float16, but got torch.float64 of shape"):
                recipe.quantize(torch.zeros(4, 4, dtype=torch.float64), Direction.ROWWISE)
            self.assertEqual(recipe, eval(repr(recipe), vars(quant)))
            self.assertEqual(hash(recipe), hash(type(recipe)(**vars(recipe))))


def block_of(*values: float, size: int) -> torch.Tensor:
    """One row of a block, filled up with zeros."""
    return torch.tensor([[*values, *([0.0] * (size - len(values)))]])


def codes(quantized: Quantized) -> tuple[list[int], list[int]]:
    """Bytes of the elements and of the scales of the first row."""
    data, scale = quantized.planes
    return data.view(torch.uint8)[0].tolist(), scale.view(torch.uint8)[0].tolist()


class TestByHand(unittest.TestCase):
    """Bits computed on paper from OCP Microscaling Formats (MX) 1.0, not by any code.

    e4m3 (5.3.1): sign, 4 bits of exponent with bias 7, 3 of mantissa, largest 448 = 0x7E. e2m1 (5.3.3): 0, .5, 1, 1.5,
    2, 3, 4, 6. e8m0 (5.4.1): ``2^(code - 127)``. Conversion (6.3): the scale is the largest power of two not above the
    largest magnitude, divided by the largest power of two of the element format (2^8 for e4m3). NVFP4 is NVIDIA's
    (arXiv 2509.25149, section 4.1): e2m1, 16 to an e4m3 scale.
    """

    def test_conversion_of_the_specification(self) -> None:
        """The largest is 1000: 2^9 <= 1000, so the scale is 2^(9 - 8) = 2, code 128. Elements: 1000 / 2 = 500 saturates
        to 448, 0x7E; 6 / 2 = 3 = 1.5 * 2, 0 1000 100; -1 / 2 = -.5 = 1 0110 000; .01 / 2 = .005 = 2.56 * 2^-9 rounds to
        3 * 2^-9, 0 0000 011."""
        quantized = MXFP8(scale_rounding="floor").quantize(
            block_of(1000.0, 6.0, -1.0, 0.01, size=32), Direction.ROWWISE
        )
        elements, scales = codes(quantized)
        self.assertEqual((scales, elements[:5]), ([128], [0x7E, 0x44, 0xB0, 0x03, 0x00]))
        values = MXFP8().dequantize(quantized, torch.Size((1, 32)), Direction.ROWWISE, torch.float32)
        self.assertEqual(values[0, :4].tolist(), [896.0, 6.0, -1.0, 2 * 3 * 2.0**-9])

    def test_rounded_up(self) -> None:
        """With "rceil" 1000 / 2 > 448, so the scale is 4, code 129: 250 lies between 240 and 256, nearer to 256, which
        is 0 1111 000; 6 / 4 = 1.5. 448 itself fits a scale of 1, and 449 does not."""
        rows = torch.cat([block_of(1000.0, 6.0, size=32), block_of(448.0, size=32), block_of(449.0, size=32)])
        data, scale = MXFP8().quantize(rows, Direction.ROWWISE).planes
        self.assertEqual(scale.view(torch.uint8).flatten().tolist(), [129, 127, 128])
        self.assertEqual(data.view(torch.uint8)[:, :2].tolist(), [[0x78, 0x3C], [0x7E, 0x00], [0x76, 0x00]])

    def test_two_blocks_of_nvfp4(self) -> None:
        """The largest of all is 2688 = 448 * 6, so the scale of the whole is 1. The first block's is 448, 0x7E:
        2688 / 448 = 6, code 7; 448 / 448 = 1, code 2; -672 / 448 = -1.5, code 11; 112 / 448 = .25, a tie, code 0. The
        second block's largest is 13.2, / 6 = 2.2, which rounds to 2.25 = 0 1000 001: 13.2 / 2.25 = 5.87, code 7; 4.5 /
        2.25 = 2, code 4; -3.4 / 2.25 = -1.51, code 11. Pairs have the first code in the low half of a byte."""
        first = (2688.0, 448.0, -672.0, 112.0)
        row = torch.cat([block_of(*first, size=16), block_of(13.2, 4.5, -3.4, size=16)], 1)
        quantized = NVFP4().quantize(row, Direction.ROWWISE)
        elements, scales = codes(quantized)
        self.assertEqual(scales, [0x7E, 0x41])
        self.assertEqual(elements[:2] + elements[8:10], [0x27, 0x0B, 0x47, 0x0B])
        values = NVFP4().dequantize(quantized, row.shape, Direction.ROWWISE, torch.float32)
        self.assertEqual(values[0, :4].tolist(), [2688.0, 448.0, -672.0, 0.0])
        self.assertEqual(values[0, 16:19].tolist(), [13.5, 4.5, -3.375])


class TestRoundTogether(unittest.TestCase):
    def test_values_are_those_of_each_weight_alone(self) -> None:
        """Bit for bit, with the statistic of the whole weight and, for None, with that of the part."""
        wholes = [torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((48, 64), (7, 40))]
        for recipe in all_recipes():
            amaxes = [recipe.amax(whole) for whole in wholes]
            parts = wholes if recipe.amax(wholes[0]) is None or len(recipe.amax_dims) == 1 else [w[:5] for w in wholes]
            for known in (amaxes, [None, amaxes[1]], [None, None]):
                values = [torch.full_like(part, torch.nan, dtype=torch.bfloat16) for part in parts]
                recipe.round_together(parts, known, values)
                for part, amax, value in zip(parts, known, values, strict=True):
                    quantized = recipe.quantize(part, Direction.ROWWISE, amax)
                    alone = recipe.dequantize(quantized, part.shape, Direction.ROWWISE, torch.bfloat16)
                    self.assertTrue(torch.equal(value, alone), recipe.name)
