"""What one layout of a job takes: time of a step with its parts and its range, and memory of the fullest rank."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise
from typing import NamedTuple

from ..policy import Schedule, SchedulePolicy
from .costs import Axis, Costs
from .job import OPTIMIZERS, Job, Layout
from .machine import GIB, Machine
from .memory import Memory, predict
from .model import ModelConfig
from .setting import COMPUTE_NBYTES, PARAM_NBYTES, Setting
from .timing import Parts, build_fully_shard, few_and_more, measure
from .trace import Part, Trace, Weight, checkpointed, record_reference, repeated, with_loss
from .user_model import UserModel


@dataclass(frozen=True)
class Problem:
    job: Job  # what is asked for
    model: ModelConfig | UserModel  # the sizes of a decoder, or a model of the user's own code
    machine: Machine  # the GPUs

    @functools.cached_property
    def whole(self) -> Trace:
        """What a rank alone would compute of one sequence."""
        return self.trace(Layout(), self.slowest(Layout()))

    def slowest(self, layout: Layout) -> Part:
        """The stage with most to compute: one with the head, or the one with most blocks."""
        return max(stage_parts(self.model, layout.pp), key=lambda part: (len(part.kinds), part.is_last))

    def full_stages(self, layout: Layout) -> dict[int, Part]:
        """Those that may be the fullest, by number: with most microbatches, the logits, or first with most mixtures."""
        parts = stage_parts(self.model, layout.pp)
        mixtures = [sum(part.kinds) for part in parts]
        return {number: parts[number] for number in {0, len(parts) - 1, mixtures.index(max(mixtures))}}

    def trace(self, layout: Layout, part: Part) -> Trace:
        """What a rank of a stage computes in one microbatch."""
        if isinstance(self.model, UserModel):
            trace = with_loss(self.model.trace(layout.tp), self.job.loss).times(layout.micro_batch)
        else:
            sizes = self.job.seq_len, layout.tp, layout.cp, layout.ep
            trace = repeated(_recorded(self.model, layout.micro_batch, sizes, self.job.loss), self.model, part)
        return checkpointed(trace, layout.checkpoint)

    def setting(self, layout: Layout, part: Part) -> Setting:
        job = self.job
        tokens = self.job.seq_len // layout.cp
        if job.dispatch == "rows":
            choices = 0
        else:
            choices = self.model.experts_per_token
        is_rowwise = job.recipe == "float8_rowwise"
        costs = Costs(self.machine, layout.axes(), job.precision, job.is_compiled, is_rowwise, tokens, choices)
        policy = SchedulePolicy(memory=job.memory)  # type: ignore[arg-type]  # a job has checked it
        reduce_nbytes = 4
        if job.reduce_dtype == "bf16":
            reduce_nbytes = 2
        tokens = layout.micro_batch * job.seq_len // layout.cp
        trace = self.trace(layout, part)
        recipe = job.quantization
        checkpoint = layout.checkpoint
        return Setting(
            trace, costs, policy, reduce_nbytes, recipe, checkpoint, job.is_captured, job.shards_optimizer, tokens
        )

    def virtual_stages(self, layout: Layout) -> int:
        """Chunks of a stage in an interleaved schedule: by default a block each."""
        most = max((self.model.layers + 2) // layout.pp, 1)
        return min(self.job.virtual_stages or most, most)

    def inflight(self, layout: Layout, number: int, num_microbatches: int) -> float:
        """Microbatches whose activations a stage holds: one for each stage from it on, as 1F1B and DualPipe do. With
        chunks asked for, as in Megatron's interleaved schedule, whose backward begins later (arXiv 2104.04473, 2.2)."""
        after = layout.pp - 1 - number
        held = after + 1.0
        if self.job.virtual_stages > 1 and layout.pp > 1:
            chunks = self.virtual_stages(layout)
            held = ((chunks - 1) * layout.pp + 2 * after + 1) / chunks
        return min(held, num_microbatches)

    def refusal(self, layout: Layout) -> str | None:
        """Why a layout cannot be, before anything is computed; None if it can."""
        job = self.job
        model = self.model
        tp = layout.tp
        pp = layout.pp
        cp = layout.cp
        ep = layout.ep
        expert_gtp = layout.expert_gtp
        stage = layout.ranks // pp
        experts = ep * expert_gtp
        domain = self.machine.gpus_per_domain
        if layout.ranks != job.gpus:
            return f"{layout.ranks} ranks on {job.gpus} GPUs"
        if isinstance(model, UserModel):
            rules: dict[str, object] = {
                "pp: plan does not know where to cut the forward of your model": pp > 1,
                "cp: the attention of your model does not exchange keys and values": cp > 1,
                "ep: plan knows experts only from a configuration": ep > 1,
                "expert_gtp: plan knows experts only from a configuration": expert_gtp > 1,
            }
        else:
            heads = model.heads
            kv_heads = model.kv_heads
            hidden = model.hidden_dim
            vocabulary = model.vocab_size
            rules = {
                f"tp {tp} does not divide {heads} heads and {kv_heads} of keys and values": heads % tp or kv_heads % tp,
                f"tp {tp} does not divide the feed-forward or the vocabulary": hidden % tp or vocabulary % tp,
                f"pp {pp} has more stages than the model has layers ({model.layers})": pp > model.layers,
                f"cp {cp} and tp {tp} do not divide {job.seq_len} tokens": job.seq_len % (cp * tp),
                "ep without experts": not model.experts and experts > 1,
                f"ep {ep} does not divide {model.experts} experts": model.experts % ep,
                f"ep {ep} and expert_gtp {expert_gtp} do not divide the {stage} ranks of a stage": stage % experts,
            }
        rules[f"tp {tp} leaves the fast link of {domain} GPUs"] = tp > domain
        batch = f"{layout.data_ranks} data ranks with {layout.micro_batch} sequences each do not divide {job.batch}"
        rules[batch] = job.batch % (layout.data_ranks * layout.micro_batch)
        reason = next((reason for reason, is_broken in rules.items() if is_broken), None)
        if reason is None and isinstance(model, UserModel):
            return model.refuses(tp)
        return reason


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
        found = self.ground
        if isinstance(found, str):
            return None
        return (self.step_ms * found.least, self.step_ms * found.most)


@functools.lru_cache(maxsize=64)
def stage_parts(model: ModelConfig | UserModel, pp: int) -> list[Part]:
    """The blocks of each stage, none for a user's model. Embedding and head count as a block each in a pipeline."""
    kinds = model.kinds
    if pp == 1:
        return [Part(tuple(kinds))]
    sizes = [(len(kinds) + 2) // pp] * pp
    for number in range((len(kinds) + 2) % pp):
        sizes[1 + number % max(pp - 2, 1) if pp > 2 else number] += 1
    sizes[0], sizes[-1] = max(sizes[0] - 1, 1), max(sizes[-1] - 1, 1)
    while sum(sizes) > len(kinds):
        sizes[sizes.index(max(sizes))] -= 1
    borders = pairwise(accumulate(sizes, initial=0))
    return [Part(tuple(kinds[begin:end]), begin == 0, end == len(kinds)) for begin, end in borders]


@functools.lru_cache(maxsize=512)
def _recorded(config: ModelConfig, batch: int, sizes: tuple[int, int, int, int], loss: str) -> Trace:
    *others, ep = sizes
    # Equal loads: however many ranks share experts, each computes as much.
    few = next((size for size in range(2, ep + 1) if ep % size == 0), 1)

    def shared(weight: Weight) -> Weight:
        num, *matrix = weight.shape
        if weight.is_expert:
            return weight._replace(shape=(num * few // ep, *matrix))
        return weight

    return record_reference(config, *others, few, loss).times(batch).with_weights(shared)


def memory_of(problem: Problem, layout: Layout) -> Memory:
    """Of the fullest rank."""
    found = []
    num = layout.num_microbatches(problem.job)
    optimizer_nbytes = OPTIMIZERS[problem.job.optimizer]
    for number, part in problem.full_stages(layout).items():
        setting = problem.setting(layout, part)
        schedule, _ = setting.choice(problem.machine.memory_nbytes)
        inflight = problem.inflight(layout, number, num)
        keep = layout.keep
        settings, left, grown = few_and_more(setting)
        memories = [predict(one, schedule, optimizer_nbytes, inflight, num, keep) for one in settings]
        few = memories[0]
        more = memories[-1]
        continued = (large + (large - small) * left // grown for small, large in zip(few[:-1], more[:-1], strict=True))
        found.append(Memory._make((*continued, more.moment)))
    return max(found, key=lambda memory: memory.total)


def evaluate(problem: Problem, layout: Layout, memory: Memory | None = None) -> Answer:
    job = problem.job
    machine = problem.machine
    memory = memory or memory_of(problem, layout)
    setting = problem.setting(layout, problem.slowest(layout))
    free = max(int((machine.memory_gib - machine.reserve_gib) * GIB) - memory.total, 0)
    schedule, reasons = setting.choice(free)
    num = layout.num_microbatches(job)
    other = last = measure(setting, schedule, is_last=True)
    if num > 1 and layout.keep:
        alone = dict.fromkeys(("gtp", "expert_gtp", "replicate", "expert_replicate"), Axis(1, 1))
        costs = replace(setting.costs, axes={**setting.costs.axes, **alone})  # weights are there, and gradients stay
        other = measure(replace(setting, costs=costs), schedule, is_last=False)
    elif num > 1 and layout.axes()["replicate"].size > 1:
        other = measure(setting, schedule, is_last=False)
    if job.dispatch == "hidden" and num > 1:
        last = last.hiding("ep")
        other = other.hiding("ep")
    total = last.plus(other, num - 1)
    if layout.pp > 1:
        total = _with_bubble(total, other, setting, layout.pp, problem.virtual_stages(layout), num)
    optimizer = _optimizer_ms(setting, OPTIMIZERS[job.optimizer])
    total.exposed["optimizer"] = optimizer
    if job.shards_optimizer:
        optimizer += _gather_parameters(setting, total)
    straggling = (total.ms + optimizer) * machine.straggling(job.gpus)
    if straggling:
        total.exposed["stragglers"] = straggling
    step_ms = total.ms + optimizer + straggling
    tokens_per_s = job.batch * job.seq_len / job.gpus / step_ms * 1e3
    mfu = tokens_per_s * (problem.whole.model_flops / job.seq_len) / (machine.peak_tflops["bf16"] * 1e12)
    capacity = machine.memory_nbytes
    received = total.received
    exposed = total.exposed
    ground = ground_of(problem, layout, filled=memory.total / capacity)
    compute_ms = step_ms - sum(exposed.values())
    return Answer(
        layout, step_ms, ground, tokens_per_s, mfu, memory, capacity, received, exposed, compute_ms, schedule, reasons
    )


def fully_shard_ms(problem: Problem, answer: Answer) -> float | None:
    """The same step with ``fully_shard``; None for other axes than gtp, for recomputation, recipes and CUDA graphs."""
    layout = answer.layout
    job = problem.job
    is_plain = layout.checkpoint == "none" and job.quantization is None and not job.is_captured
    setting = problem.setting(layout, problem.slowest(layout))
    is_first, *are_tables = [weight.is_table for weight in setting.trace.weights]
    has_blocks = bool(setting.trace.blocks) and is_first and not any(are_tables)
    has_others = layout.ranks * layout.ep * layout.expert_gtp > layout.gtp
    if has_others or layout.gtp == 1 or not is_plain or not has_blocks:
        return None
    ms = build_fully_shard(setting).ms * layout.num_microbatches(job)
    ms += _optimizer_ms(setting, OPTIMIZERS[job.optimizer])
    return ms * (1 + problem.machine.straggling(job.gpus))


def _with_bubble(total: Parts, one: Parts, setting: Setting, pp: int, chunks: int, num: int) -> Parts:
    """Stages wait for the first microbatch to come and for the last one to leave, and send activations."""
    # Two ranks that exchange messages of this size are an all-gather.
    neighbours = setting.costs.axis("pp")._replace(size=2)
    nbytes = 2 * setting.trace.input_nbytes
    send = 2 * setting.costs.gather_ms(nbytes, neighbours)
    # A message hides behind the other microbatches, but where the pipeline fills and drains.
    bubble = (pp - 1) / chunks * one.ms + 2 * (pp - 1) * send
    received = {"pp": nbytes * num * chunks}
    return Parts(total.ms + bubble, total.exposed | {"bubble": bubble}, total.received | received)


def _optimizer_ms(setting: Setting, state_nbytes: int) -> float:
    numel = sum(map(setting.optimizer_numel, setting.sharded))
    nbytes = numel * (3 * PARAM_NBYTES + 2 * state_nbytes)  # parameter and state read and written, gradient read
    return setting.costs.memory_ms(nbytes)


def _gather_parameters(setting: Setting, total: Parts) -> float:
    """Adds to ``total`` that replicas exchange updated parameters: in the dtype of compute, or whole to quantize."""
    spent = 0.0
    for name in dict.fromkeys(item.replicas for item in setting.sharded):
        axis = setting.costs.axis(name)
        items = [item for item in setting.sharded if item.replicas == name]
        nbytes = sum(item.trained_numel * (PARAM_NBYTES if item.is_quantized else COMPUTE_NBYTES) for item in items)
        spent += setting.costs.gather_ms(nbytes, axis)
        total.received[name] = total.received.get(name, 0.0) + nbytes * (axis.size - 1) / axis.size
    total.exposed["replicas"] = total.exposed.get("replicas", 0.0) + spent
    return spent


class Ground(NamedTuple):
    """How far a time of one kind may be off: by tests/planner/planner_data/published_rows.json, with a margin."""

    kind: str  # for people
    least: float  # least time of a step, as a share of the prediction
    most: float  # most time


DENSE = Ground("dense, bf16, data parallel", 0.82, 1.27)
MIXED = Ground("dense, bf16, with tp, pp or cp", 0.75, 1.3)
EIGHT_BIT = Ground("8-bit", 0.65, 1.35)
LONG = Ground("sequences above 8,192 tokens", 0.65, 1.7)
EXPERTS = Ground("experts behind the fast link", 0.65, 1.5)
# Two rows. Codes that hide how tokens travel were up to 3.6 times as fast as a prediction with another ``dispatch``.
EXPERTS_APART = Ground("experts over the network", 0.27, 1.5)
_FULL = 0.85  # of the memory: allocators of training code begin to search and to give back
_SLOWED = 1.3
_LONGEST = 131072
_MOST_DOMAINS = 128  # hosts, or racks: Llama 3 on 16,384 GPUs
_OTHER_MACHINE = 1.2  # shares of peaks are carried over from another generation


def ground_of(problem: Problem, layout: Layout, *, filled: float) -> Ground | str:
    """The range of a layout, or why there is none and what to measure; ``filled`` is the share of memory in use."""
    job = problem.job
    machine = problem.machine
    if job.seq_len > _LONGEST:
        return f"no published run had sequences of {job.seq_len} tokens: measure one of your blocks at that length"
    if not machine.has_ground:
        return f"no published run trained on {machine.name}: measure it by --calibrate"
    if (wide := is_too_wide(layout, machine)) is not None:
        return f"{wide}: no published run gathered over so many, measure one"
    if problem.whole.has_experts:
        axis = layout.axes()["ep"]
        is_near = axis.size == 1 or axis.size * axis.stride <= machine.gpus_per_domain
        found = EXPERTS_APART
        if is_near:
            found = EXPERTS
    elif job.seq_len > 8192:
        found = LONG
    elif job.precision != "bf16":
        found = EIGHT_BIT
    else:
        found = DENSE
        if max(layout.tp, layout.pp, layout.cp) > 1:
            found = MIXED
    if found is DENSE and not machine.is_preset:
        return Ground(found.kind, 1 - machine.spread, 1 + machine.spread)
    least = found.least
    most = found.most
    if machine.is_carried_over:
        least = least / _OTHER_MACHINE
        most = most * _OTHER_MACHINE
    if filled > _FULL:
        most *= _SLOWED
    return Ground(found.kind, least, most)


def is_too_wide(layout: Layout, machine: Machine) -> str | None:
    """The axis whose gathers cross more hosts than those of any published run; None if there is none."""
    axes = layout.axes()
    for name in ("gtp", "expert_gtp"):
        size, stride = axes[name]
        if size > 1 and size * min(stride, machine.gpus_per_domain) > _MOST_DOMAINS * machine.gpus_per_domain:
            return f"{name} over more than {_MOST_DOMAINS} hosts"
    return None
