"""The kinds of reduce-scatter: the same gradients where arithmetic is exact, and the error that each leaves."""

from __future__ import annotations

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, GlooTest, environment, full
from quant_common import Net as QuantNet
from quant_common import check, gtp
from runtime_common import (
    Net,
    assert_idle,
    check_step,
    counted,
    make_rows,
    make_tokens,
    shard_copy,
    small_model,
    square_step,
    token_step,
)
from schedules import explicit
from test_elastic import Elastic, _replicas
from test_gtp_shard_gradients import Scaled, assert_grads_are

from dtensor_gtp import GTPShard, MixedPrecisionPolicy, gtp_shard
from dtensor_gtp.nn import GroupedLinear
from dtensor_gtp.quant import Float8Rowwise

BF16, FP16 = torch.bfloat16, torch.float16
ALL_TO_ALL = explicit(min_shard_numel=0, reduce_scatter="all_to_all")


class Experts(nn.Module):
    """A fused weight with three dims."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = GroupedLinear(3, 6, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        sizes = torch.tensor([x.shape[0] // 2, 0, x.shape[0] - x.shape[0] // 2])
        return self.experts(x, sizes)


class TestReductions(GlooTest):
    def test_same_gradients_as_one_process(self) -> None:
        """Uneven and empty shards, both dims, tied and fused and generic weights, replicas."""
        on_dim_1 = lambda p: GTPShard(1) if p.ndim == 2 else None  # noqa: E731
        for mesh, options in ((self.gtp_mesh(), {}), (self.hsdp_mesh(), {"shard_placement_fn": on_dim_1})):
            reference = Net(num_pairs=1)
            check_step(reference, shard_copy(reference, mesh, schedule=ALL_TO_ALL), mesh, make_tokens(0), token_step)
            tiny = nn.Sequential(nn.Linear(12, 5), nn.Linear(5, 3, bias=False))  # the last rank has no row
            model = shard_copy(tiny, mesh, schedule=ALL_TO_ALL, **options)
            check_step(tiny, model, mesh, make_rows(0), square_step)
        experts = Experts()
        grads = []
        for each in (experts, shard_copy(experts, self.gtp_mesh(), schedule=ALL_TO_ALL)):
            square_step(each, make_rows(0, 8, 6))
            grads.append(full(each.experts.weight.grad))
        torch.testing.assert_close(*grads)

    def test_microbatches(self) -> None:
        """Sums over microbatches that were not synchronized, and over those that the replicas have not seen."""
        for mesh, switch in (
            (self.gtp_mesh(), "set_requires_gradient_sync"),
            (self.hsdp_mesh(), "set_requires_all_reduce"),
        ):
            reference = small_model()
            model = shard_copy(reference, mesh, schedule=ALL_TO_ALL)

            def step(module: nn.Module, rows: torch.Tensor, switch: str = switch) -> None:
                for index in range(2):
                    if hasattr(module, switch):
                        getattr(module, switch)(index == 1)
                    square_step(module, rows * (index + 1))

            for seed in range(2):
                check_step(reference, model, mesh, make_rows(seed), step)

    def test_error_does_not_see_what_rounding_in_the_ring_loses(self) -> None:
        """What three ranks add is below the bf16 resolution of what the first adds: the sum keeps it, in fp32."""
        scale = 1.0 if self.rank == 0 else 2.0**-12
        exact = (1 + 3 * 2.0**-12) / 4
        for mesh, policy in (
            (self.gtp_mesh(), MixedPrecisionPolicy(param_dtype=BF16)),
            (self.hsdp_mesh(), MixedPrecisionPolicy(reduce_dtype=BF16)),
        ):
            model = gtp_shard(Scaled(), mesh, schedule=ALL_TO_ALL, mp_policy=policy)
            for factor in (None, 4.0):
                if factor is not None:
                    model.set_gradient_divide_factor(factor)
                with counted() as counts:
                    model(scale).backward()
                self.assertEqual(counts.counts["alltoall_base_"], 3)
                self.assertEqual(counts.dtypes["alltoall_base_"], {BF16})
                assert_grads_are(model, exact)
                model.zero_grad()
            assert_idle(model)
        ring = gtp_shard(Scaled(), self.gtp_mesh(), schedule=ALL, mp_policy=MixedPrecisionPolicy(BF16))
        ring(scale).backward()
        self.assertFalse(full(ring.raw.grad).eq(exact).any())

    def test_bf16_parameters_accumulate_in_fp32(self) -> None:
        """Four times 2**-9 are lost one by one on top of a bf16 one, but not together; also where nothing is sent."""
        alone = dist.device_mesh.DeviceMesh("cpu", [self.rank], mesh_dim_names=("gtp",))
        for mesh in (self.gtp_mesh(), alone):
            model = gtp_shard(Scaled(BF16), mesh, schedule=ALL_TO_ALL)
            for scale in (1.0, 2.0**-9, 2.0**-9, 2.0**-9, 2.0**-9):
                model(scale).backward()
            assert all(param.grad.dtype == BF16 for param in model.parameters())
            assert_grads_are(model, 1 + 2.0**-7)

    def test_float16_needs_no_predivision(self) -> None:
        """The sum over four ranks, 2**16, is beyond float16; divided before the sum, 2**-24 would be lost."""
        policy = MixedPrecisionPolicy(reduce_dtype=FP16)
        for mesh, value in ((self.gtp_mesh(), 2.0**14), (self.hsdp_mesh(), 2.0**-24)):
            model = gtp_shard(Scaled(), mesh, schedule=ALL_TO_ALL, mp_policy=policy)
            model(value).backward()
            assert_grads_are(model, value)

    def test_quantized_weights(self) -> None:
        mesh = self.gtp_mesh()
        recipe = Float8Rowwise()
        torch.manual_seed(0)
        check(QuantNet(), recipe, gtp(recipe, mesh, schedule=ALL_TO_ALL), mesh, steps=1)

    def test_unequal_replicas(self) -> None:
        """What the receiving rank has added goes on to the sums over replicas in float32."""
        mesh = _replicas(((0, 1, 2), (3,)), 1)
        Elastic(mesh, apply=lambda model, mesh: gtp_shard(model, mesh.weights, schedule=ALL_TO_ALL)).train(steps=2)

    def test_bits_do_not_depend_on_time(self) -> None:
        """Delays and the number of reductions in flight change no bit."""
        results = []
        for inflight, debug in ((1, ""), (4, "poison,delay=3")):
            with environment(DTENSOR_GTP_DEBUG=debug):
                torch.manual_seed(0)
                schedule = explicit(
                    min_shard_numel=0, reduce_scatter="all_to_all", max_inflight_reduce_scatters=inflight
                )
                model = gtp_shard(Net(1), self.gtp_mesh(), schedule=schedule, mp_policy=MixedPrecisionPolicy(BF16))
                tokens = make_tokens(self.rank)
                F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
                results.append([full(param.grad) for param in model.parameters()])
        for a, b in zip(*results, strict=True):
            self.assertTrue(torch.equal(a, b))
