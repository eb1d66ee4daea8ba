"""Who moves the bytes of one communicator: the process group itself, copy engines, or a class of the user's.

A backend belongs to one communicator, gather or scatter, and is called in the same order on all of its ranks. Where
there are streams, it orders its work on the current one. A backend that cannot be had raises on all ranks of the mesh
and names the reason; the automatic choice goes on without it.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
import torch.distributed as dist

from .. import _torch_compat as compat
from ..policy import GatherBackend, SchedulePolicy
from . import collectives
from .collectives import Works
from .copy_engine import CastingBackend, CopyEngine
from .probe import SIZE, Probe
from .send_ring import SendRing
from .zero_cta import ZeroCTA

T = TypeVar("T")


# Makes a stream for communication; None where there are no streams.
NewStream = Callable[[], torch.Stream | None]


logger = logging.getLogger(__name__)


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
    """A backend, its name, and why it was taken."""

    name: str
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


def choose_gather_backend(
    schedule: SchedulePolicy, groups: list[dist.ProcessGroup], device: torch.device, new_stream: NewStream
) -> Choice:
    """The backend that ``schedule`` asks for. Collective over all ``groups``.

    Args:
        groups: The gather communicator first, then those of the mesh's other axes, whose ranks are to agree.

    Raises:
        RuntimeError: It cannot be had on some rank; raised on all ranks.
    """
    asked = schedule.gather_backend
    process_group = ProcessGroupBackend(groups[0], device)
    if asked == "process_group":
        return Choice(asked, process_group, "asked for")
    if asked == "auto":
        return _automatic(process_group, groups, device, new_stream)
    factory: type[GatherBackend]
    factory = asked if isinstance(asked, type) else CopyEngine if asked == "copy_engine" else ZeroCTA
    backend = _make_on_all_ranks(factory, groups, device, factory.__name__)
    return Choice(asked if isinstance(asked, str) else factory.__name__, backend, "asked for")


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
    """What ``factory`` makes of the first of ``groups``. Collective over all of them.

    Raises:
        RuntimeError: It raises on some rank of ``groups``. Raised on all of them, with the reasons.
    """
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


def _automatic(
    process_group: GatherBackend, groups: list[dist.ProcessGroup], device: torch.device, new_stream: NewStream
) -> Choice:
    """The fastest of those that can be had, which all ranks of ``groups`` make and time alike."""
    made: dict[str, GatherBackend] = {}
    timed: dict[str, _Timed] = {}
    missing = []
    factories: dict[str, type[GatherBackend]] = {"copy_engine": CopyEngine, "zero_cta": ZeroCTA}
    for name, factory in factories.items():
        try:
            made[name] = _make_on_all_ranks(factory, groups, device, name)
        except RuntimeError as error:
            missing.append(str(error))

    def make_probe(group: dist.ProcessGroup, device: torch.device) -> Probe:
        return Probe(group.size(), device, new_stream())

    try:
        # Like the backends, agreed upon before anything is gathered: where one rank has none, the others would wait.
        probe = _make_on_all_ranks(make_probe, groups, device, "their measurement") if made else None
    except RuntimeError as error:
        missing.append(str(error))
        made.clear()
    for name, backend in made.items():
        assert probe is not None
        if isinstance(backend, CastingBackend):
            backend.cast_stream = new_stream()
        try:
            timed[name] = _make_on_all_ranks(functools.partial(_timed, backend, probe), groups, device, name)
        except RuntimeError as error:
            missing.append(str(error))
    if not timed:
        without = "; ".join(missing)
        logger.warning("gather backend: process_group, because %s", without)
        return Choice("process_group", process_group, without)
    assert probe is not None
    timed["process_group"] = _timed(process_group, probe, groups[0], device)
    best, reason = _fastest(timed, groups, device)
    reason = "; ".join((reason, *missing))
    logger.warning("gather backend: %s (%s)", best, reason)
    # A communicator of zero_cta that is not taken stays: to end one with which memory is registered makes the allocator
    # fail when it frees that memory (torch 2.11, DistBackendError in empty_cache).
    return Choice(best, timed[best].backend, reason)


class _Timed(NamedTuple):
    """A backend, the time of a gather and a GEMM beside each other, and that of the GEMM alone."""

    backend: GatherBackend
    ms: float
    gemm_ms: float


def _timed(backend: GatherBackend, probe: Probe, group: dist.ProcessGroup, device: torch.device) -> _Timed:
    return _Timed(backend, probe.gather_ms(backend), probe.gemm_ms())


def _fastest(timed: dict[str, _Timed], groups: list[dist.ProcessGroup], device: torch.device) -> tuple[str, str]:
    """The name of the one whose slowest rank is first, and what was measured.

    The largest of all ranks' times is taken over each of ``groups`` in turn, so that all ranks of the mesh compare the
    same numbers.
    """
    slowest = torch.tensor([(one.ms, one.gemm_ms) for one in timed.values()]).to(device)
    for group in groups:
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
    measured = dict(zip(timed, slowest.tolist(), strict=True))
    best = min(measured, key=lambda name: measured[name][0])
    alone = min(gemm_ms for _, gemm_ms in measured.values())
    each = ", ".join(f"{name} {ms:.2f} ms" for name, (ms, _) in measured.items())
    return best, f"a gather of {SIZE.nbytes >> 20} MiB beside a GEMM of {alone:.2f} ms: {each}"
