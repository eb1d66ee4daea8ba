"""The communicators of one weight mesh: who gathers and reduces in them, and how a sum over ranks
becomes a gradient.

A gather backend is the process group, copy engines, or a class that the user passes. All ranks of a
communicator call it in the same order. Where there are streams, it works on the current one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch_compat as compat
from .._howto import see
from ..policy import GatherBackend, GatherBackendName, ReduceScatterKind, Schedule, SchedulePolicy
from .agreement import by_rank
from .copy_engine import ALIGNMENT, CopyEngine
from .send_ring import SendRing

T = TypeVar("T")
# Bytes that all ranks together send in a round of copy engines, even if weights are gathered one by one.
_LEAST_ROUND = 32 << 20
# A large gradient that travels alone: 4096 x 14336 elements in 16 bits.
_GRADIENT_NBYTES = 128 << 20


def has_replicas(mesh: DeviceMesh) -> bool:
    """Whether other ranks hold the same shards, as in a (replicate, gtp) mesh."""
    return mesh.ndim == 2 and mesh.size(0) > 1


@dataclass(frozen=True)
class Groups:
    """Communicators of one weight mesh. Gathers and reduce-scatters have one each, so that they
    overlap in backward; if copy engines gather, both have the same name.

    It keeps names: a group object would outlive ``destroy_process_group`` and be torn down at
    interpreter exit, while its threads still run.
    """

    gather_name: str
    scatter_name: str
    replicate_name: str | None
    # Whether the gather backend casts shards and fills this rank's part of the output (``CopyEngine``).
    casts_shards: bool = False
    reduce_scatter: ReduceScatterKind = "ring"
    sends_narrow: bool = False  # see :func:`may_send_narrow`

    @property
    def gather(self) -> dist.ProcessGroup:
        return compat.resolve_group(self.gather_name)

    @property
    def scatter(self) -> dist.ProcessGroup:
        return compat.resolve_group(self.scatter_name)

    @property
    def replicate(self) -> dist.ProcessGroup | None:
        """The group of the replicate axis; None if there is no such axis or it has one rank."""
        if self.replicate_name is None:
            return None
        return compat.resolve_group(self.replicate_name)


def may_send_narrow(kind: ReduceScatterKind, num_ranks: int) -> bool:
    """Whether gradients of 16 bits travel as they are within a host, and receivers add them in
    ``reduce_dtype``: the same sum with half the bytes. Between hosts, a ring has fewer bytes to
    send."""
    return kind == "ring" and num_ranks > 1


def is_exact_in(dtype: torch.dtype, wide: torch.dtype) -> bool:
    """Whether ``wide`` has more bytes, and each value of ``dtype``."""
    return dtype.itemsize < wide.itemsize and torch.promote_types(dtype, wide) == wide


class ReduceScale(NamedTuple):
    """How a sum over ranks becomes the gradient: the collective's operation, and the divisors
    before and after it."""

    op: dist.ReduceOp.RedOpType
    predivide: float | None
    postdivide: float | None


@functools.lru_cache(maxsize=64)  # the factor may change in each step
def reduce_scale(dtype: torch.dtype, num_ranks: int, factor: float | None) -> ReduceScale:
    """Average over ``num_ranks``, or divide the sum by ``factor`` if there is one.

    The sum of many ranks overflows float16, so half of the division (about the root) comes before
    the sum, as in torch's ``fully_shard`` (``_get_gradient_divide_factors``).
    """
    if dtype != torch.float16:
        if factor is None:
            return ReduceScale(dist.ReduceOp.AVG, None, None)
        if factor == 1:
            return ReduceScale(dist.ReduceOp.SUM, None, None)
        return ReduceScale(dist.ReduceOp.SUM, None, factor)
    if factor is None:
        factor = float(num_ranks)
    # A power of two near the root of the factor.
    predivide = 1.0
    while factor % predivide == 0 and factor / predivide > predivide:
        predivide *= 2
    return ReduceScale(dist.ReduceOp.SUM, predivide, factor / predivide)


class _Works:
    """Background works. The first wait drops them: a complete work keeps its tensors alive."""

    def __init__(self, works: Iterable[dist.Work | None]) -> None:
        self._works = [work for work in works if work is not None]

    def wait(self) -> None:
        for work in self._works:
            work.wait()
        self._works.clear()


class ProcessGroupBackend:
    """The collectives of the process group: NCCL's kernels, gloo's threads. Keeps only its name,
    see ``Groups``."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device) -> None:
        self._group_name = group.group_name
        self._is_async = device.type == "cpu"  # elsewhere streams order it

    def all_gather(self, outputs: list[Tensor], shards: list[Tensor]) -> dist.Work | _Works | None:
        group = compat.resolve_group(self._group_name)
        if len(outputs) == 1:
            return compat.all_gather_base(outputs[0], shards[0], group, self._is_async)
        # NCCL takes tensors of several dtypes in one launch.
        if not self._is_async:
            return compat.all_gather_coalesced(outputs, shards, group, False)
        return _Works(compat.all_gather_by_dtype(outputs, shards, group))


def refuse_unavailable(policy: SchedulePolicy, device_type: str) -> None:
    """Raises:
    ValueError: The policy asks for copy engines by name, but the device has none.
    """
    for name in ("gather_backend", "reduce_scatter"):
        if getattr(policy, name) == "copy_engine" and device_type != "cuda":
            raise ValueError(
                f"gtp_shard expects a mesh of GPUs with SchedulePolicy({name}='copy_engine'), but "
                f"got one of '{device_type}', which has no copy engines. Leave out {name}."
            )


def choose_gather_backend(
    schedule: Schedule, groups: list[dist.ProcessGroup], device: torch.device, known: GatherBackend | None = None
) -> tuple[GatherBackend, GatherBackendName | type[GatherBackend], str]:
    """The backend that ``schedule`` asks for, its name in a policy, and why "auto" takes it.
    Collective over all ``groups``: the gather communicator first, then those of the mesh's other
    axes, whose ranks must agree. ``known``: the backend that another mesh has for the gather
    communicator.

    "auto" takes copy engines if all ranks can have them: they were faster in each measurement.
    """
    asked = schedule.gather_backend
    if asked == "process_group":
        return ProcessGroupBackend(groups[0], device), asked, ""

    def make(group: dist.ProcessGroup, device: torch.device) -> GatherBackend:
        # Called also if one is known: peers on other axes may know none, and all must agree.
        if known is not None and not isinstance(known, ProcessGroupBackend):
            return known
        if isinstance(asked, type):
            return asked(group, device)
        return CopyEngine(group, device, round_nbytes=round_nbytes(schedule, group.size()))

    if isinstance(asked, type):
        advice = f". {see('add_a_gather_backend')}"
        return _make_on_all_ranks(make, groups, device, asked.__name__, advice), asked, ""
    # Each rank must know of the others' errors, and take the same backend.
    try:
        engine = _make_on_all_ranks(make, groups, device, "copy_engine")
        return engine, "copy_engine", "one host"
    except RuntimeError as error:  # raised on all ranks alike, so all of them take the process group
        if asked != "auto":
            raise
        return ProcessGroupBackend(groups[0], device), "process_group", str(error)


def resolve_reduce_scatter(asked: ReduceScatterKind | Literal["auto"], gathers: str) -> ReduceScatterKind:
    """What "auto" becomes: copy engines where ``gathers`` are by them."""
    if asked != "auto":
        return asked
    if gathers == "copy_engine":
        return "copy_engine"
    return "ring"


def choose_reduce_scatter(
    schedule: Schedule, groups: list[dist.ProcessGroup], device: torch.device, gathers: str
) -> tuple[SendRing | None, ReduceScatterKind, str]:
    """The ring that peers fetch gradients from, the kind that ``schedule`` asks for, and why "auto"
    takes it. Collective over all ``groups``, the scatter communicator first."""
    asked = schedule.reduce_scatter
    kind = resolve_reduce_scatter(asked, gathers)
    if kind != "copy_engine":
        return None, kind, f"gathers by {gathers}"
    enough = enough_nbytes(schedule)
    if gathers == "copy_engine":
        # These ranks map each other's memory already, so the first use may make the ring.
        ring = SendRing(groups[0], device, enough, nbytes=0)
        return ring, "copy_engine", "one host"
    # Whether these can is not known yet: a first small stage tries it.
    factory = functools.partial(SendRing, enough_nbytes=enough)
    ring = _make_on_all_ranks(factory, groups, device, "the send ring of reduce_scatter='copy_engine'")
    return ring, "copy_engine", ""


def round_nbytes(schedule: Schedule, num_ranks: int) -> int:
    """What a rank sends in a round of copy engines: half of its stage."""
    return max(schedule.coalesce_nbytes, _LEAST_ROUND) // num_ranks // ALIGNMENT * ALIGNMENT  # halves begin aligned


def enough_nbytes(schedule: Schedule) -> int:
    """The size up to which a send ring grows so that more is in flight: all groups in flight, and
    the next one."""
    group_nbytes = max(schedule.coalesce_grad_nbytes, _GRADIENT_NBYTES)
    return (schedule.max_inflight_reduce_scatters + 1) * group_nbytes


def _make_on_all_ranks(
    factory: Callable[[dist.ProcessGroup, torch.device], T],
    groups: list[dist.ProcessGroup],
    device: torch.device,
    name: str,
    advice: str = "",
) -> T:
    """The result of ``factory`` for the first of ``groups``; if it raises on some rank, all ranks
    raise."""
    made: T | None = None
    reason = ""
    try:
        made = factory(groups[0], device)
    except Exception as error:  # the other ranks must know of any error
        reason = f"{type(error).__name__}: {error}"
    # Collective, so that a rank without an error does not go on alone.
    reasons = [f"rank {rank}: {other}" for rank, other in by_rank(reason, groups).items() if other]
    if reasons:
        ranks = dist.get_process_group_ranks(groups[0])
        raise RuntimeError(f"{name} is not available to ranks {ranks} ({'; '.join(reasons)}){advice}")
    assert made is not None
    return made
