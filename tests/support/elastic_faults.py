"""Jobs whose ranks are killed, stopped or raise, and the processes that they run in. The library knows nothing of it.

Each process is a rank of its own, not of the harness that the other tests share: it does not survive what happens here.
The store lives in the test's process, as it lives in the agent of ``torchrun``. So does the job's time, which
``elastic_time`` describes.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import traceback
import uuid
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from datetime import timedelta
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_common import job_state, set_job_state
from cuda_common import take_gpu
from elastic_time import TICK, JobClock, Pacemaker, ends_collectives
from processes import set_up_process, start
from test_elastic_checkpoint import Job, Reference
from torch.distributed.checkpoint.state_dict import set_model_state_dict

from dtensor_gtp.elastic import (
    HeldState,
    RanksLostError,
    RankWatch,
    ReplicaSavePlanner,
    ReplicaSync,
    StateLostError,
    Survivors,
    hold_state,
    join,
    nonuniform_mesh,
    num_waiting,
    recover_state,
    replicas_of,
)

# Of collectives, from when a rank is known to be lost: a rank that shares no connection with it waits so long.
TIMEOUT = timedelta(seconds=6)
# Of a rank that is silent.
LIMIT = timedelta(seconds=3)
# Longer than any job takes: who is alive is waited for.
GRACE = timedelta(days=365)
# Ends what hangs. By the machine's clock, unlike those above.
HANG = timedelta(seconds=300)
# What docs/guides/fault_tolerance.md asks for where NCCL communicates.
WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
POINTS = ("forward", "backward", "sync", "optimizer", "updated", "checkpoint")


@dataclass(frozen=True)
class Fault:
    """Where in which step a rank is struck, and how."""

    step: int  # counted from 0
    rank: int  # as it is counted at the time
    point: str  # one of ``POINTS``; ``updated`` is after the optimizer, ``checkpoint`` while files are written
    kind: str = "kill"  # ``kill`` and ``stop`` are the signals; ``raise`` an exception
    generation: int = 0  # a step that is done again after a failure is not struck again

    def strike(self, job_clock: JobClock, *args: Any, **kwargs: Any) -> None:
        if self.kind == "raise":
            raise ValueError(f"struck in {self.point}")
        if self.kind == "stop":
            job_clock.announce_stop()
        os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)


@dataclass(frozen=True)
class Setup:
    """What all processes of a job are told."""

    port: int
    replicas: tuple[tuple[int, ...], ...]
    faults: tuple[Fault, ...] = ()
    path: Path | None = None  # where checkpoints are written after each second step; None for none
    num_steps: int | None = 5  # how many to train; None until the store has ``stop``
    min_ranks: int = 1  # steps wait until there are so many
    device: str = "cpu"  # ``cuda`` gives each rank a GPU of its own, with NCCL between them
    # of process groups, by the machine's clock: how long a rank waits for one that is lost while they connect
    timeout: timedelta = HANG

    @property
    def backend(self) -> str:
        return "gloo" if self.device == "cpu" else "nccl"


@dataclass
class Progress:
    """What a process keeps from one generation to the next."""

    clock: JobClock
    step: int = 0
    held: HeldState | None = None
    is_ready: bool = False
    patches: list[Any] = field(default_factory=list)


def go_on(setup: Setup, store: dist.Store, rank: int | None, job_clock: JobClock) -> None:
    """What a job does: train; on a failure hold the state, regroup, recover, train on. A rank that joins has none."""
    progress = Progress(job_clock)
    replicas, generation = setup.replicas, 0
    if rank is None:
        survivors, watch = join(
            store,
            grace=GRACE,
            backend=setup.backend,
            timeout=setup.timeout,
            limit=LIMIT,
            num_replicas=len(setup.replicas),
        )
        assert watch is not None
        replicas, generation = survivors.replicas, survivors.generation
    else:
        layout = replicas_of(replicas)
        first = dist.PrefixStore("first", store)
        dist.init_process_group(
            setup.backend, store=first, rank=rank, world_size=layout.num_ranks, timeout=setup.timeout
        )
        watch = RankWatch(layout, rank, store, limit=LIMIT)
    store.set(_member(os.getpid()), "1")
    job: Job | None = None
    while True:
        try:
            with watch, limited(watch, progress, setup):
                mesh = nonuniform_mesh(setup.device, replicas=replicas)
                job = Job(mesh, seed=generation)
                if generation:
                    recover(job, progress, setup)
                    store.set("recovered", str(progress.step))
                progress.is_ready = True
                job.sync.check_values()
                if train(job, progress, setup, watch):
                    break
        except RuntimeError as error:
            if isinstance(error, RanksLostError):
                store.set(f"error/{generation}/{watch.rank}", str(error))
        survivors = leave(job, progress, watch, setup)
        replicas, generation = survivors.replicas, survivors.generation
    assert job is not None
    job.check(Reference(progress.step, setup.device))
    store.set("steps", str(progress.step))
    dist.barrier()
    watch.close()
    dist.destroy_process_group()


def limited(watch: RankWatch, progress: Progress, setup: Setup) -> AbstractContextManager[None]:
    """The time limit of gloo's collectives. Those of NCCL are aborted when a rank is silent."""
    if setup.device != "cpu":
        return nullcontext()
    return ends_collectives(progress.clock, watch, TIMEOUT.total_seconds(), setup.port)


def leave(job: Job | None, progress: Progress, watch: RankWatch, setup: Setup) -> Survivors:
    for patch in progress.patches:
        patch.stop()
    progress.patches.clear()
    if progress.is_ready and job is not None:  # else what was held before is all there is
        progress.held = hold_state(job_state(job.model, job.optimizer), step=progress.step)
    progress.is_ready = False
    return watch.regroup(grace=GRACE, timeout=setup.timeout, num_replicas=len(setup.replicas))


def recover(job: Job, progress: Progress, setup: Setup) -> None:
    """From memory; where that has lost a part, from the last checkpoint or the beginning."""
    state = job_state(job.model, job.optimizer)
    try:
        progress.step = recover_state(progress.held, state, job.mesh)  # type: ignore[arg-type]
    except StateLostError:
        latest = latest_checkpoint(setup.path)
        if latest is None:
            progress.step = 0
            set_model_state_dict(job.model, Job(job.mesh, seed=0).model.state_dict())
            job.optimizer.state.clear()  # job_state() has made one, which counts a step
            return
        progress.step = int(latest.name.partition("-")[2])
        dcp.load(state, checkpoint_id=latest)
    set_job_state(job.model, job.optimizer, state)


def train(job: Job, progress: Progress, setup: Setup, watch: RankWatch) -> bool:
    """Whether training is at its end; else there are ranks to take in."""
    mesh, store = job.mesh, watch.store
    while True:
        news = torch.tensor([0, 0], device=setup.device)
        if dist.get_rank() == 0:
            news = torch.tensor([num_waiting(store), int(store.check(["stop"]))], device=setup.device)
        dist.broadcast(news, 0)
        if progress.step == setup.num_steps or int(news[1]):
            return True
        if int(news[0]):
            return False
        if mesh.layout.num_ranks < setup.min_ranks and setup.num_steps is not None:  # type: ignore[union-attr]
            progress.clock.sleep(TICK)
            continue
        train_step(job, progress, setup, watch)


def train_step(job: Job, progress: Progress, setup: Setup, watch: RankWatch) -> None:
    step, generation = progress.step, watch.generation

    def strike(point: str) -> Callable[..., None] | None:
        for fault in setup.faults:
            if (fault.generation, fault.step, fault.rank, fault.point) == (generation, step, dist.get_rank(), point):
                return partial(fault.strike, progress.clock)
        return None

    model: Any = job.model
    if (struck := strike("forward")) is not None:
        model.norm.register_forward_hook(struck)
    if (in_backward := strike("backward")) is not None:
        model.embedding.register_forward_hook(lambda m, a, out: out.register_hook(in_backward) and None)
    if (struck := strike("sync")) is not None:
        patch(progress, ReplicaSync, "finish", struck)
    job.backward(progress.step)
    if (struck := strike("optimizer")) is not None:
        job.optimizer.register_step_pre_hook(struck)
    watch.commit()
    job.optimizer.step()
    progress.step += 1
    if (struck := strike("updated")) is not None:
        struck()
    job.optimizer.zero_grad()
    if setup.path is not None and progress.step % 2 == 0:
        if (struck := strike("checkpoint")) is not None:
            patch(progress, dcp.filesystem.FileSystemWriter, "write_data", struck)
        save(job, setup.path, progress.step)


def patch(progress: Progress, owner: Any, name: str, struck: Callable[..., None]) -> None:
    patched = mock.patch.object(owner, name, struck)
    patched.start()
    progress.patches.append(patched)


def save(job: Job, path: Path, step: int) -> None:
    """Complete or absent: renamed when all have written."""
    unfinished = path / f"{step}.tmp.{uuid.uuid4().hex}"
    names = [str(unfinished)]
    dist.broadcast_object_list(names, 0)
    planner = ReplicaSavePlanner(job.mesh)  # type: ignore[arg-type]
    dcp.save(job_state(job.model, job.optimizer), checkpoint_id=names[0], planner=planner)
    if dist.get_rank() == 0 and not (path / f"step-{step}").exists():
        Path(names[0]).rename(path / f"step-{step}")


def latest_checkpoint(path: Path | None) -> Path | None:
    found = list(path.glob("step-*")) if path is not None else []
    return max(found, key=lambda p: int(p.name.partition("-")[2]), default=None)


def _member(pid: int) -> str:
    return f"member/{pid}"


def run_rank(setup: Setup, rank: int | None, place: int, pacemaker: Connection) -> None:
    torch.set_num_threads(1)
    set_up_process()
    job_clock = JobClock(pacemaker)
    job_clock.patched().start()
    if setup.device == "cuda":
        take_gpu(place)
        os.environ.update(WATCHDOG)
        torch.zeros(1, device="cuda")  # as RankWatch asks for, before the watch is made
    if setup.num_steps is None or setup.device == "cuda":
        torch.set_default_dtype(torch.float64)  # over many steps another order of sums would show
    try:
        store = dist.TCPStore("localhost", setup.port, is_master=False, timeout=HANG)
        go_on(setup, store, rank, job_clock)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)
    os._exit(0)  # threads of groups that broke are not waited for


class FaultyJob:
    """The processes of a job, and the store that outlives them."""

    def __init__(self, replicas: Sequence[Sequence[int]], faults: Sequence[Fault] = (), **options: Any) -> None:
        self.store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        self.setup = Setup(self.store.port, tuple(map(tuple, replicas)), tuple(faults), **options)
        self.clock = Pacemaker()
        self.processes: list[Any] = []
        self._times: dict[Any, Connection] = {}
        for rank in range(sum(map(len, replicas))):
            self.add(rank, rank)

    def add(self, rank: int | None = None, place: int = 0) -> Any:
        """A process of the first ranks, or one that joins; where ranks have GPUs, say a place that is free."""
        # not forked from this process, whose threads (torch's, the store's) may hold locks at that moment
        context = multiprocessing.get_context("forkserver")
        mine, theirs = self.clock.connect()
        process = context.Process(target=run_rank, args=(self.setup, rank, place, theirs), daemon=True)
        start(process)
        theirs.close()  # else the end of the process would not show
        self.clock.add(mine)
        self.processes.append(process)
        self._times[process] = mine
        return process

    def is_member(self, process: Any) -> bool:
        """Whether the ranks of the job have taken a process in, or it has been one of the first."""
        return self.store.check([_member(process.pid)])

    def wake(self, process: Any) -> None:
        """One that was stopped."""
        os.kill(process.pid, signal.SIGCONT)
        self.clock.add(self._times[process])

    def wait_for(self, process: Any) -> None:
        """The end of a process."""
        process.join(HANG.total_seconds())
        assert process.exitcode is not None, "the process hangs"

    def wait(self) -> list[int | None]:
        """Exit codes of all processes; those that hang have None, and are killed."""
        for process in self.processes:
            process.join(HANG.total_seconds())
        codes = [process.exitcode for process in self.processes]
        self.kill()
        return codes

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
                process.join()
        self.clock.stop()

    def errors(self, generation: int = 0) -> dict[int, str]:
        """What ranks reported of lost ranks."""
        names = {rank: f"error/{generation}/{rank}" for rank in range(sum(map(len, self.setup.replicas)))}
        return {rank: self.store.get(name).decode() for rank, name in names.items() if self.store.check([name])}
