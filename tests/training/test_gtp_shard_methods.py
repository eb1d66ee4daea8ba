"""Methods beside forward: ``register_gtp_forward_method``, by itself and beside ``fully_shard``'s own."""

from __future__ import annotations

import copy
import inspect

import pytest
import torch
import torch.nn as nn
from common import ALL, GlooTest, assert_same_params, rows_of_rank
from runtime_common import runtime_of
from schedules import explicit
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method
from torch.utils.checkpoint import checkpoint

from dtensor_gtp import MixedPrecisionPolicy, gtp_shard, register_gtp_forward_method, sharding_report
from dtensor_gtp._schedule.order_of_uses import ChainKey, Entry


class AutoEncoder(nn.Module):
    """Its methods use its own parameters as well as submodules, and forward uses other modules than they do."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
        self.outer = nn.ModuleList(nn.Linear(12, 12) for _ in range(3))
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


def loss_of(model: AutoEncoder, x: torch.Tensor) -> torch.Tensor:
    """Both methods called from outside, and forward, in one graph."""
    code = model.encode(x, gain=0.5)
    return model.decode(code).square().mean() + model(x).square().mean()


class TestMethods(GlooTest):
    def _sharded(self, **options: object) -> AutoEncoder:
        model = seeded()
        gtp_shard(model, self.gtp_mesh(), **{"schedule": ALL, **options})
        for name in ("encode", "decode"):
            register_gtp_forward_method(model, name)
        return model

    def _train(self, model: AutoEncoder, reference: AutoEncoder, *, loss=loss_of, steps: int = 2) -> None:
        optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (model, reference)]
        for step in range(steps):
            x = torch.randn(8, 12, generator=torch.Generator().manual_seed(step))
            loss(reference, x).backward()
            loss(model, rows_of_rank(x, self.gtp_mesh())).backward()
            assert_same_params(model, reference, "grad")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            assert_same_params(model, reference)

    def test_same_as_one_process(self) -> None:
        self._train(self._sharded(), seeded())

    def test_weights_kept_and_prefetched(self) -> None:
        for options in ({"prefetch_depth": 3}, {"keep_nbytes": 1 << 12}, {"keep_last": False}):
            schedule = explicit(min_shard_numel=0, **options)
            self._train(self._sharded(schedule=schedule), seeded())

    def test_under_checkpointing(self) -> None:
        def loss(model: AutoEncoder, x: torch.Tensor) -> torch.Tensor:
            code = checkpoint(model.encode, x, use_reentrant=False)
            return checkpoint(model.decode, code, use_reentrant=False).square().mean()

        self._train(self._sharded(), seeded(), loss=loss)

    def test_compiled(self) -> None:
        def loss(model: AutoEncoder, x: torch.Tensor) -> torch.Tensor:
            return compiled[model](x).square().mean()

        model, reference = self._sharded(), seeded()
        compiled = {model: torch.compile(model.encode, backend="aot_eager"), reference: reference.encode}
        self._train(model, reference, loss=loss)

    def test_called_by_compiled_code(self) -> None:
        def both(model: AutoEncoder, x: torch.Tensor) -> torch.Tensor:
            return model.decode(model.encode(x)).square().mean()

        model, compiled = self._sharded(), torch.compile(both, backend="aot_eager")
        self._train(model, seeded(), loss=lambda each, x: (compiled if each is model else both)(each, x))

    def test_a_method_is_one_pass_with_a_plan_of_its_own(self) -> None:
        model = self._sharded()
        x = torch.randn(2, 12)
        for _ in range(2):
            model.encode(x).sum().backward()
            model(x).sum().backward()
        chains, targets = runtime_of(model).passes.chains, runtime_of(model).members.gatherables
        uses = {
            entry.method: [targets[use].weight.fqn for use in chains[ChainKey(entry, True)].plan.uses]
            for entry in (Entry(model), Entry(model, "encode"))
        }
        encode = ["inner.0.weight", "inner.1.weight", "inner.2.weight", "mix"]
        self.assertEqual(uses["encode"], encode)
        self.assertEqual(uses["forward"][:4], encode)
        self.assertEqual(len({key.entry for key in chains if chains[key].plan.uses}), 2, "no submodule is a pass")
        self.assertIn("forward of AutoEncoder.encode", str(sharding_report(model)))

    def test_inputs_and_outputs_are_cast(self) -> None:
        model = self._sharded(mp_policy=MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32))
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

    def test_an_exception_ends_the_pass(self) -> None:
        model, reference = self._sharded(), seeded()
        with pytest.raises(RuntimeError, match="shapes cannot be multiplied"):
            model.encode(torch.ones(2, 5))
        self.assertFalse(runtime_of(model).is_materializing)
        self._train(model, reference, steps=1)

    def test_beside_fully_shard(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "gtp"))
        model, reference = seeded(), seeded()
        gtp_shard(model, mesh["gtp"], schedule=ALL)
        fully_shard(model, mesh=mesh["dp"])
        for name in ("encode", "decode"):
            register_gtp_forward_method(model, name)
            register_fsdp_forward_method(model, name)
        x = torch.randn(8, 12)

        def loss(model: AutoEncoder, x: torch.Tensor) -> torch.Tensor:
            return model.decode(model.encode(x)).square().mean()

        loss(reference, x).backward()
        loss(model, rows_of_rank(x, mesh)).backward()
        assert_same_params(model, reference, "grad")

    def test_signature_and_refusals(self) -> None:
        model = self._sharded()
        self.assertEqual(inspect.signature(model.encode), inspect.signature(seeded().encode))
        self.assertEqual((model.encode.__doc__, model.encode.__self__), ("Of rows.", model))
        for name in ("encod", "scale", "inner", "training"):
            with pytest.raises(ValueError, match=f"the name of a method of AutoEncoder, but got '{name}'"):
                register_gtp_forward_method(model, name)
        plain = seeded()
        before = copy.copy(plain.__dict__)
        register_gtp_forward_method(plain, "no_method_of_a_plain_module")
        self.assertEqual(plain.__dict__, before)
