"""Ranks are killed, stopped or raise in the middle of a step; the others go on in their processes."""

import random
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from elastic_faults import POINTS, Fault, FaultyJob
from elastic_time import TICK
from test_elastic_checkpoint import Reference

from dtensor_gtp.elastic import num_waiting

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="runs on CPUs alone")

NUM_KILLS = 50


def check_that_rank_1_is_named(job: FaultyJob, words: str) -> None:
    for rank in (0, 2):
        assert job.errors()[rank].startswith(f"rank 1 (replica 0, gtp 1, tp 0) {words}")


def test_a_killed_rank_is_named_and_a_new_one_takes_its_place() -> None:
    """The others go on in their processes. A repaired one joins, and the replica has its size again."""
    job = FaultyJob([[0, 1], [2]], [Fault(1, 1, "sync")], min_ranks=3, num_steps=3)
    job.wait_for(job.processes[1])
    job.add()
    assert job.wait() == [0, -9, 0, 0]
    assert job.errors().keys() == {0, 2}
    check_that_rank_1_is_named(job, "was silent for 3 seconds")


def test_a_stopped_rank_is_named_and_left_behind() -> None:
    """It breaks no connection: the time limit ends collectives, also those of its neighbour on the gtp axis. When it
    wakes up, it finds that it is out."""
    job = FaultyJob([[0, 1], [2]], [Fault(1, 1, "backward", "stop")], num_steps=3)
    for rank in (0, 2):
        job.wait_for(job.processes[rank])
    assert job.processes[1].is_alive()
    job.wake(job.processes[1])
    assert job.wait() == [0, 1, 0]
    assert job.errors().keys() == {0, 1, 2}
    check_that_rank_1_is_named(job, "was silent")


@pytest.mark.soak
def test_a_rank_that_raises_is_named() -> None:
    """Its process ends by its own error."""
    job = FaultyJob([[0, 1], [2]], [Fault(1, 1, "forward", "raise")], num_steps=3)
    assert job.wait() == [0, 1, 0]
    assert job.errors().keys() == {0, 2}
    check_that_rank_1_is_named(job, "raised ValueError: struck in forward.")


@pytest.mark.soak
@pytest.mark.parametrize("point", POINTS)
@pytest.mark.parametrize("rank", [0, 2])
def test_killed_at_each_point_of_a_step(point: str, rank: int, tmp_path: Path) -> None:
    """One rank of a replica of two, and the only one of another."""
    check_killed([[0, 1], [2]], Fault(3, rank, point), tmp_path)


@pytest.mark.soak
@pytest.mark.parametrize("point", [point for point in POINTS if point != "sync"])
def test_killed_beside_a_replica_that_is_cut_alike(point: str, tmp_path: Path) -> None:
    check_killed([[0, 1], [2, 3]], Fault(3, 3, point), tmp_path)


def test_nobody_updates_where_one_has_no_gradient() -> None:
    """Ranks 0 and 2 sum what they own without the rank that is killed; rank 1, which owns what that did, cannot. If
    those two updated, the second half of the weights would be gone. Without a checkpoint there is memory alone."""
    job = FaultyJob([[0, 1], [2, 3]], [Fault(2, 3, "sync")], num_steps=3)
    assert job.wait() == [0, 0, 0, -9]
    assert int(job.store.get("recovered")) == 2


def check_killed(replicas: list[list[int]], fault: Fault, path: Path) -> None:
    """In memory the job ends like an undisturbed one (each rank compares); the last checkpoint can be read, too."""
    job = FaultyJob(replicas, [fault], path=path, num_steps=6)
    codes = job.wait()
    assert codes == [-9 if r == fault.rank else 0 for r in range(len(codes))], codes
    check_checkpoint(path, 6)


def check_checkpoint(path: Path, least: int) -> None:
    """Every complete checkpoint can be read, and is that of an undisturbed run."""
    found = sorted(int(p.name.partition("-")[2]) for p in path.glob("step-*"))
    assert found, list(path.iterdir())
    assert found[-1] >= least
    reference = Reference(0)
    done = 0
    for step in found:
        reference.train(range(done, step))
        done = step
        state = {"model": {name: torch.zeros_like(p) for name, p in reference.model.state_dict().items()}}
        dcp.load(state, checkpoint_id=path / f"step-{step}", no_dist=True)
        for name, value in reference.model.state_dict().items():
            torch.testing.assert_close(state["model"][name], value)


@pytest.mark.soak
def test_random_ranks_are_killed_fifty_times(tmp_path: Path) -> None:
    """At any time: in a step, while the others regroup, while a new rank joins. Whoever ends is replaced. The ranks
    that are there at the end have the weights of an undisturbed run; where no replica was whole, by a checkpoint."""
    job = FaultyJob([[0, 1], [2, 3]], path=tmp_path, num_steps=None, timeout=timedelta(minutes=2))
    chance = random.Random(0)
    num_kills = 0
    while num_kills < NUM_KILLS:
        job.clock.sleep(chance.uniform(20, 240))
        alive = [process for process in job.processes if process.is_alive()]
        members = [process for process in alive if job.is_member(process)]
        assert members, f"no rank is left of the job after {num_kills} kills, only such as wait to join"
        # One that waits may be killed as well, but somebody must be there to take the others in.
        victims = [process for process in alive if members != [process]]
        if victims:
            chance.choice(victims).kill()
            num_kills += 1
            job.clock.sleep(chance.uniform(0, 40))
        for _ in range(4 - sum(process.is_alive() for process in job.processes)):
            job.add()
    for _ in range(5000):
        if not num_waiting(job.store):
            break
        job.clock.sleep(TICK)
    job.store.set("stop", "1")
    last = [process for process in job.processes if process.is_alive()]
    job.wait()
    codes = [process.exitcode for process in last]
    assert codes.count(0) >= 1, codes
    assert None not in codes, codes
    assert int(job.store.get("steps")) > 10
    torch.set_default_dtype(torch.float64)  # as in the job
    try:
        check_checkpoint(tmp_path, 2)
    finally:
        torch.set_default_dtype(torch.float32)
    print(f"{num_kills} kills, {int(job.store.get('steps'))} steps, exit codes {codes}")
