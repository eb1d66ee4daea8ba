"""Saves checkpoints by DCP that are whole or absent, keeps the last ones, finds the newest.

``checkpoint.py`` hands on what is public here.
"""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import async_save as save_behind
from torch.distributed.checkpoint.state_dict_saver import save as save_now

_MARK = "complete.json"  # in each checkpoint that ``save`` has ended, with its number among those beside it
# ends of names of folders while a checkpoint is saved
_PARTIAL = ".partial"
_REPLACED = ".replaced"
_FILES = (_MARK, ".metadata", ".metadata.tmp")  # of a checkpoint, beside those of the ranks, which end as the next
_DATA = ".distcp"


def save(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    keep: int | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup | None = None,
    no_dist: bool = False,
) -> None:
    """``torch.distributed.checkpoint.save``, after which ``path`` holds all of this checkpoint, or what it held before.

    ``dcp.save`` into a folder that holds a checkpoint leaves a mixture of both if a rank dies, which loads without an
    error. Here ranks write beside ``path``; when all have flushed their files, rank 0 renames the folder.

    Args:
        state_dict, planner, process_group, no_dist: As for ``dcp.save``.
        path: The folder of this checkpoint alone, such as ``run/step-10``, on a file system that all ranks share. It is
            replaced as a whole.
        keep: How many checkpoints of :func:`save` stay in the folder that holds ``path``; older ones are removed.

    Raises:
        ValueError: ``keep`` is less than 1, or ``path`` ends as the names of unfinished saves do.
        FileExistsError: ``path`` is a file or a link, or a folder with anything else than a checkpoint. Raised on all
            ranks, before any of them writes.

    Example:
        >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
        >>> save({"model": model.state_dict()}, "run/step-10", keep=2)
        >>> load({"model": model.state_dict()}, checkpoint_id=latest("run"))
    """
    writer = _Writer(path, keep)
    try:
        save_now(state_dict, storage_writer=writer, planner=planner, process_group=process_group, no_dist=no_dist)
    except CheckpointException as error:  # torch would show the traceback of each rank
        for refused, _ in error.failures.values():
            if isinstance(refused, FileExistsError):
                raise refused from None
        raise


def async_save(
    state_dict: dict[str, Any],
    path: str | os.PathLike[str],
    *,
    keep: int | None = None,
    planner: SavePlanner | None = None,
    process_group: dist.ProcessGroup,
) -> Future[Any]:
    """:func:`save` behind training. The values of the call are stored. Wait for the result before the next save.

    Args:
        state_dict, path, keep, planner: As for :func:`save`.
        process_group: One of gloo that nothing else uses: ``dist.new_group(backend="gloo")``.

    Returns:
        A future. Its ``result()`` raises torch's ``CheckpointException`` with what the save raised.

    Example:
        >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
        >>> gloo = torch.distributed.new_group(backend="gloo")
        >>> state = {"model": model.state_dict()}
        >>> saving = async_save(state, "run/step-20", process_group=gloo)
        >>> saved = saving.result()
    """
    writer: Any = _Writer(path, keep)
    saved: Any = save_behind(state_dict, storage_writer=writer, planner=planner, process_group=process_group)
    return saved  # type: ignore[no-any-return]


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The newest complete checkpoint that :func:`save` or :func:`async_save` put into ``folder``; None without one.

    Args:
        folder: ``run`` for checkpoints such as ``run/step-10``.

    Example:
        >>> latest("nowhere") is None
        True
    """
    return next(iter(_complete(Path(folder))), None)


def _complete(folder: Path) -> list[Path]:
    """Complete checkpoints, the newest first."""
    found = {}
    for mark in folder.glob(f"*/{_MARK}"):
        if mark.parent.suffix != _PARTIAL:
            found[mark.parent] = json.loads(mark.read_text())["number"]
    return sorted(found, key=lambda path: found[path], reverse=True)


class _Writer(FileSystemWriter):
    """Writes beside ``path``, and renames when the metadata of all ranks is written."""

    def __init__(self, path: str | os.PathLike[str], keep: int | None) -> None:
        if keep is not None and keep < 1:
            raise ValueError(f"save expects keep to be at least 1, but got {keep}. Pass None to remove nothing.")
        self._final = Path(os.path.abspath(path))
        self._keep = keep
        if self._final.suffix in (_PARTIAL, _REPLACED):
            raise ValueError(
                f"save expects a path that does not end with {_PARTIAL!r} or {_REPLACED!r}, as folders of unfinished "
                f"saves do, but got '{path}'. Choose another name."
            )
        self._replaced = self._final.with_name(self._final.name + _REPLACED)
        super().__init__(self._final.with_name(self._final.name + _PARTIAL))

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Make no folder before ``prepare_global_plan`` has checked what is there."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Runs on one rank, while no rank writes: remove what a save has left that did not end."""
        partial = Path(self.path)
        for folder in (self._final, partial, self._replaced):
            _check_replaceable(folder)
        partial.mkdir(parents=True, exist_ok=True)
        for leftover in partial.iterdir():
            leftover.unlink()
        return super().prepare_global_plan(plans)

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Any:
        """Make the folder on each rank: a network file system may not show yet that one rank has made it."""
        Path(self.path).mkdir(parents=True, exist_ok=True)
        return super().write_data(plan, planner)

    def finish(self, metadata: Metadata, results: Any) -> None:
        """Runs on one rank, when all ranks have flushed their files."""
        super().finish(metadata, results)
        folder = self._final.parent
        partial = Path(self.path)
        numbers = [json.loads((path / _MARK).read_text())["number"] for path in _complete(folder)]
        with (partial / _MARK).open("w") as file:
            json.dump({"number": max(numbers, default=0) + 1}, file)
            file.flush()
            os.fsync(file.fileno())
        _sync_folder(partial)
        if self._final.exists():
            shutil.rmtree(self._replaced, ignore_errors=True)
            self._final.rename(self._replaced)  # complete, and found by ``latest``, until the new one has its name
        partial.rename(self._final)
        _sync_folder(folder)
        shutil.rmtree(self._replaced, ignore_errors=True)
        saved = [path for path in _complete(folder) if not path.is_symlink()]  # a link is a second name of one of them
        for old in saved[self._keep :] if self._keep else ():
            shutil.rmtree(old)


def _is_of_checkpoint(name: str) -> bool:
    return name in _FILES or name.endswith(_DATA)


def _check_replaceable(path: Path) -> None:
    """Refuse to remove what is no checkpoint."""
    found = ""
    if path.is_symlink():
        found = f"it is a link to '{os.readlink(path)}'"
    elif path.is_file():
        found = "it is a file"
    elif path.is_dir():
        entries = list(path.iterdir())
        others = sorted(entry.name for entry in entries if entry.is_dir() or not _is_of_checkpoint(entry.name))
        if others:
            found = f"{len(others)} of its entries are not of a checkpoint: {', '.join(others[:3])}"
    if found:
        raise FileExistsError(
            f"save expects '{path}' not to exist or to have a checkpoint alone, because it replaces the whole folder, "
            f"but {found}. Pass a folder of this checkpoint alone as path, such as 'run/step-10', or remove what is "
            "there."
        )


def _sync_folder(path: Path) -> None:
    """A new name is durable when the folder that holds it is flushed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
