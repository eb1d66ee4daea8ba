"""Numbers for the bits of tensors, by which ranks compare values."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_gtp._comm import agreement
from dtensor_gtp._comm.agreement import digests

CPU = torch.device("cpu")


def digest(values: torch.Tensor) -> torch.Tensor:
    return digests([values], CPU)[0]


def test_equal_values_alone_have_equal_digests() -> None:
    """Wherever they lie in memory."""
    shaped = [torch.ones(8), torch.ones(7), torch.ones(()), torch.ones(9)[1:], torch.ones(3, 4, 2).transpose(0, 2)]
    bf16 = [torch.ones(numel, dtype=torch.bfloat16) for numel in (6, 8)]
    dtypes = (torch.float8_e4m3fn, torch.float64, torch.int32, torch.bool)
    others = [*(torch.ones(3).to(dtype) for dtype in dtypes), torch.ones(3, dtype=torch.complex64).conj()]
    for values in (*shaped, *bf16, *others):
        assert digest(values) == digest(values.clone(memory_format=torch.contiguous_format))
        for index in range(values.numel()):
            other = values.clone(memory_format=torch.contiguous_format).resolve_conj()
            other.view(-1)[index] = 0
            assert digest(other) != digest(values), (values.dtype, values.shape)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_order_of_elements_counts(dtype: torch.dtype) -> None:
    """Also of round numbers, of which only the highest bits differ, and of places a power of two apart."""
    values = torch.ones(4096, dtype=dtype)
    values[0], values[512] = 2, -4
    seen = {int(digest(values))}
    for place in (1, 2, 3, 8, 256, 1024, 2048):
        other = values.clone()
        other[[0, place]] = other[[place, 0]]
        seen.add(int(digest(other)))
    assert len(seen) == 8


def test_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    values = torch.randn(1001)
    whole = digest(values)
    monkeypatch.setattr(agreement, "_PIECE", 17)
    assert digest(values) == whole


def test_many_tensors_have_the_digests_of_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of one size together, as many as a piece has room for, whatever else stands between them."""
    drawn = [torch.randn(size) for size in (6, 7, 6, 0, 40, 6, 7, 6)]
    drawn += [torch.randn(6).bfloat16(), torch.randn(3, 2), drawn[0].clone()]
    alone = torch.stack([digest(values) for values in drawn])
    assert torch.equal(digests(drawn, CPU), alone)
    assert alone[0] == alone[-1]
    assert alone[3] == 0, "no values"
    assert len(set(alone.tolist())) == len(drawn) - 1
    monkeypatch.setattr(agreement, "_PIECE", 9)
    assert torch.equal(digests(drawn, CPU), alone)
    assert digests([], CPU).shape == (0,)


def test_small_tensors_of_one_size_share_kernels() -> None:
    class Counting(TorchDispatchMode):
        num_ops = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            self.num_ops += func not in (torch.ops.aten.view.dtype, torch.ops.aten.detach.default)  # no kernels
            return func(*args, **(kwargs or {}))

    drawn = [torch.randn(64) for _ in range(60)]
    with Counting() as few:
        digests(drawn[:2], CPU)
    with Counting() as many:
        digests(drawn, CPU)
    assert many.num_ops == few.num_ops
