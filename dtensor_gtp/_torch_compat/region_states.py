"""Random states of regions that CUDA graphs record, see ``random.MeshRNG.fork``.

A graph keeps no seed: each replay goes on with the generator states that were registered before its recording. So each
kind of region has a state of its own, which takes the place of the device's while the region is recorded.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache

import torch

Kind = tuple[str, ...]  # the axes along which ranks draw different numbers


@cache
def _all_states() -> weakref.WeakSet[RegionStates]:
    """Those that a graph may record."""
    return weakref.WeakSet()  # weak: states end with their ``MeshRNG``


class RegionStates:
    """The states of one device, by kind of region."""

    def __init__(self, device_index: int) -> None:
        self._device_index = device_index
        self._states: dict[Kind, torch.Generator] = {}
        self._registered: set[Kind] = set()  # with the graph that is being recorded
        _all_states().add(self)

    def prepare(self, kind: Kind, seed: int) -> None:
        """Make the state of ``kind`` with this seed, unless it exists. A recording cannot."""
        if kind not in self._states:
            self._states[kind] = torch.Generator(self._device()).manual_seed(seed)

    def seed_again(self, seed_of: Callable[[Kind], int]) -> None:
        for kind, state in self._states.items():
            state.manual_seed(seed_of(kind))

    def register(self, graph: torch.cuda.CUDAGraph) -> None:
        for kind, state in self._states.items():
            graph.register_generator_state(state)
            self._registered.add(kind)  # other kinds are refused in this recording

    def forget_registered(self) -> None:
        self._registered.clear()

    def is_registered(self, kind: Kind) -> bool:
        return kind in self._registered

    @contextmanager
    def entered(self, kind: Kind) -> Iterator[None]:
        """Let the device's generator draw from the state of ``kind``, which the draws advance."""
        default = torch.cuda.default_generators[self._device_index]
        before = default.graphsafe_get_state()
        default.graphsafe_set_state(self._states[kind])  # shared with the device's generator, not copied
        try:
            yield
        finally:
            default.graphsafe_set_state(before)  # which the region has not advanced

    def _device(self) -> torch.device:
        return torch.device("cuda", self._device_index)


@contextmanager
def regions_recorded(graph: torch.cuda.CUDAGraph) -> Iterator[None]:
    """Around the recording of ``graph``: regions may be entered in it."""
    known = list(_all_states())  # strong references until the end of the recording
    try:
        for states in known:
            states.register(graph)
        yield
    finally:  # also after a recording that failed
        for states in known:
            states.forget_registered()
