"""``capture_blocks`` without a GPU: what a backward comes to and asks for, and inputs that a graph would not see."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn as nn
from schedules import explicit
from test_capture_blocks import VOCABULARY, WIDTH, OnHost, Pair, Wire, one_of, tokens_of, train
from torch.distributed.device_mesh import DeviceMesh

from dtensor_gtp.graphs.capture_blocks import CapturedBlocks
from dtensor_gtp.graphs.record_again import MOST_SEEN

# A block is last here, and the last weight of a recorded block is gathered again for backward.
UNKEPT = explicit(min_shard_numel=0, keep_last=False)


@pytest.fixture
def world() -> Iterator[tuple[DeviceMesh, Wire]]:
    with one_of(4) as world:
        yield world


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
        assert [pair.run(train(seed)) for seed in range(4)][-1] == ["replay"] * 6
        assert all(block.other.weight.grad is None for block in pair.models[1].blocks)
        for model in pair.models:
            model.uses_other = True
        with pytest.raises(
            RuntimeError, match=r"block 'blocks.2' starts at its .* outputs \[0, 1\], but was recorded for \[0\]"
        ):
            train(5)(pair.models[1])
        pair.captured.reset()
        for model in pair.models:
            model.zero_grad()
        pair._compares_launches = False  # after a backward that raised, gathers ahead are others
        assert [pair.run(train(seed)) for seed in range(6, 10)][-1] == ["replay"] * 6

    def test_outputs_that_the_block_uses_itself(self, world: Any) -> None:
        """A gradient that comes to one from within, as to the logits of a router, is none of the loss."""
        model = Two()
        for block in model.blocks:
            block.is_routed = True
        pair = Pair(world, model, schedule=UNKEPT)
        assert [pair.run(train(seed)) for seed in range(4)][-1] == ["replay"] * 6

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
        for seed in range(3):
            pair.run(train(seed))
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
        with pytest.raises(
            RuntimeError, match=r"record block 'blocks.0': ValueError: it writes to its input 1, of shape \(\)"
        ):
            train(2, count=count)(pair.models[1])

    def test_arguments_that_a_graph_would_not_see(self, world: Any) -> None:
        """A value on another device, a tensor within an object; nor may a buffer be elsewhere."""
        pair = Pair(world)
        x = torch.randn(7, WIDTH)
        with pytest.raises(
            ValueError, match=r"A recorded block \('blocks.0'\) expects tensors on 'cpu', but got one of sh"
        ):
            pair.models[1].blocks[0](x, torch.ones((), device="meta"))
        context = type("Context", (), {})()
        context.cache = x
        with pytest.raises(ValueError, match=r"got a Context with one as 'cache', where capture_step cannot see"):
            pair.models[1].blocks[0](x, context)
        pair.captured.remove()
        pair.models[1].blocks[1].register_buffer("limit", torch.ones((), device="meta"))
        with pytest.raises(
            ValueError, match=r"capture_blocks, of block 'blocks.1', expects buffers on 'cpu', but 'limit' is"
        ):
            CapturedBlocks(pair.models[1], list(pair.models[1].blocks), OnHost(), 2, 4)

    def test_kinds_of_inputs_that_never_come_again_are_not_remembered_for_ever(self, world: Any) -> None:
        pair = Pair(world)
        block, x = pair.models[1].blocks[0], torch.randn(7, WIDTH)
        for number in range(MOST_SEEN + 10):
            block(x, float(number))
        assert len(pair.captured._blocks[0].calls.seen) == MOST_SEEN

    def test_removal_before_backward_is_refused(self, world: Any) -> None:
        pair = Pair(world)
        pair.prepare()
        loss = pair.models[1](tokens_of(3))
        with pytest.raises(
            RuntimeError, match=r"remove\(\) expects that the backward of each forward has run, but that of block"
        ):
            pair.captured.remove()
        loss.backward()
        pair.captured.remove()
