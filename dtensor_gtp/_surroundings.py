"""What a captured step finds beside its inputs, compared with what it was at each call, for ``capture_step``.

Each call does so before it launches its graph, so it has little work, without names. ``_baked_in`` gives names, where
somebody is to be told what has changed.
"""

from __future__ import annotations

from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import torch
import torch.nn as nn

from ._baked_in import address, params_outside, states_of
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


__all__ = ["SUMS", "Place", "Surroundings"]
