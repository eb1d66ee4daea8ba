"""Recordings of a step that fail, on one GPU: eager training goes on, and so does another recording."""

import unittest
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from cuda_common import assert_same
from test_cuda_streams import SCHEDULES, WORLD_SIZE, Step, make_parts, one_of, tokens_of

from dtensor_gtp import capture_step


class Breaking:
    """A step that raises in its first recording, in the middle of backward: in Python, or by waiting for the GPU, which
    makes the recording void."""

    def __init__(self, model: nn.Module, step: Step, is_void: bool) -> None:
        self.model, self.step, self.is_void = model, step, is_void
        self.num_failures = 0

    def fail(self, grad: torch.Tensor) -> None:
        self.num_failures += 1
        raise ValueError(grad.sum().item() if self.is_void else "broken")

    def watch(self, module: nn.Module, args: Any, output: torch.Tensor) -> None:
        output.register_hook(self.fail)

    def __call__(self, tokens: torch.Tensor) -> torch.Tensor:
        # Not ``torch.cuda.is_current_stream_capturing``, which answers yes in the step before a recording, too.
        if self.num_failures or not torch.cuda.graphs.is_current_stream_capturing():
            return self.step(tokens)
        handle = self.model.blocks[1].register_forward_hook(self.watch)
        try:
            return self.step(tokens)
        finally:
            handle.remove()


@unittest.skipUnless(torch.cuda.is_available(), "needs a GPU")
class TestFailedRecordings(unittest.TestCase):
    def test_training_goes_on(self) -> None:
        """Bit for bit, after gathers and reductions that were in flight."""
        with one_of(WORLD_SIZE) as mesh:
            for is_void in (False, True):
                model, optimizer, step = make_parts(mesh, **SCHEDULES["one by one"])
                eager, _, expected = make_parts(mesh, **SCHEDULES["one by one"])
                breaking = Breaking(model, step, is_void)
                captured = capture_step(breaking, model, optimizer, warmup_steps=2)
                for index in range(2):
                    self.assertTrue(torch.equal(captured(tokens_of(index)), expected(tokens_of(index))))
                current = torch.cuda.current_stream()
                with self.assertRaisesRegex(RuntimeError, "could not record the step"):
                    captured(tokens_of(2))
                self.assertEqual(breaking.num_failures, 1)
                self.assertEqual(torch.cuda.current_stream(), current)
                for index in range(2, 8):
                    run = step if index < 4 else captured
                    self.assertTrue(torch.equal(run(tokens_of(index)), expected(tokens_of(index))), f"step {index}")
                self.assertEqual(captured.num_graphs, 1)
                assert_same(model.parameters(), eager.parameters(), f"void: {is_void}")

    def test_torch_goes_on(self) -> None:
        """After a recording that waiting has made void, dropout draws, memory that a second stream has used is taken
        again, and what the recording has taken is given back."""
        with one_of(WORLD_SIZE) as mesh:
            model, optimizer, step = make_parts(mesh, **SCHEDULES["one by one"])
            captured = capture_step(Breaking(model, step, is_void=True), model, optimizer, warmup_steps=2)
            for index in range(2):
                captured(tokens_of(index))
            torch.cuda.empty_cache()
            before = torch.cuda.memory_reserved()
            with self.assertRaisesRegex(RuntimeError, "could not record the step"):
                captured(tokens_of(2))
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            self.assertEqual(torch.cuda.memory_reserved(), before)
            self.assertTrue(F.dropout(torch.ones(1024, device="cuda")).eq(0).any())
            addresses, side = set(), torch.cuda.Stream()
            for _ in range(4):
                block = torch.empty(64 << 20, dtype=torch.uint8, device="cuda")
                addresses.add(block.data_ptr())
                block.record_stream(side)
                del block
                torch.cuda.synchronize()
            self.assertEqual(len(addresses), 1)
