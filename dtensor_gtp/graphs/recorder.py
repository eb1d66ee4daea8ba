"""What ``capture_step`` and ``capture_blocks`` share: CUDA graphs, which calls are recorded, and
refusals."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from types import FunctionType, ModuleType
from typing import Any, Generic, TypeVar

import torch
import torch.nn as nn
from torch import Tensor

from .. import _torch_compat as compat
from .._howto import see
from .._modules import trees
from .._modules.binding import runtimes_below
from .._schedule.runtime import Runtime

R = TypeVar("R")
Graph = TypeVar("Graph")

# How many objects within each other are searched for tensors: a cache of transformers has layers, which have some.
_DEPTH = 4
_NO_HOLDERS = (nn.Module, type, ModuleType, FunctionType, str, int, float)  # not looked into within other objects
MOST_SEEN = 256  # kinds of calls that are remembered, so that one that comes again is recorded


class CudaRecorder:
    """Records with ``torch.cuda.graph``, all graphs in one pool; they are never replayed at the
    same time."""

    def __init__(self, device: torch.device) -> None:
        self._pool = torch.cuda.graph_pool_handle()
        # Those that are still alive. Weak: a graph that is forgotten frees its memory.
        self._graphs: weakref.WeakSet[torch.cuda.CUDAGraph] = weakref.WeakSet()
        # Warm-up and recording share a stream, because autograd remembers streams.
        self._stream = torch.cuda.Stream(device)

    @contextmanager
    def eager(self, *, is_last: bool) -> Iterator[None]:
        """Around an eager step before a recording; ``is_last`` if the next call of its kind is
        recorded."""
        current = torch.cuda.current_stream()
        self._stream.wait_stream(current)  # for the inputs
        refusing = _refusing_synchronization() if is_last else nullcontext()
        try:
            with torch.cuda.stream(self._stream), refusing:
                yield
        finally:
            current.wait_stream(self._stream)  # for the results

    def record(self, step: Callable[[], R]) -> tuple[Callable[[], None], R]:
        """Run ``step`` once without computing. Returns what replays it, and its result, to be read
        after a replay."""
        if not self._graphs:
            # The allocator refuses a pool without graphs while memory in it is in use, such as a
            # gradient.
            self._pool = torch.cuda.graph_pool_handle()
        graph = torch.cuda.CUDAGraph()
        try:
            with (
                _without_collection(),
                compat.regions_recorded(graph),
                # If the recording fails, torch.cuda.graph leaves its stream current: this restores
                # the other one.
                torch.cuda.stream(torch.cuda.current_stream()),
                # thread_local: a thread that pins the memory of the next batch does not disturb.
                torch.cuda.graph(graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"),
            ):
                result = step()
        except BaseException:
            with suppress(RuntimeError):  # the first error is the one to report
                compat.end_void_recording(self._stream.device, self._pool)
            # The allocator may still hold the pool for the void recording, and refuse it to another one.
            self._pool = torch.cuda.graph_pool_handle()
            raise
        self._graphs.add(graph)
        return graph.replay, result  # the bound method keeps the graph alive


@contextmanager
def _without_collection() -> Iterator[None]:
    """No garbage collection: to free a model whose memory peers map waits for the GPU, which a
    recording must not."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def _refusing_synchronization() -> Iterator[None]:
    """Waiting for the GPU raises, with the traceback of who waits. In a recording it would only
    make it fail. Code that waits only where nothing is recorded (checks of masks in transformers)
    finds that something is."""
    before = torch.cuda.get_sync_debug_mode()
    is_capturing = torch.cuda.is_current_stream_capturing
    torch.cuda.set_sync_debug_mode("error")  # torch raises where the host waits
    torch.cuda.is_current_stream_capturing = lambda: True  # our own code asks ``compat``
    try:
        yield
    except RuntimeError as error:
        if "synchronizing" not in str(error):  # torch: "called a synchronizing CUDA operation"
            raise
        what = f"a step that does not wait for the GPU, but it does where this error comes from: {error}"
        advice = f"Read tensors outside of the step. {see('capture_a_step')}"
        raise RuntimeError(f"capture_step expects {what}. {advice}") from error
    finally:
        torch.cuda.is_current_stream_capturing = is_capturing
        torch.cuda.set_sync_debug_mode(before)


class KnownCalls(Generic[Graph]):
    """The graphs of one function by the kind of call, and the kinds that ran eagerly."""

    def __init__(self, num_warmup: int, max_graphs: int) -> None:
        self.num_warmup = num_warmup
        self.max_graphs = max_graphs
        self.graphs: dict[Hashable, Graph] = {}
        self.seen: dict[Hashable, Any] = {}  # with a value for each kind; the oldest first
        self.num_eager = 0

    def forget(self) -> None:
        self.graphs.clear()
        self.seen.clear()
        self.num_eager = 0

    @property
    def is_full(self) -> bool:
        return len(self.graphs) >= self.max_graphs

    def may_record(self, kind: Hashable, num_more: int = 0) -> bool:
        """Whether to record a call of this kind, perhaps after some more eager calls."""
        return self.num_eager + num_more >= self.num_warmup and kind in self.seen and not self.is_full

    def note_eager(self, kind: Hashable, value: Any = None) -> Any:
        """A call of this kind ran eagerly. Returns the value that its first call gave the kind."""
        self.num_eager += 1
        value = self.seen.setdefault(kind, value)
        if len(self.seen) > MOST_SEEN:
            del self.seen[next(iter(self.seen))]  # the oldest
        return value


def signature(leaf: Any) -> Hashable:
    """What two arguments must have in common for one graph to serve both."""
    if isinstance(leaf, Tensor):
        return type(leaf), leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    try:
        hash(leaf)  # kinds of calls are keys of dicts
    except TypeError:
        what = type(leaf).__name__
        raise ValueError(f"A captured step expects tensors and hashable values, but got a {what}.") from None
    return type(leaf), leaf  # the type, because 1, 1.0 and True are equal


def with_tensors(leaves: list[Any], tensors: Sequence[Tensor]) -> list[Any]:
    """``leaves`` with others instead of its tensors."""
    others = iter(tensors)
    return [next(others) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def versions_of(tensors: list[Tensor]) -> list[int]:
    # Tensors of inference mode count no writes.
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]


def runtimes_of(module: nn.Module, caller: str = "capture_step") -> list[Runtime]:
    runtimes = runtimes_below(module)
    if not runtimes:
        what = f"a module that gtp_shard was called on, or one around it, but got a plain {type(module).__name__}"
        raise ValueError(f"{caller} expects {what}. Call gtp_shard first.")
    for runtime in runtimes:
        obstacle = _obstacle(runtime)
        if obstacle:
            raise NotImplementedError(f"{caller} does not support {obstacle}")
    return runtimes


def _obstacle(runtime: Runtime) -> str:
    """What cannot be recorded, and what to do instead; empty if all can."""
    params = runtime.members.params
    if any(param.registration.is_cut_again for param in params):
        return "an outer fully_shard. Use a (replicate, gtp) mesh."
    if any(param.policies.offload is not None for param in params):
        return f"offload_policy: a graph cannot wait for the host. {see('offload')}"
    if runtime.gathering.parts.weights:
        return (
            "gtp_shard(shard_optimizer=True): whether replicas gather what their optimizers have "
            "written is decided in each forward. Leave out shard_optimizer."
        )
    if runtime.grads.launches.replicas is not None:
        return (
            "elastic.synchronize_replicas: a graph would repeat the shares of the batch of its "
            "recording, and wait for a lost rank forever. Take equal replicas: "
            "init_weight_mesh(replicate=)."
        )
    return ""


def check_on_gpu(caller: str, module: nn.Module, device: torch.device) -> None:
    if device.type != "cuda":
        what = f"the weights of the {type(module).__name__} are on '{device.type}'"
        raise RuntimeError(f"{caller} records CUDA graphs, but {what}. Train without it there.")


def check_at_least(caller: str, **numbers: tuple[Any, int]) -> None:
    """Each number comes with the least that it may be."""
    for name, (value, least) in numbers.items():
        if not isinstance(value, int) or isinstance(value, bool):  # True is an int to Python
            raise TypeError(f"{caller} expects an int as {name}, but got {value!r}.")
        if value < least:
            raise ValueError(f"{caller} expects {name} >= {least}, but got {value}.")


def check_places(leaves: list[Any], device: torch.device, what: str) -> None:
    """Refuse arguments of ``what`` that a replay would not see: values on the host, and tensors in
    other objects."""
    for leaf in leaves:
        if not isinstance(leaf, Tensor):
            name = _hiding_place(leaf)
            if name is not None:
                raise ValueError(
                    f"{what} expects tensors in lists, tuples, dicts, or what torch.utils._pytree "
                    f"knows, but got a {type(leaf).__name__} with one as '{name}', where capture_step "
                    "cannot see changes. Pass its tensors."
                )
        elif leaf.device.type != device.type:
            got = f"one of shape {tuple(leaf.shape)} on '{leaf.device.type}'"
            raise ValueError(f"{what} expects tensors on '{device.type}', but got {got}. Move it before the call.")


def returned_tensors(outputs: Any, what: str) -> list[Tensor]:
    """The tensors in what ``what`` returns, in the order of ``map_tensors``. Refuses those in other
    objects: a replay would overwrite them, and no gradient would come to them."""
    tensors: list[Tensor] = []
    for leaf in compat.tree_leaves(outputs):
        if isinstance(leaf, Tensor):
            tensors.append(leaf)
            continue
        fields = trees.field_names(leaf)
        for name in fields:
            tensors += returned_tensors(getattr(leaf, name), what)
        hidden = _hiding_place(leaf, fields)
        if hidden is not None:
            raise ValueError(
                f"{what} expects to return tensors in lists, tuples, dicts, dataclasses, or what "
                f"torch.utils._pytree knows, but returned a {type(leaf).__name__} with one as "
                f"'{hidden}', which a replay would overwrite. Return its tensors."
            )
    return tensors


def detached(outputs: Any, what: str) -> Any:
    """What ``what`` returns, with detached tensors."""
    returned_tensors(outputs, what)  # refuses those that stay as they are
    return trees.map_tensors(outputs, Tensor.detach)


def _hiding_place(leaf: Any, known: Sequence[str] = (), depth: int = _DEPTH) -> str | None:
    """Where an object, which pytree does not know, holds a tensor, beside the attributes that are
    ``known``; None if nowhere. ``depth``: how many objects within each other are looked into."""
    held: dict[Any, Any] = {}
    if not isinstance(leaf, nn.Module):
        held |= getattr(leaf, "__dict__", {})
    # What ``__slots__`` of the class and its bases hold is not in ``__dict__``.
    slots = (name for kind in type(leaf).__mro__ for name in getattr(kind, "__slots__", ()))
    held.update((name, getattr(leaf, name, None)) for name in slots)
    for name in known:
        held.pop(name, None)
    if isinstance(leaf, dict):  # of a class of its own
        held |= leaf
    elif isinstance(leaf, list | tuple | set | frozenset):
        held |= dict(enumerate(leaf))
    for name, value in held.items():
        if any(True for _ in trees.tensors_in(value)):
            return str(name)
        for inner in compat.tree_leaves(value) if depth > 1 else ():  # such as the layers of a cache
            is_object = not isinstance(inner, _NO_HOLDERS)
            if is_object and (deeper := _hiding_place(inner, depth=depth - 1)) is not None:
                return f"{name}.{deeper}"
    return None


def check_buffers(caller: str, module: nn.Module, device: torch.device) -> None:
    for name, buffer in module.named_buffers():
        if buffer.device.type != device.type:
            raise ValueError(
                f"{caller} expects buffers on '{device.type}', but '{name}' is on "
                f"'{buffer.device.type}', whose value a graph would never read again. Move it, or "
                "make it a Python number."
            )
