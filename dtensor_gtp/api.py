"""``gtp_shard`` checks everything on all ranks, then shards in place."""

from __future__ import annotations

import functools
import logging
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, OffloadPolicy

from ._comm.agreement import agree_on_all_ranks, device_of
from ._comm.collectives import refuse_unavailable
from ._comm.debug import DebugFlags
from ._howto import did_you_mean, printable
from ._modules.bad_arguments import in_rank_order, refuse_in_flight, validate_kinds, validate_mesh, validate_module
from ._modules.binding import (
    Arguments,
    ShardGroup,
    ShardPlacementFn,
    binding_of,
    groups_below,
    outermost_calls,
    unmanaged_params,
)
from ._modules.decide import Decision, decide
from ._modules.dress import own_class
from ._modules.frames import as_forward
from ._modules.gtp_module import GTPModule, refuse_arguments
from ._modules.shard_module import earlier_runtimes, shard_module
from ._params.managed_param import Site
from ._schedule.runtime import Runtime
from .policy import SchedulePolicy

logger = logging.getLogger(__name__)


@refuse_arguments
def gtp_shard(
    module: nn.Module,
    mesh: DeviceMesh,
    *,
    reshard_after_forward: bool = True,
    shard_placement_fn: ShardPlacementFn | None = None,
    mp_policy: MixedPrecisionPolicy = MixedPrecisionPolicy(),  # noqa: B008 (frozen)
    schedule: SchedulePolicy = SchedulePolicy(),  # noqa: B008 (frozen)
    ignored_params: set[nn.Parameter] | None = None,
    offload_policy: OffloadPolicy = OffloadPolicy(),  # noqa: B008 (not changed)
    shard_optimizer: bool = False,
) -> nn.Module:
    """Shard every weight of ``module`` over ``mesh``, in place, and gather each weight just in time for its use.

    One call on the root is enough. Each weight with two or more dims becomes a DTensor parameter
    with a :class:`GTPShard` placement on dim 0. It is all-gathered ahead of each use in forward and
    backward, while earlier layers compute, and freed after the use. Its gradient is averaged and
    reduce-scattered while backward continues. Parameters with one dim and tiny ones stay whole
    (``Replicate()``); their gradients are averaged in one coalesced call per backward. Ranks of the
    mesh see different data. A submodule that was passed to ``gtp_shard`` before keeps its own mesh
    and policies.

    While a forward or backward of the module runs, ``submodule.weight`` reads as the full weight.
    Otherwise it is the sharded DTensor, with which optimizers, ``clip_grad_norm_`` and
    ``torch.distributed.checkpoint`` work. Create the optimizer after this call.

    Each use of a weight is a collective: all ranks of the mesh must run the same modules in the same order. A rank that
    has no data for a module, such as an expert that gets no token, runs it on an empty input. This call is a
    collective, too: on GPUs it connects the ranks of models with small blocks, so that the first step need not.

    Args:
        module: Any module, on CPU, on the mesh's device or on the meta device. Parameters may be
            plain tensors, equal on all ranks, or DTensors of a mesh with the same root as ``mesh``
            (tensor parallelism); such a weight is sharded again, and modules see its tp-local
            DTensor.
        mesh: 1-D (gtp), or 2-D (replicate, gtp): sharded over the last axis, replicated over the first.
        reshard_after_forward: Free a weight after its forward and gather it again in backward. False keeps it from
            forward to backward, which saves a gather and costs its full size in memory.
        shard_placement_fn: Called once for each parameter. It returns the placement: a
            :class:`GTPShard` (or torch's ``Shard``), a ``Replicate`` to keep the parameter whole,
            or None for the default. A pair (placement, mesh), or torch's ``ShardPlacementResult``,
            also puts the parameter on that mesh; its gradient is then averaged over the ranks of
            that mesh. A module class chooses its own default by a method
            ``default_gtp_placement(name) -> Placement``.
        mp_policy: torch's own policy with the meaning it has in ``fully_shard``: ``param_dtype`` is
            the dtype of the gather and of compute, ``reduce_dtype`` that of gradient reduction;
            inputs and outputs of ``module`` are cast. Blocks in a list cast their inputs, too, if the
            first call of one gets hidden states in another dtype; ``cast_forward_inputs=False``
            leaves all as they are. Without a ``reduce_dtype`` gradients are
            reduced in ``param_dtype`` (``fully_shard`` of torch 2.15: in the parameter's own).
        schedule: When weights are gathered, kept and reduced. The default chooses everything in the
            first forward. Only the policy of the outermost call is used.
        ignored_params: Parameters that are left as they are; their gradients are not reduced.
        offload_policy: torch's own. ``CPUOffloadPolicy(pin_memory=True)`` keeps shards, whole
            parameters and gradients on the host. The optimizer keeps its state and runs there, too.
            Shards are copied to the device ahead of each gather, on a separate stream; each reduced
            gradient is copied back when it is complete. After each forward and backward the host
            waits for the copies. Gathers go through the process group, and embeddings are gathered.
            Start the process group with ``backend="cpu:gloo,cuda:nccl"``, because
            ``clip_grad_norm_``, ``GradScaler`` and ``full_tensor`` communicate on the host. From
            the meta device call ``to_empty(device="cpu")``. ``pin_memory=False`` costs the overlap.
            Refused with quantized weights, CUDA graphs, an outer ``fully_shard`` and unequal
            replicas.
        shard_optimizer: Split gradients and optimizer states over the replicas of a (replicate,
            gtp) mesh (ZeRO-1). A parameter is then cut over gtp first and over the replicas then,
            on dim 0, and any optimizer, clipping, average and checkpoint takes it as it is.
            Gradients are reduce-scattered over the replicas instead of all-reduced. What optimizers
            write is gathered from the replicas once, ahead of its first use, in ``param_dtype``.
            All gathers for compute stay within gtp. Whole parameters, those that are frozen at the
            call, and blocks of rows that divide unevenly keep whole states. After a step, and after
            other writes to parameters, which must be alike on all ranks, all replicas run a
            forward. Without replicas it has no effect. Refused with ``offload_policy``, trained
            weights in native storage, CUDA graphs, an outer ``fully_shard`` and unequal replicas.

    Returns:
        ``module``, whose class is now a subclass of its old class and of :class:`GTPModule`.
        Modules below keep theirs.

    Raises:
        TypeError, ValueError: An argument is of the wrong kind or out of range.
        NotImplementedError: A combination that is not supported.
        RuntimeError: Another rank failed, or the ranks have different models. All errors are raised
            on all ranks of the mesh, after one exchange of a few bytes, and leave ``module`` as it
            was. (A rank whose ``mesh`` does not contain it cannot tell the others, nor can one that
            fails to connect afterwards.)

    The design follows ``torch.distributed.fsdp.fully_shard``.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 8))
        >>> mesh = init_weight_mesh("cpu", gtp=4)
        >>> gtp_shard(model, mesh.weights)[0].weight.to_local().shape
        torch.Size([32, 64])
        >>> optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        >>> inputs = torch.randn(16, 64)  # each rank has its own
        >>> model(inputs).square().mean().backward()
        >>> norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        >>> optimizer.step()
    """
    validate_mesh(mesh)
    if ignored_params is not None:
        ignored = ignored_params
    else:
        ignored = set()
    ranks = in_rank_order(mesh)
    arguments = Arguments(
        ranks, reshard_after_forward, shard_placement_fn, mp_policy, schedule, ignored, offload_policy, shard_optimizer
    )

    def check() -> tuple[list[Decision], set[Site], DebugFlags, type]:
        validate_kinds(module, arguments)
        validate_module(module, arguments.mesh, ignored)
        refuse_unavailable(schedule, mesh.device_type)
        decisions, sites = decide(module, arguments)
        refuse_in_flight(module, earlier_runtimes(module, decisions), "gtp_shard")
        return decisions, sites, DebugFlags.from_env(), own_class(module, GTPModule)

    def describe(checked: tuple[list[Decision], set[Site], DebugFlags, type]) -> list[str]:
        policies = [
            f"{mp_policy}",
            f"{schedule}",
            f"reshard_after_forward={reshard_after_forward}",
            f"{offload_policy}",
            f"shard_optimizer={shard_optimizer}",
        ]
        # If one rank alone compared something, it would wait for the others forever.
        policies.append(f"DTENSOR_GTP_DEBUG with order={checked[2].order}, finite={checked[2].finite}")
        return policies + [decision.describe() for decision in checked[0]]

    decisions, unmanaged, debug, own = agree_on_all_ranks(arguments.mesh, check, describe)
    with torch.inference_mode(False):  # in inference mode, the shards could never be trained
        runtime = Runtime(device_of(mesh), schedule, debug)
        shard_module(module, arguments, decisions, unmanaged, runtime, own)
    _shard_added_adapters(module)
    runtime.setup.connect_ahead(mesh)
    params = runtime.members.params
    placed = "\n".join(f"{param.fqn}: {tuple(map(str, param.placements))}" for param in params)
    logger.info("gtp_shard: %s over mesh axes %s\n%s", type(module).__name__, mesh.mesh_dim_names, placed)
    return module


def shard_added(module: nn.Module) -> nn.Module:
    """Shard the parameters of submodules that were added after ``gtp_shard``, such as an adapter loaded by PEFT.

    They get the mesh and policies of the ``gtp_shard`` call on the outer module. Give them the same
    values on all ranks, and create the optimizer afterwards. The next forward is like a first one:
    it creates communicators and records the order of uses.

    Args:
        module: A module that :func:`gtp_shard` was called on, or one around it.

    Returns:
        ``module``.

    Raises:
        ValueError: No call of :func:`gtp_shard` is on ``module`` or below it.
        NotImplementedError: A parameter was added to a module that is sharded already, not in a new module; or an
            adapter has the sizes of a local shard.

    Example:
        >>> model = nn.Sequential(nn.Linear(64, 64))
        >>> gtp_shard(model, init_weight_mesh("cpu", gtp=4).weights)
        GTPSequential(...)
        >>> model.append(nn.Linear(64, 64))
        GTPSequential(...)
        >>> shard_added(model)[1].weight.to_local().shape
        torch.Size([16, 64])
    """
    # None are below if the module of the call was taken away, as ``merge_and_unload`` of PEFT does.
    present = set(module.modules())
    gone = [group for group in groups_below(module) if group.module not in present]
    groups = [*gone, *outermost_calls(module)]
    if not groups:
        raise ValueError(f"shard_added expects a module after gtp_shard, but got a {type(module).__name__}.")
    for group in groups:
        _shard_added(group)
    return module


def _shard_added_adapters(module: nn.Module) -> None:
    """Let ``add_adapter`` of a model of PEFT or transformers, which ``load_adapter`` calls, shard what it adds."""
    stock = getattr(module, "add_adapter", None)
    if not callable(stock) or isinstance(stock, nn.Module):
        return

    @functools.wraps(stock)
    def add_adapter(*args: Any, **kwargs: Any) -> Any:
        result = stock(*args, **kwargs)
        shard_added(module)
        return result

    module.__dict__["add_adapter"] = add_adapter


def _shard_added(group: ShardGroup) -> None:
    ignored = {site.module._parameters.get(site.name) for site in group.unmanaged}
    arguments = group.arguments._replace(ignored_params={param for param in ignored if param is not None})

    def check() -> tuple[list[Decision], set[Site]]:
        for fqn, site, param in unmanaged_params(group.module):
            if binding_of(site.module) is not None and param not in arguments.ignored_params:
                raise NotImplementedError(
                    f"shard_added expects new parameters in new modules, but '{fqn}' was added to "
                    f"a {type(site.module).__name__} that gtp_shard has sharded. Add it before "
                    "gtp_shard."
                )
        _refuse_local_sizes(group.module)
        decisions, sites = decide(group.module, arguments)
        refuse_in_flight(group.module, earlier_runtimes(group.module, decisions), "shard_added")
        return decisions, sites

    decisions, unmanaged = agree_on_all_ranks(
        arguments.mesh, check, lambda checked: [each.describe() for each in checked[0]], caller="shard_added"
    )
    group.runtime.abandon()  # what a forward that raised has left
    if decisions:
        with torch.inference_mode(False):
            runtime = Runtime(group.runtime.device, arguments.schedule, group.runtime.comm.debug)
            shard_module(group.module, arguments, decisions, unmanaged, runtime, type(group.module))


def _refuse_local_sizes(module: nn.Module) -> None:
    """Raise for an adapter of PEFT that was made for this rank's rows of a layer."""
    for name, adapter in module.named_modules():
        layer = getattr(adapter, "base_layer", None)
        if not isinstance(layer, nn.Linear) or (binding := binding_of(layer)) is None:
            continue
        weight = binding.params.get("weight")
        if getattr(weight, "tp_spec", None) is not None:  # such a layer multiplies with its rows
            continue
        sizes = (layer.in_features, layer.out_features)
        found = (getattr(adapter, "in_features", sizes[0]), getattr(adapter, "out_features", sizes[1]))
        if found != sizes:
            raise NotImplementedError(
                f"shard_added expects adapters for whole layers, but {printable(name)!r} is for {found[0]} inputs and "
                f"{found[1]} outputs, and its layer has {sizes[0]} and {sizes[1]}: on a mesh whose dim is not named "
                "'fsdp', PEFT takes the shape of the local shard. Add the adapter within whole_weights(model), then "
                "call shard_added(model)."
            )


def register_gtp_forward_method(module: nn.Module, method_name: str) -> None:
    """Treat a method of ``module``, such as ``encode`` or ``generate``, as a forward.

    A call of the method is then one pass with its own plan, and ``self.weight`` reads as the full
    weight in it. If ``module`` was passed to :func:`gtp_shard`, inputs and outputs are cast by
    ``mp_policy``. Without this call, each submodule that the method calls is a separate pass: the
    results are the same, but fewer gathers overlap with compute, and parameters of ``module``
    itself read as sharded DTensors. Hooks of the module's forward are not run.

    A module without sharded parameters does not change, so code may always call this. Register the
    same methods on all ranks.

    Args:
        module: A module that :func:`gtp_shard` was called on, or one below it.
        method_name: Name of a bound method; an attribute of this one module takes its place.

    Raises:
        ValueError: ``module`` has no such method.

    The counterpart of ``torch.distributed.fsdp.register_fsdp_forward_method``.

    Example:
        >>> class Encoder(nn.Module):
        ...     def __init__(self):
        ...         super().__init__()
        ...         self.proj = nn.Linear(64, 64)
        ...     def encode(self, x):
        ...         return self.proj(x).relu()
        >>> model = gtp_shard(Encoder(), init_weight_mesh("cpu", gtp=4).weights)
        >>> register_gtp_forward_method(model, "encode")
        >>> model.encode(torch.randn(2, 64)).shape
        torch.Size([2, 64])
    """
    if binding_of(module) is None:
        return
    stock = getattr(module, method_name, None)
    if not callable(stock) or isinstance(stock, nn.Module):
        raise ValueError(
            f"register_gtp_forward_method expects the name of a method of {type(module).__name__}, "
            f"but got {method_name!r}{did_you_mean(method_name, dir(type(module)))}."
        )
    setattr(module, method_name, as_forward(stock, method_name).__get__(module, type(module)))
