"""``capture_step`` without a GPU: parameters that the optimizer has beside those of the module, and kept weights."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn as nn
from capture_common import Setting, captured_step, rows
from common import fake_world
from runtime_common import runtime_of

from dtensor_gtp.graphs.checks import check_optimizer


@pytest.fixture(autouse=True)
def world() -> Iterator[None]:
    with fake_world(world_size=1):
        yield


def test_parameters_of_the_optimizer_outside_of_the_module() -> None:
    """Graphs find their gradients, a change of them is seen, and a recording that failed leaves them."""
    setting = Setting()
    gain = nn.Parameter(torch.ones(12))
    optimizer = torch.optim.SGD([*setting.model.parameters(), gain], lr=0.1, foreach=False)
    fails = [False]

    def step(x: torch.Tensor) -> None:
        (setting.model(x) * gain).square().mean().backward()
        if fails[0] and setting.recorder.events[-1] == "record":
            raise RuntimeError("in vain")

    captured = captured_step(step, setting.model, [optimizer], [runtime_of(setting.model)], setting.recorder, 2, 8)
    for seed in range(3):
        captured(rows(seed))
        optimizer.zero_grad()
    assert captured._around is not None
    assert any(owner is gain and name == "grad" for owner, name in captured._around.places)
    assert setting.recorder.events[-2:] == ["record", "replay"]
    gain.data = gain.data.clone()
    captured(rows(3))
    assert setting.recorder.events[-1] == "eager"
    optimizer.zero_grad()
    fails[0] = True
    captured(rows(4))
    optimizer.zero_grad()
    with pytest.raises(RuntimeError, match="in vain"):
        captured(rows(5))
    assert gain.grad is None


def test_sharded_parameters_outside_of_the_module_are_refused() -> None:
    setting, other = Setting(), Setting()
    optimizer = torch.optim.SGD([*setting.model.parameters(), *other.model.parameters()], lr=0.1)
    check_optimizer(optimizer, nn.ModuleList([setting.model, other.model]))
    with pytest.raises(ValueError, match=r"all sharded parameters of SGD, but one of shape \(12, 12\) is outside"):
        check_optimizer(optimizer, setting.model)


def test_eager_steps_beyond_the_graphs_drop_what_is_kept() -> None:
    """As steps of ranks do that record or replay meanwhile, so that all gather the same."""
    setting = Setting()
    setting.model.set_reshard_after_backward(False)
    step = setting.captured(warmup_steps=2, max_graphs=1)
    for seed in range(4):
        step(rows(seed))
    weights = runtime_of(setting.model).weights
    for seed in range(2):
        before = [weight.for_forward.num_gathers for weight in weights]
        step(rows(seed, 7))
        assert setting.recorder.events[-1] in ("eager", "last")
        assert all(weight.for_forward.num_gathers > num for weight, num in zip(weights, before, strict=True))
