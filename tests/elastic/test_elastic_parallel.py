"""Tensor-parallel styles that cut at blocks: what they refuse, and what each rank gets. Training is in test_elastic."""

from collections import OrderedDict

import torch
import torch.nn as nn
from common import ALL, fake_mesh
from expecttest import TestCase
from torch.distributed.tensor.parallel import parallelize_module

from dtensor_gtp import gtp_shard
from dtensor_gtp.elastic import BlockColwiseParallel, BlockRowwiseParallel


class TestStyles(TestCase):
    def test_each_rank_has_whole_blocks(self) -> None:
        with fake_mesh(1, 3, names=("gtp", "tp"), rank=2) as mesh:
            model = nn.Sequential(OrderedDict(wq=nn.Linear(6, 32), wo=nn.Linear(32, 6)))
            parallelize_module(model, mesh["tp"], {"wq": BlockColwiseParallel(4), "wo": BlockRowwiseParallel(4)})
            gtp_shard(model, mesh["gtp"], schedule=ALL)
            shapes = {name: tuple(param.to_local().shape) for name, param in model.named_parameters()}
            # Two heads of eight: the other ranks have three.
            self.assertEqual(shapes, {"wq.weight": (8, 6), "wq.bias": (8,), "wo.weight": (6, 8), "wo.bias": (6,)})
            self.assertEqual(tuple(model.wq(torch.randn(2, 5, 6)).shape), (2, 5, 8))

    def test_refuse(self) -> None:
        with fake_mesh(3, names=("tp",)) as mesh:
            for style in (BlockColwiseParallel(4), BlockRowwiseParallel(4)):
                for features, blocks in ((10, "2.5"), (8, "2")):
                    with self.assertRaisesRegex(ValueError, f"the 3 ranks of tp, but there are {blocks}"):
                        parallelize_module(nn.Linear(features, features), mesh, style)
                with self.assertRaisesRegex(TypeError, "expects an nn.Linear, but got Embedding"):
                    parallelize_module(nn.Embedding(12, 12), mesh, style)
            with self.assertRaisesRegex(ValueError, "BlockColwiseParallel expects block_size to be at least 1"):
                BlockColwiseParallel(0)
            with self.assertRaisesRegex(TypeError, "BlockRowwiseParallel expects an int as block_size"):
                BlockRowwiseParallel(2.0)  # type: ignore[arg-type]
