"""What ranks send each other is read without running what the sender chose."""

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

import dtensor_gtp
from dtensor_gtp._comm.agreement import _decode, _encode


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
