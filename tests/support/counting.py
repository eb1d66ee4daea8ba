"""How much work something is, counted, which a busy machine does not change, and with what functions are called."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar
from unittest import mock

T = TypeVar("T")


def num_calls(job: Callable[[], T]) -> tuple[T, int]:
    """What ``job`` returns, and how many functions of Python and C it has called."""
    number = 0

    def note(frame: Any, event: str, argument: Any) -> None:
        nonlocal number
        number += event in ("call", "c_call")

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        result = job()
    finally:
        sys.setprofile(before)
    return result, number


def noted(owner: Any, name: str, note: Callable[..., object]) -> Any:
    """A patch of a function, that of an object or of a class: each call tells ``note`` its arguments, and goes on."""
    stock = getattr(owner, name)

    def call(*args: Any, **options: Any) -> Any:
        note(*args, **options)
        return stock(*args, **options)

    return mock.patch.object(owner, name, call)
