"""Training with quantized weights: ``gtp_shard``, tensor parallelism, ``fully_shard`` alone and outside."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, GlooTest, _mesh, full
from quant_common import Experts, Net, all_recipes, blocks_only, check, dequantized, fsdp, gtp, recompute, reference_of
from runtime_common import assert_idle
from schedules import explicit
from torch._dynamo.utils import counters
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_gtp import GTPShard, gtp_shard, quantize_, sharding_report
from dtensor_gtp.nn import GroupedLinear
from dtensor_gtp.quant import MXFP8, NVFP4, RECIPES, Direction, Float8Blockwise, Float8Rowwise, Float8Tensorwise, Recipe


class TestQuantizedTraining(GlooTest):
    def test_r19_gtp(self) -> None:
        for recipe in all_recipes():
            torch.manual_seed(0)
            assert_idle(check(Net(), recipe, gtp(recipe, self.gtp_mesh()), self.gtp_mesh()))
        for recipe in (NVFP4(), Float8Tensorwise()):
            torch.manual_seed(1)
            check(Net(), recipe, gtp(recipe, self.hsdp_mesh()), self.hsdp_mesh(), steps=2)

    def test_a_recipe_for_each_layer(self) -> None:
        """By a mapping: one of each kind, the head and what is no matrix in none."""
        mesh = self.gtp_mesh()
        recipes = {
            "layers.0.up": Float8Tensorwise(),
            "layers.0.down": MXFP8(),
            "layers.1.up": NVFP4(),
            "layers.1.down": Float8Rowwise(),
        }

        def make_reference(model: nn.Module, *_: Any) -> nn.Module:
            for name, recipe in recipes.items():
                model = reference_of(model, recipe, lambda module, other, name=name: other == name)
            return model

        torch.manual_seed(0)
        shard = lambda model: gtp_shard(quantize_(model, recipes), mesh, schedule=ALL)  # noqa: E731
        model = check(Net(), MXFP8(), shard, mesh, steps=1, make_reference=make_reference)
        uses = {row.name.removesuffix(".weight"): row.use for row in sharding_report(model).rows}
        for name, recipe in recipes.items():
            self.assertIn(f"fused op, {recipe.name}, dequantized for the GEMM (", uses[name])
        self.assertEqual(uses["head"], "fused op")

    def test_gtp_on_dim_1(self) -> None:
        mesh = self.gtp_mesh()
        for recipe in (Float8Rowwise(), NVFP4()):
            torch.manual_seed(0)
            place = gtp(recipe, mesh, shard_placement_fn=lambda p: GTPShard(1) if p.ndim == 2 else None)
            model = check(Net(), recipe, place, mesh, steps=1)
            self.assertEqual(model.layers[0].up.weight.placements[-1].dim, 1)

    def test_tied_head(self) -> None:
        """The lookup uses the quantized weight, too."""
        mesh = self.gtp_mesh()
        for recipe in (Float8Tensorwise(), NVFP4()):
            torch.manual_seed(0)
            everything = lambda module, name: isinstance(module, nn.Linear)  # noqa: E731
            model = check(Net(is_tied=True), recipe, gtp(recipe, mesh, None), mesh, names=everything, steps=2)
            self.assertIs(model.head.weight, model.embedding.weight)

    def test_r19_grouped_linear(self) -> None:
        """Cut by rows of every expert, and between experts."""
        mesh = self.gtp_mesh()
        experts = lambda module, name: isinstance(module, GroupedLinear)  # noqa: E731
        between = {"shard_placement_fn": lambda p: GTPShard(0) if p.ndim == 3 else None}
        by_rows = [Float8Tensorwise(), Float8Rowwise(), Float8Blockwise(), MXFP8(), NVFP4()]
        for recipe, options in [*((r, {}) for r in by_rows), (Float8Tensorwise(), between), (NVFP4(), between)]:
            torch.manual_seed(0)
            shard = gtp(recipe, mesh, experts, **options)
            check(Experts(), recipe, shard, mesh, names=experts, steps=1, is_exact=False)

    def test_attribute_path_and_recomputation(self) -> None:
        """The same arithmetic where a weight is read as an attribute, and where forward runs again in backward.

        The two directions of nvfp4 differ in most values; those of mxfp8, scaled by powers of two, in what underflows.
        """
        mesh = self.gtp_mesh()
        for recipe in (Float8Rowwise(), NVFP4()):
            torch.manual_seed(0)

            def attributes(model: nn.Module, recipe: Recipe = recipe) -> nn.Module:
                for module in model.modules():
                    if isinstance(module, nn.Linear):
                        module.forward = lambda x, m=module: F.linear(x, m.weight, m.bias)  # type: ignore[method-assign]
                return gtp(recipe, mesh)(model)

            check(Net(), recipe, attributes, mesh, steps=2)
            model = check(Net(), recipe, lambda m, r=recipe: gtp(r, mesh)(recompute(m)), mesh, steps=2)
            assert_idle(model)

    def test_compiled_blocks(self) -> None:
        mesh = self.gtp_mesh()
        for recipe in (Float8Tensorwise(), NVFP4()):
            torch.manual_seed(0)
            torch._dynamo.reset()
            counters.clear()

            def shard(model: nn.Module, recipe: Recipe = recipe) -> nn.Module:
                gtp(recipe, mesh)(model)
                for layer in model.layers:  # type: ignore[union-attr]
                    layer.compile(backend="aot_eager", fullgraph=True)
                return model

            check(Net(), recipe, shard, mesh, steps=1, is_exact=False)
            self.assertEqual(counters["stats"]["unique_graphs"], 1)

    def test_switches(self) -> None:
        mesh = self.gtp_mesh()
        recipe = NVFP4()
        for options in ({"reshard_after_forward": False}, {"schedule": explicit(prefetch_depth=0, min_shard_numel=0)}):
            torch.manual_seed(0)
            check(Net(), recipe, gtp(recipe, mesh, **options), mesh, steps=2)

    def test_r19_tensor_parallel(self) -> None:
        """``up`` is cut by columns of the product (dim 0), ``down`` by rows (dim 1); then both over gtp."""
        mesh = _mesh((2, 2), ("gtp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for recipe in (cls() for cls in RECIPES.values()):
            torch.manual_seed(0)

            def shard(model: nn.Module, recipe: Recipe = recipe) -> nn.Module:
                for layer in model.layers:  # type: ignore[union-attr]
                    parallelize_module(layer, mesh["tp"], plan)
                return gtp(recipe, mesh["gtp"])(model)

            check(Net(hidden=256), recipe, shard, mesh["gtp"], steps=2, is_exact=False)

    def test_fully_shard(self) -> None:
        """Plain ``fully_shard``, whose shards hold whole blocks where their number of rows says so."""
        mesh = self.gtp_mesh()
        hidden = {"float8_blockwise": 512}
        kept = [(recipe, {"reshard_after_forward": False}) for recipe in (MXFP8(), Float8Tensorwise())]
        for recipe, options in [*((recipe, {}) for recipe in all_recipes()), *kept]:
            torch.manual_seed(0)
            rows = hidden.get(recipe.name, 128)
            names = lambda module, name: blocks_only(module, name) and name.endswith("up")  # noqa: E731

            def shard(model: nn.Module, r: Recipe = recipe, o: Any = options, names: Any = names) -> nn.Module:
                return fsdp(quantize_(model, r, filter_fn=names), mesh, **o)

            check(Net(hidden=rows), recipe, shard, mesh, names=names, steps=2)

    def test_fully_shard_cuts_blocks(self) -> None:
        """160 rows on 4 ranks: shards of 40. Rows that ranks do not divide, and columns."""
        columns = {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else None}
        for recipe, rows, options in (
            (MXFP8(), 160, {}),
            (NVFP4(), 160, {"reshard_after_forward": False}),
            (Float8Blockwise(), 160, {}),
            (Float8Tensorwise(), 37, {}),
            (MXFP8(), 128, columns),
        ):
            torch.manual_seed(0)
            names = lambda module, name: blocks_only(module, name) and name.endswith("up")  # noqa: E731

            def shard(model: nn.Module, r: Recipe = recipe, o: Any = options, names: Any = names) -> nn.Module:
                return fsdp(quantize_(model, r, filter_fn=names), self.gtp_mesh(), **o)

            check(Net(hidden=rows), recipe, shard, self.gtp_mesh(), names=names, steps=2)

    def test_fully_shard_cuts_blocks_in_mixed_precision(self) -> None:
        """What is quantized is the weight in ``param_dtype``, which is what is gathered."""
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        torch.manual_seed(0)
        layer, recipe = nn.Linear(64, 160, bias=False), NVFP4()
        x = torch.randn(3, 64, dtype=torch.bfloat16, requires_grad=True)
        values = layer.weight.detach().bfloat16()
        rowwise, columnwise = (dequantized(values, recipe, direction) for direction in Direction)
        model = fully_shard(quantize_(layer, recipe), mesh=self.gtp_mesh(), mp_policy=policy)
        (y := model(x)).sum().backward()
        self.assertEqual(y, F.linear(x, rowwise), rtol=0, atol=0)
        self.assertEqual(x.grad, torch.ones_like(y) @ columnwise, rtol=0, atol=0)
        expected = torch.ones_like(y).t() @ x
        self.assertEqual(full(model.weight.grad), expected.float())

    def test_fully_shard_and_recomputation(self) -> None:
        mesh = self.gtp_mesh()
        torch.manual_seed(0)
        names = lambda module, name: blocks_only(module, name) and name.endswith("up")  # noqa: E731

        def shard(model: nn.Module) -> nn.Module:
            return fsdp(recompute(quantize_(model, "nvfp4", filter_fn=names)), mesh)

        check(Net(hidden=128), NVFP4(), shard, mesh, names=names, steps=2)

    def test_fully_shard_outside(self) -> None:
        """Recipes with blocks of rows need the outer axis to cut columns, or gtp to cut them."""
        mesh = _mesh((2, 2), ("dp", "gtp"))
        columns = {"shard_placement_fn": lambda p: Shard(1) if p.ndim == 2 else None}
        for recipe, inner, outer in (
            (Float8Tensorwise(), {}, {}),
            (Float8Rowwise(), columns, {}),
            (MXFP8(), {}, columns),
            (NVFP4(), columns, {}),
        ):
            torch.manual_seed(0)
            shard = gtp(recipe, mesh["gtp"], **inner)
            check(Net(), recipe, lambda m, s=shard, o=outer: fsdp(s(m), mesh["dp"], **o), mesh, steps=2)

    def test_mixed_precision(self) -> None:
        """Masters in float32, dequantized to bfloat16 for the GEMM, reduced in float32."""
        mesh = self.gtp_mesh()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for recipe in (Float8Tensorwise(), NVFP4()):
            torch.manual_seed(0)
            model = gtp(recipe, mesh, mp_policy=policy)(Net())
            linear = model.layers[0].up
            master = full(linear.weight.detach())
            with torch.no_grad():
                x = torch.randn(3, 40, generator=torch.Generator().manual_seed(3)).bfloat16()
                weight = recipe.dequantize(
                    recipe.quantize(master, Direction.ROWWISE), master.shape, Direction.ROWWISE, torch.bfloat16
                )
                bias = full(linear.bias).bfloat16()
                model.layers[0].norm(x)
                self.assertTrue(torch.equal(linear(x), F.linear(x, weight, bias)))
