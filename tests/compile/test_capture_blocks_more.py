"""``capture_blocks`` without a GPU: parameters that a block reads as attributes of its own; what a backward comes to
and asks for; inputs that a graph would not see; what is refused, and what is told."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import ALL
from runtime_common import local, members_of, runtime_of
from schedules import explicit
from test_capture_blocks import BF16, DEPTH, REPLAYED, VOCABULARY, WIDTH, Net, OnHost, Pair, one_of, tokens_of, train
from torch.utils.checkpoint import checkpoint

from dtensor_gtp import MixedPrecisionPolicy, SchedulePolicy, capture_blocks, gtp_shard, quantize_
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
        *itertools.product((False, True), ({}, {"keep_nbytes": 1100})),
        *((True, schedule) for schedule in ({"prefetch_depth": 0}, {"keep_nbytes": 9000})),
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
        pair.steps(0, 1, 2, 3)
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
    pair.steps(0, 1, 2, 3)
    assert pair.run(train(6, 7)) == REPLAYED * 2


def test_reads_that_are_new_in_the_step_of_the_recording(world: Any) -> None:
    """Whether a module reads weights is learned between steps; a recording must not save them instead of gathering."""
    pair = make_pair(world, OwnNet(Reader))
    pair.steps(0, 1)

    def short(model: nn.Module) -> None:
        for seed in range(2, 5):
            model(tokens_of(seed, 5)).backward()

    for step in (short, train(5), short, train(6), short, train(7), short):
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
    Pair(world, OwnNet(ExpertBlock), schedule=schedule).check_replays(3, 4)


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
    pair.steps(0, 1, 2, 3)
    assert pair.run(train(6, 7)) == REPLAYED * 2


# A block is last here, and the last weight of a recorded block is gathered again for backward.
UNKEPT = explicit(min_shard_numel=0, keep_last=False)


class Two(nn.Module):
    """Blocks with an output that a loss may leave out, and a weight that only this one depends on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([TwoOutputs() for _ in range(3)])
        self.uses_other = False

    def forward(self, tokens: torch.Tensor, count: torch.Tensor | None = None) -> torch.Tensor:
        x, total = self.embedding(tokens), torch.zeros(())
        for block in self.blocks:
            x, other = block(x, count)
            if self.uses_other:
                total = total + other.square().mean()
        return x.square().mean() + total


class TwoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.is_routed = False

    def forward(self, x: torch.Tensor, count: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        if count is not None:
            count.add_(1)
        other = self.other(self.norm(x))
        gate = other.softmax(-1) if self.is_routed else 1
        return x + torch.tanh(self.up(x)) * gate, other


class TestWhatBackwardComesTo:
    def test_outputs_that_no_loss_uses(self, world: Any) -> None:
        """What only they depend on has no gradient, in graphs neither."""
        pair = Pair(world, Two(), schedule=UNKEPT)
        assert pair.steps(0, 1, 2, 3)[-1] == ["replay"] * 6
        assert all(block.other.weight.grad is None for block in pair.models[1].blocks)
        for model in pair.models:
            model.uses_other = True
        match = r"'blocks.2' starts at its .* outputs \[0, 1\], but was recorded for \[0\]"
        with pytest.raises(RuntimeError, match=match):
            train(5)(pair.models[1])
        pair.captured.reset()
        for model in pair.models:
            model.zero_grad()
        pair.compares_launches = False  # after a backward that raised, gathers ahead are others
        assert pair.steps(6, 7, 8, 9)[-1] == ["replay"] * 6

    def test_outputs_that_the_block_uses_itself(self, world: Any) -> None:
        """A gradient that comes to one from within, as to the logits of a router, is none of the loss."""
        model = Two()
        for block in model.blocks:
            block.is_routed = True
        pair = Pair(world, model, schedule=UNKEPT)
        assert pair.steps(0, 1, 2, 3)[-1] == ["replay"] * 6

    def test_no_graph_before_a_backward(self, world: Any) -> None:
        """Which outputs it comes to is not known."""
        pair = Pair(world)
        block, x = pair.models[1].blocks[0], torch.randn(7, WIDTH)
        losses = [block(x, 1.0, mask=None)[0].sum() for _ in range(4)]
        assert pair.recorder.events == []
        losses[-1].backward()
        block(x, 1.0, mask=None)
        assert pair.recorder.events == ["record", "record", "replay"]

    def test_gradients_of_others_alone(self, world: Any) -> None:
        """Of inputs by ``torch.autograd.grad``, of some weights by ``backward(inputs=...)``: the rest gets none."""
        pair = Pair(world, Two(), schedule=UNKEPT)
        pair.steps(0, 1, 2)
        x = torch.randn(7, WIDTH, requires_grad=True)
        results = []
        for model in pair.models:
            blocks = [model.blocks[0]] * 3 if model is pair.models[1] else [model.blocks[0]]
            for block in blocks:  # twice eagerly, for this kind of input, then in a graph
                (grad,) = torch.autograd.grad(block(x, None)[0].sum(), x)
            results.append(grad)
            assert all(param.grad is None for param in model.parameters())
        assert pair.recorder.events.count("replay") > 0
        assert torch.equal(*results)

        def some(model: nn.Module) -> None:
            wanted = [model.blocks[1].up.weight, model.blocks[2].up.bias]
            model(tokens_of(4)).backward(inputs=wanted)

        assert pair.run(some)[:3] == ["replay"] * 3

    def test_a_block_that_writes_to_its_input(self, world: Any) -> None:
        pair = Pair(world, Two(), schedule=UNKEPT)
        count = torch.zeros(())
        for seed in range(2):
            train(seed, count=count)(pair.models[1])
        assert count == 6
        with pytest.raises(RuntimeError, match=r"'blocks.0': ValueError: it writes to its input 1, of shape \(\)"):
            train(2, count=count)(pair.models[1])

    def test_arguments_that_a_graph_would_not_see(self, world: Any) -> None:
        """A value on another device, a tensor within an object; nor may a buffer be elsewhere."""
        pair = Pair(world)
        x = torch.randn(7, WIDTH)
        with pytest.raises(ValueError, match=r"\('blocks.0'\) expects tensors on 'cpu', but got one of shape"):
            pair.models[1].blocks[0](x, torch.ones((), device="meta"))
        context = type("Context", (), {})()
        context.cache = x
        with pytest.raises(ValueError, match=r"got a Context with one as 'cache', where capture_step cannot see"):
            pair.models[1].blocks[0](x, context)
        pair.captured.remove()
        pair.models[1].blocks[1].register_buffer("limit", torch.ones((), device="meta"))
        with pytest.raises(ValueError, match=r"of block 'blocks.1', expects buffers on 'cpu', but 'limit' is"):
            CapturedBlocks(pair.models[1], list(pair.models[1].blocks), OnHost(), 2, 4)

    def test_removal_before_backward_is_refused(self, world: Any) -> None:
        pair = Pair(world)
        pair.prepare()
        loss = pair.models[1](tokens_of(3))
        match = r"remove\(\) expects that the backward of each forward has run, but that"
        with pytest.raises(RuntimeError, match=match):
            pair.captured.remove()
        loss.backward()
        pair.captured.remove()


class TestRefusals:
    def refused(self, module: Any, blocks: Any, error: Any, match: str, warmup_calls: int = 2, most: Any = 4) -> None:
        with pytest.raises(error, match=match):
            CapturedBlocks(module, list(blocks), OnHost(), warmup_calls, most)

    def test_arguments(self, world: Any) -> None:
        mesh, _ = world
        model: Any = gtp_shard(Net(), mesh, schedule=ALL)
        with pytest.raises(RuntimeError, match="capture_blocks records CUDA graphs, but the weights of the Net are on"):
            capture_blocks(model, model.blocks)
        with pytest.raises(ValueError, match="capture_blocks expects a module that gtp_shard was called on"):
            capture_blocks(nn.Linear(2, 2), [])
        for blocks in ([], [nn.Linear(2, 2)], [model.blocks, model.blocks[0]], [model.blocks[0]] * 2):
            self.refused(model, blocks, ValueError, "capture_blocks expects modules below the Net that do not contain")
        norm = [model.blocks[0].norm]
        self.refused(model, norm, ValueError, "blocks with sharded weights, but 'blocks.0.norm' has no")
        self.refused(model, model.blocks, ValueError, "capture_blocks expects warmup_calls >= 2, but got 1", 1)
        self.refused(model, model.blocks, TypeError, "capture_blocks expects an int as max_graphs, but got 1.5", 2, 1.5)
        CapturedBlocks(model, [model.blocks[0]], OnHost(), 2, 4)
        self.refused(model, model.blocks, NotImplementedError, "'blocks.0.up.weight' belongs to another recorded")

    def test_a_window_that_is_too_small_is_told(self, world: Any, caplog: pytest.LogCaptureFixture) -> None:
        Pair(world)
        assert not caplog.text
        Pair(world, schedule=SchedulePolicy(min_shard_numel=0, prefetch_nbytes=64))
        assert "gathers the rest of the 9216 bytes of a block only after the block before" in caplog.text

    def test_a_window_that_is_too_small_in_one_of_several_calls_is_told(
        self, world: Any, caplog: pytest.LogCaptureFixture
    ) -> None:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(3)))
        for block, nbytes in zip(model, (1 << 20, 64, 0), strict=True):
            gtp_shard(block, world[0], schedule=SchedulePolicy(min_shard_numel=0, prefetch_nbytes=nbytes))
        CapturedBlocks(model, list(model), OnHost(), 2, 4)
        (record,) = [record for record in caplog.records if "prefetch_nbytes" in record.message]
        assert f"(prefetch_nbytes=64) gathers the rest of the {WIDTH * WIDTH * 4} bytes" in record.message

    def test_blocks(self, world: Any) -> None:
        mesh, _ = world
        plain: Any = Net()
        quantize_(plain, "float8_tensorwise", filter_fn=lambda _, name: name == "blocks.0.up")
        ignored = {plain.blocks[1].up.bias}
        model = gtp_shard(plain, mesh, schedule=ALL, ignored_params=ignored)
        with mock.patch.object(torch, "compile"):
            model.blocks[2].compile()
        matches = ("'blocks.0.up.weight' is quantized", r"does not manage its parameter 'up\.bias'", "it is compiled")
        for index, match in enumerate(matches):
            match = f"block 'blocks.{index}', a Block: .*{match}"
            self.refused(model, [model.blocks[index]], NotImplementedError, match)

    def test_a_parameter_of_two_blocks(self, world: Any) -> None:
        for name in ("up", "norm"):
            plain = Net()
            setattr(plain.blocks[1], name, getattr(plain.blocks[0], name))
            model = gtp_shard(plain, world[0], schedule=ALL)
            match = rf"'blocks.1', a Block: its parameter 'blocks.0.{name}.weight' is one of 'blocks.0', too"
            self.refused(model, model.blocks, NotImplementedError, match)

    def test_what_cannot_be_recorded(self, world: Any) -> None:
        mesh, _ = world
        model = gtp_shard(Net(), mesh, schedule=explicit(min_shard_numel=0, embedding="exchange"))
        captured = CapturedBlocks(model, [model.embedding], OnHost(), 2, 4)
        train(0)(model)  # in which ranks find out whether it pays
        with pytest.raises(NotImplementedError, match=r"'embedding': it exchanges activations for 'embedding.weight'"):
            model(tokens_of(1))
        captured.remove()
        pair = Pair(world)
        x = torch.randn(7, WIDTH)
        for _ in range(2):
            pair.models[1].blocks[0](x)[0].sum().backward()
        pair.models[1].blocks[0].up.forward = lambda x: 1 / 0
        with pytest.raises(RuntimeError, match=r"could not record block 'blocks.0': ZeroDivisionError: division by"):
            pair.models[1].blocks[0](x)
        assert runtime_of(pair.models[1]).grads.recording is None
