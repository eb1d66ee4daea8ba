"""What a process holds does not grow with the number of models, optimizers, averages and reports that it has made."""

from __future__ import annotations

import gc
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from common import GlooTest
from torch.distributed import distributed_c10d

from dtensor_gtp import gtp_shard, sharding_report
from dtensor_gtp.optim import ShardedEMA


def counts() -> tuple[int, int, int, int]:
    """Of descriptors, threads, process groups, and objects that own streams and groups of a model."""
    gc.collect()
    contexts = sum(type(thing).__name__ == "CommContext" for thing in gc.get_objects())
    num_groups = len(distributed_c10d._world.pg_map)
    return len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task")), num_groups, contexts


def resident_nbytes() -> int:
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


class TestLeaks(GlooTest):
    world_size = 2

    def test_models_leave_nothing_behind(self) -> None:
        self.make_models(10)

    @pytest.mark.long
    def test_many_models_leave_nothing_behind(self) -> None:
        self.make_models(300)

    def make_models(self, number: int) -> None:
        mesh = self.gtp_mesh()

        def train_one(is_reported: bool) -> None:
            torch.manual_seed(0)
            model = gtp_shard(nn.Sequential(nn.Linear(8, 8)), mesh)
            optimizer, ema = torch.optim.AdamW(model.parameters()), ShardedEMA(model, decay=0.9)
            model(torch.ones(2, 8)).sum().backward()
            optimizer.step()
            ema.update()
            if is_reported:
                str(sharding_report(model))

        # The workers of these tests share groups between meshes, which would hide what is looked for here.
        shared = dist.new_group
        with mock.patch.object(dist, "new_group", getattr(shared, "_make", shared)):
            for _ in range(3):
                train_one(is_reported=True)
            before, nbytes = counts(), resident_nbytes()
            for index in range(number):
                train_one(is_reported=index % 20 == 0)
            self.assertEqual(counts(), before)
        self.assertLess(resident_nbytes() - nbytes, 32 << 20)
