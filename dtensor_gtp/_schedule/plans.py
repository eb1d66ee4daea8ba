"""The plan of a pass, as plain data: what is gathered when, and what stays between two uses. No
torch in here.

A *use* is one consumption of a weight, named by the weight's index. The uses of a pass, in order, are the plan of the
next pass of the same kind. A pass that deviates from its plan is slower, but right.

[Note: what is gathered when]
The uses of a plan are divided into *lanes*, one for each mesh. Lane 0 is the mesh of the outermost
call. The ranks of a mesh use its weights and those of lane 0 in the same order, but may use
different weights of other meshes (experts). So launches, drops and keeps in a lane may depend only
on uses of that lane and of lane 0. Each lane has a cursor.

In lane 0 a use is gathered ahead if it is one of the next ``depth`` uses, or if the weights used
before it are smaller than ``nbytes`` or than its own weight. Compute and gathers both take time in
proportion to bytes. So a large weight (a head) is gathered early enough, and small weights do not
fill the window. Other lanes look ahead by blocks, the consecutive uses of one ``gtp_shard`` call. A
use is gathered when the use at the same place in the previous block happens; in the first block, as
many uses ahead as blocks are apart. If there is only one block, its uses are planned by the rule of
lane 0, which then counts the uses of both lanes.

A weight *stays* between two of its uses, if it and the others that the lane uses meanwhile have at
most ``nbytes``: in a block that runs again at once (shared layers), or that backward has recomputed
(activation checkpointing). So those of a lane that stay have at most ``nbytes``, too. Of what the
first use makes a copy, nothing stays: the copy may be larger, and belongs to the stream of that use.

Consecutive uses of a lane with at most ``together_nbytes`` are one launch, when the first is due.
The first gathers of a pass overlap with nothing, so launches start small: at most the bytes of all
launches before, or what is gathered in less time than a collective takes to start. A backward begins
with all activations in memory. So the groups that it gathers ahead, and each launch of several, have at
most half of the bytes that were used before, as for gradients (see ``waiting_gradients``). The next
``depth`` uses are gathered ahead in any case.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Container, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from itertools import accumulate, groupby
from typing import NamedTuple, TypeVar

from .._comm.debug import format_nbytes

T = TypeVar("T")

QUICK_NBYTES = 4 << 20  # a link of 300 GB/s moves it in 14 us; a collective takes 20 us to start


class Traits(NamedTuple):
    """What a plan must know of a weight."""

    nbytes: int  # of the gathered weight
    lane: int = 0  # number of its mesh
    call: int = 0  # number of the ``gtp_shard`` call that manages it
    bundle: int = -1  # weights of one bundle (not -1) are gathered together, however large they are
    may_stay: bool = True  # whether it may stay between two uses
    is_group: bool = False  # whether it is a group of weights


@dataclass(frozen=True)
class Window:
    """How far ahead weights are gathered, see [Note: what is gathered when]."""

    depth: int  # uses ahead at least; 0 gathers nothing ahead
    nbytes: int = 0  # bytes ahead at least
    together_nbytes: int = 0  # bytes up to which gathers are one launch
    num_blocks: int = 1  # blocks ahead in lanes other than 0; 0 plans them as lane 0
    is_backward: bool = False

    def __str__(self) -> str:
        if self.depth == 0:
            return "nothing is gathered ahead"
        text = f"{self.depth} use{'s' * (self.depth > 1)}"
        if self.nbytes:
            text += f" or {format_nbytes(self.nbytes)} are gathered ahead, whichever is more"
        elif self.depth == 1:
            text += " is gathered ahead"
        else:
            text += " are gathered ahead"
        if self.together_nbytes:
            text += f"; one launch carries up to {format_nbytes(self.together_nbytes)}"
        return text


class Launch(NamedTuple):
    """Gathers that are launched together."""

    step: int  # after how many uses of the pass
    positions: tuple[int, ...]  # in the plan, of the uses that the gathers are for


class Plan:
    """The uses of a pass in order, as indices of weights (and of ``traits``), and what is launched when."""

    def __init__(self, uses: Sequence[int] = (), traits: Sequence[Traits] = (), window: Window = Window(0)) -> None:
        self.uses = tuple(uses)
        self.lanes: dict[int, list[int]] = {}  # the positions of each lane
        # By position: its lane, and how many uses of the lane are before it.
        self.places: list[tuple[int, int]] = []
        for position, use in enumerate(self.uses):
            own = self.lanes.setdefault(traits[use].lane, [])
            self.places.append((traits[use].lane, len(own)))
            own.append(position)
        self.uses_of = {
            lane: tuple(self.uses[position] for position in positions) for lane, positions in self.lanes.items()
        }
        self._positions: dict[int, list[int]] = {}  # of each weight
        for position, use in enumerate(self.uses):
            self._positions.setdefault(use, []).append(position)
        # By position of a use: the next use of the same weight, which stays until then.
        self.stays = _plan_stays(self.uses, self.lanes, traits, window.nbytes)
        self.served = frozenset(self.stays.values())  # these uses need no gather
        self.launches: list[tuple[Launch, ...]] = [()] * (len(self.uses) + 1)  # by step
        self._launch_of: dict[int, Launch] = {}  # by position of the use that it is for
        if window.depth:
            for launch in _plan_launches(self.uses, self.lanes, traits, window, self.served):
                self.launches[launch.step] += (launch,)
                self._launch_of.update(dict.fromkeys(launch.positions, launch))

    def first(self, lane: int) -> int | None:
        """The first use of the lane, if none of lane 0 comes before it."""
        begins = [self.lanes[key][0] for key in {0, lane} & self.lanes.keys()]
        return self._use_at(min(begins, default=None), lane)

    def last(self, lane: int) -> int | None:
        """The last use of the lane, if none of lane 0 comes after it."""
        ends = [self.lanes[key][-1] for key in {0, lane} & self.lanes.keys()]
        return self._use_at(max(ends, default=None), lane)

    def _use_at(self, position: int | None, lane: int) -> int | None:
        if position is None or self.places[position][0] != lane:
            return None
        return self.uses[position]

    def window(self, cursors: Mapping[int, int], lanes: Container[int] | None = None) -> list[tuple[int, ...]]:
        """Positions of the uses to come, in these lanes or all, whose gathers have been launched:
        one tuple a launch. ``cursors``: how many uses of each lane there were."""
        found: dict[Launch, list[int]] = {}
        for lane, positions in self.lanes.items():
            if lanes is not None and lane not in lanes:
                continue
            step = max(self._step(0, cursors), self._step(lane, cursors))  # the one that is ahead
            for position in positions[self.num_past(lane, cursors) :]:
                if position in self.served:
                    continue
                launch = self._launch_of.get(position)
                if launch is None or launch.step > step:
                    break  # later uses of the lane are launched no earlier
                found.setdefault(launch, []).append(position)
        return [tuple(positions) for _, positions in sorted(found.items())]

    def next_use(self, use: int, lane: int, cursors: Mapping[int, int]) -> int | None:
        """The position of the next use of a weight that is used several times."""
        positions = self._positions.get(use, ())
        if len(positions) < 2:
            return None
        to_come = self.num_past(lane, cursors)
        if to_come == len(self.lanes[lane]):
            return None
        index = bisect_left(positions, self.lanes[lane][to_come])
        if index == len(positions):
            return None
        return positions[index]

    def num_past(self, lane: int, cursors: Mapping[int, int]) -> int:
        """How many uses of a lane happened, or were left out: lane 0 is already beyond them."""
        return max(cursors.get(lane, 0), bisect_left(self.lanes[lane], self._step(0, cursors)))

    def _step(self, lane: int, cursors: Mapping[int, int]) -> int:
        """The step of the plan that a lane has reached."""
        cursor = cursors.get(lane, 0)
        if cursor == 0:
            return 0
        return self.lanes[lane][cursor - 1] + 1


def _plan_stays(
    uses: tuple[int, ...], lanes: Mapping[int, list[int]], traits: Sequence[Traits], nbytes: int
) -> dict[int, int]:
    """By position of a use: that of the next use of its weight, if it stays in between."""
    stays: dict[int, int] = {}
    for positions in lanes.values():
        last: dict[int, int] = {}  # by weight: which use of the lane was its last one
        for number, position in enumerate(positions):
            use = uses[position]
            before = last.get(use)
            last[use] = number
            if before is None or not traits[use].may_stay:
                continue
            used: set[int] = set()
            total = 0
            for between in reversed(positions[before:number]):
                if total > nbytes:
                    break
                if uses[between] not in used:
                    used.add(uses[between])
                    total += traits[uses[between]].nbytes
            if total <= nbytes:
                stays[positions[before]] = position
    return stays


def _plan_launches(
    uses: tuple[int, ...],
    lanes: Mapping[int, list[int]],
    traits: Sequence[Traits],
    window: Window,
    served: AbstractSet[int],
) -> list[Launch]:
    """All launches of a pass, in order. The uses ``served`` need no gather."""
    launches: list[Launch] = []
    used = [traits[use] for use in uses]
    for lane, positions in lanes.items():
        # Positions that all ranks of the lane's mesh share: steps are counted in these alone.
        alike = positions
        if lane != 0:
            alike = sorted([*lanes.get(0, ()), *positions])
        # After so many uses of ``alike``, this many uses of the pass have happened.
        num_uses = [0, *(position + 1 for position in alike)]
        # Blocks of the lane, as indices of ``alike``.
        blocks = [
            [bisect_left(alike, position) for position in block]
            for _, block in groupby(positions, lambda position: used[position].call)
        ]
        own = [index for block in blocks for index in block]
        borders: set[int] = set()
        if lane == 0 or window.num_blocks == 0:
            steps_of_own = _steps_by_size([used[position] for position in positions], window)
            num_alike = [0, *(index + 1 for index in own)]  # as ``num_uses``: from the lane to ``alike``
            steps = [num_alike[step] for step in steps_of_own]
        elif len(blocks) == 1:  # there is no previous block to start gathers in
            steps_of_alike = _steps_by_size([used[position] for position in alike], window)
            steps = [steps_of_alike[index] for index in own]
        else:
            steps = _steps_by_block(blocks, window.num_blocks)
            # The first position of each block that is gathered.
            gathered = ([alike[index] for index in block if alike[index] not in served] for block in blocks)
            borders.update(block[0] for block in gathered if block)
        due = {
            position: num_uses[step] for position, step in zip(positions, steps, strict=True) if position not in served
        }
        launches += _put_together(uses, traits, due, borders, window)
    return sorted(launches)


def _steps_by_size(used: list[Traits], window: Window) -> list[int]:
    """After how many uses each use is due."""
    begins = list(accumulate((each.nbytes for each in used), initial=0))  # bytes before each use
    steps = []
    for position, traits in enumerate(used):
        reach = 0  # then ``depth`` decides
        if window.nbytes:
            reach = max(window.nbytes, traits.nbytes)
        # Due after the last use that begins at least ``reach`` bytes before this one.
        by_bytes = bisect_right(begins, begins[position] - reach)
        by_depth = max(position - window.depth + 1, 0)
        step = min(by_bytes, by_depth)
        if window.is_backward and traits.is_group:
            # Until what is ahead, this use too, has at most half of the bytes that were used before.
            while step < by_depth and begins[position + 1] - begins[step] > begins[max(step - 1, 0)] // 2:
                step += 1
        steps.append(step)
    # A use is launched no later than those that follow it.
    return list(accumulate(reversed(steps), min))[::-1]


def _steps_by_block(blocks: list[list[int]], num_ahead: int) -> list[int]:
    """After how many uses each use is due, if it looks ``num_ahead`` blocks ahead."""
    stride = blocks[1][0] - blocks[0][0]  # uses from one block to the next
    steps = []
    for number, block in enumerate(blocks):
        for place, position in enumerate(block):
            if number < num_ahead:
                steps.append(max(0, position - stride * num_ahead))  # no block is that far back
            else:
                before = blocks[number - num_ahead]
                steps.append(before[min(place, len(before) - 1)] + 1)  # that block may be shorter
    return list(accumulate(reversed(steps), min))[::-1]


def _put_together(
    uses: tuple[int, ...], traits: Sequence[Traits], due: Mapping[int, int], borders: set[int], window: Window
) -> list[Launch]:
    """The launches of one lane, whose positions are ``due`` at these steps: each takes consecutive
    uses of different weights of up to ``window.together_nbytes``, but does not cross ``borders``, the
    positions at which a block begins."""
    launches: list[Launch] = []
    taken: set[int] = set()  # weights of the launch that is being put together
    total = before = 0  # bytes of it, and of those before it
    own = list(due)
    used = list(accumulate((traits[uses[position]].nbytes for position in own), initial=0))  # bytes before each
    for position, step in due.items():
        use = uses[position]
        nbytes = traits[use].nbytes
        bundle = traits[use].bundle
        total += nbytes
        if launches and position not in borders:
            begun = launches[-1]
            is_bundled = bundle != -1 and bundle == traits[uses[begun.positions[-1]]].bundle
            start = before
            if window.is_backward and traits[use].is_group:
                start = used[bisect_left(own, begun.step - 1)] // 2
            is_small = total <= min(window.together_nbytes, max(start, QUICK_NBYTES))
            if use not in taken and (is_bundled or is_small):
                launches[-1] = Launch(begun.step, (*begun.positions, position))  # due with its first use
                taken.add(use)
                continue
        launches.append(Launch(step, (position,)))
        taken = {use}
        before += total - nbytes
        total = nbytes
    return launches
