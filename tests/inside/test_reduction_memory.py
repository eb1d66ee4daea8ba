"""Which buffers stay alive until compute has waited for a reduction: all that the communication stream touches."""

from __future__ import annotations

from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn as nn
from runtime_common import runtime_of
from schedules import explicit
from test_capture_blocks import one_of
from test_gtp_shard_groups import CHOSEN, WIDTH, Mixture, Model

from dtensor_gtp import gtp_shard
from dtensor_gtp._comm.reductions import ReductionsInFlight
from dtensor_gtp._schedule import choose_schedule
from dtensor_gtp._schedule.launch_reductions import ReductionLaunches


@pytest.mark.parametrize("options", [{}, {"coalesce_grad_nbytes": 0}, {"reduce_scatter": "all_to_all"}])
def test_rows_that_wait_for_replicas(options: Any) -> None:
    """A reduction adds what earlier ones have left to its result, and nobody else holds that any more."""
    with one_of(4) as (mesh, _):
        model = gtp_shard(nn.Linear(8, 8, bias=False), mesh, schedule=explicit(min_shard_numel=0, **options))
        (weight,) = runtime_of(model).weights
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
