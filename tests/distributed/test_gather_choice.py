"""``gather_backend="auto"``: the fastest of what can be had, measured and agreed on by all ranks, and what it tells."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
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
from dtensor_gtp._comm import gather_backends as backends
from dtensor_gtp._comm import probe


class Clock:
    """Stands for the clock that the measurement reads. GEMMs and gathers take what this says."""

    def __init__(self) -> None:
        self.ms = 0.0

    @contextmanager
    def measures(self, **gather_ms: float) -> Iterator[None]:
        """Each GEMM takes 1 ms, a gather of each backend what is given for its class."""
        with ExitStack() as stack:
            clock = SimpleNamespace(perf_counter=lambda: self.ms / 1e3)
            stack.enter_context(mock.patch.object(probe, "time", clock))
            stack.enter_context(self.passes(probe.torch, "mm", 1.0))
            for backend in (OnFile, OnGloo, ByBroadcast):
                stack.enter_context(self.passes(backend, "all_gather", gather_ms[backend.__name__]))
            yield

    @contextmanager
    def passes(self, owner: Any, name: str, ms: float) -> Iterator[None]:
        function = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            self.ms += ms
            return function(*args, **kwargs)

        with mock.patch.object(owner, name, call):
            yield


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
            mock.patch.multiple(probe, SIZE=probe.ProbeSize(8, 6, 4), _ROUNDS=2),
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
        """One that is slow on one rank alone is slow. On all others it is the fastest."""
        groups = dist.distributed_c10d._world.pg_map
        for mesh, (slow, best, fast) in itertools.product(
            (self.gtp_mesh(), self.hsdp_mesh()),
            ((OnFile, "zero_cta", OnGloo), (OnGloo, "copy_engine", OnFile)),
        ):
            num_groups = len(groups)
            ms = {slow.__name__: 7.0 if self.rank == 2 else 2.0, fast.__name__: 3.0, "ByBroadcast": 5.0}
            with (
                Clock().measures(**ms),
                mock.patch.object(backends, "CopyEngine", OnFile),
                mock.patch.object(backends, "ZeroCTA", OnGloo),
                mock.patch.object(backends, "ProcessGroupBackend", ByBroadcast),
            ):
                choice, logged = self.choose(mesh)
            self.assertEqual((choice.name, type(choice.backend)), (best, fast))
            ms |= {slow.__name__: 7.0}
            times = ", ".join(
                f"{name} {ms[backend.__name__] + 1:.2f} ms"
                for name, backend in (("copy_engine", OnFile), ("zero_cta", OnGloo), ("process_group", ByBroadcast))
            )
            self.assertRegex(
                logged, rf"gather backend: {best} \(a gather of \d+ MiB beside a GEMM of 1.00 ms: {times}\)"
            )
            self.assertLessEqual(len(groups) - num_groups, 1, "of zero_cta, which stays in any case")

    def test_goes_on_without_what_fails(self) -> None:
        """When it is made, on one rank, or when it gathers."""
        for zero_cta, best in ((FailsOnLastRank, "process_group"), (OnGloo, "zero_cta")):
            with (
                Clock().measures(OnFile=1.0, OnGloo=2.0, ByBroadcast=3.0),
                mock.patch.object(backends, "CopyEngine", FailsToGather),
                mock.patch.object(backends, "ZeroCTA", zero_cta),
                mock.patch.object(backends, "ProcessGroupBackend", ByBroadcast),
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
