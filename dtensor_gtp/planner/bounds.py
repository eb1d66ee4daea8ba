"""Time and memory that a layout cannot be below, from one block of each kind: what a search needs of most layouts."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from .costs import Costs
from .evaluate import Problem, full_stages, inflight, lower_bound_ms, parts_of, setting_of, slowest
from .job import OPTIMIZERS, Layout
from .machine import GIB
from .memory import FRAGMENTS
from .setting import PARAM_NBYTES, Setting, Sharded
from .timing import compute_ms
from .trace import Part, Weight

_FIRST, _LAST = "embedding", "head and loss"

# Of one block or of several: time of a microbatch, and bytes of gathered weights, of full gradients, and elements
# before they are cut over gtp; then those of experts.
Amounts = tuple[float, ...]
_AXES = {"gtp": slice(1, 4), "expert_gtp": slice(4, 7)}
_NOTHING = (0.0,) * 7


class Block(NamedTuple):
    """What there is in a block of one kind, or before or after all blocks."""

    amounts: Amounts
    saved: int  # bytes of activations that stay until its backward
    most: int  # the most bytes of its activations, with a weight in use and its gradient
    most_alone: int  # the same without them


class Bounds:
    """Computed once for all layouts that compute alike."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._blocks: dict[tuple[object, ...], dict[object, Block]] = {}
        self._sums: dict[tuple[object, ...], Amounts] = {}

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
        stays = self.state_nbytes(layout) + int(self._problem.machine.reserve_gib * GIB)
        if num > 1:  # gradients stay from the first microbatch on
            stays += self._shards(layout, PARAM_NBYTES)
        if layout.keep:
            stays += int(sum(sum(self._of(layout)[place][:2]) for place in _AXES.values()))
        parts = parts_of(self._problem, layout)
        passing = (self._passing_nbytes(layout, number, parts[number], num) for number in full_stages(parts))
        return stays + int(max(passing) * (1 + FRAGMENTS))

    def _passing_nbytes(self, layout: Layout, number: int, part: Part | None, num: int) -> int:
        """Of a stage, with so many microbatches."""
        blocks = self._blocks_of(layout)
        begin = saved = blocks[_FIRST].saved
        most = 0
        for name in _names(part, blocks):
            if name != _FIRST:
                most = max(most, saved + (blocks[name].most_alone if layout.keep else blocks[name].most))
                saved += blocks[name].saved
        if number:  # its input is not its own
            saved -= begin
        return most + int(saved * (inflight(self._problem, layout, number, num) - 1))

    def _of(self, layout: Layout) -> Amounts:
        key = layout.pp, *_alike(layout)
        if key not in self._sums:
            blocks = self._blocks_of(layout)
            names = _names(slowest(parts_of(self._problem, layout)), blocks)
            self._sums[key] = _sum(blocks[name].amounts for name in names)
        return self._sums[key]

    def _blocks_of(self, layout: Layout) -> dict[object, Block]:
        key = _alike(layout)
        if key not in self._blocks:
            self._blocks[key] = self._by_kind(layout)
        return self._blocks[key]

    def _by_kind(self, layout: Layout) -> dict[object, Block]:
        """What there is in a block of each kind, and outside of blocks; a model of the user's code is one kind."""
        config = self._problem.config
        kinds = [] if config is None else sorted(set(config.kinds))
        part = None if config is None else Part(tuple(kinds))
        setting = setting_of(self._problem, replace(layout, gtp=1, expert_gtp=1), part)
        loss_ms, *times = compute_ms(setting)
        begins = [weights[0].live for weights in setting.trace.blocks.values()] if kinds else []
        begins = [0, *begins, setting.trace.end]
        found = {}
        for name, begin, end in zip((_FIRST, *kinds, _LAST), begins, (*begins[1:], begins[-1]), strict=True):
            amounts, most, alone = [_NOTHING], 0, 0
            if name == _LAST:
                amounts.append((loss_ms, *_NOTHING[1:]))
            for ms, item in zip(times, setting.sharded(), strict=True):
                if _name_of(item.weight, kinds) == name:
                    amounts.append(_amounts_of(ms, item))
                    most = max(most, _most_nbytes(setting, item) - begin)
                    alone = max(alone, max(item.weight.amounts) - begin)
            found[name] = Block(_sum(amounts), max(end - begin, 0), most, alone)
        return found


def _names(part: Part | None, blocks: dict[object, Block]) -> list[object]:
    """What a stage has, in order."""
    if part is None:
        return list(blocks)
    return [*[_FIRST] * part.is_first, *part.kinds, *[_LAST] * part.is_last]


def _name_of(weight: Weight, kinds: list[bool]) -> object:
    if kinds and weight.block >= 0:
        return kinds[weight.block]
    return _FIRST if weight.is_table else _LAST


def _amounts_of(ms: float, item: Sharded) -> Amounts:
    amounts = item.wired, item.sent, 0 if item.weight.is_tied else item.weight.numel
    return (ms, 0, 0, 0, *amounts) if item.weight.is_expert else (ms, *amounts, 0, 0, 0)


def _most_nbytes(setting: Setting, item: Sharded) -> int:
    """Of activations around a use, with the weight and its gradient; one in fp32 may be the shard's own."""
    amounts = item.weight.amounts
    used = 0 if item.weight.is_table else setting.held(item)
    has_grad = setting.reduce_nbytes < PARAM_NBYTES
    return max(*amounts[:3], amounts.forward + used, amounts.wgrad + used * has_grad)


def _alike(layout: Layout) -> tuple[object, ...]:
    return layout.cp, layout.tp, layout.ep, layout.micro_batch, layout.checkpoint


def _sum(each: Iterable[Amounts]) -> Amounts:
    return tuple(map(sum, zip(*each, strict=True)))
