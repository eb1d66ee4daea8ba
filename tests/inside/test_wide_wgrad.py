"""Products of 16-bit operands that are summed in float32 keep the bits that the GEMM has. CUDA alone has such a kernel:
here a stand-in takes its place, and of a CUDA tensor what is asked of one."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dtensor_gtp.ops import linear


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_microbatches_are_summed_without_rounding_any(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    stock = torch.mm

    def mm(left: torch.Tensor, right: torch.Tensor, *wide: torch.dtype, **out: Any) -> torch.Tensor:
        return stock(left.to(*wide), right.to(*wide), **out)

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(linear, "_keeps_wide_sum", lambda target, operand: target == torch.float32)
    torch.manual_seed(0)
    operands = [(torch.randn(8, 16, dtype=dtype), torch.randn(16, 8, dtype=dtype)) for _ in range(3)]
    total = torch.empty(8, 8)
    for index, (left, right) in enumerate(operands):
        linear._multiply_into(total, left, right, is_accumulating=index > 0)
    expected = sum(stock(left.double(), right.double()) for left, right in operands)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)
