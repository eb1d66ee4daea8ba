"""State that one process leaves in memory for the next: all of it or nothing, at a place that both know."""

import os
import secrets
import stat
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from expecttest import TestCase

from dtensor_gtp.elastic import HeldState, handover_path, leave_state, take_state
from dtensor_gtp.elastic.plan import Box


class TestHandover(TestCase):
    def setUp(self) -> None:
        self.folder = Path(self.enterContext(tempfile.TemporaryDirectory()))

    def test_what_is_left_is_taken_once(self) -> None:
        weight = torch.arange(12.0).reshape(3, 4)
        plain = {
            ("data", 0): {"seed": 3},
            ("betas",): (0.9, 0.95),
            ("dtype",): torch.bfloat16,
            ("rng", 0): torch.get_rng_state(),
            ("none",): None,
        }
        held = HeldState(7, {("model", "w"): (Box((3, 0), (3, 2)), weight[:, :2])}, plain)
        path = self.folder / "state.pt"
        self.assertIsNone(take_state(path))
        leave_state(held, path)
        self.assertEqual(stat.S_IMODE(path.stat().st_mode), 0o600)
        found = take_state(path)
        self.assertTrue(torch.equal(found.plain.pop(("rng", 0)), plain.pop(("rng", 0))))
        self.assertEqual((found.step, found.plain), (7, plain))
        box, part = found.tensors["model", "w"]
        self.assertEqual(box, Box((3, 0), (3, 2)))
        self.assertTrue(torch.equal(part, weight[:, :2]))
        self.assertEqual(list(self.folder.iterdir()), [])

    def test_a_failed_write_leaves_nothing(self) -> None:
        path = self.folder / "state.pt"
        with self.assertRaisesRegex(TypeError, "'data.hook' is a function"):
            leave_state(HeldState(1, {}, {("data", "hook"): lambda: None}), path)
        with mock.patch.object(torch, "save", side_effect=[OSError("full")]), self.assertRaisesRegex(OSError, "full"):
            leave_state(HeldState(1, {}, {}), path)
        self.assertEqual(list(self.folder.iterdir()), [])

    def ignored(self, path: Path, reason: str) -> None:
        """``take_state`` ignores the file, says why, and leaves it."""
        with self.assertLogs("dtensor_gtp.elastic.handover", "WARNING") as logs:
            self.assertIsNone(take_state(path))
        self.assertRegex(logs.output[0], f"{path.name} is ignored, because .*{reason}")
        self.assertTrue(os.path.lexists(path))

    def test_code_is_not_run(self) -> None:
        path, ran = self.folder / "state.pt", self.folder / "ran"

        class Planted:
            def __reduce__(self) -> tuple[Any, ...]:
                return os.mkdir, (str(ran),)

        torch.save((path.name, 1, {}, {("x",): Planted()}), path)
        path.chmod(0o600)
        self.ignored(path, "cannot be read")
        self.assertFalse(ran.exists())

    def test_files_of_strangers_are_named_and_stay(self) -> None:
        path = self.folder / "state.pt"
        leave_state(HeldState(1, {}, {}), path)
        with mock.patch.object(os, "geteuid", return_value=os.getuid() + 1):
            self.ignored(path, f"user {os.getuid()} owns it")
        path.chmod(0o644)
        self.ignored(path, "other users may read or write it")
        path.chmod(0o600)
        other = self.folder / "other.pt"
        path.rename(other)
        self.ignored(other, "it is from job 'state.pt'")
        link = self.folder / "link.pt"
        link.symlink_to(other)
        self.ignored(link, "cannot be opened")
        os.mkfifo(pipe := self.folder / "pipe.pt", 0o600)
        self.ignored(pipe, "no ordinary file")
        other.write_bytes(b"PK\3\4 cut off")
        self.ignored(other, "cannot be read")

    def test_nothing_is_written_through_a_link(self) -> None:
        target = self.folder / "target"
        target.write_text("kept")
        path = self.folder / "state.pt"
        path.symlink_to(target)
        with mock.patch.object(secrets, "token_hex", return_value="known"):
            partial = path.with_name(f"{path.name}.known.tmp")
            partial.symlink_to(target)
            with self.assertRaises(FileExistsError):
                leave_state(HeldState(1, {}, {}), path)
            self.assertTrue(partial.is_symlink())
        leave_state(HeldState(1, {}, {}), path)
        self.assertEqual(target.read_text(), "kept")
        self.assertFalse(path.is_symlink())

    def test_the_place_is_that_of_the_job_and_its_launcher(self) -> None:
        self.assertIsNone(handover_path({}, self.folder))
        environment = {"TORCHELASTIC_RUN_ID": "a/b", "LOCAL_RANK": "3"}
        path = handover_path(environment, self.folder)
        assert path is not None
        self.assertEqual(path, handover_path(environment, self.folder))
        self.assertEqual(path.parent, self.folder / f"dtensor_gtp-{os.geteuid()}")
        self.assertEqual(stat.S_IMODE(path.parent.stat().st_mode), 0o700)
        self.assertRegex(path.name, "^a_b-[0-9a-f]{32}-3.pt$")
        (path.parent / "of_another_job.pt").touch()
        others = {handover_path(environment | {"TORCHELASTIC_RUN_ID": "a_b"}, self.folder)}
        with mock.patch.object(os, "readlink", return_value="pid:[another container]"):
            others.add(handover_path(environment, self.folder))
        with mock.patch.object(os, "getppid", return_value=os.getppid() + 1):
            others.add(handover_path(environment, self.folder))
        self.assertEqual(len(others | {path}), 4)
        self.assertTrue((path.parent / "of_another_job.pt").exists())

    def test_a_directory_that_others_may_enter_is_not_used(self) -> None:
        environment = {"TORCHELASTIC_RUN_ID": "none", "LOCAL_RANK": "0"}
        own = self.folder / f"dtensor_gtp-{os.geteuid()}"
        own.mkdir(mode=0o755)
        own.chmod(0o755)
        for plant in (lambda: None, lambda: (own.rmdir(), own.symlink_to(tempfile.mkdtemp()))):
            plant()
            with self.assertLogs("dtensor_gtp.elastic.handover", "WARNING"):
                self.assertIsNone(handover_path(environment, self.folder))
        self.assertIsNone(handover_path(environment, self.folder / "missing"))
