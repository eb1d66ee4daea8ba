"""Quantized weights under plain ``fully_shard``: what its hooks gather, and the unsharded parameter it makes of it.

``fully_shard`` knows one gather for a parameter, of flat tensors whose sizes never change. So the planes of a shard are
packed into one run of bytes, as long as the longer of the two directions needs. In forward that is the rowwise data, in
backward the columnwise data. Where the other one is asked for (activation checkpointing runs forward in backward;
``reshard_after_forward=False`` never gathers for backward), the unsharded parameter gathers it itself, at once.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from .. import _torch_compat as compat
from .planes import Direction, Quantized
from .recipes import Recipe
from .weight import WeightWithRecipe

aten = torch.ops.aten


class StoredWeight(WeightWithRecipe):
    """What ``quantize_`` makes of a parameter: masters with a recipe, or the quantized data itself (``native``)."""

    def dense(self) -> Tensor:
        """The most precise values there are, an ordinary tensor."""
        raise NotImplementedError

    @property
    def row_block(self) -> int:
        """Rows that stay together on one rank."""
        raise NotImplementedError

    def sent_direction(self, direction: Direction) -> Direction:
        """Of the data that serve ``direction``."""
        raise NotImplementedError

    def amax_over(self, group: dist.ProcessGroup) -> Tensor | None:
        """The recipe's statistic over the whole weight, whose shards the ranks of ``group`` have."""
        raise NotImplementedError

    def sent_planes(self, direction: Direction, amax: Tensor | None) -> tuple[Tensor, ...]:
        """What this rank has to send."""
        raise NotImplementedError

    def fsdp_pre_all_gather(
        self,
        mesh: DeviceMesh,
        outer_size: torch.Size,
        outer_stride: tuple[int, ...],
        module: nn.Module,
        mp_policy: MixedPrecisionPolicy,
    ) -> tuple[tuple[Tensor, ...], Any]:
        """Called by ``fully_shard``: the quantized bytes of this shard."""
        inputs, info = pre_all_gather(self, mesh, outer_size)
        return inputs, (info, outer_size)

    def fsdp_post_all_gather(
        self,
        all_gather_outputs: tuple[Tensor, ...],
        metadata: Any,
        param_dtype: torch.dtype,
        *,
        out: Tensor | None = None,
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Called by ``fully_shard``: the unsharded parameter."""
        info, outer_size = metadata
        return post_all_gather(all_gather_outputs, info, param_dtype, outer_size, out)


@dataclass(frozen=True)
class GatherInfo:
    """What is needed to make a weight of the bytes of all ranks.

    Args:
        shard: This rank's shard.
        group_name: The process group that holds the others.
        world: Its size.
        direction: Which data were gathered.
        amax: The recipe's statistic over the whole weight.
    """

    shard: StoredWeight
    group_name: str
    world: int
    direction: Direction
    amax: Tensor | None


def pre_all_gather(shard: StoredWeight, mesh: DeviceMesh, outer_size: torch.Size) -> tuple[tuple[Tensor], GatherInfo]:
    """``fsdp_pre_all_gather`` of a weight with a recipe.

    Raises:
        NotImplementedError: The weight's shards are not alike or cut its blocks; raised on all ranks alike.
    """
    group, world = mesh.get_group(), mesh.size()
    _check_shards(shard, outer_size, world)
    in_backward = compat.current_graph_task_id() != -1
    direction = shard.sent_direction(Direction.COLUMNWISE if in_backward else Direction.ROWWISE)
    info = GatherInfo(shard, group.group_name, world, direction, shard.amax_over(group))
    return (_packed(info, direction),), info


def _check_shards(shard: StoredWeight, outer_size: torch.Size, world: int) -> None:
    if shard.ndim != 2:
        raise NotImplementedError(
            f"fully_shard gathers quantized weights with 2 dims, but got one of shape {tuple(outer_size)}. Use "
            "gtp_shard, or leave the weight out of quantize_."
        )
    rows, block = outer_size[0], shard.row_block
    if world == 1 or (rows % world == 0 and rows // world % block == 0 and shard.shape[1:] == outer_size[1:]):
        return
    raise NotImplementedError(
        f"fully_shard cuts a weight of shape {tuple(outer_size)} over {world} ranks into shards that are not all alike "
        f"in rows and whole {shard.recipe.name} blocks of {block} of them (this one has shape {tuple(shard.shape)}). "
        f"Choose a number of rows that is a multiple of {block * world}, use gtp_shard, which cuts between blocks, or "
        "leave the weight out of quantize_."
    )


def _packed(info: GatherInfo, direction: Direction) -> Tensor:
    """The planes of the shard, one after the other, as bytes; the end may be filled up."""
    recipe, shape = info.shard.recipe, info.shard.shape
    parts = [plane.contiguous().view(torch.uint8).view(-1) for plane in info.shard.sent_planes(direction, info.amax)]
    length = max(recipe.num_bytes(shape, info.shard.sent_direction(d)) for d in Direction)
    missing = length - sum(part.numel() for part in parts)
    return torch.cat([*parts, parts[0].new_zeros(missing)] if missing or len(parts) > 1 else parts)


def _unpacked(info: GatherInfo, slots: Tensor, direction: Direction) -> Quantized:
    """The planes of the whole weight from the bytes of all ranks."""
    local, planes, start = info.shard.shape, [], 0
    by_rank = slots.view(info.world, -1)
    for spec in info.shard.recipe.planes(direction):
        shape = spec.shape(local)
        nbytes = shape.numel() * spec.dtype.itemsize
        plane = by_rank[:, start : start + nbytes].contiguous().view(spec.dtype)
        planes.append(plane.view(info.world * shape[0], shape[1]))
        start += nbytes
    return Quantized(tuple(planes), info.amax)


def post_all_gather(
    outputs: tuple[Tensor, ...], info: GatherInfo, dtype: torch.dtype, outer_size: torch.Size, out: Any
) -> tuple[GatheredWeight, tuple[Tensor, ...]] | None:
    """``fsdp_post_all_gather``: a new unsharded parameter, or the one there is (``out``), filled again."""
    (slots,) = outputs
    if out is None:
        return GatheredWeight(slots, info, outer_size, dtype), (slots,)
    local = compat.local_part(out)
    assert isinstance(local, GatheredWeight)
    local.fill(slots, info)
    return None


class GatheredWeight(WeightWithRecipe):
    """An unsharded parameter of ``fully_shard``, made of the bytes of all ranks.

    Args:
        slots: The bytes, rank by rank.
        info: What they are.
        shape: Shape of the whole weight.
        dtype: That of computation.
    """

    __slots__ = ("_info", "_slots")
    _slots: Tensor
    _info: GatherInfo

    @staticmethod
    def __new__(cls, slots: Tensor, info: GatherInfo, shape: torch.Size, dtype: torch.dtype) -> GatheredWeight:
        result = compat.wrapper_tensor(cls, slots, shape, dtype)
        result.fill(slots, info)
        return result

    def fill(self, slots: Tensor, info: GatherInfo) -> None:
        """Take what another gather has brought."""
        self._slots, self._info = slots, info

    @property
    def recipe(self) -> Recipe:
        return self._info.shard.recipe

    def quantized_for(self, direction: Direction) -> Quantized:
        info, direction = self._info, self._info.shard.sent_direction(direction)
        slots = self._slots if direction is info.direction else _gather_now(info, direction)
        return _unpacked(info, slots, direction)

    def dequantize_for(self, direction: Direction) -> Tensor:
        quantized, info = self.quantized_for(direction), self._info
        return self.recipe.dequantize(quantized, self.shape, info.shard.sent_direction(direction), self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (aten.detach.default, aten.alias.default, aten.as_strided.default, aten.view.default):
            weight = args[0]
            return GatheredWeight(weight._slots, weight._info, weight.shape, weight.dtype)
        inner = compat.tree_map_only(
            GatheredWeight, lambda w: w.dequantize_for(Direction.ROWWISE), (args, kwargs or {})
        )
        return func(*inner[0], **inner[1])

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GatheredWeight(shape={tuple(self.shape)}, dtype={self.dtype}, recipe={self._info.shard.recipe})"


def _gather_now(info: GatherInfo, direction: Direction) -> Tensor:
    """The data of the other direction, on the current stream."""
    packed = _packed(info, direction)
    if info.world == 1:
        return packed
    slots = packed.new_empty(info.world * packed.numel())
    dist.all_gather_into_tensor(slots, packed, group=compat.resolve_group(info.group_name))
    return slots
