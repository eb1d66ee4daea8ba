"""What the tests of the runtime share: small models, one training step beside one process, counts and idle checks."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, check_update, fused_on, rows_of_rank
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from dtensor_gtp import gtp_shard
from dtensor_gtp._modules.binding import binding_of
from dtensor_gtp._params.sharded_weight import ShardedWeight
from dtensor_gtp._schedule.members import Members
from dtensor_gtp._schedule.runtime import Runtime
from dtensor_gtp.ops.linear import UngatheredWeight

VOCABULARY = 31  # 4 * 8 - 1: the last rank's shard is short
WIDTH = 12

Step = Callable[[nn.Module, torch.Tensor], Any]


class Raw(nn.Module):
    """Reads its weights as attributes: the generic path."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.second = nn.Parameter(torch.randn(width, width) / width**0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.tanh(x @ self.first) @ self.second


class Calls(nn.Module):
    """Calls ``call(self, x)``. Its modules and parameters are the keywords; tensors become parameters."""

    def __init__(self, call: Callable[[Any, Any], Any], **members: nn.Module | torch.Tensor) -> None:
        super().__init__()
        self.call = call
        for name, member in members.items():
            is_value = isinstance(member, torch.Tensor) and not isinstance(member, nn.Parameter)
            setattr(self, name, nn.Parameter(member) if is_value else member)

    def forward(self, x: Any) -> Any:
        return self.call(self, x)


class Net(nn.Module):
    """Fused and generic weights, many of one shape, a whole parameter, and a tied head of uneven rows."""

    def __init__(self, num_pairs: int = 2) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        pairs = [(nn.Linear(WIDTH, WIDTH), Raw()) for _ in range(num_pairs)]
        self.layers = nn.ModuleList([module for pair in pairs for module in pair])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return self.head(self.norm(x))


def small_model() -> nn.Sequential:
    """Fused and generic weights and whole parameters; ``square_step`` on ``make_rows`` trains it."""
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), Raw(), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH))


def make_tokens(seed: int, rows: int = 8) -> torch.Tensor:
    return torch.randint(0, VOCABULARY, (rows, 5), generator=torch.Generator().manual_seed(seed))


def make_rows(seed: int, rows: int = 8, width: int = WIDTH, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(rows, width, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def square_loss(model: nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return model(rows).square().mean()


def token_step(model: nn.Module, tokens: torch.Tensor) -> None:
    token_loss(model, tokens).backward()


def square_step(model: nn.Module, rows: torch.Tensor) -> None:
    square_loss(model, rows).backward()


def shard_copy(reference: nn.Module, mesh: DeviceMesh, **options: Any) -> Any:
    return gtp_shard(copy.deepcopy(reference), mesh, **{"schedule": ALL, **options})


def runtime_of(module: nn.Module) -> Runtime:
    binding = binding_of(module)
    assert binding is not None
    return binding.group.runtime


def members_of(module: nn.Module) -> Members:
    """The parameters and groups of its runtime."""
    return runtime_of(module).members


def weight_of(module: nn.Module, fqn: str) -> ShardedWeight:
    (weight,) = [weight for weight in members_of(module).weights if weight.fqn == fqn]
    return weight


def num_gathers(module: nn.Module) -> dict[str, int]:
    return {weight.fqn: weight.for_forward.num_gathers for weight in members_of(module).weights}


@contextmanager
def gathers(module: nn.Module) -> Iterator[dict[str, int]]:
    """Fills the dict with how often each weight was gathered in the block."""
    before, used = num_gathers(module), {}
    yield used
    used.update({name: number - before[name] for name, number in num_gathers(module).items()})


def assert_idle(module: nn.Module) -> None:
    """Nothing is gathered, in flight, half reduced or left open."""
    runtime = runtime_of(module)
    left: dict[str, Any] = {
        "frames": runtime.reads.frames,
        "is_in_backward": runtime.passes.is_in_backward,
        "saved weights": runtime.reads.saved_in_backward,
        "weights read in backward": runtime.reads.in_backward.held,
        "values read in backward": runtime.reads.in_backward.values,
        "reductions": runtime.comm.reductions._reductions,
        "gradients that wait": runtime.grads._waiting,
    }
    for param in runtime.members.params:
        left[f"reduced {param.fqn}"] = param.gradient.reduced
    for weight in runtime.members.weights:
        for target in weight.gatherables:
            left[f"gathered {target.index} {weight.fqn}"] = [*target.pending, *filter(None, (target.live, target.kept))]
        left[f"unsharded_grad {weight.fqn}"] = weight.pending_grad.unsharded
        left[f"unreplicated_grad {weight.fqn}"] = weight.pending_grad.unreplicated
        assert weight.for_forward.is_absent, f"{weight.fqn} is gathered"
    for param in runtime.members.whole:
        left[f"local gradient {param.fqn}"] = param.leaf.grad
        left[f"unsynced_grad {param.fqn}"] = param.unsynced_grad
    left = {name: value for name, value in left.items() if value is not None and (torch.is_tensor(value) or value)}
    assert not left, left


def check_step(
    reference: nn.Module,
    model: nn.Module,
    mesh: DeviceMesh,
    batch: torch.Tensor,
    step: Step,
    *,
    lr: float = 0.1,
    is_idle: bool = True,
    **tolerance: float,
) -> None:
    """``step`` runs forward and backward, on the reference with the whole batch, on the model with this rank's rows.

    Gradients must agree, then parameters after an SGD step; then both are ready for the next step.
    """
    step(reference, batch)
    step(model, rows_of_rank(batch, mesh))
    optimizers = [torch.optim.SGD(each.parameters(), lr=lr, fused=fused_on(mesh)) for each in (reference, model)]
    check_update(model, reference, optimizers, **tolerance)
    if is_idle:
        assert_idle(model)


def check_steps(
    reference: nn.Module,
    mesh: DeviceMesh,
    *steps: Step,
    seeds: Iterable[int] = range(2),
    tolerance: dict[str, float] | None = None,
    **options: Any,
) -> Any:
    """``check_step`` of each of ``steps``, by default ``square_step``, on a copy that ``gtp_shard(**options)`` shards,
    which is returned."""
    model = shard_copy(reference, mesh, **options)
    for seed in seeds:
        for step in steps or (square_step,):
            check_step(reference, model, mesh, make_rows(seed), step, **(tolerance or {}))
    return model


def local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def train_record(model: nn.Module, mesh: DeviceMesh, loss_fn: Step = token_loss, steps: int = 3) -> list[torch.Tensor]:
    """Every loss, gradient shard and parameter shard of a few steps, to be compared bit by bit."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    record = []
    for step in range(steps):
        loss = loss_fn(model, rows_of_rank(make_tokens(step), mesh))
        loss.backward()
        record.append(loss.detach().clone())
        record.extend(local(p.grad).clone() for p in model.parameters() if p.grad is not None)
        optimizer.step()
        optimizer.zero_grad()
        record.extend(local(p.detach()).clone() for p in model.parameters())
        assert_idle(model)
    return record


def assert_bit_equal(actual: list[torch.Tensor], expected: list[torch.Tensor], what: str) -> None:
    assert len(actual) == len(expected), f"{what}: {len(actual)} tensors instead of {len(expected)}"
    for index, (a, b) in enumerate(zip(actual, expected, strict=True)):
        assert a.isfinite().all(), f"{what}: tensor {index} is not finite"
        assert torch.equal(a, b), f"{what}: tensor {index} differs by {(a - b).abs().max()}"


class Counts(NamedTuple):
    """Collectives of this rank: tensors, whether each travels by itself or several together."""

    all_gathers: int
    reduce_scatters: int
    all_reduces: int


# What several collectives in one launch are called, and what one of them is.
_ONE_OF = {
    "allgather_into_tensor_coalesced_": "_allgather_base_",
    "reduce_scatter_tensor_coalesced_": "_reduce_scatter_base_",
}


class counted(TorchDispatchMode):
    """Counts this rank's collectives inside of the block: call what ``with`` returns for the counts so far.

    Like CommDebugMode, which fails on a module that is called several times with inputs that need gradients:
    its module tracker, not used here, loses count of its hooks."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()
        self.num_launches: Counter[str] = Counter()
        self.dtypes: dict[str, set[torch.dtype]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(issubclass(cls, DTensor | UngatheredWeight) for cls in types):
            return NotImplemented  # these come back with the collectives that they consist of
        if func.namespace == "c10d":
            name = _ONE_OF.get(func._opname, func._opname)
            tensors = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
            if name == "allreduce_" and tensors[0].dtype == torch.int64:
                name = "agreement"
            self.num_launches[name] += 1
            self.counts[name] += 1 if name in (func._opname, "agreement") else len(args[0])
            self.dtypes.setdefault(name, set()).update(tensor.dtype for tensor in tensors)
        return func(*args, **(kwargs or {}))

    def __call__(self) -> Counts:
        names = ("_allgather_base_", "_reduce_scatter_base_", "allreduce_")
        # The first forward agrees that it can begin, and on names for its communicators, with one broadcast for each
        # mesh.
        assert self.counts.keys() <= {*names, "agreement", "broadcast_"}, self.counts
        return Counts(*(self.counts[name] for name in names))
