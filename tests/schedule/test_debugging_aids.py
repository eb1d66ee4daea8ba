"""What helps to find a bug: loggers that ``TORCH_LOGS`` turns on, seeded delays, names of what ranks use differently.

Poison and order are tested where they find something (``test_gtp_shard_overlap.py``, ``test_gtp_shard_switches.py``),
profiler ranges in ``test_plan_report.py``, the report and ``repr`` in ``test_gtp_shard_init.py``.
"""

from __future__ import annotations

import logging
import math
import re
import tempfile
import unittest
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from common import ALL, GlooTest, environment, fake_mesh
from runtime_common import WIDTH, check_step, make_rows, shard_copy, small_model, square_step
from schedules import explicit
from script_jobs import Result, run_forked
from torch.distributed.device_mesh import DeviceMesh

from dtensor_gtp import SchedulePolicy, gtp_shard, quantize_
from dtensor_gtp._comm import debug
from dtensor_gtp._comm.streams import Streams

# One forward goes another way than the one before, which is worth a line to those who debug prefetching.
PROGRAM = """
import torch

torch._logging._internal._init_logs()  # as torch does when it is imported, which it has been here already

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


PARTED = """
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


def run_program(text: str, num_processes: int | None, *arguments: str, **variables: str) -> Result:
    with tempfile.TemporaryDirectory() as folder:
        script = Path(folder, "program.py")
        script.write_text(text)
        return run_forked([script, *arguments], num_processes, **variables)


class TestDebuggingAids(unittest.TestCase):
    def test_torch_logs_turns_the_loggers_on(self) -> None:
        result = run_program(PROGRAM, None, TORCH_LOGS="+dtensor_gtp")
        self.assertEqual(result.status, 0, result.output)
        lines = result.output.splitlines()
        self.assertTrue(any(re.match(r"(\[rank0\]:)?I.*gtp_shard: Net", line) for line in lines), result.output)
        self.assertTrue(any("a.weight" in line and "G(0)" in line for line in lines), result.output)
        # V is torch's letter for debug.
        unexpected = r"(\[rank0\]:)?V.*use of b.weight was not expected next"
        self.assertTrue(any(re.match(unexpected, line) for line in lines), result.output)

    def test_loggers_are_off_by_default_and_one_for_each_module(self) -> None:
        for name in ("dtensor_gtp", "dtensor_gtp.api", "dtensor_gtp._schedule.gathering"):
            self.assertEqual(logging.getLogger(name).level, logging.NOTSET, name)
            self.assertIn(name, logging.Logger.manager.loggerDict)

    def sleeps(self, flags: str) -> list[float]:
        """How long one step sleeps, each time."""
        with environment(DTENSOR_GTP_DEBUG=flags), fake_mesh(4) as mesh:
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

    def test_an_error_for_want_of_memory_names_a_page(self) -> None:
        class Hungry(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                raise torch.OutOfMemoryError("no more")

        with fake_mesh(4) as mesh:
            model = gtp_shard(nn.Sequential(nn.Linear(8, 8), Hungry(8, 8)), mesh, schedule=ALL)
            with self.assertRaisesRegex(torch.OutOfMemoryError, "no more") as raised:
                model(torch.ones(2, 8))
        self.assertEqual(raised.exception.__notes__, ["Read `python -m dtensor_gtp.help memory_too_high`."])


class Clips(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.up.weight.clamp_(-0.1, 0.1)
        return self.down(self.up(x))


class TestPoisonOfWhatIsFreed(GlooTest):
    """``DTENSOR_GTP_DEBUG=poison`` changes no value that is used."""

    def test_writes_of_forwards_and_inference(self) -> None:
        reference = nn.Sequential(Clips(), Clips())
        with environment(DTENSOR_GTP_DEBUG="poison"):
            model = shard_copy(reference, self.gtp_mesh(), schedule=SchedulePolicy(min_shard_numel=0))
            single = shard_copy(small_model(), self.gtp_mesh())
        for seed in range(3):
            check_step(reference, model, self.gtp_mesh(), make_rows(seed), square_step)
            for each in (model, single):
                with torch.inference_mode():
                    each(make_rows(seed))
            square_step(single, make_rows(seed))


class TestFinite(GlooTest):
    """``DTENSOR_GTP_DEBUG=finite`` on ranks of which one has a NaN: all raise, and name that rank and the weight."""

    def model(self, module: nn.Module, mesh: DeviceMesh, **options: Any) -> nn.Module:
        with environment(DTENSOR_GTP_DEBUG="finite"):
            return shard_copy(module, mesh, **options)

    def test_gradients_of_sharded_and_whole_parameters(self) -> None:
        """A NaN in the rows of rank 2, where backward meets it first. The steps before and after it are right."""
        alone = explicit(min_shard_numel=0, coalesce_grad_nbytes=0)
        for mesh, schedule, told in (
            (self.gtp_mesh(), alone, "'3.weight' has 144 NaN"),
            (self.hsdp_mesh(), ALL, "'3.weight' has 144 NaN .*'1.second' has"),
        ):
            reference = small_model()
            model = self.model(reference, mesh, schedule=schedule)
            check_step(reference, model, mesh, make_rows(0), square_step)
            rows = make_rows(1)[:2].fill_(math.nan if self.rank == 2 else 1)
            message = rf"before the reduce_scatter of gradients \(rank 2: {told}.*\), which would spread it"
            with self.assertRaisesRegex(RuntimeError, message):
                square_step(model, rows)
            check_step(reference, model, mesh, make_rows(2), square_step)
            norm = self.model(nn.LayerNorm(WIDTH), mesh)
            told = "'weight' has 1 NaN and 0 infinite of 12 elements, 'bias'"
            with self.assertRaisesRegex(RuntimeError, rf"before the all_reduce of gradients \(rank 1: {told}"):
                scale = torch.ones(WIDTH)
                scale[3] = math.nan if self.rank == 1 else 1
                norm(torch.ones(2, WIDTH) + torch.arange(WIDTH)).mul(scale).nansum().backward()

    def test_weights_in_every_storage(self) -> None:
        """One infinite element on rank 3, found before forward gathers it."""
        for storage in (None, "master", "native"):
            reference = nn.Sequential(nn.Linear(64, 64), nn.Linear(64, 128)).requires_grad_(False)
            reference[1].weight[100, 7] = math.inf  # a row of rank 3
            if storage is not None:
                quantize_(reference, "mxfp8", storage=storage)
            model = self.model(reference, self.gtp_mesh())
            message = r"before the all_gather of weights \(rank 3: '1.weight' has .*of 2048"
            with self.assertRaisesRegex(RuntimeError, message):
                model(torch.ones(2, 64))

    def test_padding_is_not_looked_at(self) -> None:
        """Buffers of gradients are not initialized, and nobody writes to their padding: 5 rows on 4 ranks have 3."""
        for schedule in (explicit(min_shard_numel=0, coalesce_grad_nbytes=0), explicit(min_shard_numel=0)):
            reference = nn.Sequential(nn.Linear(WIDTH, 5), nn.Linear(5, WIDTH), nn.Linear(WIDTH, 5))
            with environment(DTENSOR_GTP_DEBUG="poison,finite"):
                model = shard_copy(reference, self.gtp_mesh(), schedule=schedule)
            check_step(reference, model, self.gtp_mesh(), make_rows(0), square_step)

    def test_a_recording_is_refused(self) -> None:
        model = self.model(small_model(), self.gtp_mesh())
        is_recorded = mock.patch.object(Streams, "is_capturing", True)
        with is_recorded, self.assertRaisesRegex(RuntimeError, "finite reads values on the host, which a CUDA graph"):
            model(make_rows(0))


class TestPartedRanks(unittest.TestCase):
    """Ranks that use different weights, as a branch on random numbers makes them: a rank that lives on names both.

    Gloo ends the process of the other one, so each case is a job of its own.
    """

    def run_job(self, *arguments: str) -> str:
        result = run_program(PARTED, 2, *arguments)
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
