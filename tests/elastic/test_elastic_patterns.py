"""Every pattern of failures, in processes: three steps end as one process on the whole batch ends them. For hours.

tests/elastic/test_elastic_plan.py has the same patterns in one process, test_elastic.py a few of them in CI.
"""

from __future__ import annotations

import gc
import itertools
import multiprocessing
import os
import traceback
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.connection import wait
from typing import Any

import pytest
import torch
import torch.distributed as dist
from runtime_common import local
from test_elastic import HEAD_DIM, Elastic, Heads, shard_heads

from dtensor_gtp.elastic import WeightSpec, nonuniform_mesh

pytestmark = [pytest.mark.soak, pytest.mark.skipif(torch.cuda.is_available(), reason="runs on CPUs alone")]

# Of all patterns of one number of ranks, which share two cores.
LIMIT_SECONDS = 1800
# Within which ranks whose peer has failed print why.
REPORT_SECONDS = 150


def patterns() -> dict[int, list[tuple[int, ...]]]:
    """Ranks that are left of each of 2 or 3 replicas of 1 to 4, by their number: which ones failed makes no difference,
    see ``test_any_pattern_of_failures_leaves_consecutive_ranks``."""
    found: dict[int, set[tuple[int, ...]]] = {}
    for replicate, gtp in itertools.product((2, 3), (1, 2, 3, 4)):
        for left in itertools.product(range(gtp + 1), repeat=replicate):
            if any(left):
                found.setdefault(sum(left), set()).add(tuple(size for size in left if size))
    return {num_ranks: sorted(of_number) for num_ranks, of_number in sorted(found.items())}


def run(num_ranks: int, work: Callable[..., None], *args: Any) -> None:
    """``work(*args)`` on so many ranks."""
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    # not forked from this process, whose threads (torch's, the store's) may hold locks at that moment
    context = multiprocessing.get_context("forkserver")
    processes = [
        context.Process(target=run_rank, args=(store.port, rank, num_ranks, work, *args), daemon=True)
        for rank in range(num_ranks)
    ]
    try:
        for process in processes:
            process.start()
        limit = LIMIT_SECONDS
        while running := [process.sentinel for process in processes if process.exitcode is None]:
            if not wait(running, limit):
                break
            # One that has failed leaves the others in a collective, which they need not come back from.
            limit = REPORT_SECONDS if any(process.exitcode for process in processes) else LIMIT_SECONDS
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            if process.is_alive():
                process.kill()
                process.join()
    assert codes == [0] * num_ranks, codes


def run_rank(port: int, rank: int, num_ranks: int, work: Callable[..., None], *args: Any) -> None:
    torch.set_num_threads(1)
    gc.freeze()  # what the server has imported
    try:
        store = dist.TCPStore("localhost", port, is_master=False)
        limit = timedelta(seconds=120)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=num_ranks, timeout=limit)
        work(*args)
        dist.barrier()
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


def consecutive(sizes: Sequence[int]) -> list[list[int]]:
    ends = list(itertools.accumulate(sizes))
    return [list(range(end - size, end)) for end, size in zip(ends, sizes, strict=True)]


def train_patterns(of_number: list[tuple[int, ...]]) -> None:
    for sizes in of_number:
        Elastic(nonuniform_mesh("cpu", replicas=consecutive(sizes))).train(steps=3)


def train_heads() -> None:
    """Ten heads on four ranks of tp are 3, 3, 3 and 1; on the three that are left of the other replica 4, 4 and 2."""
    weights = [WeightSpec("wq", (10 * HEAD_DIM, 6), tp_dim=0, tp_block_size=HEAD_DIM)]
    mesh = nonuniform_mesh("cpu", replicate=2, gtp=1, tp=4, failed={(1, 0, 2)}, weights=weights)
    assert [(replica.gtp, replica.tp) for replica in mesh.layout.replicas] == [(1, 4), (1, 3)], str(mesh.layout)
    torch.manual_seed(3)
    elastic = Elastic(mesh, Heads(num_heads=10), shard_heads)
    rows = (12, 12, 12, 4, 16, 16, 8)[dist.get_rank()]
    assert local(elastic.model.wq.weight).shape == (rows, 6)
    elastic.train(steps=3)


@pytest.mark.parametrize("num_ranks", patterns())
def test_every_pattern_of_failures(num_ranks: int) -> None:
    run(num_ranks, train_patterns, patterns()[num_ranks])


def test_tp_shrinks_from_four_to_three_at_heads() -> None:
    run(7, train_heads)
