"""Scripts as jobs, run to their end: each process is forked from the server that has imported torch already.

What torchrun tells its processes by the environment is there, too; a test of how jobs start, fail and end takes
torchrun itself, and so does at least one test of each script.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import wait
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from timing import HANG_S


@dataclass(frozen=True)
class Result:
    status: int
    output: str


def run_forked(
    arguments: Sequence[str | Path], num_processes: int | None, *, cwd: Path | None = None, **variables: str
) -> Result:
    """A script and its arguments in so many processes, or in one without a job; then its status and all it has printed.

    The first process that fails ends the others. ``variables`` are added to the environment.
    """
    job = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    job |= {"OMP_NUM_THREADS": "1", **variables}
    places: list[dict[str, str]] = [{}]
    if num_processes is not None:
        store = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)
        job |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(store.port), "TORCHELASTIC_USE_AGENT_STORE": "True"}
        job |= {"TORCHELASTIC_RESTART_COUNT": "0", "TORCHELASTIC_MAX_RESTARTS": "0"}
        size = str(num_processes)
        job |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        places = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(num_processes)]
    with tempfile.NamedTemporaryFile() as printed:
        command, folder = [str(argument) for argument in arguments], str(cwd or os.getcwd())
        processes = [
            multiprocessing.Process(target=_be_script, args=(command, {**job, **place}, folder, printed.name))
            for place in places
        ]
        for process in processes:
            process.start()
        status = _wait(processes)
        output = Path(printed.name).read_text()
    if status is None:
        pytest.fail(f"the job did not end within {HANG_S} s: {output}")
    return Result(status, output)


def _wait(processes: list[multiprocessing.Process]) -> int | None:
    """The first status that is not 0; None where they hang. Leaves none of them."""
    try:
        while running := [process for process in processes if process.exitcode is None]:
            has_ended = wait([process.sentinel for process in running], HANG_S)
            if failed := [process.exitcode for process in processes if process.exitcode]:
                return failed[0]
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
    gc.freeze()  # what the server has imported is no garbage, and no optimizer that gtp_shard would have to look for
    sys.argv = arguments
    sys.path.insert(0, str(Path(arguments[0]).parent))
    runpy.run_path(arguments[0], run_name="__main__")
