"""A checkpoint of any topology loads on any other, model and optimizer bit for bit.

Every element of every tensor is a code of its own: which tensor it belongs to and where. A row that ends up elsewhere
(swapped halves of a fused weight, a shard read at the wrong offset, padding taken for data) is seen by its value. Jobs
of one to four ranks are sub-meshes of the four workers here; ``test_train_llama`` restarts with other numbers of
processes.
"""

import math
from collections.abc import Callable
from pathlib import Path
from typing import Literal, NamedTuple

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
from common import ALL, GlooTest, shared_directory
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

from dtensor_gtp import GTPShard, gtp_shard


class Topology(NamedTuple):
    """A way to run the model: sharded by whom, on which ranks in mesh order, in which blocks."""

    name: str
    kind: Literal["plain", "gtp", "hsdp", "tp", "fsdp"]
    ranks: tuple[int, ...]
    block_size: int = 1


TOPOLOGIES = (
    Topology("plain", "plain", (0,)),
    Topology("gtp3", "gtp", (0, 1, 2)),
    Topology("gtp4", "gtp", (0, 1, 2, 3)),
    Topology("gtp4 permuted", "gtp", (2, 0, 3, 1)),
    Topology("gtp2 block 4", "gtp", (0, 1), block_size=4),
    Topology("gtp4 block 3", "gtp", (0, 1, 2, 3), block_size=3),
    Topology("hsdp 2x2 block 2", "hsdp", (0, 1, 2, 3), block_size=2),
    Topology("gtp2 x tp2 block 2", "tp", (0, 1, 2, 3), block_size=2),
    Topology("fsdp4", "fsdp", (0, 1, 2, 3)),
)


class Coded(nn.Module):
    """One weight of each awkward kind."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(7, 6)  # 2 * 4 - 1 rows, tied
        self.norm = nn.LayerNorm(6)
        self.qkv = nn.Linear(6, 10)  # 4 rows of q, 2 x 3 of k and v: no rank border falls between them
        self.gate_up = nn.Parameter(torch.empty(12, 6))
        self.columns = nn.Parameter(torch.empty(3, 9))  # sharded on dim 1
        self.three = nn.Parameter(torch.empty(3, 2, 5))  # fewer rows than ranks
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("buffer", torch.arange(5.0))


class Job:
    """The model and its optimizer on this rank's part of a topology.

    Args:
        topology: How to shard.
        mesh: The mesh of the topology, None for the plain one.
        lr: Learning rate, a value in the optimizer's state dict.
    """

    def __init__(self, topology: Topology, mesh: DeviceMesh | None, lr: float) -> None:
        self.topology, self.mesh = topology, mesh
        self.model = Coded()
        if topology.kind == "fsdp":
            fully_shard(self.model, mesh=mesh)
        elif mesh is not None:
            if topology.kind == "tp":
                parallelize_module(self.model, mesh["tp"], {"qkv": ColwiseParallel()})
                mesh = mesh["gtp"]
            columns = self.model.columns

            def place(param: nn.Parameter) -> GTPShard | None:
                return GTPShard(int(param is columns), block_size=topology.block_size) if param.ndim > 1 else None

            gtp_shard(self.model, mesh, schedule=ALL, shard_placement_fn=place)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.state()  # makes the optimizer's tensors

    def state(self) -> dict[str, object]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything that a checkpoint must bring back, local parts."""
        found: dict[str, torch.Tensor] = {"buffer": self.model.buffer}
        for name, param in self.model.named_parameters():
            found[name] = param
            found |= {f"{name}/{key}": value for key, value in self.optimizer.state[param].items()}
        return {key: value._local_tensor if isinstance(value, DTensor) else value for key, value in found.items()}

    def expected(self) -> dict[str, torch.Tensor]:
        """What ``tensors`` are if every element stands where it belongs; no code of the library is asked."""
        shapes = {name: param.shape for name, param in Coded().named_parameters()}
        codes: dict[str, torch.Tensor] = {"buffer": torch.arange(5.0)}
        for index, (name, shape) in enumerate(shapes.items()):
            for offset, key in enumerate(("", "/exp_avg", "/exp_avg_sq")):
                code = 1000 * index + torch.arange(math.prod(shape)).view(shape) + offset / 4
                codes[name + key] = self.part(name, code)
            codes[f"{name}/step"] = torch.tensor(7.0 + index)
        return codes

    def part(self, name: str, full: torch.Tensor) -> torch.Tensor:
        """This rank's part of a tensor."""
        kind, mesh = self.topology.kind, self.mesh
        if mesh is None:
            return full
        if kind == "fsdp":
            return rows_of(full, 0, mesh.size(), mesh.get_local_rank())
        if kind == "tp" and name.startswith("qkv"):
            full = rows_of(full, 0, 2, mesh.get_local_rank("tp"))
        if full.ndim < 2:
            return full
        dim = int(name == "columns")
        return rows_of(full, dim, mesh["gtp"].size(), mesh.get_local_rank("gtp"), self.topology.block_size)

    def fill(self) -> None:
        for key, value in self.expected().items():
            self.tensors()[key].detach().copy_(value)

    def wipe(self) -> None:
        for value in self.tensors().values():
            value.detach().fill_(-1)
        self.optimizer.param_groups[0]["lr"] = -1.0

    @property
    def group(self) -> dist.ProcessGroup | None:
        return self.mesh.get_group() if self.mesh is not None and self.mesh.size() < dist.get_world_size() else None

    def save(self, path: Path) -> None:
        dcp.save(self.state(), checkpoint_id=path, process_group=self.group, no_dist=self.mesh is None)

    def load(self, path: Path) -> None:
        state = self.state()
        dcp.load(state, checkpoint_id=path, process_group=self.group, no_dist=self.mesh is None)
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])

    def differences(self) -> list[str]:
        expected, actual = self.expected(), self.tensors()
        assert expected.keys() == actual.keys()
        found = [key for key in expected if not torch.equal(expected[key], actual[key])]
        lr = self.optimizer.param_groups[0]["lr"]
        return found if lr == 0.125 else [*found, f"lr {lr}"]


def rows_of(full: torch.Tensor, dim: int, num_ranks: int, rank: int, block_size: int = 1) -> torch.Tensor:
    rows = math.ceil(math.ceil(full.shape[dim] / block_size) / num_ranks) * block_size
    begin = min(rank * rows, full.shape[dim])
    return full.narrow(dim, begin, min(rows, full.shape[dim] - begin))


def make_mesh(topology: Topology) -> DeviceMesh | None:
    """Collective over all workers, also those that are not in the mesh."""
    if topology.kind == "plain":
        return None
    if topology.kind == "hsdp":
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "gtp"))
    if topology.kind == "tp":
        return init_device_mesh("cpu", (2, 2), mesh_dim_names=("gtp", "tp"))
    return DeviceMesh("cpu", list(topology.ranks), mesh_dim_names=("gtp",))


class TestResharding(GlooTest):
    def jobs(self) -> dict[str, Job]:
        """The jobs that this rank takes part in."""
        meshes = {topology: make_mesh(topology) for topology in TOPOLOGIES}
        return {t.name: Job(t, mesh, lr=0.125) for t, mesh in meshes.items() if self.rank in t.ranks}

    def test_r12_every_topology_loads_what_the_one_before_and_the_one_behind_it_have_saved(self) -> None:
        places = {topology.name: place for place, topology in enumerate(TOPOLOGIES)}
        last = len(TOPOLOGIES) - 1
        self.check_loads(lambda source, target: abs(places[source] - places[target]) in (1, last))

    @pytest.mark.soak
    def test_r12_every_topology_loads_what_any_other_has_saved(self) -> None:
        self.check_loads(lambda source, target: True)

    def check_loads(self, is_asked: Callable[[str, str], bool]) -> None:
        jobs = self.jobs()
        differences: list[str] = []
        with shared_directory() as directory:
            for name, job in jobs.items():
                job.fill()
                job.save(directory / name)
            dist.barrier()
            for target, job in jobs.items():
                for source in TOPOLOGIES:
                    if not is_asked(source.name, target):
                        continue
                    job.wipe()
                    job.load(directory / source.name)
                    differences += [f"{source.name} -> {target}, rank {self.rank}: {d}" for d in job.differences()]
        everywhere: list[list[str]] = [[] for _ in range(self.world_size)]
        dist.all_gather_object(everywhere, differences)
        self.assertEqual([d for of_rank in everywhere for d in of_rank], [])

    def test_r11_a_mesh_with_permuted_columns_is_put_in_order(self) -> None:
        topology = Topology("permuted", "hsdp", (1, 0, 3, 2))
        job = Job(topology, DeviceMesh("cpu", [[1, 0], [3, 2]], mesh_dim_names=("replicate", "gtp")), lr=0.125)
        self.assertEqual(job.model.gate_up.device_mesh.mesh.tolist(), [[0, 1], [2, 3]])
        with shared_directory() as directory:
            job.fill()
            job.save(directory)
            job.wipe()
            plain = Job(TOPOLOGIES[0], None, lr=0.5)
            plain.load(directory)
            self.assertEqual(plain.differences(), [])
            job.load(directory)
        self.assertEqual(job.differences(), [])
