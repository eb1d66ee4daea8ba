"""``checkpoint.save``: a checkpoint is whole or absent, also where it replaces another one and a rank dies."""

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from common import GlooTest, shared_directory
from script_jobs import run_forked

from dtensor_gtp import checkpoint, gtp_shard


class TestSave(GlooTest):
    world_size = 2

    def model(self, value: float) -> nn.Module:
        model = gtp_shard(nn.Linear(6, 6, bias=False), self.gtp_mesh())
        with torch.no_grad():
            model.weight.fill_(value)
        return model

    def values(self, path: Path | None) -> set[float]:
        assert path is not None
        model = self.model(-1.0)
        checkpoint.load(model.state_dict(), checkpoint_id=path)
        return set(model.weight.full_tensor().flatten().tolist())

    def names(self, folder: Path) -> list[str]:
        dist.barrier()
        return sorted(path.name for path in folder.iterdir())

    def test_newest_are_kept_and_found(self) -> None:
        with shared_directory() as directory:
            folder = Path(directory) / "run"
            self.assertIsNone(checkpoint.latest(folder))
            for step, value in ((9, 1.0), (10, 2.0), (11, 3.0)):
                checkpoint.save(self.model(value).state_dict(), folder / f"step-{step}", keep=2)
            self.assertEqual(self.names(folder), ["step-10", "step-11"])
            self.assertEqual(self.values(checkpoint.latest(folder)), {3.0})
            checkpoint.save(self.model(4.0).state_dict(), folder / "step-10")  # in place
            self.assertEqual(self.names(folder), ["step-10", "step-11"])
            self.assertEqual(checkpoint.latest(folder), folder / "step-10")
            self.assertEqual(self.values(folder / "step-10"), {4.0})
            model = self.model(5.0)
            saving = checkpoint.async_save(
                model.state_dict(), folder / "step-12", keep=1, process_group=dist.new_group(backend="gloo")
            )
            with torch.no_grad():
                model.weight.fill_(6.0)
            saving.result()
            self.assertEqual(self.names(folder), ["step-12"])
            self.assertEqual(self.values(checkpoint.latest(folder)), {5.0})
            with self.assertRaisesRegex(ValueError, "keep to be at least 1, but got 0"):
                checkpoint.save({}, folder / "x", keep=0)

    def test_a_save_that_fails_leaves_the_checkpoint_before(self) -> None:
        with shared_directory() as directory:
            path = Path(directory) / "last"
            checkpoint.save(self.model(1.0).state_dict(), path)
            write_data = dcp.FileSystemWriter.write_data

            def write_or_fail(writer: Any, *args: Any) -> Any:
                if self.rank == 1:
                    raise OSError("no space left")
                return write_data(writer, *args)

            with (
                mock.patch.object(dcp.FileSystemWriter, "write_data", write_or_fail),
                self.assertRaisesRegex(dcp.api.CheckpointException, "no space left"),
            ):
                checkpoint.save(self.model(2.0).state_dict(), path)
            self.assertEqual(self.values(path), {1.0})
            self.assertEqual(checkpoint.latest(directory), path)
            leftover = Path(directory) / "last.partial"
            if self.rank == 0:
                (leftover / "__7_0.distcp").touch()
            dist.barrier()
            checkpoint.save(self.model(3.0).state_dict(), path)
            self.assertEqual(self.values(path), {3.0})
            self.assertEqual(self.names(Path(directory)), ["last"])
            self.assertFalse((path / "__7_0.distcp").exists())

    def test_what_is_no_checkpoint_is_not_removed(self) -> None:
        """Neither from the folder itself nor from those that a save makes beside it; by an error on all ranks."""
        with shared_directory() as directory:
            run = Path(directory) / "run"
            checkpoint.save(self.model(1.0).state_dict(), run / "step-1")
            if self.rank == 0:
                (run / "train.log").touch()
                (run / "last").symlink_to("step-1")
                (run / "new.partial" / "events").mkdir(parents=True)
                (run / "empty").mkdir()
            dist.barrier()
            found = sorted(run.rglob("*"))
            for path, what in (
                (run, "5 of its entries are not of a checkpoint: empty, last, new.partial"),
                (run / "train.log", "it is a file"),
                (run / "last", "it is a link to 'step-1'"),
                (run / "new", "1 of its entries are not of a checkpoint: events"),
            ):
                with self.assertRaisesRegex(FileExistsError, what):
                    checkpoint.save(self.model(2.0).state_dict(), path)
                dist.barrier()
                self.assertEqual(sorted(run.rglob("*")), found)
            with self.assertRaisesRegex(ValueError, "does not end with '.partial'"):
                checkpoint.save({}, run / "x.partial")
            checkpoint.save(self.model(3.0).state_dict(), run / "empty", keep=2)
            self.assertEqual(self.values(run / "empty"), {3.0})
            self.assertEqual(self.values(run / "last"), {1.0})  # a link is not counted

    def test_what_others_did_to_a_checkpoint(self) -> None:
        """A save that died between the two names leaves a complete one; a file that was cut off is not loaded."""
        with shared_directory() as directory:
            path = Path(directory) / "last"
            checkpoint.save(self.model(1.0).state_dict(), path)
            dist.barrier()
            if self.rank == 0:
                path.rename(path.with_name("last.replaced"))
            dist.barrier()
            found = checkpoint.latest(directory)
            self.assertEqual(self.values(found), {1.0})
            if self.rank == 0:
                for file in found.glob("*.distcp"):
                    os.truncate(file, file.stat().st_size // 2)
            dist.barrier()
            model = self.model(2.0)
            with self.assertRaises(dcp.api.CheckpointException):
                checkpoint.load(model.state_dict(), checkpoint_id=found)
            self.assertEqual(set(model.weight.full_tensor().flatten().tolist()), {2.0})


_KILLED = """
import os, signal, sys, pathlib
import torch, torch.distributed as dist, torch.distributed.checkpoint as dcp, torch.nn as nn
from dtensor_gtp import checkpoint, gtp_shard, init_weight_mesh

call, point, path = sys.argv[1:]
dist.init_process_group("gloo")
behind = dist.new_group(backend="gloo")
model = gtp_shard(nn.Linear(6, 6, bias=False), init_weight_mesh("cpu", gtp=2).weights)

def fill(value):
    with torch.no_grad():
        model.weight.fill_(value)
    return model.state_dict()

def struck(owner, name, rank, number=1):
    stock, left = getattr(owner, name), [number]
    def call(*args, **kwargs):
        left[0] -= 1
        if dist.get_rank() == rank and not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)
        return stock(*args, **kwargs)
    setattr(owner, name, call)

checkpoint.save(fill(1.0), path)
if point == "data":
    struck(os, "fsync", 1)
elif point == "metadata":
    struck(os, "fsync", 0, 2)
else:  # the first rename is that of the metadata
    struck(pathlib.Path, "rename", 0, {"old folder": 2, "new folder": 3}[point])
if call == "save":
    checkpoint.save(fill(2.0), path)
else:
    saving = checkpoint.async_save(fill(2.0), path, process_group=behind)
    fill(3.0)  # training goes on
    saving.result()
"""


@pytest.mark.parametrize(
    ("call", "point"),
    [("async_save", "data"), ("save", "metadata"), ("save", "old folder"), ("async_save", "new folder")],
)
def test_a_rank_is_killed(call: str, point: str, tmp_path: Path) -> None:
    """Within a save over a checkpoint, or behind training: that one is found, whole."""
    script = tmp_path / "job.py"
    script.write_text(_KILLED)
    result = run_forked([script, call, point, tmp_path / "run" / "last"], 2)
    assert result.status == -9, result.output
    found = checkpoint.latest(tmp_path / "run")
    assert found is not None
    state = {"weight": torch.zeros(6, 6)}
    dcp.load(state, checkpoint_id=found, no_dist=True)
    assert set(state["weight"].flatten().tolist()) == {1.0}
