"""Draws the pictures of docs/guides/meshes.md: which part of a weight each rank holds.

    python docs/draw_parallelism.py

writes ``docs/images/*.svg``. No formula in here knows how a placement cuts. This process plays each rank of a small
mesh in turn, in a process group that communicates nothing. On each, a weight whose elements are their own indices goes
through ``parallelize_module``, ``gtp_shard`` and ``fully_shard``; the indices that are left in the local tensor are
what is drawn. A test redraws the pictures and compares them with the files.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple
from xml.sax.saxutils import escape

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Placement
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtensor_gtp import GTPShard, SchedulePolicy, gtp_shard

IMAGES = Path(__file__).resolve().parent / "images"


@dataclass(frozen=True)
class Picture:
    """One weight of ``nn.Linear`` on one mesh.

    Args:
        name: File name without its ending.
        title: Heading.
        mesh: Sizes of the root mesh's axes; ranks are counted with the last axis fastest.
        shape: Rows and columns of the weight.
        tp: "colwise" or "rowwise" where there is a ``tp`` axis.
        block_size: Rows that gtp keeps together.
    """

    name: str
    title: str
    mesh: dict[str, int]
    shape: tuple[int, int]
    tp: str = ""
    block_size: int = 1


PICTURES = (
    Picture("gtp", "gtp alone", {"gtp": 4}, (8, 5)),
    Picture("replicate_gtp", "copies of the shards: replicate x gtp", {"replicate": 2, "gtp": 2}, (8, 5)),
    Picture("uneven", "10 rows do not divide by 4", {"gtp": 4}, (10, 5)),
    Picture("block_size", "5 heads of 3 rows, each kept whole", {"gtp": 4}, (15, 5), block_size=3),
    Picture("gtp_tp_colwise", "gtp x tp, column-wise: both cut rows", {"gtp": 2, "tp": 2}, (8, 6), tp="colwise"),
    Picture("gtp_tp_rowwise", "gtp x tp, row-wise: tp cuts columns", {"gtp": 2, "tp": 2}, (8, 6), tp="rowwise"),
    Picture(
        "dp_gtp_tp",
        "fully_shard outside of gtp x tp: three cuts of the rows",
        {"dp": 2, "gtp": 2, "tp": 2},
        (16, 5),
        tp="colwise",
    ),
)


class Held(NamedTuple):
    """What one rank holds: the rows and columns of its part, and where it stands on each axis."""

    coordinate: dict[str, int]
    rows: tuple[int, ...]
    columns: tuple[int, ...]


class Weight(NamedTuple):
    """What all ranks hold.

    ``cuts`` are the axes that cut the weight with their placements, in the order of the calls that made them.
    """

    shape: tuple[int, int]
    cuts: dict[str, str]
    ranks: list[Held]


# --- the real thing ---------------------------------------------------------------------------------------------------


def weight_of(picture: Picture) -> Weight:
    """Play every rank of ``picture`` and look at what is left in its local tensor."""
    ranks: list[Held] = []
    cuts: dict[str, str] = {}
    world_size = torch.Size(picture.mesh.values()).numel()
    for rank in range(world_size):
        dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
        try:
            mesh = init_device_mesh("cpu", tuple(picture.mesh.values()), mesh_dim_names=tuple(picture.mesh))
            weight = shard(picture, mesh)
            local = weight.to_local().long()
            indices = [int(index) for index in local.flatten()]
            rows = tuple(sorted({index // picture.shape[1] for index in indices}))
            columns = tuple(sorted({index % picture.shape[1] for index in indices}))
            assert len(rows) * len(columns) == len(indices), "not a product of rows and columns"
            coordinate = dict(zip(picture.mesh, mesh.get_coordinate() or [], strict=True))
            ranks.append(Held(coordinate, rows, columns))
            placements = dict(zip(weight.device_mesh.mesh_dim_names or (), weight.placements, strict=True))
            cuts = {axis: spell(axis, placements[axis]) for axis in ("tp", "gtp", "dp") if axis in placements}
        finally:
            dist.destroy_process_group()
    return Weight(picture.shape, cuts, ranks)


def shard(picture: Picture, mesh: DeviceMesh) -> DTensor:
    """The calls, in their order, on a weight of which each element is its own index."""
    rows, columns = picture.shape
    linear = nn.Linear(columns, rows, bias=False)
    model = nn.Sequential(linear)
    with torch.no_grad():
        linear.weight.copy_(torch.arange(rows * columns).view(rows, columns))
    if picture.tp:
        style = ColwiseParallel() if picture.tp == "colwise" else RowwiseParallel()
        parallelize_module(model, mesh["tp"], {"0": style}, src_data_rank=None)  # what rank 0 has is here as well
    weights = mesh["replicate", "gtp"] if "replicate" in picture.mesh else mesh["gtp"]
    gtp_shard(
        model,
        weights,
        shard_placement_fn=lambda param: GTPShard(0, block_size=picture.block_size),
        schedule=SchedulePolicy(min_shard_numel=0),
    )
    if "dp" in picture.mesh:
        fully_shard(model, mesh=mesh["dp"])
    weight = linear.weight
    assert isinstance(weight, DTensor)
    return weight


def spell(axis: str, placement: Placement) -> str:
    """A placement as one writes it, with the arguments that are not left at their defaults."""
    arguments = [str(getattr(placement, "dim", ""))]
    for name in ("split_factor", "block_size"):
        value = getattr(placement, name, 1)
        arguments += [f"{name}={value}"] if value > 1 else []
    # Newer torch reports an equal placement of its own (2.15: Shard) for ours.
    kind = "GTPShard" if axis == "gtp" else type(placement).__name__
    return f"{kind}({', '.join(arguments)})"


# --- drawing ----------------------------------------------------------------------------------------------------------

CELL_W, CELL_H, LINE_H = 20, 16, 16
MARGIN, GAP = 16, 22
NUMBERS = 20  # for row numbers, left of a grid
CHAR_W = 0.62  # of the font size: an upper estimate of what a letter takes on average
TITLE, LABEL, SMALL = 15, 12, 11
BACKGROUND, FRAME, LINE, TEXT, FAINT = "#ffffff", "#57606a", "#d0d7de", "#1f2328", "#f6f8fa"
TINTS = {  # by coordinate on the axis
    "tp": ("#dbe9fd", "#a9caf8"),
    "gtp": ("#fdebd3", "#fad2a0", "#f5b974", "#efa04d"),
    "dp": ("#dff3e0", "#a8d8ab"),
}
PARTS = ("#9ecbff", "#ffc78a", "#a6dba8", "#e0b3f0", "#ffb3ba", "#b8dde0", "#e6d98a", "#c3c9e8")  # by who holds it


@dataclass
class Canvas:
    """An SVG that grows with what is put on it; all lengths are whole pixels."""

    width: int = 0
    height: int = 0
    elements: list[str] = field(default_factory=list)

    def rect(self, x: int, y: int, width: int, height: int, fill: str, stroke: str = "") -> None:
        line = f' stroke="{stroke}" stroke-width="2"' if stroke else ""
        self.elements.append(f'<rect x="{x}" y="{y}" width="{width}" height="{height}" fill="{fill}"{line}/>')
        self._grow(x + width, y + height)

    def path(self, lines: list[str], stroke: str) -> None:
        self.elements.append(f'<path d="{"".join(lines)}" stroke="{stroke}" fill="none"/>')

    def text(self, x: int, y: int, text: str, size: int = LABEL, anchor: str = "start", weight: str = "normal") -> None:
        """``y`` is the base line."""
        self.elements.append(
            f'<text x="{x}" y="{y}" font-size="{size}" text-anchor="{anchor}" font-weight="{weight}">'
            f"{escape(text)}</text>"
        )
        behind = {"start": text_width(text, size), "middle": text_width(text, size) // 2, "end": 0}[anchor]
        self._grow(x + behind, y + size // 3)

    def _grow(self, x: int, y: int) -> None:
        self.width, self.height = max(self.width, x), max(self.height, y)

    def svg(self, title: str, description: str) -> str:
        width, height = self.width + MARGIN, self.height + MARGIN
        return "\n".join(
            [
                f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width}" height="{height}" '
                f'viewBox="0 0 {width} {height}" font-family="Helvetica, Arial, sans-serif" fill="{TEXT}">',
                f"<title>{escape(title)}</title>",
                f"<desc>{escape(description)}</desc>",
                # Not transparent: dark pages would swallow the text.
                f'<rect width="{width}" height="{height}" rx="6" fill="{BACKGROUND}"/>',
                *self.elements,
                "</svg>\n",
            ]
        )


def text_width(text: str, size: int) -> int:
    return round(len(text) * size * CHAR_W)


class Band(NamedTuple):
    """Rows and columns next to each other that belong to the same ``owner``."""

    rows: range
    columns: range
    owner: Any


def bands(shape: tuple[int, int], owners: dict[tuple[int, int], Any]) -> list[Band]:
    """The rectangles of one owner each of which a weight consists; ``owners`` has one for every element."""
    row_runs = runs([tuple(owners[row, column] for column in range(shape[1])) for row in range(shape[0])])
    return [
        Band(rows, columns, owners[rows.start, columns.start])
        for rows in row_runs
        for columns in runs([owners[rows.start, column] for column in range(shape[1])])
    ]


def runs(values: list[Any]) -> Iterable[range]:
    """Longest ranges of equal values."""
    start = 0
    for index in range(1, len(values) + 1):
        if index == len(values) or values[index] != values[start]:
            yield range(start, index)
            start = index


def elements_of(picture: Picture) -> list[tuple[int, int]]:
    return [(row, column) for row in range(picture.shape[0]) for column in range(picture.shape[1])]


def draw_grid(canvas: Canvas, x: int, y: int, picture: Picture) -> None:
    """The lines between elements, darker between blocks, and the frame."""
    rows, columns = picture.shape
    width, height = columns * CELL_W, rows * CELL_H
    across = {row: f"M{x} {y + row * CELL_H}h{width}" for row in range(1, rows)}
    down = [f"M{x + column * CELL_W} {y}v{height}" for column in range(1, columns)]
    canvas.path([*across.values(), *down], LINE)
    if picture.block_size > 1:
        canvas.path([line for row, line in across.items() if row % picture.block_size == 0], FRAME)
    canvas.rect(x, y, width, height, "none", FRAME)


def draw_band(canvas: Canvas, x: int, y: int, band: Band, fill: str) -> None:
    canvas.rect(
        x + band.columns.start * CELL_W,
        y + band.rows.start * CELL_H,
        len(band.columns) * CELL_W,
        len(band.rows) * CELL_H,
        fill,
    )


def label_band(canvas: Canvas, x: int, y: int, band: Band, fill: str) -> None:
    """The owner, on a patch of the band's colour, so that no line runs through it."""
    label = str(band.owner)
    width = text_width(label, LABEL)
    middle_x = x + (band.columns.start + band.columns.stop) * CELL_W // 2
    middle_y = y + (band.rows.start + band.rows.stop) * CELL_H // 2
    canvas.rect(middle_x - width // 2, middle_y - CELL_H // 2 + 1, width, CELL_H - 2, fill)
    canvas.text(middle_x, middle_y + LABEL // 3, label, anchor="middle")


def draw_whole(
    canvas: Canvas, x: int, y: int, picture: Picture, heading: tuple[str, str], parts: list[tuple[Band, str]]
) -> int:
    """The whole weight under two lines, each part in its colour and with its owner on it. Returns the width."""
    rows, columns = picture.shape
    width = max(columns * CELL_W, *(text_width(line, LABEL) for line in heading))
    left = x + (width - columns * CELL_W) // 2
    draw_heading(canvas, x + width // 2, y, heading)
    for part, fill in parts:
        draw_band(canvas, left, y, part, fill)
    draw_grid(canvas, left, y, picture)
    for part, fill in parts:
        label_band(canvas, left, y, part, fill)
    for row in range(rows):
        canvas.text(left - 5, y + row * CELL_H + CELL_H // 2 + 4, str(row), SMALL, "end")
    return width


def draw_rank(canvas: Canvas, x: int, y: int, picture: Picture, rank: int, held: Held, fill: str) -> int:
    """What one rank holds, within the outline of the whole. Returns the width."""
    rows, columns = picture.shape
    place = ", ".join(f"{axis} {index}" for axis, index in held.coordinate.items())
    size = f"{len(held.rows)} x {len(held.columns)}"
    what = [f"rows {interval(held.rows)}", f"columns {interval(held.columns)}", size] if held.rows else ["nothing"]
    width = max(columns * CELL_W, *(text_width(line, SMALL) for line in (place, *what)))
    left = x + (width - columns * CELL_W) // 2
    draw_heading(canvas, x + width // 2, y, (f"rank {rank}", place))
    canvas.rect(left, y, columns * CELL_W, rows * CELL_H, FAINT)
    for band in bands(picture.shape, {(r, c): r in held.rows and c in held.columns for r, c in elements_of(picture)}):
        if band.owner:
            draw_band(canvas, left, y, band, fill)
    draw_grid(canvas, left, y, picture)
    for number, line in enumerate(what, 1):
        canvas.text(x + width // 2, y + rows * CELL_H + LINE_H * number, line, SMALL, "middle")
    return width


def draw_heading(canvas: Canvas, x: int, y: int, lines: tuple[str, str]) -> None:
    """Two lines above ``y``, centered at ``x``."""
    canvas.text(x, y - 24, lines[0], LABEL, "middle", "bold")
    canvas.text(x, y - 8, lines[1], SMALL, "middle")


def interval(indices: tuple[int, ...]) -> str:
    """``2:4``: contiguous, as every shard of ours is."""
    assert indices == tuple(range(indices[0], indices[-1] + 1)), indices
    return f"{indices[0]}:{indices[-1] + 1}"


def draw(picture: Picture, weight: Weight) -> str:
    """The picture as SVG: the cuts one after the other, who holds what, and below it each rank."""
    elements = elements_of(picture)
    holders = {at: [r for r, h in enumerate(weight.ranks) if at[0] in h.rows and at[1] in h.columns] for at in elements}
    canvas = Canvas()
    canvas.text(MARGIN, MARGIN + TITLE, picture.title, TITLE, weight="bold")
    x, y = MARGIN + NUMBERS, MARGIN + TITLE + 56
    for number, (axis, placement) in enumerate(weight.cuts.items(), 1):
        parts = bands(picture.shape, {at: weight.ranks[holders[at][0]].coordinate[axis] for at in elements})
        heading = (f"{number}. {axis} cuts" if len(weight.cuts) > 1 else f"{axis} cuts", placement)
        named = [(part._replace(owner=f"{axis} {part.owner}"), TINTS[axis][part.owner]) for part in parts]
        x += draw_whole(canvas, x, y, picture, heading, named) + GAP + NUMBERS
    parts = bands(picture.shape, {at: tuple(holders[at]) for at in elements})
    fills = dict(zip(sorted({part.owner for part in parts}), PARTS, strict=False))
    named = [(part._replace(owner=", ".join(map(str, part.owner))), fills[part.owner]) for part in parts]
    draw_whole(canvas, x, y, picture, ("held by rank", f"{picture.shape[0]} x {picture.shape[1]}"), named)
    fill_of_rank = {rank: fill for ranks, fill in fills.items() for rank in ranks}
    draw_ranks(canvas, y + picture.shape[0] * CELL_H + 64, picture, weight, fill_of_rank)
    return canvas.svg(picture.title, describe(picture, weight))


def draw_ranks(canvas: Canvas, y: int, picture: Picture, weight: Weight, fills: dict[int, str]) -> None:
    """All ranks, four in a line; ``fills`` leaves out those that hold nothing."""
    for first in range(0, len(weight.ranks), 4):
        x = MARGIN
        for rank in range(first, min(first + 4, len(weight.ranks))):
            x += draw_rank(canvas, x, y, picture, rank, weight.ranks[rank], fills.get(rank, FAINT)) + GAP
        y += picture.shape[0] * CELL_H + 3 * LINE_H + 64


def describe(picture: Picture, weight: Weight) -> str:
    """The picture in words, for those who do not see it."""
    mesh = ", ".join(f"{axis}={size}" for axis, size in picture.mesh.items())
    ranks = [
        f"rank {rank} holds rows {interval(held.rows)} and columns {interval(held.columns)}"
        if held.rows
        else f"rank {rank} holds nothing"
        for rank, held in enumerate(weight.ranks)
    ]
    return f"A weight of {picture.shape[0]} rows and {picture.shape[1]} columns on mesh ({mesh}): {'; '.join(ranks)}."


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for picture in PICTURES:
        path = IMAGES / f"{picture.name}.svg"
        path.write_text(draw(picture, weight_of(picture)))
        print(path)
