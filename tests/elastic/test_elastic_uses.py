"""Replicas of unequal sizes whose ranks use other parameters than their peers, or two models in one backward."""

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from common import GlooTest
from test_elastic import BUCKET_NBYTES, Elastic, _replicas, shard_all
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from dtensor_gtp.elastic import ElasticMesh

WIDTH = 8
REPLICAS = (0,), (1, 2)
# By step: what each rank uses.
CHOICES = (0, 1, 1), (1, 0, 1), (1, 1, 1), (0, 1, 0)


class Parts(nn.Module):
    """A layer, and whole parameters of which a forward uses one. Nobody uses the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.parts = nn.ParameterList([torch.ones(size) for size in (WIDTH, 2 * WIDTH, WIDTH)])

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        return (torch.tanh(self.layer(x)) * self.parts[choice][:WIDTH]).square().mean()


class Tasks(nn.Module):
    """A layer, and heads with a bias, of which a forward uses one. Nobody uses the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)
        self.heads = nn.ModuleList([nn.Linear(WIDTH, size) for size in (4, 6, 4)])

    def forward(self, x: torch.Tensor, choice: int) -> torch.Tensor:
        return self.heads[choice](torch.tanh(self.layer(x))).square().mean()


class Tower(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self:
            x = torch.tanh(layer(x))
        return x


def make_rows(step: int, num_rows: int) -> torch.Tensor:
    return torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(step))


def seeded(cls: type[nn.Module], seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return cls()


class TestChoices(GlooTest):
    world_size = 3

    def train(self, elastic: Elastic, counts: tuple[int, ...], *, has_zeros: bool) -> None:
        """``counts``: samples of each rank; ranks of a tp group have the same ones."""
        layout = elastic.mesh.layout
        leaders = [row[0] for replica in layout.replicas for row in replica.grid]
        rank = dist.get_rank()
        me = next(row[0] for replica in layout.replicas for row in replica.grid if rank in row)
        num_rows = sum(counts[leader] for leader in leaders)
        elastic.sync.set_batch(counts[me])
        for step, choices in enumerate(CHOICES):
            for is_last in (False, True):  # a microbatch without sync, too
                elastic.model.set_requires_gradient_sync(is_last)
                for leader in leaders:
                    rows = make_rows(10 * step + leader, max(counts[leader], 1))
                    loss = elastic.reference(rows, choices[leader])
                    (loss * (counts[leader] / num_rows)).backward()
                    if leader == me:
                        elastic.model(rows, choices[me]).backward()
            if has_zeros:
                for param in elastic.reference.parameters():
                    if param.grad is None:
                        param.grad = torch.zeros_like(param)
            elastic.step()
        elastic.sync.check_values()

    def test_whole_parameters_that_some_ranks_use(self) -> None:
        """The mean over the batch, and no gradient where no rank has used them. Rank 0 may have no samples."""
        for counts in ((3, 2, 4), (0, 2, 4)):
            elastic = Elastic(_replicas(REPLICAS), seeded(Parts), shard_all)
            self.train(elastic, counts, has_zeros=False)

    def test_zeros_for_unused_parameters(self) -> None:
        def shard_heads(model: nn.Module, mesh: ElasticMesh) -> None:
            plan = {f"heads.{index}": ColwiseParallel(output_layouts=Replicate()) for index in range(3)}
            parallelize_module(model, mesh["tp"], plan)
            shard_all(model, mesh)

        for tp, apply in ((1, shard_all), (2, shard_heads)):
            elastic = Elastic(_replicas(REPLICAS, tp=tp), seeded(Tasks), apply)
            elastic.model.set_reduce_scatter_unused_params(True)
            self.train(elastic, (3, 2, 2), has_zeros=True)


def beside(one: Any, other: Any, x: torch.Tensor) -> torch.Tensor:
    return one(x).square().mean() + 3 * other(x).square().mean()


def behind(one: Any, other: Any, x: torch.Tensor) -> torch.Tensor:
    return other(one(x)).square().mean()


def in_turns(one: Any, other: Any, x: torch.Tensor) -> torch.Tensor:
    return other(one(other(one(x)))).square().mean()


class TestTwoModels(GlooTest):
    world_size = 3

    def test_two_models_on_one_mesh_in_one_backward(self) -> None:
        mesh = _replicas(REPLICAS)
        losses: tuple[Callable[..., torch.Tensor], ...] = beside, behind, in_turns
        for bucket_nbytes in (BUCKET_NBYTES, 1 << 20):
            both = [Elastic(mesh, seeded(Tower, seed), shard_all, bucket_nbytes=bucket_nbytes) for seed in range(2)]
            for step, loss in enumerate(losses):
                share = mesh.rebalance_batch(9)
                rows = make_rows(step, 9)
                for each in both:
                    each.sync.set_batch(share)
                loss(*(each.reference for each in both), rows).backward()
                loss(*(each.model for each in both), rows[share.rows]).backward()
                for each in both:
                    each.step()
