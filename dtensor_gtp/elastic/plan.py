"""Who holds which rows of each weight, and which segments are summed between whom. Pure functions of sizes.

Every rank of a replica holds a box of each weight: the rows (or columns) that tensor parallelism and gtp leave it. The
cut points of all replicas together make finer boxes, the *segments*: within a segment nothing is cut in any replica, so
it has one owner per replica. The owners of a segment sum its gradient; what several segments of the same owners need
travels in one flat bucket.

Where every rank of a tp axis holds the same rows (a weight that tensor parallelism does not cut), there is a copy on
each. Replicas with equally many copies sum them separately, copy by copy; else all holders sum together, each with its
part of the replica's weight.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple

from ..placement import chunk_size_and_offset
from .replicas import ReplicaLayout, count_of, format_ranks
from .weight_spec import WeightSpec

# Segments that are printed of each weight.
_MAX_SEGMENTS = 12


class Box(NamedTuple):
    """A part of a tensor: where it begins and how large it is, by dim."""

    offset: tuple[int, ...]
    size: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.size)

    def within(self, outer: Box) -> tuple[slice, ...]:
        """This box, which ``outer`` contains, as slices of a tensor that holds ``outer``."""
        starts = [a - b for a, b in zip(self.offset, outer.offset, strict=True)]
        return tuple(slice(start, start + size) for start, size in zip(starts, self.size, strict=True))

    def intersect(self, other: Box) -> Box | None:
        """What both contain; None if that is nothing."""
        starts = tuple(map(max, self.offset, other.offset))
        ends = [min(a + n, b + m) for a, n, b, m in zip(*self, *other, strict=True)]
        sizes = tuple(end - start for start, end in zip(starts, ends, strict=True))
        return Box(starts, sizes) if all(size > 0 for size in sizes) else None


class Segment(NamedTuple):
    """A part of one weight that no replica cuts, and who holds it: for each replica the ranks with a copy of it."""

    box: Box
    holders: tuple[tuple[int, ...], ...]

    @property
    def owners(self) -> tuple[int, ...]:
        """All holders, ascending."""
        return tuple(sorted(rank for copies in self.holders for rank in copies))


class _Interval(NamedTuple):
    """Rows ``start`` to ``stop`` of a dim and who has them: gtp rows and tp columns of the grid."""

    start: int
    stop: int
    gtp: tuple[int, ...]
    tp: tuple[int, ...]


def box_of_rank(weight: WeightSpec, layout: ReplicaLayout, rank: int) -> Box:
    """What ``rank`` holds of ``weight``."""
    place = layout.places[rank]
    replica = layout.replicas[place.replica]
    offset, size = [0] * len(weight.shape), list(weight.shape)
    if weight.tp_dim is not None:
        cut = chunk_size_and_offset(size[weight.tp_dim], replica.tp, place.tp, weight.tp_block_size)
        size[weight.tp_dim], offset[weight.tp_dim] = cut
    if weight.dim is not None:
        rows, start = chunk_size_and_offset(size[weight.dim], replica.gtp, place.gtp, weight.block_size)
        size[weight.dim] = rows
        offset[weight.dim] += start
    return Box(tuple(offset), tuple(size))


def segments_of(weight: WeightSpec, layout: ReplicaLayout) -> Iterator[Segment]:
    """The segments of a weight that gtp cuts, in the order of their offsets.

    Raises:
        ValueError: The weight stays whole: all ranks sum it at once.
    """
    if weight.dim is None:
        raise ValueError(f"segments_of expects a weight that gtp cuts, but '{weight.name}' stays whole.")
    cells = [list(_cells(weight, dim, layout)) for dim in range(len(weight.shape))]
    cut_dims = [dim for dim in range(len(weight.shape)) if dim in (weight.dim, weight.tp_dim)]
    for combination in _products([cells[dim] for dim in cut_dims]):
        offset, size = [0] * len(weight.shape), list(weight.shape)
        for dim, (start, stop, _) in zip(cut_dims, combination, strict=True):
            offset[dim], size[dim] = start, stop - start
        holders = []
        for index, replica in enumerate(layout.replicas):
            intervals = [owners[index] for _, _, owners in combination]
            rows = _common([interval.gtp for interval in intervals])
            columns = _common([interval.tp for interval in intervals])
            holders.append(tuple(replica.ranks[row * replica.tp + column] for row in rows for column in columns))
        yield from _by_copy(Box(tuple(offset), tuple(size)), tuple(holders))


def _by_copy(box: Box, holders: tuple[tuple[int, ...], ...]) -> Iterator[Segment]:
    if len(set(map(len, holders))) == 1:
        for copies in zip(*holders, strict=True):
            yield Segment(box, tuple((rank,) for rank in copies))
    else:
        yield Segment(box, holders)


def _common(indices: Sequence[tuple[int, ...]]) -> tuple[int, ...]:
    first, *others = indices
    return tuple(index for index in first if all(index in other for other in others))


def _products(cells: list[list[_Cell]]) -> Iterator[tuple[_Cell, ...]]:
    if not cells:
        yield ()
        return
    for cell in cells[0]:
        for rest in _products(cells[1:]):
            yield (cell, *rest)


class _Cell(NamedTuple):
    """Rows of one dim that no replica cuts, and the interval of each replica that they are part of."""

    start: int
    stop: int
    owners: tuple[_Interval, ...]


def _cells(weight: WeightSpec, dim: int, layout: ReplicaLayout) -> Iterator[_Cell]:
    """Merge the cut points of all replicas along ``dim``."""
    cuts = [_intervals(weight, dim, replica.gtp, replica.tp) for replica in layout.replicas]
    positions = [0] * len(cuts)
    start = 0
    while start < weight.shape[dim]:
        owners = tuple(intervals[position] for intervals, position in zip(cuts, positions, strict=True))
        stop = min(interval.stop for interval in owners)
        yield _Cell(start, stop, owners)
        start = stop
        positions = [p + (owner.stop == stop) for p, owner in zip(positions, owners, strict=True)]


def _intervals(weight: WeightSpec, dim: int, gtp: int, tp: int) -> list[_Interval]:
    """How one replica cuts ``dim``; empty chunks are left out."""
    all_gtp, all_tp = tuple(range(gtp)), tuple(range(tp))
    rows = weight.shape[dim]
    slices = [_Interval(0, rows, all_gtp, all_tp)]
    if dim == weight.tp_dim:
        slices = []
        for index in all_tp:
            size, offset = chunk_size_and_offset(rows, tp, index, weight.tp_block_size)
            slices.append(_Interval(offset, offset + size, all_gtp, (index,)))
    if dim == weight.dim:
        finer = []
        for part in slices:
            for index in all_gtp:
                size, offset = chunk_size_and_offset(part.stop - part.start, gtp, index, weight.block_size)
                finer.append(_Interval(part.start + offset, part.start + offset + size, (index,), part.tp))
        slices = finer
    return [interval for interval in slices if interval.stop > interval.start]


@dataclass(frozen=True)
class Bucket:
    """Segments of several weights that the same ranks sum.

    Args:
        holders: For each replica the ranks with a copy.
        segments: (index of the weight, its part), in the order of the weights.
    """

    holders: tuple[tuple[int, ...], ...]
    segments: tuple[tuple[int, Box], ...]

    @cached_property
    def owners(self) -> tuple[int, ...]:
        return Segment(Box((), ()), self.holders).owners

    @cached_property
    def numel(self) -> int:
        return sum(box.numel for _, box in self.segments)


@dataclass(frozen=True)
class SyncPlan:
    """Which gradients are summed between whom. Made by :func:`plan_sync`; ``print(plan)`` shows it.

    Args:
        layout: The replicas.
        weights: All parameters.
        buckets: One for each set of owners, in the order in which all ranks go through them.
    """

    layout: ReplicaLayout
    weights: tuple[WeightSpec, ...]
    buckets: tuple[Bucket, ...]
    _by_rank: dict[int, tuple[Bucket, ...]] = field(default_factory=dict, compare=False, repr=False)

    def of_rank(self, rank: int) -> tuple[Bucket, ...]:
        """The buckets that ``rank`` is an owner of."""
        if not self._by_rank:
            found: dict[int, list[Bucket]] = {r: [] for r in self.layout.places}
            for bucket in self.buckets:
                for owner in bucket.owners:
                    found[owner].append(bucket)
            self._by_rank.update((r, tuple(buckets)) for r, buckets in found.items())
        return self._by_rank[rank]

    @cached_property
    def whole(self) -> tuple[WeightSpec, ...]:
        """Parameters that all ranks hold whole, and sum in one collective of all ranks."""
        return tuple(weight for weight in self.weights if weight.dim is None)

    def bucket_nbytes(self, bucket: Bucket) -> int:
        return sum(self.weights[index].nbytes * box.numel for index, box in bucket.segments)

    def sync_nbytes(self, rank: int) -> int:
        """Bytes of gradient that ``rank`` sums with other replicas in each step: its shard, and what is whole."""
        whole = sum(weight.nbytes * weight.numel for weight in self.whole)
        return whole + sum(self.bucket_nbytes(bucket) for bucket in self.of_rank(rank) if len(bucket.owners) > 1)

    def __str__(self) -> str:
        lines = [str(self.layout)]
        by_weight: dict[int, list[tuple[Box, Bucket]]] = {}
        for bucket in self.buckets:
            for index, box in bucket.segments:
                by_weight.setdefault(index, []).append((box, bucket))
        for index, weight in enumerate(self.weights):
            lines.append(_heading(weight))
            parts = sorted(by_weight.get(index, ()), key=lambda part: (part[0], part[1].owners))
            lines += [f"  {_extent(box, weight):<24} {_owners(bucket)}" for box, bucket in parts[:_MAX_SEGMENTS]]
            if len(parts) > _MAX_SEGMENTS:
                lines.append(f"  and {len(parts) - _MAX_SEGMENTS} more segments")
        lines.append(count_of(len(self.buckets), "bucket"))
        for bucket in self.buckets[:_MAX_SEGMENTS]:
            size = format_nbytes(self.bucket_nbytes(bucket))
            lines.append(f"  {_owners(bucket):<24} {count_of(len(bucket.segments), 'segment')}, {size}")
        if len(self.buckets) > _MAX_SEGMENTS:
            lines.append(f"  and {len(self.buckets) - _MAX_SEGMENTS} more")
        if self.whole:
            nbytes = sum(weight.nbytes * weight.numel for weight in self.whole)
            lines.append(f"all ranks: {count_of(len(self.whole), 'whole parameter')}, {format_nbytes(nbytes)}")
        return "\n".join(lines)


def plan_sync(layout: ReplicaLayout, weights: Sequence[WeightSpec]) -> SyncPlan:
    """Group the segments of all weights by owners.

    Args:
        layout: The replicas.
        weights: All parameters, in an order that is the same on all ranks.
    """
    segments: dict[tuple[tuple[int, ...], ...], list[tuple[int, Box]]] = {}
    known: dict[tuple[object, ...], list[Segment]] = {}
    for index, weight in enumerate(weights):
        if weight.dim is None:
            continue
        # Layers repeat: weights of one shape are cut alike.
        key = (weight.shape, weight.dim, weight.block_size, weight.tp_dim, weight.tp_block_size)
        if key not in known:
            known[key] = list(segments_of(weight, layout))
        for box, holders in known[key]:
            segments.setdefault(holders, []).append((index, box))
    buckets = [Bucket(holders, tuple(parts)) for holders, parts in sorted(segments.items())]
    return SyncPlan(layout, tuple(weights), tuple(buckets))


def format_nbytes(nbytes: float) -> str:
    """``1.5 KiB``."""
    if nbytes < 1024:
        return f"{nbytes:.0f} B"
    exponent = min(int(math.log2(nbytes)) // 10, 4)
    return f"{nbytes / 1024**exponent:.1f} {('KiB', 'MiB', 'GiB', 'TiB')[exponent - 1]}"


def _heading(weight: WeightSpec) -> str:
    if weight.dim is None:
        return f"{weight.name} {weight.shape}, whole"
    block = f" in blocks of {weight.block_size}" if weight.block_size > 1 else ""
    text = f"{weight.name} {weight.shape}, gtp cuts dim {weight.dim}{block}"
    if weight.tp_dim is not None:
        block = f" in blocks of {weight.tp_block_size}" if weight.tp_block_size > 1 else ""
        text += f", tp cuts dim {weight.tp_dim}{block}"
    return text


def _extent(box: Box, weight: WeightSpec) -> str:
    dims = [dim for dim in range(len(weight.shape)) if dim in (weight.dim, weight.tp_dim)]
    return ", ".join(f"dim {dim} {box.offset[dim]}:{box.offset[dim] + box.size[dim]}" for dim in dims)


def _owners(bucket: Bucket) -> str:
    return "owners " + " | ".join(format_ranks(copies) for copies in bucket.holders)
