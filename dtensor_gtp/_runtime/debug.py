"""Debugging aids, switched on with the environment variable ``DTENSOR_GTP_DEBUG``.

``poison``: a gather buffer is filled with NaN when it is freed, so that a read after the release shows in the result.
``delay`` or ``delay=SEED``: every stream (on CPU: the host) sleeps a random time at each gather, use and
reduce-scatter, so that a missing wait shows. Both can be given: ``poison,delay=7``. Neither changes a correct result.
"""

from __future__ import annotations

import os
import random
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from .. import _torch_compat as compat

_ENV = "DTENSOR_GTP_DEBUG"
_MAX_DELAY_US = 300


@dataclass(frozen=True)
class DebugFlags:
    """Parsed ``DTENSOR_GTP_DEBUG``."""

    poison: bool = False
    delay_seed: int | None = None

    @classmethod
    def from_env(cls) -> DebugFlags:
        """Raises:
        ValueError: The variable names an unknown aid.
        """
        poison, seed = False, None
        for word in filter(None, (part.strip() for part in os.environ.get(_ENV, "").split(","))):
            name, _, value = word.partition("=")
            if name == "poison" and not value:
                poison = True
            elif name == "delay" and (not value or value.isdecimal()):
                seed = int(value or 0)
            else:
                raise ValueError(f"{_ENV} expects 'poison', 'delay' or 'delay=SEED', but got {word!r}.")
        return cls(poison, seed)


class Delays:
    """Seeded random sleeps on the current stream, or on the host where there are no streams."""

    def __init__(self, seed: int, device: torch.device) -> None:
        self._random = random.Random(seed)
        self._device = device

    def sleep(self) -> None:
        micros = self._random.randrange(_MAX_DELAY_US)
        if self._device.type == "cuda":
            # Cycles of the SM clock, about 1.7 of them in a nanosecond. It sleeps the stream, not the host.
            compat.sleep_stream(micros * 1700)
        else:
            time.sleep(micros * 1e-6)


def profiler_range(name: str, detail: str) -> AbstractContextManager[Any]:
    """A named range in the profiler's trace; free while no profiler records."""
    return torch.profiler.record_function(f"{name} ({detail})") if compat.is_profiling() else nullcontext()
