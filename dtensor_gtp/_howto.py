"""Which how-to page helps with an error: messages end with the command that prints it."""

from __future__ import annotations

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


def see(page: Page) -> str:
    """The last sentence of a message: how to read the page."""
    return f"Read `python -m dtensor_gtp.help {page}`."
