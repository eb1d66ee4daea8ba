"""The runtime of one root module: who uses which weight, in which pass, and where its gradient goes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Protocol

import torch
import torch.distributed as dist
import torch.nn as nn

from .. import _torch_compat as compat
from .._comm.context import CommContext
from .._comm.debug import DebugFlags
from .._params.managed_param import ManagedParam
from .._params.saved_for_backward import SavedWeights
from .._params.sharded_weight import ShardedWeight
from .._params.whole_param import WholeParam
from ..policy import SchedulePolicy
from . import first_forward
from .attribute_reads import AttributeReads, Frame
from .gathering import Gathering
from .optimizer_steps import optimizer_steps
from .order_of_uses import Entry
from .reduce_gradients import Gradients

logger = logging.getLogger(__name__)


class Call(Protocol):
    """One ``gtp_shard`` call, and the runtime that serves it."""

    params: list[ManagedParam]
    runtime: Runtime


class _EndOfBackward:
    """Runs ``finish`` at the end of a backward. Autograd alone holds it: if it is gone, that backward has failed."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def __call__(self) -> None:
        self._finish()


class Runtime(Gathering):
    """Runtime of a root module and everything below it.

    Args:
        device: Device of the shards.
        schedule: Policy of the root.
        debug: Debugging aids.
    """

    def __init__(self, device: torch.device, schedule: SchedulePolicy, debug: DebugFlags) -> None:
        super().__init__(CommContext(device, schedule, debug), schedule, debug)
        self.device = device
        self.grads = Gradients(self.comm, schedule.reduce_scatter, schedule.coalesce_grad_nbytes, schedule.wgrad_first)
        self.calls: list[Call] = []  # that it serves
        self.weights: list[ShardedWeight] = []
        self.whole: list[WholeParam] = []
        self.is_last_backward = True
        self.num_steps = 0  # optimizer steps on parameters of this runtime
        self.reads = AttributeReads(self)
        self._end_of_backward: weakref.ref[_EndOfBackward] | None = None
        # For optimizer steps: parameters by the ids of their objects; empty: to be made.
        self._by_id: dict[int, ManagedParam] = {}
        self._is_cut_again = False
        optimizer_steps().tell(self)

    def note_step(self, updated: set[int]) -> None:
        """An optimizer has written to the parameters with these ids: perhaps one of very many optimizers."""
        if not self._by_id:
            self._by_id = {id(param.param): param for param in self.params}
            # An optimizer holds what an outer fully_shard has made of our parameters.
            self._is_cut_again = any(param.is_cut_again for param in self.params)
        written = [self._by_id[one] for one in updated & self._by_id.keys()]
        self.num_steps += bool(written) or self._is_cut_again
        for param in written:
            if isinstance(param, ShardedWeight):
                param.num_updates += 1
                self.drop_kept(param)
            elif isinstance(param, WholeParam):
                torch.autograd.graph.increment_version(param.leaf)

    def close(self) -> None:
        """Another runtime has taken over all that this one served."""
        optimizer_steps().forget(self)

    def forget_objects(self) -> None:
        """Other parameter objects have come in the place of some, or an outer ``fully_shard`` now manages them."""
        self._by_id = {}

    def add(self, params: Sequence[ManagedParam]) -> None:
        """Take over the parameters of one ``gtp_shard`` call, also of a nested one that had a runtime of its own; those
        of the outermost call come last."""
        weights = [param for param in params if isinstance(param, ShardedWeight)]
        self.weights += weights
        self._add_gatherables(weights)
        self.forget_objects()
        for param in params:
            param.on_replaced = self.forget_objects
            if isinstance(param, WholeParam):
                param.on_local_grad = self.note_backward
                self.whole.append(param)

    @property
    def params(self) -> list[ManagedParam]:
        return [*self.weights, *self.whole]

    @property
    def is_materializing(self) -> bool:
        """Whether a parameter read as a module attribute is the full weight: in a forward, and in backward."""
        return bool(self.reads.frames) or compat.current_graph_task_id() != -1

    def enter(self, module: nn.Module, needs_hooks: Callable[[int], bool], method: str = "forward") -> Frame:
        """A forward of ``module``, or another method of it that counts as one, begins; saved weights become handles if
        ``needs_hooks`` of the number of steps."""
        if not self.is_materializing:
            self._begin_forward(Entry(module, method))
        needs_handles = torch.is_grad_enabled() and needs_hooks(self.num_steps) and compat.saved_tensors_hooks_enabled()
        return self.reads.push(needs_handles)

    def exit(self, frame: Frame, is_complete: bool) -> None:
        """The forward has ended; ``is_complete`` is False if it raised."""
        self.reads.pop(frame)
        if not self.reads.frames and self._forward_chain is not None:
            self._drop_prefetched()
            if is_complete:
                self._forward_chain.end()
            else:
                self._forward_chain.begin()
                self._end_keeps()
            self._forward_chain = None

    def _begin_forward(self, entry: Entry) -> None:
        self.drop_broken_backward()
        self.ensure_initialized()
        self.comm.begin_pass()
        self._end_keeps()
        is_captured = self.comm.is_capturing
        for param in self.params:
            param.begin_forward(is_captured)
        self._begin_quantized(self.weights)
        chain = self._chain(entry, is_backward=False, is_grad_enabled=torch.is_grad_enabled())
        self._forward_chain = chain
        self._choose_kept(entry)
        self._begin_chain(chain)

    def ensure_initialized(self) -> None:
        """First forward: check that there is something to run on, and make the communicators, on all ranks alike."""
        if self.is_initialized:
            return
        with compat.unseen_by_checkpoint_policies():
            first_forward.agree_to_begin(self.params, self.device)
        for param in self.params:
            param.groups = self.comm.groups(param.mesh)
        self._number_lanes()
        self.is_initialized = True

    def note_backward(self, entry: Entry | None = None) -> None:
        """Called by whatever happens first in a backward, as the gradient of what an ``entry`` returned: its chain
        begins, and its end is awaited."""
        if self.recording is not None:
            return  # of a block, which is no backward of this runtime
        if self._is_in_backward:
            if self._end_of_backward is not None and self._end_of_backward() is not None:
                return
            # A backward that raised, and this is another one, without a forward in between.
            self._abandon_backward()
        self._is_in_backward = True
        self.comm.begin_pass()
        end = _EndOfBackward(self._finish_backward)
        self._end_of_backward = weakref.ref(end)
        compat.queue_backward_callback(end)
        self._backward_chain = self._chain(entry, is_backward=True)
        self._begin_chain(self._backward_chain)

    def watch_saved(self, saved: SavedWeights) -> None:
        """``saved`` holds gathered weights in this backward; they are released at its end at the latest."""
        self.reads.saved_in_backward.append(saved)

    def _finish_backward(self) -> None:
        """End of backward, on the caller's stream: all gradients are in ``.grad`` when this returns."""
        self.reads.release_read_in_backward()
        self._drop_prefetched()
        self._end_keeps()
        self._is_in_backward = False
        self._backward_chain.end()
        self.complete_gradients()

    def complete_gradients(self) -> None:
        """Reduce what is left to reduce; all gradients are in ``.grad`` when this returns, after the last backward."""
        self.grads.launch_waiting()
        if self.is_last_backward:
            with self._forgetting_on_error():
                self.grads.flush(self.weights)
                self.grads.reduce_whole(self.whole)
                self.grads.publish(self.params)

    def publish(self, params: Sequence[ManagedParam]) -> None:
        """Complete the gradients of ``params`` now, within backward: an outer ``fully_shard`` is about to read them."""
        if self.is_last_backward:
            with self._forgetting_on_error():
                self.grads.flush([param for param in params if isinstance(param, ShardedWeight)])
                self.grads.reduce_whole([param for param in params if isinstance(param, WholeParam)])
                self.grads.publish(params)

    @contextmanager
    def _forgetting_on_error(self) -> Iterator[None]:
        """If a user's hook raises, the gradients that were not yet handed out are not those of a later backward."""
        try:
            yield
        except BaseException:
            self._forget_gradients()
            raise

    def _forget_gradients(self) -> None:
        """After an exception: wait for what was launched, and drop all that no ``.grad`` has."""
        self.grads.abandon()
        for param in self.params:
            param.reset_grads()

    @property
    def has_gradients_in_flight(self) -> bool:
        """Whether backwards that were not the last one have left gradients that are to be added to those of the
        next."""
        of_whole = (grad for param in self.whole for grad in (param.leaf.grad, param._wide_local_grad))
        reduced = (param.reduced for param in self.params)
        return self.comm.is_reducing or any(grad is not None for grad in (*reduced, *of_whole))

    def drop_broken_backward(self) -> None:
        """Forget a backward that raised before its end, if that was the last one: its prefetches and gradients are
        void."""
        if self._is_in_backward:
            self._abandon_backward()

    def abandon(self) -> None:
        """After an exception: forget a backward that broke off, and gradients in flight."""
        self.drop_broken_backward()
        self._forget_gradients()

    def forget_recording(self) -> None:
        """After a recording into a CUDA graph that failed: what it has gathered and reduced was never computed, and
        cannot be waited for."""
        self.comm.forget_recording()
        for target in self.gatherables:
            target.pending.clear()
            target.live = target.kept = None
        for weight in self.weights:
            weight.num_updates += 1  # what others still hold of the recording is not fresh
            self.drop_kept(weight)
        self._is_in_backward = False
        self.reads.release_read_in_backward()
        self._backward_chain.begin()
        self.abandon()

    def _abandon_backward(self) -> None:
        sums = (grad for weight in self.weights for grad in (weight.unsharded_grad, weight.unreplicated_grad))
        has_earlier = self.has_gradients_in_flight or any(grad is not None for grad in sums)
        others = ", with those of earlier microbatches that were not synced" if has_earlier else ""
        text = "the last backward did not complete; its gradients are dropped%s (rank %d)"
        logger.warning(text, others, dist.get_rank())
        self._is_in_backward = False
        self._forget_gradients()
        self.reads.release_read_in_backward()
        self._backward_chain.begin()
        self._drop_prefetched()
        self._end_keeps()
