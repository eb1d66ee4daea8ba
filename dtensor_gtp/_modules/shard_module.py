"""Shards a module once all ranks have agreed: parameters, bindings, classes, buffers."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from .._dtensor import gradients, random_init
from .._params.managed_param import ManagedParam
from .._schedule.runtime import Runtime
from . import graphed_callables, other_wrappers, outer_fully_shard
from .binding import Binding, ShardGroup, binding_of
from .decide import Decision, Decisions
from .make_param import make_param
from .managed_module import bind


def shard_module(
    module: nn.Module,
    mesh: DeviceMesh,
    decisions: Decisions,
    mp_policy: MixedPrecisionPolicy,
    runtime: Runtime,
    reshard_after_forward: bool,
    mixin: type,
) -> None:
    """Replace the parameters and swap the classes. Nothing in here may fail on bad input.

    Args:
        runtime: Serves this call from now on, and earlier ones on submodules.
        mixin: Base of the class that ``module`` gets, beside the bases that all managed modules get.
    """
    _move_buffers(module, runtime.device)
    nested = _adopt_earlier(module, decisions.params, runtime)
    new: list[ManagedParam] = []
    owned: dict[nn.Module, dict[str, ManagedParam]] = {}
    for decision in decisions.params:
        param = make_param(decision, mesh, runtime.device, mp_policy)
        if decision.existing is None:
            param.flags.reshard_after_forward = reshard_after_forward
            new.append(param)
        for site in decision.sites:
            owned.setdefault(site.module, {})[site.name] = param
    group = ShardGroup(module, mesh, mp_policy, runtime, decisions.unmanaged)
    group.params = new
    classes: dict[tuple[Any, ...], type] = {}
    for submodule in list(module.modules()):
        is_ours = any(m in owned or m in nested for m in submodule.modules())
        if submodule not in nested and (is_ours or submodule is module):
            mixins = (mixin,) if submodule is module else ()
            bind(submodule, Binding(submodule, group, owned.get(submodule, {})), mixins, classes)
    runtime.add(new)
    runtime.calls.append(group)
    for room in (gradients, outer_fully_shard, other_wrappers, graphed_callables):
        room.install()
    for mesh_of_param in {param.spec.mesh for param in new}:
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


def _move_buffers(module: nn.Module, device: torch.device) -> None:
    """Buffers stay whole; like ``fully_shard``, they are moved to the mesh's device."""
    for submodule in module.modules():
        for name, buffer in submodule._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != device:
                submodule._buffers[name] = buffer.to(device)
