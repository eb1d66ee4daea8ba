"""Which ranks form which replica, and as what (gtp, tp) grid. Plain arithmetic, no process groups.

A replica is a set of ranks that holds one full copy of the weights on a grid of its own. What failed is left out, the
others move up: every rank that is left works, no replica is cut down to the size of another.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import pairwise
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .weight_spec import WeightSpec


# Ranks that are printed of each replica.
_MAX_RANKS = 16


@dataclass(frozen=True)
class Replica:
    """Ranks that hold one full copy of the weights.

    Args:
        ranks: In row-major order of the (gtp, tp) grid; ascending along both axes.
        gtp: Ranks over which weights are split and gathered; they see different data.
        tp: Tensor-parallel ranks; they see the same data.
        reason: Why the sizes are not those that were asked for; empty if they are.
    """

    ranks: tuple[int, ...]
    gtp: int
    tp: int
    reason: str = ""

    @property
    def grid(self) -> tuple[tuple[int, ...], ...]:
        """Ranks by (gtp, tp) coordinate."""
        return tuple(self.ranks[row * self.tp : (row + 1) * self.tp] for row in range(self.gtp))

    def __str__(self) -> str:
        sizes = f"gtp {self.gtp}" + (f" x tp {self.tp}" if self.tp > 1 else "")
        why = f"  {self.reason}" if self.reason else ""
        return f"{sizes:<14} ranks {format_ranks(self.ranks)}{why}"


@dataclass(frozen=True)
class Place:
    """Where a rank stands: indices of its replica and of its row (gtp) and column (tp) there."""

    replica: int
    gtp: int
    tp: int


@dataclass(frozen=True)
class BatchShare:
    """Samples ``start`` to ``stop`` of a global batch: what one rank works on.

    Args:
        start, stop: Half-open range of samples; ranks of one tp group have the same.
        counts: Samples of every data rank: one tuple for each replica, by gtp coordinate.
    """

    start: int
    stop: int
    counts: tuple[tuple[int, ...], ...]

    @property
    def num_samples(self) -> int:
        return self.stop - self.start

    @property
    def rows(self) -> slice:
        """For ``batch[share.rows]``."""
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class ReplicaLayout:
    """All replicas. Made by :func:`plan_replicas` or :func:`replicas_of`; ``print(layout)`` shows them.

    Args:
        replicas: At least one; together they hold the ranks 0 to ``num_ranks - 1``, each once.
    """

    replicas: tuple[Replica, ...]

    @cached_property
    def num_ranks(self) -> int:
        return sum(len(replica.ranks) for replica in self.replicas)

    @cached_property
    def num_data_ranks(self) -> int:
        """Ranks that see different data: the gtp sizes summed up."""
        return sum(replica.gtp for replica in self.replicas)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all replicas have the same sizes."""
        return len({(replica.gtp, replica.tp) for replica in self.replicas}) == 1

    @cached_property
    def places(self) -> dict[int, Place]:
        """Where each rank stands."""
        return {
            rank: Place(index, position // replica.tp, position % replica.tp)
            for index, replica in enumerate(self.replicas)
            for position, rank in enumerate(replica.ranks)
        }

    def batch_counts(self, global_batch: int) -> tuple[tuple[int, ...], ...]:
        """Samples of each data rank: those of a replica are in proportion to its ranks, and all sum up exactly.

        Args:
            global_batch: Number of samples.

        Returns:
            One tuple for each replica, by gtp coordinate. Ranks of a replica differ by one sample at most.

        Raises:
            ValueError: There are fewer samples than data ranks.
        """
        if isinstance(global_batch, bool) or not isinstance(global_batch, int):
            raise TypeError(f"rebalance_batch expects an int as global_batch, but got {global_batch!r}.")
        if global_batch < self.num_data_ranks:
            raise ValueError(
                f"rebalance_batch expects a sample for each of the {self.num_data_ranks} ranks that see different "
                f"data, but got global_batch={global_batch}. Use a larger batch or fewer ranks."
            )
        divided = [divmod(global_batch * len(replica.ranks), self.num_ranks) for replica in self.replicas]
        counts = [quotient for quotient, _ in divided]
        by_remainder = sorted(range(len(counts)), key=lambda index: (-divided[index][1], index))
        for index in by_remainder[: global_batch - sum(counts)]:
            counts[index] += 1
        # A small batch may leave a replica of many data ranks and no tp less than one sample for each of them.
        surplus = [count - replica.gtp for count, replica in zip(counts, self.replicas, strict=True)]
        while min(surplus) < 0:
            needy, rich = surplus.index(min(surplus)), surplus.index(max(surplus))
            surplus[needy] += 1
            surplus[rich] -= 1
        return tuple(
            split_evenly(replica.gtp + extra, replica.gtp)
            for replica, extra in zip(self.replicas, surplus, strict=True)
        )

    def batch_shares(self, global_batch: int) -> dict[int, BatchShare]:
        """The share of every rank, see :meth:`batch_counts`: consecutive samples, in the order of the replicas."""
        counts = self.batch_counts(global_batch)
        shares: dict[int, BatchShare] = {}
        start = 0
        for replica, of_replica in zip(self.replicas, counts, strict=True):
            for row, count in zip(replica.grid, of_replica, strict=True):
                shares.update((rank, BatchShare(start, start + count, counts)) for rank in row)
                start += count
        return shares

    def __str__(self) -> str:
        lines = [f"{count_of(len(self.replicas), 'replica')} of {count_of(self.num_ranks, 'rank')}"]
        lines += [f"  replica {index}  {replica}".rstrip() for index, replica in enumerate(self.replicas)]
        return "\n".join(lines)


def split_evenly(total: int, parts: int) -> tuple[int, ...]:
    """``total`` in ``parts`` summands that differ by one at most, larger ones first."""
    quotient, remainder = divmod(total, parts)
    return tuple(quotient + (index < remainder) for index in range(parts))


def plan_replicas(
    *,
    replicate: int,
    gtp: int,
    tp: int = 1,
    failed: Collection[tuple[int, int, int]] = (),
    weights: Sequence[WeightSpec] = (),
) -> ReplicaLayout:
    """The replicas that remain of ``replicate`` replicas of ``gtp * tp`` ranks when some ranks have failed.

    The ranks that are left are counted anew, in the order of their coordinates: that is how a launcher starts them. A
    replica that lost all ranks is dropped; the others keep what they have.

    Args:
        replicate, gtp, tp: Sizes before the failure.
        failed: Coordinates (replica, gtp, tp) that failed.
        weights: What is to be sharded; says where tensor parallelism may cut, see :func:`choose_sizes`.

    Raises:
        TypeError, ValueError: A size or a coordinate is out of range, nothing is left, or no cut fits ``weights``.
    """
    sizes = {"replicate": replicate, "gtp": gtp, "tp": tp}
    for name, size in sizes.items():
        check_size("nonuniform_mesh", name, size)
    lost = {_checked_coordinate(coordinate, tuple(sizes.values())) for coordinate in failed}
    replicas: list[Replica] = []
    first = 0
    for index in range(replicate):
        num_lost = sum(coordinate[0] == index for coordinate in lost)
        num_ranks = gtp * tp - num_lost
        if num_ranks == 0:
            continue
        ranks = tuple(range(first, first + num_ranks))
        first += num_ranks
        replicas.append(_make_replica(index, ranks, gtp, tp, weights))
    if not replicas:
        raise ValueError(f"nonuniform_mesh expects ranks that did not fail, but all {len(lost)} of {sizes} did.")
    return ReplicaLayout(tuple(replicas))


def replicas_of(ranks: Sequence[Sequence[int]], *, tp: int = 1, weights: Sequence[WeightSpec] = ()) -> ReplicaLayout:
    """Replicas from lists of ranks, e.g. ``[[0, 1], [2, 3, 4, 5]]``; an empty list is a replica that lost everything.

    Args:
        ranks: Ranks of each replica, in any order. Rows of ``tp`` consecutive ones form the tensor-parallel groups if
            ``tp`` divides their number.
        tp: Largest size of the tp axis.
        weights: As in :func:`plan_replicas`.

    Raises:
        ValueError: Replicas overlap or leave ranks out, or no cut fits ``weights``.
    """
    check_size("nonuniform_mesh", "tp", tp)
    seen: dict[int, int] = {}
    for index, members in enumerate(ranks):
        for rank in members:
            if isinstance(rank, bool) or not isinstance(rank, int):
                raise TypeError(f"nonuniform_mesh expects ranks as ints, but got {rank!r} in replica {index}.")
            if rank in seen:
                raise ValueError(
                    f"nonuniform_mesh expects replicas that do not overlap, but rank {rank} is in replica {seen[rank]} "
                    f"and in replica {index} of {[list(r) for r in ranks]}. Name each rank once."
                )
            seen[rank] = index
    missing = sorted(set(range(max(seen, default=-1) + 1)) - set(seen))
    if missing or not seen or min(seen) < 0:
        raise ValueError(
            f"nonuniform_mesh expects replicas that hold the ranks 0 to N-1, but got {[list(r) for r in ranks]}"
            f"{f', which leaves out {missing}' if missing else ''}. Add what is missing to a replica: every rank works."
        )
    largest = max(map(len, ranks))
    replicas = [
        _make_replica(index, tuple(members), -(-largest // tp), tp, weights)
        for index, members in enumerate(ranks)
        if members
    ]
    return ReplicaLayout(tuple(replicas))


def _make_replica(index: int, ranks: tuple[int, ...], gtp: int, tp: int, weights: Sequence[WeightSpec]) -> Replica:
    own_gtp, own_tp, reason = choose_sizes(len(ranks), gtp, tp, weights, what=f"replica {index}")
    return Replica(_in_grid_order(ranks, own_tp), own_gtp, own_tp, reason)


def _in_grid_order(ranks: tuple[int, ...], tp: int) -> tuple[int, ...]:
    """Ranks such that they ascend along both axes of the grid, because process groups count them that way. Rows of
    ``tp`` consecutive ranks stay together where that allows it."""
    rows = sorted(tuple(sorted(ranks[i : i + tp])) for i in range(0, len(ranks), tp))
    if all(a < b for upper, lower in pairwise(rows) for a, b in zip(upper, lower, strict=True)):
        return tuple(rank for row in rows for rank in row)
    return tuple(sorted(ranks))


def choose_sizes(
    num_ranks: int, gtp: int, tp: int, weights: Sequence[WeightSpec] = (), *, what: str = "a replica"
) -> tuple[int, int, str]:
    """(gtp, tp) of a replica that has ``num_ranks`` ranks left of ``gtp * tp``, and why.

    All ranks work, so tp must divide their number; it never grows, because nothing says that the model can be cut more
    finely. Tensor parallelism waits for the rank with most blocks (heads): of the sizes that are possible, the one that
    loses least to that is taken (``tp`` itself loses nothing that was not accepted), and among equals the largest one,
    because activations and gathered weights grow when tp shrinks. What tp gives up moves to gtp.

    Args:
        num_ranks: Ranks that are left.
        gtp, tp: Sizes before.
        weights: Those with a ``tp_dim`` say into how many blocks each may be cut.
        what: The replica, for messages.

    Raises:
        ValueError: Blocks do not divide a weight, or ``tp`` was larger than their number to begin with.
    """
    cut = [weight for weight in weights if weight.tp_dim is not None]
    for weight in cut:
        if tp > 1:
            _check_blocks(weight, tp)
    candidates = [size for size in range(1, tp + 1) if num_ranks % size == 0]
    accepted = _slowdown(tp, cut)  # what was asked for with all ranks is good enough with fewer
    best = max(candidates, key=lambda size: (-max(_slowdown(size, cut), accepted), size))
    if (num_ranks // best, best) == (gtp, tp):
        return gtp, tp, ""
    lost = gtp * tp - num_ranks
    reasons = [f"{lost} of {gtp * tp} ranks failed"] if lost > 0 else []
    if best != tp:
        reasons.append(f"tp {tp} -> {best}: {_why(num_ranks, tp, best, candidates, cut)}")
    if num_ranks // best != gtp:
        reasons.append(f"gtp {gtp} -> {num_ranks // best}")
    return num_ranks // best, best, "; ".join(reasons)


def _why(num_ranks: int, tp: int, best: int, candidates: list[int], cut: list[WeightSpec]) -> str:
    larger = [size for size in candidates if size > best]
    if not larger:
        tried = f"{best + 1}" if best + 1 == tp else f"{best + 1} to {tp}"
        return f"{tried} {'does' if best + 1 == tp else 'do'} not divide {num_ranks}, and no rank is parked"
    size = max(larger)
    worst = max(cut, key=lambda weight: size * -(-weight.num_tp_blocks // size) / weight.num_tp_blocks)
    most = -(-worst.num_tp_blocks // size)
    idle = 1 - worst.num_tp_blocks / (most * size)
    return (
        f"tp {size} would idle {idle:.0%} of the time in '{worst.name}' ({worst.num_tp_blocks} blocks over {size} "
        f"ranks, {most} on the fullest)"
    )


def _slowdown(tp: int, cut: Sequence[WeightSpec]) -> float:
    """Time of tensor-parallel GEMMs over what it were if blocks could be split evenly, by elements of the weights."""
    total = sum(weight.numel for weight in cut)
    if not total:
        return 1.0
    return sum(w.numel * tp * -(-w.num_tp_blocks // tp) / w.num_tp_blocks for w in cut) / total


def _check_blocks(weight: WeightSpec, tp: int) -> None:
    assert weight.tp_dim is not None
    rows = weight.shape[weight.tp_dim]
    if rows % weight.tp_block_size or weight.num_tp_blocks < tp:
        raise ValueError(
            f"nonuniform_mesh expects blocks of {weight.tp_block_size} rows (heads) to fill dim {weight.tp_dim} of "
            f"weight '{weight.name}' of shape {weight.shape} and to be at least as many as tp={tp} ranks, but {rows} "
            f"rows make {rows / weight.tp_block_size:g} blocks: no cut fits. Use a smaller tp or another block size."
        )


def _checked_coordinate(coordinate: object, sizes: tuple[int, ...]) -> tuple[int, int, int]:
    if not isinstance(coordinate, tuple) or len(coordinate) != 3 or any(type(index) is not int for index in coordinate):
        raise TypeError(f"nonuniform_mesh expects (replica, gtp, tp) coordinates in failed, but got {coordinate!r}.")
    if any(not 0 <= index < size for index, size in zip(coordinate, sizes, strict=True)):
        raise ValueError(
            f"nonuniform_mesh expects coordinates within (replicate, gtp, tp) = {sizes} in failed, but got "
            f"{coordinate}."
        )
    replica, row, column = coordinate
    return replica, row, column


def check_size(caller: str, name: str, size: object) -> None:
    """Raises:
    TypeError, ValueError: ``size`` is not a positive int.
    """
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"{caller} expects an int as {name}, but got {type(size).__name__}: {size!r}.")
    if size < 1:
        raise ValueError(f"{caller} expects {name} to be at least 1, but got {size}.")


def format_ranks(ranks: Sequence[int]) -> str:
    """``0-3,7`` for ranks in ascending order; others as they are, the first few of them."""
    if list(ranks) != sorted(ranks):
        shown = ",".join(map(str, ranks[:_MAX_RANKS]))
        return f"{shown} and {len(ranks) - _MAX_RANKS} more" if len(ranks) > _MAX_RANKS else shown
    parts: list[str] = []
    start = 0
    for index in range(1, len(ranks) + 1):
        if index < len(ranks) and ranks[index] == ranks[index - 1] + 1:
            continue
        parts.append(str(ranks[start]) if index - start == 1 else f"{ranks[start]}-{ranks[index - 1]}")
        start = index
    more = len(parts) - _MAX_RANKS
    return ",".join(parts[:_MAX_RANKS]) + (f" and {more} more ranges" if more > 0 else "")


def count_of(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"


def format_place(rank: int, place: Place) -> str:
    """``rank 3 (replica 1, gtp 0, tp 0)``."""
    return f"rank {rank} (replica {place.replica}, gtp {place.gtp}, tp {place.tp})"
