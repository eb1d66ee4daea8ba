"""``SelectiveOffload``: outputs of chosen ops wait on the host for their backward."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint

from dtensor_gtp import SelectiveOffload, activations

aten = torch.ops.aten


def offloaded(offload: SelectiveOffload, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return checkpoint(block, x, use_reentrant=False, context_fn=offload)


class Square(nn.Module):
    """Says when it runs. Its product is written in place if ``writes``."""

    def __init__(self, log: list[str], name: str, *, writes: bool = False) -> None:
        super().__init__()
        self.log, self.name, self.writes = log, name, writes
        self.weight = nn.Parameter(torch.rand(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.log.append(f"run {self.name}")
        y = x @ self.weight
        if self.writes:
            y.mul_(2)
        return y.exp().sin()


@pytest.fixture
def copies() -> Any:
    """Copies to the host stay under way, as on a GPU, until ``_leave`` counts too many."""
    with mock.patch.object(activations._Offloaded, "has_arrived", False):
        yield


def train(blocks: list[Square], run: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> list[torch.Tensor]:
    torch.manual_seed(1)
    x = torch.rand(3, 4, requires_grad=True)
    y = x
    for block in blocks:
        y = run(block, y)
    return list(torch.autograd.grad(y.sum(), [x, *(block.weight for block in blocks)]))


def test_gradients_are_those_of_one_pass_and_loads_are_one_checkpoint_ahead(copies: Any) -> None:
    log: list[str] = []
    blocks = [Square(log, str(i)) for i in range(8)]
    expected = train(blocks, lambda block, x: block(x))
    log.clear()
    init, load = activations._Offloaded.__init__, activations._Offloaded.load
    numbers: dict[int, int] = {}

    def numbered(self: Any, *args: Any) -> None:
        numbers[id(self)] = len(numbers)
        init(self, *args)

    def logged(self: Any) -> None:
        before = self._value
        load(self)
        if self._value is not before:
            log.append(f"load {numbers[id(self)]}")

    with mock.patch.multiple(activations._Offloaded, __init__=numbered, load=logged):
        found = train(blocks, partial(offloaded, SelectiveOffload([aten.mm.default])))
    assert all(map(torch.equal, found, expected))
    # The last outputs have not left: four copies may be under way. The others are loaded while the block behind runs.
    backward = [f"run {number}" for number in range(7, 3, -1)]
    for number in range(3, -1, -1):
        backward += [f"load {number}", f"run {number}"]
    assert log[8:] == backward


def test_outputs_written_while_they_are_copied_raise(copies: Any) -> None:
    blocks = [Square([], str(i), writes=i == 0) for i in range(6)]
    with pytest.raises(RuntimeError, match="mutated"):
        train(blocks, partial(offloaded, SelectiveOffload([aten.mm.default])))


def test_outputs_written_after_the_copy_keep_their_values() -> None:
    offload = SelectiveOffload([aten.mm.default])
    block = Square([], "0", writes=True)
    expected = train([block], lambda block, x: block(x))
    assert all(map(torch.equal, train([block], partial(offloaded, offload)), expected))


def test_a_forward_without_backward_holds_nothing() -> None:
    offload = SelectiveOffload([aten.mm.default])
    made: list[Any] = []
    init = activations._Offloaded.__init__

    def noted(self: Any, *args: Any) -> None:
        init(self, *args)
        made.append(activations.weakref.ref(self))

    with mock.patch.object(activations._Offloaded, "__init__", noted):
        offloaded(offload, Square([], "0"), torch.rand(3, 4, requires_grad=True))
    assert len(made) == 1
    assert made[0]() is None


def test_a_policy_offloads_saves_and_recomputes() -> None:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        words = {aten.mm.default: "MUST_CPU_OFFLOAD", aten.exp.default: "MUST_SAVE"}
        return getattr(CheckpointPolicy, words.get(op, "PREFER_RECOMPUTE"))

    blocks = [Square([], str(i)) for i in range(3)]
    expected = train(blocks, lambda block, x: block(x))
    with mock.patch.object(activations, "_Offloaded", wraps=activations._Offloaded) as made:
        assert all(map(torch.equal, train(blocks, partial(offloaded, SelectiveOffload(policy))), expected))
    assert made.call_count == 3


def test_others_than_ops_are_refused() -> None:
    with pytest.raises(TypeError, match=r"torch\.ops\.aten\.mm\.default, but got .*OpOverloadPacket"):
        SelectiveOffload([aten.mm])  # type: ignore[list-item]
