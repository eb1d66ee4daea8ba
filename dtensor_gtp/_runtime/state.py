"""The runtime of one root module: who uses which weight, when it is gathered, and where its gradient goes.

[Note: uses, frames and holds]
A *use* acquires a gathered weight and releases it; the last release frees the buffer. Fused ops hold a weight for one
GEMM. Any other code reads a parameter as a module attribute, and the attribute is then the full weight, held until the
*frame* ends in which it was read: the innermost running ``forward`` of a module that contains sharded weights. What
autograd saves of such a weight is replaced by a handle that gathers again in backward. A reference that escapes all of
this keeps its memory alive and its values right; it only costs memory.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn as nn

from .. import _torch_compat as compat
from ..policy import SchedulePolicy
from . import gather
from .comm_context import CommContext
from .debug import DebugFlags, poison
from .gathered import Gatherable, Gathered
from .gradients import Gradients
from .optimizer_steps import optimizer_steps
from .param import ManagedParam, ShardedWeight, WholeParam
from .saved import SavedWeights, check_differentiable
from .schedule import Chain
from .wire import QuantizedWire, agree_on_amax

logger = logging.getLogger("dtensor_gtp")


class ChainKey(NamedTuple):
    """Which order of uses: that of an outermost module's forward or backward; stages of a pipeline may share a runtime.
    The module is None in a backward that no module's output announced."""

    module: nn.Module | None
    is_grad_enabled: bool
    is_backward: bool = False


class Frame:
    """One running forward of a module, and the weights it holds."""

    def __init__(self) -> None:
        self.values: dict[tuple[ManagedParam, bool], torch.Tensor] = {}
        self.held: list[tuple[ShardedWeight, Gathered]] = []
        self.saved: SavedWeights | None = None
        self.reads_weights = False


class _EndOfBackward:
    """Runs ``finish`` at the end of a backward. Autograd alone holds it: if it is gone, that backward has failed."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def __call__(self) -> None:
        self._finish()


class Runtime:
    """Runtime of a root module and everything below it.

    Args:
        device: Device of the shards.
        schedule: Policy of the root.
        debug: Debugging aids.
    """

    def __init__(self, device: torch.device, schedule: SchedulePolicy, debug: DebugFlags) -> None:
        self.device = device
        self.schedule = schedule
        self.debug = debug
        self.comm = CommContext(device, schedule.max_inflight_reduce_scatters, debug)
        self.grads = Gradients(self.comm, schedule.reduce_scatter)
        self.weights: list[ShardedWeight] = []
        self.gatherables: list[Gatherable] = []  # of the weights; a plan names them by index
        self.whole: list[WholeParam] = []
        self.chains: dict[ChainKey, Chain] = {}
        self.is_last_backward = True
        self.num_steps = 0  # optimizer steps on parameters of this runtime
        self._frames: list[Frame] = []
        self._forward_chain: Chain | None = None
        self._forward_module: nn.Module | None = None
        self._differentiable_chain: Chain | None = None
        self._is_in_backward = False
        self._end_of_backward: weakref.ref[_EndOfBackward] | None = None
        self._backward_chain = Chain(schedule.prefetch_depth)  # until the first backward
        self._backward_frame = Frame()
        self._backward_saved: list[SavedWeights] = []
        self._is_initialized = False
        optimizer_steps().tell(self)

    def note_step(self, updated: set[int]) -> None:
        """An optimizer has written to the parameters with these ids."""
        # An optimizer holds what an outer fully_shard has made of our parameters.
        self.num_steps += any(id(param.param) in updated or param.is_cut_again for param in self.params)
        for weight in self.weights:
            if id(weight.param) in updated:
                weight.num_updates += 1
                self.drop_kept(weight)
        for param in self.whole:
            if id(param.param) in updated:
                torch.autograd.graph.increment_version(param.leaf)

    def add(self, params: Iterable[ManagedParam]) -> None:
        """Take over parameters, also those of a nested ``gtp_shard`` call that had a runtime of its own."""
        for param in params:
            if isinstance(param, ShardedWeight):
                self.weights.append(param)
                for target in param.gatherables:
                    target.index = len(self.gatherables)
                    self.gatherables.append(target)
            elif isinstance(param, WholeParam):
                param.on_local_grad = self.note_backward
                self.whole.append(param)

    @property
    def params(self) -> list[ManagedParam]:
        return [*self.weights, *self.whole]

    def _chain(self, key: ChainKey) -> Chain:
        if key not in self.chains:
            self.chains[key] = Chain(self.schedule.prefetch_depth)
        return self.chains[key]

    # --- frames -------------------------------------------------------------------------------------------------------

    @property
    def is_materializing(self) -> bool:
        """Whether a parameter read as a module attribute is the full weight: in a forward, and in backward."""
        return bool(self._frames) or compat.current_graph_task_id() != -1

    def enter(self, module: nn.Module, needs_hooks: Callable[[int], bool]) -> Frame:
        """A forward of ``module`` begins; saved weights become handles if ``needs_hooks`` of the number of steps."""
        frame = Frame()
        if not self._frames and compat.current_graph_task_id() == -1:
            self._begin_forward(module)
        self._frames.append(frame)
        if torch.is_grad_enabled() and needs_hooks(self.num_steps) and compat.saved_tensors_hooks_enabled():
            frame.saved = SavedWeights(self)
            frame.saved.push()
        return frame

    def exit(self, frame: Frame, is_complete: bool) -> None:
        """The forward has ended; ``is_complete`` is False if it raised."""
        if frame.saved is not None:
            frame.saved.pop()
        popped = self._frames.pop()
        assert popped is frame, "frames must end in the order in which they began, last first"
        self._close(frame)
        if not self._frames and self._forward_chain is not None:
            self._drop_prefetched()
            if is_complete:
                self._forward_chain.end()
            else:
                self._forward_chain.cancel()
                self._end_keeps()
            self._forward_chain = None

    def _close(self, frame: Frame) -> None:
        frame.values.clear()
        for weight, gathered in frame.held:
            self.release(weight, gathered)
        frame.held.clear()

    def _begin_forward(self, module: nn.Module) -> None:
        if self._is_in_backward:
            # The last backward raised before its end: its prefetches and gradients are void.
            self._abandon_backward()
        self.ensure_initialized()
        self._end_keeps()
        for param in self.params:
            param.begin_forward()
        self._begin_quantized()
        self._forward_module = module
        self._forward_chain = self._chain(ChainKey(module, torch.is_grad_enabled()))
        self._differentiable_chain = self._forward_chain if torch.is_grad_enabled() else None
        self._prefetch(self._forward_chain.begin())

    def ensure_initialized(self) -> None:
        """First forward: check that there is something to run on, and make the communicators, on all ranks alike."""
        if self._is_initialized:
            return
        meta = [param.fqn for param in self.params if self._is_meta(param)]
        if meta:
            raise RuntimeError(
                f"Parameters {meta} are still on the meta device at the first forward. Materialize them with "
                f"module.to_empty(device='{self.device.type}') and initialize them, or load a state dict."
            )
        for param in self.params:
            param.groups = self.comm.groups(param.mesh)
        self._is_initialized = True

    @staticmethod
    def _is_meta(param: ManagedParam) -> bool:
        param.follow(param.sites[0])
        registered = param.sites[0].module._parameters[param.sites[0].name]
        return registered is not None and compat.local_tensor(registered).is_meta  # type: ignore[arg-type]

    # --- gathering ----------------------------------------------------------------------------------------------------

    def _begin_quantized(self) -> None:
        """Before the first gather: all weights whose shards have changed agree on their statistics at once."""
        quantized = [(weight, weight.wire) for weight in self.weights if isinstance(weight.wire, QuantizedWire)]
        is_captured = self.comm.is_capturing
        agree_on_amax([weight for weight, wire in quantized if wire.begin_forward(weight, is_captured)], self.comm)

    def acquire(self, target: Gatherable) -> Gathered:
        """Begin a use: the full weight, ready on the current stream. Launches the gathers that the plan has next."""
        self.ensure_initialized()
        gathered = target.live
        if gathered is None or not gathered.is_fresh(target.weight):
            target.weight.check_readable()
            gathered = self._take_kept(target) or self._take_prefetched(target) or self._gather(target)
            target.live = gathered
            self._advance(target)
        gathered.holds += 1
        self.comm.delay()
        self.comm.wait(gathered.done)
        return gathered

    @contextmanager
    def using(self, target: Gatherable) -> Iterator[torch.Tensor]:
        """A use that ends with the context: the full weight."""
        gathered = self.acquire(target)
        try:
            yield gathered.full
        finally:
            self.release(target, gathered)

    def release(self, target: Gatherable, gathered: Gathered) -> None:
        """End a use."""
        gathered.holds -= 1
        if gathered.holds:
            return
        if target.live is gathered:
            target.live = None
        if self._is_kept_after_use(target) and gathered.is_fresh(target.weight):
            target.kept = gathered
        else:
            self._free(gathered)

    def _is_kept_after_use(self, target: Gatherable) -> bool:
        weight = target.weight
        if weight.is_pinned:
            return True
        if self._is_in_backward:
            return not weight.flags.reshard_after_backward
        if not weight.flags.reshard_after_forward:
            return weight.for_backward is target
        # The last weight of the forward is the first of backward: to free it between the two would put a gather that
        # nothing hides at the turning point.
        chain = self._forward_chain
        is_last = chain is not None and chain is self._differentiable_chain and chain.is_at_end
        return is_last and self._chain(ChainKey(self._forward_module, True, True)).plan[:1] == (target.index,)

    def _end_keeps(self) -> None:
        """A weight is kept from a forward to its backward at most, unless the user asks for more: between passes shards
        are also written to in ways that leave no trace (``.data``, foreach functions, ``dcp.load``)."""
        for target in self.gatherables:
            weight = target.weight
            is_lasting = weight.is_pinned or not weight.flags.reshard_after_backward
            if target.kept is not None and (weight.is_cut_again or not is_lasting):
                self._drop_kept(target)

    def _take_kept(self, target: Gatherable) -> Gathered | None:
        kept, target.kept = target.kept, None
        if kept is None or kept.is_fresh(target.weight):
            return kept
        self._discard(kept)
        return None

    def _free(self, gathered: Gathered) -> None:
        """Drop a buffer that this runtime no longer needs; poison it if nobody else holds it either."""
        if self.debug.poison and not gathered.is_alias:
            gathered.forget()
            # Two owners are ours: the buffer and the Python object of its storage that we ask with.
            if compat.storage_use_count(gathered.buffer.untyped_storage()) <= 2:
                with compat.unseen_by_checkpoint_policies():
                    poison(gathered.buffer)

    def _gather(self, target: Gatherable) -> Gathered:
        """Launch the gather of the present shard. Which gathers a recomputation launches depends on the plan."""
        with compat.unseen_by_checkpoint_policies():
            return gather.launch(target, self.comm)

    def _active_chain(self) -> Chain | None:
        return self._backward_chain if self._is_in_backward else self._forward_chain

    def _advance(self, target: Gatherable) -> None:
        chain = self._active_chain()
        if chain is None:
            return
        deviations = chain.num_deviations
        window = chain.advance(target.index)
        if chain.num_deviations != deviations:
            logger.debug(
                "use of %s was not expected next; %d deviations so far", target.weight.fqn, chain.num_deviations
            )
            self._drop_prefetched(keep=window)
        self._prefetch(window)

    def _prefetch(self, window: Sequence[int]) -> None:
        """Launch a gather for each use in the window that has none in flight yet, in order."""
        for position, index in enumerate(window, 1):
            target = self.gatherables[index]
            if target.weight.is_cut_again and not target.weight.is_readable:
                continue
            if target.kept is None and len(target.pending) < window[:position].count(index):
                target.pending.append(self._gather(target))

    def _take_prefetched(self, target: Gatherable) -> Gathered | None:
        while target.pending:
            gathered = target.pending.popleft()
            if gathered.is_fresh(target.weight):
                return gathered
            self._discard(gathered)
        return None

    def _drop_prefetched(self, keep: Sequence[int] = ()) -> None:
        """Drop gathers that nobody came for, except as many as ``keep`` still expects."""
        expected = Counter(keep)
        for target in self.gatherables:
            while len(target.pending) > expected[target.index]:
                self._discard(target.pending.pop())

    def _discard(self, gathered: Gathered) -> None:
        # Its memory must not be reused, nor the shard be written, while the gather still runs.
        self.comm.wait(gathered.done)
        self._free(gathered)

    def gather_kept(self, weight: ShardedWeight) -> None:
        """Gather a weight ahead of any use, for ``unshard``."""
        self.ensure_initialized()
        if weight.live is None and (weight.kept is None or not weight.kept.is_fresh(weight)):
            self.drop_kept(weight)
            weight.follow(weight.sites[0])
            weight.check_readable()
            weight.kept = self._take_prefetched(weight) or self._gather(weight)

    def wait_kept(self, weight: ShardedWeight) -> None:
        if weight.kept is not None:
            self.comm.wait(weight.kept.done)

    def drop_kept(self, weight: ShardedWeight) -> None:
        """Keep nothing that was made of a shard."""
        for target in weight.gatherables:
            self._drop_kept(target)
        if isinstance(weight.wire, QuantizedWire):
            weight.wire.forget()

    def _drop_kept(self, target: Gatherable) -> None:
        kept, target.kept = target.kept, None
        if kept is not None:
            self._discard(kept)

    # --- attribute reads ----------------------------------------------------------------------------------------------

    def read(self, param: ManagedParam) -> torch.Tensor:
        """The value of a parameter that is read as a module attribute while ``is_materializing``."""
        if isinstance(param, WholeParam):
            return param.value()
        assert isinstance(param, ShardedWeight)
        frame = self._frames[-1] if self._frames else self._backward_frame
        is_differentiable = torch.is_grad_enabled() and param.param.requires_grad
        value = frame.values.get((param, is_differentiable))
        if value is None:
            if not self._frames and compat.current_graph_task_id() != -1:
                self.note_backward()
            value = self._materialize(param, frame, is_differentiable)
            frame.values[(param, is_differentiable)] = value
        return value

    def _materialize(self, weight: ShardedWeight, frame: Frame, is_differentiable: bool) -> torch.Tensor:
        gathered = self.acquire(weight)
        frame.held.append((weight, gathered))
        frame.reads_weights = True
        if frame.saved is not None:
            frame.saved.watch(weight, gathered)
        if not is_differentiable:
            return weight.for_modules(gathered)
        check_differentiable(weight)
        value: torch.Tensor = Materialize.apply(weight.leaf, self, weight, gathered)  # type: ignore[no-untyped-call]
        return value

    def read_pinned(self, weight: ShardedWeight) -> torch.Tensor:
        """The value of a weight that the user has unsharded, outside of any forward."""
        gathered = self.acquire(weight)
        try:
            if torch.is_grad_enabled() and weight.param.requires_grad:
                value: torch.Tensor = Materialize.apply(weight.leaf, self, weight, gathered)  # type: ignore[no-untyped-call]
                return value
            return weight.for_modules(gathered)
        finally:
            self.release(weight, gathered)

    # --- backward -----------------------------------------------------------------------------------------------------

    def note_backward(self, module: nn.Module | None = None) -> None:
        """Called by whatever happens first in a backward, as the gradient of the output of an outermost ``module``: its
        chain begins, and its end is awaited."""
        if self._is_in_backward:
            if self._end_of_backward is not None and self._end_of_backward() is not None:
                return
            # A backward that raised, and this is another one, without a forward in between.
            self._abandon_backward()
        self._is_in_backward = True
        end = _EndOfBackward(self._finish_backward)
        self._end_of_backward = weakref.ref(end)
        compat.queue_backward_callback(end)
        self._backward_chain = self._chain(ChainKey(module, True, True))
        self._prefetch(self._backward_chain.begin())

    def watch_saved(self, saved: SavedWeights) -> None:
        """``saved`` holds gathered weights in this backward; they are released at its end at the latest."""
        self._backward_saved.append(saved)

    def _release_read_in_backward(self) -> None:
        """Release what was read as an attribute or for saved tensors, and not released by its last use."""
        self._close(self._backward_frame)
        for saved in self._backward_saved:
            saved.release_all()
        self._backward_saved.clear()

    def _finish_backward(self) -> None:
        """End of backward, on the caller's stream: all gradients are in ``.grad`` when this returns."""
        self._release_read_in_backward()
        self._drop_prefetched()
        self._end_keeps()
        self._is_in_backward = False
        self._backward_chain.end()
        self.complete_gradients()

    def complete_gradients(self) -> None:
        """Reduce what is left to reduce; all gradients are in ``.grad`` when this returns."""
        if self.is_last_backward:
            self.grads.flush(self.weights)
            self.grads.reduce_whole(self.whole)
            self.grads.publish(self.params)

    def publish(self, params: Sequence[ManagedParam]) -> None:
        """Complete the gradients of ``params`` now, within backward: an outer ``fully_shard`` is about to read them."""
        if self.is_last_backward:
            self.grads.flush([param for param in params if isinstance(param, ShardedWeight)])
            self.grads.reduce_whole([param for param in params if isinstance(param, WholeParam)])
            self.grads.publish(params)

    def drop_prefetched_of(self, params: Sequence[ManagedParam]) -> None:
        """Their shards are about to be freed: nothing may read them any more."""
        for param in params:
            for target in param.gatherables if isinstance(param, ShardedWeight) else ():
                while target.pending:
                    self._discard(target.pending.pop())

    def _abandon_backward(self) -> None:
        logger.warning("the last backward did not complete; its gradients are dropped")
        self._is_in_backward = False
        self.grads.abandon()
        self._release_read_in_backward()
        self._backward_chain.cancel()
        self._drop_prefetched()
        self._end_keeps()
        for param in self.params:
            param.reset_grads()


class Materialize(torch.autograd.Function):
    """The full weight as a differentiable function of its shard: gather, and reduce-scatter of the gradient."""

    @staticmethod
    def forward(
        ctx: Any, leaf: torch.Tensor, runtime: Runtime, weight: ShardedWeight, gathered: Gathered
    ) -> torch.Tensor:
        ctx.runtime, ctx.weight = runtime, weight
        return weight.for_modules(gathered)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[None, ...]:
        weight: ShardedWeight = ctx.weight
        ctx.runtime.note_backward()
        if weight.tp_spec is not None:
            grad = compat.local_tensor(grad.redistribute(placements=weight.tp_spec.placements))  # type: ignore[attr-defined]
        # A sum node may hand one gradient to several inputs; with more than one rank it is only read.
        is_owned = weight.layout.world > 1 and weight.reduce_dtype != torch.float16
        ctx.runtime.grads.add_full(weight, grad, is_owned and weight.flags.requires_gradient_sync)
        return None, None, None, None
