from __future__ import annotations

import inspect
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import MixedPrecisionPolicy

from .. import _torch_compat as compat
from .._comm.context import CommContext
from ..quant.casts import describe_casts
from ..quant.compute import ComputePath, choose_path, warn_dequantized
from ..quant.float8_gemms import Float8GEMMs
from ..quant.native import NativeWeight, recipe_groups
from ..quant.planes import Direction, PlaneSpec, Quantized
from ..quant.recipes import Recipe
from ..quant.weight import GatheredWeight
from .gathered import ShardState
from .layout import WeightLayout
from .sharded_weight import ShardedWeight
from .wire import Packed, Wire


class QuantizedWire(Wire):
    """A high-precision shard that is quantized before it is gathered: when, [Note: what is made of a shard] says.

    Args:
        weight: Whose shard it is.
        recipe: The format.
        groups: Names of the process groups over which the recipe's statistic runs: those of the mesh axes that cut a
            dim it is taken over, hence never the replicate axis.
        is_within_mesh: Whether all these ranks are of the mesh that gathers the self.weight.
    """

    def __init__(
        self, weight: ShardedWeight, recipe: Recipe, groups: tuple[str, ...], is_within_mesh: bool = True
    ) -> None:
        self.weight = weight
        self.recipe = recipe
        self.groups = groups
        self.is_within_mesh = is_within_mesh
        self.is_made_once = True
        self.has_columnwise = recipe.has_columnwise
        self._made_of: tuple[Tensor, ShardState] | None = None
        self._amax: Tensor | None = None
        self._quantized: dict[Direction, Quantized] = {}

    def forget(self) -> None:
        self._made_of, self._amax = None, None
        self._quantized.clear()

    def begin_forward(self) -> bool:
        is_current = self._is_current()
        if not is_current:
            self.forget()
        return bool(self.recipe.amax_dims) and not self.weight.is_cut_again and not is_current

    def _is_current(self) -> bool:
        made_of = self._made_of
        return made_of is not None and made_of[0] is self.weight.shard and made_of[1] == self.weight.state_of_shard

    def pack(self, direction: Direction, comm: CommContext) -> Packed:
        recipe = self.recipe
        direction, quantized = self._quantize(direction, comm)
        layout, dtype, amax = self.weight.layout, self.weight.compute_dtype, quantized.amax
        specs, tensors = recipe.planes(direction), quantized.planes
        if amax is not None:  # one for each matrix: where the axis cuts between them, every rank has its own
            specs, tensors = (*specs, PlaneSpec(amax.dtype, None, None)), (*tensors, amax)
        # A plane that the axis does not cut is whole on every rank.
        cut = [i for i, spec in enumerate(specs) if spec.step(layout.dim - len(layout.shape)) is not None]
        planes = [(_plane_layout(layout, specs[i]), tensors[i]) for i in cut]

        def assemble(parts: list[Tensor]) -> Quantized:
            whole = list(tensors)
            for i, part in zip(cut, parts, strict=True):
                whole[i] = part
            all_amax = None if amax is None else whole.pop()
            return Quantized(tuple(whole), all_amax)

        def unpack(parts: list[Tensor]) -> Tensor:
            return recipe.dequantize(assemble(parts), layout.shape, direction, dtype)

        return Packed(planes, unpack, None if self.weight.gemms is None else assemble)

    def path(self) -> ComputePath:
        """How linear layers multiply with the weight, and why."""
        device = torch.device(self.weight.mesh.device_type)
        return choose_path(self.recipe, device, self.weight.layout.shape, self.weight.compute_dtype, self.weight.fqn)

    def gemms(self) -> Float8GEMMs | None:
        return self.path().gemms

    def _quantize(self, direction: Direction, comm: CommContext) -> tuple[Direction, Quantized]:
        """The data of the shard that serve ``direction``, and of which direction they are."""
        direction = self.recipe.direction(direction)
        if not self._is_current():
            agree_on_amax([self.weight], comm)
        quantized = self._quantized.get(direction)
        if quantized is None:
            quantized = self._quantized[direction] = self.recipe.quantize(self.weight.shard, direction, self._amax)
        return direction, quantized

    def set_amax(self, amax: Tensor | None) -> None:
        """Take the statistic of the present shard, over all ranks."""
        self.forget()
        self._made_of, self._amax = (self.weight.shard, self.weight.state_of_shard), amax

    def num_bytes(self) -> int:
        return self.recipe.num_bytes(self.weight.layout.shape, Direction.ROWWISE)

    def note_read(self) -> None:
        warn_dequantized(
            self.recipe, self.weight.fqn, "it is read as an attribute, not used by the forward of nn.Linear"
        )

    def describe(self, not_fused: str) -> str:
        path = self.path()
        if path.gemms is not None and not_fused:
            path = ComputePath(None, not_fused)
        casts = describe_casts(torch.device(self.weight.mesh.device_type))
        return ", ".join(filter(None, (self.recipe.name, path.describe(), casts)))


class NativeWire(QuantizedWire):
    """A shard that is quantized data: its rowwise planes are gathered as they are, in forward and in backward."""

    def __init__(self, weight: ShardedWeight, recipe: Recipe) -> None:
        super().__init__(weight, recipe, ())
        self.has_columnwise = False
        self.is_made_once = False  # nothing is made: planes are sent as they are

    def begin_forward(self) -> bool:
        return False

    def _quantize(self, direction: Direction, comm: CommContext) -> tuple[Direction, Quantized]:
        shard = self.weight.shard
        # An outer fully_shard registers what it has gathered.
        assert isinstance(shard, NativeWeight | GatheredWeight)
        return Direction.ROWWISE, shard.quantized_for(direction)


def _plane_layout(layout: WeightLayout, spec: PlaneSpec) -> WeightLayout:
    """Where the rows of a plane lie: as those of the weight, in steps of the plane."""
    block_size = spec.size(layout.dim - len(layout.shape), layout.block_size)
    return replace(layout, shape=spec.shape(layout.shape), block_size=block_size)


def agree_on_amax(weights: Sequence[ShardedWeight], comm: CommContext) -> None:
    """Give each weight the statistic of its present shard over all ranks: one all-reduce for all of them on each axis.

    Magnitudes are compared as integers: for floats that are not negative the order is the same, but a NaN is the
    largest of all, where a maximum of floats may lose it.
    """
    by_groups: dict[tuple[str, ...], list[tuple[QuantizedWire, ShardedWeight, Tensor]]] = {}
    for weight in weights:
        wire = weight.wire
        assert isinstance(wire, QuantizedWire)
        amax = wire.recipe.amax(weight.shard)
        if amax is None or not wire.groups:
            wire.set_amax(amax)
        else:
            by_groups.setdefault(wire.groups, []).append((wire, weight, amax))
    for names, members in by_groups.items():
        flat = torch.cat([amax.reshape(-1) for _, _, amax in members])
        _all_reduce_max(flat.view(torch.int32), [compat.resolve_group(name) for name in names], members[0][1], comm)
        parts = flat.split([amax.numel() for _, _, amax in members])
        for (wire, _, amax), part in zip(members, parts, strict=True):
            wire.set_amax(part.view(amax.shape))


def _all_reduce_max(
    bits: Tensor, groups: Iterable[dist.ProcessGroup], weight: ShardedWeight, comm: CommContext
) -> None:
    with comm.gathering(weight.groups):
        comm.before_collective("all_reduce of amax", weight.fqn, weight.groups)
        done = None
        for group in groups:
            if done is not None and done.work is not None:
                done.work.wait()
            work = compat.all_reduce(bits, dist.ReduceOp.MAX, group, not comm.has_streams)
            done = comm.gather_done(work, weight.groups)
    if done is not None:
        comm.wait(done)


class HookWire(Wire):
    """A tensor subclass that says itself what is gathered of it, by the hooks that ``fully_shard`` calls, too.

    Args:
        weight: Whose shard it is.
        mp_policy: Passed on to the hook.
    """

    def __init__(self, weight: ShardedWeight, mp_policy: MixedPrecisionPolicy) -> None:
        self.weight = weight
        self._mp_policy = mp_policy

    def pack(self, direction: Direction, comm: CommContext) -> Packed:
        weight, shard, layout = self.weight, self.weight.shard, self.weight.layout
        mesh = weight.mesh[weight.mesh.mesh_dim_names[-1]] if weight.mesh.mesh_dim_names else weight.mesh
        if not has_hooks(shard):
            raise NotImplementedError(
                f"gtp_shard gathers parameter '{weight.fqn}' of shape {tuple(layout.shape)} by the hooks of its shard, "
                f"but a fully_shard outside has called them already and left a {type(shard).__name__}. Leave the "
                "parameter out of that fully_shard (ignored_params), or use quantize_ instead."
            )
        pre: Any = shard.fsdp_pre_all_gather  # type: ignore[attr-defined]
        if len(inspect.signature(pre).parameters) == 1:  # of older torchao
            inputs, metadata = pre(mesh)
        else:
            stride = torch.empty(layout.shape, device="meta").stride()
            inputs, metadata = pre(mesh, layout.shape, stride, self.weight.sites[0].module, self._mp_policy)
        planes = [(_hook_layout(self.weight, tensor), tensor) for tensor in inputs]

        def unpack(parts: list[Tensor]) -> Tensor:
            full, _ = shard.fsdp_post_all_gather(tuple(parts), metadata, self.weight.compute_dtype)  # type: ignore[attr-defined]
            result: Tensor = full
            return result

        return Packed(planes, unpack)

    def num_bytes(self) -> None:
        return None

    def describe(self, not_fused: str) -> str:
        return "gathered and used by its own hooks"


def _hook_layout(weight: ShardedWeight, tensor: Tensor) -> WeightLayout:
    """Where a hook's tensor lies in the gather: in the rows of the weight, or, if all shards are alike, in its own."""
    layout = weight.layout
    if layout.dim == 0 and tensor.ndim > 0 and tensor.shape[0] == layout.local_rows:
        return replace(layout, shape=torch.Size((layout.num_rows, *tensor.shape[1:])))
    if layout.dim != 0 or layout.num_rows != layout.world * layout.chunk_rows:
        raise NotImplementedError(
            f"gtp_shard expects fsdp_pre_all_gather of {type(weight.shard).__name__} to return tensors with the "
            f"{layout.local_rows} rows of its shard where shards are not alike or dim 0 is not the sharded one, but "
            f"got one of shape {tuple(tensor.shape)} for parameter '{weight.fqn}' of shape {tuple(layout.shape)} (rank "
            f"{layout.rank} of {layout.world}). Choose a shape whose rows the axis divides evenly."
        )
    rows = tensor.shape[0] if tensor.ndim else 1
    return replace(layout, shape=torch.Size((layout.world * rows, *tensor.shape[1:])), block_size=1)


def make_wire(weight: ShardedWeight, recipe: Recipe | None, mp_policy: MixedPrecisionPolicy) -> Wire | None:
    """How a weight is gathered: quantized by ``recipe``, by hooks of its own, or (None) as it is."""
    if recipe is None:
        return HookWire(weight, mp_policy) if has_hooks(weight.shard) else None
    if isinstance(weight.shard, NativeWeight):
        return NativeWire(weight, recipe)
    spec = weight.spec
    groups = recipe_groups(spec, recipe)
    return QuantizedWire(weight, recipe, groups, set(groups) <= {spec.mesh.get_group(spec.mesh.ndim - 1).group_name})


def has_hooks(tensor: Tensor) -> bool:
    """Whether ``tensor`` has hooks that say what is gathered of it."""
    return hasattr(tensor, "fsdp_pre_all_gather") and hasattr(tensor, "fsdp_post_all_gather")
