"""Reads a trace into *lanes*: a stream with its kernels on a GPU, a thread with its operators on a CPU.

Communication is what NCCL or gloo do and what was launched inside of a range that gathers or reduces
(``GTP::all_gather (layers.0.wq.weight)``, or ``fully_shard``'s own).
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any, NamedTuple

from .intervals import Interval, subtract

STEP_RANGE = "step"  # what a script may call a step
_KINDS_OF_STEPS = (re.compile(r"(benchmark::)?step$"), re.compile(r"ProfilerStep#\d+$"))
COMPUTE = "compute"
COMMUNICATION = "communication"

_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_RANGE = re.compile(r"GTP::(?P<kind>\w+)(?: \((?P<names>.*)\))?|FSDP::(?P<other>\w+)(?: \((?P<other_names>.*)\))?")
_COMMUNICATES = {
    *("all_gather", "reduce_scatter", "all_reduce", "exchange", "all_gather_copy_out", "post_backward_reduce")
}


class Span(NamedTuple):
    """One kernel or operator of a lane.

    Args:
        begin: Microseconds, as ``end``.
        kind: ``COMPUTE`` or ``COMMUNICATION``.
        what: The range that it belongs to, such as "all_gather layers.0.wq.weight"; else its own name.
        name: Of the kernel or operator.
        launched: When the host began to launch it, as ``begin``; -inf where that is not known.
    """

    begin: float
    end: float
    lane: str
    kind: str
    what: str
    name: str
    launched: float = -math.inf

    @property
    def since(self) -> float:
        """When the host has come to it, as far as that is known."""
        if self.launched == -math.inf:
            return self.begin
        return self.launched


class Range(NamedTuple):
    """A named range on a thread of the host.

    Args:
        num_weights: How many weights its name has.
    """

    begin: float
    end: float
    kind: str
    what: str
    num_weights: int


class Timeline(NamedTuple):
    """A trace, between the start of its first step and the end of its last.

    Args:
        num_steps: 1 if the trace has no ranges that are named as steps.
        window: From when to when.
        spans: In order of their starts.
    """

    num_steps: int
    window: Interval
    spans: list[Span]


def read_timeline(trace: dict[str, Any]) -> Timeline:
    """The lanes of a trace.

    Raises:
        ValueError: There is no work in it.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("dur", 0) > 0]
    ranges = _ranges(events)
    spans = _gpu_spans(events, ranges) or _cpu_spans(events, ranges)
    steps = _steps(events)
    begin = min((step[0] for step in steps), default=-math.inf)
    end = max((step[1] for step in steps), default=math.inf)
    before = [span for span in spans if span.since < begin]
    spans = sorted(span for span in spans if begin <= span.since < end)
    if not spans:
        raise ValueError("read_timeline expects a trace with kernels or operators, but found none in it.")
    # The host is ahead of the device: steps begin when the device has computed what was launched before them, and what
    # is launched in the last one ends later.
    if steps:
        first = max([begin, *(span.end for span in before if span.kind == COMPUTE)])
    else:
        first = spans[0].begin
    last = max([span.end for span in spans] + [step[1] for step in steps])
    return Timeline(max(len(steps), 1), (first, last), spans)


def _steps(events: list[dict[str, Any]]) -> list[Interval]:
    """Ranges of one kind: a script may name its steps while the profiler, with a schedule, counts them too."""
    for kind in _KINDS_OF_STEPS:
        named = [event for event in events if kind.match(event["name"])]
        # GPUs have their own annotations, which repeat those of the host.
        steps = [_interval(event) for event in named if event.get("cat") == "user_annotation"]
        if steps:
            return steps
    return []


def _interval(event: dict[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _ranges(events: list[dict[str, Any]]) -> dict[Any, list[Range]]:
    """The ranges of each thread of the host, in order of their starts."""
    found: dict[Any, list[Range]] = defaultdict(list)
    for event in events:
        match = _RANGE.match(event["name"])
        if match is None or event.get("cat") not in ("user_annotation", "cpu_op"):
            continue
        own = match["kind"] or match["other"]
        kind = COMPUTE
        if own in _COMMUNICATES:
            kind = COMMUNICATION
        names = match["names"] or match["other_names"]
        what, num_weights = (f"{own} {shorten(names)}", len(names.split(", "))) if names else (own, 1)
        found[event["tid"]].append(Range(*_interval(event), kind, what, num_weights))
    for ranges in found.values():
        ranges.sort()
    return found


def shorten(names: str) -> str:
    """A list of weights by its first and the number of others."""
    first, *others = names.split(", ")
    if others:
        return f"{first} + {len(others)}"
    return first


def _innermost(ranges: Sequence[Range], at: float) -> Range | None:
    found = None
    for range_ in ranges:
        if range_.begin > at:
            break
        if at < range_.end:
            found = range_  # the latest that has begun
    return found


def _gpu_spans(events: list[dict[str, Any]], ranges: dict[Any, list[Range]]) -> list[Span]:
    launches = {e["args"]["correlation"]: e for e in events if e.get("cat") in _LAUNCHES and "correlation" in e["args"]}
    spans = []
    for event in events:
        if event.get("cat") not in _GPU_WORK:
            continue
        launch = launches.get(event["args"].get("correlation"))
        range_ = None
        if launch:
            range_ = _innermost(ranges.get(launch["tid"], ()), float(launch["ts"]))
        # In a CUDA graph nothing belongs to a range, but this shows by its name.
        is_wire = any(name in event["name"].lower() for name in ("nccl", "memcpy ptop"))
        kind = COMMUNICATION if is_wire else range_.kind if range_ else COMPUTE
        lane = f"stream {event['args'].get('stream', event['tid'])}"
        if range_ and range_.kind == kind:
            what = range_.what
        else:
            what = event["name"]
        if launch:
            launched = float(launch["ts"])
        else:
            launched = -math.inf
        spans.append(Span(*_interval(event), lane, kind, what, event["name"], launched))
    return spans


def _cpu_spans(events: list[dict[str, Any]], ranges: dict[Any, list[Range]]) -> list[Span]:
    transfers = [event for event in events if event["name"].startswith("gloo:")]
    busy = defaultdict(list)
    for event in transfers:
        busy[event["tid"]].append(_interval(event))
    whats = _names_of_transfers(transfers, ranges)
    spans = [
        Span(*_interval(event), f"thread {event['tid']}", COMMUNICATION, what, event["name"])
        for event, what in zip(transfers, whats, strict=True)
    ]
    for event, (begin, end) in _own_times(events):
        if any(outer[0] <= begin < outer[1] for outer in busy[event["tid"]]):
            continue  # part of a transfer
        range_ = _innermost(ranges.get(event["tid"], ()), begin)
        kind = COMPUTE
        what = event["name"]
        if range_:
            kind = range_.kind
            what = range_.what
        spans.append(Span(begin, end, f"thread {event['tid']}", kind, what, event["name"]))
    return spans


def _own_times(events: list[dict[str, Any]]) -> list[tuple[dict[str, Any], Interval]]:
    """When operators on the host run, without the operators that they call: a GEMM first expands its bias, and an
    operator on DTensors waits in one that is not torch's own."""
    by_thread = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            by_thread[event["tid"]].append(event)
    parts = []
    for ops in by_thread.values():
        ops.sort(key=lambda event: (event["ts"], -event["dur"]))
        called = defaultdict(list)
        running: list[dict[str, Any]] = []  # each has called the next
        for op in ops:
            while running and _interval(running[-1])[1] <= float(op["ts"]):
                running.pop()
            if running:
                called[id(running[-1])].append(_interval(op))
            running.append(op)
        own = [op for op in ops if op["name"].startswith("aten::")]
        parts += [(op, part) for op in own for part in subtract([_interval(op)], called[id(op)])]
    return parts


def _names_of_transfers(transfers: list[dict[str, Any]], ranges: dict[Any, list[Range]]) -> list[str]:
    """gloo takes what was launched in its order: a gather in one transfer, a reduction in one for each weight. Where
    there are not as many, each is taken to be of the last launch before it, which may be one too late.
    """
    launched = sorted(r for of_thread in ranges.values() for r in of_thread if r.kind == COMMUNICATION)
    names = {}
    for is_gather in (True, False):
        candidates = [r for r in launched if ("all_gather" in r.what) == is_gather]
        in_order = [r for r in candidates for _ in range(1 if is_gather else r.num_weights)]
        mine = sorted((e for e in transfers if ("gather" in e["name"]) == is_gather), key=_interval)
        for index, event in enumerate(mine):
            before = [r for r in candidates if r.begin <= float(event["ts"])]
            found = in_order[index] if len(mine) == len(in_order) else before[-1] if before else None
            names[id(event)] = found.what if found else event["name"]
    return [names[id(event)] for event in transfers]
