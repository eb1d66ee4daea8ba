"""``gtp_shard`` inside of ``fully_shard``: what FSDP2 gathers are our shards, and what it reduces are our gradients.

Each test is a cell of the support matrix. Gradients and parameters after each step are compared with one process.
"""

import dataclasses
import unittest
from functools import partial
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from checkpoint_common import PLAIN, topology
from common import ALL, NOTHING_STAYS, GlooTest, assert_same_params, environment, fake_mesh, full, rows_of_rank
from fsdp_common import (
    WIDTH,
    Block,
    Model,
    both,
    check,
    check_checkpoints,
    check_resumes,
    dp_gtp,
    make,
    mesh_of,
    next_token_loss,
    sgd,
    three_axes,
    token_batch,
    wrap,
)
from runtime_common import assert_bit_equal, assert_idle, counted, gathers, runtime_of, train_record
from torch.distributed.fsdp import MixedPrecisionPolicy, _common_utils, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import Shard
from torch.utils.checkpoint import checkpoint

from dtensor_gtp import GTPModule, GTPShard, gtp_shard
from dtensor_gtp._schedule.gathering import Gathering

BF16, FP32 = torch.bfloat16, torch.float32


@dataclasses.dataclass
class Box:
    """A container that ``fully_shard`` looks into."""

    x: torch.Tensor


class BoxBlock(Block):
    def forward(self, box: Any) -> Any:
        return Box(super().forward(box.x))


class BoxModel(Model):
    def __init__(self) -> None:
        super().__init__(block=BoxBlock)

    def run_layers(self, x: torch.Tensor) -> torch.Tensor:
        box = Box(x)
        for layer in self.layers:
            box = layer(box)
        return box.x


class CallsAgain(Model):
    """A second call in a row needs weights that were freed after the first, as does one that comes later."""

    def run_layers(self, x: torch.Tensor) -> torch.Tensor:
        first, second = self.layers
        for layer in (first, first, second, first, second):
            x = layer(x)
        return x


class Recomputes(Model):
    use_reentrant = False

    def run_layers(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = checkpoint(layer, x, use_reentrant=self.use_reentrant)
        return x


class RecomputesReentrant(Recomputes):
    use_reentrant = True


class InsideBlock(Block):
    """Checkpointing is inside of the unit: only a part of a block is computed again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + checkpoint(lambda z: self.down(torch.tanh(self.up(z))), self.norm(x), use_reentrant=False)
        return y @ self.mix


def scaled_in_place_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    logits = model(tokens[:, :-1])
    logits /= 2
    return F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


class TestFullyShardOutside(GlooTest):
    """dp x gtp, 2 x 2."""

    def test_per_block_and_root(self) -> None:
        for reshard in (None, False):  # True is in most other tests
            assert_idle(check(make(), both(dp_gtp(), reshard_after_forward=reshard), dp_gtp()))
        check(make(), both(dp_gtp(), gtp={"reshard_after_forward": False}), dp_gtp())

    def test_other_units(self) -> None:
        """The root alone, single layers and a list."""
        units: list[Any] = [
            lambda model: [],
            lambda model: [*model.layers, model.embedding, model.head],
            lambda model: [model.layers[0].up, model.layers[0], [model.layers[1], model.norm, model.head]],
        ]
        for unit in units:
            check(make(), both(dp_gtp(), unit, reshard_after_forward=True), dp_gtp())

    def test_unit_around_the_sharded_module(self) -> None:
        """``gtp_shard`` knows nothing of the outer module."""
        mesh = dp_gtp()

        def shard(model: Any) -> nn.Module:
            gtp_shard(model[0], mesh["gtp"], schedule=ALL)
            return wrap(model, mesh["dp"], lambda model: model[0].layers)

        check(make(lambda: nn.Sequential(Model())), shard, mesh)

    def test_units_called_several_times_and_inputs_in_a_dataclass(self) -> None:
        looks_into_dataclasses = hasattr(_common_utils, "collect_grad_tensors")  # not in torch 2.11
        for cls in (CallsAgain, *([BoxModel] if looks_into_dataclasses else [])):
            assert_idle(check(make(cls), both(dp_gtp(), reshard_after_forward=True), dp_gtp()))

    def test_frozen_weights_and_an_output_changed_in_place(self) -> None:
        reference = make()
        for param in (reference.embedding.weight, reference.layers[0].up.weight, reference.layers[1].mix):
            param.requires_grad_(False)
        check(reference, both(dp_gtp(), reshard_after_forward=True), dp_gtp(), loss_fn=scaled_in_place_loss)

    def test_other_axes(self) -> None:
        """Replicas outside and inside, HSDP outside of tensor parallelism, gtp as the outer axis of the root mesh."""
        mesh = mesh_of((2, 2, 1), ("outer", "middle", "gtp"))
        for inner, outer in (("gtp", ("outer", "middle")), (("middle", "gtp"), "outer")):
            shard = both(mesh, inner=inner, outer=outer, reshard_after_forward=True)
            check(make(), shard, mesh, make_optimizer=partial(sgd, foreach=True))

        mesh = mesh_of((2, 1, 1, 2), ("outer", "middle", "gtp", "tp"))
        shard = three_axes(mesh, ("outer", "middle"), reshard_after_forward=True)
        check(make(), shard, mesh["outer", "middle", "gtp"], num_microbatches=2, steps=1)
        mesh = mesh_of((2, 2), ("gtp", "dp"))
        check(make(), both(mesh, reshard_after_forward=True), mesh)

    def test_gradient_accumulation(self) -> None:
        mesh, reference, generator = dp_gtp(), make(), torch.Generator().manual_seed(0)
        model = both(mesh, reshard_after_forward=True)(make())
        batches = [token_batch(generator) for _ in range(2)]
        for batch in batches:
            (next_token_loss(reference, batch) / 2).backward()

        def outer(name: str) -> Any:
            return getattr(model, name)

        def inner(name: str) -> Any:
            return partial(getattr(GTPModule, name), model)  # the methods of fully_shard come first

        for name, kinds in (
            ("requires_gradient_sync", ()),
            ("requires_gradient_sync", (outer,)),
            ("requires_gradient_sync", (inner,)),
            ("requires_gradient_sync", (outer, inner)),
            ("is_last_backward", (outer,)),
            ("is_last_backward", (outer, inner)),
            ("reshard_after_backward", (outer, inner)),
        ):
            for index, batch in enumerate(batches):
                for kind in kinds:
                    kind(f"set_{name}")(index == 1)
                (next_token_loss(model, rows_of_rank(batch, mesh)) / 2).backward()
            assert_same_params(model, reference, "grad")
            assert_idle(model)
            model.zero_grad()

    def test_activation_checkpointing(self) -> None:
        inside = partial(Model, block=InsideBlock)
        cells = ((Recomputes, True), (Recomputes, False), (RecomputesReentrant, True), (inside, True))
        for cls, reshard in cells:
            shard = both(dp_gtp(), reshard_after_forward=reshard)
            assert_idle(check(make(cls), shard, dp_gtp(), num_microbatches=2, steps=1))

    def test_mixed_precision(self) -> None:
        """Modules compute in the policies' dtype; gradients are those of one process up to its rounding."""
        policies = {
            "gtp": (MixedPrecisionPolicy(BF16, FP32), MixedPrecisionPolicy()),
            "fsdp": (MixedPrecisionPolicy(), MixedPrecisionPolicy(BF16, FP32)),
            "both": (MixedPrecisionPolicy(BF16, FP32), MixedPrecisionPolicy(BF16, FP32)),
        }
        for name, (gtp, fsdp) in policies.items():
            reference = make().float()
            seen: set[torch.dtype] = set()
            reference_batch = token_batch(torch.Generator().manual_seed(0))
            model = both(dp_gtp(), gtp={"mp_policy": gtp}, mp_policy=fsdp)(make().float())
            model.layers[1].register_forward_pre_hook(lambda module, args, seen=seen: seen.add(module.mix.dtype))
            next_token_loss(reference, reference_batch).backward()
            with counted() as counts:
                next_token_loss(model, rows_of_rank(reference_batch, dp_gtp())).backward()
            self.assertEqual(seen, {BF16}, name)
            # fully_shard gathers in the dtype of its own policy, gtp_shard in the narrower of the two.
            self.assertEqual(BF16 in counts.dtypes["_allgather_base_"], True)
            self.assertEqual(FP32 in counts.dtypes["_allgather_base_"], name == "gtp")
            self.assertEqual({p.grad.dtype for p in model.parameters()}, {FP32}, name)
            assert_same_params(model, reference, "grad", rtol=0.1, atol=2e-3)
            for module in (model, reference):
                torch.optim.SGD(module.parameters(), lr=0.5).step()
            assert_same_params(model, reference, rtol=0, atol=5e-3)

    def test_wide_reduction_under_gtp_policy(self) -> None:
        """Gradients that bf16 cannot hold survive both reductions where fully_shard keeps the parameters in fp32."""
        mesh = dp_gtp()
        model: Any = nn.Sequential(nn.Linear(4, 4, bias=False))
        gtp_shard(model, mesh["gtp"], mp_policy=MixedPrecisionPolicy(BF16, FP32), schedule=ALL)
        fully_shard(model, mesh=mesh["dp"])
        # Each rank's gradient is a power of two: their mean needs more bits than bf16 has.
        rank = dist.get_rank()
        (model(torch.full((1, 4), 2.0 ** (-4 * rank), dtype=FP32)).sum()).backward()
        expected = sum(2.0 ** (-4 * r) for r in range(4)) / 4
        self.assertNotEqual(torch.tensor(expected, dtype=BF16).item(), expected)
        torch.testing.assert_close(full(model[0].weight.grad), torch.full((4, 4), expected), rtol=0, atol=0)

    def test_blocks_of_rows(self) -> None:
        """A block size that leaves the chunks as torch.chunk cuts them; and any other, with fully_shard on dim 1."""
        mesh = dp_gtp()

        def place_up(placement: Shard) -> dict[str, Any]:
            return {"shard_placement_fn": lambda p: placement if p.shape == (2 * WIDTH, WIDTH) else None}

        aligned = both(mesh, gtp=place_up(GTPShard(0, block_size=4)), reshard_after_forward=True)
        model = check(make(), aligned, mesh, steps=1)
        self.assertEqual(model.layers[0].up.weight.placements[1], Shard(0))
        on_dim_1 = both(mesh, gtp=place_up(GTPShard(0, block_size=12)), **place_up(Shard(1)))
        model = check(make(), on_dim_1, mesh, steps=1)
        self.assertEqual(model.layers[0].up.weight.placements, (Shard(1), GTPShard(0, block_size=12)))
        dim_0_by_fsdp = {"shard_placement_fn": lambda p: GTPShard(1) if p.ndim == 2 else None}
        check(make(), both(mesh, gtp=dim_0_by_fsdp, reshard_after_forward=True), mesh, steps=1)

    def test_checkpoints(self) -> None:
        """What was saved under dp x gtp resumes under other axes, on the meta device and in one process."""
        check_checkpoints(dp_gtp(), both(dp_gtp()))

    def test_every_use_is_one_gather(self) -> None:
        """Nothing is gathered twice, thrown away or left out; fully_shard gathers each unit once a pass."""
        mesh = dp_gtp()
        for reshard in (True, False):
            model = both(mesh, reshard_after_forward=reshard)(make())
            for _ in range(2):
                with counted() as counts, gathers(model) as used:
                    next_token_loss(model, rows_of_rank(token_batch(torch.Generator()), mesh)).backward()
            # The embedding is not needed in backward; the head is kept between forward and backward.
            once = {"embedding.weight", "head.weight"}
            self.assertEqual(used, {name: 1 if name in once else 2 for name in used})
            units = len(model.layers) + 1
            of_fully_shard = units * (2 if reshard else 1)
            # One reduce-scatter for each weight and unit; one all-reduce of whole parameters for each unit.
            self.assertEqual(counts(), (sum(used.values()) + of_fully_shard, len(used) + units, units))

    def test_races_change_no_bit(self) -> None:
        """Slow and poisoned collectives: a gradient read too early or a shard read too late would show."""
        records = []
        for flags in ("", "poison,delay=1"):
            with environment(DTENSOR_GTP_DEBUG=flags):
                model = both(dp_gtp(), reshard_after_forward=True)(make(CallsAgain))
            records.append(train_record(model, dp_gtp(), next_token_loss, steps=2))
        assert_bit_equal(records[1], records[0], "delayed and poisoned")


class TestOrder(unittest.TestCase):
    """What is read when, in one process of a group that communicates nothing."""

    def setUp(self) -> None:
        self.mesh = self.enterContext(fake_mesh(2, 2, names=("dp", "gtp")))
        self.tokens = torch.zeros(2, 5, dtype=torch.int64)

    def test_gathers_read_only_what_fully_shard_has_gathered(self) -> None:
        """Also while they are in flight: when a unit frees its shards, nothing that was launched still needs them."""
        for cls in (Model, CallsAgain):
            model = both(self.mesh, gtp={"schedule": NOTHING_STAYS}, reshard_after_forward=True)(make(cls))
            reads: list[int] = []
            in_flight: list[str] = []
            launch, free, targets = Gathering._gather, FSDPParamGroup._to_sharded, runtime_of(model).members.gatherables

            def recorded(gathering: Any, launched: Any, launch: Any = launch, reads: Any = reads) -> Any:
                reads.extend(target.weight.shard.untyped_storage().nbytes() for target in launched)
                return launch(gathering, launched)

            def freed(group: Any, free: Any = free, targets: Any = targets, in_flight: Any = in_flight) -> None:
                free(group)
                in_flight.extend(t.weight.fqn for t in targets if t.pending and not t.weight.is_readable)

            with (
                mock.patch.object(Gathering, "_gather", recorded),
                mock.patch.object(FSDPParamGroup, "_to_sharded", freed),
            ):
                for _ in range(3):
                    next_token_loss(model, self.tokens).backward()
            self.assertGreater(len(reads), 3 * len(targets))
            self.assertNotIn(0, reads)
            self.assertEqual(in_flight, [])

    def test_parameter_hooks(self) -> None:
        """As with ``fully_shard`` alone: those that run after a gradient is accumulated, once for each backward."""
        model = both(self.mesh)(make())
        seen: list[str] = []
        for name, param in model.named_parameters():
            param.register_post_accumulate_grad_hook(
                lambda p, n=name: seen.append(f"{n} {p.grad.placements == p.placements}")
            )
        for _ in range(2):
            next_token_loss(model, self.tokens).backward()
            self.assertEqual(sorted(seen), sorted(f"{name} True" for name, _ in model.named_parameters()))
            seen.clear()

    def test_optimizer_of_before_is_refused(self) -> None:
        """It holds parameters in whose place fully_shard has put others."""
        root = self.mesh
        model = gtp_shard(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), root["gtp"], schedule=ALL)
        early = torch.optim.SGD(model[1].parameters(), lr=0.1)
        fully_shard(model, mesh=root["dp"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        model(torch.ones(2, 8)).sum().backward()
        optimizer.step()
        with self.assertRaisesRegex(RuntimeError, r"SGD optimizer on parameter '1\..*Create the optimizer after"):
            early.step()
        del early
        optimizer.step()

    def test_use_outside_of_its_unit_is_refused(self) -> None:
        model = both(self.mesh, reshard_after_forward=True)(make())
        model(self.tokens)
        with self.assertRaisesRegex(RuntimeError, "'head.weight'.*is used outside of the forward or backward of the"):
            model.head(torch.zeros(1, WIDTH, dtype=torch.float64))

    def test_parameters_cannot_be_named_or_given_data(self) -> None:
        """``fully_shard`` has put its own in the place of those that ``gtp_shard`` made."""
        model = both(self.mesh, reshard_after_forward=True)(make())
        weight = model.head.weight
        with self.assertRaisesRegex(ValueError, "a parameter that no outer fully_shard has sharded, but got a Tensor"):
            weight.data = torch.ones(weight.shape, dtype=weight.dtype)
        loss = next_token_loss(model, self.tokens)
        for ask in (lambda: loss.backward(inputs=[weight]), lambda: torch.autograd.grad(loss, weight)):
            told = "cannot name a parameter of shape .* which an outer fully_shard has sharded, too.*requires_grad_"
            with self.assertRaisesRegex(NotImplementedError, told):
                ask()
        loss.backward()  # the graph is as it was
        self.assertIsNotNone(weight.grad)


class TestFullyShardOutsideOfEight(GlooTest):
    """What needs three axes of two ranks: few tests, because eight workers are slow to start."""

    world_size = 8

    def test_tensor_parallel(self) -> None:
        """Trained with recomputation and microbatches; saved, and loaded onto the same axes and into one process."""
        mesh = mesh_of((2, 2, 2), ("dp", "gtp", "tp"))
        shard, data = three_axes(mesh, reshard_after_forward=True), mesh["dp", "gtp"]
        check(make(Recomputes), shard, data, steps=1, num_microbatches=2)
        check_resumes([topology(three_axes(mesh), data), PLAIN])

    def test_hsdp_outside(self) -> None:
        mesh = mesh_of((2, 2, 2), ("dp_replicate", "dp_shard", "gtp"))
        check(make(), both(mesh, outer=("dp_replicate", "dp_shard"), reshard_after_forward=True), mesh)
