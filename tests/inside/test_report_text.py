"""Equal blocks of a model are one in the text of a report, and nothing else is."""

from __future__ import annotations

import dataclasses
import itertools
import os
import unittest
from unittest import mock

import torch
from expecttest import TestCase

from dtensor_gtp._report.columns import in_columns
from dtensor_gtp._report.facts import LaunchReport, PlanReport, ReportRow
from dtensor_gtp._report.fold import Line, Repeat, fold
from dtensor_gtp._report.text import folded_rows, plan_text, short_names, table
from dtensor_gtp.report import ShardingReport


def rows(*names: str, nbytes: int = 64) -> list[ReportRow]:
    return [ReportRow(name, (4, 4), torch.float32, "(G(0))", nbytes, 64, "fused op") for name in names]


def lines(*names: str) -> list[Line]:
    return [Line(tuple(name.split(" ")), "") for name in names]


def block(index: int) -> tuple[str, ...]:
    return tuple(f"layers.{index}.{name}" for name in ("wq", "wo"))


def plan(uses: tuple[str, ...], ahead: int) -> PlanReport:
    """Each use launches the gather of the one ``ahead`` uses later."""
    launches: list[tuple[LaunchReport, ...]] = [(LaunchReport(tuple(range(ahead)), ahead << 10),)]
    launches += [(LaunchReport((k + ahead,), 1 << 10),) if k + ahead < len(uses) else () for k in range(len(uses))]
    return PlanReport("forward", "2 uses ahead", False, uses, tuple(launches))


class TestFold(unittest.TestCase):
    def folded(self, *names: str) -> list[tuple[str, int]]:
        return [(row.name, row.times) for row in folded_rows(rows(*names), False)]

    def test_blocks_are_one(self) -> None:
        names = ["embed", *itertools.chain(*map(block, range(32))), "head"]
        expected = [("embed", 1), ("layers.0-31.wq", 32), ("layers.0-31.wo", 32), ("head", 1)]
        self.assertEqual(self.folded(*names), expected)
        self.assertEqual(len(folded_rows(rows(*names), True)), len(names))

    def test_blocks_that_differ_stay(self) -> None:
        """One of another size splits the run; two alike are shown by themselves."""
        equal = rows(*(name for k in range(7) for name in block(k)))
        equal[6] = equal[6]._replace(local_nbytes=1)  # layers.3.wq
        names = [row.name for row in folded_rows(equal, False)]
        self.assertEqual(
            names, ["layers.0-2.wq", "layers.0-2.wo", "layers.3.wq", "layers.3.wo", "layers.4-6.wq", "layers.4-6.wo"]
        )
        self.assertEqual(self.folded("0.w", "1.w"), [("0.w", 1), ("1.w", 1)])
        gaps = ("0.w", "2.w", "4.w", "6.w")
        self.assertEqual(self.folded(*gaps), [(name, 1) for name in gaps])

    def test_experts_and_tied_parameters_within_blocks(self) -> None:
        names = [f"layers.{k}.experts.{e}.{w}" for k in range(4) for e in range(8) for w in ("up", "down")]
        self.assertEqual(self.folded(*names), [(f"layers.0-3.experts.0-7.{w}", 32) for w in ("up", "down")])
        self.assertEqual(self.folded(*(f"a.{k}.w = b.{k}.w" for k in range(3))), [("a.0-2.w = b.0-2.w", 3)])
        shared = " = ".join(f"layers.{k}.w" for k in range(12))
        self.assertEqual(self.folded(shared), [("layers.0.w = layers.1.w = ... (12 names)", 1)])
        self.assertEqual(folded_rows(rows(shared), True)[0].name, shared)

    def test_numbers_count_up_or_down_together(self) -> None:
        ahead = lines(*(f"l.{k} l.{k + 2} table" for k in range(5)))
        self.assertEqual(fold(ahead), (Repeat(5, (Line(("l.0-4", "l.2-6", "table"), ""),)),))
        self.assertEqual(fold(ahead[::-1]), (Repeat(5, (Line(("l.4-0", "l.6-2", "table"), ""),)),))
        for names in (("l.0 l.9", "l.1 l.8", "l.2 l.7"), ("l.0", "l.0", "l.0"), ("l.0", "l.1", "l.3")):
            self.assertEqual(fold(lines(*names)), tuple(lines(*names)))

    def test_no_line_is_lost(self) -> None:
        """Whatever is folded: as many lines as before, in the same order."""

        def unfolded(element: Line | Repeat) -> int:
            return element.times * sum(map(unfolded, element.body)) if isinstance(element, Repeat) else 1

        for seed in range(12):
            generator = torch.Generator().manual_seed(seed)
            draws = torch.randint(0, 3, (40,), generator=generator).tolist()
            given = lines(*(f"a.{k // (1 + seed % 4)}.{'xyz'[draw % (1 + seed % 3)]}" for k, draw in enumerate(draws)))
            self.assertEqual(sum(map(unfolded, fold(given))), len(given), seed)


class TestText(TestCase):
    def test_table(self) -> None:
        text = "\n".join(table([*rows("embed", nbytes=512), *rows(*(f"layers.{k}.w" for k in range(8)))], False))
        self.assertExpectedInline(
            text,
            """\
parameter     shape  dtype    placements  per rank  gathered  use
embed         4x4    float32  (G(0))      512 B     64 B      fused op
layers.0-7.w  4x4    float32  (G(0))      8 x 64 B  64 B      fused op
1.0 KiB of parameters per rank; largest gathered weight 64 B""",
        )

    def test_plan(self) -> None:
        uses = ("embed.weight", *(f"layers.{k}.attention.{w}.weight" for k in range(9) for w in ("wq", "wk")))
        self.assertExpectedInline(
            plan_text(plan(uses, 2), is_verbose=False),
            """\
forward: 19 weight uses; 2 uses ahead
  begin                                        gather embed.weight + layers.0.attention.wq.weight (2.0 KiB)
  use embed.weight                             gather layers.0.attention.wk.weight (1.0 KiB)
  8 times:
  | use layers.0-7.attention.wq.weight         gather layers.1-8.attention.wq.weight (1.0 KiB)
  | use layers.0-7.attention.wk.weight         gather layers.1-8.attention.wk.weight (1.0 KiB)
  use layers.8.attention.{wq,wk}.weight""",
        )

    def test_a_folded_block_begins_where_a_block_begins(self) -> None:
        """Not at the first line that repeats, which lies within the first block."""
        uses = tuple(f"layers.{k}.{w}.weight" for k in range(9) for w in ("a", "b", "c"))
        text = plan_text(plan(uses, 4), is_verbose=False)
        self.assertIn("| use layers.0-6.a.weight", text)
        body = [line for line in text.splitlines() if line.startswith("  | use")]
        self.assertEqual([line.split()[2] for line in body], [f"layers.0-6.{w}.weight" for w in ("a", "b", "c")])

    def test_a_model_of_8b_fits_a_screen(self) -> None:
        """32 blocks of nine parameters, in any window: under 40 lines of COLUMNS; each of them with ``is_verbose``."""
        layers = [f"{part}.{w}.weight" for part, ws in (("attn", "qkvo"), ("mlp", "gud")) for w in ws]
        names = ("embed.weight", *(f"layers.{k}.{name}" for k in range(32) for name in layers), "head.weight")
        choices = ("gathered ahead 32.0 MiB: the largest block has 1.6 MiB; 32.0 MiB is the minimum",) * 6
        for ahead in (1, 11):
            plans = (plan(names, ahead), plan(names[::-1], ahead))
            report = ShardingReport("gtp=8", tuple(rows(*names)), plans, choices=choices, advice=("Do this.",) * 4)
            for columns in (50, 80):
                with mock.patch.dict(os.environ, COLUMNS=str(columns)):
                    lines = str(report).splitlines()
                    self.assertLess(len(lines), 40 if columns >= 80 else 80, str(report))
                    self.assertLessEqual(max(map(len, lines)), columns)
                    verbose = str(dataclasses.replace(report, is_verbose=True))
                self.assertGreater(len(verbose.splitlines()), 3 * len(names))
                if ahead == 1 and columns >= 80:
                    self.assertLessEqual(max(map(len, verbose.splitlines())), columns)
                for name in names:
                    self.assertIn(f"use {name}", verbose)

    def test_what_is_the_same_is_said_once(self) -> None:
        weights = rows(*(f"layers.{k}.{w}.weight" for k in range(4) for w in ("q", "k")), "head.weight")
        norm = ReportRow("norm.weight", (4,), torch.float32, "(R)", 16, 0, "whole (1-D)")
        with mock.patch.dict(os.environ, COLUMNS="80"):
            text = str(ShardingReport("gtp=4", (*weights, norm)))
            self.assertExpectedInline(
                text,
                """\
gtp_shard on gtp=4
  weight                   shape  this rank
  layers.0-3.{q,k}.weight  4x4    8 x 64 B
  head.weight              4x4    64 B
  all: float32, (G(0)), fused op
  whole (1-D): 1 (16 B): norm.weight
memory of this rank
  parameters: 592 B, in shards and whole
  largest gathered weight: 64 B
schedule
  not observed yet""",
            )
            other = norm._replace(name="table", gathered_nbytes=64, use="attribute")
            self.assertRegex(str(ShardingReport("gtp=4", (*weights, other))), r"(?m)^  table .* attribute$")

    def test_what_is_special_is_said_of_all_weights_that_have_it(self) -> None:
        special = [row._replace(use="fused op, float8 GEMMs by cuBLAS") for row in rows(*(f"{k}.w" for k in range(9)))]
        lookup = rows("table")[0]._replace(use="fused op, lookup: exchange of 4 tokens")
        report = ShardingReport("gtp=4", (*special, lookup), exchanges=("lookup of table: exchange of 4 tokens",))
        self.assertIn("\n  0-8.w: float8 GEMMs by cuBLAS\n", f"{report}\n")
        self.assertEqual(str(report).count("exchange of 4 tokens"), 1)

    def test_cells_wrap_where_names_end(self) -> None:
        """Nothing is cut off: the pieces of a cell are the cell."""
        name = "model.layers.0-31.self_attn.{q_proj,k_proj,v_proj}.weight"
        for width in (30, 40, 60):
            lines = in_columns([("parameter", "shape"), (name, "4096x4096")], width)
            self.assertLessEqual(max(map(len, lines)), width)
            self.assertEqual("".join("".join(lines[1:]).replace("4096x4096", "").split()), name)

    def test_short_names(self) -> None:
        names = ["l.0.attn.q.weight", "l.0.attn.k.weight", "l.0.mlp.up.weight", "l.1.mlp.up.weight", "norm.weight"]
        short = ["l.0.attn.{q,k}.weight", "l.0.mlp.up.weight", "l.1.mlp.up.weight", "norm.weight"]
        self.assertEqual(short_names(names), short)
        for apart in (["a.q.weight", "a.k.weight"], ["l.0.a.q.weight", "l.0.a.q.bias"]):
            self.assertEqual(short_names(apart), apart)
