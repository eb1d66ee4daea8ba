"""``sharding_report`` with a machine: predicted beside measured."""

import pytest
import torch
import torch.nn as nn
from common import fake_mesh
from schedules import explicit

from dtensor_gtp import gtp_shard, sharding_report
from dtensor_gtp.planner.costs import Axis, Costs
from dtensor_gtp.planner.errors import PlanError
from dtensor_gtp.planner.machine import load_machine
from dtensor_gtp.report import _describe_measured


def test_gathers_and_gradients_of_the_plan() -> None:
    with fake_mesh(8) as mesh:
        layers = (nn.Linear(64, 64, bias=False) for _ in range(3))
        model = gtp_shard(nn.Sequential(*layers), mesh, schedule=explicit())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        assert "no plan yet, run a step" in str(sharding_report(model, machine="h200"))
        assert sharding_report(model).prediction == ()
        for _ in range(3):
            model(torch.ones(2, 64, requires_grad=True)).sum().backward()
            optimizer.step()
        predicted, measured = sharding_report(model, machine="h200").prediction
        with pytest.raises(PlanError, match="machine expects one of"):
            sharding_report(model, machine="h201")
    nbytes = 64 * 64 * 4
    costs, axis = Costs(load_machine("h200")), Axis(8, 1)
    # The last layer stays gathered from forward to backward.
    times = [costs.together_ms(num * nbytes, axis, num, is_copy=False) for num in (3, 2, 3)]
    expected = f"forward gathers 48.0 KiB, {times[0]:.2f} ms; backward gathers 32.0 KiB, {times[1]:.2f} ms; "
    assert f"{expected}gradients 48.0 KiB, {times[2]:.2f} ms" in predicted
    assert "not calibrated" in predicted
    assert measured.startswith("measured: ")
    assert measured.endswith("ms a step (median of 2)")


def test_what_is_measured() -> None:
    assert _describe_measured([], None) == "measured: no two steps yet"
    assert _describe_measured([1.0, 1.5, 1.75, 5.0], 1 << 30).startswith(
        "measured: 500.00 ms a step (median of 3), at most 1.0 GiB"
    )
