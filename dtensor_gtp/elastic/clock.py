"""The only place where this package tells time and waits where ranks may be gone. Tests replace these functions."""

from __future__ import annotations

import threading
import time
from contextlib import suppress
from datetime import timedelta

from .. import _torch_compat as compat

now = time.monotonic  # never set back, as the time of day may be
sleep = time.sleep
wait = threading.Event.wait


def wait_for_key(store: compat.Store, name: str, seconds: float) -> None:
    with suppress(RuntimeError):  # raised when the time is over
        store.wait([name], timedelta(seconds=seconds))
