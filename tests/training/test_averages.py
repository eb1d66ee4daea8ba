"""Averages of sharded weights: ``ShardedEMA`` beside torch's own in one process, swapped in, saved and loaded."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from common import ALL, GlooTest, fake_mesh, full, rows_of_rank, shared_directory
from runtime_common import WIDTH, make_rows
from torch.distributed.fsdp import fully_shard
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.testing._internal.common_utils import TestCase

from dtensor_gtp import gtp_shard, quantize_
from dtensor_gtp.optim import ShardedEMA


def make(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, 33), nn.LayerNorm(33), nn.Linear(33, WIDTH)).to(dtype)


@torch.no_grad()
def take_over(reference: nn.Module, model: nn.Module) -> None:
    for mine, other in zip(reference.parameters(), model.parameters(), strict=True):
        mine.copy_(full(other))


class TestShardedEMA(GlooTest):
    def train(self, model: nn.Module, mesh: Any, ema: ShardedEMA, reference: AveragedModel | None = None) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        for step in range(2):
            model(rows_of_rank(make_rows(step), mesh)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            ema.update()
            if reference is not None:
                present = make()
                take_over(present, model)
                reference.update_parameters(present)

    def test_same_bits_as_one_process(self) -> None:
        for mesh, shard in (
            (self.gtp_mesh(), lambda m, mesh: gtp_shard(m, mesh, schedule=ALL)),
            (self.hsdp_mesh(), lambda m, mesh: gtp_shard(m, mesh, schedule=ALL, reshard_after_forward=False)),
            (self.gtp_mesh(), lambda m, mesh: fully_shard(m, mesh=mesh)),
        ):
            model = shard(make(), mesh)
            reference = AveragedModel(make(), multi_avg_fn=get_ema_multi_avg_fn(0.9))
            reference.update_parameters(reference.module)  # the first call copies
            ema = ShardedEMA(model, decay=0.9)
            self.train(model, mesh, ema, reference)
            x, own = make_rows(5), [full(param).clone() for param in model.parameters()]
            before = model(x)
            with ema.averaged():
                self.assertEqual(model(x), reference(x), rtol=0, atol=0)
                for mine, other in zip(model.parameters(), reference.parameters(), strict=True):
                    self.assertEqual(full(mine), other, rtol=0, atol=0)
            self.assertEqual(model(x), before, rtol=0, atol=0)
            self.assertEqual([full(param) for param in model.parameters()], own, rtol=0, atol=0)

    def test_averages_of_bfloat16_in_float32(self) -> None:
        """Small changes are not lost; what the model gets is rounded once; its weights come back."""
        model = gtp_shard(make(torch.bfloat16), self.gtp_mesh(), schedule=ALL)
        ema = ShardedEMA(model, decay=0.999, dtype=torch.float32)
        weight = model[0].weight
        first = full(weight).float()
        with torch.no_grad():
            weight.mul_(2)
        own = full(weight)
        ema.update()
        expected = first.lerp(2 * first, 1 - 0.999)
        self.assertEqual(full(ema.state_dict()["averages"]["0.weight"]), expected, rtol=0, atol=0)
        ema.swap()
        self.assertEqual(full(weight), expected.bfloat16(), rtol=0, atol=0)
        ema.restore()
        self.assertEqual(full(weight), own, rtol=0, atol=0)

    def test_checkpoint_on_another_topology(self) -> None:
        model = gtp_shard(make(), self.gtp_mesh(), schedule=ALL)
        ema = ShardedEMA(model, decay=0.9)
        self.train(model, self.gtp_mesh(), ema)
        other = ShardedEMA(gtp_shard(make(), self.hsdp_mesh(), schedule=ALL))
        alone = ShardedEMA(make())
        with shared_directory() as directory:
            dcp.save({"ema": ema}, checkpoint_id=directory)
            for loaded in (other, alone):
                dcp.load({"ema": loaded}, checkpoint_id=directory)
        averages = ema.state_dict()["averages"]
        for loaded in (other, alone):
            self.assertEqual(loaded.decay, 0.9)
            for name, average in loaded.state_dict()["averages"].items():
                self.assertEqual(full(average), full(averages[name]), rtol=0, atol=0)
        whole = {name: full(average) + 1 for name, average in averages.items()}
        ema.load_state_dict({"averages": whole, "decay": 0.5})
        for name, average in ema.state_dict()["averages"].items():
            self.assertEqual(full(average), whole[name], rtol=0, atol=0)


class TestShardedEMAAlone(TestCase):
    def test_names_of_compiled_modules(self) -> None:
        """``torch.compile(module)`` is a module around it; one like it here, as the compiler takes long to import."""
        model = make()
        names = ShardedEMA(model).state_dict()["averages"].keys()
        compiled = nn.ModuleDict({"_orig_mod": model})
        model[0] = nn.ModuleDict({"_orig_mod": model[0]})
        self.assertEqual(ShardedEMA(compiled).state_dict()["averages"].keys(), names)

    def test_refusals(self) -> None:
        model = make()
        ema = ShardedEMA(model)
        with self.assertRaisesRegex(RuntimeError, "Call swap"):
            ema.restore()
        ema.swap()
        for call in (ema.swap, ema.update):
            with self.assertRaisesRegex(RuntimeError, r"Call restore\(\)"):
                call()
        with self.assertRaisesRegex(ValueError, r"a decay in \[0, 1\], but got 1.5"):
            ShardedEMA(model, decay=1.5)
        state = copy.deepcopy(ema.state_dict())
        state["averages"]["0.bias"] = torch.ones(2)
        with self.assertRaisesRegex(ValueError, r"average of '0.bias' of shape \(33,\), but got \(2,\)"):
            ema.load_state_dict(state)
        del state["averages"]["0.bias"]
        with self.assertRaisesRegex(ValueError, r"but only one of the two has \['0.bias'\]"):
            ema.load_state_dict(state)

    def test_quantized_weights(self) -> None:
        """Masters are averaged; native weights have none."""
        with fake_mesh(2) as mesh:
            plain = nn.Sequential(nn.Linear(64, 64))
            for shard in (lambda m: gtp_shard(m, mesh, schedule=ALL), lambda m: fully_shard(m, mesh=mesh)):
                model = shard(quantize_(copy.deepcopy(plain), "mxfp8"))
                average = ShardedEMA(model).state_dict()["averages"]["0.weight"]
                self.assertIs(type(average.to_local()), torch.Tensor)
                native = shard(quantize_(copy.deepcopy(plain), "mxfp8", storage="native"))
                with self.assertRaisesRegex(NotImplementedError, r"'0.weight' of shape \(64, 64\) has native storage"):
                    ShardedEMA(native)
                native.requires_grad_(False)
                self.assertEqual(ShardedEMA(native).state_dict()["averages"].keys(), {"0.bias"})
