"""``quantize_`` in one process: which weights it takes, what they compute, what crosses the wire, what is refused."""

import copy
import math
import unittest
import warnings
from itertools import product
from unittest import mock

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, fake_mesh
from extension_common import make_scaled
from quant_common import all_recipes, dequantized, traffic_of_a_step, wire_traffic
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_gtp import GTPShard, gtp_shard, quantize_, sharding_report
from dtensor_gtp.nn import GroupedLinear
from dtensor_gtp.quant import MXFP8, NVFP4, Direction, Float8Blockwise, Float8Rowwise, Float8Tensorwise
from dtensor_gtp.quant.master import MasterWeight, recipe_of


class Model(nn.Module):
    def __init__(self, is_tied: bool = False) -> None:
        super().__init__()
        self.embedding = nn.Embedding(64, 48)
        self.norm = nn.LayerNorm(48)
        self.up = nn.Linear(48, 40)
        self.down = nn.Linear(40, 48, bias=False)
        self.head = nn.Linear(48, 64, bias=False)
        if is_tied:
            self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        return self.head(x + self.down(torch.relu(self.up(self.norm(x)))))


def recipes_of(module: nn.Module) -> dict[str, str]:
    found = {name: recipe_of(param) for name, param in module.named_parameters(remove_duplicate=False)}
    return {name: recipe.name for name, recipe in found.items() if recipe is not None}


# Kinds, and whose data backward multiplies with.
STORAGES = (("master", Direction.COLUMNWISE), ("native", Direction.ROWWISE))
FLOAT8 = [cls(compute="float8") for cls in (Float8Tensorwise, Float8Rowwise, Float8Blockwise)]


class TestSelection(unittest.TestCase):
    def test_linear_weights_by_default(self) -> None:
        model = Model()
        before = {name: id(param) for name, param in model.named_parameters()}
        self.assertIs(quantize_(model, "mxfp8"), model)
        self.assertEqual(recipes_of(model), dict.fromkeys(("up.weight", "down.weight", "head.weight"), "mxfp8"))
        unchanged = {n for n, param in model.named_parameters() if id(param) == before[n]}
        self.assertEqual(unchanged, {"embedding.weight", "norm.weight", "norm.bias", "up.bias"})

    def test_filter(self) -> None:
        model = quantize_(Model(), "nvfp4", filter_fn=lambda module, name: name in ("embedding", "up"))
        self.assertEqual(recipes_of(model), {"embedding.weight": "nvfp4", "up.weight": "nvfp4"})

    def test_mapping_and_second_call(self) -> None:
        model = quantize_(Model(), {"up": "float8_rowwise", "down": MXFP8(scale_rounding="floor")})
        self.assertEqual(recipes_of(model), {"up.weight": "float8_rowwise", "down.weight": "mxfp8"})
        self.assertEqual(recipe_of(model.down.weight), MXFP8(scale_rounding="floor"))
        quantize_(model, {"up": "float8_blockwise"})
        self.assertEqual(recipes_of(model), {"up.weight": "float8_blockwise", "down.weight": "mxfp8"})
        self.assertIs(type(model.up.weight.master), torch.Tensor)

    def test_tied_weights_stay_tied(self) -> None:
        tokens = torch.arange(5)
        for storage, num_planes in (("master", 0), ("native", 2)):
            model = Model(is_tied=True)
            values = model.head.weight.detach().clone()
            quantize_(model, "nvfp4", filter_fn=lambda module, name: name == "head", storage=storage)
            self.assertIs(model.head.weight, model.embedding.weight)
            expected = F.embedding(tokens, dequantized(values, NVFP4(), Direction.ROWWISE))
            self.assertTrue(torch.equal(model.embedding(tokens), expected))
            model.embedding(tokens).sum().backward()
            self.assertEqual(model.head.weight.grad[:5].sum(), 5 * 48)
            self.assertEqual(len([name for name in model.state_dict() if name.endswith("nvfp4.elements")]), num_planes)

    def test_tags_and_requires_grad_stay(self) -> None:
        model = Model()
        model.up.weight.tag = "mine"
        model.down.weight.requires_grad_(False)
        quantize_(model, "mxfp8")
        self.assertEqual(model.up.weight.tag, "mine")
        self.assertEqual([model.down.weight.requires_grad, model.up.weight.requires_grad], [False, True])

    def test_errors(self) -> None:
        wide = nn.ModuleDict({"wide": nn.Linear(4, 4, dtype=torch.float64)})
        conv = nn.Sequential(nn.Conv1d(4, 4, 3))
        several = nn.Sequential(GroupedLinear(2, 4, 4, single_grouped_weight=False))
        computed = nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Linear(4, 4)))
        tied = nn.ModuleDict({"first": nn.Linear(4, 4), "head": nn.Linear(4, 4)})
        tied["head"].weight = tied["first"].weight
        refused = NotImplementedError
        everything = {"filter_fn": lambda module, name: True}
        for error, message, module, recipe, options in (
            (TypeError, "expects an nn.Module, but got str", "up", "mxfp8", {}),
            (TypeError, "expects a callable as filter_fn", Model(), "mxfp8", {"filter_fn": 3}),
            (TypeError, "recipe or its name, but got int", Model(), 8, {}),
            (ValueError, "one of the recipes float8_tensorwise, .* but got 'mxfp6'", Model(), "mxfp6", {}),
            (ValueError, r"\['nose'\] are none of Model", Model(), {"nose": "mxfp8"}, {}),
            (ValueError, "no weight to quantize in LayerNorm", nn.LayerNorm(4), "mxfp8", {}),
            (refused, r"2 dims, but '0.weight' of Conv1d has shape \(4, 4, 3\)", conv, "mxfp8", everything),
            (refused, "one weight for all groups, but '0' has one for each", several, "mxfp8", {}),
            (refused, "but '0' of ParametrizedLinear computes its 'weight'", computed, "mxfp8", {}),
            (TypeError, r"'wide.weight' of shape \(4, 4\) has torch.float64", wide, "mxfp8", {}),
            (ValueError, "one recipe for the tied weight of 'head'", tied, {"first": "mxfp8", "head": "nvfp4"}, {}),
        ):
            with self.assertRaisesRegex(error, message):
                quantize_(module, recipe, **options)


class TestArithmetic(unittest.TestCase):
    """Native storage has rowwise data alone, for both directions."""

    def test_linear(self) -> None:
        """Output and gradients by their definitions, with and without bias, for inputs of several dims."""
        dtypes = torch.float32, torch.bfloat16
        for recipe, dtype, bias, (storage, backward) in product(all_recipes(), dtypes, (True, False), STORAGES):
            torch.manual_seed(0)
            plain = nn.Linear(40, 33, bias=bias, dtype=dtype)
            quantized = quantize_(copy.deepcopy(plain), recipe, storage=storage)
            x = torch.randn(2, 3, 40, dtype=dtype, requires_grad=True)
            y = quantized(x)
            grad = torch.randn_like(y)
            y.backward(grad)
            forward, turned = (dequantized(plain.weight.detach(), recipe, d) for d in (Direction.ROWWISE, backward))
            self.assertTrue(torch.equal(y, F.linear(x, forward, plain.bias)))
            self.assertTrue(torch.equal(x.grad, grad.matmul(turned)))
            plain(x).backward(grad)
            self.assertTrue(torch.equal(quantized.weight.grad, plain.weight.grad))
            self.assertIs(type(quantized.weight.grad), torch.Tensor)
            if bias:
                torch.testing.assert_close(quantized.bias.grad, plain.bias.grad)

    def test_grouped_linear(self) -> None:
        """Each group with its own matrix, quantized by itself."""
        counts = torch.tensor([4, 0, 5])
        for recipe, (storage, backward) in product(all_recipes(), STORAGES):
            torch.manual_seed(0)
            plain = GroupedLinear(3, 40, 33)
            quantized = quantize_(copy.deepcopy(plain), recipe, storage=storage)
            x = torch.randn(10, 40, requires_grad=True)
            y = quantized(x, counts)
            grad = torch.randn_like(y)
            y.backward(grad)
            masters = plain.weight.detach().clone()
            for direction in (Direction.ROWWISE, backward):
                plain.weight.data = torch.stack([dequantized(matrix, recipe, direction) for matrix in masters])
                plain.zero_grad()
                x_again = x.detach().requires_grad_()
                y_again = plain(x_again, counts)
                y_again.backward(grad)
                if direction is Direction.ROWWISE:
                    self.assertTrue(torch.equal(y, y_again))
                    self.assertTrue(storage == "master" or torch.equal(quantized.weight.dense(), plain.weight))
            self.assertTrue(torch.equal(x.grad, x_again.grad))
            self.assertTrue(torch.equal(quantized.weight.grad, plain.weight.grad))

    def test_optimizers_update_the_master(self) -> None:
        for options in ({"fused": True}, {"foreach": True}, {"foreach": False}):
            torch.manual_seed(0)
            plain = nn.Linear(40, 33)
            quantized = quantize_(copy.deepcopy(plain), "mxfp8")
            grad = torch.randn(33, 40)
            for module in (plain, quantized):
                optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, **options)
                module.weight.grad = grad.clone()
                optimizer.step()
                states = {type(value) for value in optimizer.state[module.weight].values()}
                self.assertNotIn(MasterWeight, states)
            self.assertTrue(torch.equal(quantized.weight.master, plain.weight))

    def test_values_are_written_in_place(self) -> None:
        layer = quantize_(nn.Linear(32, 32), "mxfp8")
        master = layer.weight.master
        layer.reset_parameters()
        with torch.no_grad():
            self.assertIs(layer.weight.fill_(3.0).mul_(2.0), layer.weight)
            self.assertIs(layer.weight.copy_(layer.weight + 1), layer.weight)
        self.assertTrue(torch.equal(master, torch.full((32, 32), 7.0)))

    def test_dtypes_of_input_and_weight_must_agree(self) -> None:
        """Where GEMMs in float8 multiply them, of both kinds of storage."""
        for storage in ("master", "native"):
            layer = quantize_(nn.Linear(32, 16), Float8Rowwise(compute="float8"), storage=storage)
            told = r"one dtype, but got torch.bfloat16 and torch.float32 for a weight of shape \(16, 32\)"
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # they are slow on CPUs
                with self.assertRaisesRegex(RuntimeError, f"F.linear expects input and weight of {told}"):
                    layer(torch.ones(2, 32, dtype=torch.bfloat16))
                self.assertEqual(layer(torch.ones(2, 32)).dtype, torch.float32)

    def test_unknown_products_are_refused(self) -> None:
        layer = quantize_(nn.Linear(32, 32), "mxfp8")
        with self.assertRaisesRegex(NotImplementedError, "aten.mm.default does not support a weight with"):
            torch.ones(2, 32) @ layer.weight


class TestStateDict(unittest.TestCase):
    def test_plain_values_go_out_and_come_in(self) -> None:
        plain = Model()
        model = quantize_(copy.deepcopy(plain), "mxfp8")
        state = model.state_dict()
        self.assertEqual({type(value) for value in state.values()}, {torch.Tensor})
        for name, value in plain.state_dict().items():
            self.assertTrue(torch.equal(state[name], value))
        self.assertEqual(state["up.weight"].data_ptr(), model.up.weight.master.data_ptr())
        for assign in (False, True):
            other = Model().bfloat16() if assign else Model()
            target = quantize_(Model(), "nvfp4")
            target.load_state_dict(other.state_dict(), assign=assign)
            self.assertEqual(recipes_of(target), dict.fromkeys(("up.weight", "down.weight", "head.weight"), "nvfp4"))
            self.assertTrue(torch.equal(target.up.weight.master, other.up.weight))
            Model().load_state_dict(target.state_dict())


class TestSharded(unittest.TestCase):
    """One rank of several whose collectives communicate nothing: what is sent, where weights are cut, what raises."""

    def test_r22_bytes_on_the_wire(self) -> None:
        """Rowwise planes in forward; columnwise ones in backward, of native storage the same again. With float8 GEMMs
        nothing is dequantized."""
        rows, columns = 1024, 256
        cases = [*product(all_recipes(), STORAGES, ("gtp", "fsdp")), *product(FLOAT8, STORAGES[:1], ("gtp",))]
        with fake_mesh(4) as mesh, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # float8 GEMMs by the reference arithmetic
            for recipe, (storage, _), wrap in cases:
                # One before and one after it, so that it is neither the first nor the last use.
                shapes = ((256, 256), (columns, rows), (rows, 8))
                model = nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in shapes))
                quantize_(model, recipe, filter_fn=lambda module, name: name == "1", storage=storage)
                if wrap == "gtp":
                    gtp_shard(model, mesh, schedule=ALL)
                else:
                    fully_shard(model[1], mesh=mesh, reshard_after_forward=True)
                rest = 4 * rows if recipe.name == "float8_rowwise" else 0
                expected = (recipe.bytes_per_element() * rows * columns + rest) / 4
                how = {"side_effect": AssertionError("dequantized") if recipe in FLOAT8 else type(recipe).dequantize}
                with mock.patch.object(type(recipe), "dequantize", autospec=True, **how):
                    traffics = traffic_of_a_step(model, torch.zeros(2, 256))
                for traffic in traffics:
                    # The weights beside it are float32.
                    sent = [call for call in traffic.calls if "gather" in call[0] and call[1] is not torch.float32]
                    self.assertEqual(sum(nbytes for *_, nbytes in sent), expected, (recipe, wrap, sent))
                    self.assertTrue({dtype for _, dtype, _ in sent} <= {torch.uint8, torch.int32})
                    maxima = [call for call in traffic.calls if call[1] == torch.int32 and "reduce" in call[0]]
                    self.assertTrue(storage == "master" or not maxima)

    def test_reductions_stay_in_float32(self) -> None:
        """Whatever is gathered and multiplied with, and whatever is stored."""
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        with fake_mesh(4) as mesh, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # float8 GEMMs by the reference arithmetic
            for recipe, (storage, _), wrap in product([*all_recipes(), *FLOAT8], STORAGES, ("gtp", "fsdp")):
                model = nn.Sequential(nn.Linear(32, 512, bias=False), nn.Linear(512, 64))
                quantize_(model, recipe, storage=storage, filter_fn=lambda module, name: name == "0")
                if wrap == "gtp":
                    gtp_shard(model, mesh, mp_policy=policy, schedule=ALL)
                else:
                    fully_shard(model, mesh=mesh, mp_policy=policy)
                result = model(torch.ones(2, 32, dtype=torch.bfloat16))
                with wire_traffic() as traffic:
                    result.sum().backward()
                reduced = [call for call in traffic.calls if "reduce" in call[0] and call[1] != torch.int32]
                self.assertEqual({dtype for _, dtype, _ in reduced}, {torch.float32}, (recipe, storage, wrap))
                nbytes = sum(n for name, _, n in reduced if "scatter" in name)
                self.assertGreaterEqual(nbytes, 4 * (32 * 512 + 512 * 64), (recipe, storage, wrap))

    def test_only_the_shard_is_quantized(self) -> None:
        """By each rank, for one direction at a time."""
        with fake_mesh(4) as mesh:
            for recipe in all_recipes():
                model = quantize_(nn.Sequential(nn.Linear(48, 1024, bias=False), nn.Linear(1024, 48)), recipe)
                gtp_shard(model, mesh, schedule=ALL)
                shards = {tuple(layer.weight.to_local().shape) for layer in model}
                quantize = type(recipe).quantize
                with mock.patch.object(type(recipe), "quantize", autospec=True, side_effect=quantize) as seen:
                    for _ in range(2):
                        model(torch.ones(2, 48, requires_grad=True)).sum().backward()
                self.assertEqual({tuple(call.args[1].shape) for call in seen.call_args_list}, shards)
                self.assertEqual(seen.call_count, 2 * len({recipe.direction(d) for d in Direction}), recipe)

    def test_r18_report_says_where_weights_are_cut_and_what_computes(self) -> None:
        blocks = {"float8_tensorwise": 1, "float8_rowwise": 1, "float8_blockwise": 128, "mxfp8": 32, "nvfp4": 16}
        place = {300: GTPShard(0, block_size=10), 8: Shard(1), 6: None}
        with fake_mesh(4, rank=1) as mesh:
            for recipe in all_recipes():
                model = nn.Sequential(nn.Linear(9, 300), nn.Linear(300, 8), nn.Linear(8, 6))
                quantize_(model, recipe)
                gtp_shard(model, mesh, shard_placement_fn=lambda p: place[p.shape[0]] if p.ndim == 2 else None)
                block = blocks[recipe.name]
                rows = {row.name: row for row in sharding_report(model).rows}
                placements = [rows[f"{index}.weight"].placements for index in range(3)]
                both = math.lcm(10, block)
                expected = [GTPShard(0, block_size=both), GTPShard(1, block_size=block), GTPShard(0, block_size=block)]
                self.assertEqual(placements, [f"({placement})" for placement in expected])
                self.assertIs(type(model[0].weight.to_local()), torch.Tensor)
                self.assertIn(f"fused op, {recipe.name}, dequantized for the GEMM (", rows["0.weight"].use)
                nbytes = recipe.num_bytes(torch.Size((300, 9)), Direction.ROWWISE)
                self.assertEqual(rows["0.weight"].gathered_nbytes, nbytes)

    def test_r18_a_weight_that_would_stay_whole_or_is_cut_in_its_blocks_is_refused(self) -> None:
        with fake_mesh(2, 2, names=("gtp", "tp")) as mesh:
            model = quantize_(nn.Linear(8, 8), "mxfp8")
            with self.assertRaisesRegex(ValueError, r"to shard parameter 'weight' of shape \(8, 8\).*Replicate"):
                gtp_shard(model, mesh["gtp"], shard_placement_fn=lambda p: Replicate())
            for plan, dim in ((ColwiseParallel(), 0), (RowwiseParallel(), 1)):
                model = parallelize_module(nn.Sequential(nn.Linear(80, 80)), mesh["tp"], {"0": plan})
                quantize_(model, "mxfp8")
                message = (
                    f"whole mxfp8 blocks of 32 along dim {dim}, but mesh axis 'tp' of size 2 .*'0.weight' .*slices "
                    "of 40. Choose a size that is a multiple of 64"
                )
                with self.assertRaisesRegex(ValueError, message):
                    gtp_shard(model, mesh["gtp"])

    def test_what_is_refused(self) -> None:
        """Sharded weights; hooks that fully_shard calls for its own gather, so that nothing is left for that of gtp;
        products under plain tensor parallelism."""
        with fake_mesh(2, 2, names=("dp", "gtp")) as mesh:
            for model in (
                gtp_shard(nn.Sequential(nn.Linear(64, 64)), mesh["gtp"]),
                fully_shard(nn.Sequential(nn.Linear(64, 64)), mesh=mesh["gtp"]),
            ):
                with self.assertRaisesRegex(ValueError, "'0.weight' of shape .*is. Call quantize_ before"):
                    quantize_(model, "mxfp8")
            model = fully_shard(gtp_shard(make_scaled(), mesh["gtp"], schedule=ALL), mesh=mesh["dp"])
            with self.assertRaisesRegex(NotImplementedError, "'0.weight' .* by the hooks .*and left a Codes"):
                model(torch.zeros(2, 16))
            model = parallelize_module(nn.Sequential(nn.Linear(64, 64)), mesh["dp"], {"0": ColwiseParallel()})
            quantize_(model, "mxfp8")
            with self.assertRaisesRegex(NotImplementedError, "Under tensor parallelism, call gtp_shard on the module"):
                model(torch.zeros(1, 64))
            layer = nn.Linear(64, 64)
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh["gtp"], [Shard(1)]))
            quantize_(layer, "nvfp4")
            self.assertEqual(layer.weight.placements, (Shard(1),), "fine, and still cut")
            self.assertEqual(recipe_of(layer.weight).name, "nvfp4")

    def test_fully_shard_says_what_it_cuts(self) -> None:
        """It gathers such a weight unquantized; a native one, which has no other values, is refused."""
        with fake_mesh(4) as mesh, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("default")  # one text from one place once
            for rows, name, fits in ((66, "float8_tensorwise", 4), (96, "mxfp8", 128), (64, "nvfp4", None)):
                said.clear()
                model = fully_shard(quantize_(nn.Linear(16, rows), name), mesh=mesh)
                for _ in range(2):
                    model(torch.zeros(1, 16))
                texts = [str(warning.message) for warning in said if "fully_shard splits" in str(warning.message)]
                self.assertEqual(len(texts), int(fits is not None))
                for text in texts:
                    self.assertRegex(text, f"a multiple of {fits} rows, .*quantizes the whole weight")
            native = fully_shard(quantize_(nn.Linear(16, 66), "float8_tensorwise", storage="native"), mesh=mesh)
            with self.assertRaisesRegex(NotImplementedError, "a multiple of 4 rows, use gtp_shard"):
                native(torch.zeros(1, 16))

    def test_views_of_what_fully_shard_gathers_have_the_shape_that_was_asked_for(self) -> None:
        with fake_mesh(1) as mesh:
            model = fully_shard(quantize_(nn.Linear(64, 64, bias=False), "mxfp8"), mesh=mesh)
            model.unshard()
            values = model.weight + 0
            for view in (
                lambda t: t.view(64, 64),
                lambda t: t.view(8, 8, 64),
                lambda t: t.reshape(-1),
                lambda t: t.as_strided((64, 64), (1, 64)),
                lambda t: t.as_strided((8, 64), (64, 1), 64),
            ):
                torch.testing.assert_close(view(model.weight) + 0, view(values), rtol=0, atol=0)
