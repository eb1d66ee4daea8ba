"""Optimizer states cut over replicas: ``fully_shard(reshard_after_forward=False)`` over the copies of ``gtp_shard``.

A parameter is then cut over (replicate, gtp). Gradients are reduce-scattered over both axes, and what the optimizer has
updated is gathered over the replicas once a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
from common import ALL, GlooTest, rows_of_rank
from fsdp_common import (
    check,
    check_averages,
    check_checkpoints,
    check_overflow,
    make,
    mesh_of,
    next_token_loss,
    token_batch,
    wrap,
)
from runtime_common import counted
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from dtensor_gtp import gtp_shard

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "SGD": partial(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, foreach=True),
    "AdamW fused": partial(torch.optim.AdamW, lr=1e-2, fused=True),
    "AdamW foreach": partial(torch.optim.AdamW, lr=1e-2, foreach=True, amsgrad=True),
    "Adam for-loop": partial(torch.optim.Adam, lr=1e-2, foreach=False),
    "NAdam": partial(torch.optim.NAdam, lr=1e-2),
    "RAdam": partial(torch.optim.RAdam, lr=1e-2),
    "Adamax": partial(torch.optim.Adamax, lr=1e-2),
    "Adadelta": partial(torch.optim.Adadelta, lr=1e-1),
    "ASGD": partial(torch.optim.ASGD, lr=1e-2),
    "Adagrad": partial(torch.optim.Adagrad, lr=1e-2),
    "RMSprop": partial(torch.optim.RMSprop, lr=1e-2, foreach=True),
}


def cut_over_replicas(mesh: DeviceMesh) -> Callable[[Any], Any]:
    def shard(model: Any) -> Any:
        gtp_shard(model, mesh["gtp"], schedule=ALL)
        return wrap(model, mesh["replicate"], reshard_after_forward=False)

    return shard


class TestStatesOverReplicas(GlooTest):
    """replicate x gtp, 2 x 2."""

    @property
    def mesh(self) -> DeviceMesh:
        return mesh_of((2, 2), ("replicate", "gtp"))

    @property
    def shard(self) -> Callable[[Any], Any]:
        return cut_over_replicas(self.mesh)

    def batch(self, step: int) -> torch.Tensor:
        return token_batch(torch.Generator().manual_seed(step))

    @pytest.mark.long
    def test_optimizers_of_torch(self) -> None:
        for make_optimizer in OPTIMIZERS.values():
            check(make(), self.shard, self.mesh, make_optimizer=make_optimizer, tolerance={"rtol": 1e-6, "atol": 1e-8})

    def test_a_rank_holds_its_part_of_the_states(self) -> None:
        """Each state has as many elements as the parts of all ranks together: none is on two ranks."""
        model = self.shard(make())
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        next_token_loss(model, rows_of_rank(self.batch(0), self.mesh)).backward()
        optimizer.step()
        for param, state in optimizer.state.items():
            if param.ndim < 2:
                continue  # what stays whole along gtp is cut over the replicas alone
            for moment in (state["exp_avg"], state["exp_avg_sq"]):
                assert isinstance(moment, DTensor)
                mine = torch.tensor(moment.to_local().numel())
                torch.distributed.all_reduce(mine)
                self.assertEqual(mine.item(), moment.numel())

    def test_a_step_gathers_over_replicas_once(self) -> None:
        """And reduce-scatters each unit once: together what one all-reduce moves."""
        model, plain = self.shard(make()), gtp_shard(make(), self.mesh["gtp"], schedule=ALL)
        units = len(model.layers) + 1
        for _ in range(2):
            counts = []
            for trained in (model, plain):
                with counted() as count:
                    next_token_loss(trained, rows_of_rank(self.batch(0), self.mesh)).backward()
                counts.append(count())
        self.assertEqual(counts[0].all_gathers - counts[1].all_gathers, units)
        self.assertEqual(counts[0].reduce_scatters - counts[1].reduce_scatters, units)

    @pytest.mark.long  # by default: test_shard_optimizer.py
    def test_clipping_scaling_and_averages(self) -> None:
        check_averages(self, OPTIMIZERS["AdamW fused"])

    def test_an_overflow_of_one_rank_skips_the_step_of_all(self) -> None:
        check_overflow(self, OPTIMIZERS["AdamW fused"])

    @pytest.mark.long
    def test_checkpoints(self) -> None:
        """Resumes on the same axes, on meta, under gtp alone and in one process, and goes on there as here."""
        check_checkpoints(self.mesh, self.shard)
