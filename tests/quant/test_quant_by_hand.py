"""MX and NVFP4 by hand: bits computed on paper from OCP Microscaling Formats (MX) 1.0, not by any code.

Section numbers are those of the specification. e4m3 (5.3.1): sign, 4 bits of exponent with bias 7, 3 of mantissa,
largest 448 = 0x7E, NaN 0x7F. e2m1 (5.3.3): sign, 2 bits of exponent with bias 1, 1 of mantissa: 0, .5, 1, 1.5, 2, 3, 4,
6. e8m0 (5.4.1): ``2^(code - 127)``, NaN 0xFF. Conversion (6.3): the scale is the largest power of two not above the
largest magnitude, divided by the largest power of two of the element format (2^8 for e4m3).
"""

from __future__ import annotations

import unittest

import torch

from dtensor_gtp.quant import MXFP8, NVFP4, Direction, Quantized, cast

NAN, INF = float("nan"), float("inf")


def block_of(*values: float, size: int) -> torch.Tensor:
    """One row of a block, filled up with zeros."""
    return torch.tensor([[*values, *([0.0] * (size - len(values)))]])


def codes(quantized: Quantized) -> tuple[list[int], list[int]]:
    """Bytes of the elements and of the scales of the first row."""
    data, scale = quantized.planes
    return data.view(torch.uint8)[0].tolist(), scale.view(torch.uint8)[0].tolist()


class TestElements(unittest.TestCase):
    def test_all_values_of_e2m1(self) -> None:
        values = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
        both = torch.tensor([*values, *(-value for value in values)])
        self.assertEqual(cast.to_e2m1(both).tolist(), list(range(16)))
        self.assertTrue(torch.equal(cast.from_e2m1(torch.arange(16, dtype=torch.uint8)), both))
        self.assertTrue(cast.from_e2m1(torch.tensor([8], dtype=torch.uint8)).signbit().item())  # -0

    def test_ties_of_e2m1_go_to_even_codes(self) -> None:
        """.25 -> 0, .75 -> 1, 1.25 -> 1, 1.75 -> 2, 2.5 -> 2, 3.5 -> 4, 5 -> 4; a little above each goes up."""
        ties = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0])
        self.assertEqual(cast.to_e2m1(ties).tolist(), [0, 2, 2, 4, 4, 6, 6])
        self.assertEqual(cast.to_e2m1(ties * (1 + 2.0**-20)).tolist(), [1, 2, 3, 4, 5, 6, 7])
        self.assertEqual(cast.to_e2m1(ties * (1 - 2.0**-20)).tolist(), [0, 1, 2, 3, 4, 5, 6])
        self.assertEqual(cast.to_e2m1(torch.tensor([6.5, 1e30, INF, -INF])).tolist(), [7, 7, 7, 15])

    def test_e4m3(self) -> None:
        """1 = 0 0111 000. 1.5 = 0 0111 100. -2 = 1 1000 000. 448 = 0 1111 110. The smallest normal 2^-6 = 0 0001 000,
        denormal 2^-9 = 0 0000 001. 17 lies between 16 and 18, a tie that goes to 16 = 0 1011 000; 19 to 20. Half of
        2^-9 is a tie that goes to 0. 464 is a tie between 448 and what would be 480: it saturates, as more does."""
        pairs = {1.0: 0x38, 1.5: 0x3C, -2.0: 0xC0, 448.0: 0x7E, 2.0**-6: 0x08, 2.0**-9: 0x01, 17.0: 0x58, 19.0: 0x5A}
        pairs |= {2.0**-10: 0x00, 464.0: 0x7E, 1e9: 0x7E, -INF: 0xFE, 0.0: 0x00}
        found = cast.to_float8(torch.tensor(list(pairs)))
        self.assertEqual(found.view(torch.uint8).tolist(), list(pairs.values()))

    def test_e8m0(self) -> None:
        """Code 0 is 2^-127, 127 is 1, 128 is 2, 254 is 2^127, 255 is NaN."""
        scales = torch.tensor([0, 1, 127, 128, 254], dtype=torch.uint8).view(torch.float8_e8m0fnu)
        expected = [2.0**-127, 2.0**-126, 1.0, 2.0, 2.0**127]
        self.assertEqual(cast.e8m0_to_float(scales).tolist(), expected)
        self.assertTrue(cast.e8m0_to_float(torch.tensor([255], dtype=torch.uint8).view(torch.float8_e8m0fnu)).isnan())


class TestMXFP8(unittest.TestCase):
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

    def test_ends(self) -> None:
        """Zeros have the smallest scale. 2^-119 = 2^8 * 2^-127 has it, too, and the element 256, 0 1111 000. A block
        with a NaN or an infinity has the scale NaN. The largest float32, almost 2^128, has 2^(127 - 8): code 246."""
        rows = [block_of(0.0, -0.0, size=32), block_of(2.0**-119, size=32), block_of(INF, size=32)]
        rows += [block_of(torch.finfo(torch.float32).max, size=32)]
        data, scale = MXFP8(scale_rounding="floor").quantize(torch.cat(rows), Direction.ROWWISE).planes
        self.assertEqual(scale.view(torch.uint8).flatten().tolist(), [0, 0, 255, 246])
        firsts = data.view(torch.uint8)[:, :2].tolist()
        self.assertEqual([firsts[0], firsts[1][0], firsts[2][0], firsts[3][0]], [[0x00, 0x80], 0x78, 0x7F, 0x7E])

    def test_columnwise(self) -> None:
        """Blocks of 32 rows: each column has its scale. 3 = 1.5 * 2^1 has 2^-7, code 120, and 3 * 128 = 384 is
        0 1111 100. 256 has 1, code 127."""
        matrix = torch.zeros(32, 2)
        matrix[0, 0], matrix[31, 1] = 3.0, 256.0
        data, scale = MXFP8(scale_rounding="floor").quantize(matrix, Direction.COLUMNWISE).planes
        self.assertEqual(scale.view(torch.uint8).tolist(), [[120, 127]])
        bits = data.view(torch.uint8)
        self.assertEqual((bits[0, 0].item(), bits[31, 1].item()), (0x7C, 0x78))


class TestNVFP4(unittest.TestCase):
    """NVFP4 is NVIDIA's (arXiv 2509.25149, section 4.1): e2m1 of the specification, 16 to an e4m3 scale."""

    def test_two_blocks(self) -> None:
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

    def test_smallest_scale_of_a_block(self) -> None:
        """A block of zeros, and one whose scale would be below 2^-9, have 2^-9 = 0x01. 2^-9 / 2^-9 = 1, code 2. 2^-12
        is .125 of it, code 0."""
        row = torch.cat([block_of(2688.0, size=16), block_of(2.0**-9, 2.0**-12, size=16), block_of(size=16)], 1)
        elements, scales = codes(NVFP4().quantize(row, Direction.ROWWISE))
        self.assertEqual((scales, elements[8]), ([0x7E, 0x01, 0x01], 0x02))

    def test_columnwise(self) -> None:
        """Pairs of rows share a byte: 2688 above -1344 is code 7 below -3, code 13."""
        matrix = torch.zeros(16, 1)
        matrix[0, 0], matrix[1, 0] = 2688.0, -1344.0
        data, scale = NVFP4().quantize(matrix, Direction.COLUMNWISE).planes
        self.assertEqual((data.shape, data[0, 0].item()), ((8, 1), 0xD7))
        self.assertEqual(scale.view(torch.uint8).tolist(), [[0x7E]])
