"""What users pass: frozen dataclasses, checked when they are made. ``MixedPrecisionPolicy`` is torch's own class."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.fsdp import MixedPrecisionPolicy


@dataclass(frozen=True)
class SchedulePolicy:
    """How gathers and reduce-scatters are placed around compute.

    None of these changes a result, only time and memory.

    Args:
        prefetch_depth: Number of weights that are gathered ahead of the one in use. 0 gathers each weight when it is
            used. Each level costs one gathered weight of memory.
        max_inflight_reduce_scatters: Number of gradient send buffers that may wait for their reduce-scatter before
            compute waits for the oldest. At least 1. Each costs one full gradient of memory.
        min_shard_numel: A weight with fewer elements stays whole on every rank (``Replicate()``), because a collective
            for it costs more than it saves. 0 shards every weight with two or more dims.

    Raises:
        TypeError: A field is not an ``int``.
        ValueError: A field is out of its range.
    """

    prefetch_depth: int = 2
    max_inflight_reduce_scatters: int = 2
    min_shard_numel: int = 1024

    def __post_init__(self) -> None:
        for name, least in (("prefetch_depth", 0), ("max_inflight_reduce_scatters", 1), ("min_shard_numel", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"SchedulePolicy expects an int for {name}, but got {value!r}.")
            if value < least:
                raise ValueError(f"SchedulePolicy expects {name} >= {least}, but got {value}.")


__all__ = ["MixedPrecisionPolicy", "SchedulePolicy"]
