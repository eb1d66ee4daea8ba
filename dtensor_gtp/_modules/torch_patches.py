"""Replaces functions of torch that have no hooks, so that they work with modules of ours, or refuse
them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, cast

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DataParallel, DistributedDataParallel

from .. import _torch_compat as compat
from .._dtensor.block_layout import has_torch_chunks
from .._howto import see
from .._params.managed_param import ManagedParam, Site
from .._params.sharded_weight import ShardedWeight
from .._schedule.runtime import Runtime
from .._schedule.steps import optimizer_steps
from ..placement import GTPShard
from .binding import binding_of, managed_params
from .outside_of_modules import known_runtimes
from .overrides import INSTEAD_OF_DDP


@functools.cache
def install() -> None:
    """Replace the functions once in a process. Those of pipelines follow when pipelines are
    imported, see ``outside_of_modules.follow_pipelining``."""
    _wrap_fully_shard()
    _keep_read_items()
    _refuse_wrappers()
    _copy_full_states()


def _wrap_fully_shard() -> None:
    """Let ``fully_shard`` around modules of ours cut our parameters once more, over a data-parallel
    axis.

    In forward and backward it registers DTensors like ours, which the runtime follows. A gather
    must not read a shard that ``fully_shard`` has freed, so gathers in flight are dropped before.
    Gradients must be in ``.grad`` when its post-backward reads them. Both moments are methods of
    its parameter groups, which ``replicate`` of torch 2.13 uses, too. If this torch has other
    groups, ``ManagedParam.follow`` raises at the first use.
    """
    group_class = compat.fully_shard_group_class()
    if group_class is None:
        return
    stock_init = group_class.__init__
    stock_post_backward = group_class.post_backward
    stock_to_sharded = group_class._to_sharded
    stock_to_unsharded = group_class._to_unsharded

    @functools.wraps(stock_init)
    def init(group: Any, params: list[nn.Parameter], modules: tuple[nn.Module, ...], *args: Any, **kwargs: Any) -> None:
        cut = compat.FullyShardCut.from_arguments(stock_init, group, params, modules, *args, **kwargs)
        _check_cuts(params, modules, cut)  # while nothing is cut yet
        stock_init(group, params, modules, *args, **kwargs)
        for runtime, param, (module, name) in _managed_in(group):
            runtime.members.forget_objects()  # ids of parameters have to be looked up again
            # From now on, gathers wait until ``fully_shard`` has gathered the shard.
            param.registration.is_cut_again = True
            param.registration.num_outer_ranks = cut.mesh.size()
            if module._parameters.get(name) is not param.param:
                # An optimizer that holds the old object would step to no effect.
                optimizer_steps().note_replaced(param.param, param.fqn)

    @functools.wraps(stock_post_backward)
    def post_backward(group: Any, *unused: Any) -> None:
        for runtime, managed in _by_runtime(group).items():
            # Into ``.grad``, from where ``fully_shard`` takes them.
            runtime.steps.publish([param for param in managed if not param.gradient.has_more_uses])
        with compat.empty_grads_set_aside(group):  # of ranks without rows
            stock_post_backward(group, *unused)

    @functools.wraps(stock_to_sharded)
    def to_sharded(group: Any) -> None:
        if not group.is_sharded:
            # Torch frees the shards that these gathers read.
            for runtime, managed in _by_runtime(group).items():
                runtime.gathering.drop_prefetched_of(managed)
        stock_to_sharded(group)

    @functools.wraps(stock_to_unsharded)
    def to_unsharded(group: Any) -> None:
        stock_to_unsharded(group)
        # Compiled code does not look at what is registered while it runs.
        for _, managed, site in _managed_in(group):
            managed.follow(site)

    compat.replace("fully_shard init", group_class, "__init__", init)
    compat.replace("fully_shard post_backward", group_class, "post_backward", post_backward)
    compat.replace("fully_shard to_sharded", group_class, "_to_sharded", to_sharded)
    compat.replace("fully_shard to_unsharded", group_class, "_to_unsharded", to_unsharded)


def _keep_read_items() -> None:
    """Let containers of parameters take what a forward has read as it is: slices, copies and unions
    of a container in a forward are new containers."""

    def patch(key: str, cls: Any) -> None:
        stock = cls.__setitem__

        @functools.wraps(stock)
        def set_item(container: Any, index: Any, value: Any) -> None:
            if torch.compiler.is_compiling() or not _was_read(value) or binding_of(container) is not None:
                stock(container, index, value)
                return
            stock(container, index, None)  # counts it
            container.__dict__[compat.attribute_of_item(container, index)] = value

        compat.replace(key, cls, "__setitem__", set_item)

    def _was_read(value: Any) -> bool:
        return any(runtime.reads.has_given(value) for runtime in known_runtimes())

    patch("items of lists", nn.ParameterList)
    patch("items of dicts", nn.ParameterDict)


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
    """Refuse a mesh that shares other ranks with that of a parameter, and a cut that would split
    whole blocks."""
    ours = {id(managed.param): managed for module in modules for _, managed in managed_params(module)}
    outer = set(cut.mesh.mesh.flatten().tolist())
    for param in params:
        managed = ours.get(id(param))
        if managed is None or not isinstance(param, DTensor):  # not one of ours
            continue
        what = f"parameter '{managed.fqn}' of shape {tuple(param.shape)} (rank {dist.get_rank()})"
        if managed.policies.offload is not None:
            raise NotImplementedError(
                f"fully_shard cannot wrap gtp_shard with offload_policy, which keeps {what} on the "
                "host. Pass a (replicate, gtp) mesh to gtp_shard instead, or leave out "
                f"offload_policy. {see('offload')}"
            )
        if isinstance(managed, ShardedWeight) and managed.has_parts:
            raise NotImplementedError(
                "fully_shard cannot wrap gtp_shard(shard_optimizer=True), which has split the "
                f"optimizer states of {what} already. Pass a mesh whose first axis has all copies "
                "to gtp_shard (mesh.weights), or leave out shard_optimizer: an outer fully_shard "
                "splits states over its axis."
            )
        # This rank is in both meshes. With a second one in both, a gradient would be averaged twice.
        if len(outer & set(managed.mesh.mesh.flatten().tolist())) > 1:
            raise ValueError(
                "fully_shard expects a mesh of other axes than gtp_shard, but mesh axes "
                f"{cut.mesh.mesh_dim_names} and {managed.mesh.mesh_dim_names} share ranks for "
                f"{what}, whose gradient gtp_shard averages over the latter already. Pass a mesh "
                "of other axes of the same root, e.g. mesh['dp'] beside mesh['gtp']; or, if "
                "fully_shard is for other modules, pass the parameters of gtp_shard in "
                "ignored_params."
            )
        axis = managed.gtp_axis  # not always the last one, see ``shard_optimizer``
        placement = param.placements[axis]
        dim = cut.dim_of(param)
        # ``replicate`` cuts nothing, and cuts of another dim leave our blocks whole.
        if cut.num_shards == 1 or not isinstance(placement, GTPShard) or placement.dim != dim:
            continue
        if not has_torch_chunks(compat.dtensor_spec(param), axis):
            raise NotImplementedError(
                f"fully_shard over mesh axes {cut.mesh.mesh_dim_names} cannot shard dim {dim} of "
                f"{what} with placements {param.placements}: its shards hold whole blocks, which "
                "torch.chunk would split, and DTensor has no placement for the result. Let "
                "fully_shard shard another dim, with shard_placement_fn=lambda param: "
                f"Shard({int(dim == 0)}) for this parameter; or choose sizes so that each rank of "
                "the gtp axis gets the same number of blocks; or use block_size=1."
            )


def _refuse_wrappers() -> None:
    """``DistributedDataParallel`` and others take each parameter for a plain tensor that all ranks
    hold alike.

    They would broadcast one rank's shard, and wait for gradients that never come, because ours do
    not pass through autograd; ``make_graphed_callables`` would train nothing. One case is right:
    ``DistributedDataParallel`` over exactly the ranks of the gtp mesh reduces the
    ``ignored_params`` of ``gtp_shard``. Code that has imported ``make_graphed_callables`` by name
    before gets an error from the recording itself (``wants_wgrad``).
    """
    _before_init(DistributedDataParallel, _check_ddp)
    _before_init(FullyShardedDataParallel, _check_others)
    _before_init(DataParallel, _check_others)
    torch_module = compat.localizing_module()
    localize = torch_module._localize_dtensor
    make_graphed = torch.cuda.make_graphed_callables

    @functools.wraps(localize)
    def localize_or_refuse(module: nn.Module, *args: Any, ignored_params: set[nn.Parameter] | None = None) -> None:
        for name, param in _managed(module, ignored_params or ()):
            raise _refusal("replicate, or DistributedDataParallel with a device_mesh,", name, param)
        localize(module, *args, ignored_params=ignored_params)

    @functools.wraps(make_graphed)
    def make_graphed_or_refuse(callables: Any, *args: Any, **kwargs: Any) -> Any:
        given = callables
        if not isinstance(callables, tuple):
            given = (callables,)
        modules = [module for module in given if isinstance(module, nn.Module)]
        for module in modules:
            for name, _ in _managed(module):
                raise RuntimeError(
                    f"torch.cuda.make_graphed_callables does not support a {type(module).__name__} "
                    f"after gtp_shard: the gradient of {name!r} is reduced over ranks outside of "
                    "autograd, so the graph would not have it. Use dtensor_gtp.capture_step for "
                    "whole steps, dtensor_gtp.capture_blocks for single modules."
                )
        return make_graphed(callables, *args, **kwargs)

    compat.replace("replicate", torch_module, "_localize_dtensor", localize_or_refuse)
    for module in (torch.cuda, torch.cuda.graphs):  # the first has imported it by name
        compat.replace("graphed callables", module, "make_graphed_callables", make_graphed_or_refuse)


def _copy_full_states() -> None:
    """Let full state dicts share no memory with what stays whole of a model and its optimizer: a snapshot would change
    with the next step."""
    module = compat.state_dict_module()
    stock = module._maybe_full_or_cpu_state_dict

    @functools.wraps(stock)
    def gather_and_copy(state_dict: dict[str, Any], info: Any) -> dict[str, Any]:
        found: dict[str, Any] = stock(state_dict, info)
        if not info.full_state_dict:
            return found
        tensors = [leaf for leaf in compat.tree_leaves(state_dict) if isinstance(leaf, torch.Tensor)]
        if not any(isinstance(tensor, DTensor) for tensor in tensors):
            return found  # of a plain model
        plain = [local for tensor in tensors if type(local := compat.local_part(tensor)) is torch.Tensor]
        own = {tensor.untyped_storage().data_ptr() for tensor in plain}
        copies: dict[tuple[Any, ...], torch.Tensor] = {}  # ties stay

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            if type(tensor) is not torch.Tensor or tensor.untyped_storage().data_ptr() not in own:
                return tensor
            key = (tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype)
            if key not in copies:
                copies[key] = tensor.clone()
            return copies[key]

        return cast("dict[str, Any]", compat.tree_map_only(torch.Tensor, copied, found))

    compat.replace("full state dicts", module, "_maybe_full_or_cpu_state_dict", gather_and_copy)


def _before_init(cls: type, check: Callable[[type, dict[str, Any]], None]) -> None:
    """Call ``check(cls, arguments)`` ahead of ``cls(module, ...)``."""
    stock: Any = cls.__init__  # type: ignore[misc]

    @functools.wraps(stock)
    def init(self: Any, *args: Any, **kwargs: Any) -> None:
        # Partial, because the stock function reports missing arguments.
        arguments = inspect.signature(stock).bind_partial(self, *args, **kwargs).arguments
        if isinstance(arguments.get("module"), nn.Module):
            check(cls, arguments)
        stock(self, *args, **kwargs)

    compat.replace(cls.__name__, cls, "__init__", init)


def _managed(module: nn.Module, ignored: Collection[nn.Parameter] = ()) -> list[tuple[str, ManagedParam]]:
    """Our parameters below ``module`` that are not ``ignored``, with each of their names."""
    ignored_ids = {id(param) for param in ignored}
    named = managed_params(module, remove_duplicate=False)
    return [(name, param) for name, param in named if id(param.param) not in ignored_ids]


def _refusal(what: str, name: str, param: ManagedParam) -> ValueError:
    return ValueError(
        f"{what} cannot wrap a module after gtp_shard: parameter {name!r} of shape "
        f"{tuple(param.param.shape)} is sharded, and its gradient averaged, over mesh axes "
        f"{param.mesh.mesh_dim_names} only (rank {dist.get_rank()}). Pass a 2-D (replicate, gtp) "
        "mesh to gtp_shard instead, or call fully_shard over the outer mesh axis after it. To "
        "reduce only other parameters, pass the sharded modules to replicate as ignored_modules, "
        "or process_group=mesh.get_group() of their mesh to DistributedDataParallel."
    )


def _check_ddp(cls: type, arguments: dict[str, Any]) -> None:
    module = arguments["module"]
    mesh = arguments.get("device_mesh")
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))  # names that DDP leaves alone
    managed = {name: param for name, param in _managed(module) if name not in ignored}
    if not managed:  # DDP would take none of ours
        return
    group = arguments.get("process_group")
    if mesh is not None:
        group = mesh.get_group()
    ranks = sorted(dist.get_process_group_ranks(group))  # None: DDP takes the default group
    for name, param in managed.items():
        # With ``device_mesh`` DDP may make plain parameters of shards (``_localize_dtensor``).
        if mesh is not None or ranks != sorted(param.mesh.mesh.flatten().tolist()):
            raise _refusal(f"DistributedDataParallel over ranks {ranks}", name, param)
    ignored.update(managed)
    # DDP looks for the parameters of the outermost module under a name with a dot in front as well.
    ignored.update(f".{name}" for name in managed if "." not in name)
    compat.ignore_in_ddp(module, sorted(ignored))
    # DDP raises for a module without trained parameters, too, but does not say what to do instead.
    left = [name for name, param in module.named_parameters() if param.requires_grad]
    if ignored.issuperset(left):
        axes = next(iter(managed.values())).mesh.mesh_dim_names
        raise RuntimeError(
            f"DistributedDataParallel finds nothing to reduce in a {type(module).__name__} after "
            f"gtp_shard over mesh axes {axes} (rank {dist.get_rank()}): {INSTEAD_OF_DDP}"
        )


def _check_others(cls: type, arguments: dict[str, Any]) -> None:
    # Arguments of ``FullyShardedDataParallel``. ``DataParallel`` has none of them.
    ignored: set[nn.Parameter] = set()
    for name in ("ignored_modules", "ignored_states"):
        for item in arguments.get(name) or ():
            if isinstance(item, nn.Module):
                ignored.update(item.parameters())
            else:
                ignored.add(item)
    for name, param in _managed(arguments["module"], ignored):
        raise _refusal(cls.__name__, name, param)
