"""How often processes of tests collect garbage."""

from __future__ import annotations

import gc


def collect_seldom() -> None:
    """What has been imported is no garbage, and no optimizer that ``gtp_shard`` would have to look for: the collector
    need not look at these hundreds of thousands of objects again. To collect before would take most of the start of a
    worker."""
    gc.freeze()
    gc.set_threshold(50_000)  # new objects between two collections; Python's 700 cost a tenth of the time of a test
