"""``F.linear`` on a sharded weight in float8: the planes that were gathered are what the GEMMs multiply with.

Casts of activations come before the wait for a gather, which they help to hide.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

import torch.nn.functional as F
from torch import Tensor

from .. import _torch_compat as compat
from .._params.sharded_weight import Gatherable, ShardedWeight
from .._schedule.runtime import Runtime
from ..quant.float8_gemms import Float8GEMMs, Tensors
from ..quant.planes import Quantized
from .ungathered import UngatheredWeight


@contextmanager
def using_quantized(runtime: Runtime, target: Gatherable) -> Iterator[Quantized]:
    """A use of a weight in the form in which it was gathered."""
    gathered = runtime.acquire(target)
    try:
        assert gathered.quantized is not None
        yield gathered.quantized()
    finally:
        runtime.release(target, gathered)


def multiply(gemms: Float8GEMMs, input: Tensor, bias: Tensor | None, runtime: Runtime, weight: ShardedWeight) -> Tensor:
    """``F.linear(input, weight, bias)``: shape ``(*, out_features)``."""
    check_dtype(input, weight)
    if compat.asks_checkpoint_policy():
        # Shows the policy the GEMM that nn.Linear is known by.
        return F.linear(input, UngatheredWeight(runtime, weight, multiply=partial(multiply_2d, gemms)), bias)
    output = multiply_2d(gemms, input.reshape(-1, input.shape[-1]), runtime, weight)
    output = output.view(*input.shape[:-1], output.shape[-1])
    return output if bias is None else output + bias


def multiply_2d(gemms: Float8GEMMs, input_MK: Tensor, runtime: Runtime, weight: ShardedWeight) -> Tensor:
    """Forward's GEMM."""
    operands = gemms.cast_input(input_MK)
    with using_quantized(runtime, weight) as quantized:
        return gemms.output(operands, quantized, weight.compute_dtype)


def multiply_grad(gemms: Float8GEMMs, operands: Tensors, runtime: Runtime, weight: ShardedWeight) -> Tensor:
    """dgrad's GEMM; ``operands`` are what ``gemms.cast_grad`` has made."""
    with using_quantized(runtime, weight.for_backward) as quantized:
        return gemms.grad_input(operands, quantized, weight.compute_dtype)


def wgrad_of(gemms: Float8GEMMs, operands: Tensors, runtime: Runtime, weight: ShardedWeight) -> None:
    """wgrad's GEMM, and its reduction; ``operands`` are what ``gemms.cast_wgrad`` has made."""
    runtime.grads.add_full(weight, gemms.grad_weight(operands, weight.reduce_dtype), is_owned=True)


def wgrad(
    gemms: Float8GEMMs, grad: Tensors, grad_MN: Tensor, input_MK: Tensor, runtime: Runtime, weight: ShardedWeight
) -> None:
    """:func:`wgrad_of` with its casts; ``grad`` is what ``gemms.cast_grad`` has made."""
    wgrad_of(gemms, gemms.cast_wgrad(grad_MN, input_MK, grad), runtime, weight)


def check_dtype(input: Tensor, weight: ShardedWeight) -> None:
    """Raises:
    RuntimeError: The input has another dtype than the layer computes in, as ``F.linear`` raises.
    """
    if input.dtype != weight.compute_dtype:
        raise RuntimeError(
            f"F.linear expects input and weight of one dtype, but got {input.dtype} and {weight.compute_dtype} for "
            f"parameter '{weight.fqn}' of shape {tuple(weight.layout.shape)}."
        )
