"""Times of operations and collectives on a machine, in milliseconds: each alone, and of tasks that slow each other.

A rank has streams, each of which runs its tasks in order. A task begins when the one before it in its stream, the tasks
that it waits for and the host that launches it are done. Rates are constant between two events, so results are exact.
"""

from __future__ import annotations

import functools
import math
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from itertools import pairwise
from typing import NamedTuple

from .errors import PlanError
from .machine import ATTENTION_LENGTHS, Contention, Link, Machine
from .recorder import Kind, Op

_PER_GB_S = 1e-6  # milliseconds for a byte at 1 GB/s


class Axis(NamedTuple):
    size: int
    stride: int  # between two of them


class Wire(NamedTuple):
    is_fast: bool  # whether all of it is behind the fast link
    gb_s: float  # what a rank receives in a second
    start_ms: float  # until the first byte arrives


class Work(NamedTuple):
    """What one piece of a pass takes on the compute stream, in order: compute, then a collective, and so on."""

    ms: float  # time
    axis: str  # whose collective it is; empty for compute
    host_ms: float  # time of the host to launch it
    nbytes: float = 0  # what a collective makes on each rank


@dataclass(frozen=True)
class Costs:
    machine: Machine  # the machine
    axes: Mapping[str, Axis] = field(default_factory=dict)  # the groups of a layout by the name of their axis
    precision: str = "bf16"  # what GEMMs of the blocks compute in: "bf16", "float8" or "float4"
    is_compiled: bool = False  # whether blocks are compiled, so that elementwise kernels are fused
    is_rowwise: bool = False  # whether float8 GEMMs have a scale for each row
    seq_len: int = 0  # tokens of a sequence on one rank: kernels of attention reach less at long ones
    choices: int = 0  # experts of a token, where it goes once to each of their hosts; 0 where it goes to each expert

    def axis(self, name: str) -> Axis:
        return self.axes.get(name, Axis(1, 1))

    def gemm_ms(self, op: Op, precision: str = "bf16") -> float:
        """One kernel, which reaches of the peak what a GEMM of the size of one of its groups does."""
        if not op.flops:
            return 0
        compute = self.machine.compute
        peaks = self.machine.peak_tflops
        if precision not in peaks:
            only = f"only in {', '.join(peaks)}. Name another recipe, or one with :dequantize."
            raise PlanError(f"{self.machine.name} has no peak for GEMMs in {precision}, {only}")
        curve = compute.float8_gemm
        if precision == "bf16":
            curve = compute.gemm
        elif self.is_rowwise:
            curve = compute.float8_rowwise_gemm
        share = _share(curve, op.flops / op.groups)
        if op.is_ragged:
            share *= compute.ragged
        return compute.kernel_us / 1e3 + op.flops / (peaks[precision] * share) * 1e-9

    def memory_ms(self, nbytes: float, share: float = 0.0) -> float:
        """One kernel that reads and writes so many bytes, at this share of the memory's bandwidth."""
        rate = self.machine.hbm_gb_s * (share or self.machine.compute.hbm)
        if nbytes:
            return self.machine.compute.kernel_us / 1e3 + nbytes / rate * _PER_GB_S
        return 0

    def cast_ms(self, nbytes: float) -> float:
        return self.memory_ms(nbytes, self.machine.compute.cast)

    def op_ms(self, op: Op) -> float:
        if op.kind is Kind.GEMM:
            return self.gemm_ms(op)
        if op.kind is Kind.ATTENTION:
            compute = self.machine.compute
            shares = compute.attention, compute.attention_long or compute.attention
            share = _share(tuple(zip(ATTENTION_LENGTHS, shares, strict=True)), max(self.seq_len, 1))
            return compute.kernel_us / 1e3 + op.flops / (self.machine.peak_tflops["bf16"] * share) * 1e-9
        if op.kind is Kind.MEMORY:
            return self.memory_ms(op.nbytes)
        return 0

    def works(self, ops: Iterable[Op], *, is_block: bool = True) -> list[Work]:
        """Compute between two collectives is one piece. ``is_block``: of a block, which may be compiled."""
        factor = 1.0
        if self.is_compiled and is_block:
            factor = self.machine.compute.fused
        op_ms = self.machine.host.op_us / 1e3
        works: list[Work] = []
        ms = host = 0.0
        for op in ops:
            if op.kind in (Kind.TP, Kind.CP, Kind.EP):
                works += [Work(ms, "", host)] * bool(ms or host)
                ms = host = 0.0
                axis = self.axis(op.kind.value)
                nbytes = op.nbytes
                if op.kind is Kind.TP and self.precision == "float8" and self.is_compiled and not self.is_rowwise:
                    # Inputs are cast before a gather: half of all messages have half the bytes, one finds the scale.
                    nbytes *= 0.85
                if op.kind is Kind.EP:
                    spent = self.exchange_ms(nbytes, axis)
                else:
                    spent = self.gather_ms(nbytes, axis)
                works.append(Work(spent, op.kind.value, self.machine.host.collective_us / 1e3, nbytes))
                continue
            left = 1.0
            if op.kind in (Kind.MEMORY, Kind.VIEW):
                left = factor
            ms += self.op_ms(op) * left
            host += op_ms * left
        if ms or host:
            return [*works, Work(ms, "", host)]
        return works

    def wire(self, axis: Axis) -> Wire:
        """The fast link, or rings through the network: one for each of the group's members in a domain."""
        network = self.machine.network
        fast = self.machine.fast
        if axis.size * axis.stride <= self.machine.gpus_per_domain:
            return Wire(True, fast.gb_s * fast.share, _start_ms(fast, axis.size - 1))
        members = self.members(axis)
        rate = min(network.gb_s * network.share * members, fast.gb_s * fast.share)
        return Wire(False, rate, _start_ms(network, max(-(-axis.size // members) - 1, 1)))

    def members(self, axis: Axis) -> int:
        return max(min(axis.size, self.machine.gpus_per_domain // axis.stride), 1)

    def gather_ms(self, nbytes: float, axis: Axis) -> float:
        """An all-gather that makes ``nbytes`` on each rank."""
        if axis.size == 1:
            return 0
        wire = self.wire(axis)
        return wire.start_ms + nbytes * (axis.size - 1) / axis.size / wire.gb_s * _PER_GB_S

    scatter_ms = gather_ms  # a reduce-scatter of ``nbytes`` on each rank

    def load(self, axis: Axis, *, is_copy: bool) -> Load:
        if is_copy:
            return Load.COPY
        if self.wire(axis).is_fast:
            return Load.NCCL
        return Load.NETWORK

    def together_ms(
        self, nbytes: float, axis: Axis, num_tensors: int, *, is_copy: bool, is_reduction: bool = False
    ) -> float:
        """Of several tensors in one launch. Copy engines copy for each tensor and peer in turn, behind a barrier."""
        if not is_copy:
            if is_reduction:
                one = self.scatter_ms(nbytes, axis)
            else:
                one = self.gather_ms(nbytes, axis)
            if num_tensors > 1:
                one *= self.machine.contention.grouped
            return one
        link = self.machine.copy
        peers = axis.size - 1
        starts = link.start_us * peers * num_tensors + link.hop_us * peers
        return starts / 1e3 + nbytes * peers / axis.size / (link.gb_s * link.share) * _PER_GB_S

    def reduce_ms(self, nbytes: float, axis: Axis) -> float:
        """An all-reduce: through the network in trees, which start as late as the logarithm of the domains."""
        if axis.size == 1 or self.wire(axis).is_fast:
            return 2 * self.gather_ms(nbytes, axis)
        domains = -(-axis.size // self.members(axis))
        start = _start_ms(self.machine.network, math.log2(max(domains, 2)))
        return 2 * (self.gather_ms(nbytes, axis) - self.wire(axis).start_ms + start)

    def exchange_ms(self, nbytes: float, axis: Axis) -> float:
        """An all-to-all in which each rank sends ``nbytes``, its own part included."""
        if axis.size == 1:
            return 0
        fast = self.machine.fast
        network = self.machine.network
        members = self.members(axis)
        within = nbytes * (members - 1) / axis.size / (fast.gb_s * fast.share) * _PER_GB_S
        sent = nbytes * (axis.size - members) / axis.size
        if self.choices:  # to how many other domains, if experts are chosen at random
            domains = axis.size / members
            sent = nbytes / self.choices * (domains - 1) * (1 - (1 - 1 / domains) ** self.choices)
        beyond = sent / (network.gb_s * network.share) * _PER_GB_S
        farthest = network
        if members == axis.size:
            farthest = fast
        return max(within, beyond) + _start_ms(farthest, 1)


def _start_ms(link: Link, hops: float) -> float:
    return (link.start_us + link.hop_us * hops) / 1e3


@functools.lru_cache(maxsize=4096)
def _share(points: Sequence[tuple[float, float]], flops: float) -> float:
    """The share of the peak at ``flops``, or at a length, interpolated over their logarithm."""
    if flops <= points[0][0]:
        return points[0][1]
    for (least, share), (most, next_share) in pairwise(points):
        if flops <= most:
            return share + (next_share - share) * (math.log(flops / least) / math.log(most / least))
    return points[-1][1]


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
    begin: float
    end: float


def simulate(tasks: Sequence[Task], contention: Contention) -> list[Span]:
    """When each task runs. Raises ValueError where a task waits for a later one."""
    queues: dict[Stream, deque[int]] = {}  # what has not ended
    for number, task in enumerate(tasks):
        if any(other >= number for other in task.after):
            raise ValueError(f"simulate expects tasks that wait for earlier ones, but task {number} does not.")
        queues.setdefault(task.stream, deque()).append(number)
    begins: dict[int, float] = {}
    ends: dict[int, float] = {}
    left: dict[int, float] = {}  # running tasks, and what is left of them
    now = 0.0
    while any(queues.values()):
        next_launch = math.inf
        for number in [queue[0] for queue in queues.values() if queue and queue[0] not in left]:
            if all(other in ends for other in tasks[number].after):
                if tasks[number].launch_ms > now + 1e-12:
                    next_launch = min(next_launch, tasks[number].launch_ms)
                else:
                    begins[number], left[number] = now, tasks[number].ms
        if not left:
            now = next_launch
            continue
        speeds = _rates(contention, tuple(tasks[number].load for number in left))
        ends_first = min(amount / speed for amount, speed in zip(left.values(), speeds, strict=True))
        first = min(ends_first, next_launch - now)
        now += first
        for number, speed in zip(list(left), speeds, strict=True):
            left[number] -= first * speed
            if left[number] <= 1e-9:
                del left[number]
                ends[number] = now
                queues[tasks[number].stream].popleft()
    return [Span(begins[number], ends[number]) for number in range(len(tasks))]


_KERNELS = (Load.COMPUTE, Load.KERNEL)
_FAST = (Load.NCCL, Load.COPY)


@functools.lru_cache(maxsize=4096)
def _rates(c: Contention, loads: tuple[Load, ...]) -> list[float]:
    """How fast tasks of these loads run beside each other."""
    return [1 / _factor(c, load, loads[:number] + loads[number + 1 :]) for number, load in enumerate(loads)]


def _factor(c: Contention, load: Load, others: tuple[Load, ...]) -> float:
    factor = 1.0
    num_kernels = sum(other in _KERNELS for other in others)
    if load in _KERNELS:
        if Load.NCCL in others or Load.NETWORK in others:
            factor *= c.gemm_beside_nccl
        if Load.COPY in others:
            factor *= c.gemm_beside_copy
        return factor * (1 + (c.kernel - 1) * num_kernels)
    if num_kernels and load is Load.COPY:
        factor *= c.copy_beside_gemm
    elif num_kernels:
        factor *= c.nccl_beside_gemm
    sharing = sum((other in _FAST) == (load in _FAST) and other not in _KERNELS for other in others)
    return factor * (1 + (c.wire - 1) * sharing)
