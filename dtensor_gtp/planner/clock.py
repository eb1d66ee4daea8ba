"""Times of repeated work on one device, of a CPU by the clock, of a GPU by its events, and the machine that follows.

On a GPU the work is queued behind GEMMs that keep it busy. So the host's launches do not count, unless it is the host
that is timed.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from .machine import FACTORS, Link, Machine

Work = Callable[[], object]

_SAMPLES = 10
_SUSTAINED_SECONDS = 0.4  # clocks of a GPU settle within it
_MOST_SAMPLES = 2000
_HEAD_START_DIM = 8192


class Clock:
    """Seconds of one call, medians of several samples. This one is for CPUs, where nothing runs beside."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def time(self, work: Work, calls: int = 1, *, is_sustained: bool = False) -> float:
        """Of the device; ``calls`` are queued for one sample. ``is_sustained``: until clocks have settled, of which the
        second half counts. Each rank then has its own number of samples, so ``work`` must be no collective."""
        samples = []
        for _ in range(_SAMPLES):
            work()
            begin = time.perf_counter()
            for _ in range(calls):
                work()
            samples.append((time.perf_counter() - begin) / calls)
        return statistics.median(samples)

    def time_host(self, work: Work) -> float:
        """Until the call returns, while the device is idle."""
        return self.time(work)

    def time_with(self, work: Work, calls: int, other: Work, other_calls: int, *, joins: bool) -> float | None:
        """Of ``calls`` beside ``other`` on another stream; ``joins``: of all of both. None if there are no streams."""
        return None


def new_stream(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class EventClock(Clock):
    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self._stream = new_stream(device)
        shape = (_HEAD_START_DIM, _HEAD_START_DIM)
        self._a, self._out = (torch.randn(shape, device=device).to(torch.bfloat16) for _ in range(2))

    def _head_start(self, num: int) -> None:
        for _ in range(num):
            torch.mm(self._a, self._a, out=self._out)

    def time(self, work: Work, calls: int = 1, *, is_sustained: bool = False) -> float:
        work()
        torch.cuda.synchronize(self.device)
        samples: list[float] = []
        stop = time.perf_counter() + _SUSTAINED_SECONDS * is_sustained
        while len(samples) < _SAMPLES or (len(samples) < _MOST_SAMPLES and time.perf_counter() < stop):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            self._head_start(2 + calls // 20)
            work()  # after a collective all ranks begin together
            begin.record()
            for _ in range(calls):
                work()
            end.record()
            end.synchronize()
            samples.append(float(begin.elapsed_time(end)) / 1e3 / calls)
        return statistics.median(samples[len(samples) // 2 * is_sustained :])

    def time_host(self, work: Work) -> float:
        work()
        samples = []
        for _ in range(_SAMPLES):
            torch.cuda.synchronize(self.device)
            begin = time.perf_counter()
            work()
            samples.append(time.perf_counter() - begin)
        torch.cuda.synchronize(self.device)
        return statistics.median(samples)

    def time_with(self, work: Work, calls: int, other: Work, other_calls: int, *, joins: bool) -> float | None:
        samples = []
        current = torch.cuda.current_stream(self.device)
        for _ in range(_SAMPLES):
            torch.cuda.synchronize(self.device)
            self._head_start(4 + (calls + other_calls) // 20)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            if joins:
                begin.record()
            self._stream.wait_stream(current)
            with torch.cuda.stream(self._stream):
                for _ in range(other_calls):
                    other()
            if not joins:
                work()
                begin.record()
            for _ in range(calls):
                work()
            if joins:
                current.wait_stream(self._stream)
            end.record()
            torch.cuda.synchronize(self.device)
            samples.append(float(begin.elapsed_time(end)) / 1e3)
        return statistics.median(samples)


class Sample(NamedTuple):
    """How much took how many seconds: operations of a GEMM, bytes touched or received, kernels, calls, weights."""

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
        if not found:
            return None
        return statistics.median(sample.seconds / sample.amount for sample in found)


def fitted(machine: Machine, samples: Samples, *, fast: int = 1, network: int = 1, together: int = 1) -> Machine:
    """``machine`` with all numbers that follow from the samples; its ``not_measured`` names the others. ``fast`` and
    ``network`` ranks measured these links, 1 if nobody did; the host launched as many weights ``together``."""
    found = {
        "fast": _link(machine.fast, "fast", samples, fast),
        "copy": _copies(machine, samples, fast),
        "network": _link(machine.network, "network", samples, network),
        "compute": _compute(machine, samples),
        "host": _host(samples, together),
        "contention": samples.beside,
    }
    # never measured
    missing = ["reserve_gib", "jitter"]
    changes = {}
    for part, values in found.items():
        changes[part] = replace(getattr(machine, part), **values)
        # A data sheet has ``gb_s``, of which a share is measured.
        left = [f"{part}.{name}" for name in vars(changes[part]) if name not in values and name != "gb_s"]
        if values:
            missing += left
        else:
            missing.append(part)
    return replace(machine, **changes, not_measured=tuple(missing))


# Fields of ``Compute``, the kinds of their samples, and the peaks that they are shares of.
_SHARES = (
    ("gemm", "bf16 GEMM", "bf16"),
    ("float8_gemm", "float8 tensorwise GEMM", "float8"),
    ("float8_rowwise_gemm", "float8 rowwise GEMM", "float8"),
    ("attention", "attention", "bf16"),
    ("hbm", "memory", "hbm"),
    ("cast", "cast", "hbm"),
)


def _compute(machine: Machine, samples: Samples) -> dict[str, Any]:
    kernel = samples.seconds("kernel")
    found: dict[str, Any] = {}
    gap = machine.compute.kernel_us / 1e6
    if kernel is not None:
        found["kernel_us"] = kernel * 1e6
        gap = kernel

    def share(sample: Sample, peak: float, most: float) -> float:
        # The planner adds the gap to each kernel.
        return min(sample.amount / max(sample.seconds - gap, sample.seconds / 2) / peak, most)

    peaks = {name: peak * 1e12 for name, peak in machine.peak_tflops.items()} | {"hbm": machine.hbm_gb_s * 1e9}
    for name, kind, peak in _SHARES:
        if (rows := samples.by_kind.get(kind)) and peak in peaks:
            most = 1.0
            if peak == "hbm":
                most = 1.5
            curve = tuple((row.amount, share(row, peaks[peak], most)) for row in sorted(rows))
            found[name] = curve
            if not name.endswith("gemm"):
                found[name] = statistics.median(part for _, part in curve)
    return found


def _host(samples: Samples, together: int) -> dict[str, Any]:
    """A sharded weight costs two uses, two gathers and a reduction; copies and ``fully_shard`` launch ``together``."""
    kinds = ("op", "collective", "plain layer", "sharded layer", "copied layer", "fully_shard layer")
    op, call, plain, sharded, copied, fully = (samples.seconds(f"host: {kind}") for kind in kinds)
    found = {"op_us": op, "collective_us": call}
    if plain is not None and sharded is not None:
        call = call or 0.0
        uses = max(sharded - plain - 3 * call, 0.0)
        found["use_us"] = uses / 2
        if copied is not None:
            found["copy_us"] = (copied - plain - uses) * together / 3
        if fully is not None:
            # Per parameter, a gather and a wait in each pass and a reduction of two quarters: see ``fully_shard``.
            found["fsdp_use_us"] = (fully - plain - 3 * call / together) / 1.5
    return {name: max(seconds, 0.0) * 1e6 for name, seconds in found.items() if seconds is not None}


def _link(link: Link, name: str, samples: Samples, size: int) -> dict[str, Any]:
    """Gathers and reductions by size: the median rate of the largest ones, and the start of the smallest ones."""
    kinds = [rows for kind in ("gather", "reduce") if (rows := samples.by_kind.get(f"{name}: {kind}"))]
    if not kinds or size == 1:
        return {}
    rate, start = _line(kinds)
    return {"share": min(rate / 1e9 / link.gb_s, 2.0), "start_us": max(start * 1e6 - link.hop_us * (size - 1), 0.0)}


def _line(kinds: Sequence[list[Sample]]) -> tuple[float, float]:
    """The rate of large messages and the time before the first byte, by the smallest and the two largest sizes."""
    rates = []
    by_size = [sorted(rows) for rows in kinds]
    for *_, small, large in by_size:
        grown = large.seconds - small.seconds
        # Noise of a small machine may hide the difference.
        if grown > large.seconds / 4:
            rates.append((large.amount - small.amount) / grown)
        else:
            rates.append(large.rate)
    rate = statistics.mean(rates)
    return rate, max(statistics.mean(rows[0].seconds - rows[0].amount / rate for rows in by_size), 0.0)


def _copies(machine: Machine, samples: Samples, size: int) -> dict[str, Any]:
    """A copy starts for each tensor and each peer, behind barriers of all peers."""
    rows = samples.by_kind.get("copy: gather")
    tensors = samples.by_kind.get("copy: tensors")
    if not rows or not tensors or size == 1:
        return {}
    rate, _ = _line([rows])
    few = min(tensors)
    many = max(tensors)
    start = max((many.seconds - few.seconds) / (many.amount - few.amount) / (size - 1), 0.0)
    barrier = max(few.seconds / (size - 1) - few.amount * start, 0.0)
    return {"share": min(rate / 1e9 / machine.copy.gb_s, 2.0), "start_us": start * 1e6, "hop_us": barrier * 1e6}
