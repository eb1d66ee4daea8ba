"""Native storage in one process: the parameter is the quantized data. What it computes, holds, reads and refuses; and
``MasterOptimizer``, which trains it."""

import copy
import gc
import io
import itertools
import unittest
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from checkpoint_common import local
from common import ALL, fake_mesh
from quant_common import Net, all_recipes, blocks_only, compile_layers, dequantized, loss_of, tokens_of, wire_traffic
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_gtp import GTPShard, gtp_shard, quantize_, sharding_report
from dtensor_gtp.quant import MXFP8, NVFP4, Direction, Float8Rowwise
from dtensor_gtp.quant.master import MasterWeight
from dtensor_gtp.quant.master_optimizer import MasterOptimizer
from dtensor_gtp.quant.native import NativeWeight


def native(module: nn.Module, recipe: Any, **kwargs: Any) -> nn.Module:
    return quantize_(module, recipe, storage="native", **kwargs)


def make(seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(40, 33), nn.Linear(33, 20, bias=False)).to(dtype)


def state_of(module: nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in module.state_dict().items()}


def load_in_place(state: dict[str, torch.Tensor], values: dict[str, torch.Tensor]) -> None:
    """As ``dcp.load``: into the planes of native weights."""
    for name, value in values.items():
        into, given = local(state[name]).detach(), local(value)
        if not isinstance(given, NativeWeight):
            into.copy_(given)
            continue
        assert isinstance(into, NativeWeight)
        for plane, of_given in zip(into.quantized.planes, given.quantized.planes, strict=True):
            plane.copy_(of_given)


def same_state(a: dict[str, Any], b: dict[str, Any]) -> bool:
    assert a.keys() == b.keys(), (a.keys(), b.keys())
    return all(torch.equal(local(value), local(b[name])) for name, value in a.items())


def held_storages() -> dict[int, int]:
    """Address and bytes of the memory of all tensors that the process holds."""
    gc.collect()
    plain = [t for t in gc.get_objects() if type(t) in (torch.Tensor, nn.Parameter)]
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in plain if t.device.type == "cpu"}


def by_fsdp(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    return fully_shard(model, mesh=mesh)


class TestValues(unittest.TestCase):
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
        state = state_of(model)
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

    def test_writes_through_a_view_are_refused(self) -> None:
        """And to a weight without memory."""
        weight = native(make(), "mxfp8")[0].weight
        with torch.no_grad():
            for target, told in (
                (weight.view(3, 11, 40), r"a view of shape \(3, 11, 40\) on cpu. Copy into the parameter itself"),
                (weight.to("meta"), r"a view of shape \(33, 40\) on meta"),
            ):
                with self.assertRaisesRegex(NotImplementedError, rf"'0.weight' of shape \(33, 40\) .* through {told}"):
                    target.copy_(torch.ones(target.shape))
            weight.copy_(torch.ones(33, 40))
            self.assertTrue(torch.equal(weight.dense(), torch.ones(33, 40)))


class TestStateDict(unittest.TestCase):
    def test_same_bytes(self) -> None:
        for recipe in all_recipes():
            state = state_of(native(make(0), recipe))
            self.assertEqual({value.dtype for name, value in state.items() if "elements" in name}, {torch.uint8})
            for assign in (False, True):
                other = native(make(1), recipe)
                self.assertFalse(same_state(other.state_dict(), state))
                other.load_state_dict(state, assign=assign)
                self.assertTrue(same_state(other.state_dict(), state))

    def test_other_values_are_quantized(self) -> None:
        """Those of high precision and the planes of another recipe."""
        for recipe, dtype in itertools.product(all_recipes(), (torch.float32, torch.bfloat16)):
            plain, other = make(1, dtype), native(make(0), recipe)
            other.load_state_dict(plain.state_dict())
            self.assertTrue(same_state(other[0].state_dict(), native(plain.float(), recipe)[0].state_dict()))
        source, target = native(make(0), "float8_rowwise"), native(make(1), "nvfp4")
        target.load_state_dict(source.state_dict())
        expected = dequantized(source[0].weight.dense(), NVFP4(), Direction.ROWWISE)
        self.assertTrue(torch.equal(target[0].weight.dense(), expected))

    def test_planes_that_do_not_fit(self) -> None:
        target = native(make(), "mxfp8")
        state = target.state_dict()
        cut = state | {"0.weight_mxfp8.scales": state["0.weight_mxfp8.scales"][:, :1]}
        missing = {name: value for name, value in state.items() if name != "0.weight_mxfp8.scales"}
        expects = r"expects mxfp8 scales of shape \(33, 2\), but got"
        for given, message in (
            (cut, rf"'0.weight' of shape \(33, 40\) {expects} a Tensor of shape"),
            (missing, f"{expects} none"),
            ({}, 'Missing key.* "0.weight"'),
        ):
            with self.assertRaisesRegex(RuntimeError, message):
                target.load_state_dict(given)


class TestQuantize(unittest.TestCase):
    def test_storage_for_each_layer(self) -> None:
        model = quantize_(make(), {"0": "mxfp8", "1": "nvfp4"}, storage={"1": "native"})
        self.assertEqual([type(layer.weight) for layer in model], [MasterWeight, NativeWeight])
        planes = [f"1.weight_nvfp4.{name}" for name in ("elements", "scales", "amax")]
        self.assertEqual(set(model.state_dict()), {"0.weight", "0.bias", *planes})

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
        cases = ("'master' or 'native', but got 'both'", "both"), (r"\['2'\] are none of", {"2": "native"})
        for message, storage in cases:
            with self.assertRaisesRegex(ValueError, message):
                quantize_(make(), "mxfp8", storage=storage)

    def test_slices_that_cut_blocks(self) -> None:
        """Rows of mxfp8 are not tied to one another where nothing is stored columnwise."""
        with fake_mesh(2, 2, names=("gtp", "tp")) as mesh:
            by_columns, by_rows = (
                parallelize_module(nn.Sequential(nn.Linear(80, 80)), mesh["tp"], {"0": style()})
                for style in (RowwiseParallel, ColwiseParallel)
            )
            with self.assertRaisesRegex(ValueError, "quantize_ expects slices of whole mxfp8 blocks of 32 along dim 1"):
                native(by_columns, "mxfp8")
            gtp_shard(native(by_rows, "mxfp8"), mesh["gtp"], schedule=ALL)
            self.assertEqual(by_rows[0].weight.to_local().shape, (20, 80))


class TestSharded(unittest.TestCase):
    """One rank of several whose collectives communicate nothing."""

    def test_memory_is_data_and_scales(self) -> None:
        """Within 2% of what the format says, in all that the process holds after a forward and backward."""
        rows, columns = 1024, 512
        with fake_mesh(4) as mesh:
            x = torch.ones(1, columns, dtype=torch.bfloat16, requires_grad=True)
            before = held_storages()
            for recipe, wrap in itertools.product((MXFP8(), NVFP4(), Float8Rowwise()), (gtp_shard, by_fsdp)):
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

    def test_report(self) -> None:
        with fake_mesh(4, rank=1) as mesh:
            model = nn.Sequential(nn.Linear(64, 300), nn.Linear(300, 64), nn.Linear(64, 8))
            quantize_(model, {"0": "mxfp8", "1": "float8_blockwise"}, storage={"0": "native"})
            report = sharding_report(gtp_shard(model, mesh), verbose=True)
            rows = {row.name: row for row in report.rows}
            self.assertEqual(rows["0.weight"].local_nbytes, 75 * 66)
            storages = [rows[f"{index}.weight"].storage for index in range(3)]
            self.assertEqual(storages, ["native mxfp8", "float8_blockwise from master", ""])
            self.assertIn("float32 (native mxfp8)", str(report))

    def test_empty_shards_and_columns(self) -> None:
        place = {33: Shard(1), 20: GTPShard(0, block_size=16)}
        for rank, recipe in itertools.product(range(4), all_recipes()):
            with fake_mesh(4, rank=rank) as mesh:
                model = native(make(), recipe)
                by_rows = lambda p: place[p.shape[0]] if p.ndim == 2 else None  # noqa: E731
                gtp_shard(model, mesh, schedule=ALL, shard_placement_fn=by_rows)
                for layer in model:
                    is_empty = layer.weight.to_local().numel() == 0
                    for name, plane in layer.state_dict().items():
                        if "weight" in name:
                            self.assertTrue(plane.to_local().numel() > 0 or is_empty or "amax" in name)
                model(torch.ones(1, 40)).sum().backward()
                self.assertIs(type(model[0].weight.grad.to_local()), torch.Tensor)

    def test_optimizers_cannot_write(self) -> None:
        """Whole, under ``gtp_shard`` and ``fully_shard``, on any rank: named on the first step; masters that the
        optimizer helper keeps are the remedy, or freezing."""
        gtp, ways = partial(gtp_shard, schedule=ALL), ({"fused": True}, {"foreach": True}, {"foreach": False})
        optimizers = [*(partial(torch.optim.AdamW, **way) for way in ways), partial(torch.optim.SGD, lr=0.1)]
        for wrap, rank in ((None, 0), (gtp, 0), (gtp, 3), (by_fsdp, 0), (by_fsdp, 3)):
            for make_optimizer in optimizers:
                with fake_mesh(4, rank=rank) as mesh:
                    model = native(nn.Sequential(nn.Linear(64, 128)), "mxfp8")
                    model = model if wrap is None else wrap(model, mesh)
                    before = state_of(model)
                    model(torch.ones(1, 64)).sum().backward()
                    rows = 128 if wrap is None else 32
                    message = (
                        rf"Parameter '0.weight' of shape \({rows}, 64\) has native storage \(mxfp8\), .*MasterOptim"
                    )
                    with self.assertRaisesRegex(NotImplementedError, message):
                        make_optimizer([model[0].weight]).step()
                    self.assertTrue(same_state(model.state_dict(), before))

    def test_parts_with_one_scale_for_the_whole_weight(self) -> None:
        """``fully_shard`` does not say which ranks have the others. A state dict says it."""
        for recipe in ("float8_tensorwise", "nvfp4"):
            with fake_mesh(4, rank=3) as mesh:
                model = by_fsdp(native(nn.Sequential(nn.Linear(64, 126)), recipe), mesh)
                told = rf"'0.weight' of shape \(126, 64\) .* by copy_ under fully_shard, because {recipe} has one scale"
                for target in (model[0].weight, model[0].weight.to_local()):
                    with torch.no_grad(), self.assertRaisesRegex(NotImplementedError, told):
                        target.copy_(torch.ones_like(target))
                ones = DTensor.from_local(torch.ones(30, 64), mesh, [Shard(0)], shape=(126, 64), stride=(64, 1))
                model.load_state_dict({"0.weight": ones, "0.bias": model[0].bias})
                self.assertTrue(torch.equal(local(model[0].weight).dense(), torch.ones(30, 64)))

    def test_equal_parts_with_one_scale_for_the_whole_weight(self) -> None:
        """Refused on all ranks, also on those whose part needs no padding."""
        for recipe, rows in itertools.product(("float8_tensorwise", "nvfp4"), (128, 126)):
            with fake_mesh(4, rank=0) as mesh:
                weight = by_fsdp(native(nn.Sequential(nn.Linear(64, rows)), recipe), mesh)[0].weight
                told = rf"'0.weight' of shape \({rows}, 64\) .* by copy_ under fully_shard, because {recipe} has one"
                with torch.no_grad(), self.assertRaisesRegex(NotImplementedError, told):
                    weight.copy_(torch.ones_like(weight))

    def test_parts_with_a_scale_of_their_own_are_written(self) -> None:
        """Under ``fully_shard`` that splits no statistic: rows scaled one by one, and a mesh of one rank."""
        for recipe, size in (("float8_rowwise", 4), ("float8_tensorwise", 1)):
            with fake_mesh(size) as mesh:
                weight = by_fsdp(native(nn.Sequential(nn.Linear(64, 128)), recipe), mesh)[0].weight
                with torch.no_grad():
                    weight.copy_(torch.ones_like(weight))
                self.assertTrue(torch.equal(local(weight).dense(), torch.ones(128 // size, 64)))

    def test_frozen_base_with_adapters(self) -> None:
        """Nothing is reduced for what does not train."""
        with fake_mesh(4) as mesh:
            model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 4, bias=False))
            native(model, Float8Rowwise(), filter_fn=lambda module, name: name == "0")
            model[0].weight.requires_grad_(False)
            gtp_shard(model, mesh, schedule=ALL)
            with wire_traffic() as traffic:
                model(torch.ones(1, 64)).sum().backward()
            self.assertEqual(len([call for call in traffic.calls if "reduce_scatter" in call[0]]), 1)
            self.assertIsNone(model[0].weight.grad)
            torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1).step()


def make_layer(**options: Any) -> Any:
    torch.manual_seed(0)
    return native(nn.Linear(40, 33, **options), "mxfp8")


def step(layer: nn.Module, optimizer: torch.optim.Optimizer, seed: int = 0) -> None:
    x = torch.randn(5, 40, generator=torch.Generator().manual_seed(seed))
    layer(x.to(next(iter(layer.parameters())).dtype)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


class TestMasterOptimizer(unittest.TestCase):
    def test_steps_are_those_of_the_stock_optimizer_on_masters(self) -> None:
        for cls, options in (
            (torch.optim.AdamW, {"fused": True}),
            (torch.optim.AdamW, {"foreach": True}),
            (torch.optim.SGD, {"momentum": 0.9, "weight_decay": 0.1}),
        ):
            layer = make_layer()
            start = layer.weight.dense() + 1e-4
            optimizer = MasterOptimizer(layer.parameters(), cls, masters={"weight": start}, lr=0.1, **options)
            master, bias = nn.Parameter(start.clone()), nn.Parameter(layer.bias.detach().clone())
            reference = cls([master, bias], lr=0.1, **options)
            for number in range(2):

                def closure(layer: nn.Module = layer, optimizer: Any = optimizer) -> torch.Tensor:
                    optimizer.zero_grad()
                    loss: torch.Tensor = layer(torch.ones(2, 40)).square().sum()
                    loss.backward()
                    return loss

                if number == 0:
                    closure()
                    optimizer.step()
                else:
                    self.assertTrue(optimizer.step(closure).isfinite())
                master.grad, bias.grad = layer.weight.grad.clone(), layer.bias.grad.clone()
                reference.step()
                self.assertTrue(torch.equal(optimizer.state[layer.weight]["master"], master))
                self.assertTrue(torch.equal(layer.bias, bias))
                rounded = dequantized(master.detach(), MXFP8(), Direction.ROWWISE)
                self.assertTrue(torch.equal(layer.weight.dense(), rounded))

    def test_state_dict(self) -> None:
        """Masters and moments stay in float32, also beside a weight of bfloat16; what is loaded counts."""
        layer = make_layer(dtype=torch.bfloat16)
        optimizer = MasterOptimizer(layer.named_parameters(), torch.optim.AdamW, lr=0.1)
        self.assertEqual(optimizer.state_dict()["state"], {})
        step(layer, optimizer)
        file = io.BytesIO()
        torch.save([layer.state_dict(), optimizer.state_dict()], file)
        expected = {key: value.clone() for key, value in optimizer.state[layer.weight].items()}
        self.assertEqual({value.dtype for value in expected.values()}, {torch.float32})
        other = make_layer(dtype=torch.bfloat16)
        resumed = MasterOptimizer(other.named_parameters(), torch.optim.AdamW, lr=0.5)
        step(other, resumed, seed=1)
        file.seek(0)
        model_state, optimizer_state = torch.load(file)
        other.load_state_dict(model_state)
        resumed.load_state_dict(optimizer_state)
        for key, value in expected.items():
            self.assertTrue(torch.equal(resumed.state[other.weight][key], value), key)
            self.assertEqual(resumed.state[other.weight][key].dtype, value.dtype)
        for module, opt in ((layer, optimizer), (other, resumed)):
            step(module, opt, seed=2)
        self.assertTrue(same_state(layer.state_dict(), other.state_dict()))

    def test_weights_that_were_loaded_count(self) -> None:
        """A master is made anew of a weight that was written to since, but not if that is its own after all."""
        for is_sharded, is_in_place in itertools.product((False, True), repeat=2):
            with self.subTest(is_sharded=is_sharded, is_in_place=is_in_place), fake_mesh(1) as mesh:
                layer = make_layer()
                if is_sharded:
                    gtp_shard(layer, mesh, schedule=ALL)
                optimizer = MasterOptimizer(layer.parameters(), torch.optim.SGD, lr=0.01)
                step(layer, optimizer)
                good = state_of(layer)
                masters = optimizer.state[layer.weight]["master"].clone()
                step(layer, optimizer, seed=1)
                other = state_of(layer)
                if is_in_place:
                    load_in_place(layer.state_dict(), good)
                else:
                    layer.load_state_dict(good)
                with torch.no_grad():
                    expected = local(layer.weight).dense().clone()
                for group in optimizer.param_groups:
                    group["lr"] = 1e-30
                step(layer, optimizer, seed=2)
                self.assertTrue(torch.equal(local(optimizer.state[layer.weight]["master"]), expected))
                # Swapped for a while: the master keeps what the format has no bits for.
                with torch.no_grad():
                    optimizer.state[layer.weight]["master"].copy_(masters)
                step(layer, optimizer, seed=3)
                own = state_of(layer)
                layer.load_state_dict(other)
                layer.load_state_dict(own)
                step(layer, optimizer, seed=4)
                self.assertTrue(torch.equal(local(optimizer.state[layer.weight]["master"]), local(masters)))

    def test_schedulers_groups_and_scalers(self) -> None:
        layer, late = make_layer(), nn.Linear(3, 3)
        optimizer = MasterOptimizer(
            [{"params": [layer.weight], "lr": 1.0}, {"params": [layer.bias]}], torch.optim.SGD, lr=0.5
        )
        self.assertEqual([group["lr"] for group in optimizer.param_groups], [1.0, 0.5])
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        optimizer.add_param_group({"params": list(late.parameters()), "lr": 3.0})
        step(layer, optimizer)
        scheduler.step()
        before = optimizer.state[layer.weight]["master"].clone()
        scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
        scaler.scale(layer(torch.ones(1, 40)).sum()).backward()
        scaler.scale(late(torch.ones(1, 3)).sum()).backward()
        values = late.bias.detach().clone()
        scaler.step(optimizer)
        self.assertTrue(torch.equal(optimizer.state[layer.weight]["master"], before - 0.5))
        self.assertTrue(torch.equal(late.bias, values - 1.5))

    def test_frozen_and_later_trained(self) -> None:
        layer = make_layer()
        layer.weight.requires_grad_(False)
        before = state_of(layer)
        optimizer = MasterOptimizer(layer.parameters(), torch.optim.SGD, lr=0.1)
        step(layer, optimizer)
        self.assertNotIn(layer.weight, optimizer.state)
        for name, value in layer.state_dict().items():
            self.assertEqual(torch.equal(value, before[name]), name != "bias", name)
        layer.weight.requires_grad_(True)
        step(layer, optimizer)
        self.assertIn("master", optimizer.state[layer.weight])

    def test_errors(self) -> None:
        layer = make_layer()
        for error, cls, masters, message in (
            (TypeError, "SGD", None, "expects a class of optimizers, but got 'SGD'"),
            (ValueError, torch.optim.SGD, {"up": torch.ones(1)}, r"of its native parameters, but got \['up'\]"),
            (ValueError, torch.optim.SGD, {"weight": torch.ones(3, 3)}, r"of shape \(33, 40\) for 'weight', but got"),
        ):
            with self.assertRaisesRegex(error, message):
                MasterOptimizer(layer.parameters(), cls, lr=0.1, masters=masters)  # type: ignore[arg-type]

    def test_masters_with_other_placements(self) -> None:
        values = torch.randn(33, 40)
        with fake_mesh(3) as mesh:
            layer = gtp_shard(make_layer(), mesh, schedule=ALL)
            for given in (distribute_tensor(values, mesh, [placement]) for placement in (Replicate(), Shard(1))):
                told = r"master for 'weight' of shape \(33, 40\) that is placed as the parameter or whole .*placements"
                with self.assertRaisesRegex(ValueError, told):
                    MasterOptimizer(layer.parameters(), torch.optim.SGD, masters={"weight": given})
            own = distribute_tensor(values, mesh, layer.weight.placements, src_data_rank=None)  # nothing is sent
            for given in (values, own):
                optimizer = MasterOptimizer(layer.parameters(), torch.optim.SGD, masters={"weight": given}, lr=0.0)
                layer(torch.ones(5, 40)).sum().backward()
                for param in layer.parameters():
                    local(param.grad).zero_()  # what a fake group leaves there may be NaN
                optimizer.step()
                self.assertTrue(torch.equal(local(optimizer.state[layer.weight]["master"]), values[:11]))

    def test_compiled_blocks_share_one_graph(self) -> None:
        """Sharded and without sharding."""
        with fake_mesh(1) as mesh:
            for recipe, is_sharded in (("nvfp4", True), ("float8_rowwise", False)):
                torch.manual_seed(0)
                models = [Net()]
                models.append(copy.deepcopy(models[0]))
                for model in models:
                    quantize_(model, recipe, filter_fn=blocks_only, storage="native")
                    if is_sharded:
                        gtp_shard(model, mesh, schedule=ALL)
                torch._dynamo.reset()
                counters.clear()
                compile_layers(models[1])
                for model in models:
                    loss_of(model, tokens_of(0)).backward()
                self.assertEqual(counters["stats"]["unique_graphs"], 1)
                for a, b in zip(models[0].parameters(), models[1].parameters(), strict=True):
                    torch.testing.assert_close(local(a.grad), local(b.grad))
