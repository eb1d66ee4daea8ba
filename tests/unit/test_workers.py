"""What tests may expect of the processes that they start."""

from __future__ import annotations

import faulthandler
import multiprocessing
import sys


def _tell_whether_crashes_are_reported() -> None:
    sys.exit(0 if faulthandler.is_enabled() else 1)


def test_a_worker_that_crashes_would_say_where() -> None:
    worker = multiprocessing.Process(target=_tell_whether_crashes_are_reported)
    worker.start()
    worker.join()
    assert worker.exitcode == 0
