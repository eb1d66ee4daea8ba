"""Training with quantized weights: what ``test_quantized_matrix.py``, recipe by recipe and mesh by mesh, leaves out.

Where nothing else is said, each test has recipes that compute with dequantized weights and recipes with float8 GEMMs,
by the reference arithmetic.
"""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, GlooTest, environment, full, rows_of_rank
from float8_reference import Values, forward_operands
from quant_common import (
    Experts,
    Net,
    check,
    compile_layers,
    dequantized,
    fully_sharded,
    gtp,
    is_grouped,
    is_linear,
    loss_of,
    recompute,
    reference_of,
    tokens_of,
    up_only,
)
from runtime_common import assert_idle
from schedules import explicit
from torch._dynamo.utils import counters
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dtensor_gtp import GTPShard, gtp_shard, quantize_, sharding_report
from dtensor_gtp.quant import MXFP8, NVFP4, Direction, Float8Blockwise, Float8Rowwise, Float8Tensorwise, Recipe

warnings.filterwarnings("ignore", "The recipe .* asks for float8 GEMMs, which torch lacks on CPUs")

TENSORWISE, ROWWISE = Float8Tensorwise(compute="float8"), Float8Rowwise(compute="float8")
MIXED = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def read_attributes(model: nn.Module) -> nn.Module:
    """The weights of linear layers are no more taken by fused ops."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            module.forward = lambda x, m=module: F.linear(x, m.weight, m.bias)  # type: ignore[method-assign]
    return model


def recompute_all_but_gemms(model: nn.Module) -> nn.Module:
    def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_gemm = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if is_gemm else CheckpointPolicy.PREFER_RECOMPUTE

    context_fn = partial(create_selective_checkpoint_contexts, policy)
    for layer in model.layers:  # type: ignore[union-attr]
        forward = layer.forward
        layer.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=False, context_fn=context_fn)
    return model


class TestQuantizedTraining(GlooTest):
    world_size = 2

    def check(self, make: Callable[[], nn.Module], recipe: Recipe, shard: Any = None, **options: Any) -> Any:
        """``shard`` is ``gtp`` of all ranks by default."""
        torch.manual_seed(0)
        return check(make(), recipe, shard or gtp(recipe, self.gtp_mesh()), self.gtp_mesh(), **{"steps": 1, **options})

    def test_a_recipe_for_each_layer(self) -> None:
        """By a mapping: one of each kind, the head and what is no matrix in none."""
        names = ("layers.0.up", "layers.0.down", "layers.1.up", "layers.1.down")
        recipes = dict(zip(names, (Float8Tensorwise(), MXFP8(), NVFP4(), Float8Rowwise()), strict=True))

        def make_reference(model: nn.Module, *_: Any) -> nn.Module:
            for name, recipe in recipes.items():
                model = reference_of(model, recipe, lambda module, other, name=name: other == name)
            return model

        def shard(model: nn.Module) -> nn.Module:
            return gtp_shard(quantize_(model, recipes), self.gtp_mesh(), schedule=ALL)

        model = self.check(Net, MXFP8(), shard, make_reference=make_reference)
        uses = {row.name.removesuffix(".weight"): row.use for row in sharding_report(model).rows}
        for name, recipe in recipes.items():
            self.assertIn(f"fused op, {recipe.name}, dequantized for the GEMM (", uses[name])
        self.assertEqual(uses["head"], "fused op")

    def test_gtp_on_dim_1(self) -> None:
        for recipe in (Float8Rowwise(), NVFP4()):
            place = lambda param: GTPShard(1) if param.ndim == 2 else None  # noqa: E731
            model = self.check(Net, recipe, gtp(recipe, self.gtp_mesh(), shard_placement_fn=place))
            self.assertEqual(model.layers[0].up.weight.placements[-1].dim, 1)

    def test_tied_head(self) -> None:
        """The lookup uses the quantized weight, too."""
        for recipe in (Float8Tensorwise(), NVFP4()):
            shard = gtp(recipe, self.gtp_mesh(), is_linear)
            model = self.check(partial(Net, is_tied=True), recipe, shard, names=is_linear)
            self.assertIs(model.head.weight, model.embedding.weight)

    def test_r19_grouped_linear(self) -> None:
        """Cut by rows of every expert, and between experts."""
        between = {"shard_placement_fn": lambda p: GTPShard(0) if p.ndim == 3 else None}
        by_rows = [Float8Tensorwise(), Float8Rowwise(), Float8Blockwise(), MXFP8(), NVFP4()]
        for recipe, options in [*((r, {}) for r in by_rows), (Float8Tensorwise(), between), (NVFP4(), between)]:
            shard = gtp(recipe, self.gtp_mesh(), is_grouped, **options)
            self.check(Experts, recipe, shard, names=is_grouped, is_exact=False)

    def test_attributes_and_recomputation(self) -> None:
        """The same arithmetic where a weight is read as an attribute, and where forward runs again in backward, under a
        policy not where the GEMM's output was saved. The two directions of nvfp4 differ in most values."""
        for recipe, changes in (
            (Float8Rowwise(), (read_attributes, recompute)),
            (NVFP4(), (read_attributes, recompute)),
            (TENSORWISE, (recompute, recompute_all_but_gemms)),
            (ROWWISE, (recompute, recompute_all_but_gemms)),
        ):
            shard = gtp(recipe, self.gtp_mesh())
            for change in changes:
                assert_idle(self.check(Net, recipe, lambda m, s=shard, c=change: s(c(m))))
        shard = fully_sharded(NVFP4(), self.gtp_mesh())
        self.check(partial(Net, hidden=64), NVFP4(), lambda model: shard(recompute(model)), names=up_only)

    def test_compiled_blocks(self) -> None:
        """One graph for all blocks; casts are traced, gathers stay inside of opaque ops."""
        for recipe, is_exact in ((NVFP4(), False), (TENSORWISE, True), (ROWWISE, True)):
            torch._dynamo.reset()
            counters.clear()
            shard = gtp(recipe, self.gtp_mesh())
            self.check(Net, recipe, lambda model, s=shard: compile_layers(s(model)), is_exact=is_exact)
            self.assertEqual(counters["stats"]["unique_graphs"], 1)

    def test_switches(self) -> None:
        for options in ({"reshard_after_forward": False}, {"schedule": explicit(prefetch_depth=0, min_shard_numel=0)}):
            self.check(Net, NVFP4(), gtp(NVFP4(), self.gtp_mesh(), **options), steps=2)

    def test_mixed_precision(self) -> None:
        """Masters in float32, computed with in bfloat16, gradients reduced in float32; a freed plane is never read."""
        x = torch.randn(3, 40, generator=torch.Generator().manual_seed(3)).bfloat16()
        for recipe in (Float8Tensorwise(), NVFP4(), TENSORWISE, ROWWISE):
            grads = []
            for debug in ("", "poison,delay=7"):
                torch.manual_seed(0)
                with environment(DTENSOR_GTP_DEBUG=debug):
                    model = gtp(recipe, self.gtp_mesh(), mp_policy=MIXED)(Net())
                    loss_of(model, rows_of_rank(tokens_of(0), self.gtp_mesh())).backward()
                grads.append([full(p.grad) for p in model.parameters()])
            for a, b in zip(*grads, strict=True):
                self.assertEqual(a.dtype, torch.float32)
                self.assertTrue(a.isfinite().all() and torch.equal(a, b), recipe)
            linear = model.layers[0].up
            master, bias = full(linear.weight.detach()), full(linear.bias.detach()).bfloat16()
            if recipe.compute == "float8":
                left, right = forward_operands(recipe, x.float(), Values.of(master, recipe))
                expected = left.mm(right.t()).bfloat16() + bias
            else:
                planes = recipe.quantize(master, Direction.ROWWISE)
                weight = recipe.dequantize(planes, master.shape, Direction.ROWWISE, torch.bfloat16)
                expected = F.linear(x, weight, bias)
            with torch.no_grad():
                self.assertTrue(torch.equal(linear(x), expected), recipe)

    def test_fully_shard_cuts_blocks_in_mixed_precision(self) -> None:
        """What is quantized is the weight in ``param_dtype``, which is what is gathered."""
        torch.manual_seed(0)
        layer, recipe = nn.Linear(64, 80, bias=False), NVFP4()
        x = torch.randn(3, 64, dtype=torch.bfloat16, requires_grad=True)
        values = layer.weight.detach().bfloat16()
        rowwise, columnwise = (dequantized(values, recipe, direction) for direction in Direction)
        model = fully_shard(quantize_(layer, recipe), mesh=self.gtp_mesh(), mp_policy=MIXED)
        (y := model(x)).sum().backward()
        self.assertEqual(y, F.linear(x, rowwise), rtol=0, atol=0)
        self.assertEqual(x.grad, torch.ones_like(y) @ columnwise, rtol=0, atol=0)
        expected = torch.ones_like(y).t() @ x
        self.assertEqual(full(model.weight.grad), expected.float())

    def test_what_is_not_a_fused_linear_layer_is_dequantized_and_says_so(self) -> None:
        model = read_attributes(quantize_(nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 16)), TENSORWISE))
        del model[1].forward
        gtp_shard(model, self.gtp_mesh(), schedule=ALL)
        uses = {row.name: row.use for row in sharding_report(model).rows}
        self.assertRegex(uses["0.weight"], r"attribute, float8_tensorwise, dequantized for the GEMM \(no fused nn.Lin")
        self.assertRegex(uses["1.weight"], r"fused op, float8_tensorwise, float8 GEMMs by reference arithmetic \(no")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(2):
                model(torch.ones(2, 16))
        (said,) = caught
        self.assertRegex(str(said.message), "'0.weight' is dequantized: it is read as an attribute")

    def test_dtypes_of_input_and_weight_must_agree(self) -> None:
        model = gtp(TENSORWISE, self.gtp_mesh(), is_linear)(nn.Linear(16, 16, bias=False))
        with self.assertRaisesRegex(RuntimeError, "one dtype, but got torch.bfloat16 and torch.float32 for parameter"):
            model(torch.ones(2, 16, dtype=torch.bfloat16))
