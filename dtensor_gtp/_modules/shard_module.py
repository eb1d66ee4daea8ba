"""Shards a module once all ranks have agreed: parameters, bindings, classes, buffers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from .._comm.agreement import device_of
from .._comm.debug import DebugFlags
from .._dtensor import norms, optimizers, random_init
from .._params.managed_param import ManagedParam, Site
from .._schedule.runtime import Runtime
from ..policy import SchedulePolicy
from . import graphed_callables, other_wrappers, outer_fully_shard
from .binding import Binding, ShardGroup, binding_of, unmanaged_params
from .decide import Decision
from .make_param import make_param
from .managed_module import bind


def shard_module(
    module: nn.Module,
    mesh: DeviceMesh,
    decisions: list[Decision],
    mp_policy: MixedPrecisionPolicy,
    schedule: SchedulePolicy,
    reshard_after_forward: bool,
    debug: DebugFlags,
    mixin: type,
) -> None:
    """Replace the parameters and swap the classes. Nothing in here may fail on bad input.

    Args:
        mixin: What the class of ``module`` gets, beside what all managed modules get.
    """
    device = device_of(mesh)
    runtime = Runtime(device, schedule, debug)
    group = ShardGroup(module, mesh, mp_policy, runtime)
    owned: dict[nn.Module, dict[str, ManagedParam]] = {}
    nested = _adopt_earlier(module, decisions, runtime)
    for decision in decisions:
        param = make_param(decision, mesh, device, mp_policy)
        if decision.existing is None:
            param.flags.reshard_after_forward = reshard_after_forward
            group.params.append(param)
        for site in decision.sites:
            owned.setdefault(site.module, {})[site.name] = param
    runtime.add(group.params)
    runtime.calls.append(group)
    classes: dict[tuple[Any, ...], type] = {}
    for submodule in list(module.modules()):
        if submodule in nested or not (submodule is module or _contains_managed(submodule, owned, nested)):
            continue
        mixins = (mixin,) if submodule is module else ()
        bind(submodule, Binding(submodule, group, owned.get(submodule, {})), mixins, classes)
    known = {site for m in nested if (b := binding_of(m)) is not None for site in b.group.unmanaged}
    sites = {Site(owner, name) for _, owner, name in unmanaged_params(module)}
    group.unmanaged = {site for site in sites if site.module not in nested or site in known}
    _move_buffers(module, device)
    for room in (optimizers, norms, outer_fully_shard, other_wrappers, graphed_callables):
        room.install()
    for mesh_of_param in {param.param.device_mesh for param in group.params}:  # type: ignore[attr-defined]
        random_init.whole_draws().add_mesh(mesh_of_param)


def _adopt_earlier(module: nn.Module, decisions: list[Decision], runtime: Runtime) -> set[nn.Module]:
    """Give this runtime to earlier calls on submodules, and to those that share a parameter with ``module``.

    Returns:
        The modules below ``module`` that earlier calls manage.
    """
    nested = {m: name for name, m in module.named_modules() if binding_of(m) is not None}
    tied = [d.existing.sites[0].module for d in decisions if d.existing is not None]
    # In an order that is the same on all ranks (a set of modules has none): it becomes the order of collectives.
    found = [b.group.runtime for m in (*nested, *tied) if (b := binding_of(m)) is not None]
    for earlier in dict.fromkeys(found):
        for call in earlier.calls:  # all of them: a weight with two runtimes would be reduced by both
            runtime.add(call.params)
            call.runtime = runtime
        runtime.calls += earlier.calls
        earlier.close()
    names: dict[ManagedParam, str] = {}
    for submodule, prefix in nested.items():
        binding = binding_of(submodule)
        for name, param in binding.params.items() if binding is not None else ():
            names.setdefault(param, f"{prefix}.{name}")
    for param, name in names.items():
        param.fqn = name
    return set(nested)


def _contains_managed(module: nn.Module, owned: dict[nn.Module, Any], nested: set[nn.Module]) -> bool:
    return any(m in owned or m in nested for m in module.modules())


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    """Buffers stay whole; like ``fully_shard``, they are moved to the mesh's device."""
    for submodule in module.modules():
        for name, buffer in submodule._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                submodule._buffers[name] = buffer.to(device)
