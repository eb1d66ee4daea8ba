"""Ranks that use different weights, as a branch on random numbers makes them: a rank that lives on names both weights.

Gloo ends the process of the other one, so each case is a job of its own.
"""

from __future__ import annotations

import tempfile
import unittest
from pathlib import Path

import pytest
from script_jobs import run_forked

JOB = """
import signal, sys
import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh

from dtensor_gtp import gtp_shard

signal.signal(signal.SIGTERM, signal.SIG_IGN)  # the launcher ends a job as soon as one process is dead
step, skipped = int(sys.argv[1]), {int(k): int(v) for k, v in (pair.split(":") for pair in sys.argv[2:])}

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        widths = range(64, 104, 8)
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(32, w), nn.ReLU(), nn.Linear(w, 32)) for w in widths)

    def forward(self, x, skipped):
        for index, layer in enumerate(self.layers):
            x = x if index == skipped else x + layer(x)
        return x

dist.init_process_group("gloo")
torch.manual_seed(0)
model = gtp_shard(Net(), init_device_mesh("cpu", (2,), mesh_dim_names=("gtp",)))
for number in range(4):
    model(torch.randn(2, 32), skipped.get(dist.get_rank()) if number == step else None).sum().backward()
print("done")
"""


class TestPartedRanks(unittest.TestCase):
    def run_job(self, *arguments: str) -> str:
        with tempfile.TemporaryDirectory() as folder:
            script = Path(folder) / "job.py"
            script.write_text(JOB)
            result = run_forked([script, *arguments], 2)
        self.assertNotEqual(result.status, 0, result.output)
        return result.output

    def check(self, arguments: tuple[str, ...], first: str, second: str) -> None:
        output = self.run_job(*arguments)
        ranks = {0: f"rank 0 has layers.{first}", 1: f"rank 1 has layers.{second}"}  # weights of a block are one use
        either = [f"{ranks[one]}, {ranks[1 - one]}" for one in (0, 1)]
        self.assertTrue(any(f"(as use 3 of a pass, {text})" in output for text in either), output)
        self.assertRegex(output, "If another rank raised .* must not decide whether a layer runs")

    def test_a_layer_that_one_rank_skips_after_some_steps(self) -> None:
        self.check(("2", "1:2"), "2", "3")

    @pytest.mark.long
    def test_other_layers_that_ranks_skip(self) -> None:
        """In the first forward their collectives still fit together, so both ranks live on to compare their uses."""
        output = self.run_job("0", "1:2")
        self.assertIn("in the first forward of a Net rank 0 has 'layers.2' where rank 1 has 'layers.3'", output)
        self.check(("2", "0:2"), "3", "2")
        self.check(("2", "0:2", "1:3"), "3", "2")
