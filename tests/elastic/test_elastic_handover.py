"""State that one process leaves in memory for the next: all of it or nothing, at a place that both know."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path

import torch
from expecttest import TestCase

from dtensor_gtp.elastic import HeldState, handover_path, leave_state, take_state
from dtensor_gtp.elastic.plan import Box


class TestHandover(TestCase):
    def setUp(self) -> None:
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)

    def test_what_is_left_is_taken_once(self) -> None:
        weight = torch.arange(12.0).reshape(3, 4)
        held = HeldState(7, {("model", "w"): (Box((3, 0), (3, 2)), weight[:, :2])}, {("data", 0): {"seed": 3}})
        path = self.folder / "state.pt"
        self.assertIsNone(take_state(path))
        leave_state(held, path)
        self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o600)
        found = take_state(path)
        assert found is not None
        self.assertEqual((found.step, found.plain), (7, held.plain))
        box, part = found.tensors["model", "w"]
        self.assertEqual(box, Box((3, 0), (3, 2)))
        self.assertTrue(torch.equal(part, weight[:, :2]))
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_a_process_that_ends_while_it_writes_leaves_nothing(self) -> None:
        path = self.folder / "state.pt"
        with self.assertRaisesRegex(AttributeError, "local"):
            leave_state(HeldState(1, {}, {("hook",): lambda: None}), path)
        self.assertIsNone(take_state(path))

    def test_the_place_is_that_of_launcher_and_local_rank(self) -> None:
        self.assertIsNone(handover_path({}, self.folder))
        environment = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "3"}
        path = handover_path(environment, self.folder)
        assert path is not None
        self.assertEqual(path, self.folder / f"dtensor_gtp-{os.getppid()}-3.pt")
        others = [self.folder / name for name in ("dtensor_gtp-99999999-0.pt", "other-99999999-0.pt")]
        for file in (path, *others):
            file.touch()
        handover_path(environment, self.folder)
        self.assertEqual([file.exists() for file in (path, *others)], [True, False, True])
