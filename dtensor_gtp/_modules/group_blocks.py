"""Which blocks of a model gather and reduce their weights as groups.

A *block* is a module whose class stands at least twice in a container. In the first forward its
weights become a group, if they are small: the host would need longer for each of them than its GEMM
lasts; if code of the user multiplies them (experts of transformers); or if a recipe would have them
dequantized for each GEMM. A block keeps single weights if one is shared with other blocks, lies on
another mesh, is offloaded, tensor-parallel or cut again by an outer ``fully_shard``, or if the
schedule was given number by number. ``sharding_report`` says which and why.

The modules of a group multiply in the compute dtype. So a rank sends what a recipe makes of the
values of its shard, in that dtype: within a host, more bytes take less time than casts of each
layer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache, partial
from types import MethodType

import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from .._comm.agreement import is_one_host
from .._comm.debug import format_nbytes
from .._howto import printable
from .._params.managed_param import ManagedParam
from .._params.pack_planes import QuantizedWire
from .._params.sharded_weight import ShardedWeight
from .._params.weight_group import WeightGroup
from .._params.whole_param import WholeParam
from .._schedule.choose_schedule import fits_a_group, is_worth_a_group
from .._schedule.guesses import blocks_in
from .._schedule.runtime import Runtime
from .binding import ShardGroup, binding_of, bindings_of, join_name, params_of
from .dress import dress
from .frames import call_in_frame

# A block that has more than this share of a model is no unit of gathering if it has blocks inside.
_MOST_OF_MODEL = 0.3


def make_groups(runtime: Runtime, num_tokens: int) -> tuple[str, ...]:
    """Turn blocks below the outermost call into groups. Returns what was chosen and why."""
    calls: list[ShardGroup] = runtime.members.calls
    if runtime.policy._numbers or runtime.grads.launches.replicas is not None:
        return ()
    # Cached, because ranks ask each other for a mesh: once, on all ranks alike.
    is_near = cache(lambda mesh: is_one_host(mesh.get_group(mesh.ndim - 1), runtime.device))
    groups: list[WeightGroup] = []
    reasons: dict[str, list[str]] = {}
    total = sum(_numel(param) for call in calls for param in call.params)
    may_replay = runtime.comm.may_replay_steps
    called = {call.module for call in calls}
    blocks: dict[nn.Module, str] = {}
    for name, block in _blocks(calls[-1].module, "", total, called):
        blocks.setdefault(block, name)  # two containers may hold it
    times = Counter(part for block in blocks for part in block.modules())
    shared = {part for part in times if times[part] > 1}
    why_single = partial(
        _why_single, num_tokens=num_tokens, is_near=is_near, may_replay=may_replay, called=called, shared=shared
    )
    for block, name in blocks.items():
        parts = list(block.modules())
        why = why_single(parts)
        others = [module for module in parts if not _has_experts(module)]
        if why is not None and block in others and len(others) < len(parts):
            why_experts = why
            parts = others
            why = why_single(parts)
            if why is None:
                reasons.setdefault(_of_any_block(why_experts, name), []).append(f"experts of {name}")
        if why is None:
            groups.append(_make_group(name, block, parts))
        else:
            reasons.setdefault(_of_any_block(why, name), []).append(name)
    chosen = []
    if groups:
        runtime.use_groups(groups)
        sizes = f"{groups[0].fqn} to {groups[-1].fqn}"
        chosen.append(f"groups: {len(groups)} blocks, each gathered as a whole ({sizes})")
    chosen += [f"no group: {_named(names)}, because {why}" for why, names in reasons.items()]
    return tuple(chosen)


def _make_group(name: str, block: nn.Module, modules: list[nn.Module]) -> WeightGroup:
    params = params_of(bindings_of(modules))
    weights = [param for param in params if isinstance(param, ShardedWeight)]
    whole = [param for param in params if isinstance(param, WholeParam)]
    # Before: the group keeps what its modules have as ``_parameters``.
    _dress_as_group(modules, block)
    group = WeightGroup(name, block, weights, whole)
    group.for_forward.call = weights[0].for_forward.call
    group.on_dissolved = partial(_dress_as_group, modules, None)
    # Modules that read weights of the group, besides the block: outside of passes their calls are
    # frames of the block's group, see ``frames``.
    parts = {site.module for param in params for site in param.registration.sites} - {block}
    for binding in bindings_of(modules):  # also of those without parameters: code may have compiled their calls
        binding.weight_group = group
    group.views.calls = {part: MethodType(call_in_frame, part) for part in parts}
    return group


def _dress_as_group(modules: list[nn.Module], block: nn.Module | None) -> None:
    """Reads of these modules are those of ``nn.Module`` from now on, and calls but for those of
    ``block``; None: they are modules of single weights again."""
    for module in modules:
        if (binding := binding_of(module)) is not None:
            binding.block = block
            dress(module)


def _of_any_block(why: str, name: str) -> str:
    """A reason that names a parameter of block ``name`` as all blocks call it."""
    return why.replace(f"'{name}.", "'")


def _named(names: list[str]) -> str:
    if len(names) == 1:
        return names[0]
    return f"{names[0]} and {len(names) - 1} more"


def _numel(param: ManagedParam) -> int:
    """Elements of a sharded weight; whole parameters do not count."""
    if isinstance(param, ShardedWeight):
        return param.param.numel()
    return 0


def _blocks(module: nn.Module, prefix: str, total: int, called: set[nn.Module]) -> Iterator[tuple[str, nn.Module]]:
    """The outermost blocks below ``module`` that are no large part of it and have none of ``called`` inside, with
    their names."""
    blocks = set(blocks_in(module))
    for name, child in module.named_children():
        fqn = printable(join_name(prefix, name))
        is_container = isinstance(child, nn.ModuleList | nn.ModuleDict)
        if child in blocks and not is_container:
            inner = list(_blocks(child, fqn, total, called))
            params = params_of(bindings_of(child.modules()))
            is_large = sum(map(_numel, params)) > _MOST_OF_MODEL * total
            if inner and (is_large or not called.isdisjoint([*child.modules()][1:])):
                yield from inner
            else:
                yield fqn, _without_wrappers(child)
        else:
            yield from _blocks(child, fqn, total, called)


def _without_wrappers(module: nn.Module) -> nn.Module:
    """The block in wrappers that were put around it after ``gtp_shard``, whose calls are no frames. A compiled wrapper
    stays: its graph has no place for frames."""
    while binding_of(module) is None and module._compiled_call_impl is None:
        managed = [child for child in module.children() if any(bindings_of(child.modules()))]
        if len(managed) != 1:
            break
        (module,) = managed
    return module


def _has_experts(module: nn.Module) -> bool:
    """Whether a module has weights of several experts in one. The rest of its block may be a group."""
    binding = binding_of(module)
    if binding is None:
        return False
    return any(isinstance(param, ShardedWeight) and param.param.ndim == 3 for param in binding.params.values())


def _why_single(
    modules: list[nn.Module],
    num_tokens: int,
    is_near: Callable[[DeviceMesh], bool],
    *,
    may_replay: bool,
    called: set[nn.Module],
    shared: set[nn.Module],
) -> str | None:
    """Why the weights of these modules are gathered one by one; None if they can be a group.
    ``called``: what ``gtp_shard`` was called on. ``shared``: what several blocks have as a part."""
    params = params_of(bindings_of(modules))
    weights = [param for param in params if isinstance(param, ShardedWeight)]
    if len(weights) < 2:
        return "it has fewer than two sharded weights"
    if not called.isdisjoint(modules[1:]):  # whose calls cast, in frames of their own
        return "gtp_shard was called on a part of it"
    if elsewhere := params_of(bindings_of(module for module in modules if module in shared)):
        # A group takes gradients of its own leaves alone.
        return f"'{elsewhere[0].fqn}' is shared with other blocks"
    why = _why_large(weights, num_tokens)
    if why is None:
        why = _why_unlike(modules, params)
    if why is None:
        why = _why_not_rounded(weights, is_near, may_replay=may_replay)
    return why


def _why_large(weights: list[ShardedWeight], num_tokens: int) -> str | None:
    """Why the host has time for each of these weights, and so they need no group."""
    nbytes = sum(weight.param.numel() * weight.compute_dtype.itemsize for weight in weights)
    if not fits_a_group(nbytes):
        return f"a gather lasts longer than the host needs for its weights ({format_nbytes(nbytes)})"
    # Other weights gain nothing alone: no op of ours multiplies them.
    numels = [weight.param.numel() for weight in weights if weight.fused.is_any]
    mean = sum(numels) / max(len(numels), 1)
    has_float8 = any(weight.form.gemms is not None for weight in weights)
    is_dequantized = not has_float8 and any(isinstance(weight.form.wire, QuantizedWire) for weight in weights)
    if is_worth_a_group(mean, num_tokens, has_float8=has_float8, is_dequantized=is_dequantized):
        return None
    return f"a GEMM lasts longer than the host needs for a weight ({mean:.3g} elements, {num_tokens} tokens)"


def _why_unlike(modules: list[nn.Module], params: list[ManagedParam]) -> str | None:
    """Why these modules and parameters are not alike enough to be a group."""
    weights = [param for param in params if isinstance(param, ShardedWeight)]
    if binding_of(modules[0]) is None:
        return "the module around its weights was added after gtp_shard"
    first = weights[0]
    inside = set(modules)
    if first.flags.reduce_scatter_unused_params:
        return "set_reduce_scatter_unused_params lets ranks use each weight as they like"
    for param in params:
        if any(site.module not in inside for site in param.registration.sites):
            return f"'{param.fqn}' is shared with other modules"
        if param.is_pinned:
            return f"unshard() keeps '{param.fqn}'"
        if param.mesh != first.mesh or param.flags != first.flags:
            return f"'{param.fqn}' has another mesh or other settings"
        if param.registration.is_cut_again or not param.is_readable:
            return f"'{param.fqn}' was sharded again or replaced"
        if param.policies.offload is not None or getattr(param, "tp_spec", None) is not None:
            return f"'{param.fqn}' is offloaded or tensor-parallel"
        # One buffer has them all.
        if (param.compute_dtype, param.reduce_dtype) != (first.compute_dtype, first.reduce_dtype):
            return f"'{param.fqn}' has another dtype"
    for weight in weights:
        layout = weight.layout
        # Gradients are packed in equal chunks of rows.
        is_even = layout.chunk_rows == -(-layout.num_rows // layout.world)
        if layout.dim != 0 or not is_even or layout.world == 1:
            return f"'{weight.fqn}' is sharded in another way"
        if weight.for_forward.companions:
            return f"'{weight.fqn}' travels with others"
    if any(isinstance(module, nn.RNNBase) for module in modules):
        return "recurrent layers keep a list of their weights"
    return None


def _why_not_rounded(
    weights: list[ShardedWeight], is_near: Callable[[DeviceMesh], bool], *, may_replay: bool
) -> str | None:
    """Why quantized weights of a block are not gathered as values; None if they are, or if none is
    quantized."""
    quantized = [weight for weight in weights if weight.form.wire is not None]
    for weight in quantized:
        wire = weight.form.wire
        if not isinstance(wire, QuantizedWire) or wire.is_native:
            return f"'{weight.fqn}' is stored in low precision"
        if wire.recipe.compute == "float8" or (may_replay and weight.form.gemms is not None):
            return f"'{weight.fqn}' is multiplied in float8"
    if quantized and not is_near(quantized[0].mesh):
        return f"'{quantized[0].fqn}' travels between hosts, so in few bytes"
    return None
