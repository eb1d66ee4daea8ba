"""``gtp_shard`` with two more at once; and what each composition has saved, loaded onto itself and into one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn as nn
from checkpoint_common import PLAIN, check_reload, topology
from common import ALL, GlooTest
from fsdp_common import (
    Model,
    check,
    dp_gtp,
    make,
    mesh_of,
    next_token_loss,
    tensor_parallel,
    three_axes,
    token_batch,
    wrap,
)
from torch._dynamo.utils import counters
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from dtensor_gtp import gtp_shard


def compile_blocks(model: Any, is_wrapped: bool = False) -> Any:
    """In place, or by a wrapper, which adds to the names of parameters."""
    for index, layer in enumerate(model.layers):
        if is_wrapped:
            model.layers[index] = torch.compile(layer, backend="aot_eager", fullgraph=True)
        else:
            layer.compile(backend="aot_eager", fullgraph=True)
    return model


class TestThreeAtOnce(GlooTest):
    """``gtp_shard`` with two more: each pair has a file of its own."""

    def compiled(self, shard: Callable[[nn.Module], nn.Module], mesh: DeviceMesh) -> None:
        """One graph for all blocks, without a break."""
        torch._dynamo.reset()
        counters.clear()
        check(make(), lambda model: compile_blocks(shard(model)), mesh, num_microbatches=2)
        self.assertEqual(counters["stats"]["unique_graphs"], 1)
        self.assertFalse(counters["graph_break"])

    def test_compiled_blocks_inside_of_fully_shard(self) -> None:
        mesh = dp_gtp()
        self.compiled(lambda model: wrap(gtp_shard(model, mesh["gtp"], schedule=ALL), mesh["dp"]), mesh)

    def test_compiled_blocks_with_replicas(self) -> None:
        mesh = self.hsdp_mesh()
        self.compiled(lambda model: gtp_shard(model, mesh, schedule=ALL), mesh)

    def test_tensor_parallel_in_mixed_precision(self) -> None:
        """Reduced in fp32, the gradients are as close as bf16 compute allows; parameters stay fp32."""
        policy = {"mp_policy": MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)}
        gtp_tp, dp_gtp_tp = mesh_of((2, 2), ("gtp", "tp")), mesh_of((2, 1, 2), ("dp", "gtp", "tp"))

        def two_axes(model: nn.Module) -> nn.Module:
            tensor_parallel(model, gtp_tp["tp"])
            return gtp_shard(model, gtp_tp["gtp"], schedule=ALL, **policy)

        cells = (
            (two_axes, gtp_tp["gtp"]),
            (three_axes(dp_gtp_tp, gtp=policy), dp_gtp_tp["dp", "gtp"]),
            (three_axes(dp_gtp_tp, **policy), dp_gtp_tp["dp", "gtp"]),
        )
        for shard, data in cells:
            model = check(
                make().float(),
                shard,
                data,
                loss_fn=lambda model, tokens: next_token_loss(model, tokens).float(),
                tolerance={"rtol": 0.05, "atol": 4e-3},
            )
            self.assertEqual({param.dtype for param in model.parameters()}, {torch.float32})


def model_of(seed: int) -> Any:
    return make(Model, seed)


class TestReload(GlooTest):
    """Trained, saved, loaded and trained on: what other files do not do for their compositions."""

    def check(
        self, shard: Callable[[Any], Any], mesh: DeviceMesh, make_model: Callable[[int], nn.Module] = model_of
    ) -> None:
        check_reload(
            make_model,
            lambda step: token_batch(torch.Generator().manual_seed(step)),
            next_token_loss,
            [topology(shard, mesh), PLAIN],
        )

    def test_replicas_with_checkpoint_wrappers(self) -> None:
        mesh = self.hsdp_mesh()

        def shard(model: Any) -> nn.Module:
            for index, layer in enumerate(model.layers):
                model.layers[index] = checkpoint_wrapper(layer)
            return gtp_shard(model, mesh, schedule=ALL)

        self.check(shard, mesh)

    def test_compiled_blocks(self) -> None:
        mesh = self.hsdp_mesh()
        torch._dynamo.reset()
        self.check(lambda model: compile_blocks(gtp_shard(model, mesh, schedule=ALL), is_wrapped=True), mesh)

    def test_hsdp_outside(self) -> None:
        mesh = mesh_of((2, 1, 2), ("outer", "middle", "gtp"))

        def shard(model: Any) -> nn.Module:
            gtp_shard(model, mesh["gtp"], schedule=ALL)
            return wrap(model, mesh["outer", "middle"])

        self.check(shard, mesh)

    def test_siblings(self) -> None:
        """``fully_shard``, ``replicate`` or DDP on the others."""
        mesh = self.gtp_mesh()
        beside: list[Callable[[nn.Module], nn.Module]] = [
            lambda module: fully_shard(module, mesh=mesh),
            lambda module: replicate(module, mesh=mesh),
            DistributedDataParallel,
        ]
        for wrapper in beside:

            def shard(model: Any, wrapper: Callable[[nn.Module], nn.Module] = wrapper) -> nn.Module:
                gtp_shard(model.layers[0], mesh, schedule=ALL)
                for owner, name in ((model.layers, "1"), (model, "embedding"), (model, "norm"), (model, "head")):
                    setattr(owner, name, wrapper(getattr(owner, name)))
                return model  # type: ignore[no-any-return]

            self.check(shard, mesh)

    def test_around(self) -> None:
        """Of ``fully_shard``, inside of ``replicate``, inside of DDP that reduces what it ignores."""
        mesh, outer = self.gtp_mesh(), dp_gtp()

        def around(model: Any) -> nn.Module:
            fully_shard(model.layers[0], mesh=mesh, reshard_after_forward=True)
            return gtp_shard(model, mesh, schedule=ALL, ignored_params=set(model.layers[0].parameters()))

        def inside(model: Any) -> nn.Module:
            gtp_shard(model, outer["gtp"], schedule=ALL)
            return replicate(model, mesh=outer["dp"])

        def inside_of_ddp(model: Any) -> nn.Module:
            gtp_shard(model, mesh, schedule=ALL, ignored_params={model.head.weight, *model.norm.parameters()})
            return DistributedDataParallel(model)

        for shard, data in ((around, mesh), (inside, outer), (inside_of_ddp, mesh)):
            self.check(shard, data)

    def test_frozen_weights(self) -> None:
        """A base of which the norms and one layer train."""
        mesh = self.gtp_mesh()

        def frozen(seed: int) -> nn.Module:
            model = model_of(seed)
            model.requires_grad_(False)
            for module in (model.norm, model.layers[0].norm, model.layers[1].up):
                module.requires_grad_(True)
            return model

        self.check(lambda model: gtp_shard(model, mesh, schedule=ALL), mesh, frozen)
