"""An optimizer that holds a parameter which ``gtp_shard`` is to replace is found; else no optimizer is searched for.

That takes a look at all objects of the process. It is spared if nobody holds a parameter, by its reference count, or
nobody in a list.
"""

from __future__ import annotations

import copy
import re
import unittest
from unittest import mock

import torch
import torch.nn as nn
from common import ALL, fake_mesh

from dtensor_gtp import GTPShard, gtp_shard


class Net(nn.Module):
    """Tied weights, one of them at two modules that share their parameters, and a module that holds its own again."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.copied = copy.copy(self.first)
        self.tied = nn.Linear(8, 8)
        self.tied.weight = self.first.weight
        self.norm = nn.LayerNorm(8)
        self.last = nn.Linear(8, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.norm(self.tied(self.copied(self.first(x)))))


class TestEarlyOptimizers(unittest.TestCase):
    def setUp(self) -> None:
        self.mesh = self.enterContext(fake_mesh(4))

    def refuses(self, net: nn.Module, name: str) -> None:
        optimizer = torch.optim.SGD([net.get_parameter(name)])
        with self.assertRaisesRegex(ValueError, rf"an optimizer \(SGD\) already holds parameter '{re.escape(name)}'"):
            gtp_shard(net, self.mesh, schedule=ALL)
        del optimizer

    def test_of_any_one_parameter(self) -> None:
        net = Net()
        names = [name for name, _ in net.named_parameters()]
        self.assertEqual(len(names), 6)
        for name in names:
            self.refuses(net, name)
        net(torch.randn(2, 8)).sum().backward()
        self.refuses(net, names[0])
        gtp_shard(net, self.mesh, schedule=ALL)
        many = nn.Sequential(*(nn.Linear(2, 2) for _ in range(40)))
        held = dict.fromkeys(many.parameters())
        self.refuses(many, "39.bias")
        gtp_shard(many, self.mesh, schedule=ALL)
        self.assertEqual(len(held), 80)

    def test_nobody_searches_where_nobody_holds_a_parameter(self) -> None:
        sharded = Net()
        placements = {sharded.tied.weight: GTPShard(1)}
        for net in (Net(), copy.deepcopy(Net()), Net().bfloat16(), Net().to_empty(device="meta"), sharded):
            with mock.patch("gc.get_objects", side_effect=AssertionError("all objects of the process were looked at")):
                gtp_shard(net, self.mesh, schedule=ALL, shard_placement_fn=placements.get)
