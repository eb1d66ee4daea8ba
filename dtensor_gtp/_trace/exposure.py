"""How long communication was *exposed*: it runs while no stream (or thread) computes.

A GPU is *host-bound* while it has ended what it was to compute and the host has not yet launched what comes next.
"""

from __future__ import annotations

import math
from collections import defaultdict
from typing import NamedTuple

from .intervals import Interval, intersect, length, subtract, union
from .read import COMMUNICATION, COMPUTE, Timeline


class Exposure(NamedTuple):
    """How long communication was not hidden, in milliseconds per step.

    Args:
        step: Of the whole window, compute or not.
        compute: While anything computes.
        communication: While anything communicates.
        exposed: While something communicates and nothing computes.
        by_what: The last one by what was communicated, the largest first. Two that are exposed at the same time both
            count, so their sum may exceed ``exposed``.
        host_bound: While nothing computes, because the host launched the next kernel only after the last one had ended;
            until that launch. None where no launch is known, as on a CPU.
        host_bound_exposed: What of it is in ``exposed``, too.
    """

    step: float
    compute: float
    communication: float
    exposed: float
    by_what: dict[str, float]
    host_bound: float | None = None
    host_bound_exposed: float = 0.0


def exposure(timeline: Timeline) -> Exposure:
    """The numbers of a timeline."""
    computed = union(span[:2] for span in timeline.spans if span.kind == COMPUTE)
    communicated = defaultdict(list)
    for span in timeline.spans:
        if span.kind == COMMUNICATION:
            communicated[span.what].append(span[:2])
    everything = union(interval for intervals in communicated.values() for interval in intervals)
    exposed = subtract(everything, computed)
    late = host_bound(timeline)
    per_step = 1 / (1000 * timeline.num_steps)
    by_what = {
        what: length(subtract(union(intervals), computed)) * per_step for what, intervals in communicated.items()
    }
    return Exposure(
        step=(timeline.window[1] - timeline.window[0]) * per_step,
        compute=length(computed) * per_step,
        communication=length(everything) * per_step,
        exposed=length(exposed) * per_step,
        by_what=dict(sorted(by_what.items(), key=lambda item: (-item[1], item[0]))),
        host_bound=None if late is None else length(late) * per_step,
        host_bound_exposed=length(intersect(late or [], exposed)) * per_step,
    )


def host_bound(timeline: Timeline) -> list[Interval] | None:
    """When the GPU had nothing to compute because the host was late: from the end of all compute so far to the launch
    of the next kernel that computes, if that comes later.

    After the launch it may wait for a gather, say, which is no fault of the host's; so the few microseconds until a
    kernel begins do not count. In a CUDA graph all kernels are launched at once. None where no launch is known.
    """
    computing = [span for span in timeline.spans if span.kind == COMPUTE]
    if not any(span.launched > -math.inf for span in computing):
        return None
    late = []
    end = computing[0].end  # what comes before the first has nothing to be measured from
    for span in computing:
        if span.begin > end and span.launched > end:
            late.append((end, min(span.launched, span.begin)))
        end = max(end, span.end)
    return late


def describe(numbers: Exposure, num_shown: int = 12) -> str:
    """The numbers as text, those of what was communicated down to ``num_shown``."""
    lines = [
        f"step {numbers.step:.3f} ms: compute {numbers.compute:.3f}, communication {numbers.communication:.3f}, "
        f"of it exposed {numbers.exposed:.3f}"
    ]
    if numbers.host_bound is not None:
        lines[0] += f", host-bound {numbers.host_bound:.3f} ({numbers.host_bound_exposed:.3f} of it exposed, too)"
    shown = list(numbers.by_what.items())[:num_shown]
    lines += [f"  {milliseconds:8.3f} ms  {what}" for what, milliseconds in shown]
    if len(numbers.by_what) > len(shown):
        rest = sum(list(numbers.by_what.values())[num_shown:])
        lines.append(f"  {rest:8.3f} ms  {len(numbers.by_what) - len(shown)} others")
    return "\n".join(lines)
