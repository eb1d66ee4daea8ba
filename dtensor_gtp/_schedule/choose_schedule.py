"""Chooses the numbers of a schedule from the policy and from what all ranks know in the first forward."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

import torch
import torch.distributed as dist
import torch.nn as nn

from .._comm.debug import format_nbytes
from .._params.sharded_weight import ShardedWeight
from ..policy import GatherBackend, GatherBackendName, ReduceScatterName, Schedule, SchedulePolicy
from .guesses import blocks_in

# What a link of 300 GB/s moves in 1.8 ms. Larger windows were no faster on 8 x H200.
_MOST_AHEAD = 512 << 20
# Less than this saves no memory worth having, and costs launches.
_LEAST_AHEAD = 32 << 20
# Groups travel together up to this size, and to this part of all groups, so that a small model
# needs little memory. A launch takes the host 0.2 ms (gather) or 0.4 ms (reduction).
_GROUPS_TOGETHER = 100 << 20  # four blocks of BERT-large
_GROUPS_OF_MODEL = 6
# Bytes of gradients that are sent together, and how many such groups before compute waits for the oldest.
_REDUCTIONS = (128 << 20, 2)
# With copy engines half the launches, each of which costs the host more than one of NCCL. As many
# bytes are in flight.
_REDUCTIONS_BY_COPIES = (256 << 20, 1)
_KEPT_OF_FREE = 8
# Elements of a weight times tokens, on average over a block. Below that, a slow host needs longer
# for the weight by itself than its GEMM takes: 57 single weights took one 21 ms more than their
# groups, 0.4 ms each; 1e11 multiplications and additions take an H100 0.3 ms.
# Llama of transformers, 2 x H200, as groups and as single weights: 68.4 and 75.3 ms at 6e10, 119.2
# and 113.6 at 1.3e11.
_SMALL_GEMM = 100e9
# The same of a weight with float8 GEMMs. They cast inputs and gradients, which takes the host 3 ms
# a weight: Llama of 8 layers took 174 ms at 6e10 and 212 at 2.6e11, in bf16 85 and 230 (2 x H200).
_SMALL_FLOAT8_GEMM = 200e9
# Where the number of tokens is not known (images, sound).
_SMALL_NUMEL = 16 << 20
# Bytes of a group: a link of 300 GB/s takes 7 ms for 2 GiB. By themselves, the two weights of all
# experts take the host 3 ms a block: Qwen3-MoE (1.2 GB a block) took 88.7 ms, in groups 81.3 (2 x H200).
_MOST_IN_GROUP = 2 << 30
# Bytes of a table and its gradient, which take a link of 300 GB/s 3.6 ms while nothing computes.
# For less it does not pay that hosts wait for each other in each lookup: 47 of 371 ms with T5-large
# on 2 x H100 (0.26 GB), 1.2 of 66.1 ms with Llama of 32,000 tokens on 2 x H200 (1.05 GB).
_LARGE_TABLE = 1 << 30
# Stands for the GPUs of a host, in measurements without a wire: what a rank launches shall be the same.
_FAKE = "the process group is fake"


@dataclass(frozen=True)
class Facts:
    """What a choice is made from. The same on all ranks.

    Args:
        no_copy_engines: Why GPUs cannot copy from each other here, as far as that is known before it is tried; or None.
        block_nbytes: Bytes of the gathered weights of the largest block, see :func:`block_nbytes`.
        free_nbytes: Free memory of the device, the least of all ranks.
        group_nbytes: Bytes of the gathered weights of all groups.
        single_nbytes: Of the weights that are gathered one by one.
    """

    no_copy_engines: str | None
    block_nbytes: int
    free_nbytes: int
    group_nbytes: int = 0
    single_nbytes: int = 0

    @property
    def has_small_weights(self) -> bool:
        """Whether most of the model is gathered in groups."""
        return self.group_nbytes > self.single_nbytes

    def no_copies(self, policy: SchedulePolicy) -> str | None:
        """Why GPUs shall not copy from each other; None if they shall try."""
        if policy.memory == "least":
            return "memory='least'"  # symmetric memory is the largest part of what a step takes beside activations
        if self.no_copy_engines is None and policy.gather_backend == "auto" and self.has_small_weights:
            # A block of 16 weights takes the host 0.20 ms by NCCL and 0.35 ms by copy engines (H100).
            return "groups of small weights: the process group takes the host less time"
        return self.no_copy_engines


def choose(policy: SchedulePolicy, facts: Facts) -> tuple[Schedule, tuple[str, ...]]:
    """The schedule that ``policy`` asks for, and the reasons for all that it leaves open.

    ``"balanced"`` gathers one block ahead, as ``fully_shard`` does: in one launch with copy
    engines, else in two. Whether there are copy engines is known only when each communicator is
    made (see ``collectives``), so ``"auto"`` may remain. Their symmetric memory takes the place of
    a head that waits for its backward: ``fully_shard`` holds head and embedding there.
    """
    given = dict(policy._numbers)
    if len(given) == len(fields(Schedule)):
        fixed = Schedule(**given)
        return fixed, (
            "all numbers: SchedulePolicy.chosen has fixed them",
            f"gathers by {_word(fixed.gather_backend)}, reduce-scatters by {_word(fixed.reduce_scatter)}: fixed, too",
        )
    is_least = policy.memory == "least"
    no_copies = facts.no_copies(policy)
    by_copies = no_copies in (None, _FAKE)
    most_ahead = _MOST_AHEAD
    if is_least:
        most_ahead = _MOST_AHEAD // 2
    ahead = min(max(facts.block_nbytes, _LEAST_AHEAD), most_ahead)
    why_ahead = f"the largest block has {format_nbytes(facts.block_nbytes)}"
    why_ahead += _bound(ahead, facts.block_nbytes)
    together, why_together = _together(facts, ahead, by_copies=by_copies, is_least=is_least)
    if policy.prefetch_nbytes is not None:  # it does not change what is gathered together
        ahead = policy.prefetch_nbytes
        why_ahead = "SchedulePolicy(prefetch_nbytes=)"
    depth = Schedule.prefetch_depth
    if facts.group_nbytes:
        depth = 1  # a group is a block: one ahead is enough, as in ``fully_shard``
    grads_together, inflight = _REDUCTIONS
    if by_copies:
        grads_together, inflight = _REDUCTIONS_BY_COPIES
    keep_last = policy.memory == "most_speed" or not (by_copies or is_least)
    kept, why_kept = _kept(policy, facts)
    gathers, why_gathers = _gathers(policy, no_copies)
    reduces, why_reduces = _reduces(policy, facts)
    reasons = [
        f"gathered ahead {format_nbytes(ahead)}: {why_ahead}",
        f"up to {format_nbytes(together)} in one launch: {why_together}",
        f"{_what_is_kept(kept, keep_last)} kept until backward: {why_kept}",
    ]
    # What is still open is chosen when communicators are made, which gives the reason.
    reasons += [f"gathers by {_word(gathers)}: {why_gathers}"] * (gathers != "auto")
    reasons += [f"reduce-scatters by {_word(reduces)}: {why_reduces}"] * (reduces != "auto")
    schedule = Schedule(
        prefetch_depth=min(depth, ahead),  # 0 bytes ahead: no uses ahead either
        prefetch_nbytes=ahead,
        coalesce_nbytes=together,
        coalesce_grad_nbytes=min(together, grads_together),
        max_inflight_reduce_scatters=inflight,
        keep_nbytes=kept,
        keep_last=keep_last,
        # With copy engines the other order was as fast, and frees a head before its gradient is
        # made. Beside groups there is little else than a head.
        wgrad_first=not (by_copies or is_least or facts.has_small_weights),
        gather_backend=gathers,
        reduce_scatter=reduces,
    )
    reasons += [f"{name}={value}: given" for name, value in given.items()]
    return replace(schedule, **given), tuple(reasons)


def gathers_by_process_group(policy: SchedulePolicy, facts: Facts) -> bool:
    """Whether that is known before communicators are made."""
    return _gathers(policy, facts.no_copies(policy))[0] == "process_group"


def adds_addends(policy: SchedulePolicy, facts: Facts) -> bool:
    """Whether ranks will exchange gradients and then add them, as far as is known before
    communicators are made."""
    reduces, _ = _reduces(policy, facts)
    if reduces == "auto":  # which takes copy engines where gathers do
        return policy.gather_backend in ("auto", "copy_engine")
    return reduces != "ring"


def _gathers(policy: SchedulePolicy, no_copies: str | None) -> tuple[GatherBackendName | type[GatherBackend], str]:
    """Who gathers, and why; "auto" if ranks have to try."""
    if policy.gather_backend == "auto" and no_copies is not None:
        return "process_group", no_copies
    return policy.gather_backend, "SchedulePolicy(gather_backend=)"


def _reduces(policy: SchedulePolicy, facts: Facts) -> tuple[ReduceScatterName, str]:
    """Who reduces, and why; "auto" if that follows from who gathers."""
    if policy.reduce_scatter == "auto" and facts.group_nbytes:
        # Copy engines would need copies first: Qwen3-MoE took 91.0 instead of 88.8 ms on 2 x H100.
        return "ring", "autograd allocates the gradients of groups, so copy engines would need a copy first"
    if policy.reduce_scatter == "auto" and (no_copies := facts.no_copies(policy)) is not None:
        return "ring", no_copies
    return policy.reduce_scatter, "SchedulePolicy(reduce_scatter=)"


def is_worth_a_group(
    mean_numel: float, num_tokens: int, *, has_float8: bool = False, is_dequantized: bool = False
) -> bool:
    """Whether the weights of a block are gathered as a group. Those that layers multiply have so many
    elements on average. Alone, they would be multiplied in float8 (``has_float8``) or dequantized
    for each GEMM."""
    if is_dequantized:
        # A group rounds shards instead. Llama, T=8192, mxfp8, as one of two ranks: 215.5 ms in
        # groups, 221.7 alone, in bf16 215.5 (H200).
        return True
    if not num_tokens:
        return mean_numel <= _SMALL_NUMEL
    small = _SMALL_GEMM
    if has_float8:
        small = _SMALL_FLOAT8_GEMM
    return mean_numel * num_tokens <= small


def fits_a_group(nbytes: int) -> bool:
    """Whether the full weights of a group may take so many bytes."""
    return nbytes <= _MOST_IN_GROUP


def is_worth_asking(weight_nbytes: int) -> bool:
    """Whether hosts tell each other their numbers of tokens in each lookup in a table with so many
    bytes to gather and to reduce, so that activations can move instead."""
    return weight_nbytes >= _LARGE_TABLE


def is_exchange_worth(num_ranks: int, num_tokens: int, token_nbytes: int, weight_nbytes: int) -> bool:
    """Whether an exchange of activations moves fewer bytes than a gather of the weight and the
    reduction of its gradient, ``weight_nbytes`` together."""
    return num_ranks * num_tokens * token_nbytes < weight_nbytes


def lookup_nbytes(dim: int, itemsize: int, *, has_gradient: bool = True) -> int:
    """What an exchange moves for one token and rank: its id, the row, and the gradient of the row."""
    return (1 + has_gradient) * dim * itemsize + torch.int64.itemsize


def _together(facts: Facts, ahead: int, *, by_copies: bool, is_least: bool) -> tuple[int, str]:
    """Bytes of one launch of gathers, and why."""
    # A launch costs the host more with copy engines, so a block takes one of those, or two of NCCL.
    share = facts.block_nbytes
    what = "the largest block"
    if not by_copies:
        share //= 2
        what = "half of the largest block"
    together = min(max(share, _LEAST_AHEAD), ahead)
    of_groups = min(facts.group_nbytes // _GROUPS_OF_MODEL, _GROUPS_TOGETHER)
    if facts.has_small_weights and not is_least and together < of_groups:
        return of_groups, "several small blocks take the host one launch"
    return together, what + _bound(together, share)


def _kept(policy: SchedulePolicy, facts: Facts) -> tuple[int, str]:
    """Bytes that stay gathered until backward, and why."""
    if policy.keep_nbytes is not None:
        return policy.keep_nbytes, "SchedulePolicy(keep_nbytes=)"
    if policy.memory == "most_speed":
        free = format_nbytes(facts.free_nbytes)
        return facts.free_nbytes // _KEPT_OF_FREE, f"an eighth of the {free} that all ranks have free"
    return 0, f"memory='{policy.memory}'"


def _what_is_kept(kept: int, keep_last: bool) -> str:
    what = []
    if keep_last:
        what.append("the last weight of the forward")
    if kept:
        what.append(format_nbytes(kept))
    return " and ".join(what) or "nothing"


def _bound(chosen: int, wanted: int) -> str:
    """The end of a reason where a limit and not the model has decided."""
    if chosen == wanted:
        return ""
    limit = "maximum"
    if chosen > wanted:
        limit = "minimum"
    return f"; {format_nbytes(chosen)} is the {limit}"


def _word(name: str | type) -> str:
    if not isinstance(name, str):
        return name.__name__
    words = {"process_group": "the process group", "copy_engine": "copy engines", "ring": "the process group"}
    return words.get(name, name)


def block_nbytes(roots: Iterable[nn.Module], weights: Iterable[ShardedWeight]) -> int:
    """Bytes of the gathered weights of the largest block below ``roots``; of all weights if there are no blocks.

    Blocks are modules of one class that stand in one container (``nn.ModuleList``,
    ``nn.Sequential``) at least twice. What has several groups inside (a stage of blocks) is none.
    """
    by_module: dict[nn.Module, int] = {}
    groups: dict[nn.Module, set[object]] = {}
    for weight in weights:
        owner = weight.registration.sites[0].module
        groups.setdefault(owner, set()).add(weight.group)
        nbytes = weight.for_forward.nbytes
        if weight.group is not None:
            nbytes = weight.for_forward.kept_nbytes  # groups send the compute dtype, whatever the recipe
        by_module[owner] = by_module.get(owner, 0) + nbytes
    total = sum(by_module.values())
    sizes = [0]
    for block in (block for root in roots for container in root.modules() for block in blocks_in(container)):
        modules = list(block.modules())
        inside = set().union(*(groups.get(module, ()) for module in modules)) - {None}
        if len(inside) <= 1:
            sizes.append(sum(by_module.get(module, 0) for module in modules))
    return max(sizes) or total


def no_copy_engines(device: torch.device, groups: list[dist.ProcessGroup], has_unequal_replicas: bool) -> str | None:
    """Why GPUs cannot copy from each other, as far as that is known without a try."""
    if device.type != "cuda":
        return f"a mesh of '{device.type}' has no copy engines"
    if has_unequal_replicas:
        return "replicas of unequal sizes: streams would wait forever for copy engines of a lost rank"
    if any(dist.get_backend(group) == "fake" for group in groups):
        return _FAKE
    return None
