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

from dtensor_gtp import gtp_shard
from dtensor_gtp._comm.context import CommContext


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
        launched = CommContext.reduction_launched

        def watched(comm: Any, work: Any, complete: Any, keep: tuple[torch.Tensor, ...], *rest: Any) -> None:
            kept.extend(buffer.data_ptr() for buffer in keep)
            launched(comm, work, complete, keep, *rest)

        with mock.patch.object(CommContext, "reduction_launched", watched):
            model(torch.randn(2, 8)).sum().backward()
        assert left in kept
        assert weight.pending_grad.unreplicated is None
