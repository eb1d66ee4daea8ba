"""The communicators of one weight mesh, and how their collectives reduce."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch_compat as compat
from ..policy import ReduceScatterKind

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def has_replicas(mesh: DeviceMesh) -> bool:
    """Whether other ranks hold the same shards, as in a (replicate, gtp) mesh."""
    return mesh.ndim == 2 and mesh.size(0) > 1


@dataclass(frozen=True)
class Groups:
    """Communicators of one weight mesh. Gathers and reduce-scatters have one each, so that they overlap in backward; if
    copy engines gather, both have the same name.

    It keeps names: a group object would outlive ``destroy_process_group`` and be torn down at interpreter exit, while
    its threads still run.
    """

    gather_name: str
    scatter_name: str
    replicate_name: str | None
    # Whether the gather backend casts shards and fills this rank's part of the output (``CastingBackend``).
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
        return None if self.replicate_name is None else compat.resolve_group(self.replicate_name)


def may_send_narrow(kind: ReduceScatterKind, num_ranks: int) -> bool:
    """Whether gradients of 16 bits travel as they are within a host, and receivers add them in ``reduce_dtype``: the
    same sum with half the bytes. Between hosts, a ring has fewer bytes to send."""
    return kind == "ring" and num_ranks > 1


def is_exact_in(dtype: torch.dtype, wide: torch.dtype) -> bool:
    """Whether ``wide`` has more bytes, and each value of ``dtype``."""
    return dtype.itemsize < wide.itemsize and torch.promote_types(dtype, wide) == wide


def as_integers(tensor: Tensor) -> Tensor:
    """The same bits as integers."""
    return tensor.view(_INTEGERS[tensor.dtype.itemsize])


def as_sendable(tensor: Tensor) -> Tensor:
    """The same bits in a dtype that all backends gather: neither gloo nor NCCL has all float dtypes, or int16."""
    return tensor.view(torch.bfloat16) if tensor.dtype.itemsize == 2 else as_integers(tensor)


class ReduceScale(NamedTuple):
    """How a sum over ranks becomes the gradient: the collective's operation, and the divisors before and after it."""

    op: dist.ReduceOp.RedOpType
    predivide: float | None
    postdivide: float | None


@functools.lru_cache(maxsize=64)  # the factor may change in each step
def reduce_scale(dtype: torch.dtype, num_ranks: int, factor: float | None) -> ReduceScale:
    """Average over ``num_ranks``, or divide the sum by ``factor`` if there is one.

    The sum of many ranks overflows float16, so half of the division (about the root) comes before the sum, as in
    torch's ``fully_shard`` (``_get_gradient_divide_factors``).
    """
    if dtype != torch.float16:
        if factor is None:
            return ReduceScale(dist.ReduceOp.AVG, None, None)
        return ReduceScale(dist.ReduceOp.SUM, None, factor if factor != 1 else None)
    factor = float(num_ranks) if factor is None else factor
    predivide = 1.0
    while factor % predivide == 0 and factor / predivide > predivide:
        predivide *= 2
    return ReduceScale(dist.ReduceOp.SUM, predivide, factor / predivide)
