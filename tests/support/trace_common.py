"""What a GPU has done, by the profiler: which kernels and copies belong to which use of a weight."""

from __future__ import annotations

import json
import re
import tempfile
from bisect import bisect_right
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.profiler import ProfilerActivity, profile

OUTSIDE = "outside of all ranges"
_GEMM = re.compile(r"gemm|gemv|nvjet|cutlass|splitk|cublas")


def trace_of(work: Callable[[], object]) -> dict[str, Any]:
    """The profiler's trace of a piece of work, from when the GPU is idle until it is idle again."""
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        work()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profiler.export_chrome_trace(str(path))
        trace: dict[str, Any] = json.loads(path.read_text())
    return trace


def graph_kernels(trace: dict[str, Any]) -> list[list[tuple[float, float]]]:
    """When the kernels of each CUDA graph ran, in microseconds; graphs in the order of their launches."""
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    launches = (event for event in events if "GraphLaunch" in event["name"] and "correlation" in event.get("args", {}))
    graphs: dict[Any, list[tuple[float, float]]] = {
        event["args"]["correlation"]: [] for event in sorted(launches, key=lambda event: float(event["ts"]))
    }
    for event in events:
        if event.get("cat") == "kernel" and (graph := graphs.get(event["args"].get("correlation"))) is not None:
            graph.append((float(event["ts"]), float(event["ts"]) + float(event["dur"])))
    return [graph for graph in graphs.values() if graph]  # the driver's call may be listed beside the runtime's


def kind_of(event: dict[str, Any]) -> str:
    """What a kernel or copy is; its name, if it is none of what a use consists of."""
    name = event["name"].lower()
    if event["cat"] == "gpu_memcpy":
        return "copy"
    if "nccl" in name:
        return "NCCL"
    if _GEMM.search(name):
        return "GEMM"
    if "reduce_kernel" in name or name == "sum_over_ranks":
        return "sum"
    return "cast" if "elementwise_kernel" in name or "multi_tensor_apply" in name else str(event["name"])


def uses_of(trace: dict[str, Any]) -> dict[str, int]:
    """How often each use of a weight occurs with the kernels and copies that were launched in its range, such as
    ``{"all_gather 0.weight: 1 NCCL, 1 cast": 2}``; what was launched outside of all of them, one by one.

    The kernels of cuBLAS in one range count as one: whether a second one adds up the parts of the first is up to it.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    launches = {
        event["args"]["correlation"]: event
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event["args"]
    }
    ranges = defaultdict(list)
    for event in events:
        if event.get("cat") == "user_annotation" and event["name"].startswith("GTP::"):
            ranges[event["tid"]].append((float(event["ts"]), float(event["ts"]) + float(event["dur"]), event["name"]))
    works: dict[tuple[Any, ...], Counter[str]] = {
        (tid, *range_): Counter() for tid, of_thread in ranges.items() for range_ in sorted(of_thread)
    }
    uses: Counter[str] = Counter()
    for event in events:
        if event.get("cat") not in ("kernel", "gpu_memcpy"):
            continue
        range_ = _range_of(launches.get(event["args"].get("correlation")), ranges)
        if range_ is None:
            uses[f"{OUTSIDE}: {event['name']}"] += 1
        else:
            works[range_][kind_of(event)] += 1
    for (*_, name), work in works.items():
        parts = [f"{1 if kind == 'GEMM' else num} {kind}" for kind, num in sorted(work.items())]
        kind, _, names = name.removeprefix("GTP::").partition(" ")
        uses[f"{kind} {names.strip('()')}: {', '.join(parts)}"] += 1
    return dict(uses)


def _range_of(launch: dict[str, Any] | None, ranges: dict[Any, list[tuple[float, float, str]]]) -> Any:
    """The innermost range that a launch is in: of those that have not ended, the last to begin."""
    if launch is None:
        return None
    of_thread = sorted(ranges.get(launch["tid"], ()))
    at = float(launch["ts"])
    begun = of_thread[: bisect_right(of_thread, at, key=lambda range_: range_[0])]
    return next(((launch["tid"], *range_) for range_ in reversed(begun) if at < range_[1]), None)
