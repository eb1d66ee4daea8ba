"""The memory columns of the benchmark's table, from numbers that stand for an allocator's."""

import dataclasses
import json
import sys
from pathlib import Path
from typing import Any

import pytest
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples" / "benchmarks"))

import harness
import report

GIB = 2**30


def measurement(mode: str, **memory: Any) -> Any:
    amounts = {"state": 2, "resident": 2, "allocated": 10, "reserved": 12, "leftover": 0, "symmetric": 0} | memory
    scaled = {name: value if value is None else value * GIB for name, value in amounts.items()}
    found = harness.Memory(**scaled)
    activations = 5 * GIB
    return report.Measurement(mode, 16, "full step", [1.0], 16, found, 0.5, None, None, activations)


def cells(table: str) -> dict[str, dict[str, str]]:
    """What a table says of each mode, by column."""
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()]
    return {line[2]: dict(zip(lines[0], line, strict=True)) for line in lines[2:]}


def test_memory_is_compared_with_the_peer_that_has_least() -> None:
    measured = [
        measurement("fsdp2-fp32", allocated=13),
        measurement("fsdp2-bf16", allocated=11),
        measurement("gtp-bf16", allocated=8, symmetric=1),
        measurement("gtp-bf16-graph", allocated=None, reserved=9),
    ]
    records = {record["mode"]: record for record in report.rows(measured)}
    gtp = records["gtp-bf16"]
    assert (gtp["allocated_peak_bytes"], gtp["symmetric_bytes"], gtp["peak_bytes"]) == (8 * GIB, GIB, 9 * GIB)
    assert gtp["peak_above_state_bytes"] == 7 * GIB
    assert gtp["peak_above_activations_bytes"] == 2 * GIB
    assert [record["ratio_fsdp2_memory"] for record in records.values()] == [1.5, 1.0, 0.5, None]
    table = cells(report.step_table(list(records.values())))
    columns = ("peak GiB", "above state GiB", "above activations GiB", "reserved GiB", "x FSDP2 memory")
    assert [table["gtp-bf16"][name] for name in columns] == ["9.00", "7.00", "2.00", "12.00", "0.500"]
    assert [table["gtp-bf16-graph"][name] for name in columns] == ["n/a", "n/a", "n/a", "9.00", "n/a"]


def test_predictions_stand_beside_measurements() -> None:
    predicted = dataclasses.replace(measurement("gtp-bf16"), predicted_ms=1.25)
    table = cells(report.step_table(report.rows([predicted, measurement("megatron-bf16")])))
    assert [table[mode]["predicted ms"] for mode in ("gtp-bf16", "megatron-bf16")] == ["1.2", "n/a"]


def test_without_a_peer_there_is_no_ratio() -> None:
    nothing_above = measurement("fsdp2-bf16", allocated=7)
    for peers in ([], [nothing_above]):
        assert report.rows([*peers, measurement("gtp-bf16")])[-1]["ratio_fsdp2_memory"] is None


def test_first_steps_are_compared_with_the_quickest_peer() -> None:
    """The least of the rounds: the first mode of the first round also pays for what the process loads once."""
    modes = {"fsdp2-fp32": (500.0, 300.0), "fsdp2-bf16": (450.0, 400.0), "gtp": (360.0, 390.0), "other": (None, None)}
    merged = []
    for mode, rounds in modes.items():
        first, later = (dataclasses.replace(measurement(mode), first_ms=ms) for ms in rounds)
        merged.append(first.merged(later))
    records = report.rows(merged)
    assert [record["first_ms"] for record in records] == [300.0, 400.0, 360.0, None]
    table = cells(report.step_table(records))
    assert [table[mode]["x FSDP2 first"] for mode in modes] == ["1.000", "1.333", "1.200", "n/a"]


def test_rounds_report_the_larger_of_each() -> None:
    first = measurement("gtp-bf16", allocated=8, reserved=12, symmetric=1)
    later = measurement("gtp-bf16", allocated=9, reserved=11, symmetric=2)
    memory = first.merged(later).memory
    assert (memory.allocated, memory.reserved, memory.symmetric) == (9 * GIB, 12 * GIB, 2 * GIB)
    graph = measurement("gtp-bf16-graph", allocated=None)
    assert graph.merged(graph).memory == graph.memory


def test_steps_of_a_trace_without_ranges_are_marked_by_the_clock(tmp_path: Path) -> None:
    """Those marks have: two days before and after the work that the profiler has seen, which are far more than a clock
    may be off, and far less than one with another begin or unit would be."""
    path = tmp_path / "trace.json"
    day = 24 * 3600 * 10**9
    with profile(activities=[ProfilerActivity.CPU]) as profiler, record_function("work"):
        pass
    profiler.export_chrome_trace(str(path))
    now = path.stat().st_mtime_ns
    harness._mark_steps(path, [now - 2 * day, now - day, now + day, now + 2 * day])
    events = json.loads(path.read_text())["traceEvents"]
    steps, (work,) = ([e for e in events if e["name"] == name] for name in (harness.STEP_RANGE, "work"))
    # microseconds, as the profiler writes them
    assert [step["dur"] for step in steps] == pytest.approx([day / 1e3, 2 * day / 1e3, day / 1e3])
    before, around, after = steps
    assert before["ts"] + before["dur"] == pytest.approx(around["ts"])
    assert around["ts"] < work["ts"] < work["ts"] + work["dur"] < around["ts"] + around["dur"]
    assert around["ts"] + around["dur"] == pytest.approx(after["ts"])
