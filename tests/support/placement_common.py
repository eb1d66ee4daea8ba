"""What the tests of GTPShard placements share: meshes, cases, tensors whose elements say where they stand."""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
from common import fake_world
from torch.distributed._local_tensor import LocalTensor, LocalTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.utils._python_dispatch import _disable_current_modes

from dtensor_gtp.placement import GTPShard

WORLD_SIZE = 4


class Meshes(NamedTuple):
    gtp: DeviceMesh
    tp_gtp: DeviceMesh
    gtp_tp: DeviceMesh


def make_meshes() -> Meshes:
    return Meshes(
        init_device_mesh("cpu", (4,), mesh_dim_names=("gtp",)),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "gtp")),
        init_device_mesh("cpu", (2, 2), mesh_dim_names=("gtp", "tp")),
    )


@contextmanager
def simulated_meshes() -> Iterator[Meshes]:
    """Meshes over four ranks that all live in this process."""
    with fake_world(WORLD_SIZE), LocalTensorMode(WORLD_SIZE):
        yield make_meshes()


class Case(NamedTuple):
    """A shape and how it is sharded; ``left`` are the placements to the left of the gtp axis."""

    shape: tuple[int, ...]
    dim: int = 0
    left: tuple[Placement, ...] = ()

    def on(self, meshes: Meshes, block_size: int) -> tuple[DeviceMesh, tuple[Placement, ...]]:
        return (meshes.tp_gtp if self.left else meshes.gtp), (*self.left, GTPShard(self.dim, block_size=block_size))


CASES = {
    "even": Case((64, 3)),
    "uneven": Case((10, 3)),
    "fewer_rows_than_ranks": Case((3, 2)),
    "no_rows": Case((0, 2)),
    "1d": Case((37,)),
    "dim1": Case((5, 37, 2), 1),
    "last_dim": Case((2, 3, 21), 2),
    "tp_same_dim": Case((25, 2), 0, (Shard(0),)),
    "tp_same_dim1": Case((3, 27), 1, (Shard(1),)),
    "tp_other_dim": Case((10, 5), 0, (Shard(1),)),
    "replicated": Case((10, 3), 0, (Replicate(),)),
}
each_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES.keys())
OP_CASES = {name: CASES[name] for name in ("dim1", "tp_same_dim")}
each_op_case = pytest.mark.parametrize("case", OP_CASES.values(), ids=OP_CASES.keys())
each_block_size = pytest.mark.parametrize("block_size", [1, 4, 16])


def coded(shape: Sequence[int]) -> torch.Tensor:
    """A tensor whose elements say where they stand."""
    return torch.arange(1.0, 1.0 + math.prod(shape)).view(tuple(shape))


def shard(tensor: torch.Tensor, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    return distribute_tensor(tensor.clone(), mesh, [Replicate()] * mesh.ndim).redistribute(mesh, placements)


def whole(value: Any) -> Any:
    """Plain tensors for DTensors; the simulated ranks must agree."""
    if isinstance(value, DTensor):
        value = value.full_tensor()
    if isinstance(value, list | tuple):
        return [whole(v) for v in value]
    return value.reconcile() if isinstance(value, LocalTensor) else value


def cut_by_hand(tensor: torch.Tensor, mesh_shape: Sequence[int], rank: int, placements: Sequence[Placement]) -> Any:
    """Local tensor of ``rank``, by lists of blocks instead of arithmetic."""
    coordinate: list[int] = []
    for size in reversed(mesh_shape):
        rank, index = divmod(rank, size)
        coordinate.insert(0, index)
    for size, index, placement in zip(mesh_shape, coordinate, placements, strict=True):
        if isinstance(placement, Replicate):
            continue
        dim = placement.dim  # type: ignore[attr-defined]
        parts = [tensor.narrow(dim, 0, 0)]
        for piece in tensor.chunk(getattr(placement, "split_factor", 1), dim):
            blocks = piece.split(getattr(placement, "block_size", 1), dim) if piece.size(dim) else ()
            per_rank = -(-len(blocks) // size)
            parts += blocks[index * per_rank : (index + 1) * per_rank]
        tensor = torch.cat(parts, dim)
    return tensor


def local_tensors(tensor: DTensor) -> dict[int, torch.Tensor]:
    local = tensor.to_local()
    assert isinstance(local, LocalTensor)
    return local._local_tensors


def assert_holds(tensor: DTensor, expected: torch.Tensor, placements: Sequence[Placement]) -> None:
    """``tensor`` has the shape of ``expected`` and ``placements``, and each rank holds exactly its rows."""
    assert tensor.placements == tuple(placements)
    assert tensor.shape == expected.shape
    expected, locals_by_rank = whole(expected), local_tensors(tensor)
    with _disable_current_modes():  # simulated ranks would run each op of the reference four times, and slowly
        for rank, local in locals_by_rank.items():
            assert torch.equal(local, cut_by_hand(expected, tensor.device_mesh.shape, rank, placements)), f"rank {rank}"
