"""The plan of gathers as plain data: what is launched when, and how it prints. No process group in here."""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace

from expecttest import TestCase

from dtensor_gtp._comm.debug import format_nbytes
from dtensor_gtp._report.facts import plan_report
from dtensor_gtp._report.text import plan_text
from dtensor_gtp._schedule.held_weights import choose_kept, held_nbytes
from dtensor_gtp._schedule.passes import Chain
from dtensor_gtp._schedule.plans import Plan, Traits, Window

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


def drawn(seed: int) -> Iterator[tuple[random.Random, list[Traits], Window, list[int]]]:
    """A hundred times: weights of three meshes, a window and uses, and who has drawn them."""
    rng = random.Random(seed)
    for _ in range(100):
        traits = [
            Traits(
                *(rng.choice((1, 2, 5, 40)), rng.randrange(3), rng.randrange(3), rng.choice((-1, -1, 0))),
                is_group=rng.random() < 0.5,
            )
            for _ in range(rng.randrange(1, 9))
        ]
        sizes = (rng.choice((0, 7, 30)), rng.choice((0, 5, 50)))
        window = Window(rng.randrange(1, 4), *sizes, rng.randrange(3), is_backward=rng.random() < 0.5)
        yield rng, traits, window, [rng.randrange(len(traits)) for _ in range(rng.randrange(1, 25))]


def launched(uses: Sequence[int], traits: Sequence[Traits], window: Window) -> list[str]:
    """For each step of a plan, the uses that are launched: ``0 1+2`` are two launches."""
    plan = Plan(uses, traits, window)
    return [
        " ".join("+".join(str(uses[position]) for position in launch.positions) for launch in launches)
        for launches in plan.launches
    ]


class TestChain(TestCase):
    def test_what_is_in_flight_after_each_use(self) -> None:
        """A pass after others: what is in flight at its begin and after each use, and its deviations from the plan."""
        for name, depth, before, uses, windows, num_deviations in (
            ("a first pass expects nothing", 2, [], [3, 1, 2], [[], [], [], []], 3),
            ("it slides by a use", 2, [range(4)], range(4), [[0, 1], [1, 2], [2, 3], [3], []], 0),
            ("depth 0", 0, [range(3)], range(3), [[]] * 4, 0),
            ("depth beyond the plan", 9, [range(3)], range(3), [[0, 1, 2], [1, 2], [2], []], 0),
            ("a use again", 3, [[0, 0, 1, 0]], [0, 0, 1, 0], [[0, 0, 1], [0, 1, 0], [1, 0], [0], []], 0),
            ("skipped uses move it ahead", 2, [range(6)], [0, 3, 4, 5], [[0, 1], [1, 2], [4, 5], [5], []], 1),
            (
                *("an unplanned use moves nothing", 2, [range(4)], [0, 9, 1, 2, 3]),
                *([[0, 1], [1, 2], [1, 2], [2, 3], [3], []], 1),
            ),
            (
                *("a use behind does not move it back", 2, [range(4)], [0, 1, 2, 0, 3]),
                *([[0, 1], [1, 2], [2, 3], [3], [3], []], 1),
            ),
            ("a reversed pass is learned", 1, [[0, 1, 2], [2, 1, 0]], [2, 1, 0], [[2], [1], [0], []], 0),
            ("uses after the end", 2, [[0, 1]], [0, 1, 2], [[0, 1], [1], [], []], 1),
            ("a pass that ended early", 2, [range(4), [0, 1]], [0, 1], [[0, 1], [1], []], 0),
        ):
            with self.subTest(name):
                chain = make_chain(depth)
                for other in before:
                    run_pass(chain, other)
                earlier = chain.num_deviations
                self.assertEqual(run_pass(chain, uses), windows)
                self.assertEqual(chain.num_deviations - earlier, num_deviations)
                self.assertEqual(chain.plan.uses, tuple(uses))

    def test_a_repeated_pass_keeps_its_plan(self) -> None:
        chain = make_chain(depth=2)
        run_pass(chain, [2, 0, 1, 2])
        plan = chain.plan
        run_pass(chain, [2, 0, 1, 2])
        self.assertIs(chain.plan, plan, "it is not made anew")

    def test_a_pass_that_never_ended_is_forgotten(self) -> None:
        chain = make_chain(depth=2)
        run_pass(chain, range(3))
        chain.begin()
        for use in (0, 7):
            chain.advance(use)
        self.assertEqual(run_pass(chain, range(3)), [[0, 1], [1, 2], [2], []])

    def test_whether_a_use_was_planned_is_told(self) -> None:
        chain = make_chain(depth=2)
        run_pass(chain, range(4))
        chain.begin()
        self.assertEqual([chain.advance(use) is None for use in (0, 1, 2, 0, 3)], [False, False, False, True, False])
        self.assertTrue(chain.is_at_end())

    def test_what_is_due_after_each_use_adds_up_to_what_is_expected(self) -> None:
        """Whoever launches what is due, and drops nothing, has in flight what a fresh look at the plan would launch."""
        for _, traits, window, uses in drawn(0):
            chain = Chain(window, lambda traits=traits: traits)
            run_pass(chain, uses)
            chain.begin()
            in_flight = [p for launch in chain.plan.launches[0] for p in launch.positions]
            for position, use in enumerate(uses):
                self.assertNotEqual(position in in_flight, position in chain.plan.served, "launched before its use")
                in_flight = [each for each in in_flight if each != position]
                due = chain.advance(use, traits[use].lane)
                assert due is not None
                in_flight += [p for launch in due for p in launch.positions]
                self.assertEqual(sorted(in_flight), sorted(p for launch in chain.expected() for p in launch))
            order = [p for step in chain.plan.launches for launch in step for p in launch.positions]
            for lane in range(3):
                own = [p for p in order if traits[uses[p]].lane == lane]
                self.assertEqual(own, sorted(own), "a lane is launched in order")


# Three blocks of attention (a weight) and experts (two); the experts of each block are a call of their own.
BLOCKS = [
    trait
    for block in range(3)
    for trait in (Traits(10), Traits(100, lane=1, call=block), Traits(100, lane=1, call=block))
]


def sized(*sizes: int) -> list[Traits]:
    return [Traits(size) for size in sizes]


class TestLaunches(TestCase):
    def check(self, *cases: tuple[str, Sequence[Traits], Iterable[int], Window, Sequence[str]]) -> None:
        """A name, weights, their uses, the window, and for each step what is launched after it."""
        for name, traits, uses, window, steps in cases:
            with self.subTest(name):
                self.assertEqual(launched(list(uses), traits, window), steps)

    def test_windows_in_bytes(self) -> None:
        small, head, long = sized(1, 1, 1, 1, 4, 4, 4), sized(*[100] * 5, 1000), sized(*[100] * 7, 600)
        self.check(
            # until as many bytes are ahead, and as many uses at least
            ("small", small, range(7), Window(2, nbytes=4), ["0 1 2 3", "4", "", "", "5", "6", "", ""]),
            ("by depth alone", head, range(6), Window(2), ["0 1", "2", "3", "4", "5", "", ""]),
            # a head its own size ahead, behind all that comes before it
            ("by size", long, range(8), Window(2, nbytes=250), ["0 1 2", "3", "4 5 6 7", "", "", "", "", "", ""]),
        )

    def test_what_travels_together(self) -> None:
        small, first = sized(8, 2, 2, 8, 30), sized(*(size << 20 for size in (3, 1, 1, 3, 8, 8, 8, 8)))
        bundle = [Traits(1), *[Traits(50, bundle=1)] * 3, Traits(1)]
        meshes = [Traits(1), Traits(1, lane=1, call=1), Traits(1)]
        self.check(
            ("small neighbours", small, range(5), Window(1, together_nbytes=4), ["0", "1+2", "", "3", "4", ""]),
            ("as many as fit", small, range(5), Window(1, together_nbytes=12), ["0+1+2", "", "", "3", "4", ""]),
            # nothing hides the first ones: what takes longer to gather than to start does not wait for others
            (
                *("first launches are small", first, range(8), Window(1, together_nbytes=16 << 20)),
                ["0+1", "", "2+3", "", "4", "5+6", "", "7", ""],
            ),
            ("a weight not with itself", sized(1, 1), [0, 0, 1], Window(1, together_nbytes=9), ["0", "0+1", "", ""]),
            ("a bundle of any size", bundle, range(5), Window(1, together_nbytes=10), ["0", "1+2+3", "", "", "4", ""]),
            ("meshes apart", meshes, range(3), Window(2, together_nbytes=9), ["0+2 1", "", "", ""]),
        )

    def test_a_backward_begins_with_little_ahead(self) -> None:
        """A head, a large block and small ones: groups ahead have half of what was used before, or one use does."""
        head, *blocks = sized(*(size << 20 for size in (8, 40, *[8] * 8)))
        groups = [head, *(block._replace(is_group=True) for block in blocks)]
        ahead = Window(1, nbytes=40 << 20, together_nbytes=24 << 20)
        forward = ["0 1", "", "2+3+4 5+6+7", "", "8+9", "", "", "", "", "", ""]
        small = ["0", "1", "2", "3+4+5", "6+7+8", "", "9", "", "", "", ""]
        self.check(
            ("in a forward", groups, range(10), ahead, forward),
            ("a backward", groups, range(10), replace(ahead, is_backward=True), small),
            ("no groups", [head, *blocks], range(10), replace(ahead, is_backward=True), forward),
        )

    def test_experts(self) -> None:
        """Each block while its counterpart of the block before is used; the dense window moves on past them."""
        ahead, small = Window(1), Window(1, together_nbytes=1000)
        single = [*sized(*[10] * 8), Traits(30, lane=1, call=1), Traits(10)]
        self.check(
            ("one block", BLOCKS, range(9), ahead, ["0 1 2", "3", "4", "5", "6", "7", "8", "", "", ""]),
            ("two", BLOCKS, range(9), Window(1, num_blocks=2), ["0 1 2 4 5", "3", "7", "8", "6", "", "", "", "", ""]),
            ("none", BLOCKS, range(9), Window(1, num_blocks=0), ["0 1", "3", "2", "4", "6", "5", "7", "", "8", ""]),
            ("backward", BLOCKS, range(8, -1, -1), ahead, ["8 7 6", "5", "4", "3", "2", "1", "0", "", "", ""]),
            ("small ones", BLOCKS, range(9), small, ["0+3+6 1+2", "", "4+5", "", "", "7+8", "", "", "", ""]),
            # behind dense layers, the first block waits until it is one block away
            (
                "dense layers first",
                sized(*[10] * 4) + BLOCKS,
                range(13),
                ahead,
                [*"01", "2 5", "3 6", *"4789", "10", "11", "12", "", "", ""],
            ),
            (
                *("a single block, in time", single, range(10), Window(1, nbytes=20)),
                ["0 1", *"23456", "7 8", "9", "", "", ""],
            ),
        )

    def test_a_member_that_is_used_first_leaves_the_others_in_flight(self) -> None:
        chain = make_chain(1, together_nbytes=3)
        run_pass(chain, range(6))
        chain.begin()
        self.assertIsNone(chain.advance(1))  # 0 does not come
        self.assertEqual(expected_uses(chain), [2])
        self.assertIsNotNone(chain.advance(2))
        self.assertEqual(expected_uses(chain), [3, 4, 5])

    def test_in_flight_is_bounded_by_bytes(self) -> None:
        """The bytes, and one weight that crosses them; or the depth."""
        rng = random.Random(1)
        for _ in range(50):
            sizes = [rng.choice((1, 3, 10, 60)) for _ in range(12)]
            depth, nbytes = rng.randrange(1, 4), rng.choice((5, 20, 100))
            chain = make_chain(depth, sizes, nbytes=nbytes)
            run_pass(chain, range(12))
            largest = max(sizes)
            for window in run_pass(chain, range(12)):
                total = sum(sizes[use] for use in window)
                self.assertLessEqual(total, max(max(nbytes, largest) + largest, depth * largest))


class TestRanksOfAMesh(TestCase):
    """Ranks of a mesh use its weights alike, and those of the outermost call. What they use of others is their own
    matter: rank A has uses of a third mesh, rank B has none, or deviates elsewhere."""

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
        for rng, traits, window, uses in drawn(0):
            later = list(uses)
            for _ in range(rng.randrange(3)):  # uses that are left out, or come anew
                if later and rng.random() < 0.5:
                    later.pop(rng.randrange(len(later)))
                later.insert(rng.randrange(len(later) + 1), rng.randrange(len(traits)))
            for lane in range(3):
                lanes = {0, lane}
                a, b = Chain(window, lambda: traits), Chain(window, lambda: traits)  # noqa: B023
                for one in (uses, later, uses):
                    own = [use for use in one if traits[use].lane in lanes]
                    self.assertEqual(self.seen(a, traits, one, lanes), self.seen(b, traits, own, lanes))

    def test_launch_in_the_same_order(self) -> None:
        """And whatever begins a launch is a use of theirs."""
        for _, traits, window, uses in drawn(0):
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
        for rng, traits, window, uses in drawn(0):
            sizes, lanes = [trait.nbytes for trait in traits], [trait.lane for trait in traits]
            budget = rng.randrange(100)
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

    def test_experts_share_in_equal_parts_what_others_leave(self) -> None:
        """What is kept of the outermost call does not depend on them, nor that of one mesh of them on another."""
        forward, backward = (Plan(uses, [Traits(1)] * 4, Window(1)) for uses in ((0, 1, 2, 3), (3, 2, 1, 0)))
        one = [(10, (1,)), (20, (1, 0)), (49, (1, 0)), (50, (3, 1, 0)), (80, (3, 2, 1, 0))]
        two = [(49, (0,)), (50, (3, 1, 0)), (89, (3, 1, 0)), (90, (3, 2, 1, 0))]
        for sizes, lanes, cases in (([10, 10, 30, 30], [0, 0, 1, 1], one), ([10, 20, 20, 20], [0, 1, 2, 2], two)):
            for budget, kept in cases:
                self.assertEqual(choose_kept(forward, backward, sizes, lanes, budget), kept, budget)


class TestStays(TestCase):
    def test_as_long_as_others_fit_the_window(self) -> None:
        """By the places of two uses: the weight stays from the first to the second."""
        fixed = [Traits(10), Traits(10, may_stay=False)]
        experts = [Traits(10), Traits(10), Traits(100, lane=1)]
        for name, traits, uses, nbytes, stays in (
            ("at once", sized(10, 10), (0, 0, 1), 10, {0: 1}),
            ("not without a window", sized(10, 10), (0, 0, 1), 9, {}),
            ("a block that backward has recomputed", sized(10, 10, 10), (0, 1, 2, 2, 1, 0), 30, {2: 3, 1: 4, 0: 5}),
            ("a byte too many", sized(10, 10, 10), (0, 1, 2, 2, 1, 0), 29, {2: 3, 1: 4}),
            ("what is used twice in between counts once", sized(10, 10), (0, 1, 1, 0), 20, {1: 2, 0: 3}),
            ("from each use to the next", sized(10, 10), (0, 1, 0, 1, 0), 20, {0: 2, 1: 3, 2: 4}),
            ("what another mesh uses does not count", experts, (0, 2, 1, 0), 20, {0: 3}),
            ("what may not", fixed, (1, 1, 0, 0), 10, {2: 3}),
        ):
            with self.subTest(name):
                plan = Plan(uses, traits, Window(1, nbytes))
                self.assertEqual(plan.stays, stays)
                launched = [p for step in plan.launches for launch in step for p in launch.positions]
                self.assertEqual(sorted([*launched, *stays.values()]), [*range(len(uses))])

    def test_what_stays_fits_the_window(self) -> None:
        """In each lane."""
        for _, traits, window, uses in drawn(3):
            plan = Plan(uses, traits, window)
            for step in range(1, len(uses) + 1):
                there = [uses[begin] for begin, end in plan.stays.items() if begin < step <= end]
                for lane in range(3):
                    sizes = [traits[use].nbytes for use in there if traits[use].lane == lane]
                    self.assertLessEqual(sum(sizes), window.nbytes)

    def test_a_deviation_ends_it_at_the_use_that_is_left_out(self) -> None:
        chain = make_chain(1, [10] * 4, nbytes=20)
        run_pass(chain, [0, 1, 0, 2, 3])
        chain.begin()
        for use, expected in ((0, True), (1, True), (2, False), (0, False)):
            chain.advance(use)
            self.assertEqual(chain.stays(0, 0), expected, use)


class TestFormatPlan(TestCase):
    def formatted(self, name: str, uses: Sequence[int], sizes: Sequence[int], window: Window) -> str:
        chain = Chain(window, lambda: [Traits(size) for size in sizes])
        run_pass(chain, uses)
        return plan_text(plan_report(name, chain, NAMES, range(len(uses))))

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

    def test_depth_zero_gathers_at_the_use(self) -> None:
        self.assertExpectedInline(
            self.formatted("backward", (3, 1), (1,) * 4, Window(0, 100, 100)),
            """\
backward: 2 weight uses; nothing is gathered ahead
  use head.weight                              gather head.weight
  use layer0.weight                            gather layer0.weight""",
        )

    def test_sizes(self) -> None:
        self.assertEqual(
            [format_nbytes(n) for n in (0, 1023, 1536, 3 << 20, 5 << 29)],
            ["0 B", "1023 B", "1.5 KiB", "3.0 MiB", "2.5 GiB"],
        )


class TestHeldWeights(TestCase):
    def test_random_plans(self) -> None:
        """What a pass holds is counted as it goes: it is what the window has and what stays, at each use."""
        for rng, traits, window, uses in drawn(7):
            plan, num = Plan(uses, traits, rng.choice((window, Window(0)))), len(traits)
            nbytes = [rng.randint(1, 100) for _ in range(num)]
            kept = frozenset(rng.sample(range(num), rng.randint(0, num)))
            for is_backward in (False, True):
                held = held_nbytes(plan, kept, nbytes, is_backward=is_backward)
                for step in range(len(uses) + 1):
                    used = set(uses[:step])
                    there = set(kept - used if is_backward else kept & used)
                    for positions in plan.window(
                        {lane: sum(p < step for p in places) for lane, places in plan.lanes.items()}
                    ):
                        there.update(uses[position] for position in positions)
                    there.update(uses[begin] for begin, end in plan.stays.items() if begin < step <= end)
                    self.assertEqual(held.between[step], sum(nbytes[use] for use in there))
                    if step:
                        there.add(uses[step - 1])
                        self.assertEqual(held.during[step - 1], sum(nbytes[use] for use in there))
