"""``fully_shard`` outside of ``gtp_shard``: it cuts our parameters once more, over a data-parallel axis.

During a module's forward and backward it registers what it has gathered: a DTensor just like ours, which the runtime
follows. Two things need care. A gather must not read a shard that ``fully_shard`` has not gathered yet or has freed:
the plan skips weights that are not registered as ours, and gathers in flight are dropped before their shards are freed.
And gradients must be in ``.grad`` when the post-backward of ``fully_shard`` reads them. Compiled code does not look at
what is registered while it runs, so the runtime is told when something else is.

These moments are methods of torch's parameter group, and are wrapped there. Hooks on modules would miss some of them:
``fully_shard`` may be called on a module around ours, on one of a list, or on a single linear layer, and where its
post-backward stands in autograd's graph depends on the containers in which it looks for tensors. ``replicate`` (torch
2.13) is made of the same groups.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat
from .._dtensor.block_layout import has_torch_chunks
from .._params.managed_param import ManagedParam, Site
from .._schedule.optimizer_steps import optimizer_steps
from .._schedule.runtime import Runtime
from ..placement import GTPShard
from .binding import binding_of, managed_params


@functools.cache
def install() -> None:
    """Wrap the parameter groups of ``fully_shard``, once in a process; groups without our parameters stay as they are.

    A torch whose groups are unknown is left alone: there the first use of a parameter that ``fully_shard`` has cut
    raises (see ``ManagedParam.follow``).
    """
    group_class = compat.fully_shard_group_class()
    if group_class is None:
        return
    stock_init, stock_post_backward = group_class.__init__, group_class.post_backward
    stock_to_sharded, stock_to_unsharded = group_class._to_sharded, group_class._to_unsharded

    @functools.wraps(stock_init)
    def init(group: Any, params: list[nn.Parameter], modules: tuple[nn.Module, ...], *args: Any, **kwargs: Any) -> None:
        cut = compat.FullyShardCut.from_arguments(stock_init, group, params, modules, *args, **kwargs)
        _check_cuts(params, modules, cut)
        stock_init(group, params, modules, *args, **kwargs)
        for runtime, param, (module, name) in _managed_in(group):
            runtime.forget_objects()
            param.is_cut_again = True
            if module._parameters.get(name) is not param.param:
                optimizer_steps().note_replaced(param.param, param.fqn)

    @functools.wraps(stock_post_backward)
    def post_backward(group: Any, *unused: Any) -> None:
        for runtime, managed in _by_runtime(group).items():
            runtime.publish(managed)
        with compat.empty_grads_set_aside(group):
            stock_post_backward(group, *unused)

    @functools.wraps(stock_to_sharded)
    def to_sharded(group: Any) -> None:
        if not group.is_sharded:
            for runtime, managed in _by_runtime(group).items():
                runtime.drop_prefetched_of(managed)
        stock_to_sharded(group)

    @functools.wraps(stock_to_unsharded)
    def to_unsharded(group: Any) -> None:
        stock_to_unsharded(group)
        for _, managed, site in _managed_in(group):
            managed.follow(site)

    group_class.__init__, group_class.post_backward = init, post_backward
    group_class._to_sharded, group_class._to_unsharded = to_sharded, to_unsharded


def is_outer_module(module: nn.Module) -> bool:
    """Whether ``fully_shard`` was called on ``module``."""
    return isinstance(module, FSDPModule)


def _managed_in(group: Any) -> Iterator[tuple[Runtime, ManagedParam, Site]]:
    """Our parameters in a group."""
    for module, name in compat.fully_shard_sites(group):
        binding = binding_of(module)
        if binding is not None and name in binding.params:
            yield binding.group.runtime, binding.params[name], Site(module, name)


def _by_runtime(group: Any) -> dict[Runtime, list[ManagedParam]]:
    found: dict[Runtime, list[ManagedParam]] = {}
    for runtime, param, _ in _managed_in(group):
        found.setdefault(runtime, []).append(param)
    return found


def _check_cuts(params: Sequence[nn.Parameter], modules: Sequence[nn.Module], cut: compat.FullyShardCut) -> None:
    """Refuse what ``fully_shard`` cannot cut again, before it has changed anything.

    Raises:
        ValueError: Its mesh has more than this rank in common with that of a parameter of ours.
        NotImplementedError: It would cut a dim whose blocks must stay whole, in other places than between them.
    """
    ours = {id(managed.param): managed for module in modules for _, managed in managed_params(module)}
    outer = set(cut.mesh.mesh.flatten().tolist())
    for param in params:
        managed = ours.get(id(param))
        if managed is None or not isinstance(param, DTensor):
            continue
        what = f"parameter '{managed.fqn}' of shape {tuple(param.shape)} (rank {dist.get_rank()})"
        if len(outer & set(managed.mesh.mesh.flatten().tolist())) > 1:
            raise ValueError(
                f"fully_shard expects a mesh of other axes than gtp_shard, but mesh axes {cut.mesh.mesh_dim_names} and "
                f"{managed.mesh.mesh_dim_names} share ranks for {what}, whose gradient is averaged over the latter "
                "already. Pass a mesh of other axes of the same root, e.g. mesh['dp'] beside mesh['gtp']; or, for a "
                "module beside that gtp_shard does not manage, pass the parameters of gtp_shard in ignored_params."
            )
        placement = param.placements[-1]
        dim = cut.dim_of(param)
        if not isinstance(placement, GTPShard) or placement.dim != dim or cut.num_shards == 1:
            continue
        if has_torch_chunks(compat.dtensor_spec(param), param.device_mesh.ndim - 1):
            continue
        raise NotImplementedError(
            f"fully_shard over mesh axes {cut.mesh.mesh_dim_names} cannot cut dim {dim} of {what} with placements "
            f"{param.placements}: its shards of whole blocks are not torch.chunk's, and DTensor has no placement for "
            "what would come out. Let fully_shard cut another dim of it, with shard_placement_fn=lambda param: "
            f"Shard({1 if dim == 0 else 0}) for this parameter; or choose sizes of which each rank of the gtp axis "
            "gets as many whole blocks; or use block_size=1."
        )
