"""Blocks of a model as CUDA graphs of their own: ``capture_blocks``.

[Note: what is recorded of a block]
Its compute, forward and backward, each a graph; no communication. Around a replay, eager code gathers the block's
weights into buffers at fixed addresses, by the plan as ever, and reduces the gradients that the graph has left in
others (see [Note: fixed buffers] in ``_runtime/recording.py``). So gathers and reductions cross the borders of graphs
as they cross those of ops, on their streams; any gather backend and any kind of reduce-scatter will do; and the
sequence of collectives is that of eager code, so that some ranks may replay what others run.

[Note: memory of a recorded block]
Forward and backward are recorded one after the other, and what forward saves is kept for good, since graphs of other
blocks share the pool. Only what lives within one graph shares memory with that of others. A forward that comes before
the backward of the last one would overwrite what it has saved: it runs eagerly.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn as nn

from . import _torch_compat as compat
from ._block_checks import check_apart, check_block, check_window, params_of
from ._capture_checks import check_at_least, check_places
from ._recorder import CudaRecorder, Recorder
from ._runtime.gathered import Version
from ._runtime.param import ManagedParam, ShardedWeight
from ._runtime.recording import Recording, Rings
from ._runtime.saved import check_unmodified
from ._runtime.state import Runtime
from .capture import _MOST_SEEN, _runtimes_of, _signature, _versions_of

logger = logging.getLogger("dtensor_gtp")


def capture_blocks(
    module: nn.Module, blocks: Iterable[nn.Module], *, warmup_calls: int = 3, max_graphs: int = 4
) -> CapturedBlocks:
    """Run blocks of a model as CUDA graphs where the whole step cannot be one.

    What is around the blocks stays eager: an embedding, a loss that asks the host, a ``GradScaler``, a data-dependent
    branch, the optimizer. Each block's forward and backward become a graph, without their collectives, which stay
    eager and overlap with the graphs of other blocks::

        gtp_shard(model, mesh, schedule=SchedulePolicy(prefetch_nbytes=bytes_of_a_block))
        capture_blocks(model, model.layers)
        ...  # train as ever

    In place: the ``forward`` of each block is replaced, hooks on the block run around it. The first ``warmup_calls``
    calls with gradients run eagerly, the next one with inputs that have been seen is recorded. Without gradients, under
    autocast, in a recomputation, with weights that ``unshard`` keeps, and where a forward comes before the backward of
    the last one (microbatches of a pipeline), a block runs eagerly. Its weights are gathered again for backward,
    whatever ``keep_nbytes`` and ``reshard_after_forward`` say.

    It costs memory: two sets of full weights and two of full gradients for each kind of block, and what forward saves
    stays allocated between steps. ``prefetch_nbytes`` should be at least the bytes of a block's weights: a graph is
    launched when all of them are there. Where the whole step can be recorded, ``capture_step`` is the better choice.

    Args:
        module: What ``gtp_shard`` was called on, or a module that contains such modules.
        blocks: Modules below it that do not contain each other. Their inputs are any trees of tensors, which are
            copied and only read, and of other values, which are compared; their outputs are copied, too, and backward
            comes to the same of them as in the eager calls. Tensors that they find
            elsewhere are to stay where they are: parameters and buffers are watched, attributes (a cache) are not.
        warmup_calls: Eager calls of each block before its first recording, at least 2.
        max_graphs: Beyond so many combinations of inputs for one block, further ones run eagerly.

    Raises:
        TypeError, ValueError: An argument is of the wrong kind or out of range.
        RuntimeError: The weights are not on a CUDA device.
        NotImplementedError: Something about the module or a block is not supported: an outer ``fully_shard``, unequal
            replicas, recipes, tensor parallelism, exchanges of activations, compiled blocks, parameters that nobody
            manages.
    """
    blocks = list(blocks)
    runtimes = _runtimes_of(module, "capture_blocks")
    device = runtimes[0].device
    if device.type != "cuda":
        raise RuntimeError(
            f"capture_blocks records CUDA graphs, but the weights of the {type(module).__name__} are on "
            f"'{device.type}'. Call the module as it is there."
        )
    return CapturedBlocks(module, blocks, CudaRecorder(device), warmup_calls, max_graphs)


class CapturedBlocks:
    """What :func:`capture_blocks` returns."""

    def __init__(
        self, module: nn.Module, blocks: Sequence[nn.Module], recorder: Recorder, warmup_calls: int, max_graphs: int
    ) -> None:
        check_at_least("capture_blocks", 2, warmup_calls=warmup_calls)
        check_at_least("capture_blocks", 1, max_graphs=max_graphs)
        names = {submodule: name for name, submodule in module.named_modules()}
        held = Counter(inner for block in blocks for inner in block.modules())
        if not blocks or any(block not in names or held[block] > 1 for block in blocks):
            raise ValueError(
                f"capture_blocks expects modules below the {type(module).__name__} that do not contain each other as "
                f"blocks, but got {[names.get(block, type(block).__name__) for block in blocks]}."
            )
        for block in blocks:
            check_block(names[block], block)
        check_apart(blocks, names)
        check_window(blocks)
        # A runtime knows who holds a fixed buffer among its own gathers and reductions, not among those of another.
        rings = {runtime: Rings() for runtime in _runtimes_of(module, "capture_blocks")}
        self._blocks = [_CapturedBlock(names[b], b, rings, recorder, warmup_calls, max_graphs) for b in blocks]

    @property
    def num_graphs(self) -> int:
        """Recorded forwards, each with its backward, that are still of use."""
        return sum(len(block.graphs) for block in self._blocks)

    def reset(self) -> None:
        """Forget all graphs: the next calls are as the first ones. Call it after a change that cannot be seen, such as
        another value of a Python variable that a block reads."""
        for block in self._blocks:
            block.reset()

    def remove(self) -> None:
        """Give the blocks their own ``forward`` back, and free graphs and buffers.

        Raises:
            RuntimeError: The backward of a call may still come.
        """
        awaiting = [block.name for block in self._blocks if any(g.awaits_backward for g in block.graphs.values())]
        if awaiting:
            raise RuntimeError(
                f"remove() expects no forward whose backward is still to come, but that of block '{awaiting[0]}' may. "
                "Run it, or drop the loss and all outputs."
            )
        for block in self._blocks:
            block.remove()


class _CapturedBlock:
    """A block with its graphs, by what they have baked in."""

    def __init__(
        self,
        name: str,
        block: nn.Module,
        rings: Mapping[Runtime, Rings],
        recorder: Recorder,
        warmup_calls: int,
        max_graphs: int,
    ) -> None:
        self.name = name
        self.block = block
        self.params = params_of(block)
        self.weights = [param for param in self.params if isinstance(param, ShardedWeight)]
        self.runtime = _runtimes_of(block, "capture_blocks")[0]
        self.recorder = recorder
        self.graphs: dict[Hashable, _BlockGraph] = {}
        self._warmup_calls = warmup_calls
        self._max_graphs = max_graphs
        self._num_eager = 0
        self._binding: Hashable = None
        self._seen: dict[Hashable, _Reached] = {}  # in order
        rings[self.runtime].assign(self.weights)
        self.forward = block.forward
        self._had_forward = "forward" in block.__dict__
        block.forward = self

    def remove(self) -> None:
        self.graphs.clear()
        for weight in self.weights:
            weight.fixed = None
        if self._had_forward:
            self.block.forward = self.forward
        else:
            del self.block.forward

    def reset(self) -> None:
        self.graphs.clear()
        self._seen.clear()
        self._num_eager = 0

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self._can_replay():
            return self.forward(*args, **kwargs)
        leaves, spec = compat.tree_flatten((args, kwargs))
        binding = self._describe()
        if binding != self._binding:
            self.reset()
            self._check_buffers()
            self._binding = binding
        key = (str(spec), tuple(map(_key_of, leaves)))
        graph = self.graphs.get(key)
        if graph is None:
            check_places(leaves, self.runtime.device, f"A recorded block ('{self.name}')")
            reached = self._seen.get(key)
            is_ready = self._num_eager >= self._warmup_calls and reached is not None and reached.is_known
            if reached is None or not is_ready or len(self.graphs) >= self._max_graphs:
                return self._run_eagerly(key, args, kwargs)
            graph = self.graphs[key] = _BlockGraph(self, leaves, spec, reached)
        if graph.awaits_backward:
            return self.forward(*args, **kwargs)
        return graph(leaves)

    def _run_eagerly(self, key: Hashable, args: Any, kwargs: Any) -> Any:
        """And see which outputs backward comes to."""
        leaves, spec = compat.tree_flatten(self.forward(*args, **kwargs))
        self._num_eager += 1
        result = compat.tree_unflatten(self._seen.setdefault(key, _Reached()).observed(leaves), spec)
        if len(self._seen) > _MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        return result

    def _can_replay(self) -> bool:
        return (
            torch.is_grad_enabled()
            and compat.current_graph_task_id() == -1
            and compat.saved_tensors_hooks_enabled()
            and not torch.is_autocast_enabled(self.runtime.device.type)
            and not self.runtime.comm.is_capturing
            and not self.runtime.has_foreign_saved_hooks()
            and not any(weight.is_pinned for weight in self.weights)
        )

    def _describe(self) -> Hashable:
        modules = list(self.block.modules())
        buffers = tuple(buffer.data_ptr() for buffer in self.block.buffers())
        exchanges = [w.fqn for w in self.weights if w.lookups is not None or w.losses is not None]
        if exchanges:
            raise NotImplementedError(
                f"capture_blocks does not support block '{self.name}': it exchanges activations for '{exchanges[0]}'. "
                'Use capture_step, or SchedulePolicy(embedding="gather", head="gather").'
            )
        params = []
        for param in self.params:
            registered = param.sites[0].module._parameters.get(param.sites[0].name)
            params.append((id(registered), id(param.shard), registered is not None and registered.requires_grad))
        return tuple(params), tuple(module.training for module in modules), buffers

    def _check_buffers(self) -> None:
        for weight in self.weights:
            fixed = weight.fixed
            if fixed is None or (fixed.gathered.dtype, fixed.grad.dtype) != (weight.compute_dtype, weight.reduce_dtype):
                raise RuntimeError(
                    f"The dtype of '{weight.fqn}' has changed since capture_blocks: call remove() on what it has "
                    "returned, then capture_blocks again."
                )


class _Reached:
    """Which of the differentiable outputs of eager calls have got a gradient: of what only others depend on, there is
    none, and a graph must not make zeros of it."""

    def __init__(self) -> None:
        self.num_outputs = 0
        self.indices: set[int] = set()

    @property
    def is_known(self) -> bool:
        return bool(self.indices) or self.num_outputs == 0

    def observed(self, leaves: list[Any]) -> list[Any]:
        """Outputs for the caller. They are views, as those of a graph are copies: a gradient that comes to what they
        show from within the block is none of theirs."""
        self.num_outputs, outputs = 0, []
        for leaf in leaves:
            if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                leaf = leaf.view_as(leaf)
                leaf.register_hook(partial(self._note, self.num_outputs))
                self.num_outputs += 1
            outputs.append(leaf)
        return outputs

    def _note(self, index: int, grad: torch.Tensor | None) -> None:
        if grad is not None:
            self.indices.add(index)


class _BlockGraph:
    """The two graphs of a block for one kind of inputs, with everything that must live as long as they.

    Args:
        owner: The block.
        leaves: Inputs of the kind.
        spec: How they make arguments.
        reached: Which outputs have got gradients so far.
    """

    def __init__(self, owner: _CapturedBlock, leaves: list[Any], spec: Any, reached: _Reached) -> None:
        self._owner = owner
        self._leaves = [_static(leaf) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        self._spec = spec
        self.inputs = [leaf for leaf in self._leaves if isinstance(leaf, torch.Tensor)]
        self._forward_pass, self._backward_pass = Recording(), Recording()
        self._differentiable: list[torch.Tensor] = []
        self._reached = frozenset(reached.indices)
        self.is_differentiable: list[bool] = []
        # Has autograd call backward where no input needs a gradient.
        self._anchor = torch.empty(0, device=owner.runtime.device, requires_grad=True)
        self._last: weakref.ref[_Call] | None = None
        self.num_calls = 0
        try:
            self._replay_forward, (self.outputs, self._output_spec) = owner.recorder.record(self._run_forward)
            self.grad_outputs = {index: torch.empty_like(self._differentiable[index]) for index in self._reached}
            self._replay_backward, self.grads = owner.recorder.record(self._run_backward)
            self.trained = self._trained()
            self._anchor.requires_grad_(any(self.is_differentiable))
        except Exception as error:
            raise RuntimeError(
                f"capture_blocks could not record block '{owner.name}': {type(error).__name__}: {error}. A block that "
                "is recorded must not wait for the GPU, draw from generators of its own, or communicate."
            ) from error
        logger.info("capture_blocks: block '%s' recorded", owner.name)

    # --- what is recorded ---------------------------------------------------------------------------------------------

    def _run_forward(self) -> tuple[list[Any], Any]:
        owner = self._owner
        args, kwargs = compat.tree_unflatten(self._leaves, self._spec)
        versions = _versions_of(self.inputs)
        with torch.enable_grad(), self._forward_pass.active(owner.runtime, owner.params, is_forward=True):
            outputs, spec = compat.tree_flatten(owner.forward(*args, **kwargs))
        for index, (before, now) in enumerate(zip(versions, _versions_of(self.inputs), strict=True)):
            if before != now:
                raise ValueError(
                    f"it writes to its input {index}, of shape {tuple(self.inputs[index].shape)}, of which a graph has "
                    "a copy, so the caller would not see it; return it"
                )
        tensors = [leaf for leaf in outputs if isinstance(leaf, torch.Tensor)]
        # Holds what is saved, see [Note: memory of a recorded block].
        self._differentiable = [tensor for tensor in tensors if tensor.requires_grad]
        self.is_differentiable = [tensor.requires_grad for tensor in tensors]
        return [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in outputs], spec

    def _run_backward(self) -> list[torch.Tensor | None]:
        """Gradients of the inputs, then of each reading of a whole parameter."""
        owner = self._owner
        sources = [*self.inputs, *(value for _, value in self._forward_pass.whole)]
        for source in sources:
            source.grad = None
        with self._backward_pass.active(owner.runtime, owner.params, is_forward=False):
            if self._reached:
                outputs = [self._differentiable[index] for index in self.grad_outputs]
                torch.autograd.backward(outputs, list(self.grad_outputs.values()), retain_graph=True)
        grads = [source.grad for source in sources]
        for source in sources:
            source.grad = None
        return grads

    # --- replays ------------------------------------------------------------------------------------------------------

    @property
    def name(self) -> str:
        return self._owner.name

    @property
    def awaits_backward(self) -> bool:
        """Whether the backward of the last call may still come."""
        return self._last is not None and self._last() is not None

    def __call__(self, leaves: list[Any]) -> Any:
        call = _Call()
        self._last = weakref.ref(call)
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        leaves_of_trained = [param.leaf for param in self.trained]
        results: Any = _Replay.apply(self, call, len(given), self._anchor, *given, *leaves_of_trained)  # type: ignore[no-untyped-call]
        remaining = iter(results)
        outputs = [next(remaining) if isinstance(leaf, torch.Tensor) else leaf for leaf in self.outputs]
        return compat.tree_unflatten(outputs, self._output_spec)

    def _trained(self) -> list[ManagedParam]:
        """Parameters whose gradients the graphs leave."""
        written = [one.weight for one in self._backward_pass.written]
        whole = [use.param for use in self._forward_pass.whole if use.value.requires_grad]
        return list(dict.fromkeys((*written, *whole)))

    def versions(self) -> list[Version]:
        """Of the weights that backward uses."""
        return [weight.version for weight in self._backward_pass.used]

    def run_forward(self, given: Sequence[torch.Tensor]) -> tuple[torch.Tensor, ...]:
        self.num_calls += 1
        for target, source in zip(self.inputs, given, strict=True):
            target.detach().copy_(source)
        self._replay(self._replay_forward, self._forward_pass.used)
        # Whoever keeps an output keeps its values.
        return tuple(leaf.clone() for leaf in self.outputs if isinstance(leaf, torch.Tensor))

    def run_backward(
        self, grads: dict[int, torch.Tensor], versions: list[Version], awaited: set[ManagedParam]
    ) -> list[torch.Tensor | None]:
        """Gradients of the inputs.

        Args:
            grads: Of differentiable outputs, by their index.
            versions: Of the weights, in forward.
            awaited: Parameters whose gradients this backward wants.
        """
        if grads.keys() != self._reached:
            raise RuntimeError(
                f"The backward of block '{self.name}' comes to its differentiable outputs {sorted(grads)}, but was "
                f"recorded for {sorted(self._reached)}. Of what only another output depends on, eager code would leave "
                "no gradient, and the graph zeros. Use the same outputs in every loss, or leave this block out."
            )
        runtime = self._owner.runtime
        runtime.note_backward()
        for weight, version in zip(self._backward_pass.used, versions, strict=True):
            check_unmodified(weight, version)
        for index, grad in grads.items():
            self.grad_outputs[index].copy_(grad)
        # What is about to be written may still be read by reductions.
        runtime.comm.retire_users([written.buffer for written in self._backward_pass.written])
        self._replay(self._replay_backward, self._backward_pass.used)
        runtime.grads.submit_recorded([one for one in self._backward_pass.written if one.weight in awaited])
        of_whole = self.grads[len(self.inputs) :]
        for (param, _), local in zip(self._forward_pass.whole, of_whole, strict=True):
            if local is not None and param in awaited:
                param.add_local_grad(local)
        return [None if grad is None else grad.clone() for grad in self.grads[: len(self.inputs)]]

    def _replay(self, replay: Callable[[], None], weights: list[ShardedWeight]) -> None:
        runtime = self._owner.runtime
        held = []
        try:
            for index, weight in enumerate(weights, start=1):
                weight.follow(weight.sites[0])
                gathered = runtime.acquire(weight)
                if weight in weights[index:]:
                    runtime.release(weight, gathered)  # the next use has a gather of its own, as without a graph
                else:
                    held.append((weight, gathered))
            for weight, gathered in held:
                runtime.place(weight, gathered)
            replay()
        finally:
            for weight, gathered in held:
                runtime.release(weight, gathered)


class _Call:
    """One replayed forward; autograd alone holds it, until its backward has run."""


class _Replay(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, graph: _BlockGraph, call: _Call, num_inputs: int, anchor: torch.Tensor, *tensors: torch.Tensor
    ) -> tuple[torch.Tensor, ...]:
        """The leaves of trained parameters come after the inputs, to tell whether a backward wants their gradients."""
        results = graph.run_forward(tensors[:num_inputs])
        ctx.num_inputs = num_inputs
        ctx.set_materialize_grads(False)
        ctx.call, ctx.graph, ctx.number, ctx.versions = call, graph, graph.num_calls, graph.versions()
        constants = [r for r, is_one in zip(results, graph.is_differentiable, strict=True) if not is_one]
        ctx.mark_non_differentiable(*constants)
        return results

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        graph: _BlockGraph = ctx.graph
        if graph.num_calls != ctx.number:
            raise RuntimeError(
                f"The backward of block '{graph.name}' comes after a later forward of it, whose graph has overwritten "
                "what the first one saved. Run it before, or call remove() on what capture_blocks has returned."
            )
        differentiable = [grad for grad, is_one in zip(grads, graph.is_differentiable, strict=True) if is_one]
        given = {index: grad for index, grad in enumerate(differentiable) if grad is not None}
        trained = graph.trained
        leaves = range(1 + ctx.num_inputs, 1 + ctx.num_inputs + len(trained))  # behind the anchor and the inputs
        awaited = {param for param, index in zip(trained, leaves, strict=True) if compat.is_awaited(ctx, index)}
        results = graph.run_backward(given, ctx.versions, awaited)
        ctx.call = None  # a later forward may overwrite what this one has saved
        return None, None, None, None, *results, *[None] * len(trained)


def _static(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor for a graph to read, like one that it is called with."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)


def _key_of(leaf: Any) -> Hashable:
    return _signature(leaf), isinstance(leaf, torch.Tensor) and leaf.requires_grad


__all__ = ["CapturedBlocks", "capture_blocks"]
