"""Why a captured step is recorded again: what a graph has baked in, compared at each call."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat
from .._schedule.runtime import Runtime

# By what it is: "parameter" or "buffer" with its name, or the state of an optimizer.
Addresses = dict[tuple[Any, ...], Hashable]


def addresses(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Addresses:
    """Where a step finds the tensors that it is not given."""
    found: Addresses = {("parameter", name): address(param) for name, param in module.named_parameters()}
    others = enumerate(params_outside(module, optimizers))
    found.update((("parameter of an optimizer", index), address(param)) for index, param in others)
    found.update((("buffer", name), address(buffer)) for name, buffer in module.named_buffers())
    found.update((what, address(tensor)) for what, tensor in states_of(optimizers))
    return found


def params_outside(module: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> list[Tensor]:
    """What optimizers step beside the module's own: of a criterion, say."""
    own = {id(param) for param in module.parameters()}
    stepped = {id(p): p for one in optimizers for group in one.param_groups for p in group["params"]}
    return [param for identity, param in stepped.items() if identity not in own]


def states_of(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[tuple[Any, ...], Tensor]]:
    """All tensors of their states, each with what it is."""
    for number, optimizer in enumerate(optimizers):
        what = f"state of {type(optimizer).__name__}"
        for index, state in enumerate(optimizer.state.values()):
            for key, value in state.items() if isinstance(state, dict) else ((None, state),):
                for part, tensor in enumerate(tensors_in(value)):
                    yield (what, key, number, index, part), tensor


def changed(before: Addresses, now: Addresses) -> str | None:
    """What has come, gone, or moved to another address, for people; None if nothing has."""
    if before == now:
        return None
    what, name, *_ = next(key for key in (before | now) if before.get(key) != now.get(key))
    return f"'{name}' in the {what}" if what.startswith("state of ") else f"{what} '{name}'"


def tensors_in(value: Any) -> Iterable[Tensor]:
    """Those that a value is or consists of."""
    if isinstance(value, Tensor):
        return (value,)
    if not isinstance(value, list | tuple | dict):
        return ()
    return (leaf for leaf in compat.tree_flatten(value)[0] if isinstance(leaf, Tensor))


PLAIN = (Tensor, nn.Parameter)


def address(tensor: Tensor) -> Hashable:
    """Where its memory begins; of one that wraps others, where theirs do."""
    if isinstance(tensor, DTensor):
        tensor = compat.local_tensor(tensor)
    if type(tensor) not in PLAIN and (flatten := getattr(tensor, "__tensor_flatten__", None)) is not None:
        parts = [getattr(tensor, name) for name in flatten()[0]]
        return tuple(address(part) for part in parts if isinstance(part, Tensor))
    return tensor.data_ptr() if tensor.layout is torch.strided else id(tensor)


class Kept:
    """Which parameters, buffers and state there were, and their memory, to be put back: what a recording that failed
    has made in their place was never computed."""

    def __init__(self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        dicts: list[dict[Any, Any]] = [each for m in module.modules() for each in (m._parameters, m._buffers)]
        outside = params_outside(module, optimizers)
        for optimizer in optimizers:
            dicts += [optimizer.state, *(state for state in optimizer.state.values() if isinstance(state, dict))]
        self._contents = [(one, dict(one)) for one in dicts]
        values = [*outside, *(value for one in dicts for value in one.values())]
        tensors = {id(t): t for value in values for t in tensors_in(value) if type(t) in PLAIN}
        self._memory = [(tensor, tensor.detach()) for tensor in tensors.values()]

    def put_back(self) -> None:
        for one, content in self._contents:
            one.clear()
            one.update(content)
        for tensor, memory in self._memory:
            if address(tensor) != address(memory):
                tensor.data = memory


def ids_of_params(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    """Of all parameters that these optimizers step."""
    groups = [group for optimizer in optimizers for group in optimizer.param_groups]
    return {id(param) for group in groups for param in group["params"]}


def hyperparameters(optimizers: Iterable[torch.optim.Optimizer]) -> list[dict[str, Any]]:
    """Those of each optimizer, by name (and group, if there are several)."""
    return [
        {
            f"{name} of group {index}" if len(optimizer.param_groups) > 1 else name: _value(value)
            for index, group in enumerate(optimizer.param_groups)
            for name, value in group.items()
            if name != "params"
        }
        for optimizer in optimizers
    ]


def _value(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return tuple(map(_value, value))
    if not isinstance(value, Tensor):
        return value
    return value.item() if value.device.type == "cpu" else OnDevice(value)


class OnDevice:
    """A tensor whose value a graph reads anew each time, where it lies: equal to itself there alone, and kept alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor, self._address = tensor, address(tensor)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, OnDevice) and self._tensor is other._tensor and self._address == other._address

    def __hash__(self) -> int:
        return id(self._tensor)

    def __str__(self) -> str:
        return f"a tensor on '{self._tensor.device}'"


def differences(
    optimizers: Iterable[torch.optim.Optimizer], before: Iterable[dict[str, Any]]
) -> Iterator[tuple[str, Any, Any]]:
    """Hyperparameters that are others than before: name, old and new value."""
    for optimizer, old in zip(optimizers, before, strict=True):
        (now,) = hyperparameters([optimizer])
        for name in old.keys() | now.keys():
            if old.get(name) != now.get(name):
                yield f"{type(optimizer).__name__}'s {name}", old.get(name), now.get(name)


class Updates:
    """Which parameters optimizers have stepped, whoever they belong to. ``optimizer_steps`` tells it."""

    def __init__(self) -> None:
        self.ids: set[int] = set()

    def note_step(self, updated: set[int]) -> None:
        self.ids |= updated


# An object and the name of its attribute that is a gradient or None.
Place = tuple[Any, str]


# Sums over microbatches beside ``.grad``, see ``param.py`` and ``whole.py``.
SUMS = ("_wide_grad", "unsharded_grad", "unreplicated_grad", "unsynced_grad")


_SWITCHES = attrgetter(
    "requires_gradient_sync",
    "requires_all_reduce",
    "reshard_after_forward",
    "reshard_after_backward",
    "gradient_divide_factor",
)


class Surroundings:
    """Modules, parameters, buffers, optimizers' states and switches as they are when this is made.

    Args:
        module: What the step trains.
        optimizers: Those that it steps.
        runtimes: Of all ``gtp_shard`` calls within ``module``.
    """

    def __init__(
        self, module: nn.Module, optimizers: Sequence[torch.optim.Optimizer], runtimes: Sequence[Runtime]
    ) -> None:
        self._module, self._optimizers, self._runtimes = module, optimizers, runtimes
        self._modules = list(module.modules())
        self._outside = params_outside(module, optimizers)
        self._params = [*module.parameters(), *self._outside]
        # Of other tensors addresses alone, so that none is kept alive that has been moved away.
        self._addresses = self._located()
        self._binding = self._describe()
        # Where a step finds and leaves gradients.
        self.places: list[Place] = [(param, "grad") for param in self._params]
        for runtime in runtimes:
            self.places += [(param, name) for param in runtime.params for name in SUMS if hasattr(param, name)]

    def has_same_binding(self) -> bool:
        """Whether the same parameters are trained in the same way."""
        return self._describe() == self._binding

    def is_in_place(self) -> bool:
        """Whether all tensors that a graph finds are there, and where they were."""
        return self._located() == self._addresses

    def moved(self) -> Surroundings:
        """With the tensors that are there now, but the binding of before."""
        now = Surroundings(self._module, self._optimizers, self._runtimes)
        now._binding = self._binding
        return now

    def _located(self) -> list[Any]:
        """Where the tensors are that modules have registered, and those of optimizers' states."""
        dicts = [each for m in self._modules for each in (m._parameters, m._buffers)]
        found = [None if tensor is None else address(tensor) for each in dicts for tensor in each.values()]
        found += map(address, self._outside)
        return found + [address(tensor) for _, tensor in states_of(self._optimizers)]

    def _describe(self) -> list[Any]:
        managed = [param for runtime in self._runtimes for param in runtime.params]
        registered = [param.sites[0].module._parameters.get(param.sites[0].name) for param in managed]
        return [
            [runtime.is_last_backward for runtime in self._runtimes],
            [module.training for module in self._modules],
            [id(child) for module in self._modules for child in module._modules.values()],
            [id(param) for module in self._modules for param in module._parameters.values()],
            [param.requires_grad for param in self._params],
            [id(param) for optimizer in self._optimizers for g in optimizer.param_groups for param in g["params"]],
            list(map(id, registered)),
            [param is not None and param.requires_grad for param in registered],
            [id(param.shard) for param in managed],
            [_SWITCHES(param.flags) for param in managed],
        ]


# Combinations of shapes, values and gradients that are remembered, so that one that comes again is recorded.
MOST_SEEN = 256


# What arguments are like, where there are gradients, and what is switched on.
Key = tuple[Hashable, Hashable, Hashable, Hashable]


def signature(leaf: Any) -> Hashable:
    """What two arguments must have in common for one graph to serve both."""
    if isinstance(leaf, Tensor):
        return type(leaf), leaf.shape, leaf.stride(), leaf.dtype, leaf.device
    try:
        hash(leaf)
    except TypeError:
        raise ValueError(
            "A captured step expects tensors, and values that can be compared (hashable), but got a "
            f"{type(leaf).__name__}."
        ) from None
    return type(leaf), leaf


def describe_modes(device: torch.device) -> Hashable:
    """What is switched on around a step."""
    is_autocast = torch.is_autocast_enabled(device.type)
    autocast = torch.get_autocast_dtype(device.type) if is_autocast else None
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled(), autocast
