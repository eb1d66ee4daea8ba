"""Bad input is refused before anything changes, on all ranks alike.

Each rank checks for itself; one exchange of three numbers then tells whether all ranks passed and whether they saw the
same model. Only a rank without a mesh that it is part of cannot tell the others.
"""

from __future__ import annotations

import gc
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Set
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy
from torch.nn.parallel import DistributedDataParallel

from .. import _torch_compat as compat
from ..policy import SchedulePolicy
from .binding import binding_of


def validate_call(
    module: Any, reshard_after_forward: Any, shard_placement_fn: Any, mp_policy: Any, schedule: Any, ignored_params: Any
) -> None:
    """Check the kinds of the arguments.

    Raises:
        TypeError: An argument is of the wrong kind.
        ValueError: The module has no forward.
    """
    expected: tuple[tuple[str, Any, Any], ...] = (
        ("an nn.Module as module", module, nn.Module),
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


def validate_mesh(mesh: Any) -> None:
    """Check that this rank can talk to its peers over ``mesh``; needs no communication.

    Raises:
        TypeError: It is no mesh.
        ValueError: It has the wrong rank or device, or does not contain this rank.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(
            f"gtp_shard expects a DeviceMesh as mesh, but got {type(mesh).__name__}: {mesh!r}. Build one with "
            "init_device_mesh."
        )
    if mesh.ndim not in (1, 2):
        raise ValueError(
            f"gtp_shard expects a 1-D (gtp) or 2-D (replicate, gtp) mesh, but got a {mesh.ndim}-D mesh with axes "
            f"{mesh.mesh_dim_names} of sizes {tuple(mesh.shape)} (rank {dist.get_rank()}). Pass a sub-mesh, e.g. "
            "mesh['gtp']."
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"gtp_shard expects a mesh that contains this rank, but rank {dist.get_rank()} is not among the ranks "
            f"{mesh.mesh.flatten().tolist()} of mesh axes {mesh.mesh_dim_names}. Call it on the mesh's ranks only."
        )
    if mesh.device_type != "cpu" and not torch.get_device_module(mesh.device_type).is_available():
        raise ValueError(
            f"gtp_shard expects a mesh of a device that this process has, but got a '{mesh.device_type}' mesh "
            f"with axes {mesh.mesh_dim_names} (rank {dist.get_rank()}). Build it with init_device_mesh('cpu', ...) to "
            "run here."
        )


def in_rank_order(mesh: DeviceMesh) -> DeviceMesh:
    """``mesh`` itself, or the mesh of the same process groups in which ranks ascend along each axis.

    A process group counts its ranks in ascending order, and collectives put each rank's rows there. DTensor computes
    offsets from coordinates in the mesh. Where the two differ a checkpoint would file a shard under another's rows.

    Raises:
        ValueError: A 2-D mesh has no such order.
    """
    ranks = mesh.mesh.cpu()
    if all(bool((ranks.diff(dim=axis) > 0).all()) for axis in range(mesh.ndim)):
        return mesh
    if mesh.ndim == 1:
        return DeviceMesh.from_group(mesh.get_group(), mesh.device_type, mesh_dim_names=mesh.mesh_dim_names)
    rows = torch.tensor(sorted(row.sort().values.tolist() for row in ranks))
    if {frozenset(column) for column in rows.t().tolist()} != {frozenset(column) for column in ranks.t().tolist()}:
        raise ValueError(
            f"gtp_shard expects a mesh whose ranks can be put in ascending order along each axis without changing its "
            f"groups, but got {ranks.tolist()} on axes {mesh.mesh_dim_names} (rank {dist.get_rank()}): the replicas of "
            "a shard would not meet. Build the mesh with init_device_mesh."
        )
    groups = mesh.get_all_groups()
    return DeviceMesh.from_group(groups, mesh.device_type, mesh=rows, mesh_dim_names=mesh.mesh_dim_names)


def validate_module(module: nn.Module, mesh: DeviceMesh, ignored: Set[nn.Parameter]) -> None:
    """Check the state of ``module``.

    Args:
        ignored: Parameters that will be left as they are.

    Raises:
        ValueError: It is wrapped or sharded already, or parameters or an optimizer do not fit.
    """
    for name, submodule in module.named_modules():
        is_wrapped = isinstance(submodule, FSDPModule | FullyShardedDataParallel | DistributedDataParallel)
        if not is_wrapped and not compat.is_replicated_by_ddp(submodule):
            continue
        # A module beside ours may be anything.
        if any(param not in ignored for param in submodule.parameters()):
            raise ValueError(
                f"gtp_shard expects modules that no other data parallelism has wrapped yet, but "
                f"'{name or type(module).__name__}' is a {type(submodule).__name__}. Call gtp_shard first, then "
                "fully_shard; or pass a (replicate, gtp) mesh in the place of DistributedDataParallel; or leave the "
                "module out by passing all its parameters in ignored_params."
            )
    sharded = binding_of(module)
    if sharded is not None:
        raise ValueError(
            f"gtp_shard was called on a {type(module).__name__} that an earlier call on it or on a module that "
            f"contains it has sharded already over mesh axes {sharded.group.mesh.mesh_dim_names} (rank "
            f"{dist.get_rank()}). Call it on submodules first, on the root last, and once on each."
        )
    bindings = [b for m in module.modules() if (b := binding_of(m)) is not None]
    if any(b.group.runtime.grads.replicas is not None for b in bindings):
        raise ValueError(
            f"gtp_shard was called on a {type(module).__name__} of which a part sums its gradients with other replicas "
            "already. Call gtp_shard on the submodules and the root first, then elastic.synchronize_replicas on the "
            "root."
        )
    managed = {id(p.param) for b in bindings for p in b.params.values()}
    replaced = {n: p for n, p in module.named_parameters() if p not in ignored and id(p) not in managed}
    _refuse_other_devices(replaced, mesh)
    _refuse_params_of("fully_shard", compat.fully_shard_params(), replaced)
    held = _held_elsewhere(module, replaced)
    if held and _is_in_a_list(held):
        _refuse_holders(held, mesh)


def _refuse_other_devices(params: dict[str, nn.Parameter], mesh: DeviceMesh) -> None:
    for name, param in params.items():
        if param.device.type not in ("meta", "cpu", mesh.device_type):
            raise ValueError(
                f"gtp_shard expects parameters on '{mesh.device_type}' (the mesh's device), cpu or meta, but parameter "
                f"'{name}' of shape {tuple(param.shape)} is on {param.device}, with mesh axes {mesh.mesh_dim_names} "
                f"(rank {dist.get_rank()}). Move the module, or build the mesh for its device."
            )


def _refuse_params_of(wrapper: str, held: Iterable[Tensor], params: dict[str, nn.Parameter]) -> None:
    """Refuse parameters that a wrapper further up, which ``module.modules()`` does not show, holds already."""
    names = {id(param): name for name, param in params.items()}
    for param in held:
        if id(param) in names:
            raise ValueError(
                f"gtp_shard expects parameters that no other data parallelism manages yet, but {wrapper} on a module "
                f"around has taken parameter '{names[id(param)]}' of shape {tuple(param.shape)} (rank "
                f"{dist.get_rank()}). Call gtp_shard first, then {wrapper}."
            )


def _held_elsewhere(module: nn.Module, params: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Those of ``params`` to which more refers than the modules of ``module`` and ``params`` itself."""
    by_id = {id(m._parameters): m._parameters for m in module.modules()}  # shallow copies of a module share theirs
    sites = Counter(id(param) for held in by_id.values() for param in held.values())
    alone = {"": nn.Parameter(torch.empty(0))}  # as many references as releases of Python and torch have for one
    (num_alone,) = _num_references(alone)
    numbers = dict(zip(params, _num_references(params), strict=True))
    return {name: param for name, param in params.items() if numbers[name] != num_alone + sites[id(param)]}


def _num_references(params: dict[str, nn.Parameter]) -> list[int]:
    return [sys.getrefcount(param) for param in params.values()]


def _is_in_a_list(params: dict[str, nn.Parameter]) -> bool:
    """Whether one of ``params`` may be in a list, as those of optimizers are; not in a dict of placements, say."""
    if len(params) > 64:  # it compares each reference of the process with each of them
        return True
    return any(isinstance(referrer, list | tuple) for referrer in gc.get_referrers(*params.values()))


def _refuse_holders(params: dict[str, nn.Parameter], mesh: DeviceMesh) -> None:
    """Refuse parameters that a DistributedDataParallel or an optimizer holds. torch keeps no record of them, and to
    look at all objects takes 0.1 s and more.
    """
    names = {id(param): name for name, param in params.items()}
    wrappers, optimizers = _living(DistributedDataParallel, torch.optim.Optimizer)
    for wrapper in wrappers:
        _refuse_params_of("DistributedDataParallel", wrapper._module_parameters, params)
    early = _early_optimizer(optimizers, names)
    if early is not None:
        # One that nobody uses any more may wait in a reference cycle: collect those before it is held against us.
        del optimizers
        gc.collect()
        early = _early_optimizer(_living(torch.optim.Optimizer)[0], names)
    if early is not None:
        optimizer, name = early
        raise ValueError(
            f"gtp_shard replaces parameters, but a {optimizer} optimizer already holds parameter '{name}' of shape "
            f"{tuple(params[name].shape)}, to be sharded over mesh axes {mesh.mesh_dim_names}, and would update it to "
            f"no effect (rank {dist.get_rank()}). Create the optimizer after gtp_shard."
        )


def _living(*classes: type[Any]) -> list[list[Any]]:
    """All objects of each of the classes in this process."""
    # By the exact type, which triggers no proxy and is quick.
    index = {kind: i for i, cls in enumerate(classes) for kind in _with_subclasses(cls)}
    found: list[list[Any]] = [[] for _ in classes]
    for candidate in gc.get_objects():
        if type(candidate) in index:
            found[index[type(candidate)]].append(candidate)
    return found


def _with_subclasses(cls: type[Any]) -> Iterator[type[Any]]:
    yield cls
    for subclass in cls.__subclasses__():
        yield from _with_subclasses(subclass)


def _early_optimizer(optimizers: list[torch.optim.Optimizer], names: dict[int, str]) -> tuple[str, str] | None:
    """Class of an optimizer that holds one of the parameters, and the parameter's name."""
    for optimizer in optimizers:
        for group in getattr(optimizer, "param_groups", ()):
            for param in group["params"]:
                if id(param) in names:
                    return type(optimizer).__name__, names[id(param)]
    return None
