"""One recorded step: records it, checks the recording, replays it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from .record_again import Addresses, Place, Updates


class StepGraph(NamedTuple):
    """One recording, with everything that must live as long as it."""

    replay: Callable[[], None]
    inputs: list[Tensor]
    outputs: list[Any]
    output_spec: Any
    found: list[Tensor | None]  # gradients that were there before: the graph adds to them
    left: list[Tensor | None]  # gradients that are there after it
    hyperparameters: list[dict[str, Any]]
    written: set[int]  # ids of the parameters that it writes to


class Before(NamedTuple):
    """What there is before a step is recorded."""

    hyperparameters: list[dict[str, Any]]
    at: Addresses
    versions: list[tuple[int, int]]
    inputs: list[int]
    updates: Updates


def read_values(places: list[Place]) -> list[Tensor | None]:
    # A wide sum goes with a gradient: it is void when that has been dropped.
    return [
        None if name == "_wide_grad" and owner.param.grad is None else getattr(owner, name) for owner, name in places
    ]


def write_values(places: list[Place], values: list[Tensor | None]) -> None:
    for (owner, name), value in zip(places, values, strict=True):
        setattr(owner, name, value)


def replaced_params(leaves: list[Any], tensors: list[Tensor]) -> list[Any]:
    remaining = iter(tensors)
    return [next(remaining) if isinstance(leaf, Tensor) else leaf for leaf in leaves]


def versions_of(tensors: list[Tensor]) -> list[int]:
    return [0 if tensor.is_inference() else tensor._version for tensor in tensors]
