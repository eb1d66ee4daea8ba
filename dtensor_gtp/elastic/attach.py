"""``synchronize_replicas``: from a sharded module to the plan of its gradients' sums over unequal replicas."""

from __future__ import annotations

from dataclasses import astuple, replace

import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Shard

from .. import _torch_compat as compat
from .._comm.agreement import agree_on_all_ranks, all_gather_values
from .._modules.binding import binding_of
from .._params.managed_param import ManagedParam
from .._params.sharded_weight import ShardedWeight
from .._schedule.runtime import Runtime
from ..placement import GTPShard
from .mesh import ElasticMesh
from .plan import box_of_rank, plan_sync
from .replicas import WeightSpec, check_size
from .sync import ReplicaSync


def synchronize_replicas(module: nn.Module, mesh: ElasticMesh, *, bucket_nbytes: int = 32 << 20) -> ReplicaSync:
    """Sum the gradients of ``module`` over all replicas of ``mesh``, from the next backward on.

    Call it once on the root right after ``gtp_shard(module, mesh.weights)``, on all ranks. Then ``backward()`` writes
    the mean over the whole batch to ``.grad``, as on a (replicate, gtp) mesh: each rank sums its rows with the ranks
    of other replicas that hold them, in buckets, during backward. Replicas must hold equal values (one seed, or one
    checkpoint): :meth:`ReplicaSync.check_values` of the handle that is returned compares them, and
    :meth:`ReplicaSync.set_batch` takes the number of samples of each rank. Several modules on one mesh, each
    synchronized by its own call, may be part of one backward.

    Args:
        module, mesh: The module that ``gtp_shard`` was called on, and the mesh whose ``weights`` it was sharded over.
        bucket_nbytes: Gradients of one set of owners are sent together, when they have this size.

    Returns:
        The :class:`ReplicaSync` of this rank.

    Raises:
        TypeError, ValueError: ``module`` is not sharded over ``mesh.weights``, or an argument is out of range.
        NotImplementedError: ``fully_shard`` wraps it, other axes than gtp and tp cut it, or it uses copy engines.
        RuntimeError: A forward has run already, or replicas have different models or policies. All of these are raised
            on all ranks.

    Example:
        >>> mesh = nonuniform_mesh("cpu", replicas=[[0], [1, 2, 3]])
        >>> model = gtp_shard(nn.Linear(64, 64), mesh.weights)
        >>> sync = synchronize_replicas(model, mesh)
        >>> sync.check_values()  # all replicas begin with the same weights
        >>> model(torch.ones(2, 64)).sum().backward()
        >>> model.bias.grad.to_local()[0]  # the mean over the ranks
        tensor(2.)
    """
    if not isinstance(mesh, ElasticMesh):
        raise TypeError(f"synchronize_replicas expects an ElasticMesh as mesh, but got {type(mesh).__name__}.")

    def check() -> tuple[Runtime, list[WeightSpec]]:
        check_size("synchronize_replicas", "bucket_nbytes", bucket_nbytes)
        runtime = _checked_runtime(module, mesh)
        return runtime, [_spec_of(param) for param in runtime.members.params]

    def describe(checked: tuple[Runtime, list[WeightSpec]]) -> list[str]:
        runtime, specs = checked
        bindings = filter(None, map(binding_of, module.modules()))  # None: not sharded by us
        # One for each ``gtp_shard`` call: modules of one call have one group.
        policies = {binding.group: str(binding.group.arguments.mp_policy) for binding in bindings}
        flags = sorted({str(param.flags) for param in runtime.members.params})
        # Tensor parallelism may have another size in each replica: its cuts are compared below.
        params = [
            f"{replace(spec, tp_dim=None, tp_block_size=1)}, {p.param.dtype}, requires_grad={p.param.requires_grad}"
            for spec, p in zip(specs, runtime.members.params, strict=True)
        ]
        return [f"bucket_nbytes={bucket_nbytes}", str(runtime.policy), *policies.values(), *flags, *params]

    runtime, specs = agree_on_all_ranks(
        mesh.world, check, describe, caller="synchronize_replicas", expected="the same model and policies"
    )
    # Of each parameter: itself, then its spec on each rank that knows the cuts of tensor parallelism.
    known = list(zip(runtime.members.params, *_specs_with_cuts(specs, mesh), strict=True))

    def merge() -> list[WeightSpec]:
        return [_merged(param, set(of_ranks), mesh) for param, *of_ranks in known]

    # Once more on all ranks: a cut that does not fit may be found on some ranks alone.
    merged = agree_on_all_ranks(mesh.world, merge, lambda found: [str(spec) for spec in found])
    sync = ReplicaSync(mesh, plan_sync(mesh.layout, merged), runtime.members.params, runtime.comm, bucket_nbytes)
    runtime.grads.launches.replicas = sync  # from here on, ``ReductionLaunches`` asks it
    return sync


def _checked_runtime(module: nn.Module, mesh: ElasticMesh) -> Runtime:
    binding = binding_of(module)
    if binding is None or binding.group.module is not module:
        raise ValueError(
            "synchronize_replicas expects the module that was passed to gtp_shard, but got another "
            f"{type(module).__name__}. Call gtp_shard(module, mesh.weights) first."
        )
    runtime = binding.group.runtime
    if runtime.grads.launches.replicas is not None:
        raise ValueError(f"synchronize_replicas was called on this {type(module).__name__} already: call it once.")
    if runtime.setup.is_done:  # it may have made groups or chosen copy engines, which unequal replicas do not have
        raise RuntimeError(
            f"synchronize_replicas expects a {type(module).__name__} that has run no forward and no unshard(), but a "
            "schedule has been chosen already. Call it right after gtp_shard."
        )
    for name in ("gather_backend", "reduce_scatter"):
        if getattr(runtime.policy, name) == "copy_engine":
            raise NotImplementedError(
                f"synchronize_replicas does not support SchedulePolicy({name}='copy_engine'): streams would wait "
                f"forever for the copy engines of a lost rank. Leave out {name}."
            )
    for name, submodule in module.named_modules():
        if isinstance(submodule, FSDPModule):
            raise NotImplementedError(
                f"synchronize_replicas does not support fully_shard around gtp_shard, but '{name}' is wrapped. Use "
                "more replicas instead of the outer axis."
            )
    if any(call.arguments.shard_optimizer for call in runtime.members.calls):
        raise NotImplementedError(
            "synchronize_replicas does not support gtp_shard(shard_optimizer=True): the states of a lost replica would "
            "be lost. Leave out shard_optimizer."
        )
    expected = mesh.weights.mesh.flatten().tolist()  # ranks of this replica, along gtp
    for param in runtime.members.params:
        if param.policies.offload is not None:
            raise NotImplementedError("synchronize_replicas does not support offload_policy of gtp_shard.")
        ranks = param.mesh.mesh.flatten().tolist()
        # 1-D: the mesh of a weight has the gtp axis alone, no replicas of equal size.
        if param.mesh.ndim != 1 or ranks != expected:
            raise ValueError(
                f"synchronize_replicas expects parameters that are sharded over mesh.weights (ranks {expected}), but "
                f"parameter '{param.fqn}' of shape {tuple(param.param.shape)} is on mesh axes "
                f"{param.mesh.mesh_dim_names} of ranks {ranks} (rank {dist.get_rank()}). Pass mesh.weights to "
                "every gtp_shard call, for experts too: replicas of unequal sizes have no expert axes in common."
            )
    return runtime


def _spec_of(param: ManagedParam) -> WeightSpec:
    dim, block_size = (param.layout.dim, param.layout.block_size) if isinstance(param, ShardedWeight) else (None, 1)
    tp_cut = _tensor_parallel_cut(param)
    nbytes = param.reduce_dtype.itemsize
    return WeightSpec(param.fqn, tuple(param.param.shape), dim, block_size, *tp_cut, nbytes)


def _tensor_parallel_cut(param: ManagedParam) -> tuple[int | None, int]:
    """The dim that tensor parallelism cuts (None if it cuts nothing), and the rows of it that stay together."""
    assert isinstance(param.param, DTensor)
    spec = compat.dtensor_spec(param.param)
    before = spec.placements[:-1]  # all but the last axis, which is gtp
    # Beside gtp there may be tp of the elastic mesh, and nothing else.
    if before and (len(before) > 1 or spec.mesh.mesh_dim_names != ("tp", "gtp")):
        raise NotImplementedError(
            "synchronize_replicas supports parameters that are sharded over the gtp and tp axes of the elastic "
            f"mesh, but '{param.fqn}' has placements {spec.placements} on mesh axes {spec.mesh.mesh_dim_names}. Keep "
            "experts whole on each rank (no ep): replicas of unequal sizes would split them at other rows."
        )
    if not before or before[0].is_replicate():
        return None, 1  # nothing is cut: each tp rank has a copy
    placement = before[0]
    # With a split factor the axis would cut each of several slices, which a box cannot describe.
    if isinstance(placement, Shard | GTPShard) and getattr(placement, "split_factor", 1) == 1:
        return placement.dim % param.param.ndim, getattr(placement, "block_size", 1)
    raise NotImplementedError(
        f"synchronize_replicas supports Shard, GTPShard and Replicate on axis tp, but '{param.fqn}' has {placement!r}."
    )


def _specs_with_cuts(specs: list[WeightSpec], mesh: ElasticMesh) -> list[list[WeightSpec]]:
    """The specs of each rank whose replica has tp, or of this one: only those know how tensor parallelism cuts."""
    large = [rank for replica in mesh.layout.replicas if replica.tp > 1 for rank in replica.ranks]
    if not large:
        return [specs]  # without tp, specs are equal on all ranks already
    # As plain tuples: ranks send each other JSON, which has no dataclasses.
    gathered = all_gather_values([astuple(spec) for spec in specs], mesh.world.get_group())
    return [[WeightSpec(*fields) for fields in gathered[rank]] for rank in large]


def _merged(param: ManagedParam, specs: set[WeightSpec], mesh: ElasticMesh) -> WeightSpec:
    spec, *others = specs  # a set: equal specs are one
    if others:
        cuts = sorted(str((spec.tp_dim, spec.tp_block_size)) for spec in specs)
        raise ValueError(
            "synchronize_replicas expects the same tensor-parallel split in all replicas that have tp, but "
            f"parameter '{spec.name}' of shape {spec.shape} is split by (dim, block_size) {cuts}. Use one "
            "parallelize plan for all."
        )
    # The plan computes sizes by itself: they must be those that ``gtp_shard`` made.
    box = box_of_rank(spec, mesh.layout, dist.get_rank())
    assert box.size == param.shard.shape, f"'{spec.name}': planned {box.size}, but the shard is {param.shard.shape}"
    return spec
