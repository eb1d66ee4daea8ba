"""The random parts of the NVFP4 casts of gradients, in plain torch: random bits, stochastic
rounding, rotation.

*Stochastic rounding* of a value between two neighbours of e2m1 takes the upper one with the
probability that makes the mean right. The 16 random bits of a value follow from a seed and its
position in the matrix (Philox-4x32-10, as Triton's ``tl.philox``), so the result depends on no tile
and no device. A value that e2m1 has stays as it is. Probabilities are multiples of 2^-16, rounded
up. What lies beyond 6 saturates, as in all casts.

A *random Hadamard transform* multiplies each 16 values by ``diag(signs) @ H / 4``, where ``H`` is
Sylvester's matrix of 16 rows. It is orthogonal: it spreads an outlier over the block, and the
product of two operands that are transformed alike along their contraction stays as it was. It is
computed as four stages of sums and differences in float32.

Sources: NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149), sections 4.2 and
4.4: both for the operands of wgrad; stochastic rounding for gradients alone. Transformer Engine's
``NVFP4BlockScaling`` does the same. Salmon et al., "Parallel random numbers: as easy as 1, 2, 3"
(2011), for Philox.
"""

from __future__ import annotations

from math import prod

import torch
from torch import Tensor

BLOCK = 16
_MASK = 0xFFFFFFFF


def philox(seed: Tensor, counters: tuple[Tensor, Tensor, Tensor, Tensor], num_rounds: int = 10) -> Tensor:
    """The first of the four words of Philox-4x32, in int64; ``seed`` is int64, counters are int64
    below 2^32."""
    c0, c1, c2, c3 = counters
    key0 = seed & _MASK
    key1 = (seed >> 32) & _MASK
    for _ in range(num_rounds):
        # A product of 32-bit words wraps in int64, but all 64 bits of it are right.
        of_0 = c0 * 0xD2511F53  # the multipliers of Philox-4x32
        of_2 = c2 * 0xCD9E8D57
        c0 = ((of_2 >> 32) & _MASK) ^ c1 ^ key0
        c1 = of_2 & _MASK
        c2 = ((of_0 >> 32) & _MASK) ^ c3 ^ key1
        c3 = of_0 & _MASK
        key0 = (key0 + 0x9E3779B9) & _MASK  # from the golden ratio
        key1 = (key1 + 0xBB67AE85) & _MASK  # from the root of 3
    return c0


def random_bits(seed: Tensor, shape: torch.Size, dim: int) -> Tensor:
    """16 random bits, as integers in int32, for each element of matrices of ``shape`` that are cast
    along ``dim`` (-1 or -2, of even size). Two neighbours along ``dim`` share a word of Philox: the
    first has its low half. Its counters are the number of the pair in its line, the line, and the
    matrix."""
    sizes = (prod(shape[:-2]), shape[-3 - dim], shape[dim] // 2)  # -3 - dim: the other dim
    ranges = (torch.arange(size, device=seed.device) for size in sizes)
    matrix, line, pair = torch.meshgrid(*ranges, indexing="ij")
    words = philox(seed, (pair, line, matrix, torch.zeros_like(pair)))
    bits = torch.stack((words & 0xFFFF, words >> 16), -1).flatten(-2).to(torch.int32)
    if dim == -2:
        bits = bits.mT  # lines are columns
    return bits.reshape(shape)


def to_e2m1_stochastic(values: Tensor, bits: Tensor) -> Tensor:
    """float32 to the codes of e2m1 in uint8, rounded up in magnitude where 16 random ``bits`` are
    below the fraction of the step from the neighbour below. Saturates at 6; a NaN becomes 0."""
    magnitude = values.abs().clamp(max=6.0)
    # Steps are 0.5 below 2, 1 below 4, and 2 up to 6.
    is_small = magnitude < 2.0
    is_middle = magnitude < 4.0
    in_steps = magnitude * torch.where(is_small, 2.0, torch.where(is_middle, 1.0, 0.5))
    below = in_steps.floor()
    code = below + torch.where(is_small, 0.0, torch.where(is_middle, 2.0, 4.0))  # the codes of 2 and 4 are 4 and 6
    code = code + (bits.to(torch.float32) < (in_steps - below) * 65536.0)
    # As an integer a NaN is undefined, so it is replaced before; then its sign goes, too.
    signed = torch.where(values.isnan(), 0.0, code).to(torch.uint8) | (values.signbit().to(torch.uint8) << 3)
    return torch.where(values.isnan(), 0, signed).to(torch.uint8)


def rotate(values: Tensor, dim: int, signs: int) -> Tensor:
    """The random Hadamard transform of each 16 float32 values along ``dim``, whose size is a
    multiple of 16. Bit ``i`` of ``signs`` negates value ``i`` of each block first."""
    blocks = _negated(values.movedim(dim, -1).unflatten(-1, (-1, BLOCK)), signs)
    # Each stage adds and subtracts values that are twice as far apart as in the last one.
    for stage in range(4):
        pairs = blocks.unflatten(-1, (-1, 2, 1 << stage))
        first, second = pairs.unbind(-2)
        blocks = torch.stack((first + second, first - second), -2).flatten(-3)
    return (blocks * 0.25).flatten(-2).movedim(-1, dim)  # 1 / 4 makes the matrix orthogonal


def rotate_back(values: Tensor, dim: int, signs: int) -> Tensor:
    """The inverse of :func:`rotate`, up to rounding."""
    # Without signs the matrix is its own inverse.
    blocks = rotate(values, dim, 0).movedim(dim, -1).unflatten(-1, (-1, BLOCK))
    return _negated(blocks, signs).flatten(-2).movedim(-1, dim)


def _negated(blocks: Tensor, signs: int) -> Tensor:
    """``blocks`` of shape ``(*, 16)`` with the values negated whose bit is set."""
    is_negated = (torch.full((), signs, device=blocks.device) >> torch.arange(BLOCK, device=blocks.device)) & 1
    return torch.where(is_negated == 1, -blocks, blocks)
