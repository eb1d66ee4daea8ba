"""How much work something is, counted, which a busy machine does not change."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, TypeVar

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
