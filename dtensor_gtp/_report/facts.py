"""What a report says, as plain data: the parameters and the plans."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from .._schedule.passes import Chain


class Cut(NamedTuple):
    """What one mesh axis does to a parameter. Axes cut one after the other, each what the one before it left.

    Args:
        axis: Name of the mesh axis.
        num_ranks: Its size.
        coordinate: That of this rank.
        dim: The tensor dim that is cut, or None if the axis cuts nothing.
        block_size: Rows of that dim that stay together.

    Example:
        >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
        >>> cut = sharding_report(model).rows[0].cuts[0]
        >>> cut.num_ranks, cut.dim, cut.block_size
        (4, 0, 1)
    """

    axis: str
    num_ranks: int
    coordinate: int
    dim: int | None = None
    block_size: int = 1


class ReportRow(NamedTuple):
    """One parameter of the report.

    Args:
        name: Fully qualified; several names of a tied parameter are joined by " = ".
        shape: Of the whole parameter.
        dtype: In which it is stored.
        placements: By mesh axis, in the short form of DTensor: "(R, G(0))".
        local_nbytes: What this rank holds of it.
        gathered_nbytes: What a gather of it sends and receives; 0 for a parameter that stays whole.
        use: How modules read it, such as "fused op", and for a whole parameter why it is whole.
        storage: "native mxfp8" or "mxfp8 from master" for a weight with a recipe, "on the host", else empty.
        cuts: What each mesh axis does to it, from the left to the right; none if the parameter is ignored.

    Example:
        >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
        >>> row = sharding_report(model).rows[0]
        >>> row.name, row.placements, row.local_nbytes, row.gathered_nbytes
        ('weight', '(G(0))', 4096, 16384)
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    placements: str
    local_nbytes: int
    gathered_nbytes: int
    use: str
    storage: str = ""
    cuts: tuple[Cut, ...] = ()


class PassReport(NamedTuple):
    """The plan of one pass that computes gradients.

    Args:
        is_backward: False for the forward of an outermost module.
        uses: Names of the weights in the order of their uses.
        gathered_nbytes: For each use, the bytes of full weights that are in memory or on their way: the one in use,
            those that are gathered ahead, and those that are kept from forward to backward.
        between_nbytes: The same before each use and after the last one.

    Example:
        >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
        >>> model(torch.randn(2, 64)).sum().backward()
        >>> forward = sharding_report(model).passes[0]
        >>> forward.uses, forward.gathered_nbytes
        (('weight',), (16384,))
    """

    is_backward: bool
    uses: tuple[str, ...]
    gathered_nbytes: tuple[int, ...]
    between_nbytes: tuple[int, ...]


class LaunchReport(NamedTuple):
    """Gathers that are launched together.

    Args:
        positions: Of the uses that they are for, in the order of ``PlanReport.uses``.
        nbytes: Of all of them.

    Example:
        >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
        >>> model(torch.randn(2, 64)).sum().backward()
        >>> sharding_report(model).plans[0].launches
        ((LaunchReport(positions=(0,), nbytes=16384),), ())
    """

    positions: tuple[int, ...]
    nbytes: int


@dataclass(frozen=True)
class PlanReport:
    """The plan of one kind of pass.

    Args:
        title: "forward of Model".
        window: How far ahead weights are gathered, as text.
        is_on_demand: Nothing is gathered ahead: each weight is gathered when it is used.
        uses: Names of what is gathered, in the order of the uses; "(columnwise)" where backward gathers other data.
        launches: The gathers that are launched before the first use, after the first use, and so on.
        kept: What is kept from forward to backward, as a line of text; empty if ``keep_nbytes`` keeps nothing.
        memory: The plan as bytes in memory; None for a pass that computes no gradients.

    Example:
        >>> model = gtp_shard(nn.Linear(64, 64), init_weight_mesh("cpu", gtp=4).weights)
        >>> model(torch.randn(2, 64)).sum().backward()
        >>> plan = sharding_report(model).plans[0]
        >>> plan.title, plan.uses
        ('forward of Linear', ('weight',))
    """

    title: str
    window: str
    is_on_demand: bool
    uses: tuple[str, ...]
    launches: tuple[tuple[LaunchReport, ...], ...]
    kept: str = ""
    memory: PassReport | None = None


def plan_report(
    title: str,
    chain: Chain,
    names: Sequence[str],
    gathered: Collection[int],
    kept: str = "",
    memory: PassReport | None = None,
) -> PlanReport:
    """The plan of ``chain``. ``names`` are by index of what is gathered. ``gathered``: positions of uses whose weights
    are not in memory already."""
    plan = chain.plan
    sizes = chain.sizes()
    launches = []
    for step in plan.launches:
        missing = [tuple(position for position in launch.positions if position in gathered) for launch in step]
        launches.append(tuple(LaunchReport(at, sum(sizes[plan.uses[p]] for p in at)) for at in missing if at))
    uses = tuple(names[use] for use in plan.uses)
    return PlanReport(title, str(chain.window), chain.window.depth == 0, uses, tuple(launches), kept, memory)


class Facts(NamedTuple):
    """All that a text or a page shows, as ``ShardingReport`` has it.

    Args:
        choices: Lines of "what: why".
        prediction: What was predicted and measured; empty without a machine.
        peak_nbytes: The most that the allocator has counted so far; None where there is none.
        advice: What to do next, one sentence or two each.
    """

    mesh: str
    rows: Sequence[ReportRow]
    plans: Sequence[PlanReport]
    choices: Sequence[str]
    symmetric_nbytes: int
    is_verbose: bool
    prediction: Sequence[str] = ()
    peak_nbytes: int | None = None
    advice: Sequence[str] = ()

    @property
    def local_nbytes(self) -> int:
        """Of all parameters on this rank."""
        return sum(row.local_nbytes for row in self.rows)

    @property
    def largest_nbytes(self) -> int:
        """Of a gathered weight; 0 if nothing is sharded."""
        return max((row.gathered_nbytes for row in self.rows), default=0)

    def most_gathered(self, is_backward: bool) -> int | None:
        """The most bytes of gathered weights at one time, in forwards or in backwards; None before the first."""
        passes = [plan.memory for plan in self.plans if plan.memory and plan.memory.is_backward is is_backward]
        return max((max(memory.gathered_nbytes + memory.between_nbytes) for memory in passes), default=None)
