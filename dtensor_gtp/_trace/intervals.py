"""Sets of points in time as intervals."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

Interval = tuple[float, float]


def union(intervals: Iterable[Interval]) -> list[Interval]:
    """The same set of points as disjoint intervals in ascending order."""
    merged: list[Interval] = []
    for begin, end in sorted(intervals):
        if end <= begin:
            continue
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(end, merged[-1][1]))
        else:
            merged.append((begin, end))
    return merged


def subtract(intervals: Sequence[Interval], covered: Sequence[Interval]) -> list[Interval]:
    """What of ``intervals`` is not in ``covered``; both as :func:`union` returns them."""
    left: list[Interval] = []
    ends = [end for _, end in covered]
    for begin, end in intervals:
        for index in range(bisect_right(ends, begin), len(covered)):
            if covered[index][0] >= end:
                break
            if covered[index][0] > begin:
                left.append((begin, covered[index][0]))
            begin = covered[index][1]
        if begin < end:
            left.append((begin, end))
    return left


def intersect(intervals: Sequence[Interval], others: Sequence[Interval]) -> list[Interval]:
    """What is in both; both as :func:`union` returns them."""
    return subtract(intervals, subtract(intervals, others))


def length(intervals: Iterable[Interval]) -> float:
    """Total length of disjoint intervals."""
    return sum(end - begin for begin, end in intervals)
