"""Scripts as jobs, run to their end: each process is forked from the server that has imported torch already.

What torchrun tells its processes by the environment is there, too. torchrun itself starts jobs in the long tier: at
least one of each script, and those that fail, are ended or are started again.
"""

from __future__ import annotations

import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from processes import set_up_process, start
from timing import HANG_S
from torchvision_ops import define_missing


@dataclass(frozen=True)
class Result:
    status: int
    output: str


def run_forked(
    arguments: Sequence[str | Path],
    num_processes: int | None,
    *,
    cwd: Path | None = None,
    max_restarts: int = 0,
    **variables: str,
) -> Result:
    """A script and its arguments in so many processes, or in one without a job; then its status and all it has printed.

    The first process that fails ends the others by SIGTERM, and then all start again, ``max_restarts`` times.
    ``variables`` are added to the environment.
    """
    command, folder = [str(argument) for argument in arguments], str(cwd or os.getcwd())
    with tempfile.NamedTemporaryFile() as printed:
        for restart in range(max_restarts + 1):
            counts = {"TORCHELASTIC_RESTART_COUNT": str(restart), "TORCHELASTIC_MAX_RESTARTS": str(max_restarts)}
            with _environments(num_processes, counts | variables) as environments:
                processes = [
                    multiprocessing.Process(target=_be_script, args=(command, environment, folder, printed.name))
                    for environment in environments
                ]
                for process in processes:
                    start(process)
                status = _wait(processes)
            if not status:
                break
        output = Path(printed.name).read_text()
    if status is None:
        pytest.fail(f"the job did not end within {HANG_S} s: {output}")
    return Result(status, output)


@contextmanager
def _environments(num_processes: int | None, variables: dict[str, str]) -> Iterator[list[dict[str, str]]]:
    """Of each process; their store lives as long."""
    job = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    job |= {"OMP_NUM_THREADS": "1", **variables}
    if num_processes is None:
        yield [job]
        return
    store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
    job |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    job |= {"TORCHELASTIC_RUN_ID": "forked", "WORLD_SIZE": str(num_processes), "LOCAL_WORLD_SIZE": str(num_processes)}
    yield [{**job, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_processes)]


def _wait(processes: list[multiprocessing.Process]) -> int | None:
    """The status of the process that has failed; None where they hang. Leaves none of them."""
    try:
        while running := [process for process in processes if process.exitcode is None]:
            has_ended = wait([process.sentinel for process in running], HANG_S)
            if failed := [process.exitcode for process in processes if process.exitcode]:
                return min(failed)  # negative: a signal, of which another process may have died at once
            if not has_ended:
                return None
        return 0
    finally:
        for process in processes:
            process.terminate()
        for process in processes:
            process.join(HANG_S)  # it may say something first, and takes its time where the machine is busy
            process.kill()
            process.join()


def _be_script(arguments: list[str], environment: dict[str, str], cwd: str, printed: str) -> None:
    writer = os.open(printed, os.O_WRONLY | os.O_APPEND)
    os.dup2(writer, 1)
    os.dup2(writer, 2)
    os.environ.clear()
    os.environ.update(environment)
    os.chdir(cwd)
    torch.set_num_threads(1)
    set_up_process()
    define_missing()
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    runpy.run_path(arguments[0], run_name="__main__")
