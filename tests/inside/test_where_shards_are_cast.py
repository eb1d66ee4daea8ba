"""Shards are cast on the compute stream, but for those that other streams have made.

A CPU has no streams, so this looks at what a gather is told to copy on its own.
"""

from __future__ import annotations

import unittest
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from common import fake_mesh
from schedules import explicit

from dtensor_gtp import MixedPrecisionPolicy, SchedulePolicy, gtp_shard, quantize_
from dtensor_gtp._comm.context import CommContext

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
WIDTH, HIDDEN = 64, 128  # rows in blocks of 32 are cut into equal shards
SINGLE = explicit(min_shard_numel=0)


def blocks() -> nn.Module:
    return nn.Sequential(
        *(nn.Sequential(nn.Linear(WIDTH, HIDDEN), nn.ReLU(), nn.Linear(HIDDEN, WIDTH)) for _ in range(4))
    )


class TestWhereShardsAreCast(unittest.TestCase):
    def gathers(self, model: nn.Module, **options: Any) -> set[bool]:
        """Of all gathers of two steps, whether they copied on the gather stream."""
        found: set[bool] = set()
        all_gather = CommContext.all_gather

        def noting(self: CommContext, *args: Any) -> Any:
            found.add(len(args) > 4 and args[4] is not None)
            return all_gather(self, *args)

        with fake_mesh(2, 2, names=("replicate", "gtp")) as mesh, mock.patch.object(CommContext, "all_gather", noting):
            gtp_shard(model, mesh, mp_policy=BF16, **options)
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            for _ in range(2):
                model(torch.randn(4, WIDTH)).sum().backward()
                optimizer.step()
                optimizer.zero_grad()
        return found

    def test_on_the_compute_stream(self) -> None:
        for schedule in (SINGLE, SchedulePolicy(min_shard_numel=0)):
            with self.subTest(schedule=schedule):
                self.assertEqual(self.gathers(blocks(), schedule=schedule), {False})

    def test_on_the_gather_stream_after_gathers_from_replicas(self) -> None:
        for schedule in (SINGLE, SchedulePolicy(min_shard_numel=0)):
            with self.subTest(schedule=schedule):
                self.assertEqual(self.gathers(blocks(), schedule=schedule, shard_optimizer=True), {True})

    def test_on_the_gather_stream_after_casts_of_a_recipe(self) -> None:
        model = blocks()
        quantize_(model, "mxfp8")
        self.assertEqual(self.gathers(model, schedule=SchedulePolicy(min_shard_numel=0)), {True})
