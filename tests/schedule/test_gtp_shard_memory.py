"""What is in memory when: gathered weights between passes, buffers in flight, nothing that grows with the steps."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from common import ALL, GlooTest, rows_of_rank
from counting import noted
from runtime_common import (
    WIDTH,
    Net,
    Raw,
    assert_idle,
    check_step,
    make_rows,
    make_tokens,
    members_of,
    runtime_of,
    shard_copy,
    square_loss,
    square_step,
    token_step,
)
from schedules import explicit
from timing import come_late, until
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.multiprocessing.reductions import StorageWeakRef

from dtensor_gtp import gtp_shard
from dtensor_gtp._params.gathered import Gathered
from dtensor_gtp._params.sharded_weight import Gatherable


class Generic(nn.Module):
    """Weights of modules without a fused op, in ops that save them."""

    def __init__(self) -> None:
        super().__init__()
        self.raw = Raw()
        self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        self.conv = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.bilinear = nn.Bilinear(WIDTH, WIDTH, WIDTH)
        self.recurrent = nn.GRU(WIDTH, WIDTH, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.raw(x.unflatten(0, (-1, 2)))
        x = x + self.attention(x, x, x, need_weights=False)[0]
        x = self.conv(x.transpose(1, 2)).transpose(1, 2)
        return self.recurrent(torch.tanh(self.bilinear(x, x)))[0]


class Gathers:
    """Weak references to all gathers of a model."""

    def __init__(self) -> None:
        self.buffers: list[tuple[str, StorageWeakRef]] = []
        self.gathered: list[weakref.ref[Gathered]] = []
        self.most_held = 0

    def assert_alive(self, names: Sequence[str]) -> None:
        """The weights whose gathered buffer is in memory, whoever holds it.

        gloo's threads hold a buffer a moment longer than its collective takes.
        """
        assert until(lambda: self._alive() == names), f"in memory: {self._alive()}, expected {names}"

    def _alive(self) -> list[str]:
        return [name for name, buffer in self.buffers if not buffer.expired()]

    def note(self, name: str, gathered: Gathered) -> None:
        self.buffers.append((name, StorageWeakRef(gathered.buffer.untyped_storage())))
        self.gathered.append(weakref.ref(gathered))
        self.most_held = max(self.most_held, sum(ref() is not None for ref in self.gathered))


@contextmanager
def watched_gathers(model: nn.Module) -> Iterator[Gathers]:
    runtime, gathers = runtime_of(model), Gathers()
    gather = runtime.gathering._gather

    def watch(targets: Sequence[Gatherable]) -> None:
        gather(targets)
        for target in targets:
            gathers.note(target.weight.fqn, target.pending[-1])

    with mock.patch.object(runtime.gathering, "_gather", watch):
        yield gathers


def num_tensors() -> int:
    gc.collect()
    return sum(issubclass(type(candidate), torch.Tensor) for candidate in gc.get_objects())


def num_objects() -> int:
    gc.collect()
    return len(gc.get_objects())


def settled(count: Callable[[], int]) -> int:
    """The least of some counts: a thread of gloo lets go of its last tensors a moment late. If it does so later, a test
    allows more than it should."""
    counts = []
    for _ in range(6):
        counts.append(count())
        come_late(0.03)
    return min(counts)


class TestMemory(GlooTest):
    world_size = 2

    def test_no_weight_stays_gathered_between_forward_and_backward(self) -> None:
        """Not in autograd's hands either, which saves what matmuls and convolutions have read."""
        for model in (Generic(), nn.Sequential(Raw(), nn.Linear(WIDTH, WIDTH), Raw())):
            gtp_shard(model, self.gtp_mesh(), schedule=ALL)
            x = make_rows(0).requires_grad_()
            for step in range(2):
                with watched_gathers(model) as gathers:
                    loss = square_loss(model, x)
                    assert len(gathers.buffers) >= len(members_of(model).weights)
                    # What the forward uses last and the backward first is kept, once that is known.
                    kept = [weight.fqn for weight in members_of(model).weights if weight.for_forward.kept is not None]
                    assert len(kept) == (step > 0), kept
                    gathers.assert_alive(kept)
                    loss.backward()
                    gathers.assert_alive([])
                assert_idle(model)

    def test_autocast_saves_no_gathered_weight(self) -> None:
        """Under autocast a linear layer goes the generic way; its cast copy of the weight is saved by autograd."""
        reference = nn.Sequential(nn.Linear(WIDTH, WIDTH), Raw(), nn.Linear(WIDTH, WIDTH))
        model = shard_copy(reference, self.gtp_mesh())

        def step(module: nn.Module, x: torch.Tensor) -> None:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                y = module(x.clone().requires_grad_())
            self.assertEqual(y.dtype, torch.bfloat16)
            y.float().square().mean().backward()

        for seed in range(2):
            with watched_gathers(model) as gathers:
                check_step(reference, model, self.gtp_mesh(), make_rows(seed), step, rtol=2e-2, atol=2e-3)
                gathers.assert_alive([])

    def test_reshard_after_forward_false_keeps_each_weight_once(self) -> None:
        model = gtp_shard(Generic(), self.gtp_mesh(), schedule=ALL, reshard_after_forward=False)
        names = sorted(weight.fqn for weight in members_of(model).weights)
        for _ in range(2):
            with watched_gathers(model) as gathers:
                loss = square_loss(model, make_rows(0))
                gathers.assert_alive([name for name, _ in gathers.buffers])
                assert sorted(name for name, _ in gathers.buffers) == names
                loss.backward()
                gathers.assert_alive([])

    def test_gathered_weights_are_bounded_by_the_prefetch_depth(self) -> None:
        for depth in (0, 3):
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
            policy = explicit(depth, prefetch_nbytes=0, coalesce_nbytes=0, min_shard_numel=0)
            gtp_shard(model, self.gtp_mesh(), schedule=policy)
            x = make_rows(0).requires_grad_()
            for step in range(2):
                with watched_gathers(model) as gathers:
                    square_step(model, x)
                # The one in use and those ahead of it; in the first pass nothing is known ahead.
                assert gathers.most_held == (1 if step == 0 else depth + 1), (step, depth, gathers.most_held)

    def test_reductions_in_flight_are_bounded(self) -> None:
        for max_inflight in (1, 3):
            model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(8)))
            policy = explicit(max_inflight_reduce_scatters=max_inflight, min_shard_numel=0, coalesce_grad_nbytes=0)
            gtp_shard(model, self.gtp_mesh(), schedule=policy)
            reductions, seen = runtime_of(model).comm.reductions, []

            def note(*args: Any, reductions: Any = reductions, seen: list[int] = seen) -> None:
                seen.append(len(reductions._reductions) + 1)  # with the one that is launched

            with noted(reductions, "launched", note):
                square_step(model, make_rows(0))
            assert max(seen) == max_inflight, seen

    def test_memory_does_not_grow(self) -> None:
        model = gtp_shard(Net(num_pairs=1), self.gtp_mesh(), schedule=ALL)
        # DTensor of torch 2.11 remembers every new scalar that it is called with: AdamW has some in each step.
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
        tensors, objects = [], []
        for step in range(20):
            model(make_tokens(step))  # a forward without a backward, too
            token_step(model, rows_of_rank(make_tokens(step), self.gtp_mesh()))
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model(make_tokens(step))
            if step % 15 == 4:
                tensors.append(settled(num_tensors))
                objects.append(settled(num_objects))
        # 15 steps, at least, that leak would show as 15.
        assert max(tensors) - tensors[0] < 3 or until(lambda: num_tensors() - tensors[0] < 3), tensors
        assert max(objects) - objects[0] < 20 or until(lambda: num_objects() - objects[0] < 20), objects
        assert {len(chain.plan.uses) for chain in runtime_of(model).passes.chains.values()} <= {4, 5}

    def test_dropped_model_frees_its_runtime_and_weights(self) -> None:
        before = settled(num_tensors)
        model = gtp_shard(Net(), self.gtp_mesh(), schedule=ALL)
        for seed in range(2):
            token_step(model, make_tokens(seed))
        model.unshard()
        runtime = weakref.ref(runtime_of(model))
        shards = [StorageWeakRef(param.to_local().untyped_storage()) for param in model.parameters()]
        buffers = [
            StorageWeakRef(weight.for_forward.kept.buffer.untyped_storage()) for weight in members_of(model).weights
        ]
        del model
        assert until(lambda: num_tensors() <= before)
        assert runtime() is None
        assert all(storage.expired() for storage in (*shards, *buffers))

    def test_dropped_graph_frees_what_it_saved(self) -> None:
        model = gtp_shard(Generic(), self.gtp_mesh(), schedule=ALL, reshard_after_forward=False)
        square_step(model, make_rows(0))
        loss = square_loss(model, make_rows(0))
        del loss
        before = settled(num_tensors)
        for _ in range(5):
            square_loss(model, make_rows(0))
        assert until(lambda: num_tensors() <= before)

    def test_saved_tensor_hooks(self) -> None:
        """They get what others save, never a gathered weight, and gradients stay right. Where hooks are disabled,
        autograd keeps the gathered weights until backward: more memory, the same result."""
        reference = nn.Sequential(nn.Linear(WIDTH, WIDTH), Generic())
        model = shard_copy(reference, self.gtp_mesh())

        def offloaded(module: nn.Module, x: torch.Tensor) -> None:
            with save_on_cpu():
                square_loss(module, x).backward()

        def without_hooks(module: nn.Module, x: torch.Tensor) -> None:
            with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
                loss = square_loss(module, x)
            loss.backward()

        for seed in range(2):
            for step in (offloaded, without_hooks):
                check_step(reference, model, self.gtp_mesh(), make_rows(seed), step)
        packed: list[torch.Size] = []
        with watched_gathers(model) as gathers:

            def pack(tensor: torch.Tensor) -> torch.Tensor:
                packed.append(tensor.shape)
                addresses = [buffer for _, buffer in gathers.buffers if not buffer.expired()]
                assert StorageWeakRef(tensor.untyped_storage()) not in addresses, tensor.shape
                return tensor

            with saved_tensors_hooks(pack, lambda tensor: tensor):
                loss = square_loss(model, make_rows(0))
            loss.backward()
        assert packed
