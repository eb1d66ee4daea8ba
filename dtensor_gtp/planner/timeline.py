"""One forward and backward of an answer, stream by stream: as a Chrome trace, and as the picture of a trace."""

from __future__ import annotations

import json

from .._trace.picture import draw
from .._trace.read import COMMUNICATION, COMPUTE, Span
from .._trace.read import Timeline as Drawn
from .evaluate import Answer, Problem, parts_of, setting_of, slowest
from .program import build
from .simulate import Stream
from .timing import Timeline, timeline_of


def timeline(problem: Problem, answer: Answer) -> Timeline:
    """One microbatch of the slowest stage."""
    setting = setting_of(problem, answer.layout, slowest(parts_of(problem, answer.layout)))
    return timeline_of(build(setting, answer.schedule), problem.machine)


def as_svg(found: Timeline, title: str) -> str:
    """As ``python -m dtensor_gtp.trace`` draws measured steps."""
    spans = []
    for task, span in zip(found.program.tasks, found.spans, strict=True):
        if span.end > span.begin:
            kind = COMPUTE if task.stream is Stream.COMPUTE and not task.cause else COMMUNICATION
            times = span.begin * 1e3, span.end * 1e3
            lane = task.stream.name.lower().replace("_", " ")
            spans.append(Span(*times, lane, kind, task.label, task.label, task.launch_ms * 1e3))
    return draw(Drawn(1, (0.0, found.ms * 1e3), sorted(spans)), title)


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
