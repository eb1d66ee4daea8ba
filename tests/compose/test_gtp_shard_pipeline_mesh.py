"""Pipelines over the axes of ``init_weight_mesh``: experts folded into each stage, random numbers of each stage."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, GlooTest, full
from test_gtp_shard_pipeline import (
    INTERLEAVED,
    NUM_MICROBATCHES,
    ONE_F_ONE_B,
    ZERO_BUBBLE,
    Layout,
    Pipeline,
    Stage,
    train,
)
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from dtensor_gtp import WeightMesh, gtp_shard, init_weight_mesh, quantize_
from dtensor_gtp.nn import GroupedExperts, GroupedMLP, parallelize_experts

WIDTH, TOKENS = 16, 4
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
    return nn.Sequential(*(Part() for _ in range(4)))


def make_batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    x, target = torch.randn(2, 16, TOKENS, WIDTH, generator=torch.Generator().manual_seed(step)).unbind()
    return x, target


def shard(part: Any, mesh: WeightMesh, recipe: str | None = None) -> None:
    if mesh["tp"].size() > 1:
        parallelize_module(part, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
    ep, expert_tp = (mesh[name] if mesh[name].size() > 1 else None for name in ("ep", "expert_tp"))
    parallelize_experts(part.experts, ep, expert_tp)
    if recipe is not None:
        quantize_(part.experts, recipe)
    gtp_shard(part.experts.mlp, mesh.expert_weights, schedule=ALL)
    part.experts.mlp.set_gradient_divide_factor(mesh.data.size())
    gtp_shard(part, mesh.weights, schedule=ALL)


class Recording(Stage):
    """Notes whether the first part of a backward has put off the weight gradients of all layers."""

    puts_off = False

    def backward_maybe_with_nosync(self, backward_type: str, *args: Any, **kwargs: Any) -> Any:
        result = super().backward_maybe_with_nosync(backward_type, *args, **kwargs)
        if backward_type == "input":
            self.puts_off = sum(len(jobs) for _, jobs in result[1]) == 5  # two dense layers and three of experts
        return result


def pipeline_of(layout: Layout, mesh: WeightMesh, recipe: str | None = None) -> Pipeline:
    return Pipeline(
        *(layout, make_parts()),
        mesh=mesh,
        batch_of=make_batch,
        stage_class=Recording,
        loss_fn=F.mse_loss,
        shard=lambda parts, mesh: [shard(part, mesh, recipe) for part in parts],
    )


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
        return torch.tanh(self.part(x)) * (outside + inside)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.body, x, use_reentrant=False)


class TestPipelineMesh(GlooTest):
    def test_experts_are_folded_into_each_stage(self) -> None:
        """The ranks of a stage are gtp for dense layers, ep for experts, whose weight gradients are put off, too."""
        mesh = init_weight_mesh("cpu", pp=2, gtp=2, ep=2)
        pipeline = pipeline_of(ZERO_BUBBLE, mesh)
        train(pipeline, make_parts(), loss_fn=F.mse_loss)
        for stage in pipeline.stages:
            self.assertEqual(stage.puts_off, stage.stage_index > 0)

    @pytest.mark.long
    def test_tensor_parallelism_and_a_recipe_with_wgrad_put_off(self) -> None:
        """Same gradients, bit for bit, as by a schedule that puts nothing off."""
        mesh = init_weight_mesh("cpu", pp=2, tp=2, expert_tp=2)
        for recipe in (None, "mxfp8"):
            runs = []
            for layout in (ZERO_BUBBLE, INTERLEAVED):
                pipeline = pipeline_of(layout, mesh, recipe)
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
        stages = nn.Sequential(dropping, dropping)  # each rank has one
        pipeline = Pipeline(
            *(ONE_F_ONE_B, stages), mesh=mesh, batch_of=make_batch, loss_fn=F.mse_loss, shard=lambda parts, mesh: None
        )
        pipeline.run(0)
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
