"""Sums of bits by which ranks compare the values that they begin with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import pytest
import torch

from dtensor_gtp._runtime.first_forward import _sum_of_bits
from dtensor_gtp._runtime.param import ManagedParam


def sum_of_bits(values: torch.Tensor) -> int:
    param = SimpleNamespace(shard=values, is_cut_again=False)
    return int(_sum_of_bits(cast("ManagedParam", param)))


@pytest.mark.parametrize(
    "values",
    [
        torch.ones(8),
        torch.ones(7),
        torch.ones(()),
        torch.ones(9)[1:],
        torch.ones(3, 4, 2).transpose(0, 2),
        torch.ones(8, dtype=torch.bfloat16),
        torch.ones(6, dtype=torch.bfloat16),
        torch.ones(16).to(torch.float8_e4m3fn),
        torch.ones(5, dtype=torch.float64),
        torch.ones(3, dtype=torch.complex64).conj(),
        torch.ones(3, dtype=torch.int32),
        torch.ones(3, dtype=torch.bool),
    ],
    ids=lambda values: f"{values.dtype}-{list(values.shape)}",
)
def test_equal_values_alone_have_equal_sums(values: torch.Tensor) -> None:
    """Wherever they lie in memory."""
    assert sum_of_bits(values) == sum_of_bits(values.clone(memory_format=torch.contiguous_format))
    for index in range(values.numel()):
        other = values.clone(memory_format=torch.contiguous_format).resolve_conj()
        other.view(-1)[index] = 0
        assert sum_of_bits(other) != sum_of_bits(values)


def test_no_values() -> None:
    assert sum_of_bits(torch.ones(0)) == 0
