"""Modules of Transformer Engine under ``gtp_shard``, as any module whose code reads ``self.weight``. Needs its wheel
and a GPU."""

from __future__ import annotations

import copy

import pytest
import torch
from common import assert_same_params
from cuda_common import take_gpu
from torch.distributed.device_mesh import init_device_mesh

from dtensor_gtp import SchedulePolicy, gtp_shard

te = pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["Linear", "LayerNormLinear"])
def test_gradients_and_updates(kind: str) -> None:
    """One rank: what may fail is how these modules read their weights and where they put gradients."""
    take_gpu(0)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("nccl", rank=0, world_size=1, store=store)
    try:
        reference = getattr(te, kind)(64, 128, params_dtype=torch.float32).cuda()
        mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("gtp",))
        model = gtp_shard(copy.deepcopy(reference), mesh, schedule=SchedulePolicy(min_shard_numel=0))
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (reference, model)]
        x = torch.randn(16, 64, device="cuda")
        for _ in range(2):
            for module in (reference, model):
                module(x).square().mean().backward()
            assert_same_params(model, reference, "grad")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same_params(model, reference)
    finally:
        torch.distributed.destroy_process_group()
