"""MX and NVFP4 by hand: bits computed on paper from OCP Microscaling Formats (MX) 1.0, not by any code.

Section numbers are those of the specification. e4m3 (5.3.1): sign, 4 bits of exponent with bias 7, 3 of mantissa,
largest 448 = 0x7E, NaN 0x7F. e2m1 (5.3.3): sign, 2 bits of exponent with bias 1, 1 of mantissa: 0, .5, 1, 1.5, 2, 3, 4,
6. e8m0 (5.4.1): ``2^(code - 127)``, NaN 0xFF. Conversion (6.3): the scale is the largest power of two not above the
largest magnitude, divided by the largest power of two of the element format (2^8 for e4m3).
"""

from __future__ import annotations

import unittest

import torch

from dtensor_gtp.quant import MXFP8, NVFP4, Direction, Quantized


def block_of(*values: float, size: int) -> torch.Tensor:
    """One row of a block, filled up with zeros."""
    return torch.tensor([[*values, *([0.0] * (size - len(values)))]])


def codes(quantized: Quantized) -> tuple[list[int], list[int]]:
    """Bytes of the elements and of the scales of the first row."""
    data, scale = quantized.planes
    return data.view(torch.uint8)[0].tolist(), scale.view(torch.uint8)[0].tolist()


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
