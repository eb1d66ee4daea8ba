"""Pictures of a report (SVG): the parts of a parameter as a strip, the plan of a pass as a timeline.

In a strip the cut dim runs from the left to the right, a second cut dim from the top to the bottom. Parts are computed
as placements compute them, for all ranks, without communication.

In a timeline each use has a column. A bar is one launch of gathers: it begins where it is launched and ends after its
last use. Equal blocks are folded: two of them are drawn, and a gap stands for the others.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape
from itertools import groupby, product
from typing import NamedTuple

from .._comm.debug import format_nbytes
from ..placement import chunk_size_and_offset
from .facts import Cut, LaunchReport, PlanReport, ReportRow
from .fold import Element, Repeat, fold
from .text import plan_lines

# of a strip, in pixels
_WIDTH = 360
_HEIGHT = 20
_MOST_LINES = 8  # parts from the top to the bottom that have the full height
_MOST_PARTS = 4096  # more are not drawn
_LETTER = 7.2  # pixels that a letter of a label takes
_NUM_TINTS = 8


class Part(NamedTuple):
    """What the ranks at some ``coordinates`` of the axes that cut hold: for each cut dim its begin and end."""

    coordinates: tuple[int, ...]
    ranges: dict[int, tuple[int, int]]
    is_own: bool  # of this rank


def parts_of(shape: tuple[int, ...], cuts: tuple[Cut, ...]) -> Iterator[Part]:
    """The parts of a parameter, in the order of the ranks; axes that cut nothing hold copies and are left out."""
    cutting = [cut for cut in cuts if cut.dim is not None]
    for coordinates in product(*(range(cut.num_ranks) for cut in cutting)):
        ranges: dict[int, tuple[int, int]] = {}
        for cut, index in zip(cutting, coordinates, strict=True):
            assert cut.dim is not None
            begin, end = ranges.get(cut.dim, (0, shape[cut.dim]))
            size, offset = chunk_size_and_offset(end - begin, cut.num_ranks, index, cut.block_size)
            ranges[cut.dim] = begin + offset, begin + offset + size
        yield Part(coordinates, ranges, coordinates == tuple(cut.coordinate for cut in cutting))


def strip(row: ReportRow) -> str:
    """The SVG of a parameter; empty if no axis cuts it."""
    cutting = [cut for cut in row.cuts if cut.dim is not None]
    if not 1 < math.prod(cut.num_ranks for cut in cutting) <= _MOST_PARTS or 0 in row.shape:
        return ""
    dims = list(dict.fromkeys(cut.dim for cut in reversed(cutting) if cut.dim is not None))
    across = dims[0]
    down = None
    if len(dims) > 1:
        down = dims[1]
    num_lines = math.prod(cut.num_ranks for cut in cutting if cut.dim == down)
    height = _HEIGHT * min(num_lines, _MOST_LINES)
    drawn = []
    for number, part in enumerate(parts_of(row.shape, row.cuts)):
        x, width = _scaled(part.ranges[across], row.shape[across], _WIDTH)
        y, tall = (0.0, float(height)) if down is None else _scaled(part.ranges[down], row.shape[down], height)
        if width and tall:
            drawn.append((part.is_own, _part(number, part, cutting, (x, y, width, tall))))
    drawn.sort(key=lambda pair: pair[0])  # the frame of this rank's part lies above those of its neighbours
    box = f'viewBox="-1 -1 {_WIDTH + 2} {height + 2}" width="{_WIDTH + 2}" height="{height + 2}"'
    label = escape(f"{row.name}: {row.placements}")
    return f'<svg {box} role="img" aria-label="{label}">{"".join(text for _, text in drawn)}</svg>'


def _part(number: int, part: Part, cutting: list[Cut], box: tuple[float, float, float, float]) -> str:
    x, y, width, height = box
    where = ", ".join(f"{cut.axis} {index}" for cut, index in zip(cutting, part.coordinates, strict=True))
    held = ", ".join(f"dim {dim}: {begin} to {end - 1}" for dim, (begin, end) in sorted(part.ranges.items()))
    title = f"<title>{escape(where)}{' (this rank)' if part.is_own else ''}: {held}</title>"
    rect = f'<rect x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    drawn = f'<g class="part t{number % _NUM_TINTS}{" own" if part.is_own else ""}">{title}{rect}/>'
    label = ",".join(map(str, part.coordinates))
    if len(label) * _LETTER + 2 <= width and height >= 14:
        drawn += f'<text x="{x + width / 2:.1f}" y="{y + height / 2 + 4:.1f}">{label}</text>'
    return f"{drawn}</g>"


def _scaled(part: tuple[int, int], size: int, length: int) -> tuple[float, float]:
    """Begin and length in pixels."""
    return part[0] / size * length, (part[1] - part[0]) / size * length


def legend(row: ReportRow) -> str:
    """What the numbers in a strip are: "gtp", or "tp,gtp"; and which axes hold copies."""
    cutting = ",".join(cut.axis for cut in row.cuts if cut.dim is not None)
    copies = " x ".join(f"{cut.num_ranks} copies along {cut.axis}" for cut in row.cuts if cut.dim is None)
    if copies and cutting:
        return f"{cutting}; {copies}"
    return cutting or copies


_COLUMN = 24  # of a use in a timeline, in pixels
_GAP = 76  # and of blocks that are not drawn
_LEFT = 12
# heights of the chart of bytes and of a bar, width of a letter
_CHART = 56
_LANE = 20
_TEXT = 6.6
_FEWEST_LEFT_OUT = 3  # uses; a gap is no narrower
_DRAWN_BLOCKS = 2


class _Bar(NamedTuple):
    begin: float
    end: float
    text: str
    title: str
    uses: tuple[float, ...]  # where its weights are used


def timeline(plan: PlanReport, is_verbose: bool) -> str:
    """The SVG of a plan."""
    columns = _Columns(plan, is_verbose)
    lanes = _in_lanes(list(_bars(plan, columns)))
    chart = ""
    if plan.memory is not None:
        chart = _chart(plan, columns)
    top = 4
    if chart:
        top = 18 + _CHART
    drawn = [chart]
    for number, lane in enumerate(lanes):
        drawn += [_bar(bar, top + 8 + number * _LANE, columns) for bar in lane]
    bottom = top + 14 + len(lanes) * _LANE
    names, num_letters = _names(plan, columns, bottom)
    height = bottom + num_letters * _TEXT + 34
    drawn += [names, *_gaps(columns, top, bottom)]
    label = escape(f"{plan.title}, {len(plan.uses)} uses")
    size = f'viewBox="0 0 {columns.width:.0f} {height:.0f}" width="{columns.width:.0f}" height="{height:.0f}"'
    return f'<svg class="timeline" {size} role="img" aria-label="{label}">{"".join(drawn)}</svg>'


class _Columns:
    """Where each use is drawn, from the left to the right, and where blocks are left out."""

    def __init__(self, plan: PlanReport, is_verbose: bool) -> None:
        lines = tuple(plan_lines(plan))
        drawn = list(_drawn(lines if is_verbose else fold(lines), False))
        drawn = drawn[len(drawn) - len(plan.uses) :]  # without the line before the first use
        self.begins: list[float] = []
        self.is_drawn = drawn
        self.gaps: list[tuple[float, int]] = []  # where, and how many uses are left out
        x = float(_LEFT + _COLUMN)
        for is_drawn, uses in groupby(range(len(drawn)), drawn.__getitem__):
            members = list(uses)
            self.begins += [x + k * _COLUMN * is_drawn for k in range(len(members))]
            if not is_drawn:
                self.gaps.append((x, len(members)))
            x += len(members) * _COLUMN if is_drawn else _GAP
        self.width = max(x + _LEFT, 360.0)  # room for what the chart says

    def end(self, use: int) -> float:
        return self.begins[use] + (_COLUMN if self.is_drawn[use] else _GAP / 2)

    def after(self, step: int) -> float:
        """Where the first ``step`` uses have begun."""
        if step:
            return self.begins[step - 1] + 5
        return float(_LEFT)


def _drawn(elements: Sequence[Element], is_left_out: bool) -> Iterator[bool]:
    """Whether each line is drawn."""
    for element in elements:
        if isinstance(element, Repeat):
            num_left_out = (element.times - _DRAWN_BLOCKS) * sum(1 for _ in _drawn(element.body, False))
            for block in range(element.times):
                is_rest = block >= _DRAWN_BLOCKS and num_left_out >= _FEWEST_LEFT_OUT
                yield from _drawn(element.body, is_left_out or is_rest)
        else:
            yield not is_left_out


def _bars(plan: PlanReport, columns: _Columns) -> Iterator[_Bar]:
    launched: set[int] = set()
    for step, launches in enumerate(plan.launches):
        for launch in launches:
            launched.update(launch.positions)
            drawn = [position for position in launch.positions if columns.is_drawn[position]]
            if not drawn and (step == 0 or not columns.is_drawn[step - 1]):
                continue
            yield _Bar(
                columns.after(step),
                max(columns.end(position) for position in launch.positions),
                " + ".join(map(_leaf, (plan.uses[position] for position in launch.positions))),
                _title(plan, launch),
                tuple(columns.begins[position] for position in drawn),
            )
    for position in range(len(plan.uses)):  # gathered when it is used, or kept from an earlier pass
        if position not in launched and columns.is_drawn[position]:
            begin = columns.begins[position]
            name = plan.uses[position]
            title = f"{name}: {'gathered when it is used' if plan.is_on_demand else 'in memory already'}"
            yield _Bar(begin, columns.end(position), "", title, (begin,))


def _title(plan: PlanReport, launch: LaunchReport) -> str:
    return f"{' + '.join(plan.uses[position] for position in launch.positions)} ({format_nbytes(launch.nbytes)})"


def _in_lanes(bars: list[_Bar]) -> list[list[_Bar]]:
    """Bars that lie at the same time lie one below the other."""
    lanes: list[list[_Bar]] = []
    for bar in sorted(bars, key=lambda bar: (bar.begin, -bar.end)):
        lane = next((lane for lane in lanes if lane[-1].end <= bar.begin), None)
        if lane is None:
            lanes.append([bar])
        else:
            lane.append(bar)
    return lanes


def _bar(bar: _Bar, y: float, columns: _Columns) -> str:
    width = bar.end - bar.begin
    drawn = f'<rect class="ahead" x="{bar.begin:.1f}" y="{y}" width="{width:.1f}" height="{_LANE - 3}" rx="3"/>'
    for begin in bar.uses:
        drawn += f'<rect class="used" x="{begin + 1:.1f}" y="{y}" width="{_COLUMN - 2}" height="{_LANE - 3}" rx="3"/>'
    begin = bar.begin
    end = min((bar.end, *bar.uses))
    for gap, _ in columns.gaps:  # it covers what is behind it
        if gap <= begin < gap + _GAP:
            begin = gap + _GAP - 4
        elif begin < gap < end:
            end = gap
    if bar.text and len(bar.text) * _TEXT <= end - begin - 8:
        drawn += f'<text x="{begin + 5:.1f}" y="{y + 12.5}">{escape(bar.text)}</text>'
    return f"<g><title>{escape(bar.title)}</title>{drawn}</g>"


def _chart(plan: PlanReport, columns: _Columns) -> str:
    """The bytes of gathered weights during each use."""
    assert plan.memory is not None
    nbytes = plan.memory.gathered_nbytes
    peak = max(nbytes)
    drawn = ""
    base = 14 + _CHART
    for use, amount in enumerate(nbytes):
        if columns.is_drawn[use]:
            height = 0.0
            if peak:
                height = amount / peak * _CHART
            title = f"<title>{escape(plan.uses[use])}: {format_nbytes(amount)} of gathered weights in memory</title>"
            drawn += (
                f'<g class="bytes">{title}<rect x="{columns.begins[use] + 1:.1f}" y="{base - height:.1f}" '
                f'width="{_COLUMN - 2}" height="{height:.1f}"/></g>'
            )
    line = f'<line x1="{_LEFT}" x2="{columns.width - _LEFT:.0f}" y1="{base}" y2="{base}"/>'
    return f'<text x="{_LEFT}" y="10">gathered weights in memory, at most {format_nbytes(peak)}</text>{line}{drawn}'


def _names(plan: PlanReport, columns: _Columns, y: float) -> tuple[str, int]:
    """The names of the uses, below their columns, and those of their blocks; and the length of the longest."""
    drawn = [use for use in range(len(plan.uses)) if columns.is_drawn[use]]
    leaves = [_leaf(plan.uses[use]) for use in drawn]
    num_letters = max(map(len, leaves), default=0)
    text = ""
    for use, leaf in zip(drawn, leaves, strict=True):
        place = f"translate({columns.begins[use] + _COLUMN / 2 + 4:.1f} {y}) rotate(-90)"
        text += f'<text transform="{place}" text-anchor="end">{escape(leaf)}</text>'
    line = y + num_letters * _TEXT + 8
    for block, uses in groupby(drawn, lambda use: _block(plan.uses[use])):
        for members in _neighbours(list(uses)):
            begin = columns.begins[members[0]] + 3
            end = columns.end(members[-1]) - 3
            if not block or end - begin < len(block) * _TEXT:
                continue
            text += f'<line x1="{begin:.1f}" x2="{end:.1f}" y1="{line:.1f}" y2="{line:.1f}"/>'
            text += f'<text x="{(begin + end) / 2:.1f}" y="{line + 15:.1f}" text-anchor="middle">{escape(block)}</text>'
    return text, num_letters


def _neighbours(uses: Sequence[int]) -> Iterator[list[int]]:
    for _, pairs in groupby(enumerate(uses), lambda pair: pair[1] - pair[0]):
        yield [use for _, use in pairs]


def _gaps(columns: _Columns, top: float, bottom: float) -> Iterator[str]:
    for x, num in columns.gaps:
        yield f'<rect class="gap" x="{x + 4:.1f}" y="{top}" width="{_GAP - 8}" height="{bottom - top:.1f}"/>'
        middle = x + _GAP / 2
        y = (top + bottom) / 2
        yield f'<text x="{middle:.1f}" y="{y:.1f}" text-anchor="middle">{num} uses</text>'
        yield f'<text x="{middle:.1f}" y="{y + 14:.1f}" text-anchor="middle">alike</text>'


def _leaf(name: str) -> str:
    """The name of a weight within its block: "attention.wq" of "layers.3.attention.wq.weight" is "wq"."""
    name, _, note = name.partition(" ")
    parts = name.removesuffix(".weight").split(".")
    return f"{parts[-1]}{'*' * bool(note)}"


def _block(name: str) -> str:
    """The name up to its first number; empty without one."""
    parts = name.split(" ")[0].split(".")
    return next((".".join(parts[: k + 1]) for k, part in enumerate(parts) if part.isdecimal()), "")
