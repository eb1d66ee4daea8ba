"""What long work tells: lines of the log, and counts in a terminal, by a clock of the test."""

from __future__ import annotations

import io
import logging
import unittest
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from common import imports_as
from torch.distributed.device_mesh import init_device_mesh

from dtensor_gtp import gtp_shard, quantize_
from dtensor_gtp._progress import Progress
from dtensor_gtp.checkpoint import dequantize_state_dict
from dtensor_gtp.quant import casts
from dtensor_gtp.quant.cast import Casts

LOGGER = logging.getLogger("dtensor_gtp.test_progress")


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


class TestProgress(unittest.TestCase):
    def setUp(self) -> None:
        self.seconds, self.terminal = 100.0, Terminal()

    def work(self, *seconds: float, total: int = 0, stream: io.StringIO | None = None) -> list[str]:
        """Steps that take so long each; gives the lines of the log."""
        with self.assertLogs(LOGGER, logging.INFO) as logged:
            stream = self.terminal if stream is None else stream
            with Progress(LOGGER, "work", total, stream=stream, now=lambda: self.seconds) as progress:
                for step, taken in enumerate(seconds):
                    self.seconds += taken
                    progress.advance(f"part {step}")
        return [record.getMessage() for record in logged.records]

    def test_log(self) -> None:
        self.assertEqual(self.work(1, 2, total=3), ["work: begins, 3 in all", "work: done after 3.0 s (2 of 3)"])
        self.assertEqual(self.work(0.25), ["work: begins", "work: done after 0.2 s (1)"])
        self.assertEqual(self.work(), ["work: begins", "work: done after 0.0 s"])

    def test_terminal(self) -> None:
        """Nothing in the first second, then at most four lines a second; at the end the line is gone."""
        self.work(0.5, 0.4, 0.2, 0.1, 0.1, 10, total=6)
        written = self.terminal.getvalue().split("\r")
        lines = ["work: 3 of 6, 1 s (part 2)", "work: 6 of 6, 11 s (part 5)"]
        self.assertEqual(written, ["", *lines, " " * len(lines[1]), ""])

    def test_where_nothing_is_shown(self) -> None:
        """For short work, in files, on other ranks than the first one."""
        file = io.StringIO()
        self.work(0.1, 0.1)
        self.work(5, 5, stream=file)
        with mock.patch.object(dist, "is_initialized", return_value=True), mock.patch.object(dist, "get_rank") as rank:
            rank.return_value = 1
            self.work(5)
            self.assertEqual((self.terminal.getvalue(), file.getvalue()), ("", ""))
            rank.return_value = 0
            self.work(5)
            self.assertIn("work: 1, 5 s", self.terminal.getvalue())

    def test_shorter_lines_cover_longer_ones(self) -> None:
        with Progress(LOGGER, "work", stream=self.terminal, now=lambda: self.seconds) as progress:
            for name in ("long name", ""):
                self.seconds += 2
                progress.advance(name)
        _, first, second, *_ = self.terminal.getvalue().split("\r")
        self.assertEqual((len(second), second.rstrip()), (len(first), "work: 2, 4 s"))

    def test_errors(self) -> None:
        with self.assertLogs(LOGGER, logging.INFO) as logged, self.assertRaises(KeyError):
            with Progress(LOGGER, "work", stream=self.terminal, now=lambda: self.seconds) as progress:
                for _ in progress.over("ab"):
                    self.seconds += 3
                    raise KeyError
        self.assertEqual(logged.records[-1].getMessage(), "work: failed with KeyError after 3.0 s")


class TestLongWork(unittest.TestCase):
    """What takes long says so. Recovery: ``test_elastic_checkpoint.py``."""

    def test_first_forward(self) -> None:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
        self.addCleanup(dist.destroy_process_group)
        model = gtp_shard(nn.Linear(64, 64), init_device_mesh("cpu", (1,), mesh_dim_names=("gtp",)))
        with self.assertLogs("dtensor_gtp._schedule.first_forward", logging.INFO) as logged:
            model(torch.zeros(1, 64))
        begin, end, *_ = (record.getMessage() for record in logged.records)
        self.assertEqual(begin, "first forward: ranks agree, communicators are made: begins, 2 in all")
        self.assertRegex(end, r"made: done after \d+\.\d s \(2 of 2\)$")

    def test_conversion(self) -> None:
        native = quantize_(nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32)), "mxfp8", storage="native")
        plain = nn.Sequential(nn.Linear(64, 32), nn.Linear(32, 32))
        with self.assertLogs("dtensor_gtp.checkpoint", logging.INFO) as logged:
            dequantize_state_dict(native.state_dict(), plain)
        begin, end = (record.getMessage() for record in logged.records)
        self.assertEqual(begin, "dequantization of a state dict: begins, 2 in all")
        self.assertRegex(end, r"^dequantization of a state dict: done after .* \(2 of 2\)$")

    def test_compiling_casts(self) -> None:
        """Each kernel counts; the casts of this machine's CPU take the place of Triton's."""
        module = mock.Mock(TritonCasts=lambda has_float8: Casts())
        with (
            imports_as("dtensor_gtp.quant.triton_casts", module),
            mock.patch.object(torch.cuda, "get_device_capability", return_value=(9, 0)),
            self.assertLogs("dtensor_gtp.quant.casts", logging.INFO) as logged,
        ):
            _, reason = casts._try(torch.device("cpu"))
        self.assertEqual(reason, "")
        begin, end = (record.getMessage() for record in logged.records)
        self.assertEqual(begin, "compiling the fused casts for cpu: begins")
        self.assertRegex(end, r"^compiling the fused casts for cpu: done after .* \(16\)$")
