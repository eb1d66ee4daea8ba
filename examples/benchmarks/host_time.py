"""The host's time per use of a weight in eager mode, beyond what the model itself and the c10d calls take.

A stack of small ``nn.Linear`` layers is so cheap on the device that a step's wall time is the host's: launching
kernels, Python, autograd. The same stack runs plain and sharded; a layer has two uses of its weight in a step, one in
forward and one in backward (the input of the stack requires a gradient, so the first layer too computes dgrad), and

    host time per use = (sharded step - plain step - collectives of a step * bare c10d call) / (2 * layers)

The collectives of a step are counted by running one under ``CommDebugMode``; a bare call is the median time that
enqueueing a gather or a reduction of the same size takes, in a loop of nothing else.
The time is taken from the start of forward to the return of ``backward()``, without waiting for the device, which is
idle at the start. (On a CPU, the device is the host: copies of the data count.)

Under ``torchrun`` the collectives are real. A single process started without it acts as rank 0 of a fake process group
of 2, whose collectives communicate nothing: measurable on one GPU or on none.
"""

import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import AllgatherOptions, AllreduceOptions, ReduceScatterOptions
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.debug import CommDebugMode

from harness import World, median, release_memory, trace_steps
from report import describe, environment, markdown_table

# the host's work does not grow with it, but that of the fake group does: it copies the shard once for each rank
FAKE_WORLD_SIZE = 2
_LAYERS = 32
_FEATURES = 64
_BARE_CALLS = 200
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
    from dtensor_gtp import SchedulePolicy, gtp_shard

    # each weight by itself, as the weights of a large model travel; several in one launch cost less
    one_by_one = SchedulePolicy(coalesce_nbytes=0, coalesce_grad_nbytes=0)
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


def host_us(model: nn.Module, world: World, steps: int) -> float:
    """Median microseconds of the host in forward and backward, the slowest process's."""
    step = make_step(model, world)
    samples = []
    for _ in range(_WARMUP + steps):
        world.barrier()
        begin = time.perf_counter()
        step()
        samples.append((time.perf_counter() - begin) * 1e6)
        world.synchronize()
        for parameter in model.parameters():
            parameter.grad = None
    return world.slowest([median(samples[_WARMUP:])])[0]


def count_collectives(model: nn.Module, world: World) -> dict[str, int]:
    """How often each kind of collective is called in one step."""
    counter = CommDebugMode()
    with counter:
        make_step(model, world)()
    for parameter in model.parameters():
        parameter.grad = None
    counts = {"all_gather": 0, "reduce_scatter": 0, "all_reduce": 0}
    for op, count in counter.get_comm_counts().items():
        name = str(op).lower().replace("_", "")
        kind = next((kind for kind in counts if kind.replace("_", "") in name), None)
        if kind is None:
            raise RuntimeError(f"count_collectives expects gathers and reductions only, but got {op}.")
        counts[kind] += count
    return counts


def bare_call_us(mesh: DeviceMesh, world: World, dtype: torch.dtype) -> dict[str, float]:
    """Median microseconds to enqueue one collective of a layer's size.

    By the methods of the process group: the public functions check their arguments first, in Python, and a library
    that spares itself the checks is not to be credited with their time.
    """
    group = mesh.get_group()
    gather, scatter, reduce = AllgatherOptions(), ReduceScatterOptions(), AllreduceOptions()
    for options in (gather, scatter, reduce):
        options.asyncOp = False
    whole = torch.zeros(_FEATURES * _FEATURES, device=world.device, dtype=dtype)
    shard = torch.zeros(whole.numel() // world.size, device=world.device, dtype=dtype)
    calls: dict[str, Callable[[], object]] = {
        "all_gather": lambda: group._allgather_base(whole, shard, gather),
        "reduce_scatter": lambda: group._reduce_scatter_base(shard, whole, scatter),
        "all_reduce": lambda: group.allreduce([whole], reduce),
    }
    return {name: _enqueue_us(call, world) for name, call in calls.items()}


def _enqueue_us(call: Callable[[], object], world: World) -> float:
    samples = []
    for i in range(_WARMUP + _BARE_CALLS):
        if i % 16 == 0:
            # a full device queue would make the host wait in the call
            world.barrier()
        begin = time.perf_counter()
        call()
        samples.append((time.perf_counter() - begin) * 1e6)
    world.barrier()
    return world.slowest([median(samples[_WARMUP:])])[0]


def measure_stack(
    stack: nn.Module, plain_us: float, call_us: dict[str, float], world: World, steps: int, trace: Path | None
) -> dict[str, Any]:
    """Measures one sharded stack against the plain one's time and those of bare collective calls."""
    step_us = host_us(stack, world, steps)
    counts = count_collectives(stack, world)
    if trace is not None:
        trace_steps(make_step(stack, world), world, trace)
    c10d_us = sum(count * call_us[kind] for kind, count in counts.items())
    return {
        "step_us": step_us,
        "plain_step_us": plain_us,
        "collectives_per_step": counts,
        "c10d_call_us": call_us,
        "us_per_weight_use": (step_us - plain_us - c10d_us) / (2 * _LAYERS),
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
        plain_us = host_us(build_stack(world, dtype), world, steps)
        call_us = bare_call_us(mesh, world, dtype)
        for library, shard in (("gtp", shard_with_gtp), ("fsdp2", shard_with_fsdp2)):
            name = f"{library}-{policy_name}"
            file = trace / f"{name}.json" if trace else None
            stack, error = world.guarded(name, partial(shard, build_stack(world), mesh, policy))
            if stack is not None:
                work = partial(measure_stack, stack, plain_us, call_us, world, steps, file)
                record, error = world.guarded(name, work)
                if record is not None:
                    results.append({"library": library, "policy": policy_name, **record})
            if error is not None:
                errors[name] = error
            release_memory(world)
    settings = {"layers": _LAYERS, "features": _FEATURES, "steps": steps}
    return {"environment": environment(world), "settings": settings, "results": results, "errors": errors}


def print_host_time(world: World, content: dict[str, Any]) -> None:
    header = ["library", "policy", "step us", "plain us", "gathers", "scatters", "us per weight use"]
    lines = [
        [
            r["library"],
            r["policy"],
            f"{r['step_us']:.0f}",
            f"{r['plain_step_us']:.0f}",
            str(r["collectives_per_step"]["all_gather"]),
            str(r["collectives_per_step"]["reduce_scatter"]),
            f"{r['us_per_weight_use']:.1f}",
        ]
        for r in content["results"]
    ]
    world.say(describe(content["environment"]) + "\n\n" + markdown_table(header, lines))
    for name, error in content["errors"].items():
        world.say(f"\n{name} FAILED: {error}")
