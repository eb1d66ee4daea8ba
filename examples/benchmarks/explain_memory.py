"""What ``predict_peak`` needs to know of a model under ``gtp_shard``: its plan and its activations."""

import functools
from collections.abc import Collection, Mapping

import torch
import torch.nn as nn
import torch.nn.functional as F

from dtensor_gtp import SchedulePolicy, sharding_report
from dtensor_gtp._schedule.plans import Held
from dtensor_gtp.planner.memory import Peak, Reducing, Shard, Use, gathered_amounts, make_lookup, make_use, predict_peak
from dtensor_gtp.planner.recorder import Recorder
from dtensor_gtp.planner.trace import Amounts, record
from dtensor_gtp.policy import Schedule
from dtensor_gtp.report import ReportRow, ShardingReport
from harness import World, state_bytes
from llama import Llama, LlamaConfig
from modes import Mode, Workload


def activations_of(workload: Workload, seq_len: int) -> dict[str, Amounts]:
    """Bytes of activations in a step of ``modes.make_step``, by the name of the module that has the matrix."""
    return _activations_of(workload.config, workload.batch, seq_len)


@functools.cache
def _activations_of(config: LlamaConfig, batch: int, seq_len: int) -> dict[str, Amounts]:
    def loss_of(model: nn.Module, _: Recorder) -> torch.Tensor:
        tokens = torch.zeros(batch, seq_len + 1, dtype=torch.int64)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:]
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    trace = record(lambda: Llama(config), loss_of)
    return {weight.name.removesuffix(".weight"): weight.amounts for weight in trace.weights}


def most_activations(workload: Workload, seq_len: int) -> int:
    """The most bytes of activations at any moment of such a step: what it would need if weights took no memory."""
    return max(max(amounts) for amounts in activations_of(workload, seq_len).values())


def symmetric_bytes(model: nn.Module, mode: str) -> int:
    """Bytes of symmetric memory that a gtp mode holds on this process; 0 for other modes, which are not asked."""
    return sharding_report(model).symmetric_nbytes if Mode.parse(mode).family == "gtp" else 0


def shard_of(row: ReportRow) -> Shard:
    return Shard(row.name, torch.Size(row.shape).numel(), row.local_nbytes, row.dtype.itemsize)


def plan_uses(
    report: ShardingReport, activations: Mapping[str, Amounts], tables: Collection[str], reducing: Reducing, tokens: int
) -> list[Use] | None:
    """The uses of weights in a step; None where there is no plan yet, or weights are gathered in groups.

    Args:
        report: After a step.
        activations: By the name of the module, in the order of the forward.
        tables: Names of the embeddings. One that the plan does not gather is used first.
        tokens: Of one rank in a step.
    """
    forward = next((plan for plan in report.passes if not plan.is_backward), None)
    backward = next((plan for plan in report.passes if plan.is_backward), None)
    if forward is None or backward is None:
        return None
    rows = {row.name: row for row in report.rows}
    if not rows.keys() >= set(forward.uses):
        return None
    uses = []
    for name in (f"{table}.weight" for table in tables):
        if name not in forward.uses:
            counted, row = activations[name.removesuffix(".weight")], rows[name]
            ends = forward.between_nbytes[0], backward.between_nbytes[-1]
            uses.append(make_lookup(shard_of(row), row.shape[1], ends, counted, tokens, reducing.num_ranks))
    held = tuple(Held(each.gathered_nbytes, each.between_nbytes) for each in (forward, backward))
    for name, gathered in zip(forward.uses, gathered_amounts(forward.uses, backward.uses, held), strict=True):
        module = name.removesuffix(".weight")
        uses.append(make_use(shard_of(rows[name]), gathered, activations[module], reducing, is_table=module in tables))
    return uses


def explain_uses(model: nn.Module, mode: str, workload: Workload, seq_len: int, num_ranks: int) -> list[Use] | None:
    """The uses of weights in a step of a mode, from the plan that the model has after a step."""
    parsed = Mode.parse(mode)
    is_plain = not (parsed.recipe or parsed.is_compiled or parsed.has_block_graphs or parsed.is_vocabulary_parallel)
    if parsed.family != "gtp" or not is_plain:
        return None
    tables = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    reducing = Reducing(parsed.reduce_dtype.itemsize, SchedulePolicy.chosen(model).reduce_scatter, num_ranks)
    activations = activations_of(workload, seq_len)
    return plan_uses(sharding_report(model), activations, tables, reducing, workload.batch * seq_len)


def explain_peak(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, mode: str, workload: Workload, seq_len: int, world: World
) -> Peak | None:
    """The predicted peak of the allocator on GPUs, without symmetric memory, of which it does not know; None for modes
    that are not of this package, whose plan is not known yet or has groups, or whose activations are not those of the
    plain model: recipes, compiled or recorded blocks, losses without logits."""
    uses = explain_uses(model, mode, workload, seq_len, world.size)
    if uses is None:
        return None
    schedule = Schedule(**dict(SchedulePolicy.chosen(model)._numbers))
    together = schedule.coalesce_grad_nbytes if schedule.reduce_scatter != "all_to_all" else 0
    inflight, order = schedule.max_inflight_reduce_scatters, schedule.wgrad_first
    return predict_peak(uses, state_bytes(model, optimizer), inflight, together, wgrad_first=order)
