"""Runs tasks on streams that share a GPU and its links: who waits for whom, and who slows whom.

Each stream runs its tasks in order. A task begins when the one before it in its stream, the tasks that it waits for and
the host that launches it are done. Tasks that run at the same time slow each other, as ``machine.Contention`` says.
Their rates are constant between two events, so the result is exact.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple

from .machine import Contention


class Stream(IntEnum):
    """The streams of a rank. The host launches, so its order is that of the tasks."""

    COMPUTE = 0
    GATHER = 1
    EXPERT_GATHER = 2
    CAST = 3
    SCATTER = 4
    FINISH = 5


class Load(IntEnum):
    COMPUTE = 0  # SMs, by GEMMs and what is between them
    KERNEL = 1  # SMs, beside the compute stream
    NCCL = 2  # the fast link and some SMs
    COPY = 3  # the fast link alone
    NETWORK = 4  # the network and some SMs


class Task(NamedTuple):
    stream: Stream  # where it runs
    load: Load  # what it occupies
    ms: float  # how long it takes alone
    after: tuple[int, ...] = ()  # numbers of earlier tasks that it waits for, of any stream
    launch_ms: float = 0.0  # when the host has launched it
    label: str = ""  # for people
    cause: str = ""  # under what its time counts if compute waits for it


class Span(NamedTuple):
    """When a task ran, in milliseconds."""

    begin: float
    end: float


def simulate(tasks: Sequence[Task], contention: Contention) -> list[Span]:
    """When each task runs. Raises ValueError where a task waits for a later one."""
    waiting, followers = _order(tasks)
    ready = [number for number, count in enumerate(waiting) if not count]
    begins, ends = [0.0] * len(tasks), [0.0] * len(tasks)
    left: dict[int, float] = {}  # running tasks, and what is left of them
    now = 0.0

    def end(number: int) -> None:
        ends[number] = now
        for follower in followers[number]:
            waiting[follower] -= 1
            if not waiting[follower]:
                ready.append(follower)

    while ready or left:
        not_launched = []
        while ready:
            number = ready.pop()
            begins[number] = now
            if tasks[number].launch_ms > now + 1e-12:
                not_launched.append(number)
            elif tasks[number].ms > 0:
                left[number] = tasks[number].ms
            else:
                end(number)
        ready += not_launched
        next_launch = min((tasks[number].launch_ms for number in ready), default=math.inf)
        if not left:
            now = next_launch
            continue
        speeds = _rates(contention, tuple(tasks[number].load for number in left))
        first = min(amount / speed for amount, speed in zip(left.values(), speeds, strict=True))
        first = min(first, next_launch - now)
        now += first
        for number, speed in zip(list(left), speeds, strict=True):
            left[number] -= first * speed
            if left[number] <= 1e-9:
                del left[number]
                end(number)
    return [Span(begin, end) for begin, end in zip(begins, ends, strict=True)]


def _order(tasks: Sequence[Task]) -> tuple[list[int], list[list[int]]]:
    """Of each task, how many others it waits for, the one before it in its stream too, and which wait for it."""
    waiting = [0] * len(tasks)
    followers: list[list[int]] = [[] for _ in tasks]
    last: dict[Stream, int] = {}
    for number, task in enumerate(tasks):
        if any(other >= number for other in task.after):
            raise ValueError(f"simulate expects tasks that wait for earlier ones, but task {number} does not.")
        before = {*task.after, *([last[task.stream]] if task.stream in last else [])}
        waiting[number] = len(before)
        for other in before:
            followers[other].append(number)
        last[task.stream] = number
    return waiting, followers


_KERNELS, _FAST = (Load.COMPUTE, Load.KERNEL), (Load.NCCL, Load.COPY)


@functools.lru_cache(maxsize=4096)
def _rates(c: Contention, loads: tuple[Load, ...]) -> list[float]:
    """How fast tasks of these loads run beside each other."""
    return [1 / _factor(c, load, loads[:number] + loads[number + 1 :]) for number, load in enumerate(loads)]


def _factor(c: Contention, load: Load, others: tuple[Load, ...]) -> float:
    factor, num_kernels = 1.0, sum(other in _KERNELS for other in others)
    if load in _KERNELS:
        factor *= c.gemm_beside_nccl if Load.NCCL in others or Load.NETWORK in others else 1
        factor *= c.gemm_beside_copy if Load.COPY in others else 1
        return factor * (1 + (c.kernel - 1) * num_kernels)
    if num_kernels:
        factor *= c.copy_beside_gemm if load is Load.COPY else c.nccl_beside_gemm
    sharing = sum((other in _FAST) == (load in _FAST) and other not in _KERNELS for other in others)
    return factor * (1 + (c.wire - 1) * sharing)
