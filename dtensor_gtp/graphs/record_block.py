"""One recorded block: what it uses while it is recorded, and the graphs of its forward and its backward.

[Note: fixed buffers]
A graph keeps the addresses of its recording. So the weights of a recorded block are gathered into
fixed buffers, and its full gradients are written to others. Blocks of one kind take turns with two
sets: one is gathered or reduced while the other is in use, by the rules of
[Note: streams and memory]. A gather that finds its fixed buffer held uses another one, and the
weight is copied before the replay. A full gradient is overwritten once the reduction that reads it
is retired.

A recording reads weights in its own frame (``AttributeReads.apart``). The frame around it would
keep a fixed buffer for backward, while the next gather overwrites it. So nothing of a recorded
block is kept from forward to backward, not even by ``keep_nbytes`` or
``reshard_after_forward=False``. (Tested on a CPU only.)
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from .. import _torch_compat as compat
from .._comm.streams import Done
from .._howto import see
from .._modules.trees import map_tensors
from .._params.gathered import Gathered
from .._params.managed_param import ManagedParam
from .._params.refusals import check_unmodified
from .._params.sharded_weight import Gatherable, ShardedWeight
from .._params.whole_param import WholeParam
from .._schedule.launch_reductions import Written
from .._schedule.runtime import Runtime
from .recorder import CudaRecorder, returned_tensors, versions_of, with_tensors

logger = logging.getLogger("dtensor_gtp")


class Recording:
    """Takes the place of gathers and reductions while a pass of a block is recorded."""

    def __init__(self) -> None:
        self.used: list[ShardedWeight] = []  # for each use
        self.written: list[Written] = []
        # For each reading, with the leaf that stood for it.
        self.whole: list[tuple[WholeParam, Tensor]] = []
        self._bundle: int | None = None  # what is submitted now is reduced in one launch

    def acquire(self, target: Gatherable) -> Gathered:
        weight = target.weight
        if weight.form.fixed is None:
            raise NotImplementedError(f"capture_blocks expects blocks that use their own weights, not '{weight.fqn}'.")
        self.used.append(weight)
        fixed = weight.form.fixed.gathered
        buffer = fixed.view(fixed.shape)  # counts as a holder, see ``GatherForm.gather_buffer``
        full = weight.layout.full_view(buffer)
        # No event: ``BlockGraph.replay`` waits for the gathers before it launches the graph.
        gathered = Gathered(buffer, full, Done(), weight.shard, weight.version)
        gathered.is_alias = True  # a fixed buffer is not freed with it
        gathered.holds = 1  # it stays: ``Gathering.release`` does nothing while a block is recorded
        return gathered

    def target(self, weight: ShardedWeight, dtype: torch.dtype | None = None) -> Tensor:
        """Where to put the gradient of a use. Each is reduced by itself: all but the first get
        memory of the graph."""
        assert weight.form.fixed is not None
        grad = weight.form.fixed.grad
        dtype = dtype or weight.reduce_dtype
        is_taken = any(weight is other.weight for other in self.written)
        if is_taken or dtype.itemsize > grad.dtype.itemsize:
            return torch.empty_like(grad, dtype=dtype)
        if dtype == grad.dtype:
            return grad
        # The first bytes of the buffer.
        return grad.view(-1).view(dtype)[: grad.numel()].view(grad.shape)

    def keep(self, weight: ShardedWeight, rows: Tensor) -> Tensor:
        return self.target(weight, rows.dtype).copy_(rows)

    def submit(self, weight: ShardedWeight, buffer: Tensor) -> None:
        self.written.append(Written(weight, buffer, self._bundle))

    @contextmanager
    def together(self) -> Iterator[None]:
        self._bundle = len(self.written)  # another number for each bundle that is not empty
        try:
            yield
        finally:
            self._bundle = None

    def _read(self, param: WholeParam) -> Tensor:
        # A leaf for each reading: backward leaves its gradient there.
        # It shares memory with the leaf, or the graph has the cast: a replay reads present values.
        value = param.leaf.detach().to(param.compute_dtype).requires_grad_(param.leaf.requires_grad)
        self.whole.append((param, value))
        return value

    @contextmanager
    def active(self, runtime: Runtime, params: Iterable[ManagedParam], *, is_forward: bool) -> Iterator[None]:
        """Record what runs in the context: the forward or the backward of the block with these
        parameters."""
        for earlier in (self.used, self.written, self.whole):
            earlier.clear()
        leaves = [(param, param.leaf) for param in params if isinstance(param, ShardedWeight)]
        whole = [param for param in params if isinstance(param, WholeParam)]
        runtime.grads.recording = self
        for weight, leaf in leaves:
            # Autograd remembers the first stream on which it sees a leaf, which must be that of the
            # recording.
            weight.leaf = torch.empty_like(leaf, requires_grad=leaf.requires_grad)
        for param in whole:
            param.record_use = self._read
        try:
            # A frame of its own, see [Note: fixed buffers].
            with runtime.reads.apart(is_forward=is_forward):
                yield
        finally:
            runtime.grads.recording = None  # after ``apart``, whose releases must do nothing
            for weight, leaf in leaves:
                weight.leaf = leaf
            for param in whole:
                param.record_use = None


class Block(NamedTuple):
    """A block that is recorded, with its own ``forward``."""

    name: str
    forward: Callable[..., Any]
    params: list[ManagedParam]
    runtime: Runtime
    recorder: CudaRecorder

    def __str__(self) -> str:
        return f"A recorded block ('{self.name}')"

    @property
    def weights(self) -> list[ShardedWeight]:
        return [param for param in self.params if isinstance(param, ShardedWeight)]


class Reached:
    """Which differentiable outputs get a gradient in eager calls: a graph must not make zeros for
    the others."""

    def __init__(self) -> None:
        self.indices: set[int] | None = None  # before a backward

    def observed(self, outputs: Any) -> Any:
        """The outputs for the caller: views, so that a gradient from within the block does not count."""
        num_differentiable = 0

        def view(tensor: Tensor) -> Tensor:
            nonlocal num_differentiable
            if tensor.requires_grad:
                tensor = tensor.view_as(tensor)
                tensor.register_hook(partial(self._note, num_differentiable))
                num_differentiable += 1
            return tensor

        outputs = map_tensors(outputs, view)
        if not num_differentiable:
            self.indices = set()  # no backward will come
        return outputs

    def _note(self, index: int, grad: Tensor | None) -> None:
        if grad is None:
            return
        if self.indices is None:
            self.indices = set()
        self.indices.add(index)


class BlockGraph:
    """The two graphs of a block for arguments with these leaves and this spec, with all that must
    live as long."""

    def __init__(self, block: Block, leaves: list[Any], spec: Any, reached: Reached) -> None:
        self.block = block
        # Where the graphs read inputs: each call copies its own there.
        self.inputs: list[Tensor] = []
        for leaf in leaves:
            if isinstance(leaf, Tensor):
                self.inputs.append(leaf.detach().clone().requires_grad_(leaf.requires_grad))
        self._arguments = compat.tree_unflatten(with_tensors(leaves, self.inputs), spec)
        self.forward_pass = Recording()
        self.backward_pass = Recording()
        self._differentiable: list[Tensor] = []  # outputs
        self.is_differentiable: list[bool] = []  # for each output that is a tensor
        # Makes autograd call backward where no input needs a gradient.
        self._anchor = torch.empty(0, device=block.runtime.device, requires_grad=True)
        # Weak: it is gone when its backward has run, or can no longer come.
        self._last_call: weakref.ref[_Call] | None = None
        self.num_calls = 0
        # Where the backward's graph reads gradients of outputs, by number of the output.
        self.grad_outputs: dict[int, Tensor] = {}
        try:
            self.replay_forward, self.outputs = block.recorder.record(self._run_forward)
            for index in reached.indices or ():  # made outside of the recordings, so not in the graphs' memory
                self.grad_outputs[index] = torch.empty_like(self._differentiable[index])
            self.replay_backward, self.grads = block.recorder.record(self._run_backward)
        except Exception as error:
            raise RuntimeError(
                f"capture_blocks could not record block '{block.name}': {type(error).__name__}: "
                f"{error}. A recorded block must not wait for the GPU, use its own random "
                "generators, or communicate. " + see("capture_a_step")
            ) from error
        written = [each.weight for each in self.backward_pass.written]
        whole = [param for param, value in self.forward_pass.whole if value.requires_grad]
        # The graphs leave their gradients.
        self.trained: list[ManagedParam] = list(dict.fromkeys((*written, *whole)))
        self._anchor.requires_grad_(any(self.is_differentiable))  # otherwise no backward will come
        logger.info("capture_blocks: block '%s' recorded", block.name)

    def _run_forward(self) -> list[Tensor]:
        """Returns the outputs that are tensors, detached."""
        block = self.block
        args, kwargs = self._arguments
        before = versions_of(self.inputs)
        recording = self.forward_pass.active(block.runtime, block.params, is_forward=True)
        with torch.enable_grad(), recording:
            returned = block.forward(*args, **kwargs)
        now = versions_of(self.inputs)
        for index, given in enumerate(self.inputs):
            if before[index] != now[index]:
                raise ValueError(
                    f"it writes to its input {index}, of shape {tuple(given.shape)}, but a graph "
                    "writes to its own copy; return it instead"
                )
        tensors = returned_tensors(returned, str(block))
        self._returned = map_tensors(returned, Tensor.detach)  # each call returns the like, with its own tensors
        # Keeps alive what autograd has saved, see [Note: memory of a recorded block].
        self._differentiable = [tensor for tensor in tensors if tensor.requires_grad]
        self.is_differentiable = [tensor.requires_grad for tensor in tensors]
        return [tensor.detach() for tensor in tensors]

    def _run_backward(self) -> list[Tensor | None]:
        """Returns the gradients of the inputs, then of each reading of a whole parameter."""
        sources = [*self.inputs, *(value for _, value in self.forward_pass.whole)]
        for source in sources:
            source.grad = None
        with self.backward_pass.active(self.block.runtime, self.block.params, is_forward=False):
            if self.grad_outputs:
                outputs = [self._differentiable[index] for index in self.grad_outputs]
                grad_outputs = list(self.grad_outputs.values())
                # Replays read what autograd has saved, so its graph must stay.
                torch.autograd.backward(outputs, grad_outputs, retain_graph=True)
        grads = [source.grad for source in sources]
        for source in sources:
            source.grad = None
        return grads

    @property
    def awaits_backward(self) -> bool:
        """Whether the backward of the last call may still come."""
        return self._last_call is not None and self._last_call() is not None

    def __call__(self, leaves: list[Any]) -> Any:
        call = _Call()
        self._last_call = weakref.ref(call)
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        leaves_of_trained = [param.leaf for param in self.trained]
        tensors = [self._anchor, *inputs, *leaves_of_trained]
        results: Any = _Replay.apply(self, call, *tensors)  # type: ignore[no-untyped-call]
        others = iter(results)
        return map_tensors(self._returned, lambda _: next(others))

    def replay(self, replay: Callable[[], None], weights: list[ShardedWeight]) -> None:
        """Gather the weights where the graph reads them, and replay it."""
        runtime = self.block.runtime
        # Graphs have one pool and fixed buffers, so they run one after the other, on any streams.
        runtime.comm.streams.wait_for_others()
        held = []
        try:
            for index, weight in enumerate(weights, start=1):
                weight.follow(weight.registration.sites[0])  # as a read of the attribute would
                gathered = runtime.gathering.acquire(weight.for_forward)
                if weight in weights[index:]:
                    # The next use has its own gather, as without a graph.
                    runtime.gathering.release(weight.for_forward, gathered)
                else:
                    held.append((weight, gathered))
            for weight, gathered in held:
                # Into the fixed buffer, if somebody held that when the gather began.
                runtime.keeper.place(weight, gathered)
            replay()  # on the current stream, which waits for the gathers
        finally:
            for weight, gathered in held:
                runtime.gathering.release(weight.for_forward, gathered)


class _Call:
    """One replayed forward; only autograd holds it, until its backward has run."""


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, graph: BlockGraph, call: _Call, anchor: Tensor, *tensors: Tensor) -> tuple[Tensor, ...]:
        """``tensors``: inputs, then the leaves of trained parameters, which tell whether their
        gradients are wanted."""
        graph.num_calls += 1  # what earlier calls have saved is overwritten now
        for target, source in zip(graph.inputs, tensors, strict=False):  # ``tensors`` has leaves, too
            target.detach().copy_(source)  # detached: the graph's input may need a gradient
        graph.replay(graph.replay_forward, graph.forward_pass.used)
        ctx.set_materialize_grads(False)  # backward asks which outputs have a gradient
        ctx.call = call  # alive until the backward has run
        ctx.graph = graph
        ctx.number = graph.num_calls
        ctx.versions = [weight.version for weight in graph.backward_pass.used]  # backward gathers them again
        # Copies, because the next replay overwrites the outputs.
        results = tuple(output.clone() for output in graph.outputs)
        constants = [r for r, is_one in zip(results, graph.is_differentiable, strict=True) if not is_one]
        ctx.mark_non_differentiable(*constants)
        return results

    @staticmethod
    @compat.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        graph: BlockGraph = ctx.graph
        name = graph.block.name
        runtime = graph.block.runtime
        written = graph.backward_pass.written
        if graph.num_calls != ctx.number:
            raise RuntimeError(
                f"The backward of block '{name}' runs after a later forward of it, whose graph "
                "overwrote the saved tensors. Run the backward first, or call remove() on the "
                "result of capture_blocks."
            )
        is_differentiable = graph.is_differentiable
        differentiable = [g for g, is_one in zip(grads, is_differentiable, strict=True) if is_one]
        given = {index: grad for index, grad in enumerate(differentiable) if grad is not None}
        if given.keys() != graph.grad_outputs.keys():
            raise RuntimeError(
                f"The backward of block '{name}' starts at its differentiable outputs "
                f"{sorted(given)}, but was recorded for {sorted(graph.grad_outputs)}. Where eager "
                "code gives no gradient, the graph gives zeros. Use the same outputs in every "
                "loss, or leave this block out."
            )
        num_inputs = len(graph.inputs)
        leaves = enumerate(graph.trained, start=1 + num_inputs)  # behind the anchor and the inputs
        awaited = {param for index, param in leaves if compat.is_awaited(ctx, index)}
        runtime.note_backward()
        for weight, version in zip(graph.backward_pass.used, ctx.versions, strict=True):
            check_unmodified(weight, version)
        for index, grad in given.items():
            graph.grad_outputs[index].copy_(grad)  # where the graph reads it
        # Reductions may still read what the replay overwrites.
        runtime.comm.reductions.retire_users([each.buffer for each in written])
        graph.replay(graph.replay_backward, graph.backward_pass.used)
        runtime.grads.submit_recorded([each for each in written if each.weight in awaited])
        for (param, _), local in zip(graph.forward_pass.whole, graph.grads[num_inputs:], strict=True):
            if local is not None and param in awaited:
                param.add_local_grad(local)
        ctx.call = None  # a later forward may overwrite what this one has saved
        # Copies, because the next replay overwrites these.
        results = [None if grad is None else grad.clone() for grad in graph.grads[:num_inputs]]
        return None, None, None, *results, *[None] * len(graph.trained)
