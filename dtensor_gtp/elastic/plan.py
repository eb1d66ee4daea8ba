"""Which rank holds which part of a tensor, and which ranks sum or send parts of it. Pure functions of sizes.

Every rank of a replica holds a box of each weight: its rows (or columns) after the split by tensor parallelism and gtp.
The edges of all boxes split the weight into *segments*. Each segment has one owner in each replica, and its owners sum
its gradient. Segments with the same owners are sent in one flat bucket. Where tensor parallelism does not split a
weight, each rank of a tp axis holds a copy. Replicas with the same number of copies sum them copy by copy; otherwise
all holders sum together.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from itertools import chain, pairwise, product
from typing import Any, NamedTuple

from .._comm.debug import format_nbytes
from ..placement import chunk_size_and_offset
from .replicas import ReplicaLayout, WeightSpec, count_of, format_ranks

_MAX_SEGMENTS = 12  # that are printed of each weight
Holders = tuple[tuple[int, ...], ...]  # for each replica the ranks with a copy


class Box(NamedTuple):
    """A part of a tensor: where it begins and how large it is, by dim."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """For a tensor that this box is a part of."""
        return tuple(slice(start, start + size) for start, size in zip(*self, strict=True))

    def within(self, outer: Box) -> tuple[slice, ...]:
        """This box, which ``outer`` contains, as slices of a tensor that holds ``outer``."""
        starts = tuple(a - b for a, b in zip(self.offset, outer.offset, strict=True))  # relative to ``outer``
        return Box(starts, self.size).slices

    def intersect(self, other: Box) -> Box | None:
        """What both contain; None if that is nothing."""
        starts = tuple(map(max, self.offset, other.offset))
        sizes = tuple(min(a + n, b + m) - s for s, a, n, b, m in zip(starts, *self, *other, strict=True))
        if min(sizes, default=1) > 0:  # 1: a scalar has one element
            return Box(starts, sizes)
        return None

    def subtract(self, other: Box) -> list[Box]:
        """What is left of this box without ``other``, in boxes."""
        common = self.intersect(other)
        if common is None:
            return [self]
        # Cut off what lies before and behind the common part, one dim after the other.
        left = []
        offset = list(self.offset)
        size = list(self.size)
        for dim, (start, length) in enumerate(zip(*common, strict=True)):
            for begin, end in ((offset[dim], start), (start + length, offset[dim] + size[dim])):
                if begin < end:
                    starts = (*offset[:dim], begin, *offset[dim + 1 :])
                    left.append(Box(starts, (*size[:dim], end - begin, *size[dim + 1 :])))
            # later pieces have the common extent here
            offset[dim] = start
            size[dim] = length
        return left


class Segment(NamedTuple):
    """A part of one weight that no replica cuts, and who holds it: for each replica the ranks with a copy of it."""

    box: Box
    holders: Holders

    @property
    def owners(self) -> tuple[int, ...]:
        """All holders, ascending."""
        return tuple(sorted(chain.from_iterable(self.holders)))


def box_of_rank(weight: WeightSpec, layout: ReplicaLayout, rank: int) -> Box:
    """What ``rank`` holds of ``weight``."""
    place = layout.places[rank]
    replica = layout.replicas[place.replica]
    offset = [0] * len(weight.shape)
    size = list(weight.shape)
    # First tp, then gtp, as DTensor reads placements from left to right.
    if weight.tp_dim is not None:
        cut = chunk_size_and_offset(size[weight.tp_dim], replica.tp, place.tp, weight.tp_block_size)
        size[weight.tp_dim], offset[weight.tp_dim] = cut
    if weight.dim is not None:
        size[weight.dim], start = chunk_size_and_offset(size[weight.dim], replica.gtp, place.gtp, weight.block_size)
        offset[weight.dim] += start  # ``start`` is relative to the slice of tp
    return Box(tuple(offset), tuple(size))


def segments_of(weight: WeightSpec, layout: ReplicaLayout) -> Iterator[Segment]:
    """The segments of a weight that gtp cuts, in the order of their offsets; ValueError if the weight stays whole."""
    if weight.dim is None:
        raise ValueError(f"segments_of expects a weight that is sharded over gtp, but '{weight.name}' stays whole.")
    boxes = {rank: box_of_rank(weight, layout, rank) for rank in layout.places}
    edges = []
    # Where boxes begin and end on each dim.
    for dim in range(len(weight.shape)):
        extents = {(box.offset[dim], box.offset[dim] + box.size[dim]) for box in boxes.values()}
        edges.append(sorted(set(chain.from_iterable(extents))))
    # Of each cell between the edges, as (start, stop) by dim: for each replica the ranks whose boxes contain it.
    cells = product(*map(pairwise, edges))
    holders: dict[Any, list[list[int]]] = {cell: [[] for _ in layout.replicas] for cell in cells}
    for rank, box in boxes.items():
        replica = layout.places[rank].replica
        # Of each dim the edges within the box. A box without rows has one edge there, so it is in no cell.
        inside = [
            cuts[bisect_left(cuts, start) : bisect_left(cuts, start + size) + 1]
            for cuts, start, size in zip(edges, *box, strict=True)
        ]
        for cell in product(*map(pairwise, inside)):
            holders[cell][replica].append(rank)
    for cell, of_replica in holders.items():
        box = Box(tuple(start for start, _ in cell), tuple(stop - start for start, stop in cell))
        if len(set(map(len, of_replica))) == 1:  # as many copies in each replica
            for copies in zip(*of_replica, strict=True):  # the n-th copies of all replicas
                yield Segment(box, tuple((rank,) for rank in copies))
        else:
            yield Segment(box, tuple(map(tuple, of_replica)))  # each copy then counts in part, see ``Channel.scale``


@dataclass(frozen=True)
class Bucket:
    """Segments that the same ranks sum: (index of the weight, its part), in the order of the weights."""

    holders: Holders
    segments: tuple[tuple[int, Box], ...]

    @cached_property
    def owners(self) -> tuple[int, ...]:
        """All holders, ascending."""
        return tuple(sorted(chain.from_iterable(self.holders)))

    @cached_property
    def numel(self) -> int:
        return sum(box.numel for _, box in self.segments)

    def __str__(self) -> str:
        return "owners " + " | ".join(map(format_ranks, self.holders))


@dataclass(frozen=True)
class SyncPlan:
    """Which gradients are summed between whom. Made by :func:`plan_sync`; ``print(plan)`` shows it.

    Args:
        layout: The replicas.
        weights: All parameters.
        buckets: One for each set of owners, in the order in which all ranks go through them.

    Example:
        >>> weights = [WeightSpec("w", (6, 4)), WeightSpec("b", (6,), dim=None)]
        >>> plan = plan_sync(replicas_of([[0], [1, 2]]), weights)
        >>> [(bucket.owners, plan.bucket_nbytes(bucket)) for bucket in plan.buckets]
        [((0, 1), 48), ((0, 2), 48)]
        >>> len(plan.of_rank(0)), plan.sync_nbytes(0)  # in float32
        (2, 120)
    """

    layout: ReplicaLayout
    weights: tuple[WeightSpec, ...]
    buckets: tuple[Bucket, ...]

    def of_rank(self, rank: int) -> tuple[Bucket, ...]:
        """The buckets that ``rank`` is an owner of.

        Args:
            rank: Of the layout.
        """
        return tuple(bucket for bucket in self.buckets if rank in bucket.owners)

    @cached_property
    def whole(self) -> tuple[WeightSpec, ...]:
        """Parameters that all ranks hold whole, and sum in one collective of all ranks."""
        return tuple(weight for weight in self.weights if weight.dim is None)

    def bucket_nbytes(self, bucket: Bucket) -> int:
        """Bytes of a bucket's gradients when they are sent.

        Args:
            bucket: One of ``buckets``.
        """
        return sum(self.weights[index].nbytes * box.numel for index, box in bucket.segments)

    def sync_nbytes(self, rank: int) -> int:
        """Bytes of gradient that ``rank`` sums with other replicas in each step: its shard, and what is whole.

        Args:
            rank: Of the layout.
        """
        # A bucket with one owner is not sent.
        shared = sum(self.bucket_nbytes(bucket) for bucket in self.of_rank(rank) if len(bucket.owners) > 1)
        return shared + sum(weight.nbytes * weight.numel for weight in self.whole)

    def __str__(self) -> str:
        lines = [str(self.layout)]
        by_weight: list[list[tuple[Box, Bucket]]] = [[] for _ in self.weights]
        for bucket in self.buckets:
            for index, box in bucket.segments:
                by_weight[index].append((box, bucket))
        for weight, parts in zip(self.weights, by_weight, strict=True):
            lines.append(_heading(weight))
            parts.sort(key=lambda part: (part[0], part[1].owners))
            lines += [f"  {_extent(box, weight):<24} {bucket}" for box, bucket in parts[:_MAX_SEGMENTS]]
            if len(parts) > _MAX_SEGMENTS:
                lines.append(f"  and {len(parts) - _MAX_SEGMENTS} more segments")
        lines.append(count_of(len(self.buckets), "bucket"))
        for bucket in self.buckets[:_MAX_SEGMENTS]:
            size = format_nbytes(self.bucket_nbytes(bucket))
            lines.append(f"  {bucket!s:<24} {count_of(len(bucket.segments), 'segment')}, {size}")
        if len(self.buckets) > _MAX_SEGMENTS:
            lines.append(f"  and {len(self.buckets) - _MAX_SEGMENTS} more")
        if self.whole:
            size = format_nbytes(sum(weight.nbytes * weight.numel for weight in self.whole))
            lines.append(f"all ranks: {count_of(len(self.whole), 'whole parameter')}, {size}")
        return "\n".join(lines)


def plan_sync(layout: ReplicaLayout, weights: Sequence[WeightSpec]) -> SyncPlan:
    """Decide which ranks sum which parts of which gradients.

    Args:
        layout: The replicas.
        weights: All parameters, in the same order on all ranks.

    Returns:
        A :class:`SyncPlan`; print it.

    Example:
        >>> print(plan_sync(replicas_of([[0], [1, 2]]), [WeightSpec("w", (6, 4))]))
        2 replicas of 3 ranks
          replica 0  gtp 1          ranks 0  1 of 2 ranks failed; gtp 2 -> 1
          replica 1  gtp 2          ranks 1-2
        w (6, 4), gtp cuts dim 0
          dim 0 0:3                owners 0 | 1
          dim 0 3:6                owners 0 | 2
        2 buckets
          owners 0 | 1             1 segment, 48 B
          owners 0 | 2             1 segment, 48 B
    """
    segments: dict[Holders, list[tuple[int, Box]]] = {}  # by the ranks that sum them
    known: dict[WeightSpec, list[Segment]] = {}  # of weights that are cut alike
    for index, weight in enumerate(weights):
        if weight.dim is None:
            continue  # summed by all ranks at the end of backward
        cut = replace(weight, name="", nbytes=0)  # layers repeat: weights of one shape are cut alike
        if cut not in known:
            known[cut] = list(segments_of(weight, layout))
        for box, holders in known[cut]:
            segments.setdefault(holders, []).append((index, box))
    # In one order on all ranks, see [Note: order of channels] in ``sync``.
    buckets = tuple(Bucket(holders, tuple(parts)) for holders, parts in sorted(segments.items()))
    return SyncPlan(layout, tuple(weights), buckets)


class Move(NamedTuple):
    """A part of a tensor that ``target`` gets from ``source`` (which may be the same rank)."""

    source: int
    target: int
    box: Box


def plan_moves(
    held: Mapping[int, Box], wanted: Mapping[int, Box], replica_of: Mapping[int, int]
) -> tuple[list[Move], list[tuple[int, Box]]]:
    """Who sends which part of one tensor to whom, and, as (target, box), what no rank holds. Arguments are by rank.

    Each part comes from the nearest rank that holds it: the target itself, a rank of its replica, then the replicas
    after its own in turn, so that several replicas that are rebuilt do not all ask the same one.
    """
    num_replicas = max(replica_of.values(), default=0) + 1

    @cache
    def nearest(replica: int) -> list[int]:
        # The rank's own replica is at distance 0, the one behind it at 1.
        return sorted(held, key=lambda rank: ((replica_of[rank] - replica) % num_replicas, rank))

    moves: list[Move] = []
    missing: list[tuple[int, Box]] = []
    for target, box in sorted(wanted.items()):
        left = []  # a shard without rows needs nothing
        if box.numel:
            left = [box]
        # ``nearest`` has the target once more, but then nothing is left that it holds.
        for source in chain([target] if target in held else [], nearest(replica_of[target])):
            if not left:
                break
            taken = [part for piece in left if (part := piece.intersect(held[source])) is not None]
            moves += [Move(source, target, part) for part in taken]
            if taken:  # most ranks hold nothing of it
                left = [rest for piece in left for rest in piece.subtract(held[source])]
        missing += [(target, piece) for piece in left]
    return moves, missing


def _heading(weight: WeightSpec) -> str:
    text = f"{weight.name} {weight.shape}"
    if weight.dim is None:
        return f"{text}, whole"
    for axis, dim, block_size in (("gtp", weight.dim, weight.block_size), ("tp", weight.tp_dim, weight.tp_block_size)):
        if dim is not None:
            text += f", {axis} cuts dim {dim}" + (f" in blocks of {block_size}" if block_size > 1 else "")
    return text


def _extent(box: Box, weight: WeightSpec) -> str:
    dims = sorted({dim for dim in (weight.dim, weight.tp_dim) if dim is not None})
    return ", ".join(f"dim {dim} {box.offset[dim]}:{box.offset[dim] + box.size[dim]}" for dim in dims)
