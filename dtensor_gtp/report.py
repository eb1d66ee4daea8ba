"""``sharding_report``: a table of what ``gtp_shard`` did. Placement, bytes and use of each
parameter; the schedule."""

from __future__ import annotations

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from ._comm.debug import format_nbytes
from ._howto import printable
from ._modules.binding import Binding, binding_of, join_name, unmanaged_params
from ._params.managed_param import ManagedParam
from ._params.weight_group import Reducible
from ._report.columns import terminal_width
from ._report.facts import Cut, Facts, LaunchReport, PassReport, PlanReport, ReportRow, plan_report
from ._report.page import fragment, page
from ._report.rows import axes_of, exchanges_of, row_of
from ._report.text import full_text, plan_text, summary
from ._schedule.held_weights import held_nbytes
from ._schedule.passes import ChainKey
from ._schedule.plans import Plan
from ._schedule.runtime import Runtime

if TYPE_CHECKING:
    from .planner.machine import Machine


@dataclass(frozen=True)
class ShardingReport:
    """Report of a sharded module. ``str()`` fits a screen, as wide as the terminal or the variable COLUMNS says.

    Args:
        mesh: Axes and sizes of the root's mesh.
        rows: One for each distinct parameter.
        plans: The observed plan of each forward and backward; empty before the first forward.
        exchanges: Which embeddings and heads exchange activations, as text.
        symmetric_nbytes: Memory of this rank that peers copy from by copy engines. It does not come
            from the caching allocator, so ``torch.cuda.memory_stats`` does not count it.
        gather_backends: Who gathers and reduces on each mesh and why, as text; empty before the first forward.
        choices: What else was chosen in the first forward and why, as text.
        is_verbose: Each parameter and each launch is shown. Else the text fits a screen, with equal
            blocks as one ("layers.0-31").
        prediction: What communication takes on a machine, and below it what was measured; empty without a machine.
        peak_nbytes: The most memory that ``torch.cuda.max_memory_allocated`` has counted; None on CPUs.
        advice: What to do next, in a sentence or two each.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
        >>> model = gtp_shard(model, init_weight_mesh("cpu", gtp=4).weights)
        >>> model(torch.randn(2, 64)).sum().backward()
        >>> report = sharding_report(model)
        >>> [row.name for row in report.rows]
        ['0.weight', '0.bias', '2.weight', '2.bias']
        >>> len(report.passes)  # forward and backward
        2
        >>> "backward" in report.schedule
        True
        >>> report.to_html(f"rank{torch.distributed.get_rank()}.html")
    """

    mesh: str
    rows: tuple[ReportRow, ...]
    plans: tuple[PlanReport, ...] = ()
    exchanges: tuple[str, ...] = ()
    symmetric_nbytes: int = 0
    gather_backends: tuple[str, ...] = ()
    choices: tuple[str, ...] = ()
    is_verbose: bool = False
    prediction: tuple[str, ...] = ()
    peak_nbytes: int | None = None
    advice: tuple[str, ...] = ()

    @property
    def schedule(self) -> str:
        """The observed plan of each forward and backward, as text; empty before the first forward."""
        return "\n".join((*self.exchanges, *(plan_text(plan, self.is_verbose) for plan in self.plans)))

    @property
    def passes(self) -> tuple[PassReport, ...]:
        """The plans of passes that compute gradients, as bytes in memory."""
        return tuple(plan.memory for plan in self.plans if plan.memory is not None)

    def __str__(self) -> str:
        if self.is_verbose:
            return full_text(self._facts, terminal_width())
        return summary(self._facts, terminal_width())

    def to_html(self, path: str | os.PathLike[str]) -> None:
        """Write the report as one page without scripts: what each rank holds, bytes, the plans as
        timelines, and the choices with their reasons. Ranks have their own reports: call it on one
        rank, or give each its own file.

        Args:
            path: The file, which is overwritten.

        Raises:
            OSError: The file cannot be written.
        """
        Path(path).write_text(page(self._facts), encoding="utf-8")

    def _repr_html_(self) -> str:
        """Notebooks call it to show the report."""
        return fragment(self._facts)

    @property
    def _facts(self) -> Facts:
        choices = (*self.gather_backends, *self.exchanges, *self.choices)
        return Facts(
            self.mesh,
            self.rows,
            self.plans,
            choices,
            self.symmetric_nbytes,
            self.is_verbose,
            self.prediction,
            self.peak_nbytes,
            self.advice,
        )


def sharding_report(
    module: nn.Module, *, machine: str | Machine | None = None, verbose: bool = False
) -> ShardingReport:
    """Describe what :func:`gtp_shard` did to ``module`` and the schedule it has observed so far.

    ``print`` it, or let a notebook display it. The text fits a screen: what is sharded, memory,
    what was chosen and why, the schedule, and what to do next. Three or more equal blocks are shown
    as one: "layers.0-31.wq.weight".

    Args:
        module: A module that was passed to ``gtp_shard``, or one inside of it.
        machine: As for :func:`dtensor_gtp.plan`. With one, the report has what the gathers and
            reductions of the plan take on its links in milliseconds, and below it the time between
            the last optimizer steps, and on GPUs the most memory that the allocator has counted.
            ``python -m dtensor_gtp.help planner`` has predictions of whole steps.
        verbose: Show each parameter and each launch of gathers by itself.

    Returns:
        The :class:`ShardingReport` of this rank.

    Raises:
        ValueError: ``module`` is not sharded, or there is no such machine.

    Example:
        >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
        >>> print(sharding_report(model))
        gtp_shard on gtp=4
          weight  shape  dtype    placements  this rank  use
          weight  64x64  float32  (G(0))      4.0 KiB    fused op
          whole (1-D): 1 (256 B): bias
        memory of this rank
          parameters: 4.2 KiB, in shards and whole
          largest gathered weight: 16.0 KiB
        schedule
          not observed yet
        next
          Run a forward and a backward: a report after them has the choices and the schedule.
          ...
    """
    binding = binding_of(module)
    if binding is None:
        raise ValueError(
            "sharding_report expects a module after gtp_shard, but got a plain "
            f"{type(module).__name__}. Pass the module that you passed to gtp_shard."
        )
    sites: dict[ManagedParam, dict[str, Binding]] = {}
    for prefix, submodule in module.named_modules():
        inner = binding_of(submodule)
        for name in submodule._parameters:
            if inner is not None and name in inner.params:
                sites.setdefault(inner.params[name], {})[printable(join_name(prefix, name))] = inner
    rows = [row_of(managed, bindings) for managed, bindings in sites.items()]
    for fqn, _, param in unmanaged_params(module):
        nbytes = param.numel() * param.element_size()
        rows.append(ReportRow(fqn, tuple(param.shape), param.dtype, "-", nbytes, 0, "ignored"))
    mesh = binding.group.arguments.mesh
    runtime = binding.group.runtime
    axes = axes_of(mesh)
    shown = ", ".join(f"{axis}={size}" for axis, size in zip(axes, mesh.shape, strict=True))
    if runtime.gathering.parts.weights:
        shown += f"; optimizer states over {axes[0]}"
    peak_nbytes = None
    if runtime.device.type == "cuda":
        peak_nbytes = torch.cuda.max_memory_allocated(runtime.device)
    prediction: tuple[str, ...] = ()
    if machine is not None:
        prediction = _prediction(runtime, mesh, machine, peak_nbytes)
    return ShardingReport(
        shown,
        tuple(rows),
        _plans(runtime),
        _exchanges(runtime),
        runtime.comm.symmetric_nbytes,
        tuple(runtime.comm.choices),
        runtime.setup.reasons,
        verbose,
        prediction,
        peak_nbytes,
        _advice(runtime, verbose, machine is not None),
    )


def _advice(runtime: Runtime, is_verbose: bool, has_machine: bool) -> tuple[str, ...]:
    """What may help, given what is chosen."""
    advice = []
    if not any(chain.plan.uses for chain in list(runtime.passes.chains.values())):
        advice.append("Run a forward and a backward: a report after them has the choices and the schedule.")
    if runtime.policy.memory == "balanced":
        advice.append(
            "Out of memory: pass schedule=SchedulePolicy(memory='least') to gtp_shard. "
            "Memory left over: memory='most_speed'."
        )
    if not has_machine:
        advice.append("Predicted communication beside measured time: sharding_report(model, machine='h100').")
    more = "Timelines as a page: sharding_report(model).to_html('report.html')."
    if not is_verbose:
        more = f"Each parameter and each launch: sharding_report(model, verbose=True). {more}"
    advice.append(more)
    return tuple(advice)


def _prediction(runtime: Runtime, mesh: DeviceMesh, machine: str | Machine, peak_nbytes: int | None) -> tuple[str, ...]:
    """Lines of what was predicted and measured of the weights on ``mesh``."""
    # The planner loads only where it is asked.
    from .planner.costs import Axis, Costs
    from .planner.machine import load_machine

    gpus = machine
    if isinstance(gpus, str):
        gpus = load_machine(gpus)
    ranks = mesh.mesh.reshape(-1, mesh.size(mesh.ndim - 1))[0].tolist()
    stride = 1
    if len(ranks) > 1:
        stride = ranks[1] - ranks[0]
    axis = Axis(len(ranks), stride)
    amounts = []  # what is sent, its bytes, and how many weights it is of
    num_gathered = 0
    for key, chain in list(runtime.passes.chains.items()):
        if not key.is_grad_enabled or not chain.plan.uses:
            continue
        gathered = _gathered_at(runtime, key, chain.plan)
        targets = [runtime.members.gatherables[chain.plan.uses[position]] for position in gathered]
        uses = [target for target in targets if target.weight.mesh == mesh]
        name = "forward gathers"
        if key.is_backward:
            name = "backward gathers"
        amounts.append((name, sum(target.nbytes for target in uses), len(uses)))
        num_gathered += len(uses)
    if not num_gathered:
        return (f"predicted on {gpus.describe()}: no plan yet, run a step",)
    senders: list[Reducible] = [*runtime.members.single_weights, *runtime.members.groups]
    senders = [sender for sender in senders if sender.mesh == mesh and sender.has_gradient]
    sent = [runtime.grads.sent_nbytes(sender) for sender in senders]
    amounts.append(("gradients", sum(sent), len(sent)))
    is_copy = runtime.setup.schedule.gather_backend == "copy_engine"
    costs = Costs(gpus)
    parts = []
    for name, nbytes, num in amounts:
        ms = 0.0
        if nbytes:
            ms = costs.together_ms(nbytes, axis, num, is_copy=is_copy)
        parts.append(f"{name} {format_nbytes(nbytes)}, {ms:.2f} ms")
    predicted = f"predicted on {gpus.describe()}, on the wire alone: {'; '.join(parts)}"
    return predicted, _describe_measured(tuple(runtime.steps.begins), peak_nbytes)


def _gathered_at(runtime: Runtime, key: ChainKey, plan: Plan) -> list[int]:
    """Positions of the uses that need a gather. Backward has what stays from the forward at its first use."""
    stay: set[int] = set()
    if key.is_backward:
        stay.update(runtime.keeper.kept_from_forward(key.entry))
    positions = []
    for position, use in enumerate(plan.uses):
        if use not in stay and position not in plan.served:
            positions.append(position)
        stay.discard(use)
    return positions


def _describe_measured(begins: Sequence[float], peak_nbytes: int | None) -> str:
    """Time between the starts of steps, in seconds on the host's clock, and what the allocator has counted."""
    intervals = [later - earlier for earlier, later in zip(begins, list(begins)[1:], strict=False)]
    text = "measured: no two steps yet"
    if intervals:
        median_ms = statistics.median(intervals) * 1e3
        text = f"measured: {median_ms:.2f} ms a step (median of {len(intervals)})"
    if peak_nbytes is not None:
        text += f", at most {format_nbytes(peak_nbytes)} allocated"
    return text


def _exchanges(runtime: Runtime) -> tuple[str, ...]:
    return tuple(
        f"{exchange.purpose} of {weight.fqn}: {exchange.describe()}"
        for weight in runtime.members.weights
        for exchange in exchanges_of(weight)
    )


def _plans(runtime: Runtime) -> tuple[PlanReport, ...]:
    columnwise = {
        id(weight.for_backward) for weight in runtime.members.weights if weight.for_backward is not weight.for_forward
    }
    names = []
    for target in runtime.members.gatherables:
        name = target.weight.fqn
        if id(target) in columnwise:
            name += " (columnwise)"
        names.append(name)
    plans = []
    for key, chain in list(runtime.passes.chains.items()):
        if not chain.plan.uses:
            continue
        kept = ""
        memory = None
        if key.is_grad_enabled:
            memory = _memory(runtime, key, chain.plan)
            if not key.is_backward:
                kept = _kept(runtime, key, names)
        gathered = set(_gathered_at(runtime, key, chain.plan))
        plans.append(plan_report(_title(key), chain, names, gathered, kept, memory))
    return tuple(plans)


def _title(key: ChainKey) -> str:
    title = "forward"
    if key.is_backward:
        title = "backward"
    if key.entry is not None:
        title += f" of {key.entry.module._get_name()}"
        if key.entry.method != "forward":
            title += f".{key.entry.method}"
    if not key.is_grad_enabled:
        title += " without gradient"
    return title


def _kept(runtime: Runtime, key: ChainKey, names: list[str]) -> str:
    kept = runtime.keeper.kept_until_backward(key.entry)
    if not kept:
        return ""
    total = format_nbytes(sum(runtime.members.gatherables[index].kept_nbytes for index in kept))
    budget = format_nbytes(runtime.setup.schedule.keep_nbytes)
    return f"kept until backward ({total} of {budget}): {', '.join(names[index] for index in kept)}"


def _memory(runtime: Runtime, key: ChainKey, plan: Plan) -> PassReport:
    nbytes = [gatherable.kept_nbytes for gatherable in runtime.members.gatherables]
    kept = runtime.keeper.kept_from_forward(key.entry)
    held = held_nbytes(plan, kept, nbytes, is_backward=key.is_backward)
    names = tuple(runtime.members.gatherables[use].weight.fqn for use in plan.uses)
    return PassReport(key.is_backward, names, *held)


__all__ = ["Cut", "LaunchReport", "PassReport", "PlanReport", "ReportRow", "ShardingReport", "sharding_report"]
