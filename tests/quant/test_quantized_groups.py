"""Small quantized weights of a block, which are gathered together: each rank sends what a recipe makes of its values.

The reference is one process that multiplies with the quantized whole weight, in both directions of a layer.
"""

from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.nn as nn
from common import GlooTest, environment, full, rows_of_rank
from quant_common import (
    Net,
    RowwiseOnly,
    all_recipes,
    blocks_only,
    check,
    compile_layers,
    gtp,
    loss_of,
    recompute,
    reference_of,
    tokens_of,
    traffic_of_a_step,
    wire_traffic,
)
from runtime_common import members_of
from torch.distributed.fsdp import MixedPrecisionPolicy

from dtensor_gtp import SchedulePolicy, gtp_shard, quantize_, sharding_report
from dtensor_gtp._modules import group_blocks
from dtensor_gtp._schedule import choose_schedule
from dtensor_gtp.quant import MXFP8, NVFP4, Float8Rowwise, Float8Tensorwise, Recipe

CHOSEN = SchedulePolicy(min_shard_numel=0)  # as the default, but tiny weights are sharded, too
WIDE = partial(Net, 256, 256)  # whole blocks of each recipe on each of two ranks


def rowwise_reference(model: nn.Module, recipe: Recipe, names: Any) -> nn.Module:
    return reference_of(model, RowwiseOnly(recipe), names)  # type: ignore[arg-type]


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
        """By foreach functions, through ``.data``, and in a forward to the full weights."""
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
        model.layers[1].up.weight.data.mul_(3.0)
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


class TestQuantizedGroupsOnReplicas(GlooTest):
    """On a mesh of two axes; also where replicas split the optimizer states, so have parts of shards alone."""

    world_size = 4

    def test_steps_equal_one_process(self) -> None:
        mesh = self.hsdp_mesh()
        for recipe, options in ((Float8Tensorwise(), {}), (Float8Rowwise(), {"shard_optimizer": True})):
            shard = gtp(recipe, mesh, schedule=CHOSEN, **options)
            model = check(seeded(), recipe, shard, mesh, make_reference=rowwise_reference)
            self.assertEqual(len(members_of(model).groups), 2)
