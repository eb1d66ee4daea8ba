"""Rows of the report: where each parameter is, and what computes with it."""

from __future__ import annotations

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard

from .._comm.tokens import TokenExchange
from .._modules.binding import Binding
from .._params.managed_param import ManagedParam
from .._params.pack_planes import QuantizedWire
from .._params.sharded_weight import ShardedWeight
from .._params.whole_param import WholeParam
from ..placement import GTPShard
from ..quant.native import native_of
from .facts import Cut, ReportRow


def row_of(managed: ManagedParam, bindings: dict[str, Binding]) -> ReportRow:
    """The row of a parameter; ``bindings`` has that of the one module of each of its names."""
    param = managed.param
    shard = managed.shard
    native = native_of(shard)
    local_nbytes = shard.numel() * shard.element_size()
    storage = ""
    if native is not None:
        local_nbytes = native.stored_nbytes
        storage = f"native {native.recipe.name}"
    if managed.policies.offload is not None:
        storage = "on the host"
    gathered = 0  # a whole parameter is not gathered
    if isinstance(managed, WholeParam):
        use = f"whole ({managed.reason})"
    else:
        assert isinstance(managed, ShardedWeight)
        use = _use_of(managed, bindings)
        gathered = managed.layout.shape.numel() * managed.compute_dtype.itemsize
        wire = managed.form.wire
        if native is None and isinstance(wire, QuantizedWire):
            storage = f"{wire.recipe.name} from master"
        if wire is not None and managed.group is None:
            gathered = managed.for_forward.nbytes
    return ReportRow(
        name=" = ".join(bindings),
        shape=tuple(param.shape),
        dtype=param.dtype,
        placements="(" + ", ".join(map(str, managed.placements)) + ")",
        local_nbytes=local_nbytes,
        gathered_nbytes=gathered,
        use=use,
        storage=storage,
        cuts=_cuts(managed),
    )


def _use_of(weight: ShardedWeight, bindings: dict[str, Binding]) -> str:
    """What computes with a weight, and what is made of it for that."""
    use = "attribute"
    if weight.group is not None:
        use = "with its block"
    if next(iter(bindings.values())).fused is not None:
        exchanges = [f"{exchange.purpose}: {exchange.describe()}" for exchange in exchanges_of(weight)]
        use = ", ".join(("fused op", *exchanges))
    if weight.form.wire is None:
        return use
    fused = [binding.fused for binding in bindings.values()]
    why_not = "no fused nn.Linear"
    if any(each is not None and each.multiplies for each in fused):
        why_not = ""
    return f"{use}, {weight.form.wire.describe(why_not)}"


def _cuts(managed: ManagedParam) -> tuple[Cut, ...]:
    mesh = managed.spec.mesh
    (coordinates,) = (mesh.mesh == dist.get_rank()).nonzero().tolist()
    found = []
    axes = zip(axes_of(mesh), mesh.shape, coordinates, managed.placements, strict=True)
    for axis, size, index, placement in axes:
        if isinstance(placement, Shard | GTPShard):
            dim = placement.dim % len(managed.param.shape)
            found.append(Cut(axis, size, index, dim, getattr(placement, "block_size", 1)))
        else:
            found.append(Cut(axis, size, index))
    return tuple(found)


def exchanges_of(weight: ShardedWeight) -> list[TokenExchange]:
    return [exchange for exchange in (weight.fused.lookups, weight.fused.losses) if exchange is not None]


def axes_of(mesh: DeviceMesh) -> tuple[str, ...]:
    """Their names, also of those that have none."""
    return mesh.mesh_dim_names or tuple(f"axis{axis}" for axis in range(mesh.ndim))
