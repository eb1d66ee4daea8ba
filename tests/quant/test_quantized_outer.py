"""Quantized weights with a maximum over the whole tensor, under ``fully_shard`` on two axes and with tp: rows of the
support matrix that ranks could get wrong by taking the maximum of their own part.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
from common import GlooTest, _mesh
from quant_common import Net, blocks_only, check, fsdp, gtp
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_gtp import quantize_
from dtensor_gtp.quant import NVFP4, Float8Tensorwise, Recipe

COLUMNS: dict[str, Any] = {"shard_placement_fn": lambda param: Shard(1) if param.ndim == 2 else None}
# Recipes with an amax, and who cuts columns: NVFP4 has blocks of rows, too.
WITH_AMAX: tuple[tuple[Recipe, dict[str, Any]], ...] = ((Float8Tensorwise(), {}), (NVFP4(), COLUMNS))


def up_only(module: nn.Module, name: str) -> bool:
    return blocks_only(module, name) and name.endswith("up")


class TestHSDP(GlooTest):
    def test_alone(self) -> None:
        mesh = _mesh((2, 2), ("replicate", "dp"))
        for recipe, _ in WITH_AMAX:
            torch.manual_seed(0)

            def shard(model: nn.Module, recipe: Recipe = recipe) -> nn.Module:
                return fsdp(quantize_(model, recipe, filter_fn=up_only), mesh)

            check(Net(hidden=128), recipe, shard, mesh, names=up_only, steps=2)

    def test_around_gtp(self) -> None:
        for shape in ((2, 1, 2), (1, 2, 2)):
            mesh = _mesh(shape, ("replicate", "dp", "gtp"))
            for recipe, inner in WITH_AMAX:
                torch.manual_seed(0)
                shard = gtp(recipe, mesh["gtp"], **inner)
                outer = mesh["replicate", "dp"]
                check(Net(), recipe, lambda m, s=shard, o=outer: fsdp(s(m), o), mesh, steps=1)


class TestThreeAxes(GlooTest):
    """dp x gtp x tp, two ranks on each pair of axes with tp; TestHSDP has the other pair."""

    def test_training(self) -> None:
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for shape in ((2, 1, 2), (1, 2, 2)):
            mesh = _mesh(shape, ("dp", "gtp", "tp"))
            for recipe, inner in WITH_AMAX:
                torch.manual_seed(0)

                def shard(model: nn.Module, recipe: Recipe = recipe, inner: Any = inner, mesh: Any = mesh) -> nn.Module:
                    for layer in model.layers:  # type: ignore[union-attr]
                        parallelize_module(layer, mesh["tp"], plan)
                    return fsdp(gtp(recipe, mesh["gtp"], **inner)(model), mesh["dp"])

                check(Net(hidden=256), recipe, shard, mesh["dp", "gtp"], steps=1, is_exact=False)
