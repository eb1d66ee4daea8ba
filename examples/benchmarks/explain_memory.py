"""What ``predict_peak`` needs to know of a model under ``gtp_shard``: its plan and its activations."""

import functools
from collections.abc import Mapping
from dataclasses import replace

import torch
import torch.nn as nn
import torch.nn.functional as F

from dtensor_gtp import SchedulePolicy, sharding_report
from dtensor_gtp._schedule.held_weights import Held
from dtensor_gtp.planner.costs import Axis
from dtensor_gtp.planner.memory import Peak, Use, gathered_amounts, make_lookup, make_use, predict_peak
from dtensor_gtp.planner.recorder import Recorder
from dtensor_gtp.planner.setting import PARAM_NBYTES, Sharded
from dtensor_gtp.planner.trace import Weight, record
from dtensor_gtp.policy import Schedule
from dtensor_gtp.report import ShardingReport
from harness import World, state_bytes
from llama import Llama, LlamaConfig
from modes import Mode, Workload


def weights_of(workload: Workload, seq_len: int) -> Mapping[str, Weight]:
    """The uses of weights in a step of ``modes.make_step``, by the name of the weight."""
    return _weights_of(workload.config, workload.batch, seq_len)


@functools.cache
def _weights_of(config: LlamaConfig, batch: int, seq_len: int) -> Mapping[str, Weight]:
    def loss_of(model: nn.Module, _: Recorder) -> torch.Tensor:
        tokens = torch.zeros(batch, seq_len + 1, dtype=torch.int64)
        inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:]
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())

    return {weight.name: weight for weight in record(lambda: Llama(config), loss_of).weights}


def most_activations(workload: Workload, seq_len: int) -> int:
    """The most bytes of activations at any moment of such a step: what it would need if weights took no memory."""
    return max(max(weight.amounts) for weight in weights_of(workload, seq_len).values())


def symmetric_bytes(model: nn.Module, mode: str) -> int:
    """Bytes of symmetric memory that a gtp mode holds on this process; 0 for other modes, which are not asked."""
    return sharding_report(model).symmetric_nbytes if Mode.parse(mode).family == "gtp" else 0


def plan_uses(
    report: ShardingReport, weights: Mapping[str, Weight], num_ranks: int, reduce_nbytes: int, kind: str, tokens: int
) -> list[Use] | None:
    """The uses of weights in a step; None where there is no plan yet, or weights are gathered in groups.

    Args:
        report: After a step.
        weights: By name, in the order of the forward. Tables that the plan does not gather are used first.
        num_ranks: That share each weight.
        reduce_nbytes: Of an element of a gradient on the wire.
        kind: Of ``SchedulePolicy.reduce_scatter``.
        tokens: Of one rank in a step.
    """
    forward = next((plan for plan in report.passes if not plan.is_backward), None)
    backward = next((plan for plan in report.passes if plan.is_backward), None)
    if forward is None or backward is None:
        return None
    rows = {row.name: row for row in report.rows}
    if not rows.keys() >= set(forward.uses):
        return None

    def sharded(name: str) -> Sharded:
        return Sharded(weights[name], 0, Axis(num_ranks, 1), 0, 0, 0, rows[name].local_nbytes // PARAM_NBYTES)

    tables = [name for name, weight in weights.items() if weight.is_table and name not in forward.uses]
    ends = forward.between_nbytes[0], backward.between_nbytes[-1]
    uses = [make_lookup(sharded(name), ends, tokens) for name in tables]
    held = tuple(Held(each.gathered_nbytes, each.between_nbytes) for each in (forward, backward))
    for name, gathered in zip(forward.uses, gathered_amounts(forward.uses, backward.uses, held), strict=True):
        uses.append(make_use(sharded(name), gathered, reduce_nbytes, kind))
    return uses


def explain_uses(model: nn.Module, mode: str, workload: Workload, seq_len: int, num_ranks: int) -> list[Use] | None:
    """The uses of weights in a step of a mode, from the plan that the model has after a step."""
    parsed = Mode.parse(mode)
    is_plain = not (parsed.recipe or parsed.is_compiled or parsed.has_block_graphs or parsed.is_vocabulary_parallel)
    if parsed.family != "gtp" or not is_plain:
        return None
    reduce_nbytes, kind = parsed.reduce_dtype.itemsize, SchedulePolicy.chosen(model).reduce_scatter
    tokens = workload.batch * seq_len
    return plan_uses(sharding_report(model), weights_of(workload, seq_len), num_ranks, reduce_nbytes, kind, tokens)


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
    if schedule.reduce_scatter == "all_to_all":
        schedule = replace(schedule, coalesce_grad_nbytes=0)
    return predict_peak(uses, state_bytes(model, optimizer), schedule)
