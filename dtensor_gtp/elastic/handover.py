"""State goes from a process that is told to end to the one that takes its place, through a file system in memory.

A launcher such as ``torchrun`` ends all workers when one fails, with a signal first and by force some seconds later.
That is time enough to leave what a rank holds in host memory, where the next worker finds it. Nothing is copied before
a failure happens.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path

import torch

from .recovery import HeldState

_MEMORY = Path("/dev/shm")


_PREFIX = "dtensor_gtp"


def handover_path(environment: Mapping[str, str] | None = None, directory: Path | None = None) -> Path | None:
    """Where a worker of ``torchrun`` leaves its state for the worker that takes its place on this host.

    The name holds the process of the launcher, which stays when workers are started again, and the local rank. Files of
    launchers that are gone are removed.

    Args:
        environment: ``os.environ`` by default.
        directory: A folder in memory, ``/dev/shm`` by default; where there is none, the folder of temporary files.

    Returns:
        None outside of ``torchrun``.
    """
    environment = os.environ if environment is None else environment
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None
    if directory is None:
        directory = _MEMORY if _MEMORY.is_dir() else Path(tempfile.gettempdir())
    for path in directory.glob(f"{_PREFIX}-*"):
        launcher = path.name.split("-")[1]
        if launcher.isdigit() and not Path(f"/proc/{launcher}").exists() and Path("/proc/self").exists():
            path.unlink(missing_ok=True)
    return directory / f"{_PREFIX}-{os.getppid()}-{environment['LOCAL_RANK']}.pt"


def leave_state(held: HeldState, path: Path) -> None:
    """Write ``held`` such that :func:`take_state` finds all of it or nothing. For this user's eyes only."""
    partial = path.with_suffix(".tmp")
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
        torch.save(
            (held.step, {k: (box, part.contiguous()) for k, (box, part) in held.tensors.items()}, held.plain), file
        )
    partial.replace(path)


def take_state(path: Path) -> HeldState | None:
    """What was left there, which is removed; None if nothing was."""
    if not path.exists():
        return None
    # A process of the same user and launcher has written it: it may hold any Python value, as a job's state does.
    step, tensors, plain = torch.load(path, map_location="cpu", weights_only=False)
    path.unlink()
    return HeldState(step, tensors, plain)
