"""What a graph has baked in, and what is compared with it at each call."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Generic, TypeVar

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from .. import _torch_compat as compat
from .._params.weight_group import WeightGroup
from .._schedule.runtime import Runtime

Graph = TypeVar("Graph")

Place = tuple[Any, str]  # an object and the name of its attribute that is a gradient or None
MOST_SEEN = 256  # kinds of calls that are remembered, so that one that comes again is recorded
PLAIN = (Tensor, nn.Parameter)


class KnownCalls(Generic[Graph]):
    """The graphs of one function by the kind of call, and the kinds that ran eagerly."""

    def __init__(self, num_warmup: int, max_graphs: int) -> None:
        self.num_warmup, self.max_graphs = num_warmup, max_graphs
        self.graphs: dict[Hashable, Graph] = {}
        self.seen: dict[Hashable, Any] = {}  # with a value for each kind; the oldest first
        self.num_eager = 0

    def forget(self) -> None:
        self.graphs.clear()
        self.seen.clear()
        self.num_eager = 0

    def may_record(self, kind: Hashable) -> bool:
        return self.num_eager >= self.num_warmup and kind in self.seen and len(self.graphs) < self.max_graphs

    def note_eager(self, kind: Hashable, value: Any = None) -> Any:
        """A call of this kind ran eagerly. Returns the value that its first call gave the kind."""
        self.num_eager += 1
        value = self.seen.setdefault(kind, value)
        if len(self.seen) > MOST_SEEN:
            del self.seen[next(iter(self.seen))]
        return value


class Surroundings:
    """What a step finds beside its inputs, as it is now: modules, parameters, buffers, optimizer states, switches."""

    def __init__(self, module: nn.Module, optimizers: Sequence[Optimizer], runtimes: Sequence[Runtime]) -> None:
        self.module, self.optimizers, self.runtimes = module, optimizers, runtimes
        self._modules = {f"{name}." if name else "": submodule for name, submodule in module.named_modules()}
        self._outside = params_outside(module, optimizers)
        self._params = [*module.parameters(), *self._outside]
        # Addresses only, because a tensor that is moved away must not be kept alive.
        self._addresses = {
            (kind, name, where, part): address(tensor)
            for kind, where, held in self._dicts()
            for name, value in held.items()
            for part, tensor in enumerate(tensors_in(value))
        }
        self.binding = self._describe()
        # Where a step finds and leaves gradients.
        self.places: list[Place] = [(param, "grad") for param in self._params]
        self.places += [place for runtime in runtimes for place in places_of_sums(runtime)]
        self._groups = self._find_groups()

    def has_same_binding(self) -> bool:
        """Whether the same parameters are trained in the same way."""
        return self._describe() == self.binding

    def _find_groups(self) -> list[WeightGroup]:
        return [group for runtime in self.runtimes for group in runtime.groups]

    def is_in_place(self) -> bool:
        """Whether all tensors that a graph reads are there, at the same addresses, and weights in the same groups."""
        if self._find_groups() != self._groups:  # the first forward makes them
            return False
        now = [address(t) for *_, held in self._dicts() for value in held.values() for t in tensors_in(value)]
        return now == list(self._addresses.values())

    def renewed(self) -> Surroundings:
        return Surroundings(self.module, self.optimizers, self.runtimes)

    def moved(self) -> str | None:
        """For people: a tensor that has come, gone, or moved to another address; None if there is none."""
        before, now = self._addresses, self.renewed()._addresses
        if before == now:
            return None
        kind, name, where, _ = next(key for key in before | now if before.get(key) != now.get(key))
        return f"'{name}' in the {kind}" if kind.startswith("state of ") else f"{kind} '{where}{name}'"

    @contextmanager
    def put_back_on_error(self) -> Iterator[None]:
        """If the context raises, put back what was there: a failed recording has computed none of its new tensors."""
        dicts = [held for *_, held in self._dicts()] + [optimizer.state for optimizer in self.optimizers]
        contents = [(held, dict(held)) for held in dicts]
        tensors = {id(t): t for held in dicts for v in held.values() for t in tensors_in(v) if type(t) in PLAIN}
        memory = [(tensor, tensor.detach()) for tensor in tensors.values()]
        grads = read_values(self.places)
        try:
            yield
        except BaseException:
            for runtime in self.runtimes:
                runtime.forget_recording()
            write_values(self.places, grads)
            for held, content in contents:
                held.clear()
                held.update(content)
            for tensor, before in memory:
                if address(tensor) != address(before):
                    tensor.data = before
            raise

    def _dicts(self) -> Iterator[tuple[str, Any, dict[Any, Any]]]:
        """Where tensors are registered by name: their kind, a key of the dict within the kind, and the dict."""
        for prefix, module in self._modules.items():
            yield "parameter", prefix, module._parameters
            yield "buffer", prefix, module._buffers
        yield "parameter of an optimizer", "", dict(enumerate(self._outside))
        for number, optimizer in enumerate(self.optimizers):
            kind = f"state of {type(optimizer).__name__}"
            for index, state in enumerate(optimizer.state.values()):
                yield kind, (number, index), state if isinstance(state, dict) else {None: state}

    def _describe(self) -> list[Any]:
        modules = self._modules.values()
        managed = [param for runtime in self.runtimes for param in runtime.params]
        registered = [param.registration.current for param in managed]
        return [
            [runtime.steps.is_last_backward for runtime in self.runtimes],
            [module.training for module in modules],
            [id(child) for module in modules for child in module._modules.values()],
            [id(param) for module in modules for param in module._parameters.values()],
            [param.requires_grad for param in self._params],
            list(stepped_params(self.optimizers)),
            [(id(param), param is not None and param.requires_grad) for param in registered],
            [id(param.shard) for param in managed],
            [list(vars(param.flags).values()) for param in managed],
        ]


def places_of_sums(runtime: Runtime) -> list[Place]:
    """Where sums over microbatches are, beside ``.grad``."""
    owners: list[Any] = [*runtime.members.whole, *(param.gradient for param in runtime.params)]
    owners += [weight.pending_grad for weight in runtime.weights]
    owners += [group.pending_grad for group in runtime.groups]
    names = ("wide", "unsynced_grad", "unsharded", "unreplicated")
    return [(owner, name) for owner in owners for name in names if hasattr(owner, name)]


def read_values(places: list[Place]) -> list[Tensor | None]:
    # A wide sum belongs to a gradient: without the gradient it is void.
    return [None if name == "wide" and o.param.grad is None else getattr(o, name) for o, name in places]


def write_values(places: list[Place], values: list[Tensor | None]) -> None:
    for (owner, name), value in zip(places, values, strict=True):
        setattr(owner, name, value)


def stepped_params(optimizers: Iterable[Optimizer]) -> dict[int, Tensor]:
    """All parameters that these optimizers step, by id."""
    return {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def params_outside(module: nn.Module, optimizers: Iterable[Optimizer]) -> list[Tensor]:
    """Parameters that optimizers step and ``module`` does not have, such as those of a criterion."""
    own = {id(param) for param in module.parameters()}
    return [param for identity, param in stepped_params(optimizers).items() if identity not in own]


def tensors_in(value: Any) -> Iterable[Tensor]:
    """The tensors that a value is or consists of."""
    if isinstance(value, Tensor):
        return (value,)
    if not isinstance(value, list | tuple | dict):
        return ()
    return (leaf for leaf in compat.tree_flatten(value)[0] if isinstance(leaf, Tensor))


def address(tensor: Tensor) -> Hashable:
    """Where the memory of a tensor, or of those that it wraps, begins."""
    if isinstance(tensor, DTensor):
        tensor = compat.local_tensor(tensor)
    if type(tensor) not in PLAIN and (flatten := getattr(tensor, "__tensor_flatten__", None)) is not None:
        parts = [getattr(tensor, name) for name in flatten()[0]]
        return tuple(address(part) for part in parts if isinstance(part, Tensor))
    return tensor.data_ptr() if tensor.layout is torch.strided else id(tensor)


def hyperparameters(optimizers: Iterable[Optimizer]) -> dict[tuple[str, int, int], Any]:
    """By name, index of the optimizer and index of its group."""
    return {
        (name, number, index): _value(value)
        for number, optimizer in enumerate(optimizers)
        for index, group in enumerate(optimizer.param_groups)
        for name, value in group.items()
        if name != "params"
    }


def _value(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_value, value))
    if not isinstance(value, Tensor):
        return value
    return value.item() if value.device.type == "cpu" else OnDevice(value)


class OnDevice:
    """A tensor that a graph reads at its address: equal to the same tensor at the same address, and kept alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._address = tensor, address(tensor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OnDevice) and self._tensor is other._tensor and self._address == other._address

    def __str__(self) -> str:
        return f"a tensor on '{self._tensor.device}'"


def signature(leaf: Any) -> Hashable:
    """What two arguments must have in common for one graph to serve both."""
    if isinstance(leaf, Tensor):
        return type(leaf), leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    try:
        hash(leaf)
    except TypeError:
        what = type(leaf).__name__
        raise ValueError(f"A captured step expects tensors and hashable values, but got a {what}.") from None
    return type(leaf), leaf
