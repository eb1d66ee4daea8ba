"""Process groups: how they are made, named and left. Device meshes: their axes, and where this rank stands."""

from __future__ import annotations

import functools
import os
import secrets
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Store
from torch.distributed import distributed_c10d
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.distributed_c10d import _resolve_process_group  # type: ignore[attr-defined]
from torch.distributed.tensor import _redistribute as redistribute_module

from .dtensor import op_dispatcher
from .patches import replace

_HOST_BACKENDS = frozenset({"gloo", "fake"})  # they cannot abort, see ``abort_device_groups``

root_mesh = DeviceMesh._get_root_mesh
flatten_mesh = DeviceMesh._flatten  # a 1-D sub-mesh of the same root, with a name, of the ranks in row-major order
resolve_group = cast("Callable[[str], dist.ProcessGroup]", _resolve_process_group)  # the live group of a name


def twin_group(group: dist.ProcessGroup, device: torch.device, desc: str) -> dist.ProcessGroup:
    """A second communicator of the ranks of ``group``, the same for each caller with this ``desc``. The first call is
    collective over these ranks, and no others. It ends with the other process groups.

    ``dist.new_group(use_local_synchronization=True)`` names a group by how many groups the process has. Ranks that have
    made different numbers of groups would never meet. So the ranks agree on a name first.
    """
    # Without what the group may have for other devices: gloo's connections would take 20 ms.
    backends = dist.get_backend_config(group).split(",")
    own = next((backend for backend in backends if backend.startswith(f"{device.type}:")), None)
    return _group_beside(group, device, desc, backend=own)  # None: that of the default group


def host_group(group: dist.ProcessGroup, device: torch.device, desc: str) -> dist.ProcessGroup:
    """A group of the ranks of ``group`` that takes tensors on the host: itself if it does, else one of gloo, the same
    for each caller with this ``desc``. The first call is collective over these ranks."""
    if torch.device("cpu") in group._device_types:
        return group
    return _group_beside(group, device, desc, backend="gloo")


def has_twin(group: dist.ProcessGroup, desc: str) -> bool:
    """Whether ``twin_group`` was called for it."""
    return described_group(_beside(group, desc)) is not None


def _beside(group: dist.ProcessGroup, desc: str) -> str:
    """The description by which later calls find the group."""
    return f"{desc} beside {group.group_name}"


def _group_beside(
    group: dist.ProcessGroup, device: torch.device, desc: str, backend: str | None = None
) -> dist.ProcessGroup:
    description = _beside(group, desc)
    known = described_group(description)
    if known is not None:
        return known
    # All ranks of ``group`` come here together: the twin exists on all of them or on none.
    name = agreed_name(group, device, desc)
    return named_group(dist.get_process_group_ranks(group), name, description, group, backend)


def described_group(description: str) -> dist.ProcessGroup | None:
    """The group of this process that was made with this description; None if there is none.

    Torch keeps a group, with its threads and sockets, until all groups are destroyed: each model would leave one
    behind. Torch's own list is searched, so nothing is remembered of groups that are gone.
    """
    return next((group for group in list(distributed_c10d._world.pg_map) if group.group_desc == description), None)


def agreed_name(group: dist.ProcessGroup, device: torch.device, prefix: str) -> str:
    """A name that no process group has yet. Collective over ``group``: a maximum, whose kernel NCCL has loaded. Its
    broadcast would take 0.1 s."""
    name = torch.tensor(secrets.randbits(62), device=device)  # each rank draws its own
    dist.all_reduce(name, dist.ReduceOp.MAX, group=group)
    return f"{prefix}_{int(name):x}"  # all have the largest; the host waits for it


def named_group(
    ranks: list[int], name: str, desc: str, parent: dist.ProcessGroup, backend: str | None = None
) -> dist.ProcessGroup:
    """A new process group of ``ranks`` under a name that they have agreed on. Collective over them, and no others.

    It has the time limit of ``parent``. It does not split the communicator of a default group that is bound to a
    device: that would wait for all of its ranks.
    """
    timeout = timeout_of(parent)
    # torch would name the group by its ranks and by the number of groups of this process.
    with (
        mock.patch.object(distributed_c10d, "_process_group_name", return_value=name),
        mock.patch.object(distributed_c10d, "_get_split_source", return_value=None),
        gloo_with_one_thread(parent),
    ):
        group = dist.new_group(ranks, timeout, backend, use_local_synchronization=True, group_desc=desc)
        return cast("dist.ProcessGroup", group)


class OneThreadGloo:
    """Stands for torch's class of gloo's groups where torch makes one. Torch gives a group two threads. Both assign one
    ``std::string`` without a lock when a collective ends (``lastCompletedWorkName`` in ``ProcessGroupGloo::runLoop``,
    seen in torch 2.13). Names of more than 15 characters, such as that of gathers of several tensors
    (``ALLGATHER_COALESCED``), are on the heap, where two threads may free one: the process dies of it later, by chance.
    It takes two collectives in flight in one group.

    Groups share ``devices``: each device has a thread that polls a hundred times a second.
    """

    def __init__(self, devices: list[Any] | None = None) -> None:
        self._cls: Any = dist.ProcessGroupGloo
        self._devices = devices

    def _own_devices(self) -> list[Any]:
        """As torch chooses them."""
        interfaces = os.environ.get("GLOO_SOCKET_IFNAME", "")
        named = [self._cls.create_device(interface=name) for name in interfaces.split(",") if name]
        return named or [self._cls.create_default_device()]

    def __instancecheck__(self, instance: Any) -> bool:  # torch calls ``isinstance`` with this object
        return isinstance(instance, self._cls)

    def __call__(self, store: Store, rank: int, size: int, timeout: timedelta, **further: bool) -> Any:
        """``further``: 2.14 passes ``enable_reconfigure``, which nobody turns on."""
        assert not any(further.values()), further
        if self._devices is None:  # the first group makes them, later ones share them
            self._devices = self._own_devices()
        options = self._cls._Options()
        options._devices = self._devices
        options._timeout = timeout
        options._threads = 1
        return self._cls(store, rank, size, options)


@contextmanager
def gloo_with_one_thread(parent: dist.ProcessGroup | None = None) -> Iterator[None]:
    """Groups of gloo that are made here have one thread, and the devices of ``parent`` if that is one of gloo."""
    stock = getattr(distributed_c10d, "ProcessGroupGloo", None)
    if not isinstance(stock, type):  # torch without gloo, or this is on already
        yield
        return
    # None: devices as torch chooses them, made with the first group.
    if parent is None:
        options = None
    else:
        options = _gloo_options(parent)
    made = OneThreadGloo(None if options is None else options._devices)
    with mock.patch.object(distributed_c10d, "ProcessGroupGloo", made):
        yield


def has_racing_threads(group: dist.ProcessGroup) -> bool:
    """Whether ``group`` is one of gloo with several threads."""
    options = _gloo_options(group)
    return options is not None and options._threads > 1


def _gloo_options(group: dist.ProcessGroup) -> Any:
    if torch.device("cpu") not in group._device_types:  # no backend for tensors on the host
        return None
    backend = group._get_backend(torch.device("cpu"))
    if backend.name() == "gloo" and hasattr(backend.options, "_threads"):
        return backend.options
    return None


def device_of_objects(group: dist.ProcessGroup) -> torch.device:
    """On which device ``group`` sends objects: the host if it can."""
    return torch.device(distributed_c10d._get_object_coll_device(group))


def timeout_of(group: dist.ProcessGroup) -> timedelta | None:
    """How long a collective of ``group`` may take; None without a limit, as in a fake group."""
    limits = []
    for device in group._device_types:
        try:
            limits.append(group._get_backend(device).options._timeout)
        except (AttributeError, RuntimeError):  # a backend without options, or one that does not show them
            continue
    return min(limits, default=None)  # a group may have a backend for each device


def clone_store(store: Store) -> Store:
    """Another client of the same store, for another thread: a client serves one request at a time."""
    return cast("Any", store).clone()  # type: ignore[no-any-return]


def store_of(group: dist.ProcessGroup) -> Store:
    """The part of the job's store that the ranks of ``group`` met in."""
    return distributed_c10d._get_process_group_store(group)


def abort_device_groups(*, wait: bool = True) -> None:
    """Abort the collectives of all process groups on devices, from any thread: waits for them return or raise.

    A thread for each aborts them at the same time, because NCCL's abort of a group waits for what the group has queued
    on the device, perhaps behind a collective of another group that hangs. Gloo cannot abort: its collectives end when
    a connection breaks or their time limit passes. With ``wait``, return when all are aborted, perhaps after seconds.
    """
    # Of groups with a backend other than gloo: the others have nothing to abort.
    # Daemons, so that an abort that hangs does not keep the process.
    threads = [
        threading.Thread(target=group.abort, name="dtensor_gtp abort", daemon=True)
        for group in list(distributed_c10d._world.pg_map)
        if not {part.rpartition(":")[2] for part in dist.get_backend_config(group).split(",")} <= _HOST_BACKENDS
    ]
    for thread in threads:
        thread.start()
    for thread in threads if wait else ():
        thread.join()


def restart_group_names() -> None:
    """Without a default group, count names of groups from the beginning. Its name is part of addresses in the store,
    and each failed attempt to make it uses up a name: ranks with different numbers of attempts would not meet."""
    if not dist.is_initialized():  # groups that exist have names already
        distributed_c10d._world.group_count = 0


def leave_process_groups() -> None:
    """Abort all process groups of this process without waiting for their ranks, some of which may be gone. Clear
    DTensor's caches: a later mesh of equal ranks would get plans whose groups are gone."""
    abort_device_groups()  # all at once: the call below aborts them one by one
    distributed_c10d._abort_process_group()  # torch forgets them all, and counts names from 0 again
    # torch has such a cache for each thread. This clears that of the calling thread.
    op_dispatcher().sharding_propagator.propagate_op_sharding.cache_clear()
    torch._C._clear_DTensor_sharding_propagator_cache()
    redistribute_module._gen_transform_infos.cache_clear()
    redistribute_module.clear_redistribute_planner_cache()


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
    """Let DTensor redistribute over a mesh whose axes stand in another order than in its root mesh: there torch (2.11,
    2.13), which looks for a flattened mesh of some axes, gets a KeyError instead of none."""
    lookup = getattr(redistribute_module, "_get_flattened_mesh_by_layout", None)
    if lookup is None:  # a torch that looks elsewhere
        return

    @functools.wraps(lookup)
    def lookup_or_none(mesh: DeviceMesh, mesh_dims: tuple[int, ...]) -> DeviceMesh | None:
        try:
            return cast("DeviceMesh | None", lookup(mesh, mesh_dims))
        except KeyError:  # ``_get_slice_mesh_layout`` wants axes in ascending order
            return None  # no flattened mesh: DTensor goes axis by axis

    replace("flattened mesh", redistribute_module, "_get_flattened_mesh_by_layout", lookup_or_none)


def unflatten_mesh(mesh: DeviceMesh, sizes: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """``mesh``, which is 1-D, with its one axis split into several; a sub-mesh of the same root."""
    return mesh._unflatten(0, sizes, names)
