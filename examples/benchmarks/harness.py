"""What every measurement needs: the processes, the clock, the memory counters and a shared option."""

import argparse
import ast
import gc
import json
import os
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import astuple, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
from dtensor_gtp import _torch_compat as compat
from dtensor_gtp._trace.read import STEP_RANGE
from launch import Place, start

T = TypeVar("T")


@dataclass(frozen=True)
class World:
    """The processes of this job.

    Args:
        rank: this process.
        size: number of processes.
        device: where this process computes.
        control: gloo group over all processes. What the processes tell each other about results and errors goes over
            it, so that no measured communicator carries anything else.
    """

    rank: int
    size: int
    device: torch.device
    control: dist.ProcessGroup

    @property
    def is_cuda(self) -> bool:
        return self.device.type == "cuda"

    def say(self, text: str) -> None:
        """Prints on rank 0."""
        if self.rank == 0:
            print(text, flush=True)

    def synchronize(self) -> None:
        if self.is_cuda:
            torch.cuda.synchronize(self.device)

    def barrier(self) -> None:
        """Waits until every process has finished all it queued on its device."""
        self.synchronize()
        dist.barrier(self.control)

    def slowest(self, values: Iterable[float]) -> list[float]:
        """The maximum over the processes, value by value."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def mean(self, value: float) -> float:
        return self._reduce([value], dist.ReduceOp.SUM)[0] / self.size

    def _reduce(self, values: Iterable[float], op: dist.ReduceOp.RedOpType) -> list[float]:
        tensor = torch.tensor(list(values), dtype=torch.float64)
        dist.all_reduce(tensor, op, group=self.control)
        return tensor.tolist()

    def guarded(self, label: str, work: Callable[[], T]) -> tuple[T | None, str | None]:
        """Runs ``work``; if it raises on any rank, all ranks get its error instead of its result.

        A rank that fails alone in the middle of a collective leaves the others waiting in it; they end with the
        process groups' timeout, and the reason is what the failing rank has printed here.

        Returns:
            (result, None) or (None, the error of the lowest failing rank).
        """
        result: T | None = None
        error: str | None = None
        try:
            result = work()
            self.synchronize()
        except Exception as exc:
            error = f"rank {self.rank}: {type(exc).__name__}: {exc}"
            print(f"[{label}] {error}", file=sys.stderr, flush=True)
            traceback.print_exc()
            # the frames would keep the failed model's memory alive
            traceback.clear_frames(exc.__traceback__)
        errors: list[str | None] = [None] * self.size
        dist.all_gather_object(errors, error, group=self.control)
        first = next((text for text in errors if text is not None), None)
        return (None, first) if first is not None else (result, None)


def init_world(device: str, *, fake_size: int | None = None) -> World:
    """Joins the job that ``torchrun`` started, or makes a job of one process.

    Args:
        device: "auto", "cpu" or "cuda".
        fake_size: without ``torchrun``, act as rank 0 of a fake process group of this size, whose collectives
            communicate nothing.

    Raises:
        RuntimeError: if ``device`` is "cuda" and not every process of this host has a GPU.
    """
    gc.freeze()  # what has been imported is no garbage: release_memory looks at what was made since
    if device == "cpu":
        # read when CUDA is first asked for its devices, which nothing has done so far
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    if fake_size is not None and "RANK" not in os.environ:
        dist.init_process_group("fake", rank=0, world_size=fake_size)
        _keep_activations()
        target = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
        place = Place(0, fake_size, target)
        control = dist.new_group()
    else:
        place = start()
        control = dist.new_group(backend="gloo")
    if device == "cuda" and place.device.type != "cuda":
        raise RuntimeError(
            f"init_world expects a GPU for each process of this host, but got {torch.cuda.device_count()}. "
            "Start fewer processes or pass --device cpu."
        )
    return World(place.rank, place.world_size, place.device, control)


def _keep_activations() -> None:
    """Lets reductions of activations in a fake group give this process its own part. They travel as integers; left as
    they were in memory, they would make the loss anything."""
    reduce_scatter = compat.reduce_scatter_base

    def own_part(output: torch.Tensor, input: torch.Tensor, *options: Any) -> Any:
        if not output.is_floating_point():
            output.copy_(input[: len(output)])
        return reduce_scatter(output, input, *options)

    compat.reduce_scatter_base = own_part


def time_steps(step: Callable[[], object], world: World, steps: int, *, free_running: bool) -> list[float]:
    """Times ``steps`` calls of ``step``.

    On CUDA with events on the current stream. By default the host waits for the device after each step, so that a
    step's time includes filling the device's queue anew; ``free_running`` lets the host run ahead instead.

    Args:
        step: one training step.
        world: the processes; all call this together.
        steps: how many steps to time.
        free_running: do not wait between steps.

    Returns:
        Milliseconds of each step, each that of the slowest process.
    """
    world.barrier()
    if not world.is_cuda:
        marks = [time.perf_counter()]
        for _ in range(steps):
            step()
            marks.append(time.perf_counter())
        return world.slowest((b - a) * 1e3 for a, b in pairwise(marks))
    pairs = []
    for _ in range(steps):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        step()
        end.record()
        pairs.append((begin, end))
        if not free_running:
            torch.cuda.synchronize(world.device)
    torch.cuda.synchronize(world.device)
    return world.slowest(begin.elapsed_time(end) for begin, end in pairs)


@dataclass(frozen=True)
class Memory:
    """Device memory of one measurement, in bytes, each the largest over the processes.

    Args:
        state: parameters, buffers and optimizer state as they lie between steps, by their storages.
        resident: allocated between steps after warm-up; what exceeds ``state`` is kept by the runtime or by inputs.
        allocated: most allocated during the timed steps. None for CUDA graphs: what a graph uses is counted while it
            is recorded, not while it is replayed.
        reserved: most that the caching allocator held of the device in steps that began with an empty cache: what is
            allocated, what lies between, and the memory of CUDA graphs.
        leftover: allocated before the mode was built, because something kept what an earlier mode used. Not part of
            the three above.
        symmetric: memory that copy engines of peers read. The allocator does not know of it: not part of any of these.
    """

    state: int
    resident: int
    allocated: int | None
    reserved: int
    leftover: int
    symmetric: int

    @property
    def peak(self) -> int | None:
        """The most memory in use, whoever has allocated it."""
        return None if self.allocated is None else self.allocated + self.symmetric

    def merged(self, later: "Memory") -> "Memory":
        """The larger of both, number by number."""
        pairs = zip(astuple(self), astuple(later), strict=True)
        return Memory(*(None if None in pair else max(pair) for pair in pairs))


class MemoryMeter:
    """Reads the CUDA allocator around the timed steps; on CPU it has nothing to read."""

    def __init__(self, world: World, model: nn.Module, optimizer: torch.optim.Optimizer | None, leftover: int) -> None:
        self._world = world
        self._leftover = leftover
        self._state = state_bytes(model, optimizer)
        self._resident = 0
        if world.is_cuda:
            torch.cuda.synchronize(world.device)
            self._resident = torch.cuda.memory_allocated(world.device)
            torch.cuda.reset_peak_memory_stats(world.device)

    def read(self, step: Callable[[], object], symmetric: int, *, is_graph: bool) -> Memory | None:
        """What the timed steps have used.

        Args:
            step: runs twice more, from an empty cache.
            symmetric: bytes of symmetric memory of this process.
            is_graph: whether steps are replays of a CUDA graph.
        """
        if not self._world.is_cuda:
            return None
        device = self._world.device
        allocated = torch.cuda.max_memory_allocated(device)
        torch.cuda.synchronize(device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(device)
        for _ in range(2):
            step()
        torch.cuda.synchronize(device)
        reserved = torch.cuda.max_memory_reserved(device)
        counted = (self._resident, allocated, reserved)
        values = (self._state, *(nbytes - self._leftover for nbytes in counted), self._leftover, symmetric)
        memory = Memory(*(int(value) for value in self._world.slowest(values)))
        return replace(memory, allocated=None) if is_graph else memory


def state_bytes(model: nn.Module, optimizer: torch.optim.Optimizer | None) -> int:
    """Bytes of the distinct local storages of parameters, buffers and optimizer state."""
    tensors = [*model.parameters(), *model.buffers()]
    if optimizer is not None:
        tensors += [p for group in optimizer.param_groups for p in group["params"]]
        tensors += [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    storages = [part.untyped_storage() for t in tensors for part in _plain_parts(local_tensor(t))]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


def _plain_parts(tensor: torch.Tensor) -> list[torch.Tensor]:
    """The tensors that one of a subclass consists of, which has no storage of its own; else the tensor itself."""
    names = tensor.__tensor_flatten__()[0] if hasattr(tensor, "__tensor_flatten__") else []
    return [part for name in names for part in _plain_parts(getattr(tensor, name))] or [tensor]


def allocate_workspaces(world: World) -> None:
    """Has the matmul library take its workspaces, in forward and backward, so that they are no mode's memory."""
    x = torch.ones(64, 64, device=world.device, dtype=torch.bfloat16, requires_grad=True)
    (x @ x).sum().backward()


def local_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """This process's part of a DTensor; any other tensor as it is."""
    detached = tensor.detach()
    return detached.to_local() if isinstance(detached, DTensor) else detached


def gradient_norm(model: nn.Module, world: World) -> float | None:
    """Total norm of the sharded gradients; None for whole ones, each process having another's then.

    Every piece of a gradient counts once: a gradient whole on an axis is divided by the number of its copies.
    """
    square = torch.zeros((), dtype=torch.float64, device=world.device)
    for grad in (p.grad for p in model.parameters() if p.grad is not None):
        if not isinstance(grad, DTensor):
            return None
        copies = 1
        for axis, placement in enumerate(grad.placements):
            if placement.is_replicate():
                copies *= grad.device_mesh.size(axis)
        square += local_tensor(grad).double().square().sum() / copies
    return (world.mean(square.item()) * world.size) ** 0.5


def release_memory(world: World) -> int:
    """Gives the memory of what nobody holds any longer back to the device.

    Returns:
        bytes that are still allocated on this process's GPU; 0 on CPU.
    """
    gc.collect()
    if not world.is_cuda:
        return 0
    torch.cuda.synchronize(world.device)
    torch.cuda.empty_cache()
    return torch.cuda.memory_allocated(world.device)


def trace_steps(
    step: Callable[[], object], world: World, path: Path, steps: int = 3, *, device_only: bool = False
) -> None:
    """Writes a chrome trace of some steps of rank 0, each in a range; the other processes run them along with it.

    Ranges inside of a step name each weight's gather, compute and scatter; ``python -m dtensor_gtp.trace`` draws
    them. To record them and each operator makes the host slower. ``device_only`` spares that: the trace has what
    the GPU does and the calls that launched it, and begins after two more steps, when the host is as far ahead as it
    comes without a profiler.
    """
    ahead = 2 if device_only else 0
    world.barrier()
    if world.rank != 0:
        for _ in range(ahead + steps):
            step()
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    activities = [] if device_only else [ProfilerActivity.CPU]
    marks = []
    with profile(activities=[*activities, *([ProfilerActivity.CUDA] if world.is_cuda else [])]) as profiler:
        for _ in range(ahead):
            step()
        for _ in range(steps):
            marks.append(time.time_ns())
            with record_function(STEP_RANGE):
                step()
        marks.append(time.time_ns())
        world.synchronize()
    profiler.export_chrome_trace(str(path))
    if device_only:
        _mark_steps(path, marks)


def _mark_steps(path: Path, marks: list[int]) -> None:
    """Adds the ranges of steps to a trace that has none, from the clock's nanoseconds between them."""
    trace = json.loads(path.read_text())
    base = trace["baseTimeNanoseconds"]
    trace["traceEvents"] += [
        {
            "ph": "X",
            "cat": "user_annotation",
            "name": STEP_RANGE,
            "pid": os.getpid(),
            "tid": "steps",
            "ts": (begin - base) / 1e3,
            "dur": (end - begin) / 1e3,
        }
        for begin, end in pairwise(marks)
    ]
    path.write_text(json.dumps(trace))


def add_schedule_option(
    parser: argparse.ArgumentParser,
    name: str = "--schedule",
    help: str = "fields of SchedulePolicy for the gtp modes, e.g. prefetch_nbytes=0 gather_backend=copy_engine",
) -> None:
    """Adds an option whose value is a list of (field, value)."""
    parser.add_argument(name, nargs="+", type=_schedule_field, default=[], metavar="FIELD=VALUE", help=help)


def _schedule_field(text: str) -> tuple[str, Any]:
    name, _, value = text.partition("=")
    try:
        return name, ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return name, value


def median(values: list[float]) -> float:
    return statistics.median(values)
