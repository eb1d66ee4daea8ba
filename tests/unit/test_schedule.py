"""The prefetch plan as plain data: what a chain expects after each use, and how it prints. No process group in here."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from expecttest import TestCase

from dtensor_gtp._runtime.schedule import Chain, format_plan

NAMES = ("embedding.weight", "layers.0.weight", "layers.1.weight", "head.weight")


def run_pass(chain: Chain, uses: Iterable[int]) -> list[tuple[int, ...]]:
    """One complete pass; the windows after ``begin`` and after each use."""
    windows = [tuple(chain.begin())]
    windows.extend(tuple(chain.advance(use)) for use in uses)
    chain.end()
    return windows


def trace(chain: Chain, uses: Sequence[int]) -> str:
    """A pass as text: each use with the window that it leaves, and the deviations so far."""
    lines = [f"begin -> {list(chain.begin())}"]
    lines.extend(f"use {use} -> {list(chain.advance(use))}, {chain.num_deviations} deviations" for use in uses)
    chain.end()
    return "\n".join([*lines, f"plan {list(chain.plan)}"])


class TestChain(TestCase):
    def test_first_pass_expects_nothing_and_becomes_the_plan(self) -> None:
        chain = Chain(depth=2)
        self.assertEqual(run_pass(chain, [3, 1, 2]), [(), (), (), ()])
        self.assertEqual(chain.plan, (3, 1, 2))

    def test_window_slides_by_one_use(self) -> None:
        chain = Chain(depth=2)
        run_pass(chain, range(5))
        self.assertExpectedInline(
            trace(chain, range(5)),
            """\
begin -> [0, 1]
use 0 -> [1, 2], 5 deviations
use 1 -> [2, 3], 5 deviations
use 2 -> [3, 4], 5 deviations
use 3 -> [4], 5 deviations
use 4 -> [], 5 deviations
plan [0, 1, 2, 3, 4]""",
        )

    def test_depth_zero_never_expects(self) -> None:
        chain = Chain(depth=0)
        run_pass(chain, range(3))
        self.assertEqual(run_pass(chain, range(3)), [()] * 4)
        self.assertEqual(chain.plan, (0, 1, 2))

    def test_depth_beyond_the_plan_expects_all_that_is_left(self) -> None:
        chain = Chain(depth=9)
        run_pass(chain, range(3))
        self.assertEqual(run_pass(chain, range(3)), [(0, 1, 2), (1, 2), (2,), ()])

    def test_reused_weight_is_one_use_each_time(self) -> None:
        chain = Chain(depth=3)
        run_pass(chain, [0, 0, 1, 0])
        self.assertEqual(run_pass(chain, [0, 0, 1, 0]), [(0, 0, 1), (0, 1, 0), (1, 0), (0,), ()])

    def test_repeated_pass_does_not_deviate(self) -> None:
        chain = Chain(depth=2)
        run_pass(chain, [2, 0, 1, 2])
        before = chain.num_deviations
        for _ in range(3):
            run_pass(chain, [2, 0, 1, 2])
        self.assertEqual(chain.num_deviations, before)

    def test_skipped_uses_move_the_window_ahead(self) -> None:
        chain = Chain(depth=2)
        run_pass(chain, range(6))
        self.assertExpectedInline(
            trace(chain, [0, 3, 4, 5]),
            """\
begin -> [0, 1]
use 0 -> [1, 2], 6 deviations
use 3 -> [4, 5], 7 deviations
use 4 -> [5], 7 deviations
use 5 -> [], 7 deviations
plan [0, 3, 4, 5]""",
        )

    def test_unplanned_use_closes_the_window_until_the_plan_fits_again(self) -> None:
        chain = Chain(depth=2)
        run_pass(chain, range(4))
        self.assertExpectedInline(
            trace(chain, [0, 9, 1, 2, 3]),
            """\
begin -> [0, 1]
use 0 -> [1, 2], 4 deviations
use 9 -> [], 5 deviations
use 1 -> [2, 3], 5 deviations
use 2 -> [3], 5 deviations
use 3 -> [], 5 deviations
plan [0, 9, 1, 2, 3]""",
        )

    def test_use_that_the_plan_has_only_behind_it_does_not_go_back(self) -> None:
        chain = Chain(depth=2)
        run_pass(chain, range(4))
        chain.begin()
        for use in (0, 1, 2):
            chain.advance(use)
        self.assertEqual(tuple(chain.advance(0)), ())
        self.assertEqual(tuple(chain.advance(3)), ())

    def test_reversed_pass_is_learned(self) -> None:
        chain = Chain(depth=1)
        run_pass(chain, [0, 1, 2])
        run_pass(chain, [2, 1, 0])
        before = chain.num_deviations
        self.assertEqual(run_pass(chain, [2, 1, 0]), [(2,), (1,), (0,), ()])
        self.assertEqual(chain.num_deviations, before)

    def test_uses_after_the_plan_ended_are_unplanned(self) -> None:
        chain = Chain(depth=2)
        run_pass(chain, [0, 1])
        before = chain.num_deviations
        self.assertEqual(run_pass(chain, [0, 1, 2]), [(0, 1), (1,), (), ()])
        self.assertEqual(chain.num_deviations, before + 1)
        self.assertEqual(chain.plan, (0, 1, 2))

    def test_pass_that_ends_early_shortens_the_plan(self) -> None:
        chain = Chain(depth=2)
        run_pass(chain, range(4))
        run_pass(chain, [0, 1])
        self.assertEqual(chain.plan, (0, 1))

    def test_cancel_keeps_the_plan_of_the_last_complete_pass(self) -> None:
        chain = Chain(depth=2)
        run_pass(chain, range(3))
        chain.begin()
        chain.advance(0)
        chain.advance(7)
        chain.cancel()
        self.assertEqual(chain.plan, (0, 1, 2))
        self.assertEqual(tuple(chain.begin()), (0, 1))

    def test_begin_forgets_a_pass_that_never_ended(self) -> None:
        chain = Chain(depth=1)
        run_pass(chain, [0, 1])
        chain.begin()
        chain.advance(0)
        self.assertEqual(run_pass(chain, [0, 1]), [(0,), (1,), ()])
        self.assertEqual(chain.plan, (0, 1))


class TestFormatPlan(TestCase):
    def test_each_use_launches_the_gather_that_enters_the_window(self) -> None:
        self.assertExpectedInline(
            format_plan("forward of Model", (0, 1, 2, 3), NAMES, depth=2),
            """\
forward of Model: 4 uses, prefetch depth 2
  begin                      gather embedding.weight, layers.0.weight
  use embedding.weight                         gather layers.1.weight
  use layers.0.weight                          gather head.weight
  use layers.1.weight
  use head.weight""",
        )

    def test_depth_zero_gathers_at_the_use(self) -> None:
        self.assertExpectedInline(
            format_plan("backward", (3, 1), NAMES, depth=0),
            """\
backward: 2 uses, prefetch depth 0
  use head.weight                              gather head.weight
  use layers.0.weight                          gather layers.0.weight""",
        )

    def test_reused_weight_appears_once_for_each_use(self) -> None:
        self.assertExpectedInline(
            format_plan("forward of Model", (1, 1, 1), NAMES, depth=1),
            """\
forward of Model: 3 uses, prefetch depth 1
  begin                      gather layers.0.weight
  use layers.0.weight                          gather layers.0.weight
  use layers.0.weight                          gather layers.0.weight
  use layers.0.weight""",
        )

    def test_empty_plan_is_its_heading(self) -> None:
        self.assertExpectedInline(format_plan("backward", (), NAMES, 2), """backward: 0 uses, prefetch depth 2""")

    def test_printed_gathers_are_those_of_the_chain(self) -> None:
        """The text lists exactly the gathers that following the windows launches, each once and in order."""
        plan = (2, 0, 0, 3, 1, 2)
        names = [f"w{i}" for i in range(4)]
        for depth in range(1, 8):
            chain = Chain(depth)
            run_pass(chain, plan)
            windows = run_pass(chain, plan)
            launched, position = [], 0
            for used, window in enumerate(windows):
                for offset, use in enumerate(window):
                    if used + offset == position:
                        launched.append(names[use])
                        position += 1
            text = format_plan("p", plan, names, depth)
            printed = [word for line in text.splitlines()[1:] for word in line.partition("gather ")[2].split(", ")]
            self.assertEqual(list(filter(None, printed)), launched)
            self.assertEqual(launched, [names[use] for use in plan])


if __name__ == "__main__":
    import unittest

    unittest.main()
