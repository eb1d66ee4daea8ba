"""Any module under ``gtp_shard`` trains as one process does on the concatenated batch."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, GlooTest, check_training
from torch.testing._internal.common_utils import run_tests

from dtensor_gtp import gtp_shard


class Zoo(nn.Module):
    """One of each: fused ops, convolution, norms, raw parameters, a ParameterList, tied weights."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(33, 16)
        self.linear = nn.Linear(16, 21)
        self.norm = nn.LayerNorm(21)
        self.conv = nn.Conv1d(21, 18, 3, padding=1)
        self.group_norm = nn.GroupNorm(3, 18)
        self.raw = nn.Parameter(torch.randn(18, 18) * 0.2)
        self.list = nn.ParameterList([torch.randn(18, 18) * 0.2 for _ in range(2)])
        self.out = nn.Linear(18, 16, bias=False)
        self.head = nn.Linear(16, 33, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.norm(torch.relu(self.linear(self.embedding(tokens))))
        x = self.group_norm(self.conv(x.transpose(1, 2))).transpose(1, 2)
        x = x @ self.raw
        for weight in self.list:
            x = torch.tanh(x @ weight)
        logits: torch.Tensor = self.head(self.out(x))
        return logits


def token_batch(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 33, (8, 6), generator=generator)


def next_token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


class TestTraining(GlooTest):
    def test_zoo(self) -> None:
        mesh = self.gtp_mesh()
        torch.manual_seed(0)
        check_training(Zoo(), lambda m: gtp_shard(m, mesh, schedule=ALL), mesh, token_batch, next_token_loss)

    def test_zoo_hsdp(self) -> None:
        mesh = self.hsdp_mesh()
        torch.manual_seed(0)
        check_training(Zoo(), lambda m: gtp_shard(m, mesh, schedule=ALL), mesh, token_batch, next_token_loss)

    def test_zoo_microbatches(self) -> None:
        mesh = self.gtp_mesh()
        torch.manual_seed(0)
        check_training(
            Zoo(), lambda m: gtp_shard(m, mesh, schedule=ALL), mesh, token_batch, next_token_loss, num_microbatches=3
        )


if __name__ == "__main__":
    run_tests()
