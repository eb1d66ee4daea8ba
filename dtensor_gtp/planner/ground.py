"""How far a predicted time may be off, by kind of job: from runs that others have published, with their configuration.

Each kind has the least and the most that a measured step took of a predicted one, over the published runs of that kind
(tests/planner/planner_data/published_rows.json) with a margin. `python -m dtensor_gtp.help planner` says how often
these ranges hold for sources that had no part in them. Where nothing was published that is near a job, there is no
range and no time.
"""

from __future__ import annotations

from typing import NamedTuple

from .job import Job, Layout
from .machine import Machine


class Ground(NamedTuple):
    kind: str  # for people
    least: float  # least time of a step, as a share of the prediction
    most: float  # most time


DENSE = Ground("dense, bf16, data parallel", 0.82, 1.27)
MIXED = Ground("dense, bf16, with tp, pp or cp", 0.75, 1.3)
EIGHT_BIT = Ground("8-bit", 0.65, 1.35)
LONG = Ground("sequences above 8,192 tokens", 0.65, 1.7)
EXPERTS = Ground("experts behind the fast link", 0.65, 1.5)
# Two rows. Codes that hide how tokens travel were up to 3.6 times as fast as a prediction with another ``dispatch``.
EXPERTS_APART = Ground("experts over the network", 0.27, 1.5)
_FULL = 0.85  # of the memory: allocators of training code begin to search and to give back
_SLOWED = 1.3
_LONGEST = 131072
_MOST_DOMAINS = 128  # hosts, or racks: Llama 3 on 16,384 GPUs
_OTHER_MACHINE = 1.2  # shares of peaks are carried over from another generation


def ground_of(job: Job, layout: Layout, machine: Machine, *, has_experts: bool, filled: float) -> Ground | str:
    """The range of a layout, or why there is none and what to measure; ``filled`` is the share of memory in use."""
    if job.seq_len > _LONGEST:
        return f"no published run had sequences of {job.seq_len} tokens: measure one of your blocks at that length"
    if not machine.has_ground:
        return f"no published run trained on {machine.name}: measure it by --calibrate"
    if (wide := is_too_wide(layout, machine)) is not None:
        return f"{wide}: no published run gathered over so many, measure one"
    if has_experts:
        axis = layout.axes()["ep"]
        is_near = axis.size == 1 or axis.size * axis.stride <= machine.gpus_per_domain
        found = EXPERTS if is_near else EXPERTS_APART
    elif job.seq_len > 8192:
        found = LONG
    elif job.precision != "bf16":
        found = EIGHT_BIT
    else:
        found = MIXED if max(layout.tp, layout.pp, layout.cp) > 1 else DENSE
    if found is DENSE and not machine.is_preset:
        return Ground(found.kind, 1 - machine.spread, 1 + machine.spread)
    least, most = found.least, found.most
    if machine.is_carried_over:
        least, most = least / _OTHER_MACHINE, most * _OTHER_MACHINE
    if filled > _FULL:
        most *= _SLOWED
    return Ground(found.kind, least, most)


def is_too_wide(layout: Layout, machine: Machine) -> str | None:
    """The axis whose gathers cross more hosts than those of any published run; None if there is none."""
    axes = layout.axes()
    for name in ("gtp", "expert_gtp"):
        size, stride = axes[name]
        if size > 1 and size * min(stride, machine.gpus_per_domain) > _MOST_DOMAINS * machine.gpus_per_domain:
            return f"{name} over more than {_MOST_DOMAINS} hosts"
    return None
