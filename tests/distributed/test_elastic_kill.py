"""Ranks are killed, stopped or raise in the middle of a step; the others go on in their processes."""

from __future__ import annotations

import os
import signal

import pytest
import torch
from elastic_faults import LIMIT, TIMEOUT, Fault, FaultyJob

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="workers are forked")

# How late a process may be that shares its core with others.
SLACK = 10.0


def test_a_killed_rank_is_named_and_the_others_go_on() -> None:
    job = FaultyJob([[0, 1], [2]], [Fault(1, 1, "sync")])
    codes = job.wait()
    assert codes == [0, -9, 0]
    errors = job.errors()
    assert set(errors) == {0, 2}
    for text, seconds in errors.values():
        assert text.startswith("rank 1 (replica 0, gtp 1, tp 0) was silent for 3 seconds")
        assert seconds < TIMEOUT.total_seconds() + LIMIT.total_seconds() + SLACK


def test_a_stopped_rank_is_named_and_left_behind() -> None:
    """It breaks no connection: the time limit ends the collectives. When it wakes up, it finds that it is out."""
    job = FaultyJob([[0, 1], [2]], [Fault(1, 2, "backward", "stop")])
    for process in job.processes[:2]:
        process.join(90)
    os.kill(job.processes[2].pid, signal.SIGCONT)
    assert job.wait(60) == [0, 0, 1]
    errors = job.errors()
    assert set(errors) == {0, 1, 2}
    for rank in (0, 1):
        assert errors[rank][0].startswith("rank 2 (replica 1, gtp 0, tp 0) was silent")


def test_a_rank_that_raises_is_named_and_a_new_one_takes_its_place() -> None:
    """Its process ends by its own error. A repaired one joins, and the replica has its size again."""
    job = FaultyJob([[0, 1], [2]], [Fault(1, 1, "forward", "raise")], min_ranks=3)
    job.processes[1].join(60)
    job.add()
    assert job.wait() == [0, 1, 0, 0]
    errors = job.errors()
    assert set(errors) == {0, 2}
    for text, _ in errors.values():
        assert text.startswith("rank 1 (replica 0, gtp 1, tp 0) raised ValueError: struck in forward.")
