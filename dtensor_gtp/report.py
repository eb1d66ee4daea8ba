"""``sharding_report``: a table of what ``gtp_shard`` did. Placement, bytes and use of each parameter; the schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn

from ._comm.debug import format_nbytes
from ._modules.binding import binding_of, join_name, unmanaged_params
from ._modules.fused_forward import GTPFused
from ._params.managed_param import ManagedParam
from ._params.pack_planes import QuantizedWire
from ._params.sharded_weight import ShardedWeight
from ._params.whole_param import WholeParam
from ._schedule.order_of_uses import format_plan
from ._schedule.runtime import Runtime
from .quant.native import native_of


class ReportRow(NamedTuple):
    """One parameter of the report. ``gathered_nbytes`` is 0 for a parameter that stays whole. ``storage`` is "native
    mxfp8" or "mxfp8 from master" for a weight with a recipe, else empty."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: str
    local_nbytes: int
    gathered_nbytes: int
    use: str
    storage: str = ""


class PassReport(NamedTuple):
    """The plan of one pass that computes gradients.

    Args:
        is_backward: False for the forward of an outermost module.
        uses: Names of the weights in the order of their uses.
        gathered_nbytes: For each use, the bytes of full weights that are in memory or on their way: the one in use,
            those that are gathered ahead, and those that are kept from forward to backward.
        between_nbytes: The same before each use and after the last one.
    """

    is_backward: bool
    uses: tuple[str, ...]
    gathered_nbytes: tuple[int, ...]
    between_nbytes: tuple[int, ...]


@dataclass(frozen=True)
class ShardingReport:
    """Report of a sharded module; ``str()`` is the table.

    Args:
        mesh: Axes and sizes of the root's mesh.
        rows: One for each distinct parameter.
        schedule: The observed plan of each forward and backward, as text; empty before the first forward.
        passes: The same as data.
        symmetric_nbytes: Memory of this rank that peers copy from by copy engines. It does not come from the caching
            allocator, so ``torch.cuda.memory_stats`` does not count it.
        gather_backends: Who gathers and reduces on each mesh and why, as text; empty before the first forward.
        choices: What else was chosen in the first forward and why, as text.
    """

    mesh: str
    rows: tuple[ReportRow, ...]
    schedule: str
    passes: tuple[PassReport, ...] = ()
    symmetric_nbytes: int = 0
    gather_backends: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()

    def __str__(self) -> str:
        cells = [("parameter", "shape", "dtype", "placements", "per rank", "gathered", "use")]
        for row in self.rows:
            shape, dtype = "x".join(map(str, row.shape)) or "scalar", str(row.dtype).removeprefix("torch.")
            dtype += f" ({row.storage})" if row.storage else ""
            gathered = format_nbytes(row.gathered_nbytes) if row.gathered_nbytes else "-"
            cells.append((row.name, shape, dtype, row.placements, format_nbytes(row.local_nbytes), gathered, row.use))
        widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
        local = sum(row.local_nbytes for row in self.rows)
        largest = max((row.gathered_nbytes for row in self.rows), default=0)
        lines = [f"gtp_shard on {self.mesh}", *(line.rstrip() for line in lines)]
        lines += [f"{format_nbytes(local)} of parameters per rank; largest gathered weight {format_nbytes(largest)}"]
        if self.symmetric_nbytes:
            lines.append(f"{format_nbytes(self.symmetric_nbytes)} of memory that peers copy from")
        return "\n".join((*lines, *self.gather_backends, *self.choices, self.schedule or "schedule: not observed yet"))


def sharding_report(module: nn.Module) -> ShardingReport:
    """Describe what :func:`gtp_shard` did to ``module`` and the schedule it has observed so far.

    Args:
        module: A module that was passed to ``gtp_shard``, or one inside of it.

    Raises:
        ValueError: ``module`` is not sharded.
    """
    binding = binding_of(module)
    if binding is None:
        raise ValueError(f"sharding_report expects a module after gtp_shard, but got a plain {type(module).__name__}.")
    sites: dict[ManagedParam, dict[str, nn.Module]] = {}
    for prefix, submodule in module.named_modules():
        inner = binding_of(submodule)
        for name in submodule._parameters:
            if inner is not None and name in inner.params:
                sites.setdefault(inner.params[name], {})[join_name(prefix, name)] = submodule
    rows = [_row(managed, modules) for managed, modules in sites.items()]
    for fqn, _, param in unmanaged_params(module):
        nbytes = param.numel() * param.element_size()
        rows.append(ReportRow(fqn, tuple(param.shape), param.dtype, "-", nbytes, 0, "ignored"))
    mesh, runtime = binding.group.mesh, binding.group.runtime
    axes = mesh.mesh_dim_names or tuple(f"axis{axis}" for axis in range(mesh.ndim))
    return ShardingReport(
        ", ".join(f"{axis}={size}" for axis, size in zip(axes, mesh.shape, strict=True)),
        tuple(rows),
        _schedule(runtime),
        _passes(runtime),
        runtime.comm.symmetric_nbytes,
        tuple(runtime.comm.choices),
        runtime.reasons,
    )


def _row(managed: ManagedParam, modules: dict[str, nn.Module]) -> ReportRow:
    """The row of a parameter; ``modules`` has the one module of each of its names."""
    param, shard = managed.param, managed.shard
    placements = "(" + ", ".join(map(str, managed.placements)) + ")"
    native = native_of(shard)
    local_nbytes = shard.numel() * shard.element_size() if native is None else native.stored_nbytes
    storage = "" if native is None else f"native {native.recipe.name}"
    storage = storage if managed.offload is None else "on the host"
    gathered, use = 0, "attribute"
    if isinstance(managed, WholeParam):
        use = f"whole ({managed.reason})"
    if isinstance(managed, ShardedWeight):
        if isinstance(next(iter(modules.values())), GTPFused):
            exchanges = [f"{e.purpose}: {e.describe()}" for e in (managed.lookups, managed.losses) if e is not None]
            use = ", ".join(("fused op", *exchanges))
        gathered = managed.layout.shape.numel() * managed.compute_dtype.itemsize
        if native is None and isinstance(managed.wire, QuantizedWire):
            storage = f"{managed.wire.recipe.name} from master"
        if managed.wire is not None:
            gathered = managed.wire.num_bytes() or gathered
            in_gemm = any(isinstance(module, GTPFused) and module.multiplies for module in modules.values())
            use = f"{use}, {managed.wire.describe('' if in_gemm else 'no fused nn.Linear')}"
    return ReportRow(
        " = ".join(modules), tuple(param.shape), param.dtype, placements, local_nbytes, gathered, use, storage
    )


def _schedule(runtime: Runtime) -> str:
    columnwise = {id(weight.for_backward) for weight in runtime.weights if weight.for_backward is not weight}
    names = [g.weight.fqn + " (columnwise)" * (id(g) in columnwise) for g in runtime.gatherables]
    plans = [
        f"{exchange.purpose} of {weight.fqn}: {exchange.describe()}"
        for weight in runtime.weights
        for exchange in (weight.lookups, weight.losses)
        if exchange is not None
    ]
    for key, chain in list(runtime.chains.items()):
        if not chain.plan.uses:
            continue
        title = "backward" if key.is_backward else "forward"
        if key.entry is not None:
            title += f" of {key.entry.module._get_name()}"
            title += f".{key.entry.method}" * (key.entry.method != "forward")
        if not key.is_grad_enabled:
            title += " without gradient"
        plans.append(format_plan(title, chain, names))
        kept = runtime.kept_until_backward(key.entry) if key.is_grad_enabled and not key.is_backward else ()
        if kept:
            total = format_nbytes(sum(runtime.gatherables[index].kept_nbytes for index in kept))
            budget = format_nbytes(runtime.schedule.keep_nbytes)
            plans.append(f"  kept until backward ({total} of {budget}): {', '.join(names[index] for index in kept)}")
    return "\n".join(plans)


def _passes(runtime: Runtime) -> tuple[PassReport, ...]:
    passes = []
    nbytes = [gatherable.kept_nbytes for gatherable in runtime.gatherables]
    for key, chain in list(runtime.chains.items()):
        plan = chain.plan
        if not plan.uses or not key.is_grad_enabled:
            continue
        kept = runtime.kept_from_forward(key.entry)
        during, between = [], []
        for cursor in range(len(plan.uses) + 1):
            used = frozenset(plan.uses[:cursor])
            held = kept - used if key.is_backward else kept & used
            launches = plan.window(plan.cursors(cursor))
            ahead = held | {plan.uses[position] for positions in launches for position in positions}
            between.append(sum(nbytes[index] for index in ahead))
            if cursor:
                during.append(sum(nbytes[index] for index in {plan.uses[cursor - 1], *ahead}))
        names = tuple(runtime.gatherables[use].weight.fqn for use in plan.uses)
        passes.append(PassReport(key.is_backward, names, tuple(during), tuple(between)))
    return tuple(passes)
