"""Shards a module once all ranks have agreed: parameters, bindings, classes, buffers."""

from __future__ import annotations

from functools import partial

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from .. import _torch_compat as compat
from .._comm.agreement import device_of
from .._comm.collectives import has_replicas
from .._dtensor import gradients, random_init, remedies
from .._dtensor.block_layout import has_torch_chunks
from .._howto import printable
from .._params.layout import WeightLayout
from .._params.managed_param import ManagedParam, Policies, Site
from .._params.pack_planes import make_wire
from .._params.replica_part import ReplicaPart
from .._params.sharded_weight import ShardedWeight
from .._params.ties import ReplacedParam, refuse_gradient_of_replaced
from .._params.whole_param import WholeParam
from .._schedule.guesses import blocks_in
from .._schedule.runtime import Runtime
from .._schedule.steps import optimizer_steps
from ..placement import GTPShard
from ..quant.master import master_of
from ..quant.native import NativeWeight
from ..quant.native_data import recipe_groups
from . import outside_of_modules, torch_patches, uncompiled
from .binding import Arguments, Binding, ShardGroup, binding_of, bindings_of, managed_params
from .decide import Decision
from .dress import bind
from .group_blocks import make_groups
from .input_casts import InputCasts
from .overrides import run_all_layers


def shard_module(
    module: nn.Module, arguments: Arguments, decisions: list[Decision], ignored: set[Site], runtime: Runtime, own: type
) -> None:
    """Replace the parameters and bind the modules. Nothing in here may fail on bad input.
    ``runtime`` also serves earlier calls on submodules from now on; ``own`` becomes the class of
    ``module``, and of no module below it."""
    # Buffers stay whole. Like ``fully_shard``, move them to the mesh's device.
    for submodule in module.modules():
        for name, buffer in submodule._buffers.items():
            if buffer is not None and not buffer.is_meta and buffer.device != runtime.device:
                submodule._buffers[name] = buffer.to(runtime.device)
    if arguments.mesh.size() > 1:  # a rank alone may skip layers
        run_all_layers(module)
    nested = _adopt_earlier(module, decisions, runtime)
    group = ShardGroup(module, arguments, runtime, ignored)
    owned: dict[nn.Module, dict[str, ManagedParam]] = {}
    for decision in decisions:
        param = decision.existing
        if param is None:
            param = _make_param(decision, arguments, runtime.device)
            group.params.append(param)
        else:  # a tie with a parameter of an earlier call
            param.registration.sites.extend(decision.sites)
        for site in decision.sites:
            site.module._parameters[site.name] = param.param
            owned.setdefault(site.module, {})[site.name] = param
    # Modules around ours are bound, too: their calls are frames. The rest stays as it is.
    for submodule in list(module.modules()):
        is_ours = any(m in owned or m in nested for m in submodule.modules())
        if submodule not in nested and (is_ours or submodule is module):
            binding = Binding(submodule, group, owned.get(submodule, {}))
            bind(submodule, binding, own if submodule is module else None)
    _cast_into_blocks(module, group)
    runtime.add(group.params)
    calls = runtime.members.calls
    is_outer = [call.module is not module and module in set(call.module.modules()) for call in calls]
    calls.insert([*is_outer, True].index(True), group)  # before the calls around it: the outermost one is the last
    # Not yet: the first forward shows how many tokens a rank gets.
    runtime.setup.make_groups_by(partial(make_groups, runtime))
    for part_of_torch in (gradients, remedies, torch_patches, outside_of_modules, uncompiled):
        part_of_torch.install()  # once in a process
    for mesh_of_param in {param.spec.mesh for param in group.params}:
        random_init.whole_draws().add_mesh(mesh_of_param)  # all ranks draw alike, as one process does


def _cast_into_blocks(module: nn.Module, group: ShardGroup) -> None:
    """Let blocks below ``module`` cast their inputs where their container needs it."""
    policy = group.arguments.mp_policy
    if policy.param_dtype is None or not policy.cast_forward_inputs:
        return
    for container in module.modules():
        casts: InputCasts | None = None  # of all its blocks
        for block in blocks_in(container):
            binding = binding_of(block)
            if binding is None or binding.group is not group or not any(block.children()):
                continue  # a layer casts nothing
            if casts is None:
                casts = InputCasts(block, policy.param_dtype)
            binding.input_casts = casts


def earlier_runtimes(module: nn.Module, decisions: list[Decision]) -> list[Runtime]:
    """Of calls on submodules, and of calls elsewhere that share a parameter. Each once, in an order that is the same on
    all ranks: it becomes the order of collectives."""
    tied = [d.existing.registration.sites[0].module for d in decisions if d.existing is not None]
    bindings = bindings_of((*module.modules(), *tied))
    return list(dict.fromkeys(binding.group.runtime for binding in bindings))


def _adopt_earlier(module: nn.Module, decisions: list[Decision], runtime: Runtime) -> set[nn.Module]:
    """Give ``runtime`` to earlier calls on submodules, and to calls elsewhere that share a
    parameter with ``module``. Returns the modules below ``module`` that earlier calls manage."""
    nested = [submodule for submodule in module.modules() if binding_of(submodule) is not None]
    for earlier in earlier_runtimes(module, decisions):
        earlier.split_groups()  # they are those of another runtime
        for call in earlier.members.calls:  # all: both runtimes of a weight would reduce it
            runtime.add(call.params)
            call.runtime = runtime
        runtime.members.calls += earlier.members.calls
        optimizer_steps().watchers.discard(earlier)  # it serves no call any more
    # Reversed, so that a tied parameter keeps its first name.
    for name, param in reversed(list(managed_params(module))):
        param.fqn = printable(name)
    return set(nested)


def _make_param(decision: Decision, arguments: Arguments, device: torch.device) -> ManagedParam:
    old = decision.param
    recipe = decision.recipe
    placement = decision.placement
    mesh = decision.mesh
    spec_mesh, placements = _where(decision, arguments)
    tp_spec = None
    if isinstance(old, DTensor):
        tp_spec = compat.dtensor_spec(old)
    local = master_of(compat.local_part(old)).detach()
    layout: WeightLayout | None = None
    part: ReplicaPart | None = None
    if isinstance(placement, GTPShard):
        rank = mesh.get_local_rank(mesh.ndim - 1)
        world = mesh.size(mesh.ndim - 1)
        layout = WeightLayout(local.shape, placement.dim, world, rank, placement.block_size)
        shard = layout.shard_of(local)  # a copy: the whole weight can be freed
        cut = None
        if _splits_states(decision, arguments):
            cut = _cut_by_replicas(old, spec_mesh, placements)
        if cut is not None:
            placements = cut
            part = ReplicaPart(WeightLayout(shard.shape, 0, mesh.size(0), mesh.get_local_rank(0)))
            shard = part.layout.shard_of(shard)
    else:
        shard = local.clone(memory_format=torch.contiguous_format)
    if not shard.is_meta:
        home = device
        if arguments.offload is not None:
            home = torch.device("cpu")
        shard = shard.to(home)
    spec = compat.make_spec(spec_mesh, placements, old.shape, old.dtype)
    if isinstance(shard, NativeWeight):
        assert recipe is not None
        # ``copy_`` takes the largest magnitude over these groups.
        shard = shard.like(groups=recipe_groups(spec, recipe))
    new = nn.Parameter(compat.wrap_local(shard, spec), requires_grad=old.requires_grad)
    structural = old.detach().__dict__  # what a tensor subclass needs for itself, its data among it
    for key, value in old.__dict__.items():
        if key not in structural:
            new.__dict__.setdefault(key, value)  # tags that users put on parameters
    compat.move_hooks(old, new)
    managed: ManagedParam
    policies = Policies(arguments.mp_policy, arguments.offload, device_of(mesh))
    fqn = decision.fqn
    sites = decision.sites
    if layout is not None:
        weight = ShardedWeight(fqn, sites, new, mesh, policies, layout, tp_spec, part)
        weight.set_wire(make_wire(weight, recipe))
        managed = weight
    else:
        managed = WholeParam(fqn, sites, new, mesh, policies, tp_spec, decision.reason)
    managed.flags.reshard_after_forward = arguments.reshard_after_forward
    # A later call finds the tie by this weak reference, as long as the manager holds it.
    replaced = ReplacedParam(old)
    replaced.manager = managed
    managed.registration.replaced = replaced
    # What still computes with the old parameter would train on the data of this rank alone.
    if old.requires_grad:
        old.register_hook(partial(refuse_gradient_of_replaced, replaced))
    return managed


def _splits_states(decision: Decision, arguments: Arguments) -> bool:
    """Whether replicas split the optimizer states of a weight. A frozen one has none."""
    return arguments.shard_optimizer and has_replicas(decision.mesh) and decision.param.requires_grad


def _where(decision: Decision, arguments: Arguments) -> tuple[DeviceMesh, tuple[Placement, ...]]:
    """The mesh and placements of a parameter, as if replicas did not cut it. Placements apply from
    left to right."""
    mesh = decision.mesh
    placements: tuple[Placement, ...] = (decision.placement,)
    if mesh.ndim == 2:
        placements = (Replicate(), decision.placement)
    if arguments.shard_optimizer and has_replicas(mesh):  # replicas cut what gtp has left
        assert mesh.mesh_dim_names is not None
        replicate, gtp = mesh.mesh_dim_names
        mesh = compat.concatenate_meshes([mesh[gtp], mesh[replicate]])
        # ``_cut_by_replicas`` may make a Shard(0) of the last one.
        placements = (decision.placement, Replicate())
    if isinstance(decision.param, DTensor):  # gtp cuts what tp has left, also unevenly
        spec = compat.dtensor_spec(decision.param)
        return compat.concatenate_meshes([spec.mesh, mesh]), (*spec.placements, *placements)
    return mesh, placements


def _cut_by_replicas(
    param: nn.Parameter, mesh: DeviceMesh, whole: tuple[Placement, ...]
) -> tuple[Placement, ...] | None:
    """The placements of a weight whose dim 0 the replicas cut, too. None where that would split
    blocks in a way that DTensor has no placement for."""
    spec = compat.make_spec(mesh, whole, param.shape, param.dtype)
    placements = list(whole)
    for axis, placement in enumerate(placements):
        if isinstance(placement, GTPShard) and placement.dim == 0 and placement.block_size > 1:
            if not has_torch_chunks(spec, axis):
                return None
            # The same rows, but without a block size: a placement in blocks must be the last one of its dim.
            placements[axis] = GTPShard(0)
    return (*placements[:-1], Shard(0))
