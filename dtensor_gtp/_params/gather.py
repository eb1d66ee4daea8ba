"""Launches one gather of one or several weights: buffers, the collective, and how the full weights are read later."""

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
from .pack_planes import agree_on_stale, rounded
from .sharded_weight import Gatherable, ShardedWeight
from .weight_group import GatherableGroup, WeightGroup

# One tensor to gather: where its rows lie in the buffer, this rank's part, and the buffer.
_Plane = tuple[WeightLayout, Tensor, Tensor]


def launch(targets: Sequence[Gatherable], comm: CommContext) -> None:
    """Launch the gathers of present shards of one mesh, as one operation. They become the last ones ``pending``."""
    weight = targets[0].weight
    if comm.is_debugged and weight.layout.world > 1:
        weights = [weight for target in targets for weight in weights_of(target)]
        shards = {weight.fqn: weight.shard for weight in weights}
        # A tensor of another library may have no isfinite.
        values = [(n, s) for n, s in shards.items() if type(s) is Tensor or isinstance(s, WeightWithRecipe)]
        comm.check_finite("the all_gather of weights", values, weight.groups)
    if weight.form.is_plain and len(targets) == 1:
        with profiler_range("GTP::all_gather", weight.fqn):
            _launch_plain(targets[0], comm)
    elif weight.layout.world == 1:
        for target in targets:
            target.add(_alone(target, comm))
    else:
        with profiler_range("GTP::all_gather", *[target.weight.fqn for target in targets]):
            _launch_together(targets, comm)


def _launch_plain(target: Gatherable, comm: CommContext) -> None:
    """As ``_launch_together``, but for one weight that is gathered as it is: the most frequent case, so it is short."""
    weight = target.weight
    layout, shard, form, rows = weight.layout, weight.shard, weight.form, weight.form.rows
    buffer = torch.empty_like(form.full_like) if form.fixed is None else form.gather_buffer()
    if form.is_sendable or weight.groups.casts_shards:
        done = comm.all_gather(weight.groups, weight.fqn, [buffer], [rows])
    else:
        slot = layout.slot(buffer)
        copies = _copied_ahead(([layout.filled(slot)], [rows]), [target], comm)
        done = comm.all_gather(weight.groups, weight.fqn, [buffer], [slot], copies)
    full = buffer if layout.is_as_buffer else layout.full_view(buffer)
    version = weight.param._version, weight.local._version, weight.versions.num_updates
    target.add(Gathered(buffer, full, done, shard, version))


def _copied_ahead(copies: Copies, targets: Sequence[Gatherable], comm: CommContext) -> Copies | None:
    """Copy on the compute stream, between two GEMMs. On another stream each kernel would wait until a GEMM ends, which
    takes all multiprocessors: 67.0, 67.6, 68.9 to 65.7, 66.1, 67.1 ms with Llama on 2 x H200, T=2048. Returns what is
    left to copy: all, if other streams have made the sources (gathers from replicas, casts of recipes, uploads)."""
    if not all(weight.part is None and weight.form.is_plain for target in targets for weight in weights_of(target)):
        return copies
    comm.streams.note_compute()
    with profiler_range("GTP::cast", *[target.weight.fqn for target in targets]):
        compat.copy_all(*copies)
    return None


def _alone(target: Gatherable, comm: CommContext) -> Gathered:
    """Make the full weight from the shard on an axis of one rank, without communication."""
    weight, done = target.weight, comm.streams.at_once()
    layout, shard, version = weight.layout, weight.shard, weight.version
    if weight.form.wire is not None:
        packed = weight.form.wire.pack(_direction(target), comm)
        own = [plane for _, plane in packed.planes]
        gathered = Gathered(compat.as_sendable(own[0]), shard, done, shard, version)
        gathered.is_alias = True
        return _with_planes(gathered, packed, lambda: own)
    rows = layout.rows_of(shard)
    if weight.policies.offload is not None:
        (copy,), uploaded = comm.host_copies.upload([shard])
        comm.streams.wait(Done(uploaded))
        buffer = layout.rows_of(copy).to(weight.compute_dtype)
        return Gathered(buffer, layout.full_view(buffer), done, shard, version)
    buffer = rows.to(weight.compute_dtype)
    gathered = Gathered(buffer, layout.full_view(buffer), done, shard, version)
    gathered.is_alias = buffer is rows
    return gathered


def _pack(targets: Sequence[Gatherable], comm: CommContext) -> dict[Gatherable, Packed]:
    """Quantize or pack the shards that are not sent as they are."""
    wires = [(target, wire) for target in targets if (wire := target.weight.form.wire) is not None]
    if not wires:
        return {}
    with comm.packing(targets[0].weight.groups):
        return {target: wire.pack(_direction(target), comm) for target, wire in wires}


def _rounded(group: WeightGroup, comm: CommContext) -> dict[ShardedWeight, Tensor]:
    """What the gather sends of quantized members."""
    with comm.packing(group.groups):
        agree_on_stale(group.quantized, comm)
        return rounded(group.quantized)


def _direction(target: Gatherable) -> Direction:
    return Direction.ROWWISE if target is target.weight.for_forward else Direction.COLUMNWISE


def _side_by_side(targets: Sequence[Gatherable]) -> dict[Gatherable, Tensor]:
    """Buffers of weights that are always gathered together. They are slices of one tensor, so that an op that computes
    with all of the weights gets their stack as a view."""
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
    return target.group.weights if isinstance(target, GatherableGroup) else [target.weight]


def _planes(weight: ShardedWeight, packed: Packed | None, buffer: Tensor | None, copy: Tensor | None) -> list[_Plane]:
    """What to gather of a weight: the weight itself in ``buffer``, or the planes that it is packed in. ``copy`` is that
    of a shard on the host."""
    if packed is None:
        shard = weight.shard if copy is None else copy
        return [(weight.layout, shard, weight.form.gather_buffer() if buffer is None else buffer)]
    planes = []
    for layout, plane in packed.planes:
        part = compat.as_sendable(plane)
        planes.append((layout, part, torch.empty(layout.buffer_shape, dtype=part.dtype, device=part.device)))
    return planes


def _launch_together(targets: Sequence[Gatherable], comm: CommContext) -> None:
    """Gather several tensors in one launch, each into a buffer of its own, so that each weight is freed by itself."""
    groups, names = targets[0].weight.groups, ", ".join(target.weight.fqn for target in targets)
    grouped = [target for target in targets if isinstance(target, GatherableGroup)]
    singles = targets if not grouped else [target for target in targets if not isinstance(target, GatherableGroup)]
    parts = Parts([], [], [], [])
    for target in grouped:
        group = target.group
        group.leaves.allocate(group.version)
        values = _rounded(group, comm) if group.quantized else {}
        more = group.shards.parts(group.leaves.outputs, groups.casts_shards, values)
        for all_parts, those_of_group in zip(parts, more, strict=True):
            all_parts += those_of_group
    packed, buffers = _pack(singles, comm), _side_by_side(singles)
    hosted = [target for target in singles if target.weight.policies.offload is not None]
    uploads, uploaded = comm.host_copies.upload([target.weight.shard for target in hosted]) if hosted else ([], None)
    copies = dict(zip(hosted, uploads, strict=True))
    planes_of = {
        target: _planes(target.weight, packed.get(target), buffers.get(target), copies.get(target))
        for target in singles
    }
    for planes in planes_of.values():
        for layout, part, buffer in planes:
            parts.add(layout, layout.rows_of(part), buffer, groups.casts_shards)
    left = _copied_ahead((parts.copied, parts.sources), targets, comm) if parts.copied else None
    done = comm.all_gather(groups, names, parts.outputs, parts.slots, left, uploaded)
    for target in grouped:
        group = target.group
        assert group.leaves.version is not None
        first = group.leaves.outputs[0]
        target.add(Gathered(first, first, done, group.weights[0].shard, group.leaves.version))
    for single, planes in planes_of.items():
        gathered = _gathered(single.weight, planes, packed.get(single), done, comm)
        gathered.uploaded = copies.get(single)
        single.add(gathered)


def _gathered(
    weight: ShardedWeight, planes: list[_Plane], packed: Packed | None, done: Done, comm: CommContext
) -> Gathered:
    buffers = [buffer for _, _, buffer in planes]
    full = buffers[0] if packed is not None else weight.layout.full_view(buffers[0])
    gathered = Gathered(buffers[0], full, done, weight.shard, weight.version)
    if packed is None:
        return gathered
    layouts = [(layout, plane.dtype) for layout, plane in packed.planes]

    def parts() -> list[Tensor]:
        comm.streams.note_reading(done, buffers)
        views = zip(layouts, buffers, strict=True)
        return [layout.full_view(buffer).view(dtype) for (layout, dtype), buffer in views]

    return _with_planes(gathered, packed, parts)


def _with_planes(gathered: Gathered, packed: Packed, parts: Callable[[], list[Tensor]]) -> Gathered:
    gathered.unpack = lambda: packed.unpack(parts())
    if (assemble := packed.quantized) is not None:
        gathered.quantized = lambda: assemble(parts())
    return gathered
