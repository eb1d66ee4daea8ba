"""What the tests of checkpoints and optimizers share: a model of awkward weights, its training, and three probes."""

from __future__ import annotations

import copy
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, comparable, full, rows_of_rank, shared_directory
from runtime_common import local
from timing import HANG_S, until
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtensor_gtp import GTPShard, gtp_shard

RANK0 = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)


class Small(nn.Module):
    """Tied embedding and head, a blocked weight, one sharded on dim 1, whole parameters, a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(11, 8)
        self.linear = nn.Linear(8, 10)
        self.norm = nn.LayerNorm(10)
        self.columns = nn.Parameter(torch.randn(10, 9) * 0.3)
        self.out = nn.Linear(9, 8)
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("scale", torch.rand(9) + 0.5)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.linear(self.embedding(tokens))))
        return self.head(self.out(x @ self.columns * self.scale.to(x.dtype)))


def make(seed: int) -> Small:
    torch.manual_seed(seed)
    return Small()


def shard(model: Small, mesh: DeviceMesh, **kwargs: Any) -> Small:
    placements = {model.linear.weight: GTPShard(0, block_size=4), model.columns: GTPShard(1)}
    gtp_shard(model, mesh, schedule=ALL, shard_placement_fn=placements.get, **kwargs)
    return model


def make_sharded(seed: int, mesh: DeviceMesh, **kwargs: Any) -> Small:
    return shard(make(seed), mesh, **kwargs)


def adamw(model: nn.Module, lr: float = 1e-2) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=lr, fused=True)


def tokens_of_step(step: int) -> torch.Tensor:
    return torch.randint(0, 11, (8, 5), generator=torch.Generator().manual_seed(step))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: Iterable[int], mesh: DeviceMesh | None) -> None:
    for step in steps:
        tokens = tokens_of_step(step) if mesh is None else rows_of_rank(tokens_of_step(step), mesh)
        F.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()


def local_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Copies of all that training changes, local parts."""
    found = {}
    for name, param in model.named_parameters():
        found[name] = local(param).detach().clone()
        found |= {f"{name}/{key}": local(value).clone() for key, value in optimizer.state[param].items()}
    return found


def whole_state(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> dict[str, torch.Tensor]:
    """Copies of all that is saved of both, gathered."""
    found = {name: full(value).clone() for name, value in model.state_dict().items()}
    if optimizer is not None:
        for name, param in model.named_parameters():
            found |= {f"{name}/{key}": full(value).clone() for key, value in optimizer.state[param].items()}
    return found


def assert_same_state(actual: dict[str, Any], expected: dict[str, Any], what: object = None) -> None:
    """Bit for bit what this rank has."""
    assert actual.keys() == expected.keys(), what
    for name, value in expected.items():
        assert torch.equal(local(actual[name]), local(value)), (what, name)


def job_state(model: nn.Module, optimizer: torch.optim.Optimizer, scheduler: Any = None) -> dict[str, Any]:
    state: dict[str, Any] = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
    return state if scheduler is None else state | {"scheduler": scheduler.state_dict()}


def load_job(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> None:
    state = job_state(model, optimizer)
    dcp.load(state, checkpoint_id=path)
    set_job_state(model, optimizer, state)


def set_job_state(model: nn.Module, optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> None:
    set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class Topology(NamedTuple):
    """How a plain model is sharded and wrapped, and which part of a global batch this rank has there."""

    shard: Callable[[Any], Any]
    rows: Callable[[Any], Any]


PLAIN = Topology(lambda model: model, lambda batch: batch)


def topology(shard: Callable[[Any], Any], mesh: DeviceMesh) -> Topology:
    """Ranks along all axes of ``mesh`` see different data."""
    return Topology(shard, partial(rows_of_rank, mesh=mesh))


def momentum(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD([param for param in params if param.requires_grad], lr=0.2, momentum=0.9)


def check_reload(
    make: Callable[[int], nn.Module],
    make_batch: Callable[[int], Any],
    loss: Callable[[nn.Module, Any], torch.Tensor],
    topologies: Sequence[Topology],
    make_optimizer: Callable[[list[nn.Parameter]], torch.optim.Optimizer] = momentum,
    **tolerance: float,
) -> None:
    """Train on the first topology, save; load onto each of them, and train on there: all equal one process.

    What is compared with one process are gradients and parameters of each step, before the save and after each load,
    and optimizer states after each load. Wrappers may rename parameters, so these are compared in order.

    Args:
        make: A plain model whose values depend on the seed.
        make_batch: A global batch by the number of the step.
        loss: Of a model and a batch or the rank's part of one; wrapped modules are called as they are.
        topologies: The first one saves; it is loaded onto, too.
    """

    def job(shard: Callable[[Any], Any], seed: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = shard(make(seed))
        return module, make_optimizer(list(module.parameters()))

    def same(mine: nn.Module, theirs: nn.Module, what: str) -> None:
        names = [name for name, _ in theirs.named_parameters()]
        for name, *pair in zip(names, mine.parameters(), theirs.parameters(), strict=True):
            a, b = (param if what == "parameter" else param.grad for param in pair)
            assert (a is None) == (b is None), f"{what} of {name}: {a is None} vs reference {b is None}"
            if a is not None:
                a, b = comparable(a, b)
                torch.testing.assert_close(a, b, msg=lambda m, n=name: f"{what} of {n}: {m}", **tolerance)

    def step(jobs: Sequence[tuple[nn.Module, torch.optim.Optimizer]], number: int, rows: Callable[[Any], Any]) -> None:
        """``jobs`` are that of this rank, and the reference's."""
        for (module, _), part in zip(jobs, (rows(make_batch(number)), make_batch(number)), strict=True):
            loss(module, part).backward()
        same(jobs[0][0], jobs[1][0], "gradient")
        for _, optimizer in jobs:
            optimizer.step()
            optimizer.zero_grad()
        same(jobs[0][0], jobs[1][0], "parameter")

    reference, model = job(PLAIN.shard, 0), job(topologies[0].shard, 0)
    for number in range(2):
        step((model, reference), number, topologies[0].rows)
    with shared_directory() as path:
        dcp.save(job_state(*model), checkpoint_id=path)
        for shard, rows in topologies:
            loaded, expected = job(shard, 1), job(PLAIN.shard, 2)
            load_job(*loaded, path)
            same(loaded[0], reference[0], "parameter")
            for mine, theirs in zip(loaded[0].parameters(), reference[0].parameters(), strict=True):
                for key, value in reference[1].state.get(theirs, {}).items():
                    actual, value = comparable(loaded[1].state[mine][key], value)
                    torch.testing.assert_close(actual, value, check_device=False, **tolerance)
            expected[0].load_state_dict(reference[0].state_dict())
            expected[1].load_state_dict(copy.deepcopy(reference[1].state_dict()))
            step((loaded, expected), 2, rows)


@contextmanager
def held_back_writes() -> Iterator[threading.Event]:
    """No byte of a checkpoint is written before the event is set."""
    go = threading.Event()
    write_data = dcp.FileSystemWriter.write_data

    def wait_and_write(*args: Any) -> Any:
        assert go.wait(HANG_S)
        return write_data(*args)

    with mock.patch.object(dcp.FileSystemWriter, "write_data", wait_and_write):
        yield go


class PeakBytes(TorchDispatchMode):
    """Peak of the memory of tensors that come into being under this mode.

    Args:
        limit: What the peak may be. gloo's threads let go of a tensor a little after the collective has been waited
            for: what is above the limit is looked at until they have.
    """

    def __init__(self, limit: float) -> None:
        super().__init__()
        self._limit = limit
        self.nbytes = 0
        self._live: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {id_of(t) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and id_of(tensor) not in known:
                storage = local(tensor).untyped_storage()
                self._live[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        is_low = until(lambda: self._live_nbytes() <= self._limit)
        assert is_low, f"{self._live_nbytes()} bytes, where {self._limit:.0f} are allowed"
        self.nbytes = max(self.nbytes, self._live_nbytes())
        return result

    def _live_nbytes(self) -> int:
        self._live = {key: entry for key, entry in self._live.items() if not entry[0].expired()}
        return sum(nbytes for _, nbytes in self._live.values())


def id_of(tensor: torch.Tensor) -> int:
    inner = tensor._local_tensor if isinstance(tensor, DTensor) else tensor
    return inner.untyped_storage()._cdata


class RecordingPlanner(dcp.DefaultSavePlanner):
    """Counts who writes what; only the coordinator sees the global plan."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.writes: Counter[tuple[Any, ...]] = Counter()

    def create_global_plan(self, all_plans: list[Any]) -> Any:
        plans, metadata = super().create_global_plan(all_plans)
        items = [item for plan in plans for item in plan.items]
        empty = [item for item in items if item.tensor_data is not None and 0 in item.tensor_data.chunk.sizes]
        self.writes = Counter((i.index.fqn, i.index.offset) for i in items if i not in empty)
        return plans, metadata
