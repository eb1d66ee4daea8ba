"""The memory of one rank by kind, at the fullest moment of a step.

The amounts come from the model and from the plan that ``sharding_report`` shows, none from an allocator, so that the
sum can be held against what an allocator has measured.

``torch.distributed._tools`` tracks the memory of a model that runs with fake tensors. One step of Llama 3 8B takes its
``MemTracker`` 26 s; a plan of 64 GPUs, which asks for the memory of 68 layouts, takes 3.4 s in all (2 cores, torch
2.13). It also needs the model as code, not as sizes, and a mesh of as many ranks as are planned.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from typing import NamedTuple

from .._comm.addends import is_worth_loading
from .._comm.collectives import enough_nbytes, round_nbytes
from .._comm.send_ring import ring_nbytes
from .._schedule.held_weights import Held, held_nbytes
from .._schedule.waiting_gradients import Together
from ..policy import Schedule
from .machine import GIB
from .setting import COMPUTE_NBYTES, PARAM_NBYTES, Setting, Sharded, Step, plan_step
from .trace import Amounts

# What the allocator reserves beyond what it gives out, as a share of what comes and goes: by torchtitan's peaks.
FRAGMENTS = 1 / 5
# Llama 3 405B ran on 80 GB without recomputation (arXiv 2407.21783, 3.3.2): half of what is counted here. DeepSeek-V3
# kept activations in 8 bits and computed norms and up-projections again (arXiv 2412.19437, 3.2.3, 3.3.3): a third.
_LEAN = 0.35
_LEAN_LOGITS = 0.25


class Use(NamedTuple):
    """One use of a weight in the forward; backward comes by in the reverse order. All in bytes."""

    name: str
    gathered: Amounts  # gathered weights: the one in use, those kept for backward, and those that are gathered ahead
    activations: Amounts  # what is saved for backward and not yet used up, gradients of activations, results
    wgrad: int  # the full gradient, in the dtype of its reduction
    sent: int  # what the reduction needs beside the full gradient, until it is complete
    grad: int  # the shard's gradient, which stays until the optimizer has seen it
    unreduced: int = 0  # what computing the full gradient needs beside it
    is_in_ring: bool = False  # whether the full gradient is written to symmetric memory, which is not counted here
    waiting: int = 0  # full gradients that wait for this one
    is_exchanged: bool = False  # whether there is no full gradient: activations are exchanged, or it is not trained

    @property
    def buffer(self) -> int:
        if self.is_in_ring:
            return 0
        return self.wgrad

    @property
    def pending(self) -> int:
        """What there is while the full gradient waits for others; those of a group are not packed until then."""
        if self.waiting:
            return self.waiting + self.unreduced
        return self.buffer


class Peak(NamedTuple):
    moment: str  # the pass, and the name of the weight that is in use, or was or will be
    state: int  # parameters, buffers and optimizer state, which are always there
    gradients: int  # of the shards, as far as they have been reduced
    gathered: int  # gathered weights
    wgrad: int  # full gradients that are computed or on their way, and what their reduction needs beside them
    activations: int  # what is saved for backward, gradients of activations, logits

    @property
    def total(self) -> int:
        return sum(self[1:])


def moments(uses: Sequence[Use], state: int, schedule: Schedule) -> list[Peak]:
    """The moments of a forward and backward that may be the fullest, in order; see :func:`predict_peak`."""
    found: list[Peak] = []
    grads = 0
    gradients = Together[Use](schedule.coalesce_grad_nbytes)
    inflight = deque[list[Use]](maxlen=schedule.max_inflight_reduce_scatters)  # once full, the oldest are waited for

    def reducing() -> int:
        on_the_way = sum(use.buffer + use.sent for launch in inflight for use in launch)
        return on_the_way + sum(use.pending for use in gradients.waiting)

    def add(moment: str, use: Use, gathered: int, activations: int, wgrad: int = 0) -> None:
        found.append(Peak(f"{moment} of {use.name}", state, grads, gathered, wgrad, activations))

    for use in uses:
        add("in forward", use, use.gathered.forward, use.activations.forward)
        add("after forward", use, use.gathered.after_forward, use.activations.after_forward)
    backward = list(reversed(uses))
    for use, following in zip(backward, [*backward[1:], None], strict=True):
        gathered = use.gathered
        activations = use.activations
        before = reducing() + use.waiting
        add("before backward", use, gathered.before_backward, activations.before_backward, before)
        if not schedule.wgrad_first:
            add("in backward", use, gathered.dgrad, activations.dgrad, before)
            # The gathered weight is freed, and the gradient of the input is there.
            if following is not None:
                gathered = gathered._replace(wgrad=following.gathered.before_backward)
            activations = activations._replace(wgrad=activations.dgrad)
        # The buffers of a reduction are made while as many as may be are in flight; then the oldest is waited for.
        launches: list[list[Use]] = []
        if not use.is_exchanged:
            unpacked = sum(other.pending for other in gradients.waiting if other.waiting)
            launches = gradients.submit(use, use.wgrad, is_group=use.waiting > 0)
            if launches and use.waiting:  # of a group: compute has waited for all others
                inflight.clear()
                before = unpacked + use.waiting
        launched = [other for launch in launches for other in launch]
        if use.waiting:
            buffer = sum(other.buffer for other in launched)
        else:
            buffer = use.buffer
        new_grads = sum(other.grad for other in launched) + use.grad * use.is_exchanged
        new_buffers = new_grads + sum(other.sent for other in launched)
        add("in backward", use, gathered.wgrad, activations.wgrad, before + use.unreduced + buffer + new_buffers)
        inflight.extend(launches)
        grads += new_grads
        if schedule.wgrad_first:
            add("in backward", use, gathered.dgrad, activations.dgrad, reducing() + use.waiting)
    before = reducing()
    if gradients.waiting:
        added = sum(other.sent + other.grad for other in gradients.flush())
        add("after backward", uses[0], uses[0].gathered.dgrad, uses[0].activations.dgrad, before + added)
    return found


def predict_peak(uses: Sequence[Use], state: int, schedule: Schedule) -> Peak:
    """The fullest moment, by uses in the order of the forward."""
    if not uses:
        raise ValueError("predict_peak expects at least one use of a weight, but got none.")
    return max(moments(uses, state, schedule), key=lambda moment: moment.total)


def make_use(item: Sharded, gathered: Amounts, reduce_nbytes: int, kind: str) -> Use:
    """One use of a weight in bf16. An element of its gradient has ``reduce_nbytes`` on the wire; ``kind`` is that of
    ``SchedulePolicy.reduce_scatter``. A table's gradient is computed in bf16, and cast if reduced in another dtype."""
    weight = item.weight
    num_ranks = item.axis.size
    if weight.is_frozen:
        return Use(item.name, gathered, weight.amounts, 0, 0, 0, is_exchanged=True)
    wgrad = weight.numel * reduce_nbytes
    is_summed_in_place = reduce_nbytes >= PARAM_NBYTES  # what is received is the shard's gradient
    sent = 0
    part = wgrad // num_ranks
    if num_ranks == 1:
        wgrad *= not is_summed_in_place
    elif kind != "ring":  # received from all ranks; from all others if copy engines send or a kernel adds
        sent = wgrad
        if kind == "copy_engine" or is_worth_loading(wgrad):
            sent = wgrad - part
    elif not is_summed_in_place:
        sent = part
    unreduced = 0
    if weight.is_table and reduce_nbytes != COMPUTE_NBYTES:
        unreduced = weight.numel * COMPUTE_NBYTES
    # GEMMs write where copy engines of peers read; the gradient of a table is copied there.
    is_in_ring = kind == "copy_engine" and num_ranks > 1 and not weight.is_table
    grad = item.state_numel * PARAM_NBYTES
    return Use(item.name, gathered, weight.amounts, wgrad, sent, grad, unreduced, is_in_ring)


def make_lookup(item: Sharded, ends: tuple[int, int], tokens: int) -> Use:
    """The first use of a forward, of a table that exchanges rows; ``ends``: bytes there before and after all uses."""
    ahead, last = ends
    dim = item.weight.shape[1]
    amounts = item.weight.amounts
    # Rows of the shard and what they are cast to; in backward gradients of all ranks, and what those are cast to.
    exchanged = item.axis.size * tokens * dim * (PARAM_NBYTES + COMPUTE_NBYTES)
    grad = (item.state_numel + dim) * PARAM_NBYTES  # one row takes what is for other ranks
    sent = tokens * dim * COMPUTE_NBYTES
    activations = amounts._replace(forward=amounts.forward + exchanged)
    gathered = Amounts(ahead, ahead, last, last, last)
    if item.weight.is_frozen:
        return Use(item.name, gathered, activations, 0, 0, 0, is_exchanged=True)
    return Use(item.name, gathered, activations, 0, 0, grad, exchanged + sent, is_exchanged=True)


def gathered_amounts(forward: Sequence[object], backward: Sequence[object], held: Sequence[Held]) -> list[Amounts]:
    """Bytes of gathered weights at each use of the forward; ``held`` in forward and in backward."""
    in_forward, in_backward = held
    used_in_backward = {name: position for position, name in enumerate(backward)}
    amounts: list[Amounts] = []
    for name, during, after in zip(forward, in_forward.during, in_forward.between[1:], strict=True):
        # What backward does not gather comes at its end, as a table does.
        place = used_in_backward.get(name, len(backward))
        ahead = in_backward.between[place]
        in_use = ahead
        if name in used_in_backward:
            in_use = in_backward.during[place]
        # The first gathers of backward come after the gradient of what the model has returned.
        before = ahead
        if len(amounts) == len(forward) - 1:
            before = after
        amounts.append(Amounts(during, after, before, ahead, in_use))
    return amounts


class Memory(NamedTuple):
    """Bytes of one rank by kind at the fullest moment.

    Args:
        parameters: Shards in float32.
        gradients: Of the shards.
        optimizer: Its state.
        gathered: Gathered weights.
        reductions: Full gradients on their way, and what their reductions need.
        activations: What is saved for backward, and what is computed with, but for those of the head and the loss.
        logits: Activations of the head and the loss.
        symmetric: What peers copy from.
        reserve: Headroom: what CUDA and NCCL take, and a fifth of what comes and goes in a step. The allocator
            reserves that much more than it gives out.
        moment: When that is.

    Example:
        >>> memory = plan("llama3-8b", "h100", gpus=8, fixed={"gtp": 8}).best.memory
        >>> memory.total > memory.parameters + memory.gradients + memory.optimizer
        True
    """

    parameters: int
    gradients: int
    optimizer: int
    gathered: int
    reductions: int
    activations: int
    logits: int
    symmetric: int
    reserve: int
    moment: str

    @property
    def total(self) -> int:
        """The sum of all kinds."""
        return sum(self[:-1])

    @property
    def least(self) -> int:
        """What the leanest code known needs, without fragments, and without what compilers, fused kernels, and tensor
        parallelism that gathers again in backward do not keep. Published runs came down to it."""
        state = self.parameters + self.gradients + self.optimizer
        return int(state + self.gathered + self.reductions + _LEAN * self.activations + _LEAN_LOGITS * self.logits)

    def parts(self) -> dict[str, int]:
        """Bytes by kind."""
        return dict(zip(self._fields[:-1], self[:-1], strict=True))


def predict(
    setting: Setting, schedule: Schedule, optimizer_nbytes: int, inflight: float = 1, num: int = 1, keep: bool = False
) -> Memory:
    """The memory of a step of ``num`` microbatches, of which a rank of a pipeline holds the activations of ``inflight``
    at once. ``keep``: weights and full gradients stay for the whole step. ``optimizer_nbytes`` are of a parameter."""
    weights = setting.sharded
    trace = setting.trace
    uses = _uses(setting, plan_step(setting, schedule), schedule)
    if num > 1:  # gradients of the shards stay from the first microbatch on
        uses = [use._replace(grad=0) for use in uses]
    launched = schedule
    if setting.reduces_by(schedule, 0) == "all_to_all":  # each gradient travels at once
        launched = replace(schedule, coalesce_grad_nbytes=0)
    peak = predict_peak(uses, 0, launched)
    numel = sum(item.state_numel for item in weights) + trace.small_numel
    small = trace.small_numel - trace.frozen_small_numel
    trained = sum(item.trained_numel for item in weights)
    states = sum(map(setting.optimizer_numel, weights))
    last = trace.weights[-1]
    is_loss = last.block < 0 and peak.moment.endswith(last.name)
    logits = 0
    if is_loss:
        logits = max(peak.activations - max(last.live, 0), 0)
    gathered = peak.gathered
    reductions = peak.wgrad
    if keep:
        once = [item for item in weights if not item.weight.is_tied]
        gathered = sum(map(setting.held, once))
        reductions = sum(item.sent for item in once)
    # What a microbatch leaves in a stage until its backward.
    end = last.live
    if last.block >= 0 and trace.end > 0:
        end = trace.end
    saved = end - trace.weights[0].live
    activations = peak.activations - logits + int(max(saved, 0) * (inflight - 1))
    passing = activations + logits
    if not keep:
        passing += gathered + reductions
    reserve = int(setting.costs.machine.reserve_gib * GIB + passing * FRAGMENTS)
    parameters = numel * PARAM_NBYTES
    optimizer = (states + small) * optimizer_nbytes
    gradients = peak.gradients
    symmetric = symmetric_nbytes(setting, schedule)
    if num > 1:
        gradients = (trained + small) * PARAM_NBYTES
    kinds = parameters, gradients, optimizer, gathered, reductions, activations, logits, symmetric, reserve
    return Memory(*kinds, peak.moment)


def _uses(setting: Setting, step: Step, schedule: Schedule) -> list[Use]:
    nbytes = list(map(setting.held, setting.units))
    held = [held_nbytes(plan, step.kept, nbytes, is_backward=plan is step.backward) for plan in step[:2]]
    # What is used in a forward that backward computes again is used in its gradient last.
    found = gathered_amounts(step.forward.uses, step.backward.uses, held)
    amounts = dict(zip(step.forward.uses, found, strict=True))
    uses = []
    for number, item in enumerate(setting.sharded):
        place = setting.unit_of[number]
        if place not in amounts:
            uses.append(make_lookup(item, (held[0].between[0], held[1].between[-1]), setting.tokens))
            continue
        reduce_nbytes = setting.reduce_nbytes
        kind = setting.reduces_by(schedule, item.lane)
        if setting.sends_narrow(schedule, item):
            reduce_nbytes = COMPUTE_NBYTES
            kind = "all_to_all"
        unit = setting.units[place]
        use = make_use(unit, amounts[place], reduce_nbytes, kind)
        if unit.is_group:
            use = _in_group(setting, unit, number, use)
        uses.append(use)
    return uses


def _in_group(setting: Setting, group: Sharded, number: int, use: Use) -> Use:
    """The use of a weight of a group that stays gathered. Full gradients wait to be packed with that of the first."""
    gathered = use.gathered
    if number != group.members[-1]:
        gathered = gathered._replace(after_forward=gathered.forward, before_backward=gathered.dgrad)
    weight = setting.sharded[number].weight
    items = [setting.sharded[member] for member in group.members]
    later = items[group.members.index(number) :]
    computed = [item.gathered * (not item.weight.is_frozen) for item in later]
    grad = sum(item.trained_numel for item in items) * PARAM_NBYTES
    use = use._replace(name=weight.name, gathered=gathered, activations=weight.amounts, grad=grad)
    use = use._replace(waiting=sum(computed) - computed[0], unreduced=computed[0])
    if number == group.members[0]:
        return use
    return use._replace(wgrad=0, sent=0, grad=0, is_exchanged=True)


def symmetric_nbytes(setting: Setting, schedule: Schedule) -> int:
    """What copy engines need: for gathers a stage of two rounds, for reductions a ring. The runtime has both sizes."""
    shards = [item for item in setting.sharded if item.axis.size > 1]
    total = 0
    for lane in {item.lane for item in shards}:
        items = [item for item in shards if item.lane == lane]
        if setting.gathers_by(schedule, lane) == "copy_engine":
            total += 2 * round_nbytes(schedule, items[0].axis.size)
        if setting.reduces_by(schedule, lane) == "copy_engine":
            total += ring_nbytes([item.sent for item in items], enough_nbytes(schedule))
    return total
