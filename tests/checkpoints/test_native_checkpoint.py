"""Checkpoints of native weights: the same bytes back on any topology that cuts between blocks; from and to bfloat16."""

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from checkpoint_common import RANK0, assert_same_state, job_state, load_job, whole_state
from common import GlooTest, _mesh, full, rows_of_rank, shared_directory
from quant_common import (
    COLUMNS,
    Net,
    all_recipes,
    cut_layers,
    dequantized,
    fsdp,
    fully_sharded,
    gtp,
    loss_of,
    tokens_of,
    up_only,
)
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh

from dtensor_gtp import checkpoint, gtp_shard, quantize_
from dtensor_gtp.quant import (
    MXFP8,
    NVFP4,
    Direction,
    Float8Blockwise,
    Float8Rowwise,
    Float8Tensorwise,
    PlaneSpec,
    Quantized,
    Recipe,
)
from dtensor_gtp.quant.master_optimizer import MasterOptimizer
from dtensor_gtp.quant.native import native_of

HIDDEN = 256
ShardFn = Callable[[nn.Module], nn.Module]
WHOLE = StateDictOptions(full_state_dict=True, cpu_offload=True)


def net(seed: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(seed)
    return Net(hidden=HIDDEN).to(dtype)


on_gtp = partial(gtp, names=up_only, storage="native")
on_fsdp = partial(fully_sharded, storage="native")


def on_tp(recipe: Recipe, mesh: DeviceMesh) -> ShardFn:
    return lambda model: on_gtp(recipe, mesh["gtp"])(cut_layers(model, mesh["tp"]))


def in_float32(shard: ShardFn) -> ShardFn:
    return lambda model: shard(model.float())


@dataclass(frozen=True)
class Int8Rows(Recipe):
    """A recipe as a user writes one: whole numbers, with one scale for each row."""

    levels: int = 127  # a checkpoint does not say it
    name = "int8_rows"
    rowwise = (PlaneSpec(torch.int8, 1, 1), PlaneSpec(torch.float32, 1, None))
    amax_dims = (-1,)

    def quantize(self, weight: torch.Tensor, direction: Direction, amax: torch.Tensor | None = None) -> Quantized:
        amax = self.amax(weight) if amax is None else amax
        assert amax is not None
        scale = (amax / self.levels).clamp(min=1e-30)
        return Quantized(((weight.float() / scale).round().to(torch.int8), scale), None)

    def dequantize(
        self, quantized: Quantized, shape: torch.Size, direction: Direction, dtype: torch.dtype
    ) -> torch.Tensor:
        elements, scale = quantized.planes
        return (elements * scale).to(dtype)


class TestNativeCheckpoint(GlooTest):
    def _check(self, recipe: Recipe, source: ShardFn, targets: list[ShardFn]) -> None:
        """Of each target: save by the source, load, same bytes, and forward computes with them."""
        saved = source(net(1))
        expected = whole_state(saved)
        self.assertEqual(sum(name.endswith("elements") for name in expected), 2)
        with shared_directory() as path:
            dcp.save({"model": get_model_state_dict(saved)}, checkpoint_id=path)
            for index, target in enumerate(targets):
                model = target(net(2))
                state = {"model": get_model_state_dict(model)}
                dcp.load(state, checkpoint_id=path)
                set_model_state_dict(model, state["model"])
                assert_same_state(whole_state(model), expected, (recipe, index))
                weight = full(model.layers[0].up.weight.detach())
                self.assertTrue(torch.equal(weight, full(saved.layers[0].up.weight.detach())))

    def test_dcp_loads_on_any_topology(self) -> None:
        """Also where some ranks have no blocks of scales, and scales of whole weights and rows."""
        mesh, one, dp_mesh = self.gtp_mesh(), self.hsdp_mesh(4), self.hsdp_mesh()
        tp, around = _mesh((2, 2), ("gtp", "tp")), _mesh((2, 2), ("dp", "gtp"))
        blockwise, nvfp4, mxfp8 = Float8Blockwise(), NVFP4(), MXFP8()
        tensorwise, rowwise = Float8Tensorwise(), Float8Rowwise()
        both = lambda model: fsdp(on_gtp(mxfp8, around["gtp"])(model), around["dp"])  # noqa: E731
        cases: list[tuple[Recipe, ShardFn, list[ShardFn]]] = [
            (blockwise, on_gtp(blockwise, mesh), [on_fsdp(blockwise, dp_mesh), on_gtp(blockwise, mesh, **COLUMNS)]),
            (blockwise, on_fsdp(blockwise, dp_mesh), [on_gtp(blockwise, mesh)]),
            (nvfp4, on_gtp(nvfp4, mesh), [on_gtp(nvfp4, mesh), on_tp(nvfp4, tp), on_gtp(nvfp4, mesh, **COLUMNS)]),
            (nvfp4, on_gtp(nvfp4, mesh, **COLUMNS), [on_fsdp(nvfp4, mesh)]),
            (mxfp8, on_gtp(mxfp8, one), [on_gtp(mxfp8, one), on_gtp(mxfp8, mesh), on_fsdp(mxfp8, one), both]),
            (tensorwise, on_tp(tensorwise, tp), [on_gtp(tensorwise, mesh)]),
            (rowwise, on_tp(rowwise, tp), [on_fsdp(rowwise, mesh)]),
        ]
        for recipe, source, targets in cases:
            self._check(recipe, source, targets)

    def test_a_recipe_of_the_user(self) -> None:
        """By dcp, by ``load_state_dict`` with and without ``assign``, from high precision; with the same arguments."""
        mesh, recipe = self.gtp_mesh(), Int8Rows(levels=100)
        shard = on_gtp(recipe, mesh)
        self._check(recipe, shard, [shard, on_fsdp(recipe, mesh)])
        saved = shard(net(1))
        state = {name: value.clone() for name, value in saved.state_dict().items()}
        for assign in (False, True):
            model = shard(net(2))
            model.load_state_dict(state, assign=assign)
            assert_same_state(model.state_dict(), saved.state_dict(), assign)
            native = native_of(model.layers[0].up.weight)
            self.assertEqual(native.recipe, recipe)
        with shared_directory() as path:
            dcp.save(fsdp(net(1), mesh).state_dict(), checkpoint_id=path)
            model = shard(net(2))
            checkpoint.load(model.state_dict(), model=model, checkpoint_id=path)
            assert_same_state(model.state_dict(), saved.state_dict())

    def test_a_recipe_of_the_user_into_a_plain_model(self) -> None:
        """The checkpoint does not say the recipe, so the caller does."""
        mesh, recipe = self.gtp_mesh(), Int8Rows(levels=100)
        saved = on_gtp(recipe, mesh)(net(1))
        expected = {name: full(param.detach()) for name, param in saved.named_parameters()}
        with shared_directory() as path:
            dcp.save(saved.state_dict(), checkpoint_id=path)
            plain = fsdp(net(2), mesh)
            checkpoint.load(plain.state_dict(), checkpoint_id=path, recipes=[recipe])
            assert_same_state({name: full(param.detach()) for name, param in plain.named_parameters()}, expected)
            with self.assertRaisesRegex(RuntimeError, "'layers.0.up.weight', did you mean 'layers.0.up.weight_"):
                checkpoint.load(plain.state_dict(), checkpoint_id=path)
        alone = net(2)
        alone.load_state_dict(checkpoint.dequantize_state_dict(whole_state(saved), alone, [recipe]))
        assert_same_state(dict(alone.named_parameters()), expected)

    def test_full_state_dicts(self) -> None:
        """Out to rank 0 and back, from rank 0 and from every rank; planes, and high-precision values."""
        mesh = self.gtp_mesh()
        for number, recipe in enumerate(all_recipes()):
            saved = on_gtp(recipe, mesh)(net(1))
            expected = saved.state_dict()
            plain = net(1).state_dict()
            whole = get_model_state_dict(saved, options=WHOLE)
            on_every_rank = [whole]
            dist.broadcast_object_list(on_every_rank)
            all_options = [RANK0, StateDictOptions(full_state_dict=True)]
            for source, options in zip((on_every_rank[0], plain), all_options[:: (-1) ** number], strict=True):
                model = on_gtp(recipe, mesh)(net(2))
                is_given = options is not RANK0 or self.rank == 0
                set_model_state_dict(model, dict(source) if is_given else {}, options=options)
                assert_same_state(model.state_dict(), expected, recipe)
            other = net(2)
            other.load_state_dict(checkpoint.dequantize_state_dict(on_every_rank[0], other))
            for name, param in other.named_parameters():
                value = (
                    dequantized(plain[name], recipe, Direction.ROWWISE) if name.endswith("up.weight") else plain[name]
                )
                self.assertTrue(torch.equal(param, value), (recipe, name))

    def test_load_state_dict_quantizes_whole_values(self) -> None:
        """Of high precision on every rank, copied and assigned, on one axis and on several, also after unshard()."""
        mesh, tp, around = self.gtp_mesh(), _mesh((2, 2), ("gtp", "tp")), _mesh((2, 2), ("dp", "gtp"))
        values = net(1).state_dict()
        shards: list[ShardFn] = []
        for recipe in all_recipes():
            shards += [on_gtp(recipe, mesh), on_tp(recipe, tp)]
        shards += [on_gtp(NVFP4(), mesh, **COLUMNS), on_gtp(NVFP4(), around["gtp"])]
        shards.append(lambda model: fsdp(on_gtp(MXFP8(), around["gtp"])(model), around["dp"]))
        for index, shard in enumerate(shards):
            expected = shard(net(1)).state_dict()
            for assign in (False, True):
                model = shard(net(2))
                model.load_state_dict(values, assign=assign)
                assert_same_state(model.state_dict(), expected, (index, assign))
        model = shards[0](net(2))
        model.unshard()
        model.load_state_dict(values)
        assert_same_state(model.state_dict(), shards[0](net(1)).state_dict())

    def test_bfloat16_into_native_and_back(self) -> None:
        """A checkpoint of plain ``fully_shard`` in bfloat16 into every recipe and masters, and each of them back."""
        mesh, tp, around = self.gtp_mesh(), _mesh((2, 2), ("gtp", "tp")), _mesh((2, 2), ("dp", "gtp"))
        plain = lambda model: fsdp(model, mesh)  # noqa: E731
        values = {name: value.clone() for name, value in net(1, torch.bfloat16).state_dict().items()}
        with shared_directory() as path:
            dcp.save({"model": plain(net(1, torch.bfloat16)).state_dict()}, checkpoint_id=path / "plain")
            for index, (recipe, shard) in enumerate(
                (
                    *((recipe, on_gtp(recipe, mesh)) for recipe in all_recipes()),
                    (NVFP4(), on_fsdp(NVFP4(), mesh)),
                    (Float8Tensorwise(), on_tp(Float8Tensorwise(), tp)),
                    (MXFP8(), lambda m: fsdp(on_gtp(MXFP8(), around["gtp"])(m), around["dp"])),
                    (MXFP8(), gtp(MXFP8(), mesh, up_only)),  # masters
                    (NVFP4(), in_float32(gtp(NVFP4(), mesh, up_only))),
                )
            ):
                model = shard(net(2, torch.bfloat16))
                checkpoint.load({"model": model.state_dict()}, model=model, checkpoint_id=path / "plain")
                is_native = native_of(model.layers[0].up.weight) is not None
                back = plain(net(3, torch.bfloat16))
                dcp.save({"model": model.state_dict()}, checkpoint_id=path / f"{index}")
                checkpoint.load({"model": back.state_dict()}, checkpoint_id=path / f"{index}")
                for name, param in back.named_parameters():
                    value = values[name]
                    if is_native and name.endswith("up.weight"):
                        value = dequantized(value, recipe, Direction.ROWWISE)
                    self.assertTrue(torch.equal(full(param.detach()), value), (recipe, name))

    def test_one_recipe_into_another(self) -> None:
        """Dequantized in float32, quantized again; on parts that begin and end within blocks of the source."""
        mesh = self.gtp_mesh()
        source = on_gtp(Float8Blockwise(), mesh)(net(1))
        with shared_directory() as path:
            dcp.save(source.state_dict(), checkpoint_id=path)
            target = on_gtp(NVFP4(), mesh)(net(2))
            with self.assertRaisesRegex(ValueError, "load expects the module that has .* must quantize it"):
                checkpoint.load(target.state_dict(), checkpoint_id=path)
            checkpoint.load(target.state_dict(), model=target, checkpoint_id=path)
            values = full(source.layers[1].up.weight.detach())
            actual = full(target.layers[1].up.weight.detach())
            self.assertTrue(torch.equal(actual, dequantized(values, NVFP4(), Direction.ROWWISE)))
            with self.assertRaisesRegex(RuntimeError, "2 keys that the checkpoint lacks: '0.(weight|bias)'; "):
                checkpoint.load(nn.Sequential(nn.Linear(40, 5)).state_dict(), checkpoint_id=path)

    def test_into_masters_of_ranks_without_rows(self) -> None:
        """Blocks of scales are whole, so a rank may have none; the others would wait for it forever."""
        mesh = self.gtp_mesh()
        for recipe, rows in ((Float8Blockwise(), 128), (MXFP8(), 32)):
            models = []
            for storage in ("native", "master"):
                torch.manual_seed(len(models))
                plain = nn.Sequential(nn.Linear(64, rows, bias=False))
                models.append(gtp_shard(quantize_(plain, recipe, storage=storage), mesh))
            with shared_directory() as path:
                checkpoint.save({"model": models[0].state_dict()}, path)
                checkpoint.load({"model": models[1].state_dict()}, checkpoint_id=path, model=models[1])
            torch.testing.assert_close(full(models[1][0].weight), full(models[0][0].weight), rtol=0, atol=0)

    def test_masters_and_optimizer_state(self) -> None:
        """Bit for bit on another topology; training goes on with the bits it would have had."""
        mesh, tp = self.gtp_mesh(), _mesh((2, 2), ("gtp", "tp"))
        recipe = NVFP4()

        def job(shard: ShardFn, data_mesh: DeviceMesh, seed: int) -> tuple[nn.Module, MasterOptimizer]:
            model = shard(net(seed, torch.bfloat16))
            optimizer = MasterOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2)
            step(model, optimizer, data_mesh, seed)
            return model, optimizer

        def step(model: nn.Module, optimizer: MasterOptimizer, data_mesh: DeviceMesh, seed: int) -> None:
            loss_of(model, rows_of_rank(tokens_of(seed), data_mesh)).backward()
            optimizer.step()
            optimizer.zero_grad()

        saved = job(on_gtp(recipe, mesh), mesh, 1)
        expected = whole_state(*saved)
        self.assertEqual(expected["layers.0.up.weight/master"].dtype, torch.float32)
        self.assertEqual(expected["layers.0.up.weight/exp_avg"].dtype, torch.float32)
        with shared_directory() as path:
            dcp.save(job_state(*saved), checkpoint_id=path)
            loaded = {}
            ways = {"gtp": (on_gtp, mesh, mesh), "tp": (on_tp, tp, tp["gtp"]), "fsdp": (on_fsdp, mesh, mesh)}
            for name, (shard, on, data_mesh) in ways.items():
                loaded[name] = job(shard(recipe, on), data_mesh, 2)
                load_job(*loaded[name], path)
                assert_same_state(whole_state(*loaded[name]), expected, name)
        for model, optimizer in (saved, loaded["gtp"]):
            step(model, optimizer, mesh, 3)
        assert_same_state(whole_state(*loaded["gtp"]), whole_state(*saved))
        again = MasterOptimizer(copy.copy(list(saved[0].parameters())), torch.optim.AdamW, lr=1e-2)
        again.load_state_dict(saved[1].state_dict())
        assert_same_state(whole_state(saved[0], again), whole_state(*saved))

    def test_blocks_that_a_topology_cuts(self) -> None:
        mesh = self.gtp_mesh()
        message = r"'layers.0.up.weight' of shape \(256, 40\) cannot be split .* splits float8_blockwise blocks of 128"
        with self.assertRaisesRegex(NotImplementedError, message):
            on_fsdp(Float8Blockwise(), mesh)(net(1))
