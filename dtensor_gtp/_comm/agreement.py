"""Ranks compare what each of them has found before anything is changed: all succeed, or all raise."""

from __future__ import annotations

import hashlib
import socket
from collections.abc import Callable, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from .._howto import see
from .collectives import as_integers
from .values import all_gather_values

T = TypeVar("T")

_WORD = torch.int64
# Words that are mixed at once. Mixing takes about ten times their bytes of memory.
_PIECE = 1 << 20
# The finalizer of SplitMix64 (Steele et al. 2014), in two's complement: each bit of the result depends on all bits.
_STEPS = ((30, 0xBF58476D1CE4E5B9 - (1 << 64)), (27, 0x94D049BB133111EB - (1 << 64)), (31, 1))
_STRIDE = 0x9E3779B97F4A7C15 - (1 << 64)


def device_of(mesh: DeviceMesh) -> torch.device:
    """The device on which this rank's shards live."""
    if mesh.device_type == "cpu":
        return torch.device("cpu")
    return torch.device(mesh.device_type, torch.get_device_module(mesh.device_type).current_device())


def by_rank(own: T, groups: Sequence[dist.ProcessGroup]) -> dict[int, T]:
    """The value of each rank of a mesh, sorted by global rank: what ``values`` sends. Collective over ``groups``, one
    for each axis of the mesh."""
    known = {dist.get_rank(): own}
    for group in groups:
        parts: list[dict[int, T]] = all_gather_values(known, group)
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
    """Run ``check`` on each rank of ``mesh``. Raise on all ranks if one raised or if their results differ in what
    ``describe`` says of them. ``caller`` (a public function), ``expected`` and ``remedy`` are for messages.

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
    code = _code_of("\n".join(described))
    status = torch.tensor([error is not None, code, -code], dtype=torch.int64, device=device_of(mesh))
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
        difference = first_difference(by_rank(described, groups))
        raise RuntimeError(
            f"{caller} expects {expected} on all ranks of mesh axes {mesh.mesh_dim_names}, but {difference}. {remedy} "
            + see("ranks_diverge")
        )
    return cast("T", result)


def _text_of(error: Exception) -> str:
    return "\n".join((f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())))


def first_difference(described: dict[int, Sequence[str]]) -> str:
    """Where what the ranks say differs first."""
    first_rank, *others = described
    for rank in others:
        for a, b in zip_longest(described[first_rank], described[rank], fillvalue="nothing more"):
            if a != b:
                return f"rank {first_rank} has {a} where rank {rank} has {b}"
    raise AssertionError("the hashes of the ranks differ, but not their descriptions")


def digests(tensors: Sequence[Tensor], device: torch.device) -> Tensor:
    """One number for the bits of each plain tensor, of any dtype and layout: int64, shape ``(len(tensors),)``, on
    ``device``; 0 for no elements.

    It differs if one element differs and, almost surely, if several elements or their order differ. Tensors of one size
    are mixed together: a model has many small ones, and each kernel costs host time.
    """
    alike: dict[tuple[int, torch.dtype, torch.device], list[int]] = {}
    for index, tensor in enumerate(tensors):
        alike.setdefault((tensor.numel(), tensor.dtype, tensor.device), []).append(index)
    found = [torch.zeros((), dtype=_WORD, device=device)] * len(tensors)
    for (numel, _, _), indices in alike.items():
        num_rows = max(1, _PIECE // max(1, numel))
        for begin in range(0, len(indices) if numel else 0, num_rows):
            some = indices[begin : begin + num_rows]
            words = [_words_of(tensors[index]) for index in some]
            rows = torch.stack(words) if len(some) > 1 else words[0].unsqueeze(0)
            for index, total in zip(some, _mixed(rows).to(device).unbind(), strict=True):
                found[index] = total
    return torch.stack(found) if found else torch.zeros(0, dtype=_WORD, device=device)


def _words_of(tensor: Tensor) -> Tensor:
    if tensor.is_complex():
        tensor = torch.view_as_real(tensor.resolve_conj())
    flat = tensor.contiguous().flatten()
    if flat.nbytes % _WORD.itemsize:
        return as_integers(flat)
    is_aligned = flat.storage_offset() * flat.itemsize % _WORD.itemsize == 0
    return (flat if is_aligned else flat.clone()).view(_WORD)


def _mixed(rows: Tensor) -> Tensor:
    """One number for each row of words."""
    totals = torch.zeros(len(rows), dtype=_WORD, device=rows.device)
    for begin in range(0, rows.shape[1], _PIECE):
        piece = rows[:, begin : begin + _PIECE].to(_WORD)
        # As in the generator, the state at each place is a multiple of an odd number.
        places = torch.arange(begin + 1, begin + 1 + piece.shape[1], device=rows.device)
        mixed = piece + places * _STRIDE
        for shift, factor in _STEPS:
            without_sign = (mixed >> shift) & ((1 << (64 - shift)) - 1)
            mixed = (mixed ^ without_sign) * factor
        totals += mixed.sum(1)
    return totals


def host_name() -> str:
    """A name of this host that no other host has, even in containers with equal host names."""
    boot_id = Path("/proc/sys/kernel/random/boot_id")
    return f"{socket.gethostname()} {boot_id.read_text().strip() if boot_id.exists() else ''}".strip()


def is_one_host(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether all ranks of ``group`` run on one host. Collective; the host waits for the answer."""
    return bool(is_alike(host_name(), group, device))


def is_alike(text: str, group: dist.ProcessGroup, device: torch.device) -> bool | None:
    """Whether all ranks of ``group`` have the same text; None where tensors are fake. Collective; the host waits for
    the answer."""
    code = _code_of(text)
    extremes = torch.tensor([code, -code], device=device)
    dist.all_reduce(extremes, dist.ReduceOp.MAX, group=group)
    if type(extremes) is not Tensor:
        return None
    highest, lowest = extremes.tolist()
    return bool(highest == -lowest)


def _code_of(text: str) -> int:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big")


def any_rank_has(found: Sequence[bool], mesh: DeviceMesh, device: torch.device) -> list[bool]:
    """Of each of these facts whether it holds on any rank of ``mesh``. The host waits for the answer."""
    flags = torch.tensor(found, dtype=torch.int32, device=device)
    for axis in range(mesh.ndim):
        if mesh.size(axis) > 1:
            dist.all_reduce(flags, dist.ReduceOp.MAX, group=mesh.get_group(axis))
    return [flag > 0 for flag in flags.tolist()]
