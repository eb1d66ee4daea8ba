"""Stock ``clip_grad_norm_`` where parameters lie on several meshes: tensor parallelism beside plain layers, experts."""

from __future__ import annotations

import copy
import math
from itertools import product

import torch
import torch.nn as nn
from common import ALL, GlooTest, _mesh, assert_same_params, full, rows_of_rank
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_gtp import GTPShard, gtp_shard

ORDERS = (2.0, 1.0, math.inf)


class Layers(nn.Module):
    """A plain layer and a norm, which tensor parallelism leaves alone, around a parallel pair."""

    def __init__(self) -> None:
        super().__init__()
        self.plain = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.up = nn.Linear(8, 12)
        self.down = nn.Linear(12, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.plain(x))
        return x + self.down(torch.relu(self.up(x)))


class Scaled(Layers):
    """With a parameter of no dim, the first of all."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scale


def fp64_norm(grads: list[torch.Tensor], order: float) -> float:
    return torch.linalg.vector_norm(torch.cat([g.double().flatten() for g in grads]), order).item()


def clip(model: nn.Module, reference: nn.Module, order: float, foreach: bool | None) -> None:
    """Clip both; the norm, the gradients and the parameters after a step must agree with one process in fp64."""
    expected = fp64_norm([param.grad for param in reference.parameters() if param.grad is not None], order)
    for clipped in (reference, model):
        norm = nn.utils.clip_grad_norm_(clipped.parameters(), expected / 3, order, foreach=foreach)
        torch.testing.assert_close(
            full(norm).item(), expected, rtol=1e-5, atol=0, msg=lambda m: f"{order} {foreach}: {m}"
        )
    assert_same_params(model, reference, "grad")
    for clipped in (reference, model):
        torch.optim.AdamW(clipped.parameters(), lr=0.5).step()
    assert_same_params(model, reference)


class TestNorms(GlooTest):
    def test_r10_tensor_parallel_beside_plain_layers(self) -> None:
        world = _mesh((2, 2), ("gtp", "tp"))
        plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
        for order, foreach in product(ORDERS, (True, False, None)):
            torch.manual_seed(0)
            reference = Layers()
            model = gtp_shard(
                parallelize_module(copy.deepcopy(reference), world["tp"], plan), world["gtp"], schedule=ALL
            )
            x = torch.randn(8, 8)
            reference(x).square().mean().backward()
            model(rows_of_rank(x, world["gtp"])).square().mean().backward()
            self.assertEqual(len({p.device_mesh for p in model.parameters()}), 2)
            clip(model, reference, order, foreach)

    def test_r10_submodule_with_a_mesh_of_its_own(self) -> None:
        """The inner layer is replicated twice: its rows count once."""
        for order, foreach, block_size in product(ORDERS, (True, False), (1, 3)):
            torch.manual_seed(0)
            reference = Layers()
            model = copy.deepcopy(reference)
            gtp_shard(model.up, self.hsdp_mesh(), schedule=ALL, shard_placement_fn=blocks_of(block_size))
            gtp_shard(model, self.gtp_mesh(), schedule=ALL)
            x = torch.randn(8, 8)
            reference(x).square().mean().backward()
            model(rows_of_rank(x, self.gtp_mesh())).square().mean().backward()
            clip(model, reference, order, foreach)

    def test_a_scalar_parameter_beside(self) -> None:
        """It counts as lying on the mesh of the layer behind it, also beside blocks on either mesh."""
        for order, foreach, cut in product(ORDERS, (True, False), ("outer", "inner")):
            torch.manual_seed(0)
            reference = Scaled()
            model = copy.deepcopy(reference)
            blocks = {"shard_placement_fn": blocks_of(2)}
            gtp_shard(model.plain, self.hsdp_mesh(), schedule=ALL, **(blocks if cut == "inner" else {}))
            gtp_shard(model, self.gtp_mesh(), schedule=ALL, **(blocks if cut == "outer" else {}))
            x = torch.randn(8, 8)
            reference(x).square().mean().backward()
            model(rows_of_rank(x, self.gtp_mesh())).square().mean().backward()
            clip(model, reference, order, foreach)

    def test_r10_fully_shard_beside(self) -> None:
        for order, foreach in product(ORDERS, (True, False)):
            torch.manual_seed(0)
            reference = Layers()
            model = copy.deepcopy(reference)
            fully_shard(model.up, mesh=_mesh((4,), ("dp",)))
            for layer in (model.plain, model.norm, model.down):
                gtp_shard(layer, self.gtp_mesh(), schedule=ALL)
            x = torch.randn(8, 8)
            reference(x).square().mean().backward()
            model(rows_of_rank(x, self.gtp_mesh())).square().mean().backward()
            clip(model, reference, order, foreach)

    def test_only_scalars_mix(self) -> None:
        """Anything else on several meshes is refused as before; one mesh goes the stock way."""
        world = _mesh((2, 2), ("gtp", "tp"))
        rows = distribute_tensor(torch.arange(8.0), world["gtp"], [Shard(0)])
        others = distribute_tensor(torch.arange(8.0), world["tp"], [Shard(0)])
        gtp_shard(nn.Linear(4, 4), world["gtp"])
        with self.assertRaisesRegex((RuntimeError, ValueError), "mesh"):
            rows + others
        with self.assertRaisesRegex((RuntimeError, ValueError), "mesh"):
            torch.stack([rows, others])
        scalars = torch.stack([rows.sum(), others.sum(), rows.max()])
        self.assertEqual(full(scalars), torch.tensor([28.0, 28.0, 7.0]))
        self.assertEqual(scalars.placements, (Replicate(),))
        self.assertEqual(full(others * scalars.sum()), torch.arange(8.0) * 63)
        self.assertEqual(full(torch.stack([rows.sum(), rows.sum()])), torch.tensor([28.0, 28.0]))

    def test_a_sum_of_another_mesh_is_reduced_before_it_counts(self) -> None:
        """Each rank has a part of it only: read as it is, ranks would go on with different numbers."""
        world = _mesh((2, 2), ("gtp", "tp"))
        gtp_shard(nn.Linear(4, 4), world["gtp"])
        rows = distribute_tensor(torch.arange(8.0), world["gtp"], [Shard(0)])
        others = distribute_tensor(torch.arange(8.0), world["tp"], [Shard(0)])
        with self.assertRaisesRegex((RuntimeError, ValueError), "mesh"):
            others * rows.sum()
        whole = rows.sum().redistribute(placements=[Replicate()])
        self.assertEqual(full(others * whole), torch.arange(8.0) * 28)


def blocks_of(block_size: int) -> object:
    return lambda param: GTPShard(0, block_size=block_size) if param.ndim else None
