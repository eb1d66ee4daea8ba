"""What ``gtp_shard`` attaches to a module."""

from __future__ import annotations

from collections.abc import Iterator
from typing import cast

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from .._params.managed_param import ManagedParam, Site
from .._params.sharded_weight import ShardedWeight
from .._schedule.runtime import Runtime
from ..ops.compiled_weight import CompiledWeight

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
        self.reads = Reads()
        # The sharded weights as compiled code names them.
        self.compiled = {
            name: CompiledWeight(lambda: group.runtime, param, Site(module, name))
            for name, param in params.items()
            if isinstance(param, ShardedWeight)
        }


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


class ShardGroup:
    """What one ``gtp_shard`` call manages.

    Args:
        module: The module that was passed.
        mesh: Its mesh, 1-D (gtp) or 2-D (replicate, gtp).
        mp_policy: Mixed precision; also casts the module's inputs and outputs, as in ``fully_shard``.
        runtime: Its runtime; that of the outermost ``gtp_shard`` call around it once there is one.
        unmanaged: Where ignored parameters below the module are registered.
    """

    def __init__(
        self,
        module: nn.Module,
        mesh: DeviceMesh,
        mp_policy: MixedPrecisionPolicy,
        runtime: Runtime,
        unmanaged: set[Site],
    ) -> None:
        self.module = module
        self.mesh = mesh
        self.mp_policy = mp_policy
        self.runtime = runtime
        self.params: list[ManagedParam] = []
        self.unmanaged = unmanaged
        self.num_registrations = -1  # when it was last looked for others; see ``registrations``
