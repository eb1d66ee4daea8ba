"""The host's time per use of a weight in eager mode, beyond what the model itself and the c10d calls take.

A stack of small ``nn.Linear`` layers is so cheap on the device that a step's wall time is the host's: launching
kernels, Python, autograd. The same stack runs plain and sharded; a layer has two uses of its weight in a step, one in
forward and one in backward (the input of the stack requires a gradient, so the first layer too computes dgrad), and

    host time per use = (sharded step - plain step - c10d calls) / (2 * layers)

The c10d calls are timed where they are made: the methods of the process group, between entry and return. (In a loop of
nothing else they would look cheaper than in the midst of kernels for several streams.) They are counted, too. The time
is taken from the start of forward to the return of ``backward()``, without waiting for the device, which is
idle at the start. (On a CPU, the device is the host: copies of the data count.)

Under ``torchrun`` the collectives are real. A single process started without it acts as rank 0 of a fake process group
of 2, whose collectives communicate nothing: measurable on one GPU or on none.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from harness import World, median, release_memory, trace_steps
from report import describe, environment, markdown_table

# the host's work does not grow with it, but that of the fake group does: it copies the shard once for each rank
FAKE_WORLD_SIZE = 2
_LAYERS = 32
_FEATURES = 64
# lets a schedule that is learned in the first steps settle
_WARMUP = 5

_POLICIES = {
    "fp32": MixedPrecisionPolicy(),
    "bf16": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32),
}


def build_stack(world: World, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Linear(_FEATURES, _FEATURES, bias=False, device=world.device, dtype=dtype) for _ in range(_LAYERS))
    return nn.Sequential(*layers)


def shard_with_gtp(stack: nn.Sequential, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> nn.Module:
    from dtensor_gtp import gtp_shard
    from dtensor_gtp.policy import fixed_policy

    # each weight by itself, as the weights of a large model travel; several in one launch cost less
    one_by_one = fixed_policy(coalesce_nbytes=0, coalesce_grad_nbytes=0)
    return gtp_shard(stack, mesh, mp_policy=policy, schedule=one_by_one)


def shard_with_fsdp2(stack: nn.Sequential, mesh: DeviceMesh, policy: MixedPrecisionPolicy) -> nn.Module:
    """``fully_shard`` on every layer: like gtp, a gather for each use."""
    for layer in stack:
        fully_shard(layer, mesh=mesh, mp_policy=policy)
    return fully_shard(stack, mesh=mesh, mp_policy=policy)


def make_step(model: nn.Module, world: World) -> Callable[[], None]:
    """Forward and backward, without resetting the gradients."""
    x = torch.randn(4, _FEATURES, device=world.device, dtype=next(model.parameters()).dtype, requires_grad=True)
    return lambda: model(x).sum().backward()


class StepTime(NamedTuple):
    """Medians over the steps, in microseconds, each the slowest process's, and calls in one step."""

    step_us: float
    c10d_us: float
    collectives: dict[str, int]


def time_host(model: nn.Module, world: World, steps: int) -> StepTime:
    """The host's time in forward and backward, and in the collectives that they call."""
    step = make_step(model, world)
    samples, calls = [], []
    for _ in range(_WARMUP + steps):
        world.barrier()
        with CollectiveClock() as clock:
            begin = time.perf_counter()
            step()
            samples.append((time.perf_counter() - begin) * 1e6)
        calls.append(clock.seconds * 1e6)
        world.synchronize()
        for parameter in model.parameters():
            parameter.grad = None
    slowest = world.slowest([median(samples[_WARMUP:]), median(calls[_WARMUP:])])
    return StepTime(slowest[0], slowest[1], clock.counts)


class CollectiveClock:
    """Counts the collectives that this process calls within the context, and adds up the time until they return.

    By the methods of the process group, which all public functions end in. Reductions of single tensors and of several
    are told apart from gathers by name.
    """

    _METHODS: ClassVar = {
        "_allgather_base": "all_gather",
        "all_gather_single": "all_gather",  # its name since torch 2.13
        "allgather_into_tensor_coalesced": "all_gather",
        "_reduce_scatter_base": "reduce_scatter",
        "reduce_scatter_single": "reduce_scatter",
        "reduce_scatter_tensor_coalesced": "reduce_scatter",
        "alltoall_base": "reduce_scatter",
        "allreduce": "all_reduce",
    }

    def __init__(self) -> None:
        self.counts = dict.fromkeys(self._METHODS.values(), 0)
        self.seconds = 0.0
        self._originals: dict[str, Any] = {}

    def __enter__(self) -> "CollectiveClock":
        for method, kind in self._METHODS.items():
            if method not in dist.ProcessGroup.__dict__:
                continue  # not in this release of torch
            # as the class holds it: read as its attribute, it would not bind an object any more when it is put back
            self._originals[method] = dist.ProcessGroup.__dict__[method]
            setattr(dist.ProcessGroup, method, self._timed(getattr(dist.ProcessGroup, method), kind))
        return self

    def __exit__(self, *exception: object) -> None:
        for method, original in self._originals.items():
            setattr(dist.ProcessGroup, method, original)

    def _timed(self, call: Callable[..., Any], kind: str) -> Callable[..., Any]:
        def timed(*args: Any, **kwargs: Any) -> Any:
            begin = time.perf_counter()
            try:
                return call(*args, **kwargs)
            finally:
                self.seconds += time.perf_counter() - begin
                self.counts[kind] += 1

        return timed


def measure_stack(stack: nn.Module, plain_us: float, world: World, steps: int, trace: Path | None) -> dict[str, Any]:
    """Measures one sharded stack against the plain one's time."""
    measured = time_host(stack, world, steps)
    if trace is not None:
        trace_steps(make_step(stack, world), world, trace)
    return {
        "step_us": measured.step_us,
        "plain_step_us": plain_us,
        "collectives_per_step": measured.collectives,
        "c10d_us": measured.c10d_us,
        "us_per_weight_use": (measured.step_us - plain_us - measured.c10d_us) / (2 * _LAYERS),
    }


def measure_host_time(world: World, steps: int, trace: Path | None = None) -> dict[str, Any]:
    """Measures gtp and, as its peer, FSDP2 on every layer.

    Args:
        world: the processes, two or more; all call this together.
        steps: timed steps.
        trace: the folder for a chrome trace per library and precision.

    Returns:
        the content of the JSON file: the environment, one record per library and precision, and errors.

    Raises:
        ValueError: if there is only one process, between which nothing is gathered.
    """
    if world.size == 1:
        raise ValueError("measure_host_time expects two or more processes, but got 1. Start it without torchrun.")
    # worker threads that wait for small kernels disturb the host's clock
    torch.set_num_threads(1)
    mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("gtp",))
    results: list[dict[str, Any]] = []
    errors: dict[str, str] = {}
    for policy_name, policy in _POLICIES.items():
        dtype = policy.param_dtype or torch.float32
        plain_us = time_host(build_stack(world, dtype), world, steps).step_us
        for library, shard in (("gtp", shard_with_gtp), ("fsdp2", shard_with_fsdp2)):
            name = f"{library}-{policy_name}"
            file = trace / f"{name}.json" if trace else None
            stack, error = world.guarded(name, partial(shard, build_stack(world), mesh, policy))
            if stack is not None:
                work = partial(measure_stack, stack, plain_us, world, steps, file)
                record, error = world.guarded(name, work)
                if record is not None:
                    results.append({"library": library, "policy": policy_name, **record})
            if error is not None:
                errors[name] = error
            release_memory(world)
    settings = {"layers": _LAYERS, "features": _FEATURES, "steps": steps}
    return {"environment": environment(world), "settings": settings, "results": results, "errors": errors}


def print_host_time(world: World, content: dict[str, Any]) -> None:
    header = ["library", "policy", "step us", "plain us", "c10d us", "gathers", "scatters", "us per weight use"]
    lines = [
        [
            r["library"],
            r["policy"],
            f"{r['step_us']:.0f}",
            f"{r['plain_step_us']:.0f}",
            f"{r['c10d_us']:.0f}",
            str(r["collectives_per_step"]["all_gather"]),
            str(r["collectives_per_step"]["reduce_scatter"]),
            f"{r['us_per_weight_use']:.1f}",
        ]
        for r in content["results"]
    ]
    world.say(describe(content["environment"]) + "\n\n" + markdown_table(header, lines))
    for name, error in content["errors"].items():
        world.say(f"\n{name} FAILED: {error}")
