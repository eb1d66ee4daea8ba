"""Who moves the bytes of one communicator: the process group itself, copy engines, or a class of the user's.

A backend belongs to one communicator, gather or scatter, and is called in the same order on all of its ranks. Where
there are streams, it orders its work on the current one. A backend that cannot be had raises on all ranks of the mesh
and names the reason; the automatic choice goes on without it.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable
from statistics import median
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from .. import _torch_compat as compat
from ..policy import GatherBackend, SchedulePolicy
from . import collectives
from .collectives import Works
from .copy_engine import CopyEngine
from .send_ring import SendRing
from .zero_cta import ZeroCTA

T = TypeVar("T")

logger = logging.getLogger(__name__)

# What the automatic choice times: about a weight of 4096 x 8192 in bf16, often enough to get past the first launches.
_PROBE_NBYTES = 64 * 2**20
_PROBE_ROUNDS = 8


class ProcessGroupBackend:
    """The collectives of the process group: NCCL's kernels, gloo's threads.

    Args:
        group: The communicator. Its name is kept, see ``Groups``.
        device: Of the tensors.
    """

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group_name = group.group_name
        self._has_streams = device.type != "cpu"

    def all_gather(self, outputs: list[torch.Tensor], shards: list[torch.Tensor]) -> dist.Work | Works | None:
        group = compat.resolve_group(self._group_name)
        return collectives.all_gather_many(outputs, shards, group, self._has_streams)


class Choice(NamedTuple):
    """A backend, and why it was taken."""

    backend: GatherBackend
    reason: str


def refuse_unavailable(schedule: SchedulePolicy, device_type: str, backend: str) -> None:
    """Refuse what the device cannot do, before anything is changed.

    Args:
        device_type: Of the mesh.
        backend: Name of the backend of its process groups for that device, e.g. "nccl".

    Raises:
        ValueError: The policy asks by name for what there is not.
    """
    for name in ("gather_backend", "reduce_scatter"):
        asked = getattr(schedule, name)
        if asked in ("copy_engine", "zero_cta") and device_type != "cuda":
            raise ValueError(
                f"gtp_shard expects a mesh of GPUs with SchedulePolicy({name}='{asked}'), but got one of "
                f"'{device_type}', which has no copy engines. Leave it at its default there."
            )
    limited = [name for name in ("gather_ctas", "scatter_ctas") if getattr(schedule, name) is not None]
    if limited and backend != "nccl":
        raise ValueError(
            f"gtp_shard expects process groups of NCCL with SchedulePolicy({limited[0]}=...), but got '{backend}', "
            "which has no CTAs to limit. Leave it at its default there."
        )


def choose_gather_backend(schedule: SchedulePolicy, groups: list[dist.ProcessGroup], device: torch.device) -> Choice:
    """The backend that ``schedule`` asks for. Collective over all ``groups``.

    Args:
        groups: The gather communicator first, then those of the mesh's other axes, whose ranks are to agree.

    Raises:
        RuntimeError: It cannot be had on some rank; raised on all ranks.
    """
    asked = schedule.gather_backend
    process_group = ProcessGroupBackend(groups[0], device)
    if asked == "process_group":
        return Choice(process_group, "asked for")
    if asked != "auto":
        factory: type[GatherBackend]
        factory = asked if isinstance(asked, type) else CopyEngine if asked == "copy_engine" else ZeroCTA
        return Choice(_make_on_all_ranks(factory, groups, device, factory.__name__), "asked for")
    try:
        copies = _make_on_all_ranks(CopyEngine, groups, device, CopyEngine.__name__)
    except RuntimeError as error:
        logger.warning("gather backend: process_group, because %s", error)
        return Choice(process_group, f"copy_engine: {error}")
    return _faster({"process_group": process_group, "copy_engine": copies}, groups, device)


def make_send_ring(groups: list[dist.ProcessGroup], device: torch.device, enough_nbytes: int) -> SendRing:
    """A ring for the first of ``groups``. Collective over all of them.

    Raises:
        RuntimeError: It cannot be had on some rank; raised on all ranks.
    """
    factory = functools.partial(SendRing, enough_nbytes=enough_nbytes)
    return _make_on_all_ranks(factory, groups, device, "the send ring of reduce_scatter='copy_engine'")


def _make_on_all_ranks(
    factory: Callable[[dist.ProcessGroup, torch.device], T],
    groups: list[dist.ProcessGroup],
    device: torch.device,
    name: str,
) -> T:
    """What ``factory`` makes of the first group, called ``name`` in the error of all ranks if it fails on one."""
    made: T | None = None
    reason = None
    try:
        made = factory(groups[0], device)
    except Exception as error:  # whatever it is, the other ranks must hear of it
        reason = f"{type(error).__name__}: {error}"
    reasons = {dist.get_rank(): reason} if reason is not None else {}
    for group in groups:
        parts: list[dict[int, str]] = [{}] * group.size()
        dist.all_gather_object(parts, reasons, group=group)
        reasons = {rank: other for part in parts for rank, other in part.items()}
    if reasons:
        told = "; ".join(f"rank {rank}: {other}" for rank, other in sorted(reasons.items()))
        raise RuntimeError(f"{name} cannot be had for ranks {dist.get_process_group_ranks(groups[0])} ({told})")
    assert made is not None
    return made


def _faster(backends: dict[str, GatherBackend], groups: list[dist.ProcessGroup], device: torch.device) -> Choice:
    """Time a gather with each; all ranks of the mesh take the one whose slowest rank is first."""
    times = torch.tensor([_gather_ms(backend, groups[0].size(), device) for backend in backends.values()])
    slowest = times.to(device)
    for group in groups:
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    measured = dict(zip(backends, slowest.tolist(), strict=True))
    best = min(measured, key=lambda name: measured[name])
    told = ", ".join(f"{name} {ms:.2f} ms" for name, ms in measured.items())
    logger.warning("gather backend: %s (a gather of %d MiB: %s)", best, _PROBE_NBYTES // 2**20, told)
    return Choice(backends[best], told)


def _gather_ms(backend: GatherBackend, num_ranks: int, device: torch.device) -> float:
    """Median time of a gather in milliseconds."""
    shard = torch.zeros(_PROBE_NBYTES // num_ranks, dtype=torch.uint8, device=device)
    output = torch.empty(num_ranks * shard.numel(), dtype=torch.uint8, device=device)
    samples = []
    for _ in range(_PROBE_ROUNDS):
        begin = time.perf_counter()
        work = backend.all_gather([output], [shard])
        if device.type != "cpu":
            torch.accelerator.current_stream(device.index).synchronize()
        elif work is not None:
            work.wait()
        samples.append((time.perf_counter() - begin) * 1e3)
    return median(samples[_PROBE_ROUNDS // 2 :])
