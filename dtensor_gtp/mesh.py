"""``init_weight_mesh``: named meshes over all ranks from sizes of axes. It also sets up device, process group and RNG.

There are two views of the same ranks ("parallel folding"): dense layers use the axes

    (pp, replicate, dp, cp, gtp, tp)                        pp * replicate * dp * cp * gtp * tp == number of ranks

and mixture-of-experts layers the axes

    (pp, replicate, expert_dp, ep, expert_gtp, expert_tp)   expert_dp is what the others leave

Both are row-major over one list of ranks: the axis on the right changes fastest, so ranks of a tp (expert_tp) group are
neighbours. ``pp`` and ``replicate`` are the same axes in both. The other expert axes divide the ranks of dp, cp, gtp
and tp in another way: with ``expert_tp=1``, ranks that share a dense layer along tp work on different experts, or on
different rows of them.

All meshes are sub-meshes of one 1-D root, so ``gtp_shard`` and ``fully_shard`` can shard tensor-parallel DTensors
again.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from . import _torch_compat as compat
from ._comm.agreement import agree_on_all_ranks
from ._comm.process_groups import (
    check_device,
    default_device_type,
    device_types,
    set_device,
    start_process_group,
    world_mesh,
    world_size,
)
from .random import DATA_AXES, DENSE_AXES, EXPERT_AXES, MeshRNG

_MAX_GROUPS = 8  # groups of an axis that are printed


@dataclass(frozen=True, eq=False, repr=False)
class WeightMesh:
    """Named meshes over the same ranks, and this rank's random number streams. Made by :func:`init_weight_mesh`.

    ``mesh["gtp"]``, ``mesh["dp", "gtp"]`` or ``mesh["ep"]`` is the sub-mesh of these axes. ``print(mesh)`` shows the
    groups of every axis.

    Args:
        dense: Axes (pp, replicate, dp, cp, gtp, tp), for all layers but experts.
        expert: Axes (pp, replicate, expert_dp, ep, expert_gtp, expert_tp) over the same ranks, for experts.
        data: 1-D over replicate, dp, cp and gtp: the ranks that see different data, over which a loss is averaged.
        batch: 1-D over replicate, dp and gtp: the ranks that see different samples, for a sampler's rank and number of
            replicas. Ranks along cp see different parts of the same sequences.
        weights: For ``gtp_shard``: 2-D, all ranks that hold copies of a shard (replicate, dp and cp) by gtp; the 1-D
            gtp axis if there are no copies. Under an outer ``fully_shard`` over dp pass ``mesh["gtp"]`` instead.
        expert_weights: The same for experts: the ranks along replicate and expert_dp, by expert_gtp.
        rng: Random number streams of this rank; put it into checkpoints.

    If only one of several flattened axes is larger than 1, the mesh is that axis, under its own name: no process group
    is made twice.

    Example:
        >>> mesh = init_weight_mesh("cpu", replicate=2, gtp=2)
        >>> mesh["gtp"].size(), mesh.weights.shape, mesh.data.size()
        (2, (2, 2), 4)
        >>> with mesh.fork_rng("params"):  # all ranks draw the same weights
        ...     model = nn.Linear(64, 64)
        >>> gtp_shard(model, mesh.weights).weight.placements
        (Replicate(), GTPShard(dim=0))
    """

    dense: DeviceMesh
    expert: DeviceMesh
    data: DeviceMesh
    batch: DeviceMesh
    weights: DeviceMesh
    expert_weights: DeviceMesh
    rng: MeshRNG

    def __getitem__(self, axes: str | tuple[str, ...]) -> DeviceMesh:
        """The sub-mesh of one or more axes, named in the order of their view.

        Raises:
            KeyError: Unknown axes, axes of both views, or another order.
        """
        names = (axes,) if isinstance(axes, str) else tuple(axes)
        for view, of_view in ((self.dense, DENSE_AXES), (self.expert, EXPERT_AXES)):
            if names and names == tuple(axis for axis in of_view if axis in names):
                return view[names]
        raise KeyError(
            f"WeightMesh expects axes of one view in its order, {DENSE_AXES} or {EXPERT_AXES}, but got {names}."
        )

    def flatten(self, *axes: str) -> DeviceMesh:
        """A 1-D mesh over several axes of one view.

        It makes a process group unless there is one already: call it on all ranks.

        Args:
            axes: Names in the order of their view.

        Returns:
            A mesh whose one axis has the names joined by underscores, or the one of these axes that is larger than 1.

        Raises:
            KeyError: As for ``mesh[axes]``.

        Example:
            >>> mesh = init_weight_mesh("cpu", dp=2, cp=2)
            >>> mesh.flatten("dp", "cp").size()  # for an outer fully_shard
            4
        """
        return _flatten(self[axes], "_".join(axes))

    def fork_rng(self, *axes: str) -> AbstractContextManager[None]:
        """In the context, ranks along ``axes`` draw different numbers and others of the stage the same:
        :meth:`MeshRNG.fork`.

        Args:
            axes: ``"params"`` for building and initializing models, ``"sequence_parallel"`` for dropout on activations
                that are split along tp, or names of axes: ``"gtp", "tp"`` for code that fills its own weight shards.

        Raises:
            ValueError: Unknown names, or axes of both views.
            RuntimeError: In a recomputation or while a CUDA graph is captured.

        Example:
            >>> mesh = init_weight_mesh("cpu", gtp=4)
            >>> with mesh.fork_rng("params"):
            ...     model = nn.Linear(64, 64)  # equal on all ranks of a stage
        """
        return self.rng.fork(*axes)

    def __repr__(self) -> str:
        rank = int(self.dense.mesh[self.dense.get_coordinate()])
        lines = [f"WeightMesh of {self.dense.size()} {self.dense.device_type} ranks (this is rank {rank})"]
        for title, view in (("dense", self.dense), ("expert", self.expert)):
            lines.append(f"  {title}")
            width = max(map(len, EXPERT_AXES))
            for axis, (name, size) in enumerate(zip(view.mesh_dim_names or (), view.shape, strict=True)):
                groups = view.mesh.movedim(axis, -1).reshape(-1, size).tolist() if size > 1 else []
                shown = " ".join(map(_format_group, groups[:_MAX_GROUPS]))
                more = f" and {len(groups) - _MAX_GROUPS} more" if len(groups) > _MAX_GROUPS else ""
                lines.append(f"    {name:<{width}} {size:>4}  {shown}{more}".rstrip())
        return "\n".join(lines)


def init_weight_mesh(
    device_type: str | None = None,
    *,
    replicate: int = 1,
    dp: int = 1,
    gtp: int = 1,
    tp: int = 1,
    cp: int = 1,
    ep: int = 1,
    expert_gtp: int = 1,
    expert_tp: int = 1,
    pp: int = 1,
    rank_order: Sequence[int] | None = None,
    seed: int = 0,
    backend: str | None = None,
    timeout: timedelta | None = None,
) -> WeightMesh:
    """Build the meshes of a model that is sharded over several axes, and set up what the model needs before it is
    built.

    The steps are: check the arguments; set this process's device from ``LOCAL_RANK``; initialize the default process
    group, if there is none, from the environment of ``torchrun``; compare the arguments of all ranks; make the groups;
    seed torch's default generators, with different seeds along pp and the data axes (replicate, dp, cp, gtp) and the
    same along tp. Build the model under ``mesh.fork_rng("params")``, in which all ranks of a stage draw the same
    numbers.

    Args:
        device_type: ``"cuda"``, ``"cpu"`` or another device type of torch. Default: the accelerator of this process, or
            ``"cpu"`` if it has none or if the existing process group is one of gloo.
        replicate: Copies of everything.
        dp: Outer data parallelism, e.g. for ``fully_shard``.
        gtp: Ranks over which ``gtp_shard`` splits weights; they see different data.
        tp: Tensor-parallel ranks; they see the same data.
        cp: Context-parallel ranks; they see different parts of the same sequences.
        ep: Ranks over which experts are distributed.
        expert_gtp: Ranks over which ``gtp_shard`` splits the weights of each expert.
        expert_tp: Tensor-parallel ranks of each expert. ``pp * replicate * ep * expert_gtp * expert_tp`` divides the
            number of ranks; the quotient is the axis ``expert_dp``, along which experts are replicated.
        pp: Stages of a pipeline. Each has all other axes, with its own part of the model.
        rank_order: The processes in row-major order of the dense axes: a permutation of the numbers in ``RANK``. The
            process group that this call initializes counts ranks in this order, so ``dist.get_rank()`` is the position
            in it (``RANK`` does not change). An existing process group cannot be reordered, because torch's subgroups
            count their ranks in ascending order.
        seed: Seed of the random number streams; the same on all ranks.
        backend: For ``init_process_group``. Default: ``"nccl"`` for cuda, ``"gloo"`` for cpu, else torch's choice.
        timeout: For ``init_process_group``, of collectives and of the rendezvous.

    Returns:
        The :class:`WeightMesh` of this rank.

    Raises:
        TypeError, ValueError: A size is not a positive integer, the product of the sizes is not the number of ranks, or
            another argument does not fit; the message says which sizes would fit.
        RuntimeError: Variables of the environment are missing, or ranks got different arguments.

    Example:
        >>> mesh = init_weight_mesh("cpu", gtp=2, tp=2, seed=1)  # on four ranks
        >>> print(mesh)
        WeightMesh of 4 cpu ranks (this is rank ...)
          dense
            pp            1
            replicate     1
            dp            1
            cp            1
            gtp           2  [0,2] [1,3]
            tp            2  [0,1] [2,3]
          ...
    """
    sizes = {"pp": pp, "replicate": replicate, "dp": dp, "cp": cp, "gtp": gtp, "tp": tp}
    expert_sizes = {"ep": ep, "expert_gtp": expert_gtp, "expert_tp": expert_tp}

    has_group = dist.is_initialized()
    device_type = default_device_type() if device_type is None else device_type

    def check() -> _Layout:
        _check_others(device_type, seed, timeout)
        layout = _Layout.of(sizes, expert_sizes, world_size(), rank_order)
        if has_group and layout.rank_order != tuple(range(len(layout.rank_order))):
            raise ValueError(
                f"init_weight_mesh cannot reorder the ranks of an existing process group to {rank_order}, because "
                "its subgroups count ranks in ascending order. Do not call init_process_group before, or pass it "
                "the new rank of this process."
            )
        set_device(device_type)
        return layout

    if not has_group:
        start_process_group(device_type, backend, timeout, check().rank_order)
    elif device_type in device_types(dist.get_backend_config()):
        check_device(device_type)  # ranks tell each other on this device what they have found
    world = world_mesh(device_type)
    layout = agree_on_all_ranks(
        world,
        check,
        lambda checked: [f"device_type={device_type!r}, {checked}, seed={seed}"],
        caller="init_weight_mesh",
        expected="the same arguments",
        remedy="Pass the same everywhere.",
    )
    group = world.get_group()
    known = _known_meshes().setdefault(group, {})
    if (device_type, layout) not in known:
        with compat.gloo_with_one_thread(group):
            known[device_type, layout] = _build(device_type, layout)
    meshes = known[device_type, layout]
    return WeightMesh(**meshes, rng=MeshRNG(meshes["dense"], meshes["expert"], seed))


@functools.cache
def _known_meshes() -> WeakKeyDictionary[dist.ProcessGroup, dict[tuple[str, _Layout], dict[str, DeviceMesh]]]:
    """Meshes by the group of all ranks: torch keeps the groups of a mesh until the end, so calls that are alike share
    them. Meshes have only the names of their groups."""
    return WeakKeyDictionary()


@dataclass(frozen=True)
class _Layout:
    """Sizes of both views in the order of their axes, and the processes in row-major order."""

    dense: tuple[int, ...]
    expert: tuple[int, ...]
    rank_order: tuple[int, ...]

    @staticmethod
    def of(
        sizes: dict[str, int], expert_sizes: dict[str, int], world_size: int, rank_order: Sequence[int] | None
    ) -> _Layout:
        """Check the sizes, and compute that of ``expert_dp``."""
        for name, size in (sizes | expert_sizes).items():
            if not isinstance(size, int) or isinstance(size, bool):
                raise TypeError(f"init_weight_mesh expects an int as {name}, but got {type(size).__name__}: {size!r}.")
            if size < 1:
                raise ValueError(f"init_weight_mesh expects {name} to be at least 1, but got {size}.")
        _check_dense_sizes(sizes, world_size)
        num_folded = world_size // (sizes["pp"] * sizes["replicate"])
        _check_expert_sizes(expert_sizes, num_folded)
        dense = tuple(sizes[axis] for axis in DENSE_AXES)
        expert_dp = num_folded // math.prod(expert_sizes.values())
        expert = (sizes["pp"], sizes["replicate"], expert_dp, *expert_sizes.values())
        order = tuple(range(world_size)) if rank_order is None else tuple(rank_order)
        if sorted(order) != list(range(world_size)):
            raise ValueError(
                f"init_weight_mesh expects rank_order to be a permutation of the ranks 0 to {world_size - 1}, but got "
                f"{list(order)}."
            )
        return _Layout(dense, expert, order)


def _check_dense_sizes(sizes: dict[str, int], world_size: int) -> None:
    num_ranks = math.prod(sizes.values())
    if num_ranks == world_size:
        return
    off = [f"{axis}={size}" for axis, size in sizes.items() if world_size % size]
    others = {axis: num_ranks // size for axis, size in sizes.items()}
    fits = [f"{axis}={world_size // rest}" for axis, rest in others.items() if world_size % rest == 0]
    problem = f"{' and '.join(off)} {'do' if len(off) > 1 else 'does'} not divide {world_size}. " if off else ""
    raise ValueError(
        f"init_weight_mesh expects {' * '.join(sizes)} to be the number of ranks, {world_size} (WORLD_SIZE), but got "
        f"{' * '.join(map(str, sizes.values()))} = {num_ranks}. {problem}{_what_fits(fits, ', ')} Or start "
        f"{num_ranks} processes (torchrun --nproc-per-node)."
    )


def _check_expert_sizes(sizes: dict[str, int], num_ranks: int) -> None:
    inner = math.prod(sizes.values())
    if num_ranks % inner == 0:
        return
    fits = []
    for name, size in sizes.items():
        rest, remainder = divmod(num_ranks, inner // size)
        if remainder == 0:
            values = [str(value) for value in range(1, rest + 1) if rest % value == 0]
            fits.append(f"{name} in {{{', '.join(values)}}}")
    raise ValueError(
        f"init_weight_mesh expects {' * '.join(sizes)} to divide dp * cp * gtp * tp = {num_ranks}, but got "
        f"{' * '.join(map(str, sizes.values()))} = {inner}. {_what_fits(fits, ' or ')}"
    )


def _what_fits(fits: list[str], separator: str) -> str:
    return f"Change one size: {separator.join(fits)}." if fits else "No change of a single size would fit."


def _check_others(device_type: str, seed: Any, timeout: Any) -> None:
    if not isinstance(device_type, str) or not device_type.isalpha():
        raise ValueError(
            f"init_weight_mesh expects a device type without an index, e.g. 'cuda', but got {device_type!r}. "
            "LOCAL_RANK chooses the device."
        )
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"init_weight_mesh expects an int as seed, but got {type(seed).__name__}: {seed!r}.")
    if timeout is not None and not isinstance(timeout, timedelta):
        raise TypeError(f"init_weight_mesh expects a timedelta as timeout, but got {type(timeout).__name__}.")
    if dist.is_initialized():
        config = dist.get_backend_config()
        if device_type not in device_types(config):
            raise ValueError(
                f"init_weight_mesh expects a process group that communicates '{device_type}' tensors, but the "
                f"existing one has the backends '{config}'. Do not call init_process_group before, or pass it "
                f"backend='{device_type}:...'."
            )


def _build(device_type: str, layout: _Layout) -> dict[str, DeviceMesh]:
    root = world_mesh(device_type)
    dense = compat.unflatten_mesh(root, layout.dense, DENSE_AXES)
    expert = compat.unflatten_mesh(root, layout.expert, EXPERT_AXES)
    copies = _flatten(dense["replicate", "dp", "cp"], "copies")
    expert_copies = _flatten(expert["replicate", "expert_dp"], "expert_copies")
    return {
        "dense": dense,
        "expert": expert,
        "data": _flatten(dense[DATA_AXES], "data"),
        "batch": _flatten(dense["replicate", "dp", "gtp"], "batch"),
        "weights": _with_copies(copies, dense["gtp"]),
        "expert_weights": _with_copies(expert_copies, expert["expert_gtp"]),
    }


def _flatten(mesh: DeviceMesh, name: str) -> DeviceMesh:
    """``mesh`` as one axis ``name``; the axis itself if only one is larger than 1, instead of its own group."""
    assert mesh.mesh_dim_names is not None
    large = [axis for axis, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True) if size > 1]
    if len(large) <= 1:
        return mesh[large[0] if large else mesh.mesh_dim_names[-1]]
    return compat.flatten_mesh(mesh, name)


def _with_copies(copies: DeviceMesh, gtp: DeviceMesh) -> DeviceMesh:
    return gtp if copies.size() == 1 else compat.concatenate_meshes([copies, gtp])


def _format_group(ranks: list[int]) -> str:
    """``[0-3]`` for consecutive ranks, else ``[0,4]``."""
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"[{ranks[0]}-{ranks[-1]}]"
    return f"[{','.join(map(str, ranks))}]"


__all__ = ["WeightMesh", "init_weight_mesh"]
