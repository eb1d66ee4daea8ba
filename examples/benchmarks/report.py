"""Results as plain data, the table printed from them and the JSON file."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dtensor_gtp
from dtensor_gtp.planner.memory import Peak
from harness import Memory, World, median
from modes import COMPILED, RECIPE


@dataclass(frozen=True)
class Measurement:
    """One mode at one sequence length in one phase.

    Args:
        mode: see ``modes.build_mode``.
        seq_len: tokens per sequence.
        phase: "forward+backward" or "full step".
        samples_ms: milliseconds of each timed step, the slowest process's.
        tokens_per_step: tokens that one process takes per step.
        memory: None on CPU.
        loss: of the first step from the initial weights of this phase, mean over the processes.
        grad_norm: total norm of that step's gradient; None where gradients are not reduced.
        predicted: what the allocator's peak should be, and why; None for modes whose plan is not known.
        activations: the most bytes that activations alone need in such a step, the same for all modes.
        predicted_ms: what the planner says of forward and backward; None for modes and machines that it does not know.
        first_ms: forward and backward of the first step after the model was built and sharded; None if nobody timed it.
    """

    mode: str
    seq_len: int
    phase: str
    samples_ms: list[float]
    tokens_per_step: int
    memory: Memory | None
    loss: float
    grad_norm: float | None
    predicted: Peak | None = None
    activations: int = 0
    predicted_ms: float | None = None
    first_ms: float | None = None

    @property
    def key(self) -> tuple[str, int, str]:
        return self.mode, self.seq_len, self.phase

    @property
    def ms(self) -> float:
        return median(self.samples_ms)

    @property
    def above_activations(self) -> int | None:
        """Bytes at the peak beyond the state and what activations alone need; None where the peak is not known."""
        if self.memory is None or self.memory.peak is None:
            return None
        return self.memory.peak - self.memory.state - self.activations

    def merged(self, later: "Measurement") -> "Measurement":
        """This measurement with the samples of a later round of the same thing."""
        memory = self.memory
        if memory is not None and later.memory is not None:
            memory = memory.merged(later.memory)
        firsts = [ms for ms in (self.first_ms, later.first_ms) if ms is not None]
        return replace(
            self, samples_ms=self.samples_ms + later.samples_ms, memory=memory, first_ms=min(firsts, default=None)
        )


def rows(measurements: Iterable[Measurement]) -> list[dict[str, Any]]:
    """One flat record per measurement, with the ratios to its peers at the same length and phase.

    ``ratio_fsdp2`` is to the fastest of the FSDP2 modes, ``ratio_compute`` to the compute mode, ``ratio_eager`` of a
    compiled mode to the same mode without compilation, ``ratio_torchao`` of a mode with a recipe to the fastest of
    torchao's, ``ratio_fsdp2_memory`` of what is above the activations to that FSDP2 mode with the least,
    ``ratio_fsdp2_first`` of the first step to the quickest of theirs; None where the peer was not measured.
    """
    measured = list(measurements)
    records = []
    for item in measured:
        peers = [m for m in measured if (m.seq_len, m.phase) == (item.seq_len, item.phase)]
        records.append(
            {
                "mode": item.mode,
                "seq_len": item.seq_len,
                "phase": item.phase,
                "ms": item.ms,
                "ms_min": min(item.samples_ms),
                "ms_max": max(item.samples_ms),
                "samples_ms": item.samples_ms,
                "predicted_ms": item.predicted_ms,
                "first_ms": item.first_ms,
                "tokens_per_s_per_gpu": item.tokens_per_step / item.ms * 1e3,
                **_ratios(item, peers),
                **_memory(item),
                "predicted_peak": item.predicted._asdict() | {"total": item.predicted.total}
                if item.predicted
                else None,
                "loss": item.loss,
                "grad_norm": item.grad_norm,
            }
        )
    return records


def _ratios(item: Measurement, peers: list[Measurement]) -> dict[str, float | None]:
    """See :func:`rows`."""
    fsdp2 = [m for m in peers if m.mode.startswith("fsdp2")]
    torchao = [m.ms for m in peers if m.mode.startswith("torchao") and RECIPE in item.mode]
    times = {m.mode: m.ms for m in peers}
    eager = times.get(item.mode.removesuffix(COMPILED)) if item.mode.endswith(COMPILED) else None
    above = [m.above_activations for m in fsdp2 if m.above_activations is not None]
    firsts = [m.first_ms for m in fsdp2 if m.first_ms is not None]
    return {
        "ratio_fsdp2": _ratio(item.ms, min((m.ms for m in fsdp2), default=None)),
        "ratio_compute": _ratio(item.ms, times.get("compute")),
        "ratio_eager": _ratio(item.ms, eager),
        "ratio_torchao": _ratio(item.ms, min(torchao, default=None)),
        "ratio_fsdp2_memory": _ratio(item.above_activations, min(above, default=None)),
        "ratio_fsdp2_first": _ratio(item.first_ms, min(firsts, default=None)),
    }


def _ratio(value: float | None, peer: float | None) -> float | None:
    return None if value is None or peer is None or peer <= 0 else value / peer


def _memory(item: Measurement) -> dict[str, int | None]:
    """The columns of memory: the peak is that of the allocator and symmetric memory together."""
    memory = item.memory
    peak = memory.peak if memory else None
    return {
        "peak_bytes": peak,
        "peak_above_state_bytes": None if memory is None or peak is None else peak - memory.state,
        "peak_above_activations_bytes": item.above_activations,
        "allocated_peak_bytes": memory.allocated if memory else None,
        "symmetric_bytes": memory.symmetric if memory else None,
        "state_bytes": memory.state if memory else None,
        "activations_bytes": item.activations,
        "resident_bytes": memory.resident if memory else None,
        "reserved_bytes": memory.reserved if memory else None,
        "leftover_bytes": memory.leftover if memory else None,
    }


def describe_peak(peak: Peak, measured: int | None = None) -> str:
    """The parts in MiB, and beside them what was measured if something was."""
    parts = ", ".join(f"{name} {value / 2**20:.1f}" for name, value in zip(peak._fields[1:], peak[1:], strict=True))
    text = f"peak {peak.moment}: {peak.total / 2**20:.1f} MiB = {parts}"
    if measured is None:
        return f"{text} (predicted for a GPU; there is no counter here)"
    return f"{text}; measured {measured / 2**20:.1f} MiB ({(measured / peak.total - 1) * 100:+.1f}%)"


def memory_lines(measurements: Iterable[Measurement]) -> list[str]:
    """For each measurement with a prediction, what its peak memory consists of."""
    return [
        f"{item.mode}, {item.phase}, T={item.seq_len}: "
        + describe_peak(item.predicted, item.memory.allocated if item.memory else None)
        for item in measurements
        if item.predicted is not None
    ]


def markdown_table(header: list[str], lines: Iterable[list[str]]) -> str:
    """A markdown table whose columns are also aligned as plain text."""
    cells = [header, *lines]
    widths = [max(len(line[i]) for line in cells) for i in range(len(header))]
    texts = ["| " + " | ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)) + " |" for line in cells]
    texts.insert(1, "|" + "|".join("-" * (w + 2) for w in widths) + "|")
    return "\n".join(texts)


def step_table(records: list[dict[str, Any]]) -> str:
    """The records of :func:`rows` as a table, sorted by phase and length, in the order of the modes within."""
    extra = [name for name in ("eager", "torchao") if any(r[f"ratio_{name}"] is not None for r in records)]
    ratios = ["x FSDP2", "x compute", *(f"x {name}" for name in extra)]
    memory = {
        "peak GiB": "peak_bytes",
        "above state GiB": "peak_above_state_bytes",
        "above activations GiB": "peak_above_activations_bytes",
        "reserved GiB": "reserved_bytes",
    }
    first = ["first step ms", "x FSDP2 first"]
    header = ["phase", "T", "mode", "ms", "predicted ms", "tokens/s/GPU", *ratios, *memory, "x FSDP2 memory", *first]
    lines = [
        [
            r["phase"],
            str(r["seq_len"]),
            r["mode"],
            _number(r["ms"], 1),
            _number(r["predicted_ms"], 1),
            _number(r["tokens_per_s_per_gpu"], 0),
            _number(r["ratio_fsdp2"], 3),
            _number(r["ratio_compute"], 3),
            *(_number(r[f"ratio_{name}"], 3) for name in extra),
            *(_number(r[name], 2, 2**30) for name in memory.values()),
            _number(r["ratio_fsdp2_memory"], 3),
            _number(r["first_ms"], 1),
            _number(r["ratio_fsdp2_first"], 3),
        ]
        for r in sorted(records, key=lambda r: (r["phase"] != "forward+backward", r["seq_len"]))
    ]
    return markdown_table(header, lines)


def _number(value: float | None, digits: int, unit: int = 1) -> str:
    return "n/a" if value is None else f"{value / unit:.{digits}f}"


def environment(world: World) -> dict[str, Any]:
    """Date, versions, machine and command line: what a reader needs to repeat the run."""
    launcher = "python"
    if "LOCAL_WORLD_SIZE" in os.environ:
        launcher = f"torchrun --nproc-per-node {os.environ['LOCAL_WORLD_SIZE']}"
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "dtensor_gtp": dtensor_gtp.__version__,
        "torch": torch.__version__,
        "python": platform.python_version(),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if world.is_cuda else None,
        "device": torch.cuda.get_device_name(world.device) if world.is_cuda else f"CPU, {os.cpu_count()} cores",
        "backend": dist.get_backend(),
        "world_size": world.size,
        "command": f"{launcher} examples/benchmarks/{Path(sys.argv[0]).name} {shlex.join(sys.argv[1:])}".strip(),
    }


def describe(environment: dict[str, Any]) -> str:
    """The environment in two lines, as they stand above a table."""
    versions = ", ".join(
        f"{name} {environment[name]}" for name in ("torch", "nccl", "dtensor_gtp") if environment[name]
    )
    machine = f"world size {environment['world_size']}, {environment['backend']}, {environment['device']}"
    return f"{environment['date']}, {machine}, {versions}\n{environment['command']}"


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Writes ``content``; whoever reads the file meanwhile sees the old one or the new one, whole."""
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(content, indent=1, allow_nan=False) + "\n")
    partial.replace(path)
