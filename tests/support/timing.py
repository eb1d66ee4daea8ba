"""Where tests of several processes use the machine's clock. No result depends on how long these take."""

from __future__ import annotations

import time
from collections.abc import Callable

# Ends what hangs. A machine that is slow, or shared with others, must not come near it.
HANG_S = 300.0


def until(is_there: Callable[[], bool]) -> bool:
    """Wait for what nobody announces, e.g. that a thread of gloo drops a tensor, which it does a moment after the
    collective has been waited for. Whether it has come."""
    end = time.monotonic() + HANG_S
    while not is_there():
        if time.monotonic() > end:
            return False
        time.sleep(1e-3)
    return True


def come_late(seconds: float) -> None:
    """Let others go ahead, who must wait: without this, one that does not wait would seldom be seen."""
    time.sleep(seconds)
