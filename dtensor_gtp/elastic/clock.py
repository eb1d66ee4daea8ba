"""How this package tells time and waits where ranks may be gone. Nothing else of it reads a clock.

Tests replace these functions by a time of their own, so that what they find does not depend on how fast a machine is.
"""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import timedelta

from .. import _torch_compat as compat


def now() -> float:
    """Seconds since any moment; compared with other values of this process alone."""
    return time.monotonic()


def sleep(seconds: float) -> None:
    """Wait for a time."""
    time.sleep(seconds)


def wait(event: threading.Event, seconds: float) -> bool:
    """Wait for ``event``, at most ``seconds``; whether it is set."""
    return event.wait(seconds)


def wait_for_key(store: compat.Store, name: str, seconds: float) -> None:
    """Wait until ``store`` has ``name``, at most ``seconds``."""
    with suppress(RuntimeError):  # it says so when the time is over
        store.wait([name], timedelta(seconds=seconds))
