"""Pipelines over the axes of ``init_weight_mesh``: experts folded into each stage, random numbers of each stage."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, GlooTest, assert_same_params, full
from torch.distributed.pipelining import (
    PipelineStage,
    Schedule1F1B,
    ScheduleInterleaved1F1B,
    ScheduleInterleavedZeroBubble,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.common_utils import run_tests
from torch.utils.checkpoint import checkpoint

from dtensor_gtp import WeightMesh, gtp_shard, init_weight_mesh, quantize_
from dtensor_gtp.nn import GroupedExperts, GroupedMLP, parallelize_experts

WIDTH, TOKENS, NUM_PARTS, NUM_MICROBATCHES = 16, 4, 4, 4
HIDDEN = 64  # two blocks of MXFP8, one for each rank of tp


class Part(nn.Module):
    """A dense MLP and experts. A token's place chooses its expert, so that no rounding does."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.experts = GroupedExperts(GroupedMLP(2, WIDTH, HIDDEN, is_fused=False))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.tanh(self.up(x)))
        chosen = torch.arange(x.shape[1]).expand(x.shape[:2]).reshape(-1, 1) % 2
        y = self.experts(x.flatten(0, 1), chosen, torch.full(chosen.shape, 0.5))
        return x + y.view(x.shape)


def make_parts() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(Part() for _ in range(NUM_PARTS)))


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, target = torch.randn(2, 16, TOKENS, WIDTH, generator=torch.Generator().manual_seed(step)).unbind()
    return x, target


def shard(part: Any, mesh: WeightMesh, recipe: str | None = None) -> None:
    if mesh["tp"].size() > 1:
        parallelize_module(part, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    parallelize_experts(
        part.experts,
        mesh["ep"] if mesh["ep"].size() > 1 else None,
        mesh["expert_tp"] if mesh["expert_tp"].size() > 1 else None,
    )
    if recipe is not None:
        quantize_(part.experts, recipe)
    gtp_shard(part.experts.mlp, mesh.expert_weights, schedule=ALL)
    part.experts.mlp.set_gradient_divide_factor(mesh.data.size())
    gtp_shard(part, mesh.weights, schedule=ALL)


class Recording(PipelineStage):
    """Notes whether the first part of a backward has put off the weight gradients of all layers."""

    puts_off = False

    def backward_maybe_with_nosync(self, backward_type: str, *args: Any, **kwargs: Any) -> Any:
        result = super().backward_maybe_with_nosync(backward_type, *args, **kwargs)
        if backward_type == "input":
            self.puts_off = sum(len(jobs) for _, jobs in result[1]) == 5  # two dense layers and three of experts
        return result


class Pipeline:
    def __init__(self, mesh: WeightMesh, parts: nn.Sequential, schedule: Any, recipe: str | None = None) -> None:
        rank = mesh["pp"].get_local_rank()
        self.is_first, self.mesh = rank == 0, mesh
        self.parts = {index: parts[index] for index in (rank, rank + 2)}
        for part in self.parts.values():
            shard(part, mesh, recipe)
        self.stages = [
            Recording(part, index, NUM_PARTS, torch.device("cpu"), group=mesh["pp"].get_group())
            for index, part in self.parts.items()
        ]
        self.schedule = schedule(self.stages, n_microbatches=NUM_MICROBATCHES, loss_fn=F.mse_loss)

    def run(self, step: int) -> None:
        samples = self.mesh.batch
        x, target = (t.chunk(samples.size())[samples.get_local_rank()] for t in make_batch(step))
        if self.is_first:
            self.schedule.step(x)
        else:
            self.schedule.step(target=target)

    def parameters(self) -> list[nn.Parameter]:
        return [param for part in self.parts.values() for param in part.parameters()]


class Dropping(nn.Module):
    """A stage with dropout outside and inside of a region, recomputed in backward; notes numbers of both."""

    def __init__(self, part: nn.Module, mesh: WeightMesh) -> None:
        super().__init__()
        self.part, self.mesh = part, mesh
        self.drawn: list[tuple[float, float]] = []

    def body(self, x: torch.Tensor) -> torch.Tensor:
        outside = torch.rand(())
        with self.mesh.fork_rng("sequence_parallel"):
            inside = torch.rand(())
        self.drawn.append((outside.item(), inside.item()))
        y: torch.Tensor = torch.tanh(self.part(x)) * (outside + inside)
        return y

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self.body, x, use_reentrant=False)
        return y


class TestPipelineMesh(GlooTest):
    def test_experts_are_folded_into_each_stage(self) -> None:
        """The ranks of a stage are gtp for dense layers, ep for experts, whose weight gradients are put off, too."""
        mesh = init_weight_mesh("cpu", pp=2, gtp=2, ep=2)
        reference, pipeline = make_parts(), Pipeline(mesh, make_parts(), ScheduleInterleavedZeroBubble)
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.5, momentum=0.5) for each in (reference, pipeline)]
        for step in range(2):
            x, target = make_batch(step)
            F.mse_loss(reference(x), target).backward()
            pipeline.run(step)
            for index, part in pipeline.parts.items():
                assert_same_params(part, reference[index], "grad")
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            for index, part in pipeline.parts.items():
                assert_same_params(part, reference[index])
        for stage in pipeline.stages:
            self.assertEqual(stage.puts_off, stage.stage_index > 0)

    @pytest.mark.long
    def test_tensor_parallelism_and_a_recipe_with_wgrad_put_off(self) -> None:
        """Same gradients, bit for bit, as by a schedule that puts nothing off."""
        mesh = init_weight_mesh("cpu", pp=2, tp=2, expert_tp=2)
        for recipe in (None, "mxfp8"):
            runs = []
            for schedule in (ScheduleInterleavedZeroBubble, ScheduleInterleaved1F1B):
                pipeline = Pipeline(mesh, make_parts(), schedule, recipe)
                pipeline.run(0)
                runs.append([full(param.grad) for param in pipeline.parameters()])
            for actual, expected in zip(*runs, strict=True):
                torch.testing.assert_close(actual, expected, rtol=0, atol=0)

    def test_random_numbers_of_stages(self) -> None:
        """Unlike between stages, alike along tp outside of a region, and the same again when recomputed."""
        mesh = init_weight_mesh("cpu", pp=2, tp=2, seed=3)
        with mesh.fork_rng("params"):
            part = nn.Linear(WIDTH, WIDTH)
        gtp_shard(part, mesh.weights, schedule=ALL)
        dropping = Dropping(part, mesh)
        stage = PipelineStage(
            dropping, mesh["pp"].get_local_rank(), 2, torch.device("cpu"), group=mesh["pp"].get_group()
        )
        schedule = Schedule1F1B(stage, n_microbatches=NUM_MICROBATCHES, loss_fn=F.mse_loss)
        x, target = make_batch(0)
        if stage.is_first:
            schedule.step(x)
        else:
            schedule.step(target=target)
        drawn = dropping.drawn[-2 * NUM_MICROBATCHES :]  # before, torch has run each stage once to learn shapes
        self.assertEqual(len({value for value, _ in drawn}), NUM_MICROBATCHES)  # each twice: recomputed
        self.assertEqual(len(set(drawn)), NUM_MICROBATCHES)
        everyone: list[Any] = [None] * self.world_size
        dist.all_gather_object(everyone, (full(part.weight).flatten()[0].item(), sorted(drawn)[::2]))
        weights, draws = zip(*everyone, strict=True)
        self.assertEqual([weights[0], weights[2]], [weights[1], weights[3]])
        self.assertNotEqual(weights[0], weights[2])
        outside, inside = ([[pair[i] for pair in of_rank] for of_rank in draws] for i in (0, 1))
        self.assertEqual([outside[0], outside[2]], [outside[1], outside[3]])
        self.assertTrue(set(outside[0]).isdisjoint(outside[2]))
        self.assertEqual(len({value for of_rank in inside for value in of_rank}), 4 * NUM_MICROBATCHES)


if __name__ == "__main__":
    run_tests()
