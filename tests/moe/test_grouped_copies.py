"""How often a grouped weight's gradient is copied on its way to the shard: one rank of a group that communicates
nothing."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.nn as nn
from common import fake_world
from schedules import explicit
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_gtp import GTPShard, MixedPrecisionPolicy, gtp_shard
from dtensor_gtp.nn import GroupedLinear
from dtensor_gtp.ops.grouped import stacked

GROUPS, IN, OUT, ROWS = 4, 16, 24, 10
BF16 = torch.bfloat16
SCHEDULE = explicit(min_shard_numel=0, coalesce_grad_nbytes=0)


class Written(TorchDispatchMode):
    """Ops that write a tensor as large as the weight, in order; the GEMM is ``wgrad``, the collective ``send``."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.__name__.partition(".")[0]
        first = result[0] if isinstance(result, tuple) else result
        is_large = isinstance(first, torch.Tensor) and first.numel() == GROUPS * IN * OUT
        if name == "_grouped_mm" and is_large:
            self.events.append("wgrad")
        elif "reduce_scatter" in name or "alltoall" in name:
            self.events.append("send")
        elif name in ("copy_", "clone", "_to_copy", "add", "add_", "stack", "cat") and is_large:
            self.events.append(name)
        return result


@contextmanager
def events_of(model: nn.Module, x: torch.Tensor, splits: torch.Tensor) -> Iterator[list[str]]:
    output = model(x, splits).sum()
    with Written() as written:
        output.backward()
    yield written.events


@pytest.mark.parametrize(
    ("dim", "reduce_dtype", "copies"),
    [
        (0, BF16, []),  # what the GEMM has written is sent
        (1, BF16, ["copy_"]),  # rows of each rank side by side
        (0, torch.float32, []),  # receivers cast
        (1, torch.float32, ["copy_"]),
    ],
)
def test_a_gradient_is_copied_once_at_most(dim: int, reduce_dtype: torch.dtype, copies: list[str]) -> None:
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=reduce_dtype)
    with fake_world():
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("gtp",))
        layer = GroupedLinear(GROUPS, IN, OUT, bias=False)
        model = gtp_shard(
            layer, mesh, mp_policy=policy, schedule=SCHEDULE, shard_placement_fn=lambda param: GTPShard(dim)
        )
        # No gradient of x: nothing but the weight's gradient is computed.
        x, splits = torch.randn(ROWS, IN), torch.tensor([3, 0, 5, 2])
        with events_of(model, x, splits) as events:
            assert events == ["wgrad", *copies, "send"]
        model.set_requires_gradient_sync(False)
        is_cast = reduce_dtype != BF16
        with events_of(model, x, splits) as events:
            assert events == ["wgrad", *(["copy_"] if is_cast else [])], "what the GEMM has written is the sum"
        with events_of(model, x, splits) as events:
            assert events == ["wgrad", "add_"]
        model.set_requires_gradient_sync(True)
        with events_of(model, x, splits) as events:
            assert events == ["wgrad", "add_", *([] if is_cast else copies), "send"]


def test_one_rank_keeps_what_the_gemm_has_written() -> None:
    with fake_world(world_size=1):
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("gtp",))
        model = gtp_shard(GroupedLinear(GROUPS, IN, OUT, bias=False), mesh, schedule=SCHEDULE)
        with events_of(model, torch.randn(ROWS, IN), torch.tensor([3, 0, 5, 2])) as events:
            assert events == ["wgrad"]
        assert model.weight.grad.to_local().is_contiguous()


def test_weights_of_each_group_are_gathered_side_by_side() -> None:
    """Their stack is a view: no op but the GEMMs makes a tensor of all groups, and their gradients leave together."""
    policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
    with fake_world():
        mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("gtp",))
        layer = GroupedLinear(GROUPS, IN, OUT, bias=False, single_grouped_weight=False)
        model = gtp_shard(layer, mesh, mp_policy=policy, schedule=SCHEDULE)
        x, splits = torch.randn(ROWS, IN, requires_grad=True), torch.tensor([3, 0, 5, 2])
        for _ in range(3):  # on demand, by the plan, and kept at the turning point
            with Written() as forward:
                output = model(x, splits).sum()
            assert forward.events == []
            with Written() as backward:
                output.backward()
            assert backward.events == ["wgrad", "send"]


def test_what_lies_side_by_side_is_stacked_by_a_view() -> None:
    whole = torch.randn(3, 5, 4)
    assert stacked(whole[:, :4].unbind(0)).data_ptr() == whole.data_ptr()
    for parts in (
        whole[:, :4].unbind(0),
        whole.unbind(0)[::-1],
        whole.unbind(0)[:1],
        (whole[0], whole[0], whole[0]),
        (whole[0], whole[2], whole[1]),
        tuple(torch.randn(2, 2) for _ in range(3)),
        (whole[0], whole[1].t().contiguous().t(), whole[2]),
        tuple(torch.empty(3, 0, 2)),
    ):
        torch.testing.assert_close(stacked(parts), torch.stack(parts), rtol=0, atol=0)
