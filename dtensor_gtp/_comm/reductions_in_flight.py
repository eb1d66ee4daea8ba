"""Reductions that are launched, and the waits for them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .send_ring import Place
from .streams import Done


class Reduction(NamedTuple):
    """A reduction in flight.

    ``complete`` is what is left to do on the host once a background work has ended (None where streams order it).
    ``keep`` holds the buffers that the communication stream still uses, ``places`` what peers still read. ``origins``
    are the compute streams whose memory those are.
    """

    done: Done
    complete: Callable[[], None] | None
    keep: tuple[Tensor, ...]
    places: Sequence[Place] = ()
    origins: tuple[torch.Stream, ...] = ()
