"""Searches the layouts of a job: those that cannot be are refused with a reason, the others are simulated, the most
promising first, until none that is left can be among the best."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from .bounds import Bounds
from .errors import PlanError
from .evaluate import Answer, Problem, evaluate, memory_of
from .ground import is_too_wide
from .job import AXES, CHECKPOINTS, Layout, refusal
from .machine import GIB, load_machine, preset_names

_MAX_TRIED = 64  # simulations of one search
_MAX_TIGHT = 24  # of those that do not fit, how many are looked at if none does
_NUM_SMALL = 8  # and how many of those whose bounds are least
# Of the least memory, what there is at least: allocators round.
_CERTAIN = 0.97
# A layout of a family is not tried if it could gain less than this on the best of the family.
_ENOUGH = 1.01
# Of the time that layouts like it suggest, what a layout is expected to take.
_LIKELY = 0.9
_STATE, _MEMORY = "parameters and optimizer alone do not fit", "does not fit"


@dataclass(frozen=True)
class Refused:
    reason: str
    count: int
    example: Layout


@dataclass(frozen=True)
class Found:
    # The fastest of each family, the best first. A family has equal pp, cp, tp and ep. If none fits, those that leaner
    # code could run: see ``Answer.may_fit``.
    answers: tuple[Answer, ...]
    refused: tuple[Refused, ...]  # the most frequent first
    closest: Answer | None  # of those that do not fit, the one that lacks least memory; None if one fits
    num_layouts: int  # how many were considered
    num_simulated: int
    seconds: float


Report = Callable[[int, int, int], None]  # simulated, all, seconds


def layouts_of(problem: Problem) -> Iterator[Layout]:
    """All layouts with the axes that the user fixed."""
    job, config = problem.job, problem.config
    fixed, can_be_cut = job.fixed, problem.user is None or not problem.user.plan.refusal
    most = {
        "tp": min(problem.machine.gpus_per_domain, 16) if can_be_cut else 1,
        "pp": min(config.layers, 64) if config is not None else 1,
        "cp": 16 if config is not None and job.seq_len >= 16384 else 1,
    }
    divisors = _divisors(job.gpus)
    sizes = ([fixed[name]] if name in fixed else [size for size in divisors if size <= most[name]] for name in most)
    for tp, pp, cp in itertools.product(*sizes):
        rest, remainder = divmod(job.gpus, tp * pp * cp)
        for gtp in _divisors(rest) if not remainder else ():
            replicate = rest // gtp
            if (fixed.get("gtp", gtp), fixed.get("replicate", replicate)) == (gtp, replicate):
                for experts in _expert_axes(problem, Layout(pp=pp, replicate=replicate, cp=cp, gtp=gtp, tp=tp)):
                    yield from _batches(problem, experts)


def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _expert_axes(problem: Problem, layout: Layout) -> Iterator[Layout]:
    config, fixed = problem.config, problem.job.fixed
    if config is None or not config.experts:
        yield replace(layout, ep=fixed.get("ep", 1), expert_gtp=fixed.get("expert_gtp", 1))
        return
    stage = layout.ranks // layout.pp
    divisors = [size for size in _divisors(stage) if config.experts % size == 0]
    for ep in [fixed["ep"]] if "ep" in fixed else divisors:
        # As many ranks of experts as of dense weights, or all ranks of a stage.
        wanted = {max(layout.gtp * layout.tp // ep, 1), max(stage // ep, 1)}
        for expert_gtp in [fixed["expert_gtp"]] if "expert_gtp" in fixed else sorted(wanted):
            yield replace(layout, ep=ep, expert_gtp=expert_gtp)


def _batches(problem: Problem, layout: Layout) -> Iterator[Layout]:
    job = problem.job
    per_rank = job.batch // layout.data_ranks
    micro = job.fixed.get("micro_batch")
    sizes = [micro] if micro else [size for size in (1, 2, 4) if size <= max(per_rank, 1)]
    checkpoints = CHECKPOINTS if job.checkpointing == "auto" else (job.checkpointing,)
    for micro_batch, checkpoint in itertools.product(sizes, checkpoints):
        one = replace(layout, micro_batch=micro_batch, checkpoint=checkpoint)
        yield one
        if per_rank // micro_batch > 1 and layout.gtp > 1:
            yield replace(one, keep=True)


def search(problem: Problem, *, top: int = 5, report: Report | None = None) -> Found:
    """The fastest layouts that fit, ``top`` of them. Raises PlanError if no layout has the axes that were asked for."""
    begin = time.monotonic()
    layouts, bounds = list(layouts_of(problem)), Bounds(problem)
    queue, refused = _possible(problem, layouts, bounds)
    state = _Search(problem, bounds, refused, top)
    while queue and state.num < _MAX_TRIED:
        expected, number, layout, least = heapq.heappop(queue)
        likely = state.likely_ms(layout, least)
        if likely > expected * _ENOUGH:
            heapq.heappush(queue, (likely, number, layout, least))
            continue
        if state.is_done(expected):
            break
        if state.try_out(layout, expected, least) and report is not None:
            report(state.num, len(layouts), int(time.monotonic() - begin))
    nearest = None if state.best else state.what_lacks_least()
    reasons = [Refused(reason, len(found), found[0]) for reason, found in refused.items()]
    reasons.sort(key=lambda item: -item.count)
    answers = sorted(state.best.values(), key=lambda answer: (answer.step_ms, answer.layout))
    return Found(tuple(answers[:top]), tuple(reasons), nearest, len(layouts), state.num, time.monotonic() - begin)


class _Search:
    def __init__(self, problem: Problem, bounds: Bounds, refused: dict[str, list[Layout]], top: int) -> None:
        self._problem, self._bounds, self._refused, self._top = problem, bounds, refused, top
        self._capacity = problem.machine.memory_nbytes
        self._factors: dict[tuple[object, ...], float] = {}  # of times over their bounds
        self._too_large: dict[tuple[object, ...], list[Layout]] = {}
        self._refused_memory: list[Layout] = []
        self.best: dict[tuple[int, ...], Answer] = {}  # of each family
        self.num = 0  # of simulations

    def likely_ms(self, layout: Layout, least: float) -> float:
        """Time by that of layouts like it, a little less than it will take."""
        return least * max(_LIKELY * self._factors.get(_alike(layout), 1.0), 1.0)

    def is_done(self, expected: float) -> bool:
        """Whether no layout of so much time can be among the best."""
        leading = sorted(answer.step_ms for answer in self.best.values())
        return len(leading) >= self._top and expected > leading[self._top - 1]

    def try_out(self, layout: Layout, expected: float, least: float) -> bool:
        """Simulates a layout, unless it does not fit or another one of its family is as fast."""
        rival = self.best.get(_family(layout))
        if rival is not None and rival.step_ms <= expected * _ENOUGH:
            return False
        if self._bounds.state_nbytes(layout) > self._capacity:
            self._refused.setdefault(_STATE, []).append(layout)
            return False
        is_hopeless = self._bounds.nbytes(layout) * _CERTAIN > self._capacity or self._is_hopeless(layout)
        memory = None if is_hopeless else memory_of(self._problem, layout, self._capacity)
        if memory is None or memory.total > self._capacity:
            self._refused.setdefault(_MEMORY, []).append(layout)
            self._refused_memory.append(layout)
            self._too_large.setdefault(_kind(layout), []).append(layout)
            return False
        answer = evaluate(self._problem, layout, memory)
        factor = answer.step_ms / least
        self._factors[_alike(layout)] = min(factor, self._factors.get(_alike(layout), factor))
        if rival is None or answer.step_ms < rival.step_ms:
            self.best[_family(layout)] = answer
        self.num += 1
        return True

    def _is_hopeless(self, layout: Layout) -> bool:
        """Whether one of its kind does not fit that cuts weights into as many parts: another one, or the one that cuts
        them into most."""
        kind = _kind(layout)
        if kind not in self._too_large:
            experts = layout.ranks // layout.pp // layout.ep if layout.expert_gtp > 1 else 1
            widest = replace(layout, gtp=layout.gtp * layout.replicate, replicate=1, expert_gtp=experts)
            self._too_large[kind] = [widest] * (memory_of(self._problem, widest).total > self._capacity)
        larger = self._too_large[kind]
        return any(other.gtp >= layout.gtp and other.expert_gtp >= layout.expert_gtp for other in larger)

    def what_lacks_least(self) -> Answer | None:
        """Where no layout fits: takes those that leaner code could run as the best; else gives the smallest one."""
        smallest = heapq.nsmallest(_NUM_SMALL, self._refused_memory or self._refused.get(_STATE, []), key=self._size)
        tight = [*self._refused_memory[:_MAX_TIGHT], *smallest]
        found = [(memory_of(self._problem, layout), layout) for layout in tight]
        if not found:
            return None
        for memory, layout in found:
            if memory.least <= self._capacity and len(self.best) < self._top:
                self.best.setdefault(_family(layout), evaluate(self._problem, layout, memory))
        if self.best:
            return None
        memory, layout = min(found, key=lambda item: item[0].total)
        return evaluate(self._problem, layout, memory)

    def _size(self, layout: Layout) -> tuple[int, int]:
        return self._bounds.nbytes(layout), -CHECKPOINTS.index(layout.checkpoint)


def _possible(
    problem: Problem, layouts: list[Layout], bounds: Bounds
) -> tuple[list[tuple[float, int, Layout, float]], dict[str, list[Layout]]]:
    """A heap of the layouts that can be, with the time that each is expected to take, and that it takes at least; the
    others by the reason."""
    queue: list[tuple[float, int, Layout, float]] = []
    refused: dict[str, list[Layout]] = {}
    for number, layout in enumerate(layouts):
        reason = _refusal(problem, layout)
        if reason is None:
            least = bounds.ms(layout)
            queue.append((least, number, layout, least))
        else:
            refused.setdefault(reason, []).append(layout)
    if not queue:
        raise PlanError(_nothing(problem, refused))
    heapq.heapify(queue)
    return queue, refused


def _family(layout: Layout) -> tuple[int, ...]:
    """Layouts that differ in how data ranks hold weights, and in how a batch is cut."""
    return layout.pp, layout.cp, layout.tp, layout.ep


def _kind(layout: Layout) -> tuple[object, ...]:
    """Layouts that take less memory the more ranks share weights."""
    return *_family(layout), layout.micro_batch, layout.keep, layout.checkpoint


def _alike(layout: Layout) -> tuple[object, ...]:
    """Layouts that are slower than their bounds by much the same factor."""
    return *_family(layout), layout.micro_batch, layout.keep, layout.gtp > 1  # whole weights make no groups


def _refusal(problem: Problem, layout: Layout) -> str | None:
    is_free = not {"gtp", "replicate", "expert_gtp"} & problem.job.fixed.keys()
    if is_free and (wide := is_too_wide(layout, problem.machine)) is not None:
        return f"{wide}: no published run was so wide; --gtp tries it all the same"
    reason = refusal(layout, problem.job, problem.config, problem.machine)
    return problem.user.refuses(layout.tp) if reason is None and problem.user is not None else reason


def _nothing(problem: Problem, refused: dict[str, list[Layout]]) -> str:
    job = problem.job
    asked = ", ".join(f"{name} {job.fixed[name]}" for name in AXES if name in job.fixed) or "any axes"
    reason = max(refused, key=lambda key: len(refused[key]), default="their product is another number")
    return f"plan finds no layout of {job.gpus} GPUs with {asked}: {reason}. Pass other sizes."


def advise(problem: Problem, closest: Answer) -> list[str]:
    """Changes that make the closest layout fit, each tried by itself, and what they leave free."""
    lines: list[str] = []
    for text, changed, layout in _changes(problem, closest.layout):
        if text.startswith("--gpus") and any(line.startswith("--gpus") for line in lines):
            continue  # fewer GPUs are enough
        if refusal(layout, changed.job, changed.config, changed.machine) is None:
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
