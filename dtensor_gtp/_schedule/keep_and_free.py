"""The weights and passes of one runtime: which gathered weights stay in memory, and when their buffers are freed."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

import torch
import torch.nn as nn

from .. import _torch_compat as compat
from .._comm.addends import is_worth_loading, load_ahead
from .._comm.collectives import Groups
from .._comm.context import CommContext
from .._comm.debug import DebugFlags, poison
from .._comm.send_ring import SendRing
from .._params.gathered import Gathered
from .._params.managed_param import ManagedParam
from .._params.sharded_weight import Gatherable, ShardedWeight
from .._params.ties import warn_of_holders
from .._params.weight_group import GatherableGroup, Reducible, WeightGroup
from .._params.whole_param import WholeParam
from .._progress import Progress
from ..policy import Schedule, SchedulePolicy
from .any_use import may_be_left_out
from .choose_schedule import Facts, adds_addends, block_nbytes, choose, no_copy_engines
from .first_forward import agree_to_begin
from .guesses import Guesses
from .order_of_gathers import Plan, Traits, Window, choose_kept, turning_point
from .order_of_uses import Chain, ChainKey, Entry
from .reduce_gradients import BlockRecording, Gradients

logger = logging.getLogger(__name__)


class Call(Protocol):
    """One ``gtp_shard`` call."""

    module: nn.Module
    params: list[ManagedParam]
    runtime: Any  # a ``Runtime``
    arguments: Any  # a ``bad_arguments.Arguments``


class KeepAndFree:
    """Knows the order of uses in each kind of pass. Keeps gathered weights as the policy and the user ask, and frees
    all others after their last use."""

    is_initialized = False
    guesses: Guesses  # since the first forward

    def __init__(self, device: torch.device, policy: SchedulePolicy, debug: DebugFlags) -> None:
        self.device, self.device_type = device, device.type
        self.policy = policy
        self.comm = CommContext(device, debug)
        self.grads = Gradients(self.comm)
        self.calls: list[Call] = []  # the calls that it serves
        self.reasons: tuple[str, ...] = ()  # for what was chosen
        self.debug = debug
        self.weights: list[ShardedWeight] = []
        self.whole: list[WholeParam] = []
        self.gatherables: list[Gatherable] = []  # of single weights, and groups; plans name them by index
        self.groups: list[WeightGroup] = []
        # Called once, in the first forward, with the most tokens of any rank.
        self.make_groups: Callable[[int], tuple[str, ...]] | None = None
        self.num_tokens = 0  # of the first forward, see ``frames``
        self.chains: dict[ChainKey, Chain] = {}
        self.recording: BlockRecording | None = None  # set while a block is recorded
        self._num_calls = 0  # of ``gtp_shard``
        self._is_in_backward = False
        self._forward_chain: Chain | None = None
        self._forward_of_backward: Chain | None = None  # of the running or last backward
        # In the running forward: weights that ``keep_nbytes`` keeps; weights that ``keep_last`` keeps if used last.
        self._kept_until_backward: frozenset[int] = frozenset()
        self._kept_if_last: frozenset[int] = frozenset()
        self.use_schedule(Schedule())  # until one is chosen

    @property
    def is_in_backward(self) -> bool:
        """Whether a backward has begun and not ended."""
        return self._is_in_backward

    def use_schedule(self, schedule: Schedule) -> None:
        self.schedule = self.grads.schedule = schedule
        self._window = Window(
            schedule.prefetch_depth, schedule.prefetch_nbytes, schedule.coalesce_nbytes, schedule.expert_blocks_ahead
        )
        self._backward_chain = Chain(self._window, self._traits)  # until the first backward

    @property
    def params(self) -> list[ManagedParam]:
        return [*self.weights, *self.whole]

    @property
    def single_weights(self) -> list[ShardedWeight]:
        """The weights that no group gathers."""
        return [weight for weight in self.weights if weight.group is None]

    def ensure_initialized(self) -> None:
        """In the first forward, on all ranks alike: check that they can run, choose a schedule, make communicators."""
        if self.is_initialized:
            return
        with Progress(logger, "first forward: ranks agree, communicators are made", len(self.params)) as progress:
            self._initialize(progress)
        logger.info("chosen: %s", "; ".join((*self.comm.choices, *self.reasons)))

    def _initialize(self, progress: Progress) -> None:
        gathering = [mesh.get_group(mesh.ndim - 1) for mesh in {param.mesh for param in self.params}]
        no_copies = no_copy_engines(self.device, gathering, self.grads.launches.replicas is not None)
        if any(param.policies.offload is not None for param in self.params):
            no_copies = "offload_policy keeps shards on the host"
            if self.policy.gather_backend == "copy_engine":
                raise ValueError(
                    "gtp_shard does not support SchedulePolicy(gather_backend='copy_engine') with offload_policy: "
                    "copy engines send only from the device. Leave gather_backend at its default."
                )
        with compat.unseen_by_checkpoint_policies():
            free_nbytes, num_tokens = agree_to_begin(self.params, self.device, self.num_tokens)
        warn_of_holders(self.params)
        why_groups: tuple[str, ...] = ()
        if self.make_groups is not None:
            why_groups = self.make_groups(num_tokens)
        facts = Facts(
            no_copies,
            block_nbytes((call.module for call in self.calls), self.weights),
            free_nbytes,
            group_nbytes=sum(group.leaves.nbytes for group in self.groups),
            single_nbytes=sum(weight.gatherables[0].nbytes for weight in self.single_weights),
        )
        if torch.is_grad_enabled():
            self._load_sums(facts)
        schedule, reasons = choose(self.policy, facts)
        self.reasons = (*why_groups, *reasons)
        self.use_schedule(schedule)
        groups: dict[int, Groups] = {}  # by mesh; to ask a mesh for its groups takes long
        for param in progress.over(self.params):
            if id(param.mesh) not in groups:
                groups[id(param.mesh)] = self.comm.groups(param.mesh, schedule)
            param.groups = groups[id(param.mesh)]
        self._prepare_gatherables()
        self.is_initialized = True

    def _load_sums(self, facts: Facts) -> None:
        """Begin to load what will add gradients, if ranks exchange them."""
        if adds_addends(self.policy, facts):
            kinds = {(weight.reduce_dtype, weight.layout.world) for weight in self.weights}
        else:  # groups send theirs as they are
            large = [group for group in self.groups if is_worth_loading(group.leaves.nbytes)]
            kinds = {(group.leaves.dtype, group.layout.world) for group in large}
        for dtype, num_ranks in kinds:
            load_ahead(self.device, dtype, num_ranks)

    def _prepare_gatherables(self) -> None:
        """Give the weights and groups their rings and lanes, and guess the first passes."""
        self._set_rings()
        lanes: dict[Groups, int] = {}
        for target in reversed(self.gatherables):  # the weights of the outermost call come last: they get lane 0
            target.lane = lanes.setdefault(target.weight.groups, len(lanes))
        numbers: Counter[Groups] = Counter()
        for target in self.gatherables:
            target.number = numbers[target.weight.groups]
            numbers[target.weight.groups] += 1
        roots = (call.module for call in reversed(self.calls))
        self.guesses = Guesses(roots, self.gatherables, self.schedule.prefetch_nbytes)

    def _set_rings(self) -> None:
        sizes: dict[SendRing, list[int]] = {}
        reduced: list[Reducible] = [*self.single_weights, *self.groups]
        for weight in reduced:
            if weight.groups.reduce_scatter == "copy_engine" and weight.layout.world > 1:
                weight.pending_grad.ring = self.comm.send_ring(weight.groups)
                sizes.setdefault(weight.pending_grad.ring, []).append(
                    weight.pending_grad.sent_nbytes * weight.has_gradient
                )
        for ring, expected in sizes.items():
            ring.expect(expected)

    def chosen_policy(self) -> SchedulePolicy | None:
        """What was asked for and chosen, as a policy that leaves nothing open; None before the first forward."""
        if not self.is_initialized:
            return None
        schedule = replace(self.schedule, **self.comm.chosen_backends())
        numbers = vars(schedule)
        fixed = {name: numbers[name] for name in ("gather_backend", "reduce_scatter", "prefetch_nbytes", "keep_nbytes")}
        return replace(self.policy, **fixed, _numbers=tuple(numbers.items()))

    def _traits(self) -> list[Traits]:
        """Of each gatherable, for plans: the same on all ranks of its mesh."""
        return [
            Traits(t.nbytes, t.lane, t.call, t.companions[0].index if t.companions else -1) for t in self.gatherables
        ]

    def _chain(self, entry: Entry | None, *, is_backward: bool, is_grad_enabled: bool = True) -> Chain:
        key = ChainKey(entry, is_grad_enabled, is_backward)
        if key not in self.chains:
            self.chains[key] = Chain(self._window, self._traits)
        return self.chains[key]

    def _turning_point(self, entry: Entry | None) -> tuple[Plan, Plan, tuple[int, ...]]:
        """The plans of a forward of ``entry`` and of its backward, and the weights that are last in the forward and
        first in the backward, on all ranks of their mesh. Only ``keep_last`` decides whether those are kept."""
        forward, backward = (self._chain(entry, is_backward=is_backward).plan for is_backward in (False, True))
        return forward, backward, turning_point(forward, backward)

    def kept_until_backward(self, entry: Entry | None) -> tuple[int, ...]:
        """The weights that ``keep_nbytes`` keeps from a forward of ``entry`` to its backward."""
        if not self.schedule.keep_nbytes:
            return ()
        forward, backward, turning = self._turning_point(entry)
        sizes = [0] * len(self.gatherables)
        for target in self.gatherables:
            weight = target.weight
            if weight.flags.reshard_after_forward and weight.form.fixed is None and target.index not in turning:
                sizes[target.index] = target.kept_nbytes
        lanes = [target.lane for target in self.gatherables]
        return choose_kept(forward, backward, sizes, lanes, self.schedule.keep_nbytes)

    def kept_from_forward(self, entry: Entry | None) -> frozenset[int]:
        """All weights that are kept from a forward of ``entry`` to its backward, for reports."""
        _, _, turning = self._turning_point(entry)
        last = turning if self.schedule.keep_last else ()
        asked = (
            t.index
            for t in self.gatherables
            if t.weight.is_pinned or (not t.weight.flags.reshard_after_forward and t.weight.for_backward is t)
        )
        return frozenset((*self.kept_until_backward(entry), *last, *asked))

    def _stays(self, target: Gatherable) -> bool:
        """Whether the weight stays gathered after all of its uses in this pass."""
        weight = target.weight
        if weight.is_pinned or may_be_left_out(target):
            return True
        if weight.form.fixed is not None:
            return False  # see [Note: fixed buffers]
        if self._is_in_backward:
            return not weight.flags.reshard_after_backward
        is_asked_for = not weight.flags.reshard_after_forward and weight.for_backward is target
        return is_asked_for or target.index in self._kept_until_backward

    def _choose_kept(self, entry: Entry) -> None:
        """At the start of a forward, choose the weights that stay for its backward."""
        self._kept_until_backward = self._kept_if_last = frozenset()
        if not torch.is_grad_enabled():
            return
        self._kept_until_backward = frozenset(self.kept_until_backward(entry))
        if self.schedule.keep_last:
            backward = self._chain(entry, is_backward=True).plan
            first = [use for lane in backward.lanes if (use := backward.first(lane)) is not None]
            companions = [other.index for use in first for other in self.gatherables[use].companions]
            self._kept_if_last = frozenset((*first, *companions))

    def _is_turning_point(self, target: Gatherable) -> bool:
        """Whether a weight that ``_kept_if_last`` names is the last one of a forward. It is the first of the backward,
        so nothing would hide a gather in between."""
        chain = self._forward_chain
        if self._is_in_backward or target.weight.form.fixed is not None:
            return False
        return chain is not None and chain.is_at_end(target.lane)

    def _take(self, target: Gatherable) -> Gathered | None:
        """The present weight, if it is kept or its gather was launched ahead. Discards older ones."""
        pending = target.pending
        if target.kept is not None:
            pending.appendleft(target.kept)
            target.kept = None
        while pending:
            gathered = pending.popleft()
            if target.weight.is_fresh(gathered):
                return gathered
            self._discard(target, gathered)
        return None

    def _end_keeps(self) -> None:
        """Drop kept weights at the end of a backward, unless the user asks to keep them. Between passes, writes to
        shards may leave no trace (``.data``, foreach functions, ``dcp.load``)."""
        for target in self.gatherables:
            if target.kept is not None:
                weight = target.weight
                if weight.registration.is_cut_again or not (
                    weight.is_pinned or not weight.flags.reshard_after_backward
                ):
                    self.forget_kept(target)

    def wait_kept(self, weight: ShardedWeight) -> None:
        kept = (weight.group or weight).for_forward.kept
        if kept is not None:
            self.comm.wait(kept.done)
            self.comm.finish_uploads()

    def drop_kept(self, weight: ShardedWeight) -> None:
        """Drop everything that was made of a shard."""
        for target in (weight.group or weight).gatherables:
            self.forget_kept(target)
        weight.versions.edition += 1
        if weight.form.wire is not None:
            weight.form.wire.forget()

    def forget_kept(self, target: Gatherable) -> None:
        """Drop what stays in memory of a weight or a group without a use."""
        kept, target.kept = target.kept, None
        if kept is not None:
            self._discard(target, kept)

    def _discard(self, target: Gatherable, gathered: Gathered) -> None:
        """Free the buffer of a gather that is unused."""
        # While the gather runs, its memory must not be reused and nobody may write to the shard.
        self.comm.wait_to_drop(gathered.done, gathered.buffer)
        self._free(target, gathered)

    def _free(self, target: Gatherable, gathered: Gathered) -> None:
        """Drop a buffer that this runtime no longer needs. Poison it if nobody else holds it."""
        if isinstance(target, GatherableGroup):
            if self.debug.poison:  # whoever reads the memory before the next gather is complete finds it
                target.group.carry_writes()
                with compat.unseen_by_checkpoint_policies():
                    for output in target.group.leaves.outputs:
                        poison(output)
            target.group.free()
        elif self.debug.poison and not gathered.is_alias:
            gathered.forget()
            # We are two of the owners: the buffer, and the Python object of its storage.
            if compat.storage_use_count(gathered.buffer.untyped_storage()) <= 2:
                with compat.unseen_by_checkpoint_policies():
                    poison(gathered.buffer)

    def place(self, weight: ShardedWeight, gathered: Gathered) -> None:
        """Bring a weight in use to the fixed buffer, where the graph of a recorded block reads it."""
        assert weight.form.fixed is not None
        fixed = weight.form.fixed.gathered
        if not gathered.is_in(fixed):
            # A gather for a later use may have the fixed buffer, or one for eager code that did not pass the weight on
            # (see ``leave_fixed``). Move those to other buffers.
            for target in self.gatherables:
                for other in (*target.pending, *filter(None, (target.kept, target.live))):
                    if other is not gathered and other.is_in(fixed):
                        self.comm.wait(other.done)
                        other.move(target.weight.form.new_buffer(), target.weight.layout)
            fixed.copy_(gathered.buffer)

    def leave_fixed(self, weight: ShardedWeight, gathered: Gathered) -> None:
        """Copy the weight out of the fixed buffer before eager code keeps it: the next replay overwrites the buffer."""
        if weight.form.fixed is not None and self.recording is None and gathered.is_in(weight.form.fixed.gathered):
            gathered.move(weight.form.new_buffer(), weight.layout)
