"""Weights with a recipe: the products of stock modules, and what plain ``fully_shard`` gathers.

``fully_shard`` gathers flat tensors whose sizes never change. So the planes of a shard are packed
into bytes as long as the longer direction needs: rowwise data in forward, columnwise in backward.
With activation checkpointing and ``reshard_after_forward=False`` the unsharded parameter gathers
the data of the other direction itself, at once. Masters whose shards cut blocks are gathered in the
compute dtype, and each rank quantizes the whole weight.
"""

from __future__ import annotations

from typing import Any, ClassVar, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch_compat as compat
from .compute import choose_path, warn_once
from .float8_gemms import Float8GEMMs
from .planes import Direction, Quantized
from .recipe import Recipe

aten = torch.ops.aten


class WeightWithRecipe(Tensor):
    """Base of the tensors that ``F.linear`` and ``F.embedding`` read as their quantized values."""

    __slots__ = ("recipe",)
    recipe: Recipe

    def quantized_for(self, direction: Direction) -> Quantized:
        """The quantized weight, for GEMMs that multiply with it."""
        raise NotImplementedError

    def data_direction(self, direction: Direction) -> Direction:
        """The direction of the data that serve ``direction``."""
        raise NotImplementedError

    def dequantize_for(self, direction: Direction) -> Tensor:
        """The quantized weight as an ordinary tensor of this one's dtype."""
        quantized = self.quantized_for(direction)
        return self.recipe.dequantize(quantized, self.shape, self.data_direction(direction), self.dtype)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is F.linear:
            return _linear(*args, **kwargs)
        if func is F.embedding:
            return _embedding(*args, **kwargs)
        with compat.without_torch_function():
            return func(*args, **kwargs)  # ops reach __torch_dispatch__


def gemms_of(weight: WeightWithRecipe) -> Float8GEMMs | None:
    """How ``F.linear`` multiplies with ``weight``; None to dequantize it."""
    is_native = isinstance(weight, StoredWeight) and weight.is_native
    about = (weight.device, weight.shape, weight.dtype)
    return choose_path(weight.recipe, *about, "weight", is_native=is_native).gemms


def _linear(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not isinstance(weight, WeightWithRecipe):
        raise TypeError(f"F.linear expects a weight with a recipe as weight only, but got {type(input).__name__}.")
    if bias is not None:
        bias = compat.autocast_operand(bias)
    dtype = compat.autocast_dtype(weight.dtype, weight.device)
    args = (compat.autocast_operand(input), weight, bias, gemms_of(weight), dtype)
    return _Linear.apply(*args)  # type: ignore[no-untyped-call]


def _embedding(input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Any:
    return F.embedding(input, _StraightThrough.apply(weight), *args, **kwargs)  # type: ignore[no-untyped-call]


class _StraightThrough(torch.autograd.Function):
    """The values of the rowwise data; their gradient is that of the weight."""

    @staticmethod
    def forward(ctx: Any, weight: WeightWithRecipe) -> Tensor:
        return weight.dequantize_for(Direction.ROWWISE)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class _Linear(torch.autograd.Function):
    """By the three GEMMs in float8; without them (``gemms`` is None) with the dequantized weight. ``dtype`` is that of
    computation: under autocast another one than the weight's."""

    @staticmethod
    def forward(
        ctx: Any,
        input: Tensor,
        weight: WeightWithRecipe,
        bias: Tensor | None,
        gemms: Float8GEMMs | None,
        dtype: torch.dtype,
    ) -> Tensor:
        # fully_shard keeps the object and fills it again for backward.
        ctx.weight = weight
        ctx.gemms = gemms
        ctx.dtype = dtype
        if gemms is None:
            ctx.save_for_backward(input)
            return F.linear(input, weight.dequantize_for(Direction.ROWWISE).to(dtype), bias)
        if input.dtype != dtype:
            raise RuntimeError(
                f"F.linear expects input and weight of one dtype, but got {input.dtype} and "
                f"{dtype} for a weight of shape {tuple(weight.shape)}."
            )
        operands = gemms.cast_input(input.reshape(-1, input.shape[-1]))
        ctx.save_for_backward(input, *gemms.for_later(operands))
        output = gemms.output(operands, weight.quantized_for(Direction.ROWWISE), dtype)
        output = output.view(*input.shape[:-1], output.shape[-1])
        if bias is not None:
            output = output + bias
        return output

    @staticmethod
    @compat.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        input, *known = ctx.saved_tensors
        needs_input, needs_weight, needs_bias, *_ = ctx.needs_input_grad
        gemms: Float8GEMMs | None = ctx.gemms
        weight: WeightWithRecipe = ctx.weight
        grad_MN = grad.reshape(-1, grad.shape[-1])
        grad_input = None
        grad_weight = None
        grad_bias = None
        operands: list[Tensor] = []
        # Dgrad and wgrad read the same casts.
        if gemms is not None and (needs_input or (needs_weight and not gemms.high_precision_wgrad)):
            operands = gemms.cast_grad(grad_MN)
        if needs_weight:
            input_MK = input.reshape(-1, input.shape[-1])
            if gemms is None or gemms.high_precision_wgrad:
                grad_weight = grad_MN.t().mm(input_MK)
            else:
                for_wgrad = gemms.cast_wgrad(grad_MN, input_MK, operands, known)
                grad_weight = gemms.grad_weight(for_wgrad, weight.dtype)
        if needs_input and gemms is None:
            grad_input = grad.matmul(weight.dequantize_for(Direction.COLUMNWISE).to(ctx.dtype))
        elif needs_input and gemms is not None:
            quantized = weight.quantized_for(Direction.COLUMNWISE)
            grad_input = gemms.grad_input(operands, quantized, ctx.dtype).view(input.shape)
        if needs_bias:
            grad_bias = grad_MN.sum(0)
        return grad_input, grad_weight, grad_bias, None, None  # autograd casts them to the dtypes of what forward got


class StoredWeight(WeightWithRecipe):
    """What ``quantize_`` makes of a parameter: masters with a recipe, or the quantized data itself
    (``native``)."""

    is_native: ClassVar[bool] = False

    def dense(self) -> Tensor:
        """The most precise values there are, an ordinary tensor."""
        raise NotImplementedError

    def data_direction(self, direction: Direction) -> Direction:
        if self.is_native:
            return Direction.ROWWISE
        return self.recipe.direction(direction)

    def quantized_for(self, direction: Direction, amax: Tensor | None = None) -> Quantized:
        """With ``amax`` the data of a shard, for which that is the statistic of the whole weight."""
        raise NotImplementedError

    def amax_over(self, group: dist.ProcessGroup) -> Tensor | None:
        """The recipe's statistic over the whole weight, whose shards the ranks of ``group`` have."""
        raise NotImplementedError

    def fsdp_pre_all_gather(
        self, mesh: DeviceMesh, outer_size: torch.Size, outer_stride: Any, module: Any, mp_policy: Any
    ) -> tuple[tuple[Tensor, ...], GatherInfo]:
        """Called by ``fully_shard``: the quantized bytes of this shard; its values in
        ``param_dtype``, where shards are not alike or cut blocks. NotImplementedError, on all ranks
        alike, if the weight cannot be gathered."""
        group = mesh.get_group()
        world = mesh.size()
        problem = _problem_of_shards(self, outer_size, world)
        if problem:
            if self.ndim != 2 or self.is_native:
                raise NotImplementedError(problem)
            warn_once(f"{problem} It is gathered unquantized, and each rank quantizes the whole weight.")
            info = GatherInfo(self, outer_size, group.group_name, world, Direction.ROWWISE, None, is_dense=True)
            return (_padded(self, outer_size, world, mp_policy.param_dtype or self.dtype),), info
        direction = Direction.ROWWISE
        if compat.current_graph_task_id() != -1:  # in backward
            direction = Direction.COLUMNWISE
        direction = self.data_direction(direction)  # rowwise, if that serves both
        amax = self.amax_over(group)
        info = GatherInfo(self, outer_size, group.group_name, world, direction, amax)
        return (_packed(info, direction),), info

    def fsdp_post_all_gather(
        self, all_gather_outputs: tuple[Tensor, ...], metadata: Any, param_dtype: torch.dtype, *, out: Any = None
    ) -> tuple[Tensor, tuple[Tensor, ...]] | None:
        """Called by ``fully_shard``: a new unsharded parameter, or the present one (``out``) filled
        again."""
        (slots,) = all_gather_outputs  # ``fully_shard`` frees and refills this memory
        # The first gather of this parameter.
        if out is None:
            return GatheredWeight(slots, metadata, param_dtype), (slots,)
        local = compat.local_part(out)
        assert isinstance(local, GatheredWeight)
        local.slots = slots
        local.info = metadata  # direction and amax of this gather
        return None


class GatherInfo(NamedTuple):
    """What is needed to make a weight of the bytes of all ranks."""

    shard: StoredWeight  # of this rank
    shape: torch.Size  # of the whole weight
    group_name: str  # the process group that holds the shards
    world: int  # its size
    direction: Direction  # of the data that were gathered
    amax: Tensor | None  # the recipe's statistic over the whole weight
    is_dense: bool = False  # values were gathered, and are quantized at each use


def _problem_of_shards(shard: StoredWeight, outer_size: torch.Size, world: int) -> str:
    """Why the quantized data of all shards are not those of the whole weight; empty if they are."""
    if shard.ndim != 2:
        return (
            "fully_shard gathers quantized weights with 2 dims, but got one of shape "
            f"{tuple(outer_size)}. Use gtp_shard, or leave the weight out of quantize_."
        )
    rows = outer_size[0]
    block = shard.recipe.block_of(-2, is_native=shard.is_native)
    has_whole_blocks = rows % world == 0 and rows // world % block == 0
    if world == 1 or (has_whole_blocks and shard.shape[1:] == outer_size[1:]):
        return ""
    return (
        f"fully_shard splits a weight of shape {tuple(outer_size)} over {world} ranks into shards "
        f"that are unequal or not whole {shard.recipe.name} blocks of {block} rows. Let it shard "
        f"dim 0 with a multiple of {block * world} rows, use gtp_shard, which splits between "
        "blocks, or leave the weight out of quantize_."
    )


def _padded(shard: StoredWeight, outer_size: torch.Size, world: int, dtype: torch.dtype) -> Tensor:
    """The values of a shard, with as many rows as the largest one: a gather needs equal sizes."""
    values = shard.dense().to(dtype)
    if shard.shape[1:] != outer_size[1:]:
        return values.contiguous()  # dim 1 is cut, evenly
    # The last shards may be short or empty.
    return F.pad(values, (0, 0, 0, -(-outer_size[0] // world) - values.shape[0]))


def _packed(info: GatherInfo, direction: Direction) -> Tensor:
    """The planes of the shard, one after the other, as bytes; the end may be filled up."""
    shard = info.shard
    planes = shard.quantized_for(direction, info.amax).planes
    parts = [plane.contiguous().view(torch.uint8).view(-1) for plane in planes]
    # As long as the longer direction needs: ``fully_shard`` never changes the size.
    length = max(shard.recipe.num_bytes(shard.shape, shard.data_direction(d)) for d in Direction)
    missing = length - sum(part.numel() for part in parts)
    if missing:
        parts.append(parts[0].new_zeros(missing))
    return torch.cat(parts)


def _gather_now(info: GatherInfo, direction: Direction) -> Tensor:
    """The bytes of all ranks for the other direction, on the current stream."""
    packed = _packed(info, direction)
    if info.world == 1:
        return packed
    slots = packed.new_empty(info.world * packed.numel())
    dist.all_gather_into_tensor(slots, packed, group=compat.resolve_group(info.group_name))
    return slots


class GatheredWeight(WeightWithRecipe):
    """An unsharded parameter of ``fully_shard``, in the dtype of computation."""

    __slots__ = ("info", "slots")
    slots: Tensor  # the bytes of all ranks, rank by rank
    info: GatherInfo

    @staticmethod
    def __new__(cls, slots: Tensor, info: GatherInfo, dtype: torch.dtype) -> GatheredWeight:
        result = compat.wrapper_tensor(cls, slots, info.shape, dtype)
        result.recipe = info.shard.recipe
        result.slots = slots
        result.info = info
        return result

    def data_direction(self, direction: Direction) -> Direction:
        return self.info.shard.data_direction(direction)

    def quantized_for(self, direction: Direction) -> Quantized:
        info = self.info
        direction = self.data_direction(direction)
        if info.is_dense:
            # ``fully_shard`` has put them in order, also where dim 1 is cut; rows may be padded.
            values = self.slots.view(-1, self.shape[1])[: self.shape[0]]
            return self.recipe.quantize(values, direction)
        slots = self.slots
        # A recomputation, or a weight that stays gathered, needs the direction that was not gathered.
        if direction is not info.direction:
            slots = _gather_now(info, direction)
        by_rank = slots.view(info.world, -1)
        planes = []
        start = 0  # of the next plane in the bytes of a rank
        for spec in self.recipe.planes(direction):
            shape = spec.shape(info.shard.shape)
            nbytes = shape.numel() * spec.dtype.itemsize
            # The parts of all ranks, which one after the other are the plane of the whole.
            plane = by_rank[:, start : start + nbytes].contiguous().view(spec.dtype)
            planes.append(plane.view(info.world * shape[0], shape[1]))
            start += nbytes
        return Quantized(tuple(planes), info.amax)

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        # ``fully_shard`` and ``nn.Parameter`` view the whole weight. A view of another shape is one of the values.
        if func in (aten.detach.default, aten.alias.default) or _is_whole_view(func, args, kwargs or {}):
            return GatheredWeight(args[0].slots, args[0].info, args[0].dtype)
        inner = (args, kwargs or {})
        args, kwargs = compat.tree_map_only(GatheredWeight, lambda w: w.dequantize_for(Direction.ROWWISE), inner)
        return func(*args, **kwargs)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"GatheredWeight(shape={tuple(self.shape)}, dtype={self.dtype}, recipe={self.recipe})"


def _is_whole_view(func: Any, args: Any, kwargs: Any) -> bool:
    if func not in (aten.as_strided.default, aten.view.default):
        return False
    weight, *given = args
    # The strides of what a view makes, also where a size is -1.
    view = func(torch.empty(weight.shape, device="meta"), *given, **kwargs)
    return (view.shape, view.stride(), view.storage_offset()) == (weight.shape, weight.stride(), 0)
