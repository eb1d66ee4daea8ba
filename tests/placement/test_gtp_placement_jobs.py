"""Optimizers, clipping and checkpoints of DTensors with GTPShard placements, on four gloo ranks started once."""

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from common import GlooTest, shared_directory
from placement_common import WORLD_SIZE, coded, shard, whole
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode

from dtensor_gtp.placement import GTPShard

STEPS = 3
SHAPES = {"weight": (37, 3), "tp_weight": (25, 2), "three_dims": (3, 21, 2), "vector": (11,), "tiny": (2, 2)}


Specs = dict[str, tuple[DeviceMesh, tuple[Placement, ...]]]


class Layout(NamedTuple):
    """How the tensors of SHAPES are sharded over ``num_ranks`` ranks; block size 0 means whole on every rank."""

    num_ranks: int
    block_size: int

    def specs(self) -> Specs:
        """Meshes and placements; every rank of the job must call it, because it makes process groups."""
        flat = DeviceMesh("cpu", list(range(self.num_ranks)), mesh_dim_names=("gtp",))
        tp = 2 if self.num_ranks == 4 else 1
        tp_gtp = DeviceMesh(
            "cpu", torch.arange(self.num_ranks).view(tp, self.num_ranks // tp), mesh_dim_names=("tp", "gtp")
        )

        def gtp(dim: int) -> Placement:
            return GTPShard(dim, block_size=self.block_size) if self.block_size else Replicate()

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

    def sharded(self, specs: Specs, seed: int) -> dict[str, DTensor]:
        return {name: shard(values(SHAPES[name], seed), mesh, placements) for name, (mesh, placements) in specs.items()}

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

    def check_optimizer(self, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> None:
        """Steps on DTensors, several layouts in one optimizer, against steps on plain tensors.

        Bit-equal to an optimizer of plain shards; only close to one of whole tensors, because vectorized CPU kernels
        round the last few elements of a tensor in another way.
        """
        layouts = [Layout(4, 1), Layout(4, 4), Layout(4, 0)]
        params = [nn.Parameter(t) for layout in layouts for t in self.sharded(layout.specs(), seed=0).values()]
        names = [name for _ in layouts for name in SHAPES]
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

    def test_adamw_for_loop(self) -> None:
        self.check_optimizer(lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1, foreach=False))

    def test_adamw_foreach(self) -> None:
        self.check_optimizer(lambda params: torch.optim.AdamW(params, lr=0.1, foreach=True, amsgrad=True))

    def test_adamw_fused(self) -> None:
        self.check_optimizer(lambda params: torch.optim.AdamW(params, lr=0.1, weight_decay=0.1, fused=True))

    def test_adamw_fused_with_tensor_lr(self) -> None:
        self.check_optimizer(lambda params: torch.optim.AdamW(params, lr=torch.tensor(0.1), fused=True))

    def test_sgd_for_loop(self) -> None:
        self.check_optimizer(
            lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, weight_decay=0.1, nesterov=True, foreach=False)
        )

    def test_sgd_foreach(self) -> None:
        self.check_optimizer(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, dampening=0.2, foreach=True))

    def test_sgd_fused(self) -> None:
        # the list of momentum buffers is empty in the first case, and lr is a tensor in the last
        self.check_optimizer(lambda params: torch.optim.SGD(params, lr=0.1, weight_decay=0.1, fused=True))
        self.check_optimizer(lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9, fused=True))
        self.check_optimizer(
            lambda params: torch.optim.SGD(params, lr=torch.tensor(0.1), momentum=0.9, nesterov=True, fused=True)
        )

    def test_rmsprop_foreach(self) -> None:
        self.check_optimizer(lambda params: torch.optim.RMSprop(params, lr=0.1, momentum=0.9, foreach=True))

    def test_gradients_may_come_in_another_layout(self) -> None:
        param = nn.Parameter(self.sharded(Layout(4, 4).specs(), seed=0)["weight"])
        plain = nn.Parameter(values(SHAPES["weight"], seed=0))
        param.grad = shard(values(SHAPES["weight"], 1), param.device_mesh, [Replicate()])
        plain.grad = values(SHAPES["weight"], 1)
        torch.optim.SGD([param], lr=0.1, foreach=False).step()
        torch.optim.SGD([plain], lr=0.1, foreach=False).step()
        self.assertTrue(is_bit_equal(param.full_tensor(), plain.detach()))

    # --- gradient clipping --------------------------------------------------------------------------------------------

    def test_clip_grad_norm_equals_fp64_reference(self) -> None:
        for norm_type in (2.0, 1.0, math.inf):
            for foreach in (True, False):
                for block_size in (1, 4):
                    if norm_type == math.inf and block_size == 1:
                        continue  # torch's own layout: the inf norm of an empty shard raises in torch
                    with self.subTest(norm_type=norm_type, foreach=foreach, block_size=block_size):
                        self.check_clip_grad_norm(norm_type, foreach, block_size)

    def check_clip_grad_norm(self, norm_type: float, foreach: bool, block_size: int) -> None:
        # one mesh, as stock clip_grad_norm_ needs; sharded, block-sharded and whole parameters
        mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("tp", "gtp"))
        kinds: list[tuple[Placement, ...]] = [
            (Replicate(), GTPShard(0, block_size=block_size)),
            (Shard(0), GTPShard(0, block_size=block_size)),
            (Replicate(), Replicate()),
            (Shard(1), GTPShard(0, block_size=block_size)),
        ]
        params = []
        for seed, kind in enumerate(kinds):
            params.append(nn.Parameter(shard(torch.zeros(37, 5), mesh, kind)))
            params[-1].grad = shard(values((37, 5), seed), mesh, kind)
        every = torch.cat([values((37, 5), seed).double().flatten() for seed in range(len(kinds))])
        norm = torch.linalg.vector_norm(every, norm_type)
        total = whole(nn.utils.clip_grad_norm_(params, 0.5, norm_type, foreach=foreach))
        torch.testing.assert_close(total.double(), norm, rtol=1e-6, atol=0)
        for seed, (kind, param) in enumerate(zip(kinds, params, strict=True)):
            assert isinstance(param.grad, DTensor)
            self.assertEqual(param.grad.placements, kind)
            expected = values((37, 5), seed).double() * (0.5 / (norm + 1e-6)).clamp(max=1.0)
            torch.testing.assert_close(param.grad.full_tensor().double(), expected, rtol=2e-6, atol=1e-9)

    # --- checkpoints --------------------------------------------------------------------------------------------------

    LAYOUTS = (Layout(4, 1), Layout(4, 4), Layout(4, 16), Layout(4, 0), Layout(2, 1), Layout(2, 4))

    def test_checkpoints_reload_on_every_other_layout(self) -> None:
        groups = {4: dist.group.WORLD, 2: dist.new_group([0, 1])}
        all_specs = {layout: layout.specs() for layout in self.LAYOUTS}
        with shared_directory() as directory:
            for source in self.LAYOUTS:
                path = directory / str(source)
                if self.rank < source.num_ranks:
                    state = self.sharded(all_specs[source], seed=5)
                    dcp.save(dict(state), checkpoint_id=path, process_group=groups[source.num_ranks])
                dist.barrier()
                for target, specs in all_specs.items():
                    if self.rank < target.num_ranks:
                        self.check_load(path, specs, groups[target.num_ranks], f"{source} -> {target}")
                plain = {name: torch.zeros(shape) for name, shape in SHAPES.items()}
                dcp.load(dict(plain), checkpoint_id=path, no_dist=True)
                for name, tensor in plain.items():
                    self.assertTrue(is_bit_equal(tensor, values(SHAPES[name], 5)), f"{source} -> plain: {name}")

    def check_load(self, path: Path, specs: Specs, group: dist.ProcessGroup | None, message: str) -> None:
        loaded = self.sharded(specs, seed=6)
        pointers = {name: tensor.to_local().data_ptr() for name, tensor in loaded.items()}
        dcp.load(dict(loaded), checkpoint_id=path, process_group=group)
        for name, tensor in loaded.items():
            self.assertEqual(tensor.placements, specs[name][1])
            self.assertEqual(tensor.to_local().data_ptr(), pointers[name])
            self.assertTrue(is_bit_equal(tensor.full_tensor(), values(SHAPES[name], 5)), f"{message}: {name}")

    def test_plain_checkpoint_loads_into_blocks(self) -> None:
        specs = Layout(4, 4).specs()
        with shared_directory() as directory:
            if self.rank == 0:
                state = {name: values(shape, 5) for name, shape in SHAPES.items()}
                dcp.save(state, checkpoint_id=directory, no_dist=True)
            dist.barrier()
            self.check_load(directory, specs, None, "plain -> blocks")

    def trained(self, specs: Specs, steps: int) -> tuple[nn.Module, torch.optim.Optimizer]:
        module = nn.Module()
        for name, tensor in self.sharded(specs, seed=0).items():
            module.register_parameter(name, nn.Parameter(tensor))
        optimizer = torch.optim.AdamW(module.parameters(), lr=0.1, fused=True)
        for step in range(steps):
            for name, param in module.named_parameters():
                assert isinstance(param, DTensor)
                param.grad = shard(values(SHAPES[name], 1 + step), param.device_mesh, param.placements)
            optimizer.step()
        return module, optimizer

    def test_optimizer_state_reloads_on_another_layout(self) -> None:
        module, optimizer = self.trained(Layout(4, 4).specs(), steps=2)
        with shared_directory() as directory:
            model_state, optim_state = get_state_dict(module, optimizer)
            dcp.save({"model": model_state, "optim": optim_state}, checkpoint_id=directory)
            for layout in (Layout(4, 4), Layout(4, 1), Layout(4, 16)):
                again, again_optimizer = self.trained(layout.specs(), steps=1)
                model_state, optim_state = get_state_dict(again, again_optimizer)
                dcp.load({"model": model_state, "optim": optim_state}, checkpoint_id=directory)
                set_state_dict(again, again_optimizer, model_state_dict=model_state, optim_state_dict=optim_state)
                self.check_same_training_state(module, optimizer, again, again_optimizer, str(layout))

    def test_full_state_dicts_both_ways(self) -> None:
        module, optimizer = self.trained(Layout(4, 4).specs(), steps=2)
        for from_rank0 in (False, True):
            # with cpu_offload only rank 0 gets the full state, which is what broadcast_from_rank0 starts from
            full = StateDictOptions(full_state_dict=True, cpu_offload=from_rank0)
            states = get_state_dict(module, optimizer, options=full)
            again, again_optimizer = self.trained(Layout(4, 16).specs(), steps=1)
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=from_rank0)
            # not set_state_dict: where the states of the other ranks are empty, it skips the model on those
            set_model_state_dict(again, states[0], options=options)
            set_optimizer_state_dict(again, again_optimizer, states[1], options=options)
            self.check_same_training_state(module, optimizer, again, again_optimizer, f"{from_rank0=}")
            again_optimizer.step()  # the loaded states have the layout that a fused step asks for

    def check_same_training_state(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        again: nn.Module,
        again_optimizer: torch.optim.Optimizer,
        message: str,
    ) -> None:
        for name, param in module.named_parameters():
            other = again.get_parameter(name)
            assert isinstance(other, DTensor)
            pairs = {"parameter": (param.detach(), other.detach())}
            for key, state in optimizer.state[param].items():
                pairs[key] = (state, again_optimizer.state[other][key])
            for key, (saved, loaded) in pairs.items():
                if isinstance(saved, DTensor):
                    self.assertEqual(loaded.placements, other.placements)
                self.assertTrue(is_bit_equal(whole(loaded), whole(saved)), f"{message} {name} {key}")

    def test_checkpoint_names_the_true_chunks_once(self) -> None:
        mesh = DeviceMesh("cpu", torch.arange(4).view(2, 2), mesh_dim_names=("replicate", "gtp"))
        tensor = shard(coded((10, 3)), mesh, [Replicate(), GTPShard(0, block_size=8)])
        spread = shard(coded((40, 3)), DeviceMesh("cpu", range(4)), [GTPShard(0, block_size=16)])
        with shared_directory() as directory:
            dcp.save({"tensor": tensor, "spread": spread}, checkpoint_id=directory)
            metadata = dcp.FileSystemReader(directory).read_metadata()
        chunks = {}
        for name in ("tensor", "spread"):
            storage = metadata.state_dict_metadata[name]
            assert isinstance(storage, TensorStorageMetadata)
            chunks[name] = sorted((tuple(c.offsets), tuple(c.sizes)) for c in storage.chunks if c.sizes[0] > 0)
        self.assertEqual(chunks["tensor"], [((0, 0), (8, 3)), ((8, 0), (2, 3))])
        self.assertEqual(chunks["spread"], [((0, 0), (16, 3)), ((16, 0), (16, 3)), ((32, 0), (8, 3))])
        written = sorted((index.fqn, tuple(index.offset or ())) for index in metadata.storage_data)
        self.assertEqual(len(written), len(set(written)))
        self.assertEqual([offset for name, offset in written if name == "tensor"], [(0, 0), (8, 0)])
