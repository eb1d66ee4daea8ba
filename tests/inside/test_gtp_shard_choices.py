"""All ranks run with one schedule, whatever each of them sees."""

from __future__ import annotations

from unittest import mock

import torch
import torch.nn as nn
from common import GlooTest
from runtime_common import Net, make_tokens, runtime_of, shard_copy, token_loss

from dtensor_gtp import SchedulePolicy, gtp_shard, sharding_report
from dtensor_gtp._schedule import first_forward

GiB = 1 << 30


class TestChoices(GlooTest):
    def test_the_least_free_memory_counts_on_all_ranks(self) -> None:
        for mesh in (self.gtp_mesh(), self.hsdp_mesh()):
            model = gtp_shard(nn.Linear(64, 64), mesh, schedule=SchedulePolicy(memory="most_speed"))
            free = (self.rank + 2) * GiB
            with mock.patch.object(first_forward, "_free_nbytes", return_value=free):
                model(torch.ones(2, 64))
            self.assertEqual(SchedulePolicy.chosen(model).keep_nbytes, 2 * GiB // 8)

    def test_the_report_gives_each_reason(self) -> None:
        torch.manual_seed(0)
        model = shard_copy(Net(1), self.gtp_mesh(), schedule=SchedulePolicy())
        self.assertEqual(sharding_report(model).choices, ())
        token_loss(model, make_tokens(0)).backward()
        report = sharding_report(model)
        for text in ("gathered ahead 32.0 MiB: the largest block has", "a mesh of 'cpu' has no copy engines"):
            self.assertIn(text, str(report))
        self.assertEqual(runtime_of(model).setup.schedule.gather_backend, "process_group")
