"""Who sends which part of a tensor to whom when replicas are rebuilt. No process groups in here."""

import itertools

import torch
from counting import num_calls
from expecttest import TestCase

from dtensor_gtp.elastic import ReplicaLayout, WeightSpec, plan_replicas, replicas_of
from dtensor_gtp.elastic.plan import Box, Move, box_of_rank, plan_moves

WEIGHTS = (
    WeightSpec("rows", (11, 3)),
    WeightSpec("blocks", (20, 2), block_size=4),
    WeightSpec("wo", (5, 24), tp_dim=1, tp_block_size=4),
    WeightSpec("wq", (24, 2), tp_dim=0, tp_block_size=4),
    WeightSpec("norm", (6,), dim=None),
)
LAYOUTS = (
    replicas_of([[0, 1, 2], [3, 4, 5, 6], [7]]),
    replicas_of([[7, 6], [0, 2, 4], [5, 3, 1]]),
    replicas_of([[0, 1, 2, 3, 4, 5, 6, 7]]),
    replicas_of([[0, 1, 2, 3], [4, 5, 6, 7]], tp=2, weights=WEIGHTS),
    replicas_of([[0, 1, 2, 3], [4, 5], [6], [7]], tp=4, weights=WEIGHTS),
)


def boxes(weight: WeightSpec, layout: ReplicaLayout) -> dict[int, Box]:
    return {rank: box_of_rank(weight, layout, rank) for rank in layout.places}


class TestMoves(TestCase):
    def test_every_element_arrives_once_from_a_rank_that_holds_it(self) -> None:
        """All pairs of layouts, with ranks lost that hold nothing alone."""
        num_moves = 0
        for before, after in itertools.product(LAYOUTS, LAYOUTS):
            replica_of = {rank: place.replica for rank, place in after.places.items()}
            for weight, num_lost in itertools.product(WEIGHTS, (0, 3)):
                alive = {rank: box for rank, box in boxes(weight, before).items() if rank >= num_lost}
                wanted = boxes(weight, after)
                moves, missing = plan_moves(alive, wanted, replica_of)
                num_moves += len(moves)
                for rank, box in wanted.items():
                    count = torch.zeros(weight.shape)
                    for source, _, part in (move for move in moves if move.target == rank):
                        self.assertEqual(part.intersect(alive[source]), part)
                        count[part.slices] += 1
                    for target, part in missing:
                        if target == rank:
                            count[part.slices] += 1
                    expected = torch.zeros(weight.shape)
                    expected[box.slices] = 1
                    self.assertTrue(torch.equal(count, expected), (weight, rank))
                for _, part in missing:
                    self.assertTrue(all(part.intersect(box) is None for box in alive.values()))
        self.assertGreater(num_moves, 1000)

    def test_the_nearest_rank_sends(self) -> None:
        """What a rank has stays there; then its replica; then the replicas after its own in turn."""
        layout = replicas_of([[0, 1], [2, 3], [4, 5]])
        weight = WeightSpec("w", (8, 1))
        held = {rank: box for rank, box in boxes(weight, layout).items() if rank in (0, 1, 4, 5)}
        replica_of = {rank: place.replica for rank, place in layout.places.items()}
        moves, missing = plan_moves(held, boxes(weight, layout), replica_of)
        self.assertEqual(missing, [])
        self.assertEqual(
            [(source, target) for source, target, _ in moves], [(r, s) for s, r in enumerate((0, 1, 4, 5, 4, 5))]
        )
        whole = {rank: Box((0, 0), (8, 1)) for rank in range(6)}
        moves, _ = plan_moves(held, {1: whole[1]}, replica_of)
        self.assertEqual(moves, [Move(1, 1, Box((4, 0), (4, 1))), Move(0, 1, Box((0, 0), (4, 1)))])

    def test_what_nobody_holds_is_named(self) -> None:
        held = {0: Box((0, 0), (3, 2))}
        moves, missing = plan_moves(held, {1: Box((1, 0), (4, 2))}, {0: 0, 1: 1})
        self.assertEqual(moves, [Move(0, 1, Box((1, 0), (2, 2)))])
        self.assertEqual(missing, [(1, Box((3, 0), (2, 2)))])

    def test_subtract_leaves_boxes_that_do_not_overlap(self) -> None:
        outer = Box((1, 2, 0), (4, 3, 2))
        for offset in itertools.product(range(6), range(6), range(2)):
            part = Box(offset, (2, 2, 1))
            count = torch.zeros(8, 8, 4)
            for rest in outer.subtract(part):
                count[rest.slices] += 1
            expected = torch.zeros(8, 8, 4)
            expected[outer.slices] = 1
            expected[part.slices] = 0
            self.assertTrue(torch.equal(count, expected))

    def test_a_thousand_ranks(self) -> None:
        layout = plan_replicas(replicate=16, gtp=64)
        weight = WeightSpec("w", (16384, 4096))
        replica_of = {rank: place.replica for rank, place in layout.places.items()}
        held = {rank: box for rank, box in boxes(weight, layout).items() if rank % 64}
        held[0] = box_of_rank(weight, layout, 0)
        wanted = boxes(weight, layout)
        (moves, missing), work = num_calls(lambda: plan_moves(held, wanted, replica_of))
        self.assertLess(work, 750_000)  # half as many, today; every rank with every other would be a million boxes
        self.assertEqual((len(moves), missing), (1024, []))
