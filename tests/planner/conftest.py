"""Fixtures of several files."""

import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from torchvision_ops import define_missing

from dtensor_gtp.planner.user_model import UserModel, load_model


class UsersModels(ModuleType):
    """A module of a user with a function ``build``."""

    def define(self, build: Callable[[], Any]) -> None:
        """Let ``build`` return what this one does, on the meta device."""

        def on_meta() -> Any:
            with torch.device("meta"):
                return build()

        self.build: Callable[[], Any] = on_meta

    def load(self, build: Callable[[], Any], num_tokens: int) -> UserModel:
        self.define(build)
        user = load_model("users_models:build", num_tokens)
        assert isinstance(user, UserModel)
        return user


@pytest.fixture
def users_models() -> Iterator[UsersModels]:
    """Importable by this name."""
    made = UsersModels("users_models")
    sys.modules[made.__name__] = made
    yield made
    del sys.modules[made.__name__]


@pytest.fixture
def transformers() -> Any:
    """The package, where it is installed."""
    found = pytest.importorskip("transformers")
    define_missing()
    return found
