"""A timeline as an SVG picture: a row for each stream or thread, exposed communication in red, in light or dark as the
page is."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterator, Sequence
from xml.sax.saxutils import escape

from .exposure import describe, exposure
from .intervals import Interval, subtract, union
from .read import COMMUNICATION, COMPUTE, Span, Timeline

_WIDTH = 1200
_LEFT = 190
_RIGHT = 30
_LANE = 22
_TOP = 66
_COLORS = {COMPUTE: "#8fb3d9", COMMUNICATION: "#e3c98f", "exposed": "#d62f2f"}
_LEGEND = ((COMPUTE, "compute"), (COMMUNICATION, "communication"), ("exposed", "exposed: nothing computes"))
_MOST_TICKS = 12
_NCCL_KERNEL = re.compile(r"ncclDevKernel_([A-Za-z]+)")
_STYLE = (
    "svg { background: #fff } text { fill: #1f2328 } line { stroke: #d1d9e0; stroke-width: 0.5 } "
    "@media (prefers-color-scheme: dark) { svg { background: #0d1117 } "
    "text { fill: #e6edf3 } line { stroke: #3d444d } }"
)


def draw(timeline: Timeline, title: str) -> str:
    """The picture. Time runs from the left to the right, in milliseconds."""
    begin, end = timeline.window
    scale = (_WIDTH - _LEFT - _RIGHT) / (end - begin)
    computed = union(span[:2] for span in timeline.spans if span.kind == COMPUTE)
    by_lane = defaultdict(list)
    for span in timeline.spans:
        by_lane[span.lane].append(span)
    names = {lane: row_name(lane, spans) for lane, spans in by_lane.items()}
    lanes = sorted(by_lane, key=lambda lane: (not names[lane].startswith("compute"), names[lane]))
    parts = []
    for row, lane in enumerate(lanes):
        y = _TOP + row * _LANE
        parts.append(f'<text x="4" y="{y + 13}">{escape(names[lane])}</text>')
        for span in _coarser(by_lane[lane], 0.25 / scale):
            parts.append(_rectangle(span, span[:2], span.kind, y, begin, scale))
            if span.kind == COMMUNICATION:
                exposed = subtract([span[:2]], computed)
                parts += [_rectangle(span, interval, "exposed", y, begin, scale) for interval in exposed]
    bottom = _TOP + len(lanes) * _LANE
    parts += _ticks(end - begin, scale, bottom)
    numbers = describe(exposure(timeline), 0).splitlines()[0]
    head = f'<text x="4" y="14" font-weight="bold">{escape(title)}</text><text x="4" y="30">{escape(numbers)}</text>'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {bottom + 38}" font-family="sans-serif" '
        f'font-size="11">\n<style>{_STYLE}</style>\n{head}\n{_legend()}\n' + "\n".join(parts) + "\n</svg>\n"
    )


def row_name(lane: str, spans: Sequence[Span]) -> str:
    """What a lane does most of its time, and which one it is: "all_gather (stream 20)"; or its name, if it has one."""
    if lane.replace(" ", "").isalpha():  # of the planner
        return lane
    times: dict[str, float] = defaultdict(float)
    for span in spans:
        kernel = _NCCL_KERNEL.match(span.what)  # in a CUDA graph nothing else is known of it
        if kernel:
            what = f"NCCL {kernel[1]}"
        else:
            what = span.what.partition(" ")[0]
        times["compute" if span.kind == COMPUTE else what] += span.end - span.begin
    most = max(times, key=lambda what: (times[what], what))
    return f"{most[:22]} ({lane})"


def _legend() -> str:
    parts = []
    x = 4.0
    for color, text in _LEGEND:
        parts.append(f'<rect x="{x:.0f}" y="40" width="14" height="10" fill="{_COLORS[color]}"/>')
        parts.append(f'<text x="{x + 19:.0f}" y="49">{text}</text>')
        x += 40 + 6 * len(text)
    return "".join(parts)


def _ticks(microseconds: float, scale: float, bottom: float) -> Iterator[str]:
    """Lines at round times, and their unit."""
    step = _round_step(microseconds / 1000 / _MOST_TICKS)
    digits = max(0, len(f"{step:.6f}".rstrip("0").partition(".")[2]))
    for tick in range(int(microseconds / 1000 / step + 1e-9) + 1):
        x = _LEFT + tick * step * 1000 * scale
        yield f'<line x1="{x:.1f}" y1="{_TOP - 4}" x2="{x:.1f}" y2="{bottom}"/>'
        yield f'<text x="{x:.1f}" y="{bottom + 14}" text-anchor="middle">{tick * step:.{digits}f}</text>'
    yield f'<text x="{(_LEFT + _WIDTH - _RIGHT) / 2:.0f}" y="{bottom + 30}" text-anchor="middle">milliseconds</text>'


def _round_step(least: float) -> float:
    """The smallest of 1, 2 and 5 times a power of ten that is not below ``least``."""
    power = 1.0
    while power > least:
        power /= 10
    while True:
        for factor in (1, 2, 5):
            if power * factor >= least:
                return power * factor
        power *= 10


def _rectangle(span: Span, part: Interval, color: str, y: int, begin: float, scale: float) -> str:
    x = _LEFT + (part[0] - begin) * scale
    width = max((part[1] - part[0]) * scale, 0.3)
    if span.what == span.name:
        what = span.what
    else:
        what = f"{span.what}: {span.name}"
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
        last = None
        if merged:
            last = merged[-1]
        if last and last.kind == span.kind and span.begin - last.end < pixel:
            is_same = last.what == span.what
            if is_same or min(span.end - span.begin, last.end - last.begin) < pixel:
                if is_same:
                    what = last.what
                else:
                    what = f"{last.what.partition(' and others')[0]} and others"
                name = what
                if last.name == span.name:
                    name = last.name
                merged[-1] = last._replace(end=max(last.end, span.end), what=what, name=name)
                continue
        merged.append(span)
    return merged
