"""One ``gtp_shard`` call: its module, mesh and policies, and the casts at the module's boundary."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from .. import _torch_compat as compat
from .param import ManagedParam, Site
from .state import Runtime


class ShardGroup:
    """What one ``gtp_shard`` call manages.

    Args:
        module: The module that was passed.
        mesh: Its mesh, 1-D (gtp) or 2-D (replicate, gtp).
        mp_policy: Mixed precision; also casts the module's inputs and outputs, as in ``fully_shard``.
        runtime: Its runtime; that of the outermost ``gtp_shard`` call around it once there is one.
    """

    def __init__(self, module: nn.Module, mesh: DeviceMesh, mp_policy: MixedPrecisionPolicy, runtime: Runtime) -> None:
        self.module = module
        self.mesh = mesh
        self.mp_policy = mp_policy
        self.runtime = runtime
        self.params: list[ManagedParam] = []
        # Parameters below the module that nobody manages, as gtp_shard found them: the ignored ones.
        self.unmanaged: set[Site] = set()
        self.num_registrations = -1  # when it was last looked for others; see ``registrations``

    def cast_inputs(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        dtype = self.mp_policy.param_dtype
        if dtype is None or not self.mp_policy.cast_forward_inputs:
            return args, kwargs
        cast_args: tuple[Any, ...] = _cast(args, dtype)
        cast_kwargs: dict[str, Any] = _cast(kwargs, dtype)
        return cast_args, cast_kwargs

    def cast_outputs(self, output: Any) -> Any:
        return output if self.mp_policy.output_dtype is None else _cast(output, self.mp_policy.output_dtype)


def _cast(tree: Any, dtype: torch.dtype) -> Any:
    return compat.tree_map_only(torch.Tensor, lambda t: t.to(dtype) if t.is_floating_point() else t, tree)
