"""NVFP4 casts of gradients: stochastic rounding has the right mean, the random Hadamard transform loses nothing.

Bounds of means are eight standard deviations wide and the seeds are fixed, so that they do not fail by chance.
"""

import unittest
from itertools import pairwise

import torch

from dtensor_gtp.quant import cast
from dtensor_gtp.quant.cast import Casts
from dtensor_gtp.quant.nvfp4_operands import nvfp4_operand, nvfp4_values
from dtensor_gtp.quant.random_casts import philox, random_bits, rotate, rotate_back, to_e2m1_stochastic

SIGNS = 0x5CA3  # any
CASTS = Casts()
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)


def seed_of(seed: int) -> torch.Tensor:
    return torch.tensor(seed, dtype=torch.int64)


def gaussian(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def operand_values(matrix: torch.Tensor, dim: int, **options: object) -> torch.Tensor:
    signs = options.get("signs")
    quantized = nvfp4_operand(matrix, dim, **options)  # type: ignore[arg-type]
    return nvfp4_values(quantized, dim, matrix.shape, torch.float32, signs=signs)  # type: ignore[arg-type]


class TestPhilox(unittest.TestCase):
    def test_known_answers(self) -> None:
        """Those of Random123 (kat_vectors, philox4x32 with 10 rounds), first word."""
        ones = 0xFFFFFFFF
        for seed, counters, word in (
            (0, (0, 0, 0, 0), 0x6627E8D5),
            (-1, (ones,) * 4, 0x408F276D),
            (0x299F31D0A4093822, (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), 0xD16CFE09),
        ):
            c0, c1, c2, c3 = (torch.tensor([counter]) for counter in counters)
            self.assertEqual(philox(seed_of(seed), (c0, c1, c2, c3)).tolist(), [word])

    def test_bits_depend_on_the_place_alone(self) -> None:
        """On the number of the pair in its line, the line and the matrix: along both dims, and of a part from 0 on."""
        shape = torch.Size((2, 24, 32))
        bits = random_bits(seed_of(7), shape, -1)
        self.assertTrue(torch.equal(bits[:, :5, :16], random_bits(seed_of(7), torch.Size((2, 5, 16)), -1)))
        self.assertTrue(torch.equal(bits.mT, random_bits(seed_of(7), torch.Size((2, 32, 24)), -2)))
        self.assertFalse(torch.equal(bits[0], bits[1]))
        self.assertTrue(bits.min() >= 0 and bits.max() < 65536)
        self.assertFalse(torch.equal(bits, random_bits(seed_of(8), shape, -1)))


class TestStochasticRounding(unittest.TestCase):
    def test_neighbours(self) -> None:
        """The largest bits give the neighbour below, the smallest that above. Values of e2m1 and the ends stay."""
        between = [(a + b) / 2 for a, b in pairwise(E2M1)]
        values = torch.tensor([*between, *(-value for value in between)])
        down = to_e2m1_stochastic(values, torch.full((14,), 65535))
        up = to_e2m1_stochastic(values, torch.zeros(14, dtype=torch.int32))
        self.assertEqual(down.tolist(), [*range(7), *range(8, 15)])
        self.assertEqual(up.tolist(), [*range(1, 8), *range(9, 16)])
        exact = torch.tensor([*E2M1, *(-value for value in E2M1), 7.0, float("inf"), -1e30, float("nan")])
        for bits in (0, 1, 32768, 65535):
            codes = to_e2m1_stochastic(exact, torch.full((20,), bits))
            self.assertEqual(codes.tolist(), [*range(16), 7, 7, 15, 0], bits)

    def test_probabilities(self) -> None:
        """For all random bits: as many of 65536 go up as the fraction of the step says, rounded up."""
        bits = torch.arange(65536)
        cases = (0.125, 0, 0.25), (1.9, 3, 0.8), (2.25, 4, 0.25), (5.9, 6, 0.95), (1e-9, 0, 2e-9)
        for value, below, fraction in cases:
            codes = to_e2m1_stochastic(torch.full((65536,), value), bits)
            num_up = int((codes == below + 1).sum())
            self.assertEqual(num_up + int((codes == below).sum()), 65536)
            self.assertTrue(0 <= num_up - fraction * 65536 <= 1.01, (value, num_up))

    def test_the_mean_of_many_casts_is_the_value(self) -> None:
        """Where nothing saturates. Rounding to nearest is off by more, whatever the number of casts."""
        matrix = gaussian(8, 64)
        matrix[:, ::16] = 6.0 * 448 * 2.0**-8  # the largest of each block, so that scales are exact: nothing saturates
        num = 128
        total = sum(operand_values(matrix, -1, seed=seed_of(k)).double() for k in range(num))
        step = 2.0 * 448 * 2.0**-8  # the largest of e2m1, times the scale of a block
        bound = 8 * (step / 2) / num**0.5  # a value between neighbours deviates by at most half a step
        self.assertLess((total / num - matrix).abs().max(), bound)
        nearest = operand_values(matrix, -1)
        self.assertGreater((nearest - matrix).abs().mean(), 3 * (total / num - matrix).abs().mean())

    def test_errors_are_independent(self) -> None:
        """Of neighbours, and of two seeds: correlations within eight standard deviations of 0."""
        matrix = torch.full((64, 1024), 1.25 * 448 * 6)
        matrix[:, ::16] = 6.0 * 448 * 6
        first, again, second = (operand_values(matrix, -1, seed=seed_of(k)) - matrix for k in (1, 1, 2))
        self.assertTrue(torch.equal(first, again))
        errors = [e.reshape(64, -1, 16)[..., 1:].double() for e in (first, second)]
        bound = 8 / errors[0].numel() ** 0.5
        for a, b in ((errors[0], errors[1]), (errors[0][..., 1:], errors[0][..., :-1])):
            self.assertLess(abs(torch.corrcoef(torch.stack((a.flatten(), b.flatten())))[0, 1]), bound)
        shares = (errors[0] > 0).double().mean((0, 1))
        self.assertLess((shares - 0.5).abs().max(), 8 * 0.5 / (64 * 64) ** 0.5)


class TestRotation(unittest.TestCase):
    def test_matrix(self) -> None:
        """It is the product with ``diag(signs) @ H / 4``, H by Sylvester's doubling."""
        hadamard = torch.ones(1, 1)
        for _ in range(4):
            hadamard = torch.cat((torch.cat((hadamard, hadamard), 1), torch.cat((hadamard, -hadamard), 1)))
        signs = torch.tensor([-1.0 if SIGNS >> bit & 1 else 1.0 for bit in range(16)])
        product = torch.diag(signs) @ hadamard / 4
        matrix = torch.randint(-9, 9, (6, 48), generator=torch.Generator().manual_seed(0)).float()  # sums are exact
        expected = (matrix.view(6, 3, 16) @ product).view(6, 48)
        self.assertTrue(torch.equal(rotate(matrix, -1, SIGNS), expected))
        self.assertTrue(torch.equal(rotate(matrix.mT, -2, SIGNS), expected.mT))
        self.assertTrue(torch.equal(rotate_back(expected, -1, SIGNS), matrix))

    def test_shapes_that_end_early(self) -> None:
        """Padded blocks of the transform hold values beyond the end, which the planes keep."""
        for shape, dim in (((5, 37), -1), ((37, 5), -2), ((2, 19, 7), -2), ((3, 1), -1)):
            matrix = gaussian(*shape)
            quantized = nvfp4_operand(matrix, dim, signs=SIGNS)
            self.assertEqual(quantized.planes[0].shape[dim], -(-shape[dim] // 16) * 8)
            values = nvfp4_values(quantized, dim, matrix.shape, torch.float32, signs=SIGNS)
            self.assertEqual(values.shape, matrix.shape)
            self.assertLess((values - matrix).norm() / matrix.norm(), 0.2, shape)

    def test_amax_is_that_of_rotated_values(self) -> None:
        matrix = torch.zeros(1, 16)
        matrix[0, 3] = 8.0
        self.assertEqual(CASTS.nvfp4_amax(matrix, (1, 16), SIGNS).item(), 2.0)
        self.assertEqual(CASTS.nvfp4_amax(torch.full((1, 16), 1.0), (1, 16), 0).item(), 4.0)

    def test_what_is_not_finite(self) -> None:
        """A NaN or an infinity makes the scale of the whole matrix NaN, as without the transform."""
        for value in (float("nan"), float("inf")):
            matrix = gaussian(4, 32)
            matrix[1, 2] = value
            for options in ({"signs": SIGNS}, {"seed": seed_of(0)}, {"signs": SIGNS, "seed": seed_of(0)}):
                self.assertTrue(operand_values(matrix, -1, **options).isnan().all())

    def test_wgrad_is_unbiased(self) -> None:
        """The mean of the products of operands as wgrad has them, over many seeds, is that of the values which
        stochastic rounding starts from."""
        grad, x = gaussian(64, 8), gaussian(64, 8, seed=1)
        x_values = rotate(operand_values(x, -2, signs=SIGNS), -2, SIGNS)
        num, total, squares = 128, torch.zeros(8, 8).double(), torch.zeros(8, 8).double()
        for k in range(num):
            values = rotate(operand_values(grad, -2, signs=SIGNS, seed=seed_of(k)), -2, SIGNS)
            product = (values.mT @ x_values).double()
            total, squares = total + product, squares + product.square()
        # What saturates is cut to 6 times its scale first, which no rounding undoes.
        amax = CASTS.nvfp4_amax(grad, (16, 1), SIGNS)
        rotated = rotate(grad, -2, SIGNS)
        tensor_scale = cast.nvfp4_tensor_scale(amax)
        scale = cast.nvfp4_block_scale(cast.block_amax(rotated, (16, 1)), tensor_scale)
        limit = cast.spread(scale.float() * tensor_scale, (16, 1), rotated.shape) * 6.0
        clipped = (rotated.clamp(-limit, limit).mT @ x_values).double()
        mean = total / num
        deviation = (squares / num - mean.square()).clamp(min=0).sqrt() / num**0.5
        self.assertTrue(((mean - clipped).abs() <= 8 * deviation + 1e-4).all())


class TestOperands(unittest.TestCase):
    def test_refusals(self) -> None:
        matrix, an_element = gaussian(16, 16), "an int64 tensor with one element as seed"
        for operand, dim, options, message in (
            *((matrix, dim, {}, "dim -1 or -2") for dim in (0, 1, 2)),
            (matrix, -1, {"seed": torch.tensor(1.0)}, an_element),
            (matrix, -1, {"seed": torch.zeros(2, dtype=torch.int64)}, an_element),
            *((matrix, -1, {"signs": signs}, "16 bits as signs") for signs in (-1, 1 << 16)),
            (matrix[0], -1, {}, "a matrix"),
        ):
            with self.assertRaisesRegex(ValueError, f"nvfp4_operand expects {message}"):
                nvfp4_operand(operand, dim, **options)
