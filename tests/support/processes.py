"""What each process of the suite does when it has imported torch."""

from __future__ import annotations

import gc
import sys


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
