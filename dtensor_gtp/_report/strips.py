"""Which part of a parameter each rank holds, as a strip: the cut dim runs from the left to the right.

A second cut dim runs from the top to the bottom. Parts are computed as placements compute them, for all ranks, without
communication.
"""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from itertools import product
from typing import NamedTuple

from ..placement import chunk_size_and_offset
from .facts import Cut, ReportRow

_WIDTH, _HEIGHT = 360, 20  # of a strip, in pixels
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
    num_parts = 1
    for cut in cutting:
        num_parts *= cut.num_ranks
    if not cutting or not 1 < num_parts <= _MOST_PARTS or 0 in row.shape:
        return ""
    dims = list(dict.fromkeys(cut.dim for cut in reversed(cutting) if cut.dim is not None))
    across, down = dims[0], dims[1] if len(dims) > 1 else None
    num_lines = 1
    for cut in cutting:
        num_lines *= cut.num_ranks if cut.dim == down else 1
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
    return f"{cutting}; {copies}" if copies and cutting else cutting or copies
