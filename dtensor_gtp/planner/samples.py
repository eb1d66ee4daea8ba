"""What ``--calibrate`` measures, and the numbers of a machine that follow from it. Nothing here runs on a device."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

from .machine import FACTORS, Link, Machine


class Sample(NamedTuple):
    """One measurement: how much of something took how many seconds. What is counted depends on the kind: operations of
    a GEMM, bytes that a kernel reads and writes or a rank receives, kernels, calls, weights."""

    amount: float
    seconds: float

    @property
    def rate(self) -> float:
        return self.amount / self.seconds


class Samples(NamedTuple):
    """All measurements by kind; kinds that could not be measured are missing."""

    by_kind: dict[str, list[Sample]]
    beside: dict[str, float]  # how many times as long work takes beside other work

    def add(self, kind: str, amount: float, seconds: float) -> None:
        self.by_kind.setdefault(kind, []).append(Sample(amount, seconds))

    def add_beside(self, name: str, alone: float, beside: float) -> None:
        """Seconds of work alone, and of the same work beside other work."""
        self.beside[name] = min(max(beside / alone, FACTORS[0]), FACTORS[1])

    def seconds(self, kind: str) -> float | None:
        """Of one unit of a kind with one sample; None if it is missing."""
        found = self.by_kind.get(kind)
        return None if not found else statistics.median(sample.seconds / sample.amount for sample in found)


def fitted(machine: Machine, samples: Samples, *, fast: int = 1, network: int = 1, together: int = 1) -> Machine:
    """``machine`` with all numbers that follow from the samples; its ``not_measured`` names the others. ``fast`` and
    ``network`` ranks measured these links, 1 if nobody did; the host launched as many weights ``together``."""
    found = {
        "compute": _compute(machine, samples),
        "host": _host(samples, together),
        "fast": _link(machine.fast, "fast", samples, fast),
        "network": _link(machine.network, "network", samples, network),
        "copy": _copies(machine, samples, fast),
        "contention": samples.beside,
    }
    missing, changes = ["reserve_gib", "jitter"], {}  # never measured
    for part in ("fast", "copy", "network", "compute", "host", "contention"):
        values = found[part]
        changes[part] = replace(getattr(machine, part), **values)
        # A data sheet has ``gb_s``, of which a share is measured.
        left = [f"{part}.{name}" for name in vars(changes[part]) if name not in values and name != "gb_s"]
        missing += left if values else [part]
    return replace(machine, **changes, not_measured=tuple(missing))


def _compute(machine: Machine, samples: Samples) -> dict[str, Any]:
    found: dict[str, Any] = {}
    kernel = samples.seconds("kernel")
    if kernel is not None:
        found["kernel_us"] = kernel * 1e6
    gap = machine.compute.kernel_us / 1e6 if kernel is None else kernel

    def share(sample: Sample, peak: float, most: float) -> float:
        # The planner adds the gap to each kernel.
        return min(sample.amount / max(sample.seconds - gap, sample.seconds / 2) / peak, most)

    kinds = (
        ("gemm", "bf16 GEMM", "bf16"),
        ("float8_gemm", "float8 tensorwise GEMM", "float8"),
        ("float8_rowwise_gemm", "float8 rowwise GEMM", "float8"),
    )
    for name, kind, precision in kinds:
        if (rows := samples.by_kind.get(kind)) and precision in machine.peak_tflops:
            peak = machine.peak_tflops[precision] * 1e12
            found[name] = tuple((row.amount, share(row, peak, 1.0)) for row in sorted(rows))
    peaks = {
        "attention": ("attention", machine.peak_tflops["bf16"] * 1e12, 1.0),
        "hbm": ("memory", machine.hbm_gb_s * 1e9, 1.5),
        "cast": ("cast", machine.hbm_gb_s * 1e9, 1.5),
    }
    for name, (kind, peak, most) in peaks.items():
        if rows := samples.by_kind.get(kind):
            found[name] = statistics.median(share(row, peak, most) for row in rows)
    return found


def _host(samples: Samples, together: int) -> dict[str, Any]:
    """A sharded weight costs the host two uses and three launches: two gathers and a reduction. Copies are launched for
    ``together`` weights at once, and so are collectives of ``fully_shard``."""
    found: dict[str, Any] = {}

    def put(name: str, seconds: float) -> None:
        found[name] = max(seconds, 0.0) * 1e6

    for name, kind in (("op_us", "host: op"), ("collective_us", "host: collective")):
        if (seconds := samples.seconds(kind)) is not None:
            put(name, seconds)
    plain, sharded = samples.seconds("host: plain layer"), samples.seconds("host: sharded layer")
    if plain is None or sharded is None:
        return found
    call = samples.seconds("host: collective") or 0.0
    uses = max(sharded - plain - 3 * call, 0.0)
    put("use_us", uses / 2)
    if (copied := samples.seconds("host: copied layer")) is not None:
        put("copy_us", (copied - plain - uses) * together / 3)
    if (fully := samples.seconds("host: fully_shard layer")) is not None:
        # Per parameter, a gather and a wait in each pass and a reduction of two quarters: see ``fully_shard``.
        put("fsdp_use_us", (fully - plain - 3 * call / together) / 1.5)
    return found


def _link(link: Link, name: str, samples: Samples, size: int) -> dict[str, Any]:
    """Gathers and reductions by size: the median rate of the largest ones, and the start of the smallest ones."""
    kinds = [rows for kind in ("gather", "reduce") if (rows := samples.by_kind.get(f"{name}: {kind}"))]
    if not kinds or size == 1:
        return {}
    rate, start = _line(kinds)
    return {"share": min(rate / 1e9 / link.gb_s, 2.0), "start_us": max(start * 1e6 - link.hop_us * (size - 1), 0.0)}


def _line(kinds: Sequence[list[Sample]]) -> tuple[float, float]:
    """The rate of large messages and the time before the first byte, by the smallest and the two largest sizes."""

    def of(function: Callable[[list[Sample]], float]) -> float:
        return statistics.mean(function(sorted(rows)) for rows in kinds)

    def rate(rows: list[Sample]) -> float:
        small, large = rows[-2], rows[-1]
        grown = large.seconds - small.seconds
        # Noise of a small machine may hide the difference.
        return (large.amount - small.amount) / grown if grown > large.seconds / 4 else large.rate

    found = of(rate)
    return found, max(of(lambda rows: rows[0].seconds - rows[0].amount / found), 0.0)


def _copies(machine: Machine, samples: Samples, size: int) -> dict[str, Any]:
    """A copy starts for each tensor and each peer, behind barriers of all peers."""
    rows, tensors = samples.by_kind.get("copy: gather"), samples.by_kind.get("copy: tensors")
    if not rows or not tensors or size == 1:
        return {}
    rate, _ = _line([rows])
    few, many = min(tensors), max(tensors)
    start = max((many.seconds - few.seconds) / (many.amount - few.amount) / (size - 1), 0.0)
    barrier = max(few.seconds / (size - 1) - few.amount * start, 0.0)
    share = min(rate / 1e9 / machine.copy.gb_s, 2.0)
    return {"share": share, "start_us": start * 1e6, "hop_us": barrier * 1e6}
