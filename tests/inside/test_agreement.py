"""What ranks send each other is read without running what the sender chose; digests, by which they compare bits."""

from __future__ import annotations

import ast
import os
import pickle
import re
from collections import OrderedDict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

import dtensor_gtp
from dtensor_gtp._comm import agreement
from dtensor_gtp._comm.agreement import _decode, _encode, digests

CPU = torch.device("cpu")


def test_values_arrive_as_they_are() -> None:
    nested = {("model", 0): (torch.bfloat16, [(1,)]), 3: {"dict": [1]}, "tuple": {"tensor": 2}}
    for value in (None, [True, 1, 0.1, float("inf"), "ä\0\udcff", [], (), {}], nested, OrderedDict(a=1)):
        found = _decode(_encode(value))
        assert found == value
        assert str(found) == str(dict(value) if isinstance(value, dict) else value)  # types, too


def test_tensors_arrive_with_their_bits() -> None:
    tensors = [
        torch.tensor(True),
        torch.randn(3, 4, dtype=torch.bfloat16).t(),
        torch.randn(2, dtype=torch.complex64).conj(),
        torch.zeros(0, 3, dtype=torch.int64),
        torch.tensor([1.0, float("nan")], dtype=torch.float64, requires_grad=True),
        torch.ones(5).to(torch.float8_e4m3fn),
        torch.get_rng_state(),
    ]
    for tensor, found in zip(tensors, _decode(_encode({"a": tensors}))["a"], strict=True):
        assert (found.dtype, found.shape) == (tensor.dtype, tensor.shape)
        words = [t.detach().resolve_conj().contiguous().flatten().view(torch.uint8) for t in (found, tensor)]
        assert torch.equal(*words)


def test_what_is_sent_by_a_stranger_runs_nothing(tmp_path: Path) -> None:
    ran = tmp_path / "ran"

    class Planted:
        def __reduce__(self) -> tuple[Any, ...]:
            return os.mkdir, (str(ran),)

    planted = [pickle.dumps(Planted()), pickle.dumps(Planted(), 0), b"", b"\0", b'{"x": 1}\0', b'{"dtype": "load"}\0']
    for payload in planted:
        with pytest.raises((ValueError, TypeError)):
            _decode(torch.frombuffer(bytearray(payload or b" "), dtype=torch.uint8))
    assert not ran.exists()


def test_what_cannot_be_sent_is_named() -> None:
    for value in (print, {1: object()}, [torch.ones(2).to_sparse()], (pickle,)):
        with pytest.raises(TypeError, match=r"plain values, but the value.* is a "):
            _encode(value)


def test_nobody_unpickles() -> None:
    """The package calls no collective of objects, and loads files without code."""
    for path in Path(dtensor_gtp.__file__).parent.rglob("*.py"):
        text = path.read_text()
        for node in ast.walk(ast.parse(text if re.search(r"pickle|_object|torch\.load", text) else "")):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                name = node.func.attr
                assert not name.endswith(("_object", "_object_list")), f"{path}: {ast.unparse(node)}"
                if name in ("load", "loads", "Unpickler"):
                    called = ast.unparse(node)
                    assert not called.startswith("pickle."), f"{path}: {called}"
                    assert not called.startswith("torch.load(") or "weights_only=True" in called, f"{path}: {called}"


# --- digests ----------------------------------------------------------------------------------------------------------


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
