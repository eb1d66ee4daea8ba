"""What one use of a weight launches: every kernel, copy and collective, in order. A copy more shows here.

One process of a group whose collectives communicate nothing. Views and allocations launch nothing and are left out.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from common import fake_world
from expecttest import TestCase
from schedules import changed, explicit
from torch.distributed.device_mesh import init_device_mesh
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_gtp import GTPShard, MixedPrecisionPolicy, gtp_shard
from dtensor_gtp.nn import GroupedLinear

BF16 = torch.bfloat16
MIXED = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=torch.float32)


_COLLECTIVES = {
    "c10d._allgather_base_": "GATHER",
    "c10d._reduce_scatter_base_": "SCATTER",
    "c10d.allreduce_": "REDUCE",
    "c10d.alltoall_base_": "EXCHANGE",
}


class Launches(TorchDispatchMode):
    """Names of the ops that move or compute data."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = str(func).removeprefix("aten.").removesuffix(".default")
        is_data = not func.is_view and not name.startswith(
            ("empty", "new_empty", "detach", "_unsafe_view", "promote_types")
        )
        if func.namespace == "c10d" or (is_data and not _is_alias(name, args, result)):
            self.names.append(_COLLECTIVES.get(name, name))
        return result


def _is_alias(name: str, args: Any, result: Any) -> bool:
    """``reshape`` and ``contiguous`` of what is contiguous, ``to`` of what has the dtype."""
    return name.startswith(("reshape", "contiguous", "_to_copy")) and result is args[0]


# Each weight by itself.
SCHEDULE = explicit(min_shard_numel=0, coalesce_nbytes=0, coalesce_grad_nbytes=0)


def linears(out_features: int = 16, dtype: torch.dtype = torch.float32) -> nn.Module:
    first = nn.Linear(16, out_features, bias=False, dtype=dtype)
    return nn.Sequential(first, nn.Linear(out_features, 16, bias=False, dtype=dtype))


def rows(dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.ones(5, 16, dtype=dtype, requires_grad=True)


def launches(model: nn.Module, x: torch.Tensor) -> str:
    """One line for forward, one for backward, of the third step; gradients do not accumulate."""
    for _ in range(3):
        with Launches() as forward:
            output = model(x)
        grad = torch.ones_like(output)
        with Launches() as backward:
            output.backward(grad)
        model.zero_grad()
        x.grad = None
    return f"forward: {', '.join(forward.names)}\nbackward: {', '.join(backward.names)}"


class TestCopies(TestCase):
    """Two weights, each used in forward and backward; the second, the last of forward, is kept for backward."""

    def of(self, model: nn.Module, x: torch.Tensor, *, rank: int = 0, **options: Any) -> str:
        with fake_world(rank, 4):
            mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("gtp",))
            return launches(gtp_shard(model, mesh, schedule=SCHEDULE, **options), x)

    def test_linear(self) -> None:
        """No copy at all: shards go out as they are, and GEMMs read what arrives and write what is sent."""
        for dtype in (torch.float32, BF16):
            self.assertExpectedInline(
                self.of(linears(dtype=dtype), rows(dtype)),
                """\
forward: GATHER, GATHER, mm, mm
backward: GATHER, mm, SCATTER, mm, mm, SCATTER, mm""",
            )

    def test_mixed_precision(self) -> None:
        """Each gather casts this rank's shard. Only on a CPU, whose GEMMs cannot write fp32, wgrad is widened."""
        self.assertExpectedInline(
            self.of(linears(), rows(BF16), mp_policy=MIXED),
            """\
forward: copy_, GATHER, copy_, GATHER, mm, mm
backward: copy_, GATHER, mm, copy_, SCATTER, mm, mm, copy_, SCATTER, mm""",
        )

    def test_dim_1(self) -> None:
        """Each gather brings this rank's shard into rows, each reduction brings the rows of this rank back."""
        on_dim_1 = lambda p: GTPShard(1)  # noqa: E731
        self.assertExpectedInline(
            self.of(linears(), rows(), shard_placement_fn=on_dim_1),
            """\
forward: copy_, GATHER, copy_, GATHER, mm, mm
backward: copy_, GATHER, mm.out, SCATTER, mm, mm.out, SCATTER, mm, clone, clone""",
        )

    def test_uneven(self) -> None:
        """A rank with all rows copies nothing. The short one pads."""
        self.assertExpectedInline(
            self.of(linears(15), rows()),
            """\
forward: GATHER, GATHER, mm, mm
backward: GATHER, mm, SCATTER, mm, mm.out, SCATTER, mm""",
        )
        self.assertExpectedInline(
            self.of(linears(15), rows(), rank=3),
            """\
forward: copy_, GATHER, GATHER, mm, mm
backward: copy_, GATHER, mm, SCATTER, mm, mm.out, SCATTER, mm""",
        )

    def test_replicas(self) -> None:
        with fake_world(0, 4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "gtp"))
            model = gtp_shard(linears(), mesh, schedule=SCHEDULE)
            self.assertExpectedInline(
                launches(model, rows()),
                """\
forward: GATHER, GATHER, mm, mm
backward: GATHER, mm, SCATTER, mm, mm, SCATTER, mm, REDUCE, REDUCE""",
            )

    def test_all_to_all(self) -> None:
        """The sum, and the division by the number of ranks."""
        with fake_world(0, 4):
            mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("gtp",))
            schedule = changed(SCHEDULE, reduce_scatter="all_to_all")
            self.assertExpectedInline(
                launches(gtp_shard(linears(), mesh, schedule=schedule), rows()),
                """\
forward: GATHER, GATHER, mm, mm
backward: GATHER, mm, EXCHANGE, mm, mm, EXCHANGE, mm, mean.out, mean.out""",
            )

    def test_embedding(self) -> None:
        model = nn.Sequential(nn.Embedding(8, 16))
        with fake_world(0, 4):
            mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("gtp",))
            gtp_shard(model, mesh, schedule=SCHEDULE)
            self.assertExpectedInline(
                launches(model, torch.arange(5)),
                """\
forward: GATHER, embedding
backward: embedding_dense_backward, SCATTER""",
            )

    def test_grouped(self) -> None:
        """Whole experts need no copy. Rows of every expert do: of shards and of gradients, as on dim 1."""

        class Experts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.experts = GroupedLinear(4, 16, 8, bias=False)

            def forward(self, x: torch.Tensor) -> torch.Tensor:
                output: torch.Tensor = self.experts(x, torch.tensor([1, 2, 0, 2]))
                return output

        cut_rows = lambda param: GTPShard(1)  # noqa: E731
        self.assertExpectedInline(
            self.of(Experts(), rows(), shard_placement_fn=cut_rows),
            """\
forward: copy_, GATHER, cumsum, _grouped_mm, arange, ge.Tensor, masked_fill_.Scalar
backward: _grouped_mm, copy_, SCATTER, _grouped_mm, arange, ge.Tensor, masked_fill_.Scalar, clone""",
        )
        self.assertExpectedInline(
            self.of(Experts(), rows()),
            """\
forward: GATHER, cumsum, _grouped_mm, arange, ge.Tensor, masked_fill_.Scalar
backward: _grouped_mm, SCATTER, _grouped_mm, arange, ge.Tensor, masked_fill_.Scalar""",
        )
