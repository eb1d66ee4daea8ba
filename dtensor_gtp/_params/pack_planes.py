"""Packs shards into planes for their gather: FP8 and other low-precision data, or what a tensor's
own hooks return.

A plane is one tensor of a packed weight: its low-precision values, or their scales.
``QuantizedWire`` quantizes a high-precision shard, ``NativeWire`` sends a quantized one,
``HookWire`` calls the hooks that ``fully_shard`` calls.
"""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from .. import _torch_compat as compat
from .._comm.context import CommContext
from ..quant.cast import WIDENS
from ..quant.casts import describe_casts
from ..quant.compute import ComputePath, choose_path, warn_dequantized
from ..quant.float8_gemms import Float8GEMMs
from ..quant.native import NativeWeight
from ..quant.native_data import recipe_groups
from ..quant.planes import Direction, PlaneSpec, Quantized
from ..quant.recipe import Recipe
from ..quant.weight import GatheredWeight
from .gathered import Packed, Version, Wire
from .layout import WeightLayout
from .sharded_weight import ShardedWeight


class QuantizedWire(Wire):
    """Quantizes a high-precision shard before its gather; [Note: data made from a shard] says when."""

    is_native = False  # whether there are data for forward alone

    def __init__(self, weight: ShardedWeight, recipe: Recipe) -> None:
        self.weight = weight
        self.recipe = recipe
        # Names of the process groups over which the recipe's statistic runs, and whether the gather
        # has the same ranks.
        self.groups = recipe_groups(weight.shard_spec, recipe)
        mesh = weight.mesh
        self.is_within_mesh = set(self.groups) <= {mesh.get_group(mesh.ndim - 1).group_name}
        self.has_columnwise = recipe.has_columnwise and not self.is_native
        # The version of the shard of which the statistic of all ranks and the quantized data were made.
        self._made_of: Version | None = None
        self.amax: Tensor | None = None
        self._quantized: dict[Direction, Quantized] = {}

    def forget(self) -> None:
        self._made_of = None
        self.amax = None
        self._quantized.clear()

    def begin_forward(self) -> bool:
        """Drop stale data. Returns whether the ranks must agree on a statistic before the next gather."""
        if self.is_current:
            return False
        self.forget()
        # Under an outer fully_shard the shard is not in memory yet: its gather agrees by itself.
        return bool(self.recipe.amax_dims) and not self.weight.registration.is_cut_again

    @property
    def is_current(self) -> bool:
        """Whether the statistic is that of the present shard."""
        return self._made_of == self.weight.version

    def pack(self, direction: Direction, comm: CommContext) -> Packed:
        recipe = self.recipe
        layout = self.weight.layout
        dtype = self.weight.compute_dtype
        if not self.has_columnwise:
            direction = Direction.ROWWISE
        quantized = self._quantize(direction, comm)
        specs = recipe.planes(direction)
        tensors = quantized.planes
        amax = quantized.amax
        if amax is not None:
            # Has one number for each matrix; if the axis cuts between matrices, each rank has its
            # own.
            specs = (*specs, PlaneSpec(amax.dtype, None, None))
            tensors = (*tensors, amax)
        dim = layout.dim - len(layout.shape)  # as recipes count
        planes = []
        cut = []  # indices of the planes that are gathered
        for i, spec in enumerate(specs):
            if spec.period(dim) is not None:  # otherwise every rank has the whole plane
                shape = spec.shape(layout.shape)
                block_size = spec.size(dim, layout.block_size)
                planes.append((replace(layout, shape=shape, block_size=block_size), tensors[i]))
                cut.append(i)

        def assemble(parts: list[Tensor]) -> Quantized:
            whole = list(tensors)
            for i, part in zip(cut, parts, strict=True):
                whole[i] = part
            if amax is None:
                return Quantized(tuple(whole), None)
            return Quantized(tuple(whole[:-1]), whole[-1])

        def unpack(parts: list[Tensor]) -> Tensor:
            return recipe.dequantize(assemble(parts), layout.shape, direction, dtype)

        if self.weight.form.gemms is None:
            return Packed(planes, unpack)
        return Packed(planes, unpack, assemble)

    def _path(self) -> ComputePath:
        weight = self.weight
        about = (weight.layout.shape, weight.compute_dtype, weight.fqn)
        device = torch.device(weight.mesh.device_type)
        return choose_path(self.recipe, device, *about, is_native=self.is_native)

    def gemms(self) -> Float8GEMMs | None:
        return self._path().gemms

    def _quantize(self, direction: Direction, comm: CommContext) -> Quantized:
        if not self.is_current:
            agree_on_amax([self.weight], comm)
        quantized = self._quantized.get(direction)
        if quantized is None:
            quantized = self.recipe.quantize(self.weight.shard, direction, self.amax)
            self._quantized[direction] = quantized
        return quantized

    def set_amax(self, amax: Tensor | None) -> None:
        """Store the statistic of the present shard over all ranks."""
        self.forget()
        self._made_of = self.weight.version
        self.amax = amax

    def num_bytes(self) -> int:
        return self.recipe.num_bytes(self.weight.layout.shape, Direction.ROWWISE)

    def note_read(self) -> None:
        reason = "it is read as an attribute, not used by the forward of nn.Linear"
        warn_dequantized(self.recipe, self.weight.fqn, reason)

    def describe(self, not_fused: str) -> str:
        if self.weight.group is not None:
            return f"rounded to {self.recipe.name} before the gather"
        path = self._path()
        if path.gemms is not None and not_fused:
            path = ComputePath(None, not_fused)
        casts = describe_casts(torch.device(self.weight.mesh.device_type))
        return ", ".join(filter(None, (self.recipe.name, path.describe(), casts)))


class NativeWire(QuantizedWire):
    """Sends the rowwise planes of a quantized shard as they are, in forward and in backward."""

    is_native = True

    def begin_forward(self) -> bool:
        return False

    def _quantize(self, direction: Direction, comm: CommContext) -> Quantized:
        shard = self.weight.shard
        # An outer fully_shard registers a GatheredWeight.
        assert isinstance(shard, NativeWeight | GatheredWeight)
        return shard.quantized_for(direction)


def round_into(slots: Sequence[tuple[ShardedWeight, Tensor]]) -> None:
    """Fill the slots of quantized weights, whose statistics are known, with the values of their
    shards. Those of all ranks together are the values of the quantized weights, bit for bit."""
    by_recipe: dict[Recipe, list[tuple[ShardedWeight, Tensor]]] = {}
    for weight, slot in slots:
        # Equal recipes share a launch.
        by_recipe.setdefault(_wire_of(weight).recipe, []).append((weight, slot))
    for recipe, members in by_recipe.items():
        amaxes = [_wire_of(weight).amax for weight, _ in members]
        shards = [weight.shard for weight, _ in members]
        recipe.round_together(shards, amaxes, [slot for _, slot in members])


def agree_on_stale(weights: Sequence[ShardedWeight], comm: CommContext) -> None:
    """``agree_on_amax`` of those whose shards have changed since."""
    agree_on_amax([weight for weight in weights if not _wire_of(weight).is_current], comm)


def agree_on_amax(weights: Sequence[ShardedWeight], comm: CommContext) -> None:
    """Give each weight the statistic of its shard over all ranks, by one all_reduce on each axis
    for all weights."""
    by_groups: dict[tuple[str, ...], list[tuple[QuantizedWire, Tensor]]] = {}
    for weight, amax in zip(weights, _maxima(weights), strict=True):
        wire = _wire_of(weight)
        if amax is None or not wire.groups:
            wire.set_amax(amax)
        else:
            by_groups.setdefault(wire.groups, []).append((wire, amax))
    for names, members in by_groups.items():
        flat = torch.cat([amax.reshape(-1) for _, amax in members])
        _all_reduce_max(flat, names, members[0][0].weight, comm)
        parts = flat.split([amax.numel() for _, amax in members])
        for (wire, amax), part in zip(members, parts, strict=True):
            wire.set_amax(part.view(amax.shape))


def _maxima(weights: Sequence[ShardedWeight]) -> list[Tensor | None]:
    """The statistic of each shard. One launch serves all that are matrices with one number: two
    launches each would take the host 5 ms for 56 weights."""
    together = [weight for weight in weights if _is_largest_magnitude(weight)]
    largest = compat.largest_magnitudes([weight.shard for weight in together])
    found: dict[ShardedWeight, Tensor | None] = dict(zip(together, largest, strict=True))
    for weight in weights:
        if weight not in found:
            found[weight] = _wire_of(weight).recipe.amax(weight.shard)
    return [found[weight] for weight in weights]


def _is_largest_magnitude(weight: ShardedWeight) -> bool:
    """Whether the statistic is one number, and nobody has defined another one."""
    recipe = _wire_of(weight).recipe
    shard = weight.shard
    is_stock = type(recipe).amax is Recipe.amax and recipe.amax_dims == (-2, -1)
    return is_stock and shard.ndim == 2 and shard.numel() > 0 and shard.dtype in WIDENS


def _wire_of(weight: ShardedWeight) -> QuantizedWire:
    assert isinstance(weight.form.wire, QuantizedWire)
    return weight.form.wire


def _all_reduce_max(amax: Tensor, groups: tuple[str, ...], weight: ShardedWeight, comm: CommContext) -> None:
    # Floats that are not negative have the order of their bits. As integers a NaN is the largest; a
    # maximum of floats may lose it.
    bits = amax.view(torch.int32)
    with comm.gathering(weight.groups):
        comm.before_collective("all_reduce of amax", weight.fqn, weight.groups)
        done = None
        for group in map(compat.resolve_group, groups):
            # Without streams nothing orders the works of two groups.
            if done is not None and done.work is not None:
                done.work.wait()
            work = compat.all_reduce(bits, dist.ReduceOp.MAX, group, not comm.streams.has_streams)
            done = comm.gather_done(work, weight.groups)
    if done is not None:
        comm.streams.wait(done)


class HookWire(Wire):
    """Gathers what the hooks of a tensor subclass return."""

    def __init__(self, weight: ShardedWeight) -> None:
        self.weight = weight

    def pack(self, direction: Direction, comm: CommContext) -> Packed:
        weight = self.weight
        shard = weight.shard
        layout = weight.layout
        mesh = weight.mesh
        if mesh.mesh_dim_names:
            mesh = mesh[mesh.mesh_dim_names[-1]]  # without the replicas
        if not has_hooks(shard):
            raise NotImplementedError(
                f"gtp_shard gathers parameter '{weight.fqn}' of shape {tuple(layout.shape)} by the "
                "hooks of its shard, but a fully_shard outside has called them already and left a "
                f"{type(shard).__name__}. Leave the parameter out of that fully_shard "
                "(ignored_params), or use quantize_ instead."
            )
        pre: Any = shard.fsdp_pre_all_gather  # type: ignore[attr-defined]
        if len(inspect.signature(pre).parameters) == 1:  # older torchao
            inputs, metadata = pre(mesh)
        else:
            stride = torch.empty(layout.shape, device="meta").stride()
            module = weight.registration.sites[0].module
            inputs, metadata = pre(mesh, layout.shape, stride, module, weight.policies.mp)
        inputs = [_without_padding(tensor, layout) for tensor in inputs]
        planes = [(_hook_layout(weight, tensor), tensor) for tensor in inputs]

        def unpack(parts: list[Tensor]) -> Tensor:
            post: Any = shard.fsdp_post_all_gather  # type: ignore[attr-defined]
            full: Tensor
            full, _ = post(tuple(parts), metadata, weight.compute_dtype)
            return full

        return Packed(planes, unpack)

    def describe(self, not_fused: str) -> str:
        return "its own hooks gather and use it"


def _without_padding(tensor: Tensor, layout: WeightLayout) -> Tensor:
    """Where shards differ in size, hooks for ``fully_shard`` pad theirs to the size of the largest
    one."""
    if layout.dim == 0 and tensor.ndim > 0 and tensor.shape[0] == layout.chunk_rows:
        return layout.filled(tensor)
    return tensor


def _hook_layout(weight: ShardedWeight, tensor: Tensor) -> WeightLayout:
    """Layout of a hook's tensor: with the rows of the weight, or with rows of its own if all shards
    have one size."""
    layout = weight.layout
    if layout.dim == 0 and tensor.ndim > 0 and tensor.shape[0] == layout.local_rows:
        return replace(layout, shape=torch.Size((layout.num_rows, *tensor.shape[1:])))
    if layout.dim != 0 or layout.num_rows != layout.world * layout.chunk_rows:
        raise NotImplementedError(
            f"gtp_shard expects fsdp_pre_all_gather of {type(weight.shard).__name__} to return "
            f"tensors with the {layout.local_rows} rows of its shard where shards differ in size "
            f"or dim 0 is not the sharded one, but got one of shape {tuple(tensor.shape)} for "
            f"parameter '{weight.fqn}' of shape {tuple(layout.shape)} (rank {layout.rank} of "
            f"{layout.world}). Choose a shape whose rows the axis divides evenly."
        )
    rows = 1  # of a tensor without dims
    if tensor.ndim:
        rows = tensor.shape[0]
    shape = torch.Size((layout.world * rows, *tensor.shape[1:]))
    return replace(layout, shape=shape, block_size=1)


def make_wire(weight: ShardedWeight, recipe: Recipe | None) -> Wire | None:
    """How to gather a weight that is not sent as it is; None for other weights."""
    if recipe is not None and isinstance(weight.shard, NativeWeight):
        return NativeWire(weight, recipe)
    if recipe is not None:
        return QuantizedWire(weight, recipe)
    if has_hooks(weight.shard):
        return HookWire(weight)
    return None


def has_hooks(tensor: Tensor) -> bool:
    """Whether ``fully_shard`` would gather what the tensor's own hooks return."""
    return hasattr(tensor, "fsdp_pre_all_gather") and hasattr(tensor, "fsdp_post_all_gather")
