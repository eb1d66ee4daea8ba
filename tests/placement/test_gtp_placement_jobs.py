"""Optimizers and collectives of DTensors with GTPShard placements, on four gloo ranks."""

from collections.abc import Callable, Sequence

import torch
from common import GlooTest
from placement_common import WORLD_SIZE, coded, shard, whole
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from dtensor_gtp.placement import GTPShard

STEPS = 2
SHAPES = {"weight": (37, 3), "tp_weight": (25, 2), "three_dims": (3, 21, 2), "vector": (11,), "tiny": (2, 2)}


Specs = dict[str, tuple[DeviceMesh, tuple[Placement, ...]]]


def specs(block_size: int) -> Specs:
    """Block size 0 means whole on every rank."""
    flat = DeviceMesh("cpu", range(4), mesh_dim_names=("gtp",))
    tp_gtp = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("tp", "gtp"))

    def gtp(dim: int) -> Placement:
        return GTPShard(dim, block_size=block_size) if block_size else Replicate()

    return {
        "weight": (flat, (gtp(0),)),
        "tp_weight": (tp_gtp, (Shard(0), gtp(0))),
        "three_dims": (tp_gtp, (Replicate(), gtp(1))),
        "vector": (flat, (gtp(0),)),
        "tiny": (flat, (gtp(0),)),
    }


def values(shape: Sequence[int], seed: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def is_bit_equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a, b)


class TestFourRanks(GlooTest):
    world_size = WORLD_SIZE

    def sharded(self, block_size: int, seed: int) -> dict[str, DTensor]:
        return {name: shard(values(SHAPES[name], seed), *spec) for name, spec in specs(block_size).items()}

    # --- ops ----------------------------------------------------------------------------------------------------------

    def test_collectives_of_redistribution(self) -> None:
        mesh = DeviceMesh("cpu", range(4))
        tensor = coded((10, 3))
        placements = [GTPShard(0, block_size=4)]
        source = shard(tensor, mesh, placements)
        partial = DTensor.from_local(tensor, mesh, [Partial()])
        for start, target, expected in [
            (source, [Replicate()], ["all_gather_into_tensor"]),
            (source, [Shard(0)], ["all_gather_into_tensor"]),
            (source, placements, []),
            (source.redistribute(mesh, [Replicate()]), placements, []),
            (partial, placements, ["reduce_scatter_tensor"]),
        ]:
            with CommDebugMode() as comms:
                start.redistribute(mesh, target)
            names = [str(op).rpartition(".")[2] for op, n in comms.get_comm_counts().items() for _ in range(n)]
            self.assertEqual(names, expected)

    def test_equal_looks_at_every_rank(self) -> None:
        mesh = DeviceMesh("cpu", range(4))
        for row in range(10):
            tensor = coded((10, 3))
            other = tensor.clone()
            other[row] += 1
            a, b = (shard(t, mesh, [GTPShard(0, block_size=4)]) for t in (tensor, other))
            self.assertTrue(torch.equal(a, a.clone()))
            self.assertFalse(torch.equal(a, b))

    # --- optimizers ---------------------------------------------------------------------------------------------------

    def test_optimizers(self) -> None:
        """Steps on DTensors, several layouts in one optimizer, against steps on plain tensors.

        Bit-equal to an optimizer of plain shards; only close to one of whole tensors, because vectorized CPU kernels
        round the last few elements of a tensor in another way.
        """
        adamw, sgd, rmsprop = torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop
        for kind, options in (
            (adamw, {"weight_decay": 0.1, "foreach": False}),
            (adamw, {"foreach": True, "amsgrad": True}),
            (adamw, {"weight_decay": 0.1, "fused": True}),
            (adamw, {"lr": torch.tensor(0.1), "fused": True}),
            (sgd, {"momentum": 0.9, "weight_decay": 0.1, "nesterov": True, "foreach": False}),
            (sgd, {"momentum": 0.9, "dampening": 0.2, "foreach": True}),
            (sgd, {"weight_decay": 0.1, "fused": True}),  # its list of momentum buffers is empty
            (sgd, {"lr": torch.tensor(0.1), "momentum": 0.9, "nesterov": True, "fused": True}),
            (rmsprop, {"momentum": 0.9, "foreach": True}),
        ):
            with self.subTest(kind=kind, options=options):
                self.check_optimizer(lambda params, k=kind, o=options: k(params, **{"lr": 0.1, **o}))

    def check_optimizer(self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        block_sizes = (1, 4, 0)
        params = [nn.Parameter(t) for block_size in block_sizes for t in self.sharded(block_size, seed=0).values()]
        names = [name for _ in block_sizes for name in SHAPES]
        shards = [nn.Parameter(p.to_local().detach().clone()) for p in params]
        wholes = [nn.Parameter(values(SHAPES[name], seed=0)) for name in names]
        optimizer, of_shards, of_wholes = make(params), make(shards), make(wholes)
        before = [p.placements for p in params]
        for step in range(STEPS):
            for name, param, local, plain in zip(names, params, shards, wholes, strict=True):
                grad = values(SHAPES[name], 1 + step)
                param.grad = shard(grad, param.device_mesh, param.placements)
                local.grad, plain.grad = param.grad.to_local().clone(), grad
            for opt in (optimizer, of_shards, of_wholes):
                opt.step()
        for param, placements, local, plain in zip(params, before, shards, wholes, strict=True):
            pairs = [(param, local, plain)]
            for key, state in optimizer.state[param].items():
                pairs.append((state, of_shards.state[local][key], of_wholes.state[plain][key]))
            for ours, of_shard, of_whole in pairs:
                if isinstance(ours, DTensor) and ours.ndim > 0:
                    self.assertEqual(ours.placements, placements)
                    self.assertTrue(is_bit_equal(ours.to_local(), of_shard))
                torch.testing.assert_close(whole(ours), of_whole.detach(), rtol=1e-6, atol=1e-6)

    def test_gradients_may_come_in_another_layout(self) -> None:
        param = nn.Parameter(self.sharded(4, seed=0)["weight"])
        plain = nn.Parameter(values(SHAPES["weight"], seed=0))
        param.grad = shard(values(SHAPES["weight"], 1), param.device_mesh, [Replicate()])
        plain.grad = values(SHAPES["weight"], 1)
        torch.optim.SGD([param], lr=0.1, foreach=False).step()
        torch.optim.SGD([plain], lr=0.1, foreach=False).step()
        self.assertTrue(is_bit_equal(param.full_tensor(), plain.detach()))
