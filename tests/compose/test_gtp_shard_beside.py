"""``gtp_shard`` beside other data parallelism, and what may not go around it.

Each test is a cell of the support matrix: supported cells are compared with one process, others are refused before
anything has changed, with the remedy.
"""

from __future__ import annotations

import copy
import unittest
from typing import Any

import torch
import torch.nn as nn
from common import ALL, GlooTest, assert_same_params, fake_world, full, rows_of_rank
from fsdp_common import Model, both, dp_gtp, make, mesh_of, next_token_loss, tensor_parallel, token_batch, wrap
from torch.distributed._composable import replicate as replicate_by_ddp
from torch.distributed._composable.replicate_with_fsdp import replicate
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DataParallel, DistributedDataParallel

from dtensor_gtp import GTPModule, GTPShard, gtp_shard


class Plain(nn.Module):
    """Belongs to nobody, and is called from a module that belongs to nobody either."""

    def __init__(self) -> None:
        super().__init__()
        self.first = Model(num_layers=1)
        self.scale = nn.Parameter(torch.ones(31))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.first(tokens) * self.scale
        return logits


def train_beside(reference: nn.Module, model: nn.Module, mesh: DeviceMesh, call: Any = None, clip: bool = True) -> None:
    """Steps with one optimizer and one ``clip_grad_norm_`` over all parameters, beside one process.

    Args:
        call: What runs the forward, if ``model`` is inside of it.
    """
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (reference, model)]
    for step in range(3):
        batch = token_batch(torch.Generator().manual_seed(step))
        next_token_loss(reference, batch).backward()
        next_token_loss(call or model, rows_of_rank(batch, mesh)).backward()
        assert_same_params(model, reference, "grad")
        if clip:
            norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.05) for m in (reference, model)]
            torch.testing.assert_close(full(norms[1]), norms[0])
            assert_same_params(model, reference, "grad")
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_params(model, reference, "param")


class TestBeside(GlooTest):
    """All ranks see different data, for every parameter."""

    def test_fully_shard_and_gtp_shard_on_siblings(self) -> None:
        """Separate roots below a plain parent, over one mesh and over two meshes of the same ranks."""
        mesh = self.gtp_mesh()
        for other in (mesh, mesh_of((4,), ("fsdp",))):
            reference = make()
            model = copy.deepcopy(reference)
            gtp_shard(model.layers[0], mesh, schedule=ALL)
            for module in (model.embedding, model.layers[1], model.norm, model.head):
                fully_shard(module, mesh=other)
            train_beside(reference, model, mesh)

    def test_fully_shard_around_ignores_gtp_shard(self) -> None:
        mesh = self.gtp_mesh()
        reference = make()
        model = copy.deepcopy(reference)
        gtp_shard(model.layers[1], mesh, schedule=ALL)
        fully_shard(model.layers[0], mesh=mesh)
        fully_shard(model, mesh=mesh, ignored_params=set(model.layers[1].parameters()))
        train_beside(reference, model, mesh)

    def test_gtp_shard_around_ignores_fully_shard(self) -> None:
        mesh = self.gtp_mesh()
        reference = make()
        model = copy.deepcopy(reference)
        fully_shard(model.layers[0], mesh=mesh, reshard_after_forward=True)
        gtp_shard(model, mesh, schedule=ALL, ignored_params=set(model.layers[0].parameters()))
        train_beside(reference, model, mesh)

    def test_replicate_around(self) -> None:
        mesh = dp_gtp()
        reference = make()
        model = gtp_shard(copy.deepcopy(reference), mesh["gtp"], schedule=ALL)
        for layer in model.layers:
            replicate(layer, mesh=mesh["dp"])
        replicate(model, mesh=mesh["dp"])
        train_beside(reference, model, mesh)

    def test_replicate_around_blocks_of_rows(self) -> None:
        """``replicate`` cuts nothing, so any block size will do."""
        mesh = dp_gtp()
        reference = make()
        model = copy.deepcopy(reference)
        blocked = {layer.up.weight: GTPShard(0, block_size=12) for layer in model.layers}
        gtp_shard(model, mesh["gtp"], schedule=ALL, shard_placement_fn=blocked.get)
        replicate(model, mesh=mesh["dp"])
        train_beside(reference, model, mesh)

    def test_replicate_beside(self) -> None:
        mesh = self.gtp_mesh()
        reference = make()
        model = copy.deepcopy(reference)
        gtp_shard(model.layers[0], mesh, schedule=ALL)
        for module in (model.embedding, model.layers[1], model.norm, model.head):
            replicate(module, mesh=mesh)
        train_beside(reference, model, mesh)

    def test_replicate_by_ddp_beside(self) -> None:
        mesh = self.gtp_mesh()
        reference = make()
        model = copy.deepcopy(reference)
        gtp_shard(model.layers[0], mesh, schedule=ALL)
        replicate_by_ddp(model, ignored_modules=[model.layers[0]])
        train_beside(reference, model, mesh, clip=False)

    def test_ddp_around_reduces_what_gtp_shard_ignores(self) -> None:
        """Over the ranks of the gtp mesh: the default group, and one that is named; also on a module further out."""
        mesh = self.gtp_mesh()
        for options in ({}, {"process_group": mesh.get_group()}):
            reference = make(Plain)
            model = copy.deepcopy(reference)
            first = model.first
            ignored = {first.head.weight, *first.layers[0].norm.parameters()}
            gtp_shard(first, mesh, schedule=ALL, ignored_params=ignored)
            train_beside(reference, model, mesh, DistributedDataParallel(model, **options), clip=False)
        reference = make()
        model = gtp_shard(copy.deepcopy(reference), mesh, schedule=ALL, ignored_params=set())
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

    def test_ddp_beside(self) -> None:
        """Siblings, and a DDP module below one that gtp_shard was called on."""
        mesh = self.gtp_mesh()
        reference = make()
        model = copy.deepcopy(reference)
        gtp_shard(model.layers[0], mesh, schedule=ALL)
        for owner, name in ((model.layers, "1"), (model, "embedding"), (model, "norm"), (model, "head")):
            setattr(owner, name, DistributedDataParallel(getattr(owner, name)))
        train_beside(reference, Renamed(model), mesh, model, clip=False)
        reference = make()
        model = copy.deepcopy(reference)
        model.head = DistributedDataParallel(model.head)
        gtp_shard(model, mesh, schedule=ALL, ignored_params=set(model.head.parameters()))
        train_beside(reference, Renamed(model), mesh, model, clip=False)


class Renamed:
    """The parameters of a model with DDP modules in it, under the names of the model without."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model

    def named_parameters(self) -> Any:
        for name, param in self._model.named_parameters():
            yield name.replace("module.", ""), param

    def parameters(self) -> Any:
        return self._model.parameters()


class TestRefused(unittest.TestCase):
    """Nothing has changed when it raises; all ranks run the same lines, so all raise."""

    def setUp(self) -> None:
        world = fake_world(world_size=8)
        world.__enter__()
        self.addCleanup(world.__exit__, None, None, None)
        self.mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("dp", "gtp", "tp"))
        torch.manual_seed(0)

    def sharded(self, **options: Any) -> Any:
        return gtp_shard(Model(), self.mesh["gtp"], schedule=ALL, **options)

    def refused(self, message: str, call: Any, model: nn.Module, kind: Any = ValueError) -> None:
        before = {name: (param, type(param)) for name, param in model.named_parameters()}
        with self.assertRaisesRegex(kind, message):
            call()
        after = {name: (param, type(param)) for name, param in model.named_parameters()}
        self.assertEqual(before.keys(), after.keys())
        for name in before:
            self.assertIs(after[name][0], before[name][0])

    def test_ddp_around(self) -> None:
        remedy = r"Pass a 2-D \(replicate, gtp\) mesh to gtp_shard instead, or call fully_shard over the outer"
        message = f"DistributedDataParallel over ranks .*'embedding.weight' of shape .*\\('gtp',\\).* {remedy}"
        dp = self.mesh["dp"]
        for options in ({}, {"init_sync": False}, {"process_group": dp.get_group()}, {"device_mesh": dp}):
            model = self.sharded()
            self.refused(message, lambda m=model, o=options: DistributedDataParallel(m, **o), model)
        model = nn.Sequential(self.sharded(), nn.Linear(31, 2))
        self.refused(message.replace("embed", "0.embed"), lambda: DistributedDataParallel(model), model)

    def test_ddp_over_some_ranks_of_the_gtp_mesh(self) -> None:
        mesh = self.mesh["dp", "gtp"]
        model = gtp_shard(Model(), mesh, schedule=ALL, ignored_params=set())
        message = "DistributedDataParallel over ranks .*, or process_group=mesh.get_group"
        self.refused(message, lambda: DistributedDataParallel(model, process_group=mesh.get_group("gtp")), model)

    def test_fully_sharded_data_parallel_around(self) -> None:
        model = self.sharded()
        message = r"FullyShardedDataParallel cannot wrap .*'embedding.weight'.*2-D \(replicate, gtp\) mesh"
        self.refused(message, lambda: FullyShardedDataParallel(model), model)

    def test_data_parallel_around(self) -> None:
        model = self.sharded()
        self.refused("DataParallel cannot wrap .*'embedding.weight'", lambda: DataParallel(model), model)

    def test_replicate_by_ddp_around(self) -> None:
        for options in ({}, {"process_group": self.mesh["dp"].get_group()}, {"device_mesh": self.mesh["dp"]}):
            model = replicate_by_ddp(self.sharded(), **options)
            message = (
                r"replicate, or DistributedDataParallel with a device_mesh, cannot .*2-D \(replicate, gtp\) mesh .*"
                "to replicate as ignored_modules"
            )
            self.refused(message, lambda m=model: m(torch.zeros(1, 2, dtype=torch.int64)), model)

    def test_gtp_shard_after_another_wrapper(self) -> None:
        """On the wrapped module, on one that contains it, and on one that it contains."""
        gtp, dp = self.mesh["gtp"], self.mesh["dp"]
        wrappers: list[tuple[str, Any]] = [
            ("FSDP", lambda module: fully_shard(module, mesh=dp)),
            ("Replicate", lambda module: replicate(module, mesh=dp)),
            ("DDP", replicate_by_ddp),
        ]
        for name, wrapper in wrappers:
            for target in (lambda m: m.layers[0], lambda m: m):
                model = Model()
                wrapper(model.layers[0])
                message = f"is a {name}Block. Call gtp_shard first, then fully_shard;.*in ignored_params"
                self.refused(message, lambda m=model, t=target: gtp_shard(t(m), gtp), model)
        for wrapper in (lambda module: fully_shard(module, mesh=dp), lambda module: replicate(module, mesh=dp)):
            model = Model()
            wrapper(model)
            message = "fully_shard on an outer module manages parameter 'norm.weight'.*Call gtp_shard first"
            self.refused(message, lambda m=model: gtp_shard(m.layers[0], gtp), model)
        model = Model()
        around = DistributedDataParallel(model, init_sync=False)
        message = "DistributedDataParallel on an outer module manages parameter 'embedding.weight'"
        self.refused(message, lambda: gtp_shard(around.module, gtp), model)

    def test_fully_shard_over_ranks_of_gtp(self) -> None:
        message = "fully_shard expects a mesh of other axes than gtp_shard.*'embedding.weight'.*in ignored_params"
        world = init_device_mesh("cpu", (8,), mesh_dim_names=("all",))
        for mesh in (self.mesh["gtp"], self.mesh["dp", "gtp"], world, None):
            model = self.sharded()
            self.refused(message, lambda m=model, mesh=mesh: fully_shard(m, mesh=mesh), model)
            model = self.sharded()
            if mesh is None or mesh.ndim == 1:
                self.refused(message, lambda m=model, mesh=mesh: replicate(m, mesh=mesh), model)

    def test_fully_shard_cuts_blocks_apart(self) -> None:
        model = Model()
        blocked = {layer.up.weight: GTPShard(0, block_size=12) for layer in model.layers}
        gtp_shard(model, self.mesh["gtp"], schedule=ALL, shard_placement_fn=blocked.get)
        message = r"cannot shard dim 0 of parameter 'layers.0.up.weight'.*shard_placement_fn=lambda param: Shard\(1\)"
        self.refused(message, lambda: fully_shard(model, mesh=self.mesh["dp"]), model, NotImplementedError)

    def test_unshard_of_gtp_shard_outside_of_the_forward(self) -> None:
        model = both(self.mesh)(Model())
        with self.assertRaisesRegex(RuntimeError, "outside of the forward or backward of the fully_shard module"):
            GTPModule.unshard(model)

    def test_reshard_to_a_smaller_mesh(self) -> None:
        """Torch's own limit for parameters that are DTensors."""
        mesh = init_device_mesh("cpu", (4, 2), mesh_dim_names=("dp", "gtp"))
        model = gtp_shard(Model(), mesh["gtp"], schedule=ALL)
        wrap(model, mesh["dp"], reshard_after_forward=2)
        with self.assertRaisesRegex(NotImplementedError, "smaller mesh (is not|with TP is not) supported"):
            model(torch.zeros(1, 2, dtype=torch.int64))

    def test_more_axes_than_fully_shard_knows(self) -> None:
        """Torch's own limit: two axes inside. (replicate, gtp, tp) are three."""
        mesh = init_device_mesh("cpu", (1, 2, 2, 2), mesh_dim_names=("dp", "replicate", "gtp", "tp"))
        model = Model()
        tensor_parallel(model, mesh["tp"])
        gtp_shard(model, mesh["replicate", "gtp"], schedule=ALL)
        with self.assertRaisesRegex(NotImplementedError, "FSDP only supports 1D TP/EP or 2D EP"):
            fully_shard(model, mesh=mesh["dp"])
