"""Uses of a weight by the fused ops: in float8, and as a tensor that is gathered by the first op that computes with it.

A fused op shows the policy of a selective activation checkpoint the GEMM (``aten.mm``, ``aten.addmm``) or the lookup on
an ``UngatheredWeight``: if the output was saved, the recomputation does not gather the weight.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from .. import _torch_compat as compat
from .._params.sharded_weight import Gatherable, ShardedWeight
from .._schedule.runtime import Runtime
from ..quant.planes import Quantized


@contextmanager
def using_quantized(runtime: Runtime, target: Gatherable) -> Iterator[Quantized]:
    """A use of a weight in the form in which it was gathered."""
    gathered = runtime.gathering.acquire(target)
    try:
        assert gathered.quantized is not None
        yield gathered.quantized()
    finally:
        runtime.gathering.release(target, gathered)


def float8_product(input_MK: Tensor, runtime: Runtime, weight: ShardedWeight) -> Tensor:
    """``input @ weight.T`` in float8. The cast comes before the wait for the gather, which it helps to hide."""
    assert weight.form.gemms is not None
    operands = weight.form.gemms.cast_input(input_MK)
    with using_quantized(runtime, weight.for_forward) as quantized:
        return weight.form.gemms.output(operands, quantized, weight.compute_dtype)


class UngatheredWeight(Tensor):
    """Stands for the full weight, or its transpose, in the arguments of an op; the op itself gets the real one."""

    _runtime: Runtime
    _weight: ShardedWeight
    _is_transposed: bool

    @staticmethod
    def __new__(cls, runtime: Runtime, weight: ShardedWeight, is_transposed: bool = False) -> UngatheredWeight:
        shape = weight.layout.shape[::-1] if is_transposed else weight.layout.shape
        strides = (1, shape[0]) if is_transposed else (shape[1], 1)
        dtype, device = weight.compute_dtype, weight.device
        self = compat.make_wrapper_subclass(cls, shape, strides=strides, dtype=dtype, device=device)
        self._runtime, self._weight, self._is_transposed = runtime, weight, is_transposed
        return self  # type: ignore[no-any-return]

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in (torch.ops.aten.t.default, torch.ops.aten.detach.default):
            (weight,) = args
            return cls(weight._runtime, weight._weight, weight._is_transposed != (func is torch.ops.aten.t.default))
        if func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) and isinstance(args[-1], cls):
            *bias, matrix, weight = args
            if weight._weight.form.gemms is not None and weight._is_transposed:
                output = float8_product(matrix, weight._runtime, weight._weight)
                return output + bias[0] if bias else output
        with ExitStack() as stack:
            real = compat.tree_map_only(cls, lambda weight: weight._gathered(stack), (args, kwargs or {}))
            return func(*real[0], **real[1])

    def _gathered(self, stack: ExitStack) -> Tensor:
        full = stack.enter_context(self._runtime.gathering.using(self._weight.for_forward))
        return full.t() if self._is_transposed else full
