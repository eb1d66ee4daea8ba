"""Random numbers per mesh axis: the same on ranks that must agree, different on all others.

Every rank has two streams:

- torch's default generators (CPU and this rank's device), from which stock code draws. ``MeshRNG`` seeds them with
  different seeds along the data axes and ``pp``, and the same seed along ``tp``, as dropout needs outside of
  sequence-parallel regions.
- a CPU generator with the same state on all ranks, from which only ``fork`` draws.

``fork(*axes)`` seeds torch's default generators, for as long as it lasts, with a hash of a number from one of the two
streams and of this rank's coordinates on ``axes``. So ranks along ``axes`` draw different numbers in it, and all others
the same. If ``axes`` contains all data axes, the number comes from the default CPU generator, which is the same on the
ranks that must agree; otherwise it comes from the common generator.

Along ``pp`` everything differs, in each region: stages hold other layers, which must not begin with the same weights,
and may enter other numbers of regions.

Other trackers keep a state per region. But activation checkpointing restores torch's default generators alone when it
recomputes. A region that starts from them draws the same numbers again, in every kind of checkpointing. And a
checkpoint holds two states instead of one per region.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from . import _torch_compat as compat

DENSE_AXES = ("pp", "replicate", "dp", "cp", "gtp", "tp")
"""Axes of ``WeightMesh.dense`` in their order.

Example:
    >>> DENSE_AXES
    ('pp', 'replicate', 'dp', 'cp', 'gtp', 'tp')
"""
EXPERT_AXES = ("pp", "replicate", "expert_dp", "ep", "expert_gtp", "expert_tp")
"""Axes of ``WeightMesh.expert`` in their order.

Example:
    >>> EXPERT_AXES
    ('pp', 'replicate', 'expert_dp', 'ep', 'expert_gtp', 'expert_tp')
"""
DATA_AXES = ("replicate", "dp", "cp", "gtp")
"""Axes whose ranks see different data.

Example:
    >>> DATA_AXES
    ('replicate', 'dp', 'cp', 'gtp')
"""
_REGIONS = {"params": ("pp",), "sequence_parallel": DENSE_AXES}
_COMMON = "common"  # the common generator, in seeds and checkpoints


class MeshRNG:
    """The random number streams of one rank of a :class:`WeightMesh`. It is ``Stateful``: put it into a checkpoint.

    Making one seeds torch's default generators of this process, and on CUDA DTensor's tracker, whose first random op
    would otherwise give all ranks the state of rank 0. Do not call ``torch.manual_seed`` with one number on all ranks
    afterwards: dropout would be alike along the data axes.

    Args:
        dense: Mesh with the axes (pp, replicate, dp, cp, gtp, tp).
        expert: Mesh of the same ranks with the axes (pp, replicate, expert_dp, ep, expert_gtp, expert_tp).
        seed: The same integer on all ranks.

    Source: Megatron-LM's ``CudaRNGStatesTracker`` keeps a state for each name; here states are derived.

    Example:
        >>> rng = init_weight_mesh("cpu", gtp=4, seed=1).rng
        >>> with rng.fork("params"):  # the same on all ranks
        ...     model = nn.Linear(64, 64)
        >>> streams = rng.state_dict()  # goes into a checkpoint
        >>> before = torch.rand(3)
        >>> rng.load_state_dict(streams)
        >>> torch.equal(torch.rand(3), before)
        True
        >>> rng.manual_seed(2)
    """

    def __init__(self, dense: DeviceMesh, expert: DeviceMesh, seed: int) -> None:
        self._coordinates = _coordinates(expert) | _coordinates(dense)
        self._sizes = dict(zip(DENSE_AXES, dense.shape, strict=True))
        self._device_type = dense.device_type
        self._device_index: int | None = None
        if self._device_type != "cpu" and self._device_module().is_available():
            self._device_index = self._device_module().current_device()
            compat.seed_dtensor_rng(seed, dense)
        self._regions: compat.RegionStates | None = None  # for CUDA graphs
        if self._device_type == "cuda" and self._device_index is not None:
            self._regions = compat.RegionStates(self._device_index)
        self._common = torch.Generator()
        self._num_open_forks = 0
        self.manual_seed(seed)

    def manual_seed(self, seed: int) -> None:
        """Seed all streams again, e.g. after a load onto a mesh of other sizes, for which no streams were saved.

        Args:
            seed: The same integer on all ranks.

        Raises:
            RuntimeError: Inside a region.
        """
        self._refuse_in_region("manual_seed")
        self._common.manual_seed(_mix(seed, _COMMON))
        if self._regions is not None:
            self._regions.seed_again(lambda names: self._seed_of(names, _mix(seed, "graph", names)))
        self._seed_default(_mix(seed, "data", *(self._coordinates[axis] for axis in ("pp", *DATA_AXES))))

    @contextmanager
    def fork(self, *axes: str) -> Iterator[None]:
        """A region in which ranks along ``axes`` and ``pp`` draw different numbers, and along all other axes the same.

        In the region, torch's default generators of the CPU and of this rank's device have another seed; at the end
        their states are restored. Ranks that must agree must enter the same regions in the same order. Each region
        draws other numbers than the one before.

        Recomputation by activation checkpointing draws the same numbers again if ``axes`` contains all data axes
        (``preserve_rng_state`` must be on, as it is by default, and a selective policy must not keep random ops); other
        regions refuse it. Not supported: a region in a function under ``torch.compile(fullgraph=True)``. Without
        ``fullgraph`` a region breaks the graph.

        ``capture_step`` and ``capture_blocks`` record regions that an eager step has entered before. Replays draw from
        a state of the graph's own for each set of axes, other numbers each time, and not those of eager steps. No
        checkpoint has it. Other captures are refused.

        Args:
            axes: Names of axes of one view of the mesh, dense or expert; or one of

                - ``"params"``: the same on all ranks of a stage. For building a model that is sharded afterwards, and
                  for the random initialization of DTensors: on meshes of ``gtp_shard`` each is drawn whole, and a rank
                  keeps its part. On other meshes DTensor offsets the shards, on CUDA only. Code that fills plain
                  tensors with its own shard names the axes that split the weight, as in ``fork("gtp", "tp")``.
                - ``"sequence_parallel"``: different along all axes, for plain activations that are split along tp, too.
                  DTensors that are sharded along tp need no region on CUDA, because DTensor offsets the shards.

        Raises:
            ValueError: Unknown names, or axes of both views.
            RuntimeError: In a recomputation or a CUDA graph that may not have it, see above.
        """
        names = self._resolve(axes)
        is_recorded = self._regions is not None and compat.is_stream_capturing()
        with self._recorded(names) if is_recorded else self._seeded(names):
            self._num_open_forks += 1
            try:
                yield
            finally:
                self._num_open_forks -= 1

    @contextmanager
    def _seeded(self, names: tuple[str, ...]) -> Iterator[None]:
        """A region in eager code."""
        seed = self._seed_of(names, self._draw(names))
        if self._regions is not None:
            self._regions.prepare(names, _mix(seed, "graph"))
        if self._device_index is None:
            devices = []
        else:
            devices = [self._device_index]
        with torch.random.fork_rng(devices=devices, device_type=self._device_type if devices else "cuda"):
            self._seed_default(seed)
            yield

    def _seed_of(self, names: tuple[str, ...], number: int) -> int:
        """From a number that is the same on all ranks that must agree, and this rank's coordinates."""
        return _mix(number, *((axis, self._coordinates[axis]) for axis in names))

    def _recorded(self, names: tuple[str, ...]) -> AbstractContextManager[None]:
        """A region in a CUDA graph."""
        assert self._regions is not None
        if not self._regions.is_registered(names):
            raise RuntimeError(
                "fork_rng cannot be entered while a CUDA graph is captured, because a replay would draw the same "
                "numbers again, unless capture_step or capture_blocks captures it and an eager step has entered the "
                f"same axes before ({', '.join(names)}). Record the step with capture_step, or enter the region around "
                "the capture."
            )
        if _is_in_recomputation():
            raise RuntimeError(
                "In a CUDA graph, fork_rng cannot be entered in a function that activation checkpointing recomputes, "
                "which would draw other numbers than the first time. Draw before the checkpointed function and pass "
                "the result to it."
            )
        return self._regions.entered(names)

    def state_dict(self) -> dict[str, Any]:
        """The states of this rank's streams, under a key with the sizes of the mesh and the rank's position in it.

        So each rank of a mesh finds its own states, also with permuted ranks. On a mesh of other sizes ``dcp.load``
        says that the key is missing: leave the streams out of what is loaded there, and call :meth:`manual_seed`.

        Returns:
            ``{sizes: {place: {"common": ..., "cpu": ..., device type: ...}}}``, uint8 tensors on the CPU.

        Raises:
            RuntimeError: Inside a region.
        """
        self._refuse_in_region("state_dict")
        states = {_COMMON: self._common.get_state(), "cpu": torch.get_rng_state()}
        if self._device_index is not None:
            states[self._device_type] = self._device_module().get_rng_state(self._device_index)
        return {self._mesh_key(): {self._place_key(): states}}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue the streams where they were when ``state_dict`` was made, bit for bit.

        Args:
            state_dict: What :meth:`state_dict` has given on a mesh of the same sizes.

        Raises:
            ValueError: It was made on a mesh of other sizes, by another rank, or for another device.
            RuntimeError: Inside a region.
        """
        self._refuse_in_region("load_state_dict")
        places = state_dict.get(self._mesh_key())
        states = (places or {}).get(self._place_key())
        if states is None:
            raise ValueError(
                f"MeshRNG expects the states of place {self._place_key()} on a mesh with {self._mesh_key()}, but got "
                f"{ {mesh: list(places) for mesh, places in state_dict.items()} }. On a mesh of other sizes leave the "
                "streams out of what is loaded and call manual_seed."
            )
        if self._device_index is None:
            devices = {"cpu"}
        else:
            devices = {"cpu", self._device_type}
        if set(states) != devices | {_COMMON}:
            raise ValueError(
                f"MeshRNG expects states for {sorted(devices)}, but got {sorted(set(states) - {_COMMON})}. Random "
                "numbers cannot continue on another kind of device. Leave the streams out and call manual_seed."
            )
        self._common.set_state(states[_COMMON].cpu())
        torch.set_rng_state(states["cpu"].cpu())
        if self._device_index is not None:
            self._device_module().set_rng_state(states[self._device_type].cpu(), self._device_index)

    def _device_module(self) -> Any:
        return torch.get_device_module(self._device_type)

    def _mesh_key(self) -> str:
        return ",".join(f"{axis}={size}" for axis, size in self._sizes.items())

    def _place_key(self) -> str:
        return "-".join(str(self._coordinates[axis]) for axis in DENSE_AXES)

    @torch.compiler.disable(reason="fork_rng seeds torch's generators")  # type: ignore[untyped-decorator]
    def _seed_default(self, seed: int) -> None:
        torch.default_generator.manual_seed(seed)
        if self._device_index is not None:
            # Only the current device: other devices may belong to other ranks or to the user.
            with self._device_module().device(self._device_index):
                self._device_module().manual_seed(seed)

    def _resolve(self, axes: Sequence[str]) -> tuple[str, ...]:
        if len(axes) == 1 and axes[0] in _REGIONS:
            return _REGIONS[axes[0]]
        for view in (DENSE_AXES, EXPERT_AXES):
            if axes and set(axes) <= set(view):
                return tuple(axis for axis in view if axis in axes or axis == "pp")
        raise ValueError(
            f"fork_rng expects axes of one view, {DENSE_AXES} or {EXPERT_AXES}, or one of {tuple(_REGIONS)}, but got "
            f"{tuple(axes)}."
        )

    @torch.compiler.disable(reason="fork_rng reads a random number on the host")  # type: ignore[untyped-decorator]
    def _draw(self, names: tuple[str, ...]) -> int:
        """A number that is the same on all ranks with the same coordinates on ``names``, another one each time."""
        generator = None
        if set(names) not in (set(DENSE_AXES), set(EXPERT_AXES)) and not set(DATA_AXES) <= set(names):
            if _is_in_recomputation():
                raise RuntimeError(
                    "In a function that activation checkpointing recomputes, fork_rng expects a region that differs "
                    f"along all data axes {DATA_AXES}, but got {names[1:] or ('params',)}, which would draw other "
                    "numbers than the first time. Draw before the checkpointed function and pass the result to it."
                )
            generator = self._common
        return int(torch.randint(2**63 - 1, (), generator=generator, device="cpu").item())

    def _refuse_in_region(self, what: str) -> None:
        if self._num_open_forks:
            raise RuntimeError(
                f"MeshRNG.{what} was called inside fork_rng, whose states are temporary. Call it outside."
            )


def _is_in_recomputation() -> bool:
    """Gradients are enabled in one, and disabled in a custom backward that draws."""
    return compat.current_graph_task_id() != -1 and torch.is_grad_enabled()


def _coordinates(mesh: DeviceMesh) -> dict[str, int]:
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    assert mesh.mesh_dim_names is not None
    return dict(zip(mesh.mesh_dim_names, coordinate, strict=True))


def _mix(*parts: Any) -> int:
    """A seed in [0, 2**63) from integers and strings; any change of any of them gives an unrelated one."""
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


__all__ = ["DATA_AXES", "DENSE_AXES", "EXPERT_AXES", "MeshRNG"]
