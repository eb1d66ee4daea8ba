"""The runtime of one root module: begins and ends its forwards and backwards."""

from __future__ import annotations

import logging
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn

from .. import _torch_compat as compat
from .._comm.debug import DebugFlags
from .._params.managed_param import ManagedParam
from .._params.saved_for_backward import SavedWeights
from .._params.sharded_weight import ShardedWeight
from .._params.weight_group import WeightGroup
from .._params.whole_param import WholeParam
from ..policy import SchedulePolicy
from .any_use import gather_for_any_use
from .attribute_reads import AttributeReads, Frame
from .block_uses import finish_backward, release_all
from .first_forward import agree_on_order
from .gathering import Gathering
from .lost_writes import LostWrites, count_writes, refuse_hooks_at_nodes
from .one_thread import OneThread
from .optimizer_steps import optimizer_steps
from .order_of_uses import Chain, Entry

logger = logging.getLogger(__name__)

_NUM_BEGINS = 9  # of steps, of whose intervals reports give the median


class Runtime(Gathering):
    """Runtime of a root module and everything below it."""

    def __init__(self, device: torch.device, policy: SchedulePolicy, debug: DebugFlags) -> None:
        super().__init__(device, policy, debug)
        self.is_last_backward = True
        self.num_steps = 0  # optimizer steps on parameters of this runtime
        self.reads = AttributeReads(self)
        self.lost_writes = LostWrites(self, self.reads)
        # Autograd alone holds the callback: if it is gone, that backward has failed.
        self._end_of_backward: weakref.ref[partial[None]] | None = None
        # Parameters by the ids of their objects, for optimizer steps; ``note_step`` rebuilds it if it is empty.
        self._by_id: dict[int, ManagedParam] = {}
        self._is_cut_again = False
        self._records_graph = False  # whether the running backward has ``create_graph=True``
        self._has_unsynced = False  # whether the last complete backward has left gradients for the next one to add to
        self._unhandled_then = 0  # id of the exception that ended the last cell or line of an interactive session
        self._is_offloaded = False  # whether shards are on the host
        # When forwards after an optimizer step began, in seconds on the host's clock: for reports.
        self.step_begins: deque[float] = deque(maxlen=_NUM_BEGINS)
        self._num_begun = -1
        self._num_forwards = 0
        self.asked_for: set[int] | None = None  # ids of the tensors to which the running backward is confined
        self.num_trained = 0  # backwards that gave gradients, and optimizer steps
        self._thread = OneThread()
        optimizer_steps().watchers.add(self)

    def _known(self) -> dict[int, ManagedParam]:
        """Parameters by the ids of their objects."""
        if not self._by_id:
            self._by_id = {id(param.param): param for param in self.params}
            # Of these parameters, optimizers hold the objects that an outer fully_shard has made.
            self._is_cut_again = any(param.registration.is_cut_again for param in self.params)
        return self._by_id

    def member_of(self, param: object) -> ManagedParam | None:
        """The managed parameter with this object; None if it is another one that has got its id."""
        member = self._known().get(id(param))
        return member if member is not None and member.param is param else None

    def _members(self, ids: set[int]) -> list[ManagedParam]:
        """The managed parameters among objects with these ids."""
        return [self._by_id[key] for key in ids & self._known().keys()]

    @property
    def holds_weights(self) -> bool:
        """Whether a forward runs, or what was gathered stays for later ones. Steps of optimizers ask, for each op."""
        is_kept = any(target.kept is not None for target in self.gatherables)
        return bool(self.reads.frames) or is_kept

    def note_handed_out(self, param: object) -> None:
        """Somebody has got hold of a parameter in a way in which writes to it leave no version."""
        if (member := self.member_of(param)) is not None:
            self.lost_writes.note_handed_out(member)

    def note_untraced_write(self, param: object) -> None:
        """As ``note_handed_out``, where it is likely that all ranks do so."""
        self.note_handed_out(param)
        self.parts.num_writes += self.member_of(param) is not None

    def note_written(self, params: Iterable[object]) -> None:
        """Somebody writes to these, if they are ours, and leaves no version."""
        count_writes(self._members(set(map(id, params))))

    def refuse_new_data(self, param: object) -> None:
        """``param.data = ...`` in a forward."""
        if self.reads.frames and (member := self.member_of(param)) is not None:
            self.lost_writes.refuse_new_data(member)

    def note_new_data(self, param: object) -> None:
        """After ``param.data = ...``."""
        if (member := self.member_of(param)) is not None:
            self.lost_writes.note_new_data(member)

    def hold_until_end(self, group: WeightGroup) -> None:
        super().hold_until_end(group)
        self.lost_writes.note_read(group)

    def note_step(self, updated: set[int]) -> None:
        """An optimizer has written to the parameters with these ids. There may be very many optimizers."""
        written = self._members(updated)
        self.num_steps += bool(written) or self._is_cut_again
        self.parts.num_writes += bool(written)
        self.num_trained += 1
        errors = self.lost_writes.written_outside(param for param in written if isinstance(param, ShardedWeight))
        count_writes(written)
        for group in {param.group for param in written if param.group is not None}:
            self.forget_kept(group.for_forward)
        for param in written:
            if isinstance(param, ShardedWeight) and param.group is None:
                self.drop_kept(param)
        if errors:
            raise errors[0]

    def close(self) -> None:
        """Another runtime has taken over all calls of this one."""
        optimizer_steps().watchers.discard(self)

    def forget_objects(self) -> None:
        """Some parameter objects were replaced, or an outer ``fully_shard`` now manages them."""
        self._by_id = {}

    def add(self, params: Sequence[ManagedParam]) -> None:
        """Take over the parameters of one ``gtp_shard`` call. The outermost call must come last."""
        self.forget_objects()
        self._num_calls += 1
        for param in params:
            param.registration.on_replaced = self.forget_objects
            self._is_offloaded |= param.policies.offload is not None
            if isinstance(param, WholeParam):
                param.on_local_grad = self.note_backward
                self.whole.append(param)
            elif isinstance(param, ShardedWeight):
                self.weights.append(param)
                self.parts.weights += [param] if param.has_parts else []
                for target in param.gatherables:
                    target.index, target.call = len(self.gatherables), self._num_calls
                    self.gatherables.append(target)

    @property
    def is_materializing(self) -> bool:
        """Whether module attributes are full weights now, as in a forward or backward."""
        return bool(self.reads.frames) or compat.current_graph_task_id() != -1

    def depth_of_call(self) -> int:
        """How many frames run. Call it before ``enter``, and ``leave`` with the result after ``exit``, whatever happens
        in between: a KeyboardInterrupt may be raised between any two lines."""
        self._thread.enter()
        return len(self.reads.frames)

    def enter(self, module: nn.Module, needs_hooks: Callable[[int], bool], method: str = "forward") -> Frame:
        """Begin a forward. ``needs_hooks`` of the number of optimizer steps: whether saved weights become handles."""
        if not self.is_materializing:
            self._begin_forward(Entry(module, method))
        needs_handles = torch.is_grad_enabled() and needs_hooks(self.num_steps) and compat.saved_tensors_hooks_enabled()
        frame = self.reads.push(needs_handles)
        if len(self.reads.frames) == 1:
            for group in self.groups:
                group.views.show()
        return frame

    def exit(self, frame: Frame, is_complete: bool) -> None:
        """End a forward; ``is_complete`` is False if it raised."""
        misuse = self.reads.misuse_in(frame) if is_complete and frame.seen else None
        if is_complete and len(self.reads.frames) == 1:
            misuse = misuse or self.lost_writes.found()
        self.reads.end(frame)
        if len(self.reads.frames) == 1:
            for group in self.groups:
                group.views.hide()
            if not torch.is_grad_enabled():
                self._release_read_outside()
            if self._forward_chain is not None:
                self._end_forward(self._forward_chain, is_complete)
        self.reads.frames.pop()  # last: ``leave`` takes a frame that is left for one that has not ended
        if misuse is not None:
            raise misuse

    def _end_forward(self, chain: Chain, is_complete: bool) -> None:
        if not is_complete:
            self._drop_broken_forward()
            return
        self._drop_prefetched()
        self.comm.finish_uploads()
        self.parts.finish()
        uses = chain.observed
        chain.end()
        if not (chain.is_compared or self.comm.is_capturing):
            self._compare_order(chain, uses)
        self._forward_chain = None

    def leave(self, depth: int) -> None:
        """After ``exit``. If that has not run to its end, or ``enter`` has not, end the frames behind ``depth``."""
        while len(self.reads.frames) > depth:
            self.reads.end(self.reads.frames[-1])
            self.reads.frames.pop()
            self._hide_groups()
        if depth == 0:
            if self._forward_chain is not None:
                self._drop_broken_forward()
            self._thread.leave()

    def _drop_broken_forward(self) -> None:
        """After a forward that did not complete: nothing uses a weight any more. Gradients of earlier microbatches
        stay, unless the user has interrupted the step, and will hardly go on with it."""
        self._drop_gathers()
        self.comm.finish_uploads()
        for group in self.groups:
            group.views.hide()
        error = sys.exc_info()[1]
        if self._has_unsynced and error is not None and not isinstance(error, Exception):
            logger.warning("a forward was interrupted; unsynced gradients are dropped (rank %d)", dist.get_rank())
            self._forget_gradients()
        if self._forward_chain is not None:
            self._forward_chain.begin()
        self._forward_chain = None

    def _drop_gathers(self, *, is_in_forward: bool = False) -> None:
        """Nobody uses a weight any more, though uses may not have ended: free all but what the user asks to keep. With
        ``is_in_forward``, a forward runs around the broken backward, and has weights in use."""
        self._release_read_outside()
        release_all(self, self.groups)
        self._drop_prefetched()
        for target in self.gatherables if not is_in_forward else ():
            live, target.live = target.live, None
            if live is not None:
                live.holds = 0
                self.forget_kept(target)
                target.kept = live
            if target.kept is not None and not target.weight.is_fresh(target.kept):
                self.forget_kept(target)
        self._end_keeps()

    def _compare_order(self, chain: Chain, uses: Sequence[int]) -> None:
        """After a first forward, raise on all ranks if they have used other weights, or in another order."""
        chain.is_compared = True
        entry = next((key.entry for key, known in self.chains.items() if known is chain), None)
        what = "a forward" if entry is None else f"the first {entry.method} of a {type(entry.module).__name__}"
        agree_on_order([self.gatherables[use].weight for use in uses], self.weights, what)

    def _begin_forward(self, entry: Entry) -> None:
        self._thread.begin_forward(self._is_backward_running)
        self.drop_broken_backward()
        self._drop_what_was_given_up()
        self.ensure_initialized()
        self._release_read_outside()  # of a forward without a backward
        release_all(self, self.groups)
        self.comm.begin_pass()
        self._end_keeps()
        self.lost_writes.begin_forward()
        self._num_forwards += 1
        # In the forwards of number 1, 2, 4, 8 and so on, which costs nothing in the long run.
        is_power = self._num_forwards & (self._num_forwards - 1) == 0
        self.reads.is_differentiated = torch.is_grad_enabled()
        self.reads.looks_at_bits = is_power and self.comm.may_wait_on_host
        is_captured = self.comm.is_capturing
        for param in self.params:
            if param.group is None:
                param.begin_forward(is_captured)
        for group in self.groups:
            group.begin_forward()
        if self._is_offloaded:
            self.comm.note_uploads()
        if self.reads.looks_at_bits and torch.is_grad_enabled() and not compat.in_func_transform():
            refuse_hooks_at_nodes(self.weights)
        self.parts.begin(self.schedule.coalesce_nbytes)
        self._begin_quantized(self.weights)
        gather_for_any_use(self)
        if torch.is_grad_enabled() and self._num_begun != self.num_steps:
            self._num_begun = self.num_steps
            self.step_begins.append(time.perf_counter())
        chain = self._chain(entry, is_backward=False, is_grad_enabled=torch.is_grad_enabled())
        self._forward_chain = chain
        self._choose_kept(entry)
        if chain.may_guess and entry.method == "forward":
            chain.guess(self.guesses.forward(entry.module))
        self._begin(chain)

    def note_backward(self, entry: Entry | None = None) -> None:
        """Begin a backward, unless it has begun: e.g. the output of an ``entry`` gets its gradient."""
        if self.recording is not None:
            return  # the backward of a block that is recorded is not one of this runtime
        is_running = self._is_backward_running
        if self.device.type == "cpu":  # elsewhere autograd has threads of its own
            self._thread.begin_backward(is_running)
        if is_running:
            return
        self.drop_broken_backward()  # if the last one raised, and no forward came in between
        self._is_in_backward = True
        for each in self.whole:
            if each.group is None:
                each.follow_writes()
        asked = self.asked_for
        free = (weight for weight in self.weights if weight.flags.reduce_scatter_unused_params)
        for param in (*self.whole, *free):
            leaf = param.leaf if param.group is None else param.group.leaves.by_member[param]
            if param.param.requires_grad and (asked is None or id(leaf) in asked):
                param.gradient.awaits_reduction = True
        for group in self.groups:
            group.pending_grad.asked_for = asked
        self._records_graph = torch.is_grad_enabled()
        self.comm.begin_pass()
        self.lost_writes.gather_outdated()
        end = partial(self._finish_backward)
        try:
            self._end_of_backward = weakref.ref(end)
            compat.queue_backward_callback(end)
        finally:
            del end  # a traceback would keep it
        self._backward_chain = self._chain(entry, is_backward=True)
        self._forward_of_backward = None if entry is None else self._chain(entry, is_backward=False)
        gather_for_any_use(self)
        self._begin(self._backward_chain)
        self._hide_groups()

    def add_groups(self, groups: Sequence[WeightGroup]) -> None:
        """Gather and reduce the members of ``groups`` together from now on. No gather may be in memory or in flight."""
        self.groups = list(groups)
        for group in groups:
            group.reader = self
        self._plan_anew(
            [
                *(target for target in self.gatherables if target.weight.group is None),
                *(group.for_forward for group in groups),
            ]
        )

    def gather_kept(self, weight: ShardedWeight) -> None:
        """Gather a weight, or its group, ahead of any use, for ``unshard``."""
        self.ensure_initialized()
        self.parts.begin(self.schedule.coalesce_nbytes)
        self.parts.finish()
        group = weight.group
        if group is None:
            super().gather_kept(weight)
            return
        if not (group.is_pinned or self.reads.frames):
            group.begin_forward()  # follows parameters that were replaced
        group.views.pin(self.note_backward)
        target = group.for_forward
        if target.live is None and (target.kept is None or not group.is_fresh(target.kept)):
            self.forget_kept(target)
            self.comm.begin_pass(group.groups)
            target.kept = self._take(target) or self._gather_now(target)

    @property
    def gives_full_params(self) -> bool:
        """Whether ``parameters()`` of a module yields gathered weights now."""
        return self.reads.gives_full_params

    def full_params(self, members: Iterator[tuple[str, Any]]) -> Iterator[tuple[str, Any]]:
        """``members`` of ``named_parameters()``, with full weights instead of shards."""
        return self.reads.full_params(members, self._known())

    def watch_saved(self, saved: SavedWeights) -> None:
        """Release the gathered weights that ``saved`` holds at the end of this backward at the latest."""
        self.reads.saved_in_backward.append(saved)

    @property
    def _is_backward_running(self) -> bool:
        return self._is_in_backward and self._end_of_backward is not None and self._end_of_backward() is not None

    def _hide_groups(self) -> None:
        """Let modules have what they have outside of forwards, unless one runs."""
        if not self.reads.frames:
            for group in self.groups:
                group.views.hide()

    def _finish_backward(self) -> None:
        """End a backward, on the caller's stream. When this returns, all gradients are in ``.grad``."""
        with self._forgetting_on_failure():
            misuse = self.reads.misuse_in(self.reads.in_backward)
            self.reads.release_read_in_backward()
            finish_backward(self, self.groups)
            misuse = misuse or self.lost_writes.found("in a backward")
            self._release_read_outside()
            self._drop_prefetched()
            self._end_keeps()
            self.comm.finish_uploads()
            self._backward_chain.end()
            self._is_in_backward = False
            self._hide_groups()
            self.complete_gradients()
            if self._records_graph:
                for param in self.params:
                    param.mark_undifferentiable()
            if misuse is not None:
                raise misuse

    def complete_gradients(self) -> None:
        """Reduce all remaining gradients. After the last backward, all are in ``.grad`` when this returns."""
        with self._forgetting_on_failure():
            self.grads.launch_waiting()
            if self.is_last_backward:
                self.num_trained += 1
                self.grads.complete(self.params, self.groups)
        flags = (param.flags for param in self.params)
        self._has_unsynced = not self.is_last_backward or not all(
            each.requires_gradient_sync and each.requires_all_reduce for each in flags
        )
        self._unhandled_then = id(getattr(sys, "last_value", None))

    def publish(self, params: Sequence[ManagedParam]) -> None:
        """In the last backward, complete the gradients of ``params`` now, e.g. for an outer ``fully_shard``."""
        if self.is_last_backward:
            with self._forgetting_on_failure():
                self.grads.complete(params)

    @contextmanager
    def _forgetting_on_failure(self) -> Iterator[None]:
        """If this context raises, a later backward does not add to gradients of this one."""
        try:
            yield
        except BaseException:  # also of a user's hook
            self._forget_gradients()
            raise

    def _forget_gradients(self) -> None:
        """After an exception: wait for launched reductions, and drop all gradients that are not in ``.grad`` yet."""
        self.grads.abandon()
        self._has_unsynced = False
        for param in self.params:
            param.reset_grads()
        for group in self.groups:
            group.pending_grad.forget()

    def _drop_what_was_given_up(self) -> None:
        """In a notebook, an interrupt between two microbatches ends the loop, and the process goes on: the next forward
        is one of a new step. A program that handles the interrupt calls ``reset_iter_state``."""
        unhandled = getattr(sys, "last_value", None)
        if self._has_unsynced and isinstance(unhandled, KeyboardInterrupt) and id(unhandled) != self._unhandled_then:
            text = "a step was interrupted between microbatches; unsynced gradients are dropped (rank %d)"
            logger.warning(text, dist.get_rank())
            self._forget_gradients()

    @property
    def has_gradients_in_flight(self) -> bool:
        """Whether earlier backwards, none of them the last one, have left gradients for the next one to add to."""
        of_whole = (grad for param in self.whole for grad in (param.leaf.grad, param._wide_local_grad))
        reduced = (param.gradient.reduced for param in self.params)
        return self.comm.is_reducing or any(grad is not None for grad in (*reduced, *of_whole))

    def drop_broken_backward(self) -> None:
        """If the last backward raised before its end, drop its prefetched weights and its gradients."""
        if not self._is_in_backward:
            return
        others = ", with those of earlier microbatches that were not synced" if self._has_unsynced else ""
        text = "the last backward did not complete; its gradients are dropped%s (rank %d)"
        logger.warning(text, others, dist.get_rank())
        self._forget_gradients()
        self.reads.release_read_in_backward()
        self._drop_gathers(is_in_forward=bool(self.reads.frames))
        self._backward_chain.begin()
        self._is_in_backward = False  # late, so that nothing is left if this is interrupted
        self._hide_groups()

    def abandon(self) -> None:
        """After an exception: drop a backward that did not complete, and gradients in flight."""
        self.drop_broken_backward()
        self._forget_gradients()

    def forget_recording(self) -> None:
        """After a failed recording into a CUDA graph: nobody can wait for its collectives, because they never ran."""
        self.comm.forget_recording()
        for target in self.gatherables:
            target.pending.clear()
            target.live = target.kept = None
        for group in self.groups:
            group.in_backward.held = None
            group.free()
            group.shards.num_updates += 1
        for weight in self.weights:
            weight.versions.num_updates += 1  # so that nothing reuses a gather of the recording
            self.drop_kept(weight)
        self._is_in_backward = False
        self._hide_groups()
        self.reads.release_read_in_backward()
        self._backward_chain.begin()
        self.abandon()
