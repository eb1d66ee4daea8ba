"""Draws a trace of ``train_step.py --trace``, and says how long communication was exposed.

    python examples/benchmarks/trace_picture.py traces/gtp-bf16.T2048.json --svg gtp-bf16.svg

A trace is the JSON file that ``torch.profiler`` exports. On a GPU its lanes are streams, and what a lane shows are
kernels and copies; on a CPU they are threads and the operators that call no other. Communication is what NCCL or gloo
do and what was launched inside of a range that gathers or reduces (``GTP::all_gather (layers.0.wq.weight)``, or
``fully_shard``'s own). It is *exposed* while no compute runs in any lane: that is drawn in red, and summed up by step
and by what was communicated. A GPU is *host-bound* while it has ended what it was to compute and the host has not yet
launched what comes next.

Everything here is a function of the trace. It needs nothing but Python, so traces can be looked at where torch is not.
"""

import argparse
import json
import math
import re
from bisect import bisect_right
from collections import defaultdict
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

STEP_RANGE = "benchmark::step"
COMPUTE, COMMUNICATION = "compute", "communication"

Interval = tuple[float, float]

_GPU_WORK = ("kernel", "gpu_memcpy", "gpu_memset")
_LAUNCHES = ("cuda_runtime", "cuda_driver")
_RANGE = re.compile(r"GTP::(?P<kind>\w+)(?: \((?P<names>.*)\))?|FSDP::(?P<other>\w+)(?: \((?P<other_names>.*)\))?")
_COMMUNICATES = {
    *("all_gather", "reduce_scatter", "all_reduce", "exchange", "all_gather_copy_out", "post_backward_reduce")
}


class Span(NamedTuple):
    """What one lane did in one go.

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
        return self.begin if self.launched == -math.inf else self.launched


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
    """A trace, between the begin of its first step and the end of its last.

    Args:
        num_steps: 1 if the trace has no ranges named ``STEP_RANGE``.
        window: From when to when.
        spans: In order of their begins.
    """

    num_steps: int
    window: Interval
    spans: list[Span]


# --- intervals --------------------------------------------------------------------------------------------------------


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same set of points as disjoint intervals in ascending order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def subtract(intervals: Sequence[Interval], covered: Sequence[Interval]) -> list[Interval]:
    """What of ``intervals`` is not in ``covered``; both as :func:`union` returns them."""
    left: list[Interval] = []
    ends = [end for _, end in covered]
    for begin, end in intervals:
        for index in range(bisect_right(ends, begin), len(covered)):
            if covered[index][0] >= end:
                break
            if covered[index][0] > begin:
                left.append((begin, covered[index][0]))
            begin = covered[index][1]
        if begin < end:
            left.append((begin, end))
    return left


def intersect(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What is in both; both as :func:`union` returns them."""
    return subtract(intervals, subtract(intervals, others))


def length(intervals: Iterable[Interval]) -> float:
    """Total length of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)


# --- reading a trace --------------------------------------------------------------------------------------------------


def read_timeline(trace: dict[str, Any]) -> Timeline:
    """The lanes of a trace.

    Raises:
        ValueError: There is no work in it.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X" and event.get("dur", 0) > 0]
    ranges = _ranges(events)
    spans = _gpu_spans(events, ranges) or _cpu_spans(events, ranges)
    steps = [_interval(event) for event in events if event["name"] == STEP_RANGE and event["cat"] == "user_annotation"]
    begin = min(step[0] for step in steps) if steps else -math.inf
    before = [span for span in spans if span.since < begin]
    spans = sorted(span for span in spans if span.since >= begin)
    if not spans:
        raise ValueError("read_timeline expects a trace with kernels or operators, but found none in it.")
    # The host is ahead of the device: steps begin when the device has computed what was launched before them, and what
    # is launched in the last one ends later.
    first = max([begin, *(span.end for span in before if span.kind == COMPUTE)]) if steps else spans[0].begin
    last = max([span.end for span in spans] + [step[1] for step in steps])
    return Timeline(max(len(steps), 1), (first, last), spans)


def _interval(event: dict[str, Any]) -> Interval:
    return float(event["ts"]), float(event["ts"]) + float(event["dur"])


def _ranges(events: list[dict[str, Any]]) -> dict[Any, list[Range]]:
    """The ranges of each thread of the host, in order of their begins."""
    found: dict[Any, list[Range]] = defaultdict(list)
    for event in events:
        match = _RANGE.match(event["name"])
        if match is None or event.get("cat") not in ("user_annotation", "cpu_op"):
            continue
        own = match["kind"] or match["other"]
        kind = COMMUNICATION if own in _COMMUNICATES else COMPUTE
        names = match["names"] or match["other_names"]
        what, num_weights = (f"{own} {shorten(names)}", len(names.split(", "))) if names else (own, 1)
        found[event["tid"]].append(Range(*_interval(event), kind, what, num_weights))
    for ranges in found.values():
        ranges.sort()
    return found


def shorten(names: str) -> str:
    """A list of weights by its first and the number of others."""
    first, *others = names.split(", ")
    return f"{first} + {len(others)}" if others else first


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
        range_ = _innermost(ranges.get(launch["tid"], ()), float(launch["ts"])) if launch else None
        # In a CUDA graph nothing belongs to a range, but this shows by its name.
        is_wire = any(name in event["name"].lower() for name in ("nccl", "memcpy ptop"))
        kind = COMMUNICATION if is_wire else range_.kind if range_ else COMPUTE
        lane = f"stream {event['args'].get('stream', event['tid'])}"
        what = range_.what if range_ and range_.kind == kind else event["name"]
        launched = float(launch["ts"]) if launch else -math.inf
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
    for event in _leaves(events):
        begin, end = _interval(event)
        if any(outer[0] <= begin < outer[1] for outer in busy[event["tid"]]):
            continue  # part of a transfer
        range_ = _innermost(ranges.get(event["tid"], ()), begin)
        kind = range_.kind if range_ else COMPUTE
        what = range_.what if range_ else event["name"]
        spans.append(Span(begin, end, f"thread {event['tid']}", kind, what, event["name"]))
    return spans


def _leaves(events: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Operators that call no other, on the host."""
    by_thread = defaultdict(list)
    for event in events:
        if event.get("cat") == "cpu_op":
            by_thread[event["tid"]].append(event)
    leaves = []
    for ops in by_thread.values():
        ops.sort(key=lambda event: (event["ts"], -event["dur"]))
        for op, following in zip(ops, [*ops[1:], None], strict=True):
            calls_another = following is not None and float(following["ts"]) < _interval(op)[1]
            if not calls_another and op["name"].startswith("aten::"):
                leaves.append(op)
    return leaves


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


# --- numbers ----------------------------------------------------------------------------------------------------------


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
    late, end = [], computing[0].end  # what comes before the first has nothing to be measured from
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


# --- picture ----------------------------------------------------------------------------------------------------------

_WIDTH, _LEFT, _LANE, _TOP = 1200, 110, 22, 46
_COLORS = {COMPUTE: "#8fb3d9", COMMUNICATION: "#e3c98f", "exposed": "#d62f2f"}


def draw(timeline: Timeline, title: str) -> str:
    """An SVG picture: a row for each lane, time from left to right, exposed communication in red."""
    begin, end = timeline.window
    scale = (_WIDTH - _LEFT - 10) / (end - begin)
    computed = union(span[:2] for span in timeline.spans if span.kind == COMPUTE)
    lanes = list(dict.fromkeys(span.lane for span in sorted(timeline.spans, key=lambda span: span.lane)))
    parts = []
    for row, lane in enumerate(lanes):
        y = _TOP + row * _LANE
        parts.append(f'<text x="4" y="{y + 13}">{escape(lane)}</text>')
        spans = [span for span in timeline.spans if span.lane == lane]
        for span in _coarser(spans, 0.25 / scale):
            parts.append(_rectangle(span, span[:2], span.kind, y, begin, scale))
            if span.kind == COMMUNICATION:
                exposed = subtract([span[:2]], computed)
                parts += [_rectangle(span, interval, "exposed", y, begin, scale) for interval in exposed]
    bottom = _TOP + len(lanes) * _LANE
    for tick in range(11):
        x = _LEFT + tick * (_WIDTH - _LEFT - 10) / 10
        parts.append(
            f'<line x1="{x:.1f}" y1="{_TOP - 4}" x2="{x:.1f}" y2="{bottom}" stroke="#ddd" stroke-width="0.5"/>'
        )
        parts.append(f'<text x="{x - 12:.1f}" y="{bottom + 14}">{(end - begin) * tick / 10_000:.2f}</text>')
    numbers = describe(exposure(timeline), 0).splitlines()[0]
    head = f'<text x="4" y="14" font-weight="bold">{escape(title)}</text><text x="4" y="30">{escape(numbers)}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 22}" font-family="sans-serif" '
        f'font-size="11">\n<rect width="100%" height="100%" fill="white"/>\n{head}\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _rectangle(span: Span, part: Interval, color: str, y: int, begin: float, scale: float) -> str:
    x, width = _LEFT + (part[0] - begin) * scale, max((part[1] - part[0]) * scale, 0.3)
    what = span.what if span.what == span.name else f"{span.what}: {span.name}"
    return (
        f'<rect x="{x:.2f}" y="{y}" width="{width:.2f}" height="{_LANE - 5}" fill="{_COLORS[color]}">'
        f"<title>{escape(what)}, {(part[1] - part[0]):.0f} us</title></rect>"
    )


def _coarser(spans: Sequence[Span], pixel: float) -> list[Span]:
    """The spans of a lane, put together where they are next to each other and of the same weight, or too short to be
    seen: a step has thousands.
    """
    merged: list[Span] = []
    for span in spans:
        last = merged[-1] if merged else None
        if last and last.kind == span.kind and span.begin - last.end < pixel:
            is_same = last.what == span.what
            if is_same or min(span.end - span.begin, last.end - last.begin) < pixel:
                what = last.what if is_same else f"{last.what.partition(' and others')[0]} and others"
                name = last.name if last.name == span.name else what
                merged[-1] = last._replace(end=max(last.end, span.end), what=what, name=name)
                continue
        merged.append(span)
    return merged


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path, help="a file that train_step.py --trace has written")
    parser.add_argument("--svg", type=Path, metavar="FILE", help="write the picture")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers")
    parser.add_argument("--title", help="of the picture; default: the name of the trace")
    arguments = parser.parse_args()
    timeline = read_timeline(json.loads(arguments.trace.read_text()))
    numbers = exposure(timeline)
    print(describe(numbers))
    if arguments.svg is not None:
        arguments.svg.write_text(draw(timeline, arguments.title or arguments.trace.stem))
    if arguments.json is not None:
        arguments.json.write_text(json.dumps(numbers._asdict(), indent=1) + "\n")


if __name__ == "__main__":
    main()
