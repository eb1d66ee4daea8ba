"""What a process holds does not grow with the number of models, optimizers, averages and reports that it has made."""

from __future__ import annotations

import gc
import os
import tempfile
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from capture_common import Setting, rows
from common import ALL, GlooTest, fake_world
from runtime_common import members_of
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh

from dtensor_gtp import SchedulePolicy, gtp_shard, init_weight_mesh, sharding_report, whole_weights
from dtensor_gtp.graphs.capture_step import CapturedStep
from dtensor_gtp.optim import Muon, ShardedEMA, gathered


def counts() -> tuple[int, int, int, int]:
    """Of descriptors, threads, process groups, and objects that own streams and groups of a model."""
    gc.collect()
    contexts = sum(type(thing).__name__ == "CommContext" for thing in gc.get_objects())
    num_groups = len(distributed_c10d._world.pg_map)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), num_groups, contexts


def resident_nbytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def num_tensors() -> int:
    return sum(isinstance(thing, torch.Tensor) for thing in gc.get_objects())


def swap_averages(model: nn.Module) -> None:
    ema = ShardedEMA(model, decay=0.9)
    ema.update()
    with ema.averaged():
        model(torch.ones(2, 8))


def write_report(model: nn.Module) -> None:
    report = sharding_report(model, verbose=True)
    with tempfile.TemporaryDirectory() as folder:
        report.to_html(f"{folder}/report.html")
    str(report)


def read_whole(model: nn.Module) -> None:
    with whole_weights(model):
        list(model.parameters())


def step_with(optimizer: torch.optim.Optimizer, model: nn.Module) -> None:
    model(torch.ones(2, 8)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


# What is made again and again beside one model, and dropped.
BESIDE: dict[str, Callable[[nn.Module], object]] = {
    "optimizers": lambda model: step_with(torch.optim.AdamW(model.parameters()), model),
    "Muon": lambda model: step_with(Muon([model.get_parameter("0.weight")], lr=0.1), model),
    "gathered optimizers": lambda model: step_with(gathered(torch.optim.SGD)(model.parameters(), lr=0.1), model),
    "averages": swap_averages,
    "reports": write_report,
    "whole weights": read_whole,
    "meshes": lambda model: init_weight_mesh("cpu", gtp=2),
    "models on meshes": lambda model: step_with(
        torch.optim.SGD((other := one_layer(init_weight_mesh("cpu", gtp=2).weights)).parameters(), lr=0.1), other
    ),
}


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.norm, self.down = nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(self.norm(self.up(x)))


def blocks(mesh: DeviceMesh, schedule: SchedulePolicy) -> nn.Module:
    torch.manual_seed(0)
    return gtp_shard(nn.Sequential(Residual(), Residual()), mesh, schedule=schedule)


def one_layer(mesh: DeviceMesh) -> nn.Module:
    torch.manual_seed(0)
    return gtp_shard(nn.Sequential(nn.Linear(8, 8)), mesh, schedule=ALL)


class TestLongRuns(GlooTest):
    world_size = 2

    @pytest.mark.soak  # minutes
    def test_ten_thousand_steps_of_single_weights(self) -> None:
        self.train_on(ALL)

    @pytest.mark.soak  # minutes
    def test_ten_thousand_steps_of_groups(self) -> None:
        self.train_on(SchedulePolicy(min_shard_numel=0))

    def train_on(self, schedule: SchedulePolicy) -> None:
        """What there is after 1,000 steps is there after 10,000, and no more."""
        model = blocks(self.gtp_mesh(), schedule)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for step in range(10_000):
            step_with(optimizer, model)
            if step == 0:
                self.assertEqual(len(members_of(model).groups), 2 * (schedule is not ALL))
            if step == 1_000:
                before, nbytes = (*counts(), num_tensors()), resident_nbytes()
        self.assertEqual((*counts(), num_tensors()), before)
        self.assertLess(resident_nbytes() - nbytes, 8 << 20)


class TestLeaks(GlooTest):
    world_size = 2

    def test_models_leave_nothing_behind(self) -> None:
        self.make_models(10)

    @pytest.mark.long
    def test_many_models_leave_nothing_behind(self) -> None:
        self.make_models(300)

    def test_groups_that_are_dropped_between_unshard_and_reshard(self) -> None:
        def make(_: int) -> None:
            model = blocks(self.gtp_mesh(), SchedulePolicy(min_shard_numel=0))
            model(torch.ones(2, 8)).sum().backward()
            self.assertEqual(len(members_of(model).groups), 2)
            model.unshard()

        self.make_many("models", 10, make)

    def test_what_is_made_beside_a_model(self) -> None:
        self.make_beside(10)

    @pytest.mark.long
    def test_much_that_is_made_beside_a_model(self) -> None:
        self.make_beside(300)

    def make_beside(self, number: int) -> None:
        model = one_layer(self.gtp_mesh())
        for name, make in BESIDE.items():
            self.make_many(name, number, lambda _, make=make: make(model))

    def make_models(self, number: int) -> None:

        def train_one(is_reported: bool) -> None:
            torch.manual_seed(0)
            model = gtp_shard(nn.Sequential(nn.Linear(8, 8)), self.gtp_mesh())
            optimizer, ema = torch.optim.AdamW(model.parameters()), ShardedEMA(model, decay=0.9)
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            ema.update()
            if is_reported:
                str(sharding_report(model))

        self.make_many("models", number, lambda index: train_one(is_reported=index % 20 == 0))

    def make_many(self, name: str, number: int, make: Callable[[int], None]) -> None:
        # The workers of these tests share groups between meshes, which would hide what is looked for here.
        shared = dist.new_group
        with mock.patch.object(dist, "new_group", getattr(shared, "_make", shared)):
            for _ in range(3):
                make(0)
            before, nbytes = counts(), resident_nbytes()
            for index in range(number):
                make(index)
            self.assertEqual(counts(), before, name)
        self.assertLess(resident_nbytes() - nbytes, 32 << 20, name)


class TestLeaksOfCapturedSteps:
    """With the stand-in for graphs: what the package itself holds."""

    def test_captured_steps_leave_nothing_behind(self) -> None:
        self.make_captured(5)

    @pytest.mark.long
    def test_many_captured_steps_leave_nothing_behind(self) -> None:
        self.make_captured(300)

    def make_captured(self, number: int) -> None:
        with fake_world(world_size=1):
            setting = Setting()

            def num_alive() -> int:
                return sum(type(thing) is CapturedStep for thing in gc.get_objects())

            def make() -> None:
                step = setting.captured()
                for seed in range(5):
                    step(rows(seed))

            for _ in range(3):
                make()
            before, nbytes = (*counts(), num_alive()), resident_nbytes()
            for _ in range(number):
                make()
            assert (*counts(), num_alive()) == before
            assert resident_nbytes() - nbytes < 32 << 20
