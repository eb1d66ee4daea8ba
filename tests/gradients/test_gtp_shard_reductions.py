"""The kinds of reduce-scatter: the same gradients where arithmetic is exact, and the error that each leaves, as
reduction_error.py computes it; what each keeps alive until compute has waited for it, all that the communication stream
touches."""

from __future__ import annotations

import sys
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from addends_common import add, all_to_all_of_peers
from common import ALL, GlooTest, environment, full
from counting import noted
from quant_common import Net as QuantNet
from quant_common import check, gtp
from runtime_common import (
    Net,
    assert_bit_equal,
    assert_idle,
    check_step,
    counted,
    make_rows,
    make_tokens,
    members_of,
    shard_copy,
    small_model,
    square_step,
    token_step,
)
from schedules import explicit
from test_capture_blocks import one_of
from test_elastic import Elastic, _replicas
from test_gtp_shard_gradients import ALL_TO_ALL, Scaled, assert_grads_are
from test_gtp_shard_groups import CHOSEN, WIDTH, Mixture, Model
from torch.distributed import ReduceOp
from torch.distributed.device_mesh import DeviceMesh

from dtensor_gtp import GTPShard, MixedPrecisionPolicy, gtp_shard
from dtensor_gtp import _torch_compat as compat
from dtensor_gtp._comm import reductions
from dtensor_gtp._comm.collectives import ReduceScale
from dtensor_gtp._comm.reductions import ReductionsInFlight, Scattering, sum_dtype
from dtensor_gtp._schedule import choose_schedule
from dtensor_gtp._schedule.launch_reductions import ReductionLaunches
from dtensor_gtp.nn import GroupedLinear
from dtensor_gtp.policy import ReduceScatterKind
from dtensor_gtp.quant import Float8Rowwise

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "benchmarks"))

from reduction_error import measure

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


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

    def gradients(self, mesh: DeviceMesh, inflight: int = 1) -> list[torch.Tensor]:
        torch.manual_seed(0)
        schedule = explicit(min_shard_numel=0, reduce_scatter="all_to_all", max_inflight_reduce_scatters=inflight)
        model = gtp_shard(Net(1), mesh, schedule=schedule, mp_policy=MixedPrecisionPolicy(BF16))
        tokens = make_tokens(self.rank)
        F.cross_entropy(model(tokens).flatten(0, 1).float(), tokens.flatten()).backward()
        return [full(param.grad) for param in model.parameters()]

    def test_bits_do_not_depend_on_time(self) -> None:
        """Delays and the number of reductions in flight change no bit."""
        expected = self.gradients(self.gtp_mesh())
        with environment(DTENSOR_GTP_DEBUG="poison,delay=3"):
            assert_bit_equal(self.gradients(self.gtp_mesh(), inflight=4), expected, "late")

    def test_bits_do_not_depend_on_who_adds(self) -> None:
        """With a kernel the own addend stays where it is. Here torch plays the kernel, and gloo NCCL."""
        for mesh in (self.gtp_mesh(), self.hsdp_mesh()):
            expected = self.gradients(mesh)
            with (
                mock.patch.object(reductions, "fused_sum", return_value=add),
                mock.patch.object(compat, "all_to_all_of_peers", side_effect=all_to_all_of_peers) as exchange,
            ):
                assert_bit_equal(self.gradients(mesh, inflight=4), expected, f"{mesh}")
            self.assertTrue(exchange.called)


# --- in one process ---------------------------------------------------------------------------------------------------


def test_dtype_of_the_sum() -> None:
    for wire in (BF16, FP16, FP32, FP64):
        assert sum_dtype("ring", wire) == wire
    for wire, wide in ((BF16, FP32), (FP16, FP32), (FP32, FP32), (FP64, FP64), (torch.complex64, torch.complex64)):
        assert sum_dtype("all_to_all", wire) == wide


def test_all_to_all_adds_in_float32_what_it_received() -> None:
    for op, num_addends in ((ReduceOp.SUM, 1), (ReduceOp.AVG, 3)):
        scattering = Scattering("all_to_all", [torch.zeros(6, 5, dtype=BF16)], 3, BF16)
        received = scattering.keep()[-1].view(6, 5)
        received.copy_(torch.tensor([1.0, 2.0**-12, 2.0**-12]).repeat_interleave(2)[:, None].expand(6, 5))
        scattering.finish(ReduceScale(op, None, None))
        (slot,) = scattering.slots
        assert torch.equal(slot, torch.full((2, 5), 1 + 2.0**-11, dtype=FP32) / num_addends)


def test_one_rank_sends_nothing() -> None:
    full = torch.ones(4, 2, dtype=BF16)
    assert Scattering("ring", [full], 1, BF16).slots[0] is full
    (slot,) = Scattering("all_to_all", [full], 1, BF16).slots
    assert torch.equal(slot, torch.ones(4, 2, dtype=FP32))


def test_slots_are_kept_while_the_communication_stream_reads_them() -> None:
    """What is left to do on that stream, a copy of a slot in another layout for one, reads it after the launch: memory
    that nobody keeps would be given to compute meanwhile."""
    for kind, num_ranks, dtype in product(("ring", "all_to_all", "copy_engine"), (1, 2), (BF16, FP32)):
        scattering = Scattering(kind, [torch.ones(4, 2, dtype=dtype)], num_ranks, BF16)
        kept = {buffer.untyped_storage().data_ptr() for buffer in scattering.keep()}
        assert all(slot.untyped_storage().data_ptr() in kept for slot in scattering.slots), (kind, num_ranks, dtype)


def test_what_is_copied_on_a_stream_is_kept() -> None:
    """On any device with streams. Without them the copy is complete."""
    for has_streams in (True, False):
        full = torch.ones(4, 2)
        scattering = Scattering("ring", [full], 2, BF16)
        with mock.patch.object(compat, "reduce_scatter_base"):
            scale = ReduceScale(ReduceOp.SUM, None, None)
            scattering.launch(scale, mock.Mock(), mock.Mock(), async_op=not has_streams)
        assert any(buffer is full for buffer in scattering.keep()) == has_streams


@pytest.mark.parametrize("kind", ["ring", "all_to_all"])
def test_only_a_send_ring_asks_for_addresses(kind: ReduceScatterKind) -> None:
    """Tensors without memory, with which steps are planned, have none to tell."""
    fulls = [torch.ones(4, 2, dtype=BF16), torch.ones(4, 2)]
    with mock.patch.object(torch.Tensor, "data_ptr", side_effect=AssertionError("asked for an address")):
        ready, cast = (Scattering(kind, [full], 2, BF16) for full in fulls)
    assert ready.keep()[0] is fulls[0]
    assert cast.keep()[1] is fulls[1]


def test_error_of_the_ring_grows_with_the_axis_and_that_of_all_to_all_does_not() -> None:
    for share_in_common in (1.0, 0.1):
        errors = [measure(num_ranks, 1 << 14, share_in_common) for num_ranks in (2, 4, 8)]
        for few, many in pairwise(errors):
            assert many["all_to_all, bf16"] < 1.01 * few["all_to_all, bf16"]
        for of_axis in errors:
            # Never more than rounding each addend once: half a unit in the last place of bf16.
            assert of_axis["all_to_all, bf16"] < 2.0**-9
            assert of_axis["all_to_all, bf16"] < of_axis["ring, bf16"]
        assert errors[-1]["ring, bf16"] > 1.3 * errors[0]["ring, bf16"]
        assert errors[-1]["ring, bf16"] > 2.4 * errors[-1]["all_to_all, bf16"]


@pytest.mark.parametrize("options", [{}, {"coalesce_grad_nbytes": 0}, {"reduce_scatter": "all_to_all"}])
def test_rows_that_wait_for_replicas(options: Any) -> None:
    """A reduction adds what earlier ones have left to its result, and nobody else holds that any more."""
    with one_of(4) as (mesh, _):
        model = gtp_shard(nn.Linear(8, 8, bias=False), mesh, schedule=explicit(min_shard_numel=0, **options))
        (weight,) = members_of(model).weights
        model.set_requires_all_reduce(False)
        model(torch.randn(2, 8)).sum().backward()
        assert weight.pending_grad.unreplicated is not None
        left = weight.pending_grad.unreplicated.data_ptr()
        model.set_requires_all_reduce(True)
        kept: list[int] = []

        def note(reductions: Any, work: Any, complete: Any, keep: tuple[torch.Tensor, ...], *rest: Any) -> None:
            kept.extend(buffer.data_ptr() for buffer in keep)

        with noted(ReductionsInFlight, "launched", note):
            model(torch.randn(2, 8)).sum().backward()
        assert left in kept
        assert weight.pending_grad.unreplicated is None


def test_a_group_waits_for_the_one_before_alone() -> None:
    """The buffers of one group at a time are in memory; experts that were launched after it go on."""
    seen: list[list[str]] = []

    def note(launches: Any, together: Any) -> None:
        if together[0].taken is not None:
            sent = [reduction.complete.args[0] for reduction in launches._comm.reductions._reductions]
            seen.append([each.weight.fqn for gradients in sent for each in gradients])

    with (
        one_of(4) as (mesh, _),
        mock.patch.object(choose_schedule, "_MOST_IN_GROUP", 64 * WIDTH**2),
        mock.patch.object(choose_schedule, "_LEAST_AHEAD", 0),
        noted(ReductionLaunches, "launch", note),
    ):
        model = gtp_shard(Model(block=Mixture), mesh, schedule=CHOSEN)
        for _ in range(2):  # in the first backward, ranks agree on what is used
            seen.clear()
            model(torch.randn(8, WIDTH)).sum().backward()
    assert [any("experts" in name for name in names) for names in seen] == [True, True, True], seen
    assert not [name for names in seen for name in names if name.count(".") == 1 and name.startswith("layers")]
