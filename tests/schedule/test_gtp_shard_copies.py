"""What one use of a weight launches: every kernel, copy and collective, in order. A copy more shows here.

One process of a group whose collectives communicate nothing. Views and allocations launch nothing and are left out.
"""

from __future__ import annotations

from itertools import product
from typing import Any
from unittest import TestCase

import torch
import torch.nn as nn
from common import fake_mesh
from schedules import changed, explicit
from torch.utils._python_dispatch import TorchDispatchMode

from dtensor_gtp import GTPShard, MixedPrecisionPolicy, gtp_shard
from dtensor_gtp.nn import GroupedLinear, GroupedMLP
from dtensor_gtp.ops.grouped import stacked

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


def launches(model: nn.Module, x: torch.Tensor) -> tuple[str, str]:
    """Of forward and of backward, in the third step; gradients do not accumulate."""
    for _ in range(3):
        with Launches() as forward:
            output = model(x)
        grad = torch.ones_like(output)
        with Launches() as backward:
            output.backward(grad)
        model.zero_grad()
        x.grad = None
    return ", ".join(forward.names), ", ".join(backward.names)


class Experts(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.experts: nn.Module = GroupedLinear(4, 16, 8, bias=False, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, torch.tensor([1, 2, 0, 2]))


class TestCopies(TestCase):
    """Two weights, each used in forward and backward; the second, the last of forward, is kept for backward."""

    def check(self, model: nn.Module, x: torch.Tensor, forward: str, backward: str, **options: Any) -> None:
        shape, rank = options.pop("shape", (4,)), options.pop("rank", 0)
        with fake_mesh(*shape, names=("replicate", "gtp")[-len(shape) :], rank=rank) as mesh:
            model = gtp_shard(model, mesh, **{"schedule": SCHEDULE, **options})
            self.assertEqual(launches(model, x), (forward, backward))

    def test_linear(self) -> None:
        """No copy at all: shards go out as they are, and GEMMs read what arrives and write what is sent."""
        plain, backward = "GATHER, GATHER, mm, mm", "GATHER, mm.out, SCATTER, mm, mm.out, SCATTER, mm"
        for dtype in (torch.float32, BF16):
            self.check(linears(dtype=dtype), rows(dtype), plain, backward)
        self.check(linears(), rows(), plain, f"{backward}, REDUCE, REDUCE", shape=(2, 2))
        # The sum, and the division by the number of ranks.
        exchanges = "GATHER, mm.out, EXCHANGE, mm, mm.out, EXCHANGE, mm, mean.out, mean.out"
        self.check(linears(), rows(), plain, exchanges, schedule=changed(SCHEDULE, reduce_scatter="all_to_all"))
        # A rank with all rows copies nothing. The short one pads.
        padded = "mm.out, SCATTER, mm, mm.out, SCATTER, mm"
        self.check(linears(15), rows(), plain, f"GATHER, {padded}")
        self.check(linears(15), rows(), "copy_, GATHER, GATHER, mm, mm", f"copy_, GATHER, {padded}", rank=3)

    def test_mixed_precision(self) -> None:
        """Each gather casts this rank's shard. Only on a CPU, whose GEMMs cannot write fp32, wgrad is widened."""
        forward = "copy_, GATHER, copy_, GATHER, mm, mm"
        backward = "copy_, GATHER, mm, copy_, SCATTER, mm, mm, copy_, SCATTER, mm"
        self.check(linears(), rows(BF16), forward, backward, mp_policy=MIXED)

    def test_dim_1(self) -> None:
        """Each gather brings this rank's shard into rows, each reduction brings the rows of this rank back."""
        forward = "copy_, GATHER, copy_, GATHER, mm, mm"
        backward = "copy_, GATHER, mm.out, SCATTER, mm, mm.out, SCATTER, mm, clone, clone"
        self.check(linears(), rows(), forward, backward, shard_placement_fn=lambda p: GTPShard(1))

    def test_embedding(self) -> None:
        model = nn.Sequential(nn.Embedding(8, 16))
        self.check(model, torch.arange(5), "GATHER, embedding", "embedding_dense_backward, SCATTER")

    def test_grouped(self) -> None:
        """Whole experts need no copy. Rows of every expert do: of shards and of gradients, as on dim 1."""
        masked = "_grouped_mm, arange, ge.Tensor, masked_fill_.Scalar"
        self.check(Experts(), rows(), f"GATHER, cumsum, {masked}", f"_grouped_mm, SCATTER, {masked}")
        forward, backward = f"copy_, GATHER, cumsum, {masked}", f"_grouped_mm, copy_, SCATTER, {masked}, clone"
        self.check(Experts(), rows(), forward, backward, shard_placement_fn=lambda p: GTPShard(1))

    def test_gradients_of_grouped_weights(self) -> None:
        """What the GEMM has written is sent, in rows of each rank side by side; receivers cast. Without a gradient sync
        it is the sum, in the dtype of the reduction. No gradient of ``x``: nothing else is computed."""
        for dim, dtype in product((0, 1), (BF16, torch.float32)):
            with fake_mesh(4) as mesh:
                policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=dtype)
                on_dim = lambda p, dim=dim: GTPShard(dim)  # noqa: E731
                model = gtp_shard(Experts(), mesh, schedule=SCHEDULE, mp_policy=policy, shard_placement_fn=on_dim)
                wide, copies = dtype != BF16, ["copy_"] * dim
                for is_synced, expected in (
                    (True, [*copies, "EXCHANGE" if wide else "SCATTER"]),
                    (False, ["copy_"] * wide),
                    (False, ["add_.Tensor"]),
                    (True, ["add_.Tensor", *copies[: 0 if wide else 1], "SCATTER"]),
                ):
                    model.set_requires_gradient_sync(is_synced)
                    output = model(rows().detach())
                    grad = torch.ones_like(output)
                    with Launches() as backward:
                        output.backward(grad)
                    self.assertEqual(backward.names[: len(expected) + 1], ["_grouped_mm", *expected])
                    rest = set(backward.names[len(expected) + 1 :])  # of the shard
                    self.assertLessEqual(rest, {"_to_copy", "add_.Tensor", "mean.out", "clone"} if is_synced else set())
        with fake_mesh(1) as mesh:
            model = gtp_shard(Experts(), mesh, schedule=SCHEDULE)
            output = model(rows().detach())
            with Launches() as backward:
                output.backward(torch.ones_like(output))
            self.assertEqual(backward.names, ["ones_like", "_grouped_mm"])
            self.assertTrue(model.experts.weight.grad.to_local().is_contiguous())

    def test_weights_of_each_group_lie_side_by_side(self) -> None:
        """Their stack is a view, and their gradients leave together; else they are copied."""
        policy = MixedPrecisionPolicy(param_dtype=BF16, reduce_dtype=BF16)
        masked = "_grouped_mm, arange, ge.Tensor, masked_fill_.Scalar"
        forward = f"_foreach_copy_, c10d.allgather_into_tensor_coalesced_, _to_copy, cumsum, {masked}"
        backward = f"_grouped_mm, c10d.reduce_scatter_tensor_coalesced_, {masked}"
        casts = ", _to_copy" * 5  # of x's gradient and the shards
        several = Experts(single_grouped_weight=False)
        self.check(several, rows(), forward, f"{backward}{casts}", mp_policy=policy)
        whole = torch.randn(3, 5, 4)
        for regular in (whole[:, :4], whole[:1]):
            self.assertEqual(stacked(regular.unbind(0)).data_ptr(), whole.data_ptr())
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

    def test_the_second_gather_hides_behind_the_first_gemm(self) -> None:
        """Of a ``GroupedMLP``: in backward that of ``gate_up`` behind one or both GEMMs of ``down``, which is kept from
        forward; each reduction behind what follows."""

        class MLP(Experts):
            def __init__(self) -> None:
                super().__init__()
                self.experts = GroupedMLP(4, 16, 8)

        for depth, backward in (
            (1, "GEMM SCATTER GATHER GEMM GEMM SCATTER GEMM"),
            (2, "GATHER GEMM SCATTER GEMM GEMM SCATTER GEMM"),
        ):
            with fake_mesh(4) as mesh:
                schedule = changed(SCHEDULE, prefetch_depth=depth, prefetch_nbytes=0)
                both = launches(gtp_shard(MLP(), mesh, schedule=schedule), rows())
            kinds = {"_grouped_mm": "GEMM", "GATHER": "GATHER", "SCATTER": "SCATTER"}
            order = [" ".join(kinds[name] for name in names.split(", ") if name in kinds) for names in both]
            self.assertEqual(order, ["GATHER GATHER GEMM GEMM", backward])
