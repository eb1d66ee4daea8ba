"""torchao's own float8 weights under ``gtp_shard``: gathered in float8, and trained as under ``fully_shard``."""

import importlib.util
import unittest
from typing import Any

import torch
import torch.nn as nn
from common import ALL, GlooTest, full, rows_of_rank
from quant_common import wire_traffic
from runtime_common import assert_idle
from torch.distributed.fsdp import fully_shard

from dtensor_gtp import gtp_shard, sharding_report


def float8(model: nn.Module) -> nn.Module:
    from torchao.float8 import Float8LinearConfig, convert_to_float8_training

    # A CPU has no kernels for it.
    config = Float8LinearConfig(enable_fsdp_float8_all_gather=True, emulate=True)
    return convert_to_float8_training(model, config=config)


@unittest.skipUnless(importlib.util.find_spec("torchao"), "torchao is not installed")
class TestTorchao(GlooTest):
    world_size = 2

    def _model(self) -> nn.Module:
        torch.manual_seed(0)
        return float8(nn.Sequential(nn.Linear(32, 48), nn.Tanh(), nn.Linear(48, 32, bias=False), nn.Linear(32, 16)))

    def test_as_under_fully_shard(self) -> None:
        """The same hooks, the same scales, the same float8 layer: gradients and parameters are the same bits."""
        mesh = self.gtp_mesh()
        models: list[Any] = [self._model() for _ in range(2)]
        gtp_shard(models[0], mesh, schedule=ALL)
        fully_shard(models[1], mesh=mesh)  # with the biases: gloo gathers mixed dtypes as bytes, but no float8
        optimizers = [torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9) for model in models]
        for step in range(2):
            x = rows_of_rank(torch.randn(8, 32, generator=torch.Generator().manual_seed(step)), mesh)
            for microbatch in (x, -x):
                losses = [model(microbatch).square().mean() for model in models]
                self.assertTrue(torch.equal(*losses))
                for loss in losses:
                    loss.backward()
            for (name, a), b in zip(models[0].named_parameters(), models[1].parameters(), strict=True):
                torch.testing.assert_close(plain(a.grad), plain(b.grad), msg=lambda m, n=name: f"{n}: {m}")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            with torch.no_grad():
                for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
                    torch.testing.assert_close(plain(a), plain(b))
        assert_idle(models[0])
        uses = {row.name: row.use for row in sharding_report(models[0]).rows}
        self.assertEqual(uses["0.weight"], "attribute, its own hooks gather and use it")

    def test_float8_crosses_the_wire(self) -> None:
        mesh = self.gtp_mesh()
        model = gtp_shard(self._model(), mesh, schedule=ALL)
        for _ in range(2):
            with wire_traffic() as forward:
                loss = model(torch.randn(4, 32)).sum()
            with wire_traffic() as backward:
                loss.backward()
        sizes = [48 * 32 // 2, 32 * 48 // 2, 16 * 32 // 2]
        for traffic, expected in ((forward, sizes), (backward, sizes)):
            gathers = [nbytes for name, dtype, nbytes in traffic.calls if "gather" in name and dtype == torch.uint8]
            self.assertTrue(set(gathers) <= set(expected) and len(gathers) >= 2, gathers)
            wide = [call for call in traffic.calls if "gather" in call[0] and call[1] != torch.uint8]
            self.assertEqual(wide, [])


def plain(tensor: Any) -> torch.Tensor:
    whole = full(tensor)
    return getattr(whole, "_tensor", whole)
