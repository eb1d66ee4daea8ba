"""``GroupedLinear`` under stock ``fully_shard``, its checkpoints on other layouts, and which expert a weight is of."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from common import ALL, GlooTest, check_training, full, shared_directory
from fsdp_common import mesh_of
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

from dtensor_gtp import GTPShard, gtp_shard, quantize_
from dtensor_gtp.nn import GroupedLinear

GROUPS, WIDTH = 4, 64
SPLITS = torch.tensor([3, 0, 4, 1])
Layout = Callable[[nn.Module], nn.Module]


class Layer(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.up = GroupedLinear(GROUPS, WIDTH, 32, **options)

    def forward(self, x: torch.Tensor, splits: torch.Tensor) -> torch.Tensor:
        return self.up(x, splits)


class TestGroupedUnderFullyShard(GlooTest):
    def layouts(self) -> dict[str, Layout]:
        mesh = mesh_of((2, 2), ("dp", "gtp"))

        def whole_experts(model: nn.Module) -> nn.Module:
            place = {param: GTPShard(0) for param in model.parameters() if param.ndim == 3}
            return gtp_shard(model, self.gtp_mesh(), schedule=ALL, shard_placement_fn=place.get)

        return {
            "fully_shard": lambda model: fully_shard(model, mesh=self.gtp_mesh()),
            "fully_shard, rows": lambda model: fully_shard(
                model, mesh=self.gtp_mesh(), shard_placement_fn=lambda param: Shard(min(param.ndim - 1, 1))
            ),
            "gtp": lambda model: gtp_shard(model, self.gtp_mesh(), schedule=ALL),
            "whole experts": whole_experts,
            "gtp, two ranks": lambda model: gtp_shard(model, mesh["gtp"], schedule=ALL),
            "both": lambda m: fully_shard(gtp_shard(m, mesh["gtp"], schedule=ALL), mesh=mesh["dp"]),
            "one process": lambda model: model,
        }

    def test_training_equals_one_process(self) -> None:
        cases = ("fully_shard", {}), ("fully_shard", {"single_grouped_weight": False}), ("fully_shard, rows", {})
        for name, options in cases:
            torch.manual_seed(0)
            check_training(
                Layer(**options),
                self.layouts()[name],
                self.gtp_mesh(),
                lambda generator: torch.randn(32, WIDTH, generator=generator),
                lambda model, x: torch.stack([model(rows, SPLITS).square().mean() for rows in x.split(8)]).mean(),
            )

    @pytest.mark.long
    def test_checkpoints_change_no_bit(self) -> None:
        """From each layout to each: masters, and what the layer computes with its planes of 8 bits."""
        layouts = self.layouts()
        recipes = {"gtp": "mxfp8", "whole experts": "mxfp8", "gtp, two ranks": "mxfp8"}
        x = torch.randn(8, WIDTH)
        for source, shard in layouts.items():
            torch.manual_seed(1)
            saved = Layer()
            expected = copy.deepcopy(saved).state_dict()
            saved = shard(saved)
            with shared_directory() as path:
                dcp.save(saved.state_dict(), checkpoint_id=path)
                outputs = []
                for target, other in layouts.items():
                    torch.manual_seed(2)
                    model: nn.Module = Layer()
                    if target in recipes:
                        quantize_(model, recipes[target], filter_fn=lambda module, name: hasattr(module, "num_groups"))
                    model = other(model)
                    state = model.state_dict()
                    dcp.load(state, checkpoint_id=path)
                    model.load_state_dict(state)
                    for name, value in model.state_dict().items():
                        self.assertEqual(full(value), expected[name], rtol=0, atol=0, msg=f"{source} to {target}")
                    if target in recipes:
                        outputs.append(model(x, SPLITS))
                for output in outputs[1:]:
                    self.assertEqual(output, outputs[0], rtol=0, atol=0)
