"""Every pattern of failures, in processes: three steps end as one process on the whole batch ends them. For hours.

tests/elastic/test_elastic_plan.py has the same patterns in one process, test_elastic.py a few of them in CI.
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from common import GlooTest
from runtime_common import local
from test_elastic import HEAD_DIM, Elastic, Heads, shard_heads
from test_elastic_plan import consecutive
from workers import WorkerPool

from dtensor_gtp.elastic import WeightSpec, nonuniform_mesh

pytestmark = [pytest.mark.soak, pytest.mark.skipif(torch.cuda.is_available(), reason="runs on CPUs alone")]

# Of all patterns of one number of ranks, which share two cores.
LIMIT_SECONDS = 1800


def patterns() -> dict[int, list[tuple[int, ...]]]:
    """Ranks that are left of each of 2 or 3 replicas of 1 to 4, by their number: which ones failed makes no difference,
    see ``test_any_pattern_of_failures_leaves_consecutive_ranks``."""
    found: dict[int, set[tuple[int, ...]]] = {}
    for left in itertools.product(range(5), repeat=3):
        if any(left):
            found.setdefault(sum(left), set()).add(tuple(size for size in left if size))
    return {num_ranks: sorted(of_number) for num_ranks, of_number in sorted(found.items())}


class OnRanks(GlooTest):
    """What ``run`` runs on some number of them."""

    def patterns(self) -> None:
        for sizes in patterns()[dist.get_world_size()]:
            Elastic(nonuniform_mesh("cpu", replicas=consecutive(sizes))).train(steps=3)

    def heads(self) -> None:
        """Ten on four ranks of tp are 3, 3, 3 and 1; on the three that are left of the other replica 4, 4 and 2."""
        weights = [WeightSpec("wq", (10 * HEAD_DIM, 6), tp_dim=0, tp_block_size=HEAD_DIM)]
        mesh = nonuniform_mesh("cpu", replicate=2, gtp=1, tp=4, failed={(1, 0, 2)}, weights=weights)
        self.assertEqual([(replica.gtp, replica.tp) for replica in mesh.layout.replicas], [(1, 4), (1, 3)])
        torch.manual_seed(3)
        elastic = Elastic(mesh, Heads(num_heads=10), shard_heads)
        rows = (12, 12, 12, 4, 16, 16, 8)[dist.get_rank()]
        self.assertEqual(local(elastic.model.wq.weight).shape, (rows, 6))
        elastic.train(steps=3)


def run(num_ranks: int, method: str) -> None:
    pool = WorkerPool(num_ranks)
    try:
        pool.run(__name__, "OnRanks", method, LIMIT_SECONDS)
    finally:
        pool.close()


@pytest.mark.parametrize("num_ranks", patterns())
def test_every_pattern_of_failures(num_ranks: int) -> None:
    run(num_ranks, "patterns")


def test_tp_shrinks_from_four_to_three_at_heads() -> None:
    run(7, "heads")
