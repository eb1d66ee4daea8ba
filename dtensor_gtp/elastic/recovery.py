"""State goes from the memory of the ranks that are left to a new layout, without a checkpoint on disk.

``hold_state`` keeps what a rank has, and where it belongs in the logical tensors. When the ranks that are left (and
new ones, which have nothing) have built their new mesh and model, ``recover_state`` fills it, as ``dcp.load`` would
from disk. A rank that lost nothing copies what it has; each part that is missing is sent once.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat
from .._comm.agreement import device_of
from .mesh import ElasticMesh
from .plan import Box
from .transfer import Move, plan_moves

Path = tuple[Any, ...]


class StateLostError(RuntimeError):
    """A part of the state is on none of the ranks that are left: a checkpoint has to be loaded."""


@dataclass(frozen=True)
class HeldState:
    """What one rank has of the state of a job. Made by :func:`hold_state`.

    Args:
        step: Optimizer steps that are done.
        tensors: By path in the state: where this rank's part lies in the logical tensor, and the part itself.
        plain: All other values, by path.
    """

    step: int
    tensors: dict[Path, tuple[Box, Tensor]]
    plain: dict[Path, Any]


class _Part(NamedTuple):
    """What all ranks tell each other of one tensor."""

    box: Box
    shape: tuple[int, ...]
    dtype: torch.dtype


def hold_state(state: dict[str, Any], *, step: int) -> HeldState:
    """Keep this rank's part of ``state``. No communication, and no copy of DTensors: they are those of the job.

    Call it when the job has failed, before its process groups are destroyed.

    Args:
        state: What would be saved: nested dicts and lists with DTensors (see the checkpointing guide), numbers, plain
            tensors.
        step: Number of optimizer steps that this rank has completed. Count it right after ``optimizer.step()``.
    """
    tensors: dict[Path, tuple[Box, Tensor]] = {}
    plain: dict[Path, Any] = {}
    for path, _, value in _leaves(state):
        if isinstance(value, DTensor):
            tensors[path] = (_box_of(value), compat.local_tensor(value).detach())
        else:
            plain[path] = _copied(value)
    return HeldState(step, tensors, plain)


def _copied(value: Any) -> Any:
    """In host memory: a pickled tensor of a device comes back on the device of that index, which is a peer's."""
    is_on_device = isinstance(value, Tensor) and value.device.type != "cpu"
    return value.detach().cpu() if is_on_device else copy.deepcopy(value)


def recover_state(
    held: HeldState | None, state: dict[str, Any], mesh: ElasticMesh, *, chunk_nbytes: int = 256 << 20
) -> int:
    """Fill ``state`` from what the ranks of ``mesh`` hold. Collective over all of them.

    A failure may catch some ranks before the last optimizer step and some after it. The latest step of which nothing is
    missing is taken, whole: replicas that have not got there take it over from those that have.

    Args:
        held: What this rank has, None if it is new.
        state: State of the job that was built on ``mesh``: as for ``dcp.load``, its tensors are written in place, other
            values are replaced. A value that is no DTensor is kept by ranks that have it of the step that is taken; the
            others get that of the lowest rank.
        mesh: The new mesh.
        chunk_nbytes: Bytes that a rank exchanges at a time, about.

    Returns:
        The step that the state is of.

    Raises:
        ValueError: The held state is that of another model.
        StateLostError: A part of the state is on none of the ranks. Both are raised on all ranks.
    """
    wanted = {path: value for path, _, value in _leaves(state) if isinstance(value, DTensor)}
    # Everything in one exchange: the plan is then the same arithmetic on all ranks.
    own_held = None
    if held is not None:
        own_held = (held.step, {path: (box, part.dtype) for path, (box, part) in held.tensors.items()}, set(held.plain))
    own_wanted = {path: _Part(_box_of(value), tuple(value.shape), value.dtype) for path, value in wanted.items()}
    gathered: list[Any] = [None] * mesh.layout.num_ranks
    group = mesh.world.get_group()
    dist.all_gather_object(gathered, (own_held, own_wanted), group=group)
    having = {rank: known for rank, (known, _) in enumerate(gathered) if known is not None}
    wanting = [parts for _, parts in gathered]
    replica_of = {rank: place.replica for rank, place in mesh.layout.places.items()}

    step, moves = _latest_complete_step(having, wanting, replica_of)
    is_source = held is not None and held.step == step
    local = {path: compat.local_tensor(value) for path, value in wanted.items()}
    with torch.no_grad():
        for chunk in _chunks(moves, wanting, chunk_nbytes * len(wanting)):
            _exchange(chunk, held.tensors if held is not None and is_source else {}, local, own_wanted, mesh)
    _fill_plain(state, held if is_source else None, step, having, mesh)
    return step


def _latest_complete_step(
    having: Mapping[int, Any], wanting: list[dict[Path, _Part]], replica_of: Mapping[int, int]
) -> tuple[int, dict[Path, list[Move]]]:
    if not having:
        raise StateLostError("recover_state expects ranks that hold state, but there are none. Load a checkpoint.")
    lost = ""
    for step in sorted({known[0] for known in having.values()}, reverse=True):
        sources = {rank: tensors for rank, (at, tensors, _) in having.items() if at == step}
        moves: dict[Path, list[Move]] = {}
        known_plans: dict[Any, Any] = {}
        for path in wanting[0]:
            wanted = {rank: parts[path].box for rank, parts in enumerate(wanting)}
            held = {rank: tensors[path][0] for rank, tensors in sources.items() if path in tensors}
            _check_same_model(path, wanting[0][path], held, [t[path][1] for t in sources.values() if path in t])
            # Layers repeat: tensors that are cut alike move alike.
            key = (tuple(wanted.items()), tuple(held.items()))
            if key not in known_plans:
                known_plans[key] = plan_moves(held, wanted, replica_of)
            moves[path], missing = known_plans[key]
            if missing:
                part = missing[0].box
                lost = f"part {part.offset}+{part.size} of {format_path(path)} after step {step}"
                break
        else:
            return step, moves
    raise StateLostError(
        f"recover_state expects each part of the state on a rank that is left, but {lost} is on none of the ranks "
        f"{sorted(having)}. Load a checkpoint."
    )


def _check_same_model(path: Path, part: _Part, held: Mapping[int, Box], dtypes: list[torch.dtype]) -> None:
    fits = all(
        len(box.size) == len(part.shape) and all(o + n <= s for o, n, s in zip(*box, part.shape, strict=True))
        for box in held.values()
    )
    if not held or not fits or set(dtypes) != {part.dtype}:
        got = f"parts {sorted(set(held.values()))} of {sorted(map(str, set(dtypes)))}" if held else "nothing of it"
        raise ValueError(
            f"recover_state expects the state of the same model, but the model on the new mesh has {format_path(path)} "
            f"of shape {part.shape} and {part.dtype}, and the ranks that are left hold {got}."
        )


def _chunks(
    moves: dict[Path, list[Move]], wanting: list[dict[Path, _Part]], limit: int
) -> Iterator[dict[Path, list[Move]]]:
    """The moves in portions of about ``limit`` bytes over all ranks; one dtype each."""
    chunk: dict[Path, list[Move]] = {}
    nbytes, dtype = 0, None
    for path, of_path in moves.items():
        part = wanting[0][path]
        if chunk and (nbytes >= limit or part.dtype != dtype):
            yield chunk
            chunk, nbytes = {}, 0
        chunk[path], dtype = of_path, part.dtype
        nbytes += sum(move.box.numel for move in of_path if move.source != move.target) * part.dtype.itemsize
    if chunk:
        yield chunk


def _exchange(
    chunk: dict[Path, list[Move]],
    held: Mapping[Path, tuple[Box, Tensor]],
    local: Mapping[Path, Tensor],
    wanted: Mapping[Path, _Part],
    mesh: ElasticMesh,
) -> None:
    """Copy what stays on this rank; all-to-all of the rest, in the order (path, move) between any two ranks."""
    rank, num_ranks = dist.get_rank(), mesh.layout.num_ranks
    sent: list[list[Tensor]] = [[] for _ in range(num_ranks)]
    received: list[list[Tensor]] = [[] for _ in range(num_ranks)]
    for path, moves in chunk.items():
        for source, target, box in moves:
            if rank not in (source, target):
                continue
            outgoing = held[path][1][box.within(held[path][0])] if source == rank else None
            incoming = local[path][box.within(wanted[path].box)] if target == rank else None
            if outgoing is not None and incoming is not None:
                incoming.copy_(outgoing)
            elif outgoing is not None:
                sent[target].append(outgoing.reshape(-1))
            elif incoming is not None:
                received[source].append(incoming)
    if not any(move.source != move.target for moves in chunk.values() for move in moves):
        return
    dtype = next(iter(wanted[path].dtype for path in chunk))
    device = device_of(mesh.world)
    sizes = [sum(part.numel() for part in parts) for parts in sent]
    expected = [sum(part.numel() for part in parts) for parts in received]
    outbox = torch.cat([part.to(device) for parts in sent for part in parts]) if sum(sizes) else None
    outbox = torch.empty(0, dtype=dtype, device=device) if outbox is None else outbox
    inbox = torch.empty(sum(expected), dtype=dtype, device=device)
    dist.all_to_all_single(inbox, outbox, expected, sizes, group=mesh.world.get_group())
    targets = [part for parts in received for part in parts]
    for part, values in zip(targets, inbox.split([part.numel() for part in targets]), strict=True):
        part.copy_(values.view(part.shape))


def _fill_plain(
    state: dict[str, Any], held: HeldState | None, step: int, having: Mapping[int, Any], mesh: ElasticMesh
) -> None:
    """Values that are no DTensors: a rank's own ones, else those of the lowest rank that has them."""
    first = min(rank for rank, known in having.items() if known[0] == step)
    values = [held.plain if held is not None else None]
    dist.broadcast_object_list(values, group=mesh.world.get_group(), group_src=first)
    shared = values[0]
    assert shared is not None
    own = held.plain if held is not None else shared
    for path, container, value in list(_leaves(state)):
        if isinstance(value, DTensor):
            continue
        found = own.get(path, shared.get(path, value))
        if isinstance(value, Tensor) and isinstance(found, Tensor) and value.shape == found.shape:
            with torch.no_grad():
                value.copy_(found)
        else:
            is_on_device = isinstance(value, Tensor) and isinstance(found, Tensor)
            container[path[-1]] = found.to(value.device) if is_on_device else found


def _leaves(tree: Any, path: Path = ()) -> Iterator[tuple[Path, Any, Any]]:
    """(path, container, value) of everything in nested dicts and lists."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(value, dict | list):
            yield from _leaves(value, (*path, key))
        else:
            yield (*path, key), tree, value


def _box_of(tensor: DTensor) -> Box:
    shape, offset = compat.local_shape_and_offset(tensor)
    return Box(offset, shape)


def format_path(path: Path) -> str:
    """``'model.norm.weight'``."""
    return f"'{'.'.join(map(str, path))}'"
