"""Memory of each rank when replicas take over for failed ranks. Arithmetic, not a measurement."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from .._comm.debug import format_nbytes
from ..placement import chunk_rows
from ..policy import SchedulePolicy
from .plan import box_of_rank
from .replicas import Replica, ReplicaLayout, WeightSpec


@dataclass(frozen=True)
class MemoryModel:
    """What a rank must hold, in bytes.

    Args:
        budget: Memory of a rank.
        shard_nbytes: Bytes of each element that a rank holds: parameter, gradient and optimizer state. 16 for float32
            parameters and AdamW.
        gathered_nbytes: Bytes of an element of a gathered weight.
        reduce_nbytes: Bytes of an element of a gradient that is sent.
        prefetch_depth, prefetch_nbytes, max_inflight_reduce_scatters: As in ``SchedulePolicy``.
        activation_nbytes: Activations of a rank at tensor-parallel size 1.
    """

    budget: int
    shard_nbytes: int = 16
    gathered_nbytes: int = 2
    reduce_nbytes: int = 4
    prefetch_depth: int = 2
    max_inflight_reduce_scatters: int = 2
    activation_nbytes: int = 0
    prefetch_nbytes: int = SchedulePolicy.prefetch_nbytes


class RankMemory(NamedTuple):
    """Bytes of one rank, by purpose."""

    shards: int
    buffers: int
    activations: int

    @property
    def total(self) -> int:
        return sum(self)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {format_nbytes(value)}" for name, value in self._asdict().items())
        return f"{format_nbytes(self.total)} ({parts})"


def check_memory(layout: ReplicaLayout, weights: Sequence[WeightSpec], model: MemoryModel) -> list[RankMemory]:
    """The memory of every replica's fullest rank.

    Raises:
        ValueError: A replica is too small for its ranks' memory.
    """
    found = [_memory_of_fullest_rank(layout, replica, weights, model) for replica in layout.replicas]
    for index, (replica, memory) in enumerate(zip(layout.replicas, found, strict=True)):
        if memory.total > model.budget:
            raise ValueError(
                f"nonuniform_mesh expects replicas whose ranks have memory for their part of the model, but replica "
                f"{index} of {len(replica.ranks)} ranks (gtp {replica.gtp}, tp {replica.tp}) is too small: rank "
                f"{replica.ranks[0]} needs {memory}, and has {format_nbytes(model.budget)}. Leave this replica out, or "
                "shard over fewer, larger replicas."
            )
    return found


def _memory_of_fullest_rank(
    layout: ReplicaLayout, replica: Replica, weights: Sequence[WeightSpec], model: MemoryModel
) -> RankMemory:
    """Of the first rank: it has the largest chunk of every weight."""
    boxes = [box_of_rank(weight, layout, replica.ranks[0]) for weight in weights]
    shards = sum(box.numel for box in boxes) * model.shard_nbytes
    slices = sorted((_slice_numel(weight, replica.tp) for weight in weights if weight.dim is not None), reverse=True)
    gathered = sum(slices[: model.prefetch_depth + 1]) * model.gathered_nbytes
    if slices and model.prefetch_depth and model.prefetch_nbytes:
        # The weight in use, those of the prefetch window, and the launch that crosses the end of the window.
        largest = slices[0] * model.gathered_nbytes
        in_window = largest + max(largest, model.prefetch_nbytes) + max(largest, SchedulePolicy.coalesce_nbytes)
        gathered = max(gathered, min(sum(slices) * model.gathered_nbytes, in_window))
    # Gradients that wait to be sent together, and those in flight.
    launch = max([SchedulePolicy.coalesce_grad_nbytes, *(numel * model.reduce_nbytes for numel in slices[:1])])
    sent = min(sum(slices) * model.reduce_nbytes, (model.max_inflight_reduce_scatters + 1) * launch)
    return RankMemory(shards, gathered + sent, -(-model.activation_nbytes // replica.tp))


def _slice_numel(weight: WeightSpec, tp: int) -> int:
    """Elements of the gathered weight on a tp rank."""
    if weight.tp_dim is None:
        return weight.numel
    rows = weight.shape[weight.tp_dim]
    return weight.numel // rows * chunk_rows(rows, tp, weight.tp_block_size) if rows else 0
