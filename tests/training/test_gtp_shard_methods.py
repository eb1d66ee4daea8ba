"""Methods beside forward: ``register_gtp_forward_method``, by itself and beside ``fully_shard``'s own."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn as nn
from common import ALL, GlooTest, assert_same_params, rows_of_rank
from runtime_common import check_step, make_rows, runtime_of
from schedules import explicit
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

from dtensor_gtp import MixedPrecisionPolicy, gtp_shard, register_gtp_forward_method, sharding_report
from dtensor_gtp._schedule.passes import ChainKey, Entry


class AutoEncoder(nn.Module):
    """Its methods use its own parameters as well as submodules, and forward uses other modules than they do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.outer = nn.ModuleList(nn.Linear(12, 12) for _ in range(2))
        self.mix = nn.Parameter(torch.randn(12, 12))
        self.scale = nn.Parameter(torch.rand(12) + 1)

    def encode(self, x: torch.Tensor, *, gain: float = 1.0) -> torch.Tensor:
        """Of rows."""
        for layer in self.inner:
            x = torch.tanh(layer(x))
        return x @ self.mix * self.scale * gain

    def decode(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.outer:
            x = torch.tanh(layer(x @ self.mix))
        return x

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.decode(self.encode(x))


def seeded() -> AutoEncoder:
    torch.manual_seed(3)
    return AutoEncoder()


Loss = Callable[[Any, torch.Tensor], torch.Tensor]


def loss_of(model: AutoEncoder, x: torch.Tensor) -> torch.Tensor:
    """Both methods called from outside, and forward, in one graph."""
    code = model.encode(x, gain=0.5)
    return model.decode(code).square().mean() + model(x).square().mean()


def encode_and_decode(model: Any, x: torch.Tensor) -> torch.Tensor:
    return model.decode(model.encode(x)).square().mean()


def recomputed(model: Any, x: torch.Tensor) -> torch.Tensor:
    code = checkpoint(model.encode, x, use_reentrant=False)
    return checkpoint(model.decode, code, use_reentrant=False).square().mean()


class TestMethods(GlooTest):
    world_size = 2

    def sharded(self, **options: object) -> Any:
        model = gtp_shard(seeded(), self.gtp_mesh(), **{"schedule": ALL, **options})
        for name in ("encode", "decode"):
            register_gtp_forward_method(model, name)
        return model

    def check(self, model: Any, loss: Loss = loss_of, of_model: Loss | None = None) -> None:
        """``model`` trains with ``of_model`` as one process does with ``loss``."""
        reference = seeded()

        def step(each: Any, x: torch.Tensor) -> None:
            (loss if each is reference else of_model or loss)(each, x).backward()

        for seed in range(2):
            check_step(reference, model, self.gtp_mesh(), make_rows(seed), step, is_idle=False)

    def test_same_as_one_process(self) -> None:
        """With weights that are prefetched or kept; recomputed; after an exception."""
        for options in ({}, {"prefetch_depth": 3}, {"keep_nbytes": 1 << 12}, {"keep_last": False}):
            self.check(self.sharded(schedule=explicit(min_shard_numel=0, **options)))
        model = self.sharded()
        self.check(model, recomputed)
        model = self.sharded()
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model.encode(torch.ones(2, 5))
        self.assertFalse(runtime_of(model).is_materializing)
        self.check(model)

    def test_compiled(self) -> None:
        """A compiled method, and methods that compiled code calls."""
        model = self.sharded()
        encode = torch.compile(model.encode, backend="aot_eager")
        self.check(model, lambda each, x: each.encode(x).square().mean(), lambda _, x: encode(x).square().mean())
        self.check(self.sharded(), encode_and_decode, torch.compile(encode_and_decode, backend="aot_eager"))

    def test_a_method_is_one_pass_with_a_plan_of_its_own(self) -> None:
        model = self.sharded()
        x = torch.randn(2, 12)
        for _ in range(2):
            model.encode(x).sum().backward()
            model(x).sum().backward()
        chains, targets = runtime_of(model).passes.chains, runtime_of(model).members.gatherables
        uses = {
            entry.method: [targets[use].weight.fqn for use in chains[ChainKey(entry, True)].plan.uses]
            for entry in (Entry(model), Entry(model, "encode"))
        }
        encode = ["inner.0.weight", "inner.1.weight", "mix"]
        self.assertEqual(uses["encode"], encode)
        self.assertEqual(uses["forward"][:3], encode)
        self.assertEqual(len({key.entry for key in chains if chains[key].plan.uses}), 2, "no submodule is a pass")
        self.assertIn("forward of AutoEncoder.encode", str(sharding_report(model)))

    def test_inputs_and_outputs_are_cast(self) -> None:
        model = self.sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32))
        dtypes = []
        model.inner[0].register_forward_pre_hook(lambda _, args: dtypes.append(args[0].dtype))
        self.assertEqual(model.encode(torch.randn(2, 12)).dtype, torch.float32)
        self.assertEqual(dtypes, [torch.bfloat16])

    def test_on_a_submodule_and_under_no_grad(self) -> None:
        model = nn.Sequential(seeded(), nn.Linear(12, 2))
        want = model[0].encode(torch.ones(1, 12)).detach()
        gtp_shard(model, self.gtp_mesh(), schedule=ALL)
        register_gtp_forward_method(model[0], "encode")
        with torch.no_grad():
            torch.testing.assert_close(model[0].encode(torch.ones(1, 12)), want)
        with pytest.raises(RuntimeError, match="mixed torch"):
            model[0].decode(torch.ones(1, 12))  # not registered, and uses a weight of its own

    def test_signature_and_refusals(self) -> None:
        model = self.sharded()
        self.assertEqual(inspect.signature(model.encode), inspect.signature(seeded().encode))
        self.assertEqual((model.encode.__doc__, model.encode.__self__), ("Of rows.", model))
        for name in ("encod", "scale", "inner", "training"):
            with pytest.raises(ValueError, match=f"the name of a method of AutoEncoder, but got '{name}'"):
                register_gtp_forward_method(model, name)
        plain = seeded()
        before = copy.copy(plain.__dict__)
        register_gtp_forward_method(plain, "no_method_of_a_plain_module")
        self.assertEqual(plain.__dict__, before)


class TestMethodsBesideFullyShard(GlooTest):
    def test_same_as_one_process(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "gtp"))
        model, reference = seeded(), seeded()
        gtp_shard(model, mesh["gtp"], schedule=ALL)
        fully_shard(model, mesh=mesh["dp"])
        for name in ("encode", "decode"):
            register_gtp_forward_method(model, name)
            register_fsdp_forward_method(model, name)
        encode_and_decode(reference, make_rows(0)).backward()
        encode_and_decode(model, rows_of_rank(make_rows(0), mesh)).backward()
        assert_same_params(model, reference, "grad")
