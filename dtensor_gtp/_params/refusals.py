"""What is refused of parameters that were changed behind the library's back: the errors, and how a change is seen."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement

from ..placement import GTPShard


class Extent(NamedTuple):
    """Of a parameter and of its shard, what no optimizer and no load changes."""

    shape: torch.Size
    dtype: torch.dtype
    local_shape: torch.Size

    @classmethod
    def of(cls, param: nn.Parameter, shard: Tensor) -> Extent:
        return cls(param.shape, param.dtype, shard.shape)

    def is_kept_by(self, param: nn.Parameter, shard: Tensor) -> bool:
        """Whether both still are as they were, and have memory. In each forward for each parameter, so it is quick."""
        if (param.shape, param.dtype, shard.shape) != self:
            return False
        # What a tensor subclass consists of is its own business.
        return type(shard) is not Tensor or shard.data_ptr() != 0 or shard.numel() == 0


class Expected(NamedTuple):
    """What a message names: the parameter as ``gtp_shard`` made it."""

    fqn: str
    shape: torch.Size
    placements: Sequence[Placement]
    mesh: DeviceMesh

    def __str__(self) -> str:
        return (
            f"gtp_shard expects a parameter of shape {tuple(self.shape)} with placements {tuple(self.placements)} on "
            f"mesh axes {self.mesh.mesh_dim_names} (rank {dist.get_rank()})"
        )


def cuts_alike(outer: Placement, mine: Placement) -> bool:
    """Whether two placements are one, apart from a block size that made no difference when fully_shard cut again."""
    if isinstance(mine, GTPShard) and mine.block_size > 1 and outer != mine:
        return outer == GTPShard(mine.dim)
    return outer == mine


def replaced(expected: Expected, current: object) -> RuntimeError:
    """Another object is registered in the place of the parameter."""
    return RuntimeError(
        f"Parameter '{expected.fqn}' was replaced behind gtp_shard by {_describe(current)}, but {expected}. Load "
        "values with load_state_dict or copy_ into the DTensor, change the module before gtp_shard, and call it "
        "without functional_call."
    )


def resized(expected: Expected, param: nn.Parameter, shard: Tensor, extent: Extent) -> RuntimeError:
    """The object is the same, but not its size, dtype or memory."""
    is_freed = not Extent.of(param, shard).is_kept_by(param, shard)
    found = (
        "its shard has no memory"
        if is_freed
        else (f"it is of shape {tuple(param.shape)} and {param.dtype}, its shard of shape {tuple(shard.shape)}")
    )
    return RuntimeError(
        f"Parameter '{expected.fqn}' was resized or cast in place behind gtp_shard: {found}, but {expected}, a shard "
        f"of shape {tuple(extent.local_shape)} and {extent.dtype}. Load values with load_state_dict or copy_ into the "
        "DTensor, cast the module with module.to(dtype), and change shapes before gtp_shard."
    )


def removed(expected: Expected) -> RuntimeError:
    """Nothing is registered under one of its names any more."""
    return RuntimeError(
        f"Parameter '{expected.fqn}' of shape {tuple(expected.shape)} on mesh axes {expected.mesh.mesh_dim_names} was "
        f"removed from its module (rank {dist.get_rank()}): weight_norm, a parametrization or pruning after gtp_shard "
        "put others in its place, which nobody shards. Change the module before gtp_shard."
    )


def _describe(value: object) -> str:
    if value is None:
        return "None"
    if isinstance(value, DTensor):
        return f"a DTensor of shape {tuple(value.shape)} with placements {value.placements}"
    return f"a {type(value).__name__}" + (f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else "")
