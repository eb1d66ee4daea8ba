"""The page of a report: each rank's part as it is in memory, and pictures in which nothing is lost or covered."""

from __future__ import annotations

import re
import tempfile
import unittest
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import torch
import torch.nn as nn
from common import ALL, fake_mesh
from schedules import explicit
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_gtp import GTPShard, gtp_shard, sharding_report
from dtensor_gtp._report.facts import Cut, ReportRow
from dtensor_gtp._report.pictures import parts_of, strip, timeline
from dtensor_gtp.report import ShardingReport

WIDTH = 8
ONE_AHEAD = explicit(prefetch_depth=1, prefetch_nbytes=0, coalesce_nbytes=0, min_shard_numel=0)


def observed(num_layers: int, *, verbose: bool = False) -> ShardingReport:
    """The report of equal layers after a step, in the place of rank 1 of 4."""
    with fake_mesh(4, rank=1) as mesh:
        layers = (nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers))
        model = gtp_shard(nn.Sequential(*layers), mesh, schedule=ONE_AHEAD)
        model(torch.randn(2, WIDTH, requires_grad=True)).sum().backward()
        return sharding_report(model, verbose=verbose)


def svgs(html: str) -> list[ElementTree.Element]:
    """All pictures, which must be well-formed."""
    return [ElementTree.fromstring(text) for text in re.findall(r"<svg.*?</svg>", html, re.S)]


def rects(svg: ElementTree.Element, kind: str) -> list[tuple[float, float, float, float]]:
    names = ("x", "y", "width", "height")
    found = [r for r in svg.iter("rect") if r.get("class") == kind]
    return [tuple(float(rect.get(name, "nan")) for name in names) for rect in found]  # type: ignore[misc]


class TestStrips(unittest.TestCase):
    def test_parts_are_what_ranks_hold(self) -> None:
        """On a mesh of three axes, uneven and in blocks; and the parts together are the parameter."""
        for rank in (0, 5, 6):
            with fake_mesh(2, 2, 2, names=("replicate", "gtp", "tp"), rank=rank) as mesh:
                model = nn.Sequential(nn.Linear(10, 14), nn.Linear(14, 10), nn.Linear(10, 9), nn.Conv1d(9, 5, 3))
                plan = {"0": ColwiseParallel(), "1": RowwiseParallel()}
                parallelize_module(model, mesh["tp"], plan, src_data_rank=None)
                in_blocks = model[2].weight

                def place(param: nn.Parameter, in_blocks: nn.Parameter = in_blocks) -> GTPShard | None:
                    return GTPShard(0, block_size=4) if param is in_blocks else None

                gtp_shard(model, mesh["replicate", "gtp"], schedule=ONE_AHEAD, shard_placement_fn=place)
                for row in sharding_report(model).rows:
                    parts = list(parts_of(row.shape, row.cuts))
                    (own,) = (part for part in parts if part.is_own)
                    param = model.get_parameter(row.name)
                    local = list(param.shape)
                    for dim, (begin, end) in own.ranges.items():
                        local[dim] = end - begin
                    self.assertEqual(local, list(param.to_local().shape), (rank, row))
                    numels = [torch.Size(end - begin for begin, end in p.ranges.values()).numel() for p in parts]
                    cut = torch.Size(row.shape[dim] for dim in own.ranges).numel()
                    self.assertEqual(sum(numels), cut, (rank, row))

    def test_strip(self) -> None:
        """Ten rows on four ranks, of which this is rank 3 with the one row that is left."""
        row = ReportRow("w", (10, 4), torch.float32, "(G(0))", 16, 160, "fused op", cuts=(Cut("gtp", 4, 3, 0),))
        (svg,) = svgs(strip(row))
        widths = [rect[2] for rect in rects(svg, None)]  # type: ignore[arg-type]
        self.assertEqual(widths, [108.0, 108.0, 108.0, 36.0])
        titles = [title.text for title in svg.iter("title")]
        self.assertEqual(titles[0], "gtp 0: dim 0: 0 to 2")
        self.assertEqual(titles[3], "gtp 3 (this rank): dim 0: 9 to 9")
        for cuts in ((), (Cut("gtp", 4, 0),)):
            self.assertEqual(strip(row._replace(cuts=cuts)), "")


class TestTimeline(unittest.TestCase):
    def test_each_use_and_each_gather_once(self) -> None:
        report = observed(6, verbose=True)
        for plan in report.plans:
            svg = ElementTree.fromstring(timeline(plan, True))
            used = sorted(x for x, *_ in rects(svg, "used"))
            self.assertEqual(len(used), 6)
            self.assertEqual(len(rects(svg, "ahead")), sum(map(len, plan.launches)))
            steps = {b - a for a, b in pairwise(used)}
            self.assertEqual(len(steps), 1, "columns of one width")

    def test_bars_end_with_their_last_use(self) -> None:
        (forward, _) = observed(3, verbose=True).plans
        svg = ElementTree.fromstring(timeline(forward, True))
        ends = [{x + width for x, _, width, _ in rects(svg, kind)} for kind in ("ahead", "used")]
        self.assertEqual(*({end + (kind == 1) for end in ends[kind]} for kind in (0, 1)))  # a use has a margin of 1

    def test_equal_blocks_are_folded(self) -> None:
        few, many = (observed(num) for num in (20, 40))
        for small, large in zip(few.plans, many.plans, strict=True):
            drawn = [ElementTree.fromstring(timeline(plan, False)) for plan in (small, large)]
            self.assertEqual(*(len(rects(svg, "used")) for svg in drawn))
            self.assertEqual(*(svg.get("width") for svg in drawn))
            (said,) = (text.text for text in drawn[1].iter("text") if (text.text or "").endswith(" uses"))
            self.assertEqual(int(said.split()[0]) + len(rects(drawn[1], "used")), 40)

    def test_nothing_lies_on_something_else(self) -> None:
        """Bars of a lane, and their texts, end where the next begin; all lies within the picture."""
        for num, verbose in ((3, False), (12, True), (40, False)):
            for plan in observed(num, verbose=verbose).plans:
                svg = ElementTree.fromstring(timeline(plan, verbose))
                lanes: dict[float, list[tuple[float, float]]] = {}
                for x, y, width, _ in rects(svg, "ahead"):
                    lanes.setdefault(y, []).append((x, x + width))
                for bars in lanes.values():
                    bars.sort()
                    self.assertTrue(all(a[1] <= b[0] for a, b in pairwise(bars)), bars)
                right, bottom = float(svg.get("width", 0)), float(svg.get("height", 0))
                for x, y, width, height in (*rects(svg, "ahead"), *rects(svg, "used"), *rects(svg, "gap")):
                    self.assertTrue(x >= 0 and x + width <= right and y >= 0 and y + height <= bottom)


HOSTILE = "a\x1b[2Jb\nc"


class Named(nn.Module):
    """Calls one of its blocks by its name."""

    def __init__(self, blocks: nn.ModuleDict, name: str) -> None:
        super().__init__()
        self.blocks, self.name = blocks, name

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.blocks[self.name](x)


class TestPage(unittest.TestCase):
    def test_file(self) -> None:
        report = observed(5)
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "report.html"
            report.to_html(path)
            html = path.read_text(encoding="utf-8")
        self.assertTrue(html.startswith("<!DOCTYPE html>"))
        self.assertIn(report._repr_html_(), html)
        for elsewhere in ("<script", "src=", "href=", "url(", "http"):
            self.assertNotIn(elsewhere, html)
        passes = "forward of Sequential: 5 uses"
        for shown in ("0-4.weight", "gtp_shard on gtp=4", "gathers by the process group", passes):
            self.assertIn(shown, html)
        self.assertEqual(len(svgs(html)), 1 + 2)  # one folded parameter, two passes

    def test_before_the_first_forward(self) -> None:
        with fake_mesh(4) as mesh:
            html = sharding_report(gtp_shard(nn.Linear(64, 64), mesh))._repr_html_()
        self.assertIn("Not observed yet", html)
        self.assertIn("whole on every rank", html)  # the bias

    def test_names_reach_no_terminal(self) -> None:
        """Of modules whose names are those of a stranger's file."""
        blocks = nn.ModuleDict({HOSTILE: nn.Linear(64, 64), "other": nn.Linear(64, 64)})
        ignored = set(blocks["other"].parameters())
        with fake_mesh(4) as mesh:
            model = gtp_shard(Named(blocks, HOSTILE), mesh, schedule=ALL, ignored_params=ignored)
            model(torch.ones(2, 64)).sum().backward()
            for verbose in (False, True):
                report = sharding_report(model, verbose=verbose)
                for text in (str(report), report.schedule, report._repr_html_()):
                    self.assertNotIn("\x1b", text)
                    self.assertIn(r"a\x1b[2Jb\nc", text)

    def test_names_are_escaped(self) -> None:
        row = ReportRow("a<b>&c", (8, 4), torch.float32, "(G(0))", 32, 128, "<i>", cuts=(Cut("<x>", 4, 0, 0),))
        html = ShardingReport("<x>=4", (row,), choices=("<b>: <i>",))._repr_html_()
        self.assertNotRegex(html, "<x>|<i>|a<b>|<dt><b>")
        self.assertEqual(len(svgs(html)), 1)
