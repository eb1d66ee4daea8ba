"""One gather: buffers, the collective, and when the full weight may be read."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ..quant.base import Direction
from . import collectives
from .comm_context import CommContext, Done
from .debug import profiler_range
from .gathered import Columnwise, Gatherable, Gathered
from .param import ShardedWeight
from .wire import Packed, as_integers


def launch(target: Gatherable, comm: CommContext) -> Gathered:
    """Launch the gather of the present shard."""
    weight = target.weight
    target.num_gathers += 1
    if weight.wire is not None:
        direction = Direction.COLUMNWISE if isinstance(target, Columnwise) else Direction.ROWWISE
        return _launch_packed(weight, weight.wire.pack(weight, direction, comm), comm)
    layout, shard, dtype = weight.layout, weight.shard, weight.compute_dtype
    rows = layout.rows_of(shard)
    if layout.world == 1:
        buffer = rows if rows.dtype == dtype else rows.to(dtype)
        return Gathered(buffer, layout.full_view(buffer), Done(), shard, weight.version, buffer is rows)
    buffer = torch.empty(layout.buffer_shape, dtype=dtype, device=shard.device)
    is_sendable = rows.dtype == dtype and rows.shape[0] == layout.chunk_rows and rows.is_contiguous()
    with profiler_range("GTP::all_gather", weight.fqn), comm.gathering():
        comm.before_collective("all_gather", weight.fqn, weight.groups)
        # The shard goes out as it is if it can; else it is cast and padded into its own slot of the buffer.
        slot = rows
        if not is_sendable:
            slot = layout.slot(buffer)
            layout.filled(slot).copy_(rows)
        done = comm.gather_done(collectives.all_gather(buffer, slot, weight.groups.gather, comm.has_streams))
    return Gathered(buffer, layout.full_view(buffer), done, shard, weight.version, False)


def _launch_packed(weight: ShardedWeight, packed: Packed, comm: CommContext) -> Gathered:
    """Gather each plane into a buffer of its own, all in one collective; the weight is made of them after the wait."""
    shard, version = weight.shard, weight.version
    planes = [(layout, as_integers(plane), plane.dtype) for layout, plane in packed.planes]
    if weight.layout.world == 1:
        own = [plane for _, plane in packed.planes]
        return _packed(packed, lambda: own, Gathered(planes[0][1], shard, Done(), shard, version, True))
    buffers = [torch.empty(layout.buffer_shape, dtype=p.dtype, device=p.device) for layout, p, _ in planes]
    slots = []
    with profiler_range("GTP::all_gather", weight.fqn), comm.gathering():
        comm.before_collective("all_gather", weight.fqn, weight.groups)
        for (layout, plane, _), buffer in zip(planes, buffers, strict=True):
            rows = layout.rows_of(plane)
            if rows.shape[0] == layout.chunk_rows and rows.is_contiguous():
                slots.append(rows)
                continue
            slots.append(layout.slot(buffer))
            layout.filled(slots[-1]).copy_(rows)
        work = collectives.all_gather_many(buffers, slots, weight.groups.gather, comm.has_streams)
        done = comm.gather_done(work)

    def parts() -> list[torch.Tensor]:
        full = [layout.full_view(buffer) for (layout, _, _), buffer in zip(planes, buffers, strict=True)]
        return [part.view(dtype) for part, (_, _, dtype) in zip(full, planes, strict=True)]

    return _packed(packed, parts, Gathered(buffers[0], buffers[0], done, shard, version, False))


def _packed(packed: Packed, parts: Callable[[], list[torch.Tensor]], gathered: Gathered) -> Gathered:
    gathered.unpack = lambda: packed.unpack(parts())
    if (assemble := packed.quantized) is not None:
        gathered.quantized = lambda: assemble(parts())
    return gathered
