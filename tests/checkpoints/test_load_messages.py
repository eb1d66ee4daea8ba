"""A checkpoint that does not fit is refused in one message, which names the keys and what to write."""

import tempfile
import unittest
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from checkpoint_common import job_state
from common import GlooTest, full, shared_directory

from dtensor_gtp import checkpoint, gtp_shard


class TestMissingKeys(unittest.TestCase):
    """In one process: the message is short, and says what was meant."""

    def test_messages(self) -> None:
        model = nn.Sequential(nn.Linear(4, 4))
        state = model.state_dict()
        with tempfile.TemporaryDirectory() as folder:
            dcp.save({"model": state, "step": 3}, checkpoint_id=f"{folder}/nested", no_dist=True)
            dcp.save(state, checkpoint_id=f"{folder}/bare", no_dist=True)
            deeper = {f"net.{name}": value for name, value in state.items()}
            for saved, asked, told in (
                ("nested", state, r"'0.weight', did you mean 'model.0.weight'\?.*saved as {\"model\": ...}"),
                ("bare", {"model": state}, r"'model.0.weight', did you mean '0.weight'\?.*load the inner dict"),
                ("nested", {"model": deeper}, r"'model.net.0.weight', did you mean 'model.0.weight'\?"),
                ("nested", {"model": state, "stepp": 0}, "'stepp', did you mean 'step'.*allow_partial_load=True"),
            ):
                with self.assertRaisesRegex(RuntimeError, told) as raised:
                    checkpoint.load(asked, checkpoint_id=f"{folder}/{saved}", no_dist=True)
                self.assertLess(len(str(raised.exception)), 400)
                self.assertNotIn("Traceback", str(raised.exception))
            asked = {"model": state, "stepp": 0}
            checkpoint.load(asked, checkpoint_id=f"{folder}/nested", no_dist=True, allow_partial_load=True)

    def test_names_of_others_reach_no_terminal(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            dcp.save({"bias\x1b[2J": torch.ones(2)}, checkpoint_id=folder, no_dist=True)
            for asked in ({"bias": torch.ones(2)}, {"bias\x1b[2J": torch.ones(3)}):
                with self.assertRaisesRegex((RuntimeError, ValueError), r"'bias\\x1b\[2J'") as raised:
                    checkpoint.load(asked, checkpoint_id=folder, no_dist=True)
                self.assertNotIn("\x1b", str(raised.exception))

    def test_no_checkpoint(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            with self.assertRaisesRegex(FileNotFoundError, rf"a checkpoint in '{folder}/none', but there is none"):
                checkpoint.load({"step": 0}, checkpoint_id=f"{folder}/none", no_dist=True)
            with self.assertRaisesRegex(ValueError, "expects checkpoint_id or storage_reader, but got None.*latest"):
                checkpoint.load({"step": 0}, checkpoint_id=checkpoint.latest(folder), no_dist=True)


class TestOtherSizes(GlooTest):
    """On ranks, too, a message and no traceback of each rank."""

    world_size = 2

    def test_messages(self) -> None:
        mesh = self.gtp_mesh()

        def job(width: int) -> tuple[nn.Module, torch.optim.Optimizer]:
            model = gtp_shard(nn.Sequential(nn.Linear(64, 64), nn.Linear(64, width)), mesh)
            return model, torch.optim.AdamW(model.parameters())

        def states(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
            return job_state(model, optimizer) | {"step": 3}

        saved, other = job(64), job(32)
        before = full(other[0][0].weight).clone()
        with shared_directory() as folder:
            checkpoint.save(states(*saved), f"{folder}/step-3")
            for asked, kind, told in (
                (states(*other), ValueError, r"'model.1.weight' is \(32, 64\) here and \(64, 64\) there.*; and 1 more"),
                (
                    {"model": saved[0].state_dict(), "optimizer": saved[1].state_dict()},
                    RuntimeError,
                    r"numbers its states.*get_state_dict\(model, optimizer\)",
                ),
                ({"model": {"0.weight": 3}}, ValueError, "'model.0.weight' is of type int here and a tensor there"),
            ):
                with self.assertRaisesRegex(kind, told) as raised:
                    checkpoint.load(asked, checkpoint_id=f"{folder}/step-3")
                self.assertLess(len(str(raised.exception)), 600)
                self.assertNotIn("Traceback", str(raised.exception))
            self.assertEqual(full(other[0][0].weight), before)
            with self.assertRaisesRegex(FileNotFoundError, "but there is none"):
                checkpoint.load(states(*saved), checkpoint_id=f"{folder}/step-4")
