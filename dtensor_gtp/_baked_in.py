"""What a graph of a training step has baked in beside its inputs, for ``capture_step``.

That is where parameters, buffers and the state of optimizers lie, and the hyperparameters of optimizers. It is taken
before a recording, and compared with what is there later.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from . import _torch_compat as compat

# --- tensors ----------------------------------------------------------------------------------------------------------

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


def params_outside(module: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> list[torch.Tensor]:
    """What optimizers step beside the module's own: of a criterion, say."""
    own = {id(param) for param in module.parameters()}
    stepped = {id(p): p for one in optimizers for group in one.param_groups for p in group["params"]}
    return [param for identity, param in stepped.items() if identity not in own]


def states_of(optimizers: Iterable[torch.optim.Optimizer]) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
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


def tensors_in(value: Any) -> Iterable[torch.Tensor]:
    """Those that a value is or consists of."""
    if isinstance(value, torch.Tensor):
        return (value,)
    if not isinstance(value, list | tuple | dict):
        return ()
    return (leaf for leaf in compat.tree_flatten(value)[0] if isinstance(leaf, torch.Tensor))


PLAIN = (torch.Tensor, nn.Parameter)


def address(tensor: torch.Tensor) -> Hashable:
    """Where its memory begins; of one that wraps others, where theirs do."""
    if isinstance(tensor, DTensor):
        tensor = compat.local_tensor(tensor)
    if type(tensor) not in PLAIN and (flatten := getattr(tensor, "__tensor_flatten__", None)) is not None:
        parts = [getattr(tensor, name) for name in flatten()[0]]
        return tuple(address(part) for part in parts if isinstance(part, torch.Tensor))
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


# --- optimizers -------------------------------------------------------------------------------------------------------


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
    if not isinstance(value, torch.Tensor):
        return value
    return value.item() if value.device.type == "cpu" else OnDevice(value)


class OnDevice:
    """A tensor whose value a graph reads anew each time, where it lies: equal to itself there alone, and kept alive."""

    def __init__(self, tensor: torch.Tensor) -> None:
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


__all__ = [
    "PLAIN",
    "Addresses",
    "Kept",
    "Updates",
    "address",
    "addresses",
    "changed",
    "differences",
    "hyperparameters",
    "ids_of_params",
    "params_outside",
    "states_of",
    "tensors_in",
]
