"""Modules of Transformer Engine under ``gtp_shard`` beside one process. Needs its wheel and GPUs; never run so far.

``test_transformer_engine.py`` has a module that uses weights as they do, on CPUs.
"""

import unittest
from typing import Any

import pytest
import torch
import torch.nn as nn
from common import ALL, full, rows_of_rank
from cuda_common import NUM_RANKS, CudaTest

from dtensor_gtp import gtp_shard

te = pytest.importorskip("transformer_engine.pytorch", reason="needs Transformer Engine")

WIDTH, TOKENS = 64, 16
LAYER = {
    "num_attention_heads": 4,
    "hidden_dropout": 0.0,
    "attention_dropout": 0.0,
    "attn_input_format": "bshd",
    "self_attn_mask_type": "causal",
}
KINDS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "Linear": ((WIDTH, WIDTH), {}),
    "LayerNormLinear": ((WIDTH, WIDTH), {}),
    "TransformerLayer": ((WIDTH, 2 * WIDTH), LAYER),
}


def make(kind: str) -> nn.Module:
    torch.manual_seed(0)
    sizes, options = KINDS[kind]
    return getattr(te, kind)(*sizes, params_dtype=torch.float32, device="cuda", **options)


@unittest.skipIf(NUM_RANKS < 2, "needs at least 2 GPUs")
class TestTransformerEngine(CudaTest):
    def test_gradients_and_updates(self) -> None:
        """Up to roundings: its products of float32 are in TF32."""
        mesh = self.gtp_mesh()
        for kind in KINDS:
            reference, model = make(kind), make(kind)
            self.check(kind, model, reference, "param", 0.0)
            gtp_shard(model, mesh, schedule=ALL)
            optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in (reference, model)]
            for step in range(3):
                torch.manual_seed(step)
                x = torch.randn(2 * NUM_RANKS, TOKENS, WIDTH, device="cuda")
                reference(x).square().mean().backward()
                model(rows_of_rank(x, mesh)).square().mean().backward()
                self.check(kind, model, reference, "grad", 0.02)
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
                self.check(kind, model, reference, "param", 0.02)

    def check(self, kind: str, model: nn.Module, reference: nn.Module, what: str, limit: float) -> None:
        for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
            got, want = (param, other) if what == "param" else (param.grad, other.grad)
            error = (full(got.detach()) - want).norm().item()
            self.assertLessEqual(error, limit * want.norm().item(), f"{kind}, {what} of {name}")
