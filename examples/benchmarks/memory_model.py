"""Explains the peak memory of a step: what lies there in its fullest moment, and how much of it is what.

The amounts come from the model and from the plan that ``sharding_report`` shows, none from an allocator, so that the
sum can be held against what an allocator has measured. A pure function of plain numbers; it needs nothing but Python.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Use(NamedTuple):
    """One use of a weight in the forward; backward comes by in the reverse order. All in bytes.

    Args:
        gathered: Gathered weights in memory while forward uses this one: itself, those kept for backward, and those
            that are gathered ahead.
        gathered_in_backward: The same while backward uses it.
        wgrad: The full gradient, in the dtype of its reduction.
        grad: The shard's gradient, which stays until the optimizer has seen it.
        saved: What is saved for backward from the use before up to here.
    """

    name: str
    gathered: int
    gathered_in_backward: int
    wgrad: int
    grad: int
    saved: int


class Peak(NamedTuple):
    """The fullest moment of a step, in bytes.

    Args:
        moment: "forward" or "backward" and the name of the weight in use.
        state: Parameters, buffers and optimizer state, which are always there.
        gradients: Of the shards, as far as they have been reduced.
        gathered: Gathered weights.
        wgrad: Full gradients that are computed or on their way.
        activations: What is saved for backward.
    """

    moment: str
    state: int
    gradients: int
    gathered: int
    wgrad: int
    activations: int

    @property
    def total(self) -> int:
        return sum(self[1:])

    def as_record(self) -> dict[str, int | str]:
        """The parts and their sum by name."""
        return self._asdict() | {"total": self.total}

    def describe(self, measured: int | None = None) -> str:
        """The parts in MiB, and beside them what was measured if something was."""
        parts = ", ".join(f"{name} {value / 2**20:.1f}" for name, value in zip(self._fields[1:], self[1:], strict=True))
        text = f"peak in {self.moment}: {self.total / 2**20:.1f} MiB = {parts}"
        if measured is None:
            return f"{text} (predicted; there is no counter here)"
        return f"{text}; measured {measured / 2**20:.1f} MiB ({(measured / self.total - 1) * 100:+.1f}%)"


def predict_peak(uses: Sequence[Use], state: int, max_inflight: int, copies_in_flight: int = 1) -> Peak:
    """Where a forward and backward have their peak.

    Args:
        uses: In the order of the forward.
        state: See ``Peak``.
        max_inflight: ``SchedulePolicy.max_inflight_reduce_scatters``.
        copies_in_flight: Buffers of the size of a full gradient that a reduction in flight takes.

    Raises:
        ValueError: There are no uses.
    """
    if not uses:
        raise ValueError("predict_peak expects at least one use of a weight, but got none.")
    moments = []
    saved = 0
    for use in uses:
        saved += use.saved
        moments.append(Peak(f"forward of {use.name}", state, 0, use.gathered, 0, saved))
    grads = 0
    in_flight: list[Use] = []
    for use in reversed(uses):
        # The gradient that is being computed now, and those before it that may still be on their way.
        wgrad = use.wgrad + copies_in_flight * sum(other.wgrad for other in in_flight)
        moments.append(Peak(f"backward of {use.name}", state, grads, use.gathered_in_backward, wgrad, saved))
        in_flight = [*in_flight, use][-max_inflight:]
        grads += use.grad
        saved -= use.saved
    return max(moments, key=lambda moment: moment.total)
