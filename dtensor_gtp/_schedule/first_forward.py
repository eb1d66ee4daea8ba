"""What ranks tell each other in the first forward: whether each can begin, and with the same values."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch_compat as compat
from .._comm.agreement import digest
from .._comm.collectives import has_replicas
from .._params.managed_param import ManagedParam
from .._params.whole_param import WholeParam

_WORD = torch.int64
_Digests = dict[DeviceMesh, list[Tensor | int]]


class _Compared(NamedTuple):
    """What the ranks of a mesh are to have alike: parameters that stay whole on all of them, shards on replicas."""

    whole: list[ManagedParam]
    shards: list[ManagedParam]

    @property
    def params(self) -> list[ManagedParam]:
        return self.whole + self.shards


def agree_to_begin(params: Sequence[ManagedParam], device: torch.device) -> None:
    """One small all-reduce for each axis of the meshes, and a wait for the result. Ranks need not have all meshes in
    common: what is done over one does not depend on others. What a mesh finds, larger ones hear of.

    Args:
        params: Of all meshes, in the same order on all ranks.
        device: Where the backends of the meshes expect tensors.

    Raises:
        RuntimeError: This rank or another one cannot begin, or the values of a parameter differ. Raised on all ranks
            of the mesh that connects them, if it is the largest of them.
    """
    compared = _by_mesh(params)
    error: RuntimeError | None = None
    digests: _Digests | None = None
    try:
        _check_materialized(params, device)
        digests = {mesh: [_digest_of(param) for param in some.params] for mesh, some in compared.items()}
    except RuntimeError as caught:  # the others wait to be told
        error = caught
    told = _tell(compared, digests, device)
    if error is not None:
        raise error
    if type(told) is not Tensor:
        return  # a fake one
    rank, *differ = told.tolist()
    everything = [param for some in compared.values() for param in some.params]
    unequal = [param for param, differs in zip(everything, differ, strict=True) if differs]
    if unequal:
        raise _refusal(unequal)
    if rank >= 0:
        raise RuntimeError(
            f"The first forward failed on rank {rank}, whose error says why, so it fails on all ranks of mesh axes "
            f"{' and '.join(str(mesh.mesh_dim_names) for mesh in compared)} (rank {dist.get_rank()})."
        )


def _by_mesh(params: Sequence[ManagedParam]) -> dict[DeviceMesh, _Compared]:
    """The largest mesh last, which others are parts of: the experts' within the dense one."""
    compared: dict[DeviceMesh, _Compared] = {}
    for param in params:
        whole, shards = compared.setdefault(param.mesh, _Compared([], []))
        if isinstance(param, WholeParam):
            whole.append(param)
        elif has_replicas(param.mesh):
            shards.append(param)
    return dict(sorted(compared.items(), key=lambda item: item[0].size()))


def _tell(compared: dict[DeviceMesh, _Compared], digests: _Digests | None, device: torch.device) -> Tensor:
    """A rank that cannot begin or has found values that differ, or -1; then, for each that is compared, whether it
    does. ``digests`` are None on a rank that cannot begin; they differ from nothing."""
    failed = torch.tensor([dist.get_rank() if digests is None else -1], device=device)
    results = []
    for mesh, some in compared.items():
        numbers = torch.zeros(len(some.params), dtype=_WORD, device=device)
        for place, number in enumerate(digests[mesh] if digests is not None else ()):
            numbers[place] = number
        failed, differs = _over_axes(mesh, failed, numbers, len(some.whole))
        differs &= failed < 0
        failed = torch.where(differs.any(), dist.get_rank(), failed)
        results.append(differs)
    return torch.cat([failed, *results])


def _over_axes(mesh: DeviceMesh, failed: Tensor, digests: Tensor, num_whole: int) -> tuple[Tensor, Tensor]:
    """The largest ``failed``, of shape ``(1,)``, and for each of ``digests`` whether it differs between ranks: over the
    whole mesh for the first ``num_whole``, over its replicas for the others."""
    extremes = torch.stack([digests, ~digests])  # the largest and, as its complement, the smallest
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            told = torch.cat([failed, extremes.flatten()])
            dist.all_reduce(told, dist.ReduceOp.MAX, group=mesh.get_group(axis))
            failed, extremes = told[:1], told[1:].view_as(extremes)
        if axis == 0 and has_replicas(mesh):
            # Along the other axis shards are of other parts: what is told there is only whether replicas differ.
            shards = extremes[:, num_whole:]
            shards[0] = _differs(shards)
            shards[1] = ~0
    return failed, _differs(extremes)


def _differs(extremes: Tensor) -> Tensor:
    return extremes[0] != ~extremes[1]


def _digest_of(param: ManagedParam) -> Tensor | int:
    """0 for what an outer ``fully_shard`` has cut again, of which this rank has another part, and for what consists of
    several tensors (a quantized weight).
    """
    values = param.shard.detach()
    if param.is_cut_again or type(values) is not Tensor or values.is_quantized:
        return 0
    return digest(values)


def _refusal(unequal: Sequence[ManagedParam]) -> RuntimeError:
    param, *others = unequal
    more = f" and {len(others)} more" if others else ""
    return RuntimeError(
        f"Parameter '{param.fqn}' of shape {tuple(param.param.shape)}{more} has other values on some ranks of mesh "
        f"axes {param.mesh.mesh_dim_names} than on others, with placements {param.placements} (rank "
        f"{dist.get_rank()}): each would train another model. Seed all ranks alike before the model is built or "
        "initialized (torch.manual_seed), initialize all that to_empty() has made, load the same state dict on all "
        "ranks, or pass a parameter that is to be each rank's own in ignored_params."
    )


# Of the parameters that one message is about: a model may have thousands.
_MOST_NAMED = 8


def _check_materialized(params: Sequence[ManagedParam], device: torch.device) -> None:
    """Raises:
    RuntimeError: Parameters are on the meta device, have no memory, or are not those that ``gtp_shard`` has registered.
    """
    meta = [param for param in params if _is_meta(param)]
    if not meta:
        for param in params:
            param.check_memory()
        return
    named = [f"'{param.fqn}' of shape {tuple(param.param.shape)}" for param in meta[:_MOST_NAMED]]
    more = f" and {len(meta) - _MOST_NAMED} more" if len(meta) > _MOST_NAMED else ""
    raise RuntimeError(
        f"Parameters {', '.join(named)}{more} on mesh axes {meta[0].mesh.mesh_dim_names} are still on the meta device "
        f"at the first forward (rank {dist.get_rank()}). Materialize them with "
        f"module.to_empty(device='{device.type}') and initialize them, or load a state dict."
    )


def _is_meta(param: ManagedParam) -> bool:
    param.follow(param.sites[0])
    registered = param.sites[0].module._parameters[param.sites[0].name]
    return registered is not None and compat.local_tensor(registered).is_meta  # type: ignore[arg-type]
