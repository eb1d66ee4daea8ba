"""``GroupedLinear`` under ``gtp_shard``: experts routed on the device, expert parallelism, meshes of their own.

The reference is one process with the same layer on the concatenated rows.
"""

from __future__ import annotations

import copy
import itertools
from typing import Any

import pytest
import torch
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, GlooTest, _mesh, assert_same_params, full, rows_of_rank
from runtime_common import counted, num_gathers
from schedules import explicit
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.utils.checkpoint import checkpoint

from dtensor_gtp import GTPShard, MixedPrecisionPolicy, gtp_shard, quantize_, sharding_report
from dtensor_gtp.nn import GroupedLinear
from dtensor_gtp.quant import Float8Rowwise

GROUPS, WIDTH, HIDDEN, ROWS = 4, 6, 10, 24
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
    """Each weight in two uses of one step."""

    def __init__(self, experts: Experts) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.experts(torch.tanh(self.experts(x)))
        return output


def train(reference: nn.Module, model: nn.Module, mesh: Any, steps: int = 2, **tolerance: float) -> None:
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (reference, model)]
    for step in range(steps):
        x = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(step))
        reference(x).square().mean().backward()
        model(rows_of_rank(x, mesh)).square().mean().backward()
        assert_same_params(model, reference, "grad", **tolerance)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_params(model, reference, **tolerance)


def make(**options: Any) -> Experts:
    torch.manual_seed(0)
    return Experts(**options)


class TestGrouped(GlooTest):
    def test_training_equals_one_process(self) -> None:
        for mesh in (self.gtp_mesh(), self.hsdp_mesh(), self.hsdp_mesh(4)):
            for options, cut in (({}, None), ({}, cut_rows), ({"single_grouped_weight": False}, None)):
                reference = make(**options)
                model = gtp_shard(copy.deepcopy(reference), mesh, schedule=ALL, shard_placement_fn=cut)
                train(reference, model, mesh)

    def test_two_uses_in_one_step(self) -> None:
        """Gradients are the sum over both, whose tokens go to other experts."""
        mesh = self.gtp_mesh()
        for options, cut in (({}, None), ({}, cut_rows), ({"single_grouped_weight": False}, None)):
            reference = Twice(make(**options))
            train(reference, gtp_shard(copy.deepcopy(reference), mesh, schedule=ALL, shard_placement_fn=cut), mesh)

    def test_how_groups_are_cut(self) -> None:
        """Whole ones where ranks divide them, since their gradients need no copy; else rows of each, or as asked."""

        def sharded(num_groups: int, **options: Any) -> nn.Parameter:
            layer = GroupedLinear(num_groups, WIDTH, HIDDEN, single_grouped_weight=options.pop("single", True))
            gtp_shard(layer, self.gtp_mesh(), schedule=ALL, **options)
            return next(layer.parameters())

        whole, rows = sharded(2 * self.world_size), sharded(self.world_size + 1)
        self.assertEqual(whole.placements, (GTPShard(0),))
        self.assertEqual(whole.to_local().shape, (2, HIDDEN, WIDTH))
        self.assertEqual(rows.placements, (GTPShard(1),))
        self.assertEqual(rows.to_local().shape[:1], (self.world_size + 1,))
        self.assertEqual(sharded(self.world_size, shard_placement_fn=cut_rows).placements, (GTPShard(1),))
        self.assertEqual(sharded(self.world_size, single=False).placements, (GTPShard(0),))
        model = gtp_shard(make(), self.gtp_mesh(), schedule=ALL)
        self.assertEqual(model.up._parameters["bias"].placements, (Replicate(),))
        self.assertRegex(str(sharding_report(model, verbose=True)), r"up.bias .*by GroupedLinear")

    def test_blocks_of_rows_stay_together(self) -> None:
        reference = make()
        blocks = lambda param: GTPShard(1, block_size=4) if param.ndim == 3 else None  # noqa: E731
        model = gtp_shard(copy.deepcopy(reference), self.gtp_mesh(), schedule=ALL, shard_placement_fn=blocks)
        self.assertEqual(model.up._parameters["weight"].to_local().shape[1], (4, 4, 2, 0)[self.rank])
        train(reference, model, self.gtp_mesh())

    def test_microbatches_without_gradient_sync(self) -> None:
        """Summed as full gradients, whichever dim is cut and in whichever dtype they are reduced."""
        mesh, reference = self.gtp_mesh(), make()
        batches = [torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(s)) for s in range(3)]
        for x in batches:
            reference(x).square().mean().backward()
        low = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for policy, dim in itertools.product((MixedPrecisionPolicy(), low), (0, 1)):
            cut = lambda param, dim=dim: GTPShard(dim) if param.ndim == 3 else None  # noqa: E731
            model = gtp_shard(copy.deepcopy(reference), mesh, schedule=ALL, mp_policy=policy, shard_placement_fn=cut)
            model.zero_grad()
            for number, x in enumerate(batches):
                model.set_requires_gradient_sync(number == len(batches) - 1)
                model(rows_of_rank(x, mesh)).float().square().mean().backward()
            tolerance = {"rtol": 0.1, "atol": 0.03} if policy is low else {}
            assert_same_params(model, reference, "grad", **tolerance)

    def test_weights_of_each_group(self) -> None:
        """Some frozen, some read by the user's code, which autograd saves one by one from one buffer."""

        class OneByOne(GroupedLinear):
            def forward(self, x: torch.Tensor, split_sizes: torch.Tensor) -> torch.Tensor:
                parts = x.split(split_sizes.tolist())
                names = self.names_of("weight")
                return torch.cat([F.linear(part, getattr(self, name)) for part, name in zip(parts, names, strict=True)])

        mesh, splits = self.gtp_mesh(), torch.tensor([2, 1, 0, 3])
        x = torch.randn(6 * 4, WIDTH, generator=torch.Generator().manual_seed(0))
        for cls, frozen in itertools.product((GroupedLinear, OneByOne), ((), (0, 2))):
            torch.manual_seed(1)
            reference = cls(GROUPS, WIDTH, HIDDEN, bias=False, single_grouped_weight=False)
            for group in frozen:
                getattr(reference, f"weight{group}").requires_grad_(False)
            model = gtp_shard(copy.deepcopy(reference), mesh, schedule=ALL)
            inputs = rows_of_rank(x, mesh).requires_grad_()
            for step in range(3):
                with counted() as counts:
                    model(inputs, splits).square().mean().backward()
                # Known from the first step on: at the turning point they stay.
                self.assertEqual(counts().all_gathers, GROUPS * (1 if step else 2), f"{cls.__name__}, step {step}")
            output = model(inputs, splits)
            model.reshard()
            model.unshard()  # one by one: backward finds them in buffers of their own
            output.square().mean().backward()
            model.reshard()
            reference.zero_grad()
            own = x.clone().requires_grad_()
            for _ in range(4):
                for rows in own.chunk(4):
                    (reference(rows, splits).square().mean() / 4).backward()
            assert_same_params(model, reference, "grad")
            self.assertEqual(inputs.grad / 4, rows_of_rank(own.grad, mesh))

    def test_one_gather_a_use_and_one_scatter_a_backward(self) -> None:
        model = gtp_shard(make(), self.gtp_mesh(), schedule=ALL)
        x = torch.randn(6, WIDTH)
        model(x).sum().backward()
        with counted() as counts:
            model(x).sum().backward()
        # router, up and down in the forward; down is kept at the turning point, and nobody wants a gradient of x
        self.assertEqual(counts().all_gathers, 3)
        x.requires_grad_()
        model(x).sum().backward()
        with counted() as counts:
            model(x).sum().backward()
        self.assertEqual(counts().all_gathers, 5)
        self.assertEqual(counts().reduce_scatters, 3)
        model.up.requires_grad_(False)
        model.down.requires_grad_(False)
        model(x).sum().backward()
        with counted() as counts:
            model(x).sum().backward()
        self.assertEqual(counts().reduce_scatters, 1)

    def test_expert_parallelism(self) -> None:
        """Each rank of ep has half of the experts; ranks of gtp see different tokens."""
        world = _mesh((2, 2), ("ep", "gtp"))
        reference = GroupedLinear(GROUPS, WIDTH, HIDDEN)
        for param in reference.parameters():
            nn.init.normal_(param, generator=torch.Generator().manual_seed(3))
        for placement_fn in (None, cut_rows):
            layer = copy.deepcopy(reference)
            for name, param in list(layer.named_parameters()):
                setattr(layer, name, nn.Parameter(distribute_tensor(param.detach(), world["ep"], [Shard(0)])))
            model = gtp_shard(nn.Sequential(layer), world["gtp"], schedule=ALL, shard_placement_fn=placement_fn)[0]
            splits = torch.tensor([[1, 2, 0, 4], [3, 0, 2, 2]])  # of the two token streams
            x = [torch.randn(7, WIDTH, generator=torch.Generator().manual_seed(s)) for s in range(2)]
            reference.zero_grad()
            (sum(reference(x[s], splits[s]).square().sum() for s in range(2)) / 2).backward()
            stream, ep = world.get_local_rank("gtp"), world.get_local_rank("ep")
            first, mine = splits[stream, : 2 * ep].sum(), splits[stream, 2 * ep : 2 * ep + 2]
            output = model(x[stream][first : first + mine.sum()], mine)
            output.square().sum().backward()
            for name, param in reference.named_parameters():
                grad = model._parameters[name].grad
                torch.testing.assert_close(full(grad), param.grad)

    def test_recomputation_mixed_precision_and_evaluation(self) -> None:
        mesh = self.gtp_mesh()
        reference = make()
        model = gtp_shard(copy.deepcopy(reference), mesh, schedule=ALL)
        x = torch.randn(ROWS, WIDTH)
        reference(x).square().mean().backward()
        for use_reentrant in (True, False):
            inputs = rows_of_rank(x, mesh).clone().requires_grad_()
            checkpoint(model, inputs, use_reentrant=use_reentrant).square().mean().backward()
            assert_same_params(model, reference, "grad")
            model.zero_grad()
        with torch.no_grad():
            torch.testing.assert_close(model(rows_of_rank(x, mesh)), rows_of_rank(reference(x), mesh))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        low = gtp_shard(copy.deepcopy(reference).requires_grad_(), mesh, schedule=ALL, mp_policy=policy)
        low(rows_of_rank(x, mesh)).float().square().mean().backward()
        assert_same_params(low, reference, "grad", rtol=0.1, atol=0.01)

    def test_compiled(self) -> None:
        """One graph for the whole model; gathers as many weights as without a compiler, and saves none of them."""
        self.check_compiled(mp_policy=MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))

    @pytest.mark.long
    def test_compiled_in_one_precision(self) -> None:
        self.check_compiled()

    def check_compiled(self, **options: Any) -> None:
        mesh, x = self.gtp_mesh(), torch.randn(6, WIDTH, requires_grad=True)
        models = [gtp_shard(make(), mesh, schedule=NO_KEEP, **options) for _ in range(2)]
        models[1].compile(fullgraph=True, backend="aot_eager")
        for freeze in (False, True):
            for model in models:
                model.up.requires_grad_(not freeze)
            results = []
            for model in models:
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
        """Cut over four ranks or over one, the operands and so the outputs have the same bits; gradients are near those
        of the weights that are not quantized."""
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        torch.manual_seed(0)
        reference = GroupedLinear(GROUPS, 48, 32, bias=False)
        splits, rows = torch.tensor([5, 0, 3, 4]), torch.randn(14, 48)
        results = []
        for mesh in (self.gtp_mesh(), self.hsdp_mesh(4)):
            layer = quantize_(copy.deepcopy(reference), Float8Rowwise(compute="float8"))
            gtp_shard(layer, mesh, schedule=ALL, mp_policy=policy)
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
