"""What ``gtp_shard`` attaches to a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, cast

import torch.nn as nn

from ..ops.compiled import CompiledWeight
from .param import ManagedParam, ShardedWeight, Site

if TYPE_CHECKING:
    from .group import ShardGroup

BINDING = "_gtp_binding"


class Reads:
    """Whether one function of a module, its forward or another that counts as one, reads sharded weights as attributes:
    known for owners whose forward is not fused; else learned in the first call."""

    def __init__(self) -> None:
        self._is_reading: bool | None = None
        # After how many optimizer steps a call read weights that had not done so before.
        self._learned_in: int | None = None

    def know(self) -> None:
        """It does."""
        self._is_reading = True

    def may_read(self, num_steps: int) -> bool:
        """Whether saved tensors of a call after ``num_steps`` optimizer steps need hooks.

        The answer changes between steps only: a recomputation (activation checkpointing) must save as many tensors in
        the same way as its forward did, also if forwards of other microbatches were in between.
        """
        if self._learned_in is not None and num_steps != self._learned_in:
            self._is_reading, self._learned_in = True, None
        return self._is_reading is not False

    def learn(self, is_reading: bool, num_steps: int) -> None:
        """After a complete call, which came after ``num_steps`` optimizer steps."""
        if self._is_reading is None:
            self._is_reading = is_reading
        elif is_reading and not self._is_reading and self._learned_in is None:
            self._learned_in = num_steps


class Binding:
    """What ``gtp_shard`` attaches to a module.

    Args:
        module: The module.
        group: The ``gtp_shard`` call that manages the module.
        params: Managed parameters that are registered on this very module, by attribute name.
    """

    def __init__(self, module: nn.Module, group: ShardGroup, params: dict[str, ManagedParam]) -> None:
        self.group = group
        self.params = params
        # The same weights as compiled code names them.
        self.compiled = {
            name: CompiledWeight(lambda: group.runtime, param, Site(module, name))
            for name, param in params.items()
            if isinstance(param, ShardedWeight)
        }
        self.reads = Reads()


def binding_of(module: nn.Module) -> Binding | None:
    """The binding of a managed module, None for any other."""
    return cast("Binding | None", module.__dict__.get(BINDING))


def unmanaged_params(module: nn.Module) -> Iterator[tuple[str, nn.Module, str]]:
    """Parameters below ``module`` that no call manages: fully qualified name, owner and attribute name."""
    for prefix, owner in module.named_modules():
        binding = binding_of(owner)
        for name, param in owner._parameters.items():
            if param is not None and (binding is None or name not in binding.params):
                yield f"{prefix}.{name}" if prefix else name, owner, name
