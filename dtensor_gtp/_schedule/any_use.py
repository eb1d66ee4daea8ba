"""Weights that each rank may use as it likes, or leave out: ``set_reduce_scatter_unused_params``.

A use of any other weight is a collective, so all ranks must use it. Of these weights, all ranks gather all at the start
of a pass, and reduce all at its end, with zeros where a rank has no gradient. In between a use communicates nothing, so
no plan contains it. They cost the memory of full weights and gradients for a pass, as a module of ``fully_shard`` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import torch.distributed as dist

from .._comm.collectives import Groups
from .._params.sharded_weight import Gatherable


def may_be_left_out(target: Gatherable) -> bool:
    """Whether ranks may use the weight in different ways."""
    return target.weight.flags.reduce_scatter_unused_params


def absent_beside(target: Gatherable, gatherables: Iterable[Gatherable]) -> list[Gatherable]:
    """What else of the mesh is gathered where a rank needs such a weight outside of a pass: all ranks gather the same,
    whichever they need."""
    groups = target.weight.groups
    others = [each for each in gatherables if may_be_left_out(each) and each.weight.groups == groups]
    return [each for each in others if each is target or each.is_absent]


def gather_for_any_use(
    gather: Callable[[Sequence[Gatherable]], None], gatherables: Iterable[Gatherable], *, is_in_backward: bool
) -> None:
    """At the start of a pass, gather what is absent of these weights, in the same order on all ranks."""
    by_mesh: dict[Groups, list[Gatherable]] = {}
    for target in gatherables:
        weight = target.weight
        if not may_be_left_out(target):
            continue
        weight.follow(weight.registration.sites[0])
        if weight.registration.is_cut_again:
            raise NotImplementedError(
                f"set_reduce_scatter_unused_params does not support parameter '{weight.fqn}', which an outer "
                f"fully_shard has sharded, too (rank {dist.get_rank()}). Pass a (replicate, gtp) mesh to gtp_shard "
                "instead of the fully_shard around it."
            )
        is_needed = is_in_backward or target is weight.for_forward
        if is_needed and (target.kept is None or not weight.is_fresh(target.kept)) and target.live is None:
            by_mesh.setdefault(weight.groups, []).append(target)
    for targets in by_mesh.values():
        gather(targets)
