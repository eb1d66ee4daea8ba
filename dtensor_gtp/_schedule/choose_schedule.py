"""Chooses the numbers of a schedule from the policy and from what all ranks know in the first forward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
import torch.nn as nn

from .._comm.debug import format_nbytes
from .._params.sharded_weight import ShardedWeight
from ..policy import Schedule, SchedulePolicy

# What a link of 300 GB/s moves in 1.8 ms. Larger windows were no faster on 8 x H200.
_MOST_AHEAD = 512 << 20
# Less than this saves no memory worth having, and costs launches.
_LEAST_AHEAD = 32 << 20
_GRADIENTS_TOGETHER = 128 << 20
_KEPT_OF_FREE = 8


@dataclass(frozen=True)
class Facts:
    """What a choice is made from. The same on all ranks.

    Args:
        no_copy_engines: Why GPUs cannot copy from each other here, as far as that is known before it is tried; or None.
        block_nbytes: Bytes of the gathered weights of the largest block, see :func:`block_nbytes`.
        free_nbytes: Free memory of the device, the least of all ranks.
    """

    no_copy_engines: str | None
    block_nbytes: int
    free_nbytes: int


def choose(policy: SchedulePolicy, facts: Facts) -> tuple[Schedule, tuple[str, ...]]:
    """The schedule that ``policy`` asks for, and the reasons for all that it leaves open.

    ``"balanced"`` gathers one block ahead, as ``fully_shard`` does, half a block in one launch. Whether there are copy
    engines is known only when each communicator is made (see ``gather_backends``), so ``"auto"`` may remain.
    """
    is_least = policy.memory == "least"
    ahead = min(max(facts.block_nbytes, _LEAST_AHEAD), _MOST_AHEAD // 2 if is_least else _MOST_AHEAD)
    together = min(max(facts.block_nbytes // 2, _LEAST_AHEAD), ahead)
    why = f"the largest block has {format_nbytes(facts.block_nbytes)}"
    schedule = Schedule(
        prefetch_nbytes=ahead,
        coalesce_nbytes=together,
        coalesce_grad_nbytes=min(together, _GRADIENTS_TOGETHER),
        keep_last=not is_least,
        # With copy engines the other order was as fast, and frees a head before its gradient is made.
        wgrad_first=_why_no_copy_engines(policy, facts) is not None and not is_least,
    )
    reasons = [f"{format_nbytes(together)} in one launch: half of it"]
    if policy.prefetch_nbytes is None:
        reasons.insert(0, f"gathered ahead {format_nbytes(ahead)}: {why}")
    else:
        depth = min(schedule.prefetch_depth, policy.prefetch_nbytes)
        schedule = replace(schedule, prefetch_depth=depth, prefetch_nbytes=policy.prefetch_nbytes)
        reasons.insert(0, f"gathered ahead {format_nbytes(policy.prefetch_nbytes)}: asked for")
    schedule, kept = _with_kept(schedule, policy, facts)
    schedule, backends = _with_backends(schedule, policy, facts)
    given = dict(policy._numbers)
    if len(given) == len(fields(Schedule)):
        return Schedule(**given), ("all numbers: as SchedulePolicy.chosen has them",)
    stated = [f"{name}={value}: given" for name, value in given.items()]
    return replace(schedule, **given), (*reasons, kept, *backends, *stated)


def _with_kept(schedule: Schedule, policy: SchedulePolicy, facts: Facts) -> tuple[Schedule, str]:
    if policy.keep_nbytes is not None:
        nbytes, why = policy.keep_nbytes, "asked for"
    elif policy.memory == "most_speed":
        nbytes = facts.free_nbytes // _KEPT_OF_FREE
        why = f"an eighth of the {format_nbytes(facts.free_nbytes)} that all ranks have free"
    else:
        nbytes, why = 0, f"memory='{policy.memory}'"
    return replace(schedule, keep_nbytes=nbytes), f"kept until backward up to {format_nbytes(nbytes)}: {why}"


def _with_backends(schedule: Schedule, policy: SchedulePolicy, facts: Facts) -> tuple[Schedule, list[str]]:
    """Backends, and the reasons for those that are known here."""
    gathers, reduces, reasons = policy.gather_backend, policy.reduce_scatter, []
    why = _why_no_copy_engines(policy, facts)
    if gathers == "auto" and why is not None:
        gathers = "process_group"
        reasons.append(f"gathers by the process group: {why}")
    if reduces == "auto" and why is not None:
        reduces = "ring"
        reasons.append(f"reduce-scatters by the process group: {why}")
    return replace(schedule, gather_backend=gathers, reduce_scatter=reduces), reasons


def _why_no_copy_engines(policy: SchedulePolicy, facts: Facts) -> str | None:
    """Their symmetric memory is the largest part of what a step takes beside activations."""
    return "memory='least'" if policy.memory == "least" else facts.no_copy_engines


def block_nbytes(roots: Iterable[nn.Module], weights: Iterable[ShardedWeight]) -> int:
    """Bytes of the gathered weights of the largest block below ``roots``; of all weights if there are no blocks.

    Blocks are modules of one class that stand in one container (``nn.ModuleList``, ``nn.Sequential``) at least twice.
    """
    by_module: dict[nn.Module, int] = {}
    for weight in weights:
        owner = weight.sites[0].module
        by_module[owner] = by_module.get(owner, 0) + weight.gatherables[0].nbytes
    total = sum(by_module.values())
    blocks = [block for root in roots for container in root.modules() for block in _blocks(container)]
    sizes = (sum(by_module.get(module, 0) for module in block.modules()) for block in blocks)
    return max(sizes, default=0) or total


def _blocks(container: nn.Module) -> list[nn.Module]:
    if not isinstance(container, nn.ModuleList | nn.Sequential | nn.ModuleDict):
        return []
    children = list(container.children())
    classes = [type(child) for child in children]
    return [child for child in children if classes.count(type(child)) > 1]


def no_copy_engines(device: torch.device, groups: list[dist.ProcessGroup], has_unequal_replicas: bool) -> str | None:
    """Why GPUs cannot copy from each other, as far as that is known without a try."""
    if device.type != "cuda":
        return f"a mesh of '{device.type}' has no copy engines"
    if has_unequal_replicas:
        return "replicas of unequal sizes: streams would wait for copy engines of a lost rank without a limit"
    if any(dist.get_backend(group) == "fake" for group in groups):
        return "the process group is fake"
    return None
