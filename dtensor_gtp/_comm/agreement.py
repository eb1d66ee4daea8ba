"""One exchange before anything is changed: all ranks succeed, or all raise."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device on which this rank's shards live."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def agree_on_all_ranks(
    mesh: DeviceMesh,
    check: Callable[[], T],
    describe: Callable[[T], Sequence[str]],
    *,
    caller: str = "gtp_shard",
    expected: str = "the same module and policies",
    remedy: str = "Build the same module everywhere; make shard_placement_fn and the policies independent of the rank.",
) -> T:
    """Run ``check`` on each rank of ``mesh``; raise on all of them if one raised or their results differ.

    Args:
        describe: What must be equal on all ranks, of the result of ``check``.
        caller, expected, remedy: For messages: the public function, what it expects to be equal, what to do if it is
        not.

    Raises:
        Exception: Whatever ``check`` raised on this rank.
        RuntimeError: ``check`` raised on another rank (the message says what), or the results differ.
    """
    result: T | None = None
    error: Exception | None = None
    described: Sequence[str] = ()
    try:
        result = check()
        described = describe(result)
    except Exception as caught:
        error = caught
    digest = int.from_bytes(hashlib.sha256("\n".join(described).encode()).digest()[:7], "big")
    status = torch.tensor([error is not None, digest, -digest], dtype=torch.int64, device=device_of(mesh))
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    for group in groups:
        dist.all_reduce(status, dist.ReduceOp.MAX, group=group)
    has_failed, highest, lowest = status.tolist()
    if has_failed:
        notes = getattr(error, "__notes__", [])
        errors = _exchange(None if error is None else "\n".join((f"{type(error).__name__}: {error}", *notes)), groups)
        if error is not None:
            raise error
        messages = "; ".join(f"rank {rank}: {message}" for rank, message in errors.items())
        raise RuntimeError(f"{caller} failed on another rank of the mesh, so it fails on all: {messages}")
    if highest != -lowest:
        raise RuntimeError(
            f"{caller} expects {expected} on all ranks of mesh axes {mesh.mesh_dim_names}, but "
            f"{_first_difference(_exchange(described, groups))}. {remedy}"
        )
    assert error is None
    return cast("T", result)


def _exchange(mine: Any, groups: list[dist.ProcessGroup]) -> dict[int, Any]:
    """What each rank of the mesh has, except None, by rank."""
    known = {dist.get_rank(): mine} if mine is not None else {}
    for group in groups:
        gathered: list[Any] = [None] * group.size()
        dist.all_gather_object(gathered, known, group=group)
        known = {rank: value for part in gathered for rank, value in part.items()}
    return dict(sorted(known.items()))


def _first_difference(described: dict[int, Sequence[str]]) -> str:
    first_rank, *others = described
    for rank in others:
        for a, b in zip_longest(described[first_rank], described[rank], fillvalue="nothing more"):
            if a != b:
                return f"rank {first_rank} has {a} where rank {rank} has {b}"
    raise AssertionError("the digests of the ranks differ, but not what they describe")
