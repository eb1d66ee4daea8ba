"""The plan of gathers as plain data: what is launched when, and how it prints. No process group in here."""

from __future__ import annotations

import random
from collections.abc import Iterable, Sequence

from expecttest import TestCase

from dtensor_gtp._comm.debug import format_nbytes
from dtensor_gtp._report.facts import plan_report
from dtensor_gtp._report.text import plan_text
from dtensor_gtp._schedule.held_weights import held_nbytes
from dtensor_gtp._schedule.order_of_gathers import Plan, Traits, Window, choose_kept
from dtensor_gtp._schedule.order_of_uses import Chain

NAMES = ("table.weight", "layer0.weight", "layer1.weight", "head.weight")


def make_chain(depth: int, sizes: Sequence[int] = (1,) * 10, **window: int) -> Chain:
    return Chain(Window(depth, **window), lambda: [Traits(size) for size in sizes])


def expected_uses(chain: Chain) -> list[int]:
    """What is in memory or in flight for uses to come."""
    return [chain.plan.uses[position] for positions in chain.expected() for position in positions]


def run_pass(chain: Chain, uses: Iterable[int]) -> list[list[int]]:
    """One complete pass; what is in flight after ``begin`` and after each use."""
    chain.begin()
    windows = [expected_uses(chain)]
    for use in uses:
        chain.advance(use)
        windows.append(expected_uses(chain))
    chain.end()
    return windows


def trace(chain: Chain, uses: Sequence[int]) -> str:
    """A pass as text: each use with what is in flight after it, and the deviations so far."""
    chain.begin()
    lines = [f"begin -> {expected_uses(chain)}"]
    for use in uses:
        chain.advance(use)
        lines.append(f"use {use} -> {expected_uses(chain)}, {chain.num_deviations} deviations")
    chain.end()
    return "\n".join([*lines, f"plan {list(chain.plan.uses)}"])


def launched(uses: Sequence[int], traits: Sequence[Traits], window: Window) -> list[str]:
    """For each step of a plan, the uses that are launched: ``0 1+2`` are two launches."""
    plan = Plan(uses, traits, window)
    return [
        " ".join("+".join(str(uses[position]) for position in launch.positions) for launch in launches)
        for launches in plan.launches
    ]


class TestChain(TestCase):
    def test_first_pass_expects_nothing_and_becomes_the_plan(self) -> None:
        chain = make_chain(depth=2)
        self.assertEqual(run_pass(chain, [3, 1, 2]), [[], [], [], []])
        self.assertEqual(chain.plan.uses, (3, 1, 2))

    def test_window_slides_by_one_use(self) -> None:
        chain = make_chain(depth=2)
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
        chain = make_chain(depth=0, nbytes=100, together_nbytes=100)
        run_pass(chain, range(3))
        self.assertEqual(run_pass(chain, range(3)), [[]] * 4)
        self.assertEqual(chain.plan.uses, (0, 1, 2))

    def test_depth_beyond_the_plan_expects_all_that_is_left(self) -> None:
        chain = make_chain(depth=9)
        run_pass(chain, range(3))
        self.assertEqual(run_pass(chain, range(3)), [[0, 1, 2], [1, 2], [2], []])

    def test_reused_weight_is_one_use_each_time(self) -> None:
        chain = make_chain(depth=3)
        run_pass(chain, [0, 0, 1, 0])
        self.assertEqual(run_pass(chain, [0, 0, 1, 0]), [[0, 0, 1], [0, 1, 0], [1, 0], [0], []])

    def test_repeated_pass_does_not_deviate(self) -> None:
        chain = make_chain(depth=2)
        run_pass(chain, [2, 0, 1, 2])
        before, plan = chain.num_deviations, chain.plan
        for _ in range(3):
            run_pass(chain, [2, 0, 1, 2])
        self.assertEqual(chain.num_deviations, before)
        self.assertIs(chain.plan, plan, "it is not made anew")

    def test_skipped_uses_move_the_window_ahead(self) -> None:
        chain = make_chain(depth=2)
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

    def test_unplanned_use_moves_nothing(self) -> None:
        chain = make_chain(depth=2)
        run_pass(chain, range(4))
        self.assertExpectedInline(
            trace(chain, [0, 9, 1, 2, 3]),
            """\
begin -> [0, 1]
use 0 -> [1, 2], 4 deviations
use 9 -> [1, 2], 5 deviations
use 1 -> [2, 3], 5 deviations
use 2 -> [3], 5 deviations
use 3 -> [], 5 deviations
plan [0, 9, 1, 2, 3]""",
        )

    def test_use_that_the_plan_has_only_behind_it_does_not_go_back(self) -> None:
        chain = make_chain(depth=2)
        run_pass(chain, range(4))
        chain.begin()
        for use in (0, 1, 2):
            self.assertIsNotNone(chain.advance(use))
        self.assertIsNone(chain.advance(0))
        self.assertEqual(expected_uses(chain), [3])
        self.assertIsNotNone(chain.advance(3))
        self.assertTrue(chain.is_at_end())

    def test_reversed_pass_is_learned(self) -> None:
        chain = make_chain(depth=1)
        run_pass(chain, [0, 1, 2])
        run_pass(chain, [2, 1, 0])
        before = chain.num_deviations
        self.assertEqual(run_pass(chain, [2, 1, 0]), [[2], [1], [0], []])
        self.assertEqual(chain.num_deviations, before)

    def test_uses_after_the_plan_ended_are_unplanned(self) -> None:
        chain = make_chain(depth=2)
        run_pass(chain, [0, 1])
        before = chain.num_deviations
        self.assertEqual(run_pass(chain, [0, 1, 2]), [[0, 1], [1], [], []])
        self.assertEqual(chain.num_deviations, before + 1)
        self.assertEqual(chain.plan.uses, (0, 1, 2))

    def test_pass_that_ends_early_shortens_the_plan(self) -> None:
        chain = make_chain(depth=2)
        run_pass(chain, range(4))
        run_pass(chain, [0, 1])
        self.assertEqual(chain.plan.uses, (0, 1))

    def test_begin_keeps_the_plan_of_the_last_complete_pass(self) -> None:
        chain = make_chain(depth=2)
        run_pass(chain, range(3))
        chain.begin()
        chain.advance(0)
        chain.advance(7)
        chain.begin()
        self.assertEqual(chain.plan.uses, (0, 1, 2))
        self.assertEqual(expected_uses(chain), [0, 1])

    def test_begin_forgets_a_pass_that_never_ended(self) -> None:
        chain = make_chain(depth=1)
        run_pass(chain, [0, 1])
        chain.begin()
        chain.advance(0)
        self.assertEqual(run_pass(chain, [0, 1]), [[0], [1], []])

    def test_what_is_due_after_each_use_adds_up_to_what_is_expected(self) -> None:
        """Whoever launches what is due, and drops nothing, has in flight what a fresh look at the plan would launch."""
        rng = random.Random(0)
        for _ in range(200):
            num = rng.randrange(1, 6)
            traits = [
                Traits(rng.choice((1, 2, 5, 40)), rng.randrange(2), rng.randrange(3), rng.choice((-1, -1, 0)))
                for _ in range(num)
            ]
            window = Window(rng.randrange(1, 4), rng.choice((0, 7, 30)), rng.choice((0, 5, 50)), rng.randrange(3))
            chain = Chain(window, lambda traits=traits: traits)
            uses = [rng.randrange(num) for _ in range(rng.randrange(1, 20))]
            run_pass(chain, uses)
            chain.begin()
            in_flight = [p for launch in chain.plan.launches[0] for p in launch.positions]
            for position, use in enumerate(uses):
                self.assertIn(position, in_flight, "launched before its use")
                in_flight.remove(position)
                due = chain.advance(use, traits[use].lane)
                assert due is not None
                in_flight += [p for launch in due for p in launch.positions]
                self.assertEqual(sorted(in_flight), sorted(p for launch in chain.expected() for p in launch))
            for _, lane in enumerate((0, 1)):
                order = [p for step in chain.plan.launches for launch in step for p in launch.positions]
                own = [p for p in order if traits[uses[p]].lane == lane]
                self.assertEqual(own, sorted(own), "a lane is launched in order")


class TestWindowInBytes(TestCase):
    def test_small_weights_do_not_starve_the_window(self) -> None:
        """Until as many bytes are ahead, and as many uses at least."""
        sizes = [1, 1, 1, 1, 4, 4, 4]
        self.assertEqual(
            launched(range(7), [Traits(size) for size in sizes], Window(2, nbytes=4)),
            ["0 1 2 3", "4", "", "", "5", "6", "", ""],
        )

    def test_large_weight_is_begun_its_own_size_ahead(self) -> None:
        """A head of 1000 behind layers of 100: without bytes it would be begun two layers ahead, here ten."""
        sizes = [100] * 15 + [1000]
        steps = launched(range(16), [Traits(size) for size in sizes], Window(2, nbytes=250))
        self.assertIn("15", steps[6].split())
        self.assertEqual(steps[0], "0 1 2")
        # What comes before it is launched before it.
        self.assertEqual(steps[6], "8 9 10 11 12 13 14 15")

    def test_in_flight_is_bounded_by_bytes(self) -> None:
        """The bytes, and one weight that crosses them; or the depth."""
        rng = random.Random(1)
        for _ in range(100):
            sizes = [rng.choice((1, 3, 10, 60)) for _ in range(12)]
            depth, nbytes = rng.randrange(1, 4), rng.choice((5, 20, 100))
            chain = make_chain(depth, sizes, nbytes=nbytes)
            run_pass(chain, range(12))
            for window in run_pass(chain, range(12)):
                total = sum(sizes[use] for use in window)
                largest = max(sizes, default=0)
                self.assertLessEqual(total, max(max(nbytes, largest) + largest, depth * largest))

    def test_zero_bytes_leave_it_to_the_depth(self) -> None:
        sizes = [100] * 5 + [1000]
        self.assertEqual(
            launched(range(6), [Traits(size) for size in sizes], Window(2)), ["0 1", "2", "3", "4", "5", "", ""]
        )


class TestTogether(TestCase):
    def test_small_neighbours_are_one_launch(self) -> None:
        """wq wk wv wo w1: as many as the limit allows, begun when the first is due."""
        sizes = [8, 2, 2, 8, 30]
        traits = [Traits(size) for size in sizes]
        self.assertEqual(launched(range(5), traits, Window(1, together_nbytes=4)), ["0", "1+2", "", "3", "4", ""])
        self.assertEqual(launched(range(5), traits, Window(1, together_nbytes=12)), ["0+1+2", "", "", "3", "4", ""])

    def test_first_launches_of_a_pass_are_small(self) -> None:
        """Nothing hides them: what takes longer to gather than to start does not wait for others."""
        traits = [Traits(size << 20) for size in (3, 1, 1, 3, 8, 8, 8, 8)]
        self.assertEqual(
            launched(range(8), traits, Window(1, together_nbytes=16 << 20)),
            ["0+1", "", "2+3", "", "4", "5+6", "", "7", ""],
        )

    def test_weight_used_twice_does_not_travel_with_itself(self) -> None:
        self.assertEqual(launched([0, 0, 1], [Traits(1)] * 2, Window(1, together_nbytes=9)), ["0", "0+1", "", ""])

    def test_bundle_travels_together_whatever_it_weighs(self) -> None:
        traits = [Traits(1), *(Traits(50, bundle=1) for _ in range(3)), Traits(1)]
        self.assertEqual(launched(range(5), traits, Window(1, together_nbytes=10)), ["0", "1+2+3", "", "", "4", ""])

    def test_weights_of_two_meshes_travel_apart(self) -> None:
        traits = [Traits(1), Traits(1, lane=1, call=1), Traits(1)]
        self.assertEqual(launched(range(3), traits, Window(2, together_nbytes=9)), ["0+2 1", "", "", ""])

    def test_member_that_is_used_first_leaves_the_others_in_flight(self) -> None:
        chain = make_chain(1, together_nbytes=3)
        run_pass(chain, range(6))
        chain.begin()
        self.assertIsNone(chain.advance(1))  # 0 does not come
        self.assertEqual(expected_uses(chain), [2])
        self.assertIsNotNone(chain.advance(2))
        self.assertEqual(expected_uses(chain), [3, 4, 5])


class TestLanes(TestCase):
    def setUp(self) -> None:
        # Three blocks of attention (a weight) and experts (two); the experts of each block are a call of their own.
        self.traits = [
            trait
            for block in range(3)
            for trait in (Traits(10), Traits(100, lane=1, call=block), Traits(100, lane=1, call=block))
        ]

    def test_experts_are_gathered_one_block_ahead(self) -> None:
        """Each while its counterpart of the block before is used; the dense window moves on past them."""
        self.assertEqual(
            launched(range(9), self.traits, Window(1)), ["0 1 2", "3", "4", "5", "6", "7", "8", "", "", ""]
        )

    def test_two_blocks_ahead_and_none(self) -> None:
        two = launched(range(9), self.traits, Window(1, num_blocks=2))
        self.assertEqual(two, ["0 1 2 4 5", "3", "7", "8", "6", "", "", "", "", ""])
        none = launched(range(9), self.traits, Window(1, num_blocks=0))
        self.assertEqual(none, ["0 1", "3", "2", "4", "6", "5", "7", "", "8", ""])

    def test_first_block_is_not_begun_earlier_than_the_others(self) -> None:
        """Behind four dense layers, the experts of the first block wait until it is one block away."""
        traits = [Traits(10)] * 4 + self.traits
        steps = launched(range(13), traits, Window(1))
        self.assertEqual([step for step, text in enumerate(steps) if {"5", "6"} & set(text.split())], [2, 3])

    def test_single_block_is_gathered_in_time_but_not_at_the_begin(self) -> None:
        traits = [Traits(10)] * 8 + [Traits(30, lane=1, call=1)] + [Traits(10)]
        steps = launched(range(10), traits, Window(1, nbytes=20))
        self.assertEqual([step for step, text in enumerate(steps) if "8" in text.split()], [6])

    def test_small_experts_travel_together_within_a_block(self) -> None:
        steps = launched(range(9), self.traits, Window(1, together_nbytes=1000))
        self.assertEqual(steps, ["0+3+6 1+2", "", "4+5", "", "", "7+8", "", "", "", ""])

    def test_backward_goes_the_other_way(self) -> None:
        steps = launched(range(8, -1, -1), self.traits, Window(1))
        self.assertEqual(steps, ["8 7 6", "5", "4", "3", "2", "1", "0", "", "", ""])


class TestRanksOfAMesh(TestCase):
    """Ranks of a mesh use its weights alike, and those of the outermost call. What they use of others is their own
    matter: rank A has uses of a third mesh, rank B has none, or deviates elsewhere."""

    def setUp(self) -> None:
        self.rng = random.Random(0)

    def draw(self) -> tuple[list[Traits], Window, list[int]]:
        rng = self.rng
        num = rng.randrange(3, 9)
        traits = [
            Traits(rng.choice((1, 2, 5, 40)), rng.randrange(3), rng.randrange(3), rng.choice((-1, -1, 0)))
            for _ in range(num)
        ]
        window = Window(rng.randrange(1, 4), rng.choice((0, 7, 30)), rng.choice((0, 5, 50)), rng.randrange(3))
        return traits, window, [rng.randrange(num) for _ in range(rng.randrange(1, 25))]

    def seen(self, chain: Chain, traits: Sequence[Traits], uses: Sequence[int], lanes: set[int]) -> list[list[str]]:
        """What is expected of some lanes at the begin of a pass, and after each of their uses; and where they end."""

        def expected() -> list[str]:
            launches = ([chain.plan.uses[position] for position in launch] for launch in chain.expected(lanes))
            return sorted(map(str, launches))

        chain.begin()
        found = [expected()]
        for use in uses:
            chain.advance(use, traits[use].lane)
            if traits[use].lane in lanes:
                found.append([*expected(), *(str(chain.is_at_end(lane)) for lane in sorted(lanes))])
        chain.end()
        return found

    def test_expect_the_same_of_it(self) -> None:
        for _ in range(300):
            traits, window, uses = self.draw()
            later = list(uses)
            for _ in range(self.rng.randrange(3)):  # uses that are left out, or come anew
                if later and self.rng.random() < 0.5:
                    later.pop(self.rng.randrange(len(later)))
                later.insert(self.rng.randrange(len(later) + 1), self.rng.randrange(len(traits)))
            for lane in range(3):
                lanes = {0, lane}
                a, b = Chain(window, lambda: traits), Chain(window, lambda: traits)  # noqa: B023
                for one in (uses, later, uses):
                    own = [use for use in one if traits[use].lane in lanes]
                    self.assertEqual(self.seen(a, traits, one, lanes), self.seen(b, traits, own, lanes))

    def test_launch_in_the_same_order(self) -> None:
        """And whatever begins a launch is a use of theirs."""
        for _ in range(300):
            traits, window, uses = self.draw()
            for lane in range(3):
                lanes = {0, lane}
                own = [position for position, use in enumerate(uses) if traits[use].lane in lanes]
                whole, part = Plan(uses, traits, window), Plan([uses[position] for position in own], traits, window)
                order = []
                for launches in whole.launches:
                    for step, positions in launches:
                        if traits[uses[positions[0]]].lane == lane:
                            self.assertTrue(step == 0 or traits[uses[step - 1]].lane in lanes)
                            order.append((step, positions))
                expected = [
                    (0 if step == 0 else own[step - 1] + 1, tuple(own[position] for position in positions))
                    for launches in part.launches
                    for step, positions in launches
                    if traits[uses[own[positions[0]]]].lane == lane
                ]
                self.assertEqual(order, expected)
                self.assertEqual((whole.first(lane), whole.last(lane)), (part.first(lane), part.last(lane)))

    def test_keep_the_same_of_it(self) -> None:
        for _ in range(300):
            traits, window, uses = self.draw()
            sizes, lanes = [trait.nbytes for trait in traits], [trait.lane for trait in traits]
            budget = self.rng.randrange(100)
            backward = uses[::-1]
            everything = choose_kept(Plan(uses, traits, window), Plan(backward, traits, window), sizes, lanes, budget)
            self.assertLessEqual(sum(sizes[use] for use in everything), budget)
            for lane in range(3):
                plans = [
                    Plan([use for use in one if lanes[use] in (0, lane)], traits, window) for one in (uses, backward)
                ]
                kept = choose_kept(*plans, sizes, lanes, budget)
                own, expected = ([use for use in one if lanes[use] == lane] for one in (kept, everything))
                self.assertEqual(own, expected)


class TestKept(TestCase):
    def test_what_backward_uses_first_is_kept_as_far_as_the_budget_goes(self) -> None:
        forward, backward = (Plan(uses, [Traits(1)] * 5, Window(1)) for uses in ((0, 1, 2, 3, 4), (4, 3, 3, 2, 1)))
        sizes = [10, 20, 30, 5, 40]
        for budget, kept in ((0, ()), (4, ()), (5, (3,)), (35, (3, 2)), (39, (3, 2)), (40, (4,)), (45, (4, 3))):
            self.assertEqual(choose_kept(forward, backward, sizes, [0] * 5, budget), kept, budget)
        # 0 is not used in backward at all, and a weight of no size is not to be chosen.
        self.assertEqual(choose_kept(forward, backward, [10, 20, 30, 0, 40], [0] * 5, 1000), (4, 2, 1))
        self.assertEqual(choose_kept(Plan(), backward, sizes, [0] * 5, 1000), ())

    def test_experts_have_what_others_leave(self) -> None:
        """What is kept of the outermost call does not depend on them."""
        forward, backward = (Plan(uses, [Traits(1)] * 4, Window(1)) for uses in ((0, 1, 2, 3), (3, 2, 1, 0)))
        sizes, lanes = [10, 10, 30, 30], [0, 0, 1, 1]
        for budget, kept in ((10, (1,)), (20, (1, 0)), (49, (1, 0)), (50, (3, 1, 0)), (80, (3, 2, 1, 0))):
            self.assertEqual(choose_kept(forward, backward, sizes, lanes, budget), kept, budget)

    def test_meshes_of_experts_share_in_equal_parts(self) -> None:
        """What is kept of one of them does not depend on what there is of another."""
        forward, backward = (Plan(uses, [Traits(1)] * 4, Window(1)) for uses in ((0, 1, 2, 3), (3, 2, 1, 0)))
        sizes, lanes = [10, 20, 20, 20], [0, 1, 2, 2]
        for budget, kept in ((49, (0,)), (50, (3, 1, 0)), (89, (3, 1, 0)), (90, (3, 2, 1, 0))):
            self.assertEqual(choose_kept(forward, backward, sizes, lanes, budget), kept, budget)


class TestFormatPlan(TestCase):
    def formatted(self, name: str, uses: Sequence[int], sizes: Sequence[int], window: Window) -> str:
        chain = Chain(window, lambda: [Traits(size) for size in sizes])
        run_pass(chain, uses)
        return plan_text(plan_report(name, chain, NAMES))

    def test_each_use_launches_what_is_due_after_it(self) -> None:
        self.assertExpectedInline(
            self.formatted(
                "forward of Model", range(4), (9 << 10, 3 << 10, 3 << 10, 8 << 10), Window(2, 4096, 6 << 10)
            ),
            """\
forward of Model: 4 weight uses; 2 uses or 4.0 KiB are gathered ahead, whichever is more; one launch carries up to 6.0
  KiB
  begin                                        gather table.weight (9.0 KiB), layer0.weight + layer1.weight (6.0 KiB)
  use table.weight                             gather head.weight (8.0 KiB)
  use layer0.weight
  use layer1.weight
  use head.weight""",
        )

    def test_launches_of_many_weights_take_several_lines(self) -> None:
        self.assertExpectedInline(
            self.formatted("forward of Model", [0, 1, 2, 3] * 2, (5,) * 4, Window(9, 0, 10**9)),
            """\
forward of Model: 8 weight uses; 9 uses are gathered ahead; one launch carries up to 953.7 MiB
  begin                                        gather table.weight + layer0.weight + layer1.weight + head.weight (20 B),
                                                      table.weight + layer0.weight + layer1.weight + head.weight (20 B)
  use table.weight
  use layer0.weight
  use layer1.weight
  use head.weight
  use table.weight
  use layer0.weight
  use layer1.weight
  use head.weight""",
        )

    def test_depth_zero_gathers_at_the_use(self) -> None:
        self.assertExpectedInline(
            self.formatted("backward", (3, 1), (1,) * 4, Window(0, 100, 100)),
            """\
backward: 2 weight uses; nothing is gathered ahead
  use head.weight                              gather head.weight
  use layer0.weight                            gather layer0.weight""",
        )

    def test_reused_weight_appears_once_for_each_use(self) -> None:
        self.assertExpectedInline(
            self.formatted("forward of Model", (1, 1, 1), (5,) * 4, Window(1)),
            """\
forward of Model: 3 weight uses; 1 use is gathered ahead
  begin                                        gather layer0.weight (5 B)
  use layer0.weight                            gather layer0.weight (5 B)
  use layer0.weight                            gather layer0.weight (5 B)
  use layer0.weight""",
        )

    def test_sizes(self) -> None:
        self.assertEqual(
            [format_nbytes(n) for n in (0, 1023, 1536, 3 << 20, 5 << 29)],
            ["0 B", "1023 B", "1.5 KiB", "3.0 MiB", "2.5 GiB"],
        )


class TestHeldWeights(TestCase):
    """What a pass holds is counted as it goes: it is what the window has and what stays, at each use."""

    def test_random_plans(self) -> None:
        numbers = random.Random(7)
        for _ in range(300):
            num = numbers.randint(1, 8)
            traits = [Traits(numbers.choice((1, 5, 9 << 20)), numbers.choice((0, 0, 1))) for _ in range(num)]
            uses = [numbers.randrange(num) for _ in range(numbers.randint(0, 20))]
            plan = Plan(
                uses, traits, Window(numbers.randint(0, 3), numbers.choice((0, 10)), numbers.choice((0, 1 << 25)))
            )
            nbytes = [numbers.randint(1, 100) for _ in range(num)]
            kept = frozenset(numbers.sample(range(num), numbers.randint(0, num)))
            for is_backward in (False, True):
                held = held_nbytes(plan, kept, nbytes, is_backward=is_backward)
                for step in range(len(uses) + 1):
                    used = set(uses[:step])
                    there = set(kept - used if is_backward else kept & used)
                    for positions in plan.window(plan.cursors(step)):
                        there.update(uses[position] for position in positions)
                    self.assertEqual(held.between[step], sum(nbytes[use] for use in there))
                    if step:
                        there.add(uses[step - 1])
                        self.assertEqual(held.during[step - 1], sum(nbytes[use] for use in there))
