"""What a sharded model's communication takes on a machine, to stand beside what was measured."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import NamedTuple

from .._comm.debug import format_nbytes
from .costs import Axis, Costs
from .machine import Machine


class Traffic(NamedTuple):
    """One kind of communication of a step."""

    name: str  # for people
    nbytes: int  # of the full weights or gradients
    num_tensors: int  # how many
    ms: float  # time on the wire, if nothing else runs and all of it is one launch


def predict_traffic(
    machine: Machine, axis: Axis, amounts: Sequence[tuple[str, int, int]], *, is_copy: bool
) -> list[Traffic]:
    """Times on the wire of ``amounts``: name, bytes and number of tensors; ``is_copy``: by copy engines."""
    costs = Costs(machine)

    def ms(nbytes: int, num: int) -> float:
        return costs.together_ms(nbytes, axis, num, is_copy=is_copy) if nbytes and axis.size > 1 else 0.0

    return [Traffic(name, nbytes, num, ms(nbytes, num)) for name, nbytes, num in amounts]


def describe_traffic(machine: Machine, traffic: Sequence[Traffic]) -> str:
    parts = "; ".join(f"{each.name} {format_nbytes(each.nbytes)}, {each.ms:.2f} ms" for each in traffic)
    return f"predicted on {machine.describe()}, on the wire alone: {parts}"


def describe_measured(begins: Sequence[float], peak_nbytes: int | None) -> str:
    """Time between the starts of steps, in seconds on the host's clock, and what the allocator has counted."""
    intervals = [later - earlier for earlier, later in zip(begins, list(begins)[1:], strict=False)]
    text = "measured: no two steps yet"
    if intervals:
        text = f"measured: {statistics.median(intervals) * 1e3:.2f} ms a step (median of {len(intervals)})"
    return text if peak_nbytes is None else f"{text}, at most {format_nbytes(peak_nbytes)} allocated"
