"""Debugging aids, switched on by the environment variable ``DTENSOR_GTP_DEBUG``, e.g. ``poison,delay=7``.

``poison``: fill a gather buffer with NaN when it is freed, so that a later read shows in the result.
``delay`` or ``delay=SEED``: each stream (on CPU: the host) sleeps a random time at each gather, use
and reduce-scatter, so that a missing wait shows in the result.
``order``: ranks of a mesh compare what they launch before each collective, and raise if it differs.
The host waits.
``finite``: before a gather of weights or a reduction of gradients, all ranks of the mesh raise if
one of them sends NaN or infinity. The host waits, so a CUDA graph cannot record it.
``splits``: layers that are built while it is set check the sizes of their groups on the device
(``GroupedLinear``).
None of them changes a correct result.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch_compat as compat
from .._howto import see
from .agreement import by_rank, highest_of

_ENV = "DTENSOR_GTP_DEBUG"
_NOTHING = nullcontext()
_NUM_NAMED = 4  # weights that a message names; many may be sent together


@dataclass(frozen=True)
class DebugFlags:
    """Parsed ``DTENSOR_GTP_DEBUG``."""

    poison: bool = False
    delay_seed: int | None = None
    order: bool = False
    finite: bool = False
    splits: bool = False

    @classmethod
    def from_env(cls) -> DebugFlags:
        """Raises:
        ValueError: The variable names an unknown aid.
        """
        flags: dict[str, Any] = {}
        # An unset variable gives one empty word, which ``filter`` drops.
        for word in filter(None, (part.strip() for part in os.environ.get(_ENV, "").split(","))):
            name, _, value = word.partition("=")
            if name in ("poison", "order", "finite", "splits") and not value:
                flags[name] = True
            elif name == "delay" and (not value or value.isdecimal()):
                flags["delay_seed"] = int(value or 0)
            else:
                raise ValueError(
                    f"{_ENV} expects 'poison', 'delay', 'delay=SEED', 'order', 'finite' or 'splits', but got {word!r}."
                )
        return cls(**flags)


def sleep(microseconds: int, device: torch.device) -> None:
    """Let the current stream sleep, or the host if there are no streams."""
    if device.type == "cuda":
        compat.sleep_stream(microseconds * 1700)  # cycles of the SM clock, about 1.7 per nanosecond
    else:
        time.sleep(microseconds * 1e-6)


def check_order(what: str, groups: Sequence[dist.ProcessGroup]) -> None:
    """Compare ``what`` the ranks of one mesh are about to launch, over the groups of its axes. If
    it differs, all raise RuntimeError."""
    launches = by_rank(what, groups)
    if len(set(launches.values())) == 1:  # all ranks see the same values, so all return or none
        return
    listed = "; ".join(f"rank {rank}: {launch}" for rank, launch in launches.items())
    raise RuntimeError(
        f"The ranks of one mesh are about to launch different collectives ({listed}). All ranks "
        "must use the same weights in the same order: a branch that depends on a rank's data must "
        "not decide whether a weight is used. Run the module on an empty input where a rank has no "
        f"data for it. {see('ranks_diverge')}"
    )


def check_finite(
    what: str, values: Sequence[tuple[str, Tensor]], groups: Sequence[dist.ProcessGroup], device: torch.device
) -> None:
    """Look for NaN and infinity in what this rank is about to send, ``values`` by name of the
    weight. ``groups`` are those of the axes of its mesh. If one rank finds some, all raise
    RuntimeError."""
    found = [_not_finite(name, value) for name, value in values if not bool(torch.isfinite(value).all())]
    # The host waits: all ranks must raise, or none.
    if not int(highest_of([len(found)], groups, device)):  # the highest number of any rank
        return
    named = found[:_NUM_NAMED]
    if len(found) > _NUM_NAMED:
        named.append(f"{len(found) - _NUM_NAMED} more")
    # Ranks without NaN take part, too.
    by_ranks = by_rank(", ".join(named), groups)
    listed = "; ".join(f"rank {rank}: {text}" for rank, text in by_ranks.items() if text)
    raise RuntimeError(
        f"{_ENV}=finite found NaN or infinity before {what} ({listed}), which would spread it to "
        "all ranks. In a gradient it comes from that rank's batch, from this layer or from one "
        f"after it; in a weight, from an optimizer step or a load. {see('debug_nan')}"
    )


def _not_finite(name: str, value: Tensor) -> str:
    num_nan = int(torch.isnan(value).sum())
    num_infinite = int(torch.isinf(value).sum())
    return f"'{name}' has {num_nan} NaN and {num_infinite} infinite of {value.numel()} elements"


def profiler_range(name: str, *details: str) -> AbstractContextManager[Any]:
    """A named range in the profiler's trace; free while no profiler records."""
    if not compat.is_profiling():
        return _NOTHING
    return torch.profiler.record_function(f"{name} ({', '.join(details)})")


def poison(buffer: Tensor) -> None:
    """Fill a freed gather buffer, or a new one for a gradient, with NaN. Elements that travel as
    bytes become 255, a NaN of e4m3."""
    # A tensor of inference mode may be written in that mode alone.
    with torch.inference_mode(buffer.is_inference() or torch.is_inference_mode_enabled()):
        if buffer.is_floating_point():
            buffer.fill_(float("nan"))
        elif buffer.dtype == torch.uint8:  # planes with one byte an element travel so
            buffer.fill_(255)


def format_nbytes(nbytes: int) -> str:
    """A number of bytes for people to read."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    size = float(nbytes)
    for unit in ("KiB", "MiB", "GiB"):
        size /= 1024
        if size < 1024:
            return f"{size:.1f} {unit}"
    return f"{size / 1024:.1f} TiB"
