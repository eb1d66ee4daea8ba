"""The ranks that are left agree on who they are. Threads stand for processes; there are no process groups in here.

Times are those of a simulated clock: a wait of seconds takes none.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from clock_common import HANG_SECONDS, SimulatedClock
from expecttest import TestCase
from mesh_common import fake_world

from dtensor_gtp import _torch_compat as compat
from dtensor_gtp.elastic import RanksLostError, RankWatch, clock, join, num_waiting, replicas_of
from dtensor_gtp.elastic.regroup import agree_on_survivors, members_of, regroup, start_regrouped, waiting_store
from dtensor_gtp.elastic.watch import is_peer_lost


class ClockTestCase(TestCase):
    def setUp(self) -> None:
        super().setUp()
        self.clock = SimulatedClock()
        self.enterContext(self.clock.patched())


class TestAgreement(ClockTestCase):
    def agree(
        self, num_ranks: int, delays: dict[int, float], grace: float, is_alive: Callable[[int], bool] | None = None
    ) -> dict[int, list[int]]:
        """What each rank hears that comes after a delay; the others never come."""
        layout, store, limit = replicas_of([range(num_ranks)]), dist.HashStore(), timedelta(seconds=grace)
        found: dict[int, list[int]] = {}

        def come(rank: int, delay: float) -> None:
            self.clock.sleep(delay)
            members = agree_on_survivors(layout, rank, store, limit, 0, 1, is_alive)
            found[rank] = list(members.alive)

        self.clock.run(*(partial(come, *item) for item in delays.items()))
        return found

    def test_who_is_on_the_list_and_when_it_is_made(self) -> None:
        """A failure that killed nobody, such as an exception on one rank, makes nobody wait. Only ranks that are alive
        are waited for, however long the grace is."""
        for num_ranks, delays, grace, lost, alive, least_s, most_s in (
            (5, {0: 0.0, 2: 0.3, 4: 0.1}, 2.0, (), [0, 2, 4], 2.0, 2.5),
            (3, {0: 0.0, 1: 0.1, 2: 0.2}, 60.0, (), [0, 1, 2], 0.2, 0.4),
            (3, {0: 0.0, 1: 0.1, 2: 3.0}, 1.0, (), [0, 1], 3.0, 3.5),  # rank 2 finds that it is not on it
            (4, {0: 0.0, 1: 1.5, 3: 0.1}, 60.0, (2,), [0, 1, 3], 1.5, 1.7),
        ):
            began = self.clock.now()
            found = self.agree(
                num_ranks, delays, grace, is_alive=(lambda rank, lost=lost: rank not in lost) if lost else None
            )
            self.assertEqual(found, dict.fromkeys(delays, alive))
            taken = self.clock.now() - began
            self.assertTrue(least_s - 1e-6 <= taken < most_s, (delays, taken))

    def test_a_rank_that_dies_is_waited_for_no_longer(self) -> None:
        end = self.clock.now() + 1.0
        found = self.agree(3, {0: 0.0}, grace=60.0, is_alive=lambda rank: rank == 1 and self.clock.now() < end)
        self.assertEqual(found, {0: [0]})
        self.assertTrue(end <= self.clock.now() < end + 0.2)

    def test_ranks_whose_grace_ends_at_different_times_take_one_list(self) -> None:
        """Rank 1 comes while rank 0 is about to decide: in or out, but alike for both."""
        for delay in (0.28, 0.3, 0.32, 0.35):
            found = self.agree(3, {0: 0.0, 1: delay}, grace=0.3)
            self.assertEqual(found[0], found[1])


class TestSurvivors(TestCase):
    def test_ranks_are_counted_anew_and_stay_in_their_replicas(self) -> None:
        layout = replicas_of([[5, 0, 3], [4, 2], [1]])
        survivors = members_of(layout, [0, 2, 4, 5]).seen_by(2)
        self.assertEqual((survivors.rank, survivors.num_ranks), (2, 4))
        self.assertEqual(survivors.replicas, ((0, 3), (1, 2), ()))
        self.assertExpectedInline(
            str(survivors),
            """4 ranks are left, without rank 1 (replica 2, gtp 0, tp 0), rank 3 (replica 0, gtp 1, tp 0)""",
        )
        self.assertEqual(str(members_of(layout, range(6)).seen_by(0)), "6 ranks are left, without any loss")

    def test_ranks_that_join_go_to_the_smallest_replica(self) -> None:
        layout = replicas_of([[0, 1, 2, 3], [4, 5]])
        members = members_of(layout, range(6), tickets=[7, 9, 12], num_replicas=3)
        self.assertEqual(members.replicas, [[0, 1, 2, 3], [4, 5, 8], [6, 7]])
        self.assertEqual(members.layout.num_ranks, 9)
        self.assertEqual(str(members.seen_by(8)), "9 ranks are left, without any loss, with new ranks [6, 7, 8]")
        self.assertEqual(members_of(layout, [0, 1, 2, 3, 4], [1]).replicas, [[0, 1, 2, 3], [4, 5]])


class TestSecret(ClockTestCase):
    def test_who_does_not_know_the_secret_is_not_seen(self) -> None:
        store, grace = dist.HashStore(), timedelta(seconds=0.2)
        counts: list[int] = []

        def join_and_look(known_to_joiner: str, known_to_rank: str) -> None:
            with mock.patch.dict(os.environ, DTENSOR_GTP_SECRET=known_to_joiner):
                waiting_store(store).add("tickets", 1)
            with mock.patch.dict(os.environ, DTENSOR_GTP_SECRET=known_to_rank):
                counts.append(num_waiting(store))

        join_and_look("", "secret")
        join_and_look("guess", "secret")
        join_and_look("secret", "secret")
        self.assertEqual(counts, [0, 0, 1])
        with mock.patch.dict(os.environ, DTENSOR_GTP_SECRET="secret"):
            members = agree_on_survivors(replicas_of([[0]]), 0, store, grace, 0, 1, None)
        self.assertEqual(members.tickets, [1])
        self.assertFalse(store.check(["dtensor_gtp_regroup_0/members"]))


class TestStart(TestCase):
    def test_failed_attempts_leave_no_trace_in_names(self) -> None:
        """The name of the default group is part of its addresses: a rank that failed more often would be alone."""
        members = members_of(replicas_of([[0, 1, 2]]), [0, 2])
        names = []
        for num_failures in (0, 1, 3):
            for _ in range(num_failures):
                self.assertFalse(start_regrouped(dist.HashStore(), members, 0, "gloo", timedelta(milliseconds=1)))
            alone = members_of(replicas_of([[0]]), [0])
            self.assertTrue(start_regrouped(dist.HashStore(), alone, 0, "gloo", timedelta(seconds=HANG_SECONDS)))
            names.append(dist.group.WORLD.group_name)
            dist.destroy_process_group()
        self.assertEqual(len(set(names)), 1, names)


class TestGroups(TestCase):
    def test_groups_have_the_time_limit_of_their_parent(self) -> None:
        """torch would give each of them half an hour."""
        limit = timedelta(seconds=7)
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1, timeout=limit)
        self.addCleanup(dist.destroy_process_group)
        world, cpu = dist.group.WORLD, torch.device("cpu")
        assert world is not None
        named = compat.named_group([0], "named", "", world)
        self.assertEqual([compat.timeout_of(g) for g in (named, compat.twin_group(named, cpu, "twin"))], [limit] * 2)

    def test_no_limit_where_there_is_none(self) -> None:
        with fake_world(2):
            assert dist.group.WORLD is not None
            self.assertIsNone(compat.timeout_of(dist.group.WORLD))

    def test_groups_on_devices_are_aborted_all_at_once(self) -> None:
        """NCCL's abort of one returns when the device has come past a collective of another, which hangs."""
        together = threading.Barrier(3)
        aborted: list[str] = []

        def group(backend: str) -> Any:
            def abort() -> None:
                together.wait(HANG_SECONDS)
                aborted.append(backend)

            return SimpleNamespace(abort=abort, backend=backend)

        names = ["cpu:gloo,cuda:nccl", "cuda:nccl", "cuda:nccl", "cpu:gloo,cuda:gloo", "fake"]
        world = SimpleNamespace(pg_map=[group(name) for name in names])
        with (
            mock.patch.object(dist.distributed_c10d, "_world", world),
            mock.patch.object(dist, "get_backend_config", lambda group: group.backend),
        ):
            compat.abort_device_groups()
        self.assertEqual(sorted(aborted), sorted(names[:3]))


def silence(watch: RankWatch) -> None:
    assert watch._listener is not None
    watch._listener.stop()


class TestWatch(ClockTestCase):
    """Watches of several ranks in one process."""

    LAYOUT = replicas_of([[0, 1], [2, 3]])

    def watches(self, limit: float = 1.5) -> tuple[list[RankWatch], dist.Store]:
        store = dist.HashStore()
        limits = timedelta(seconds=limit)
        watches = [RankWatch(self.LAYOUT, rank, store, limit=limits) for rank in range(4)]
        for watch in watches:
            self.addCleanup(watch.close)
        return watches, store

    def test_ranks_that_are_silent_are_named_by_all_others(self) -> None:
        watches, _ = self.watches()
        for rank in (1, 2):  # neighbours: each has another rank that listens to it
            silence(watches[rank])
        for watch in (watches[0], watches[3]):
            began = self.clock.now()
            with (
                self.assertRaisesRegex(
                    RanksLostError,
                    r"^rank 1 \(replica 0, gtp 1, tp 0\) was silent for 1.5 seconds; rank 2 \(replica 1, gtp 0, tp 0\)",
                ) as caught,
                watch,
            ):
                raise RuntimeError("[gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")
            self.assertEqual(set(caught.exception.lost), {1, 2})
            # At the latest after the limit, three beats until all know, and two for those that failed with the first.
            self.assertLessEqual(self.clock.now() - began, 1.5 + (3 + 2) * 0.25)
            self.assertGreater(self.clock.now(), 1.5)
            with self.assertRaises(RanksLostError):
                watch.commit()
            self.assertEqual([watch.is_alive(rank) for rank in (0, 3)], [True, True])

    def test_a_rank_that_raises_keeps_its_error_and_is_named_by_the_others(self) -> None:
        watches, _ = self.watches()
        with self.assertRaisesRegex(ValueError, "no number"), watches[3]:
            raise ValueError("no number")
        with self.assertRaisesRegex(RanksLostError, "^rank 3 .* raised ValueError: no number"), watches[0]:
            raise RuntimeError("Timed out waiting 6000ms for recv operation to complete")

    def test_an_error_of_a_peer_without_a_loss_is_kept(self) -> None:
        """As when a network is shaky: all are there, and all come to regroup."""
        watches, _ = self.watches(limit=0.5)
        with self.assertRaisesRegex(dist.DistNetworkError, "shaky"), watches[0]:
            raise dist.DistNetworkError("shaky")

    def test_ranks_that_are_done_are_not_missed(self) -> None:
        watches, _ = self.watches(limit=0.3)
        for watch in watches[1:]:
            watch.close()
        self.clock.sleep(1)
        assert watches[0]._listener is not None
        self.assertFalse(watches[0]._listener.is_lost.is_set())
        self.assertTrue(watches[0].is_alive(2))

    def commit(self, watches: Sequence[RankWatch], delay: float = 0.0) -> list[bool]:
        """Whether each of them may update; each comes later than the one before."""
        may_update = [False] * len(watches)

        def run(index: int) -> None:
            self.clock.sleep(index * delay)
            with contextlib.suppress(RanksLostError):
                watches[index].commit()
                may_update[index] = True

        self.clock.run(*(partial(run, index) for index in range(len(watches))))
        return may_update

    def test_all_ranks_update_or_none(self) -> None:
        watches, store = self.watches(limit=1.0)
        for _ in range(3):
            self.assertEqual(self.commit(watches), [True] * 4)
        self.assertLess(store.num_keys(), 10)  # those of earlier steps are removed
        silence(watches[3])
        # The last one comes when the others have given up, and neither does the one that was silent update alone.
        self.assertEqual(self.commit(watches[:3], delay=1.2), [False] * 3)
        self.assertEqual(self.commit(watches[3:]), [False])

    def test_what_all_had_before_one_was_lost_is_taken(self) -> None:
        watches, _ = self.watches(limit=1.0)
        watches[3]._own.add("commit/0/ready", 1)
        silence(watches[3])
        self.assertEqual(self.commit(watches[:3]), [True] * 3)
        self.assertEqual(self.commit(watches[:3]), [False] * 3)

    def test_a_rank_that_closes_its_watch_is_not_waited_for(self) -> None:
        watches, _ = self.watches(limit=1.0)
        self.assertEqual(self.commit(watches), [True] * 4)
        watches[3].close()
        self.assertEqual(self.commit(watches[:2]), [False] * 2)
        with self.assertRaisesRegex(RanksLostError, "^rank 3 .* has closed its watch"):
            watches[2].commit()
        self.assertEqual([watches[2].is_alive(rank) for rank in (1, 3)], [True, False], "regroup does not wait for it")

    def test_who_closes_after_the_last_commit_takes_it_from_nobody(self) -> None:
        watches, _ = self.watches(limit=1.0)
        for watch in watches[1:]:
            watch._own.add("commit/0/ready", 1)
        watches[1].close()
        self.assertEqual(self.commit(watches[:1]), [True])

    def test_what_tells_of_a_peer(self) -> None:
        for error, expected in (
            (dist.DistBackendError("NCCL error in: unhandled"), True),
            (RuntimeError("[../gloo/transport/tcp/unbound_buffer.cc:78] Timed out waiting 2000ms"), True),
            (RuntimeError("Connection reset by peer"), True),
            (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
            (ValueError("timed out"), False),
        ):
            self.assertEqual(is_peer_lost(error), expected, error)

    def test_refuses(self) -> None:
        with self.assertRaisesRegex(ValueError, "RankWatch expects a positive limit"):
            RankWatch(self.LAYOUT, 0, dist.HashStore(), limit=timedelta(0))
        with self.assertRaisesRegex(TimeoutError, "no rank of the job admitted this process within 0.1 seconds"):
            join(dist.HashStore(), grace=timedelta(seconds=0.1), backend="gloo")

    def test_a_watchdog_that_would_be_in_the_way_is_told(self) -> None:
        wanted = {
            "TORCH_NCCL_ASYNC_ERROR_HANDLING": "0",
            "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC": "0",
            "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
        }
        cases = (
            ("cpu:gloo,cuda:nccl", {}, list(wanted)),
            ("cpu:gloo,cuda:nccl", wanted | {"TORCH_NCCL_DUMP_ON_TIMEOUT": "1"}, ["TORCH_NCCL_DUMP_ON_TIMEOUT"]),
            ("cpu:gloo,cuda:nccl", wanted, []),
            ("cpu:gloo,cuda:gloo", {}, []),
        )
        for backends, environment, missing in cases:
            logs = self.assertLogs if missing else self.assertNoLogs
            with (
                self.subTest(backends=backends, environment=environment),
                mock.patch.dict(os.environ, environment),
                mock.patch.object(dist, "is_initialized", return_value=True),
                mock.patch.object(dist, "get_backend_config", return_value=backends),
                logs("dtensor_gtp.elastic.watch") as found,
            ):
                for name in wanted.keys() - environment.keys():
                    os.environ.pop(name, None)
                self.watches()
            if missing:
                told = "RankWatch expects " + ", ".join(f"{name}=0" for name in missing) + " in the environment"
                self.assertEqual(len(found.output), 4, found.output)
                self.assertIn(told, found.output[0])

    def test_who_waits_to_join_is_counted_until_it_gives_up(self) -> None:
        store = dist.HashStore()
        counts: list[int] = []

        def wait_to_join() -> None:
            with self.assertRaisesRegex(TimeoutError, "within 1 seconds"):
                join(store, grace=timedelta(seconds=1), backend="gloo")
            counts.append(num_waiting(store))

        def look() -> None:
            self.clock.sleep(0.9)
            counts.append(num_waiting(store))

        self.clock.run(wait_to_join, look)
        self.assertEqual(counts, [1, 0])

    def test_nobody_waits_for_a_process_that_gave_up_while_the_list_was_made(self) -> None:
        store = dist.HashStore()
        with self.assertRaisesRegex(TimeoutError, "within 0.1 seconds"):
            join(store, grace=timedelta(seconds=0.1), backend="gloo")
        started: list[list[int]] = []

        def start(store: dist.Store, members: Any, *args: Any) -> bool:
            started.append(list(range(members.layout.num_ranks)))
            return True

        regrouping = "dtensor_gtp.elastic.regroup."
        with (
            mock.patch(regrouping + "start_regrouped", start),
            mock.patch(regrouping + "_waiting_tickets", side_effect=[[1], []]),  # it waited when the list was made
        ):
            grace = timedelta(seconds=1)
            survivors = regroup(replicas_of([[0]]), 0, store, generation=0, grace=grace, backend="gloo")
        self.assertEqual(started, [[0]])
        self.assertEqual((survivors.replicas, survivors.generation), (((0,),), 2))

    def test_who_is_admitted_beside_a_process_that_gave_up_waits_for_nobody(self) -> None:
        store = dist.HashStore()
        with self.assertRaisesRegex(TimeoutError, "within 0.1 seconds"):
            join(store, grace=timedelta(seconds=0.1), backend="gloo")
        members = members_of(replicas_of([[0]]), [0], tickets=[1, 2])
        waiting_store(store).set("admitted/2", json.dumps(members))
        left = "dtensor_gtp.elastic.watch."
        with (
            mock.patch(left + "start_regrouped", side_effect=AssertionError("waits for the first process")),
            mock.patch(left + "regroup", return_value="the next round") as next_round,
        ):
            self.assertEqual(join(store, grace=timedelta(seconds=1), backend="gloo"), ("the next round", None))
        self.assertEqual(next_round.call_args.args[1], 2)

    def test_who_is_admitted_while_giving_up_joins(self) -> None:
        store, times = dist.HashStore(), iter((0.0, 2.0))

        def now() -> float:
            time = next(times)
            if time > 1:  # the grace is over
                members = members_of(replicas_of([[0]]), [0], tickets=[1])
                waiting_store(store).set("admitted/1", json.dumps(members))
            return time

        start = mock.patch("dtensor_gtp.elastic.watch.start_regrouped", return_value=True)
        with mock.patch.object(clock, "now", now), start:
            survivors, _ = join(store, grace=timedelta(seconds=1), backend="gloo")
        self.assertEqual((survivors.rank, survivors.joined), (1, (1,)))
