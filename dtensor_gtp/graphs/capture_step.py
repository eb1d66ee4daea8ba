"""A whole training step as a CUDA graph: ``capture_step``.

A recording computes nothing, so the call that records replays, too: n calls leave what n eager
steps leave.

[Note: what a graph has baked in]
A graph keeps the addresses, shapes and Python numbers of its recording. Inputs are copied to where
the graph reads them. Each call compares the rest:

* Shapes, dtypes, other arguments, autocast, which gradients exist: another combination gets another
  graph.
* What the parameters are, whether they are trained, switches of ``GTPModule``, addresses of
  parameters, buffers and optimizer states, a state that is loaded: after a change all graphs are
  recorded again.
* Hyperparameters on the host must keep their values, those on the GPU their addresses: a change raises.

A step that replaces a buffer or a state by a new tensor, or writes to its inputs, is refused: a
replay would not do so.

[Note: state of the runtime around graphs]
A replay runs none of the runtime's Python code. So:

* Nothing is kept gathered when a recording begins: the graph would use an old weight forever.
  Nothing that it has gathered outlives it: that memory belongs to the graph, and its events can be
  waited for in the recording only.
* After a replay ``Runtime.note_step`` names the written parameters, so that eager code gathers and
  quantizes them anew.
* Gradients that a graph has made, and sums of microbatches, live at fixed addresses: they are put
  back after a replay.
* A recording that fails is cleaned up twice: within it, where events can be waited for, and after
  it, without waiting.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Hashable, Iterable, Sequence
from typing import Any, Generic, ParamSpec, TypeVar

import torch
import torch.nn as nn
from torch import Tensor
from torch.utils.weak import WeakIdRef

from .. import _torch_compat as compat
from .._howto import see
from .._modules.outside_of_modules import is_managed
from .._modules.trees import map_tensors
from .._schedule.runtime import Runtime
from .record_step import RecordedStep, Surroundings, drop_kept, params_outside, read_values
from .recorder import (
    CudaRecorder,
    KnownCalls,
    check_at_least,
    check_buffers,
    check_on_gpu,
    check_places,
    detached,
    runtimes_of,
    signature,
)

P = ParamSpec("P")
R = TypeVar("R")

logger = logging.getLogger(__name__)

# After the warm-up, this many steps in a row that were like none before cause a warning.
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

    ``fn`` is an ordinary step: forward, backward, any number of microbatches, clipping, the
    optimizer, ``zero_grad``. Every call does one step. The first ``warmup_steps`` run eagerly, the
    next is recorded and replayed, all later ones are replayed. Inputs of another shape run eagerly
    once, and get a new graph the second time.

    A step must not wait for the GPU (``item()``, ``print`` of a tensor, ``GradScaler``,
    data-dependent branches). Other work of Python in it (counting, ``LRScheduler.step``) happens
    only when it is recorded: keep it outside. A learning rate that changes must be a tensor on the
    GPU. Call ``zero_grad`` at the end of the step, or outside: at the beginning, each call finds
    other gradients, and none is recorded. All ranks must call with inputs of the same shapes.
    Needs a GPU.

    A call adds to the gradients that the last one left in ``.grad``, so calls may be microbatches.
    Copy a gradient that you need after the next call. A step that waits raises before the
    recording, where it waits: experts with ``method="all_to_all"`` do, and activation checkpointing
    with ``preserve_rng_state=True``. So does a step that writes to its inputs, or puts a new tensor
    instead of a buffer or of an optimizer's state. After a recording that failed eager training
    goes on.

    Eager steps, evaluation and loading in between work. After freezing, switches such as
    ``train()``, or a change of parameters, states or their addresses, the next calls are eager and
    record again: do it on all ranks. Call :meth:`CapturedStep.reset` after a change of anything
    else that Python reads. Gradients left by ``set_is_last_backward(False)`` belong to the step
    that completes them: no call with some in flight is recorded or replayed.

    Graphs that ``torch.cuda.graph`` records have to consist of whole passes, after eager ones of
    the same kind, with nothing kept or in flight; this is not checked.

    Args:
        fn: Arguments: any tree of tensors on the GPU, which are copied and only read, and other
            values, which are compared. Returns any tree, also of dataclasses; its tensors
            come back detached and copied.
        module: What ``fn`` trains: a module that ``gtp_shard`` was called on, or that contains such
            modules.
        optimizer: Those that ``fn`` steps.
        warmup_steps: Eager steps before the first recording, at least 2: the first observes the
            order of uses.
        max_graphs: Combinations of shapes that are recorded; further ones run eagerly.

    Returns:
        A :class:`CapturedStep`, which is called as ``fn`` is.

    Raises:
        TypeError, ValueError: An argument is of the wrong kind or out of range; an optimizer is not
            capturable.
        RuntimeError: The weights are not on a CUDA device.
        NotImplementedError: An outer ``fully_shard``, or unequal replicas.

    What it records is a ``torch.cuda.CUDAGraph``.

    Example:
        >>> model = nn.Linear(64, 64, device="cuda")
        >>> model = gtp_shard(model, init_weight_mesh("cuda").weights)
        >>> lr = torch.tensor(1e-3, device="cuda")
        >>> options = {"lr": lr, "fused": True, "capturable": True}
        >>> optimizer = torch.optim.AdamW(model.parameters(), **options)
        >>> def step(x):
        ...     loss = model(x).square().mean()
        ...     loss.backward()
        ...     optimizer.step()
        ...     optimizer.zero_grad()
        ...     return loss
        >>> step = capture_step(step, model, optimizer)
        >>> losses = [step(torch.ones(8, 64, device="cuda")) for _ in range(8)]
        >>> bool(losses[-1] < losses[0])
        True
    """
    optimizers = list(optimizer) if isinstance(optimizer, Iterable) else [optimizer]
    runtimes = check_step(fn, module, optimizers, warmup_steps, max_graphs)
    around = Surroundings(module, optimizers, runtimes)
    for runtime in runtimes:
        runtime.comm.may_replay_steps = True  # on all ranks alike
    return CapturedStep(fn, around, CudaRecorder(runtimes[0].device), warmup_steps, max_graphs)


class CapturedStep(Generic[P, R]):
    """What :func:`capture_step` returns: call it as the function that was passed. Needs a GPU.

    Example:
        >>> model = nn.Linear(64, 64, device="cuda")
        >>> model = gtp_shard(model, init_weight_mesh("cuda").weights)
        >>> def step(x):
        ...     model(x).square().mean().backward()
        ...     model.zero_grad()
        >>> step = capture_step(step, model)
        >>> for _ in range(5):
        ...     step(torch.randn(8, 64, device="cuda"))
        >>> step.num_graphs
        1
        >>> step.reset()
        >>> step.num_graphs
        0
    """

    def __init__(
        self, fn: Callable[P, R], around: Surroundings, recorder: CudaRecorder, warmup_steps: int, max_graphs: int
    ) -> None:
        self._fn = fn
        self._around = around  # as it was when the present graphs were recorded
        self._recorder = recorder
        self._device = around.runtimes[0].device
        self._calls: KnownCalls[RecordedStep] = KnownCalls(warmup_steps, max_graphs)
        self._num_unlike = 0  # eager steps in a row that were like none before
        reset = compat.weakly(self.reset)  # an optimizer may live longer than the graphs
        for optimizer in around.optimizers:
            # Loaded states have other addresses.
            optimizer.register_load_state_dict_post_hook(lambda _: reset())

    @property
    def num_graphs(self) -> int:
        """Graphs that have been recorded and are still of use."""
        return len(self._calls.graphs)

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        """Run one step. Raises ValueError if a tensor among the arguments is on another device or
        needs a gradient, or an object hides one, also in the result; RuntimeError if the step cannot be
        recorded, or what a graph has baked in has changed."""
        leaves, spec = compat.tree_flatten((args, kwargs))
        check_inputs(leaves, self._device)
        # Something that graphs have baked in has changed: record all of them again.
        if not self._around.has_same_binding() or not self._around.is_in_place():
            self.reset()
        around = self._around
        values = enumerate(read_values(around.places))
        # By reference, because the id of a gradient that is gone may be that of another one.
        grads = tuple((i, WeakIdRef(grad)) for i, grad in values if grad is not None)
        device = self._device.type
        autocast = None
        if torch.is_autocast_enabled(device):
            autocast = torch.get_autocast_dtype(device)
        # Without gradients, say, a step computes something else.
        modes = (torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast)
        kind = (str(spec), tuple(map(signature, leaves)), grads, modes)
        recorded = self._calls.graphs.get(kind)
        if recorded is None:
            if not self._calls.may_record(kind):  # in warm-up, the first of its kind, or too many graphs
                return self._run_eagerly(kind, leaves, spec)
            recorded = RecordedStep(self._fn, leaves, spec, around, self._recorder)
            self._calls.graphs[kind] = recorded
            logger.info("capture_step: graph %d recorded", self.num_graphs)
        result: R = recorded.replay(leaves)  # also right after the recording, which has computed nothing
        return result

    def reset(self) -> None:
        """Forget all graphs and free their memory: the next calls are as the first ones. Call it
        after a change that cannot be seen, such as another value of a Python variable that the step
        reads."""
        self._calls.forget()
        self._num_unlike = 0
        self._around = self._around.renewed()  # later calls compare with what is there now

    def _run_eagerly(self, kind: tuple[Hashable, ...], leaves: list[Any], spec: Any) -> R:
        args, kwargs = compat.tree_unflatten(leaves, spec)
        calls = self._calls
        around = self._around
        is_warm = calls.num_eager + 1 >= calls.num_warmup
        if is_warm and kind not in calls.seen and calls.is_full:
            logger.warning("capture_step runs eagerly: it has reached the limit of %d graphs", calls.max_graphs)
        # So that this step gathers what a recording, and other ranks that record or replay
        # meanwhile, gather.
        drop_kept(around.runtimes)
        # On the stream of recordings; the last one before a recording refuses to wait for the GPU.
        with self._recorder.eager(is_last=calls.may_record(kind, num_more=1)):
            outputs = detached(self._fn(*args, **kwargs), "A captured step")
            result: R = map_tensors(outputs, Tensor.clone)  # as after a replay
        for optimizer in around.optimizers:  # an optimizer makes its state in its first step
            check_state(optimizer, self._device)
        if not around.is_in_place():
            # A parameter got its state, or a table has grown: graphs read the old one.
            calls.graphs.clear()  # they would read tensors that are gone
            around.follow_moves()
        self._warn_if_never_recorded(kind)
        # Not if the step raised: it may not have come to where optimizers make their state.
        calls.note_eager(kind)
        return result

    def _warn_if_never_recorded(self, kind: tuple[Hashable, ...]) -> None:
        """Once, after many steps of which none was like one before."""
        seen = self._calls.seen
        if self._calls.graphs or kind in seen:
            self._num_unlike = 0
            return
        self._num_unlike += 1
        if self._num_unlike != self._calls.num_warmup + _MANY_UNLIKE:
            return  # too early, or it has warned
        # What differs from the last step, in the order of the parts of ``kind``.
        last: Any = next(reversed(seen))
        grads = "gradients that are there before the step"
        parts = ["arguments", "arguments", grads, "modes such as autocast"]
        part = next(part for part, old, new in zip(parts, last, kind, strict=True) if old != new)
        advice = ""
        if part == grads:
            advice = "; call zero_grad() at the end of the step, not at its beginning"
        logger.warning(
            "capture_step has recorded nothing in %d steps: each had other %s than all before%s",
            self._num_unlike,
            part,
            advice,
        )


def check_step(fn: Any, module: Any, optimizers: list[Any], warmup_steps: Any, max_graphs: Any) -> list[Runtime]:
    """Refuse arguments of ``capture_step``. Returns the runtimes of ``module``."""
    if not callable(fn):
        raise TypeError(f"capture_step expects a function as fn, but got {type(fn).__name__}.")
    if not isinstance(module, nn.Module):
        raise TypeError(f"capture_step expects an nn.Module as module, but got {type(module).__name__}.")
    for optimizer in optimizers:
        if not isinstance(optimizer, torch.optim.Optimizer):
            raise TypeError(f"capture_step expects optimizers as optimizer, but got {type(optimizer).__name__}.")
    check_at_least("capture_step", warmup_steps=(warmup_steps, 2), max_graphs=(max_graphs, 1))
    runtimes = runtimes_of(module)
    for aid in ("order", "finite"):
        if any(getattr(runtime.comm.debug, aid) for runtime in runtimes):
            raise RuntimeError(
                f"capture_step cannot record a step with DTENSOR_GTP_DEBUG={aid}, because the host "
                "waits at each collective. Train without capture_step while you debug. "
                f"{see('capture_a_step')}"
            )
    check_on_gpu("capture_step", module, runtimes[0].device)
    check_buffers("capture_step", module, runtimes[0].device)
    for optimizer in optimizers:
        check_optimizer(optimizer, module)
    return runtimes


def check_optimizer(optimizer: torch.optim.Optimizer, module: nn.Module) -> None:
    """Refuse an optimizer that is not capturable, or steps sharded parameters of runtimes outside
    of ``module``."""
    name = type(optimizer).__name__
    for index, group in enumerate(optimizer.param_groups):
        # Its step counter is on the host: each replay would use one value.
        if group.get("capturable") is False:  # None: it has no such switch, see ``check_state``
            what = f"optimizers that can be captured, but group {index} of {name} has capturable=False"
            raise ValueError(f"capture_step expects {what}. Create it with capturable=True. {see('capture_a_step')}")
    for param in params_outside(module, [optimizer]):
        # After a replay, only the runtimes of ``module`` learn what the graph has written.
        if is_managed(param):
            raise ValueError(
                f"capture_step expects a module that contains all sharded parameters of {name}, "
                f"but one of shape {tuple(param.shape)} is outside. Pass a module around both, "
                "such as nn.ModuleList."
            )


def check_state(optimizer: torch.optim.Optimizer, device: torch.device) -> None:
    """An optimizer without the switch is capturable if its state is on the GPU: a number would be
    baked in."""
    for state in optimizer.state.values():
        for name, value in state.items() if isinstance(state, dict) else ():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if is_number:
                where = "a Python number"
            elif isinstance(value, Tensor) and value.device.type != device.type:
                where = f"on '{value.device.type}'"
            else:
                continue
            raise ValueError(
                f"capture_step expects optimizers whose state is on '{device.type}', but "
                f"'{name}' of {type(optimizer).__name__} is {where}: a graph would repeat one "
                "value. Use an optimizer with capturable=True, or step it outside of the "
                f"captured function. {see('capture_a_step')}"
            )


def check_inputs(leaves: list[Any], device: torch.device) -> None:
    check_places(leaves, device, "A captured step")
    for leaf in leaves:
        if isinstance(leaf, Tensor) and leaf.requires_grad:  # a graph knows the leaf of its recording alone
            what = f"one of shape {tuple(leaf.shape)} does"
            raise ValueError(f"A captured step expects inputs that need no gradient, but {what}. Pass it detached.")
