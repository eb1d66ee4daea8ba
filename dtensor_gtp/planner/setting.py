"""How one rank runs a step: what is gathered, reduced and kept, chosen by the rules of the runtime."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .._comm.collectives import is_exact_in, may_send_narrow, resolve_reduce_scatter
from .._schedule import choose_schedule as rules
from .._schedule.held_weights import choose_kept, turning_point
from .._schedule.passes import window_of
from .._schedule.plans import Plan, Traits
from .._schedule.waiting_gradients import may_wait
from ..placement import chunk_rows
from ..policy import ReduceScatterKind, Schedule, SchedulePolicy
from ..quant.planes import Direction
from ..quant.recipe import Recipe
from .costs import Axis, Costs, Work
from .recorder import Kind
from .trace import Trace, Weight, recomputed_uses

PARAM_NBYTES = 4  # of a master weight
COMPUTE_NBYTES = 2


class Sharded(NamedTuple):
    """A weight, or a group of those of a block: what is gathered at once."""

    weight: Weight  # the use in the recording
    lane: int  # 0, or 1 for experts on their own mesh
    axis: Axis  # of the ranks that hold its shards
    gathered: int  # bytes of the full weight, in the dtype of compute
    wired: int  # bytes that are gathered: fewer with a recipe
    sent: int  # bytes of the full gradient; 0 if it is not trained
    shard_numel: int  # elements that the rank with most rows holds
    members: tuple[int, ...] = ()  # numbers of the weights that are gathered and reduced together

    @property
    def name(self) -> str:
        return self.weight.name

    @property
    def state_numel(self) -> int:
        """Elements whose state this use counts: none if another use of the same matrix does."""
        if self.weight.is_tied:
            return 0
        return self.shard_numel

    @property
    def trained_numel(self) -> int:
        """Of these, elements that have a gradient and a state of the optimizer."""
        if self.weight.is_frozen:
            return 0
        return self.state_numel

    @property
    def axis_name(self) -> str:
        if self.lane:
            return "expert_gtp"
        return "gtp"

    @property
    def replicas(self) -> str:
        if self.lane:
            return "expert_replicate"
        return "replicate"

    def gradients(self) -> tuple[str, ...]:
        return ("wgrad",) * (not self.weight.is_frozen) + ("dgrad",) * self.weight.has_dgrad

    @property
    def is_quantized(self) -> bool:
        return self.wired != self.gathered

    @property
    def cast_nbytes(self) -> float:
        """What is read and written to make of a shard what is sent."""
        if not self.is_quantized:
            return self.shard_numel * (PARAM_NBYTES + COMPUTE_NBYTES)
        return self.shard_numel * (2 * PARAM_NBYTES + self.wired / self.weight.numel)

    @property
    def is_group(self) -> bool:
        return len(self.members) > 1


@dataclass(frozen=True)
class Setting:
    trace: Trace  # what it computes
    costs: Costs  # on what machine, over which groups
    policy: SchedulePolicy  # of ``gtp_shard``
    reduce_nbytes: int = 2  # of an element of a gradient on the wire
    recipe: Recipe | None = None  # of the linear layers of the blocks; None for bf16
    checkpoint: str = "none"  # "none", "selective" or "full": which activations of a block are computed again
    is_captured: bool = False  # whether the step is replayed as a CUDA graph
    shards_optimizer: bool = False  # whether optimizer states are divided over replicas
    tokens: int = 0  # of a rank in one forward

    def held(self, item: Sharded) -> int:
        """Bytes of a gathered weight in memory: GEMMs of its format read what was gathered."""
        if self.costs.precision != "bf16":
            return item.wired
        return item.gathered

    def optimizer_numel(self, item: Sharded) -> int:
        if not self.shards_optimizer:
            return item.trained_numel
        return -(-item.trained_numel // self.costs.axis(item.replicas).size)

    @functools.cached_property
    def sharded(self) -> tuple[Sharded, ...]:
        """Those of groups are gathered in the dtype of compute."""
        items = list(self._alone)
        for number in self._groups:
            items[number] = items[number]._replace(wired=items[number].gathered)
        return tuple(items)

    @functools.cached_property
    def _alone(self) -> tuple[Sharded, ...]:
        """Each weight as if no group had it."""
        return tuple(map(self._sharded, self.trace.weights))

    @functools.cached_property
    def units(self) -> list[Sharded]:
        """What is gathered at once, in the order of the first use: groups, and weights that are in none."""
        members = dict.fromkeys(self._groups.get(number, (number,)) for number in range(len(self.sharded)))
        return list(map(self.together, members))

    @functools.cached_property
    def _groups(self) -> Mapping[int, tuple[int, ...]]:
        """By member."""
        blocks = self.trace.numbers.values()
        return {number: group for block in blocks for group in [self._group(block)] for number in group}

    @functools.cached_property
    def unit_of(self) -> Mapping[int, int]:
        return {member: number for number, unit in enumerate(self.units) for member in unit.members}

    def together(self, members: Sequence[int]) -> Sharded:
        first, *others = items = [self.sharded[number] for number in members]
        if not others:
            return first._replace(members=tuple(members))
        names = ("gathered", "wired", "sent", "shard_numel")
        sums = {name: sum(getattr(item, name) for item in items) for name in names}
        trained = [item.weight for item in items if not item.weight.is_frozen]
        shape = (sum(weight.numel for weight in trained),)
        name = first.weight.block_name
        weight = first.weight._replace(name=name, shape=shape, has_dgrad=True, is_frozen=not trained)
        return first._replace(weight=weight, members=tuple(members), **sums)

    def _group(self, block: Sequence[int]) -> tuple[int, ...]:
        """The weights of a block that are a group, by the rules of ``_modules.group_blocks``; empty if none are."""
        num_blocks = len({weight.block_name for weight in self.trace.weights if weight.block >= 0})
        if self.policy._numbers or num_blocks < 2 or self.costs.axis("tp").size > 1:
            return ()
        weights = self.trace.weights
        found = [number for number in block if not self._alone[number].lane]
        if not self._fits(found):
            found = [number for number in found if not weights[number].is_of_experts]
        items = [self._alone[number] for number in found]
        is_block = all(item.weight.block >= 0 for item in items)
        if len(items) < 2 or not is_block or not self._fits(found) or items[0].axis.size == 1:
            return ()
        has_recipe = any(item.is_quantized for item in items)
        has_float8 = has_recipe and self.costs.precision != "bf16"
        crosses_hosts = self.no_copy_engines("gtp") is not None
        if (has_recipe and crosses_hosts) or (has_float8 and self.is_captured):
            return ()
        # Experts gain nothing alone.
        numels = [item.weight.numel for item in items if not item.weight.is_of_experts]
        mean = sum(numels) / max(len(numels), 1)
        kind = {"has_float8": has_float8, "is_dequantized": has_recipe and not has_float8}
        if rules.is_worth_a_group(mean, self.tokens, **kind):
            return tuple(found)
        return ()

    def _fits(self, numbers: Sequence[int]) -> bool:
        return rules.fits_a_group(sum(self._alone[number].gathered for number in numbers))

    def _sharded(self, weight: Weight) -> Sharded:
        axis = self.costs.axis(_axis_name(is_expert=weight.is_expert))
        gathered = wired = weight.numel * COMPUTE_NBYTES
        if self.recipe is not None and weight.block >= 0 and not weight.is_table:
            wired = self.recipe.num_bytes(torch.Size(weight.shape), Direction.ROWWISE)
        if len(weight.shape) > 1:
            rows = weight.shape[-2]
        else:
            rows = weight.shape[0]
        shard = weight.numel // rows * chunk_rows(rows, axis.size)
        has_lane = weight.is_expert and axis != self.costs.axis("gtp")
        sent = weight.numel * self.reduce_nbytes * (not weight.is_frozen)
        return Sharded(weight, int(has_lane), axis, gathered, wired, sent, shard)

    def product(self, item: Sharded, part: str) -> list[Work]:
        """A GEMM of a weight and the casts around it; of a table, the lookup or the sum of its gradient."""
        costs = self.costs
        weight = item.weight
        host = costs.machine.host.op_us / 1e3
        if weight.is_table:
            nbytes = sum(op.nbytes for op in weight.use)
            if part == "wgrad":
                nbytes = 2 * item.gathered
            return [Work(costs.memory_ms(nbytes), "", host)]
        gemms = [op for op in weight.use if op.kind is Kind.GEMM]
        if self.recipe is None or not item.is_quantized or costs.precision == "bf16":
            around = {"forward": weight.use, "dgrad": weight.grads, "wgrad": ()}[part]
            others = [op for op in around if op.kind in (Kind.MEMORY, Kind.ATTENTION)]
            ms = sum(map(costs.op_ms, (*gemms, *others)))
            if item.is_quantized and part != "wgrad":  # dequantized for the GEMM
                ms += costs.memory_ms(item.wired + item.gathered)
            return [Work(ms, "", host * (len(gemms) + len(others)))]
        rows = weight.flops / (2 * weight.numel)
        if len(weight.shape) > 2:  # of each matrix
            rows *= weight.shape[0]
        cast = self._operand_nbytes(part, rows, weight.shape)
        ms = sum(costs.gemm_ms(op, costs.precision) for op in gemms)
        return [Work(ms + costs.cast_ms(cast), "", 3 * host)]

    def _operand_nbytes(self, part: str, rows: float, shape: Sequence[int]) -> float:
        """Bytes that casts of a GEMM's operands read and write. Op by op they read for the magnitude and for the cast,
        and write. Compiled, the kernel before finds the magnitude of the matrix, so one kernel reads and writes; it has
        that of a row at once, and only writes. The layout for wgrad is made of the bytes, but rows then have other
        scales."""
        costs = self.costs
        inputs = rows * shape[-1]
        outputs = rows * shape[-2]
        if not costs.is_compiled:
            return 5 * {"forward": inputs, "dgrad": outputs, "wgrad": inputs + outputs}[part]
        if not costs.is_rowwise:
            tp = costs.axis("tp").size
            width = self.trace.input_nbytes * tp // max(COMPUTE_NBYTES * self.tokens, 1)
            # What is gathered over tp was cast before.
            if shape[-1] == width:
                inputs /= tp
            if shape[-2] == width:
                outputs /= tp
        if costs.is_rowwise:
            return {"forward": inputs, "dgrad": outputs, "wgrad": 5 * (inputs + outputs)}[part]
        return {"forward": 3 * inputs, "dgrad": 3 * outputs, "wgrad": 2 * (inputs + outputs)}[part]

    def is_exchanged(self, unit: int) -> bool:
        """Whether the unit is an embedding that exchanges activations, as ``ops.embedding`` decides."""
        world = self.costs.axis("gtp").size
        if not self.units[unit].weight.is_table or world == 1 or self.costs.axis("tp").size > 1:
            return False
        rows, dim = next(weight.shape for weight in self.trace.weights if weight.is_table)
        moved = rows * dim * (COMPUTE_NBYTES + self.reduce_nbytes)
        may_ask = self.is_captured or self.policy.exchange_tokens is not None or rules.is_worth_asking(moved)
        is_worth = rules.is_exchange_worth(world, self.tokens, rules.lookup_nbytes(dim, COMPUTE_NBYTES), moved)
        return self.policy.embedding != "gather" and (self.policy.embedding == "exchange" or (may_ask and is_worth))

    def choice(self, free_nbytes: int) -> tuple[Schedule, tuple[str, ...]]:
        """The schedule that the runtime would choose, and why."""
        groups = [unit.gathered for unit in self.units if unit.is_group]
        why_groups = (f"groups: {len(groups)} blocks, each gathered as a whole",) * bool(groups)
        others = [unit.gathered for unit in self.units if not unit.is_group]
        largest = self.trace.largest_block([item.wired for item in self.sharded])
        facts = rules.Facts(self.no_copy_engines("gtp"), largest, free_nbytes, sum(groups), sum(others))
        schedule, reasons = rules.choose(self.policy, facts)
        return schedule, (*why_groups, *reasons)

    def no_copy_engines(self, name: str) -> str | None:
        """Why the ranks of an axis cannot copy from each other."""
        axis = self.costs.axis(name)
        host = self.costs.machine.gpus_per_host
        if axis.size * axis.stride <= host:
            return None
        return f"the {axis.size} ranks of {name} are on several hosts of {host} GPUs"

    def gathers_by(self, schedule: Schedule, lane: int) -> str:
        """Who gathers the weights of a lane: "process_group" or "copy_engine"."""
        if schedule.gather_backend != "auto":
            return str(schedule.gather_backend)
        if self.no_copy_engines(_axis_name(is_expert=lane > 0)) is None:
            return "copy_engine"
        return "process_group"

    def reduces_by(self, schedule: Schedule, lane: int) -> ReduceScatterKind:
        return resolve_reduce_scatter(schedule.reduce_scatter, self.gathers_by(schedule, lane))

    def sends_narrow(self, schedule: Schedule, item: Sharded) -> bool:
        """Whether a gradient of a group, or one that travels alone, has the dtype of compute: ``ReductionLaunches``."""
        is_near = self.no_copy_engines(item.axis_name) is None
        if self.reduce_nbytes == COMPUTE_NBYTES:
            wide = torch.bfloat16
        else:
            wide = torch.float32
        kind = self.reduces_by(schedule, item.lane)
        may_be = item.is_group or not may_wait(item.sent, schedule.coalesce_grad_nbytes)
        return may_be and is_near and may_send_narrow(kind, item.axis.size) and is_exact_in(torch.bfloat16, wide)


class Step(NamedTuple):
    """Uses of a forward and of its backward, as the runtime observes them."""

    forward: Plan  # the plan of the forward
    backward: Plan  # that of backward, recomputation included
    kept: frozenset[int]  # units that stay from forward to backward
    recomputed: dict[int, tuple[int, ...]]  # by block, the weights that are used again in backward before its gradients


def plan_step(setting: Setting, schedule: Schedule) -> Step:
    """The plans that the runtime has after one step of ``setting``, by units."""
    trace = setting.trace
    units = setting.units
    # The weights of one mesh that are in several blocks have one call; experts have a call for each block.
    traits = []
    for unit in units:
        call = 0
        if unit.lane:
            call = unit.weight.block + 1
        traits.append(Traits(unit.wired, unit.lane, call, is_group=unit.is_group))
    gathered = [number for number in range(len(units)) if not setting.is_exchanged(number)]
    recomputed = recomputed_uses(trace, setting.checkpoint)
    backward: list[int] = []
    for number, weight in reversed([*enumerate(trace.weights)]):
        again: tuple[int, ...] = ()
        if trace.ends_block(number):
            again = recomputed.get(weight.block, ())
        for place in (setting.unit_of[each] for each in (*again, *[number] * weight.has_dgrad)):
            # A group stays from the forward that is computed again to the end of its block's backward.
            if not (units[place].is_group and place in backward):
                backward.append(place)
    plans = (
        Plan(gathered, traits, window_of(schedule, is_backward=False)),
        Plan(backward, traits, window_of(schedule, is_backward=True)),
    )
    turning = turning_point(*plans)
    kept: set[int] = set()
    if schedule.keep_nbytes:
        sizes = [unit.gathered * (number not in turning) for number, unit in enumerate(units)]
        lanes = [unit.lane for unit in units]
        kept.update(choose_kept(*plans, sizes, lanes, schedule.keep_nbytes))
    if schedule.keep_last:
        kept.update(turning)
    return Step(*plans, frozenset(kept), recomputed)


def _axis_name(*, is_expert: bool) -> str:
    """Of the axis over which a weight is gathered."""
    if is_expert:
        return "expert_gtp"
    return "gtp"
