"""Measures a machine and writes the file that ``--machine`` takes.

One process measures compute and the host. Under ``torchrun`` it measures the links too. What cannot be measured stays
as in the preset of the GPU, and the file names it. ``calibrate_compute`` and ``calibrate_links`` measure; ``samples``
turns measurements into the numbers of a machine.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .._comm.process_groups import start_alone, world_mesh, world_size
from ..mesh import init_weight_mesh
from .calibrate_compute import TOGETHER, measure_compute, measure_host
from .calibrate_links import Links
from .clock import Clock, clock_of
from .errors import PlanError
from .machine import GIB, Machine, load_machine, preset_names, preset_of
from .samples import Groups, Samples, fitted

_CALIBRATED_SPREAD = 0.1


def calibrate(path: Path, *, device_type: str | None = None, clock: Clock | None = None) -> Machine:
    """Measure this machine and write ``path``, on the first rank.

    Args:
        path: A JSON file.
        device_type: "cuda" or "cpu"; default: "cuda" where there is one.
        clock: Who takes the time; default: events of the GPU, or the clock of the CPU.

    Raises:
        PlanError: There is no preset for the GPU, or the file cannot be written.
    """
    if os.environ.get("RANK", "0") == "0" and (path.is_dir() or not path.parent.is_dir()):  # before it measures
        raise PlanError(f"calibrate cannot write {path}: there is no such folder, or it is one. Name another place.")
    kind = device_type or ("cuda" if torch.cuda.is_available() else "cpu")
    with _meshes(kind) as (mesh, others):
        device = torch.device(kind, torch.cuda.current_device()) if kind == "cuda" else torch.device("cpu")
        clock = clock or clock_of(device)
        samples = Samples({}, {})
        base = _base(device)
        measure_compute(clock, samples)
        if kind == "cpu":
            base = _with_peaks_of_cpu(base, samples)
        group, engine = mesh.get_group(), None
        has_links = group.size() > 1
        if has_links:
            links = Links(clock, group, samples)
            links.sizes("fast")
            links.host()
            engine = links.copies()
            links.contention(engine)
        if others is not None:
            Links(clock, others.get_group(), samples).sizes("network")
        measure_host(clock, samples, mesh, has_copies=engine is not None)
        machine = fitted(base, samples, Groups(group.size(), 1 if others is None else others.size(), TOGETHER))
        name = f"{base.name}, measured"
        machine = replace(machine, name=name, spread=_CALIBRATED_SPREAD if has_links else base.spread)
        if dist.get_rank() == 0:
            try:
                path.write_text(machine.as_json())
            except (OSError, ValueError) as error:
                raise PlanError(f"calibrate cannot write {path} ({error}). Name another place.") from None
    return machine


@contextmanager
def _meshes(kind: str) -> Iterator[tuple[DeviceMesh, DeviceMesh | None]]:
    """The ranks of this host, and this rank's peers on other hosts. One process that ``torchrun`` has not started is a
    group of its own."""
    is_mine = not dist.is_initialized()
    try:
        if is_mine and "MASTER_ADDR" not in os.environ:
            start_alone(kind)
            yield world_mesh(kind), None
            return
        world = world_size()
        local = int(os.environ.get("LOCAL_WORLD_SIZE", str(world)))
        mesh = init_weight_mesh(kind, replicate=world // local, gtp=local)
        yield mesh["gtp"], mesh["replicate"] if world > local else None
        devices = [torch.cuda.current_device()] if kind == "cuda" else None
        dist.barrier(group=mesh["gtp"].get_group(), device_ids=devices)  # nobody frees memory that a peer still reads
    finally:
        if is_mine and dist.is_initialized():
            dist.destroy_process_group()


def _base(device: torch.device) -> Machine:
    """The preset of the GPU by its name; that of the H100 for CPUs, whose peaks are measured next."""
    if device.type == "cpu":
        base = load_machine("h100")
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / GIB
        return replace(base, name=f"CPU, {os.cpu_count()} cores", memory_gib=memory, reserve_gib=0.0, sources={})
    found = torch.cuda.get_device_name(device)
    if (preset := preset_of(found)) is not None:
        memory = torch.cuda.get_device_properties(device).total_memory / GIB
        sources = {"peaks and what was not measured": f"the preset {preset}", "others": "measured by --calibrate"}
        return replace(load_machine(preset), name=found, memory_gib=memory, sources=sources)
    raise PlanError(
        f"calibrate knows the peaks of {', '.join(preset_names())}, but this GPU is {found!r}. Copy a preset of "
        "dtensor_gtp/planner/machines, fill in its peaks, and pass it as --machine."
    )


def _with_peaks_of_cpu(machine: Machine, samples: Samples) -> Machine:
    """A CPU has no data sheet here: the fastest GEMM and the fastest kernel are its peaks."""
    peak = max(sample.rate for sample in samples.by_kind["bf16 GEMM"]) / 1e12
    memory = max(sample.rate for sample in samples.by_kind["memory"]) / 1e9
    return replace(machine, peak_tflops={"bf16": peak}, hbm_gb_s=memory)
