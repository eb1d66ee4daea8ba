"""The ranks that are left agree on who they are. Threads stand for processes; there are no process groups in here."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import torch.distributed as dist
from expecttest import TestCase

from dtensor_gtp.elastic import replicas_of
from dtensor_gtp.elastic.regroup import agree_on_survivors, survivors_of


def agree(num_ranks: int, delays: dict[int, float], grace: float) -> dict[int, list[int]]:
    """What each rank hears that comes after a delay; the others never come."""
    store = dist.HashStore()
    found: dict[int, list[int]] = {}

    def come(rank: int, delay: float) -> None:
        time.sleep(delay)
        found[rank] = agree_on_survivors(num_ranks, rank, store, timedelta(seconds=grace))

    threads = [threading.Thread(target=come, args=item) for item in delays.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    return found


class TestAgreement(TestCase):
    def test_all_that_come_in_time_are_in(self) -> None:
        found = agree(5, {0: 0.0, 2: 0.3, 4: 0.1}, grace=2.0)
        self.assertEqual(found, {rank: [0, 2, 4] for rank in (0, 2, 4)})

    def test_nobody_waits_when_all_have_come(self) -> None:
        """A failure that killed nobody, such as an exception on one rank."""
        start = time.monotonic()
        found = agree(3, {0: 0.0, 1: 0.1, 2: 0.2}, grace=60.0)
        self.assertEqual(found, {rank: [0, 1, 2] for rank in range(3)})
        self.assertLess(time.monotonic() - start, 20)

    def test_a_rank_that_comes_late_finds_that_it_is_not_on_the_list(self) -> None:
        found = agree(3, {0: 0.0, 1: 0.1, 2: 3.0}, grace=1.0)
        self.assertEqual(found, {rank: [0, 1] for rank in range(3)})

    def test_ranks_whose_grace_ends_at_different_times_take_one_list(self) -> None:
        """Rank 1 comes while rank 0 is about to decide: in or out, but alike for both."""
        for delay in (0.28, 0.3, 0.32):
            found = agree(3, {0: 0.0, 1: delay}, grace=0.3)
            self.assertEqual(found[0], found[1])


class TestSurvivors(TestCase):
    def test_ranks_are_counted_anew_and_stay_in_their_replicas(self) -> None:
        layout = replicas_of([[5, 0, 3], [4, 2], [1]])
        survivors = survivors_of(layout, 4, [0, 2, 4, 5])
        self.assertEqual((survivors.rank, survivors.num_ranks), (2, 4))
        self.assertEqual(survivors.replicas, ((0, 3), (1, 2), ()))
        self.assertExpectedInline(
            str(survivors),
            """4 ranks are left, without rank 1 (replica 2, gtp 0, tp 0), rank 3 (replica 0, gtp 1, tp 0)""",
        )
        self.assertEqual(str(survivors_of(layout, 0, list(range(6)))), "6 ranks are left, without any loss")
