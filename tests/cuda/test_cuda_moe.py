"""Mixtures of experts on GPUs with NCCL: no word from the host, CUDA graphs with other routing, the kernel's strides.

Needs 2 to 8 GPUs of one host; uses as many as there are, an even number.
"""

import contextlib
import copy
import itertools
import os
import subprocess
import sys
import unittest
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import assert_same_params, environment, full
from cuda_common import (
    BF16,
    COPY_ENGINES,
    CudaTest,
    assert_same,
    assert_same_grads,
    captured,
    drawn,
    no_waits,
    training_step,
)
from cuda_common import NUM_RANKS as ALL_RANKS
from schedules import changed, explicit
from torch.distributed.fsdp import MixedPrecisionPolicy

from dtensor_gtp import GTPShard, SchedulePolicy, WeightMesh, gtp_shard, init_weight_mesh, quantize_
from dtensor_gtp.nn import GroupedExperts, GroupedLinear, GroupedMLP, convert_grouped_state_dict, parallelize_experts
from dtensor_gtp.ops.grouped import grouped_mm, grouped_wgrad
from dtensor_gtp.quant import MXFP8, RECIPES, Direction, Float8Rowwise
from dtensor_gtp.quant.grouped_gemms import GroupedMXGEMMs, GroupedRowwiseGEMMs

NUM_RANKS = ALL_RANKS // 2 * 2
EXPERTS, DIM, HIDDEN, TOP_K, TOKENS = 8, 256, 512, 2, 128
DEFAULT = explicit()
COPY_ENGINE = explicit(**COPY_ENGINES)
LATE = 20_000_000  # clock cycles
ALL_BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


class Block(nn.Module):
    """Router, experts, residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(DIM, EXPERTS, bias=False)
        self.experts = GroupedExperts(GroupedMLP(EXPERTS, DIM, HIDDEN))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, chosen = self.router(x).float().softmax(-1).topk(TOP_K)
        return x + self.experts(x, chosen, weights)


def step(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    output = model(x)
    output.float().square().mean().backward()
    return output


@unittest.skipIf(NUM_RANKS < 2, "needs at least 2 GPUs")
class TestCudaMoE(CudaTest):
    world_size = NUM_RANKS

    def mesh(self) -> WeightMesh:
        return init_weight_mesh("cuda", gtp=self.world_size, ep=2, expert_gtp=self.world_size // 2)

    def block(
        self, mesh: WeightMesh, method: str, policy: MixedPrecisionPolicy = BF16, schedule: SchedulePolicy = DEFAULT
    ) -> Block:
        torch.manual_seed(0)
        model = Block().cuda()
        parallelize_experts(model.experts, mesh["ep"], method=method)
        gtp_shard(model.experts.mlp, mesh.expert_weights, mp_policy=policy, schedule=schedule)
        model.experts.mlp.set_gradient_divide_factor(mesh.data.size())  # type: ignore[operator]
        gtp_shard(model, mesh.weights, mp_policy=policy, schedule=schedule)
        return model

    def tokens(self, seed: int, rank: int | None = None) -> torch.Tensor:
        return drawn(seed * 100 + (self.rank if rank is None else rank), TOKENS, DIM)

    def test_equals_one_process(self) -> None:
        """Both ways of sending tokens, in fp32."""
        for method in ("all_to_all", "all_gather"):
            model = self.block(self.mesh(), method, MixedPrecisionPolicy())
            torch.manual_seed(0)
            reference = Block().cuda()
            everything = [self.tokens(0, rank) for rank in range(self.world_size)]
            step(reference, torch.cat(everything))
            step(model, everything[self.rank])
            assert_same_params(model, reference, "grad", rtol=1e-3, atol=1e-5)

    def test_steady_state_never_waits_on_the_host(self) -> None:
        model, x = self.block(self.mesh(), "all_gather"), self.tokens(0)
        for _ in range(2):
            step(model, x)
        with no_waits():
            step(model, x)

    def test_all_to_all_waits_once_for_each_dispatch(self) -> None:
        """The documented host path: it would raise under the mode that the other one passes."""
        model, x = self.block(self.mesh(), "all_to_all"), self.tokens(0)
        for _ in range(2):
            step(model, x)
        with no_waits(), self.assertRaisesRegex(RuntimeError, "synchroniz"):
            model(x)

    def test_block_in_a_cuda_graph(self) -> None:
        """Captured with one routing and replayed with others: the same bits as eager."""
        mesh = self.mesh()
        for schedule in (DEFAULT, COPY_ENGINE):
            model, eager = (self.block(mesh, "all_gather", schedule=schedule) for _ in range(2))
            x = self.tokens(0)
            graph, output = captured(model, lambda model=model, x=x: step(model, x))
            for replay in range(1, 5):
                x.copy_(self.tokens(replay))
                graph.replay()
                expected = step(eager, x)
                self.assertTrue(torch.equal(output, expected), f"replay {replay}")
                assert_same_grads(model, eager, f"replay {replay}")
                eager.zero_grad()

    def test_training_steps_of_a_block_in_a_cuda_graph(self) -> None:
        """``capture_step`` with an optimizer: each step is routed otherwise and leaves what eager steps leave."""
        mesh = self.mesh()
        models, steps = [self.block(mesh, "all_gather") for _ in range(2)], []
        for model in models:
            lr = torch.tensor(1e-2, device="cuda")
            optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True, capturable=True)
            steps.append(training_step(model, optimizer, step, is_captured=model is models[0]))
        routings: list[torch.Tensor] = []
        for number in range(8):
            x = self.tokens(number)
            with torch.no_grad():
                routings.append(models[1].router(x.bfloat16()).topk(TOP_K).indices)
            output, expected = (train(x) for train in steps)
            self.assertTrue(torch.equal(output, expected), f"step {number}")
            assert_same(*(model.parameters() for model in models), f"step {number}")
        self.assertEqual(steps[0].num_graphs, 1)
        self.assertFalse(any(torch.equal(a, b) for a, b in itertools.pairwise(routings)), "routed alike")

    def test_experts_gathered_blocks_ahead_in_a_cuda_graph(self) -> None:
        """Three blocks whose experts have communicators of their own, gathered ahead by copy engines or NCCL: under
        delays, with poison and late ranks, captured steps leave what plain eager ones leave."""
        mesh = init_weight_mesh("cuda", gtp=self.world_size, ep=1, expert_gtp=self.world_size)

        def train(schedule: SchedulePolicy, is_captured: bool) -> list[torch.Tensor]:
            torch.manual_seed(0)
            model = nn.Sequential(*(Block() for _ in range(3))).cuda()
            for block in model:
                gtp_shard(block.experts.mlp, mesh.expert_weights, mp_policy=BF16, schedule=schedule)
            gtp_shard(model, mesh.weights, mp_policy=BF16, schedule=schedule)
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True, capturable=True)
            run = training_step(model, optimizer, step, is_captured=is_captured)
            outputs = []
            for number in range(8):
                if number % self.world_size == self.rank:
                    torch.cuda._sleep(LATE)
                outputs.append(run(self.tokens(number)).clone())
            return [*outputs, *(param.to_local() for param in model.parameters())]

        expected = train(explicit(prefetch_depth=0), is_captured=False)
        for schedule, debug, is_captured in itertools.product(
            (DEFAULT, COPY_ENGINE), ("", "poison,delay=0", "poison,delay=1"), (False, True)
        ):
            ahead = changed(schedule, expert_blocks_ahead=2)
            with environment(DTENSOR_GTP_DEBUG=debug):
                actual = train(ahead, is_captured)
            assert_same(actual, expected, f"{ahead}, {debug}, captured {is_captured}")

    def test_fewer_tokens_than_were_agreed_on(self) -> None:
        """A gather of tokens pads what a rank lacks: results are those of one process, and in bf16, for which torch has
        grouped kernels, nothing waits on the host."""
        batches = [self.tokens(1, rank)[: TOKENS - 8 * rank] for rank in range(self.world_size)]
        for policy in (MixedPrecisionPolicy(), BF16):
            torch.manual_seed(0)
            reference = Block().cuda()
            sum_gradients(reference, batches, policy.param_dtype or torch.float32)
            model = self.block(self.mesh(), "all_gather", policy)
            model.set_gradient_divide_factor(1)  # type: ignore[operator]
            model.experts.mlp.set_gradient_divide_factor(1)  # type: ignore[operator]
            step(model, self.tokens(0))
            model.zero_grad()
            with no_waits() if policy is BF16 else contextlib.nullcontext():
                step(model, batches[self.rank])
            if policy is BF16:
                assert_near(model, reference)
            else:
                assert_same_params(model, reference, "grad", rtol=1e-3, atol=1e-5)

    def test_gradients_are_packed_behind_compute(self) -> None:
        """Whatever is cut and however streams are delayed: the bits of a run without delays, of microbatches, too."""
        mesh = self.mesh().weights
        cuts: list[dict[str, Any]] = [
            {},
            {"shard_placement_fn": lambda param: GTPShard(0)},
            {"schedule": explicit(reduce_scatter="all_to_all")},
        ]
        for options, policy in itertools.product(cuts, (BF16, ALL_BF16)):
            results = []
            for debug in ("", "poison,delay=3"):
                torch.manual_seed(0)
                mlp = GroupedMLP(EXPERTS, DIM, HIDDEN).cuda()
                with environment(DTENSOR_GTP_DEBUG=debug):
                    model: Any = gtp_shard(mlp, mesh, mp_policy=policy, **options)
                splits = torch.full((EXPERTS,), TOKENS // EXPERTS, device="cuda")
                for number in range(6):
                    model.set_requires_gradient_sync(number % 2 == 1)
                    model(self.tokens(number), splits).float().square().mean().backward()
                results.append([param.grad.to_local().clone() for param in model.parameters()])
            assert_same(*results, f"{options} {policy}")

    def test_a_weight_for_each_group(self) -> None:
        """Gathered side by side and multiplied as a view: the bits of one weight for all groups that is cut by rows."""
        mesh = self.mesh().weights
        torch.manual_seed(0)
        single = GroupedLinear(EXPERTS, DIM, HIDDEN, bias=False, device="cuda")
        several = GroupedLinear(EXPERTS, DIM, HIDDEN, bias=False, single_grouped_weight=False, device="cuda")
        several.load_state_dict(convert_grouped_state_dict(single.state_dict(), single_grouped_weight=False))
        outputs = []
        splits = torch.tensor([16, 0, 40, 8, 16, 16, 0, 20], device="cuda")
        for layer in (single, several):
            gtp_shard(layer, mesh, mp_policy=BF16)
            for _ in range(3):
                layer.zero_grad()
                x = self.tokens(0).bfloat16().requires_grad_()
                output = layer(x, splits)
                output.float().square().mean().backward()
            outputs.append((output.detach(), x.grad))
        self.assertEqual(outputs[0], outputs[1], rtol=0, atol=0)
        whole = single.weight.grad.full_tensor()
        for group in range(EXPERTS):
            grad = getattr(several, f"weight{group}").grad.full_tensor()
            torch.testing.assert_close(grad, whole[group])


@unittest.skipIf(NUM_RANKS < 2, "needs at least 2 GPUs")
class TestGroupedGraphs(CudaTest):
    """Replays with other counts leave the bits of eager steps."""

    COUNTS = ([TOKENS, 0, 0, 0, 0, 0, 0, 0], [0] * EXPERTS, [1, 2, 3, 4, 5, 6, 7, 8])

    def check(self, what: str, layer: GroupedLinear, recipe: str | None = None) -> None:
        eager = copy.deepcopy(layer)
        for module in (layer, eager):
            if recipe is not None:
                quantize_(module, recipe)
            gtp_shard(module, self.gtp_mesh(), mp_policy=BF16)
        torch.manual_seed(self.rank)
        x = torch.randn(TOKENS, DIM, device="cuda").bfloat16().requires_grad_()
        splits = torch.full((EXPERTS,), TOKENS // EXPERTS, device="cuda")
        scales = torch.rand(TOKENS, device="cuda") if layer.scale_bias else None

        def run(module: GroupedLinear) -> torch.Tensor:
            output = module(x, splits, scales)
            output.float().square().mean().backward()
            return output

        graph, output = captured(layer, lambda: run(layer))
        for counts in self.COUNTS:
            splits.copy_(torch.tensor(counts))
            if scales is not None:
                scales.copy_(torch.rand(TOKENS))
            graph.replay()
            expected = run(eager)
            self.assertTrue(torch.equal(output, expected), f"{what} {counts}")
            self.assertFalse(output[sum(counts) :].any(), f"{what} {counts}")
            assert_same_grads(layer, eager, f"{what} {counts}")
            eager.zero_grad()

    def make(self, **options: bool) -> GroupedLinear:
        torch.manual_seed(0)
        return GroupedLinear(EXPERTS, DIM, HIDDEN, device="cuda", **options)

    def test_each_kind_of_layer(self) -> None:
        """Factors of biases are others than those of the recording, too."""
        for options in ({}, {"scale_bias": True}, {"single_grouped_weight": False}):
            self.check(f"{options}", self.make(**options))

    def test_each_recipe(self) -> None:
        for name in RECIPES:
            self.check(name, self.make(bias=False), name)


def sum_gradients(model: nn.Module, batches: list[torch.Tensor], dtype: torch.dtype) -> None:
    """Gradients of one process that computes in ``dtype``, one batch after the other, summed in the model's dtype."""
    computing = copy.deepcopy(model).to(dtype)
    for batch in batches:
        computing.zero_grad()
        step(computing, batch.to(dtype))
        for param, computed in zip(model.parameters(), computing.parameters(), strict=True):
            grad = computed.grad.to(param.dtype)
            param.grad = grad if param.grad is None else param.grad + grad


def assert_near(model: nn.Module, reference: nn.Module) -> None:
    """Gradients differ by roundings to bf16: one of 128 rows of a rank that is lost or too many shows."""
    for (name, param), other in zip(model.named_parameters(), reference.parameters(), strict=True):
        want = other.grad
        error = ((full(param.grad) - want).norm() / want.norm()).item()
        assert error < 0.02, f"gradient of {name}: {error}"


@unittest.skipIf(not torch.cuda.is_available(), "needs a GPU")
class TestCudaKernel(unittest.TestCase):
    SPLITS = ([40, 0, 24, 64], [0, 0, 0, 0], [1, 2, 3, 4])

    def test_a_weight_in_a_gather_buffer(self) -> None:
        """Cut on dim 1, the full weight is a view of a buffer with that dim in front: its groups are interleaved."""
        for dtype, (n, k) in ((torch.bfloat16, (96, 64)), (torch.bfloat16, (70, 40)), (torch.float16, (64, 128))):
            buffer = torch.randn(n, 4, k, device="cuda").to(dtype)
            weight = buffer.movedim(0, 1)
            for counts in self.SPLITS:
                ends = torch.tensor(counts, device="cuda").cumsum(0, dtype=torch.int32)
                x, grad = (torch.randn(128, size, device="cuda").to(dtype) for size in (k, n))
                for a, b in (
                    (grouped_mm(x, weight.mT, ends), grouped_mm(x, weight.contiguous().mT, ends)),
                    (grouped_mm(grad, weight, ends), grouped_mm(grad, weight.contiguous(), ends)),
                ):
                    torch.testing.assert_close(a, b, rtol=0, atol=0)
                self.check_reference(x, grad, weight, counts)

    def test_quantized_groups_equal_the_reference_arithmetic(self) -> None:
        """``scaled_grouped_mm`` on what the recipe casts (groups of MXFP8 are moved to whole tiles), forward and dgrad,
        up to roundings of sums and of bf16. Hopper multiplies float8 rows, Blackwell MXFP8."""
        recipes = {9: (Float8Rowwise(), GroupedRowwiseGEMMs), 10: (MXFP8(), GroupedMXGEMMs)}
        major, _ = torch.cuda.get_device_capability()
        if major not in recipes:
            self.skipTest("needs Hopper or Blackwell")
        recipe, gemms_class = recipes[major]
        torch.manual_seed(0)
        weight = torch.randn(4, 96, 64, device="cuda") * torch.exp2(-(torch.arange(96, device="cuda") % 4.0))[:, None]
        forward = backward = recipe.quantize(weight, Direction.ROWWISE)
        if major == 10:
            backward = recipe.quantize(weight, Direction.COLUMNWISE)
        x, grad = (torch.randn(128, size, device="cuda").bfloat16() for size in (64, 96))
        kernel, reference = (gemms_class(True, on_hardware) for on_hardware in (True, False))
        for counts in ([40, 0, 24, 64], [30, 1, 0, 13]):
            ends = torch.tensor(counts, device="cuda").cumsum(0, dtype=torch.int32)
            for method, rows, data in (("grouped_output", x, forward), ("grouped_grad_input", grad, backward)):
                got, want = (
                    getattr(gemms, method)(rows, data, ends, torch.bfloat16)[: sum(counts)].float()
                    for gemms in (kernel, reference)
                )
                self.assertLess(((got - want).norm() / want.norm()).item(), 0.01, f"{method} {counts}")

    def test_debug_mode_finds_counts_beyond_the_rows(self) -> None:
        """By an assertion on the device, after which the process has no use of the GPU: so in one of its own."""
        script = """
import sys, torch
from dtensor_gtp.nn import GroupedLinear
layer = GroupedLinear(2, 64, 64, bias=False, device="cuda", dtype=torch.bfloat16)
x = torch.zeros(8, 64, device="cuda", dtype=torch.bfloat16)
layer(x, torch.tensor([8, int(sys.argv[1])], device="cuda"))
torch.cuda.synchronize()
"""
        variables = {"DTENSOR_GTP_DEBUG": "splits", "PYTHONPATH": os.pathsep.join(sys.path)}
        for beyond in (0, 1):
            result = subprocess.run(
                [sys.executable, "-c", script, str(beyond)],
                env=os.environ | variables,
                capture_output=True,
                text=True,
                timeout=300,
            )
            self.assertEqual(result.returncode != 0, bool(beyond), result.stderr)
            self.assertEqual("device-side assert" in result.stderr, bool(beyond), result.stderr)

    def check_reference(self, x: torch.Tensor, grad: torch.Tensor, weight: torch.Tensor, counts: list[int]) -> None:
        """Output, dgrad and wgrad against a loop in fp64; zeros beyond the last group."""
        ends = torch.tensor(counts, device="cuda").cumsum(0, dtype=torch.int32)
        parts_x, parts_grad = (t.double().split([*counts, 128 - sum(counts)])[:-1] for t in (x, grad))
        wide = weight.double()
        tail = torch.zeros(128 - sum(counts), 1, device="cuda", dtype=torch.float64)
        output = torch.cat(
            [*(F.linear(p, w) for p, w in zip(parts_x, wide, strict=True)), tail.expand(-1, wide.shape[1])]
        )
        dgrad = torch.cat([*(g @ w for g, w in zip(parts_grad, wide, strict=True)), tail.expand(-1, wide.shape[2])])
        wgrad = torch.stack([g.t() @ p for g, p in zip(parts_grad, parts_x, strict=True)])
        eps = torch.finfo(x.dtype).eps
        for got, want in (
            (grouped_mm(x, weight.mT, ends), output),
            (grouped_mm(grad, weight, ends), dgrad),
            (grouped_wgrad(grad, x, ends), wgrad),
        ):
            torch.testing.assert_close(got.double(), want, rtol=4 * eps, atol=4 * eps * want.abs().max().item())
