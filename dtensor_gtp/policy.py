"""What users pass: frozen dataclasses, checked when they are made. ``MixedPrecisionPolicy`` is torch's own class."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

from torch.distributed.fsdp import MixedPrecisionPolicy

ReduceScatterKind = Literal["ring", "all_to_all"]


@dataclass(frozen=True)
class SchedulePolicy:
    """How gathers and reduce-scatters are placed around compute.

    None but ``reduce_scatter`` changes a result; they change time and memory.

    Args:
        prefetch_depth: Number of weights that are gathered ahead of the one in use. 0 gathers each weight when it is
            used. Each level costs one gathered weight of memory.
        max_inflight_reduce_scatters: Number of gradient send buffers that may wait for their reduce-scatter before
            compute waits for the oldest. At least 1. Each costs one full gradient of memory.
        min_shard_numel: A weight with fewer elements stays whole on every rank (``Replicate()``), because a collective
            for it costs more than it saves. 0 shards every weight with two or more dims.
        reduce_scatter: How gradients are summed over the ranks of the axis. ``"ring"`` is the backend's reduce-scatter,
            which sends and adds in ``reduce_dtype``. ``"all_to_all"`` sends in ``reduce_dtype``, adds on the receiving
            rank in float32 and accumulates in float32: with a 16-bit ``reduce_dtype`` the error does not grow with the
            axis. It costs one more full gradient of memory for each reduction in flight. Parameters that stay whole
            are then all-reduced in float32.

    Raises:
        TypeError: A number is not an ``int``.
        ValueError: A field is out of its range, or names nothing that there is.
    """

    prefetch_depth: int = 2
    max_inflight_reduce_scatters: int = 2
    min_shard_numel: int = 1024
    reduce_scatter: ReduceScatterKind = "ring"

    def __post_init__(self) -> None:
        for name, least in (("prefetch_depth", 0), ("max_inflight_reduce_scatters", 1), ("min_shard_numel", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool):
                raise TypeError(f"SchedulePolicy expects an int for {name}, but got {value!r}.")
            if value < least:
                raise ValueError(f"SchedulePolicy expects {name} >= {least}, but got {value}.")
        _check_choice("reduce_scatter", self.reduce_scatter, get_args(ReduceScatterKind))


def _check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    if value not in choices:
        known = " or ".join(f"'{choice}'" for choice in choices)
        raise ValueError(f"SchedulePolicy expects {known} as {name}, but got {value!r}.")


__all__ = ["MixedPrecisionPolicy", "ReduceScatterKind", "SchedulePolicy"]
