"""What helps to find a bug: loggers that ``TORCH_LOGS`` turns on, and delays that are drawn from a seed.

Poison and order are tested where they find something (``test_gtp_shard_overlap.py``, ``test_gtp_shard_switches.py``),
profiler ranges in ``test_plan_report.py``, the report and ``repr`` in ``test_gtp_shard_init.py``.
"""

from __future__ import annotations

import logging
import os
import re
import subprocess
import sys
import unittest
from pathlib import Path
from unittest import mock

import torch
import torch.nn as nn
from common import ALL, environment, fake_world
from timing import HANG_S
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.common_utils import run_tests

import dtensor_gtp
from dtensor_gtp import gtp_shard
from dtensor_gtp._comm import debug

# One forward goes another way than the one before, which is worth a line to those who debug prefetching.
PROGRAM = """
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from dtensor_gtp import gtp_shard
from dtensor_gtp.policy import fixed_policy

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x, first, second):
        return getattr(self, second)(getattr(self, first)(x))

dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("gtp",))
model = gtp_shard(Net(), mesh, schedule=fixed_policy(min_shard_numel=0))
for order in ("ab", "ab", "ba"):
    model(torch.ones(1, 4), *order)
"""


class TestDebuggingAids(unittest.TestCase):
    def test_torch_logs_turns_the_loggers_on(self) -> None:
        path = os.pathsep.join([str(Path(dtensor_gtp.__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
        result = subprocess.run(
            [sys.executable, "-c", PROGRAM],
            env=os.environ | {"TORCH_LOGS": "+dtensor_gtp", "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
            capture_output=True,
            text=True,
            timeout=HANG_S,
        )
        self.assertEqual(result.returncode, 0, result.stderr)
        lines = result.stderr.splitlines()
        self.assertTrue(any(re.match(r"(\[rank0\]:)?I.*gtp_shard: Net", line) for line in lines), result.stderr)
        self.assertTrue(any("a.weight" in line and "G(0)" in line for line in lines), result.stderr)
        # V is torch's letter for debug.
        unexpected = r"(\[rank0\]:)?V.*use of b.weight was not expected next"
        self.assertTrue(any(re.match(unexpected, line) for line in lines), result.stderr)

    def test_loggers_are_off_by_default_and_one_for_each_module(self) -> None:
        for name in ("dtensor_gtp", "dtensor_gtp.api", "dtensor_gtp._schedule.gathering"):
            self.assertEqual(logging.getLogger(name).level, logging.NOTSET, name)
            self.assertIn(name, logging.Logger.manager.loggerDict)

    def sleeps(self, flags: str) -> list[float]:
        """How long one step sleeps, each time."""
        with environment(DTENSOR_GTP_DEBUG=flags), fake_world():
            mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("gtp",))
            model = gtp_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), mesh, schedule=ALL)
            with mock.patch.object(debug.time, "sleep") as sleep:
                model(torch.ones(2, 8)).sum().backward()
            return [call.args[0] for call in sleep.call_args_list]

    def test_delays_are_seeded(self) -> None:
        drawn = self.sleeps("delay=3")
        self.assertGreater(len(drawn), 6)  # gathers, uses and reductions of two weights
        self.assertGreater(len(set(drawn)), 3)
        self.assertEqual(self.sleeps("poison,delay=3"), drawn)
        self.assertNotEqual(self.sleeps("delay=4"), drawn)
        self.assertEqual(self.sleeps(""), [])


if __name__ == "__main__":
    run_tests()
