"""From who holds which part of a tensor to who sends what to whom. Pure functions.

Every part that a rank wants comes from one rank that holds it, the nearest one: itself, a rank of its replica, then the
replicas after its own in turn, so that several replicas that are rebuilt do not all ask the same one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from .plan import Box


class Move(NamedTuple):
    """A part of a tensor that ``target`` gets from ``source`` (which may be the same rank)."""

    source: int
    target: int
    box: Box


class Missing(NamedTuple):
    """A part of a tensor that nobody holds."""

    target: int
    box: Box


def plan_moves(
    held: Mapping[int, Box], wanted: Mapping[int, Box], replica_of: Mapping[int, int]
) -> tuple[list[Move], list[Missing]]:
    """Who sends which part of one tensor to whom.

    Args:
        held: What each rank has; ranks without are left out.
        wanted: What each rank is to have.
        replica_of: The replica that each rank is part of.

    Returns:
        Moves that give every rank each element that it wants once, and what cannot be had.
    """
    num_replicas = max(replica_of.values(), default=0) + 1
    by_replica: dict[int, list[int]] = {}
    for rank in sorted(held):
        by_replica.setdefault(replica_of[rank], []).append(rank)
    moves: list[Move] = []
    missing: list[Missing] = []
    for target, box in sorted(wanted.items()):
        left = [box] if box.numel else []
        own = replica_of[target]
        replicas = [(own + step) % num_replicas for step in range(num_replicas)]
        sources = [target] if target in held else []
        for replica in replicas:
            if not left:
                break
            sources += [rank for rank in by_replica.get(replica, ()) if rank != target]
            for source in sources:
                taken = [part for piece in left if (part := piece.intersect(held[source])) is not None]
                moves += [Move(source, target, part) for part in taken]
                for part in taken:
                    left = [rest for piece in left for rest in subtract(piece, part)]
            sources = []
        missing += [Missing(target, piece) for piece in left]
    return moves, missing


def subtract(box: Box, part: Box) -> list[Box]:
    """What is left of ``box`` without ``part``, in boxes."""
    common = box.intersect(part)
    if common is None:
        return [box]
    left = []
    offset, size = list(box.offset), list(box.size)
    for dim in range(len(size)):
        before = common.offset[dim] - offset[dim]
        after = offset[dim] + size[dim] - common.offset[dim] - common.size[dim]
        if before:
            left.append(Box(tuple(offset), (*size[:dim], before, *size[dim + 1 :])))
        if after:
            start = (*offset[:dim], common.offset[dim] + common.size[dim], *offset[dim + 1 :])
            left.append(Box(start, (*size[:dim], after, *size[dim + 1 :])))
        offset[dim], size[dim] = common.offset[dim], common.size[dim]
    return left
