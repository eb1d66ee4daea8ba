"""``gtp_shard`` together with ``fully_shard`` outside of it and with ``torch.compile``."""

from __future__ import annotations

import torch
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, GlooTest, check_training
from torch._dynamo.utils import counters
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.common_utils import run_tests

from dtensor_gtp import gtp_shard


class Block(nn.Module):
    """Fused linears, a norm, and a raw weight."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.up = nn.Linear(dim, 2 * dim)
        self.down = nn.Linear(2 * dim, dim)
        self.mix = nn.Parameter(torch.randn(dim, dim) * 0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = x + self.down(torch.tanh(self.up(self.norm(x)))) @ self.mix
        return y


class Model(nn.Module):
    def __init__(self, dim: int = 16, num_layers: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(33, dim)
        self.layers = nn.ModuleList([Block(dim) for _ in range(num_layers)])
        self.head = nn.Linear(dim, 33, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        logits: torch.Tensor = self.head(x)
        return logits


def token_batch(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 33, (8, 6), generator=generator)


def next_token_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """Unlike AdamW it does not blow up the last bit of a gradient near zero."""
    return torch.optim.SGD(params, lr=0.5)


class TestThreeAtOnce(GlooTest):
    """``gtp_shard`` with two more: each pair has a file of its own."""

    def test_compiled_blocks_inside_of_fully_shard(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "gtp"))
        torch._dynamo.reset()
        counters.clear()

        def shard(model: nn.Module) -> nn.Module:
            gtp_shard(model, mesh["gtp"], schedule=ALL)
            for layer in model.layers:  # type: ignore[union-attr]
                layer.compile(backend="aot_eager", fullgraph=True)
                fully_shard(layer, mesh=mesh["dp"])
            return fully_shard(model, mesh=mesh["dp"])

        torch.manual_seed(0)
        check_training(Model(), shard, mesh, token_batch, next_token_loss, make_optimizer=sgd, num_microbatches=2)
        self.assertFalse(counters["graph_break"])

    def test_tensor_parallel_in_mixed_precision(self) -> None:
        """Reduced in fp32, the gradients are as close as bf16 compute allows; parameters stay fp32."""
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("gtp", "tp"))
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        plan = {"layers.*.up": ColwiseParallel(), "layers.*.down": RowwiseParallel()}

        def shard(model: nn.Module) -> nn.Module:
            parallelize_module(model, mesh["tp"], plan)
            return gtp_shard(model, mesh["gtp"], schedule=ALL, mp_policy=policy)

        torch.manual_seed(0)
        model = check_training(
            Model(),
            shard,
            mesh["gtp"],
            token_batch,
            lambda model, tokens: next_token_loss(model, tokens).float(),
            make_optimizer=sgd,
            tolerance={"rtol": 0.05, "atol": 2e-3},
        )
        self.assertEqual({param.dtype for param in model.parameters()}, {torch.float32})

    def test_use_outside_of_its_module_is_refused(self) -> None:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "gtp"))
        torch.manual_seed(0)
        model = gtp_shard(Model(), mesh["gtp"], schedule=ALL)
        fully_shard(model, mesh=mesh["dp"], reshard_after_forward=True)
        model(token_batch(torch.Generator().manual_seed(0)))
        with self.assertRaisesRegex(RuntimeError, "'head.weight'.*is used outside of the forward or backward of the"):
            model.head(torch.zeros(1, 16))


class TestCompile(GlooTest):
    world_size = 2

    def _check(self, whole: bool) -> None:
        mesh = self.gtp_mesh()
        torch.manual_seed(0)
        torch._dynamo.reset()
        counters.clear()

        def shard(model: nn.Module) -> nn.Module:
            gtp_shard(model, mesh, schedule=ALL)
            for module in [model] if whole else model.layers:  # type: ignore[union-attr]
                module.compile(backend="aot_eager", fullgraph=True)
            return model

        check_training(Model(), shard, mesh, token_batch, next_token_loss, make_optimizer=sgd, num_microbatches=2)
        # one graph, also for all the layers of one shape
        self.assertEqual(counters["stats"]["unique_graphs"], 1)
        self.assertFalse(counters["graph_break"])

    def test_blocks_share_one_graph(self) -> None:
        self._check(whole=False)

    def test_whole_model(self) -> None:
        self._check(whole=True)


if __name__ == "__main__":
    run_tests()
