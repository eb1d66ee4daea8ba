"""What of communication is exposed, and a gradient norm that ranks have parts of."""

from __future__ import annotations

import itertools
from unittest import mock

import torch
import torch.nn as nn
from common import GlooTest
from runtime_common import runtime_of, shard_copy, small_model, square_step

from dtensor_gtp._comm.streams import Streams
from dtensor_gtp.metrics import StepMetrics


class Clock:
    """Goes on by a second whenever it is read."""

    def __init__(self) -> None:
        self.seconds = itertools.count()

    def perf_counter(self) -> float:
        return float(next(self.seconds))


class TestStepMetrics(GlooTest):
    def test_waits_of_the_first_step_since_a_reading_are_measured(self) -> None:
        """By a clock that goes on by a second whenever it is read: a second for each wait that waits for work."""
        reference = small_model()
        model = shard_copy(reference, self.gtp_mesh())
        metrics = StepMetrics(model)
        rows = torch.randn(2, 12)
        waited = 0
        wait = Streams.wait

        def counting(streams: Streams, done: object) -> object:
            nonlocal waited
            waited += done.work is not None  # type: ignore[attr-defined]
            return wait(streams, done)  # type: ignore[arg-type]

        with mock.patch("dtensor_gtp._comm.streams.time", Clock()):
            for _ in range(2):
                with mock.patch.object(Streams, "wait", counting):
                    square_step(model, rows)
                metrics.count(2)
                if runtime_of(model).comm.streams.waits.is_on:
                    raise AssertionError("one step is measured")
                square_step(model, rows)
                metrics.count(2)
                values = metrics.read()
                self.assertGreater(waited, 2)
                self.assertEqual(values["exposed_ms"], 1e3 * waited)
                waited = 0
        metrics.skip()
        self.assertNotIn("exposed_ms", metrics.read())

    def test_gradient_norm(self) -> None:
        reference = small_model()
        model = shard_copy(reference, self.gtp_mesh())
        metrics = StepMetrics(model)
        rows = torch.ones(2, 12)  # the same on all ranks: the average is what one process has
        for each in (model, reference):
            square_step(each, rows)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 1e9)
        expected = nn.utils.clip_grad_norm_(reference.parameters(), 1e9)
        self.assertAlmostEqual(metrics.read(grad_norm=norm)["grad_norm"], float(expected), places=4)
