"""Torch's ``context_parallel`` around a model under ``gtp_shard``: ranks along cp share weights through gtp.

Needs GPUs: torch has no ring attention for CPUs. ``test_gtp_shard_data_axes`` has the same axes there, with keys and
values that are gathered by hand.
"""

import copy
import unittest

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, assert_same_params
from cuda_common import NUM_RANKS, CudaTest
from torch.distributed.tensor.experimental import context_parallel
from torch.nn.attention import SDPBackend, sdpa_kernel

from dtensor_gtp import gtp_shard

WIDTH, HEADS = 64, 4
TOKENS = 64 * NUM_RANKS  # half of a rank's: 32, which the memory-efficient kernel rounds up to


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return x + self.out(y.transpose(1, 2).flatten(2))


@unittest.skipIf(NUM_RANKS < 2, "needs at least 2 GPUs")
class TestContextParallel(CudaTest):
    def test_gradients_and_updates(self) -> None:
        mesh = self.gtp_mesh()
        torch.manual_seed(0)
        reference = nn.Sequential(Attention(), Attention()).cuda()
        model = gtp_shard(copy.deepcopy(reference), mesh, schedule=ALL)
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5, momentum=0.5) for m in (reference, model)]
        for step in range(3):
            torch.manual_seed(step + 1)
            x, target = (torch.randn(2, TOKENS, WIDTH, device="cuda") for _ in range(2))
            with sdpa_kernel(SDPBackend.EFFICIENT_ATTENTION):
                F.mse_loss(reference(x), target).backward()
                with context_parallel(mesh, buffers=[x, target], buffer_seq_dims=[1, 1]):
                    F.mse_loss(model(x), target).backward()  # backward too: it sends keys round
            assert_same_params(model, reference, "grad", rtol=1e-3, atol=1e-5)
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same_params(model, reference, "param", rtol=1e-3, atol=1e-5)
