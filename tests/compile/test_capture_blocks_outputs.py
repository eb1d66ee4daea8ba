"""``capture_blocks`` without a GPU: what blocks return. The graphs are those of a stand-in, see
``test_capture_blocks``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from test_capture_blocks import RECORDED, REPLAYED, VOCABULARY, WIDTH, Pair, one_of, train


@dataclass(frozen=True)
class Output:
    hidden: Any
    rest: Any = None


class Block(nn.Module):
    """Of the tensors that it returns, the losses use all but one."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.hides = False

    def forward(self, x: torch.Tensor) -> Any:
        x = x * 2
        if self.hides:
            return Output(SimpleNamespace(hidden=self.up(x)))
        unused = self.norm(x).square()
        return [Output({"x": x + torch.tanh(self.up(self.norm(x)))}, (unused, Output(x.square()), "rest"))]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.blocks = nn.ModuleList([Block() for _ in range(3)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        total = torch.zeros(())
        for block in self.blocks:
            (output,) = block(x)
            x = output.hidden["x"]
            total = total + output.rest[1].hidden.mean()
            assert output.rest[2] == "rest"
        return F.cross_entropy(self.head(x).float(), tokens) + total


@pytest.fixture
def pair() -> Iterator[Pair]:
    with one_of(4) as world:
        yield Pair(world, Net())


def test_gradients_come_to_tensors_in_dataclasses(pair: Pair) -> None:
    assert pair.steps(0, 1, 2, 3) == [[], [], RECORDED, REPLAYED]


def test_outputs_in_a_dataclass_stay_after_later_calls(pair: Pair) -> None:
    pair.prepare()
    outputs = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        x = torch.randn(7, WIDTH, requires_grad=True)
        eager, recorded = (model.blocks[0](x)[0] for model in pair.models)
        outputs.append((eager.hidden["x"], recorded.hidden["x"]))
        for model_output in (eager, recorded):
            (model_output.hidden["x"].sum() + model_output.rest[1].hidden.sum()).backward()
    assert pair.recorder.events == ["replay"] * 4
    for eager_x, recorded_x in outputs:
        assert torch.equal(eager_x, recorded_x)


def test_tensors_that_an_output_hides_are_refused(pair: Pair) -> None:
    """No gradient would come to them."""
    pair.models[1].blocks[0].hides = True
    match = r"A recorded block \('blocks.0'\) expects .*returned a SimpleNamespace with one as 'hidden'"
    with pytest.raises(ValueError, match=match):
        train(0)(pair.models[1])
