"""``whole_weights``: code that knows no DTensor reads and changes parameters as in one process."""

from __future__ import annotations

import copy

import torch
import torch.nn as nn
from common import ALL, GlooTest, assert_same_params
from runtime_common import Net, make_tokens, token_loss
from torch.distributed.tensor import DTensor
from torch.testing._internal.common_utils import run_tests

from dtensor_gtp import GTPShard, gtp_shard, whole_weights


@torch.no_grad()
def normalize(model: nn.Module) -> list[float]:
    """Each row of each matrix is divided by its norm, in place or by another tensor; returns norms of gradients."""
    for name, param in model.named_parameters():
        if param.ndim == 2 and "layers" in name:
            param.data = param / param.norm(dim=1, keepdim=True)
        else:
            param.mul_(0.5)
    return [float(param.grad.norm()) for param in model.parameters()]


class TestWholeWeights(GlooTest):
    def test_changes_are_those_of_one_process(self) -> None:
        reference, tokens = Net(), make_tokens(0)
        for mesh in (self.gtp_mesh(), self.hsdp_mesh()):
            expected = copy.deepcopy(reference)
            model = gtp_shard(copy.deepcopy(reference), mesh, schedule=ALL, reshard_after_forward=False)
            norms = []
            for trained in (expected, model):
                token_loss(trained, tokens).backward()
                if trained is model:
                    model.unshard()  # kept weights are old afterwards
                    with whole_weights(model):
                        self.assertFalse(any(isinstance(param, DTensor) for param in model.parameters()))
                        self.assertIs(model.head.weight, model.embedding.weight)
                        norms.append(normalize(model))
                    model.reshard()
                else:
                    norms.append(normalize(expected))
                torch.optim.SGD(trained.parameters(), lr=0.1).step()
                trained.zero_grad()
                token_loss(trained, tokens).backward()
            self.assertEqual(norms[1], norms[0], rtol=1e-4, atol=1e-6)
            assert_same_params(model, expected)
            assert_same_params(model, expected, "grad")

    def test_modules_may_be_replaced_in_it_and_frozen_parts_left_alone(self) -> None:
        model = gtp_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), self.gtp_mesh(), schedule=ALL)
        model[0].requires_grad_(False)
        with whole_weights(model, trained_only=True):
            self.assertIsInstance(model[0].weight, DTensor)
            self.assertNotIsInstance(model[1].weight, DTensor)
            merged = nn.Linear(8, 8)
            merged.weight = model[1].weight
            model[1].weight = nn.Parameter(torch.zeros(8, 8))
        self.assertEqual(merged.weight.shape, (8, 8))

    def test_it_is_refused_in_a_forward(self) -> None:
        class Reads(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                with whole_weights(self):
                    return super().forward(x)

        model = gtp_shard(nn.Sequential(Reads(8, 8)), self.gtp_mesh(), schedule=ALL)
        with self.assertRaisesRegex(RuntimeError, "whole_weights cannot be called during a forward or backward"):
            model(torch.ones(2, 8))

    def test_an_uneven_shard_of_another_dim_and_blocks(self) -> None:
        for placement in (GTPShard(1), GTPShard(0, block_size=4)):
            weight = torch.arange(130.0).view(10, 13)
            model = nn.Linear(13, 10, bias=False)
            model.weight = nn.Parameter(weight.clone())
            gtp_shard(model, self.gtp_mesh(), shard_placement_fn=lambda param, placement=placement: placement)
            with whole_weights(model), torch.no_grad():
                self.assertEqual(model.weight, weight)
                model.weight += 1
            self.assertEqual(model.weight.full_tensor(), weight + 1)


if __name__ == "__main__":
    run_tests()
