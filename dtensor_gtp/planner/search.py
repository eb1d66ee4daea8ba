"""Searches the layouts of a job: those that cannot be are refused with a reason, the others are simulated, the most
promising first, until none that is left can be among the best."""

from __future__ import annotations

import heapq
import itertools
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

from .costs import Costs
from .errors import PlanError
from .evaluate import Answer, Problem, evaluate, lower_bound_ms, memory_of, parts_of, setting_of, slowest
from .job import AXES, CHECKPOINTS, OPTIMIZERS, Layout, refusal
from .memory import Memory
from .setting import PARAM_NBYTES, Setting
from .timing import compute_ms

_MAX_TRIED = 80  # simulations of one search
_MAX_TIGHT = 8
_STATE = "parameters and optimizer alone do not fit"


@dataclass(frozen=True)
class Refused:
    """Layouts that were refused for one reason, and one of them."""

    reason: str
    count: int
    example: Layout


@dataclass(frozen=True)
class Found:
    """What a search found.

    Args:
        answers: The fastest of each family, the best first. A family has equal pp, cp, tp and ep. If none fits, those
            that leaner code could run: see ``Answer.may_fit``.
        refused: By reason, the most frequent first.
        closest: Of those that do not fit, the one that lacks least memory; None if one fits.
        num_layouts: How many were considered.
        num_simulated: How many were simulated.
        seconds: How long it took.
    """

    answers: tuple[Answer, ...]
    refused: tuple[Refused, ...]
    closest: Answer | None
    num_layouts: int
    num_simulated: int
    seconds: float


Report = Callable[[int, int, int], None]  # simulated, all, seconds


def layouts_of(problem: Problem) -> Iterator[Layout]:
    """All layouts with the axes that the user fixed."""
    job, fixed = problem.job, problem.job.fixed
    is_known = problem.config is not None

    def sizes(name: str, most: int) -> list[int]:
        if name in fixed:
            return [fixed[name]]
        return [size for size in _divisors(job.gpus) if size <= most]

    config = problem.config
    most_pp = min(config.layers, 64) if config is not None else 1
    can_be_cut = problem.user is None or not problem.user.plan.refusal
    most_tp = min(problem.machine.gpus_per_domain, 16) if can_be_cut else 1
    most_cp = 16 if is_known and job.seq_len >= 16384 else 1
    most_ep = config.experts if config is not None else 1
    for tp, pp, cp in itertools.product(sizes("tp", most_tp), sizes("pp", most_pp), sizes("cp", most_cp)):
        rest = job.gpus // (tp * pp * cp)
        if rest * tp * pp * cp != job.gpus:
            continue
        for gtp in _gtp_sizes(problem, rest):
            dense = Layout(pp=pp, replicate=rest // gtp, cp=cp, gtp=gtp, tp=tp)
            for experts in _expert_axes(problem, dense, most_ep):
                yield from _batches(problem, experts)


def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, int(number**0.5) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _gtp_sizes(problem: Problem, rest: int) -> list[int]:
    fixed = problem.job.fixed
    if "replicate" in fixed and "gtp" in fixed:
        return [fixed["gtp"]] if fixed["replicate"] * fixed["gtp"] == rest else []
    if "replicate" in fixed:
        return [rest // fixed["replicate"]] if rest % fixed["replicate"] == 0 else []
    if "gtp" in fixed:
        return [fixed["gtp"]] if rest % fixed["gtp"] == 0 else []
    return _divisors(rest)


def _expert_axes(problem: Problem, layout: Layout, most_ep: int) -> Iterator[Layout]:
    config, fixed = problem.config, problem.job.fixed
    if config is None or not config.experts:
        yield replace(layout, ep=fixed.get("ep", 1), expert_gtp=fixed.get("expert_gtp", 1))
        return
    stage = layout.ranks // layout.pp
    divisors = [size for size in _divisors(stage) if size <= most_ep and config.experts % size == 0]
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
    """The fastest layouts that fit.

    Args:
        problem: What is planned.
        top: How many answers.
        report: Called now and then with the numbers of layouts that were simulated, of all, and of seconds.

    Raises:
        PlanError: No layout at all has the axes that were asked for.
    """
    begin = time.monotonic()
    layouts = list(layouts_of(problem))
    bounds = _Bounds(problem)
    queue, refused = _possible(problem, layouts, bounds)
    best: dict[tuple[int, ...], Answer] = {}  # of each family
    activations: dict[tuple[object, ...], int] = {}  # of layouts that compute alike
    closest: tuple[int, Layout] | None = None
    tight: list[tuple[Layout, Memory]] = []  # those that leaner code could run
    num = 0
    while queue and num < _MAX_TRIED:
        bound, _, layout = heapq.heappop(queue)
        leading = sorted(answer.step_ms for answer in best.values())
        if len(leading) >= top and bound > leading[top - 1]:
            break
        rival = best.get(_family(layout))
        if rival is not None and rival.step_ms <= bound * _ENOUGH:
            continue
        capacity = problem.machine.memory_nbytes
        state = bounds.state_nbytes(layout)
        if state > capacity:
            refused.setdefault(_STATE, []).append(layout)
            continue
        if state + activations.get(_alike(layout), 0) * _CERTAIN > capacity and (best or len(tight) >= top):
            refused.setdefault("does not fit", []).append(layout)
            continue
        memory = memory_of(problem, layout)
        activations[_alike(layout)] = memory.activations + memory.logits
        missing = memory.total - capacity
        if missing > 0 and memory.least <= capacity and len(tight) < _MAX_TIGHT:
            tight.append((layout, memory))
        if missing > 0:
            refused.setdefault("does not fit", []).append(layout)
            if closest is None or missing < closest[0]:
                closest = missing, layout
            continue
        answer = evaluate(problem, layout, memory)
        if rival is None or answer.step_ms < rival.step_ms:
            best[_family(layout)] = answer
        num += 1
        if report is not None:
            report(num, len(layouts), int(time.monotonic() - begin))
    if not best:
        for layout, memory in tight[:top]:
            best.setdefault(_family(layout), evaluate(problem, layout, memory))
    nearest = None
    if not best and (closest is not None or _STATE in refused):
        nearest = evaluate(problem, closest[1] if closest is not None else _smallest(refused[_STATE], bounds))
    reasons = [Refused(reason, len(found), found[0]) for reason, found in refused.items()]
    reasons.sort(key=lambda item: -item.count)
    answers = sorted(best.values(), key=lambda answer: (answer.step_ms, answer.layout))
    return Found(tuple(answers[:top]), tuple(reasons), nearest, len(layouts), num, time.monotonic() - begin)


def _smallest(layouts: list[Layout], bounds: _Bounds) -> Layout:
    """The layout with the least state, and of these the one with the fewest activations."""

    def size(layout: Layout) -> tuple[int, int, int, bool]:
        kept = -CHECKPOINTS.index(layout.checkpoint)
        return bounds.state_nbytes(layout), layout.micro_batch, kept, layout.keep

    return min(layouts, key=size)


def _possible(
    problem: Problem, layouts: list[Layout], bounds: _Bounds
) -> tuple[list[tuple[float, int, Layout]], dict[str, list[Layout]]]:
    """A heap of the layouts that can be, with the least time that each could take; the others by the reason."""
    queue: list[tuple[float, int, Layout]] = []
    refused: dict[str, list[Layout]] = {}
    for number, layout in enumerate(layouts):
        reason = _refusal(problem, layout)
        if reason is None:
            queue.append((bounds.of(layout), number, layout))
        else:
            refused.setdefault(reason, []).append(layout)
    if not queue:
        raise PlanError(_nothing(problem, refused))
    heapq.heapify(queue)
    return queue, refused


# Of the activations of another layout that computes alike, what this one has at least.
_CERTAIN = 0.97
# A layout of a family is not tried if it could gain less than this on the best of the family.
_ENOUGH = 1.01


def _family(layout: Layout) -> tuple[int, ...]:
    """Layouts that differ in how data ranks hold weights, and in how a batch is cut."""
    return layout.pp, layout.cp, layout.tp, layout.ep


def _alike(layout: Layout) -> tuple[object, ...]:
    """Layouts that differ in how data ranks hold weights alone."""
    return layout.pp, layout.cp, layout.tp, layout.ep, layout.micro_batch, layout.checkpoint


class _Alike(NamedTuple):
    """What layouts have in common that compute alike: the least time of a microbatch, and by "gtp" and "expert_gtp" the
    bytes of gathered weights, of full gradients, and of state before it is cut."""

    ms: float
    gathered: dict[str, int]
    sent: dict[str, int]
    state: dict[str, int]


class _Bounds:
    """Time and memory that no schedule of a layout can be below, computed once for all layouts that compute alike."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._known: dict[tuple[object, ...], _Alike] = {}
        self._sums: dict[tuple[int, ...], list[dict[str, int]]] = {}

    def of(self, layout: Layout) -> float:
        """Milliseconds."""
        alike = self._alike(layout)
        computing = lower_bound_ms(self._problem, layout, alike.ms)
        num = layout.num_microbatches(self._problem.job)
        costs, axes = Costs(self._problem.machine), layout.axes()
        times = {True: 0.0, False: 0.0}  # by link
        for name in alike.gathered:
            if axes[name].size > 1:
                nbytes = (2 * alike.gathered[name] + alike.sent[name]) * (1 if layout.keep else num)
                times[costs.wire(axes[name]).is_fast] += costs.gather_ms(nbytes, axes[name])
        return max(computing, *times.values())

    def state_nbytes(self, layout: Layout) -> int:
        """Parameters and optimizer state of a rank."""
        axes = layout.axes()
        return sum(nbytes // axes[name].size for name, nbytes in self._alike(layout).state.items())

    def _alike(self, layout: Layout) -> _Alike:
        key = _alike(layout)
        if key not in self._known:
            part = slowest(parts_of(self._problem, layout))
            setting = setting_of(self._problem, replace(layout, gtp=1, expert_gtp=1), part)
            if _family(layout) not in self._sums:
                self._sums[_family(layout)] = self._summed(setting)
            self._known[key] = _Alike(compute_ms(setting), *self._sums[_family(layout)])
        return self._known[key]

    def _summed(self, setting: Setting) -> list[dict[str, int]]:
        """Bytes of weights, of gradients and of state: the same however a batch is cut."""
        sums: list[dict[str, int]] = [{}, {}, {}]
        state = PARAM_NBYTES + OPTIMIZERS[self._problem.job.optimizer]
        for item in setting.sharded():
            name = "expert_gtp" if item.weight.is_expert else "gtp"
            nbytes = item.wired, item.sent, 0 if item.weight.is_tied else item.weight.numel * state
            for found, more in zip(sums, nbytes, strict=True):
                found[name] = found.get(name, 0) + more
        return sums


def _refusal(problem: Problem, layout: Layout) -> str | None:
    if problem.config is not None:
        return refusal(layout, problem.job, problem.config, problem.machine)
    if (reason := _refused_for_user(problem, layout)) is not None:
        return reason
    if problem.job.batch % (layout.data_ranks * layout.micro_batch):
        return f"{layout.data_ranks} data ranks do not divide {problem.job.batch} sequences"
    return None


def _refused_for_user(problem: Problem, layout: Layout) -> str | None:
    """Why a model of the user's code cannot have these axes."""
    assert problem.user is not None
    why = {
        "pp": "where a model's own forward is cut into stages is not known",
        "cp": "a model's own attention does not exchange keys and values",
        "ep": "experts are known in configurations alone",
        "expert_gtp": "experts are known in configurations alone",
    }
    found = next((name for name in why if getattr(layout, name) > 1), None)
    if found is not None:
        return f"{found}: {why[found]}"
    if layout.tp > problem.machine.gpus_per_domain:
        return f"tp {layout.tp} leaves the fast link of {problem.machine.gpus_per_domain} GPUs"
    return problem.user.refuses(layout.tp)


def _nothing(problem: Problem, refused: dict[str, list[Layout]]) -> str:
    job = problem.job
    asked = ", ".join(f"{name} {job.fixed[name]}" for name in AXES if name in job.fixed) or "any axes"
    if not refused:
        return f"plan finds no layout of {job.gpus} GPUs with {asked}: they do not multiply to it. Pass other sizes."
    reason = max(refused, key=lambda key: len(refused[key]))
    return f"plan finds no layout of {job.gpus} GPUs with {asked}: {reason}. Pass other sizes."
