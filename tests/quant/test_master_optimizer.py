"""``MasterOptimizer`` in one process: what it takes, keeps, hands on and refuses; compiled code of native weights."""

import copy
import io
import unittest
from typing import Any

import torch
import torch.nn as nn
from checkpoint_common import local
from common import ALL, fake_mesh
from quant_common import Net, blocks_only, compile_layers, dequantized, loss_of, tokens_of
from torch._dynamo.utils import counters

from dtensor_gtp import gtp_shard, quantize_
from dtensor_gtp.quant import MXFP8, Direction
from dtensor_gtp.quant.master_optimizer import MasterOptimizer


def make(**options: Any) -> nn.Linear:
    torch.manual_seed(0)
    layer = nn.Linear(40, 33, **options)
    return quantize_(layer, "mxfp8", storage="native")  # type: ignore[return-value]


def step(layer: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(seed))
    layer(x.to(next(iter(layer.parameters())).dtype)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class TestMasterOptimizer(unittest.TestCase):
    def test_steps_are_those_of_the_stock_optimizer_on_masters(self) -> None:
        for cls, options in (
            (torch.optim.AdamW, {"fused": True}),
            (torch.optim.AdamW, {"foreach": True}),
            (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        ):
            layer = make()
            start = layer.weight.dense() + 1e-4
            optimizer = MasterOptimizer(layer.parameters(), cls, masters={"weight": start}, lr=0.1, **options)
            master, bias = nn.Parameter(start.clone()), nn.Parameter(layer.bias.detach().clone())
            reference = cls([master, bias], lr=0.1, **options)
            for number in range(2):

                def closure(layer: nn.Module = layer, optimizer: Any = optimizer) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss: torch.Tensor = layer(torch.ones(2, 40)).square().sum()
                    loss.backward()
                    return loss

                if number == 0:
                    closure()
                    optimizer.step()
                else:
                    self.assertTrue(optimizer.step(closure).isfinite())
                master.grad, bias.grad = layer.weight.grad.clone(), layer.bias.grad.clone()
                reference.step()
                self.assertTrue(torch.equal(optimizer.state[layer.weight]["master"], master))
                self.assertTrue(torch.equal(layer.bias, bias))
                self.assertTrue(
                    torch.equal(layer.weight.dense(), dequantized(master.detach(), MXFP8(), Direction.ROWWISE))
                )

    def test_state_dict(self) -> None:
        """Masters and moments stay in float32, also beside a weight of bfloat16; what is loaded counts."""
        layer = make(dtype=torch.bfloat16)
        optimizer = MasterOptimizer(layer.named_parameters(), torch.optim.AdamW, lr=0.1)
        self.assertEqual(optimizer.state_dict()["state"], {})
        step(layer, optimizer)
        file = io.BytesIO()
        torch.save([layer.state_dict(), optimizer.state_dict()], file)
        expected = {key: value.clone() for key, value in optimizer.state[layer.weight].items()}
        self.assertEqual({value.dtype for value in expected.values()}, {torch.float32})
        other = make(dtype=torch.bfloat16)
        resumed = MasterOptimizer(other.named_parameters(), torch.optim.AdamW, lr=0.5)
        step(other, resumed, seed=1)
        file.seek(0)
        model_state, optimizer_state = torch.load(file)
        other.load_state_dict(model_state)
        resumed.load_state_dict(optimizer_state)
        for key, value in expected.items():
            self.assertTrue(torch.equal(resumed.state[other.weight][key], value), key)
            self.assertEqual(resumed.state[other.weight][key].dtype, value.dtype)
        for module, opt in ((layer, optimizer), (other, resumed)):
            step(module, opt, seed=2)
        for name, value in layer.state_dict().items():
            self.assertTrue(torch.equal(other.state_dict()[name], value), name)

    def test_weights_that_were_loaded_count(self) -> None:
        """A master is made anew of a weight that was written to since, but not if that is its own after all."""
        for is_sharded in (False, True):
            with self.subTest(is_sharded=is_sharded), fake_mesh(1) as mesh:
                layer = make()
                if is_sharded:
                    gtp_shard(layer, mesh, schedule=ALL)
                optimizer = MasterOptimizer(layer.parameters(), torch.optim.SGD, lr=0.01)
                step(layer, optimizer)
                good = {name: value.clone() for name, value in layer.state_dict().items()}
                masters = optimizer.state[layer.weight]["master"].clone()
                step(layer, optimizer, seed=1)
                other = {name: value.clone() for name, value in layer.state_dict().items()}
                layer.load_state_dict(good)
                with torch.no_grad():
                    expected = local(layer.weight).dense().clone()
                for group in optimizer.param_groups:
                    group["lr"] = 1e-30
                step(layer, optimizer, seed=2)
                self.assertTrue(torch.equal(local(optimizer.state[layer.weight]["master"]), expected))
                # Swapped for a while: the master keeps what the format has no bits for.
                with torch.no_grad():
                    optimizer.state[layer.weight]["master"].copy_(masters)
                step(layer, optimizer, seed=3)
                own = {name: value.clone() for name, value in layer.state_dict().items()}
                layer.load_state_dict(other)
                layer.load_state_dict(own)
                step(layer, optimizer, seed=4)
                self.assertTrue(torch.equal(local(optimizer.state[layer.weight]["master"]), local(masters)))

    def test_schedulers_groups_and_scalers(self) -> None:
        layer, late = make(), nn.Linear(3, 3)
        optimizer = MasterOptimizer(
            [{"params": [layer.weight], "lr": 1.0}, {"params": [layer.bias]}], torch.optim.SGD, lr=0.5
        )
        self.assertEqual([group["lr"] for group in optimizer.param_groups], [1.0, 0.5])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        optimizer.add_param_group({"params": list(late.parameters()), "lr": 3.0})
        step(layer, optimizer)
        scheduler.step()
        before = optimizer.state[layer.weight]["master"].clone()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(layer(torch.ones(1, 40)).sum()).backward()
        scaler.scale(late(torch.ones(1, 3)).sum()).backward()
        values = late.bias.detach().clone()
        scaler.step(optimizer)
        self.assertTrue(torch.equal(optimizer.state[layer.weight]["master"], before - 0.5))
        self.assertTrue(torch.equal(late.bias, values - 1.5))

    def test_frozen_and_later_trained(self) -> None:
        layer = make()
        layer.weight.requires_grad_(False)
        before = {name: value.clone() for name, value in layer.state_dict().items()}
        optimizer = MasterOptimizer(layer.parameters(), torch.optim.SGD, lr=0.1)
        step(layer, optimizer)
        self.assertNotIn(layer.weight, optimizer.state)
        for name, value in layer.state_dict().items():
            self.assertEqual(torch.equal(value, before[name]), name != "bias", name)
        layer.weight.requires_grad_(True)
        step(layer, optimizer)
        self.assertIn("master", optimizer.state[layer.weight])

    def test_errors(self) -> None:
        layer = make()
        for error, cls, masters, message in (
            (TypeError, "SGD", None, "expects a class of optimizers, but got 'SGD'"),
            (ValueError, torch.optim.SGD, {"up": torch.ones(1)}, r"of its native parameters, but got \['up'\]"),
            (ValueError, torch.optim.SGD, {"weight": torch.ones(3, 3)}, r"of shape \(33, 40\) for 'weight', but got"),
        ):
            with self.assertRaisesRegex(error, message):
                MasterOptimizer(layer.parameters(), cls, lr=0.1, masters=masters)  # type: ignore[arg-type]

    def test_compiled_blocks_share_one_graph(self) -> None:
        """Sharded and without sharding."""
        with fake_mesh(1) as mesh:
            for recipe, is_sharded in (("nvfp4", True), ("float8_rowwise", False)):
                torch.manual_seed(0)
                models = [Net()]
                models.append(copy.deepcopy(models[0]))
                for model in models:
                    quantize_(model, recipe, filter_fn=blocks_only, storage="native")
                    if is_sharded:
                        gtp_shard(model, mesh, schedule=ALL)
                torch._dynamo.reset()
                counters.clear()
                compile_layers(models[1])
                for model in models:
                    loss_of(model, tokens_of(0)).backward()
                self.assertEqual(counters["stats"]["unique_graphs"], 1)
                for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
                    torch.testing.assert_close(local(a.grad), local(b.grad))
