"""The plan of gathers, as plain data.

A *use* is one consumption of a weight and is named by the weight's index. A chain records the uses of one pass in the
order in which they happen, and takes them as the plan of the next pass. The order is re-checked at every use. A pass
that deviates is never wrong, only slower: a cursor moves to where the plan meets reality again; a use that the plan
does not have is gathered on demand and moves nothing.

There is one chain for each kind of pass: the forward of each outermost module, with and without gradients, and the
backward. Recomputation in backward (activation checkpointing) is part of the backward chain, in the order in which the
backward really interleaves it.

[Note: what is gathered when]
The uses of a plan are divided into *lanes*, one for each mesh, in which gathers are launched in order of use. Ranks of
a mesh use its weights alike, and those of the outermost call, but perhaps other experts. So what is launched, dropped
or kept of a lane follows from uses of that lane and of the outermost one alone: each has a cursor of its own.

In the lane of the outermost call a use is gathered ahead if it is one of the next ``depth`` uses, or if the uses before
it weigh less than ``nbytes``, or than itself: compute takes time in proportion to the bytes of the weights that it
uses, and so do gathers, so a window in bytes is a window in time, into which small weights do not count as much as big
ones, and a very large one (a head) is begun as many bytes ahead as it takes to hide it.

Other lanes (experts on a mesh of their own) look whole blocks ahead, a block being the consecutive uses of one
``gtp_shard`` call: a use is gathered when the use at its place in the block before happens. Where there is no block
before, it is gathered as many uses ahead as blocks are apart; with a single block in the pass, as in the first lane,
but counting the uses of both.

Consecutive uses of a lane that together weigh at most ``together_nbytes`` are one launch, begun when the first of them
is due. At the begin of a pass nothing hides a gather, so the first launches are no larger than what was launched before
them, or than what is gathered in less time than a collective takes to start.

No torch in here.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple

from .._comm.debug import format_nbytes

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

    ``lanes`` are the positions of each lane; a launch is begun by a use of its own lane or of the first.

    Args:
        uses: Indices of weights.
        traits: Of each weight, by index.
        window: How far to look ahead.
    """

    def __init__(self, uses: Sequence[int] = (), traits: Sequence[Traits] = (), window: Window = Window(0)) -> None:
        self.uses = tuple(uses)
        self.lanes: dict[int, list[int]] = {}
        self._places: list[tuple[int, int]] = []  # of each position: its lane, and which of it
        for position, use in enumerate(self.uses):
            own = self.lanes.setdefault(traits[use].lane, [])
            self._places.append((traits[use].lane, len(own)))
            own.append(position)
        self.uses_of = {lane: tuple(self.uses[p] for p in positions) for lane, positions in self.lanes.items()}
        # By step; one more than there are uses.
        self.launches: list[tuple[Launch, ...]] = [()] * (len(self.uses) + 1)
        self._launch_of: dict[int, Launch] = {}
        launches = _plan_launches(self.uses, self.lanes, traits, window) if window.depth else []
        for launch in launches:
            self.launches[launch.step] += (launch,)
            self._launch_of.update(dict.fromkeys(launch.positions, launch))

    def place(self, position: int) -> tuple[int, int]:
        """The lane of a position, and how many of the lane are before it."""
        return self._places[position]

    def first(self, lane: int) -> int | None:
        """The first use of the lane, if none of the outermost lane is before it."""
        positions = [self.lanes[one][0] for one in {0, lane} if one in self.lanes]
        return self._if_of(lane, min(positions, default=None))

    def last(self, lane: int) -> int | None:
        """The last use of the lane, if none of the outermost lane is behind it."""
        positions = [self.lanes[one][-1] for one in {0, lane} if one in self.lanes]
        return self._if_of(lane, max(positions, default=None))

    def _if_of(self, lane: int, position: int | None) -> int | None:
        return self.uses[position] if position is not None and self._places[position][0] == lane else None

    def cursors(self, step: int) -> dict[int, int]:
        """How many uses of each lane are among the first ``step``."""
        return {lane: bisect_left(positions, step) for lane, positions in self.lanes.items()}

    def window(self, cursors: Mapping[int, int], lanes: Container[int] | None = None) -> list[tuple[int, ...]]:
        """What has been launched for uses to come, as positions; as launched together.

        Args:
            cursors: How many uses of each lane there were.
            lanes: Which ones; None for all.
        """
        found: dict[Launch, list[int]] = {}
        for lane, positions in self.lanes.items():
            if lanes is not None and lane not in lanes:
                continue
            step = max(self._step(0, cursors), self._step(lane, cursors))
            for position in positions[self.num_past(lane, cursors) :]:
                launch = self._launch_of.get(position)
                if launch is None or launch.step > step:
                    break
                found.setdefault(launch, []).append(position)
        return [tuple(positions) for _, positions in sorted(found.items())]

    def num_past(self, lane: int, cursors: Mapping[int, int]) -> int:
        """How many uses of a lane are past, or were left out: the outermost lane is beyond them."""
        return max(cursors.get(lane, 0), bisect_left(self.lanes[lane], self._step(0, cursors)))

    def _step(self, lane: int, cursors: Mapping[int, int]) -> int:
        """How far the plan is where a lane stands."""
        cursor = cursors.get(lane, 0)
        return self.lanes[lane][cursor - 1] + 1 if cursor else 0


def _plan_launches(
    uses: tuple[int, ...], lanes: Mapping[int, list[int]], traits: Sequence[Traits], window: Window
) -> list[Launch]:
    """All launches of a pass, in order."""
    launches: list[Launch] = []
    for lane, positions in lanes.items():
        # What the ranks of the lane's mesh do alike, and which of that are its own.
        alike = positions if lane == 0 else sorted([*lanes.get(0, ()), *positions])
        own = [bisect_left(alike, position) for position in positions]
        blocks = [list(block) for _, block in groupby(own, lambda number: traits[uses[alike[number]]].call)]  # noqa: B023
        borders: set[int] = set()
        if lane == 0 or window.num_blocks == 0:
            steps = _steps_by_size([traits[uses[position]].nbytes for position in positions], window)
            # From the number of uses of the lane to that of those alike.
            steps = [0 if step == 0 else own[step - 1] + 1 for step in steps]
        elif len(blocks) == 1:
            of_all = _steps_by_size([traits[uses[position]].nbytes for position in alike], window)
            steps = [of_all[number] for number in own]
        else:
            steps = _steps_by_block(blocks, window.num_blocks)
            borders.update(alike[block[0]] for block in blocks)
        steps = [0 if step == 0 else alike[step - 1] + 1 for step in steps]
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


def choose_kept(
    forward: Plan, backward: Plan, sizes: Sequence[int], lanes: Sequence[int], budget: int
) -> tuple[int, ...]:
    """Which weights stay gathered from a forward to its backward, in the order in which backward uses them.

    Those that backward uses first, as far as ``budget`` bytes go: at its begin there is the least compute to hide a
    gather, and they were used last in the forward, so that they are kept for the shortest time. The ranks of a mesh
    must choose alike, whatever each of them has used of others: so those of the outermost call come before all others,
    and other meshes share in equal parts what these leave.

    Args:
        sizes: Bytes of each weight in memory, by index; 0 for those that the choice does not concern.
        lanes: The lane of each weight, by index; 0 is that of the outermost call.
    """
    candidates = set(forward.uses)
    order = [use for use in dict.fromkeys(backward.uses) if use in candidates]
    kept = set()

    def choose(lane: int, left: int) -> int:
        for use in order:
            if lanes[use] == lane and 0 < sizes[use] <= left:
                left -= sizes[use]
                kept.add(use)
        return left

    left = choose(0, budget)
    others = {lane for lane in lanes if lane != 0}
    for lane in others:
        choose(lane, left // len(others))
    return tuple(use for use in order if use in kept)
