"""Without its library, a module of ``dtensor_gtp.integrations`` names the extra."""

from __future__ import annotations

import importlib
import sys

import pytest

from dtensor_gtp import integrations


@pytest.mark.parametrize("name", ["accelerate", "lightning", "torchtitan", "transformers"])
def test_a_missing_library_is_named_with_its_extra(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, name, None)
    monkeypatch.delitem(sys.modules, f"{integrations.__name__}.{name}", raising=False)
    with pytest.raises(ImportError, match=rf"expects an installed {name}, .*pip install 'dtensor-gtp\[{name}\]'"):
        importlib.import_module(f"{integrations.__name__}.{name}")
