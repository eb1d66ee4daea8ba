"""What a captured step finds beside its inputs, compared with what it was at each call, for ``capture_step``.

Each call does so before it launches its graph, so it is made of loops that Python runs in C, over lists that are made
once. What has changed is not asked here: ``_baked_in`` gives names, where somebody is to be told.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.tensor import DTensor

from . import _torch_compat as compat
from ._baked_in import PLAIN, address, tensors_in
from ._runtime.state import Runtime

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
        self._dicts: list[dict[str, Any]] = [
            each for m in self._modules for each in (m._parameters, m._buffers, m._modules)
        ]
        self._params = list(module.parameters())
        self._values = self._present()  # kept alive, so that nothing else has their ids
        self._ids = list(map(id, self._values))
        self._located = _Located(self._values)
        self._addresses = self._located.addresses()
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
        return list(map(id, self._present())) == self._ids and self._located.addresses() == self._addresses

    def moved(self) -> Surroundings:
        """With the tensors that are there now, but the binding of before."""
        now = Surroundings(self._module, self._optimizers, self._runtimes)
        now._binding = self._binding
        return now

    def _present(self) -> list[Any]:
        """All that modules have registered, and the states of optimizers."""
        states = [state for optimizer in self._optimizers for state in optimizer.state.values()]
        inner = (state.values() if isinstance(state, dict) else (state,) for state in states)
        return [*chain.from_iterable(map(dict.values, self._dicts)), *chain.from_iterable(inner)]

    def _describe(self) -> list[Any]:
        managed = [param for runtime in self._runtimes for param in runtime.params]
        registered = [param.sites[0].module._parameters.get(param.sites[0].name) for param in managed]
        return [
            [runtime.is_last_backward for runtime in self._runtimes],
            [module.training for module in self._modules],
            [param.requires_grad for param in self._params],
            [id(param) for optimizer in self._optimizers for g in optimizer.param_groups for param in g["params"]],
            list(map(id, registered)),
            [param is not None and param.requires_grad for param in registered],
            [id(param.shard) for param in managed],
            [_SWITCHES(param.flags) for param in managed],
        ]


class _Located:
    """Tensors among some values, sorted by how their addresses are found."""

    def __init__(self, values: Iterable[Any]) -> None:
        self._plain: list[torch.Tensor] = []
        self._sharded: list[DTensor] = []
        self._others: list[torch.Tensor] = []
        for tensor in chain.from_iterable(map(tensors_in, values)):
            part = compat.local_tensor(tensor) if isinstance(tensor, DTensor) else tensor
            if type(part) not in PLAIN or part.layout is not torch.strided:
                self._others.append(tensor)
            elif isinstance(tensor, DTensor):
                self._sharded.append(tensor)
            else:
                self._plain.append(tensor)

    def addresses(self) -> list[Any]:
        of_shards = [compat.local_tensor(tensor).data_ptr() for tensor in self._sharded]
        return [*(tensor.data_ptr() for tensor in self._plain), *of_shards, *map(address, self._others)]


__all__ = ["SUMS", "Place", "Surroundings"]
