"""The graphs of one block: a forward and a backward, their inputs and outputs."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from .. import _torch_compat as compat
from .._params.gathered import Version
from .._params.managed_param import ManagedParam
from .._params.saved_for_backward import check_unmodified
from .._params.sharded_weight import ShardedWeight
from .._schedule.runtime import Runtime
from .block_recording import Recording
from .record_step import versions_of
from .recorder import Recorder

logger = logging.getLogger("dtensor_gtp")


class Block(Protocol):
    """A block that is recorded."""

    name: str
    forward: Callable[..., Any]
    params: list[ManagedParam]
    runtime: Runtime
    recorder: Recorder


class Reached:
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
            if isinstance(leaf, Tensor) and leaf.requires_grad:
                leaf = leaf.view_as(leaf)
                leaf.register_hook(partial(self._note, self.num_outputs))
                self.num_outputs += 1
            outputs.append(leaf)
        return outputs

    def _note(self, index: int, grad: Tensor | None) -> None:
        if grad is not None:
            self.indices.add(index)


class BlockGraph:
    """The two graphs of a block for one kind of inputs, with everything that must live as long as they.

    Args:
        owner: The block.
        leaves: Inputs of the kind.
        spec: How they make arguments.
        reached: Which outputs have got gradients so far.
    """

    def __init__(self, owner: Block, leaves: list[Any], spec: Any, reached: Reached) -> None:
        self._owner = owner
        self._leaves = [_static(leaf) if isinstance(leaf, Tensor) else leaf for leaf in leaves]
        self._spec = spec
        self.inputs = [leaf for leaf in self._leaves if isinstance(leaf, Tensor)]
        self._forward_pass, self._backward_pass = Recording(), Recording()
        self._differentiable: list[Tensor] = []
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

    def _run_forward(self) -> tuple[list[Any], Any]:
        owner = self._owner
        args, kwargs = compat.tree_unflatten(self._leaves, self._spec)
        versions = versions_of(self.inputs)
        with torch.enable_grad(), self._forward_pass.active(owner.runtime, owner.params, is_forward=True):
            outputs, spec = compat.tree_flatten(owner.forward(*args, **kwargs))
        for index, (before, now) in enumerate(zip(versions, versions_of(self.inputs), strict=True)):
            if before != now:
                raise ValueError(
                    f"it writes to its input {index}, of shape {tuple(self.inputs[index].shape)}, of which a graph has "
                    "a copy, so the caller would not see it; return it"
                )
        tensors = [leaf for leaf in outputs if isinstance(leaf, Tensor)]
        # Holds what is saved, see [Note: memory of a recorded block].
        self._differentiable = [tensor for tensor in tensors if tensor.requires_grad]
        self.is_differentiable = [tensor.requires_grad for tensor in tensors]
        return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in outputs], spec

    def _run_backward(self) -> list[Tensor | None]:
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
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        leaves_of_trained = [param.leaf for param in self.trained]
        results: Any = _Replay.apply(self, call, len(given), self._anchor, *given, *leaves_of_trained)  # type: ignore[no-untyped-call]
        remaining = iter(results)
        outputs = [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in self.outputs]
        return compat.tree_unflatten(outputs, self._output_spec)

    def _trained(self) -> list[ManagedParam]:
        """Parameters whose gradients the graphs leave."""
        written = [one.weight for one in self._backward_pass.written]
        whole = [use.param for use in self._forward_pass.whole if use.value.requires_grad]
        return list(dict.fromkeys((*written, *whole)))

    def versions(self) -> list[Version]:
        """Of the weights that backward uses."""
        return [weight.version for weight in self._backward_pass.used]

    def run_forward(self, given: Sequence[Tensor]) -> tuple[Tensor, ...]:
        self.num_calls += 1
        for target, source in zip(self.inputs, given, strict=True):
            target.detach().copy_(source)
        self._replay(self._replay_forward, self._forward_pass.used)
        # Whoever keeps an output keeps its values.
        return tuple(leaf.clone() for leaf in self.outputs if isinstance(leaf, Tensor))

    def run_backward(
        self, grads: dict[int, Tensor], versions: list[Version], awaited: set[ManagedParam]
    ) -> list[Tensor | None]:
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
        ctx: Any, graph: BlockGraph, call: _Call, num_inputs: int, anchor: Tensor, *tensors: Tensor
    ) -> tuple[Tensor, ...]:
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
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        graph: BlockGraph = ctx.graph
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


def _static(tensor: Tensor) -> Tensor:
    """A tensor for a graph to read, like one that it is called with."""
    return tensor.detach().clone().requires_grad_(tensor.requires_grad)
