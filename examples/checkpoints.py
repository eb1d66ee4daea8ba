"""Checkpoints that are either complete or absent, in the format of ``torch.distributed.checkpoint`` (DCP).

A checkpoint is written to ``step-N.tmp``, flushed to disk and renamed, and only then does the file ``latest`` name
it. A process that is killed at any point leaves ``latest`` pointing at the last complete one. Two are kept.

The tensors are saved by DCP, which reshards them on load, so any number of processes can resume. What must match for
the resumed run to be the same run (model sizes, data order) stands beside them in ``run.json`` and is checked first.
"""

import json
import os
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.checkpoint.stateful import Stateful

from dtensor_gtp import checkpoint
from launch import Place, UsageError

_RUN_FILE = "run.json"
_LATEST_FILE = "latest"


class TrainState(Stateful):
    """Everything that a training step reads and changes: model, optimizer, learning-rate schedule and RNG.

    The RNG state belongs to one rank of one world size. A run that resumes on another number of processes finds none
    for its ranks and keeps the state it was seeded with (``with_rng=False``).
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        scheduler: torch.optim.lr_scheduler.LRScheduler,
        place: Place,
        with_rng: bool = True,
    ) -> None:
        self._model = model
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._place = place
        self._with_rng = with_rng

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._model, self._optimizer)
        state = {"model": model, "optimizer": optimizer, "scheduler": self._scheduler.state_dict()}
        if self._with_rng:
            state["rng"] = {f"rank-{self._place.rank}": self._rng_state()}
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        set_state_dict(
            self._model, self._optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optimizer"]
        )
        self._scheduler.load_state_dict(state_dict["scheduler"])
        if self._with_rng:
            rng = state_dict["rng"][f"rank-{self._place.rank}"]
            torch.set_rng_state(rng["cpu"])
            if "cuda" in rng:
                torch.cuda.set_rng_state(rng["cuda"])

    def _rng_state(self) -> dict[str, torch.Tensor]:
        state = {"cpu": torch.get_rng_state()}
        if self._place.device.type == "cuda":
            state["cuda"] = torch.cuda.get_rng_state()
        return state


class CheckpointDir:
    """The folder that holds a run's checkpoints, on a file system that all ranks share.

    Args:
        path: the folder; created by the first save.
        place: this process's place in the job. Every method but :meth:`latest` must be called by all ranks.
    """

    def __init__(self, path: Path, place: Place) -> None:
        self.path = path
        self._place = place

    def latest(self) -> Path | None:
        """The last complete checkpoint, or None."""
        try:
            return self.path / (self.path / _LATEST_FILE).read_text().strip()
        except FileNotFoundError:
            return None

    def save(self, step: int, state: Stateful, run: dict[str, Any], planner: dcp.SavePlanner | None = None) -> None:
        """Writes a checkpoint and, once it is complete, makes it the latest one.

        Args:
            step: number of finished steps, which names the checkpoint.
            state: what to save.
            run: JSON-serializable facts that :meth:`read_run` gives back.
            planner: says which rank writes what; DCP's own by default.
        """
        partial = self.path / f"step-{step}.tmp"
        if self._place.rank == 0:
            self.path.mkdir(parents=True, exist_ok=True)
            for leftover in self.path.glob("step-*.tmp"):
                shutil.rmtree(leftover)
        dist.barrier()  # nobody writes into a leftover that rank 0 is removing
        dcp.save(state.state_dict(), checkpoint_id=partial, planner=planner)
        # dcp.save returns on rank 0 after every rank has flushed its files and the metadata is written.
        if self._place.rank == 0:
            _write_durably(partial / _RUN_FILE, json.dumps({"step": step, **run}, indent=2))
            self._publish(partial, f"step-{step}")

    def read_run(self, path: Path) -> dict[str, Any]:
        """The facts that were saved with the checkpoint in ``path``, and its ``step``."""
        return json.loads((path / _RUN_FILE).read_text())

    def load(self, path: Path, state: Stateful) -> None:
        """Loads the checkpoint in ``path`` into ``state``, resharding it where the number of processes has changed."""
        found = state.state_dict()
        checkpoint.load(found, checkpoint_id=path)  # says what does not fit
        state.load_state_dict(found)

    def _publish(self, partial: Path, name: str) -> None:
        previous = self.latest()
        # A run that starts over in the same folder meets the name again; the old one stays until the pointer moves.
        taken = {path.name for path in self.path.iterdir()}
        name = next(free for free in (name, *(f"{name}.{i}" for i in range(1, len(taken) + 1))) if free not in taken)
        _sync_dir(partial)
        final = partial.rename(self.path / name)
        _write_durably(self.path / f"{_LATEST_FILE}.tmp", f"{name}\n")
        os.replace(self.path / f"{_LATEST_FILE}.tmp", self.path / _LATEST_FILE)
        _sync_dir(self.path)
        for old in self.path.glob("step-*"):
            if old not in (previous, final):
                shutil.rmtree(old)


def check_requirements(place: Place) -> None:
    """Raises UsageError where DCP cannot run: its processes exchange Python objects, for which torch needs NumPy."""
    if place.world_size > 1 and find_spec("numpy") is None:
        raise UsageError(
            "torch.distributed.checkpoint needs NumPy to work between processes, and torch does not install it: "
            "pip install numpy, or train without checkpoints (--checkpoint-every 0)."
        )


def check_same_run(saved: dict[str, Any], current: dict[str, Any]) -> None:
    """Compares nested facts of a saved run with those of the run that resumes it.

    Raises:
        UsageError: if a fact of ``current`` has another value in ``saved``; names each with both values.
    """
    differing = [
        f"{section}.{key} is {value!r}, but {saved[section].get(key)!r} in the checkpoint"
        for section, facts in current.items()
        for key, value in facts.items()
        if saved[section].get(key) != value
    ]
    if differing:
        raise UsageError(
            f"--resume expects the configuration of the checkpoint: {'; '.join(differing)}. "
            "Resume with the same preset and options, or start a new run in another --checkpoint-dir."
        )


def _write_durably(path: Path, text: str) -> None:
    with path.open("w") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())


def _sync_dir(path: Path) -> None:
    """Flushes a folder's entries: a rename is durable only when the folder that holds the name is."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
