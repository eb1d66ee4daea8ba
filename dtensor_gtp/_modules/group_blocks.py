"""Which blocks of a model gather and reduce their weights as groups, and how a block is called then.

A *block* is a module whose class stands at least twice in a container. In the first forward its weights become a group,
if they are small: the host would need longer for each of them than its GEMM lasts. A block keeps single weights if one
is shared with other blocks, lies on another mesh, is quantized, offloaded, tensor-parallel or cut again by an outer
``fully_shard``, or if the schedule was given number by number. ``sharding_report`` says which and why.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn as nn
from torch import Tensor

from .. import _torch_compat as compat
from .._params.managed_param import ManagedParam
from .._params.sharded_weight import ShardedWeight
from .._params.weight_group import WeightGroup
from .._params.whole_param import WholeParam
from .._schedule.block_uses import BlockUse
from .._schedule.guesses import blocks_in
from .._schedule.runtime import Runtime
from .binding import BoundModule, ShardGroup, binding_of, join_name

# A block that has more than this share of a model is no unit of gathering if it has blocks inside.
_MOST_OF_MODEL = 0.3
# Elements of a weight times tokens, on average over a block. Below that, its GEMM takes less time than the host needs
# for the weight by itself: 5e10 multiplications and additions take an H100 0.15 ms, a weight takes a host as long.
_SMALL_GEMM = 50e9
# Where the number of tokens is not known (images, sound).
_SMALL_NUMEL = 16 << 20


class GTPBlock(BoundModule):
    """Mixin of a block whose weights are a group."""

    _gtp_group: WeightGroup

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        compiler = compat.set_eval_frame(None)
        try:
            return _call_block(self, super().__call__, args, kwargs, compiler)
        finally:
            compat.set_eval_frame(compiler)


compat.skip_code(GTPBlock.__call__.__code__)


def _call_block(block: GTPBlock, call: Any, args: Any, kwargs: Any, compiler: Any) -> Any:
    group, runtime = block._gtp_group, block._gtp_binding.group.runtime
    depth = runtime.depth_of_call()
    frame = gathered = None
    is_compiled = compiler is not None or block._compiled_call_impl is not None
    was_in_pass = is_complete = False
    try:
        try:
            frame = runtime.enter(block, _needs_no_hooks)
            was_in_pass = group.is_in_pass
            gathered = runtime.acquire(group)
            seen = group.seen() if runtime.reads.looks_at_bits else None
            use = BlockUse(runtime, group) if torch.is_grad_enabled() else None
            if is_compiled or not was_in_pass:
                group.show(is_compiled=is_compiled)
            inputs = [*_tensors((args, kwargs))] if use is not None else []
            if compiler is None:
                output = call(*args, **kwargs)
            else:
                compat.set_eval_frame(compiler)
                try:
                    output = call(*args, **kwargs)
                finally:
                    compat.set_eval_frame(None)
            if seen is not None:
                group.check_traces(seen)
            is_complete = True
        finally:
            if frame is not None:
                if is_compiled or not was_in_pass:
                    group.show(is_in_pass=was_in_pass)
                if gathered is not None:
                    runtime.release(group, gathered)
                runtime.exit(frame, is_complete)
    finally:
        runtime.leave(depth)
    if use is not None:
        use.watch(inputs, _tensors(output))
    return output


def _needs_no_hooks(num_steps: int) -> bool:
    """Autograd saves leaves of a group as they are: their memory is refilled for its backward."""
    return False


def _tensors(tree: Any) -> Iterator[Tensor]:
    for leaf in compat.tree_leaves(tree):
        if isinstance(leaf, Tensor):
            yield leaf


def make_groups(runtime: Runtime, bind: Callable[[nn.Module, bool], None], num_tokens: int) -> tuple[str, ...]:
    """Turn blocks of the outermost call into groups. ``bind(module, is_block)`` swaps the class of a module. Returns
    what was chosen and why."""
    call = runtime.calls[-1]
    assert isinstance(call, ShardGroup)
    if runtime.policy._numbers or runtime.grads.replicas is not None or len(runtime.calls) > 1:
        return ()
    groups: list[WeightGroup] = []
    reasons: dict[str, list[str]] = {}
    total = sum(_numel(param) for param in call.params)
    for name, block in _blocks(call.module, "", total):
        modules = list(block.modules())
        params = dict.fromkeys(
            param
            for module in modules
            if (binding := binding_of(module)) is not None
            for param in binding.params.values()
        )
        if (why := _why_single(modules, list(params), num_tokens)) is None:
            weights = [param for param in params if isinstance(param, ShardedWeight)]
            whole = [param for param in params if isinstance(param, WholeParam)]
            group = WeightGroup(name, block, weights, whole)
            group.call = weights[0].call
            groups.append(group)
            group.single_classes = [(module, type(module)) for module in modules]
            for module in modules:
                bind(module, module is block)
            block.__dict__["_gtp_group"] = group
        else:
            reasons.setdefault(why, []).append(name)
    if groups:
        runtime.add_groups(groups)
    sizes = f"{groups[0].fqn} to {groups[-1].fqn}" if groups else ""
    chosen = [f"groups: {len(groups)} blocks, each gathered as a whole ({sizes})"] if groups else []
    return (*chosen, *(f"no group: {_named(names)}, because {why}" for why, names in reasons.items()))


def _named(names: list[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _numel(param: ManagedParam) -> int:
    return param.param.numel() if isinstance(param, ShardedWeight) else 0


def _blocks(module: nn.Module, prefix: str, total: int) -> Iterator[tuple[str, nn.Module]]:
    """The outermost blocks below ``module`` that are no large part of it, with their names."""
    blocks = set(blocks_in(module))
    for name, child in module.named_children():
        fqn = join_name(prefix, name)
        is_container = isinstance(child, nn.ModuleList | nn.ModuleDict)
        if child in blocks and not is_container:
            inner = list(_blocks(child, fqn, total))
            params = {param for m in child.modules() if (b := binding_of(m)) is not None for param in b.params.values()}
            if not inner or sum(map(_numel, params)) <= _MOST_OF_MODEL * total:
                yield fqn, child
                continue
            yield from inner
        else:
            yield from _blocks(child, fqn, total)


def _why_single(modules: list[nn.Module], params: list[ManagedParam], num_tokens: int) -> str | None:
    """Why the weights of a block are gathered one by one; None if they can be a group."""
    weights = [param for param in params if isinstance(param, ShardedWeight)]
    if len(weights) < 2:
        return "it has fewer than two sharded weights"
    numel = sum(map(_numel, weights)) / len(weights)
    if numel * num_tokens > _SMALL_GEMM or (not num_tokens and numel > _SMALL_NUMEL):
        return f"a GEMM lasts longer than the host needs for a weight ({numel:.3g} elements, {num_tokens} tokens)"
    first, inside = weights[0], set(modules)
    if first.flags.reduce_scatter_unused_params:
        return "set_reduce_scatter_unused_params lets ranks use each weight as they like"
    for param in params:
        if any(site.module not in inside for site in param.sites):
            return f"'{param.fqn}' is shared with other modules"
        if param.mesh != first.mesh or param.flags != first.flags or param.is_pinned:
            return f"'{param.fqn}' has another mesh or other settings"
        if param.is_cut_again or param.param is not param.sites[0].module._parameters.get(param.sites[0].name):
            return f"'{param.fqn}' was sharded again or replaced"
        if param.offload is not None or getattr(param, "tp_spec", None) is not None:
            return f"'{param.fqn}' is offloaded or tensor-parallel"
        if (param.compute_dtype, param.reduce_dtype) != (first.compute_dtype, first.reduce_dtype):
            return f"'{param.fqn}' has another dtype"
    for weight in weights:
        layout = weight.layout
        if weight.wire is not None or layout.dim != 0 or layout.block_size != 1 or layout.world == 1:
            return f"'{weight.fqn}' is quantized or sharded in another way"
        if weight.companions:
            return f"'{weight.fqn}' travels with others"
    if any(isinstance(module, nn.RNNBase) for module in modules):
        return "recurrent layers keep a list of their weights"
    return None
