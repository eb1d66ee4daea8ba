"""``torch.cuda.make_graphed_callables`` on what ``gtp_shard`` manages raises, instead of training nothing."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from unittest import mock

import pytest
import torch
import torch.nn as nn
from common import ALL, fake_mesh
from schedules import explicit
from torch.cuda.graphs import make_graphed_callables  # torch's own, if this is imported before any gtp_shard
from torch.distributed.device_mesh import DeviceMesh

from dtensor_gtp import gtp_shard
from dtensor_gtp._comm.streams import Streams
from dtensor_gtp.nn import GroupedLinear


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    with fake_mesh(1) as mesh:
        yield mesh


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
        self.experts = GroupedLinear(2, 8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(self.block(x), torch.tensor([3, 1]))


def test_modules_with_managed_parameters_are_refused(mesh: DeviceMesh) -> None:
    plain = Net()
    model = gtp_shard(copy.deepcopy(plain), mesh, schedule=ALL)
    x = (torch.zeros(4, 8),)
    for callables, name in (
        (model, "block.0.weight"),
        ((torch.tanh, model.block), "0.weight"),
        (model.experts, "weight"),
    ):
        args = (x, x) if isinstance(callables, tuple) else x
        for make in (torch.cuda.make_graphed_callables, torch.cuda.graphs.make_graphed_callables):
            with pytest.raises(
                RuntimeError, match=rf"does not support a \w+ after gtp_shard: the gradient of '{name}'"
            ):
                make(callables, args, allow_unused_input=True)


def test_all_other_callables_are_torchs(mesh: DeviceMesh) -> None:
    gtp_shard(Net(), mesh, schedule=ALL)
    called = torch.cuda.make_graphed_callables
    module = nn.Linear(2, 2)
    module.register_forward_hook(lambda *_: None)
    with pytest.raises(AssertionError, match="Modules must not have hooks"):
        called(module, (torch.zeros(2),))
    assert called.__doc__ == make_graphed_callables.__doc__
    gtp_shard(Net(), mesh, schedule=ALL)
    assert torch.cuda.make_graphed_callables is called, "it is replaced once"


def test_a_recorded_backward_without_a_trained_weight_raises(mesh: DeviceMesh) -> None:
    model = gtp_shard(Net(), mesh, schedule=ALL)
    several = gtp_shard(GroupedLinear(2, 8, 8, bias=False, single_grouped_weight=False), mesh, schedule=ALL)
    x = torch.randn(4, 8, requires_grad=True)
    for call, name in (
        (model, "experts.weight"),
        (model.block, "block.0.weight"),
        (lambda x: several(x, torch.tensor([3, 1])), "weight0"),
    ):
        (grad,) = torch.autograd.grad(call(x).sum(), x)
        assert grad is not None
        output = call(x).sum()
        with mock.patch.object(Streams, "is_capturing", True):
            with pytest.raises(RuntimeError, match=rf"records a backward without the gradient of '{name}'"):
                torch.autograd.grad(output, x)
    model.requires_grad_(False)
    output = model(x).sum()
    with mock.patch.object(Streams, "is_capturing", True):
        torch.autograd.grad(output, x)


def test_a_recording_with_more_tokens_than_an_exchange_carries_raises() -> None:
    """Before the host would ask the device how many the others have, which ends a recording."""
    schedule = explicit(min_shard_numel=0, embedding="exchange", exchange_tokens=2)
    with fake_mesh(2) as mesh:
        table = gtp_shard(nn.Embedding(8, 4), mesh, schedule=schedule)
        with mock.patch.object(Streams, "is_capturing", True):
            with pytest.raises(ValueError, match=r"at most 2 tokens on each rank.* but got 3 tokens in a recording"):
                table(torch.tensor([1, 2, 3]))
