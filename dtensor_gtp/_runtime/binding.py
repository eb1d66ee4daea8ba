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
        # Whether the forward of this module reads sharded weights as attributes: known for owners whose forward is not
        # fused; learned in the first forward (None before it) for modules that read another module's weights.
        self._reads_weights: bool | None = None
        # After how many optimizer steps a forward read weights that had not done so before.
        self._learned_in: int | None = None

    def know_reads(self) -> None:
        """The forward of this module reads sharded weights of its own."""
        self._reads_weights = True

    def may_read_weights(self, num_steps: int) -> bool:
        """Whether saved tensors of a forward after ``num_steps`` optimizer steps need hooks.

        The answer changes between steps only: a recomputation (activation checkpointing) must save as many tensors in
        the same way as its forward did, also if forwards of other microbatches were in between.
        """
        if self._learned_in is not None and num_steps != self._learned_in:
            self._reads_weights, self._learned_in = True, None
        return self._reads_weights is not False

    def learn_reads(self, reads_weights: bool, num_steps: int) -> None:
        """After a complete forward, which came after ``num_steps`` optimizer steps."""
        if self._reads_weights is None:
            self._reads_weights = reads_weights
        elif reads_weights and not self._reads_weights and self._learned_in is None:
            self._learned_in = num_steps


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
