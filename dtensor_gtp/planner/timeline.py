"""One forward and backward of an answer, stream by stream: as a picture (SVG) and as a Chrome trace."""

from __future__ import annotations

import json
import math
from html import escape

from .evaluate import Answer, Problem, parts_of, setting_of, slowest
from .program import build
from .simulate import Load, Stream
from .timing import Timeline, timeline_of

_WIDTH, _ROW, _LEFT, _TOP = 1200, 34, 110, 46
_LOOKS = {
    Load.COMPUTE: ("#4c78a8", "compute"),
    Load.KERNEL: ("#f58518", "casts and sums"),
    Load.NCCL: ("#54a24b", "NCCL, fast link"),
    Load.COPY: ("#72b7b2", "copy engines"),
    Load.NETWORK: ("#b279a2", "NCCL, network"),
}


def timeline(problem: Problem, answer: Answer) -> Timeline:
    """One microbatch of the slowest stage."""
    setting = setting_of(problem, answer.layout, slowest(parts_of(problem, answer.layout)))
    return timeline_of(build(setting, answer.schedule), problem.machine)


def as_svg(found: Timeline, title: str) -> str:
    """A picture of the streams; a pointer on a box shows its name and its time."""
    streams = sorted({task.stream for task in found.program.tasks})
    tops = {stream: _TOP + number * _ROW for number, stream in enumerate(streams)}
    height = _TOP + _ROW * (len(streams) + 1) + 50
    scale = (_WIDTH - _LEFT - 20) / max(found.ms, 1e-9)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" '
        'font-size="12">',
        f'<rect width="{_WIDTH}" height="{height}" fill="white"/>',
        _text(10, 22, f"{escape(title)}: {found.ms:.1f} ms", size=15),
        *_time_axis(found.ms, scale, height),
    ]
    for stream, y in tops.items():
        parts.append(_text(10, y + 18, stream.name.lower().replace("_", " ")))
        parts.append(f'<line x1="{_LEFT}" x2="{_WIDTH - 20}" y1="{y + 26}" y2="{y + 26}" stroke="#ddd"/>')
    y = _TOP + len(streams) * _ROW
    parts += [
        _text(10, y + 18, "host"),
        _box(_LEFT, y, found.program.host_ms * scale, "#bab0ac", f"host: {found.program.host_ms:.2f} ms"),
    ]
    for task, span in zip(found.program.tasks, found.spans, strict=True):
        ms = span.end - span.begin
        if ms * scale >= 0.05:
            label = f"{task.label}: {ms:.3f} ms from {span.begin:.2f}"
            parts.append(_box(_LEFT + span.begin * scale, tops[task.stream], ms * scale, _LOOKS[task.load][0], label))
    if found.program.turning < len(found.spans):
        x = _LEFT + found.spans[found.program.turning].begin * scale
        parts.append(f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{_TOP - 8}" y2="{height - 44}" stroke="black"/>')
        parts.append(_text(x + 4, _TOP - 2, "backward"))
    for number, (color, name) in enumerate(_LOOKS.values()):
        x = _LEFT + number * 170
        parts.append(f'<rect x="{x}" y="{height - 30}" width="14" height="14" fill="{color}"/>')
        parts.append(_text(x + 20, height - 18, name))
    return "\n".join([*parts, "</svg>"]) + "\n"


def _text(x: float, y: float, text: str, *, size: int = 12, color: str = "black") -> str:
    return f'<text x="{x:.2f}" y="{y}" font-size="{size}" fill="{color}">{text}</text>'


def _box(x: float, y: float, width: float, color: str, label: str) -> str:
    title = f"<title>{escape(label)}</title>"
    return f'<rect x="{x:.2f}" y="{y + 4}" width="{width:.2f}" height="20" fill="{color}">{title}</rect>'


def _time_axis(ms: float, scale: float, height: int) -> list[str]:
    """About ten ticks at round numbers of milliseconds."""
    size = 10 ** math.floor(math.log10(max(ms, 1e-3) / 5))
    size *= next((factor for factor in (1, 2, 5) if ms / (size * factor) <= 12), 10)
    parts = []
    for number in range(int(ms / size) + 1):
        x, y = _LEFT + number * size * scale, height - 48
        parts.append(f'<line x1="{x:.2f}" x2="{x:.2f}" y1="{_TOP}" y2="{y}" stroke="#eee"/>')
        parts.append(_text(x + 2, y + 12, f"{number * size:g} ms", size=10, color="#666"))
    return parts


def as_chrome_trace(found: Timeline) -> str:
    """For chrome://tracing and Perfetto: a thread for each stream."""
    events: list[dict[str, object]] = [
        {"ph": "M", "name": "thread_name", "pid": 0, "tid": int(stream), "args": {"name": stream.name.lower()}}
        for stream in Stream
    ]
    for task, span in zip(found.program.tasks, found.spans, strict=True):
        if span.end > span.begin:
            args = {"alone_ms": task.ms, "load": task.load.name.lower(), "launched_ms": task.launch_ms}
            times = {"ts": span.begin * 1e3, "dur": (span.end - span.begin) * 1e3}
            events.append({"ph": "X", "name": task.label, "pid": 0, "tid": int(task.stream), **times, "args": args})
    return json.dumps({"traceEvents": events, "displayTimeUnit": "ms"}) + "\n"
