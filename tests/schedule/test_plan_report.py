"""What is told of a plan: as data, in a profiler's trace, over which communicators, on which stream shards are cast,
and on the page of a report: each rank's part as it is in memory, and pictures in which nothing is lost or covered."""

from __future__ import annotations

import re
import tempfile
import unittest
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest import mock
from xml.etree import ElementTree

import torch
import torch.distributed as dist
import torch.nn as nn
from common import ALL, fake_mesh
from counting import noted
from runtime_common import assert_idle, num_gathers, runtime_of
from schedules import changed, explicit
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.profiler import ProfilerActivity, profile

from dtensor_gtp import GTPShard, SchedulePolicy, gtp_shard, quantize_, sharding_report
from dtensor_gtp import _torch_compat as compat
from dtensor_gtp._comm.context import CommContext
from dtensor_gtp._comm.copy_engine import CopyEngine
from dtensor_gtp._comm.debug import format_nbytes
from dtensor_gtp._report.facts import Cut, ReportRow
from dtensor_gtp._report.pictures import parts_of, strip, timeline
from dtensor_gtp.graphs.capture_blocks import CapturedBlocks
from dtensor_gtp.report import PassReport, PlanReport, ShardingReport

WIDTH, NBYTES = 8, 8 * 8 * 4
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
ONE_AHEAD = explicit(prefetch_depth=1, prefetch_nbytes=0, coalesce_nbytes=0, coalesce_grad_nbytes=0, min_shard_numel=0)


def three_layers() -> nn.Module:
    return nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))


def four_blocks() -> nn.Module:
    """Their rows in blocks of 32 are cut into equal shards."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 64)) for _ in range(4)))


def launched(plan: PlanReport) -> list[str]:
    """Names of what a pass gathers, in the order of the launches."""
    return [plan.uses[position] for step in plan.launches for launch in step for position in launch.positions]


class TestPlanReport(unittest.TestCase):
    def setUp(self) -> None:
        self.mesh = self.enterContext(fake_mesh(4))
        self.model = self.shard()

    def shard(self, **options: Any) -> nn.Module:
        torch.manual_seed(0)
        return gtp_shard(three_layers(), self.mesh, schedule=changed(ONE_AHEAD, **options))

    def step(self) -> None:
        self.model(torch.randn(2, WIDTH, requires_grad=True)).sum().backward()

    def test_passes(self) -> None:
        self.assertEqual(sharding_report(self.model).passes, ())
        with torch.no_grad():
            self.model(torch.randn(2, WIDTH))
        self.assertEqual(sharding_report(self.model).passes, ())
        self.assertIn("forward of Sequential without gradient: 3 weight uses", sharding_report(self.model).schedule)
        self.step()
        names = ("0.weight", "1.weight", "2.weight")
        two_in_memory = (2 * NBYTES, 2 * NBYTES, NBYTES)  # the last use has none ahead
        # Before each use what is ahead; between the passes what is kept at the turning point.
        forward = PassReport(False, names, two_in_memory, (NBYTES, NBYTES, NBYTES, NBYTES))
        backward = PassReport(True, names[::-1], two_in_memory, (NBYTES, NBYTES, NBYTES, 0))
        self.assertEqual(sharding_report(self.model).passes, (forward, backward))

    def test_launches_leave_out_what_is_in_memory(self) -> None:
        """In a backward what the forward has kept, for the first of its uses. Each weight has a launch of its own."""
        for options, reshard, names in (
            ({}, True, ["1.weight", "0.weight"]),
            ({"keep_nbytes": NBYTES}, True, ["0.weight"]),
            ({"keep_last": False}, True, ["2.weight", "1.weight", "0.weight"]),
            ({}, False, []),
        ):
            self.model = self.shard(**options)
            self.model.set_reshard_after_forward(reshard)
            for _ in range(2):
                self.step()
            forward, backward = sharding_report(self.model).plans
            self.assertEqual(launched(forward), ["0.weight", "1.weight", "2.weight"])
            self.assertEqual(launched(backward), names)
        self.assertIn("backward of Sequential: 3 weight uses; nothing is gathered", str(sharding_report(self.model)))

    def test_predicted_gradients_are_those_that_are_sent(self) -> None:
        """Within a host, groups send what autograd gives them, and receivers add in the wider dtype."""
        model = gtp_shard(four_blocks(), self.mesh, mp_policy=BF16, schedule=SchedulePolicy(min_shard_numel=0))
        sent: list[int] = []
        with noted(compat, "all_to_all_base", lambda received, rows, *others: sent.append(rows.nbytes)):
            model(torch.randn(2, 64)).sum().backward()
        predicted, _ = sharding_report(model, machine="h100").prediction
        self.assertGreater(sum(sent), 4 * 2 * 64 * 128 * 2)  # and marks
        self.assertIn(f"gradients {format_nbytes(sum(sent))}", predicted)

    def test_symmetric_memory(self) -> None:
        """That of all communicators, in a model on a CPU, which has none."""
        self.step()
        report = sharding_report(self.model)
        self.assertEqual(report.symmetric_nbytes, 0)
        self.assertNotIn("peers copy from", str(report))
        comm = runtime_of(self.model).comm
        stage = mock.Mock(spec=CopyEngine, held_nbytes=3 << 20)
        comm._gather_backends = {"dense": stage, "experts": stage, "other": mock.Mock()}
        comm._send_rings = {"dense": mock.Mock(held_nbytes=2 << 20)}
        report = sharding_report(self.model)
        self.assertEqual(report.symmetric_nbytes, 8 << 20)
        self.assertIn("8.0 MiB of memory that peers copy from", str(report))

    def test_what_is_kept_from_forward_to_backward(self) -> None:
        """The last weight and those that fit; with ``keep_last=False`` it is gathered once more, whatever else is kept.
        The bits are the same."""
        x, grads = torch.randn(2, WIDTH), []
        one, two = NBYTES, 2 * NBYTES
        for options, kept, between in (
            ({}, [2], (one, one, one, one)),
            ({"keep_nbytes": NBYTES}, [1, 2], (one, one, two, two)),
            ({"keep_last": False}, [], (one, one, one, 0)),
            ({"keep_last": False, "keep_nbytes": NBYTES}, [1], (one, one, two, one)),
        ):
            model = self.shard(**options)
            for step in range(3):
                inputs = x.clone().requires_grad_()
                loss = model(inputs).sum()
                held = [t.weight.fqn for t in runtime_of(model).members.gatherables if t.kept is not None or t.pending]
                self.assertEqual(held, [f"{index}.weight" for index in kept] if step else [])  # once there is a plan
                loss.backward()
                assert_idle(model)
            forward, backward = sharding_report(model).passes
            self.assertEqual(forward.between_nbytes, between, options)
            if options == {"keep_nbytes": NBYTES}:
                gathered = forward.gathered_nbytes, backward.gathered_nbytes
                self.assertEqual(gathered, ((two, two, two), (two, two, one)))
                self.assertEqual(backward.between_nbytes, (two, one, one, 0))
            if not kept:
                self.assertEqual(backward.between_nbytes[0], NBYTES)  # gathered ahead, when backward begins
            expected = {f"{index}.weight": 4 if index in kept else 6 for index in range(3)}
            self.assertEqual(num_gathers(model), expected, options)
            grads.append(inputs.grad)
        for grad in grads[1:]:
            self.assertTrue(torch.equal(grad, grads[0]))

    def test_weights_that_stay_whatever_the_policy_says_and_those_that_never_do(self) -> None:
        """Ranks may leave one out of a pass, and a block that is to be recorded has fixed buffers."""
        self.model = three_layers()
        for module in (self.model[2], self.model):
            gtp_shard(module, self.mesh, schedule=ONE_AHEAD, reshard_after_forward=False)
        CapturedBlocks(self.model, [self.model[0]], mock.Mock(), 2, 4)
        self.model[2].set_reduce_scatter_unused_params(True)
        self.step()
        loss = self.model(torch.randn(2, WIDTH, requires_grad=True)).sum()
        runtime = runtime_of(self.model)
        held = [target for target in runtime.members.gatherables if target.kept is not None]
        self.assertEqual({target.weight.fqn for target in held}, {"1.weight", "2.weight"})
        for key in runtime.passes.chains:
            self.assertEqual(runtime.keeper.kept_from_forward(key.entry), {target.index for target in held})
        loss.backward()

    def test_ranges(self) -> None:
        self.step()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            self.step()
        counts = Counter(event.name for event in profiler.events() if event.name.startswith("GTP::"))
        expected = {}
        for name in ("0.weight", "1.weight", "2.weight"):
            expected[f"GTP::all_gather ({name})"] = 1 if name == "2.weight" else 2  # kept at the turning point
            expected[f"GTP::compute ({name})"] = 2  # forward, and the gradient of the input
            expected[f"GTP::wgrad ({name})"] = 1
            expected[f"GTP::reduce_scatter ({name})"] = 1
        self.assertEqual(counts, expected)

    def test_casts_of_shards_have_ranges_within_those_of_gathers(self) -> None:
        """They run on the compute stream, so a trace must not count them as communication."""
        torch.manual_seed(0)
        self.model = gtp_shard(three_layers(), self.mesh, schedule=ONE_AHEAD, mp_policy=BF16)
        self.step()
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            self.step()
        gathers, casts = (
            [event.name for event in profiler.events() if event.name.startswith(f"GTP::{kind}")]
            for kind in ("all_gather", "cast")
        )
        self.assertEqual([name.replace("all_gather", "cast") for name in gathers], casts)
        within = {e.cpu_parent.name for e in profiler.events() if e.name.startswith("GTP::cast") and e.cpu_parent}
        self.assertEqual(within, set(gathers))

    def test_gathers_and_scatters_have_communicators_of_their_own(self) -> None:
        """So that both can be under way at once in backward."""
        used: dict[str, set[str]] = {"all_gather_base": set(), "reduce_scatter_base": set()}
        for name, groups in used.items():

            def note(*args: Any, groups: set[str] = groups, **options: Any) -> None:
                groups |= {arg.group_name for arg in args if isinstance(arg, dist.ProcessGroup)}

            with noted(compat, name, note):
                self.step()
        (gather,), (scatter,) = used.values()
        self.assertNotEqual(gather, scatter)


class TestWhereShardsAreCast(unittest.TestCase):
    """On the compute stream, but for those that other streams have made. A CPU has no streams, so this looks at what a
    gather is told to copy on its own."""

    def copies(self, model: nn.Module, schedule: SchedulePolicy, **options: Any) -> set[bool]:
        """Of all gathers of two steps, whether they copied on the gather stream."""
        found: set[bool] = set()

        def note(comm: CommContext, *args: Any) -> None:
            found.add(len(args) > 4 and args[4] is not None)

        with fake_mesh(2, 2, names=("replicate", "gtp")) as mesh, noted(CommContext, "all_gather", note):
            gtp_shard(model, mesh, mp_policy=BF16, schedule=schedule, **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                model(torch.randn(4, 64)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return found

    def test_shards_replicas_and_recipes(self) -> None:
        groups = SchedulePolicy(min_shard_numel=0)
        for schedule in (explicit(min_shard_numel=0), groups):
            self.assertEqual(self.copies(four_blocks(), schedule), {False})
            self.assertEqual(self.copies(four_blocks(), schedule, shard_optimizer=True), {True}, "after replicas")
        self.assertEqual(self.copies(quantize_(four_blocks(), "mxfp8"), groups), {True}, "after casts of a recipe")


# --- the page ---------------------------------------------------------------------------------------------------------


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
            num_kept = len(plan.uses) - len(launched(plan))  # a bar each, while in use
            self.assertEqual(len(rects(svg, "ahead")), sum(map(len, plan.launches)) + num_kept)
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
