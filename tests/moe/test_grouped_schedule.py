"""Behind which GEMMs the weights of a ``GroupedMLP`` are gathered: one rank of a group that communicates nothing."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from common import fake_world
from schedules import explicit
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_gtp import gtp_shard
from dtensor_gtp.nn import GroupedMLP

GROUPS, DIM, HIDDEN = 3, 16, 24


ROWS = 8
# By the shape of the buffer, which has the sharded dim in front.
WEIGHTS = {(2 * HIDDEN, GROUPS, DIM): "gate_up", (DIM, GROUPS, HIDDEN): "down"}
# By the shapes of both operands.
GEMMS = {
    ((ROWS, DIM), (GROUPS, DIM, 2 * HIDDEN)): "gate_up",
    ((ROWS, HIDDEN), (GROUPS, HIDDEN, DIM)): "down",
    ((DIM, ROWS), (ROWS, HIDDEN)): "wgrad of down",
    ((ROWS, DIM), (GROUPS, DIM, HIDDEN)): "dgrad of down",
    ((2 * HIDDEN, ROWS), (ROWS, DIM)): "wgrad of gate_up",
    ((ROWS, 2 * HIDDEN), (GROUPS, 2 * HIDDEN, DIM)): "dgrad of gate_up",
}


class Order(TorchDispatchMode):
    """What is launched, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.__name__
        if "allgather" in name or "reduce_scatter" in name:
            shapes = [tuple(t.shape) for t in args if isinstance(t, torch.Tensor)]
            (weight,) = {WEIGHTS[shape] for shape in shapes if shape in WEIGHTS}
            self.events.append(f"{'gather' if 'allgather' in name else 'reduce'} {weight}")
        elif "_grouped_mm" in name:
            self.events.append(GEMMS[tuple(args[0].shape), tuple(args[1].shape)])
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("depth", [1, 2])
def test_the_second_gather_hides_behind_the_first_gemm(depth: int) -> None:
    """In forward that of ``down`` behind the GEMM of ``gate_up``, in backward that of ``gate_up`` behind one or both of
    those of ``down``; each reduction behind what follows."""
    schedule = explicit(
        min_shard_numel=0, prefetch_depth=depth, prefetch_nbytes=0, coalesce_nbytes=0, coalesce_grad_nbytes=0
    )
    with fake_world():
        model = gtp_shard(
            GroupedMLP(GROUPS, DIM, HIDDEN), init_device_mesh("cpu", (4,), mesh_dim_names=("gtp",)), schedule=schedule
        )
        x, splits = torch.zeros(ROWS, DIM, requires_grad=True), torch.tensor([3, 0, 5])
        for _ in range(3):  # the plan is observed in the first step
            with Order() as order:
                model(x, splits).sum().backward()
    forward = ["gather gate_up", "gather down", "gate_up", "down"]
    # down is kept from forward to backward, the last weight of the one and the first of the other.
    of_down = ["wgrad of down", "reduce down", "gather gate_up", "dgrad of down"]
    if depth == 2:
        of_down = ["gather gate_up", "wgrad of down", "reduce down", "dgrad of down"]
    assert order.events == [*forward, *of_down, "wgrad of gate_up", "reduce gate_up", "dgrad of gate_up"]
