"""``gtp_shard`` with two more at once; and what each composition has saved, loaded onto itself and into one process."""

from functools import partial
from typing import Any

import torch
import torch.nn as nn
from checkpoint_common import PLAIN, topology
from common import ALL, GlooTest
from fsdp_common import (
    both,
    check,
    check_resumes,
    dp_gtp,
    make,
    make_seeded,
    mesh_of,
    next_token_loss,
    tensor_parallel,
    three_axes,
)
from quant_common import compile_layers
from torch._dynamo.utils import counters
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy

from dtensor_gtp import gtp_shard


class TestCompositions(GlooTest):
    def test_compiled_blocks_inside_of_fully_shard(self) -> None:
        """One graph for all blocks, without a break."""
        torch._dynamo.reset()
        counters.clear()
        check(make(), lambda m: compile_layers(both(dp_gtp())(m)), dp_gtp(), num_microbatches=2, steps=1)
        self.assertEqual(counters["stats"]["unique_graphs"], 1)
        self.assertFalse(counters["graph_break"])

    def test_compiled_blocks_with_replicas(self) -> None:
        """By a wrapper, which adds to the names of parameters."""
        mesh = self.hsdp_mesh()

        def shard(model: Any) -> nn.Module:
            gtp_shard(model, mesh, schedule=ALL)
            for index, layer in enumerate(model.layers):
                model.layers[index] = torch.compile(layer, backend="aot_eager", fullgraph=True)
            return model

        torch._dynamo.reset()
        counters.clear()
        check_resumes([topology(shard, mesh), PLAIN])
        self.assertFalse(counters["graph_break"])

    def test_replicas_with_checkpoint_wrappers(self) -> None:
        mesh = self.hsdp_mesh()

        def shard(model: Any) -> nn.Module:
            for index, layer in enumerate(model.layers):
                model.layers[index] = checkpoint_wrapper(layer)
            return gtp_shard(model, mesh, schedule=ALL)

        check_resumes([topology(shard, mesh), PLAIN])

    def test_hsdp_outside(self) -> None:
        mesh = mesh_of((2, 1, 2), ("outer", "middle", "gtp"))
        check_resumes([topology(both(mesh, outer=("outer", "middle")), mesh), PLAIN])

    def test_frozen_weights(self) -> None:
        """A base of which the norms and one layer train."""
        mesh = self.gtp_mesh()

        def frozen(seed: int) -> nn.Module:
            model = make_seeded(seed)
            model.requires_grad_(False)
            for module in (model.norm, model.layers[0].norm, model.layers[1].up):
                module.requires_grad_(True)
            return model

        shard = partial(gtp_shard, mesh=mesh, schedule=ALL)
        check_resumes([topology(shard, mesh), PLAIN], make_model=frozen)

    def test_tensor_parallel_in_mixed_precision(self) -> None:
        """Reduced in fp32, the gradients are as close as bf16 compute allows; parameters stay fp32."""
        policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
        gtp_tp, dp_gtp_tp = mesh_of((2, 2), ("gtp", "tp")), mesh_of((2, 1, 2), ("dp", "gtp", "tp"))

        def two_axes(model: nn.Module) -> nn.Module:
            tensor_parallel(model, gtp_tp["tp"])
            return gtp_shard(model, gtp_tp["gtp"], schedule=ALL, **policy)

        def loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
            return next_token_loss(model, tokens).float()

        inside, outside = three_axes(dp_gtp_tp, gtp=policy), three_axes(dp_gtp_tp, **policy)
        two = dp_gtp_tp["dp", "gtp"]
        for shard, data in ((two_axes, gtp_tp["gtp"]), (inside, two), (outside, two)):
            model = check(make().float(), shard, data, loss_fn=loss, tolerance={"rtol": 0.05, "atol": 4e-3})
            self.assertEqual({param.dtype for param in model.parameters()}, {torch.float32})
