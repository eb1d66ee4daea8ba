"""Bad input is refused before anything changes, on all ranks alike.

Each rank checks for itself; one exchange of three numbers then tells whether all ranks passed and whether they saw the
same model. Only a rank that is not in the mesh cannot tell the others.
"""

from __future__ import annotations

import gc
import hashlib
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule

from ._runtime.modules import binding_of
from .policy import MixedPrecisionPolicy, SchedulePolicy


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device on which this rank's shards live."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def validate_call(
    module: Any,
    mesh: Any,
    reshard_after_forward: Any,
    shard_placement_fn: Any,
    mp_policy: Any,
    schedule: Any,
    ignored_params: Any,
) -> None:
    """Check the kinds of the arguments; needs no communication.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: The mesh does not fit.
    """
    expected: tuple[tuple[str, Any, Any], ...] = (
        ("an nn.Module as module", module, nn.Module),
        ("a DeviceMesh as mesh", mesh, DeviceMesh),
        ("a bool as reshard_after_forward", reshard_after_forward, bool),
        ("a MixedPrecisionPolicy as mp_policy", mp_policy, MixedPrecisionPolicy),
        ("a SchedulePolicy as schedule", schedule, SchedulePolicy),
        ("a set of parameters as ignored_params", ignored_params, (set, frozenset, type(None))),
    )
    for what, value, kind in expected:
        if not isinstance(value, kind):
            raise TypeError(f"gtp_shard expects {what}, but got {type(value).__name__}: {value!r}.")
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError("gtp_shard expects an eager nn.Module, but got a ScriptModule. Shard it before scripting.")
    if shard_placement_fn is not None and not callable(shard_placement_fn):
        raise TypeError(f"gtp_shard expects a callable as shard_placement_fn, but got {shard_placement_fn!r}.")
    for param in ignored_params or ():
        if not isinstance(param, nn.Parameter):
            raise TypeError(f"gtp_shard expects parameters in ignored_params, but got {type(param).__name__}.")
    if isinstance(module, nn.ModuleList | nn.ModuleDict | nn.ParameterList | nn.ParameterDict):
        raise ValueError(
            f"gtp_shard expects a module with a forward, but got a {type(module).__name__}. Call it on each element or "
            "on the module that contains it."
        )
    _validate_mesh(mesh)


def _validate_mesh(mesh: DeviceMesh) -> None:
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"gtp_shard expects a 1-D (gtp) or 2-D (replicate, gtp) mesh, but got a {mesh.ndim}-D mesh with axes "
            f"{mesh.mesh_dim_names} of sizes {tuple(mesh.shape)}. Pass a sub-mesh, e.g. mesh['gtp']."
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"gtp_shard expects a mesh that contains this rank, but rank {dist.get_rank()} is not among the ranks "
            f"{mesh.mesh.flatten().tolist()} of mesh axes {mesh.mesh_dim_names}. Call it on the mesh's ranks only."
        )
    if mesh.device_type != "cpu" and not torch.get_device_module(mesh.device_type).is_available():
        raise ValueError(
            f"gtp_shard expects a mesh of a device that this process has, but got a '{mesh.device_type}' mesh. "
            "Build it with init_device_mesh('cpu', ...) to run here."
        )


def validate_module(module: nn.Module, mesh: DeviceMesh) -> None:
    """Check the state of ``module``.

    Raises:
        ValueError: It is sharded already, or parameters or an optimizer do not fit.
    """
    for name, submodule in module.named_modules():
        if isinstance(submodule, FSDPModule):
            raise ValueError(
                f"gtp_shard expects modules that fully_shard has not wrapped yet, but "
                f"'{name or type(module).__name__}' is an FSDPModule. Call gtp_shard first, then fully_shard."
            )
    if binding_of(module) is not None:
        raise ValueError(
            f"gtp_shard was called on a {type(module).__name__} that an earlier call on it or on a module that "
            "contains it has sharded already. Call it on submodules first, on the root last, and once on each."
        )
    device_types = {p.device.type for p in module.parameters()} - {"meta", "cpu", mesh.device_type}
    if device_types:
        name, param = next((n, p) for n, p in module.named_parameters() if p.device.type in device_types)
        raise ValueError(
            f"gtp_shard expects parameters on '{mesh.device_type}' (the mesh's device), cpu or meta, but parameter "
            f"'{name}' of shape {tuple(param.shape)} is on {param.device} (rank {dist.get_rank()})."
        )
    _refuse_early_optimizer(module)


def _refuse_early_optimizer(module: nn.Module) -> None:
    """An optimizer that was built before would go on to update the unsharded parameters, silently to no effect."""
    names = {id(param): name for name, param in module.named_parameters()}
    for candidate in gc.get_objects():
        # type() does not trigger the proxies that isinstance() would.
        if not issubclass(type(candidate), torch.optim.Optimizer):
            continue
        for group in getattr(candidate, "param_groups", ()):
            for param in group["params"]:
                if id(param) in names and binding_of_param(module, param) is None:
                    raise ValueError(
                        f"gtp_shard replaces parameters, but a {type(candidate).__name__} optimizer already holds "
                        f"parameter '{names[id(param)]}' of shape {tuple(param.shape)}. Create the optimizer after "
                        "gtp_shard."
                    )


def binding_of_param(module: nn.Module, param: torch.Tensor) -> Any:
    """The manager of ``param`` if an earlier call on a submodule has sharded it: that parameter is not replaced."""
    for submodule in module.modules():
        binding = binding_of(submodule)
        for managed in binding.params.values() if binding is not None else ():
            if managed.param is param:
                return managed
    return None


def agree_on_all_ranks(mesh: DeviceMesh, check: Callable[[], Any]) -> None:
    """Run ``check`` on each rank of ``mesh``; raise on all of them if one raised or their results differ.

    Raises:
        Exception: Whatever ``check`` raised on this rank.
        RuntimeError: It raised on another rank (whose message is passed on), or the results differ.
    """
    error: Exception | None = None
    digest = 0
    try:
        text = repr(check()).encode()
        digest = int.from_bytes(hashlib.sha256(text).digest()[:7], "big")
    except Exception as caught:
        error = caught
    status = torch.tensor([error is not None, digest, -digest], dtype=torch.int64, device=device_of(mesh))
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    for group in groups:
        dist.all_reduce(status, dist.ReduceOp.MAX, group=group)
    has_failed, highest, lowest = status.tolist()
    messages = _exchange_messages(error, groups) if has_failed else []
    if error is not None:
        raise error
    if has_failed:
        raise RuntimeError(f"gtp_shard failed on another rank of the mesh, so it fails on all: {'; '.join(messages)}")
    if highest != -lowest:
        raise RuntimeError(
            f"gtp_shard expects the same module and policies on all ranks, but rank {dist.get_rank()} sees others than "
            f"its peers on mesh axes {mesh.mesh_dim_names}. Compare names, shapes and dtypes of the parameters, "
            "shard_placement_fn and the policies across ranks."
        )


def _exchange_messages(error: Exception | None, groups: list[dist.ProcessGroup]) -> list[str]:
    mine = [f"rank {dist.get_rank()}: {type(error).__name__}: {error}"] if error is not None else []
    for group in groups:
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, mine, group=group)
        mine = sorted({message for messages in gathered for message in messages})
    return mine
