"""Operands of GEMMs in NVFP4, as training takes them: stochastic rounding and random Hadamard transforms.

The recipe of arXiv 2509.25149 (and of Transformer Engine's ``NVFP4BlockScaling``), by operand:

| GEMM | operand | blocks along | rounding | transform |
|---|---|---|---|---|
| forward | activations | features | nearest | none |
| dgrad | gradient of the output | features | stochastic | none |
| wgrad | gradient of the output | tokens | stochastic | yes |
| wgrad | activations | tokens | nearest | yes |

Both operands of wgrad take the same signs, which are drawn once for a training run.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .casts import casts_for
from .planes import Quantized
from .random_casts import BLOCK, rotate_back


def nvfp4_operand(matrix: Tensor, dim: int, *, seed: Tensor | None = None, signs: int | None = None) -> Quantized:
    """Quantize an operand of a GEMM to NVFP4.

    Args:
        matrix: Shape ``(*, rows, columns)`` in float32, bfloat16 or float16.
        dim: The contraction, along which blocks of 16 lie: -1 or -2.
        seed: Round stochastically. An int64 tensor with one element, on the device of ``matrix``;
            another one for each cast. The same seed gives the same bits on each device.
        signs: Transform blocks by a random Hadamard matrix first: bit ``i`` negates the value ``i``
            of each block.

    Returns:
        Planes of shape ``(*, rows, ceil(columns / 16) * 8)`` (pairs of e2m1 in uint8) and
        ``(*, rows, ceil(columns / 16))`` (e4m3), for ``dim`` -2 with rows instead of columns; and
        the largest magnitude of each matrix after the transform, shape ``(*, 1, 1)``.

    Raises:
        ValueError: ``matrix`` has fewer than two dims, or ``dim``, ``seed`` or ``signs`` is not as above.
        TypeError: ``matrix`` has another dtype.

    Source: arXiv 2509.25149, section 4.

    Example:
        >>> grad, seed = torch.randn(32, 64), torch.tensor([1])
        >>> operand = nvfp4_operand(grad, -1, seed=seed)  # dgrad: rounded stochastically
        >>> operand = nvfp4_operand(grad, -2, seed=seed, signs=0b1011001110001011)  # wgrad
        >>> [tuple(plane.shape) for plane in operand.planes]
        [(16, 64), (2, 64)]
    """
    if matrix.ndim < 2:
        raise ValueError(f"nvfp4_operand expects a matrix, but got a tensor of shape {tuple(matrix.shape)}.")
    if dim not in (-1, -2):
        raise ValueError(f"nvfp4_operand expects dim -1 or -2, but got {dim}.")
    if seed is not None and (seed.dtype != torch.int64 or seed.numel() != 1):
        raise ValueError(
            "nvfp4_operand expects an int64 tensor with one element as seed, but got "
            f"{seed.dtype} of shape {tuple(seed.shape)}."
        )
    if signs is not None and not 0 <= signs < 1 << BLOCK:
        raise ValueError(f"nvfp4_operand expects 16 bits as signs, but got {signs}.")
    casts = casts_for(matrix)
    block = _block(dim)
    # The scale of the matrix covers what is rounded: values after the transform.
    if signs is None:
        amax = casts.amax(matrix, (-2, -1))
    else:
        amax = casts.nvfp4_amax(matrix, block, signs)
    return Quantized(casts.cast_nvfp4(matrix, block, amax, signs=signs, seed=seed), amax)


def nvfp4_values(
    quantized: Quantized, dim: int, shape: torch.Size, dtype: torch.dtype, *, signs: int | None = None
) -> Tensor:
    """The values that an operand stands for, with the transform undone; for tests and references.

    A GEMM needs no inverse: between operands that are transformed alike it cancels.

    Args:
        quantized: What :func:`nvfp4_operand` has returned.
        dim: The contraction, as it was given there.
        shape: That of the operand.
        dtype: Of the result.
        signs: As they were given there.

    Returns:
        A tensor of ``shape``.

    Example:
        >>> matrix = torch.randn(32, 64)
        >>> values = nvfp4_values(nvfp4_operand(matrix, -1), -1, matrix.shape, torch.float32)
        >>> bool((values - matrix).abs().mean() < 0.1)
        True
    """
    casts = casts_for(quantized.planes[0])
    if signs is None:
        return casts.dequantize(quantized, _block(dim), shape, dtype)
    padded = list(shape)  # whole blocks were transformed
    padded[dim] = -(-shape[dim] // BLOCK) * BLOCK
    rotated = casts.dequantize(quantized, _block(dim), torch.Size(padded), torch.float32)
    # The transform has spread values into the padding of the last block: cut it off after the inverse.
    return rotate_back(rotated, dim, signs)[..., : shape[-2], : shape[-1]].to(dtype)


def _block(dim: int) -> tuple[int, int]:
    if dim == -1:
        return (1, BLOCK)
    return (BLOCK, 1)
