"""Jobs whose ranks are killed, stopped or raise, and the processes that they run in. The library knows nothing of it.

Each process is a rank of its own, not of the harness that the other tests share: it does not survive what happens here.
The store lives in the test's process, as it lives in the agent of ``torchrun``.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from checkpoint_common import job_state
from cuda_common import take_gpu
from test_elastic_checkpoint import Job, Reference
from torch.distributed.checkpoint.state_dict import set_model_state_dict, set_state_dict

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

# Of process groups: a rank that shares no connection with the one that is gone waits so long.
TIMEOUT = timedelta(seconds=6)
# Of a rank that is silent. Threads of processes that share two cores with others may be late by a second.
LIMIT = timedelta(seconds=3)
GRACE = timedelta(seconds=60)
# What docs/fault_tolerance.md asks for where NCCL communicates.
WATCHDOG = {
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
    "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
# Between the steps of a job without an end.
PAUSE = 0.2
POINTS = ("forward", "backward", "sync", "optimizer", "updated", "checkpoint")


@dataclass(frozen=True)
class Fault:
    """Where in which step a rank is struck, and how.

    Args:
        step: Counted from 0.
        rank: As it is counted at the time.
        point: One of ``POINTS``; ``updated`` is after the optimizer, ``checkpoint`` while files are written.
        kind: ``kill`` and ``stop`` are the signals; ``raise`` an exception.
        generation: A step that is done again after a failure is not struck again.
    """

    step: int
    rank: int
    point: str
    kind: str = "kill"
    generation: int = 0

    def strike(self, *args: Any, **kwargs: Any) -> None:
        if self.kind == "raise":
            raise ValueError(f"struck in {self.point}")
        os.kill(os.getpid(), signal.SIGKILL if self.kind == "kill" else signal.SIGSTOP)


@dataclass(frozen=True)
class Setup:
    """What all processes of a job are told.

    Args:
        path: Where checkpoints are written after each second step; None for none.
        num_steps: How many to train; None until the store has ``stop``.
        min_ranks: Steps wait until there are so many.
        device: ``cuda`` gives each rank a GPU of its own, with NCCL between them.
    """

    port: int
    replicas: tuple[tuple[int, ...], ...]
    faults: tuple[Fault, ...] = ()
    path: Path | None = None
    num_steps: int | None = 5
    min_ranks: int = 1
    device: str = "cpu"

    @property
    def backend(self) -> str:
        return "gloo" if self.device == "cpu" else "nccl"

    @property
    def timeout(self) -> timedelta:
        """NCCL's collectives are aborted when a rank is silent; to connect takes it longer than gloo."""
        return TIMEOUT if self.device == "cpu" else timedelta(seconds=60)


@dataclass
class Progress:
    """What a process keeps from one generation to the next."""

    step: int = 0
    held: HeldState | None = None
    is_ready: bool = False
    patches: list[Any] = field(default_factory=list)


def go_on(setup: Setup, store: dist.Store, rank: int | None) -> None:
    """What a job does: train; on a failure hold the state, regroup, recover, train on. A rank that joins has none."""
    progress = Progress()
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
        started = time.monotonic()
        try:
            with watch:
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
                report = json.dumps([str(error), time.monotonic() - started])
                store.set(f"error/{generation}/{watch.rank}", report)
        survivors = leave(job, progress, watch, setup)
        replicas, generation = survivors.replicas, survivors.generation
    assert job is not None
    job.check(Reference(progress.step, setup.device))
    store.set("steps", str(progress.step))
    dist.barrier()
    watch.close()
    dist.destroy_process_group()


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
    set_state_dict(job.model, job.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


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
        if setup.num_steps is None:
            time.sleep(PAUSE)
        if mesh.layout.num_ranks < setup.min_ranks and setup.num_steps is not None:  # type: ignore[union-attr]
            time.sleep(0.1)
            continue
        train_step(job, progress, setup, watch)


def train_step(job: Job, progress: Progress, setup: Setup, watch: RankWatch) -> None:
    step, generation = progress.step, watch.generation

    def strike(point: str) -> Callable[..., None] | None:
        for fault in setup.faults:
            if (fault.generation, fault.step, fault.rank, fault.point) == (generation, step, dist.get_rank(), point):
                return fault.strike
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
    partial = path / f"{step}.tmp.{time.monotonic_ns() if dist.get_rank() == 0 else 0}"
    names = [str(partial)]
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


def run_rank(setup: Setup, rank: int | None, place: int) -> None:
    torch.set_num_threads(1)
    if setup.device == "cuda":
        take_gpu(place)
        os.environ.update(WATCHDOG)
        torch.zeros(1, device="cuda")  # to start CUDA may hold the thread that beats for seconds
    if setup.num_steps is None or setup.device == "cuda":
        torch.set_default_dtype(torch.float64)  # over many steps another order of sums would show
    try:
        store = dist.TCPStore("localhost", setup.port, is_master=False, timeout=timedelta(seconds=60))
        go_on(setup, store, rank)
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
        self.processes: list[Any] = []
        for rank in range(sum(map(len, replicas))):
            self.add(rank, rank)

    def add(self, rank: int | None = None, place: int = 0) -> Any:
        """A process of the first ranks, or one that joins; where ranks have GPUs, say a place that is free."""
        # not forked from this process, whose threads (torch's, the store's) may hold locks at that moment
        context = multiprocessing.get_context("forkserver")
        process = context.Process(target=run_rank, args=(self.setup, rank, place), daemon=True)
        process.start()
        self.processes.append(process)
        return process

    def is_member(self, process: Any) -> bool:
        """Whether the ranks of the job have taken a process in, or it has been one of the first."""
        return self.store.check([_member(process.pid)])

    def wait(self, seconds: float = 90) -> list[int | None]:
        """Exit codes of all processes; those that are still there have None, and are killed."""
        end = time.monotonic() + seconds
        for process in self.processes:
            process.join(max(end - time.monotonic(), 0))
        codes = [process.exitcode for process in self.processes]
        self.kill()
        return codes

    def kill(self) -> None:
        for process in self.processes:
            if process.is_alive():
                process.kill()
                process.join()

    def errors(self, generation: int = 0) -> dict[int, tuple[str, float]]:
        """What ranks reported of lost ranks, and how long after the generation began."""
        names = {rank: f"error/{generation}/{rank}" for rank in range(sum(map(len, self.setup.replicas)))}
        return {r: tuple(json.loads(self.store.get(n))) for r, n in names.items() if self.store.check([n])}
