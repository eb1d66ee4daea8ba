"""The runtime of one root module: who uses which weight, in which pass, and where its gradient goes.

[Note: frames]
Fused ops use a weight for one GEMM (see [Note: uses and holds] in ``gathering``). Any other code reads a parameter as a
module attribute, and the attribute is then the full weight, held until the *frame* ends in which it was read: the
innermost running ``forward`` of a module that contains sharded weights. What autograd saves of such a weight is
replaced by a handle that gathers again in backward. A reference that escapes all of this keeps its memory alive and its
values right; it only costs memory.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
import torch.nn as nn

from .. import _torch_compat as compat
from ..policy import SchedulePolicy
from . import first_forward
from .comm_context import CommContext
from .debug import DebugFlags
from .gathered import Gathered, Version
from .gathering import ChainKey, Entry, Gathering
from .gradients import Gradients
from .optimizer_steps import optimizer_steps
from .param import ManagedParam, ShardedWeight
from .saved import SavedWeights, check_differentiable
from .whole import WholeParam
from .wire import QuantizedWire, agree_on_amax

if TYPE_CHECKING:
    from .group import ShardGroup

logger = logging.getLogger(__name__)

# Of the parameters that one message is about: a model may have thousands.
_MOST_NAMED = 8
# Of a shard among others that are sent: for alignment, and for what is small beside it, as scales.
_SLACK_NBYTES = 64


class Frame:
    """One running forward of a module, and the weights it holds."""

    def __init__(self) -> None:
        self.values: dict[tuple[ManagedParam, bool], tuple[Version, torch.Tensor]] = {}
        self.held: list[tuple[ShardedWeight, Gathered]] = []
        self.saved: SavedWeights | None = None
        self.reads_weights = False


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
        self.groups: list[ShardGroup] = []  # of the calls that it serves
        self.weights: list[ShardedWeight] = []
        self.whole: list[WholeParam] = []
        self.is_last_backward = True
        self.num_steps = 0  # optimizer steps on parameters of this runtime
        self._frames: list[Frame] = []
        self._end_of_backward: weakref.ref[_EndOfBackward] | None = None
        self._backward_frame = Frame()
        self._backward_saved: list[SavedWeights] = []
        self._is_initialized = False
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

    # --- frames -------------------------------------------------------------------------------------------------------

    @property
    def is_materializing(self) -> bool:
        """Whether a parameter read as a module attribute is the full weight: in a forward, and in backward."""
        return bool(self._frames) or compat.current_graph_task_id() != -1

    def has_foreign_saved_hooks(self) -> bool:
        """Whether saved-tensor hooks are active that are not those of frames."""
        hooks = compat.top_saved_tensors_hooks()
        for frame in reversed(self._frames):
            if hooks is not None and frame.saved is not None and frame.saved.is_packing(hooks):
                hooks = frame.saved.outer
        return hooks is not None

    def enter(self, module: nn.Module, needs_hooks: Callable[[int], bool], method: str = "forward") -> Frame:
        """A forward of ``module``, or another method of it that counts as one, begins; saved weights become handles if
        ``needs_hooks`` of the number of steps."""
        frame = Frame()
        if not self._frames and compat.current_graph_task_id() == -1:
            self._begin_forward(Entry(module, method))
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

    @contextmanager
    def apart(self, *, is_forward: bool) -> Iterator[None]:
        """A frame of its own for a pass of a block that is recorded, which ends with it. Nothing that is read inside is
        what was read outside, or outlives it: a recording's weights are fixed buffers, and no gathers.

        Args:
            is_forward: Whether saved weights become handles, for each of which the recorded backward asks.
        """
        frame = Frame()
        if is_forward:
            frame.saved = SavedWeights(self)
            frame.saved.push()
        self._frames.append(frame)
        outside, self._backward_saved = self._backward_saved, []
        try:
            yield
        finally:
            if frame.saved is not None:
                frame.saved.pop()
            popped = self._frames.pop()
            assert popped is frame, "frames must end in the order in which they began, last first"
            self._close(frame)
            for saved in self._backward_saved:
                saved.release_all()
            self._backward_saved = outside

    def _close(self, frame: Frame) -> None:
        frame.values.clear()
        for weight, gathered in frame.held:
            self.release(weight, gathered)
        frame.held.clear()

    def _begin_forward(self, entry: Entry) -> None:
        self.drop_broken_backward()
        self.ensure_initialized()
        self.comm.begin_pass()
        self._end_keeps()
        is_captured = self.comm.is_capturing
        for param in self.params:
            param.begin_forward(is_captured)
        self._begin_quantized()
        self._forward_entry = entry
        self._forward_chain = self._chain(ChainKey(entry, torch.is_grad_enabled()))
        self._differentiable_chain = self._forward_chain if torch.is_grad_enabled() else None
        self._kept_until_backward = frozenset(self.kept_until_backward(entry) if torch.is_grad_enabled() else ())
        self._begin_chain(self._forward_chain)

    def ensure_initialized(self) -> None:
        """First forward: check that there is something to run on, and make the communicators, on all ranks alike."""
        if self._is_initialized:
            return
        with compat.unseen_by_checkpoint_policies():
            first_forward.agree_to_begin(self.params, self._check_materialized, self.device)
        for param in self.params:
            param.groups = self.comm.groups(param.mesh)
        self._number_lanes()
        sent: Counter[str] = Counter()
        for target in self.gatherables:
            sent[target.weight.groups.gather_name] += target.chunk_nbytes + _SLACK_NBYTES
        self.comm.expect(sent)
        self._is_initialized = True

    def _check_materialized(self) -> None:
        """Raises:
        RuntimeError: Parameters are on the meta device, have no memory, or are not those that ``gtp_shard`` has
            registered.
        """
        meta = [param for param in self.params if self._is_meta(param)]
        if not meta:
            for param in self.params:
                param.check_memory()
            return
        named = [f"'{param.fqn}' of shape {tuple(param.param.shape)}" for param in meta[:_MOST_NAMED]]
        more = f" and {len(meta) - _MOST_NAMED} more" if len(meta) > _MOST_NAMED else ""
        raise RuntimeError(
            f"Parameters {', '.join(named)}{more} on mesh axes {meta[0].mesh.mesh_dim_names} are still on the meta "
            f"device at the first forward (rank {dist.get_rank()}). Materialize them with "
            f"module.to_empty(device='{self.device.type}') and initialize them, or load a state dict."
        )

    @staticmethod
    def _is_meta(param: ManagedParam) -> bool:
        param.follow(param.sites[0])
        registered = param.sites[0].module._parameters[param.sites[0].name]
        return registered is not None and compat.local_tensor(registered).is_meta  # type: ignore[arg-type]

    def _begin_quantized(self) -> None:
        """Weights whose shards have changed agree on their statistics: with the first gathers of their mesh, if that is
        all on streams beside compute. Else at once: compute, or the host, would wait for ranks whose plans gather other
        weights by then, those of other meshes (of tensor parallelism) among them."""
        self._disagreeing.clear()
        self._agreeing.clear()
        now = []
        for weight in self.weights:
            wire = weight.wire
            if isinstance(wire, QuantizedWire) and wire.begin_forward(weight):
                if wire.is_within_mesh and self.comm.casts_shards(weight.groups):
                    self._disagreeing.setdefault(weight.groups, []).append(weight)
                else:
                    now.append(weight)
        agree_on_amax(now, self.comm)

    # --- attribute reads ----------------------------------------------------------------------------------------------

    def read(self, param: ManagedParam) -> torch.Tensor:
        """The value of a parameter that is read as a module attribute while ``is_materializing``."""
        if isinstance(param, WholeParam):
            return param.value()
        assert isinstance(param, ShardedWeight)
        frame = self._frames[-1] if self._frames else self._backward_frame
        is_differentiable = torch.is_grad_enabled() and param.param.requires_grad
        version, value = frame.values.get((param, is_differentiable), (None, None))
        if value is None or version != param.version:  # an optimizer may step in the middle of a forward
            if not self._frames and compat.current_graph_task_id() != -1:
                self.note_backward()
            value = self._materialize(param, frame, is_differentiable)
            frame.values[(param, is_differentiable)] = param.version, value
        return value

    def _materialize(self, weight: ShardedWeight, frame: Frame, is_differentiable: bool) -> torch.Tensor:
        if is_differentiable:
            check_differentiable(weight)
        gathered = self.acquire(weight)
        self.leave_fixed(weight, gathered)
        frame.held.append((weight, gathered))
        frame.reads_weights = True
        if frame.saved is not None:
            frame.saved.watch(weight, gathered)
        if not is_differentiable:
            return weight.for_modules(gathered)
        value: torch.Tensor = Materialize.apply(weight.leaf, self, weight, gathered)  # type: ignore[no-untyped-call]
        return value

    def read_pinned(self, weight: ShardedWeight) -> torch.Tensor:
        """The value of a weight that the user has unsharded, outside of any forward."""
        gathered = self.acquire(weight)
        try:
            self.leave_fixed(weight, gathered)
            if torch.is_grad_enabled() and weight.param.requires_grad:
                value: torch.Tensor = Materialize.apply(weight.leaf, self, weight, gathered)  # type: ignore[no-untyped-call]
                return value
            return weight.for_modules(gathered)
        finally:
            self.release(weight, gathered)

    # --- backward -----------------------------------------------------------------------------------------------------

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
        self._backward_chain = self._chain(ChainKey(entry, True, True))
        self._begin_chain(self._backward_chain)

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
        self._release_read_in_backward()
        self._backward_chain.cancel()
        self.abandon()

    def _abandon_backward(self) -> None:
        sums = (grad for weight in self.weights for grad in (weight.unsharded_grad, weight.unreplicated_grad))
        has_earlier = self.has_gradients_in_flight or any(grad is not None for grad in sums)
        others = ", with those of earlier microbatches that were not synced" if has_earlier else ""
        text = "the last backward did not complete; its gradients are dropped%s (rank %d)"
        logger.warning(text, others, dist.get_rank())
        self._is_in_backward = False
        self._forget_gradients()
        self._release_read_in_backward()
        self._backward_chain.cancel()
        self._drop_prefetched()
        self._end_keeps()


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
