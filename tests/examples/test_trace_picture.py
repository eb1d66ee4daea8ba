"""What is read from traces, on small ones made here: which lanes, what belongs to which weight, what was exposed."""

import json
import re
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from dtensor_gtp import trace as command
from dtensor_gtp._trace.exposure import describe, exposure, host_bound
from dtensor_gtp._trace.intervals import intersect, length, subtract, union
from dtensor_gtp._trace.picture import draw
from dtensor_gtp._trace.read import read_timeline

ROOT = Path(__file__).parents[2]
SVG = "{http://www.w3.org/2000/svg}"


def texts_of(svg: str) -> list[ElementTree.Element]:
    return list(ElementTree.fromstring(svg).iter(f"{SVG}text"))


def event(name: str, cat: str, tid: Any, begin: float, end: float, **args: Any) -> dict[str, Any]:
    return {"ph": "X", "name": name, "cat": cat, "pid": 1, "tid": tid, "ts": begin, "dur": end - begin, "args": args}


def launched(name: str, stream: int, begin: float, end: float, at: float, correlation: int) -> list[dict[str, Any]]:
    """A kernel and the call on thread 1 that launched it."""
    return [
        event("cudaLaunchKernel", "cuda_runtime", 1, at, at + 1, correlation=correlation),
        event(name, "kernel", stream, begin, end, stream=stream, correlation=correlation),
    ]


def gpu_trace() -> dict[str, Any]:
    """Two steps. In the first a gather of 100 us of which compute hides the 40 last, in the second one of 50 hidden
    whole, and a scatter of 30 that nothing hides. The cast of the scatter is its own."""
    return {
        "traceEvents": [
            {"ph": "M", "name": "process_name", "pid": 1, "args": {}},
            event("benchmark::step", "user_annotation", 1, 1000, 1200),
            event("benchmark::step", "user_annotation", 1, 1200, 1400),
            event("GTP::all_gather (a.weight)", "user_annotation", 1, 1010, 1020),
            event("GTP::compute (a.weight)", "user_annotation", 1, 1030, 1050),
            event("GTP::all_gather (b.weight, c.weight)", "user_annotation", 1, 1210, 1220),
            event("GTP::reduce_scatter (b.weight)", "user_annotation", 1, 1250, 1270),
            *launched("ncclDevKernel_AllGather", 20, 1100, 1200, 1015, 1),
            *launched("gemm", 7, 1160, 1300, 1035, 2),
            *launched("ncclDevKernel_AllGather", 20, 1210, 1260, 1215, 3),
            *launched("cast", 21, 1290, 1310, 1252, 4),
            *launched("ncclDevKernel_ReduceScatter", 21, 1310, 1330, 1255, 5),
            *launched("gemm", 7, 800, 900, 700, 6),  # of a step before
        ]
    }


def test_intervals() -> None:
    assert union([(5, 6), (1, 3), (2, 4), (4, 4.5), (9, 9)]) == [(1, 4.5), (5, 6)]
    assert subtract([(0, 10)], [(2, 3), (5, 6)]) == [(0, 2), (3, 5), (6, 10)]
    assert subtract([(0, 2), (4, 6)], [(1, 5)]) == [(0, 1), (5, 6)]
    assert subtract([(1, 2), (3, 4)], [(0, 10)]) == []
    assert subtract([(1, 2)], []) == [(1, 2)]
    assert intersect([(0, 2), (4, 6), (8, 9)], [(1, 5), (5.5, 7)]) == [(1, 2), (4, 5), (5.5, 6)]
    assert length([(1, 2), (3, 5)]) == 3


def test_kernels_belong_to_the_range_that_launched_them() -> None:
    timeline = read_timeline(gpu_trace())
    assert timeline.num_steps == 2
    assert timeline.window == (1000, 1400)
    assert [(s.lane, s.kind, s.what, s.name) for s in timeline.spans] == [
        ("stream 20", "communication", "all_gather a.weight", "ncclDevKernel_AllGather"),
        ("stream 7", "compute", "compute a.weight", "gemm"),
        ("stream 20", "communication", "all_gather b.weight + 1", "ncclDevKernel_AllGather"),
        ("stream 21", "communication", "reduce_scatter b.weight", "cast"),
        ("stream 21", "communication", "reduce_scatter b.weight", "ncclDevKernel_ReduceScatter"),
    ]


def test_casts_on_the_compute_stream_are_compute() -> None:
    ranges = [
        event("GTP::all_gather (a.weight)", "user_annotation", 1, 10, 30),
        event("GTP::cast (a.weight)", "user_annotation", 1, 12, 18),
    ]
    work = [*launched("cast", 7, 20, 40, 13, 1), *launched("ncclDevKernel_AllGather", 20, 40, 90, 25, 2)]
    spans = read_timeline({"traceEvents": [*ranges, *work]}).spans
    assert [(span.kind, span.what) for span in spans] == [
        ("compute", "cast a.weight"),
        ("communication", "all_gather a.weight"),
    ]


def test_exposed_is_what_no_compute_covers() -> None:
    numbers = exposure(read_timeline(gpu_trace()))
    assert numbers.step == pytest.approx(0.2)
    assert numbers.compute == pytest.approx(0.070)
    assert numbers.communication == pytest.approx((100 + 50 + 40) / 2000)
    assert numbers.exposed == pytest.approx((60 + 0 + 30) / 2000)
    assert numbers.by_what == {
        "all_gather a.weight": pytest.approx(0.030),
        "reduce_scatter b.weight": pytest.approx(0.015),
        "all_gather b.weight + 1": 0,
    }
    text = describe(numbers, num_shown=1)
    assert "of it exposed 0.045" in text
    assert "0.030 ms  all_gather a.weight\n" in text
    assert "0.015 ms  2 others" in text


def test_steps_begin_when_the_device_comes_to_them() -> None:
    """The host is ahead: what it has launched before the steps is still computed within them, and is not of them."""
    events = [
        event("benchmark::step", "user_annotation", "steps", 1000, 1100),
        event("benchmark::step", "user_annotation", "steps", 1100, 1200),
        *launched("gemm", 7, 900, 1150, 800, 1),
        *launched("ncclDevKernel_AllGather", 20, 1100, 1190, 801, 2),
        *launched("gemm", 7, 1150, 1160, 802, 3),
        *launched("gemm", 7, 1165, 1300, 1010, 4),
        *launched("gemm", 7, 1340, 1560, 1110, 5),
    ]
    timeline = read_timeline({"traceEvents": events})
    assert (timeline.num_steps, timeline.window) == (2, (1160, 1560))
    assert [(span.begin, span.launched) for span in timeline.spans] == [(1165, 1010), (1340, 1110)]
    numbers = exposure(timeline)
    assert (numbers.step, numbers.communication, numbers.host_bound) == (pytest.approx(0.2), 0, 0)


def late_host_trace() -> dict[str, Any]:
    """Gaps between GEMMs of one step, each for another reason."""
    events = [
        event("benchmark::step", "user_annotation", 1, 0, 1000),
        event("GTP::all_gather (a.weight)", "user_annotation", 1, 20, 30),
        *launched("gemm", 7, 100, 200, 40, 1),  # the gap before it, in which the step has begun, is none
        *launched("gemm", 7, 210, 300, 150, 2),  # 10: launched in time
        *launched("gemm", 7, 390, 400, 380, 3),  # 90: the host was 80 late
        *launched("ncclDevKernel_AllGather", 20, 390, 500, 25, 4),
        *launched("gemm", 7, 510, 600, 430, 5),  # 110: the host was 30 late, and then the gather was awaited
        *launched("add", 8, 590, 650, 580, 6),  # another stream
        *launched("gemm", 7, 660, 700, 640, 7),  # 60 in its stream, but something computed
        *launched("gemm", 7, 720, 730, 715, 8),  # 20: the host was 15 late
        event("cudaGraphLaunch", "cuda_runtime", 1, 725, 726, correlation=9),
        *(event("gemm", "kernel", 7, at, at + 10, stream=7, correlation=9) for at in (735, 760, 800)),
        event("gemm", "kernel", 7, 900, 910, stream=7, correlation=10),  # who knows when it was launched
    ]
    return {"traceEvents": events}


def test_host_bound_is_the_time_to_a_late_launch() -> None:
    timeline = read_timeline(late_host_trace())
    assert host_bound(timeline) == [(300, 380), (400, 430), (700, 715)]
    numbers = exposure(timeline)
    assert numbers.host_bound == pytest.approx(0.125)
    assert numbers.exposed == pytest.approx(0.100)  # of the gather: 400 to 500
    assert numbers.host_bound_exposed == pytest.approx(0.030)
    assert describe(numbers).splitlines()[0].endswith(", host-bound 0.125 (0.030 of it exposed, too)")


def test_host_bound_is_unknown_without_launches() -> None:
    events = [event("gemm", "kernel", 7, at, at + 10, stream=7) for at in (0, 50)]
    numbers = exposure(read_timeline({"traceEvents": events}))
    assert numbers.host_bound is None
    assert "host-bound" not in describe(numbers)


def test_communication_is_known_by_its_range_or_its_name() -> None:
    events = [
        event("GTP::all_gather (a.weight)", "user_annotation", 1, 0, 10),
        event("cudaMemcpyAsync", "cuda_runtime", 1, 5, 6, correlation=1),
        event("Memcpy PtoP", "gpu_memcpy", 9, 20, 30, stream=9, correlation=1),
        event("ncclDevKernel_AllReduce", "kernel", 8, 40, 50, stream=8, correlation=2),
        event("gemm", "kernel", 7, 45, 60, stream=7, correlation=3),
        event("Memcpy PtoP (Device -> Device)", "gpu_memcpy", 9, 70, 74, stream=9, correlation=4),  # in a CUDA graph
        event("Memcpy DtoD (Device -> Device)", "gpu_memcpy", 9, 80, 84, stream=9, correlation=4),
    ]
    numbers = exposure(read_timeline({"traceEvents": events}))
    assert numbers.by_what == {
        "all_gather a.weight": pytest.approx(0.010),
        "Memcpy PtoP (Device -> Device)": pytest.approx(0.004),
        "ncclDevKernel_AllReduce": pytest.approx(0.005),
    }


def test_threads_of_a_cpu() -> None:
    """torch's operators compute while they call no other; what gloo's threads do is a transfer, named in the order of
    launches."""
    events = [
        event("GTP::all_gather (a.weight)", "user_annotation", 1, 0, 3),
        event("aten::copy_", "cpu_op", 1, 1, 2),  # packs what is sent
        event("GTP::all_gather (b.weight)", "user_annotation", 1, 3, 6),
        event("GTP::compute (a.weight)", "user_annotation", 1, 20, 60),
        event("aten::linear", "cpu_op", 1, 20, 60),
        event("aten::addmm", "cpu_op", 1, 30, 60),
        event("aten::expand", "cpu_op", 1, 30, 32),
        event("aten::as_strided", "cpu_op", 1, 31, 32),
        event("aten::copy_", "cpu_op", 1, 32, 34),
        event("aten::add", "cpu_op", 1, 62, 68),  # on DTensors
        event("_c10d_functional::wait_tensor", "cpu_op", 1, 63, 67),
        event("_LinearBackward", "cpu_op", 1, 70, 100),  # waits for the most part
        event("GTP::reduce_scatter (b.weight, a.weight)", "user_annotation", 1, 70, 75),
        event("GTP::all_reduce (3 whole parameters)", "user_annotation", 1, 76, 78),
        event("gloo:all_gather", "user_annotation", 2, 5, 25),
        event("aten::copy_", "cpu_op", 2, 22, 24),
        event("gloo:all_gather", "user_annotation", 3, 26, 50),
        *(event("gloo:all_reduce", "user_annotation", 3, begin, begin + 4) for begin in (80, 84, 90)),
    ]
    timeline = read_timeline({"traceEvents": events})
    assert timeline.num_steps == 1
    assert [(s.lane, s.what, s.name) for s in timeline.spans] == [
        ("thread 1", "all_gather a.weight", "aten::copy_"),
        ("thread 2", "all_gather a.weight", "gloo:all_gather"),
        ("thread 1", "compute a.weight", "aten::linear"),
        ("thread 3", "all_gather b.weight", "gloo:all_gather"),
        ("thread 1", "compute a.weight", "aten::expand"),
        ("thread 1", "compute a.weight", "aten::as_strided"),
        ("thread 1", "compute a.weight", "aten::copy_"),
        ("thread 1", "compute a.weight", "aten::addmm"),
        ("thread 1", "aten::add", "aten::add"),
        ("thread 1", "aten::add", "aten::add"),
        ("thread 3", "reduce_scatter b.weight + 1", "gloo:all_reduce"),
        ("thread 3", "reduce_scatter b.weight + 1", "gloo:all_reduce"),
        ("thread 3", "all_reduce 3 whole parameters", "gloo:all_reduce"),
    ]
    numbers = exposure(timeline)
    assert numbers.compute == pytest.approx(0.042)  # linear and all that it calls, and add without its wait
    exposed = numbers.by_what
    assert exposed["all_gather a.weight"] == pytest.approx(0.016)
    assert exposed["all_gather b.weight"] == 0
    assert exposed["reduce_scatter b.weight + 1"] == pytest.approx(0.008)


def test_picture_shows_lanes_and_exposed_parts_in_red() -> None:
    svg = draw(read_timeline(gpu_trace()), "a < b")
    texts = [text.text for text in texts_of(svg)]
    assert texts[0] == "a < b"
    rows = [text for text in texts if text and "(stream" in text]
    assert rows == ["compute (stream 7)", "all_gather (stream 20)", "reduce_scatter (stream 21)"]
    red = [r for r in ElementTree.fromstring(svg).iter(f"{SVG}rect") if r.get("fill") == "#d62f2f"]
    titled = {title.text: r for r in red for title in r.iter(f"{SVG}title")}
    assert list(titled) == [
        "all_gather a.weight: ncclDevKernel_AllGather, 60 us",
        "reduce_scatter b.weight, 30 us",  # a cast and what follows it at once
    ]
    first = titled["all_gather a.weight: ncclDevKernel_AllGather, 60 us"]
    per_us = (1200 - 190 - 30) / 400
    assert float(first.get("x", 0)) == pytest.approx(190 + 100 * per_us)
    assert float(first.get("width", 0)) == pytest.approx(60 * per_us)


def test_rows_of_a_graph_are_named_by_their_kernels() -> None:
    """Nothing belongs to a range there."""
    events = [
        event("ncclDevKernel_ReduceScatter_Sum_bf16_RING_LL(args)", "kernel", 20, 0, 10, stream=20),
        event("ncclDevKernel_AllGather_RING_LL(args)", "kernel", 21, 0, 10, stream=21),
        event("Memcpy PtoP (Device -> Device)", "gpu_memcpy", 22, 0, 10, stream=22),
    ]
    svg = draw(read_timeline({"traceEvents": events}), "graph")
    rows = ["Memcpy (stream 22)", "NCCL AllGather (stream 21)", "NCCL ReduceScatter (stream 20)"]
    assert re.findall(r">([^<]+stream \d+\))</text>", svg) == rows


@pytest.mark.parametrize("path", sorted((ROOT / "docs/images").glob("trace_*.svg")), ids=lambda path: path.stem)
def test_pictures_of_the_pages_are_as_the_command_draws(path: Path) -> None:
    """Their traces are not kept: a unit, rows that say what they do, ticks that lie within the picture."""
    texts = texts_of(path.read_text())
    rows = [str(text.text) for text in texts if text.get("x") == "4"][2:]
    assert len(rows) >= 10
    assert all(re.fullmatch(r"(compute|Memcpy|NCCL \w+) \(stream \d+\)", row) for row in rows), rows
    assert "milliseconds" in [text.text for text in texts]
    ticks = [float(text.get("x", "0")) for text in texts if (text.text or "").isdecimal()]
    assert len(ticks) >= 6
    assert max(ticks) <= 1200 - 3.2 * 3


@pytest.mark.parametrize("microseconds", [400, 999, 1000, 1234.5, 54321])
def test_ticks_are_round_have_a_unit_and_lie_within_the_picture(microseconds: float) -> None:
    events = launched("gemm", 7, 100, 100 + microseconds, 90, 1)
    texts = texts_of(draw(read_timeline({"traceEvents": events}), "one"))
    assert "milliseconds" in [text.text for text in texts]
    ticks = [text for text in texts if (text.text or "").replace(".", "").isdecimal()]
    times = [float(text.text or "") for text in ticks]
    assert 4 <= len(times) <= 13
    assert times[0] == 0
    assert times[-1] <= microseconds / 1000
    for text in ticks:
        half = 3.2 * len(text.text or "")
        assert half <= float(text.get("x", "0")) <= 1200 - half


def test_steps_of_a_profiler_with_a_schedule() -> None:
    """Its ranges are on the host, and again on the device."""
    trace = gpu_trace()
    for number, item in enumerate(e for e in trace["traceEvents"] if e["name"] == "benchmark::step"):
        item["name"] = f"ProfilerStep#{number}"
    trace["traceEvents"].append(event("ProfilerStep#0", "gpu_user_annotation", 7, 1000, 1399))
    assert read_timeline(trace).num_steps == 2


def test_steps_that_are_named_and_counted_by_a_schedule_count_once() -> None:
    trace = gpu_trace()
    steps = [e for e in trace["traceEvents"] if e["name"] == "benchmark::step"]
    trace["traceEvents"] += [e | {"name": f"ProfilerStep#{number}"} for number, e in enumerate(steps)]
    assert read_timeline(trace).num_steps == 2


def test_work_after_the_last_step_is_of_no_step() -> None:
    """An evaluation, say. What the last step has launched counts, though it runs later."""
    trace = gpu_trace()
    trace["traceEvents"] += [*launched("gemm", 7, 1410, 1450, 1390, 7), *launched("gemm", 7, 1460, 1900, 1420, 8)]
    timeline = read_timeline(trace)
    assert (timeline.num_steps, timeline.window) == (2, (1000, 1450))
    assert exposure(timeline).compute == pytest.approx((140 + 40) / 2000)


def test_command_writes_the_picture_and_the_numbers(tmp_path: Path, capsys: Any) -> None:
    trace = tmp_path / "gtp.json"
    trace.write_text(json.dumps(gpu_trace()))
    out = [f"--svg={tmp_path / 'picture.svg'}", f"--json={tmp_path / 'numbers.json'}"]
    assert command.main([str(trace), *out]) == 0
    assert capsys.readouterr().out.startswith("step 0.200 ms: compute 0.070")
    assert json.loads((tmp_path / "numbers.json").read_text())["exposed"] == pytest.approx(0.045)
    assert (tmp_path / "picture.svg").read_text().startswith("<svg")


def test_what_cannot_be_read_is_said(tmp_path: Path, capsys: Any) -> None:
    with pytest.raises(ValueError, match="read_timeline expects a trace with kernels or operators"):
        read_timeline({"traceEvents": [event("benchmark::step", "user_annotation", 1, 0, 1)]})
    (tmp_path / "empty.json").write_text("{}")
    for name in ("missing.json", "empty.json"):
        assert command.main([str(tmp_path / name)]) == 2
        assert "dtensor_gtp.trace cannot read" in capsys.readouterr().err
