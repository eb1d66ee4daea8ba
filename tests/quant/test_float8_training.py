"""Training in float8 by the reference arithmetic: every mesh computes what one process computes, rank by rank."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, GlooTest, _mesh, environment, full, rows_of_rank
from float8_reference import Values, float8_reference, forward_operands
from quant_common import Net, blocks_only, check, fsdp, gtp, loss_of, recompute, tokens_of
from runtime_common import assert_idle
from torch._dynamo.utils import counters
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.common_utils import run_tests
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dtensor_gtp import gtp_shard, quantize_, sharding_report
from dtensor_gtp.quant import Float8Blockwise, Float8Rowwise, Float8Tensorwise, Recipe

TENSORWISE = Float8Tensorwise(compute="float8")
ROWWISE = Float8Rowwise(compute="float8")
BLOCKWISE = Float8Blockwise(compute="float8")
RECIPES = (
    TENSORWISE,
    Float8Tensorwise(compute="float8", high_precision_wgrad=True),
    ROWWISE,
    Float8Rowwise(compute="float8", high_precision_wgrad=False),
    BLOCKWISE,
)

warnings.filterwarnings("ignore", "The recipe .* asks for float8 GEMMs, which torch lacks on CPUs")


def check_float8(
    model: nn.Module, recipe: Recipe, shard: Any, mesh: Any, num_slices: int = 1, **options: Any
) -> nn.Module:
    make_reference = partial(float8_reference, num_slices=num_slices)
    return check(model, recipe, shard, mesh, make_reference=make_reference, by_rank=True, **options)


class TestFloat8Training(GlooTest):
    world_size = 2

    def test_r19_gtp(self) -> None:
        """Odd shapes, with and without bias, two microbatches."""
        mesh = self.gtp_mesh()
        for recipe in RECIPES:
            torch.manual_seed(0)
            assert_idle(check_float8(Net(), recipe, gtp(recipe, mesh), mesh, steps=2))

    def test_checkpointing(self) -> None:
        """Forward runs again in backward; under a policy, where the GEMM's output was saved, it does not."""
        mesh = self.gtp_mesh()

        def policy(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
            is_gemm = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
            return CheckpointPolicy.MUST_SAVE if is_gemm else CheckpointPolicy.PREFER_RECOMPUTE

        def selective(model: nn.Module) -> nn.Module:
            context_fn = partial(create_selective_checkpoint_contexts, policy)
            for layer in model.layers:  # type: ignore[union-attr]
                forward = layer.forward
                layer.forward = lambda x, f=forward: checkpoint(f, x, use_reentrant=False, context_fn=context_fn)
            return model

        for recipe in (TENSORWISE, ROWWISE):
            torch.manual_seed(0)
            check_float8(Net(), recipe, lambda m, r=recipe: gtp(r, mesh)(recompute(m)), mesh, steps=1)
            torch.manual_seed(0)
            check_float8(Net(), recipe, lambda m, r=recipe: gtp(r, mesh)(selective(m)), mesh, steps=1)

    def test_compiled_blocks(self) -> None:
        """One graph for all blocks; casts are traced, gathers stay inside of opaque ops."""
        mesh = self.gtp_mesh()
        for recipe in (TENSORWISE, ROWWISE):
            torch.manual_seed(0)
            torch._dynamo.reset()
            counters.clear()

            def shard(model: nn.Module, recipe: Recipe = recipe) -> nn.Module:
                gtp(recipe, mesh)(model)
                for layer in model.layers:  # type: ignore[union-attr]
                    layer.compile(backend="aot_eager", fullgraph=True)
                return model

            check_float8(Net(), recipe, shard, mesh, steps=1)
            self.assertEqual(counters["stats"]["unique_graphs"], 1)

    def test_tensor_parallel(self) -> None:
        """``up`` is cut by columns of the product, ``down`` by rows; activations are scaled by each tp rank."""
        self.check_tensor_parallel(RECIPES[:1])

    @pytest.mark.long
    def test_tensor_parallel_in_every_recipe(self) -> None:
        self.check_tensor_parallel(RECIPES[1:])
        self.check_tensor_parallel(RECIPES[-1:], compiled=True)

    def check_tensor_parallel(self, recipes: Sequence[Recipe], *, compiled: bool = False) -> None:
        mesh = _mesh((1, 2), ("gtp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for recipe in recipes:
            torch.manual_seed(0)

            def shard(model: nn.Module, recipe: Recipe = recipe) -> nn.Module:
                for layer in model.layers:  # type: ignore[union-attr]
                    parallelize_module(layer, mesh["tp"], plan)
                gtp(recipe, mesh["gtp"])(model)
                for layer in model.layers if compiled else ():  # type: ignore[union-attr]
                    layer.compile(backend="aot_eager", fullgraph=True)
                return model

            check_float8(Net(hidden=256), recipe, shard, mesh["gtp"], num_slices=2, steps=1 if compiled else 2)

    def test_fully_shard(self) -> None:
        mesh = self.gtp_mesh()
        for recipe in RECIPES:
            torch.manual_seed(0)
            names = lambda module, name: blocks_only(module, name) and name.endswith("up")  # noqa: E731

            def shard(model: nn.Module, recipe: Recipe = recipe, names: Any = names) -> nn.Module:
                return fsdp(quantize_(model, recipe, filter_fn=names), mesh)

            check_float8(Net(hidden=256), recipe, shard, mesh, names=names, steps=1)

    def test_mixed_precision_and_poisoned_buffers(self) -> None:
        """Masters in float32, activations in bfloat16, gradients reduced in float32; a freed plane is never read."""
        mesh = self.gtp_mesh()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for recipe in RECIPES[:3]:
            results = []
            for debug in ("", "poison,delay=7"):
                with environment(DTENSOR_GTP_DEBUG=debug):
                    torch.manual_seed(0)
                    model = gtp(recipe, mesh, mp_policy=policy)(Net())
                    for seed in range(2):
                        loss_of(model, rows_of_rank(tokens_of(seed), mesh)).backward()
                    results.append([full(p.grad) for p in model.parameters()])
            for a, b in zip(*results, strict=True):
                self.assertEqual(a.dtype, torch.float32)
                self.assertTrue(a.isfinite().all())
                self.assertTrue(torch.equal(a, b), recipe)
            linear = model.layers[0].up
            master = full(linear.weight.detach())
            x = torch.randn(3, 40, generator=torch.Generator().manual_seed(3)).bfloat16()
            left, right = forward_operands(recipe, x.float(), Values.of(master, recipe))
            expected = left.mm(right.t()).bfloat16() + full(linear.bias).bfloat16()
            with torch.no_grad():
                self.assertTrue(torch.equal(linear(x), expected), recipe)

    def test_what_is_not_a_fused_linear_layer_is_dequantized_and_says_so(self) -> None:
        mesh = self.gtp_mesh()

        class Reader(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return F.linear(x, self.weight)

        model = quantize_(nn.Sequential(Reader(16, 16), nn.Linear(16, 16)), TENSORWISE)
        gtp_shard(model, mesh, schedule=ALL)
        uses = {row.name: row.use for row in sharding_report(model).rows}
        self.assertRegex(uses["0.weight"], r"attribute, float8_tensorwise, dequantized for the GEMM \(no fused nn.Lin")
        self.assertRegex(uses["1.weight"], r"fused op, float8_tensorwise, float8 GEMMs by reference arithmetic \(no")
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("default")
            for _ in range(2):
                model(torch.ones(2, 16))
        self.assertEqual(len(caught), 1, [str(w.message) for w in caught])
        self.assertRegex(str(caught[0].message), "'0.weight' is dequantized: it is read as an attribute")

    def test_dtypes_of_input_and_weight_must_agree(self) -> None:
        model = gtp(TENSORWISE, self.gtp_mesh(), lambda m, n: True)(nn.Linear(16, 16, bias=False))
        with self.assertRaisesRegex(RuntimeError, "one dtype, but got torch.bfloat16 and torch.float32 for parameter"):
            model(torch.ones(2, 16, dtype=torch.bfloat16))


if __name__ == "__main__":
    run_tests()
