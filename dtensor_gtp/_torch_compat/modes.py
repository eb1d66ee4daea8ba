"""What watches the ops that run: selective checkpoints and the compiler."""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import import_module
from types import CodeType, FunctionType
from typing import Any, TypeVar, cast

import torch
from torch import _guards
from torch.autograd import graph as autograd_graph
from torch.fx import _symbolic_trace as symbolic_trace
from torch.utils import _python_dispatch as python_dispatch
from torch.utils import checkpoint
from torch.utils._pytree import tree_map_only

_T = TypeVar("_T")

# Active in the forward, and in the recomputation, of a checkpoint with a policy.
POLICY_MODES: tuple[Any, ...] = (checkpoint._CachingTorchDispatchMode, checkpoint._CachedTorchDispatchMode)

_NOTHING = nullcontext()  # one for all callers: it has no state

_ONCE = (
    "gtp_shard does not compute second derivatives through a fused op or with respect to a sharded weight "
    "(once_differentiable). For an nn.Linear or nn.Embedding, read the weight in the forward of the module around "
    "it, e.g. F.linear(x, self.layer.weight, self.layer.bias), and differentiate the gradient of an input."
)

# Of this thread; 0 almost always, and quick to ask.
_num_dispatch_modes: Callable[[], int] = torch._C._len_torch_dispatch_stack
# Makes its argument the compiler of this thread's frames (None: they run as they are) and returns the last one.
set_eval_frame: Callable[[Any], Any] = torch._C._dynamo.eval_frame.set_eval_frame


TorchDispatchMode = python_dispatch.TorchDispatchMode
OpOverload = torch._ops.OpOverload


def asks_checkpoint_policy() -> bool:
    """Whether a selective checkpoint asks its policy about the ops that run now."""
    depth = _num_dispatch_modes()
    return depth > 0 and any(isinstance(torch._C._get_dispatch_stack_at(i), POLICY_MODES) for i in range(depth))


def unseen_by_checkpoint_policies() -> AbstractContextManager[Any]:
    """A context whose ops selective activation checkpointing neither counts nor caches nor skips."""
    if not asks_checkpoint_policy():  # the usual case, which must be quick
        return _NOTHING
    return _without_checkpoint_modes(python_dispatch._get_current_dispatch_mode_stack())


class _Stored:
    """Outputs of one op that a checkpoint saves. What comes in goes through ``store``."""

    def __init__(self, store: Callable[[Any], Any]) -> None:
        super().__init__()  # the dict or the list
        self._store = store

    def stored(self, entry: Any) -> Any:
        # What torch stores for ops that are recomputed has no wrapper, so it stays as it is.
        return tree_map_only(checkpoint._VersionWrapper, self._store, entry)


class _StoredByIndex(_Stored, dict[int, Any]):
    """By the number of the call."""

    def __setitem__(self, index: int, entry: Any) -> None:
        super().__setitem__(index, self.stored(entry))


class _StoredInOrder(_Stored, list[Any]):
    """In torch 2.11, which appends outputs and takes the first one."""

    def append(self, entry: Any) -> None:
        super().append(self.stored(entry))


def checkpoint_contexts(policy: Callable[..., Any], store: Callable[[Any], Any]) -> tuple[Any, Any]:
    """``create_selective_checkpoint_contexts(policy)``, with ``store`` of each tensor that it saves instead of the
    tensor. It gets an object with ``val`` and ``get_val(allow_cache_entry_mutation)``, and returns one with the latter.
    pytorch 170384 would make this public."""
    contexts: tuple[Any, Any] = checkpoint.create_selective_checkpoint_contexts(policy)
    storage = contexts[0].storage
    # The factory tells which torch this is: the recomputation looks outputs up by number, or takes the first.
    kind = _StoredByIndex if storage.default_factory is dict else _StoredInOrder
    storage.default_factory = functools.partial(kind, store)  # both contexts have this storage
    return contexts


def is_exporting() -> bool:
    """Whether ``torch.export`` records a program. In torch 2.11 ``torch.compiler.is_exporting`` is also true while
    torch.compile traces."""
    return torch.compiler._is_exporting_flag


def is_tracing() -> bool:
    """Whether the compiler or ``make_fx`` records the ops that run now in a graph."""
    return torch._C._get_dispatch_mode(torch._C._TorchDispatchModeKey.PROXY) is not None


def is_recording() -> bool:
    """As ``is_tracing``, also of ops before autograd (``pre_dispatch=True``). The compiler cannot trace this call."""
    key = torch._C._TorchDispatchModeKey.PROXY
    return is_tracing() or torch._ops._get_dispatch_mode_pre_dispatch(key) is not None


def is_symbolic_tracing() -> bool:
    """Whether ``torch.fx.symbolic_trace`` runs code with stand-ins for tensors."""
    return symbolic_trace._is_fx_tracing_flag


def without_dispatch_modes() -> AbstractContextManager[Any]:
    """A context in which no mode, that of a tracing compiler among them, sees the ops."""
    return cast("AbstractContextManager[Any]", python_dispatch._disable_current_modes())


@contextmanager
def _without_checkpoint_modes(modes: list[Any]) -> Iterator[None]:
    others = [mode for mode in modes if not isinstance(mode, POLICY_MODES)]
    _replace_dispatch_modes(modes, others)
    try:
        yield
    finally:
        _replace_dispatch_modes(others, modes)


def _replace_dispatch_modes(before: list[Any], after: list[Any]) -> None:
    # Only the top of the stack can be taken off: take off all, and put back those that stay, the lowest first.
    for _ in before:
        python_dispatch._pop_mode()
    for mode in after:
        python_dispatch._push_mode(mode)


def skip_code(code: CodeType, *, recursive: bool = False) -> None:
    """Let the compiler leave frames of ``code`` alone, and what they call too if ``recursive``; they may be inlined."""
    eval_frame = import_module("torch._dynamo.eval_frame")  # here, because it imports the compiler
    action = eval_frame.FrameAction
    strategy = eval_frame.FrameExecStrategy(action.SKIP, action.SKIP if recursive else action.DEFAULT)
    eval_frame.set_code_exec_strategy(code, strategy)


def skip_package(package: str, *, recursive: bool = False) -> None:
    """``skip_code`` for all functions of a package that are loaded by now."""
    for name, module in sys.modules.copy().items():
        if name == package or name.startswith(f"{package}."):
            for function in _functions_in(vars(module), name):
                for code in _codes_in(function.__code__):
                    skip_code(code, recursive=recursive)


def _functions_in(namespace: Mapping[str, Any], module: str) -> Iterator[FunctionType]:
    for value in namespace.values():
        if isinstance(value, type) and value.__module__ == module:
            yield from _functions_in(vars(value), module)
        found: Any = value
        if isinstance(value, property):
            found = value.fget
        elif isinstance(value, staticmethod | classmethod):
            found = value.__func__
        if isinstance(found, FunctionType | functools._lru_cache_wrapper):
            function: Any = inspect.unwrap(found)  # behind decorators
            if isinstance(function, FunctionType) and function.__module__ == module:
                yield function


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """A function's and those of functions and comprehensions in it."""
    yield code
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield from _codes_in(constant)


def break_graph(why: str) -> None:
    """End the graph that the compiler traces. With ``fullgraph=True``, its error has ``why``."""
    torch._dynamo.graph_break(msg=why)


def at_compile_time(function: Callable[[Any], None]) -> None:
    """In code that the compiler traces: call ``function`` while it does, with what the compiler knows of the caller.
    The compiler wants a function of a module, without variables from around it."""
    from torch._dynamo.comptime import comptime  # the compiler, which traces this, has loaded it

    comptime(function)


def at_end_of_trace(context: Any, check: Callable[[], None]) -> None:
    """Call ``check`` when the compiler is done with the graph of this ``context``; what it raises ends the call that
    was to be compiled, and nothing is compiled."""
    hooks = context._i_will_not_complain_if_bc_breaks_InstructionTranslator().output.cleanup_hooks

    def run() -> None:
        try:
            check()
        except BaseException:
            hooks.clear()  # all have run, and after an error torch runs the list again
            raise

    hooks.insert(0, run)  # they run backwards: those of torch first, which leave the contexts of the graph


def are_saved_tensors_mutable() -> bool:
    """Whether ``torch.autograd.graph.allow_mutation_on_saved_tensors`` is active."""
    return autograd_graph._allow_mutation_on_saved_tensors_enabled


def is_stream_capturing() -> bool:
    """Whether a CUDA graph records the current stream. Not by ``torch.cuda.is_current_stream_capturing``: the step
    before a recording answers yes to code that asks that, see ``graphs.recorder``."""
    return torch.cuda.graphs.is_current_stream_capturing()


def is_in_compiler() -> bool:
    """Whether the compiler traces the caller, or runs it: it looks at values, to make guards from them."""
    return torch.compiler.is_compiling() or _guards.CompileContext.try_get() is not None


def autocast_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """The dtype to which ``torch.autocast`` casts operands of ``dtype`` that are multiplied: float64 stays. Outside of
    it, ``dtype``."""
    if dtype == torch.float64 or not dtype.is_floating_point:
        return dtype
    # The meta device has no autocast, and torch raises when it is asked for it.
    if not torch.amp.is_autocast_available(device.type) or not torch.is_autocast_enabled(device.type):
        return dtype
    return torch.get_autocast_dtype(device.type)


def autocast_operand(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` as ``F.linear`` takes it under ``torch.autocast``. Outside of it, ``tensor``."""
    return tensor.to(autocast_dtype(tensor.dtype, tensor.device))


def once_differentiable(backward: Callable[..., _T]) -> Callable[..., _T]:
    """As ``torch.autograd.function.once_differentiable``, but what is computed from a weight raises as well when it is
    differentiated: torch returns it as a constant if no argument of ``backward`` needs a gradient."""

    @functools.wraps(backward)
    def run(ctx: Any, *grads: Any) -> _T:
        if not torch.is_grad_enabled():  # without ``create_graph``: nobody differentiates the result
            return backward(ctx, *grads)
        with torch.no_grad():  # without a graph: the node below refuses instead
            computed: Any = backward(ctx, *grads)
        if isinstance(computed, torch.Tensor):
            return cast("_T", undifferentiable(computed, *grads))
        return cast("_T", tuple(x if x is None else undifferentiable(x, *grads) for x in computed))

    return run


def undifferentiable(grad: torch.Tensor, *computed_from: Any) -> torch.Tensor:
    """The values of a gradient. A backward through the result raises a RuntimeError, also one that is confined to what
    has a part in ``computed_from``: torch would find no way there, and return no gradient, or zeros."""
    sources = [x for x in computed_from if isinstance(x, torch.Tensor) and x.requires_grad]
    refuse: Any = torch._C._functions.DelayedError(_ONCE, 1 + len(sources))
    # torch makes the node only if an input of it needs a gradient.
    results = refuse(grad.detach().requires_grad_(), *sources)
    return cast("torch.Tensor", results[0] if sources else results)
