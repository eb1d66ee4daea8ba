"""Explains the peak memory of a step: what lies there in its fullest moment, and how much of it is what.

The amounts come from the model and from the plan that ``sharding_report`` shows, none from an allocator, so that the
sum can be held against what an allocator has measured. A pure function of plain numbers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import NamedTuple

from .._schedule.order_of_reductions import Together


class Amounts(NamedTuple):
    """What there is of one kind of memory around one use of a weight, at most, in bytes."""

    forward: int  # while forward uses the weight
    after_forward: int  # from there until forward uses the next one, or ends with the loss
    before_backward: int  # from the end of the use that backward comes from, or from the loss
    wgrad: int  # while backward computes the weight's gradient
    dgrad: int  # while it computes that of the input


class Use(NamedTuple):
    """One use of a weight in the forward; backward comes by in the reverse order. All in bytes."""

    name: str
    gathered: Amounts  # gathered weights: the one in use, those kept for backward, and those that are gathered ahead
    activations: Amounts  # what is saved for backward and not yet used up, gradients of activations, results
    wgrad: int  # the full gradient, in the dtype of its reduction
    sent: int  # what the reduction needs beside the full gradient, until it is complete
    grad: int  # the shard's gradient, which stays until the optimizer has seen it
    unreduced: int = 0  # what computing the full gradient needs beside it
    is_in_ring: bool = False  # whether the full gradient is written to symmetric memory, which is not counted here
    waiting: int = 0  # full gradients that wait for this one
    is_exchanged: bool = False  # whether activations are exchanged instead of the weight: there is no full gradient

    @property
    def buffer(self) -> int:
        """The full gradient, as far as it is counted."""
        return 0 if self.is_in_ring else self.wgrad


class Peak(NamedTuple):
    """The fullest moment of a step, in bytes."""

    moment: str  # the pass, and the name of the weight that is in use, or was or will be
    state: int  # parameters, buffers and optimizer state, which are always there
    gradients: int  # of the shards, as far as they have been reduced
    gathered: int  # gathered weights
    wgrad: int  # full gradients that are computed or on their way, and what their reduction needs beside them
    activations: int  # what is saved for backward, gradients of activations, logits

    @property
    def total(self) -> int:
        return sum(self[1:])


def moments(
    uses: Sequence[Use], state: int, max_inflight: int, together: int = 0, *, wgrad_first: bool = True
) -> list[Peak]:
    """The moments of a forward and backward that may be the fullest, in order; see :func:`predict_peak`."""
    found = []
    for use in uses:
        gathered, activations = use.gathered, use.activations
        found.append(Peak(f"in forward of {use.name}", state, 0, gathered.forward, 0, activations.forward))
        after = gathered.after_forward, 0, activations.after_forward
        found.append(Peak(f"after forward of {use.name}", state, 0, *after))
    grads = 0
    waiting = Together[Use](together)
    inflight: deque[list[Use]] = deque(maxlen=max_inflight)  # once it is full, the oldest are waited for

    def reducing() -> int:
        on_the_way = sum(use.buffer + use.sent for launch in inflight for use in launch)
        return on_the_way + sum(use.buffer for use in waiting.waiting)

    def add(moment: str, use: Use, gathered: int, activations: int, wgrad: int) -> None:
        found.append(Peak(f"{moment} of {use.name}", state, grads, gathered, wgrad, activations))

    backward = list(reversed(uses))
    for use, following in zip(backward, [*backward[1:], None], strict=True):
        gathered, activations = use.gathered, use.activations
        before = reducing() + use.waiting
        add("before backward", use, gathered.before_backward, activations.before_backward, before)
        if not wgrad_first:
            add("in backward", use, gathered.dgrad, activations.dgrad, before)
            # The gathered weight is freed, and the gradient of the input is there.
            released = gathered.wgrad if following is None else following.gathered.before_backward
            gathered, activations = gathered._replace(wgrad=released), activations._replace(wgrad=activations.dgrad)
        # The buffers of a reduction are made while as many as may be are in flight; then the oldest is waited for.
        if use.waiting and not use.is_exchanged:  # a group is reduced: all others have been waited for
            inflight.clear()
            before = reducing() + use.waiting
            launches = [[use]]
        else:
            launches = [] if use.is_exchanged else waiting.submit(use, use.wgrad)
        new_grads = sum(other.grad for launch in launches for other in launch) + use.grad * use.is_exchanged
        new_buffers = new_grads + sum(other.sent for launch in launches for other in launch)
        add("in backward", use, gathered.wgrad, activations.wgrad, before + use.unreduced + use.buffer + new_buffers)
        inflight.extend(launches)
        grads += new_grads
        if wgrad_first:
            add("in backward", use, gathered.dgrad, activations.dgrad, reducing() + use.waiting)
    before = reducing()
    if launches := waiting.flush():
        added = sum(other.sent + other.grad for other in launches[0])
        add("after backward", uses[0], uses[0].gathered.dgrad, uses[0].activations.dgrad, before + added)
    return found


def predict_peak(
    uses: Sequence[Use], state: int, max_inflight: int, together: int = 0, *, wgrad_first: bool = True
) -> Peak:
    """Where a forward and backward have their peak, by uses in the order of the forward; ``together`` is
    ``Schedule.coalesce_grad_nbytes``."""
    if not uses:
        raise ValueError("predict_peak expects at least one use of a weight, but got none.")
    found = moments(uses, state, max_inflight, together, wgrad_first=wgrad_first)
    return max(found, key=lambda moment: moment.total)
