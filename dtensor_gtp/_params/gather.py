"""Launches one gather of one or several weights: buffers, the collective, and how the full weights
are read later."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from .. import _torch_compat as compat
from .._comm.context import CommContext, Copies
from .._comm.debug import profiler_range
from .._comm.streams import Done
from ..quant.planes import Direction
from ..quant.weight import WeightWithRecipe
from .gathered import Gathered, Packed
from .group_memory import Parts
from .layout import WeightLayout
from .pack_planes import agree_on_stale, round_into
from .sharded_weight import Gatherable, ShardedWeight
from .weight_group import GatherableGroup, WeightGroup

# One tensor to gather: where its rows lie in the buffer, this rank's part, and the buffer.
_Plane = tuple[WeightLayout, Tensor, Tensor]


def launch(targets: Sequence[Gatherable], comm: CommContext) -> None:
    """Launch the gathers of present shards of one mesh, as one operation. They become the last ones
    ``pending``."""
    weight = targets[0].weight
    if comm.is_debugged and weight.layout.world > 1:
        weights = [weight for target in targets for weight in weights_of(target)]
        shards = {weight.fqn: weight.shard for weight in weights}
        values = [
            (name, shard)
            for name, shard in shards.items()
            # A tensor of another library may have no isfinite.
            if type(shard) is Tensor or isinstance(shard, WeightWithRecipe)
        ]
        comm.check_finite("the all_gather of weights", values, weight.groups)
    if any(target.weight.form.fixed is not None for target in targets):
        comm.streams.wait_for_others()  # one of them may still read the fixed buffer
    if weight.layout.world == 1:  # nothing is sent
        for target in targets:
            target.add(_alone(target, comm))
    else:
        with profiler_range("GTP::all_gather", *[target.weight.fqn for target in targets]):
            _launch_together(targets, comm)


def _copied_ahead(copies: Copies, targets: Sequence[Gatherable], comm: CommContext) -> Copies | None:
    """Copy on the compute stream, between two GEMMs. On another stream each kernel would wait until
    a GEMM ends, which takes all multiprocessors: 67.0, 67.6, 68.9 to 65.7, 66.1, 67.1 ms with Llama
    on 2 x H200, T=2048. Returns what is left to copy: all, if other streams have made the sources
    (gathers from replicas, casts of recipes, uploads)."""
    for target in targets:
        for weight in weights_of(target):
            if weight.part is not None or weight.form.wire is not None or weight.policies.offload is not None:
                return copies
    comm.streams.note_compute()  # the stream of gathers waits for this one, and so for the copies
    with profiler_range("GTP::cast", *[target.weight.fqn for target in targets]):
        compat.copy_all(*copies)
    return None


def _alone(target: Gatherable, comm: CommContext) -> Gathered:
    """Make the full weight from the shard on an axis of one rank, without communication."""
    weight = target.weight
    layout = weight.layout
    shard = weight.shard
    version = weight.version
    done = comm.streams.at_once()
    if weight.form.wire is not None:
        packed = weight.form.wire.pack(_direction(target), comm)
        own = [plane for _, plane in packed.planes]
        gathered = Gathered(compat.as_sendable(own[0]), shard, done, shard, version)
        gathered.is_alias = True
        return _with_planes(gathered, packed, lambda: own)
    rows = layout.rows_of(shard)
    if weight.policies.offload is not None:
        (copy,), uploaded = comm.host_copies.upload([shard])
        # No stream of gathers takes part: compute itself waits for the upload and reads the copy.
        comm.streams.wait(Done(uploaded))
        buffer = layout.rows_of(copy).to(weight.compute_dtype)
        return Gathered(buffer, layout.full_view(buffer), done, shard, version)
    buffer = rows.to(weight.compute_dtype)
    gathered = Gathered(buffer, layout.full_view(buffer), done, shard, version)
    gathered.is_alias = buffer is rows  # in float32, say, nothing is cast
    return gathered


def _pack(targets: Sequence[Gatherable], comm: CommContext) -> dict[Gatherable, Packed]:
    """Quantize or pack the shards that are not sent as they are."""
    if all(target.weight.form.wire is None for target in targets):
        return {}
    packed = {}
    with comm.packing(targets[0].weight.groups):
        for target in targets:
            wire = target.weight.form.wire
            if wire is not None:
                packed[target] = wire.pack(_direction(target), comm)
    return packed


def _direction(target: Gatherable) -> Direction:
    if target is target.weight.for_forward:
        return Direction.ROWWISE
    return Direction.COLUMNWISE


def _side_by_side(targets: Sequence[Gatherable]) -> dict[Gatherable, Tensor]:
    """Buffers of weights that are always gathered together. They are slices of one tensor, so that
    an op that computes with all of the weights gets their stack as a view."""
    buffers: dict[Gatherable, Tensor] = {}
    for companions in dict.fromkeys(target.companions for target in targets if target.companions):
        weights = [target.weight for target in companions]
        kinds = {(weight.layout.buffer_shape, weight.compute_dtype) for weight in weights}
        is_plain = all(weight.form.wire is None and weight.form.fixed is None for weight in weights)
        if is_plain and len(kinds) == 1 and set(companions) <= set(targets):
            shape = (len(weights), *weights[0].layout.buffer_shape)
            whole = torch.empty(shape, dtype=weights[0].compute_dtype, device=weights[0].device)
            buffers.update(zip(companions, whole.unbind(0), strict=True))
    return buffers


def weights_of(target: Gatherable) -> list[ShardedWeight]:
    """The weight itself, or those of a group."""
    if isinstance(target, GatherableGroup):
        return target.group.weights
    return [target.weight]


def _planes(weight: ShardedWeight, packed: Packed | None, buffer: Tensor | None, copy: Tensor | None) -> list[_Plane]:
    """What to gather of a weight: the weight itself in ``buffer``, or the planes that it is packed
    in. ``copy`` is that of a shard on the host."""
    if packed is None:
        shard = weight.shard if copy is None else copy
        if buffer is None:
            buffer = weight.form.gather_buffer()
        return [(weight.layout, shard, buffer)]
    planes = []
    for layout, plane in packed.planes:
        part = compat.as_sendable(plane)
        full = torch.empty(layout.buffer_shape, dtype=part.dtype, device=part.device)
        planes.append((layout, part, full))
    return planes


def _launch_together(targets: Sequence[Gatherable], comm: CommContext) -> None:
    """Gather several tensors in one launch, each into a buffer of its own, so that each weight is
    freed by itself."""
    groups = targets[0].weight.groups
    names = ", ".join(target.weight.fqn for target in targets)
    grouped: list[GatherableGroup] = []
    singles: list[Gatherable] = []
    for target in targets:
        if isinstance(target, GatherableGroup):
            grouped.append(target)
        else:
            singles.append(target)
    parts = Parts([], [], [], [])
    for in_place in grouped:
        parts.extend(_parts_of_group(in_place.group, comm))
    packed = _pack(singles, comm)
    buffers = _side_by_side(singles)
    hosted = [target for target in singles if target.weight.policies.offload is not None]
    copies: dict[Gatherable, Tensor] = {}
    uploaded = None  # the event after the uploads, for which the gather waits
    if hosted:
        uploads, uploaded = comm.host_copies.upload([target.weight.shard for target in hosted])
        copies = dict(zip(hosted, uploads, strict=True))
    planes_of = {
        target: _planes(target.weight, packed.get(target), buffers.get(target), copies.get(target))
        for target in singles
    }
    for planes in planes_of.values():
        for layout, part, buffer in planes:
            parts.add(layout, layout.rows_of(part), buffer, groups.casts_shards)
    left = None
    if parts.copied:
        left = _copied_ahead((parts.copied, parts.sources), targets, comm)
    done = comm.all_gather(groups, names, parts.outputs, parts.slots, left, uploaded)
    for in_place in grouped:
        leaves = in_place.group.leaves
        assert leaves.version is not None
        first = leaves.outputs[0]  # stands for all of them: they are filled and freed together
        shard = in_place.group.weights[0].shard
        in_place.add(Gathered(first, first, done, shard, leaves.version))
    for single, planes in planes_of.items():
        gathered = _gathered(single.weight, planes, packed.get(single), done, comm)
        gathered.uploaded = copies.get(single)
        single.add(gathered)


def _parts_of_group(group: WeightGroup, comm: CommContext) -> Parts:
    """What the gather of a group sends and fills. Allocates the memory of its leaves."""
    group.leaves.allocate(group.version)
    parts = group.shards.parts(group.leaves.outputs, group.groups.casts_shards)
    group.leaves.count_owners()
    if group.quantized:
        with comm.packing(group.groups):
            agree_on_stale(group.quantized, comm)  # collective, before the gather
            round_into(group.shards.quantized)
    return parts


def _gathered(
    weight: ShardedWeight, planes: list[_Plane], packed: Packed | None, done: Done, comm: CommContext
) -> Gathered:
    buffers = [buffer for _, _, buffer in planes]
    if packed is None:
        full = weight.layout.full_view(buffers[0])
        return Gathered(buffers[0], full, done, weight.shard, weight.version)
    gathered = Gathered(buffers[0], buffers[0], done, weight.shard, weight.version)
    layouts = [(layout, plane.dtype) for layout, plane in packed.planes]

    def parts() -> list[Tensor]:
        # The stream of the use may be another one than that which owns the planes.
        comm.streams.note_reading(done, buffers)
        views = zip(layouts, buffers, strict=True)
        return [layout.full_view(buffer).view(dtype) for (layout, dtype), buffer in views]

    return _with_planes(gathered, packed, parts)


def _with_planes(gathered: Gathered, packed: Packed, parts: Callable[[], list[Tensor]]) -> Gathered:
    gathered.unpack = lambda: packed.unpack(parts())
    assemble = packed.quantized
    if assemble is not None:
        gathered.quantized = lambda: assemble(parts())
    return gathered
