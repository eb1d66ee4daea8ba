"""Time and memory that a layout cannot be below, from one block of each kind: what a search needs of most layouts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .costs import Costs
from .evaluate import Problem, full_stages, inflight, lower_bound_ms, parts_of, setting_of, slowest
from .job import OPTIMIZERS, Layout
from .machine import GIB
from .memory import FRAGMENTS
from .setting import PARAM_NBYTES
from .timing import compute_ms
from .trace import Part

_FIRST, _LAST = "embedding", "head and loss"

# Of one block or of several: time of a microbatch, and bytes of gathered weights, of full gradients, and elements
# before they are cut over gtp; then those of experts; and bytes of activations that stay until backward.
Amounts = tuple[float, ...]
_AXES = {"gtp": slice(1, 4), "expert_gtp": slice(4, 7)}
_NOTHING = (0.0,) * 8


class Bounds:
    """Computed once for all layouts that compute alike."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._blocks: dict[tuple[object, ...], dict[object, Amounts]] = {}
        self._sums: dict[tuple[object, ...], Amounts] = {}
        self._saved: dict[tuple[object, ...], dict[int, float]] = {}  # by the number of a stage

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
        """Of a rank: state, what blocks save, and weights that stay."""
        num = layout.num_microbatches(self._problem.job)
        stays = self.state_nbytes(layout) + int(self._problem.machine.reserve_gib * GIB)
        if num > 1:  # gradients stay from the first microbatch on
            stays += self._shards(layout, PARAM_NBYTES)
        if layout.keep:
            stays += int(sum(sum(self._of(layout)[place][:2]) for place in _AXES.values()))
        key = layout.pp, *_alike(layout)
        if key not in self._saved:
            parts = parts_of(self._problem, layout)
            self._saved[key] = {number: self._sum_of(layout, parts[number])[-1] for number in full_stages(parts)}
        held = {number: inflight(self._problem, layout, number, num) for number in self._saved[key]}
        return stays + int(max(self._saved[key][number] * held[number] for number in held) * (1 + FRAGMENTS))

    def _of(self, layout: Layout) -> Amounts:
        key = layout.pp, *_alike(layout)
        if key not in self._sums:
            self._sums[key] = self._sum_of(layout, slowest(parts_of(self._problem, layout)))
        return self._sums[key]

    def _sum_of(self, layout: Layout, part: Part | None) -> Amounts:
        """Of the blocks of a stage."""
        key = _alike(layout)
        if key not in self._blocks:
            self._blocks[key] = self._by_kind(layout)
        blocks = self._blocks[key]
        names: Iterable[object] = blocks
        if part is not None:
            names = [*[_FIRST] * part.is_first, *part.kinds, *[_LAST] * part.is_last]
        return _sum(blocks[name] for name in names)

    def _by_kind(self, layout: Layout) -> dict[object, Amounts]:
        """What there is in a block of each kind, and outside of blocks; a model of the user's code is one kind."""
        config = self._problem.config
        part = None if config is None else Part(tuple(sorted(set(config.kinds))))
        setting = setting_of(self._problem, replace(layout, gtp=1, expert_gtp=1), part)
        loss_ms, *times = compute_ms(setting)
        found: dict[object, list[Amounts]] = {_FIRST: [_NOTHING], _LAST: [(loss_ms, *_NOTHING[1:])]}
        for ms, item in zip(times, setting.sharded, strict=True):
            weight = item.weight
            amounts = item.wired, item.sent, 0 if weight.is_tied else weight.numel
            outside = _FIRST if weight.is_table else _LAST
            name = outside if part is None or weight.block < 0 else part.kinds[weight.block]
            mine = (0, 0, 0, *amounts) if weight.is_expert else (*amounts, 0, 0, 0)
            found.setdefault(name, []).append((ms, *mine, 0))
        if part is not None:
            begins = [weights[0].live for weights in setting.trace.blocks.values()]
            for kind, begin, end in zip(part.kinds, begins, (*begins[1:], setting.trace.end), strict=True):
                found[kind].append((*_NOTHING[1:], max(end - begin, 0)))
        return {name: _sum(each) for name, each in found.items()}


def _alike(layout: Layout) -> tuple[object, ...]:
    return layout.cp, layout.tp, layout.ep, layout.micro_batch, layout.checkpoint


def _sum(each: Iterable[Amounts]) -> Amounts:
    return tuple(map(sum, zip(*each, strict=True)))
