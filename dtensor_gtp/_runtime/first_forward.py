"""What ranks tell each other in the first forward: whether each can begin, and with the same values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .param import ManagedParam
from .whole import WholeParam

_WORD = torch.int64
_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Told(NamedTuple):
    """What all ranks of a mesh know then.

    ``failed_rank`` is one that cannot begin. The values of ``unequal`` differ between ranks that are to have the same:
    all ranks of the mesh where a parameter stays whole, the replicas of a shard.
    """

    failed_rank: int | None
    unequal: list[ManagedParam]


def tell(has_failed: bool, params: Sequence[ManagedParam], device: torch.device) -> Told:
    """One small all-reduce for each axis of their meshes, and a wait for the results: on all ranks alike.

    Args:
        has_failed: Whether this rank cannot begin.
        params: Of all meshes, in the same order on all ranks.
        device: Where the backends of the meshes expect tensors.
    """
    by_mesh: dict[DeviceMesh, list[ManagedParam]] = {}
    for param in params:
        by_mesh.setdefault(param.mesh, []).append(param)
    failed = torch.tensor([dist.get_rank() if has_failed else -1], device=device)
    compared: list[ManagedParam] = []
    results: list[torch.Tensor] = []
    for mesh, members in by_mesh.items():
        whole = [param for param in members if isinstance(param, WholeParam)]
        shards = [param for param in members if not isinstance(param, WholeParam)] if _has_replicas(mesh) else []
        sums = torch.zeros(len(whole + shards), dtype=_WORD, device=device)
        if not has_failed:
            for place, param in enumerate(whole + shards):
                sums[place] = _sum_of_bits(param)
        failed, is_unequal = _over_axes(mesh, failed, sums, len(whole))
        compared += whole + shards
        results.append(is_unequal)
    rank, *differ = torch.cat([failed, *results]).tolist()
    return Told(None if rank < 0 else rank, [param for param, differs in zip(compared, differ, strict=True) if differs])


def _has_replicas(mesh: DeviceMesh) -> bool:
    return mesh.ndim == 2 and mesh.size(0) > 1


def _over_axes(
    mesh: DeviceMesh, failed: torch.Tensor, sums: torch.Tensor, num_whole: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """The largest ``failed``, of shape ``(1,)``, and for each of ``sums`` whether it differs between ranks: over the
    whole mesh for the first ``num_whole``, over its replicas for the others."""
    extremes = torch.stack([sums, ~sums])  # the largest and, as its complement, the smallest
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            told = torch.cat([failed, extremes.flatten()])
            dist.all_reduce(told, dist.ReduceOp.MAX, group=mesh.get_group(axis))
            failed, extremes = told[:1], told[1:].view_as(extremes)
        if axis == 0 and _has_replicas(mesh):
            # Along the other axis shards are of other parts: what is told there is only whether replicas differ.
            shards = extremes[:, num_whole:]
            shards[0] = _differs(shards)
            shards[1] = ~0
    return failed, _differs(extremes).to(sums.dtype)


def _differs(extremes: torch.Tensor) -> torch.Tensor:
    return extremes[0] != ~extremes[1]


def _sum_of_bits(param: ManagedParam) -> torch.Tensor | int:
    """Of all its elements as integers, which no order of additions changes.

    0 for what an outer ``fully_shard`` has cut again, of which this rank has another part, and for what consists of
    several tensors (a quantized weight).
    """
    values = param.shard.detach()
    if param.is_cut_again or type(values) is not torch.Tensor:
        return 0
    if values.is_complex():
        values = torch.view_as_real(values.resolve_conj())
    flat = values.contiguous().flatten()
    if flat.nbytes % _WORD.itemsize:
        return flat.view(_INTEGERS[flat.itemsize]).sum(dtype=_WORD)
    # Integers of another size would be converted before they are summed, all of them at once.
    is_aligned = flat.storage_offset() * flat.itemsize % _WORD.itemsize == 0
    return (flat if is_aligned else flat.clone()).view(_WORD).sum()


def refusal(unequal: Sequence[ManagedParam]) -> RuntimeError:
    """What to raise where ``unequal`` is not empty."""
    param, *others = unequal
    more = f" and {len(others)} more" if others else ""
    return RuntimeError(
        f"Parameter '{param.fqn}' of shape {tuple(param.param.shape)}{more} has other values on some ranks of mesh "
        f"axes {param.mesh.mesh_dim_names} than on others, with placements {param.placements} (rank "
        f"{dist.get_rank()}): each would train another model. Seed all ranks alike before the model is built or "
        "initialized (torch.manual_seed), load the same state dict on all of them, or pass a parameter that is to be "
        "each rank's own in ignored_params."
    )


__all__ = ["Told", "refusal", "tell"]
