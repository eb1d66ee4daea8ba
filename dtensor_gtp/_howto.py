"""How messages end (with the command that prints the page which helps, or the name that was meant) and print names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import Literal

Page = Literal[
    "add_a_gather_backend",
    "add_a_recipe",
    "capture_a_step",
    "debug_nan",
    "ema",
    "export",
    "lora",
    "memory_too_high",
    "offload",
    "ranks_diverge",
    "resume_on_other_gpus",
]

_ALIKE = 0.6  # "bais" and "bias" have 0.75, "up" and "norm" have 0


def see(page: Page) -> str:
    """The last sentence of a message: how to read the page."""
    return f"Read `python -m dtensor_gtp.help {page}`."


def printable(text: str) -> str:
    """``text`` in one line, without what a terminal would obey: names come from files of others."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def did_you_mean(name: str, names: Iterable[str]) -> str:
    """ ", did you mean 'x'?" with the nearest of these dotted names; empty if none is near."""
    best = ""
    likeness = 0.0
    for other in names:
        if _is_nested(name, other) or other.startswith(f"{name}_"):
            return f", did you mean {other!r}?"
        if (ratio := _likeness(name, other)) > likeness:
            best = other
            likeness = ratio
    if best:
        return f", did you mean {best!r}?"
    return ""


def _is_nested(name: str, other: str) -> bool:
    """Whether one is the other within a module more: 'net.0.bias' and '0.bias', or both below one key, as 'model.'."""
    longer, shorter = sorted((name.split("."), other.split(".")), key=len, reverse=True)
    if len(shorter) > 1 and longer[0] == shorter[0]:
        longer = longer[1:]
        shorter = shorter[1:]
    return len(longer) > len(shorter) and longer[-len(shorter) :] == shorter


def _likeness(name: str, other: str) -> float:
    """That of the parts between the dots that are least alike; 0 if a word was not meant to be the other."""
    parts = name.split(".")
    others = other.split(".")
    if len(parts) != len(others):
        return 0.0
    differ = [(a, b) for a, b in zip(parts, others, strict=True) if a != b]
    if any(a.isdecimal() or b.isdecimal() for a, b in differ):
        return 0.0
    least = min((difflib.SequenceMatcher(None, a, b).ratio() for a, b in differ), default=1.0)
    if least >= _ALIKE:
        return least
    return 0.0
