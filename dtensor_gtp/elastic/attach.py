"""``synchronize_replicas``: from a sharded module to the plan of its gradients' sums over unequal replicas."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch.distributed as dist
import torch.nn as nn
from torch.distributed.tensor import DTensor, Shard

from .. import _torch_compat as compat
from .._comm.agreement import agree_on_all_ranks
from .._modules.binding import binding_of
from .._modules.outer_fully_shard import is_outer_module
from .._params.managed_param import ManagedParam
from .._params.sharded_weight import ShardedWeight
from .._schedule.runtime import Runtime
from ..placement import GTPShard
from .mesh import ElasticMesh
from .plan import box_of_rank, plan_sync
from .replicas import WeightSpec, check_size
from .sync import ReplicaSync

# Of a parameter: the dim that tensor parallelism cuts, and the rows that stay together; None if it cuts nothing.
_TensorParallelCut = tuple[int, int] | None


def synchronize_replicas(module: nn.Module, mesh: ElasticMesh, *, bucket_nbytes: int = 32 << 20) -> ReplicaSync:
    """Sum the gradients of ``module`` over all replicas of ``mesh``, from the next backward on.

    Call it once on the root after ``gtp_shard(module, mesh.weights)``, on all ranks. Then ``backward()`` leaves in
    ``.grad`` the mean over the whole batch, as it does on a (replicate, gtp) mesh: each rank sums the rows that it
    holds with the ranks of other replicas that hold them, in buckets, behind backward.

    Args:
        module: The module that ``gtp_shard`` was called on; replicas must hold equal values (one seed, or one
            checkpoint): :meth:`ReplicaSync.check_values` compares them.
        mesh: The mesh whose ``weights`` the module was sharded over.
        bucket_nbytes: Gradients of one set of owners are sent when there are as many bytes.

    Returns:
        The handle to tell how many samples each rank has: see :meth:`ReplicaSync.set_batch`.

    Raises:
        TypeError, ValueError: ``module`` is not sharded over ``mesh.weights``, or an argument is out of range.
        NotImplementedError: The module is inside of ``fully_shard``, cut over other axes than gtp and tp, or uses copy
            engines.
        RuntimeError: Replicas have different models or policies. All of these are raised on all ranks.
    """
    if not isinstance(mesh, ElasticMesh):
        raise TypeError(f"synchronize_replicas expects an ElasticMesh as mesh, but got {type(mesh).__name__}.")

    def check() -> list[WeightSpec]:
        check_size("synchronize_replicas", "bucket_nbytes", bucket_nbytes)
        return [_spec_of(param, mesh) for param in _checked_params(module, mesh)]

    def describe(specs: list[WeightSpec]) -> list[str]:
        # Tensor parallelism may have another size in each replica: its cuts are compared below.
        tensors = [param.param for param in _runtime_of(module).params]
        return [f"bucket_nbytes={bucket_nbytes}", *_policies(module)] + [
            f"{replace(spec, tp_dim=None, tp_block_size=1)}, {tensor.dtype}, requires_grad={tensor.requires_grad}"
            for spec, tensor in zip(specs, tensors, strict=True)
        ]

    specs = agree_on_all_ranks(
        mesh.world, check, describe, caller="synchronize_replicas", expected="the same model and policies"
    )
    runtime = _runtime_of(module)
    cuts = _exchange_cuts(specs, mesh)

    def merge() -> list[WeightSpec]:
        merged = [_merged(spec, [of_rank[i] for of_rank in cuts]) for i, spec in enumerate(specs)]
        for spec, param in zip(merged, runtime.params, strict=True):
            _check_box(spec, param, mesh)
        return merged

    merged = agree_on_all_ranks(mesh.world, merge, lambda found: [str(spec) for spec in found])
    plan = plan_sync(mesh.layout, merged)
    sync = ReplicaSync(mesh, plan, runtime.params, runtime.comm, bucket_nbytes)
    runtime.grads.replicas = sync
    return sync


def _runtime_of(module: nn.Module) -> Runtime:
    binding = binding_of(module)
    assert binding is not None
    return binding.group.runtime


def _checked_params(module: nn.Module, mesh: ElasticMesh) -> list[ManagedParam]:
    binding = binding_of(module)
    if binding is None or binding.group.module is not module:
        raise ValueError(
            f"synchronize_replicas expects the module that gtp_shard was called on, but got a "
            f"{type(module).__name__} that it was not called on. Call gtp_shard(module, mesh.weights) first."
        )
    runtime = binding.group.runtime
    if runtime.grads.replicas is not None:
        raise ValueError(
            f"synchronize_replicas was called on this {type(module).__name__} already. Call it once, on the root."
        )
    for name in ("gather_backend", "reduce_scatter"):
        asked = getattr(runtime.schedule, name)
        if asked in ("copy_engine", "auto"):
            raise NotImplementedError(
                f"synchronize_replicas does not support SchedulePolicy({name}='{asked}'): streams wait for the copy "
                "engines of other ranks without a limit, and nothing ends that when a rank is lost. Use "
                "gather_backend='process_group' and reduce_scatter='ring' or 'all_to_all'."
            )
    for name, submodule in module.named_modules():
        if is_outer_module(submodule):
            raise NotImplementedError(
                f"synchronize_replicas does not support fully_shard around gtp_shard, but '{name}' is wrapped. Use "
                "more replicas in the place of the outer axis."
            )
    expected = mesh.weights.mesh.flatten().tolist()
    for param in runtime.params:
        ranks = param.mesh.mesh.flatten().tolist()
        if param.mesh.ndim != 1 or ranks != expected:
            raise ValueError(
                f"synchronize_replicas expects parameters that are sharded over mesh.weights (ranks {expected}), but "
                f"parameter '{param.fqn}' of shape {tuple(param.param.shape)} is on mesh axes "
                f"{param.mesh.mesh_dim_names} of ranks {ranks} (rank {dist.get_rank()}). Pass mesh.weights to "
                "every gtp_shard call."
            )
    return runtime.params


def _policies(module: nn.Module) -> list[str]:
    """What decides in which dtype and order gradients are reduced."""
    groups: dict[int, Any] = {}
    for submodule in module.modules():
        binding = binding_of(submodule)
        if binding is not None:
            groups[id(binding.group)] = binding.group
    flags = {str(param.flags) for param in _runtime_of(module).params}
    return [f"{_runtime_of(module).schedule}", *(f"{group.mp_policy}" for group in groups.values()), *sorted(flags)]


def _spec_of(param: ManagedParam, mesh: ElasticMesh) -> WeightSpec:
    tensor = param.param
    assert isinstance(tensor, DTensor)
    cut = _tensor_parallel_cut(param, tensor, mesh)
    is_sharded = isinstance(param, ShardedWeight)
    return WeightSpec(
        name=param.fqn,
        shape=tuple(tensor.shape),
        dim=param.layout.dim if is_sharded else None,  # type: ignore[attr-defined]
        block_size=param.layout.block_size if is_sharded else 1,  # type: ignore[attr-defined]
        tp_dim=cut[0] if cut is not None else None,
        tp_block_size=cut[1] if cut is not None else 1,
        nbytes=param.reduce_dtype.itemsize,
    )


def _tensor_parallel_cut(param: ManagedParam, tensor: DTensor, mesh: ElasticMesh) -> _TensorParallelCut:
    spec = compat.dtensor_spec(tensor)
    before = spec.placements[:-1]
    is_plain = len(before) == 0
    is_tp = len(before) == 1 and spec.mesh.mesh_dim_names == ("tp", "gtp")
    if not (is_plain or is_tp):
        raise NotImplementedError(
            f"synchronize_replicas supports parameters that are cut over the gtp and tp axes of the elastic mesh, but "
            f"'{param.fqn}' has placements {spec.placements} on mesh axes {spec.mesh.mesh_dim_names}."
        )
    if is_plain or before[0].is_replicate():
        return None
    placement = before[0]
    if isinstance(placement, Shard | GTPShard) and getattr(placement, "split_factor", 1) == 1:
        return placement.dim % tensor.ndim, getattr(placement, "block_size", 1)
    raise NotImplementedError(
        f"synchronize_replicas supports Shard, GTPShard and Replicate on the tp axis, but '{param.fqn}' has "
        f"{placement!r}."
    )


def _exchange_cuts(specs: list[WeightSpec], mesh: ElasticMesh) -> list[list[_TensorParallelCut]]:
    """How tensor parallelism cuts each parameter, by rank: a replica without tp does not know."""
    own: list[_TensorParallelCut] = [None if s.tp_dim is None else (s.tp_dim, s.tp_block_size) for s in specs]
    if all(replica.tp == 1 for replica in mesh.layout.replicas):
        return [own]
    gathered: list[Any] = [None] * mesh.layout.num_ranks
    dist.all_gather_object(gathered, own, group=mesh.world.get_group())
    large = [rank for rank, place in mesh.layout.places.items() if mesh.layout.replicas[place.replica].tp > 1]
    return [gathered[rank] for rank in large]


def _merged(spec: WeightSpec, cuts: list[_TensorParallelCut]) -> WeightSpec:
    different = set(cuts)
    if len(different) > 1:
        raise ValueError(
            f"synchronize_replicas expects the same tensor-parallel cuts in all replicas that have tp, but parameter "
            f"'{spec.name}' of shape {spec.shape} is cut by (dim, block_size) {sorted(map(str, different))}. Use one "
            "parallelize plan for all."
        )
    (cut,) = different
    if cut is None:
        return replace(spec, tp_dim=None, tp_block_size=1)
    return replace(spec, tp_dim=cut[0], tp_block_size=cut[1])


def _check_box(spec: WeightSpec, param: ManagedParam, mesh: ElasticMesh) -> None:
    box = box_of_rank(spec, mesh.layout, dist.get_rank())
    if box.size != tuple(param.shard.shape):
        raise AssertionError(
            f"the plan gives rank {dist.get_rank()} a part of shape {box.size} of '{spec.name}', but its shard has "
            f"shape {tuple(param.shard.shape)}"
        )
