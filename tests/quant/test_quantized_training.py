"""Training with quantized weights: what ``test_quantized_matrix.py``, recipe by recipe and mesh by mesh, leaves out.

Where nothing else is said, each test has recipes that compute with dequantized weights and recipes with float8 GEMMs,
by the reference arithmetic. Weights with native storage have a reference of their own: float32 masters, whose rowwise
quantization is computed with in both directions.
"""

import copy
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from checkpoint_common import local
from common import ALL, GlooTest, _mesh, assert_same_params, environment, full, rows_of_rank
from float8_reference import Values, forward_operands
from quant_common import (
    COLUMNS,
    Experts,
    Net,
    RowwiseOnly,
    blocks_only,
    check,
    compile_layers,
    cut_layers,
    dequantized,
    fsdp,
    fully_sharded,
    gtp,
    is_grouped,
    is_linear,
    loss_of,
    recompute,
    reference_of,
    tokens_of,
    up_only,
    wire_traffic,
)
from runtime_common import assert_idle
from schedules import explicit
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from dtensor_gtp import GTPShard, gtp_shard, quantize_, sharding_report
from dtensor_gtp.quant import MXFP8, NVFP4, RECIPES, Direction, Float8Blockwise, Float8Rowwise, Float8Tensorwise, Recipe
from dtensor_gtp.quant.master_optimizer import MasterOptimizer
from dtensor_gtp.quant.native import native_of

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


native = partial(gtp, storage="native")


def with_masters(model: nn.Module, masters: Any = None) -> MasterOptimizer:
    return MasterOptimizer(model.parameters(), torch.optim.SGD, masters=masters, lr=0.2, momentum=0.5)


def check_native(
    make: Callable[[], nn.Module],
    recipe: Recipe,
    shard: Callable[[nn.Module], nn.Module],
    mesh: DeviceMesh,
    *,
    names: Any = blocks_only,
    steps: int = 1,
    is_given: bool = True,
) -> Any:
    """Two microbatches a step. ``is_given``: training starts with the values before they were quantized."""
    torch.manual_seed(0)
    model = make()
    reference = reference_of(model, RowwiseOnly(recipe), names)  # type: ignore[arg-type]
    chosen = [name for name, module in model.named_modules() if hasattr(module, "weight") and names(module, name)]
    start = {f"{name}.weight": reference.get_submodule(name).weight.detach().clone() for name in chosen}
    if not is_given:
        for name in chosen:
            weight = reference.get_submodule(name).weight
            weight.data = dequantized(weight.data, recipe, Direction.ROWWISE)
    model = shard(copy.deepcopy(model))
    optimizer = with_masters(model, start if is_given else None)
    optimizers = [torch.optim.SGD(reference.parameters(), lr=0.2, momentum=0.5), optimizer]
    for step in range(steps):
        for microbatch in range(2):
            tokens = tokens_of(2 * step + microbatch)
            (loss_of(reference, tokens) / 2).backward()
            (loss_of(model, rows_of_rank(tokens, mesh)) / 2).backward()
        assert_same_params(model, reference, "grad")
        for each in optimizers:
            each.step()
            each.zero_grad(set_to_none=step % 2 == 1)
        expected, num_native = dict(reference.named_parameters()), 0
        for name, param in model.named_parameters():
            master = full(optimizer.state[param].get("master", param)).detach()
            torch.testing.assert_close(master, expected[name].detach())
            expected[name].data.copy_(master)  # a difference in the last bit must not grow to a step of the format
            if native_of(param) is not None:
                num_native += 1
                values = dequantized(master, recipe, Direction.ROWWISE)
                assert torch.equal(full(param.detach()), values), (recipe, name)
        assert num_native == len(start)
    return model


class TestNativeTraining(GlooTest):
    world_size = 2

    def test_gtp_and_fully_shard(self) -> None:
        """Of ``fully_shard`` with rows of whole blocks."""
        mesh = self.gtp_mesh()
        for recipe in (cls() for cls in RECIPES.values()):
            assert_idle(check_native(Net, recipe, native(recipe, mesh), mesh, steps=2))
            make = partial(Net, hidden=256 if recipe.name == "float8_blockwise" else 72)
            check_native(make, recipe, fully_sharded(recipe, mesh, storage="native"), mesh, names=up_only)
        for recipe in (Float8Rowwise(), NVFP4()):
            check_native(Net, recipe, native(recipe, mesh, **COLUMNS), mesh, is_given=False)

    def test_grouped_and_tied(self) -> None:
        mesh = self.gtp_mesh()
        for options in ({}, {"shard_placement_fn": lambda p: GTPShard(0) if p.ndim == 3 else None}):
            check_native(Experts, NVFP4(), native(NVFP4(), mesh, is_grouped, **options), mesh, names=is_grouped)
        model = check_native(
            partial(Net, is_tied=True), MXFP8(), native(MXFP8(), mesh, is_linear), mesh, names=is_linear, steps=2
        )
        self.assertIs(model.head.weight, model.embedding.weight)

    def test_mixed_precision(self) -> None:
        """A weight of bfloat16: computed with in bfloat16, reduced in float32, stepped in float32."""
        torch.manual_seed(0)
        layer = nn.Linear(40, 33, bias=False, dtype=torch.bfloat16)
        values = layer.weight.detach().float()
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        native(NVFP4(), self.gtp_mesh(), is_linear, mp_policy=policy)(layer)
        optimizer = MasterOptimizer(layer.parameters(), torch.optim.SGD, lr=2.0**-12, masters={"weight": values})
        expected = values.clone()
        for _ in range(3):
            layer(torch.ones(4, 40, dtype=torch.bfloat16)).sum().backward()
            self.assertEqual(layer.weight.grad.dtype, torch.bfloat16)
            optimizer.step()
            optimizer.zero_grad()
            expected.add_(torch.full_like(values, 4.0), alpha=-(2.0**-12))
        master = optimizer.state[layer.weight]["master"]
        self.assertEqual((master.dtype, master.placements), (torch.float32, layer.weight.placements))
        self.assertTrue(torch.equal(full(master), expected))

    def test_a_step_of_no_length_changes_no_byte(self) -> None:
        """Torch makes one to give an optimizer its state; dequantized values, quantized again, may be other bytes."""
        mesh = self.gtp_mesh()
        model = native(MXFP8(), mesh)(Net())
        before = {name: local(value).clone() for name, value in model.state_dict().items()}
        optimizer = MasterOptimizer(model.parameters(), torch.optim.AdamW, lr=0.0)
        loss_of(model, rows_of_rank(tokens_of(0), mesh)).backward()
        optimizer.step()
        for name, value in model.state_dict().items():
            self.assertTrue(torch.equal(local(value), before[name]), name)

    def test_writes_are_seen(self) -> None:
        """R3 and R13: the next forward computes with what was written, by a step, a copy or a load."""
        model: Any = native(Float8Tensorwise(), self.gtp_mesh(), is_linear)(nn.Linear(64, 64, bias=False))
        x = torch.eye(64)
        state = {name: local(value).clone() for name, value in model.state_dict().items()}
        values = model(x).clone()
        for index, write in enumerate(
            (
                lambda: model.weight.copy_(torch.full_like(model.weight, 2.0)),
                lambda: model.load_state_dict({"weight": torch.ones_like(model.weight) * 4}),
                lambda: model.weight.to_local().copy_(torch.full((32, 64), 8.0)),
            )
        ):
            with torch.no_grad():
                write()
            self.assertTrue(torch.equal(model(x), torch.full((64, 64), 2.0 ** (index + 1))), index)
        for name, value in model.state_dict().items():
            local(value).copy_(state[name])
        self.assertTrue(torch.equal(model(x), values))


class TestTwoAxes(GlooTest):
    def test_training(self) -> None:
        """Replicas, ``fully_shard`` and tensor parallelism."""
        for recipe in (NVFP4(), Float8Tensorwise()):
            check_native(Net, recipe, native(recipe, self.hsdp_mesh()), self.hsdp_mesh(), is_given=False)
        mesh = _mesh((2, 2), ("dp", "gtp"))
        for recipe in (MXFP8(), Float8Tensorwise()):
            shard = native(recipe, mesh["gtp"])
            check_native(partial(Net, hidden=72), recipe, lambda model, s=shard: fsdp(s(model), mesh["dp"]), mesh)
        mesh = _mesh((2, 2), ("gtp", "tp"))
        for recipe in (Float8Tensorwise(), NVFP4(), Float8Blockwise()):
            shard = native(recipe, mesh["gtp"])
            both = lambda model, s=shard: s(cut_layers(model, mesh["tp"]))  # noqa: E731
            check_native(partial(Net, hidden=256), recipe, both, mesh["gtp"])

    def test_one_all_reduce_a_step(self) -> None:
        """Of the largest magnitudes of all weights, over the axes that cut them and no other."""
        mesh = self.hsdp_mesh()
        torch.manual_seed(0)
        model: Any = native(Float8Tensorwise(), mesh)(Net())
        optimizer = with_masters(model)
        loss_of(model, rows_of_rank(tokens_of(0), mesh)).backward()
        with wire_traffic() as sent:
            optimizer.step()
        self.assertEqual(sent.calls, [("allreduce_", torch.int32, 4 * 4)])
        # A replica whose masters have drifted keeps a scale of its own.
        weight = model.layers[0].up.weight
        replica = mesh.get_local_rank("replicate")
        with torch.no_grad():
            local(optimizer.state[weight]["master"]).fill_(1.0 + replica)
        weight.grad.zero_()
        optimizer.param_groups[0]["momentum"] = 0.0
        optimizer.step()
        self.assertEqual(native_of(weight).quantized.amax.item(), 1.0 + replica)
