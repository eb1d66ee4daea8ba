"""Measures a machine and writes the file that ``--machine`` takes.

GEMMs by size, memory, attention, the host's time, gathers by size, and how gathers slow GEMMs. One process measures
compute and the host. Under ``torchrun`` the links are measured too, by the process group and, where GPUs can map each
other's memory, by copy engines. What cannot be measured is taken from the preset of the GPU, and the machine then
counts as not calibrated.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F

from .. import _torch_compat as compat
from .._comm.copy_engine import CopyEngine
from ..mesh import init_weight_mesh
from .errors import PlanError
from .machine import GIB, Contention, Link, Machine, load_machine, preset_names, preset_of

_GPU_SIZES = ((1024, 1024, 1024), (2048, 4096, 4096), (2048, 4096, 14336), (8192, 4096, 14336), (2048, 4096, 128256))
_CPU_SIZES = ((64, 128, 128), (128, 256, 256), (256, 256, 512))
_CALIBRATED_SPREAD = 0.1


class _Clock:
    """Medians of repeated calls, in seconds, on one device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._num = 20 if device.type == "cuda" else 5

    def wait(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def time(self, function: Callable[[], object], inner: int = 1) -> float:
        """Of one call, of which ``inner`` are queued at a time."""
        function()
        self.wait()
        samples = []
        for _ in range(self._num):
            begin = time.perf_counter()
            for _ in range(inner):
                function()
            self.wait()
            samples.append((time.perf_counter() - begin) / inner)
        return statistics.median(samples)


def calibrate(path: Path, *, device_type: str | None = None) -> Machine:
    """Measure this machine and write ``path``, on the first rank.

    Args:
        path: A JSON file.
        device_type: "cuda" or "cpu"; default: "cuda" where there is one.

    Raises:
        PlanError: There is no preset for the GPU, or the file cannot be written.
    """
    kind = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    world = int(os.environ.get("WORLD_SIZE", "1"))
    group = init_weight_mesh(kind, gtp=world)["gtp"].get_group() if world > 1 else None
    device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
    clock = _Clock(device)
    machine = _compute(clock, _base(device))
    machine = _host(clock, machine)
    if group is not None:
        machine = _links(clock, machine, group)
    is_linked = group is not None
    name = f"{machine.name}, measured" if is_linked else f"{machine.name}, links not measured"
    machine = replace(machine, name=name, is_calibrated=is_linked)
    machine = replace(machine, spread=_CALIBRATED_SPREAD if is_linked else machine.spread)
    if group is None or group.rank() == 0:
        try:
            path.write_text(machine.as_json())
        except OSError as error:
            raise PlanError(f"calibrate cannot write {path} ({error.strerror}). Name another place.") from None
    return machine


def _base(device: torch.device) -> Machine:
    """The peaks of the GPU by its name; for CPUs, what is measured next takes the place of peaks."""
    if device.type == "cpu":
        base = load_machine("h100")
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
        # Threads copy and reduce: there is no second engine.
        return replace(base, name=f"CPU, {os.cpu_count()} cores", memory_gib=memory, reserve_gib=0.0, sources={})
    found = torch.cuda.get_device_name(device)
    if (preset := preset_of(found)) is not None:
        memory = torch.cuda.get_device_properties(device).total_memory / GIB
        return replace(load_machine(preset), name=found, memory_gib=memory, sources={"all": "measured by --calibrate"})
    raise PlanError(
        f"calibrate knows the peaks of {', '.join(preset_names())}, but this GPU is {found!r}. Copy a preset of "
        "dtensor_gtp/planner/machines, fill in its peaks, and pass it as --machine."
    )


def _compute(clock: _Clock, machine: Machine) -> Machine:
    """Shares of the peaks that GEMMs, attention and elementwise kernels reach."""
    is_gpu = clock.device.type == "cuda"
    rates = []
    for rows, inputs, outputs in _GPU_SIZES if is_gpu else _CPU_SIZES:
        a, b = (torch.randn(*s, device=clock.device, dtype=torch.bfloat16) for s in ((rows, inputs), (inputs, outputs)))
        flops = 2 * rows * inputs * outputs
        rates.append((float(flops), flops / clock.time(partial(torch.matmul, a, b), 4) / 1e12))
    memory = torch.empty((1 << 28) if is_gpu else (1 << 22), device=clock.device)
    target = torch.empty_like(memory)
    hbm = 2 * memory.nbytes / clock.time(lambda: target.copy_(memory)) / 1e9
    if not is_gpu:
        machine = replace(machine, peak_tflops={"bf16": max(rate for _, rate in rates)}, hbm_gb_s=hbm)
    peak = machine.peak_tflops["bf16"]
    gemm = tuple((flops, min(rate / peak, 1.0)) for flops, rate in sorted(rates))
    small = torch.empty(16, device=clock.device)
    kernel = clock.time(lambda: small.add_(1), 50)
    compute = replace(
        machine.compute,
        gemm=gemm,
        attention=min(_attention_rate(clock) / peak, 1.0),
        hbm=min(hbm / machine.hbm_gb_s, 1.5),
        kernel_us=min(kernel * 1e6, machine.compute.kernel_us) if is_gpu else 0.0,
    )
    return replace(machine, compute=compute)


def _attention_rate(clock: _Clock) -> float:
    """Of causal attention with a backward, in 10^12 operations a second."""
    heads, tokens, dim = (32, 4096, 128) if clock.device.type == "cuda" else (2, 128, 32)
    shape = (1, heads, tokens, dim)
    q, k, v = (torch.randn(shape, device=clock.device, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def step() -> None:
        F.scaled_dot_product_attention(q, k, v, is_causal=True).sum().backward()

    return 3.5 * 2 * heads * tokens * tokens * dim / clock.time(step) / 1e12


def _host(clock: _Clock, machine: Machine) -> Machine:
    """The host's time for an operation in forward and backward."""
    layers = nn.Sequential(*(nn.Linear(8, 8, bias=False) for _ in range(32))).to(clock.device)
    x = torch.zeros(1, 8, device=clock.device)

    def step() -> None:
        layers(x).sum().backward()
        layers.zero_grad(set_to_none=True)

    # Of each layer a transpose, a GEMM and their three in backward.
    return replace(machine, host=replace(machine.host, op_us=clock.time(step) / (32 * 5) * 1e6))


def _links(clock: _Clock, machine: Machine, group: dist.ProcessGroup) -> Machine:
    """Gathers by size: a line through the times of a small and a large one."""
    world = group.size()
    is_gpu = clock.device.type == "cuda"
    sizes = (1 << 20, 1 << 28) if is_gpu else (1 << 12, 1 << 20)

    def gather(nbytes: int) -> Callable[[], object]:
        shard = torch.zeros(nbytes // world, dtype=torch.uint8, device=clock.device)
        output = torch.zeros(shard.numel() * world, dtype=torch.uint8, device=clock.device)
        return partial(compat.all_gather_base, output, shard, group, False)

    local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
    link = _line(machine.fast, sizes, [clock.time(gather(nbytes)) for nbytes in sizes], world)
    machine = replace(machine, fast=link) if local == world else replace(machine, network=link)
    if is_gpu and local == world:
        machine = _copies(clock, machine, group)
    return replace(machine, contention=_contention(clock, machine.contention, gather(sizes[1])))


def _line(link: Link, sizes: tuple[int, int], times: list[float], world: int) -> Link:
    received = [nbytes * (world - 1) / world for nbytes in sizes]
    slope, start = received[1] / times[1], 0.0
    if times[1] > 2 * times[0]:  # else the large one is as noisy as the small one
        slope = (received[1] - received[0]) / (times[1] - times[0])
        start = max(times[0] - received[0] / slope, 0.0)
    rate = slope / 1e9
    return replace(link, gb_s=rate, share=1.0, start_us=start * 1e6, hop_us=0.0)


def _copies(clock: _Clock, machine: Machine, group: dist.ProcessGroup) -> Machine:
    try:
        engine = CopyEngine(group, clock.device)
    except RuntimeError:
        return machine
    world, times, sizes = group.size(), [], (1 << 20, 1 << 28)
    for nbytes in sizes:
        shard = torch.zeros(nbytes // world, dtype=torch.uint8, device=clock.device)
        output = torch.zeros(nbytes // world * world, dtype=torch.uint8, device=clock.device)
        times.append(clock.time(partial(engine.all_gather, [output], [shard])))
    link = _line(machine.copy, sizes, times, world)
    return replace(machine, copy=replace(link, start_us=machine.copy.start_us, hop_us=link.start_us / (world - 1)))


def _contention(clock: _Clock, known: Contention, gather: Callable[[], object]) -> Contention:
    """How much longer GEMMs take while gathers run, and the other way round."""
    size = 4096 if clock.device.type == "cuda" else 128
    a = torch.randn(size, size, device=clock.device, dtype=torch.bfloat16)
    gemm, alone = clock.time(lambda: a @ a), clock.time(gather)
    num = max(round(alone / gemm), 1)

    def both() -> None:
        gather()
        for _ in range(num):
            a @ a

    together = clock.time(both)
    # If nothing were slowed the longer one would decide; what is beyond it slows both.
    factor = min(max(together / max(alone, num * gemm), 1.0), 10.0)
    return replace(known, gemm_beside_nccl=factor, nccl_beside_gemm=factor)
