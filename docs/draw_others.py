"""Draws the pictures of docs/explanation/gtp_and_others.md: GTP beside ZeRO-3, FSDP2, HSDP and tensor parallelism.

    python docs/draw_others.py

writes ``docs/images/others_*.svg``. This process plays each of four ranks in turn, in a process group that communicates
nothing. Each library shards two blocks of four linear layers, whose elements are their own indices, and runs a training
step and a forward. The indices that are left in a local tensor are a rank's part. At each GEMM of the forward the
script notes which weights are gathered, and what the GEMM multiplies with. A test compares the pictures with the files.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn as nn
from draw_parallelism import FAINT, FRAME, GAP, IMAGES, LABEL, LINE_H, MARGIN, SMALL, TITLE, Canvas, text_width
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_gtp import SchedulePolicy, gtp_shard
from dtensor_gtp._modules.binding import binding_of

RANKS, BLOCKS, LAYERS = 4, 2, 4
SIZE = 64  # rows and columns of each weight
USE = 2  # the weight that multiplies in the first picture
BOX, STEP = 44, 52  # pixels of a weight, and from one to the next
KEPT, GATHERED, USED = "#9ecbff", "#fdebd3", "#efa04d"
DATA = ("#dbe9fd", "#dff3e0", "#fdebd3", "#f0dcf7")  # by batch


class Part(NamedTuple):
    """Rows and columns of a weight."""

    rows: range
    columns: range


class Moment(NamedTuple):
    """One GEMM of the forward: the weights that are gathered then, and what it multiplies with."""

    gathered: tuple[bool, ...]
    used: Part


class Rank(NamedTuple):
    """One rank: its batch, what it holds of each weight of a block between steps, and the GEMMs of a forward."""

    batch: int
    kept: list[Part]
    moments: list[Moment]


class Library(NamedTuple):
    """How a library shards, and how many neighbouring ranks see the same data."""

    name: str
    shard: Callable[[nn.Sequential], None]
    tp: int = 1


# --- the real thing ---------------------------------------------------------------------------------------------------


def by_fsdp(model: nn.Sequential, *shape: int) -> None:
    """Over one axis, or two: HSDP."""
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=("replicate", "shard")[-len(shape) :])
    for block in model:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)


def by_tp(model: nn.Sequential) -> None:
    parallelize_module(model, init_device_mesh("cpu", (RANKS,)), tp_plan(), src_data_rank=None)


def by_gtp(model: nn.Sequential, tp: int = 1) -> None:
    """The window that is chosen for a block of 128 MiB, as small as the blocks here: a block ahead, half of it
    together."""
    mesh = init_device_mesh("cpu", (RANKS // tp, tp), mesh_dim_names=("gtp", "tp"))
    if tp > 1:
        parallelize_module(model, mesh["tp"], tp_plan(), src_data_rank=None)
    block = LAYERS * SIZE * SIZE * 4 // tp
    numbers = (("coalesce_nbytes", block // 2),)
    gtp_shard(model, mesh["gtp"], schedule=SchedulePolicy(prefetch_nbytes=block, min_shard_numel=0, _numbers=numbers))


def tp_plan() -> dict[str, Any]:
    styles = (ColwiseParallel, RowwiseParallel)
    return {f"{block}.{layer}": styles[layer % 2]() for block in range(BLOCKS) for layer in range(LAYERS)}


LIBRARIES = (
    Library("FSDP2 (ZeRO-3)", lambda model: by_fsdp(model, 4)),
    Library("HSDP 2 x 2", lambda model: by_fsdp(model, 2, 2)),
    Library("TP", by_tp, tp=4),
    Library("GTP", by_gtp),
    Library("GTP 2 x TP 2", lambda model: by_gtp(model, tp=2), tp=2),
)


class Watch(TorchDispatchMode):
    """Notes the state of all weights at each GEMM."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        super().__init__()
        self.layers = layers
        self.moments: list[Moment] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.mm.default:
            columns, rows = local(args[1]).shape  # rank 0's part of a weight begins at its first element
            used = Part(range(rows), range(columns))
            self.moments.append(Moment(tuple(map(is_gathered, self.layers)), used))
        return func(*args, **(kwargs or {}))


def is_gathered(layer: nn.Linear) -> bool:
    """Whether this rank has gathered the weight. Reading it would gather it, so GTP's own record is looked at."""
    binding = binding_of(layer)
    if binding is not None:
        return not next(iter(binding.params.values())).for_forward.is_absent  # type: ignore[attr-defined]
    return not isinstance(layer.weight, DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def part_of(weight: torch.Tensor) -> Part:
    """The part that a rank has of a weight of which each element is its own index."""
    indices = local(weight).long()
    rows, columns = (indices // SIZE).unique().tolist(), (indices % SIZE).unique().tolist()
    assert len(rows) * len(columns) == indices.numel(), "not a product of rows and columns"
    return Part(range(rows[0], rows[-1] + 1), range(columns[0], columns[-1] + 1))


def play(library: Library, rank: int) -> Rank:
    """Shard, train a step by which the order of uses is known, and watch the forward of the next."""
    dist.init_process_group("fake", rank=rank, world_size=RANKS, store=FakeStore())
    try:
        blocks = [[nn.Linear(SIZE, SIZE, bias=False) for _ in range(LAYERS)] for _ in range(BLOCKS)]
        layers = [layer for block in blocks for layer in block]
        with torch.no_grad():
            for layer in layers:
                layer.weight.copy_(torch.arange(SIZE * SIZE).view(SIZE, SIZE))
        model = nn.Sequential(*(nn.Sequential(*block) for block in blocks))
        library.shard(model)
        kept = [part_of(layer.weight) for layer in blocks[0]]
        batch = torch.ones(4, SIZE)
        model(batch).sum().backward()
        with Watch(layers) as watch:
            model(batch).sum()
    finally:
        dist.destroy_process_group()
    assert len(watch.moments) == len(layers)
    return Rank(rank // library.tp, kept, watch.moments)


# --- drawing ----------------------------------------------------------------------------------------------------------


def draw_weight(canvas: Canvas, x: int, y: int, label: str, part: Part, fill: str) -> None:
    """A weight's outline, with one part filled."""
    left, top = x + part.columns.start * BOX // SIZE, y + part.rows.start * BOX // SIZE
    canvas.rect(x, y, BOX, BOX, FAINT)
    canvas.rect(left, top, len(part.columns) * BOX // SIZE, len(part.rows) * BOX // SIZE, fill)
    canvas.rect(x, y, BOX, BOX, "none", FRAME)
    if label:
        canvas.text(x + BOX // 2, y + BOX // 2 + 4, label, SMALL, "middle")


def draw_legend(canvas: Canvas, y: int, meanings: dict[str, str]) -> None:
    x = MARGIN
    for fill, meaning in meanings.items():
        canvas.rect(x, y, 14, 14, fill, FRAME)
        canvas.text(x + 22, y + 11, meaning, SMALL)
        x += 22 + text_width(meaning, SMALL) + GAP


def draw_use(ranks: dict[str, Rank]) -> str:
    """One column a library: rank 0's parts of a block's weights between steps, and while one of them multiplies."""
    title = "What rank 0 of four holds of a block of four weights"
    headings = (("between", "steps"), ("while weight", f"{USE} multiplies"))
    canvas = Canvas()
    canvas.text(MARGIN, MARGIN + TITLE, title, TITLE, weight="bold")
    top, height = MARGIN + TITLE + 48, LAYERS * STEP + 24
    for number, lines in enumerate(headings):
        for line, text in enumerate(lines):
            canvas.text(MARGIN, top + number * height + LAYERS * STEP // 2 + (line - 1) * LINE_H, text)
    x = MARGIN + max(text_width(text, LABEL) for lines in headings for text in lines) + GAP
    for name, rank in ranks.items():
        width = max(BOX, text_width(name, LABEL))
        left = x + (width - BOX) // 2
        canvas.text(x + width // 2, top - 12, name, LABEL, "middle", "bold")
        for layer, kept in enumerate(rank.kept):
            y = top + layer * STEP
            draw_weight(canvas, left, y, str(layer), kept, KEPT)
            part = rank.moments[layer].used if rank.moments[USE].gathered[layer] else kept
            fill = USED if layer == USE else KEPT if part is kept else GATHERED
            draw_weight(canvas, left, y + height, str(layer), part, fill)
        x += width + GAP
    draw_legend(canvas, top + 2 * height, {KEPT: "its part", GATHERED: "gathered", USED: "multiplies"})
    return canvas.svg(title, "; ".join(describe_use(name, rank) for name, rank in ranks.items()))


def describe_use(name: str, rank: Rank) -> str:
    moment = rank.moments[USE]
    sizes = [f"{len(part.rows)} x {len(part.columns)}" for part in (rank.kept[USE], moment.used)]
    gathered = [str(layer) for layer in range(LAYERS) if moment.gathered[layer]]
    return (
        f"{name}: rank 0 holds {sizes[0]} of weight {USE} between steps and multiplies with {sizes[1]}; "
        f"gathered then: {', '.join(gathered) or 'none'}"
    )


def draw_ranks(played: dict[str, list[Rank]]) -> str:
    """One line a library: the part of one weight that each rank holds, on the colour of the batch that it sees."""
    title = "One weight on four ranks, and each rank's batch"
    canvas = Canvas()
    canvas.text(MARGIN, MARGIN + TITLE, title, TITLE, weight="bold")
    left = MARGIN + max(text_width(name, LABEL) for name in played) + GAP
    y = MARGIN + TITLE + 44
    for index in range(RANKS):
        canvas.text(left + index * 112 + 44, y - 12, f"rank {index}", LABEL, "middle", "bold")
    for name, ranks in played.items():
        canvas.text(MARGIN, y + 40, name, LABEL, weight="bold")
        for index, rank in enumerate(ranks):
            x = left + index * 112
            canvas.rect(x, y, 88, 74, DATA[rank.batch])
            draw_weight(canvas, x + 22, y + 6, "", rank.kept[1], KEPT)
            canvas.text(x + 44, y + 66, f"batch {rank.batch}", SMALL, "middle")
        y += 86
    return canvas.svg(title, "; ".join(describe_ranks(name, ranks) for name, ranks in played.items()))


def describe_ranks(name: str, ranks: list[Rank]) -> str:
    texts = []
    for index, rank in enumerate(ranks):
        rows, columns = rank.kept[1]
        held = f"rows {rows.start}:{rows.stop} and columns {columns.start}:{columns.stop}"
        texts.append(f"rank {index} holds {held} and sees batch {rank.batch}")
    return f"{name}: {', '.join(texts)}"


def pictures() -> dict[str, str]:
    """SVG by name of file."""
    played = {library.name: [play(library, rank) for rank in range(RANKS)] for library in LIBRARIES}
    in_use = draw_use({name: ranks[0] for name, ranks in played.items()})
    return {"others_ranks.svg": draw_ranks(played), "others_use.svg": in_use}


if __name__ == "__main__":
    IMAGES.mkdir(exist_ok=True)
    for name, svg in pictures().items():
        (IMAGES / name).write_text(svg)
        print(IMAGES / name)
