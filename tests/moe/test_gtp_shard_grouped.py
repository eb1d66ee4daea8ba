"""``GroupedLinear`` under ``gtp_shard`` and stock ``fully_shard``: experts routed on the device, meshes of their own,
checkpoints on other layouts.

The reference is one process with the same layer on the concatenated rows.
"""

import copy
import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, GlooTest, assert_same_params, check_training, full, rows_of_rank, shared_directory
from fsdp_common import dp_gtp
from runtime_common import counted, num_gathers
from schedules import explicit
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard
from torch.utils.checkpoint import checkpoint

from dtensor_gtp import GTPShard, MixedPrecisionPolicy, gtp_shard, quantize_, sharding_report
from dtensor_gtp.nn import GroupedLinear
from dtensor_gtp.quant import Float8Rowwise

GROUPS, WIDTH, HIDDEN, ROWS = 4, 6, 11, 24
LOW = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
NO_KEEP = explicit(min_shard_numel=0, prefetch_depth=0, prefetch_nbytes=0, coalesce_nbytes=0)


def cut_rows(param: nn.Parameter) -> GTPShard | None:
    """Each rank has rows of every group, as by default where ranks do not divide the groups."""
    return GTPShard(1) if param.ndim == 3 else None


class Experts(nn.Module):
    """Top-1 router, an expert MLP on sorted rows, and back: nothing of it asks for a count on the host."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, GROUPS)
        self.up = GroupedLinear(GROUPS, WIDTH, HIDDEN, **options)
        self.down = GroupedLinear(GROUPS, HIDDEN, WIDTH, scale_bias=True, **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        probs = self.router(x).softmax(-1)
        score, chosen = probs.max(-1)
        order = chosen.argsort(stable=True)
        splits = torch.zeros(GROUPS, dtype=torch.int64).index_add_(0, chosen, torch.ones_like(chosen))
        y = self.down(F.silu(self.up(x[order], splits)), splits, score[order])
        return x + torch.zeros_like(x).index_copy(0, order, y * score[order, None])


class Twice(nn.Module):
    """Each weight in two uses of one step, whose tokens go to other experts."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(torch.tanh(self.experts(x)))


def make(**options: Any) -> Experts:
    torch.manual_seed(0)
    return Experts(**options)


def batch(seed: int = 0) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(seed))


def square(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model(x).float().square().mean()


def check(reference: nn.Module, mesh: Any, cut: Any = None, steps: int = 1) -> Any:
    shard = partial(gtp_shard, mesh=mesh, schedule=ALL, shard_placement_fn=cut)
    make_batch = lambda generator: torch.randn(ROWS, WIDTH, generator=generator)  # noqa: E731
    return check_training(reference, shard, mesh, make_batch, square, steps=steps)


# Options of the layers and how they are cut.
FORMS = (({}, None), ({}, cut_rows), ({"single_grouped_weight": False}, None))


class TestGroupedOnReplicas(GlooTest):
    def test_training_equals_one_process(self) -> None:
        for mesh in (self.gtp_mesh(), self.hsdp_mesh()):
            for options, cut in FORMS:
                check(make(**options), mesh, cut, steps=2)


class TestGrouped(GlooTest):
    world_size = 2

    def test_training_equals_one_process(self) -> None:
        """Also on replicas alone, in two uses of a step, and with rows in blocks that stay together."""
        for options, cut in FORMS:
            check(make(**options), self.hsdp_mesh(2), cut)
            check(Twice(make(**options)), self.gtp_mesh(), cut)
        model = check(make(), self.gtp_mesh(), lambda p: GTPShard(1, block_size=4) if p.ndim == 3 else None)
        self.assertEqual(model.up._parameters["weight"].to_local().shape[1], (8, 3)[self.rank])

    def test_how_groups_are_cut(self) -> None:
        """Whole ones where ranks divide them, since their gradients need no copy; else rows of each, or as asked."""

        def sharded(num_groups: int, single: bool = True, **options: Any) -> nn.Parameter:
            layer = GroupedLinear(num_groups, WIDTH, HIDDEN, single_grouped_weight=single)
            gtp_shard(layer, self.gtp_mesh(), schedule=ALL, **options)
            return next(layer.parameters())

        whole, rows = sharded(4), sharded(3)
        self.assertEqual((whole.placements, whole.to_local().shape), ((GTPShard(0),), (2, HIDDEN, WIDTH)))
        self.assertEqual((rows.placements, rows.to_local().shape[0]), ((GTPShard(1),), 3))
        self.assertEqual(sharded(2, shard_placement_fn=cut_rows).placements, (GTPShard(1),))
        self.assertEqual(sharded(2, single=False).placements, (GTPShard(0),))
        model = gtp_shard(make(), self.gtp_mesh(), schedule=ALL)
        self.assertEqual(model.up._parameters["bias"].placements, (Replicate(),))
        self.assertRegex(str(sharding_report(model, verbose=True)), r"up.bias .*by GroupedLinear")

    def test_microbatches_without_gradient_sync(self) -> None:
        """Summed as full gradients, whichever dim is cut and in whichever dtype they are reduced."""
        mesh, reference = self.gtp_mesh(), make()
        for seed in range(3):
            square(reference, batch(seed)).backward()
        for policy, tolerance in ((MixedPrecisionPolicy(), {}), (LOW, {"rtol": 0.1, "atol": 0.03})):
            for dim in (0, 1):
                cut = lambda param, dim=dim: GTPShard(dim) if param.ndim == 3 else None  # noqa: E731
                model = gtp_shard(make(), mesh, schedule=ALL, mp_policy=policy, shard_placement_fn=cut)
                for seed in range(3):
                    model.set_requires_gradient_sync(seed == 2)
                    square(model, rows_of_rank(batch(seed), mesh)).backward()
                assert_same_params(model, reference, "grad", **tolerance)

    def test_weights_of_each_group(self) -> None:
        """Some frozen, some read by the user's code, which autograd saves one by one from one buffer."""

        class OneByOne(GroupedLinear):
            def forward(self, x: torch.Tensor, split_sizes: torch.Tensor) -> torch.Tensor:
                parts = x.split(split_sizes.tolist())
                names = self.names_of("weight")
                return torch.cat([F.linear(part, getattr(self, name)) for part, name in zip(parts, names, strict=True)])

        mesh, splits, x = self.gtp_mesh(), torch.tensor([4, 2, 0, 6]), batch()
        for cls, frozen in itertools.product((GroupedLinear, OneByOne), ((), (0, 2))):
            torch.manual_seed(1)
            reference = cls(GROUPS, WIDTH, HIDDEN, bias=False, single_grouped_weight=False)
            for group in frozen:
                getattr(reference, f"weight{group}").requires_grad_(False)
            model = gtp_shard(copy.deepcopy(reference), mesh, schedule=ALL)
            inputs = rows_of_rank(x, mesh).requires_grad_()
            for step in range(2):
                with counted() as counts:
                    model(inputs, splits).square().mean().backward()
                # Known from the first step on: at the turning point they stay.
                self.assertEqual(counts().all_gathers, GROUPS * (1 if step else 2), f"{cls.__name__}, step {step}")
            output = model(inputs, splits)
            model.reshard()
            model.unshard()  # one by one: backward finds them in buffers of their own
            output.square().mean().backward()
            model.reshard()
            own = x.clone().requires_grad_()
            for _ in range(3):
                for rows in own.chunk(2):
                    (reference(rows, splits).square().mean() / 2).backward()
            assert_same_params(model, reference, "grad")
            self.assertEqual(inputs.grad / 2, rows_of_rank(own.grad, mesh))

    def test_one_gather_a_use_and_one_scatter_a_backward(self) -> None:
        model = gtp_shard(make(), self.gtp_mesh(), schedule=ALL)
        # down is kept at the turning point; nobody wants a gradient of x at first, and that of experts at last
        for needs_grad, is_frozen, gathers, scatters in ((False, False, 3, 3), (True, False, 5, 3), (True, True, 5, 1)):
            model.up.requires_grad_(not is_frozen)
            model.down.requires_grad_(not is_frozen)
            x = torch.randn(6, WIDTH, requires_grad=needs_grad)
            for _ in range(2):
                with counted() as counts:
                    model(x).sum().backward()
            self.assertEqual((counts().all_gathers, counts().reduce_scatters), (gathers, scatters))

    def test_recomputation_mixed_precision_and_evaluation(self) -> None:
        mesh, reference, x = self.gtp_mesh(), make(), batch()
        model = gtp_shard(make(), mesh, schedule=ALL)
        square(reference, x).backward()
        for use_reentrant in (True, False):
            inputs = rows_of_rank(x, mesh).clone().requires_grad_()
            checkpoint(model, inputs, use_reentrant=use_reentrant).square().mean().backward()
            assert_same_params(model, reference, "grad")
            model.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(model(rows_of_rank(x, mesh)), rows_of_rank(reference(x), mesh))
        low = gtp_shard(make(), mesh, schedule=ALL, mp_policy=LOW)
        square(low, rows_of_rank(x, mesh)).backward()
        assert_same_params(low, reference, "grad", rtol=0.1, atol=0.01)
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            loss = square(model, rows_of_rank(x, mesh).bfloat16())
        loss.backward()
        assert_same_params(model, reference, "grad", rtol=0.1, atol=0.01)

    def test_compiled(self) -> None:
        """One graph for the whole model; gathers as many weights as without a compiler, and saves none of them."""
        self.check_compiled(mp_policy=LOW)

    @pytest.mark.long
    def test_compiled_in_one_precision(self) -> None:
        self.check_compiled()

    def check_compiled(self, **options: Any) -> None:
        x = torch.randn(6, WIDTH, requires_grad=True)
        models = [gtp_shard(make(), self.gtp_mesh(), schedule=NO_KEEP, **options) for _ in range(2)]
        models[1].compile(fullgraph=True, backend="aot_eager")
        for freeze in (False, True):
            results = []
            for model in models:
                model.up.requires_grad_(not freeze)
                for _ in range(2):
                    model.zero_grad()
                    x.grad = None
                    before = num_gathers(model)
                    output = model(x)
                    output.float().square().mean().backward()
                grads = [None if p.grad is None else full(p.grad) for p in model.parameters()]
                gathers = {name: number - before[name] for name, number in num_gathers(model).items()}
                results.append((output, x.grad.clone(), grads, gathers))
            self.assertEqual(results[0], results[1])
            # down is the last weight of the forward and the first of backward: it stays in between
            self.assertEqual(gathers, {"router.weight": 2, "up.weight": 2, "down.weight": 1})

    def test_float8_products(self) -> None:
        """Cut over ranks or not, the operands and so the outputs have the same bits; gradients are near those of the
        weights that are not quantized."""
        torch.manual_seed(0)
        reference = GroupedLinear(GROUPS, 48, 32, bias=False)
        splits, rows = torch.tensor([5, 0, 3, 4]), torch.randn(14, 48)
        results = []
        for mesh in (self.gtp_mesh(), self.hsdp_mesh(2)):
            layer = quantize_(copy.deepcopy(reference), Float8Rowwise(compute="float8"))
            gtp_shard(layer, mesh, schedule=ALL, mp_policy=LOW)
            self.assertRegex(str(sharding_report(layer)), "float8 GEMMs by reference arithmetic .*wgrad not quantized")
            x = rows.bfloat16().requires_grad_()
            output = layer(x, splits)
            output.float().square().mean().backward()
            results.append((output, x.grad, full(layer.weight.grad)))
        for ours, alone in zip(*results, strict=True):
            self.assertTrue(torch.equal(ours, alone))
        x = rows.clone().requires_grad_()
        output = reference(x, splits)
        output.square().mean().backward()
        for ours, expected in zip(results[0], (output, x.grad, reference.weight.grad), strict=True):
            self.assertGreater((ours - expected).abs().max(), 0)
            self.assertLess((ours - expected).norm() / expected.norm(), 0.06)

    def test_counts_are_checked_before_any_collective(self) -> None:
        model = gtp_shard(make(), self.gtp_mesh(), schedule=ALL)
        with counted() as counts, self.assertRaisesRegex(ValueError, r"at most the 3 rows of x.*\[1, 1, 1, 1\]"):
            model.up(torch.zeros(3, WIDTH), torch.ones(4, dtype=torch.int64))
        self.assertEqual(sum(counts()), 0)


WIDE = 64
SPLITS = torch.tensor([3, 0, 4, 1])


class Layer(nn.Module):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.up = GroupedLinear(GROUPS, WIDE, 32, **options)

    def forward(self, x: torch.Tensor, splits: torch.Tensor) -> torch.Tensor:
        return self.up(x, splits)


class TestGroupedUnderFullyShard(GlooTest):
    def layouts(self) -> dict[str, Callable[[nn.Module], nn.Module]]:
        mesh, two = self.gtp_mesh(), dp_gtp()
        by_rows = partial(fully_shard, mesh=mesh, shard_placement_fn=lambda param: Shard(min(param.ndim - 1, 1)))
        whole_groups = {"shard_placement_fn": lambda param: GTPShard(0) if param.ndim == 3 else None}
        return {
            "fully_shard": partial(fully_shard, mesh=mesh),
            "fully_shard, rows": by_rows,
            "gtp": partial(gtp_shard, mesh=mesh, schedule=ALL),
            "whole experts": partial(gtp_shard, mesh=mesh, schedule=ALL, **whole_groups),
            "gtp, two ranks": partial(gtp_shard, mesh=two["gtp"], schedule=ALL),
            "both": lambda model: fully_shard(gtp_shard(model, two["gtp"], schedule=ALL), mesh=two["dp"]),
            "one process": lambda model: model,
        }

    def test_training_equals_one_process(self) -> None:
        cases = ("fully_shard", {}), ("fully_shard", {"single_grouped_weight": False}), ("fully_shard, rows", {})
        for name, options in cases:
            torch.manual_seed(0)
            check_training(
                Layer(**options),
                self.layouts()[name],
                self.gtp_mesh(),
                lambda generator: torch.randn(32, WIDE, generator=generator),
                lambda model, x: torch.stack([model(rows, SPLITS).square().mean() for rows in x.split(8)]).mean(),
            )

    @pytest.mark.long
    def test_checkpoints_change_no_bit(self) -> None:
        """From each layout to each: masters, and what the layer computes with its planes of 8 bits."""
        layouts = self.layouts()
        quantized = ("gtp", "whole experts", "gtp, two ranks")
        x = torch.randn(8, WIDE)
        for source, shard in layouts.items():
            torch.manual_seed(1)
            saved = Layer()
            expected = copy.deepcopy(saved).state_dict()
            saved = shard(saved)
            with shared_directory() as path:
                dcp.save(saved.state_dict(), checkpoint_id=path)
                outputs = []
                for target, other in layouts.items():
                    torch.manual_seed(2)
                    model: nn.Module = Layer()
                    if target in quantized:
                        quantize_(model, "mxfp8", filter_fn=lambda module, name: hasattr(module, "num_groups"))
                    model = other(model)
                    state = model.state_dict()
                    dcp.load(state, checkpoint_id=path)
                    model.load_state_dict(state)
                    for name, value in model.state_dict().items():
                        self.assertEqual(full(value), expected[name], rtol=0, atol=0, msg=f"{source} to {target}")
                    if target in quantized:
                        outputs.append(model(x, SPLITS))
                for output in outputs[1:]:
                    self.assertEqual(output, outputs[0], rtol=0, atol=0)
