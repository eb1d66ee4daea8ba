"""Starts the process group of the world and makes the mesh of all its ranks."""

from __future__ import annotations

import hmac
import os
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed.constants import default_pg_timeout
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.rendezvous import rendezvous

from .. import _torch_compat as compat

_RENDEZVOUS = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# A variable of the environment, which the launcher passes on to all processes.
_SECRET = "DTENSOR_GTP_SECRET"


def device_types(config: str) -> list[str]:
    """Of a backend configuration such as ``cpu:gloo,cuda:nccl``."""
    return [part.partition(":")[0] for part in config.split(",")]


def world_size() -> int:
    """Number of ranks; from the environment as long as there is no process group."""
    if dist.is_initialized():
        return dist.get_world_size()
    missing = [name for name in _RENDEZVOUS if not os.environ.get(name)]  # torch refuses empty ones, too
    if missing:
        raise RuntimeError(
            f"init_weight_mesh expects a process group, or the variables {', '.join(_RENDEZVOUS)} "
            f"in the environment to initialize it from, but {', '.join(missing)} "
            f"{'are' if len(missing) > 1 else 'is'} not set. Start the processes with torchrun, or "
            "call torch.distributed.init_process_group before."
        )
    return int(os.environ["WORLD_SIZE"])


def default_device_type() -> str:
    """The accelerator of this process; "cpu" if there is none, or if the process group that exists
    uses gloo on it."""
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    if accelerator is None:
        return "cpu"
    if dist.is_initialized():
        backends = dict(part.split(":") for part in dist.get_backend_config().split(","))
        if backends.get(accelerator.type, "gloo") == "gloo":  # a group without a backend for it cannot use it either
            return "cpu"
    return str(accelerator.type)


def has_device(device_type: str) -> bool:
    """Whether this process has a device of that type."""
    if device_type == "cpu":
        return True
    try:
        return bool(torch.get_device_module(device_type).is_available())
    except RuntimeError:  # torch knows no such type
        return False


def check_device(device_type: str) -> None:
    """Raise a ValueError if there is no such device. With the backend "fake" none is needed."""
    if not has_device(device_type) and not (dist.is_initialized() and dist.get_backend() == "fake"):
        raise ValueError(
            "init_weight_mesh expects a device that this process has, but there is no "
            f"'{device_type}' here. Pass 'cpu', or install a torch for this device."
        )


def set_device(device_type: str) -> None:
    """Make the device of index LOCAL_RANK this process's current one; the CPU has no index."""
    check_device(device_type)
    if device_type == "cpu" or (dist.is_initialized() and dist.get_backend() == "fake"):
        return
    module = torch.get_device_module(device_type)
    local_rank = os.environ.get("LOCAL_RANK")
    if local_rank is None:
        raise RuntimeError(
            "init_weight_mesh expects the variable LOCAL_RANK in the environment, the index of "
            "this process's device on its host, but it is not set. Start the processes with "
            "torchrun, or set it."
        )
    num_devices = module.device_count()
    if not 0 <= int(local_rank) < num_devices:
        raise ValueError(
            f"init_weight_mesh expects one device for each process, but LOCAL_RANK is {local_rank} "
            f"and there are {num_devices} '{device_type}' devices. Start at most {num_devices} "
            "processes on a host (torchrun --nproc-per-node), or set LOCAL_RANK=0 where each "
            "process sees only its own device."
        )
    module.set_device(int(local_rank))


def job_store(name: str, store: compat.Store) -> compat.Store:
    """The keys of ``name`` in a store. Where the job has a secret, only who knows it finds them: a
    process that merely knows the port of the store neither joins as a rank nor reports one as
    lost."""
    secret = os.environ.get(_SECRET)
    if secret:
        name = f"{name}_{hmac.new(secret.encode(), name.encode(), 'sha256').hexdigest()}"
    return compat.PrefixStore(name, store)


def start_process_group(
    device_type: str, backend: str | None, timeout: timedelta | None, rank_order: tuple[int, ...]
) -> None:
    """Rendezvous as the environment says; the process whose RANK is ``rank_order[i]`` becomes rank i."""
    # None for other devices: torch chooses by the accelerator that it finds.
    backend = backend or {"cuda": "nccl", "cpu": "gloo"}.get(device_type)
    store, rank, world_size = next(rendezvous("env://", timeout=timeout or default_pg_timeout))
    # torchrun may use one store for all attempts of a job; gloo would find addresses of ended
    # processes there.
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    store = job_store(f"attempt_{attempt}_of_{world_size}", store)
    # Ranks in the order of the mesh, whatever order the launcher gave them.
    rank = rank_order.index(rank)
    with compat.gloo_with_one_thread():  # two threads of one group race, see ``OneThreadGloo``
        dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, timeout=timeout)


def start_alone(device_type: str) -> None:
    """A process group of this process alone, which no launcher has started. It needs no environment."""
    # In this process: a store with a port would listen on all interfaces.
    store = compat.HashStore()
    dist.init_process_group({"cuda": "nccl", "cpu": "gloo"}.get(device_type), store=store, rank=0, world_size=1)


def world_mesh(device_type: str) -> DeviceMesh:
    """1-D mesh of all ranks, on ``device_type`` or else on a device that the process group can
    communicate on."""
    known = device_types(dist.get_backend_config())
    if device_type not in known:
        device_type = known[0]
    return init_device_mesh(device_type, (dist.get_world_size(),), mesh_dim_names=("world",))
