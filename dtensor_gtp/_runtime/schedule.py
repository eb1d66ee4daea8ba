"""The plan of gathers, as plain data.

A *use* is one consumption of a weight and is named by the weight's index. A chain records the uses of one pass in the
order in which they happen, and takes them as the plan of the next pass. The order is re-checked at every use. A pass
that deviates is never wrong, only slower: the cursor moves to where the plan meets reality again; a use that the plan
does not have is gathered on demand and moves nothing.

There is one chain for each kind of pass: the forward of each outermost module, with and without gradients, and the
backward. Recomputation in backward (activation checkpointing) is part of the backward chain, in the order in which the
backward really interleaves it.

[Note: what is gathered when]
The uses of a plan are divided into *lanes*, one for each mesh, in which gathers are launched in order of use.

In the lane of the outermost call a use is gathered ahead if it is one of the next ``depth`` uses, or if the uses before
it weigh less than ``nbytes``, or than itself: compute takes time in proportion to the bytes of the weights that it
uses, and so do gathers, so a window in bytes is a window in time, into which small weights do not count as much as big
ones, and a very large one (a head) is begun as many bytes ahead as it takes to hide it.

Other lanes (experts on a mesh of their own) look whole blocks ahead, a block being the consecutive uses of one
``gtp_shard`` call: a use is gathered when the use at its place in the block before happens. Where there is no block
before, it is gathered as many uses ahead as blocks are apart; with a single block in the pass, as in the first lane,
but counting the uses of all lanes.

Consecutive uses of a lane that together weigh at most ``together_nbytes`` are one launch, begun when the first of them
is due. At the begin of a pass nothing hides a gather, so the first launches are no larger than what was launched before
them, or than what is gathered in less time than a collective takes to start.

No torch in here.
"""

from __future__ import annotations

import textwrap
from bisect import bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

_PLAN_WIDTH = 120  # columns of a printed plan

# A link of 300 GB/s moves it in 14 of the 20 microseconds that a collective takes to start.
_QUICK_NBYTES = 4 << 20


class Traits(NamedTuple):
    """What a plan must know of a weight.

    Args:
        nbytes: Bytes of the gathered weight.
        lane: Number of its mesh; 0 is that of the outermost call.
        call: Number of the ``gtp_shard`` call that manages it.
        bundle: Weights of one bundle (not -1) travel together whatever they weigh.
    """

    nbytes: int
    lane: int = 0
    call: int = 0
    bundle: int = -1


@dataclass(frozen=True)
class Window:
    """How far ahead weights are gathered, see [Note: what is gathered when].

    Args:
        depth: Uses ahead at least; 0 gathers nothing ahead.
        nbytes: Bytes ahead at least.
        together_nbytes: Bytes up to which gathers are one launch.
        num_blocks: Blocks ahead in lanes other than the first; 0 treats them as the first.
    """

    depth: int
    nbytes: int = 0
    together_nbytes: int = 0
    num_blocks: int = 1

    def __str__(self) -> str:
        if self.depth == 0:
            return "nothing ahead"
        text = f"{self.depth} uses" if self.depth > 1 else "1 use"
        if self.nbytes:
            text += f" or {format_nbytes(self.nbytes)}"
        together = f", together up to {format_nbytes(self.together_nbytes)}" if self.together_nbytes else ""
        return f"{text} ahead{together}"


class Launch(NamedTuple):
    """Gathers that are launched together.

    Args:
        step: After how many uses of the pass.
        positions: The uses that they are for, as positions in the plan.
    """

    step: int
    positions: tuple[int, ...]


class Plan:
    """The uses of a pass in order, and what is launched when.

    Args:
        uses: Indices of weights.
        traits: Of each weight, by index.
        window: How far to look ahead.
    """

    def __init__(self, uses: Sequence[int] = (), traits: Sequence[Traits] = (), window: Window = Window(0)) -> None:
        self.uses = tuple(uses)
        # By step; one more than there are uses.
        self.launches: list[tuple[Launch, ...]] = [()] * (len(self.uses) + 1)
        # For each step, where the last use ends that has been launched by then.
        self._ends = [0] * (len(self.uses) + 1)
        self._launch_of: dict[int, Launch] = {}
        launches = _plan_launches(self.uses, traits, window) if window.depth else []
        for launch in launches:
            self.launches[launch.step] += (launch,)
            self._ends[launch.step] = max(self._ends[launch.step], launch.positions[-1] + 1)
            self._launch_of.update(dict.fromkeys(launch.positions, launch))
        self._ends = list(accumulate(self._ends, max))

    def window(self, cursor: int) -> list[tuple[int, ...]]:
        """What has been launched by the step ``cursor`` for uses from there on, as positions; as launched together."""
        found: dict[Launch, list[int]] = {}
        for position in range(cursor, self._ends[cursor]):
            launch = self._launch_of[position]
            if launch.step <= cursor:
                found.setdefault(launch, []).append(position)
        return [tuple(positions) for positions in found.values()]


def _plan_launches(uses: tuple[int, ...], traits: Sequence[Traits], window: Window) -> list[Launch]:
    """All launches of a pass, in order."""
    lanes: dict[int, list[int]] = {}
    for position, use in enumerate(uses):
        lanes.setdefault(traits[use].lane, []).append(position)
    launches: list[Launch] = []
    for lane, positions in lanes.items():
        blocks = [list(block) for _, block in groupby(positions, lambda position: traits[uses[position]].call)]
        borders: set[int] = set()
        if lane == 0 or window.num_blocks == 0:
            steps = _steps_by_size([traits[uses[p]].nbytes for p in positions], window)
            # From the number of uses of the lane to that of all.
            steps = [0 if step == 0 else positions[step - 1] + 1 for step in steps]
        elif len(blocks) == 1:
            of_all = _steps_by_size([traits[use].nbytes for use in uses], window)
            steps = [of_all[position] for position in positions]
        else:
            steps = _steps_by_block(blocks, window.num_blocks)
            borders.update(block[0] for block in blocks)
        launches += _put_together(uses, positions, steps, borders, traits, window.together_nbytes)
    return sorted(launches)


def _steps_by_size(sizes: list[int], window: Window) -> list[int]:
    """For each use, after how many uses it is due."""
    begins = list(accumulate(sizes, initial=0))
    steps = []
    for position, size in enumerate(sizes):
        reach = max(window.nbytes, size) if window.nbytes else 0
        by_bytes = bisect_right(begins, begins[position] - reach)
        steps.append(min(by_bytes, max(position - window.depth + 1, 0)))
    # What is used earlier is launched no later.
    return list(accumulate(reversed(steps), min))[::-1]


def _steps_by_block(blocks: list[list[int]], num_ahead: int) -> list[int]:
    stride = blocks[1][0] - blocks[0][0]
    steps = []
    for number, block in enumerate(blocks):
        for place, position in enumerate(block):
            if number < num_ahead:
                steps.append(max(0, position - stride * num_ahead))
            else:
                before = blocks[number - num_ahead]
                steps.append(before[min(place, len(before) - 1)] + 1)
    return list(accumulate(reversed(steps), min))[::-1]


def _put_together(
    uses: tuple[int, ...],
    positions: list[int],
    steps: list[int],
    borders: set[int],
    traits: Sequence[Traits],
    limit: int,
) -> list[Launch]:
    """The launches of one lane: as many consecutive uses of different weights in one as ``limit`` bytes allow, but none
    across ``borders``, positions at which a block begins."""
    launches: list[Launch] = []
    total = before = 0  # bytes of the launch that is made up, and of those before it
    for position, step in zip(positions, steps, strict=True):
        nbytes, bundle = traits[uses[position]].nbytes, traits[uses[position]].bundle
        total += nbytes
        if launches and position not in borders:
            begun = launches[-1]
            others = [uses[other] for other in begun.positions]
            is_bundled = bundle != -1 and bundle == traits[others[-1]].bundle
            if uses[position] not in others and (is_bundled or total <= min(limit, max(before, _QUICK_NBYTES))):
                launches[-1] = Launch(begun.step, (*begun.positions, position))
                continue
        launches.append(Launch(step, (position,)))
        before += total - nbytes
        total = nbytes
    return launches


class Chain:
    """Order of uses of one kind of pass: what was seen last time, and where this time stands.

    Args:
        window: How far to look ahead.
        traits: Gives what a plan must know of each weight, by index.
    """

    def __init__(self, window: Window, traits: Callable[[], Sequence[Traits]]) -> None:
        self.window = window
        self.plan = Plan()
        self.cursor = 0
        self.num_deviations = 0
        self._traits = traits
        self._observed: list[int] = []

    def begin(self) -> None:
        """Start a pass."""
        self._observed = []
        self.cursor = 0

    def advance(self, use: int) -> bool:
        """Record a use; returns whether the plan expected it now."""
        self._observed.append(use)
        uses, cursor = self.plan.uses, self.cursor
        if cursor < len(uses) and uses[cursor] == use:
            self.cursor = cursor + 1
            return True
        self.num_deviations += 1
        # Uses of the plan in between, if it is found, did not happen this time.
        if use in uses[cursor:]:
            self.cursor = uses.index(use, cursor) + 1
        return False

    def due(self) -> tuple[Launch, ...]:
        """What is to be launched after the last use, if all that was due before has been."""
        return self.plan.launches[self.cursor]

    def expected(self) -> list[tuple[int, ...]]:
        """All that should be in memory or in flight for uses to come, as positions, as launched together."""
        return self.plan.window(self.cursor)

    def num_expected(self, use: int, position: int) -> int:
        """How many of the uses to come, up to ``position``, are ``use``."""
        return self.plan.uses[self.cursor : position + 1].count(use)

    @property
    def is_at_end(self) -> bool:
        """Whether the plan expects no further use in this pass."""
        return bool(self.plan.uses) and self.cursor == len(self.plan.uses)

    def end(self) -> None:
        """The pass is complete: what was seen is the plan of the next one."""
        if tuple(self._observed) != self.plan.uses:
            self.plan = Plan(self._observed, self._traits(), self.window)
        self.begin()

    def cancel(self) -> None:
        """The pass broke off (an exception): keep the plan."""
        self.begin()


def choose_kept(
    forward: Plan, backward: Plan, sizes: Sequence[int], lanes: Sequence[int], budget: int
) -> tuple[int, ...]:
    """Which weights stay gathered from a forward to its backward, in the order in which backward uses them.

    Those that backward uses first, as far as ``budget`` bytes go: at its begin there is the least compute to hide a
    gather, and they were used last in the forward, so that they are kept for the shortest time. Those of the outermost
    call come before all others: its ranks must choose alike, whatever experts each of them has used.

    Args:
        sizes: Bytes of each weight in memory, by index; 0 for those that the choice does not concern.
        lanes: The lane of each weight, by index; 0 is that of the outermost call.
    """
    candidates = set(forward.uses)
    order = [use for use in dict.fromkeys(backward.uses) if use in candidates]
    kept = set()
    for use in sorted(order, key=lambda use: lanes[use]):
        if 0 < sizes[use] <= budget:
            budget -= sizes[use]
            kept.add(use)
    return tuple(use for use in order if use in kept)


def format_plan(name: str, chain: Chain, names: Sequence[str]) -> str:
    """The plan as text: one line a use, with the gathers that are launched when it has begun, ``+`` between those that
    travel together.

    Args:
        name: Heading.
        chain: Whose plan.
        names: Fully qualified parameter names, by index.
    """
    plan, traits = chain.plan, chain._traits()
    lines = [f"{name}: {len(plan.uses)} uses, {chain.window}"]
    for step, launches in enumerate(plan.launches):
        texts = []
        for _, positions in launches:
            members = [plan.uses[position] for position in positions]
            nbytes = sum(traits[member].nbytes for member in members)
            texts.append(f"{' + '.join(names[member] for member in members)} ({format_nbytes(nbytes)})")
        use = f"use {names[plan.uses[step - 1]]}" if step else "begin"
        launched = f"gather {', '.join(texts)}" if texts else ""
        if step and chain.window.depth == 0:
            launched = f"gather {names[plan.uses[step - 1]]}"
        if step or launched:
            # Small weights may all travel together: their names take several lines.
            lines += textwrap.wrap(
                f"  {use:<44} {launched}", _PLAN_WIDTH, subsequent_indent=" " * 54, break_long_words=False
            )
    return "\n".join(lines)


def format_nbytes(nbytes: int) -> str:
    """A number of bytes for people to read."""
    size = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} GiB"
