"""Results as plain data, the table printed from them and the JSON file."""

import json
import os
import platform
import shlex
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

import dtensor_gtp
from harness import Memory, World, median
from memory_model import Peak
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
        memory: None on CPU and for CUDA graphs.
        loss: of the first step from the initial weights of this phase, mean over the processes.
        grad_norm: total norm of that step's gradient; None where gradients are not reduced.
        predicted: what the peak memory should be, and why; None for modes whose plan is not known.
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

    @property
    def key(self) -> tuple[str, int, str]:
        return self.mode, self.seq_len, self.phase

    @property
    def ms(self) -> float:
        return median(self.samples_ms)

    def merged(self, later: "Measurement") -> "Measurement":
        """This measurement with the samples of a later round of the same thing."""
        memory = self.memory
        if memory is not None and later.memory is not None:
            pairs = zip(asdict(memory).values(), asdict(later.memory).values(), strict=True)
            memory = Memory(*(max(pair) for pair in pairs))
        return replace(self, samples_ms=self.samples_ms + later.samples_ms, memory=memory)


def rows(measurements: Iterable[Measurement]) -> list[dict[str, Any]]:
    """One flat record per measurement, with the ratios to its peers at the same length and phase.

    ``ratio_fsdp2`` is to the fastest of the FSDP2 modes, ``ratio_compute`` to the compute mode, ``ratio_eager`` of a
    compiled mode to the same mode without compilation, ``ratio_torchao`` of a mode with a recipe to the fastest of
    torchao's; None where the peer was not measured.
    """
    measured = list(measurements)
    records = []
    for item in measured:
        peers = [m for m in measured if (m.seq_len, m.phase) == (item.seq_len, item.phase)]
        fsdp2 = min((m.ms for m in peers if m.mode.startswith("fsdp2")), default=None)
        torchao = min((m.ms for m in peers if m.mode.startswith("torchao") and RECIPE in item.mode), default=None)
        times = {m.mode: m.ms for m in peers}
        compute = times.get("compute")
        eager = times.get(item.mode.removesuffix(COMPILED)) if item.mode.endswith(COMPILED) else None
        memory = item.memory
        records.append(
            {
                "mode": item.mode,
                "seq_len": item.seq_len,
                "phase": item.phase,
                "ms": item.ms,
                "ms_min": min(item.samples_ms),
                "ms_max": max(item.samples_ms),
                "samples_ms": item.samples_ms,
                "tokens_per_s_per_gpu": item.tokens_per_step / item.ms * 1e3,
                "ratio_fsdp2": item.ms / fsdp2 if fsdp2 else None,
                "ratio_compute": item.ms / compute if compute else None,
                "ratio_eager": item.ms / eager if eager else None,
                "ratio_torchao": item.ms / torchao if torchao else None,
                "peak_bytes": memory.peak if memory else None,
                "peak_above_state_bytes": memory.peak - memory.state if memory else None,
                "state_bytes": memory.state if memory else None,
                "resident_bytes": memory.resident if memory else None,
                "reserved_bytes": memory.reserved if memory else None,
                "leftover_bytes": memory.leftover if memory else None,
                "predicted_peak": item.predicted._asdict() | {"total": item.predicted.total}
                if item.predicted
                else None,
                "loss": item.loss,
                "grad_norm": item.grad_norm,
            }
        )
    return records


def memory_lines(measurements: Iterable[Measurement]) -> list[str]:
    """For each measurement with a prediction, what its peak memory consists of."""
    return [
        f"{item.mode}, {item.phase}, T={item.seq_len}: "
        + item.predicted.describe(item.memory.peak if item.memory else None)
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
    header = ["phase", "T", "mode", "ms", "tokens/s/GPU", *ratios, "peak GiB", "above state GiB"]
    lines = [
        [
            r["phase"],
            str(r["seq_len"]),
            r["mode"],
            _number(r["ms"], 1),
            _number(r["tokens_per_s_per_gpu"], 0),
            _number(r["ratio_fsdp2"], 3),
            _number(r["ratio_compute"], 3),
            *(_number(r[f"ratio_{name}"], 3) for name in extra),
            _number(r["peak_bytes"], 2, 2**30),
            _number(r["peak_above_state_bytes"], 2, 2**30),
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
