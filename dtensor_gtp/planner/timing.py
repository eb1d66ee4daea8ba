"""How long a forward and backward takes, and for what compute waits in it; the same with ``fully_shard``.

A step of many alike blocks is simulated with a few of them, twice, and continued.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import replace
from typing import NamedTuple

from ..policy import Schedule
from .costs import Load, Stream, Work
from .program import Program, build
from .setting import COMPUTE_NBYTES, PARAM_NBYTES, Setting, Sharded
from .trace import Trace, recomputed_uses

# A step of more blocks is simulated with these numbers of them, and continued: blocks in the middle are all alike.
_FEW = 6
_MORE = 9
# Of smaller blocks a window of gathers holds several, so few of them are not like many.
_LARGE_BLOCK = 32 << 20


class Parts(NamedTuple):
    """Time of one forward and backward, in which compute waits for what, and what is received."""

    ms: float
    exposed: dict[str, float]
    received: dict[str, float]

    def plus(self, other: Parts, times: float) -> Parts:
        exposed, received = (
            {key: mine.get(key, 0) + times * others.get(key, 0) for key in {**mine, **others}}
            for mine, others in zip(self[1:], other[1:], strict=True)
        )
        return Parts(self.ms + times * other.ms, exposed, received)

    def hiding(self, cause: str) -> Parts:
        """The same where compute of another microbatch hides what it can of ``cause``."""
        hidden = min(self.exposed.get(cause, 0.0), self.ms - sum(self.exposed.values()))
        left = {cause: self.exposed.get(cause, 0.0) - hidden}
        return Parts(self.ms - hidden, self.exposed | left, self.received)


def few_and_more(setting: Setting) -> tuple[list[Setting], int, int]:
    """What stands for many blocks: a step of few and one of more; how many this one lacks, and has beyond the other."""
    settings = [replace(setting, trace=trace) for trace in _few_and_more(setting.trace)]
    return settings, len(setting.trace.blocks) - _MORE, _MORE - _FEW


@functools.lru_cache(maxsize=128)
def _few_and_more(trace: Trace) -> tuple[Trace, ...]:
    block_nbytes = trace.largest_block([weight.numel * COMPUTE_NBYTES for weight in trace.weights])
    shapes = [tuple((w.shape, w.is_tied, w.is_frozen) for w in weights) for weights in trace.blocks.values()]
    are_alike = len(set(shapes[_FEW // 2 :])) == 1  # those after the first few
    if len(shapes) <= _MORE + 3 or block_nbytes < _LARGE_BLOCK or not are_alike:
        return (trace,)
    return _with_blocks(trace, _FEW), _with_blocks(trace, _MORE)


def measure(setting: Setting, schedule: Schedule, *, is_last: bool) -> Parts:
    """One forward and backward, for many blocks by the difference that three of them make."""
    settings, left, grown = few_and_more(setting)
    programs = [build(one, schedule, is_last=is_last) for one in settings]
    few, more = (Parts(each.ms, each.exposed(), each.received) for each in (programs[0], programs[-1]))
    return more.plus(more.plus(few, -1), left / grown)


def _with_blocks(trace: Trace, number: int) -> Trace:
    """The same with fewer blocks: the first ones and the last ones, which come after fewer activations then."""
    blocks = sorted(trace.blocks)
    first = blocks[: number - 2]
    last = blocks[-2:]
    lives = {weight.block: weight.live for weight in reversed(trace.weights)}
    shift = (lives[last[1]] - lives[last[0]]) * (len(blocks) - number)
    weights = [weight for weight in trace.weights if weight.block in first or weight.is_table]
    after = (*last, -1)
    weights += [weight.shifted(-shift) for weight in trace.weights if weight.block in after and not weight.is_table]
    return replace(trace, weights=tuple(weights), end=max(trace.end - shift, 0))


def compute_ms(setting: Setting, hidden: str = "") -> list[float]:
    """Times of a forward and backward in which compute waits for no weight, which no schedule can be below: that of the
    loss, then of each weight with what is computed around it. Collectives of the axis ``hidden`` take none."""
    costs = setting.costs
    weights = setting.sharded
    again = {number for numbers in recomputed_uses(setting.trace, setting.checkpoint).values() for number in numbers}

    def ms(works: Iterable[Work]) -> float:
        return sum(work.ms for work in works if not hidden or work.axis != hidden)

    times = [ms(costs.works(setting.trace.loss, is_block=False))]
    for number, item in enumerate(weights):
        is_again = setting.checkpoint != "none" and item.weight.block >= 0
        around = [item.weight.before] * (1 + is_again) + [item.weight.backward]
        parts = ["forward"] * (1 + (number in again)) + [*item.gradients()]
        spent = sum(ms(costs.works(ops, is_block=item.weight.block >= 0)) for ops in around)
        times.append(spent + sum(ms(setting.product(item, part)) for part in parts))
    return times


def units_of(setting: Setting) -> tuple[Sharded, list[Sharded]]:
    """What each ``fully_shard`` call gathers: that of the root, and those of the blocks."""
    units = []
    for block, numbers in sorted(setting.trace.numbers.items()):
        unit = setting.together(numbers)
        if block < 0:
            name = "root"
        else:
            name = f"block {block}"
        units.append(unit._replace(weight=unit.weight._replace(name=name)))
    return units[0], units[1:]


class _FullyShard(Program):
    """The order is that of torch's ``_fsdp_param_group.py``: one block is gathered ahead, its shards are copied in and
    the result is copied out on the GPU, one reduce-scatter is in flight."""

    def __init__(self, setting: Setting) -> None:
        super().__init__(setting)
        self._axis = setting.costs.axis("gtp")
        self._gathers = dict[str, int]()
        self._copied_out = list[int]()
        self.reducing = list[int]()

    def spend_for(self, unit: Sharded, share: float) -> None:
        self.spend(len(unit.members) * self.host.fsdp_use_us * share)

    def gather(self, unit: Sharded) -> None:
        """Unless it has begun: shards are cast and copied in, then gathered, after the last gather was copied out."""
        if unit.name in self._gathers:
            return
        self.spend_for(unit, 1 / 4)
        self.spend(self.host.collective_us)
        ms = self.costs.memory_ms(unit.shard_numel * (2 * PARAM_NBYTES + 3 * COMPUTE_NBYTES))
        cast = self.add(Stream.GATHER, Load.KERNEL, ms, self._copied_out or self.fork(), f"copy in {unit.name}")
        ms = self.costs.gather_ms(unit.gathered, self._axis)
        label = f"gather {unit.name}"
        self._gathers[unit.name] = self.transfer(Stream.GATHER, "gtp", unit.gathered, ms, [cast], label, "gathers")

    def use(self, unit: Sharded) -> None:
        """The gather is there, and is copied to where modules read it."""
        self.gather(unit)
        self.spend_for(unit, 1 / 4)
        self.wait(self._gathers.pop(unit.name))
        ms = self.costs.memory_ms(2 * unit.gathered)
        self._copied_out = [self.add(Stream.COMPUTE, Load.COMPUTE, ms, (), f"copy out {unit.name}", "gathers")]

    def reduce(self, unit: Sharded) -> None:
        """Gradients are copied in, cast if need be, and reduced, after the last reduction."""
        costs = self.costs
        if not unit.sent:
            return
        self.spend_for(unit, 1 / 2)
        self.spend(self.host.collective_us)
        while self.reducing:
            self.wait(self.reducing.pop())
        ms = costs.memory_ms(unit.weight.numel * COMPUTE_NBYTES + unit.sent)
        copied = self.add(Stream.COMPUTE, Load.COMPUTE, ms, (), f"copy in gradients of {unit.name}")
        ms = costs.scatter_ms(unit.sent, self._axis)
        self.transfer(Stream.SCATTER, "gtp", unit.sent, ms, [copied], f"reduce {unit.name}", "reductions")
        shard = -(-unit.weight.numel // self._axis.size)
        ms = costs.memory_ms(shard * (self.setting.reduce_nbytes + PARAM_NBYTES))
        self.reducing.append(self.add(Stream.SCATTER, Load.KERNEL, ms, (), f"sum {unit.name}"))


def build_fully_shard(setting: Setting, *, keeps: bool = False) -> Program:
    """``fully_shard`` on each block and on the root; ``keeps`` with ``reshard_after_forward=False``. In forward the
    host runs ahead, so a block is gathered as soon as the one before it has been copied out."""
    tasks = _FullyShard(setting)
    root, units = units_of(setting)
    weights = {unit.name: [setting.sharded[number] for number in unit.members] for unit in (root, *units)}
    table, *head = weights[root.name]
    tasks.use(root)
    tasks.forward([table])
    for unit in units:
        tasks.use(unit)
        tasks.forward(weights[unit.name])
    tasks.forward(head)
    tasks.operations(setting.trace.loss, "loss")
    tasks.backward(head)
    for unit, following in zip(units[::-1], [*units[-2::-1], None], strict=True):
        if keeps:  # its hooks look for what there is to do
            tasks.spend_for(unit, 1 / 4)
        else:
            tasks.use(unit)
            if following is not None:
                tasks.gather(following)
        tasks.backward(weights[unit.name])
        tasks.reduce(unit)
    tasks.backward([table])
    tasks.operations(setting.trace.tail, "backward of the input")
    tasks.reduce(root)
    for task in tasks.reducing:
        tasks.wait(task)
    return tasks.end()
