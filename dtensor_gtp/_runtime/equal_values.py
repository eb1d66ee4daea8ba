"""What several ranks have of a parameter is to begin equal on them: nothing would ever make it so."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed as dist

from .comm_context import Groups
from .copy_engine import waiting_allowed
from .param import ManagedParam
from .whole import WholeParam

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def refuse_unequal_values(params: Sequence[ManagedParam], device: torch.device) -> None:
    """Compare the bits of parameters that stay whole, and those of shards along replicas: on all ranks alike, with two
    or three small collectives for each mesh, and a wait for their result.

    Raises:
        RuntimeError: The values of a parameter differ. Raised on all ranks of its mesh.
    """
    by_groups: dict[Groups, list[ManagedParam]] = {}
    for param in params:
        # Of what fully_shard has cut again this rank has another part; what is quantized consists of several tensors.
        is_one = not param.is_cut_again and type(param.shard) is torch.Tensor
        if is_one and (isinstance(param, WholeParam) or param.groups.replicate is not None):
            by_groups.setdefault(param.groups, []).append(param)
    for groups, members in by_groups.items():
        members.sort(key=lambda param: not isinstance(param, WholeParam))
        is_unequal = _compare(members, groups)
        with waiting_allowed(device):
            unequal = [param for param, differs in zip(members, is_unequal.tolist(), strict=True) if differs]
        if unequal:
            raise _refusal(unequal[0], len(unequal) - 1)


def _compare(members: list[ManagedParam], groups: Groups) -> torch.Tensor:
    """For each parameter, those that stay whole first, whether ranks differ: known to all ranks of the mesh."""
    num_whole = sum(isinstance(param, WholeParam) for param in members)
    sums = torch.stack([_sum_of_bits(param.shard) for param in members])
    extremes = torch.stack([sums, ~sums], 1)  # the largest and, as its complement, the smallest

    def reduce(numbers: torch.Tensor, group: dist.ProcessGroup | None) -> None:
        if group is not None and group.size() > 1:
            dist.all_reduce(numbers, dist.ReduceOp.MAX, group=group)

    reduce(extremes, groups.replicate)
    reduce(extremes[:num_whole], groups.gather)
    is_unequal = (extremes[:, 0] != ~extremes[:, 1]).to(torch.int64)
    reduce(is_unequal, groups.gather)
    return is_unequal


def _refusal(param: ManagedParam, num_others: int) -> RuntimeError:
    others = f" and {num_others} more" if num_others else ""
    return RuntimeError(
        f"Parameter '{param.fqn}' of shape {tuple(param.param.shape)}{others} has other values on some ranks of mesh "
        f"axes {param.mesh.mesh_dim_names} than on others, with placements {param.placements} (rank "
        f"{dist.get_rank()}): each would train another model. Seed all ranks alike before the model is built or "
        "initialized (torch.manual_seed), load the same state dict on all of them, or pass a parameter that is to be "
        "each rank's own in ignored_params."
    )


def _sum_of_bits(tensor: torch.Tensor) -> torch.Tensor:
    """Of all elements as integers, which no order of additions changes."""
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    return tensor.contiguous().view(_INTEGERS[tensor.itemsize]).sum(dtype=torch.int64)


__all__ = ["refuse_unequal_values"]
