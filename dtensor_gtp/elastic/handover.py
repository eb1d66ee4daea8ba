"""State that one process stores in host memory for the process that replaces it.

All users of a host, and perhaps several containers, share the folder of these files. So each user has a directory there
that no other user may enter. The name of a file identifies its job, and is also stored in the file. Owner and kind of
the open file are checked before it is read. Only tensors and plain values are read, never code.
"""

from __future__ import annotations

import hashlib
import io
import logging
import os
import pickle
import re
import secrets
import stat
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from .plan import Box
from .recovery import HeldState, Keys

_LOG = logging.getLogger(__name__)
_OTHERS = 0o077  # rights of group and others


def handover_path(environment: Mapping[str, str] | None = None, directory: Path | None = None) -> Path | None:
    """The file in which a worker of ``torchrun`` leaves its state for the worker that replaces it on this host.

    When one worker fails, ``torchrun`` sends a signal to all, and ends them by force some seconds later: enough time to
    write a rank's state to a file in host memory. The file lies in a directory that only this user may enter. Its name
    holds the run id, the local rank, and a digest of the launcher, which stays when workers are started again.

    Args:
        environment: By default ``os.environ``.
        directory: By default ``/dev/shm`` (memory), or the folder of temporary files where that cannot be used.

    Returns:
        The path of the file. None outside of ``torchrun``, or, with a warning, where another user has taken the name of
        the directory.

    Example:
        >>> handover_path({"TORCHELASTIC_RUN_ID": "job", "LOCAL_RANK": "2"}).name
        'job-...-2.pt'
        >>> handover_path({}) is None
        True
    """
    if environment is None:
        environment = os.environ
    if "TORCHELASTIC_RUN_ID" not in environment:
        return None  # no launcher, so no process that takes the state
    shared = [Path("/dev/shm"), Path(tempfile.gettempdir())] if directory is None else [directory]
    # ``map`` is lazy: the second folder is touched only where the first cannot be used.
    own = next((own for own in map(_own_directory, shared) if own is not None), None)
    if own is None:
        return None
    run = environment["TORCHELASTIC_RUN_ID"]
    readable = re.sub(r"[^A-Za-z0-9_]", "_", run)[:40]  # for people; the digest tells jobs apart
    return own / f"{readable}-{_digest_of_launcher(run)}-{int(environment['LOCAL_RANK'])}.pt"


def _own_directory(shared: Path) -> Path | None:
    """A directory of this user in a folder of all users; None if there cannot be one."""
    own = shared / f"dtensor_gtp-{os.geteuid()}"
    try:
        own.mkdir(mode=0o700)
    except FileExistsError:
        pass  # made by another worker or an earlier one, if it passes the checks below
    except OSError:  # no such folder, or nobody may write there
        return None
    found = own.lstat()  # not ``stat``, which follows links of others
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & _OTHERS:
        _LOG.warning("%s is not a directory of this user alone, so no state is written or read there", own)
        return None
    return own


def _digest_of_launcher(run: str) -> str:
    """Other launchers have another one: also in another container, or with the process id of one that is gone."""
    # ``torchrun`` itself, the parent of its workers
    launcher = os.getppid()
    facts = [run]
    for name in ("/proc/sys/kernel/random/boot_id", f"/proc/{launcher}/stat"):
        try:
            text = Path(name).read_text()
        except OSError:
            continue  # no such file outside of Linux
        # After the name of the program, which may hold blanks, the 20th word is the time at which it was started.
        facts.append(text.rpartition(")")[2].split()[19] if name.endswith("stat") else text)
    with suppress(OSError):
        facts.append(os.readlink("/proc/self/ns/pid"))  # containers number processes anew
    return hashlib.sha256("\n".join([*facts, str(launcher)]).encode()).hexdigest()[:32]


def leave_state(held: HeldState, path: Path) -> None:
    """Write ``held`` such that :func:`take_state` finds all of it or nothing. Only this user may read the file.

    Args:
        held: What :func:`hold_state` has returned.
        path: That of :func:`handover_path`.

    Raises:
        TypeError: A value of the state is neither a tensor nor a plain one: numbers, strings and tuples of these are.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "state.pt"
        >>> leave_state(hold_state({"epoch": 3}, step=7), path)
        >>> take_state(path).plain
        {('epoch',): 3}
    """
    # Before anything is written: one value that cannot be read would lose the whole file.
    for keys, value in held.plain.items():
        _check_is_plain(keys, value)
    tensors = {
        keys: (tuple(box.offset), tuple(box.size), part.contiguous()) for keys, (box, part) in held.tensors.items()
    }
    partial = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    # O_EXCL and O_NOFOLLOW: never write to a file, or through a link, that was there before.
    descriptor = os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(descriptor, "wb") as file:
            torch.save((path.name, held.step, tensors, held.plain), file)
        partial.replace(path)  # atomic: a reader finds the old file or the whole new one
    finally:
        partial.unlink(missing_ok=True)  # left by an error alone


def _check_is_plain(keys: Keys, value: Any) -> None:
    if isinstance(value, Tensor):
        return
    try:
        file = io.BytesIO()
        torch.save(value, file)
        file.seek(0)
        torch.load(file, weights_only=True)  # as ``take_state`` reads it
    except (pickle.PicklingError, pickle.UnpicklingError, AttributeError, TypeError) as error:
        name = ".".join(map(str, keys))
        raise TypeError(
            f"leave_state expects tensors and plain values, but '{name}' is a {type(value).__name__}. Leave it out "
            "of the state, or store its parts: numbers, strings, tuples, dicts, lists."
        ) from error


def take_state(path: Path) -> HeldState | None:
    """Read and remove what an earlier process of this job has left.

    A file that another user owns or may read, or that another job left, is not read: a warning names it, and it stays.

    Args:
        path: That of :func:`handover_path`.

    Returns:
        What :func:`leave_state` was given; None if nothing was left, or what was left cannot be read.

    Example:
        >>> import pathlib, tempfile
        >>> path = pathlib.Path(tempfile.mkdtemp()) / "state.pt"
        >>> leave_state(hold_state({"epoch": 3}, step=7), path)
        >>> take_state(path).step, take_state(path)
        (7, None)
    """
    try:
        # Without waiting, should the name be that of a pipe.
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except FileNotFoundError:
        return None
    except OSError as error:
        _LOG.warning("%s is ignored, because it cannot be opened: %s", path, error.strerror)
        return None
    with open(descriptor, "rb") as file:
        reason = _stranger(file)  # of the open file: the name may get another one meanwhile
        if reason:
            _LOG.warning("%s is ignored, because %s", path, reason)
            return None
        held = _read(file, path)
    if held is not None:  # what cannot be read stays
        for own in (path, *path.parent.glob(f"{path.name}.*.tmp")):  # a process may have been killed while it wrote
            own.unlink(missing_ok=True)
    return held


def _stranger(file: BinaryIO) -> str:
    """Why a file is none that this user has left, empty if it is."""
    found = os.fstat(file.fileno())
    if not stat.S_ISREG(found.st_mode):
        return "it is no ordinary file"
    if found.st_uid != os.geteuid():
        return f"user {found.st_uid} owns it"
    if found.st_mode & _OTHERS:
        return "other users may read or write it"
    return ""


def _read(file: BinaryIO, path: Path) -> HeldState | None:
    try:
        name, step, tensors, plain = torch.load(file, map_location="cpu", weights_only=True)
        parts = {keys: (Box(offset, size), part) for keys, (offset, size, part) in tensors.items()}
    except Exception as error:  # whatever torch says of a file that is cut off or was changed
        _LOG.warning("%s is ignored, because it cannot be read: %s", path, str(error).partition("\n")[0])
        return None
    if name != path.name:
        _LOG.warning("%s is ignored, because it is from job '%s'", path, name)
        return None
    return HeldState(step, parts, plain)
