"""Moves the state of a job from the memory of the remaining ranks to a new layout, without a checkpoint on disk.

``hold_state`` keeps a rank's state with its position in the logical tensors. When the remaining ranks (and new ones)
have built their new mesh and model, ``recover_state`` fills the model, as ``dcp.load`` would from disk: each missing
part is sent once. ``handover.py`` hands the state over to a new process.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from .. import _torch_compat as compat
from .._comm.agreement import all_gather_values, broadcast_value, device_of
from .._progress import Progress
from .mesh import ElasticMesh
from .plan import Box, Move, plan_moves

Keys = tuple[Any, ...]  # and indices: they lead to a value in nested dicts and lists
Parts = dict[Keys, tuple[Box, Tensor]]  # where parts lie in their logical tensors, and the parts
Moves = dict[Keys, list[Move]]
_NEW = -1  # the step of a rank that holds nothing
_LOG = logging.getLogger(__name__)


class StateLostError(RuntimeError):
    """No remaining rank holds a part of the state: load a checkpoint.

    Example:
        >>> mesh = nonuniform_mesh("cpu", replicas=[[0, 1, 2, 3]])
        >>> try:
        ...     recover_state(None, {"model": nn.Linear(2, 2).state_dict()}, mesh)
        ... except StateLostError as error:
        ...     print(error)
        recover_state expects ranks that hold state, but there are none. Load a checkpoint.
    """


@dataclass(frozen=True)
class HeldState:
    """What one rank has of the state of a job. Made by :func:`hold_state`.

    Args:
        step: Optimizer steps that the rank has completed.
        tensors: This rank's parts of DTensors, and where they lie in the logical tensors.
        plain: All other values.

    Example:
        >>> held = hold_state({"step": 7, "weights": torch.ones(2)}, step=7)
        >>> held.step, sorted(held.plain)
        (7, [('step',), ('weights',)])
    """

    step: int
    tensors: Parts
    plain: dict[Keys, Any]  # all other values


def hold_state(state: dict[str, Any], *, step: int) -> HeldState:
    """Keep this rank's part of ``state``. No communication, and no copy of DTensors: they are those of the job.

    Call it when the job has failed, before its process groups are destroyed.

    Args:
        state: What would be saved: nested dicts and lists with DTensors (see the checkpointing guide), numbers, plain
            tensors.
        step: Optimizer steps that this rank has completed: count it right after ``optimizer.step()``.

    Returns:
        A :class:`HeldState` for :func:`recover_state` or :func:`leave_state`.

    Example:
        >>> mesh = nonuniform_mesh("cpu", replicas=[[0, 1], [2, 3]])
        >>> model = gtp_shard(nn.Linear(64, 64), mesh.weights)
        >>> held = hold_state({"model": model.state_dict(), "epoch": 3}, step=7)
        >>> sorted(held.tensors)
        [('model', 'bias'), ('model', 'weight')]
    """
    held = HeldState(step, {}, {})
    for keys, _, value in _leaves(state):
        if isinstance(value, DTensor):
            held.tensors[keys] = (_box_of(value), compat.local_tensor(value).detach())
        elif isinstance(value, Tensor) and value.device.type != "cpu":
            held.plain[keys] = value.detach().cpu()  # each rank brings it to its own device
        else:
            held.plain[keys] = copy.deepcopy(value)  # the job may still change them
    return held


class _Part(NamedTuple):
    box: Box
    shape: tuple[int, ...]
    dtype: torch.dtype


class _Report(NamedTuple):
    """What a rank tells the others."""

    step: int
    held: dict[Keys, tuple[Box, torch.dtype]]
    wanted: dict[Keys, _Part]
    held_plain: dict[Keys, int | None]  # bytes of values that are no DTensors; None: an empty dict
    wanted_plain: dict[Keys, bool]  # whether they are tensors

    # Ranks send each other JSON, which takes plain tuples and no named ones.
    def as_sent(self) -> tuple[Any, ...]:
        held = {keys: (tuple(box), dtype) for keys, (box, dtype) in self.held.items()}
        wanted = {keys: (tuple(part.box), *part[1:]) for keys, part in self.wanted.items()}
        return self.step, held, wanted, self.held_plain, self.wanted_plain

    @classmethod
    def of_sent(cls, sent: tuple[Any, ...]) -> _Report:
        step, held, wanted, *plain = sent
        return cls(
            step,
            {keys: (Box(*box), dtype) for keys, (box, dtype) in held.items()},
            {keys: _Part(Box(*box), *rest) for keys, (box, *rest) in wanted.items()},
            *plain,
        )


def recover_state(
    held: HeldState | None, state: dict[str, Any], mesh: ElasticMesh, *, chunk_nbytes: int = 256 << 20
) -> int:
    """Fill ``state`` from what the ranks of ``mesh``, the new one, hold. Collective over all of them.

    At a failure, some ranks may be before the last optimizer step and some after it. The latest step that is complete
    is used and returned: replicas that did not complete it get it from those that did.

    Args:
        held: What this rank has, None if it is new.
        state: State of the job that was built on ``mesh``: as for ``dcp.load``, its tensors are written in place, other
            values and lists of them are replaced. Ranks that have the step that is taken keep their values that are no
            DTensors. What a rank does not have it gets from the lowest of these ranks that has it: a new rank all
            values, and the new owner of a parameter its state in an optimizer of :func:`~dtensor_gtp.optim.gathered`.
        mesh: The new one.
        chunk_nbytes: Bytes that a rank exchanges at a time, about.

    Returns:
        The number of optimizer steps of the state that was taken.

    Raises:
        ValueError: The held state is that of another model.
        TypeError: A rank needs a value that is neither a tensor nor a plain one: numbers, strings, tuples.
        StateLostError: A part of the state is on none of the ranks. All three are raised on all ranks.

    Example:
        >>> old = nonuniform_mesh("cpu", replicas=[[0, 1], [2, 3]])
        >>> model = gtp_shard(nn.Linear(64, 64), old.weights)
        >>> held = hold_state({"model": model.state_dict()}, step=7)
        >>> mesh = nonuniform_mesh("cpu", replicas=[[0], [1, 2, 3]])
        >>> model = gtp_shard(nn.Linear(64, 64), mesh.weights)
        >>> recover_state(held, {"model": model.state_dict()}, mesh)
        7
    """
    leaves = {keys: value for keys, _, value in _leaves(state)}
    wanted = {keys: value for keys, value in leaves.items() if isinstance(value, DTensor)}
    if held is None:
        held = HeldState(_NEW, {}, {})
    own = _Report(
        held.step,
        {keys: (box, part.dtype) for keys, (box, part) in held.tensors.items()},
        {keys: _Part(_box_of(value), tuple(value.shape), value.dtype) for keys, value in wanted.items()},
        {keys: _nbytes_of(value) for keys, value in held.plain.items()},
        {keys: isinstance(value, Tensor) for keys, value in leaves.items() if keys not in wanted},
    )
    # Then all ranks compute the same plan.
    reports = list(map(_Report.of_sent, all_gather_values(own.as_sent(), mesh.world.get_group())))
    step, moves = _latest_complete_step(reports, {rank: place.replica for rank, place in mesh.layout.places.items()})
    if held.step != step:  # parts of another step must not be mixed in
        held = HeldState(_NEW, {}, {})
    targets = {keys: (own.wanted[keys].box, compat.local_tensor(value)) for keys, value in wanted.items()}
    chunks = list(_chunks(moves, own.wanted, chunk_nbytes * len(reports)))  # the limit is for all ranks together
    with torch.no_grad(), Progress(_LOG, f"recovery of the state after step {step}", len(chunks)) as progress:
        for chunk in progress.over(chunks):
            _exchange(chunk, held.tensors, targets, mesh)
        _fill_plain(state, _shared_values(held.plain, reports, step, mesh, chunk_nbytes) | held.plain)
    return step


def _latest_complete_step(reports: Sequence[_Report], replica_of: Mapping[int, int]) -> tuple[int, Moves]:
    steps = {rank: report.step for rank, report in enumerate(reports) if report.step != _NEW}
    if not steps:
        raise StateLostError("recover_state expects ranks that hold state, but there are none. Load a checkpoint.")
    lost = ""  # what the error names: the first that is missing of the latest step
    # The latest step first. An older one is taken only if a part of each later one is on no rank.
    for step in sorted(set(steps.values()), reverse=True):
        moves, missing = _moves_of_step(reports, step, replica_of)
        missing = missing or _lost_value(reports, step)
        if not missing:
            return step, moves
        lost = lost or f"{missing} after step {step}"
    raise StateLostError(
        f"recover_state expects each part of the state on some remaining rank, but {lost} is on none of the ranks "
        f"{list(steps)}. Load a checkpoint."
    )


def _moves_of_step(reports: Sequence[_Report], step: int, replica_of: Mapping[int, int]) -> tuple[Moves, str]:
    """How the DTensors of a step get to their places, and the first part that no rank has; empty if there is none."""
    sources = {rank: report.held for rank, report in enumerate(reports) if report.step == step}
    moves: Moves = {}
    known_plans: dict[Any, Any] = {}
    for keys, part in reports[0].wanted.items():  # all ranks want the same tensors
        wanted = {rank: report.wanted[keys].box for rank, report in enumerate(reports)}
        held = {rank: tensors[keys] for rank, tensors in sources.items() if keys in tensors}
        _check_same_model(keys, part, list(held.values()))
        boxes = {rank: box for rank, (box, _) in held.items()}
        cut = (tuple(wanted.items()), tuple(boxes.items()))  # layers repeat: cut alike, tensors move alike
        if cut not in known_plans:
            known_plans[cut] = plan_moves(boxes, wanted, replica_of)
        moves[keys], missing = known_plans[cut]
        if missing:
            box = missing[0][1]
            return moves, f"part {box.offset}+{box.size} of '{'.'.join(map(str, keys))}'"
    return moves, ""


def _lost_value(reports: Sequence[_Report], step: int) -> str:
    """A tensor that a rank needs where others hold an empty dict alone: the state of a parameter in ``gathered``
    optimizers, whose owner is gone. Other values that no rank has are new in the state."""
    held: set[Keys] = set()
    empty: set[Keys] = set()
    for report in reports:
        if report.step == step:
            held |= report.held_plain.keys()
            empty |= {keys for keys, nbytes in report.held_plain.items() if nbytes is None}
    for report in reports:
        for keys, is_tensor in report.wanted_plain.items():
            if is_tensor and keys not in held and any(keys[:length] in empty for length in range(1, len(keys))):
                return f"'{'.'.join(map(str, keys))}'"
    return ""


def _check_same_model(keys: Keys, part: _Part, held: Sequence[tuple[Box, torch.dtype]]) -> None:
    dtypes = {dtype for _, dtype in held}  # empty if no rank holds any of it
    fits = all(
        len(box.size) == len(part.shape) and all(o + n <= s for o, n, s in zip(*box, part.shape, strict=True))
        for box, _ in held
    )
    if not fits or dtypes != {part.dtype}:
        boxes = sorted({box for box, _ in held})
        got = "nothing of it"
        if held:
            got = f"parts {boxes} of {sorted(map(str, dtypes))}"
        raise ValueError(
            "recover_state expects the state of the same model, but the model on the new mesh has "
            f"'{'.'.join(map(str, keys))}' of shape {part.shape} and {part.dtype}, and the remaining ranks hold "
            f"{got}."
        )


def _chunks(moves: Moves, wanted: Mapping[Keys, _Part], limit: int) -> Iterator[Moves]:
    """The moves in portions of about ``limit`` bytes over all ranks; one dtype each."""
    chunk: Moves = {}
    nbytes = 0
    dtype = None
    for keys, of_tensor in moves.items():
        if chunk and (nbytes >= limit or wanted[keys].dtype != dtype):  # a chunk is sent flat, in one dtype
            yield chunk
            chunk = {}
            nbytes = 0
        chunk[keys], dtype = of_tensor, wanted[keys].dtype
        # What stays on its rank is not sent.
        nbytes += sum(move.box.numel for move in of_tensor if move.source != move.target) * dtype.itemsize
    if chunk:
        yield chunk


def _exchange(chunk: Moves, sources: Parts, targets: Parts, mesh: ElasticMesh) -> None:
    """Copy what stays on this rank; all-to-all of the rest, in the order (keys, move) between any two ranks."""
    rank = dist.get_rank()
    sent: list[list[Tensor]] = [[] for _ in mesh.layout.places]  # by target
    received: list[list[Tensor]] = [[] for _ in mesh.layout.places]  # by source
    for keys, moves in chunk.items():
        for source, target, box in moves:
            if source == rank:
                outer, part = sources[keys]
                sent[target].append(part[box.within(outer)])
            if target == rank:
                outer, part = targets[keys]
                received[source].append(part[box.within(outer)])
    # Both lists come from one list of moves, so they are in one order.
    for part, kept in zip(received[rank], sent[rank], strict=True):
        part.copy_(kept)
    # done: nothing of it is sent
    sent[rank] = []
    received[rank] = []
    # Moves are the same on all ranks: all return here, or none does.
    if all(move.source == move.target for moves in chunk.values() for move in moves):
        return
    # In front, because a rank may have nothing to send, and ``cat`` takes no empty list.
    empty = torch.empty(0, dtype=targets[next(iter(chunk))][1].dtype, device=device_of(mesh.world))
    outbox = torch.cat([empty, *(part.reshape(-1).to(empty.device) for part in chain.from_iterable(sent))])
    sizes, expected = ([sum(part.numel() for part in parts) for parts in lists] for lists in (sent, received))
    inbox = empty.new_empty(sum(expected))  # in the order of the ranks that send
    dist.all_to_all_single(inbox, outbox, expected, sizes, group=mesh.world.get_group())
    incoming = list(chain.from_iterable(received))
    for part, values in zip(incoming, inbox.split([part.numel() for part in incoming]), strict=True):
        part.copy_(values.view(part.shape))


def _shared_values(
    own: dict[Keys, Any], reports: Sequence[_Report], step: int, mesh: ElasticMesh, limit: int
) -> dict[Keys, Any]:
    """Values that are no DTensors and that a rank needs from another one: of the lowest rank that has them."""
    givers: dict[Keys, int] = {}
    lacking: set[Keys] = set()  # on any rank, so that all take part in a broadcast or none
    for rank, report in enumerate(reports):
        present = {}
        if report.step == step:
            present = report.held_plain
        for keys in present:
            givers.setdefault(keys, rank)
        lacking |= report.wanted_plain.keys() - present.keys()
    rank = dist.get_rank(mesh.world.get_group())
    shared: dict[Keys, Any] = {}
    for giver in sorted(set(givers.values())):
        nbytes = 0
        portion = []
        needed = [keys for keys, source in givers.items() if source == giver and keys in lacking]
        for index, keys in enumerate(needed, 1):
            portion.append(keys)
            nbytes += reports[giver].held_plain[keys] or 0
            if nbytes < limit and index < len(needed):
                continue
            sent = None
            if giver == rank:
                sent = {keys: own[keys] for keys in portion}
            received = broadcast_value(sent, mesh.world.get_group(), giver)
            shared |= {keys: value for keys, value in received.items() if keys in reports[rank].wanted_plain}
            nbytes = 0
            portion = []
    return shared


def _fill_plain(state: dict[str, Any], values: dict[Keys, Any]) -> None:
    """Write or replace what is no DTensor. A key that no rank had keeps its value."""
    for keys, container, value in list(_leaves(state)):  # a list, because the loop writes to the containers
        if isinstance(value, DTensor) or keys not in values:
            continue
        found = values[keys]
        are_tensors = isinstance(value, Tensor) and isinstance(found, Tensor)
        if are_tensors and value.shape == found.shape:
            value.copy_(found)
        else:
            container[keys[-1]] = found.to(value.device) if are_tensors else found


def _leaves(tree: Any, keys: Keys = ()) -> Iterator[tuple[Keys, Any, Any]]:
    """(keys, container, value) of everything in nested dicts and lists. Empty dicts, and lists without tensors and
    dicts, are values as well."""
    for key, value in tree.items() if isinstance(tree, dict) else enumerate(tree):
        if isinstance(value, dict | list) and not _is_value(value):
            yield from _leaves(value, (*keys, key))
        else:
            yield (*keys, key), tree, value


def _nbytes_of(value: Any) -> int | None:
    if isinstance(value, dict):  # only an empty one is a value
        return None
    if isinstance(value, Tensor):
        return value.nbytes
    return 0


def _is_value(value: Any) -> bool:
    """As ``torch.distributed.checkpoint`` divides a state dict into what it stores, but for empty dicts, which it
    leaves out: here they are values."""
    if isinstance(value, list):
        return all(map(_is_value, value))
    if isinstance(value, dict):
        return not value
    return not isinstance(value, Tensor)


def _box_of(tensor: DTensor) -> Box:
    shape, offset = compat.local_shape_and_offset(tensor)
    return Box(offset, shape)
