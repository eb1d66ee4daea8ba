"""What crosses the wire for quantized weights, and what arrives: weight by weight, and small weights of a block, which
are gathered together: each rank sends what a recipe makes of its values."""

from collections.abc import Callable
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from common import GlooTest, _mesh, environment, full, rows_of_rank
from quant_common import (
    Block,
    Linear,
    Net,
    StockLinear,
    all_recipes,
    blocks_only,
    check,
    compile_layers,
    dequantized,
    gtp,
    is_linear,
    loss_of,
    recompute,
    reference_of,
    tokens_of,
    traffic_of_a_step,
    wire_traffic,
)
from runtime_common import members_of, runtime_of, weight_of
from schedules import explicit
from test_gather_backends import Casts
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_gtp import GTPShard, SchedulePolicy, gtp_shard, init_weight_mesh, quantize_, sharding_report
from dtensor_gtp._modules import group_blocks
from dtensor_gtp._schedule import choose_schedule
from dtensor_gtp._torch_compat import as_integers
from dtensor_gtp.quant import MXFP8, NVFP4, Direction, Float8Rowwise, Float8Tensorwise, Quantized, Recipe

NUM_QUANTIZED = 4  # weights of ``Net``
# A window whose end falls between the two sizes of a weight that tensor parallelism has cut unevenly.
TIGHT = explicit(1, prefetch_nbytes=33000, min_shard_numel=0, coalesce_nbytes=0)


def tp_pair(size: int, tp: DeviceMesh) -> nn.Module:
    """Two layers with ``size`` features between them, cut there over ``tp``."""
    pair = nn.Sequential(nn.Linear(64, size, bias=False), nn.Linear(size, 64, bias=False))
    return parallelize_module(pair, tp, {"0": ColwiseParallel(use_local_output=False), "1": RowwiseParallel()})


def statistics(sent: wire_traffic) -> list[int]:
    """How many maxima each all-reduce of them has carried."""
    return [n // 4 for op, dtype, n in sent.calls if op == "allreduce_" and dtype == torch.int32]


class TestGathered(GlooTest):
    """What arrives is what the whole weight would have been quantized to, bit for bit."""

    def _gathered(self, model: nn.Module, name: str, direction: Direction) -> tuple[Quantized, torch.Tensor]:
        runtime, weight = runtime_of(model), weight_of(model, name)
        recipe = type(weight.form.wire.recipe)
        target = weight.for_forward if direction is Direction.ROWWISE else weight.for_backward
        watched = mock.patch.object(recipe, "dequantize", autospec=True, side_effect=recipe.dequantize)
        with watched as dequantize, runtime.gathering.using(target) as gathered:
            whole = gathered.full
            return dequantize.call_args.args[1], whole.clone()

    def _check(self, model: nn.Module, recipe: Recipe, names: list[str]) -> None:
        for name in names:
            param: Any = model.get_parameter(name)
            master = full(param.detach())
            for direction in {recipe.direction(d) for d in Direction}:
                actual, whole = self._gathered(model, name, direction)
                expected = recipe.quantize(master, direction)
                for a, b in zip(actual.planes, self._of_tp(expected.planes, param), strict=True):
                    self.assertEqual((a.dtype, a.shape), (b.dtype, b.shape))
                    same = torch.equal(as_integers(a.contiguous()), as_integers(b.contiguous()))
                    self.assertTrue(same, (recipe, name))
                if expected.amax is not None:
                    self.assertTrue(torch.equal(actual.amax, expected.amax), (recipe, name))
                full_weight = recipe.dequantize(expected, master.shape, direction, master.dtype)
                self.assertTrue(torch.equal(whole, self._of_tp((full_weight,), param)[0]), (recipe, name))

    @staticmethod
    def _of_tp(planes: tuple[torch.Tensor, ...], param: DTensor) -> list[torch.Tensor]:
        """The part of whole planes that is this tp rank's."""
        mesh = param.device_mesh
        if "tp" not in mesh.mesh_dim_names:
            return list(planes)
        axis = mesh.mesh_dim_names.index("tp")
        dim = param.placements[axis].dim
        parts = [p if p.shape[dim] == 1 else p.chunk(mesh.size(axis), dim)[mesh.get_local_rank(axis)] for p in planes]
        return [part.contiguous() for part in parts]

    def test_r17_every_mesh_and_shape(self) -> None:
        for mesh, dim, recipes in (
            (self.gtp_mesh(), 0, all_recipes()),
            (self.gtp_mesh(), 1, all_recipes()),
            (self.hsdp_mesh(), 0, (Float8Tensorwise(), NVFP4())),
        ):
            place = lambda p, d=dim: GTPShard(d) if p.ndim == 2 else None  # noqa: E731
            for recipe in recipes:
                torch.manual_seed(0)
                linears = [nn.Linear(k, 33 if k != 4096 else 3, bias=False) for k in (64, 96, 128, 160, 4096)]
                model = nn.Sequential(*linears, nn.Linear(7, 300))
                model[0].weight.data[0] *= 1e3
                gtp(recipe, mesh, is_linear, shard_placement_fn=place)(model)
                self._check(model, recipe, [f"{i}.weight" for i in range(6)])

    def test_tensor_parallel(self) -> None:
        mesh = _mesh((2, 2), ("gtp", "tp"))
        for recipe in all_recipes():
            torch.manual_seed(0)
            model = Block(40, 256)
            model.up.weight.data[200, 3] = 7.0  # the largest is on one tp rank and one gtp rank only
            model.down.weight.data[3, 200] = -9.0
            parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
            gtp(recipe, mesh["gtp"], is_linear)(model)
            self._check(model, recipe, ["up.weight", "down.weight"])

    def test_r23_amax_is_that_of_the_weight_mesh(self) -> None:
        """Never over the replicate axis: a replica whose values have drifted keeps a scale of its own."""
        mesh = self.hsdp_mesh()
        model = nn.Linear(8, 8, bias=False)
        nn.init.ones_(model.weight)
        gtp(Float8Tensorwise(), mesh, is_linear)(model)
        model(torch.ones(1, 8))
        replica, rank = mesh.get_local_rank("replicate"), mesh.get_local_rank("gtp")
        with torch.no_grad():
            model.weight.to_local().mul_(1 + replica * 4 + rank)
        quantized, _ = self._gathered(model, "weight", Direction.ROWWISE)
        self.assertEqual(quantized.amax.item(), 2 + replica * 4)

    def test_nan_on_one_rank(self) -> None:
        """It reaches the scale of all ranks."""
        mesh = self.gtp_mesh()
        for recipe in (Float8Tensorwise(), NVFP4()):
            model = gtp(recipe, mesh, is_linear)(nn.Linear(64, 64, bias=False))
            if mesh.get_local_rank() == 1:
                model.weight.to_local().data[0, 0] = float("nan")
            self.assertTrue(model(torch.ones(1, 64)).isnan().all())

    def test_one_all_reduce_and_one_cast_for_a_step(self) -> None:
        mesh = self.gtp_mesh()
        torch.manual_seed(0)
        model = gtp(NVFP4(), mesh)(Net())
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
        for step in range(2):
            num_casts = 0
            for microbatch in range(2):
                counting = mock.patch.object(NVFP4, "quantize", autospec=True, side_effect=NVFP4.quantize)
                with wire_traffic() as sent, counting as quantize:
                    loss_of(model, rows_of_rank(tokens_of(step), mesh)).backward()
                self.assertEqual(len(statistics(sent)), 1 if microbatch == 0 else 0)
                num_casts += quantize.call_count
            self.assertEqual(num_casts, 2 * NUM_QUANTIZED, "one for forward and one for backward")
            optimizer.step()
            optimizer.zero_grad()

    def test_statistics_come_at_the_beginning(self) -> None:
        """Ranks of a tp group are of several gtp meshes, whose plans differ where the cut is uneven: wherever a gather
        comes, statistics do not change places with what tensor parallelism itself sends. On a mesh of experts that
        spans the tp ranks nobody waits for them, either."""
        mesh = init_weight_mesh("cpu", gtp=2, tp=2, expert_gtp=4)
        torch.manual_seed(0)
        pairs = [tp_pair(size, mesh["tp"]) for size in (64, 65, 64, 64)]
        quantize_(pairs[-1], Float8Tensorwise())
        over_tp = gtp_shard(nn.Sequential(*pairs), mesh["gtp"], schedule=TIGHT)
        pairs = [tp_pair(size, mesh["tp"]) for size in (64, 65, 64)]
        expert = gtp(Float8Tensorwise(), mesh["expert_gtp"], is_linear, schedule=TIGHT)(nn.Linear(64, 64, bias=False))
        layers = [layer for pair in pairs for layer in (pair, nn.ReLU())]
        across_tp = gtp_shard(nn.Sequential(*layers, expert), mesh["gtp"], schedule=TIGHT)
        for model in (over_tp, across_tp):
            with torch.no_grad():
                outputs = [model(torch.ones(4, 64)) for _ in range(3)]  # the later ones have a plan
            for output in outputs[1:]:
                self.assertTrue(torch.equal(output, outputs[0]))

    def test_the_first_gather_waits_for_its_own_statistics_alone(self) -> None:
        """Where shards are cast beside compute: those of all others follow, and all bits are the same."""
        gradients = []
        for backend, expected in (("process_group", [NUM_QUANTIZED]), (Casts, [1, NUM_QUANTIZED - 1])):
            torch.manual_seed(0)
            schedule = explicit(gather_backend=backend, coalesce_nbytes=0)
            model = gtp(NVFP4(), self.gtp_mesh(), schedule=schedule)(Net())
            for microbatch in range(2):
                with wire_traffic() as sent:
                    loss_of(model, rows_of_rank(tokens_of(0), self.gtp_mesh())).backward()
                self.assertEqual(statistics(sent), [] if microbatch else expected, (backend, microbatch))
            gradients.append([full(param.grad) for param in model.parameters()])
        for one, other in zip(*gradients, strict=True):
            self.assertTrue(torch.equal(one, other))

    def test_writes_without_a_trace_are_seen(self) -> None:
        """As R3 and R13: what an optimizer, a load or ``.data`` has written is what the next forward uses."""
        mesh = self.gtp_mesh()
        model: Any = gtp(MXFP8(), mesh, is_linear)(nn.Linear(64, 64, bias=False))
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
        torch.manual_seed(0)
        model: Any = gtp(NVFP4(), self.gtp_mesh(), is_linear)(nn.Linear(64, 64, bias=False))
        gathering, weight = runtime_of(model).gathering, weight_of(model, "weight")
        handle = model.unshard(async_op=True)
        handle.wait()
        handle.wait()
        first, second = (gathering.acquire(weight.for_forward) for _ in range(2))
        self.assertIs(first, second)
        self.assertIs(first.full, first.full)
        expected = dequantized(full(weight.param.detach()), NVFP4(), Direction.ROWWISE)
        self.assertTrue(torch.equal(first.full, expected))
        for gathered in (first, second):
            gathering.release(weight.for_forward, gathered)
        model.reshard()


CHOSEN = SchedulePolicy(min_shard_numel=0)  # as the default, but tiny weights are sharded, too
WIDE = partial(Net, 256, 256)  # whole blocks of each recipe on each of two ranks


def rowwise_reference(model: nn.Module, recipe: Recipe, names: Any) -> nn.Module:
    reference = reference_of(model, recipe, names)
    for module in reference.modules():
        if type(module) is Linear:
            module.__class__ = StockLinear  # type: ignore[assignment]
    return reference


def seeded(make: Any = WIDE) -> Any:
    torch.manual_seed(3)
    return make()


class TestQuantizedGroups(GlooTest):
    world_size = 2

    def check(self, recipe: Recipe, change: Any = None, names: Any = blocks_only) -> None:
        mesh = self.gtp_mesh()
        shard = gtp(recipe, mesh, names, schedule=CHOSEN)
        changed = (lambda model: shard(change(model))) if change is not None else shard
        trained = check(seeded(), recipe, changed, mesh, names=names, make_reference=rowwise_reference)
        self.assertEqual([group.fqn for group in members_of(trained).groups], ["layers.0", "layers.1"])

    def test_steps_equal_one_process(self) -> None:
        """Gradients and parameters after steps of two microbatches; the optimizer writes without a trace."""
        for recipe in all_recipes():
            with self.subTest(recipe=recipe):
                self.check(recipe)

    def test_recomputed_compiled_and_partly_quantized(self) -> None:
        for recipe in (Float8Tensorwise(), MXFP8()):
            self.check(recipe, change=recompute)
            self.check(recipe, names=lambda module, name: blocks_only(module, name) and name.endswith("0.up"))
        self.check(NVFP4(), change=compile_layers)

    def test_a_gather_sends_the_values_in_the_compute_dtype(self) -> None:
        """One gather of a block, and one all-reduce of the magnitudes of all its weights."""
        model = gtp(Float8Tensorwise(), self.gtp_mesh(), schedule=CHOSEN)(seeded())
        loss_of(model, tokens_of(0)).backward()
        calls = []
        for _ in range(2):  # the second microbatch quantizes nothing
            with wire_traffic() as traffic:
                loss_of(model, tokens_of(0)).backward()
            model.zero_grad()
            calls.append([call for call in traffic.calls if "reduce_scatter" not in call[0]])
        self.assertEqual({dtype for name, dtype, _ in calls[0] if "gather" in name}, {torch.float32})
        maxima = [[call for call in each if call[1] == torch.int32] for each in calls]
        self.assertEqual(maxima, [[], [("allreduce_", torch.int32, 16)]])
        (up,) = (row for row in sharding_report(model).rows if row.name == "layers.0.up.weight")
        self.assertEqual(up.use, "with its block, rounded to float8_tensorwise before the gather")
        self.assertEqual(up.gathered_nbytes, 4 * 256 * 256)

    def test_writes_to_shards_are_quantized_anew(self) -> None:
        """By foreach functions, through ``.data``, without a trace, and in a forward to the full weights."""
        recipe, mesh = Float8Tensorwise(), self.gtp_mesh()
        model = gtp(recipe, mesh, schedule=CHOSEN)(seeded())
        tokens = rows_of_rank(tokens_of(0), mesh)

        def compare() -> None:
            whole = seeded()
            with torch.no_grad():
                for (_, mine), (_, theirs) in zip(whole.named_parameters(), model.named_parameters(), strict=True):
                    mine.copy_(full(theirs))
            expected = rowwise_reference(whole, recipe, blocks_only)
            self.assertTrue(torch.equal(loss_of(model, tokens), loss_of(expected, tokens)))

        compare()
        with torch.no_grad():
            torch._foreach_mul_([*model.layers[0].parameters()], 1.5)
        compare()
        for data in (model.layers[1].up.weight.data, model.layers[1].up.weight.to_local().data):
            data.mul_(3.0)
            compare()

        model.unshard()
        compare()
        model.reshard()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)  # it changes no versions
        for _ in range(2):  # zeroed gradients look like those of an earlier microbatch
            loss_of(model, tokens).backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
            compare()

        def clip(module: nn.Module, args: Any) -> None:
            with torch.no_grad():
                module.weight.clamp_(-0.01, 0.01)

        handle = model.layers[0].down.register_forward_pre_hook(clip)
        loss_of(model, tokens).backward()
        handle.remove()
        compare()

    def test_what_keeps_float8_gemms_and_few_bytes(self) -> None:
        """A recipe that asks for them, storage that has nothing else, several hosts, rows that cannot be packed."""
        mesh = self.gtp_mesh()
        forced, native = Float8Tensorwise(compute="float8"), Float8Tensorwise()
        for recipe, options, why in (
            (forced, {}, "multiplied in float8"),
            (native, {"storage": "native"}, "stored in low precision"),
            (MXFP8(), {"model": Net(40, 70)}, "sharded in another way"),
        ):
            model = seeded() if "model" not in options else options["model"]
            model = quantize_(model, recipe, filter_fn=blocks_only, storage=options.get("storage", "master"))
            gtp_shard(model, mesh, schedule=CHOSEN, mp_policy=MixedPrecisionPolicy())
            with environment(PYTHONWARNINGS="ignore"):
                loss_of(model, tokens_of(0)).backward()
            self.assertEqual(len(members_of(model).groups), 0)
            self.assertIn(why, str(sharding_report(model, verbose=True)))
        with mock.patch.object(group_blocks, "is_one_host", return_value=False):
            model = gtp(Float8Tensorwise(), mesh, schedule=CHOSEN)(seeded())
            forward, _ = traffic_of_a_step(model, tokens_of(0))
        self.assertIn(torch.uint8, {dtype for name, dtype, _ in forward.calls if "gather" in name})
        self.assertIn("travels between hosts", str(sharding_report(model, verbose=True)))

    def test_float8_gemms_pay_later_than_others(self) -> None:
        cases = (2048, False, True), (4096, False, False), (4096, True, True), (8192, True, False)
        for tokens, has_float8, expected in cases:
            self.assertIs(choose_schedule.is_worth_a_group(30e6, tokens, has_float8=has_float8), expected)

    def test_large_weights_that_a_gemm_would_dequantize_are_groups(self) -> None:
        mesh, large = self.gtp_mesh(), mock.patch.object(choose_schedule, "_SMALL_GEMM", 0)
        for recipe, is_group in ((MXFP8(), True), (Float8Tensorwise(compute="dequantize"), True), (None, False)):
            model = seeded() if recipe is None else quantize_(seeded(), recipe, filter_fn=blocks_only)
            gtp_shard(model, mesh, schedule=CHOSEN, mp_policy=MixedPrecisionPolicy())
            with large:
                loss_of(model, tokens_of(0)).backward()
            self.assertEqual(bool(members_of(model).groups), is_group, recipe)


class TestQuantizedGroupsOnReplicas(GlooTest):
    """On a mesh of two axes; also where replicas split the optimizer states, so have parts of shards alone."""

    world_size = 4

    def test_steps_equal_one_process(self) -> None:
        mesh = self.hsdp_mesh()
        for recipe, options in ((Float8Tensorwise(), {}), (Float8Rowwise(), {"shard_optimizer": True})):
            shard = gtp(recipe, mesh, schedule=CHOSEN, **options)
            model = check(seeded(), recipe, shard, mesh, make_reference=rowwise_reference)
            self.assertEqual(len(members_of(model).groups), 2)
