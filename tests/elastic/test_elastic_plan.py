"""The plan of non-uniform replicas: who holds what, who sums it with whom. No process groups in here."""

import itertools
import runpy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from counting import num_calls
from expecttest import TestCase

from dtensor_gtp.elastic import (
    MemoryModel,
    ReplicaLayout,
    WeightSpec,
    check_memory,
    plan_replicas,
    plan_sync,
    replicas_of,
)
from dtensor_gtp.elastic.plan import box_of_rank, segments_of
from dtensor_gtp.elastic.replicas import choose_sizes
from dtensor_gtp.placement import chunk_size_and_offset

# Rows that nothing divides, fewer rows than ranks, blocks, columns, tensor parallelism on either dim and on none.
WEIGHTS = (
    WeightSpec("embedding", (11, 3)),
    WeightSpec("few", (2, 5)),
    WeightSpec("blocks", (20, 2), block_size=4),
    WeightSpec("columns", (3, 7), dim=1),
    WeightSpec("wq", (24, 2), tp_dim=0, tp_block_size=4, block_size=2),
    WeightSpec("wo", (5, 24), tp_dim=1, tp_block_size=4),
    WeightSpec("both", (4, 13, 2), dim=1, tp_dim=1),
    WeightSpec("norm", (6,), dim=None),
)


def layouts(replicate: int, gtp: int) -> Iterator[ReplicaLayout]:
    """Every outcome of failures, of fewer and smaller replicas, too: how many ranks each replica has left."""
    for left in itertools.product(range(gtp + 1), repeat=replicate):
        if any(left):
            yield replicas_of(consecutive(left))


def consecutive(sizes: Sequence[int]) -> list[list[int]]:
    ends = list(itertools.accumulate(sizes))
    return [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]


def tensor_parallel_layouts() -> Iterator[ReplicaLayout]:
    for gtp, tp in ((1, 2), (2, 2), (2, 3), (1, 4)):
        cells = list(itertools.product(range(2), range(gtp), range(tp)))
        for num_failed in range(4):
            for failed in itertools.islice(itertools.combinations(cells, num_failed), 0, None, 7):
                yield plan_replicas(replicate=2, gtp=gtp, tp=tp, failed=failed, weights=WEIGHTS)


def simulate(layout: ReplicaLayout, weight: WeightSpec, seed: int) -> None:
    """Sum gradients in one process as the owners would: every rank must end up with its part of the whole sum."""
    generator = torch.Generator().manual_seed(seed)
    counts = layout.batch_counts(layout.num_data_ranks + seed % 5)
    total = sum(map(sum, counts))
    replica_grads = [torch.randn(weight.shape, generator=generator, dtype=torch.float64) for _ in layout.replicas]
    expected = sum(grad * sum(c) / total for grad, c in zip(replica_grads, counts, strict=True))
    boxes = {rank: box_of_rank(weight, layout, rank) for rank in layout.places}
    shards = {rank: replica_grads[layout.places[rank].replica][box.slices].clone() for rank, box in boxes.items()}
    done = {rank: torch.zeros_like(shard, dtype=torch.int) for rank, shard in shards.items()}
    for segment, holders in segments_of(weight, layout):
        value, owners = 0.0, []
        for count, copies in zip(counts, holders, strict=True):
            for rank in copies:
                rows = segment.within(boxes[rank])
                value = value + shards[rank][rows] * (sum(count) / total / len(copies))
                owners.append((rank, rows))
        for rank, rows in owners:
            shards[rank][rows] = value
            done[rank][rows] += 1
    for rank, shard in shards.items():
        assert bool((done[rank] == 1).all()), (str(layout), weight, rank, done[rank])
        torch.testing.assert_close(shard, expected[boxes[rank].slices])


class TestReplicas(TestCase):
    def test_ranks_are_packed_in_the_order_of_their_coordinates(self) -> None:
        layout = plan_replicas(
            replicate=3, gtp=2, tp=2, failed={(1, r, c) for r in (0, 1) for c in (0, 1)} | {(2, 0, 1)}
        )
        self.assertExpectedInline(
            str(layout).replace("; ", ";\n    "),
            """\
2 replicas of 7 ranks
  replica 0  gtp 2 x tp 2   ranks 0-3
  replica 1  gtp 3          ranks 4-6  1 of 4 ranks failed;
    tp 2 -> 1: 2 does not divide 3, and no rank may be idle;
    gtp 2 -> 3""",
        )

    def test_any_pattern_of_failures_leaves_consecutive_ranks(self) -> None:
        """Which ranks of a replica failed does not matter, only how many."""
        for replicate, gtp in ((2, 4), (3, 3)):
            cells = [(replica, row, 0) for replica in range(replicate) for row in range(gtp)]
            for failed in itertools.chain.from_iterable(itertools.combinations(cells, n) for n in range(len(cells))):
                left = [gtp - sum(f[0] == replica for f in failed) for replica in range(replicate)]
                layout = plan_replicas(replicate=replicate, gtp=gtp, failed=failed)
                self.assertEqual([r.gtp for r in layout.replicas], [n for n in left if n])
                self.assertEqual([list(r.ranks) for r in layout.replicas], [m for m in consecutive(left) if m])

    def test_explicit_replicas_in_any_rank_order(self) -> None:
        """Process groups count ranks in ascending order, so grids ascend along both axes; rows stay together."""
        layout = replicas_of([[5, 1], [], [0, 4, 2, 3]], tp=2)
        self.assertEqual([replica.ranks for replica in layout.replicas], [(1, 5), (0, 2, 3, 4)])
        self.assertEqual(replicas_of([[4, 0, 5, 2], [1, 3]], tp=2).replicas[0].grid, ((0, 4), (2, 5)))
        for replica in layout.replicas:
            grid = torch.tensor(replica.grid)
            self.assertTrue(all(bool((grid.diff(dim=axis) > 0).all()) for axis in (0, 1)))

    def test_the_tp_size_that_loses_least_is_taken_and_explained(self) -> None:
        heads = [WeightSpec("wq", (64, 4), tp_dim=0, tp_block_size=8), WeightSpec("embedding", (9, 4))]
        cases = [(8, 2, 4), (7, 2, 4), (6, 2, 4), (4, 2, 4), (3, 1, 4), (1, 2, 4)]
        self.assertExpectedInline(
            "\n".join(f"{num} ranks: {choose_sizes(num, gtp, tp, heads)}" for num, gtp, tp in cases).replace(
                "; ", ";\n  "
            ),
            """\
8 ranks: (2, 4, '')
7 ranks: (7, 1, '1 of 8 ranks failed;
  tp 4 -> 1: 2 to 4 do not divide 7, and no rank may be idle;
  gtp 2 -> 7')
6 ranks: (3, 2, "2 of 8 ranks failed;
  tp 4 -> 2: tp 3 would idle 11% of the time in 'wq' (8 blocks over 3 ranks, 3 on the fullest);
  gtp 2 -> 3")
4 ranks: (1, 4, '4 of 8 ranks failed;
  gtp 2 -> 1')
3 ranks: (3, 1, "1 of 4 ranks failed;
  tp 4 -> 1: tp 3 would idle 11% of the time in 'wq' (8 blocks over 3 ranks, 3 on the fullest);
  gtp 1 -> 3")
1 ranks: (1, 1, '7 of 8 ranks failed;
  tp 4 -> 1: 2 to 4 do not divide 1, and no rank may be idle;
  gtp 2 -> 1')""",
        )
        # Ten heads on four ranks make each wait for one with three; on three ranks, with four of ten, it is no worse.
        ten = WeightSpec("wq", (40, 4), tp_dim=0, tp_block_size=4)
        for num, expected in ((3, [16, 16, 8]), (4, [12, 12, 12, 4])):
            layout = replicas_of([range(num)], tp=4, weights=[ten])
            self.assertEqual([box_of_rank(ten, layout, rank).size[0] for rank in range(num)], expected)
        # Six heads go over three ranks evenly: tensor parallelism stays, as large as it can.
        self.assertEqual(choose_sizes(3, 1, 4, [WeightSpec("wq", (12, 4), tp_dim=0, tp_block_size=2)])[:2], (1, 3))

    def test_errors(self) -> None:
        def pair(gtp: int, *failed: Any, **options: Any) -> ReplicaLayout:
            return plan_replicas(replicate=2, gtp=gtp, failed=set(failed), **options)

        layout = replicas_of([[0], [1, 2]])
        heads = [WeightSpec(name, (rows, 4), tp_dim=0, tp_block_size=4) for name, rows in (("wq", 10), ("wk", 8))]
        for error, message, call in (
            (ValueError, "but rank 1 is in replica 0 and in replica 1", lambda: replicas_of([[0, 1], [1, 2]])),
            (ValueError, r"ranks 0 to N-1, but got .*leaves out \[1\]", lambda: replicas_of([[0, 2], [3]])),
            (ValueError, r"ranks 0 to N-1, but got \[\[\]\]", lambda: replicas_of([[]])),
            (ValueError, r"ranks 0 to N-1, but got \[\[-1, 0\]\]", lambda: replicas_of([[-1, 0]])),
            (TypeError, "ranks as ints, but got 'a'", lambda: replicas_of([["a"]])),
            (ValueError, r"within \(replicate, gtp, tp\) = \(2, 4, 1\) in failed", lambda: pair(4, (0, 4, 0))),
            (TypeError, r"\(replica, gtp, tp\) coordinates in failed, but got \(0, 1\)", lambda: pair(4, (0, 1))),
            (ValueError, "but all 2 of", lambda: pair(1, (0, 0, 0), (1, 0, 0))),
            (ValueError, "gtp to be at least 1", lambda: pair(0)),
            (TypeError, "an int as tp", lambda: pair(1, tp=2.0)),
            (ValueError, "'wq' of shape .* blocks", lambda: pair(1, (0, 0, 0), tp=3, weights=heads[:1])),
            (ValueError, "'wk' of shape .* blocks", lambda: pair(1, (0, 0, 0), tp=3, weights=heads[1:])),
            (ValueError, "at least one sample for each of the 3 data ranks", lambda: layout.batch_shares(2)),
            (TypeError, "an int as global_batch, but got float: 2.5", lambda: layout.batch_shares(2.5)),
            (ValueError, "'norm' stays whole", lambda: list(segments_of(WEIGHTS[-1], layout))),
        ):
            with self.subTest(message), self.assertRaisesRegex(error, message):
                call()
        # Without tensor parallelism gtp cuts them.
        for weight in heads:
            self.assertEqual(choose_sizes(3, 3, 1, [weight])[:2], (3, 1))


class TestBatch(TestCase):
    def test_shares_sum_up_and_follow_the_number_of_ranks(self) -> None:
        for layout in itertools.chain(layouts(2, 4), layouts(3, 3), tensor_parallel_layouts()):
            for global_batch in range(layout.num_data_ranks, layout.num_data_ranks + 23):
                counts = layout.batch_counts(global_batch)
                self.assertEqual(sum(map(sum, counts)), global_batch)
                exact = [global_batch * len(replica.ranks) / layout.num_ranks for replica in layout.replicas]
                is_large = all(share >= replica.gtp for share, replica in zip(exact, layout.replicas, strict=True))
                for count, replica, share in zip(counts, layout.replicas, exact, strict=True):
                    self.assertGreaterEqual(min(count), 1)
                    self.assertLessEqual(max(count) - min(count), 1)
                    self.assertEqual(len(count), replica.gtp)
                    if is_large:
                        self.assertLess(abs(sum(count) - share), 1)

    def test_shares_are_consecutive_and_alike_along_tp(self) -> None:
        layout = plan_replicas(replicate=2, gtp=2, tp=2, failed={(1, 0, 0)})
        shares = layout.batch_shares(14)
        self.assertExpectedInline(
            "\n".join(f"rank {rank}: {share.start}:{share.stop}" for rank, share in shares.items()),
            """\
rank 0: 0:4
rank 1: 0:4
rank 2: 4:8
rank 3: 4:8
rank 4: 8:10
rank 5: 10:12
rank 6: 12:14""",
        )
        self.assertEqual(shares[0].counts, ((4, 4), (2, 2, 2)))
        self.assertEqual((shares[4].num_samples, shares[4].rows), (2, slice(8, 10)))


class TestSegments(TestCase):
    def test_sum_over_every_pattern_of_failures(self) -> None:
        large = [replicas_of(consecutive(sizes)) for sizes in ((8, 5), (7, 8, 3))]
        for seed, layout in enumerate([*layouts(3, 4), *large]):
            for weight in WEIGHTS:
                if weight.dim is not None and weight.tp_dim is None:
                    simulate(layout, weight, seed)

    def test_sum_with_tensor_parallelism_of_equal_and_unequal_sizes(self) -> None:
        sizes = set()
        for seed, layout in enumerate(tensor_parallel_layouts()):
            sizes.add(tuple(replica.tp for replica in layout.replicas))
            for weight in WEIGHTS:
                if weight.dim is not None:
                    simulate(layout, weight, seed)
        self.assertGreaterEqual(len({s for s in sizes if len(set(s)) > 1}), 3, sizes)

    def test_blocks_are_never_cut(self) -> None:
        for layout in layouts(3, 4):
            for box, _ in segments_of(WEIGHTS[2], layout):
                self.assertEqual((box.offset[0] % 4, box.size[0] % 4), (0, 0))

    def test_boxes_are_those_of_the_placement(self) -> None:
        """``GTPShard``'s own arithmetic, tensor parallelism first."""
        layout = plan_replicas(replicate=1, gtp=3, tp=2)
        for rank, place in layout.places.items():
            rows, start = chunk_size_and_offset(24, 2, place.tp, 4)
            size, offset = chunk_size_and_offset(rows, 3, place.gtp, 2)
            box = box_of_rank(WEIGHTS[4], layout, rank)
            self.assertEqual(box, ((start + offset, 0), (size, 2)))

    def test_printed_plan(self) -> None:
        layout = plan_replicas(replicate=2, gtp=4, failed={(1, 2, 0)})
        weights = [
            WeightSpec("embedding.weight", (11, 64)),
            WeightSpec("wq.weight", (32, 64), block_size=4, nbytes=2),
            WeightSpec("norm.weight", (64,), dim=None),
        ]
        self.assertExpectedInline(
            str(plan_sync(layout, weights)),
            """\
2 replicas of 7 ranks
  replica 0  gtp 4          ranks 0-3
  replica 1  gtp 3          ranks 4-6  1 of 4 ranks failed; gtp 4 -> 3
embedding.weight (11, 64), gtp cuts dim 0
  dim 0 0:3                owners 0 | 4
  dim 0 3:4                owners 1 | 4
  dim 0 4:6                owners 1 | 5
  dim 0 6:8                owners 2 | 5
  dim 0 8:9                owners 2 | 6
  dim 0 9:11               owners 3 | 6
wq.weight (32, 64), gtp cuts dim 0 in blocks of 4
  dim 0 0:8                owners 0 | 4
  dim 0 8:12               owners 1 | 4
  dim 0 12:16              owners 1 | 5
  dim 0 16:24              owners 2 | 5
  dim 0 24:32              owners 3 | 6
norm.weight (64,), whole
6 buckets
  owners 0 | 4             2 segments, 1.8 KiB
  owners 1 | 4             2 segments, 768 B
  owners 1 | 5             2 segments, 1.0 KiB
  owners 2 | 5             2 segments, 1.5 KiB
  owners 2 | 6             1 segment, 256 B
  owners 3 | 6             2 segments, 1.5 KiB
all ranks: 1 whole parameter, 256 B""",
        )

    def test_bytes_of_every_rank(self) -> None:
        """Each rank sums exactly its shard, and what is whole; nobody passes on what others own."""
        layout = plan_replicas(replicate=3, gtp=4, failed={(1, 2, 0), (2, 0, 0), (2, 1, 0)})
        plan = plan_sync(layout, WEIGHTS)
        for rank in layout.places:
            boxes = [box_of_rank(weight, layout, rank).numel for weight in WEIGHTS]
            self.assertEqual(plan.sync_nbytes(rank), 4 * sum(boxes), rank)
        alone = plan_sync(replicas_of([[0, 1]]), WEIGHTS)
        self.assertEqual(alone.sync_nbytes(0), 4 * 6)

    def test_thousands_of_ranks(self) -> None:
        failed = {(replica, row, 0) for replica in range(0, 32, 3) for row in range(1 + replica % 5)}
        layout = plan_replicas(replicate=32, gtp=64, failed=failed)
        self.assertGreater(layout.num_ranks, 2000)
        shapes = [(128256, 4096), (4096, 4096), (1024, 4096), (14336, 4096), (4096, 14336)]
        weights = [WeightSpec(f"layers.{layer}.{i}", shape) for layer in range(2) for i, shape in enumerate(shapes)]
        plan, work = num_calls(lambda: plan_sync(layout, weights))
        buckets, more_work = num_calls(lambda: plan.of_rank(layout.num_ranks - 1))
        self.assertLess(work + more_work, 560_000)  # half as many, today
        self.assertTrue(all(len(bucket.owners) == 32 for bucket in buckets))
        boxes = [box_of_rank(weight, layout, layout.num_ranks - 1).numel for weight in weights]
        self.assertEqual(sum(bucket.numel for bucket in buckets), sum(boxes))
        self.assertEqual(plan.sync_nbytes(layout.num_ranks - 1), 4 * sum(boxes))
        self.assertRegex(str(plan), r"^32 replicas of 2\d{3} ranks\n(.*\n)+\d+ buckets\n")


class TestMemory(TestCase):
    def test_figure_and_error(self) -> None:
        weights = [WeightSpec(f"w{i}", (1024, 1024)) for i in range(8)] + [WeightSpec("norm", (1024,), dim=None)]
        layout = plan_replicas(replicate=2, gtp=4, failed={(1, 0, 0), (1, 1, 0), (1, 2, 0)})
        (first, second) = check_memory(layout, weights, MemoryModel(budget=1 << 30))
        self.assertEqual(first.shards, 16 * (8 * 1024 * 1024 // 4 + 1024))
        self.assertEqual(first.buffers, 8 * (2 + 4) * 1024 * 1024, "all of so small a model may be gathered")
        by_depth = MemoryModel(budget=1 << 30, prefetch_nbytes=0)
        self.assertEqual(check_memory(layout, weights, by_depth)[0].buffers, (3 * 2 + 8 * 4) * 1024 * 1024)
        by_bytes = MemoryModel(budget=8 << 30, prefetch_nbytes=5 << 20)
        many = weights * 32
        self.assertEqual(check_memory(layout, many, by_bytes)[0].buffers, ((2 + 5 + 256) + 3 * 128) * 1024 * 1024)
        self.assertGreater(second.total, first.total)
        with self.assertRaisesRegex(
            ValueError,
            r"replica 1 of 1 ranks \(gtp 1, tp 1\) is too small: rank 4 needs 176\.0 MiB \(shards 128\.0 MiB, buffers "
            r"48\.0 MiB, activations 0 B\), and has 100\.0 MiB",
        ):
            check_memory(layout, weights, MemoryModel(budget=100 << 20))


class TestPicture(TestCase):
    def test_the_picture_in_the_docs_is_that_of_the_plan(self) -> None:
        docs = Path(__file__).parents[2] / "docs"
        drawn = runpy.run_path(str(docs / "draw_segments.py"))["draw"]()
        self.assertEqual(drawn, (docs / "images" / "segments.svg").read_text())
