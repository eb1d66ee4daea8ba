"""What crosses the wire for quantized weights, and what arrives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from common import ALL, GlooTest, _mesh, full, rows_of_rank
from quant_common import Block, Net, all_recipes, dequantized, gtp, loss_of, tokens_of, wire_traffic
from runtime_common import runtime_of
from schedules import explicit
from test_gather_backends import Casts
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_gtp import GTPShard, gtp_shard, init_weight_mesh, quantize_
from dtensor_gtp._comm.collectives import as_integers
from dtensor_gtp.quant import MXFP8, NVFP4, Direction, Float8Tensorwise, Quantized, Recipe

# A window whose end falls between the two sizes of a weight that tensor parallelism has cut unevenly.
TIGHT = explicit(1, prefetch_nbytes=33000, min_shard_numel=0, coalesce_nbytes=0)


def tp_pair(size: int, tp: DeviceMesh) -> nn.Module:
    """Two layers with ``size`` features between them, cut there over ``tp``."""
    pair = nn.Sequential(nn.Linear(64, size, bias=False), nn.Linear(size, 64, bias=False))
    return parallelize_module(pair, tp, {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel()})


class TestGathered(GlooTest):
    """What arrives is what the whole weight would have been quantized to, bit for bit."""

    def _gathered(self, model: nn.Module, name: str, direction: Direction) -> tuple[Quantized, torch.Tensor]:
        runtime = runtime_of(model)
        (weight,) = [w for w in runtime.weights if w.fqn == name]
        recipe = weight.form.wire.recipe
        seen: list[Quantized] = []
        dequantize = type(recipe).dequantize

        def spy(self: Recipe, quantized: Quantized, *args: Any) -> torch.Tensor:
            seen.append(quantized)
            return dequantize(self, quantized, *args)

        target = weight.for_forward if direction is Direction.ROWWISE else weight.for_backward
        with mock.patch.object(type(recipe), "dequantize", spy), runtime.gathering.using(target) as whole:
            return seen[0], whole.clone()

    def _check(self, model: nn.Module, recipe: Recipe, names: list[str], num_replicas: int = 1) -> None:
        for name in names:
            param = dict(model.named_parameters())[name]
            master = full(param.detach())
            for direction in {recipe.direction(d) for d in Direction}:
                actual, whole = self._gathered(model, name, direction)
                expected = recipe.quantize(master, direction)
                for a, b in zip(actual.planes, self._of_tp(expected.planes, param), strict=True):
                    self.assertEqual((a.dtype, a.shape), (b.dtype, b.shape))
                    self.assertTrue(
                        torch.equal(as_integers(a.contiguous()), as_integers(b.contiguous())), (recipe, name)
                    )
                if expected.amax is not None:
                    self.assertTrue(torch.equal(actual.amax, expected.amax), (recipe, name))
                full_weight = recipe.dequantize(expected, master.shape, direction, master.dtype)
                self.assertTrue(torch.equal(whole, self._of_tp((full_weight,), param)[0]), (recipe, name))

    @staticmethod
    def _of_tp(planes: tuple[torch.Tensor, ...], param: torch.Tensor) -> list[torch.Tensor]:
        """The part of whole planes that is this tp rank's."""
        assert isinstance(param, DTensor)
        mesh, placements = param.device_mesh, param.placements
        if "tp" not in mesh.mesh_dim_names:
            return list(planes)
        axis = mesh.mesh_dim_names.index("tp")
        dim = placements[axis].dim
        parts = [p if p.shape[dim] == 1 else p.chunk(mesh.size(axis), dim)[mesh.get_local_rank(axis)] for p in planes]
        return [part.contiguous() for part in parts]

    def test_r17_every_mesh_and_shape(self) -> None:
        for mesh in (self.gtp_mesh(), self.hsdp_mesh()):
            for recipe in all_recipes():
                for dim in (0, 1) if mesh.ndim == 1 else (0,):
                    torch.manual_seed(0)
                    linears = [nn.Linear(k, 33 if k != 4096 else 3, bias=False) for k in (64, 96, 128, 160, 4096)]
                    model = nn.Sequential(*linears, nn.Linear(7, 300))
                    model[0].weight.data[0] *= 1e3
                    quantize_(model, recipe)
                    gtp_shard(
                        model,
                        mesh,
                        schedule=ALL,
                        shard_placement_fn=lambda p, d=dim: GTPShard(d) if p.ndim == 2 else None,
                    )
                    self._check(model, recipe, [f"{i}.weight" for i in range(6)])

    def test_tensor_parallel(self) -> None:
        mesh = _mesh((2, 2), ("gtp", "tp"))
        for recipe in all_recipes():
            torch.manual_seed(0)
            model = Block(40, 256)
            model.up.weight.data[200, 3] = 7.0  # the largest is on one tp rank and one gtp rank only
            model.down.weight.data[3, 200] = -9.0
            parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            gtp(recipe, mesh["gtp"], lambda module, name: isinstance(module, nn.Linear))(model)
            self._check(model, recipe, ["up.weight", "down.weight"])

    def test_r23_amax_is_that_of_the_weight_mesh(self) -> None:
        """Never over the replicate axis: a replica whose values have drifted keeps a scale of its own."""
        mesh = self.hsdp_mesh()
        model = nn.Linear(8, 8, bias=False)
        nn.init.ones_(model.weight)
        quantize_(model, "float8_tensorwise")
        gtp_shard(model, mesh, schedule=ALL)
        model(torch.ones(1, 8))
        replica, rank = mesh.get_local_rank("replicate"), mesh.get_local_rank("gtp")
        with torch.no_grad():
            model.weight.to_local().mul_(1 + replica * 4 + rank)
        quantized, _ = self._gathered(model, "weight", Direction.ROWWISE)
        self.assertEqual(quantized.amax.item(), 2 + replica * 4)

    def test_nan_on_one_rank(self) -> None:
        """It reaches the scale of all ranks."""
        mesh = self.gtp_mesh()
        for name in ("float8_tensorwise", "nvfp4"):
            model = quantize_(nn.Linear(64, 64, bias=False), name)
            gtp_shard(model, mesh, schedule=ALL)
            if mesh.get_local_rank() == 1:
                model.weight.to_local().data[0, 0] = float("nan")
            self.assertTrue(model(torch.ones(1, 64)).isnan().all())

    def test_one_all_reduce_and_one_cast_for_a_step(self) -> None:
        mesh = self.gtp_mesh()
        torch.manual_seed(0)
        model = gtp(NVFP4(), mesh)(Net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        num_quantized = sum(weight.form.wire is not None for weight in runtime_of(model).weights)
        for step in range(3):
            num_casts = 0
            for microbatch in range(3):
                counting = mock.patch.object(NVFP4, "quantize", autospec=True, side_effect=NVFP4.quantize)
                with wire_traffic() as sent, counting as quantize:
                    loss_of(model, rows_of_rank(tokens_of(step), mesh)).backward()
                num_amax = sum(1 for op, dtype, _ in sent.calls if op == "allreduce_" and dtype == torch.int32)
                self.assertEqual(num_amax, 1 if microbatch == 0 else 0)
                num_casts += quantize.call_count
            self.assertEqual(num_casts, 2 * num_quantized, "one for forward and one for backward")
            optimizer.step()
            optimizer.zero_grad()

    def _check_forwards(self, model: nn.Module) -> None:
        """Three, of which the later ones have a plan: none waits for ever, and they are the same."""
        with torch.no_grad():
            outputs = [model(torch.ones(4, 64)) for _ in range(3)]
        for output in outputs[1:]:
            self.assertTrue(torch.equal(output, outputs[0]))

    def test_statistics_over_tp_come_at_the_beginning(self) -> None:
        """Ranks of a tp group are of several gtp meshes, whose plans differ where the cut is uneven: wherever a gather
        comes, statistics do not change places with what tensor parallelism itself sends."""
        root = _mesh((2, 2), ("tp", "gtp"))
        torch.manual_seed(0)
        pairs = [tp_pair(size, root["tp"]) for size in (64, 65, 64, 64)]
        quantize_(pairs[-1], Float8Tensorwise())
        self._check_forwards(gtp_shard(nn.Sequential(*pairs), root["gtp"], schedule=TIGHT))

    def test_statistics_of_a_mesh_across_tp_come_at_the_beginning(self) -> None:
        """The same on a mesh of experts that spans the tp ranks: nobody waits for them where plans differ."""
        mesh = init_weight_mesh("cpu", gtp=2, tp=2, expert_gtp=4)
        torch.manual_seed(0)
        pairs = [tp_pair(size, mesh["tp"]) for size in (64, 65, 64)]
        layers = [layer for pair in pairs for layer in (pair, nn.ReLU())]
        expert = quantize_(nn.Linear(64, 64, bias=False), Float8Tensorwise())
        gtp_shard(expert, mesh["expert_gtp"], schedule=TIGHT)
        self._check_forwards(gtp_shard(nn.Sequential(*layers, expert), mesh["gtp"], schedule=TIGHT))

    def test_the_first_gather_waits_for_its_own_statistics_alone(self) -> None:
        """Where shards are cast beside compute: those of all others follow, and all bits are the same."""
        mesh = self.gtp_mesh()
        gradients = []
        for backend in ("process_group", Casts):
            torch.manual_seed(0)
            schedule = explicit(gather_backend=backend, coalesce_nbytes=0)
            model = gtp(NVFP4(), mesh, schedule=schedule)(Net())
            num_quantized = sum(weight.form.wire is not None for weight in runtime_of(model).weights)
            for microbatch in range(2):
                with wire_traffic() as sent:
                    loss_of(model, rows_of_rank(tokens_of(0), mesh)).backward()
                sizes = [n // 4 for op, dtype, n in sent.calls if op == "allreduce_" and dtype == torch.int32]
                expected = [num_quantized] if backend == "process_group" else [1, num_quantized - 1]
                self.assertEqual(sizes, expected if microbatch == 0 else [], (backend, microbatch))
            gradients.append([full(param.grad) for param in model.parameters()])
        for one, other in zip(*gradients, strict=True):
            self.assertTrue(torch.equal(one, other))

    def test_writes_without_a_trace_are_seen(self) -> None:
        """As R3 and R13: what an optimizer, a load or ``.data`` has written is what the next forward uses."""
        mesh = self.gtp_mesh()
        model = gtp(MXFP8(), mesh, lambda m, n: True)(nn.Linear(64, 64, bias=False))
        x = torch.eye(64)
        writes: list[Callable[[], Any]] = [
            lambda: model.weight.data.fill_(2.0),
            lambda: torch._foreach_mul_([model.weight], 2.0),
            lambda: model.weight.to_local().data.fill_(8.0),
            lambda: model.load_state_dict({"weight": torch.ones_like(model.weight) * 16}),
            lambda: model.state_dict()["weight"].to_local().data.fill_(32.0),
        ]
        for index, write in enumerate(writes):
            model(x)
            with torch.no_grad():
                write()
            self.assertTrue(torch.equal(model(x), torch.full((64, 64), 2.0 ** (index + 1))), index)

    def test_r16_waiting_twice_is_harmless(self) -> None:
        """What follows the wait is done once."""
        mesh = self.gtp_mesh()
        torch.manual_seed(0)
        model = gtp(NVFP4(), mesh, lambda m, n: True)(nn.Linear(64, 64, bias=False))
        (weight,) = runtime_of(model).weights
        runtime = runtime_of(model)
        handle = model.unshard(async_op=True)
        handle.wait()
        handle.wait()
        first, second = runtime.gathering.acquire(weight.for_forward), runtime.gathering.acquire(weight.for_forward)
        self.assertIs(first, second)
        self.assertIs(first.full, first.full)
        expected = dequantized(full(weight.param.detach()), NVFP4(), Direction.ROWWISE)
        self.assertTrue(torch.equal(first.full, expected))
        for gathered in (first, second):
            runtime.gathering.release(weight.for_forward, gathered)
        model.reshard()
