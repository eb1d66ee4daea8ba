"""Which ranks form which replica, and as what (gtp, tp) grid: plain arithmetic. Failed ranks are left out and the
others move up. All remaining ranks work: no replica is reduced to the size of another.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import accumulate, chain, groupby, pairwise
from typing import NamedTuple

_MAX_RANKS = 16  # that are printed of each replica


@dataclass(frozen=True)
class WeightSpec:
    """What the planner must know of a parameter.

    Args:
        name, shape: Fully qualified name and logical shape.
        dim: The dim that gtp cuts; None for a parameter that stays whole.
        block_size: Rows of ``dim`` that stay together on one rank.
        tp_dim: The dim that tensor parallelism cuts, before gtp cuts the slice; None if it does not.
        tp_block_size: Rows of ``tp_dim`` that stay together on one tp rank, e.g. head_dim.
        nbytes: Bytes of an element of the gradient when it is sent.

    Example:
        >>> spec = WeightSpec("wq.weight", (4096, 4096), tp_dim=0, tp_block_size=128)
        >>> spec.numel, spec.num_tp_blocks  # 32 heads
        (16777216, 32)
    """

    name: str
    shape: tuple[int, ...]
    dim: int | None = 0
    block_size: int = 1
    tp_dim: int | None = None
    tp_block_size: int = 1
    nbytes: int = 4

    @property
    def numel(self) -> int:
        """Elements of the whole weight."""
        return math.prod(self.shape)

    @property
    def num_tp_blocks(self) -> int:
        """Blocks that tensor parallelism may distribute."""
        assert self.tp_dim is not None
        return self.shape[self.tp_dim] // self.tp_block_size


@dataclass(frozen=True)
class Replica:
    """Ranks that hold one full copy of the weights. They ascend along both axes of their grid.

    Weights are split and gathered over gtp, whose ranks see different data; tensor-parallel ranks see the same data.

    Args:
        ranks: In row-major order of the (gtp, tp) grid.
        gtp, tp: Sizes of the grid.
        reason: Why the sizes are not those that were asked for; empty if they are.

    Example:
        >>> replica = Replica(ranks=(0, 1, 2, 3), gtp=2, tp=2)
        >>> replica.grid
        ((0, 1), (2, 3))
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
        return f"{sizes:<14} ranks {format_ranks(self.ranks)}  {self.reason}".rstrip()


class Place(NamedTuple):
    """Coordinates of a rank.

    Args:
        replica: Index of its replica.
        gtp: Its row in the grid of the replica.
        tp: Its column there.

    Example:
        >>> place = replicas_of([[0], [1, 2, 3]]).places[2]
        >>> place.replica, place.gtp
        (1, 1)
        >>> print(place)
        replica 1, gtp 1, tp 0
    """

    replica: int
    gtp: int
    tp: int

    def __str__(self) -> str:
        return f"replica {self.replica}, gtp {self.gtp}, tp {self.tp}"


@dataclass(frozen=True)
class BatchShare:
    """Samples of a global batch that one rank works on. Ranks of one tp group have the same.

    Args:
        start, stop: The first sample, and the one after the last.
        counts: Samples of every data rank: one tuple for each replica, by gtp coordinate.

    Example:
        >>> share = replicas_of([[0], [1, 2, 3]]).batch_shares(8)[1]
        >>> share.num_samples, share.counts
        (2, ((2,), (2, 2, 2)))
        >>> torch.arange(8)[share.rows]
        tensor([2, 3])
    """

    start: int
    stop: int
    counts: tuple[tuple[int, ...], ...]

    @property
    def num_samples(self) -> int:
        """Samples of this rank."""
        return self.stop - self.start

    @property
    def rows(self) -> slice:
        """For ``batch[share.rows]``."""
        return slice(self.start, self.stop)


@dataclass(frozen=True)
class ReplicaLayout:
    """All replicas, with the ranks 0 to ``num_ranks - 1``. Made by :func:`plan_replicas` or :func:`replicas_of`;
    ``print(layout)`` shows them.

    Args:
        replicas: In the order of their indices.

    Example:
        >>> layout = replicas_of([[0], [1, 2, 3]])
        >>> layout.num_ranks, layout.num_data_ranks, layout.is_uniform
        (4, 4, False)
        >>> print(layout.places[2])
        replica 1, gtp 1, tp 0
    """

    replicas: tuple[Replica, ...]

    @cached_property
    def num_ranks(self) -> int:
        """Ranks of all replicas."""
        return sum(len(replica.ranks) for replica in self.replicas)

    @cached_property
    def num_data_ranks(self) -> int:
        """Ranks that see different data, which is the sum of the gtp sizes."""
        return sum(replica.gtp for replica in self.replicas)

    @cached_property
    def is_uniform(self) -> bool:
        """Whether all replicas have the same sizes."""
        return len({(replica.gtp, replica.tp) for replica in self.replicas}) == 1

    @cached_property
    def places(self) -> dict[int, Place]:
        """Where each rank stands."""
        return {
            rank: Place(index, *divmod(position, replica.tp))
            for index, replica in enumerate(self.replicas)
            for position, rank in enumerate(replica.ranks)
        }

    def batch_counts(self, global_batch: int) -> tuple[tuple[int, ...], ...]:
        """Samples of each data rank.

        Each replica gets a number in proportion to its ranks. Ranks of a replica differ by one sample at most, and the
        sum is exact.

        Args:
            global_batch: Samples of all replicas together.

        Returns:
            One tuple for each replica, by gtp coordinate.

        Raises:
            TypeError, ValueError: ``global_batch`` is no int, or smaller than the number of data ranks.

        Example:
            >>> replicas_of([[0], [1, 2, 3]]).batch_counts(9)
            ((2,), (3, 2, 2))
        """
        check_size("rebalance_batch", "global_batch", global_batch)
        if global_batch < self.num_data_ranks:
            raise ValueError(
                f"rebalance_batch expects at least one sample for each of the {self.num_data_ranks} data ranks, but "
                f"got global_batch={global_batch}. Use a larger batch or fewer ranks."
            )
        divided = [divmod(global_batch * len(replica.ranks), self.num_ranks) for replica in self.replicas]
        surplus = [count - replica.gtp for (count, _), replica in zip(divided, self.replicas, strict=True)]
        num_left = global_batch - sum(count for count, _ in divided)  # lost by rounding down
        for index in sorted(range(len(divided)), key=lambda i: -divided[i][1])[:num_left]:  # largest remainders first
            surplus[index] += 1
        # In a small batch, a replica with many data ranks (no tp) may have less than one sample for each of them.
        while min(surplus) < 0:
            poorest, richest = surplus.index(min(surplus)), surplus.index(max(surplus))
            surplus[poorest] += 1
            surplus[richest] -= 1
        totals = [(replica.gtp + extra, replica.gtp) for replica, extra in zip(self.replicas, surplus, strict=True)]
        return tuple(tuple(total // gtp + (row < total % gtp) for row in range(gtp)) for total, gtp in totals)

    def batch_shares(self, global_batch: int) -> dict[int, BatchShare]:
        """The share of every rank, see :meth:`batch_counts`: consecutive samples, in the order of the replicas.

        Args:
            global_batch: Samples of all replicas together.

        Returns:
            A :class:`BatchShare` by rank.

        Example:
            >>> shares = replicas_of([[0], [1, 2, 3]]).batch_shares(9)
            >>> shares[1].rows
            slice(2, 5, None)
        """
        counts = self.batch_counts(global_batch)
        ends = accumulate(chain.from_iterable(counts))  # behind the last sample of each data rank
        rows = [row for replica in self.replicas for row in replica.grid]  # ranks of a row share samples
        shares = zip(rows, chain.from_iterable(counts), ends, strict=True)
        return {rank: BatchShare(end - count, end, counts) for row, count, end in shares for rank in row}

    def __str__(self) -> str:
        heading = f"{count_of(len(self.replicas), 'replica')} of {count_of(self.num_ranks, 'rank')}"
        return "\n".join([heading, *(f"  replica {index}  {replica}" for index, replica in enumerate(self.replicas))])


def plan_replicas(
    *,
    replicate: int,
    gtp: int,
    tp: int = 1,
    failed: Collection[tuple[int, int, int]] = (),
    weights: Sequence[WeightSpec] = (),
) -> ReplicaLayout:
    """The remaining replicas of ``replicate`` replicas of ``gtp * tp`` ranks after some ranks have failed.

    The remaining ranks are renumbered, in the order of their coordinates, as a launcher starts them. A replica
    that lost all ranks is dropped.

    Args:
        replicate, gtp, tp: Sizes before the failure.
        failed: Coordinates (replica, gtp, tp) of ranks that are gone.
        weights: What is to be sharded; tells where tensor parallelism may cut when it has to shrink.

    Returns:
        The :class:`ReplicaLayout` of the remaining ranks.

    Raises:
        TypeError, ValueError: A size or a coordinate is out of range, nothing is left, or no cut fits ``weights``.

    Example:
        >>> print(plan_replicas(replicate=2, gtp=4, failed=[(1, 2, 0)]))
        2 replicas of 7 ranks
          replica 0  gtp 4          ranks 0-3
          replica 1  gtp 3          ranks 4-6  1 of 4 ranks failed; gtp 4 -> 3
    """
    sizes = {"replicate": replicate, "gtp": gtp, "tp": tp}
    for name, size in sizes.items():
        check_size("nonuniform_mesh", name, size)
    for place in failed:
        if not isinstance(place, tuple) or len(place) != 3 or any(type(index) is not int for index in place):
            raise TypeError(f"nonuniform_mesh expects (replica, gtp, tp) coordinates in failed, but got {place!r}.")
        if any(not 0 <= index < size for index, size in zip(place, sizes.values(), strict=True)):
            raise ValueError(
                f"nonuniform_mesh expects coordinates within (replicate, gtp, tp) = {(replicate, gtp, tp)} in failed, "
                f"but got {place}."
            )
    lost = set(failed)  # each coordinate once
    num_left = [gtp * tp - sum(replica == index for replica, _, _ in lost) for index in range(replicate)]
    replicas = [
        _make_replica(index, tuple(range(end - num, end)), gtp, tp, weights)  # new ranks follow one another
        for index, (num, end) in enumerate(zip(num_left, accumulate(num_left), strict=True))
        if num
    ]
    if not replicas:
        raise ValueError(f"nonuniform_mesh expects a rank that did not fail, but all {len(lost)} of {sizes} failed.")
    return ReplicaLayout(tuple(replicas))


def replicas_of(ranks: Sequence[Sequence[int]], *, tp: int = 1, weights: Sequence[WeightSpec] = ()) -> ReplicaLayout:
    """Replicas from lists of ranks, e.g. ``[[0, 1], [2, 3, 4, 5]]``; an empty list is a replica that lost everything.

    Args:
        ranks: Ranks of each replica, in any order. Rows of ``tp`` consecutive ones form the tensor-parallel groups if
            ``tp`` divides their number.
        tp: Largest size of the tp axis. A replica whose ranks it does not divide gets a smaller one.
        weights: What is to be sharded; tells where tensor parallelism may cut when it has to shrink.

    Returns:
        The :class:`ReplicaLayout` of these ranks.

    Raises:
        TypeError, ValueError: Replicas overlap or leave ranks out, a rank is no int, or no cut fits ``weights``.

    Example:
        >>> [replica.grid for replica in replicas_of([[0, 1], [2, 3, 4, 5]], tp=2).replicas]
        [((0, 1),), ((2, 3), (4, 5))]
    """
    check_size("nonuniform_mesh", "tp", tp)
    lists = [list(members) for members in ranks]
    replica_of: dict[int, int] = {}
    for index, members in enumerate(lists):
        for rank in members:
            if isinstance(rank, bool) or not isinstance(rank, int):  # True is an int to Python
                raise TypeError(f"nonuniform_mesh expects ranks as ints, but got {rank!r} in replica {index}.")
            if rank in replica_of:
                raise ValueError(
                    f"nonuniform_mesh expects replicas that do not overlap, but rank {rank} is in replica "
                    f"{replica_of[rank]} and in replica {index} of {lists}. Name each rank once."
                )
            replica_of[rank] = index
    missing = sorted(set(range(max(replica_of, default=-1) + 1)) - set(replica_of))
    if missing or not replica_of or min(replica_of) < 0:
        raise ValueError(
            "nonuniform_mesh expects replicas that hold the ranks 0 to N-1, but got "
            f"{lists}{f', which leaves out {missing}' if missing else ''}. Add the missing ranks to a replica."
        )
    gtp = -(-max(map(len, lists)) // tp)  # that of the largest replica
    return ReplicaLayout(
        tuple(_make_replica(index, tuple(members), gtp, tp, weights) for index, members in enumerate(lists) if members)
    )


def _make_replica(index: int, ranks: tuple[int, ...], gtp: int, tp: int, weights: Sequence[WeightSpec]) -> Replica:
    """Ranks ascend along both axes of the grid, as process groups count them. Where that allows it, rows of ``tp``
    consecutive ranks stay together."""
    gtp, tp, reason = choose_sizes(len(ranks), gtp, tp, weights, what=f"replica {index}")
    rows = sorted(tuple(sorted(ranks[i : i + tp])) for i in range(0, len(ranks), tp))  # tensor-parallel groups
    is_ascending = all(a < b for upper, lower in pairwise(rows) for a, b in zip(upper, lower, strict=True))
    return Replica(tuple(chain.from_iterable(rows) if is_ascending else sorted(ranks)), gtp, tp, reason)


def choose_sizes(
    num_ranks: int, gtp: int, tp: int, weights: Sequence[WeightSpec] = (), *, what: str = "a replica"
) -> tuple[int, int, str]:
    """(gtp, tp) of a replica that has ``num_ranks`` ranks left of ``gtp * tp``, and why.

    All ranks work, so tp must divide their number. tp never grows, because nothing says that the model can be cut more
    finely. Tensor parallelism waits for the rank with most blocks (heads) of those ``weights`` that have a ``tp_dim``.
    The size that loses least time to this is taken, where ``tp`` itself counts as losing none; among equals the
    largest, because activations and gathered weights grow when tp shrinks. What tp gives up moves to gtp. ValueError
    if blocks do not divide a weight, or are fewer than ``tp``.
    """
    cut = [weight for weight in weights if weight.tp_dim is not None]  # others do not slow down with tp
    _check_blocks(cut, tp)
    candidates = [size for size in range(1, tp + 1) if num_ranks % size == 0]  # sizes that leave no rank idle
    accepted = _slowdown(tp, cut)  # what was asked for with all ranks is good enough with fewer
    best = max(candidates, key=lambda size: (-max(_slowdown(size, cut), accepted), size))
    if (num_ranks // best, best) == (gtp, tp):
        return gtp, tp, ""
    lost = gtp * tp - num_ranks
    reasons = [f"{lost} of {gtp * tp} ranks failed"] if lost > 0 else []
    if best != tp:
        reasons.append(f"tp {tp} -> {best}: {_why_tp_shrinks(num_ranks, tp, best, cut)}")
    if num_ranks // best != gtp:
        reasons.append(f"gtp {gtp} -> {num_ranks // best}")
    return num_ranks // best, best, "; ".join(reasons)


def _why_tp_shrinks(num_ranks: int, tp: int, best: int, cut: list[WeightSpec]) -> str:
    size = max(size for size in range(best, tp + 1) if num_ranks % size == 0)  # a larger one that divides, if any
    if size == best:
        tried = f"{tp} does" if best + 1 == tp else f"{best + 1} to {tp} do"
        return f"{tried} not divide {num_ranks}, and no rank may be idle"
    worst = max(cut, key=lambda weight: size * -(-weight.num_tp_blocks // size) / weight.num_tp_blocks)
    most = -(-worst.num_tp_blocks // size)  # blocks on the fullest rank
    return (
        f"tp {size} would idle {1 - worst.num_tp_blocks / (most * size):.0%} of the time in '{worst.name}' "
        f"({worst.num_tp_blocks} blocks over {size} ranks, {most} on the fullest)"
    )


def _slowdown(tp: int, cut: Sequence[WeightSpec]) -> float:
    """Time of tensor-parallel GEMMs, divided by their time if blocks could be split evenly; by elements of weights."""
    total = sum(weight.numel for weight in cut)
    if not total:  # no weight is cut: all sizes are alike
        return 1.0
    return sum(w.numel * tp * -(-w.num_tp_blocks // tp) / w.num_tp_blocks for w in cut) / total


def _check_blocks(cut: Sequence[WeightSpec], tp: int) -> None:
    for weight in cut if tp > 1 else ():  # a tp of 1 cuts nothing
        assert weight.tp_dim is not None
        rows = weight.shape[weight.tp_dim]
        if rows % weight.tp_block_size or weight.num_tp_blocks < tp:
            raise ValueError(
                f"nonuniform_mesh expects blocks of {weight.tp_block_size} rows (heads) to fill dim {weight.tp_dim} "
                f"of weight '{weight.name}' of shape {weight.shape} and to number at least tp={tp}, but {rows} rows "
                f"make {rows / weight.tp_block_size:g} blocks. Use a smaller tp or another block size."
            )


def check_size(caller: str, name: str, size: object) -> None:
    """Raise TypeError or ValueError if ``size`` is not a positive int."""
    if isinstance(size, bool) or not isinstance(size, int):
        raise TypeError(f"{caller} expects an int as {name}, but got {type(size).__name__}: {size!r}.")
    if size < 1:
        raise ValueError(f"{caller} expects {name} to be at least 1, but got {size}.")


def format_ranks(ranks: Sequence[int]) -> str:
    """``0-3,7``: ranges of consecutive ranks, in the order of ``ranks``; the first few of them."""
    numbered = groupby(enumerate(ranks), key=lambda numbered_rank: numbered_rank[1] - numbered_rank[0])
    runs = [[rank for _, rank in run] for _, run in numbered]  # rank minus position is the same in a run
    parts = [f"{run[0]}-{run[-1]}" if len(run) > 1 else f"{run[0]}" for run in runs]
    more = len(parts) - _MAX_RANKS
    return ",".join(parts[:_MAX_RANKS]) + (f" and {more} more ranges" if more > 0 else "")


def count_of(number: int, noun: str) -> str:
    """``1 rank``, ``2 ranks``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
