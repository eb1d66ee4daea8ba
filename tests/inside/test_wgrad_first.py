"""``SchedulePolicy(wgrad_first=...)``: what backward of a layer computes first, and that no bit depends on it."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from common import fake_world
from schedules import explicit
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from dtensor_gtp import MixedPrecisionPolicy, gtp_shard, quantize_
from dtensor_gtp._schedule.gathering import Gathering
from dtensor_gtp._schedule.reduce_gradients import Gradients
from dtensor_gtp.nn import GroupedLinear
from dtensor_gtp.quant import Float8Tensorwise

WIDTH = 16
SEVERAL = "grouped, several weights"


class Grouped(nn.Module):
    def __init__(self, single_weight: bool) -> None:
        super().__init__()
        self.layer = GroupedLinear(2, WIDTH, WIDTH, single_grouped_weight=single_weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.layer(x, torch.tensor([3, 5]))
        return output


def linear() -> nn.Module:
    return nn.Linear(WIDTH, WIDTH)


def float8(high_precision_wgrad: bool) -> nn.Module:
    recipe = Float8Tensorwise(compute="float8", high_precision_wgrad=high_precision_wgrad)
    return quantize_(linear(), recipe)


MODELS = {
    "linear": linear,
    "float8": lambda: float8(False),
    "float8, wgrad in bf16": lambda: float8(True),
    "grouped": lambda: Grouped(True),
    SEVERAL: lambda: Grouped(False),
}


@contextmanager
def observed() -> Iterator[list[str]]:
    """What is done to weights, in order: "use" of a gathered one, "reduce" of a gradient; "reduce beside the weight" if
    somebody still holds a gathered one by then."""
    events: list[str] = []
    used: list[weakref.ref[torch.Tensor]] = []
    acquire, submit = Gathering.acquire, Gradients.submit

    def use(*args: Any) -> Any:
        events.append("use")
        gathered = acquire(*args)
        if not gathered.is_alias:  # quantized data of one rank are used as they are
            used.append(weakref.ref(gathered.value))
        return gathered

    def reduce(*args: Any) -> None:
        is_held = any(ref() is not None for ref in used)
        events.append("reduce beside the weight" if is_held else "reduce")
        submit(*args)

    with mock.patch.object(Gathering, "acquire", use), mock.patch.object(Gradients, "submit", reduce):
        yield events


def train(make: Callable[[], nn.Module], is_compiled: bool, wgrad_first: bool) -> tuple[list[str], list[torch.Tensor]]:
    """The events of a backward, and all gradients of two of them."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    with fake_world(0, 1):
        schedule = explicit(min_shard_numel=0, wgrad_first=wgrad_first)
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("gtp",))
        model = gtp_shard(make(), mesh, schedule=schedule, mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16))
        if is_compiled:
            model.compile(backend="aot_eager", fullgraph=True)
        x = torch.randn(8, WIDTH, requires_grad=True)
        for _ in range(2):
            output = model(x)
            with observed() as events:
                output.square().sum().backward()
        grads = [x.grad, *(param.grad for param in model.parameters())]
        assert None not in grads
        return events, [grad.to_local() if isinstance(grad, DTensor) else grad for grad in grads]


# Compiled code reads several weights as attributes, whose gradients autograd computes.
CASES = [
    (name, is_compiled) for name in MODELS for is_compiled in (False, True) if (name, is_compiled) != (SEVERAL, True)
]


@pytest.mark.parametrize(("name", "is_compiled"), CASES)
def test_order_of_a_backward(name: str, is_compiled: bool) -> None:
    first, expected = train(MODELS[name], is_compiled, True)
    last, grads = train(MODELS[name], is_compiled, False)
    weights = 2 if name == SEVERAL else 1
    assert first == ["reduce"] * weights + ["use"] * weights
    assert last == ["use"] * weights + ["reduce"] * weights
    assert len(grads) == len(expected) >= 3
    assert all(torch.equal(got, want) for got, want in zip(grads, expected, strict=True))
