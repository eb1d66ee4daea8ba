"""Device meshes: their axes, and where this rank stands on them."""

from __future__ import annotations

import functools
from typing import Any, cast

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import _redistribute as redistribute_module

root_mesh = DeviceMesh._get_root_mesh
# Makes the 1-D mesh, with a name, of the ranks of a mesh in row-major order; a sub-mesh of the same root.
flatten_mesh = DeviceMesh._flatten


def mesh_coordinate(mesh: DeviceMesh, axis: int) -> Any:
    """This rank's coordinate on one axis of ``mesh``; symbolic where torch traces or simulates several ranks."""
    return mesh._sym_get_coordinate(axis)


def is_real_rank(mesh: DeviceMesh) -> bool:
    """Whether this process is one rank of ``mesh``; not so in a mode that simulates several ranks in one process."""
    return all(type(index) is int for index in mesh.get_coordinate() or ())


def concatenate_meshes(meshes: list[DeviceMesh]) -> DeviceMesh:
    """One mesh whose axes are those of ``meshes`` in order; they must be sub-meshes of one root mesh."""
    _accept_unsorted_axes()
    return DeviceMesh._concatenate(meshes)


@functools.cache
def _accept_unsorted_axes() -> None:
    """Let DTensor redistribute over a mesh whose axes stand in another order than in its root mesh.

    Before it merges collectives over several axes, torch (2.11, 2.13) looks for a flattened mesh of these axes. In such
    a mesh the lookup raises a KeyError instead of saying that there is none.
    """
    lookup = getattr(redistribute_module, "_get_flattened_mesh_by_layout", None)
    if lookup is None:
        return

    @functools.wraps(lookup)
    def lookup_or_none(mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> DeviceMesh | None:
        try:
            return cast("DeviceMesh | None", lookup(mesh, mesh_dims))
        except KeyError:
            return None

    redistribute_module._get_flattened_mesh_by_layout = lookup_or_none


def unflatten_mesh(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """``mesh``, which is 1-D, with its one axis split into several; a sub-mesh of the same root."""
    return mesh._unflatten(0, sizes, names)
