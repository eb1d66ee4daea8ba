"""Stock ``clip_grad_norm_`` where parameters lie on several meshes: tensor parallelism beside plain layers, experts."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from itertools import product
from typing import Any

import torch
import torch.nn as nn
from common import ALL, GlooTest, _mesh, check_update, full, rows_of_rank
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
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


def in_blocks_of(block_size: int) -> dict[str, Any]:
    return {"shard_placement_fn": lambda param: GTPShard(0, block_size=block_size) if param.ndim else None}


class TestNorms(GlooTest):
    def check(self, reference: nn.Module, mesh: DeviceMesh, shard: Callable[[Any], Any]) -> None:
        """Norm, gradients, and parameters after a step are those of one process in fp64, for each kind of norm.

        Args:
            mesh: Its ranks have different rows.
        """
        torch.manual_seed(0)
        for layer in (reference.plain, reference.up, reference.down):
            layer.reset_parameters()
        model = shard(copy.deepcopy(reference))
        for order, foreach in product(ORDERS, (True, False)):
            x = torch.randn(8, 8)
            reference(x).square().mean().backward()
            model(rows_of_rank(x, mesh)).square().mean().backward()
            every = torch.cat([param.grad.double().flatten() for param in reference.parameters()])
            expected = torch.linalg.vector_norm(every, order).item()
            for clipped in (reference, model):
                norm = full(nn.utils.clip_grad_norm_(clipped.parameters(), expected / 3, order, foreach=foreach))
                self.assertEqual(norm.item(), expected, rtol=1e-5, atol=0, msg=f"{order} {foreach}")
            check_update(model, reference, [torch.optim.SGD(each.parameters(), lr=0.5) for each in (reference, model)])

    def test_r10_tensor_parallel_beside_plain_layers(self) -> None:
        """In rows, or in blocks of them, which are cut after and across those of tensor parallelism."""
        world = _mesh((2, 2), ("gtp", "tp"))
        for options in ({}, in_blocks_of(4)):

            def shard(model: nn.Module, options: dict[str, Any] = options) -> nn.Module:
                parallelize_module(model, world["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
                gtp_shard(model, world["gtp"], schedule=ALL, **options)
                self.assertEqual(len({param.device_mesh for param in model.parameters()}), 2)
                return model

            self.check(Layers(), world["gtp"], shard)

    def test_r10_submodule_with_a_mesh_of_its_own(self) -> None:
        """The inner layer is replicated twice: its rows count once."""
        for block_size in (1, 3):

            def shard(model: Any, block_size: int = block_size) -> Any:
                gtp_shard(model.up, self.hsdp_mesh(), schedule=ALL, **in_blocks_of(block_size))
                return gtp_shard(model, self.gtp_mesh(), schedule=ALL)

            self.check(Layers(), self.gtp_mesh(), shard)

    def test_a_scalar_parameter_beside(self) -> None:
        """It counts as lying on the mesh of the layer behind it, also beside blocks on either mesh."""
        for inner, outer in (({}, in_blocks_of(2)), (in_blocks_of(2), {})):

            def shard(model: Any, inner: dict[str, Any] = inner, outer: dict[str, Any] = outer) -> Any:
                gtp_shard(model.plain, self.hsdp_mesh(), schedule=ALL, **inner)
                return gtp_shard(model, self.gtp_mesh(), schedule=ALL, **outer)

            self.check(Scaled(), self.gtp_mesh(), shard)

    def test_r10_fully_shard_beside(self) -> None:
        def shard(model: Any) -> Any:
            fully_shard(model.up, mesh=_mesh((4,), ("dp",)))
            for layer in (model.plain, model.norm, model.down):
                gtp_shard(layer, self.gtp_mesh(), schedule=ALL)
            return model

        self.check(Layers(), self.gtp_mesh(), shard)

    def test_only_whole_scalars_mix(self) -> None:
        """Anything else on several meshes is refused as before; one mesh goes the stock way. Of a sum that is not
        reduced each rank has a part: read as it is, ranks would go on with different numbers."""
        world = _mesh((2, 2), ("gtp", "tp"))
        rows = distribute_tensor(torch.arange(8.0), world["gtp"], [Shard(0)])
        others = distribute_tensor(torch.arange(8.0), world["tp"], [Shard(0)])
        gtp_shard(nn.Linear(4, 4), world["gtp"])
        for mix in (lambda: rows + others, lambda: torch.stack([rows, others]), lambda: others * rows.sum()):
            with self.assertRaisesRegex((RuntimeError, ValueError), "mesh"):
                mix()
        scalars = torch.stack([rows.sum(), others.sum(), rows.max()])
        self.assertEqual(full(scalars), torch.tensor([28.0, 28.0, 7.0]))
        self.assertEqual(scalars.placements, (Replicate(),))
        self.assertEqual(full(others * scalars.sum()), torch.arange(8.0) * 63)
        self.assertEqual(full(torch.stack([rows.sum(), rows.sum()])), torch.tensor([28.0, 28.0]))
        whole = rows.sum().redistribute(placements=[Replicate()])
        self.assertEqual(full(others * whole), torch.arange(8.0) * 28)

    def test_infinity_norms_of_an_empty_shard_and_a_sum_that_is_not_reduced(self) -> None:
        """In one list, as a foreach norm has them: the sum is reduced first."""
        mesh = self.gtp_mesh()
        gtp_shard(nn.Linear(4, 4), mesh)
        short = distribute_tensor(torch.tensor([5.0, 6.0]), mesh, [Shard(0)])  # fewer rows than ranks
        terms = DTensor.from_local(torch.full((3,), self.rank + 1.0), mesh, [Partial()], run_check=False)
        norms = torch._foreach_norm([short, terms], math.inf)
        self.assertEqual([full(norm).item() for norm in norms], [6.0, 10.0])

    def test_extrema_of_a_weight_with_fewer_rows_than_ranks(self) -> None:
        """A rank without rows raised, and the others waited for it."""
        mesh = self.gtp_mesh()
        plain = nn.Linear(6, 2)
        layer = gtp_shard(copy.deepcopy(plain), mesh, schedule=ALL)
        for take in (
            *(torch.max, torch.min, torch.amax, torch.amin),
            *(lambda w: w.max(0)[0], lambda w: w.min(0)[1], lambda w: w.amax(0)),
            *(lambda w: w.max(1)[1], lambda w: w.amin(1), lambda w: torch._foreach_max([w])[0]),
        ):
            self.assertEqual(full(take(layer.weight.detach())), take(plain.weight.detach()))
