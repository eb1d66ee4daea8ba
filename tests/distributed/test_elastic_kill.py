"""Ranks are killed with ``kill -9`` in the middle of a step; the others go on in their processes, without a checkpoint.

Each process is a rank of its own, not of the harness that the other tests share: it does not survive what happens here.
The store lives in the test's process, as it lives in the agent of ``torchrun``.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from test_elastic_checkpoint import Job, Reference, job_state
from torch.distributed.checkpoint.state_dict import set_state_dict

from dtensor_gtp.elastic import ReplicaSync, hold_state, nonuniform_mesh, recover_state, regroup, replicas_of

NUM_STEPS = 4
# Ranks without a connection to the dead one notice when their collective times out; others wait for them that long.
TIMEOUT = timedelta(seconds=8)
GRACE = timedelta(seconds=12)


class Fault:
    """Where in which step a rank is struck.

    Args:
        num_ranks: Of the job at the time; a step that is done again with fewer ranks is not struck again.
        step: Counted from 0.
        rank: As it is counted at the time.
        point: ``forward``, ``backward``, ``sync`` or ``updated`` (after the optimizer).
    """

    def __init__(self, num_ranks: int, step: int, rank: int, point: str) -> None:
        self.place = (num_ranks, step, rank, point)

    def strike(self, *args: Any) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Striker:
    """Strikes this process at the point that is its turn in a step."""

    def __init__(self, faults: list[Fault]) -> None:
        self.faults = faults

    def at(self, step: int, point: str) -> Callable[..., None] | None:
        for fault in self.faults:
            if fault.place == (dist.get_world_size(), step, dist.get_rank(), point):
                return fault.strike
        return None

    def reach(self, step: int, point: str) -> None:
        strike = self.at(step, point)
        if strike is not None:
            strike()

    def arm(self, model: nn.Module, step: int) -> list[Any]:
        """Hooks within forward and backward."""
        handles = []
        forward, backward, sync = (self.at(step, point) for point in ("forward", "backward", "sync"))
        if forward is not None:
            handles.append(model.get_submodule("norm").register_forward_hook(forward))
        if backward is not None:
            handles.append(
                model.get_submodule("embedding").register_forward_hook(
                    lambda m, a, out: out.register_hook(backward) and None
                )
            )
        if sync is not None:
            mock.patch.object(ReplicaSync, "finish", sync).start()
        return handles


def train(job: Job, striker: Striker, done: list[int]) -> None:
    """Train until the last step; ``done[0]`` counts."""
    while done[0] < NUM_STEPS:
        handles = striker.arm(job.model, done[0])
        job.backward(done[0])
        for handle in handles:
            handle.remove()
        job.optimizer.step()
        done[0] += 1
        job.optimizer.zero_grad()
        striker.reach(done[0] - 1, "updated")


def go_on(rank: int, replicas: Sequence[Sequence[int]], port: int, faults: list[Fault]) -> None:
    """What a job does: train; on a failure hold the state, regroup, recover, train on."""
    store = dist.TCPStore("localhost", port, is_master=False, timeout=timedelta(seconds=60))
    num_ranks = sum(map(len, replicas))
    dist.init_process_group(
        "gloo", store=dist.PrefixStore("first", store), rank=rank, world_size=num_ranks, timeout=TIMEOUT
    )
    striker, done, held, is_ready = Striker(faults), [0], None, False
    for generation in range(10):
        try:
            mesh = nonuniform_mesh("cpu", replicas=replicas)
            job = Job(mesh, seed=generation)
            if generation:
                state = job_state(job.model, job.optimizer)
                done[0] = recover_state(held, state, mesh)
                set_state_dict(
                    job.model, job.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
                )
            is_ready = True
            job.sync.check_values()
            train(job, striker, done)
            break
        except RuntimeError:
            if is_ready:  # else what was held before is all there is
                held, is_ready = hold_state(job_state(job.model, job.optimizer), step=done[0]), False
        layout = replicas_of(replicas)
        survivors = regroup(layout, dist.get_rank(), store, generation=generation, grace=GRACE, timeout=TIMEOUT)
        replicas = survivors.replicas
    job.check(Reference(NUM_STEPS))
    dist.barrier()
    dist.destroy_process_group()


def run_rank(rank: int, *args: Any) -> None:
    torch.set_num_threads(1)
    try:
        go_on(rank, *args)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # threads of groups that broke are not waited for


def run_job(replicas: list[list[int]], faults: list[Fault]) -> list[int | None]:
    """Exit codes of all ranks."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    num_ranks = sum(map(len, replicas))
    context = multiprocessing.get_context()
    processes = [
        context.Process(target=run_rank, args=(rank, replicas, store.port, faults), daemon=True)
        for rank in range(num_ranks)
    ]
    for process in processes:
        process.start()
    end = time.monotonic() + 100
    for process in processes:
        process.join(max(end - time.monotonic(), 0))
    codes = [process.exitcode for process in processes]
    for process in processes:
        if process.is_alive():
            process.kill()
    return codes


@pytest.mark.soak  # waits out real time limits, so a loaded machine may fail it
@pytest.mark.skipif(torch.cuda.is_available(), reason="workers are forked")
def test_job_goes_on_in_memory_when_ranks_are_killed() -> None:
    """Two ranks of three die one after the other, when some ranks may have updated their weights; the last one ends
    the job alone."""
    codes = run_job([[0, 1], [2]], [Fault(3, 1, 1, "sync"), Fault(2, 2, 0, "updated")])
    assert sorted(map(str, codes)) == ["-9", "-9", "0"], codes


if __name__ == "__main__":
    test_job_goes_on_in_memory_when_ranks_are_killed()
