"""What ``predict_peak`` needs to know of a model under ``gtp_shard``: its plan and its activations."""

import functools
from collections.abc import Collection, Mapping
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from dtensor_gtp import SchedulePolicy, sharding_report
from dtensor_gtp.planner.peak import Amounts, Peak, Use, predict_peak
from dtensor_gtp.planner.recorder import Recorder
from dtensor_gtp.planner.trace import record
from dtensor_gtp.policy import Schedule
from dtensor_gtp.report import PassReport, ReportRow, ShardingReport
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


def gathered_weights(forward: PassReport, backward: PassReport) -> list[Amounts]:
    """Bytes of gathered weights at each use of the forward."""
    used_in_backward = {name: position for position, name in enumerate(backward.uses)}
    amounts = []
    for position, name in enumerate(forward.uses):
        # What backward does not gather comes at its end, as a table does.
        place = used_in_backward.get(name, len(backward.uses))
        ahead = backward.between_nbytes[place]
        in_use = backward.gathered_nbytes[place] if name in used_in_backward else ahead
        after_forward = forward.between_nbytes[position + 1]
        # The first gathers of backward come after the gradient of what the model has returned.
        before = forward.between_nbytes[-1] if position == len(forward.uses) - 1 else ahead
        amounts.append(Amounts(forward.gathered_nbytes[position], after_forward, before, ahead, in_use))
    return amounts


class Reducing(NamedTuple):
    """How gradients are reduced.

    Args:
        dtype: What they are sent in.
        kind: ``SchedulePolicy.reduce_scatter``.
        num_ranks: Size of the axis.
    """

    dtype: torch.dtype
    kind: str
    num_ranks: int


def make_use(row: ReportRow, gathered: Amounts, activations: Amounts, reducing: Reducing, *, is_table: bool) -> Use:
    """One use of a weight that is computed with in bf16.

    Args:
        is_table: Whether it is looked up: its gradient is computed in bf16, and cast if it is reduced in another dtype.
    """
    numel = torch.Size(row.shape).numel()
    wgrad = numel * reducing.dtype.itemsize
    is_summed_in_place = reducing.dtype.itemsize >= row.dtype.itemsize  # what is received is the shard's gradient
    sent = 0
    if reducing.num_ranks > 1 and reducing.kind != "ring":
        sent = wgrad  # received from all ranks, by copy engines from all others
        if reducing.kind == "copy_engine":
            sent -= wgrad // reducing.num_ranks
    elif is_summed_in_place and reducing.num_ranks == 1:
        wgrad = 0
    elif not is_summed_in_place and reducing.num_ranks > 1:
        sent = wgrad // reducing.num_ranks
    unreduced = numel * torch.bfloat16.itemsize if is_table and reducing.dtype != torch.bfloat16 else 0
    # GEMMs write where copy engines of peers read; the gradient of a table is copied there.
    is_in_ring = reducing.kind == "copy_engine" and reducing.num_ranks > 1 and not is_table
    return Use(row.name, gathered, activations, wgrad, sent, row.local_nbytes, unreduced, is_in_ring)


def make_lookup(
    row: ReportRow, forward: PassReport, backward: PassReport, activations: Amounts, tokens: int, num_ranks: int
) -> Use:
    """The first use of a forward, of a table that is not gathered: see ``embedding="exchange"``."""
    dim, ranks_tokens = row.shape[1], num_ranks * tokens
    ahead, last = forward.between_nbytes[0], backward.between_nbytes[-1]
    # Rows of the shard and what they are cast to; in backward gradients of all ranks, and what those are cast to.
    looked_up = ranks_tokens * dim * (row.dtype.itemsize + torch.bfloat16.itemsize)
    received = ranks_tokens * dim * (torch.bfloat16.itemsize + torch.float32.itemsize)
    grad = row.local_nbytes + dim * torch.float32.itemsize  # one row takes what is for other ranks
    sent = tokens * dim * torch.bfloat16.itemsize
    activations = activations._replace(forward=activations.forward + looked_up)
    gathered = Amounts(ahead, ahead, last, last, last)
    return Use(row.name, gathered, activations, 0, 0, grad, received + sent, is_exchanged=True)


def plan_uses(
    report: ShardingReport, activations: Mapping[str, Amounts], tables: Collection[str], reducing: Reducing, tokens: int
) -> list[Use] | None:
    """The uses of weights in a step; None where there is no plan yet.

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
    uses = []
    for name in (f"{table}.weight" for table in tables):
        if name not in forward.uses:
            counted = activations[name.removesuffix(".weight")]
            uses.append(make_lookup(rows[name], forward, backward, counted, tokens, reducing.num_ranks))
    for name, gathered in zip(forward.uses, gathered_weights(forward, backward), strict=True):
        module = name.removesuffix(".weight")
        uses.append(make_use(rows[name], gathered, activations[module], reducing, is_table=module in tables))
    return uses


def explain_uses(model: nn.Module, mode: str, workload: Workload, seq_len: int, num_ranks: int) -> list[Use] | None:
    """The uses of weights in a step of a mode, from the plan that the model has after a step."""
    parsed = Mode.parse(mode)
    is_plain = not (parsed.recipe or parsed.is_compiled or parsed.has_block_graphs or parsed.is_vocabulary_parallel)
    if parsed.family != "gtp" or not is_plain:
        return None
    tables = [name for name, module in model.named_modules() if isinstance(module, nn.Embedding)]
    reducing = Reducing(parsed.reduce_dtype, SchedulePolicy.chosen(model).reduce_scatter, num_ranks)
    activations = activations_of(workload, seq_len)
    return plan_uses(sharding_report(model), activations, tables, reducing, workload.batch * seq_len)


def explain_peak(
    model: nn.Module, optimizer: torch.optim.Optimizer | None, mode: str, workload: Workload, seq_len: int, world: World
) -> Peak | None:
    """The predicted peak of the allocator on GPUs, without symmetric memory, of which it does not know; None for modes
    that are not of this package, whose plan is not known yet, or whose activations are not those of the plain model:
    recipes, compiled or recorded blocks, losses without logits."""
    uses = explain_uses(model, mode, workload, seq_len, world.size)
    if uses is None:
        return None
    schedule = Schedule(**dict(SchedulePolicy.chosen(model)._numbers))
    together = schedule.coalesce_grad_nbytes if schedule.reduce_scatter != "all_to_all" else 0
    inflight, order = schedule.max_inflight_reduce_scatters, schedule.wgrad_first
    return predict_peak(uses, state_bytes(model, optimizer), inflight, together, wgrad_first=order)
