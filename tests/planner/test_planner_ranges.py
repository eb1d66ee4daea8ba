"""Ranges of times: what the page says of published runs is what the rows give, and they hold for sources left out."""

import statistics

import planner_ranges as ranges
import pytest
from planner_accuracy import PAGE

from dtensor_gtp.planner.evaluate import Problem, evaluate, ground_of
from dtensor_gtp.planner.job import Job, Layout
from dtensor_gtp.planner.machine import load_machine
from dtensor_gtp.planner.model import PRESETS

# Of the errors of a kind, what their median may be.
MOST = dict(zip(ranges.KINDS, (0.06, 0.12, 0.15, 0.15, 0.2, 0.2), strict=True))


def test_ranges_of_published_rows() -> None:
    found = list(ranges.rows())
    assert ranges.section(found) in PAGE.read_text()
    assert sum(ranges.left_out(found)) >= 0.85 * len(found)
    assert all(row.holds for row in found)
    for ground, most in MOST.items():
        assert statistics.median(abs(row.factor - 1) for row in found if row.kind == ground.kind) <= most, ground
    errors = [abs(row.factor - 1) for row in found if row.kind.startswith("experts")]
    assert len(errors) == 3
    assert max(errors) < 0.2


def test_gains_of_8_bit_with_tp_are_those_of_the_runs() -> None:
    """Tensorwise over bf16, of 8B and 70B, and rowwise over tensorwise, 0.74."""
    answers = ranges.answers()
    found = {row["name"]: (answers[row["name"]].tokens_per_s, row["tokens_per_s"]) for row in ranges.content()["rows"]}
    small, large = "L3-8B 64 FSDP8 TP8 {} sel-op", "L3-70B 256 FSDP32 TP8 {}"
    for name, first, second in (
        (small, "fp8 tensorwise", "bf16"),
        (large, "fp8 tensorwise", "bf16"),
        (large, "fp8 rowwise", "fp8 tensorwise"),
    ):
        pairs = zip(found[name.format(first)], found[name.format(second)], strict=True)
        predicted, measured = (one / other for one, other in pairs)
        assert predicted == pytest.approx(measured, rel=0.1)
        assert (predicted > 1) == (measured > 1)


def test_there_is_no_range_without_ground() -> None:
    job, layout = Job(8, seq_len=262144), Layout(gtp=8)
    found = ground_of(Problem(job, PRESETS["llama3-8b"], load_machine("h100")), layout, filled=0.5)
    assert isinstance(found, str)
    assert "262144 tokens" in found
    machine = load_machine("rtx-pro-6000")
    answer = evaluate(Problem(Job(8), PRESETS["llama3-8b"], machine), Layout(gtp=8))
    assert answer.range_ms is None


def test_a_full_gpu_widens_the_range() -> None:
    problem = Problem(Job(8), PRESETS["llama3-8b"], load_machine("h100"))
    free, full = (ground_of(problem, Layout(gtp=8), filled=filled) for filled in (0.5, 0.95))
    assert not isinstance(free, str)
    assert not isinstance(full, str)
    assert full.most > free.most


def test_memory_of_published_runs() -> None:
    """Torchtitan's 18 peaks, with tp, pp and cp too."""
    found = [error for each in ranges.memory_errors().values() for error in each]
    assert len(found) == 18
    assert max(map(abs, found)) < 0.1


def test_no_published_layout_is_refused() -> None:
    """All 40 of them ran: each has room, or could have with leaner code."""
    assert not [name for name, answer in ranges.answers().items() if not answer.may_fit]
