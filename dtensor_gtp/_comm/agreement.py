"""Ranks exchange what each of them has found, before anything is changed: all succeed, or all raise."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

T = TypeVar("T")


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device on which this rank's shards live."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def by_rank(own: T, groups: Sequence[dist.ProcessGroup]) -> dict[int, T]:
    """The value of each rank of a mesh, by global rank in order. Collective.

    Args:
        own: This rank's value, any object that can be pickled.
        groups: One group for each axis of the mesh.
    """
    known = {dist.get_rank(): own}
    for group in groups:
        parts: list[dict[int, T]] = [{}] * group.size()
        dist.all_gather_object(parts, known, group=group)
        known = {rank: value for part in parts for rank, value in part.items()}
    return dict(sorted(known.items()))


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
    groups = [mesh.get_group(axis) for axis in range(mesh.ndim) if mesh.size(axis) > 1]
    digest = int.from_bytes(hashlib.sha256("\n".join(described).encode()).digest()[:7], "big")
    status = torch.tensor([error is not None, digest, -digest], dtype=torch.int64, device=device_of(mesh))
    for group in groups:
        dist.all_reduce(status, dist.ReduceOp.MAX, group=group)
    has_failed, highest, lowest = status.tolist()
    if has_failed:
        errors = by_rank("" if error is None else _text_of(error), groups)
        if error is not None:
            raise error
        messages = "; ".join(f"rank {rank}: {message}" for rank, message in errors.items() if message)
        raise RuntimeError(f"{caller} failed on another rank of the mesh, so it fails on all: {messages}")
    if highest != -lowest:
        difference = _first_difference(by_rank(described, groups))
        raise RuntimeError(
            f"{caller} expects {expected} on all ranks of mesh axes {mesh.mesh_dim_names}, but {difference}. {remedy}"
        )
    return cast("T", result)


def _text_of(error: Exception) -> str:
    return "\n".join((f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())))


def _first_difference(described: dict[int, Sequence[str]]) -> str:
    first_rank, *others = described
    for rank in others:
        for a, b in zip_longest(described[first_rank], described[rank], fillvalue="nothing more"):
            if a != b:
                return f"rank {first_rank} has {a} where rank {rank} has {b}"
    raise AssertionError("the digests of the ranks differ, but not what they describe")
