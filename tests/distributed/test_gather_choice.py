"""``gather_backend="auto"``: the fastest of what can be had, measured and agreed on by all ranks, and what it tells."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from common import GlooTest
from runtime_common import shard_copy, small_model
from test_gather_backends import ByBroadcast, FailsOnLastRank, OnFile, OnGloo
from torch.distributed.device_mesh import DeviceMesh
from torch.testing._internal.common_utils import run_tests

from dtensor_gtp import SchedulePolicy, sharding_report
from dtensor_gtp._runtime import backends, probe


class Slow(ByBroadcast):
    def all_gather(self, outputs: list[torch.Tensor], shards: list[torch.Tensor]) -> None:
        time.sleep(0.1)


class FailsToGather(OnFile):
    def all_gather(self, *args: Any) -> None:
        raise OSError("no such link")


class TestGatherChoice(GlooTest):
    def test_falls_back_and_says_so(self) -> None:
        mesh = self.gtp_mesh()
        schedule = SchedulePolicy(min_shard_numel=0, gather_backend="auto")
        reference = small_model()
        model = shard_copy(reference, mesh, schedule=schedule)
        x = torch.ones(2, 12)
        with self.assertLogs("dtensor_gtp", "WARNING") as logs:
            output = model(x)
        self.assertRegex(logs.output[0], "gather backend: process_group, because .*a cpu device has no copy engines")
        torch.testing.assert_close(output, reference(x))
        (told,) = sharding_report(model).gather_backends
        self.assertRegex(told, r"gather backend on gtp=4: process_group \(.*no copy engines.*; .*has no NCCL")
        self.assertIn(told, str(sharding_report(model)).splitlines())

    def choose(self, mesh: DeviceMesh) -> tuple[backends.Choice, str]:
        """The automatic choice by a measurement of small matrices, and what is logged."""
        groups = [mesh.get_group(axis) for axis in reversed(range(mesh.ndim))]
        with (
            mock.patch.multiple(probe, SIZE=probe.ProbeSize(8, 6, 4), _ROUNDS=2, _PAIRS=1),
            self.assertLogs("dtensor_gtp", "WARNING") as logs,
        ):
            schedule = SchedulePolicy(gather_backend="auto")
            choice = backends.choose_gather_backend(schedule, groups, torch.device("cpu"), lambda: None)
        # What cannot be had is told with the ranks that it concerns; all that is measured is alike.
        measured = choice.reason if "cannot" not in choice.reason else ""
        told: list[str] = [""] * self.world_size
        dist.all_gather_object(told, choice.name + measured)
        self.assertEqual(told, [choice.name + measured] * self.world_size)
        return choice, logs.output[0]

    def test_takes_the_fastest_on_all_ranks(self) -> None:
        """One that is slow on one rank alone is slow."""
        groups = dist.distributed_c10d._world.pg_map
        for mesh, (slow, best, fast) in itertools.product(
            (self.gtp_mesh(), self.hsdp_mesh()),
            ((OnFile, "zero_cta", OnGloo), (OnGloo, "copy_engine", OnFile)),
        ):
            num_groups, gather = len(groups), slow.all_gather

            def late(engine: Any, *args: Any, gather: Callable[..., None] = gather) -> None:
                time.sleep(0.1 if self.rank == 2 else 0)
                gather(engine, *args)

            with (
                mock.patch.object(slow, "all_gather", late),
                mock.patch.object(backends, "CopyEngine", OnFile),
                mock.patch.object(backends, "ZeroCTA", OnGloo),
                mock.patch.object(backends, "ProcessGroupBackend", Slow),
            ):
                choice, logged = self.choose(mesh)
            self.assertEqual((choice.name, type(choice.backend)), (best, fast))
            ms = r"\d+\.\d+ ms"
            times = f"copy_engine {ms}, zero_cta {ms}, process_group {ms}"
            self.assertRegex(logged, rf"gather backend: {best} \(a gather of \d+ MiB beside a GEMM of {ms}: {times}\)")
            self.assertEqual(len(groups) - num_groups, 1, "of zero_cta, which stays in any case")

    def test_goes_on_without_what_fails(self) -> None:
        """When it is made, on one rank, or when it gathers."""
        for zero_cta, best in ((FailsOnLastRank, "process_group"), (OnGloo, "zero_cta")):
            with (
                mock.patch.object(backends, "CopyEngine", FailsToGather),
                mock.patch.object(backends, "ZeroCTA", zero_cta),
                mock.patch.object(backends, "ProcessGroupBackend", Slow),
            ):
                choice, _ = self.choose(self.hsdp_mesh())
            self.assertEqual(choice.name, best)
            self.assertIn("rank 3: OSError: no such link", choice.reason)

    def test_without_memory_to_measure_on_one_rank(self) -> None:
        class OutOfMemory(probe.Probe):
            def __init__(self, *args: Any) -> None:
                if dist.get_rank() == 1:
                    raise MemoryError("too small")
                super().__init__(*args)

        with mock.patch.object(backends, "CopyEngine", OnFile), mock.patch.object(backends, "Probe", OutOfMemory):
            choice, logged = self.choose(self.gtp_mesh())
        self.assertEqual(choice.name, "process_group")
        self.assertIn("their measurement cannot be had for ranks [0, 1, 2, 3] (rank 1: MemoryError: too small)", logged)


if __name__ == "__main__":
    run_tests()
