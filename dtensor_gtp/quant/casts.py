"""Chooses the casts: ``Casts``, the reference in plain torch, or ``TritonCasts``, which equals it
bit for bit.

``TritonCasts`` needs one or two kernels a cast: two where a scale of the whole matrix comes first,
and a copy more for columns of odd strides. It runs on CUDA, outside of compilers, which trace the
reference and fuse it with the ops before it. Before the first cast each kernel is tried on a small
matrix. If it differs, the reference is used.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Sequence
from functools import cache, partial

import torch
import torch.nn as nn
from torch import Tensor

from .._progress import Progress
from .._torch_compat.kernel_trial import decided, failure, has_same_bits
from . import cast
from .cast import Casts
from .planes import Quantized

logger = logging.getLogger(__name__)

_ENV = "DTENSOR_GTP_CASTS"
_MAX_NUMEL = 2**31 - 2**24  # within a matrix, Triton's kernels count in int32
# Of inputs of TritonCasts.
_DTYPES = (*cast.WIDENS, torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8)
_REFERENCE = Casts()


@cache
def _verdicts() -> dict[int, tuple[Casts, str]]:
    """The casts of each GPU, and why they are not Triton's; filled by ``_on_device``."""
    return {}


def casts_for(matrix: Tensor) -> Casts:
    """What casts ``matrix``, or dequantizes it; ValueError if ``DTENSOR_GTP_CASTS`` is no choice of
    casts."""
    if torch.compiler.is_compiling() or type(matrix) not in (Tensor, nn.Parameter):
        # Traced by a compiler, or a subclass that only looks like a tensor on a GPU.
        return _REFERENCE
    if not matrix.is_cuda or matrix.dtype not in _DTYPES or not _is_wanted():
        return _REFERENCE
    if not 0 < matrix.shape[-1] * matrix.shape[-2] < _MAX_NUMEL or matrix.numel() == 0:
        return _REFERENCE
    return _on_device(matrix.device)[0]


def round_together(
    matrices: Sequence[Tensor], amaxes: Sequence[Tensor], outputs: Sequence[Tensor], mx_rounding: str | None = None
) -> None:
    """:meth:`Casts.round_together` by what casts all of these."""
    first = matrices[0]
    casts = casts_for(first)
    # One launch casts four: all by the same kernel.
    if any(matrix.dtype != first.dtype or not 0 < matrix.numel() < _MAX_NUMEL for matrix in matrices):
        casts = _REFERENCE
    casts.round_together(matrices, amaxes, outputs, mx_rounding)


def describe_casts(device: torch.device) -> str:
    """For the report: empty on devices that have the reference alone."""
    if device.type != "cuda":
        return ""
    reason = f"{_ENV}=reference"
    if _is_wanted():
        _, reason = _on_device(device)
    if not reason:
        return "fused casts"
    return f"casts op by op: {reason}"


def _is_wanted() -> bool:
    value = os.environ.get(_ENV, "auto")
    if value not in ("auto", "reference"):
        raise ValueError(f"{_ENV} expects 'auto' or 'reference', but got {value!r}.")
    return value == "auto"


def _on_device(device: torch.device) -> tuple[Casts, str]:
    if device.index is None:
        index = torch.cuda.current_device()
    else:
        index = device.index
    text = "Low-precision casts run op by op on %s, with several kernels each: %s"
    warn = partial(logger.warning, text, device)
    return decided(_verdicts(), index, _REFERENCE, lambda: _try(torch.device("cuda", index)), warn)


def _try(device: torch.device) -> tuple[Casts, str]:
    """Triton's casts, if a first one works and has the bits of the reference."""
    if torch.version.hip is not None:
        return _REFERENCE, "not tested on rocm"
    try:
        from .triton_casts import TritonCasts  # needs Triton, which comes with torch for GPUs

        casts = TritonCasts(has_float8=torch.cuda.get_device_capability(device) >= (8, 9))
        # Of sizes that fill no tile.
        matrix = torch.linspace(-2.0, 3.0, 1000, dtype=torch.float32, device=device).view(20, 50)
        with Progress(logger, f"compiling the fused casts for {device}") as progress:
            pairs = zip(_probe(casts, matrix), _probe(_REFERENCE, matrix), strict=True)
            for (name, actual), (_, expected) in pairs:
                if not all(map(has_same_bits, actual, expected)):
                    return _REFERENCE, f"{name} by Triton differs from the reference"
                progress.advance(name)
    except Exception as error:
        return _REFERENCE, failure(error)
    return casts, ""


def _probe(casts: Casts, matrix: Tensor) -> Iterator[tuple[str, tuple[Tensor, ...]]]:
    """What each kernel makes of a matrix, by name; once each, because each is compiled for it."""
    amax = _REFERENCE.amax(matrix, (-2, -1))
    yield "amax", (casts.amax(matrix, (-2, -1)),)
    yield "e4m3_scale", (casts.e4m3_scale(amax),)
    yield "cast_matrix", casts.cast_matrix(matrix)
    yield "cast_matrix_turned", casts.cast_matrix_turned(matrix, 16)
    yield "cast_rows", casts.cast_rows(matrix)
    yield "cast_blocks", casts.cast_blocks(matrix, (128, 128))
    yield "cast_mx", casts.cast_mx(matrix, (1, 32), "rceil")
    yield "cast_nvfp4", casts.cast_nvfp4(matrix, (1, 16), amax)
    yield "nvfp4_amax", (casts.nvfp4_amax(matrix, (1, 16), 0x5CA3),)
    seed = torch.full((), 1 << 40, dtype=torch.int64, device=matrix.device)
    yield "cast_nvfp4 of gradients", casts.cast_nvfp4(matrix, (1, 16), amax, signs=0x5CA3, seed=seed)
    for name, quantized, block, dtype in (
        ("matrix", Quantized(_REFERENCE.cast_matrix(matrix)[:1], amax), (1, 1), torch.bfloat16),
        ("blocks", Quantized(_REFERENCE.cast_blocks(matrix, (128, 128)), None), (128, 128), torch.float32),
        ("mx", Quantized(_REFERENCE.cast_mx(matrix, (1, 32), "rceil"), None), (1, 32), torch.float32),
        ("nvfp4", Quantized(_REFERENCE.cast_nvfp4(matrix, (1, 16), amax), amax), (1, 16), torch.bfloat16),
    ):
        yield f"dequantize of {name}", (casts.dequantize(quantized, block, matrix.shape, dtype),)
    rounded = [torch.empty_like(part, dtype=torch.bfloat16) for part in (matrix, matrix[:10])]
    casts.round_together([matrix, matrix[:10]], [amax, amax], rounded)
    yield "round_together", tuple(rounded)
    mx = matrix[:, :32].contiguous()
    rounded = [torch.empty_like(mx, dtype=torch.bfloat16)]
    casts.round_together([mx], [], rounded, "rceil")
    yield "round_together of mx", tuple(rounded)
