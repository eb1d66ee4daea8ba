"""Native storage in one process: the parameter is the quantized data. What it computes, holds, reads and refuses."""

from __future__ import annotations

import copy
import gc
import unittest
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, fake_world
from quant_common import all_recipes, dequantized, wire_traffic
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_gtp import GTPShard, gtp_shard, quantize_, sharding_report
from dtensor_gtp.nn import GroupedLinear
from dtensor_gtp.quant import MXFP8, NVFP4, Direction, Float8Rowwise, Float8Tensorwise, Recipe
from dtensor_gtp.quant.master import MasterWeight
from dtensor_gtp.quant.native import NativeWeight


def native(module: nn.Module, recipe: Any, **kwargs: Any) -> nn.Module:
    return quantize_(module, recipe, storage="native", **kwargs)


def make(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 33), nn.Linear(33, 20, bias=False)).to(dtype)


def same_state(a: dict[str, Any], b: dict[str, Any]) -> bool:
    assert a.keys() == b.keys(), (a.keys(), b.keys())
    return all(torch.equal(value, b[name]) for name, value in a.items())


def held_storages() -> dict[int, int]:
    """Address and bytes of the memory of all tensors that the process holds."""
    gc.collect()
    plain = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in plain if t.device.type == "cpu"}


class TestArithmetic(unittest.TestCase):
    def test_linear(self) -> None:
        """Output and the gradients of input and weight are those of a layer with the dequantized weight."""
        for recipe in all_recipes():
            for dtype in (torch.float32, torch.bfloat16):
                model = make(dtype=dtype)
                reference = copy.deepcopy(model)
                for layer in reference:
                    layer.weight.data = dequantized(layer.weight.data, recipe, Direction.ROWWISE)
                native(model, recipe)
                inputs = [torch.randn(2, 3, 40, dtype=dtype, requires_grad=True) for _ in range(1)] * 2
                grads = []
                for m in (reference, model):
                    y = m(inputs[0])
                    grads.append((y, *torch.autograd.grad(y, [inputs[0], *m.parameters()], torch.ones_like(y))))
                for expected, actual in zip(*grads, strict=True):
                    self.assertIs(type(actual), torch.Tensor)
                    self.assertEqual(actual.dtype, dtype)
                    torch.testing.assert_close(actual, expected)
                self.assertTrue(torch.equal(grads[0][0], grads[1][0]))
                self.assertTrue(torch.equal(grads[0][1], grads[1][1]))

    def test_tied_embedding_and_groups(self) -> None:
        embedding, head = nn.Embedding(30, 40), nn.Linear(40, 30, bias=False)
        head.weight = embedding.weight
        model = nn.ModuleDict({"embedding": embedding, "head": head})
        values = embedding.weight.detach().clone()
        native(model, "nvfp4", filter_fn=lambda module, name: name == "head")
        self.assertIs(embedding.weight, head.weight)
        expected = dequantized(values, NVFP4(), Direction.ROWWISE)
        tokens = torch.arange(5)
        self.assertTrue(torch.equal(embedding(tokens), F.embedding(tokens, expected)))
        embedding(tokens).sum().backward()
        self.assertEqual(head.weight.grad[:5].sum(), 5 * 40)
        self.assertEqual(len([name for name in model.state_dict() if name.endswith("nvfp4.elements")]), 2)
        for recipe in (Float8Tensorwise(), MXFP8()):
            grouped = GroupedLinear(3, 40, 33)
            values = grouped.weight.detach().clone()
            native(grouped, recipe)
            expected = torch.stack([dequantized(matrix, recipe, Direction.ROWWISE) for matrix in values])
            self.assertTrue(torch.equal(grouped.weight.dense(), expected))
            x = torch.randn(7, 40)
            plain = GroupedLinear(3, 40, 33)
            plain.load_state_dict({"weight": expected, "bias": grouped.bias.detach()})
            counts = torch.tensor([3, 0, 4])
            self.assertTrue(torch.equal(grouped(x, counts), plain(x, counts)))

    def test_reads_are_dequantized_values(self) -> None:
        model = native(make(), "mxfp8")
        weight = model[0].weight
        values = weight.dense()
        for read in (
            lambda w: w.sum(),
            lambda w: w.t() @ w,
            lambda w: w[3:7, 2],
            lambda w: w.float().mul(2),
            lambda w: torch.ones(2, 40) @ w.t(),
            lambda w: w.view(-1).norm(),
            lambda w: torch.cat([w, w]),
        ):
            self.assertTrue(torch.equal(read(weight.detach()), read(values)))
        self.assertTrue(native(make(), "nvfp4")[0].weight.dense().is_contiguous())
        for make_like in (torch.zeros_like, torch.ones_like, torch.randn_like):
            self.assertIs(type(make_like(weight)), torch.Tensor)
        self.assertTrue(torch.equal(torch.zeros_like(weight), torch.zeros_like(values)))

    def test_conversions_keep_the_data(self) -> None:
        model = native(make(), "nvfp4")
        state = {name: value.clone() for name, value in model.state_dict().items()}
        for convert in (copy.deepcopy, lambda m: copy.deepcopy(m).to("cpu"), lambda m: copy.deepcopy(m).bfloat16()):
            other = convert(model)
            weights = {name: value for name, value in other.state_dict().items() if "weight" in name}
            self.assertTrue(same_state(weights, {name: state[name] for name in weights}))
        self.assertEqual(other[0].weight.dtype, torch.bfloat16)
        self.assertIs(type(other[0].weight), NativeWeight)

    def test_on_meta(self) -> None:
        with torch.device("meta"):
            model = native(make(), "mxfp8")
        self.assertTrue(all(value.is_meta for value in model.state_dict().values()))
        state = native(make(1), "mxfp8").state_dict()
        for other in (copy.deepcopy(model).to_empty(device="cpu"), model):
            other.load_state_dict(state, assign=other is model)
            self.assertTrue(same_state(other.state_dict(), state))


class TestStateDict(unittest.TestCase):
    def test_same_bytes(self) -> None:
        for recipe in all_recipes():
            model, other = native(make(0), recipe), native(make(1), recipe)
            state = {name: value.clone() for name, value in model.state_dict().items()}
            self.assertEqual({value.dtype for name, value in state.items() if "elements" in name}, {torch.uint8})
            for assign in (False, True):
                other = native(make(1), recipe)
                self.assertFalse(same_state(other.state_dict(), state))
                other.load_state_dict(state, assign=assign)
                self.assertTrue(same_state(other.state_dict(), state))

    def test_high_precision_values_are_quantized(self) -> None:
        for recipe in all_recipes():
            for dtype in (torch.float32, torch.bfloat16):
                plain, other = make(1, dtype), native(make(0), recipe)
                other.load_state_dict(plain.state_dict())
                self.assertTrue(
                    same_state(other[0].state_dict(), native(make(1, dtype).float(), recipe)[0].state_dict())
                )

    def test_planes_of_another_recipe_are_quantized_again(self) -> None:
        source, target = native(make(0), "float8_rowwise"), native(make(1), "nvfp4")
        target.load_state_dict(source.state_dict())
        expected = dequantized(source[0].weight.dense(), NVFP4(), Direction.ROWWISE)
        self.assertTrue(torch.equal(target[0].weight.dense(), expected))

    def test_planes_that_do_not_fit(self) -> None:
        target = native(make(), "mxfp8")
        state = target.state_dict()
        state["0.weight_mxfp8.scales"] = state["0.weight_mxfp8.scales"][:, :1]
        message = r"'0.weight' of shape \(33, 40\) expects mxfp8 scales of shape \(33, 2\), but got a Tensor of shape"
        with self.assertRaisesRegex(RuntimeError, message):
            target.load_state_dict(state)
        del state["0.weight_mxfp8.scales"]
        with self.assertRaisesRegex(RuntimeError, r"expects mxfp8 scales of shape \(33, 2\), but got none"):
            target.load_state_dict(state)
        with self.assertRaisesRegex(RuntimeError, 'Missing key.* "0.weight"'):
            target.load_state_dict({})


class TestQuantize(unittest.TestCase):
    def test_storage_for_each_layer(self) -> None:
        model = quantize_(make(), {"0": "mxfp8", "1": "nvfp4"}, storage={"1": "native"})
        self.assertIs(type(model[0].weight), MasterWeight)
        self.assertIs(type(model[1].weight), NativeWeight)
        self.assertEqual(
            set(model.state_dict()),
            {"0.weight", "0.bias", *(f"1.weight_nvfp4.{n}" for n in ("elements", "scales", "amax"))},
        )

    def test_second_call(self) -> None:
        """To another recipe and to the other storage."""
        model = native(make(), "float8_rowwise")
        values = model[0].weight.dense()
        native(model, "mxfp8")
        self.assertEqual([name for name, _ in model[0].named_children()], ["weight_mxfp8"])
        self.assertTrue(torch.equal(model[0].weight.dense(), dequantized(values, MXFP8(), Direction.ROWWISE)))
        values = model[0].weight.dense()
        quantize_(model, "mxfp8")
        self.assertTrue(torch.equal(model[0].weight.master, values))
        self.assertEqual(set(model.state_dict()), {"0.weight", "0.bias", "1.weight"})
        self.assertEqual(list(model[0].children()), [])

    def test_errors(self) -> None:
        for message, storage in (
            ("'master' or 'native', but got 'both'", "both"),
            (r"\['2'\] are none of", {"2": "native"}),
        ):
            with self.assertRaisesRegex(ValueError, message):
                quantize_(make(), "mxfp8", storage=storage)

    def test_optimizers_cannot_write(self) -> None:
        """Named on the first step; masters that the optimizer helper keeps are the remedy, or freezing."""
        for make_optimizer in (
            lambda p: torch.optim.AdamW(p, fused=True),
            lambda p: torch.optim.AdamW(p, foreach=True),
            lambda p: torch.optim.AdamW(p, foreach=False),
            lambda p: torch.optim.SGD(p, lr=0.1),
        ):
            model = native(make(), "mxfp8")
            before = {name: value.clone() for name, value in model.state_dict().items() if "weight" in name}
            model(torch.ones(1, 40)).sum().backward()
            optimizer = make_optimizer([layer.weight for layer in model])
            message = r"Parameter '0.weight' of shape \(33, 40\) has native storage \(mxfp8\), .*MasterOptimizer"
            with self.assertRaisesRegex(NotImplementedError, message):
                optimizer.step()
            after = {name: value for name, value in model.state_dict().items() if "weight" in name}
            self.assertTrue(same_state(after, before))

    def test_slices_that_cut_blocks(self) -> None:
        with fake_world(world_size=4):
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("gtp", "tp"))
            model = nn.Sequential(nn.Linear(80, 80))
            parallelize_module(model, mesh["tp"], {"0": RowwiseParallel()})
            with self.assertRaisesRegex(ValueError, "quantize_ expects slices of whole mxfp8 blocks of 32 along dim 1"):
                native(model, "mxfp8")
            # Rows of mxfp8 are not tied to one another where nothing is stored columnwise.
            model = nn.Sequential(nn.Linear(80, 80))
            parallelize_module(model, mesh["tp"], {"0": ColwiseParallel()})
            gtp_shard(native(model, "mxfp8"), mesh["gtp"], schedule=ALL)
            self.assertEqual(model[0].weight.to_local().shape, (20, 80))


class TestSharded(unittest.TestCase):
    """One rank of several whose collectives communicate nothing."""

    def test_bytes_in_memory_and_on_the_wire(self) -> None:
        """Per rank within 2% of data and scales; rowwise planes in forward, the same again in backward."""
        rows, columns = 1024, 256
        with fake_world(world_size=4):
            mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("gtp",))
            for recipe in all_recipes():
                for wrap in ("gtp", "fsdp"):
                    shapes = ((256, 256), (columns, rows), (rows, 8))
                    model = nn.Sequential(*(nn.Linear(*shape, bias=False) for shape in shapes))
                    native(model, recipe, filter_fn=lambda module, name: name == "1")
                    model = gtp_shard(model, mesh, schedule=ALL) if wrap == "gtp" else model
                    if wrap == "fsdp":
                        fully_shard(model[1], mesh=mesh, reshard_after_forward=True)
                    self._check_traffic(model, recipe, rows, columns)

    def test_memory_is_data_and_scales(self) -> None:
        """Within 2% of what the format says, in all that the process holds after a forward and backward."""
        rows, columns = 1024, 512
        with fake_world(world_size=4):
            mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("gtp",))
            x = torch.ones(1, columns, dtype=torch.bfloat16, requires_grad=True)
            before = held_storages()
            for recipe in (MXFP8(), NVFP4(), Float8Rowwise()):
                for wrap in (gtp_shard, lambda model, mesh: fully_shard(model, mesh=mesh)):
                    model = nn.Sequential(nn.Linear(columns, rows, bias=False, dtype=torch.bfloat16))
                    model = wrap(native(model, recipe).requires_grad_(False), mesh)
                    model(x).sum().backward()
                    x.grad = None
                    if isinstance(model, FSDPModule):
                        model.reshard()  # the outermost module keeps its weights
                    held = sum(n for address, n in held_storages().items() if address not in before)
                    rest = rows if recipe.name == "float8_rowwise" else 64
                    expected = recipe.bytes_per_element() * rows * columns / 4 + rest
                    self.assertLessEqual(held, 1.02 * expected, (recipe, wrap))
                    self.assertGreaterEqual(held, 0.98 * (expected - 64), (recipe, wrap))

    def _check_traffic(self, model: nn.Module, recipe: Recipe, rows: int, columns: int) -> None:
        x = torch.zeros(2, 256)
        model(x).sum().backward()  # the first pass learns the order
        with wire_traffic() as forward:
            result = model(x)
        with wire_traffic() as backward:
            result.sum().backward()
        rest = 4 * rows if recipe.name == "float8_rowwise" else 0
        for traffic in (forward, backward):
            sent = [n for name, dtype, n in traffic.calls if "gather" in name and dtype is not torch.float32]
            self.assertEqual(sum(sent), (recipe.bytes_per_element() * rows * columns + rest) / 4, recipe)
            self.assertEqual([call for call in traffic.calls if call[1] == torch.int32 and "reduce" in call[0]], [])

    def test_report(self) -> None:
        with fake_world(rank=1, world_size=4):
            mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("gtp",))
            model = nn.Sequential(nn.Linear(64, 300), nn.Linear(300, 64), nn.Linear(64, 8))
            quantize_(model, {"0": "mxfp8", "1": "float8_blockwise"}, storage={"0": "native"})
            gtp_shard(model, mesh)
            rows = {row.name: row for row in sharding_report(model).rows}
            self.assertEqual(rows["0.weight"].storage, "native mxfp8")
            self.assertEqual(rows["0.weight"].local_nbytes, 75 * 66)
            self.assertEqual(rows["1.weight"].storage, "float8_blockwise from master")
            self.assertEqual(rows["2.weight"].storage, "")
            self.assertIn("float32 (native mxfp8)", str(sharding_report(model, verbose=True)))

    def test_empty_shards_and_columns(self) -> None:
        for rank in range(4):
            with fake_world(rank=rank, world_size=4):
                mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("gtp",))
                for recipe in all_recipes():
                    model = make()
                    gtp_shard(
                        native(model, recipe),
                        mesh,
                        schedule=ALL,
                        shard_placement_fn=lambda p: (
                            {33: Shard(1), 20: GTPShard(0, block_size=16)}[p.shape[0]] if p.ndim == 2 else None
                        ),
                    )
                    for layer in model:
                        local = layer.weight.to_local()
                        for name, plane in layer.state_dict().items():
                            if "weight" in name:
                                self.assertTrue(plane.to_local().numel() > 0 or local.numel() == 0 or "amax" in name)
                    model(torch.ones(1, 40)).sum().backward()
                    self.assertIs(type(model[0].weight.grad.to_local()), torch.Tensor)

    def test_optimizers_cannot_write_shards(self) -> None:
        """Neither under ``gtp_shard`` nor under ``fully_shard``, on any rank."""
        wraps = (
            lambda model, mesh: gtp_shard(model, mesh, schedule=ALL),
            lambda model, mesh: fully_shard(model, mesh=mesh),
        )
        for rank in (0, 3):
            with fake_world(rank=rank, world_size=4):
                mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("gtp",))
                for wrap in wraps:
                    for options in ({"fused": True}, {"foreach": True}, {"foreach": False}):
                        model = wrap(native(nn.Sequential(nn.Linear(64, 128)), "mxfp8"), mesh)
                        model(torch.ones(1, 64)).sum().backward()
                        message = r"Parameter '0.weight' of shape \(32, 64\) has native storage .*MasterOptimizer"
                        with self.assertRaisesRegex(NotImplementedError, message):
                            torch.optim.AdamW(model.parameters(), **options).step()

    def test_frozen_base_with_adapters(self) -> None:
        """Nothing is reduced for what does not train."""
        with fake_world(world_size=4):
            mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("gtp",))
            model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 4, bias=False))
            native(model, Float8Rowwise(), filter_fn=lambda module, name: name == "0")
            model[0].weight.requires_grad_(False)
            gtp_shard(model, mesh, schedule=ALL)
            with wire_traffic() as traffic:
                model(torch.ones(1, 64)).sum().backward()
            self.assertEqual(len([call for call in traffic.calls if "reduce_scatter" in call[0]]), 1)
            self.assertIsNone(model[0].weight.grad)
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()
