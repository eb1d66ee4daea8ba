"""Reduce-scatter in one process: what each kind keeps alive until compute has waited for it, all that the communication
stream touches; and the error of sums as reduction_error.py computes it."""

from __future__ import annotations

import sys
from itertools import pairwise, product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from runtime_common import members_of
from schedules import explicit
from test_capture_blocks import one_of
from test_gtp_shard_groups import CHOSEN, WIDTH, Mixture, Model
from torch.distributed import ReduceOp

from dtensor_gtp import gtp_shard
from dtensor_gtp._comm.collectives import ReduceScale
from dtensor_gtp._comm.reductions import ReductionsInFlight, Scattering, sum_dtype
from dtensor_gtp._schedule import choose_schedule
from dtensor_gtp._schedule.launch_reductions import ReductionLaunches
from dtensor_gtp.policy import ReduceScatterKind

sys.path.insert(0, str(Path(__file__).parents[2] / "examples" / "benchmarks"))

from reduction_error import measure

BF16, FP16, FP32, FP64 = torch.bfloat16, torch.float16, torch.float32, torch.float64


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
        launched = ReductionsInFlight.launched

        def watched(reductions: Any, work: Any, complete: Any, keep: tuple[torch.Tensor, ...], *rest: Any) -> None:
            kept.extend(buffer.data_ptr() for buffer in keep)
            launched(reductions, work, complete, keep, *rest)

        with mock.patch.object(ReductionsInFlight, "launched", watched):
            model(torch.randn(2, 8)).sum().backward()
        assert left in kept
        assert weight.pending_grad.unreplicated is None


def test_a_group_waits_for_the_one_before_alone() -> None:
    """The buffers of one group at a time are in memory; experts that were launched after it go on."""
    seen: list[list[str]] = []
    launch = ReductionLaunches.launch

    def noted(launches: Any, together: Any) -> None:
        if together[0].taken is not None:
            sent = [reduction.complete.args[0] for reduction in launches._comm.reductions._reductions]
            seen.append([each.weight.fqn for gradients in sent for each in gradients])
        launch(launches, together)

    with (
        one_of(4) as (mesh, _),
        mock.patch.object(choose_schedule, "_SMALL_NUMEL", 4 * WIDTH**2),
        mock.patch.object(choose_schedule, "_LEAST_AHEAD", 0),
        mock.patch.object(ReductionLaunches, "launch", noted),
    ):
        model = gtp_shard(Model(block=Mixture), mesh, schedule=CHOSEN)
        for _ in range(2):  # in the first backward, ranks agree on what is used
            seen.clear()
            model(torch.randn(8, WIDTH)).sum().backward()
    assert [any("experts" in name for name in names) for names in seen] == [True, True, True], seen
    assert not [name for names in seen for name in names if name.count(".") == 1 and name.startswith("layers")]
