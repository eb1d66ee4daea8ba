"""Time and memory that a layout cannot be below, from one block of each kind: what a search needs of most layouts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .costs import Costs
from .evaluate import Problem, full_stages, inflight, lower_bound_ms, parts_of, setting_of, slowest
from .job import OPTIMIZERS, Layout
from .machine import GIB
from .memory import FRAGMENTS, checkpointed, saved_nbytes
from .setting import PARAM_NBYTES
from .timing import compute_ms
from .trace import Part

_FIRST, _LAST = "embedding", "head and loss"


# Of one block or of several: time of a microbatch, and bytes of gathered weights, of full gradients, and elements
# before they are cut over gtp; then those of experts.
Amounts = tuple[float, ...]
_AXES = {"gtp": slice(1, 4), "expert_gtp": slice(4, 7)}
_NOTHING = (0.0,) * 7


class Bounds:
    """Computed once for all layouts that compute alike."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._kinds: dict[tuple[object, ...], dict[object, Amounts]] = {}
        self._sums: dict[tuple[object, ...], Amounts] = {}
        self._passing: dict[tuple[object, ...], int] = {}

    def ms(self, layout: Layout) -> float:
        sums, axes = self._of(layout), layout.axes()
        num, costs = layout.num_microbatches(self._problem.job), Costs(self._problem.machine)
        times = {True: 0.0, False: 0.0}  # by link
        for name, place in _AXES.items():
            gathered, sent, _ = sums[place]
            if axes[name].size > 1 and gathered:
                nbytes = (2 * gathered + sent) * (1 if layout.keep else num)
                times[costs.wire(axes[name]).is_fast] += costs.gather_ms(nbytes, axes[name])
        return max(lower_bound_ms(self._problem, layout, sums[0]), *times.values())

    def state_nbytes(self, layout: Layout) -> int:
        """Parameters and optimizer state of a rank."""
        return self._shards(layout, PARAM_NBYTES, OPTIMIZERS[self._problem.job.optimizer])

    def _shards(self, layout: Layout, nbytes: int, nbytes_of_replicas: int = 0) -> int:
        """Of all shards, with so many bytes for an element, and so many that replicas may share."""
        sums, axes, total = self._of(layout), layout.axes(), 0.0
        for name, place in _AXES.items():
            replicas = axes[name.replace("gtp", "replicate")].size if self._problem.job.shards_optimizer else 1
            total += sums[place][2] / axes[name].size * (nbytes + nbytes_of_replicas / replicas)
        return int(total)

    def nbytes(self, layout: Layout) -> int:
        """Of a rank: state, what blocks save, the weight in use and its gradient, and weights that stay."""
        num = layout.num_microbatches(self._problem.job)
        key = (*replace(layout, replicate=1, gtp=1, expert_gtp=1).as_record().values(), num)
        if key not in self._passing:
            self._passing[key] = self._passing_nbytes(replace(layout, gtp=1, expert_gtp=1), num)
        stays = self.state_nbytes(layout) + int(self._problem.machine.reserve_gib * GIB)
        if num > 1:  # gradients stay from the first microbatch on
            stays += self._shards(layout, PARAM_NBYTES)
        if layout.keep:
            stays += int(sum(sum(self._of(layout)[place][:2]) for place in _AXES.values()))
        return stays + int(self._passing[key] * (1 + FRAGMENTS))

    def _passing_nbytes(self, layout: Layout, num: int) -> int:
        """Of the fullest stage, with so many microbatches."""
        parts, found = parts_of(self._problem, layout), []
        for number in full_stages(parts):
            setting = setting_of(self._problem, layout, parts[number])
            trace = checkpointed(setting)
            saved = int(max(saved_nbytes(trace), 0) * (inflight(self._problem, layout, number, num) - 1))
            # A gradient in fp32 may be the shard's own.
            grads = setting.reduce_nbytes < PARAM_NBYTES and not layout.keep
            for weight, item in zip(trace.weights, setting.sharded(), strict=True):
                used = 0 if weight.is_table or layout.keep else setting.held(item)
                amounts = weight.amounts
                found.append(saved + max(*amounts[:3], amounts.forward + used, amounts.wgrad + used * grads))
        return max(found)

    def _of(self, layout: Layout) -> Amounts:
        alike = layout.cp, layout.tp, layout.ep, layout.micro_batch, layout.checkpoint
        key = layout.pp, *alike
        if key not in self._sums:
            if alike not in self._kinds:
                self._kinds[alike] = self._by_kind(layout)
            part, kinds = slowest(parts_of(self._problem, layout)), self._kinds[alike]
            names: Iterable[object] = kinds
            if part is not None:
                names = [*part.kinds, *[_FIRST] * part.is_first, *[_LAST] * part.is_last]
            self._sums[key] = _sum(kinds[name] for name in names)
        return self._sums[key]

    def _by_kind(self, layout: Layout) -> dict[object, Amounts]:
        """What there is in a block of each kind, and outside of blocks; a model of the user's code is one kind."""
        config = self._problem.config
        part = None if config is None else Part(tuple(sorted(set(config.kinds))))
        setting = setting_of(self._problem, replace(layout, gtp=1, expert_gtp=1), part)
        loss_ms, *times = compute_ms(setting)
        found: dict[object, list[Amounts]] = {_FIRST: [_NOTHING], _LAST: [(loss_ms, *_NOTHING[1:])]}
        for ms, item in zip(times, setting.sharded(), strict=True):
            weight = item.weight
            amounts = item.wired, item.sent, 0 if weight.is_tied else weight.numel
            outside = _FIRST if weight.is_table else _LAST
            name = outside if part is None or weight.block < 0 else part.kinds[weight.block]
            mine = (0, 0, 0, *amounts) if weight.is_expert else (*amounts, 0, 0, 0)
            found.setdefault(name, []).append((ms, *mine))
        return {name: _sum(each) for name, each in found.items()}


def _sum(each: Iterable[Amounts]) -> Amounts:
    return tuple(map(sum, zip(*each, strict=True)))
