"""How processes of the suite start, and what each does when it has imported torch."""

from __future__ import annotations

import atexit
import gc
import multiprocessing.process
import sys


def start(process: multiprocessing.process.BaseProcess) -> None:
    """Starts ``process``, and leaves its exit status to whoever joins it.

    Each start of a process, on any thread, polls all children that multiprocessing knows. The status is read from a
    pipe, so of two threads that find it there one gets 255 (``multiprocessing.popen_forkserver``).
    """
    process.start()
    multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
    if process.daemon:
        atexit.register(process.kill)  # as multiprocessing does with those that it knows


def set_up_process() -> None:
    """Collects garbage seldom, and writes what it compiles where conftest.py has said.

    What has been imported is no garbage, and no optimizer that ``gtp_shard`` would have to look for: the collector
    need not look at these hundreds of thousands of objects again. To collect before would take most of the start of a
    worker.
    """
    gc.freeze()
    gc.set_threshold(50_000)  # new objects between two collections; Python's 700 cost a tenth of the time of a test
    if sys.pycache_prefix is not None:
        sys.dont_write_bytecode = False
