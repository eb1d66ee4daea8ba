"""What the multi-process tests share: a process-group class and the comparison with one process.

The reference is always the same model, unsharded, in one process on the concatenated batch. Gradients are compared, and
parameters after the optimizer step; never the loss alone.
"""

from __future__ import annotations

import copy
import functools
import math
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
from schedules import explicit
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.testing._internal.common_utils import TestCase
from torch.testing._internal.distributed.fake_pg import FakeStore
from workers import Test, lanes

from dtensor_gtp import GTPShard, SchedulePolicy, _torch_compat
from dtensor_gtp._modules.binding import plain_name
from dtensor_gtp.quant.master import master_of

# Test models are tiny: shard also what a real model would leave whole.
ALL = explicit(min_shard_numel=0)
NOTHING_STAYS = explicit(min_shard_numel=0, prefetch_nbytes=0)  # between two uses of a weight: each is gathered
GROUPS = SchedulePolicy(min_shard_numel=0)  # ALL has single weights

Model = nn.Module


class GlooTest(TestCase):
    """A test of several ranks, over gloo on CPU: each method runs in all workers of a pool at the same time."""

    world_size = 4
    rank: int | None = None  # of a worker; None in the process that runs the suite

    def __init__(self, method: str = "runTest") -> None:
        super().__init__(method)
        if method == "runTest":  # pytest makes one of each class without a test
            return
        self.run_on_rank = getattr(self, method)
        test = self.in_workers(method)

        @functools.wraps(self.run_on_rank)  # pytest looks for marks on it
        def run_in_workers() -> None:
            lanes().run(test)

        setattr(self, method, run_in_workers)

    @classmethod
    def in_workers(cls, method: str) -> Test:
        """A method as a test that workers run."""
        return Test(cls.world_size, cls.__module__, cls.__qualname__, method)

    def gtp_mesh(self) -> DeviceMesh:
        return _mesh((self.world_size,), ("gtp",))

    def hsdp_mesh(self, replicate: int = 2) -> DeviceMesh:
        shape = (replicate, self.world_size // replicate)
        return _mesh(shape, ("replicate", "gtp"))


@functools.cache
def _mesh(shape: tuple[int, ...], names: tuple[str, ...]) -> DeviceMesh:
    """Each mesh once for all tests of a worker: to connect its process groups takes longer than a small test."""
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


def full(tensor: torch.Tensor) -> torch.Tensor:
    """The logical value of a tensor, gathered if it is a DTensor, before quantization if it has a recipe."""
    return master_of(tensor.full_tensor() if isinstance(tensor, DTensor) else tensor)


def _params_by_name(model: nn.Module) -> dict[str, nn.Parameter]:
    """Without what the wrappers of ``torch.compile(module)`` and ``checkpoint_wrapper`` add to names."""
    return {plain_name(name): param for name, param in model.named_parameters()}


def assert_same_params(model: nn.Module, reference: nn.Module, what: str = "param", **tolerance: float) -> None:
    """Compare parameters (``what="param"``) or gradients (``what="grad"``) by name with an unsharded model."""
    expected, actual = _params_by_name(reference), _params_by_name(model)
    assert expected.keys() == actual.keys()
    for name, want in expected.items():
        a, b = (actual[name], want) if what == "param" else (actual[name].grad, want.grad)
        assert (a is None) == (b is None), f"{what} of {name}: {a is None} vs reference {b is None}"
        if a is not None:
            assert b is not None
            a, b = comparable(a, b)
            torch.testing.assert_close(a, b, msg=lambda m, n=name: f"{what} of {n}: {m}", **tolerance)


def check_update(
    model: nn.Module, reference: nn.Module, optimizers: Iterable[torch.optim.Optimizer], **tolerance: float
) -> None:
    """Gradients must agree, then parameters after a step of ``optimizers``. Then there are no gradients."""
    assert_same_params(model, reference, "grad", **tolerance)
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()
    assert_same_params(model, reference, "param", **tolerance)


def comparable(tensor: torch.Tensor, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor of the model and what it should be: this rank's own parts where the placements say what these are, which
    needs no communication; else both in full. The choice is the same on all ranks."""
    if isinstance(tensor, DTensor) and type(local := tensor.to_local()) is torch.Tensor:
        mesh, cuts = tensor.device_mesh, [p for p in tensor.placements if not p.is_replicate()]
        if all(type(cut) is Shard or (isinstance(cut, GTPShard) and cut.split_factor == 1) for cut in cuts):
            for axis, cut in enumerate(tensor.placements):
                if not cut.is_replicate():
                    parts, _ = cut._split_tensor(whole, mesh.size(axis), with_padding=False, contiguous=False)
                    whole = parts[mesh.get_local_rank(axis)]
            return local, whole
        if not any(cut.is_partial() for cut in cuts):
            for dim, (size, offset) in enumerate(zip(*_torch_compat.local_shape_and_offset(tensor), strict=True)):
                whole = whole.narrow(dim, min(offset, whole.shape[dim]), size)
            return local, whole
    return full(tensor), whole


def rows_of_rank(batch: Any, mesh: DeviceMesh) -> Any:
    """This rank's equal share of a global batch (dim 0): every rank of the mesh is a data-parallel rank."""
    index, num = _data_index(mesh)
    return torch.utils._pytree.tree_map_only(torch.Tensor, lambda t: t.chunk(num)[index], batch)


def _data_index(mesh: DeviceMesh) -> tuple[int, int]:
    index = 0
    for axis in range(mesh.ndim):
        index = index * mesh.size(axis) + mesh.get_local_rank(axis)
    return index, mesh.size()


def fused_on(mesh: DeviceMesh) -> bool | None:
    """The option ``fused`` of optimizers: torch's choice on GPUs (foreach), True on the host.

    There torch goes tensor by tensor: a dozen ops for each, which DTensor dispatches one by one.
    """
    return True if mesh.device_type == "cpu" else None


def check_training(
    reference: nn.Module,
    shard: Callable[[nn.Module], nn.Module],
    mesh: DeviceMesh,
    make_batch: Callable[[torch.Generator], Any],
    loss_fn: Callable[[nn.Module, Any], torch.Tensor],
    *,
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None = None,
    steps: int = 2,
    num_microbatches: int = 1,
    tolerance: dict[str, float] | None = None,
    between: Callable[[nn.Module, int], None] | None = None,
) -> nn.Module:
    """Train a sharded copy beside the reference; gradients and parameters must agree after every step.

    Args:
        reference: The unsharded model; it is trained on the whole batch.
        shard: Shards a copy of it.
        make_batch: A global batch; its dim 0 is a multiple of ``mesh.size() * num_microbatches``.
        make_optimizer: AdamW with ``fused_on(mesh)`` unless given.
        loss_fn: Mean loss over the batch it is given.
        between: Called with the sharded model and the step before each step.

    Returns:
        The sharded model.
    """
    tolerance = tolerance or {}
    make_optimizer = make_optimizer or (lambda params: torch.optim.AdamW(params, lr=1e-2, fused=fused_on(mesh)))
    model = shard(copy.deepcopy(reference))
    reference_optimizer = make_optimizer(list(reference.parameters()))
    optimizer = make_optimizer(list(model.parameters()))
    for step in range(steps):
        if between is not None:
            between(model, step)
        generator = torch.Generator().manual_seed(step)
        batches = [make_batch(generator) for _ in range(num_microbatches)]
        for batch in batches:
            (loss_fn(reference, batch) / num_microbatches).backward()
            (loss_fn(model, rows_of_rank(batch, mesh)) / num_microbatches).backward()
        check_update(model, reference, (reference_optimizer, optimizer), **tolerance)
    return model


@contextmanager
def fake_world(world_size: int = 4, rank: int = 0) -> Iterator[None]:
    """Be one rank of a process group whose collectives communicate nothing, in this process."""
    dist.init_process_group("fake", rank=rank, world_size=world_size, store=FakeStore())
    try:
        yield
    finally:
        dist.destroy_process_group()


@contextmanager
def fake_mesh(*shape: int, names: tuple[str, ...] = ("gtp",), rank: int = 0) -> Iterator[DeviceMesh]:
    """A mesh of a ``fake_world`` that has just its ranks."""
    with fake_world(math.prod(shape), rank):
        yield init_device_mesh("cpu", shape, mesh_dim_names=names)


@contextmanager
def shared_directory() -> Iterator[Path]:
    """A temporary directory that all ranks see, removed when all of them have left."""
    names = [tempfile.mkdtemp() if dist.get_rank() == 0 else ""]
    dist.broadcast_object_list(names)
    try:
        yield Path(names[0])
        dist.barrier()
    finally:
        if dist.get_rank() == 0:
            shutil.rmtree(names[0])


@contextmanager
def imports_as(name: str, module: object) -> Iterator[None]:
    """Let ``import name`` find ``module``, or nothing if it is None. ``mock.patch.dict`` would also undo what threads
    import meanwhile: the workers could not start any more."""
    before = sys.modules.get(name, ...)
    sys.modules[name] = module  # type: ignore[assignment]
    try:
        yield
    finally:
        if before is ...:
            sys.modules.pop(name, None)
        else:
            sys.modules[name] = before  # type: ignore[assignment]


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set environment variables for a while. ``mock.patch.dict`` would take all others away for a moment."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        yield
