"""Searches the layouts of a job: those that cannot be are refused with a reason, the others are simulated, the most
promising first, until none that is left can be among the best."""

from __future__ import annotations

import functools
import heapq
import itertools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from .costs import Costs
from .errors import PlanError
from .evaluate import Answer, Problem, evaluate, is_too_wide, memory_of
from .job import AXES, CHECKPOINTS, OPTIMIZERS, Job, Layout
from .machine import GIB, load_machine, preset_names
from .memory import FRAGMENTS
from .model import ModelConfig
from .setting import PARAM_NBYTES
from .timing import compute_ms
from .trace import Part

_MAX_TRIED = 64  # simulations of one search
_MAX_TIGHT = 24  # of those that do not fit, how many are looked at if none does
_NUM_SMALL = 8  # and how many of those whose bounds are least
# Of the least memory, what there is at least: allocators round.
_CERTAIN = 0.97
# A layout of a family is not tried if it could gain less than this on the best of the family.
_ENOUGH = 1.01
# Of the time that layouts like it suggest, what a layout is expected to take.
_LIKELY = 0.9
_STATE = "parameters and optimizer alone do not fit"
_MEMORY = "does not fit"


@dataclass(frozen=True)
class Refused:
    reason: str
    count: int
    example: Layout


@dataclass(frozen=True)
class Found:
    answers: tuple[Answer, ...]  # the fastest of each family; if none fits, those that leaner code could run
    refused: tuple[Refused, ...]  # the most frequent first
    closest: Answer | None  # of those that do not fit, the one that lacks least memory; None if one fits
    num_layouts: int  # how many were considered
    num_simulated: int
    seconds: float


Report = Callable[[int, int, int], None]  # simulated, all, seconds


def layouts_of(problem: Problem) -> Iterator[Layout]:
    job = problem.job
    model = problem.model
    fixed = problem.job.fixed
    most = {"tp": 1, "pp": min(model.layers, 64), "cp": 1}
    if isinstance(model, ModelConfig) or not model.plan.refusal:
        most["tp"] = min(problem.machine.gpus_per_domain, 16)
    if isinstance(model, ModelConfig) and job.seq_len >= 16384:
        most["cp"] = 16
    divisors = _divisors(job.gpus)
    sizes = {name: [size for size in divisors if size <= most[name]] for name in most}
    sizes.update({name: [fixed[name]] for name in most if name in fixed})
    for tp, pp, cp in itertools.product(*sizes.values()):
        rest, remainder = divmod(job.gpus, tp * pp * cp)
        if remainder:
            continue
        for gtp in _divisors(rest):
            replicate = rest // gtp
            if (fixed.get("gtp", gtp), fixed.get("replicate", replicate)) == (gtp, replicate):
                experts = _expert_axes(problem, job.gpus // pp, gtp * tp)
                for (ep, expert_gtp), batch in itertools.product(experts, _batches(job, gtp, replicate)):
                    micro_batch, checkpoint, keep = batch
                    yield Layout(pp, replicate, cp, gtp, tp, ep, expert_gtp, micro_batch, checkpoint, keep)


def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _expert_axes(problem: Problem, stage: int, dense: int) -> list[tuple[int, int]]:
    """Sizes of ep and expert_gtp, for a stage of so many ranks whose dense weights are cut into so many parts."""
    model = problem.model
    fixed = problem.job.fixed
    if not model.experts:
        return [(fixed.get("ep", 1), fixed.get("expert_gtp", 1))]
    sizes = [size for size in _divisors(stage) if model.experts % size == 0]
    if "ep" in fixed:
        sizes = [fixed["ep"]]
    found = []
    for ep in sizes:
        # As many ranks of experts as of dense weights, or all ranks of a stage.
        wanted = sorted({max(dense // ep, 1), max(stage // ep, 1)})
        if "expert_gtp" in fixed:
            wanted = [fixed["expert_gtp"]]
        found += [(ep, size) for size in wanted]
    return found


def _batches(job: Job, gtp: int, replicate: int) -> Iterator[tuple[int, str, bool]]:
    """Sequences of a forward, what is computed again, and whether weights stay for the step."""
    per_rank = job.batch // (gtp * replicate)
    micro = job.fixed.get("micro_batch")
    if micro:
        sizes = [micro]
    else:
        sizes = [size for size in (1, 2, 4) if size <= max(per_rank, 1)]
    checkpoints: tuple[str, ...] = (job.checkpointing,)
    if job.checkpointing == "auto":
        checkpoints = CHECKPOINTS
    for size, checkpoint in itertools.product(sizes, checkpoints):
        yield size, checkpoint, False
        if per_rank // size > 1 and gtp > 1:
            yield size, checkpoint, True


_FIRST = "embedding"
_LAST = "head and loss"

# Of one block or of several: time of a microbatch, and bytes of gathered weights, of full gradients, and elements
# before they are cut over gtp; then those of experts; and bytes of activations that stay until backward.
Amounts = tuple[float, ...]
_AXES = {"gtp": slice(1, 4), "expert_gtp": slice(4, 7)}
_NOTHING = (0.0,) * 8


class Bounds:
    """Time and memory that a layout cannot be below, from one block of each kind: once for all that compute alike."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._costs = Costs(problem.machine)
        self._by_kind, self._of = functools.cache(self._find_by_kind), functools.cache(self._add_up)

    def ms(self, layout: Layout) -> float:
        sums = self._of_slowest(layout)
        axes = layout.axes()
        num = layout.num_microbatches(self._problem.job)
        num_transfers = num
        if layout.keep:
            num_transfers = 1
        costs = self._costs
        times = {True: 0.0, False: 0.0}  # by link
        for name, place in _AXES.items():
            gathered, sent, _ = sums[place]
            if axes[name].size > 1 and gathered:
                nbytes = (2 * gathered + sent) * num_transfers
                times[costs.wire(axes[name]).is_fast] += costs.gather_ms(nbytes, axes[name])
        busy = sums[0] * (num + (layout.pp - 1) / self._problem.virtual_stages(layout))
        return max(busy * (1 + self._problem.machine.straggling(self._problem.job.gpus)), *times.values())

    def state_nbytes(self, layout: Layout) -> int:
        return self._shards(layout, PARAM_NBYTES, OPTIMIZERS[self._problem.job.optimizer])

    def _shards(self, layout: Layout, nbytes: int, nbytes_of_replicas: int = 0) -> int:
        """Of all shards, with so many bytes for an element, and so many that replicas may share."""
        sums = self._of_slowest(layout)
        axes = layout.axes()
        total = 0.0
        for name, place in _AXES.items():
            replicas = 1
            if self._problem.job.shards_optimizer:
                replicas = axes[name.replace("gtp", "replicate")].size
            total += sums[place][2] / axes[name].size * (nbytes + nbytes_of_replicas / replicas)
        return int(total)

    def nbytes(self, layout: Layout) -> int:
        """Of a rank: state, what blocks save, and weights that stay."""
        num = layout.num_microbatches(self._problem.job)
        stays = self.state_nbytes(layout) + int(self._problem.machine.reserve_gib * GIB)
        if num > 1:  # gradients stay from the first microbatch on
            stays += self._shards(layout, PARAM_NBYTES)
        if layout.keep:
            stays += int(sum(sum(self._of_slowest(layout)[place][:2]) for place in _AXES.values()))
        alone = _alone(layout)
        inflight = self._problem.inflight
        stages = self._problem.full_stages(layout).items()
        saved = max(self._of(alone, part)[-1] * inflight(layout, number, num) for number, part in stages)
        return stays + int(saved * (1 + FRAGMENTS))

    def _of_slowest(self, layout: Layout) -> Amounts:
        return self._of(_alone(layout), self._problem.slowest(layout))

    def _add_up(self, alone: Layout, part: Part) -> Amounts:
        blocks = self._by_kind(replace(alone, pp=1))
        names = *[_FIRST] * part.is_first, *part.kinds, *[_LAST] * part.is_last
        return _sum(blocks[name] for name in names)

    def _find_by_kind(self, alone: Layout) -> dict[object, Amounts]:
        """What there is in a block of each kind, and outside of blocks, where all is of a model of the user's code."""
        kinds = tuple(sorted(set(self._problem.model.kinds)))
        setting = self._problem.setting(alone, Part(kinds))
        hidden = ""
        if self._problem.job.dispatch == "hidden":
            hidden = "ep"
        loss_ms, *times = compute_ms(setting, hidden)
        found: dict[object, list[Amounts]] = {_FIRST: [_NOTHING], _LAST: [(loss_ms, *_NOTHING[1:])]}
        for ms, item in zip(times, setting.sharded, strict=True):
            weight = item.weight
            if weight.is_frozen:
                state = 0
            else:
                state = weight.numel
            if weight.is_tied:
                amounts = (0, 0, 0)
            else:
                amounts = (item.wired, item.sent, state)
            name: object = _LAST
            if kinds and weight.block >= 0:
                name = kinds[weight.block]
            elif weight.is_table:
                name = _FIRST
            if weight.is_expert:
                mine = (0, 0, 0, *amounts)
            else:
                mine = (*amounts, 0, 0, 0)
            found.setdefault(name, []).append((ms, *mine, 0))
        begins = [setting.trace.blocks[number][0].live for number in range(len(kinds))]
        for kind, begin, end in zip(kinds, begins, (*begins, setting.trace.end)[1:], strict=False):
            found[kind].append((*_NOTHING[1:], max(end - begin, 0)))
        return {name: _sum(each) for name, each in found.items()}


def _alone(layout: Layout) -> Layout:
    """The same for all layouts that compute alike: a stage without its shards and its replicas."""
    return replace(layout, replicate=1, gtp=1, expert_gtp=1, keep=False)


def _sum(each: Iterable[Amounts]) -> Amounts:
    return tuple(map(sum, zip(*each, strict=True)))


class Search:
    def __init__(self, problem: Problem, top: int = 5) -> None:
        self._problem = problem
        self._bounds = Bounds(problem)
        self._top = top
        self._capacity = problem.machine.memory_nbytes
        self._factors: dict[tuple[object, ...], float] = {}  # of times over their bounds
        self._refused: dict[str, list[Layout]] = {}  # by the reason
        self._best: dict[tuple[int, ...], Answer] = {}  # of each family

    def run(self, report: Report | None = None) -> Found:
        """The fastest layouts that fit, ``top`` of them. Raises PlanError if no layout has the axes asked for."""
        begin = time.monotonic()
        num = 0
        layouts = list(layouts_of(self._problem))
        queue = self._possible(layouts)
        while queue and num < _MAX_TRIED:
            expected, number, layout, least = heapq.heappop(queue)
            # By the time of layouts like it, a little less than it will take.
            likely = least * max(_LIKELY * self._factors.get(_alike(layout), 1.0), 1.0)
            if likely > expected * _ENOUGH:
                heapq.heappush(queue, (likely, number, layout, least))
                continue
            leading = sorted(answer.step_ms for answer in self._best.values())
            if len(leading) >= self._top and expected > leading[self._top - 1]:
                break
            if self._try_out(layout, expected, least):
                num += 1
                if report is not None:
                    report(num, len(layouts), int(time.monotonic() - begin))
        if self._best:
            nearest = None
        else:
            nearest = self._what_lacks_least()
        reasons = [Refused(reason, len(found), found[0]) for reason, found in self._refused.items()]
        reasons.sort(key=lambda item: -item.count)
        answers = sorted(self._best.values(), key=lambda answer: (answer.step_ms, answer.layout))[: self._top]
        return Found(tuple(answers), tuple(reasons), nearest, len(layouts), num, time.monotonic() - begin)

    def _possible(self, layouts: list[Layout]) -> list[tuple[float, int, Layout, float]]:
        """A heap of the layouts that can be, with the time that each is expected to take, and takes at least."""
        queue: list[tuple[float, int, Layout, float]] = []
        job = self._problem.job
        machine = self._problem.machine
        is_free = not {"gtp", "replicate", "expert_gtp"} & job.fixed.keys()
        for number, layout in enumerate(layouts):
            reason = self._problem.refusal(layout)
            if is_free and (wide := is_too_wide(layout, machine)) is not None:
                reason = f"{wide}: no published run was so wide; --gtp tries it all the same"
            if reason is None:
                least = self._bounds.ms(layout)
                queue.append((least, number, layout, least))
            else:
                self._refused.setdefault(reason, []).append(layout)
        if not queue:
            asked = ", ".join(f"{name} {job.fixed[name]}" for name in AXES if name in job.fixed) or "any axes"
            others = "their product is another number"
            reason = max(self._refused, key=lambda key: len(self._refused[key]), default=others)
            raise PlanError(f"plan finds no layout of {job.gpus} GPUs with {asked}: {reason}. Pass other sizes.")
        heapq.heapify(queue)
        return queue

    def _try_out(self, layout: Layout, expected: float, least: float) -> bool:
        """Simulates a layout, unless it does not fit or another one of its family is as fast."""
        rival = self._best.get(_family(layout))
        if rival is not None and rival.step_ms <= expected * _ENOUGH:
            return False
        if self._bounds.state_nbytes(layout) > self._capacity:
            self._refused.setdefault(_STATE, []).append(layout)
            return False
        is_hopeless = self._bounds.nbytes(layout) * _CERTAIN > self._capacity
        if is_hopeless:
            memory = None
        else:
            memory = memory_of(self._problem, layout)
        if memory is None or memory.total > self._capacity:
            self._refused.setdefault(_MEMORY, []).append(layout)
            return False
        answer = evaluate(self._problem, layout, memory)
        factor = answer.step_ms / least
        self._factors[_alike(layout)] = min(factor, self._factors.get(_alike(layout), factor))
        if rival is None or answer.step_ms < rival.step_ms:
            self._best[_family(layout)] = answer
        return True

    def _what_lacks_least(self) -> Answer | None:
        """Where no layout fits: takes those that leaner code could run as the best; else gives the smallest one."""

        def size(layout: Layout) -> tuple[int, int]:
            return self._bounds.nbytes(layout), -CHECKPOINTS.index(layout.checkpoint)

        refused = self._refused.get(_MEMORY, [])
        smallest = heapq.nsmallest(_NUM_SMALL, refused or self._refused.get(_STATE, []), key=size)
        tight = [*refused[:_MAX_TIGHT], *smallest]
        found = [(memory_of(self._problem, layout), layout) for layout in tight]
        if not found:
            return None
        for memory, layout in found:
            if memory.least <= self._capacity and len(self._best) < self._top:
                self._best.setdefault(_family(layout), evaluate(self._problem, layout, memory))
        if self._best:
            return None
        memory, layout = min(found, key=lambda item: item[0].total)
        return evaluate(self._problem, layout, memory)


def _family(layout: Layout) -> tuple[int, ...]:
    """Layouts that differ in how data ranks hold weights, and in how a batch is cut."""
    return layout.pp, layout.cp, layout.tp, layout.ep


def _alike(layout: Layout) -> tuple[object, ...]:
    """Layouts that are slower than their bounds by much the same factor."""
    return *_family(layout), layout.micro_batch, layout.keep, layout.gtp > 1  # whole weights make no groups


def advise(problem: Problem, closest: Answer) -> list[str]:
    """Changes that make the closest layout fit, each tried by itself, and what they leave free."""
    lines: list[str] = []
    for text, changed, layout in _changes(problem, closest.layout):
        if text.startswith("--gpus") and any(line.startswith("--gpus") for line in lines):
            continue  # fewer GPUs are enough
        if changed.refusal(layout) is None:
            free = changed.machine.memory_gib - memory_of(changed, layout).total / GIB
            lines += [f"{text}: fits, {free:.1f} GiB are left"] * (free >= 0)
    return lines or ["no single change is enough: combine more GPUs, --checkpointing full and shorter sequences"]


def _changes(problem: Problem, layout: Layout) -> Iterator[tuple[str, Problem, Layout]]:
    job = problem.job

    def asking(**changes: Any) -> Problem:
        return replace(problem, job=replace(job, **changes))

    if layout.checkpoint != "full":
        yield "--checkpointing full", problem, replace(layout, checkpoint="full")
    if layout.micro_batch > 1:
        yield "--micro-batch 1", problem, replace(layout, micro_batch=1)
    if job.memory != "least":
        yield "--memory least", asking(memory="least"), layout
    if job.optimizer == "adamw":
        yield "--optimizer muon", asking(optimizer="muon"), layout
    if layout.replicate > 1 and not job.shards_optimizer:
        yield "--zero1", asking(shards_optimizer=True), layout
    for factor in (2, 4, 8, 16, 32, 64):
        larger = asking(gpus=job.gpus * factor, global_batch=max(job.batch, layout.data_ranks * factor))
        yield f"--gpus {larger.job.gpus}", larger, replace(layout, gtp=layout.gtp * factor)
    for name in preset_names():
        machine = load_machine(name)
        if machine.memory_gib > problem.machine.memory_gib:
            yield f"--machine {name}", replace(problem, machine=machine), layout
