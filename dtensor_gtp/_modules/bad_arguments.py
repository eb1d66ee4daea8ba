"""The arguments of ``gtp_shard`` and their checks, before anything changes.

Each rank checks for itself. Then one exchange tells all ranks of the mesh whether all passed and
saw the same model.
"""

from __future__ import annotations

import gc
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Set
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel, MixedPrecisionPolicy, OffloadPolicy
from torch.nn.parallel import DistributedDataParallel

from .. import _torch_compat as compat
from .._comm.process_groups import device_types, has_device
from .._schedule.runtime import Runtime
from ..policy import SchedulePolicy
from .binding import Arguments, binding_of, bindings_of, params_of, runtimes_below

logger = logging.getLogger(__name__)


def validate_kinds(module: Any, arguments: Arguments) -> None:
    # ``fully_shard`` takes a list: modules that it gathers together.
    if isinstance(module, list | tuple):
        raise TypeError(
            f"gtp_shard expects an nn.Module as module, but got a {type(module).__name__}. Call it "
            "once on the module that contains them all: gtp_shard chooses which weights to gather "
            "together."
        )
    in_part = (
        "Leave out None; for a part of the weights pass SchedulePolicy(keep_nbytes=...), which "
        "keeps those that backward uses first."
    )
    mixed = "Pass MixedPrecisionPolicy(param_dtype=torch.bfloat16)."
    _check_kind("an nn.Module as module", module, nn.Module, "Pass the model.")
    for kind, what, name, advice in (
        (bool, "a bool", "reshard_after_forward", in_part),
        (MixedPrecisionPolicy, "a MixedPrecisionPolicy", "mp_policy", mixed),
        (SchedulePolicy, "a SchedulePolicy", "schedule", "Pass SchedulePolicy(memory='least')."),
        (OffloadPolicy, "an OffloadPolicy", "offload_policy", "Pass CPUOffloadPolicy()."),
        (set | frozenset, "a set of parameters", "ignored_params", "Pass {model.get_parameter(name), ...}."),
        (bool, "a bool", "shard_optimizer", ""),
    ):
        _check_kind(f"{what} as {name}", getattr(arguments, name), kind, advice)
    if arguments.shard_optimizer and arguments.offload is not None:
        raise NotImplementedError(
            "gtp_shard does not support shard_optimizer=True with offload_policy, which keeps "
            "shards on the host: replicas would gather them there. Leave out one of the two."
        )
    placement_fn = arguments.shard_placement_fn
    if placement_fn is not None and not callable(placement_fn):
        raise TypeError(f"gtp_shard expects a callable as shard_placement_fn, but got {placement_fn!r}.")
    for param in arguments.ignored_params:
        if not isinstance(param, nn.Parameter):
            raise TypeError(f"gtp_shard expects parameters in ignored_params, but got {type(param).__name__}.")
    if isinstance(module, torch.jit.ScriptModule):
        raise TypeError("gtp_shard expects an eager nn.Module, but got a ScriptModule. Shard it before scripting.")
    containers = (nn.ModuleList, nn.ModuleDict, nn.ParameterList, nn.ParameterDict)
    # A subclass may have a forward of its own.
    is_container = isinstance(module, containers)
    if is_container and type(module).forward is nn.Module.forward:
        what = f"a module with a forward, but got a {type(module).__name__}"
        raise ValueError(f"gtp_shard expects {what}. Call it on each element or on the module that contains it.")


def _check_kind(what: str, value: object, kind: Any, advice: str = "") -> None:
    if not isinstance(value, kind):
        raise TypeError(f"gtp_shard expects {what}, but got {type(value).__name__}: {value!r}. {advice}".rstrip())


def validate_mesh(mesh: Any) -> None:
    """Check, without communication, that this rank can talk to its peers over ``mesh``."""
    if isinstance(getattr(mesh, "weights", None), DeviceMesh):  # a ``WeightMesh``, not a mesh
        raise TypeError(f"gtp_shard expects a DeviceMesh as mesh, but got a {type(mesh).__name__}. Pass mesh.weights.")
    _check_kind("a DeviceMesh as mesh", mesh, DeviceMesh, "Build one with init_device_mesh.")
    rank = dist.get_rank()
    axes = mesh.mesh_dim_names
    if mesh.ndim not in (1, 2):
        got = f"a {mesh.ndim}-D mesh with axes {axes} of sizes {tuple(mesh.shape)} (rank {rank})"
        expected = "a 1-D (gtp) or 2-D (replicate, gtp) mesh"
        raise ValueError(f"gtp_shard expects {expected}, but got {got}. Pass a sub-mesh, e.g. mesh['gtp'].")
    if mesh.get_coordinate() is None:
        what = f"but rank {rank} is not among the ranks {mesh.mesh.flatten().tolist()} of mesh axes {axes}"
        raise ValueError(f"gtp_shard expects a mesh that contains this rank, {what}. Call it on the mesh's ranks only.")
    got = f"a '{mesh.device_type}' mesh with axes {axes} (rank {rank})"
    if not has_device(mesh.device_type):
        what = f"a mesh of a device that this process has, but got {got}"
        raise ValueError(f"gtp_shard expects {what}. Build it with init_device_mesh('cpu', ...) to run here.")
    # The last axis is gtp.
    config = dist.get_backend_config(mesh.get_group(mesh.ndim - 1))
    if mesh.device_type not in device_types(config):
        what = f"a mesh whose process groups communicate its tensors, but got {got} with the backends '{config}'"
        raise ValueError(f"gtp_shard expects {what}. Pass backend='{mesh.device_type}:...' to init_process_group.")


def in_rank_order(mesh: DeviceMesh) -> DeviceMesh:
    """``mesh`` itself, or the mesh of the same process groups in which ranks ascend along each
    axis: collectives place rows by ascending ranks, DTensor by coordinates. If these differ, a
    checkpoint files a shard under wrong rows."""
    ranks = mesh.mesh.cpu()
    if all(bool((ranks.diff(dim=axis) > 0).all()) for axis in range(mesh.ndim)):
        return mesh
    names = mesh.mesh_dim_names
    device_type = mesh.device_type
    if mesh.ndim == 1:
        # ``from_group`` reads the ranks from the group, where torch has sorted them.
        return DeviceMesh.from_group(mesh.get_group(), device_type, mesh_dim_names=names)
    # A row of the mesh is a gtp group. A column has the replicas of one shard.
    rows = torch.tensor(sorted(row.sort().values.tolist() for row in ranks))
    groups = {frozenset(column) for column in ranks.t().tolist()}
    # The sort may move ranks to other columns. No process group has the ranks of such a column.
    if {frozenset(column) for column in rows.t().tolist()} != groups:
        raise ValueError(
            "gtp_shard expects a mesh whose ranks can be put in ascending order along each axis "
            f"without changing its groups, but got {ranks.tolist()} on axes {mesh.mesh_dim_names} "
            f"(rank {dist.get_rank()}): the replicas of a shard would be in different groups. "
            "Build the mesh with init_device_mesh."
        )
    return DeviceMesh.from_group(mesh.get_all_groups(), device_type, mesh=rows, mesh_dim_names=names)


def refuse_in_flight(module: nn.Module, runtimes: Iterable[Runtime], caller: str) -> None:
    """Raise for gradients of microbatches that are not reduced, in one of the runtimes that a call on ``module``
    changes or replaces."""
    for runtime in runtimes:
        runtime.drop_broken_backward()  # if that raised
        if runtime.steps.has_unsynced or runtime.steps.are_in_flight:
            raise RuntimeError(
                f"{caller} expects a module whose gradients are all in .grad, but a {type(module).__name__} has some "
                f"of microbatches that are not reduced (rank {dist.get_rank()}). Call it after the backward of the "
                "last microbatch, or drop them with reset_iter_state()."
            )


def validate_module(module: nn.Module, mesh: DeviceMesh, ignored: Set[nn.Parameter]) -> None:
    """Refuse a module that is wrapped or sharded already, and parameters of other devices, wrappers and optimizers."""
    wrappers = (FSDPModule, FullyShardedDataParallel, DistributedDataParallel)
    for name, submodule in module.named_modules():
        is_wrapped = isinstance(submodule, wrappers)
        if not is_wrapped and not compat.is_replicated_by_ddp(submodule):
            continue
        # A submodule without parameters of ours may be wrapped in any way.
        if any(param not in ignored for param in submodule.parameters()):
            what = f"module {name!r}"
            if not name:
                what = "the module itself"
            raise ValueError(
                "gtp_shard expects modules without another data parallelism around them, but "
                f"{what} is a {type(submodule).__name__}. Call gtp_shard first, then fully_shard; "
                "or use a (replicate, gtp) mesh instead of DistributedDataParallel; or leave the "
                "module out by passing all its parameters in ignored_params."
            )
    if (sharded := binding_of(module)) is not None:
        raise ValueError(
            f"gtp_shard was called on a {type(module).__name__} that an earlier call has sharded "
            "already, on it or on a module that contains it, over mesh axes "
            f"{sharded.group.arguments.mesh.mesh_dim_names} (rank {dist.get_rank()}). Call it on "
            "submodules first, on the root last, and once on each."
        )
    # This call makes a new runtime, which would not know these replicas.
    if any(runtime.grads.launches.replicas is not None for runtime in runtimes_below(module)):
        raise ValueError(
            f"gtp_shard was called on a {type(module).__name__}, but elastic.synchronize_replicas "
            "was already called on a part of it. Call gtp_shard on the submodules and the root "
            "first, then elastic.synchronize_replicas on the root."
        )
    managed = {id(param.param) for param in params_of(bindings_of(module.modules()))}  # by calls on submodules
    named = module.named_parameters()
    # In a comprehension: a variable would be one more reference to the last parameter.
    replaced = {name: param for name, param in named if param not in ignored and id(param) not in managed}
    _check_devices(replaced, mesh)
    _refuse_params_of("fully_shard", compat.fully_shard_params(), replaced)  # also of modules around this one
    _check_memory(module, replaced)
    # Reference counts are quick to read. All objects of the process are searched only if one is
    # unusual.
    if held := _held_elsewhere(module, replaced):
        _refuse_holders(held, mesh)


def _check_devices(params: dict[str, nn.Parameter], mesh: DeviceMesh) -> None:
    for name, param in params.items():
        if param.device.type not in ("meta", "cpu", mesh.device_type):
            raise ValueError(
                f"gtp_shard expects parameters on '{mesh.device_type}' (the mesh's device), cpu or "
                f"meta, but parameter {name!r} of shape {tuple(param.shape)} is on {param.device}, "
                f"with mesh axes {mesh.mesh_dim_names} (rank {dist.get_rank()}). Move the module, "
                "or build the mesh for its device."
            )


def _check_memory(module: nn.Module, params: dict[str, nn.Parameter]) -> None:
    """What lies in the memory of a parameter of ``params`` follows its updates, and would not
    follow those of shards: refuse other parameters there, and warn of other tensors."""
    tensors: dict[str, Tensor] = dict([*module.named_buffers(), *module.named_parameters()])
    # Plain attributes may be tensors, too, e.g. a view of a parameter.
    for prefix, submodule in module.named_modules():
        attributes = ((f"{prefix}.{name}".lstrip("."), value) for name, value in vars(submodule).items())
        tensors |= {name: value for name, value in attributes if isinstance(value, Tensor)}
    spans = []
    for name, tensor in tensors.items():
        span = _span(tensor)
        if span is not None:
            spans.append((*span, name))
    spans.sort()
    names = list(tensors)
    # The spans are sorted by their begins. So a span overlaps with an earlier one exactly if it begins
    # before the largest end so far.
    end = 0  # of the memory that was looked at
    last = ""  # the tensor that reaches so far
    for begin, new_end, name in spans:
        pair = [last, name]
        is_trained = any(each in params and params[each].requires_grad for each in pair)
        if begin < end and is_trained and tensors[name] is not tensors[last]:
            # The parameter that this call shards comes first.
            shared, other = sorted(pair, key=lambda each: (each not in params, names.index(each)))
            text = (
                f"{other!r} of shape {tuple(tensors[other].shape)} lies in the memory of parameter "
                f"{shared!r} (rank {dist.get_rank()}), and would not follow it once that is "
                "sharded. Register one parameter in both places, or clone() it."
            )
            if isinstance(tensors[other], nn.Parameter):
                raise ValueError(f"gtp_shard expects parameters with memory of their own, but parameter {text}")
            logger.warning("tensor %s", text)
        if new_end > end:
            end = new_end
            last = name


def _span(tensor: Tensor) -> tuple[int, int] | None:
    """Where a tensor begins and ends in memory, if it has all that lies in between."""
    local = compat.local_part(tensor)
    if type(local) not in (Tensor, nn.Parameter, nn.Buffer):  # a subclass may have no memory of its own
        return None
    if local.is_meta or local.layout is not torch.strided:
        return None
    dims = zip(local.size(), local.stride(), strict=True)
    spanned = 1 + sum((size - 1) * stride for size, stride in dims)
    # With gaps, other tensors may rightly lie in between. An expanded tensor has several elements in
    # one place.
    if local.numel() == 0 or spanned != local.numel():
        return None
    return local.data_ptr(), local.data_ptr() + local.numel() * local.itemsize


def _refuse_params_of(wrapper: str, held: Iterable[Tensor], params: dict[str, nn.Parameter]) -> None:
    """Refuse parameters that a wrapper of a module further up holds, which ``module.modules()`` does not show."""
    names = {id(param): name for name, param in params.items()}
    for param in held:
        if id(param) in names:
            raise ValueError(
                "gtp_shard expects parameters that no other data parallelism manages yet, but "
                f"{wrapper} on an outer module manages parameter {names[id(param)]!r} of shape "
                f"{tuple(param.shape)} (rank {dist.get_rank()}). Call gtp_shard first, then "
                f"{wrapper}."
            )


def _held_elsewhere(module: nn.Module, params: dict[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """Those of ``params`` to which more objects refer than the modules below ``module`` and ``params`` itself."""

    def num_references(held: dict[str, nn.Parameter]) -> list[int]:
        return [sys.getrefcount(param) for param in held.values()]

    # By id, as shallow copies of a module share theirs.
    by_id = {id(each._parameters): each._parameters for each in module.modules()}
    num_sites = Counter(id(param) for held in by_id.values() for param in held.values())
    # How many references Python and torch hold to each parameter differs between releases: count
    # them for a new one.
    (num_usual,) = num_references({"": nn.Parameter(torch.empty(0))})  # in a dict, as each of ``params``
    elsewhere = {}
    for name, number in zip(params, num_references(params), strict=True):
        if number != num_usual + num_sites[id(params[name])]:
            elsewhere[name] = params[name]
    return elsewhere


def _refuse_holders(params: dict[str, nn.Parameter], mesh: DeviceMesh) -> None:
    """Refuse parameters that a DistributedDataParallel or an optimizer holds, as no module shows.
    All objects of the process are looked at, for 0.1 s or more, only if one of ``params`` may be in
    a list, as those of optimizers are."""
    # ``gc.get_referrers`` compares each reference of the process with each parameter: too slow for
    # many.
    if len(params) <= 64 and not _are_in_lists(params):
        return
    names = {id(param): name for name, param in params.items()}
    holders = _living(DistributedDataParallel, torch.optim.Optimizer)
    wrappers = [holder for holder in holders if isinstance(holder, DistributedDataParallel)]
    wrapped = [param for wrapper in wrappers for param in wrapper._module_parameters]
    _refuse_params_of("DistributedDataParallel", wrapped, params)
    if (early := _early_optimizer(holders, names)) is not None:
        # An optimizer that nobody uses any more may wait in a reference cycle: collect it and look
        # again.
        del holders  # the list itself would keep it alive
        gc.collect()
        early = _early_optimizer(_living(torch.optim.Optimizer), names)
    if early is not None:
        optimizer, name = early
        raise ValueError(
            f"gtp_shard replaces parameters, but an optimizer ({optimizer}) already holds "
            f"parameter {name!r} of shape {tuple(params[name].shape)}, to be sharded over mesh "
            f"axes {mesh.mesh_dim_names}, and its updates would be lost (rank {dist.get_rank()}). "
            "Create the optimizer after gtp_shard."
        )


def _are_in_lists(params: dict[str, nn.Parameter]) -> bool:
    referrers = gc.get_referrers(*params.values())
    return any(isinstance(held, list | tuple) for held in referrers)


def _living(*classes: type[Any]) -> list[Any]:
    """All objects of these classes in this process. By their type, since ``isinstance`` would run code of proxies."""
    return [candidate for candidate in gc.get_objects() if issubclass(type(candidate), classes)]


def _early_optimizer(holders: list[Any], names: dict[int, str]) -> tuple[str, str] | None:
    """Class of an optimizer that holds one of the parameters, and the parameter's name."""
    for optimizer in holders:
        for group in getattr(optimizer, "param_groups", ()):  # missing if its ``__init__`` has raised
            for param in group["params"]:
                if id(param) in names:
                    # Names alone: the caller tries to collect the optimizer.
                    return type(optimizer).__name__, names[id(param)]
    return None
