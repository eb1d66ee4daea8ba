"""``nonuniform_mesh``: replicas of unequal sizes, each with a (gtp, tp) mesh of its own, over all ranks of the job."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from .. import _torch_compat as compat
from .._comm.agreement import agree_on_all_ranks, device_of
from .._comm.process_groups import set_device, start_process_group, world_mesh, world_size
from .memory_model import MemoryModel, check_memory
from .replicas import BatchShare, Place, ReplicaLayout, WeightSpec, plan_replicas, replicas_of


@dataclass(frozen=True, eq=False, repr=False)
class ElasticMesh:
    """Replicas of unequal sizes. Made by :func:`nonuniform_mesh`; ``print(mesh)`` shows the replicas.

    Args:
        layout: All replicas, plain data.
        replica: This rank's replica: 2-D, axes (gtp, tp).
        world: All ranks, 1-D.
        generation: Names the process groups of this mesh; the same on all ranks, another for each mesh.
    """

    layout: ReplicaLayout
    replica: DeviceMesh
    world: DeviceMesh
    generation: str

    @property
    def weights(self) -> DeviceMesh:
        """For ``gtp_shard``: the gtp axis of this rank's replica."""
        return self.replica["gtp"]

    def __getitem__(self, axis: str) -> DeviceMesh:
        """The gtp or the tp axis of this rank's replica, e.g. ``mesh["tp"]`` for ``parallelize_module``."""
        return self.replica[axis]

    @property
    def place(self) -> Place:
        """Where this rank stands."""
        return self.layout.places[dist.get_rank()]

    def rebalance_batch(self, global_batch: int) -> BatchShare:
        """This rank's samples of a global batch.

        Each replica gets a share in proportion to its ranks. Its gtp ranks get equal parts, up to one sample. The
        shares of all replicas sum up to the batch exactly. Where ranks have unequal numbers, pass the share to
        :meth:`ReplicaSync.set_batch`.

        Args:
            global_batch: Samples of all replicas together; the same on all ranks.

        Raises:
            ValueError: There are fewer samples than ranks that see different data.
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
    """Build a mesh for each of several replicas that may have unequal sizes.

    The default process group is initialized if there is none, as :func:`init_weight_mesh` does it. It holds the ranks
    that are left, and no others. Call it on all of them.

    Args:
        device_type: ``"cuda"``, ``"cpu"`` or another device type of torch.
        replicate, gtp, tp: Sizes before the failure.
        failed: Coordinates (replica, gtp, tp) of ranks that are gone. A replica that lost all is dropped; the ranks
            that are left are counted in the order of their coordinates.
        replicas: The ranks of each replica, e.g. ``[[0, 1], [2, 3, 4, 5]]``, instead of ``replicate``, ``gtp`` and
            ``failed``; ``tp`` is then the largest size of that axis.
        weights: What will be sharded; tells where tensor parallelism may cut when it has to shrink.
        memory: Refuse replicas whose ranks do not have room for their part of ``weights``.
        backend, timeout: For ``init_process_group``, if there is no process group.

    Returns:
        This rank's mesh and the layout of all.

    Raises:
        TypeError, ValueError: Sizes, coordinates or replicas do not fit one another, the number of ranks, the blocks of
            a weight, or memory. Raised on all ranks.
        RuntimeError: Ranks got different arguments.
    """

    def check() -> ReplicaLayout:
        if replicas is not None:
            if replicate is not None or gtp is not None or failed:
                raise ValueError(
                    "nonuniform_mesh expects either replicas or the sizes before the failure (replicate, gtp, failed), "
                    "but got both. Pass one of them."
                )
            layout = replicas_of(replicas, tp=tp, weights=weights)
        elif replicate is not None and gtp is not None:
            layout = plan_replicas(replicate=replicate, gtp=gtp, tp=tp, failed=failed, weights=weights)
        else:
            raise ValueError(
                f"nonuniform_mesh expects replicate and gtp, or a list of replicas, but got replicate={replicate} and "
                f"gtp={gtp}."
            )
        if layout.num_ranks != world_size():
            raise ValueError(
                f"nonuniform_mesh expects replicas of {world_size()} ranks (WORLD_SIZE), but got "
                f"{[len(replica.ranks) for replica in layout.replicas]}, which are {layout.num_ranks}. Name the ranks "
                f"that failed, or start {layout.num_ranks} processes."
            )
        if memory is not None:
            check_memory(layout, weights, memory)
        set_device(device_type)
        return layout

    if not dist.is_initialized():
        start_process_group(device_type, backend, timeout, tuple(range(check().num_ranks)))
    world = world_mesh(device_type)
    layout = agree_on_all_ranks(
        world,
        check,
        lambda checked: [f"device_type={device_type!r}, {checked!r}"],
        caller="nonuniform_mesh",
        expected="the same arguments",
        remedy="Pass the same everywhere.",
    )
    generation = compat.agreed_name(world.get_group(), device_of(world), "elastic")
    return ElasticMesh(layout, _replica_mesh(device_type, layout, world, generation), world, generation)


def _replica_mesh(device_type: str, layout: ReplicaLayout, world: DeviceMesh, generation: str) -> DeviceMesh:
    """This rank's (gtp, tp) mesh. Only the ranks of a group take part in making it: first along gtp, then along tp."""
    place = layout.places[dist.get_rank()]
    grid = layout.replicas[place.replica].grid
    lines = {"gtp": [row[place.tp] for row in grid], "tp": list(grid[place.gtp])}
    groups = [
        compat.named_group(ranks, f"{generation}_{axis}_{ranks[0]}", f"elastic_{axis}", world.get_group())
        for axis, ranks in lines.items()
    ]
    return DeviceMesh.from_group(groups, device_type, mesh=torch.tensor(grid), mesh_dim_names=tuple(lines))
