"""``capture_blocks`` without a GPU: parameters that a block reads as attributes of its own."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from runtime_common import local, members_of, runtime_of
from schedules import explicit
from test_capture_blocks import BF16, DEPTH, REPLAYED, VOCABULARY, WIDTH, OnHost, Pair, one_of, tokens_of, train
from torch.utils.checkpoint import checkpoint

from dtensor_gtp import MixedPrecisionPolicy, gtp_shard
from dtensor_gtp._params.gathered import Gathered
from dtensor_gtp._params.sharded_weight import Gatherable
from dtensor_gtp._schedule.gathering import Gathering
from dtensor_gtp.graphs.capture_blocks import CapturedBlocks
from dtensor_gtp.nn import GroupedLinear


class OwnBlock(nn.Module):
    """Reads weights in the frame of the block itself, which does not end with the recording."""

    def __init__(self, is_checkpointed: bool = False) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.raw = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH**0.5)
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.is_checkpointed = is_checkpointed

    def _inner(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.raw) * self.scale

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.up(x)
        if self.is_checkpointed:
            return x + checkpoint(self._inner, x, use_reentrant=False, preserve_rng_state=False)
        return x + self._inner(x)


class Reader(nn.Module):
    """Reads the weight of another module, but not with every kind of input."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (torch.tanh(F.linear(x, self.up.weight)) if x.shape[0] == 5 else self.up(x))


class OwnNet(nn.Module):
    def __init__(self, block: type[nn.Module] = OwnBlock, **options: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([block(**options) for _ in range(DEPTH)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).float(), tokens)


def make_pair(world: Any, model: nn.Module, dtype: torch.dtype = BF16, **options: Any) -> Pair:
    schedule = explicit(min_shard_numel=64, **options)
    return Pair(world, model, schedule=schedule, mp_policy=MixedPrecisionPolicy(dtype), compares_launches=False)


@pytest.fixture
def world() -> Iterator[Any]:
    with one_of(4) as world:
        yield world


@pytest.mark.parametrize(
    ("is_checkpointed", "schedule"),
    [
        *((is_checkpointed, {}) for is_checkpointed in (False, True)),
        (True, {"prefetch_depth": 0}),
        *((is_checkpointed, {"keep_nbytes": 1100}) for is_checkpointed in (False, True)),
        (True, {"keep_nbytes": 9000}),
    ],
)
def test_own_parameters(world: Any, is_checkpointed: bool, schedule: Any) -> None:
    """What a recording has read must not be taken for a gathered weight when the frame around it ends; what backward
    reads (here in a recomputation) must not be what forward has read."""
    pair = make_pair(world, OwnNet(is_checkpointed=is_checkpointed), **schedule)
    release = Gathering.release

    def checked(gathering: Gathering, target: Gatherable, gathered: Gathered) -> None:
        assert not gathered.is_alias or gathering._grads.recording is not None, "a recording's weight has left it"
        release(gathering, target, gathered)

    with mock.patch.object(Gathering, "release", checked):
        for seed in range(4):
            pair.run(train(seed))
        assert pair.run(train(6, 7)) == REPLAYED * 2
    for model in pair.models:
        assert not any(t.kept or t.live or t.pending for t in runtime_of(model).members.gatherables)


def test_hooks_that_read_what_the_block_reads(world: Any) -> None:
    """A graph reads fixed buffers, not what is there because something outside of the recording has read it before."""
    # The gradients of the two reads are reduced each by itself: with rounding to bf16 that would not be the same.
    pair = make_pair(world, OwnNet(), torch.float32)
    for model in pair.models:
        for block in model.blocks:
            block.register_forward_pre_hook(lambda block, args: (args[0] * block.raw.mean(),))
    for seed in range(4):
        pair.run(train(seed))
    assert pair.run(train(6, 7)) == REPLAYED * 2


def test_reads_that_are_new_in_the_step_of_the_recording(world: Any) -> None:
    """Whether a module reads weights is learned between steps; a recording must not save them instead of gathering."""
    pair = make_pair(world, OwnNet(Reader))
    for seed in range(2):
        pair.run(train(seed))

    def step(model: nn.Module) -> None:
        for seed in range(2, 5):
            model(tokens_of(seed, 5)).backward()

    pair.run(step)
    for seed in range(5, 8):
        pair.run(train(seed))
        pair.run(step)


def test_blocks_of_several_runtimes_share_no_buffers(world: Any) -> None:
    """Each runtime knows of its own gathers and reductions alone, which are the holders of fixed buffers."""
    mesh, _ = world
    schedule = explicit(min_shard_numel=64, coalesce_grad_nbytes=0, max_inflight_reduce_scatters=8)
    grads = []
    for is_captured in (False, True):
        model = OwnNet()
        for block in model.blocks:
            gtp_shard(block, mesh, schedule=schedule)
        if is_captured:
            CapturedBlocks(model, list(model.blocks), OnHost(), 2, 4)
        for seed in range(6):
            model.zero_grad()
            model(tokens_of(seed)).backward()
            grads.append([local(param.grad).clone() for param in model.parameters()])
        assert all(members_of(block).weights[0].form.fixed is not None for block in model.blocks) == is_captured
    for eager, captured in zip(grads[:6], grads[6:], strict=True):
        assert all(map(torch.equal, eager, captured))


class ExpertBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH, bias=False)
        self.experts = GroupedLinear(3, WIDTH, WIDTH, bias=False, single_grouped_weight=False)
        self.down = nn.Linear(WIDTH, WIDTH, bias=False)
        self.register_buffer("split_sizes", torch.tensor([3, 0, 4], dtype=torch.int32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.experts(self.up(x), self.split_sizes)))


@pytest.mark.parametrize("coalesce_grad_nbytes", [0, 1100, 128 << 20])
def test_gradients_of_experts_travel_as_in_eager_steps(world: Any, coalesce_grad_nbytes: int) -> None:
    """Ranks that replay meet ranks that do not in the same collectives."""
    schedule = explicit(min_shard_numel=64, coalesce_grad_nbytes=coalesce_grad_nbytes)
    pair = Pair(world, OwnNet(ExpertBlock), schedule=schedule)
    pair.prepare()
    assert pair.run(train(3, 4)) == REPLAYED * 2


class ReadingNet(OwnNet):
    """Reads weights of its blocks itself, before it calls them, and uses them after that."""

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        weights = [block.raw for block in self.blocks]
        x = self.embedding(tokens)
        for block in self.blocks:
            x = block(x)
        for weight in weights:
            x = x + torch.tanh(x @ weight)
        return F.cross_entropy(self.head(x).float(), tokens) + sum(weight.square().mean() for weight in weights)


@pytest.mark.parametrize("prefetch_depth", [0, 2])
def test_weights_that_the_caller_holds(world: Any, prefetch_depth: int) -> None:
    """A replay writes its weights to buffers that blocks share, but not over what eager code has been given."""
    pair = make_pair(world, ReadingNet(), torch.float32, prefetch_depth=prefetch_depth)
    for seed in range(4):
        pair.run(train(seed))
    assert pair.run(train(6, 7)) == REPLAYED * 2
