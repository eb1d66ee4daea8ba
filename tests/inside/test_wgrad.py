"""Gradients of weights: what backward of a layer computes first, of which no bit depends, and their sums."""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from common import fake_mesh
from counting import noted
from runtime_common import local, runtime_of
from schedules import explicit

from dtensor_gtp import MixedPrecisionPolicy, gtp_shard, quantize_
from dtensor_gtp._schedule.gathering import Gathering
from dtensor_gtp._schedule.reduce_gradients import Gradients
from dtensor_gtp.nn import GroupedLinear
from dtensor_gtp.ops import linear
from dtensor_gtp.quant import Float8Tensorwise

WIDTH = 16


class Grouped(nn.Module):
    def __init__(self, single_weight: bool) -> None:
        super().__init__()
        self.layer = GroupedLinear(2, WIDTH, WIDTH, single_grouped_weight=single_weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x, torch.tensor([3, 5]))


def make_layers(is_compiled: bool) -> list[nn.Module]:
    float8, wgrad_in_bf16 = (
        quantize_(nn.Linear(WIDTH, WIDTH), Float8Tensorwise(compute="float8", high_precision_wgrad=is_wide))
        for is_wide in (False, True)
    )
    layers = [nn.Linear(WIDTH, WIDTH), float8, wgrad_in_bf16, Grouped(True)]
    # Compiled code reads several weights as attributes, whose gradients autograd computes.
    return layers if is_compiled else [*layers, Grouped(False)]


@contextmanager
def observed() -> Iterator[list[str]]:
    """What is done to weights, in order: "use" of a gathered one, "reduce" of a gradient; "reduce beside the weight" if
    somebody still holds a gathered one by then."""
    events: list[str] = []
    used: list[weakref.ref[torch.Tensor]] = []
    acquire = Gathering.acquire

    def use(*args: Any) -> Any:
        events.append("use")
        gathered = acquire(*args)
        if not gathered.is_alias:  # quantized data of one rank are used as they are
            used.append(weakref.ref(gathered.value))
        return gathered

    def reduce(*args: Any) -> None:
        is_held = any(ref() is not None for ref in used)
        events.append("reduce beside the weight" if is_held else "reduce")

    with mock.patch.object(Gathering, "acquire", use), noted(Gradients, "submit", reduce):
        yield events


def train(model: nn.Module, x: torch.Tensor) -> tuple[list[str], list[torch.Tensor]]:
    """The events of a backward, and all gradients of two of them."""
    for _ in range(2):
        output = model(x)
        with observed() as events:
            output.square().sum().backward()
    leaves = [x, *model.parameters()]
    grads = [local(leaf.grad).clone() for leaf in leaves if leaf.grad is not None]
    assert len(grads) == len(leaves)
    for leaf in leaves:
        leaf.grad = None
    return events, grads


@pytest.mark.parametrize("is_compiled", [False, True])
def test_order_of_a_backward(is_compiled: bool) -> None:
    torch._dynamo.reset()
    with fake_mesh(1) as mesh:
        model = nn.Sequential(*make_layers(is_compiled))
        policy = explicit(min_shard_numel=0, wgrad_first=False)
        gtp_shard(model, mesh, schedule=policy, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        if is_compiled:
            model.compile(backend="aot_eager", fullgraph=True)
        x = torch.randn(8, WIDTH, requires_grad=True)
        last, grads = train(model, x)
        reductions = runtime_of(model).grads
        reductions.schedule = dataclasses.replace(reductions.schedule, wgrad_first=True)
        first, expected = train(model, x)
    num_weights = [1] * 4 if is_compiled else [2, 1, 1, 1, 1]  # of each layer, the last one first
    assert first == [event for num in num_weights for event in [*["reduce"] * num, *["use"] * num]]
    assert last == [event for num in num_weights for event in [*["use"] * num, *["reduce"] * num]]
    assert all(torch.equal(got, want) for got, want in zip(grads, expected, strict=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_microbatches_are_summed_without_rounding_any(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    """Products of 16-bit operands that are summed in float32 keep the bits that the GEMM has. CUDA alone has such a
    kernel: here a stand-in takes its place, and of a CUDA tensor what is asked of one."""
    stock = torch.mm

    def mm(left: torch.Tensor, right: torch.Tensor, *wide: torch.dtype, **out: Any) -> torch.Tensor:
        return stock(left.to(*wide), right.to(*wide), **out)

    def addmm(total: torch.Tensor, left: torch.Tensor, right: torch.Tensor, wide: torch.dtype, *, out: Any) -> None:
        out.copy_(total + mm(left, right, wide))

    monkeypatch.setattr(torch, "mm", mm)
    monkeypatch.setattr(torch, "addmm", addmm)
    monkeypatch.setattr(linear, "_keeps_wide_sum", lambda target, operand: target == torch.float32)
    torch.manual_seed(0)
    operands = [(torch.randn(8, 16, dtype=dtype), torch.randn(16, 8, dtype=dtype)) for _ in range(3)]
    total = torch.empty(8, 8)
    for index, (left, right) in enumerate(operands):
        linear._multiply_into(total, left, right, is_accumulating=index > 0)
    expected = sum(stock(left.double(), right.double()) for left, right in operands)
    torch.testing.assert_close(total.double(), expected, rtol=1e-5, atol=1e-5)
