"""``gtp_shard`` beside other data parallelism, with two more at once, and what may not go around it.

Each test is a cell of the support matrix: supported cells are compared with one process, as is what they have saved;
others are refused before anything has changed, with the remedy.
"""

import unittest
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from checkpoint_common import PLAIN, momentum, topology
from common import ALL, GlooTest, fake_mesh
from fsdp_common import (
    Model,
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
    wrap,
)
from quant_common import compile_layers
from torch._dynamo.utils import counters
from torch.distributed._composable import replicate as replicate_by_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dtensor_gtp import GTPModule, GTPShard, gtp_shard


class Plain(nn.Module):
    """Belongs to nobody, and is called from a module that belongs to nobody either."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Model(num_layers=1)
        self.scale = nn.Parameter(torch.ones(31))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.first(tokens) * self.scale


def clipped(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    """One optimizer and one ``clip_grad_norm_`` over all parameters."""
    optimizer = momentum(params)

    def clip(*_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(params, 0.05)

    optimizer.register_step_pre_hook(clip)
    return optimizer


class TestBeside(GlooTest):
    """All ranks see different data, for every parameter. What was saved loads onto the same and into one process."""

    def check(self, shard: Callable[[Any], Any], mesh: DeviceMesh, *how: Any) -> None:
        check_resumes([topology(shard, mesh), PLAIN], *(how or (clipped,)))

    def test_siblings(self) -> None:
        """Below a plain parent: ``fully_shard`` over one mesh and over two meshes of the same ranks, others."""
        mesh, other = self.gtp_mesh(), mesh_of((4,), ("fsdp",))
        wrappers: list[tuple[Any, Any]] = [
            (lambda module: fully_shard(module, mesh=mesh if isinstance(module, nn.Linear) else other), clipped),
            (lambda module: replicate(module, mesh=mesh), clipped),
            (DistributedDataParallel, momentum),
        ]
        for wrapper, make_optimizer in wrappers:

            def shard(model: Any, wrapper: Any = wrapper) -> Any:
                gtp_shard(model.layers[0], mesh, schedule=ALL)
                for owner, name in ((model.layers, "1"), (model, "embedding"), (model, "norm"), (model, "head")):
                    setattr(owner, name, wrapper(getattr(owner, name)))
                return model

            self.check(shard, mesh, make_optimizer)

    def test_around_and_ignored(self) -> None:
        """``fully_shard`` or ``replicate`` by DDP around ``gtp_shard``; that around ``fully_shard`` or DDP."""
        mesh = self.gtp_mesh()

        def around_gtp_shard(model: Any) -> Any:
            gtp_shard(model.layers[1], mesh, schedule=ALL)
            fully_shard(model.layers[0], mesh=mesh)
            return fully_shard(model, mesh=mesh, ignored_params=set(model.layers[1].parameters()))

        def around_fully_shard(model: Any) -> Any:
            fully_shard(model.layers[0], mesh=mesh, reshard_after_forward=True)
            return gtp_shard(model, mesh, schedule=ALL, ignored_params=set(model.layers[0].parameters()))

        def ddp_around_gtp_shard(model: Any) -> Any:
            gtp_shard(model.layers[0], mesh, schedule=ALL)
            return replicate_by_ddp(model, ignored_modules=[model.layers[0]])

        def around_ddp(model: Any) -> Any:
            model.head = DistributedDataParallel(model.head)
            return gtp_shard(model, mesh, schedule=ALL, ignored_params=set(model.head.parameters()))

        for shard in (around_gtp_shard, around_fully_shard):
            self.check(shard, mesh)
        for shard in (ddp_around_gtp_shard, around_ddp):
            self.check(shard, mesh, momentum)

    def test_replicate_around(self) -> None:
        """It cuts nothing, so any blocks of rows will do."""
        mesh = dp_gtp()

        def shard(model: Any) -> Any:
            blocked = {layer.up.weight: GTPShard(0, block_size=12) for layer in model.layers}
            gtp_shard(model, mesh["gtp"], schedule=ALL, shard_placement_fn=blocked.get)
            for layer in model.layers[:1]:
                replicate(layer, mesh=mesh["dp"])
            return replicate(model, mesh=mesh["dp"])

        self.check(shard, mesh)

    def test_ddp_around_reduces_what_gtp_shard_ignores(self) -> None:
        """Over the ranks of the gtp mesh: the default group, and one that is named; also on a module further out."""
        mesh = self.gtp_mesh()

        def shard(model: Any) -> Any:
            gtp_shard(model, mesh, schedule=ALL, ignored_params={model.head.weight, *model.layers[0].norm.parameters()})
            return DistributedDataParallel(model)

        def shard_first(model: Any) -> Any:
            shard(model.first)
            return DistributedDataParallel(model, process_group=mesh.get_group())

        self.check(shard, mesh, momentum)
        self.check(shard_first, mesh, momentum, partial(make, Plain))
        model = gtp_shard(make(), mesh, schedule=ALL, ignored_params=set())
        text = "finds nothing to reduce in a Model .*\\('gtp',\\).*: .*import GTPAccelerator as Accel"
        with self.assertRaisesRegex(RuntimeError, text):
            DistributedDataParallel(model)

    def test_what_accelerate_asks_for_before_it_wraps(self) -> None:
        model = gtp_shard(make(), self.gtp_mesh(), schedule=ALL)
        self.assertFalse(hasattr(model, "_is_accelerate_prepared"))  # for anybody else
        in_accelerate = {"__name__": "accelerate.accelerator", "model": model}
        with self.assertRaisesRegex(RuntimeError, "accelerate cannot prepare a Model .*import GTPTrainer as Trainer"):
            eval("getattr(model, '_is_accelerate_prepared', False)", in_accelerate)
        model._is_accelerate_prepared = False  # as GTPAccelerator does
        self.assertFalse(model._is_accelerate_prepared)


class TestRefused(unittest.TestCase):
    """Nothing has changed when it raises; all ranks run the same lines, so all raise."""

    def setUp(self) -> None:
        self.mesh = self.enterContext(fake_mesh(2, 2, 2, names=("dp", "gtp", "tp")))
        torch.manual_seed(0)

    def sharded(self, **options: Any) -> Any:
        return gtp_shard(Model(), self.mesh["gtp"], schedule=ALL, **options)

    def refused(self, message: str, model: Any, call: Callable[[Any], object], kind: Any = ValueError) -> None:
        before = {name: (id(param), type(param)) for name, param in model.named_parameters()}
        with self.assertRaisesRegex(kind, message):
            call(model)
        self.assertEqual({name: (id(param), type(param)) for name, param in model.named_parameters()}, before)

    def test_ddp_around(self) -> None:
        remedy = r"Pass a 2-D \(replicate, gtp\) mesh to gtp_shard instead, or call fully_shard over the outer"
        message = f"DistributedDataParallel over ranks .*'embedding.weight' of shape .*\\('gtp',\\).* {remedy}"
        dp = self.mesh["dp"]
        for options in ({}, {"init_sync": False}, {"process_group": dp.get_group()}, {"device_mesh": dp}):
            self.refused(message, self.sharded(), partial(DistributedDataParallel, **options))
        model = nn.Sequential(self.sharded(), nn.Linear(31, 2))
        self.refused(message.replace("embed", "0.embed"), model, DistributedDataParallel)
        mesh = self.mesh["dp", "gtp"]
        model = gtp_shard(Model(), mesh, schedule=ALL, ignored_params=set())
        over_some = partial(DistributedDataParallel, process_group=mesh.get_group("gtp"))
        self.refused("DistributedDataParallel over ranks .*, or process_group=mesh.get_group", model, over_some)

    def test_other_wrappers_around(self) -> None:
        message = r"FullyShardedDataParallel cannot wrap .*'embedding.weight'.*2-D \(replicate, gtp\) mesh"
        self.refused(message, self.sharded(), FullyShardedDataParallel)
        self.refused("DataParallel cannot wrap .*'embedding.weight'", self.sharded(), DataParallel)
        message = (
            r"replicate, or DistributedDataParallel with a device_mesh, cannot .*2-D \(replicate, gtp\) mesh .*"
            "to replicate as ignored_modules"
        )
        tokens = torch.zeros(1, 2, dtype=torch.int64)
        for options in ({}, {"process_group": self.mesh["dp"].get_group()}, {"device_mesh": self.mesh["dp"]}):
            self.refused(message, replicate_by_ddp(self.sharded(), **options), lambda model: model(tokens))

    def test_gtp_shard_after_another_wrapper(self) -> None:
        """On the wrapped module, on one that contains it, and on one that it contains."""
        gtp, dp = self.mesh["gtp"], self.mesh["dp"]
        by_fully_shard, by_replicate = partial(fully_shard, mesh=dp), partial(replicate, mesh=dp)
        for name, wrapper in (("FSDP", by_fully_shard), ("Replicate", by_replicate), ("DDP", replicate_by_ddp)):
            for target in (lambda m: m.layers[0], lambda m: m):
                model = Model()
                wrapper(model.layers[0])
                message = f"is a {name}Block. Call gtp_shard first, then fully_shard;.*in ignored_params"
                self.refused(message, model, lambda m, t=target: gtp_shard(t(m), gtp))
        for wrapper in (by_fully_shard, by_replicate):
            message = "fully_shard on an outer module manages parameter 'norm.weight'.*Call gtp_shard first"
            self.refused(message, wrapper(Model()), lambda m: gtp_shard(m.layers[0], gtp))
        model = Model()
        around = DistributedDataParallel(model, init_sync=False)
        message = "DistributedDataParallel on an outer module manages parameter 'embedding.weight'"
        self.refused(message, model, lambda m: gtp_shard(around.module, gtp))

    def test_fully_shard_over_ranks_of_gtp(self) -> None:
        message = "fully_shard expects a mesh of other axes than gtp_shard.*'embedding.weight'.*in ignored_params"
        world = init_device_mesh("cpu", (8,), mesh_dim_names=("all",))
        for mesh in (self.mesh["gtp"], self.mesh["dp", "gtp"], world, None):
            self.refused(message, self.sharded(), partial(fully_shard, mesh=mesh))
            if mesh is None or mesh.ndim == 1:
                self.refused(message, self.sharded(), partial(replicate, mesh=mesh))

    def test_fully_shard_cuts_blocks_apart(self) -> None:
        model = Model()
        blocked = {layer.up.weight: GTPShard(0, block_size=12) for layer in model.layers}
        gtp_shard(model, self.mesh["gtp"], schedule=ALL, shard_placement_fn=blocked.get)
        message = r"cannot shard dim 0 of parameter 'layers.0.up.weight'.*shard_placement_fn=lambda param: Shard\(1\)"
        self.refused(message, model, partial(fully_shard, mesh=self.mesh["dp"]), NotImplementedError)

    def test_fully_shard_cuts_blocks_apart_that_replicas_leave_whole(self) -> None:
        """``shard_optimizer`` puts the axis of the replicas behind that of gtp."""
        mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "replicate", "gtp"))
        blocked = GTPShard(0, block_size=8)
        for is_trained, rows in ((False, 24), (True, 24), (False, 32)):
            model = nn.Sequential(nn.Linear(16, rows, bias=False).requires_grad_(is_trained))
            options: dict[str, Any] = {"schedule": ALL, "shard_optimizer": True}
            gtp_shard(model, mesh["replicate", "gtp"], shard_placement_fn=lambda param: blocked, **options)
            if rows == 32:  # each rank of gtp has two blocks
                fully_shard(model, mesh=mesh["dp"])
            else:
                message = r"cannot shard dim 0 of parameter '0.weight'.*shard_placement_fn=lambda param: Shard\(1\)"
                self.refused(message, model, partial(fully_shard, mesh=mesh["dp"]), NotImplementedError)

    def test_unshard_of_gtp_shard_outside_of_the_forward(self) -> None:
        model = both(self.mesh)(Model())
        with self.assertRaisesRegex(RuntimeError, "outside of the forward or backward of the fully_shard module"):
            GTPModule.unshard(model)

    def test_limits_of_torch(self) -> None:
        """It reshards no DTensors to a smaller mesh, and knows two axes inside: (replicate, gtp, tp) are three."""
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "gtp"))
        model = gtp_shard(Model(), mesh["gtp"], schedule=ALL)
        wrap(model, mesh["dp"], reshard_after_forward=2)
        with self.assertRaisesRegex(NotImplementedError, "smaller mesh (is not|with TP is not) supported"):
            model(torch.zeros(1, 2, dtype=torch.int64))
        mesh = init_device_mesh("cpu", (1, 2, 2, 2), mesh_dim_names=("dp", "replicate", "gtp", "tp"))
        model = Model()
        tensor_parallel(model, mesh["tp"])
        gtp_shard(model, mesh["replicate", "gtp"], schedule=ALL)
        with self.assertRaisesRegex(NotImplementedError, "FSDP only supports 1D TP/EP or 2D EP"):
            fully_shard(model, mesh=mesh["dp"])


class TestCompositions(GlooTest):
    def test_compiled_blocks_inside_of_fully_shard(self) -> None:
        """One graph for all blocks, without a break."""
        torch._dynamo.reset()
        counters.clear()
        check(make(), lambda m: compile_layers(both(dp_gtp())(m)), dp_gtp(), num_microbatches=2, steps=1)
        self.assertEqual(counters["stats"]["unique_graphs"], 1)
        self.assertFalse(counters["graph_break"])

    def test_compiled_blocks_with_replicas(self) -> None:
        """By a wrapper, which adds to the names of parameters, as that of checkpoints does inside of it."""
        mesh = self.hsdp_mesh()

        def shard(model: Any, is_compiled: bool) -> nn.Module:
            if not is_compiled:
                wrap_layers(model, checkpoint_wrapper)
            gtp_shard(model, mesh, schedule=ALL)
            if is_compiled:
                wrap_layers(model, partial(torch.compile, backend="aot_eager", fullgraph=True))
            return model

        def wrap_layers(model: Any, wrapper: Callable[[nn.Module], nn.Module]) -> None:
            for index, layer in enumerate(model.layers):
                model.layers[index] = wrapper(layer)

        torch._dynamo.reset()
        counters.clear()
        for is_compiled in (True, False):
            check_resumes([topology(partial(shard, is_compiled=is_compiled), mesh), PLAIN])
        self.assertFalse(counters["graph_break"])

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
