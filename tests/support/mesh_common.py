"""What the unit tests of meshes share: one process is each rank of a fake process group in turn."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from common import fake_world

from dtensor_gtp import WeightMesh, init_weight_mesh


def on_each_rank(world_size: int, function: Callable[[WeightMesh], Any], **sizes: int) -> list[Any]:
    """Results of ``function(mesh)`` on every rank of a mesh of ``sizes``."""
    results = []
    for rank in range(world_size):
        with fake_world(world_size, rank):
            results.append(function(init_weight_mesh("cpu", **sizes)))
    return results


@contextmanager
def fake_weight_mesh(world_size: int, rank: int = 0, **sizes: Any) -> Iterator[WeightMesh]:
    """The mesh of ``sizes`` of one rank of a ``fake_world``."""
    with fake_world(world_size, rank):
        yield init_weight_mesh("cpu", **sizes)
