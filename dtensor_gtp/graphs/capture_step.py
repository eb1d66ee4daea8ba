"""A whole training step as a CUDA graph: ``capture_step``.

[Note: warm-up]
There is none beside the training itself. The first calls run the step eagerly, and each is a step of the training like
any other; then one call records the graph, which computes nothing, and replays it, which is that call's step. So there
are no gradients, optimizer states or random numbers to put back, and what n calls leave is what n eager steps leave.

[Note: what a graph has baked in]
Addresses (of inputs, parameters, buffers, optimizer states, gradients that exist before the step), shapes, and every
number that Python knew. Inputs are copied to where the graph reads them. What else may change is compared at each call:
shapes, dtypes and values that are no tensors, autocast, and which gradients exist: another combination is another
graph. After a change of what the parameters are, whether they are trained, the switches of ``GTPModule``, where a
parameter, a buffer or an optimizer's state lies, or after an optimizer's state was loaded, all graphs are recorded
anew. Hyperparameters of the optimizer that are not on the GPU must stay as they are, and those on it where they are. A
step that puts a new tensor in the place of a buffer or of a state, or writes to its inputs, would do so only when it is
recorded: it is refused.

[Note: state of the runtime around graphs]
A recording runs the runtime's Python code once, a replay not at all. Before it nothing may be kept gathered (the graph
would compute with an old weight for ever), and nothing that it has gathered may outlive it (its memory is the graph's,
its events cannot be waited for). After each replay the runtime is told which parameters have been written to, as after
an optimizer's step, so that later eager code gathers anew and quantizes anew. Gradients that a graph has made, and the
sums of microbatches beside them, live at fixed addresses: where an eager step would have left such tensors, they are
put back after each replay. What a recording that fails has left is dropped: within it, while its events can be waited
for, and again after it, without waiting; and what it has made in the place of buffers and of optimizers' states.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from typing import Any, Generic, ParamSpec, TypeVar

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.weak import WeakIdRef

from .. import _torch_compat as compat
from .._params.sharded_weight import ShardedWeight
from .._schedule.optimizer_steps import optimizer_steps
from .._schedule.runtime import Runtime
from .checks import (
    check_arguments,
    check_buffers,
    check_capturable,
    check_inputs,
    check_params,
    check_state,
    runtimes_of,
)
from .record_again import (
    MOST_SEEN,
    Kept,
    Key,
    Place,
    Surroundings,
    Updates,
    addresses,
    changed,
    describe_modes,
    differences,
    hyperparameters,
    ids_of_params,
    signature,
)
from .record_step import Before, StepGraph, read_values, replaced_params, versions_of, write_values
from .recorder import CudaRecorder, Recorder

P = ParamSpec("P")


R = TypeVar("R")


logger = logging.getLogger(__name__)


# Steps beyond those of the warm-up after which somebody is told that none was like another.
_MANY_UNLIKE = 5


def capture_step(
    fn: Callable[P, R],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] = (),
    *,
    warmup_steps: int = 3,
    max_graphs: int = 8,
) -> CapturedStep[P, R]:
    """Make a function that runs a whole training step as one CUDA graph.

    ``fn`` is a step as it is: forward, backward, any number of microbatches, clipping, the optimizer, ``zero_grad``::

        def step(tokens):
            loss = loss_fn(model, tokens)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            return loss

        lr = torch.tensor(1e-3, device="cuda")
        optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True, capturable=True)
        step = capture_step(step, model, optimizer)
        loss = step(tokens)

    Every call does one step. The first ``warmup_steps`` run eagerly, the next is recorded and replayed, all later ones
    are replayed; so nothing has to be restored after warming up. Inputs of another shape run eagerly once, and get a
    graph of their own when they come again; all graphs share one pool of memory.

    A step may not wait for the GPU (``item()``, ``print`` of a tensor, ``GradScaler``, data-dependent branches), and
    what Python does in it besides (counting, ``LRScheduler.step``) happens only when it is recorded: keep that outside.
    A learning rate that changes must be a tensor on the GPU. ``zero_grad`` belongs to the end of the step, or outside:
    with the gradients of the step before it, each call would find others. All ranks call alike, as with eager steps,
    with inputs of the same shapes: where those differ, some ranks would replay what others run, which exchanges of
    activations do not bear.

    Args:
        fn: Positional and keyword arguments: any tree of tensors on the GPU, which are copied and only read, and other
            values, which are compared. Returns any tree; its tensors come back detached and copied.
        module: What ``fn`` trains: a module that ``gtp_shard`` was called on, or that contains such modules.
        optimizer: Those that ``fn`` steps.
        warmup_steps: Eager steps before the first recording, at least 2: the first observes the order of uses.
        max_graphs: Beyond so many combinations of shapes, further ones run eagerly.

    Raises:
        TypeError, ValueError: An argument is of the wrong kind or out of range; an optimizer is not capturable.
        RuntimeError: The weights are not on a CUDA device.
        NotImplementedError: Something around the module is not supported: an outer ``fully_shard``, unequal replicas.
    """
    optimizers = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    check_arguments(fn, module, optimizers, warmup_steps, max_graphs)
    runtimes = runtimes_of(module)
    device = runtimes[0].device
    if device.type != "cuda":
        raise RuntimeError(
            f"capture_step records CUDA graphs, but the weights of the {type(module).__name__} are on '{device.type}'. "
            "Call the step as it is there."
        )
    check_buffers("capture_step", module, device)
    for one in optimizers:
        check_capturable(one)
        check_params(one, module)
    return CapturedStep(fn, module, optimizers, runtimes, CudaRecorder(device), warmup_steps, max_graphs)


class CapturedStep(Generic[P, R]):
    """What :func:`capture_step` returns: call it as the function that was passed."""

    def __init__(
        self,
        fn: Callable[P, R],
        module: nn.Module,
        optimizers: list[torch.optim.Optimizer],
        runtimes: list[Runtime],
        recorder: Recorder,
        warmup_steps: int,
        max_graphs: int,
    ) -> None:
        self._fn = fn
        self._module = module
        self._optimizers = optimizers
        self._runtimes = runtimes
        self._recorder = recorder
        self._warmup_steps = warmup_steps
        self._max_graphs = max_graphs
        self._num_eager = 0
        self._around: Surroundings | None = None  # what all graphs find beside their inputs
        self._seen: dict[Key, None] = {}  # in order
        self._graphs: dict[Key, StepGraph] = {}
        self._num_unlike = 0  # eager steps in a row that were like none before
        this = weakref.ref(self)
        for optimizer in optimizers:
            # What is loaded has other addresses.
            optimizer.register_load_state_dict_post_hook(lambda _: _reset(this()))

    @property
    def num_graphs(self) -> int:
        """Graphs that have been recorded and are still of use."""
        return len(self._graphs)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run one step.

        Raises:
            ValueError: A tensor among the arguments is on another device, or needs a gradient.
            RuntimeError: The step cannot be recorded, or what a graph has baked in has changed.
        """
        leaves, spec = compat.tree_flatten((args, kwargs))
        check_inputs(leaves, self._runtimes[0].device)
        around = self._around
        if around is None or not (around.has_same_binding() and around.is_in_place()):
            self.reset()
            around = self._around = Surroundings(self._module, self._optimizers, self._runtimes)
        places = around.places
        # An id alone would be that of another gradient once this one is gone.
        grads = tuple((i, WeakIdRef(grad)) for i, grad in enumerate(read_values(places)) if grad is not None)
        key = (str(spec), tuple(map(signature, leaves)), grads, describe_modes(self._runtimes[0].device))
        graph = self._graphs.get(key)
        if graph is None:
            is_ready = self._num_eager >= self._warmup_steps and key in self._seen
            if not is_ready or len(self._graphs) >= self._max_graphs:
                return self._run_eagerly(key, leaves, spec, around)
            graph = self._graphs[key] = self._record(leaves, spec, places)
        return self._replay(graph, leaves, places)

    def reset(self) -> None:
        """Forget all graphs and free their memory: the next calls are as the first ones. Call it after a change that
        cannot be seen, such as another value of a Python variable that the step reads."""
        self._graphs.clear()
        self._seen.clear()
        self._num_eager = 0
        self._num_unlike = 0
        self._around = None

    def _run_eagerly(self, key: Key, leaves: list[Any], spec: Any, around: Surroundings) -> R:
        args, kwargs = compat.tree_unflatten(leaves, spec)
        is_warm = self._num_eager + 1 >= self._warmup_steps
        is_last = is_warm and key in self._seen and len(self._graphs) < self._max_graphs
        if is_warm and len(self._graphs) == self._max_graphs and key not in self._seen:
            logger.warning("capture_step runs eagerly: there are %d graphs already, the most allowed", self._max_graphs)
        # So its gathers are those of the recording, for which a gather stage cannot grow, and those of ranks that
        # record or replay meanwhile.
        self._drop_kept()
        with self._recorder.eager(is_last=is_last):
            result: R = compat.tree_map_only(Tensor, lambda t: t.detach().clone(), self._fn(*args, **kwargs))
        for optimizer in self._optimizers:
            check_state(optimizer, self._runtimes[0].device)
        if not around.is_in_place():  # a state that a parameter got, or a table that has grown: graphs know the old one
            self._graphs.clear()
            self._around = around.moved()
        # A step that raised counts for nothing: it may not have come to where optimizers make their state.
        self._num_eager += 1
        self._tell_if_never_recorded(key)
        self._seen[key] = None
        if len(self._seen) > MOST_SEEN:
            del self._seen[next(iter(self._seen))]
        return result

    def _tell_if_never_recorded(self, key: Key) -> None:
        """Once, after many steps of which none was like one before."""
        self._num_unlike = 0 if self._graphs or key in self._seen else self._num_unlike + 1
        if self._num_unlike == self._warmup_steps + _MANY_UNLIKE:
            last = next(reversed(self._seen))
            parts = ["arguments", "arguments", "gradients that are there before the step", "modes such as autocast"]
            what = next(part for part, old, new in zip(parts, last, key, strict=True) if old != new)
            logger.warning(
                "capture_step has recorded nothing in %d steps: each had other %s than all before%s",
                self._num_unlike,
                what,
                "; call zero_grad() at the end of the step, not at its begin" if what == parts[2] else "",
            )

    def _record(self, leaves: list[Any], spec: Any, places: list[Place]) -> StepGraph:
        self._check_pinned()
        self._check_none_in_flight("before it is recorded")
        inputs = [leaf.clone() for leaf in leaves if isinstance(leaf, Tensor)]
        args, kwargs = compat.tree_unflatten(replaced_params(leaves, inputs), spec)
        found, kept = read_values(places), Kept(self._module, self._optimizers)
        baked_in, at = hyperparameters(self._optimizers), addresses(self._module, self._optimizers)
        written: set[int] = set()
        self._drop_kept()
        for runtime in self._runtimes:
            runtime.comm.begin_recording()
        refusals: list[Exception] = []

        def step() -> Any:
            before = Before(baked_in, at, self._versions(), versions_of(inputs), Updates())
            optimizer_steps().tell(before.updates)
            try:
                outputs, output_spec = compat.tree_flatten(self._fn(*args, **kwargs))
                self._check_none_in_flight("when it ends")
                try:
                    self._check_recorded(before, inputs)
                except (RuntimeError, ValueError) as refusal:
                    refusals.append(refusal)
                    raise
                self._drop_kept()  # within the recording: its events can be waited for nowhere else
                written.update(self._written_since(before))
            except Exception:
                with suppress(RuntimeError):  # the recording may be void
                    for runtime in self._runtimes:
                        runtime.abandon()
                    self._drop_kept()
                raise
            return [leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in outputs], output_spec

        try:
            replay, (outputs, output_spec) = self._recorder.record(step)
        except BaseException as error:
            for runtime in self._runtimes:
                runtime.forget_recording()
            write_values(places, found)
            kept.put_back()
            is_refusal = error in refusals
            refusals.clear()  # which its own traceback holds
            if is_refusal or not isinstance(error, Exception):
                raise
            raise RuntimeError(
                f"capture_step could not record the step: {type(error).__name__}: {error}. A step that is recorded "
                "must not wait for the GPU (item(), print of a tensor, GradScaler, copies from the host), draw from "
                "generators of its own, or leave gradients in flight (set_is_last_backward(False))."
            ) from error
        logger.info("capture_step: graph %d recorded", len(self._graphs) + 1)
        return StepGraph(replay, inputs, outputs, output_spec, found, read_values(places), baked_in, written)

    def _check_recorded(self, before: Before, inputs: list[Tensor]) -> None:
        """Raises:
        RuntimeError: The step has changed a number that the graph has baked in, or put a tensor in another's place.
        ValueError: It steps optimizers that were not passed, or writes to its inputs.
        """
        trained = {id(param) for param in self._module.parameters()}
        if before.updates.ids & trained - ids_of_params(self._optimizers):
            raise ValueError("capture_step expects the optimizers that the step steps: pass them as optimizer.")
        self._check_constant(before.hyperparameters, "within the step")
        what = changed(before.at, addresses(self._module, self._optimizers))
        if what is not None:
            raise RuntimeError(
                f"capture_step expects a step that writes to the tensors that are there, but this one has put {what} "
                "to another place, which no replay would do, and each would find the old one. Write to it in place, "
                "as copy_() does."
            )
        for old, now, one in zip(before.inputs, versions_of(inputs), inputs, strict=True):
            if old != now:
                raise ValueError(
                    "capture_step expects a step that only reads its inputs, but this one writes to one of shape "
                    f"{tuple(one.shape)}: what graphs read are copies, so the caller would not see it. Return it."
                )

    def _versions(self) -> list[tuple[int, int]]:
        return [(p.param._version, p.shard._version) for runtime in self._runtimes for p in runtime.params]

    def _written_since(self, before: Before) -> set[int]:
        """Ids of the parameters that a step has written to: by an optimizer, which leaves no trace, or otherwise."""
        params = [param.param for runtime in self._runtimes for param in runtime.params]
        states = zip(params, before.versions, self._versions(), strict=True)
        return ids_of_params(self._optimizers) | {id(param) for param, old, now in states if old != now}

    def _replay(self, graph: StepGraph, leaves: list[Any], places: list[Place]) -> R:
        self._check_pinned()
        self._check_none_in_flight("before it is replayed")
        self._check_constant(graph.hyperparameters, "since the step was recorded")
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        for target, source in zip(graph.inputs, given, strict=True):
            target.copy_(source, non_blocking=True)
        graph.replay()
        write_values(places, graph.left)
        for runtime in self._runtimes:
            runtime.note_step(graph.written)
        outputs = [leaf.clone() if isinstance(leaf, Tensor) else leaf for leaf in graph.outputs]
        result: R = compat.tree_unflatten(outputs, graph.output_spec)
        return result

    def _weights(self) -> list[tuple[Runtime, ShardedWeight]]:
        return [(runtime, weight) for runtime in self._runtimes for weight in runtime.weights]

    def _drop_kept(self) -> None:
        for runtime, weight in self._weights():
            if not weight.is_pinned:
                runtime.drop_kept(weight)

    def _check_none_in_flight(self, when: str) -> None:
        for runtime in self._runtimes:
            runtime.drop_broken_backward()
        if any(runtime.has_gradients_in_flight for runtime in self._runtimes):
            raise RuntimeError(
                f"capture_step expects a step without gradients in flight {when}, but set_is_last_backward(False) has "
                "left some, which a graph would neither add to its own nor complete. Run the last backward of these "
                "microbatches eagerly, or all of them within the step."
            )

    def _check_pinned(self) -> None:
        pinned = [weight.fqn for _, weight in self._weights() if weight.is_pinned]
        if pinned:
            raise RuntimeError(
                f"capture_step expects weights that are gathered in the step, but unshard() keeps {len(pinned)} of "
                f"them ('{pinned[0]}', ...), which a graph would use unchanged for ever. Call reshard() before."
            )

    def _check_constant(self, before: list[dict[str, Any]], when: str) -> None:
        for name, old, now in differences(self._optimizers, before):
            raise RuntimeError(
                f"{name} has changed from {old} to {now} {when}, but the graph has the first of these baked in. Make "
                "it a tensor on the GPU that is filled in place, change it outside of the step, or call reset() on the "
                "captured step."
            )


def _reset(captured: CapturedStep[Any, Any] | None) -> None:
    if captured is not None:
        captured.reset()
