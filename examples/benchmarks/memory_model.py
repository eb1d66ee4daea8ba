"""Explains the peak memory of a step: what lies there in its fullest moment, and how much of it is what.

The amounts come from the model and from the plan that ``sharding_report`` shows, none from an allocator, so that the
sum can be held against what an allocator has measured. A pure function of plain numbers; it needs nothing but Python.
"""

from collections.abc import Sequence
from typing import NamedTuple


class Amounts(NamedTuple):
    """What there is of one kind of memory around one use of a weight, at most, in bytes.

    Args:
        forward: While forward uses the weight.
        after_forward: From there until forward uses the next one, or ends with the loss.
        before_backward: From the end of the use that backward comes from, or from the loss.
        wgrad: While backward computes the weight's gradient.
        dgrad: While it computes that of the input.
    """

    forward: int
    after_forward: int
    before_backward: int
    wgrad: int
    dgrad: int


class Use(NamedTuple):
    """One use of a weight in the forward; backward comes by in the reverse order. All in bytes.

    Args:
        gathered: Gathered weights: the one in use, those kept for backward, and those that are gathered ahead.
        activations: What is saved for backward and not yet used up, gradients of activations, results.
        wgrad: The full gradient, in the dtype of its reduction.
        sent: What the reduction needs beside the full gradient, until it is complete.
        grad: The shard's gradient, which stays until the optimizer has seen it.
        unreduced: What computing the full gradient needs beside it.
    """

    name: str
    gathered: Amounts
    activations: Amounts
    wgrad: int
    sent: int
    grad: int
    unreduced: int = 0


class Peak(NamedTuple):
    """The fullest moment of a step, in bytes.

    Args:
        moment: The pass, and the name of the weight that is in use, or was or will be.
        state: Parameters, buffers and optimizer state, which are always there.
        gradients: Of the shards, as far as they have been reduced.
        gathered: Gathered weights.
        wgrad: Full gradients that are computed or on their way, and what their reduction needs beside them.
        activations: What is saved for backward, gradients of activations, logits.
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
        text = f"peak {self.moment}: {self.total / 2**20:.1f} MiB = {parts}"
        if measured is None:
            return f"{text} (predicted for a GPU; there is no counter here)"
        return f"{text}; measured {measured / 2**20:.1f} MiB ({(measured / self.total - 1) * 100:+.1f}%)"


class Reductions:
    """The gradients that wait to travel together, and those on their way."""

    def __init__(self, max_inflight: int, together: int) -> None:
        self._max_inflight = max_inflight
        self._together = together
        self._waiting: list[Use] = []
        self._inflight: list[list[Use]] = []

    @property
    def nbytes(self) -> int:
        on_the_way = sum(use.wgrad + use.sent for launch in self._inflight for use in launch)
        return on_the_way + sum(use.wgrad for use in self._waiting)

    def submit(self, use: Use) -> list[list[Use]]:
        """Takes a gradient; returns what is launched by it."""
        launches = []
        is_alone = use.wgrad >= self._together
        if self._waiting and (is_alone or sum(other.wgrad for other in self._waiting) + use.wgrad > self._together):
            launches.append(self._waiting)
            self._waiting = []
        if is_alone:
            launches.append([use])
        else:
            self._waiting = [*self._waiting, use]
        return launches

    def launch(self, launches: list[list[Use]]) -> None:
        """They are on their way, and the oldest have been waited for."""
        self._inflight = [*self._inflight, *launches][-self._max_inflight :]


def moments(uses: Sequence[Use], state: int, max_inflight: int, together: int = 0) -> list[Peak]:
    """The moments of a forward and backward that may be the fullest, in order; see :func:`predict_peak`."""
    found = []

    def add(moment: str, kind: str, use: Use, grads: int = 0, wgrad: int = 0) -> None:
        gathered, activations = getattr(use.gathered, kind), getattr(use.activations, kind)
        found.append(Peak(f"{moment} of {use.name}", state, grads, gathered, wgrad, activations))

    for use in uses:
        add("in forward", "forward", use)
        add("after forward", "after_forward", use)
    grads = 0
    reductions = Reductions(max_inflight, together)
    for use in reversed(uses):
        before = reductions.nbytes
        add("before backward", "before_backward", use, grads, before)
        # The buffers of a reduction are made while as many as may be are in flight; then the oldest is waited for.
        launches = reductions.submit(use)
        launched = sum(other.sent + other.grad for launch in launches for other in launch)
        add("in backward", "wgrad", use, grads, before + use.unreduced + use.wgrad + launched)
        reductions.launch(launches)
        grads += sum(other.grad for launch in launches for other in launch)
        add("in backward", "dgrad", use, grads, reductions.nbytes)
    return found


def predict_peak(uses: Sequence[Use], state: int, max_inflight: int, together: int = 0) -> Peak:
    """Where a forward and backward have their peak.

    Args:
        uses: In the order of the forward.
        state: See ``Peak``.
        max_inflight: ``SchedulePolicy.max_inflight_reduce_scatters``.
        together: ``SchedulePolicy.coalesce_grad_nbytes``.

    Raises:
        ValueError: There are no uses.
    """
    if not uses:
        raise ValueError("predict_peak expects at least one use of a weight, but got none.")
    return max(moments(uses, state, max_inflight, together), key=lambda moment: moment.total)
