"""A whole training step as a CUDA graph: ``capture_step``.

[Note: warm-up]
There is none beside the training itself. The first calls run the step eagerly, and each is a step of the training like
any other; then one call records the graph, which computes nothing, and replays it, which is that call's step. So there
are no gradients, optimizer states or random numbers to put back, and what n calls leave is what n eager steps leave.

[Note: what a graph has baked in]
Addresses (of inputs, parameters, gradients that exist before the step), shapes, and every number that Python knew.
Inputs are copied to where the graph reads them. What else may change is compared at each call: shapes, dtypes and
values that are no tensors, and which gradients exist: another combination is another graph. After a change of what the
parameters are, whether they are trained, the switches of ``GTPModule``, or after an optimizer's state was loaded, all
graphs are recorded anew. Hyperparameters of the optimizer that are not on the GPU must stay as they are.

[Note: state of the runtime around graphs]
A recording runs the runtime's Python code once, a replay not at all. Before it nothing may be kept gathered (the graph
would compute with an old weight for ever), and nothing that it has gathered may outlive it (its memory is the graph's,
its events cannot be waited for). After each replay the runtime is told that all parameters have been written to, as
after an optimizer's step, so that later eager code gathers anew and quantizes anew. Gradients that a graph has made,
and the sums of microbatches beside them, live at fixed addresses: where an eager step would have left such tensors,
they are put back after each replay. What a recording that fails has left is dropped: within it, while its events can be
waited for, and again after it, without waiting.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable, Hashable, Sequence
from contextlib import suppress
from typing import Any, Generic, NamedTuple, ParamSpec, TypeVar

import torch
import torch.nn as nn

from . import _torch_compat as compat
from ._recorder import CudaRecorder, Recorder
from ._runtime.modules import binding_of
from ._runtime.param import ManagedParam, ShardedWeight
from ._runtime.state import Runtime

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)


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
    A learning rate that changes must be a tensor on the GPU. All ranks call alike, as with eager steps.

    Args:
        fn: Positional and keyword arguments: any tree of tensors on the GPU, which are copied, and other values, which
            are compared. Returns any tree; its tensors come back detached and copied.
        module: What ``fn`` trains: a module that ``gtp_shard`` was called on, or that contains such modules.
        optimizer: Those that ``fn`` steps.
        warmup_steps: Eager steps before the first recording, at least 2: the first observes the order of uses.
        max_graphs: Beyond so many combinations of shapes, further ones run eagerly.

    Raises:
        TypeError, ValueError: An argument is of the wrong kind or out of range; an optimizer is not capturable.
        RuntimeError: The weights are not on a CUDA device.
        NotImplementedError: Something around the module is not supported: an outer ``fully_shard``, unequal replicas.
    """
    optimizers = [optimizer] if isinstance(optimizer, torch.optim.Optimizer) else list(optimizer)
    _check_arguments(fn, module, optimizers, warmup_steps, max_graphs)
    runtimes = _runtimes_of(module)
    device = runtimes[0].device
    if device.type != "cuda":
        raise RuntimeError(
            f"capture_step records CUDA graphs, but the weights of the {type(module).__name__} are on '{device.type}'. "
            "Call the step as it is there."
        )
    for one in optimizers:
        _check_capturable(one)
    return CapturedStep(fn, module, optimizers, runtimes, CudaRecorder(device), warmup_steps, max_graphs)


class _Graph(NamedTuple):
    """One recording, with everything that must live as long as it."""

    replay: Callable[[], None]
    inputs: list[torch.Tensor]
    outputs: list[Any]
    output_spec: Any
    found: list[torch.Tensor | None]  # gradients that were there before: the graph adds to them
    left: list[torch.Tensor | None]  # gradients that are there after it
    hyperparameters: list[dict[str, Any]]


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
        self._binding: Hashable = None
        self._seen: set[Hashable] = set()
        self._graphs: dict[Hashable, _Graph] = {}
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
        _check_inputs(leaves, self._runtimes[0].device)
        binding = self._describe_binding()
        if binding != self._binding:
            self.reset()
            self._binding = binding
        places = self._places()
        grads = tuple(0 if grad is None else id(grad) for grad in _read(places))
        key = (str(spec), tuple(map(_signature, leaves)), grads)
        graph = self._graphs.get(key)
        if graph is None:
            is_ready = self._num_eager >= self._warmup_steps and key in self._seen
            if not is_ready or len(self._graphs) >= self._max_graphs:
                return self._run_eagerly(key, leaves, spec)
            graph = self._graphs[key] = self._record(leaves, spec, places)
        return self._replay(graph, leaves, places)

    def reset(self) -> None:
        """Forget all graphs and free their memory: the next calls are as the first ones. Call it after a change that
        cannot be seen, such as another value of a Python variable that the step reads."""
        self._graphs.clear()
        self._seen.clear()
        self._num_eager = 0

    # --- the three ways to run ----------------------------------------------------------------------------------------

    def _run_eagerly(self, key: Hashable, leaves: list[Any], spec: Any) -> R:
        args, kwargs = compat.tree_unflatten(leaves, spec)
        self._num_eager += 1
        is_last = self._num_eager >= self._warmup_steps and key in self._seen and len(self._graphs) < self._max_graphs
        if self._num_eager > self._warmup_steps and len(self._graphs) == self._max_graphs and key not in self._seen:
            logger.warning("capture_step runs eagerly: there are %d graphs already, the most allowed", self._max_graphs)
        self._seen.add(key)
        if len(self._graphs) < self._max_graphs:
            # So its gathers are those of the recording, for which a gather stage cannot grow.
            self._drop_kept()
        with self._recorder.eager(is_last=is_last):
            result: R = compat.tree_map_only(torch.Tensor, torch.Tensor.detach, self._fn(*args, **kwargs))
        for optimizer in self._optimizers:
            _check_state(optimizer, self._runtimes[0].device)
        return result

    def _record(self, leaves: list[Any], spec: Any, places: list[_Place]) -> _Graph:
        self._check_pinned()
        self._check_none_in_flight("before it is recorded")
        inputs = [leaf.clone() for leaf in leaves if isinstance(leaf, torch.Tensor)]
        args, kwargs = compat.tree_unflatten(_replaced(leaves, inputs), spec)
        found = _read(places)
        num_steps = [runtime.num_steps for runtime in self._runtimes]
        hyperparameters = _hyperparameters(self._optimizers)
        self._drop_kept()
        refusals: list[Exception] = []

        def step() -> Any:
            try:
                outputs, output_spec = compat.tree_flatten(self._fn(*args, **kwargs))
                self._check_none_in_flight("when it ends")
                try:
                    self._check_recorded(hyperparameters, num_steps)
                except (RuntimeError, ValueError) as refusal:
                    refusals.append(refusal)
                    raise
                self._drop_kept()  # within the recording: its events can be waited for nowhere else
            except Exception:
                with suppress(RuntimeError):  # the recording may be void
                    for runtime in self._runtimes:
                        runtime.abandon()
                    self._drop_kept()
                raise
            return [leaf.detach() if isinstance(leaf, torch.Tensor) else leaf for leaf in outputs], output_spec

        try:
            replay, (outputs, output_spec) = self._recorder.record(step)
        except BaseException as error:
            for runtime in self._runtimes:
                runtime.forget_recording()
            _write(places, found)
            if error in refusals or not isinstance(error, Exception):
                raise
            raise RuntimeError(
                f"capture_step could not record the step: {type(error).__name__}: {error}. A step that is recorded "
                "must not wait for the GPU (item(), print of a tensor, GradScaler, copies from the host), draw from "
                "generators of its own, or leave gradients in flight (set_is_last_backward(False))."
            ) from error
        logger.info("capture_step: graph %d recorded", len(self._graphs) + 1)
        return _Graph(replay, inputs, outputs, output_spec, found, _read(places), hyperparameters)

    def _check_recorded(self, hyperparameters: list[dict[str, Any]], num_steps: list[int]) -> None:
        """Raises:
        RuntimeError: The step has changed a number that the graph has baked in.
        ValueError: It steps optimizers that were not passed.
        """
        self._check_constant(hyperparameters, "within the step")
        if not self._optimizers and num_steps != [runtime.num_steps for runtime in self._runtimes]:
            raise ValueError("capture_step expects the optimizers that the step steps: pass them as optimizer.")

    def _replay(self, graph: _Graph, leaves: list[Any], places: list[_Place]) -> R:
        self._check_pinned()
        self._check_none_in_flight("before it is replayed")
        self._check_constant(graph.hyperparameters, "since the step was recorded")
        given = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        for target, source in zip(graph.inputs, given, strict=True):
            target.copy_(source, non_blocking=True)
        graph.replay()
        _write(places, graph.left)
        groups = [group for optimizer in self._optimizers for group in optimizer.param_groups]
        updated = {id(param) for group in groups for param in group["params"]}
        for runtime in self._runtimes:
            runtime.note_step(updated)
        outputs = [leaf.clone() if isinstance(leaf, torch.Tensor) else leaf for leaf in graph.outputs]
        result: R = compat.tree_unflatten(outputs, graph.output_spec)
        return result

    # --- the state around ---------------------------------------------------------------------------------------------

    def _describe_binding(self) -> Hashable:
        params = [param for runtime in self._runtimes for param in runtime.params]
        switches = tuple(_describe_param(param) for param in params)
        is_training = tuple(module.training for module in self._module.modules())
        return switches, is_training, tuple(runtime.is_last_backward for runtime in self._runtimes)

    def _places(self) -> list[_Place]:
        """Where a step finds and leaves gradients."""
        places: list[_Place] = [(param, "grad") for param in self._module.parameters()]
        for runtime in self._runtimes:
            places += [(param, name) for param in runtime.params for name in _SUMS if hasattr(param, name)]
        return places

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
        for optimizer, old in zip(self._optimizers, before, strict=True):
            (now,) = _hyperparameters([optimizer])
            for name in old.keys() | now.keys():
                if old.get(name) != now.get(name):
                    raise RuntimeError(
                        f"{type(optimizer).__name__}'s {name} has changed from {old.get(name)} to {now.get(name)} "
                        f"{when}, but the graph has the first of these baked in. Make it a tensor on the GPU, change "
                        "it outside of the step, or call reset() on the captured step."
                    )


def _reset(captured: CapturedStep[Any, Any] | None) -> None:
    if captured is not None:
        captured.reset()


# --- gradients --------------------------------------------------------------------------------------------------------

# An object and the name of its attribute that is a gradient or None.
_Place = tuple[Any, str]

# Sums over microbatches beside ``.grad``, see ``param.py`` and ``whole.py``.
_SUMS = ("_wide_grad", "unsharded_grad", "unreplicated_grad", "unsynced_grad")


def _read(places: list[_Place]) -> list[torch.Tensor | None]:
    # A wide sum goes with a gradient: it is void when that has been dropped.
    return [
        None if name == "_wide_grad" and owner.param.grad is None else getattr(owner, name) for owner, name in places
    ]


def _write(places: list[_Place], values: list[torch.Tensor | None]) -> None:
    for (owner, name), value in zip(places, values, strict=True):
        setattr(owner, name, value)


# --- checks and descriptions ------------------------------------------------------------------------------------------


def _check_arguments(fn: Any, module: Any, optimizers: list[Any], warmup_steps: Any, max_graphs: Any) -> None:
    if not callable(fn):
        raise TypeError(f"capture_step expects a function as fn, but got {type(fn).__name__}.")
    if not isinstance(module, nn.Module):
        raise TypeError(f"capture_step expects an nn.Module as module, but got {type(module).__name__}.")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"capture_step expects optimizers as optimizer, but got {type(optimizer).__name__}.")
    for name, value, least in (("warmup_steps", warmup_steps, 2), ("max_graphs", max_graphs, 1)):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"capture_step expects an int as {name}, but got {value!r}.")
        if value < least:
            raise ValueError(f"capture_step expects {name} >= {least}, but got {value}.")


def _runtimes_of(module: nn.Module, caller: str = "capture_step") -> list[Runtime]:
    runtimes = {id(b.group.runtime): b.group.runtime for m in module.modules() if (b := binding_of(m)) is not None}
    if not runtimes:
        raise ValueError(
            f"{caller} expects a module that gtp_shard was called on, or one around it, but got a "
            f"{type(module).__name__} without. Call gtp_shard first."
        )
    for runtime in runtimes.values():
        if any(param.is_cut_again for param in runtime.params):
            raise NotImplementedError(
                f"{caller} does not support an outer fully_shard. Use a (replicate, gtp) mesh in its place."
            )
        if runtime.grads.replicas is not None:
            raise NotImplementedError(f"{caller} does not support elastic.synchronize_replicas.")
    return list(runtimes.values())


def _check_capturable(optimizer: torch.optim.Optimizer) -> None:
    for index, group in enumerate(optimizer.param_groups):
        if group.get("capturable") is False:
            raise ValueError(
                f"capture_step expects optimizers that can be captured, but group {index} of "
                f"{type(optimizer).__name__} has capturable=False. Create it with capturable=True."
            )


def _check_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """An optimizer without the switch is capturable if its state is on the GPU: a number would be baked in."""
    for state in optimizer.state.values():
        for name, value in state.items() if isinstance(state, dict) else ():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            is_elsewhere = isinstance(value, torch.Tensor) and value.device.type != device.type
            if is_number or is_elsewhere:
                where = "a Python number" if is_number else f"on '{value.device.type}'"
                raise ValueError(
                    f"capture_step expects optimizers whose state is on '{device.type}', but '{name}' of "
                    f"{type(optimizer).__name__} is {where}: a graph would repeat one step's value. Use an optimizer "
                    "with capturable=True, or step it outside of the captured function."
                )


def _check_inputs(leaves: list[Any], device: torch.device) -> None:
    for leaf in leaves:
        if not isinstance(leaf, torch.Tensor):
            continue
        if leaf.device.type != device.type:
            raise ValueError(
                f"A captured step expects tensors on '{device.type}', but got one of shape {tuple(leaf.shape)} on "
                f"'{leaf.device.type}'. Move it before the call."
            )
        if leaf.requires_grad:
            raise ValueError(
                f"A captured step expects inputs that need no gradient, but one of shape {tuple(leaf.shape)} does. "
                "Pass it detached."
            )


def _signature(leaf: Any) -> Hashable:
    """What two arguments must have in common for one graph to serve both."""
    if isinstance(leaf, torch.Tensor):
        return type(leaf), leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    try:
        hash(leaf)
    except TypeError:
        raise ValueError(
            "A captured step expects tensors, and values that can be compared (hashable), but got a "
            f"{type(leaf).__name__}."
        ) from None
    return type(leaf), leaf


def _replaced(leaves: list[Any], tensors: list[torch.Tensor]) -> list[Any]:
    remaining = iter(tensors)
    return [next(remaining) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]


def _hyperparameters(optimizers: list[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """What a graph would bake in of param groups, by name (and group, if there are several): all but GPU tensors."""
    return [
        {
            f"{name} of group {index}" if len(optimizer.param_groups) > 1 else name: _number(value)
            for index, group in enumerate(optimizer.param_groups)
            for name, value in group.items()
            if name != "params"
        }
        for optimizer in optimizers
    ]


def _number(value: Any) -> Any:
    if not isinstance(value, torch.Tensor):
        return value
    return value.item() if value.device.type == "cpu" else "a tensor on the GPU"


def _describe_param(param: ManagedParam) -> Hashable:
    flags = param.flags
    registered = param.sites[0].module._parameters.get(param.sites[0].name)
    return (
        id(registered),
        id(param.shard),
        registered is not None and registered.requires_grad,
        flags.requires_gradient_sync,
        flags.requires_all_reduce,
        flags.reshard_after_forward,
        flags.reshard_after_backward,
        flags.gradient_divide_factor,
    )


__all__ = ["CapturedStep", "capture_step"]
