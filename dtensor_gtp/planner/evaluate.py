"""What one layout of a job takes: time of a step with its parts, and memory of the fullest rank."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..policy import Schedule
from .costs import Axis, Costs
from .fully_shard import build_fully_shard
from .ground import Ground, ground_of
from .job import OPTIMIZERS, Job, Layout
from .machine import GIB, Machine
from .memory import Memory, Stage, predict
from .model import ModelConfig
from .peak import Amounts
from .recorder import Op
from .setting import PARAM_NBYTES, Setting
from .timing import Parts, few_and_more, measure, timeline_of
from .trace import Part, Trace, Weight, record_reference, repeated, with_loss
from .user_model import UserModel


@dataclass(frozen=True)
class Problem:
    """What is planned."""

    job: Job  # what is asked for
    config: ModelConfig | None  # the sizes of the model; None for a model of the user's own code
    machine: Machine  # the GPUs
    user: UserModel | None = None  # such a model

    @functools.cached_property
    def whole(self) -> Trace:
        """What a rank alone would compute of one sequence."""
        return trace_of(self, Layout(), parts_of(self, Layout())[0])

    def flops_per_token(self) -> float:
        return self.whole.model_flops / self.job.seq_len

    def numel(self) -> int:
        return self.whole.numel


@dataclass(frozen=True)
class Answer:
    """What a layout takes.

    Args:
        layout: The axes.
        step_ms: Time of an optimizer step.
        ground: What the prediction rests on, with its range; a text that says what to measure where there is none.
        tokens_per_s: Of one GPU.
        mfu: Share of the bf16 peak that the model's operations are.
        memory: Of the fullest rank.
        capacity: Bytes of a GPU.
        received: Bytes that a rank receives in a step, by axis.
        exposed_ms: Time in which compute waits, by cause; "bubble" and "optimizer" too.
        compute_ms: Time in which it does not.
        schedule: What the runtime chooses.
        reasons: Why.

    Example:
        >>> answer = plan("llama3-8b", "h100", gpus=8, fixed={"gtp": 8}).best
        >>> low, high = answer.range_ms
        >>> low < answer.step_ms < high, answer.is_fitting, answer.may_fit
        (True, True, True)
        >>> answer.memory.least < answer.memory.total
        True
        >>> answer.layout.describe(), answer.memory.moment
        ('gtp 8', '...')
    """

    layout: Layout
    step_ms: float
    ground: Ground | str
    tokens_per_s: float
    mfu: float
    memory: Memory
    capacity: int
    received: Mapping[str, float]
    exposed_ms: Mapping[str, float]
    compute_ms: float
    schedule: Schedule
    reasons: tuple[str, ...]

    @property
    def is_fitting(self) -> bool:
        """Whether the fullest rank has room."""
        return self.memory.total <= self.capacity

    @property
    def may_fit(self) -> bool:
        """Whether leaner code than is counted could have room (``Memory.least``)."""
        return self.memory.least <= self.capacity

    @property
    def range_ms(self) -> tuple[float, float] | None:
        """The least and the most that a step may take, by published runs of this kind; None where there are none."""
        if isinstance(self.ground, str):
            return None
        return self.step_ms * self.ground.least, self.step_ms * self.ground.most


def stage_parts(config: ModelConfig, pp: int) -> list[Part]:
    """The blocks of each stage. Embedding and head count as a block each where there is a pipeline."""
    kinds = config.kinds
    if pp == 1:
        return [Part(tuple(kinds))]
    sizes = [(len(kinds) + 2) // pp] * pp
    for number in range((len(kinds) + 2) % pp):
        sizes[1 + number % max(pp - 2, 1) if pp > 2 else number] += 1
    sizes[0], sizes[-1] = max(sizes[0] - 1, 1), max(sizes[-1] - 1, 1)
    while sum(sizes) > len(kinds):
        sizes[sizes.index(max(sizes))] -= 1
    parts, begin = [], 0
    for number, size in enumerate(sizes):
        parts.append(Part(tuple(kinds[begin : begin + size]), number == 0, number == pp - 1))
        begin += size
    return parts


def parts_of(problem: Problem, layout: Layout) -> list[Part] | list[None]:
    """The stages of a layout; one that is not known in blocks for a model of the user's own code."""
    return [None] if problem.config is None else stage_parts(problem.config, layout.pp)


def trace_of(problem: Problem, layout: Layout, part: Part | None) -> Trace:
    """What a rank of a stage computes in one microbatch."""
    if problem.config is None:
        assert problem.user is not None
        return _scaled(with_loss(problem.user.trace(layout.tp), problem.job.loss), layout.micro_batch)
    assert part is not None
    sizes = problem.job.seq_len, layout.tp, layout.cp, layout.ep
    return _repeated(problem.config, layout.micro_batch, sizes, problem.job.loss, part)


@functools.lru_cache(maxsize=512)
def _repeated(config: ModelConfig, batch: int, sizes: tuple[int, int, int, int], loss: str, part: Part) -> Trace:
    return repeated(_recorded(config, batch, sizes, loss), config, part)


@functools.lru_cache(maxsize=512)
def _recorded(config: ModelConfig, batch: int, sizes: tuple[int, int, int, int], loss: str) -> Trace:
    seq_len, tp, cp, ep = sizes
    # Equal loads: however many ranks share experts, each computes as much.
    few = next((size for size in range(2, ep + 1) if ep % size == 0), 1)
    trace = record_reference(config, 1, seq_len, tp, cp, few, loss)

    def shared(weight: Weight) -> Weight:
        num, *matrix = weight.shape
        return weight._replace(shape=(num * few // ep, *matrix)) if weight.is_expert else weight

    return _scaled(replace(trace, weights=tuple(map(shared, trace.weights))), batch)


def _scaled(trace: Trace, batch: int) -> Trace:
    """The same for several sequences: operations and activations grow with them."""
    if batch == 1:
        return trace

    def times(op: Op) -> Op:
        return Op(op.kind, op.flops * batch, op.nbytes * batch)

    def weight(given: Weight) -> Weight:
        amounts = Amounts(*(amount * batch for amount in given.amounts))
        return given.with_ops(times)._replace(amounts=amounts, live=given.live * batch)

    return replace(
        trace,
        weights=tuple(map(weight, trace.weights)),
        loss=tuple(map(times, trace.loss)),
        tail=tuple(map(times, trace.tail)),
        input_nbytes=trace.input_nbytes * batch,
        end=trace.end * batch,
    )


def setting_of(problem: Problem, layout: Layout, part: Part | None) -> Setting:
    job = problem.job
    axes = tuple(layout.axes().items())
    length = job.seq_len // layout.cp
    costs = Costs(problem.machine, axes, job.precision, job.is_compiled, job.is_rowwise, length)
    return Setting(
        trace_of(problem, layout, part),
        costs,
        job.policy,
        job.reduce_nbytes,
        job.quantization,
        layout.checkpoint,
        job.is_captured,
        job.shards_optimizer,
        tokens=layout.micro_batch * job.seq_len // layout.cp,
    )


def full_stages(parts: list[Part] | list[None]) -> set[int]:
    """Numbers of the stages that may be the fullest: the first has most microbatches, the last the logits, the first
    of those with most mixtures most parameters."""
    mixtures = [0 if part is None else sum(part.kinds) for part in parts]
    return {0, len(parts) - 1, mixtures.index(max(mixtures))}


def memory_of(problem: Problem, layout: Layout) -> Memory:
    """Of the fullest rank."""
    parts = parts_of(problem, layout)
    found = []
    for number in full_stages(parts):
        setting = setting_of(problem, layout, parts[number])
        schedule, _ = setting.choice(problem.machine.memory_nbytes)
        num = layout.num_microbatches(problem.job)
        stage = Stage(inflight(problem, layout, number, num), num, layout.keep)
        found.append(_memory_of_stage(setting, schedule, stage, OPTIMIZERS[problem.job.optimizer]))
    return max(found, key=lambda memory: memory.total)


def _memory_of_stage(setting: Setting, schedule: Schedule, stage: Stage, optimizer_nbytes: int) -> Memory:
    """For many blocks by the difference that three of them make, see :func:`measure`."""

    def of(one: Setting) -> Memory:
        return predict(one, schedule, stage, optimizer_nbytes)

    if (shorter := few_and_more(setting)) is None:
        return of(setting)
    few, more = of(shorter.few), of(shorter.more)
    grown = (
        large + int((large - small) * shorter.left) // shorter.grown
        for small, large in zip(few[:-1], more[:-1], strict=True)
    )
    return Memory._make((*grown, more.moment))


def evaluate(problem: Problem, layout: Layout, memory: Memory | None = None) -> Answer:
    """Simulates a layout that can be."""
    job, machine = problem.job, problem.machine
    memory = memory or memory_of(problem, layout)
    parts = parts_of(problem, layout)
    setting = setting_of(problem, layout, slowest(parts))
    free = max(int((machine.memory_gib - machine.reserve_gib) * GIB) - memory.total, 0)
    schedule, reasons = setting.choice(free)
    num = layout.num_microbatches(job)
    last = measure(setting, schedule, is_last=True)
    other = last
    if num > 1 and layout.keep:
        other = measure(_without_wire(setting), schedule, is_last=False)
    elif num > 1 and layout.axes()["replicate"].size > 1:
        other = measure(setting, schedule, is_last=False)
    total = last.plus(other, num - 1)
    total = _with_bubble(total, other, problem, layout)
    optimizer = _optimizer_ms(setting, OPTIMIZERS[job.optimizer])
    total.exposed["optimizer"] = optimizer
    if job.shards_optimizer:
        optimizer += _gather_parameters(setting, total)
    straggling = (total.ms + optimizer) * machine.straggling(job.gpus)
    if straggling:
        total.exposed["stragglers"] = straggling
    step_ms = total.ms + optimizer + straggling
    tokens = job.batch * job.seq_len / job.gpus
    tokens_per_s = tokens / step_ms * 1e3
    mfu = tokens_per_s * problem.flops_per_token() / (machine.peak_tflops["bf16"] * 1e12)
    has_experts = problem.config is not None and problem.config.experts > 0
    filled = memory.total / machine.memory_nbytes
    ground = ground_of(job, layout, machine, has_experts=has_experts, filled=filled)
    compute = step_ms - sum(total.exposed.values())
    return Answer(
        layout,
        step_ms,
        ground,
        tokens_per_s,
        mfu,
        memory,
        machine.memory_nbytes,
        total.received,
        total.exposed,
        compute,
        schedule,
        reasons,
    )


def fully_shard_ms(problem: Problem, answer: Answer) -> float | None:
    """The same step with ``fully_shard`` on each block and the root; None where its model does not hold: for other axes
    than gtp, for recomputation, recipes and CUDA graphs."""
    layout, job = answer.layout, problem.job
    others = layout.pp * layout.replicate * layout.cp * layout.tp * layout.ep * layout.expert_gtp
    is_plain = layout.checkpoint == "none" and job.quantization is None and not job.is_captured
    setting = setting_of(problem, layout, parts_of(problem, layout)[0])
    tables = [weight for weight in setting.trace.weights if weight.is_table]
    has_blocks = setting.trace.num_blocks > 0 and setting.trace.weights[0].is_table and len(tables) == 1
    if others > 1 or layout.gtp == 1 or not is_plain or not has_blocks:
        return None
    ms = timeline_of(build_fully_shard(setting), problem.machine).ms * layout.num_microbatches(job)
    ms += _optimizer_ms(setting, OPTIMIZERS[job.optimizer])
    return ms * (1 + problem.machine.straggling(job.gpus))


def slowest(parts: list[Part] | list[None]) -> Part | None:
    """The stage with most to compute: one with the head, or the one with most blocks."""
    if len(parts) == 1:
        return parts[0]
    return max((part for part in parts if part is not None), key=lambda part: (len(part.kinds), part.is_last))


def _without_wire(setting: Setting) -> Setting:
    """A microbatch whose weights are there and whose gradients stay."""
    axes = dict(setting.costs.axes)
    axes |= dict.fromkeys(("gtp", "expert_gtp", "replicate", "expert_replicate"), Axis(1, 1))
    return replace(setting, costs=replace(setting.costs, axes=tuple(axes.items())))


def _with_bubble(total: Parts, one: Parts, problem: Problem, layout: Layout) -> Parts:
    """Stages wait for the first microbatch to come and for the last one to leave, and send activations."""
    if layout.pp == 1:
        return total
    job = problem.job
    assert problem.config is not None
    costs = Costs(problem.machine, tuple(layout.axes().items()))
    nbytes = layout.micro_batch * job.seq_len // (layout.cp * layout.tp) * problem.config.dim * 2
    send = 2 * costs.send_ms(nbytes, layout.axes()["pp"])
    chunks = virtual_stages(problem, layout)
    bubble = (layout.pp - 1) / chunks * one.ms
    # A message hides behind the other microbatches, but where the pipeline fills and drains.
    bubble += 2 * (layout.pp - 1) * send
    exposed_ms = dict(total.exposed) | {"bubble": bubble}
    received = dict(total.received) | {"pp": 2 * nbytes * layout.num_microbatches(job) * chunks}
    return Parts(total.ms + bubble, exposed_ms, received)


def virtual_stages(problem: Problem, layout: Layout) -> int:
    """Chunks of a stage in an interleaved schedule: by default a block each."""
    if problem.config is None:
        return 1
    most = max((problem.config.layers + 2) // layout.pp, 1)
    return min(problem.job.virtual_stages or most, most)


def inflight(problem: Problem, layout: Layout, number: int, num_microbatches: int) -> float:
    """Microbatches whose activations a stage holds: as many as there are stages from it on, as 1F1B and DualPipe do.
    Where chunks were asked for, those of Megatron's interleaved schedule, which begins backward later (arXiv
    2104.04473, section 2.2)."""
    chunks, after = problem.job.virtual_stages, layout.pp - 1 - number
    held = after + 1.0
    if chunks > 1 and layout.pp > 1:
        chunks = virtual_stages(problem, layout)
        held = ((chunks - 1) * layout.pp + 2 * after + 1) / chunks
    return min(held, num_microbatches)


def _optimizer_ms(setting: Setting, state_nbytes: int) -> float:
    numel = sum(map(setting.optimizer_numel, setting.sharded()))
    nbytes = numel * (3 * PARAM_NBYTES + 2 * state_nbytes)  # parameter and state read and written, gradient read
    return setting.costs.memory_ms(nbytes)


def _gather_parameters(setting: Setting, total: Parts) -> float:
    """Replicas get from each other the parameters that each has updated; adds it to ``total``."""
    spent = 0.0
    for name in dict.fromkeys(item.replicas for item in setting.sharded()):
        axis = setting.costs.axis(name)
        nbytes = sum(item.state_numel for item in setting.sharded() if item.replicas == name) * PARAM_NBYTES
        spent += setting.costs.gather_ms(nbytes, axis)
        total.received[name] = total.received.get(name, 0.0) + nbytes * (axis.size - 1) / axis.size
    total.exposed["replicas"] = total.exposed.get("replicas", 0.0) + spent
    return spent


def lower_bound_ms(problem: Problem, layout: Layout, one_ms: float) -> float:
    """What a step takes at least, if a microbatch takes ``one_ms`` at least."""
    num = layout.num_microbatches(problem.job)
    chunks = virtual_stages(problem, layout)
    straggling = problem.machine.straggling(problem.job.gpus)
    return one_ms * (num + (layout.pp - 1) / chunks) * (1 + straggling)
