"""What ``gtp_shard`` did, as a table: every parameter, its placement, its bytes, how it is used, and the schedule."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn as nn

from ._comm.debug import format_nbytes
from ._modules.binding import Binding, binding_of
from ._modules.fused_forward import GTPFused
from ._params.managed_param import ManagedParam
from ._params.pack_planes import QuantizedWire
from ._params.sharded_weight import ShardedWeight
from ._params.whole_param import WholeParam
from ._schedule.order_of_uses import format_plan
from .quant.native import native_of


class ReportRow(NamedTuple):
    """One parameter of the report. Sizes are in bytes; ``gathered_nbytes`` is 0 for a parameter that stays whole.
    ``storage`` tells how a weight with a recipe is stored, "native mxfp8" or "mxfp8 from master"; empty without one."""

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
        is_backward: Whether it is a backward; else the forward of an outermost module.
        uses: Names of the weights in the order of their uses.
        gathered_nbytes: For each use, the bytes of full weights that are in memory or on their way: the one in use,
            those that are gathered ahead, and those that are kept from forward to backward.
        between_nbytes: The same before each use, and, one more, after the last one.
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
        schedule: The observed plan of each chain, as text; empty before the first forward.
        passes: The same as data.
        symmetric_nbytes: Memory of this rank that peers copy from by copy engines. The caching allocator knows nothing
            of it: it is in none of ``torch.cuda.memory_stats``.
        gather_backends: Who gathers on each mesh and why, as text; empty before the first forward, and where
            ``SchedulePolicy.gather_backend`` is the default.
    """

    mesh: str
    rows: tuple[ReportRow, ...]
    schedule: str
    passes: tuple[PassReport, ...] = ()
    symmetric_nbytes: int = 0
    gather_backends: tuple[str, ...] = ()

    def __str__(self) -> str:
        cells = [("parameter", "shape", "dtype", "placements", "per rank", "gathered", "use")]
        for row in self.rows:
            shape, dtype = "x".join(map(str, row.shape)) or "scalar", str(row.dtype).removeprefix("torch.")
            nbytes = (
                format_nbytes(row.local_nbytes),
                format_nbytes(row.gathered_nbytes) if row.gathered_nbytes else "-",
            )
            dtype += f" ({row.storage})" if row.storage else ""
            cells.append((row.name, shape, dtype, row.placements, *nbytes, row.use))
        widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in cells]
        local = sum(row.local_nbytes for row in self.rows)
        largest = max((row.gathered_nbytes for row in self.rows), default=0)
        total = f"{format_nbytes(local)} of parameters per rank; largest gathered weight {format_nbytes(largest)}"
        table = "\n".join(line.rstrip() for line in lines)
        if self.symmetric_nbytes:
            total += f"\n{format_nbytes(self.symmetric_nbytes)} of memory that peers copy from"
        lines = [f"gtp_shard on {self.mesh}", table, total, *self.gather_backends]
        return "\n".join((*lines, self.schedule or "schedule: not observed yet"))


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
    seen: dict[int, tuple[ManagedParam, str]] = {}
    in_gemm: set[int] = set()
    aliases: dict[int, list[str]] = {}
    ignored: list[ReportRow] = []
    for name, submodule in module.named_modules():
        inner = binding_of(submodule)
        for local_name, param in submodule._parameters.items():
            fqn = f"{name}.{local_name}" if name else local_name
            managed = inner.params.get(local_name) if inner is not None else None
            if managed is not None:
                aliases.setdefault(id(managed), []).append(fqn)
                assert inner is not None
                seen.setdefault(id(managed), (managed, _use(submodule, managed)))
                in_gemm.update([id(managed)] if isinstance(submodule, GTPFused) and submodule.multiplies else [])
            elif param is not None:
                nbytes = param.numel() * param.element_size()
                ignored.append(ReportRow(fqn, tuple(param.shape), param.dtype, "-", nbytes, 0, "ignored"))
    rows = [_row(" = ".join(aliases[key]), managed, use, key in in_gemm) for key, (managed, use) in seen.items()]
    comm = binding.group.runtime.comm
    is_default = binding.group.runtime.schedule.gather_backend == "process_group"
    return ShardingReport(
        _describe_mesh(binding),
        (*rows, *ignored),
        _schedule(binding),
        _passes(binding),
        comm.symmetric_nbytes,
        () if is_default else tuple(comm.choices),
    )


def _row(name: str, managed: ManagedParam, use: str, in_gemm: bool) -> ReportRow:
    param, shard = managed.param, managed.shard
    placements = "(" + ", ".join(map(str, managed.placements)) + ")"
    native = native_of(shard)
    local_nbytes = shard.numel() * shard.element_size() if native is None else native.stored_nbytes
    storage = "" if native is None else f"native {native.recipe.name}"
    gathered = 0
    if isinstance(managed, ShardedWeight):
        gathered = managed.layout.shape.numel() * managed.compute_dtype.itemsize
        if native is None and isinstance(managed.wire, QuantizedWire):
            storage = f"{managed.wire.recipe.name} from master"
        if managed.wire is not None:
            gathered = managed.wire.num_bytes() or gathered
            use = f"{use}, {managed.wire.describe('' if in_gemm else 'no fused nn.Linear')}"
    return ReportRow(name, tuple(param.shape), param.dtype, placements, local_nbytes, gathered, use, storage)


def _use(module: nn.Module, managed: ManagedParam) -> str:
    if isinstance(managed, WholeParam):
        return f"whole ({managed.reason})"
    assert isinstance(managed, ShardedWeight)
    if isinstance(module, GTPFused):
        exchanges = [f"{e.purpose}: {e.describe()}" for e in (managed.lookups, managed.losses) if e is not None]
        return ", ".join(("fused op", *exchanges))
    return "attribute"


def _describe_mesh(binding: Binding) -> str:
    mesh = binding.group.mesh
    names = mesh.mesh_dim_names or tuple(f"axis{i}" for i in range(mesh.ndim))
    return ", ".join(f"{name}={size}" for name, size in zip(names, mesh.shape, strict=True))


def _schedule(binding: Binding) -> str:
    runtime = binding.group.runtime
    columnwise = {id(weight.for_backward) for weight in runtime.weights if weight.for_backward is not weight}
    names = [t.weight.fqn + " (columnwise)" * (id(t) in columnwise) for t in runtime.gatherables]
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


def _passes(binding: Binding) -> tuple[PassReport, ...]:
    runtime = binding.group.runtime
    targets = runtime.gatherables
    passes = []
    for key, chain in list(runtime.chains.items()):
        plan = chain.plan
        if not plan.uses or not key.is_grad_enabled:
            continue
        kept = runtime.kept_from_forward(key.entry)
        during, between = [], []
        for cursor in range(len(plan.uses) + 1):
            used = frozenset(plan.uses[:cursor])
            held = kept - used if key.is_backward else kept & used
            ahead = {
                plan.uses[position] for positions in plan.window(plan.cursors(cursor)) for position in positions
            } | held
            between.append(sum(targets[index].kept_nbytes for index in ahead))
            if cursor:
                during.append(sum(targets[index].kept_nbytes for index in {plan.uses[cursor - 1], *ahead}))
        names = tuple(targets[use].weight.fqn for use in plan.uses)
        passes.append(PassReport(key.is_backward, names, tuple(during), tuple(between)))
    return tuple(passes)
