"""Tensor subclasses with ``fully_shard``'s hooks under ``gtp_shard``, torchao's float8 weights too: gathered and used
as their hooks say."""

from __future__ import annotations

import importlib.util
import unittest
from typing import Any

import torch
import torch.nn as nn
from common import ALL, GlooTest, _mesh, assert_same_params, full, rows_of_rank
from extension_common import Scaled, ScaledLinear, make_scaled
from quant_common import wire_traffic
from runtime_common import assert_idle, members_of, shard_copy, square_step
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils._pytree import tree_map_only

from dtensor_gtp import gtp_shard, sharding_report
from dtensor_gtp._torch_compat import wrapper_tensor


class Halved(torch.Tensor):
    """Values that are gathered as 16 bits, seen as ``wire_dtype``."""

    def __new__(cls, values: torch.Tensor, wire_dtype: torch.dtype) -> Halved:
        return wrapper_tensor(cls, values, values.shape, values.dtype)

    def __init__(self, values: torch.Tensor, wire_dtype: torch.dtype) -> None:
        self._values, self._wire_dtype = values, wire_dtype

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        wire_dtypes: list[torch.dtype] = []

        def unwrap(tensor: Halved) -> torch.Tensor:
            wire_dtypes.append(tensor._wire_dtype)
            return tensor._values

        args, kwargs = tree_map_only(Halved, unwrap, (args, kwargs or {}))
        return tree_map_only(torch.Tensor, lambda t: Halved(t, wire_dtypes[0]), func(*args, **kwargs))

    def fsdp_pre_all_gather(self, mesh: DeviceMesh, size: torch.Size, stride: Any, module: Any, policy: Any) -> Any:
        """Padded to the size of the largest shard, which ``fully_shard`` demands."""
        rows = self._values.new_full((-(-size[0] // mesh.size()), *size[1:]), float("nan"))
        rows[: len(self._values)] = self._values
        return (rows.bfloat16().view(self._wire_dtype),), None

    def fsdp_post_all_gather(self, outputs: Any, metadata: Any, dtype: torch.dtype, *, out: Any = None) -> Any:
        return outputs[0].view(torch.bfloat16).to(dtype), outputs


def plain(value: torch.Tensor) -> torch.Tensor:
    """Of a ``Scaled`` weight or one of torchao."""
    whole = full(value)
    return whole._values if isinstance(whole, Scaled) else getattr(whole, "_tensor", whole)


class TestHooks(GlooTest):
    def test_under_gtp_shard(self) -> None:
        """Even shards and shards of which the last is short, on a gtp and on an HSDP mesh."""
        for mesh in (self.gtp_mesh(), self.hsdp_mesh()):
            for num_rows in (24, 22):
                reference = make_scaled(num_rows)
                model = shard_copy(reference, mesh)
                for step in range(2):
                    self.step(reference, model, mesh, step)
                self.assertIs(type(model[0].weight.to_local()), Scaled)
                assert_idle(model)
        uses = {row.name: row.use for row in sharding_report(model).rows}
        self.assertEqual(uses["0.weight"], "attribute, its own hooks gather and use it")

    def step(self, reference: nn.Module, model: nn.Module, mesh: DeviceMesh, number: int) -> None:
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(number))
        for module, rows in ((reference, x), (model, rows_of_rank(x, mesh))):
            module.zero_grad()
            square_step(module, rows)
        assert_same_params(model, reference, "grad")
        for module in (reference, model):
            torch.optim.SGD(module.parameters(), lr=0.1).step()
        with torch.no_grad():
            for param, want in zip(model.parameters(), reference.parameters(), strict=True):
                torch.testing.assert_close(plain(param), plain(want))
                want.copy_(plain(param))  # rounding to codes would amplify a difference in the last bit

    def test_sixteen_bits_cross_the_wire(self) -> None:
        """bfloat16, which the hook says, and int16, which neither gloo nor NCCL knows; with short and empty shards,
        which the hook pads."""
        for rows in (8, 3):
            for dtype in (torch.bfloat16, torch.int16):
                torch.manual_seed(0)
                weight = torch.randn(rows, 16).bfloat16().float()
                layer = nn.Linear(16, rows, bias=False)
                layer.weight = nn.Parameter(Halved(weight, dtype))
                model = gtp_shard(layer, self.gtp_mesh(), schedule=ALL)
                x = torch.randn(4, 16)
                self.assertEqual(model(x), x @ weight.t())

    def test_whole_values_are_loaded_into_the_class(self) -> None:
        """Copied; assigned values would replace it."""
        model = gtp_shard(make_scaled(), self.gtp_mesh(), schedule=ALL)
        values = {name: torch.full(param.shape, 2.0) for name, param in model.named_parameters()}
        model.load_state_dict(values)
        with self.assertRaisesRegex(RuntimeError, "'0.weight' was replaced after gtp_shard by a Parameter"):
            model.load_state_dict(values, assign=True)
        self.assertIs(type(model[0].weight.to_local()), Scaled)
        self.assertEqual(plain(model[0].weight), values["0.weight"])

    def test_hooks_that_come_too_late(self) -> None:
        """On the local tensor after ``gtp_shard``: all ranks say so."""
        model = gtp_shard(nn.Sequential(nn.Linear(16, 16)), self.gtp_mesh(), schedule=ALL)
        local = members_of(model).weights[0].shard
        local.fsdp_pre_all_gather = local.fsdp_post_all_gather = lambda *args: None  # type: ignore[attr-defined]
        with self.assertRaisesRegex(RuntimeError, "'0.weight' of shape .* got it later"):
            model(torch.ones(1, 16))

    def test_codes_cross_the_wire_and_are_not_saved(self) -> None:
        """int8 in both directions; backward gathers again instead of keeping the codes from forward."""
        mesh = self.gtp_mesh()
        model = gtp_shard(make_scaled(), mesh, schedule=ALL)
        for _ in range(2):
            with wire_traffic() as forward:
                loss = model(torch.randn(2, 16)).sum()
            held = [w for w in members_of(model).weights if w.for_forward.live is not None or w.for_forward.pending]
            self.assertEqual(held, [])
            with wire_traffic() as backward:
                loss.backward()
        for traffic, expected in ((forward, [24 * 16 // 4, 8 * 24 // 4]), (backward, [24 * 16 // 4])):
            gathers = [(dtype, nbytes) for name, dtype, nbytes in traffic.calls if "gather" in name]
            self.assertEqual(gathers, [(torch.uint8, nbytes) for nbytes in expected])

    def test_shapes_that_no_rank_can_tell_are_refused(self) -> None:
        class Flat(Scaled):
            def fsdp_pre_all_gather(self, mesh: DeviceMesh) -> Any:
                inputs, metadata = super().fsdp_pre_all_gather(mesh)
                return (inputs[0].view(-1),), metadata

            @classmethod
            def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                out = super().__torch_dispatch__(func, (Scaled,), args, kwargs)
                return tree_map_only(Scaled, lambda t: Flat(t._values), out)

        mesh = _mesh((2, 2), ("replicate", "gtp"))
        layer = ScaledLinear(16, 21)
        layer.weight = nn.Parameter(Flat(layer.weight.detach()))
        gtp_shard(layer, mesh, schedule=ALL)
        with self.assertRaisesRegex(NotImplementedError, "Flat to return tensors with the .* rows .*'weight'"):
            layer(torch.zeros(1, 16))


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
