"""``nonuniform_mesh``: replicas of unequal sizes, each with its own (gtp, tp) mesh, over all ranks of the job."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from datetime import timedelta
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import StorageMeta
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat
from .._comm.agreement import agree_on_all_ranks, device_of
from .._comm.debug import format_nbytes
from .._comm.process_groups import set_device, start_process_group, world_mesh, world_size
from ..policy import Schedule
from .plan import box_of_rank
from .replicas import BatchShare, Place, Replica, ReplicaLayout, WeightSpec, plan_replicas, replicas_of


class Turns:
    """Which model of a mesh has taken the last gradient, see [Note: order of channels]."""

    def __init__(self) -> None:
        self._last: weakref.WeakMethod[Callable[[], None]] | None = None

    def take(self, settle: Callable[[], None]) -> None:
        """A model takes the next gradient. The one that took the last, if it is another, first completes its
        reduce-scatters: call its ``settle``, a bound method."""
        own = weakref.WeakMethod(settle)
        if self._last == own:
            return
        settle_last = None
        if self._last is not None:
            settle_last = self._last()  # None if the model is gone
        if settle_last is not None:
            settle_last()
        self._last = own


@dataclass(frozen=True, eq=False, repr=False)
class ElasticMesh:
    """Replicas of unequal sizes. Made by :func:`nonuniform_mesh`; ``print(mesh)`` shows the replicas.

    Args:
        layout: The replicas, with all ranks.
        replica: This rank's replica: 2-D, axes (gtp, tp).
        world: All ranks, 1-D.
        generation: Names the process groups of this mesh: the same on all ranks, another for each mesh.

    Example:
        >>> mesh = nonuniform_mesh("cpu", replicas=[[0], [1, 2, 3]])
        >>> print(mesh)
        ElasticMesh: 2 replicas of 4 ranks
          replica 0  gtp 1          ranks 0  2 of 3 ranks failed; gtp 3 -> 1
          replica 1  gtp 3          ranks 1-3
        (this is rank ...)
        >>> mesh.weights.size() == mesh["gtp"].size() == (1, 3)[mesh.place.replica]
        True
    """

    layout: ReplicaLayout
    replica: DeviceMesh
    world: DeviceMesh
    generation: str
    _turns: Turns = field(default_factory=Turns, init=False)

    @property
    def weights(self) -> DeviceMesh:
        """The gtp axis, for ``gtp_shard``, of this rank's replica."""
        return self.replica["gtp"]

    def __getitem__(self, axis: str) -> DeviceMesh:
        """The gtp or the tp axis of this rank's replica, e.g. ``mesh["tp"]`` for ``parallelize_module``."""
        return self.replica[axis]

    @property
    def place(self) -> Place:
        """Where this rank stands."""
        return self.layout.places[dist.get_rank()]

    def rebalance_batch(self, global_batch: int) -> BatchShare:
        """This rank's samples of the ``global_batch`` samples of all replicas together.

        Replicas get shares in proportion to their ranks, and gtp ranks of one replica equal parts, up to one sample.
        The sum is exact. Where ranks have unequal numbers, pass the share to :meth:`ReplicaSync.set_batch`.

        Args:
            global_batch: Samples of a step, the same number on all ranks.

        Returns:
            The :class:`BatchShare` of this rank.

        Raises:
            ValueError: There are fewer samples than ranks that see different data.

        Example:
            >>> mesh = nonuniform_mesh("cpu", replicas=[[0], [1, 2, 3]])
            >>> share = mesh.rebalance_batch(10)
            >>> share.counts
            ((3,), (3, 2, 2))
            >>> batch = torch.arange(10)[share.rows]
        """
        return self.layout.batch_shares(global_batch)[dist.get_rank()]

    def __repr__(self) -> str:
        return f"ElasticMesh: {self.layout}\n(this is rank {dist.get_rank()} in replica {self.place.replica})"


def nonuniform_mesh(
    device_type: str,
    *,
    replicate: int | None = None,
    gtp: int | None = None,
    tp: int = 1,
    failed: Collection[tuple[int, int, int]] = (),
    replicas: Sequence[Sequence[int]] | None = None,
    weights: Sequence[WeightSpec] = (),
    memory: MemoryModel | None = None,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> ElasticMesh:
    """Build a mesh for each replica; replicas may have unequal sizes. Call it on all remaining ranks.

    The default process group, of these ranks, is initialized if there is none, as
    :func:`~dtensor_gtp.init_weight_mesh` does it.

    Args:
        device_type: ``"cuda"``, ``"cpu"`` or another device type of torch.
        replicate, gtp, tp: Sizes before the failure.
        failed: Coordinates (replica, gtp, tp) of lost ranks. A replica that lost all ranks is dropped; the remaining
            ranks are numbered in the order of their coordinates.
        replicas: The ranks of each replica, e.g. ``[[0, 1], [2, 3, 4, 5]]``, instead of ``replicate``, ``gtp`` and
            ``failed``; ``tp`` is then the largest size of that axis.
        weights: Weights to be sharded, with the block sizes at which a smaller tensor parallelism may split them.
        memory: Refuse replicas whose ranks do not have room for their part of ``weights``.
        backend, timeout: For ``init_process_group``, if there is no process group.

    Returns:
        The :class:`ElasticMesh` of this rank.

    Raises:
        TypeError, ValueError: Arguments do not fit one another, the number of ranks, the blocks of a weight, or memory.
        RuntimeError: Ranks got different arguments. All of these are raised on all ranks.

    Example:
        >>> failed = [(0, gtp, 0) for gtp in (1, 2)] + [(1, gtp, 0) for gtp in (0, 2)]
        >>> mesh = nonuniform_mesh("cpu", replicate=2, gtp=4, failed=failed)
        >>> print(mesh.layout)
        2 replicas of 4 ranks
          replica 0  gtp 2          ranks 0-1  2 of 4 ranks failed; gtp 4 -> 2
          replica 1  gtp 2          ranks 2-3  2 of 4 ranks failed; gtp 4 -> 2
        >>> model = gtp_shard(nn.Linear(64, 64), mesh.weights)
    """

    # Runs twice where there is no process group yet: for the number of ranks, and on all ranks together.
    def check() -> ReplicaLayout:
        if replicas is None and replicate is not None and gtp is not None:
            layout = plan_replicas(replicate=replicate, gtp=gtp, tp=tp, failed=failed, weights=weights)
        elif replicas is not None and replicate is None and gtp is None and not failed:
            layout = replicas_of(replicas, tp=tp, weights=weights)
        else:
            raise ValueError(
                f"nonuniform_mesh expects either replicas or the sizes before the failure (replicate and gtp, failed), "
                f"but got {replicas=}, {replicate=}, {gtp=} and {failed=}. Pass one of them."
            )
        if layout.num_ranks != world_size():
            raise ValueError(
                f"nonuniform_mesh expects replicas of {world_size()} ranks (WORLD_SIZE), but got "
                f"{[len(replica.ranks) for replica in layout.replicas]}, which are {layout.num_ranks}. Name the ranks "
                f"that failed, or start {layout.num_ranks} processes."
            )
        if memory is not None:
            check_memory(layout, weights, memory)
        set_device(device_type)  # on which the collectives below run
        return layout

    # Without a group no rank can be asked: each checks its own arguments before it waits for others.
    if not dist.is_initialized():
        start_process_group(device_type, backend, timeout, tuple(range(check().num_ranks)))
    world = world_mesh(device_type)
    texts = {"caller": "nonuniform_mesh", "expected": "the same arguments", "remedy": "Pass the same everywhere."}
    layout = agree_on_all_ranks(world, check, lambda checked: [f"{device_type=}, {checked!r}"], **texts)
    generation = compat.agreed_name(world.get_group(), device_of(world), "elastic")  # drawn at random
    return ElasticMesh(layout, _replica_mesh(device_type, layout, world, generation), world, generation)


def _replica_mesh(device_type: str, layout: ReplicaLayout, world: DeviceMesh, generation: str) -> DeviceMesh:
    """This rank's (gtp, tp) mesh. Only the ranks of a group take part in making it: first along gtp, then along tp."""
    place = layout.places[dist.get_rank()]
    grid = layout.replicas[place.replica].grid
    # Along gtp the column of this rank in the grid, along tp its row.
    lines = {"gtp": [row[place.tp] for row in grid], "tp": list(grid[place.gtp])}
    groups = [
        # The first rank tells the lines of one axis apart, which are all made at the same time.
        compat.named_group(ranks, f"{generation}_{axis}_{ranks[0]}", f"elastic_{axis}", world.get_group())
        for axis, ranks in lines.items()
    ]
    # A DeviceMesh that makes its own groups would need all ranks of the job, which have other grids.
    return DeviceMesh.from_group(groups, device_type, mesh=torch.tensor(grid), mesh_dim_names=tuple(lines))


@dataclass(frozen=True)
class MemoryModel:
    """What a rank must hold, in bytes.

    Args:
        budget: Memory of a rank.
        shard_nbytes: Bytes of each element that a rank holds: parameter, gradient and optimizer state. 16 for float32
            parameters and AdamW.
        gathered_nbytes, reduce_nbytes: Bytes of an element of a gathered weight, and of a gradient that is sent.
        prefetch_depth, prefetch_nbytes, max_inflight_reduce_scatters: As in ``policy.Schedule``.
        activation_nbytes: Activations of a rank at tensor-parallel size 1.

    Example:
        >>> layout = replicas_of([[0], [1, 2, 3]])
        >>> weights = [WeightSpec("w", (4096, 4096))]
        >>> model = MemoryModel(budget=16 << 30, shard_nbytes=12)
        >>> [memory.shards >> 20 for memory in check_memory(layout, weights, model)]  # MiB
        [192, 64]
    """

    budget: int
    shard_nbytes: int = 16
    gathered_nbytes: int = 2
    reduce_nbytes: int = 4
    prefetch_depth: int = 2
    max_inflight_reduce_scatters: int = 2
    activation_nbytes: int = 0
    prefetch_nbytes: int = Schedule.prefetch_nbytes


class RankMemory(NamedTuple):
    """Bytes of one rank, by purpose.

    Args:
        shards: Parameters, gradients and optimizer state.
        buffers: Gathered weights, and gradients that are being sent.
        activations: What forward saves for backward.

    Example:
        >>> memory = RankMemory(shards=3 << 20, buffers=1 << 20, activations=0)
        >>> memory.total >> 20
        4
        >>> print(memory)
        4.0 MiB (shards 3.0 MiB, buffers 1.0 MiB, activations 0 B)
    """

    shards: int
    buffers: int
    activations: int

    @property
    def total(self) -> int:
        """The sum of all."""
        return sum(self)

    def __str__(self) -> str:
        parts = ", ".join(f"{name} {format_nbytes(value)}" for name, value in self._asdict().items())
        return f"{format_nbytes(self.total)} ({parts})"


def check_memory(layout: ReplicaLayout, weights: Sequence[WeightSpec], model: MemoryModel) -> list[RankMemory]:
    """The memory of every replica's fullest rank.

    Args:
        layout: The replicas.
        weights: All parameters.
        model: What a rank must hold of them, and its budget.

    Returns:
        One :class:`RankMemory` for each replica.

    Raises:
        ValueError: A replica is too small for the budget.

    Example:
        >>> layout = replicas_of([[0], [1, 2, 3]])
        >>> weights = [WeightSpec("w", (4096, 4096))]
        >>> check_memory(layout, weights, MemoryModel(budget=256 << 20))
        Traceback (most recent call last):
        ValueError: nonuniform_mesh expects replicas with enough memory ...
    """
    found = [_memory(layout, replica, weights, model) for replica in layout.replicas]
    for index, (replica, memory) in enumerate(zip(layout.replicas, found, strict=True)):
        if memory.total > model.budget:
            raise ValueError(
                f"nonuniform_mesh expects replicas with enough memory for the model, but replica {index} of "
                f"{len(replica.ranks)} ranks (gtp {replica.gtp}, tp {replica.tp}) is too small: rank "
                f"{replica.ranks[0]} needs {memory}, and has {format_nbytes(model.budget)}. Leave this replica out, "
                "or shard over fewer, larger replicas."
            )
    return found


def _memory(layout: ReplicaLayout, replica: Replica, weights: Sequence[WeightSpec], model: MemoryModel) -> RankMemory:
    rank = replica.ranks[0]  # the fullest: it has the largest chunk of every weight
    shards = sum(box_of_rank(weight, layout, rank).numel for weight in weights) * model.shard_nbytes
    # Gathered weights: tensor parallelism alone cuts them.
    gatherable = [replace(weight, dim=None) for weight in weights if weight.dim is not None]
    slices = sorted((box_of_rank(weight, layout, rank).numel for weight in gatherable), reverse=True)
    # By number: as if the largest weights stood side by side in the plan.
    gathered = sum(slices[: model.prefetch_depth + 1]) * model.gathered_nbytes
    if slices and model.prefetch_depth and model.prefetch_nbytes:
        # The weight in use, those of the prefetch window, and the launch that crosses the end of the window.
        largest = slices[0] * model.gathered_nbytes
        in_window = largest + max(largest, model.prefetch_nbytes) + max(largest, Schedule.coalesce_nbytes)
        gathered = max(gathered, min(sum(slices) * model.gathered_nbytes, in_window))  # no more than all weights
    # Gradients that wait to be sent together, and those in flight.
    launch = max([Schedule.coalesce_grad_nbytes, *(numel * model.reduce_nbytes for numel in slices[:1])])
    # Those in flight, and one launch more that is still collected.
    sent = min(sum(slices) * model.reduce_nbytes, (model.max_inflight_reduce_scatters + 1) * launch)
    return RankMemory(shards, gathered + sent, -(-model.activation_nbytes // replica.tp))


class ReplicaSavePlanner(DefaultSavePlanner):
    """Lets ``dcp.save`` and ``dcp.async_save`` write what replicas of unequal sizes hold. Pass it on all ranks.

    Such replicas split a weight at different rows, and ``torch.distributed.checkpoint`` (DCP) refuses chunks that
    overlap. So only the ranks of the largest replica write sharded tensors, because their shards are the smallest.
    Everything else is written once for each key, as usual. A load needs no planner.

    Args:
        mesh: The mesh of the job.
        options: Those of ``DefaultSavePlanner``.

    Example:
        >>> import torch.distributed.checkpoint as dcp
        >>> mesh = nonuniform_mesh("cpu", replicas=[[0], [1, 2, 3]])
        >>> model = gtp_shard(nn.Linear(64, 64), mesh.weights)
        >>> planner = ReplicaSavePlanner(mesh)
        >>> state = {"model": model.state_dict()}
        >>> saved = dcp.save(state, checkpoint_id="step10", planner=planner)
        >>> dcp.load(state, checkpoint_id="step10")
    """

    def __init__(self, mesh: ElasticMesh, **options: Any) -> None:
        super().__init__(**options)
        sizes = [len(replica.ranks) for replica in mesh.layout.replicas]
        self._is_writer = mesh.place.replica == sizes.index(max(sizes))  # the first of them, if several are as large

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Leave out what another replica writes."""
        super().set_up_planner(state_dict, storage_meta, is_coordinator)
        if not self._is_writer:  # ``super`` has put the values of nested dicts side by side
            self.state_dict = {key: value for key, value in self.state_dict.items() if not isinstance(value, DTensor)}
