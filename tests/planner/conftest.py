"""Fixtures of several files."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
from torchvision_ops import define_missing


@pytest.fixture
def users_models() -> Iterator[ModuleType]:
    """A module of a user, importable by the name ``users_models``."""
    made = ModuleType("users_models")
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


@pytest.fixture
def transformers() -> Any:
    """The package, where it is installed."""
    found = pytest.importorskip("transformers")
    define_missing()
    return found
