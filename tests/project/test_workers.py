"""What tests may expect of the processes that they start: who dies or hangs is named, and the rest goes on."""

import faulthandler
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import unittest
from collections.abc import Iterator
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

import processes
import pytest
import torch
import torch.distributed as dist
from common import GlooTest
from processes import start
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import distribute_tensor
from workers import Lanes, Pools

from dtensor_gtp import GTPShard


class Deeds(GlooTest):
    """What workers are told to do below. Not collected as tests: the names do not begin as those of tests do."""

    world_size = 2

    def sum_up(self) -> None:
        total = torch.ones(())
        dist.all_reduce(total)
        assert total == 2

    def die_on_rank_1(self) -> None:
        if self.rank == 1:
            self._die()
        dist.barrier()

    def _die(self) -> None:
        os.kill(os.getpid(), signal.SIGABRT)

    def hang(self) -> None:
        threading.Event().wait()

    def fail_on_rank_0(self) -> None:
        assert self.rank == 1, "a number that is wrong"
        dist.barrier()

    def make_groups_of_their_own(self) -> None:
        """Rank 0 has the second group already, rank 1 has not: after it they have made different numbers of groups."""
        dist.new_group([self.rank], group_desc="mesh_gtp")
        dist.new_group([0], group_desc="mesh_gtp")

    def make_a_group(self) -> None:
        total = torch.ones(())
        dist.all_reduce(total, group=dist.new_group([0, 1], group_desc="mesh_gtp"))
        assert total == 2

    def leave_a_group(self) -> None:
        dist.destroy_process_group(dist.new_group([0, 1], group_desc="mesh_gtp"))

    def make_block_placements_on_rank_0(self) -> None:
        for _ in range(1 - self.rank):
            GTPShard(0, block_size=2)

    def distribute_blocks(self) -> None:
        """With the function that this file has imported, behind the placements of rank 0."""
        assert hasattr(distribute_tensor, "__wrapped__"), "DTensor has not known block placements"
        mesh = init_device_mesh("cpu", (2,))
        held = distribute_tensor(torch.arange(5), mesh, [GTPShard(0, block_size=2)]).to_local()
        assert held.tolist() == ([0, 1, 2, 3], [4])[self.rank]

    def skip(self) -> None:
        raise unittest.SkipTest("nothing to see")

    def demand_another_message(self) -> None:
        with self.assertRaisesRegex(ValueError, "one thing"):
            raise ValueError("another thing")


@pytest.fixture(scope="module")
def pools() -> Iterator[Pools]:
    some = Pools()
    yield some
    some.close()


def _run(pools: Pools, deed: str, **options: float) -> None:
    pools.of(2).run(__name__, "Deeds", deed, **options)


def test_a_pool_lives_on_from_test_to_test(pools: Pools) -> None:
    _run(pools, "sum_up")
    pool = pools.of(2)
    _run(pools, "sum_up")
    with pytest.raises(unittest.SkipTest, match="nothing to see"):
        _run(pools, "skip")
    assert pools.of(2) is pool


def test_groups_meet_whatever_each_worker_has_made_before(pools: Pools) -> None:
    _run(pools, "make_groups_of_their_own")
    for deed in ("make_a_group", "make_a_group", "leave_a_group", "make_a_group"):
        _run(pools, deed)


def test_ranks_import_the_same_functions_whatever_they_have_made_before(pools: Pools) -> None:
    _run(pools, "make_block_placements_on_rank_0")
    _run(pools, "distribute_blocks")


def test_what_goes_wrong_is_named_with_its_stack_and_the_rest_goes_on(pools: Pools) -> None:
    limit: dict[str, float] = {"limit_s": 5}
    for deed, words, options in (
        ("die_on_rank_1", r"Deeds.die_on_rank_1 failed.*rank 1: the worker died.* -6\n.*_die", {}),
        ("hang", r"rank 0: it did not end.* within 5 s.*in hang\n.*rank 1: .*in hang\n", limit),
        ("fail_on_rank_0", r"rank 0: Traceback.*a number that is wrong.*rank 1: .*barrier", {}),
    ):
        _run(pools, "sum_up")
        with pytest.raises(AssertionError, match=f"(?s){words}"):
            _run(pools, deed, **options)
    _run(pools, "sum_up")


def test_the_server_runs_before_there_are_threads_that_need_it(monkeypatch: pytest.MonkeyPatch) -> None:
    lanes = Lanes()
    executors: list[Any] = []
    monkeypatch.setattr(forkserver, "ensure_running", lambda: executors.append(lanes._executor))
    lanes.start([], 1)
    lanes.stop()
    assert executors == [None]


def test_other_threads_that_start_processes_do_not_take_the_exit_status(pools: Pools) -> None:
    """They ask all children of multiprocessing for theirs, which can be read once."""
    is_over = threading.Event()

    def ask() -> None:
        while not is_over.is_set():
            multiprocessing.active_children()

    others = [threading.Thread(target=ask) for _ in range(4)]
    for thread in others:
        thread.start()
    try:
        for _ in range(3):
            with pytest.raises(AssertionError, match="the worker died, exit status -6"):
                _run(pools, "die_on_rank_1")
    finally:
        is_over.set()
        for thread in others:
            thread.join()


def test_daemons_end_with_the_process_that_started_them() -> None:
    """Else this one would not see the end of what they inherit."""
    daemon = "multiprocessing.get_context('fork').Process(target=time.sleep, args=(600,), daemon=True)"
    script = f"import multiprocessing, time; from processes import start; start({daemon})"
    command = [sys.executable, "-c", script]
    subprocess.run(command, cwd=Path(processes.__file__).parent, check=True, stdout=subprocess.PIPE, timeout=60)


def test_messages_of_errors_are_compared(pools: Pools) -> None:
    """torch's test classes compare none on a device that they do not know."""
    with pytest.raises(AssertionError, match='"one thing" does not match "another thing"'):
        _run(pools, "demand_another_message")


def _tell_whether_crashes_are_reported() -> None:
    sys.exit(0 if faulthandler.is_enabled() else 1)


def test_a_process_that_crashes_would_say_where() -> None:
    process = multiprocessing.Process(target=_tell_whether_crashes_are_reported)
    start(process)
    process.join()
    assert process.exitcode == 0
