"""Equal blocks of a model are one in the text of a report, and nothing else is."""

from __future__ import annotations

import itertools
import unittest

import torch
from expecttest import TestCase

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

    def test_experts_within_blocks(self) -> None:
        names = [f"layers.{k}.experts.{e}.{w}" for k in range(4) for e in range(8) for w in ("up", "down")]
        expected = [(f"layers.0-3.experts.0-7.{w}", 32) for w in ("up", "down")]
        self.assertEqual(self.folded(*names), expected)

    def test_tied_parameters(self) -> None:
        pairs = [f"a.{k}.w = b.{k}.w" for k in range(3)]
        self.assertEqual(self.folded(*pairs), [("a.0-2.w = b.0-2.w", 3)])
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

        for seed in range(50):
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
forward: 19 uses, 2 uses ahead
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
        """32 blocks of nine parameters: under 60 lines, and each of them with ``is_verbose``."""
        layers = [f"{part}.{w}.weight" for part, ws in (("attn", "qkvo"), ("mlp", "gud")) for w in ws]
        names = ("embed.weight", *(f"layers.{k}.{name}" for k in range(32) for name in layers), "head.weight")
        plans = (plan(names, 4), plan(names[::-1], 4))
        report = ShardingReport("gtp=8", tuple(rows(*names)), plans)
        self.assertLess(len(str(report).splitlines()), 60)
        verbose = str(ShardingReport("gtp=8", tuple(rows(*names)), plans, is_verbose=True))
        self.assertGreater(len(verbose.splitlines()), 3 * len(names))
        for name in names:
            self.assertIn(f"use {name}", verbose)

    def test_short_names(self) -> None:
        names = ["l.0.attn.q.weight", "l.0.attn.k.weight", "l.0.mlp.up.weight", "l.1.mlp.up.weight", "norm.weight"]
        short = ["l.0.attn.{q,k}.weight", "l.0.mlp.up.weight", "l.1.mlp.up.weight", "norm.weight"]
        self.assertEqual(short_names(names), short)
        for apart in (["a.q.weight", "a.k.weight"], ["l.0.a.q.weight", "l.0.a.q.bias"]):
            self.assertEqual(short_names(apart), apart)


if __name__ == "__main__":
    unittest.main()
