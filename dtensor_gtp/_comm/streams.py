"""Streams and events: who waits for whom."""

from __future__ import annotations

from contextlib import nullcontext
from typing import NamedTuple

import torch

from ..policy import Waitable

HOST = nullcontext()


class Done(NamedTuple):
    """When a collective is complete: an event where there are streams, a background work where there are none.

    ``origin`` is the compute stream from which it was launched, whose memory it fills.
    """

    event: torch.Event | None = None
    work: Waitable | None = None
    origin: torch.Stream | None = None
