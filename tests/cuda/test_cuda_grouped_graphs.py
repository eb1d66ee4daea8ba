"""Grouped layers in CUDA graphs: factors of biases, a weight for each group, each recipe.

Replays with other counts leave the bits of eager steps. Needs 2 to 8 GPUs of one host.
"""

import copy
import unittest

import torch
from cuda_common import BF16, NUM_RANKS, CudaTest, assert_same_grads, captured

from dtensor_gtp import gtp_shard, quantize_
from dtensor_gtp.nn import GroupedLinear
from dtensor_gtp.quant import RECIPES

GROUPS, DIM, HIDDEN, TOKENS = 8, 256, 512, 128
COUNTS = ([TOKENS, 0, 0, 0, 0, 0, 0, 0], [0] * GROUPS, [1, 2, 3, 4, 5, 6, 7, 8])


@unittest.skipIf(NUM_RANKS < 2, "needs at least 2 GPUs")
class TestGroupedGraphs(CudaTest):
    def check(self, what: str, layer: GroupedLinear, recipe: str | None = None) -> None:
        eager = copy.deepcopy(layer)
        for module in (layer, eager):
            if recipe is not None:
                quantize_(module, recipe)
            gtp_shard(module, self.gtp_mesh(), mp_policy=BF16)
        torch.manual_seed(self.rank)
        x = torch.randn(TOKENS, DIM, device="cuda").bfloat16().requires_grad_()
        splits = torch.full((GROUPS,), TOKENS // GROUPS, device="cuda")
        scales = torch.rand(TOKENS, device="cuda") if layer.scale_bias else None

        def run(module: GroupedLinear) -> torch.Tensor:
            output = module(x, splits, scales)
            output.float().square().mean().backward()
            return output

        graph, output = captured(layer, lambda: run(layer))
        for counts in COUNTS:
            splits.copy_(torch.tensor(counts))
            if scales is not None:
                scales.copy_(torch.rand(TOKENS))
            graph.replay()
            expected = run(eager)
            self.assertTrue(torch.equal(output, expected), f"{what} {counts}")
            self.assertFalse(output[sum(counts) :].any(), f"{what} {counts}")
            assert_same_grads(layer, eager, f"{what} {counts}")
            eager.zero_grad()

    def make(self, **options: bool) -> GroupedLinear:
        torch.manual_seed(0)
        return GroupedLinear(GROUPS, DIM, HIDDEN, device="cuda", **options)

    def test_each_kind_of_layer(self) -> None:
        """Factors of biases are others than those of the recording, too."""
        for options in ({}, {"scale_bias": True}, {"single_grouped_weight": False}):
            self.check(f"{options}", self.make(**options))

    def test_each_recipe(self) -> None:
        for name in RECIPES:
            self.check(name, self.make(bias=False), name)
