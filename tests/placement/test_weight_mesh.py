"""Models on the meshes of ``init_weight_mesh``, its random numbers and its process group, on four processes."""

import itertools
import os
import subprocess
import sys
import unittest
from collections.abc import Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from common import ALL, GlooTest, assert_same_params, check_training, environment, full, shared_directory
from cuda_common import NUM_RANKS, RANKS_PER_GPU, CudaTest
from script_jobs import run_forked
from timing import HANG_S
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.checkpoint import checkpoint

from dtensor_gtp import WeightMesh, gtp_shard, init_weight_mesh
from dtensor_gtp import _torch_compat as compat
from dtensor_gtp.random import DENSE_AXES


class Net(nn.Module):
    """Uneven rows, a head on what the embedding gives, dropout twice."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.embedding = nn.Embedding(13, 6)
        self.up = nn.Linear(6, 12)
        self.down = nn.Linear(12, 6)
        self.head = nn.Linear(6, 13, bias=False)
        self.dropout = nn.Dropout(dropout)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.dropout(self.embedding(tokens))
        x = self.dropout(x + self.down(torch.relu(self.up(x))))
        return self.head(x)

    def reset_parameters(self) -> None:
        for layer in (self.embedding, self.up, self.down, self.head):
            layer.reset_parameters()


def make_tokens(generator: torch.Generator) -> torch.Tensor:
    return torch.randint(0, 13, (8, 5), generator=generator)


def loss_fn(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())


def tensor_parallel(model: nn.Module, mesh: WeightMesh) -> nn.Module:
    return parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})


def check_meta_model(mesh: WeightMesh) -> None:
    with mesh.fork_rng("params"), torch.device(mesh.dense.device_type):
        reference = Net()
    mesh.rng.manual_seed(0)  # the region once more, from its start
    with torch.device("meta"):
        model = Net()
    gtp_shard(tensor_parallel(model, mesh), mesh.weights, schedule=ALL)
    model.to_empty(device=mesh.dense.device_type)
    with mesh.fork_rng("params"):
        model.reset_parameters()
    assert_same_params(model, reference, rtol=0, atol=0)
    for param in model.parameters():  # every copy, not only those that full_tensor() takes
        values = [torch.empty_like(full(param)) for _ in range(dist.get_world_size())]
        dist.all_gather(values, full(param.detach()))
        for value in values:
            torch.testing.assert_close(value, values[0], rtol=0, atol=0)


class TestModels(GlooTest):
    def test_like_one_process(self) -> None:
        """Copies of weights along several axes, tensor parallelism, and ``fully_shard`` outside, over dp."""
        for is_fsdp_outside, sizes in (
            (False, {"gtp": 4}),
            (False, {"replicate": 2, "cp": 2}),
            (False, {"gtp": 2, "tp": 2}),
            (False, {"dp": 2, "tp": 2}),
            (True, {"dp": 2, "gtp": 2}),
            (True, {"dp": 2, "tp": 2}),
        ):
            mesh = init_weight_mesh("cpu", **sizes)

            def shard(model: nn.Module, mesh: WeightMesh = mesh, is_fsdp_outside: bool = is_fsdp_outside) -> nn.Module:
                if mesh["tp"].size() > 1:
                    tensor_parallel(model, mesh)
                if is_fsdp_outside:
                    return fully_shard(gtp_shard(model, mesh["gtp"], schedule=ALL), mesh=mesh["dp"])
                return gtp_shard(model, mesh.weights, schedule=ALL)

            torch.manual_seed(0)
            check_training(Net(), shard, mesh.data, make_tokens, loss_fn, num_microbatches=2)

    def test_every_view_gathers_in_order(self) -> None:
        mesh = init_weight_mesh("cpu", replicate=2, tp=2, ep=2)
        tensor = torch.arange(8.0 * 6).view(8, 6)
        for view in (mesh.dense, mesh.expert, mesh.data, mesh.weights, mesh["replicate", "tp"]):
            placements = [Shard(0)] * view.ndim
            self.assertEqual(distribute_tensor(tensor, view, placements).full_tensor(), tensor)

    def test_shards_of_a_meta_model_are_those_of_the_whole_model(self) -> None:
        """Parameters that are drawn after sharding: alike along copies, unlike along shards, parts of one whole."""
        for sizes in ({"gtp": 2, "tp": 2}, {"replicate": 2, "gtp": 2}):
            check_meta_model(init_weight_mesh("cpu", **sizes))

    # --- disagreement -------------------------------------------------------------------------------------------------

    def test_arguments_that_differ(self) -> None:
        sizes = {"gtp": 4} if self.rank != 2 else {"gtp": 2, "dp": 2}
        message = r"expects the same arguments on all ranks .*1, 4, 1.*where rank 2 has"
        with self.assertRaisesRegex(RuntimeError, message):
            init_weight_mesh("cpu", **sizes)
        with self.assertRaisesRegex(RuntimeError, r"rank 0 has .*seed=0 where rank 1 has .*seed=1"):
            init_weight_mesh("cpu", gtp=4, seed=self.rank)
        init_weight_mesh("cpu", gtp=4)

    def test_arguments_wrong_on_one_rank(self) -> None:
        error, message = RuntimeError, "init_weight_mesh failed on another rank .* rank 2: ValueError: .*gtp=3 does not"
        if self.rank == 2:
            error, message = ValueError, "gtp=3 does not divide 4"
        with self.assertRaisesRegex(error, message):
            init_weight_mesh("cpu", gtp=3 if self.rank == 2 else 4)

    # --- random numbers -----------------------------------------------------------------------------------------------

    def test_a_run_goes_on_bit_for_bit_from_a_checkpoint(self) -> None:
        """Model, optimizer and random number streams, with dropout outside, inside a region, and recomputed."""
        with shared_directory() as directory:
            job = DropoutJob(init_weight_mesh("cpu", gtp=2, tp=2, seed=1))
            before = job.step()
            dcp.save(job.state(), checkpoint_id=directory)
            expected = [job.step() for _ in range(2)]
            self.assertEqual(len({before, *expected}), 3)
            again = DropoutJob(init_weight_mesh("cpu", gtp=2, tp=2, seed=2))
            again.step()
            dcp.load(state := again.state(), checkpoint_id=directory)
            again.optimizer.load_state_dict(state["optimizer"])
            self.assertEqual([again.step() for _ in range(2)], expected)
            for name, param in job.model.named_parameters():
                other = again.model.get_parameter(name)
                self.assertEqual(other.to_local(), param.to_local(), rtol=0, atol=0)

    def test_states_of_another_mesh_are_missing(self) -> None:
        with shared_directory() as directory:
            dcp.save({"rng": init_weight_mesh("cpu", gtp=4).rng}, checkpoint_id=directory)
            other = init_weight_mesh("cpu", gtp=2, tp=2)
            before = other.rng.state_dict()
            message = r"Missing key in checkpoint state_dict: rng.pp=1,.*gtp=2,tp=2"
            with self.assertRaisesRegex(CheckpointException, message):
                dcp.load({"rng": other.rng}, checkpoint_id=directory)
            self.assertEqual(other.rng.state_dict(), before)

    def test_saving_asynchronously_takes_the_states_of_the_call(self) -> None:
        mesh = init_weight_mesh("cpu", gtp=4)
        with shared_directory() as directory:
            saving = dcp.async_save({"rng": mesh.rng}, checkpoint_id=directory)
            expected = torch.rand(5)
            saving.result()
            dist.barrier()
            dcp.load({"rng": mesh.rng}, checkpoint_id=directory)
        self.assertEqual(torch.rand(5), expected, rtol=0, atol=0)


class DropoutJob:
    """A model, its optimizer and its streams."""

    def __init__(self, mesh: WeightMesh) -> None:
        self.mesh = mesh
        with mesh.fork_rng("params"):
            self.model = Net(dropout=0.4)
        self.model = gtp_shard(self.model, mesh.weights, schedule=ALL)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.01)

    def step(self) -> tuple[float, float]:
        """Loss, and a sum of what the regions drew in forward and recomputation."""
        tokens = make_tokens(torch.Generator().manual_seed(self.mesh.data.get_local_rank()))
        drawn = []

        def forward(tokens: torch.Tensor) -> torch.Tensor:
            with self.mesh.fork_rng("sequence_parallel"):
                drawn.append(torch.rand(()).item())
            logits = self.model(tokens[:, :-1])
            return F.cross_entropy(self.model.dropout(logits).flatten(0, 1), tokens[:, 1:].flatten())

        loss = checkpoint(forward, tokens, use_reentrant=False)
        loss.backward()
        assert len(drawn) == 2
        assert drawn[0] == drawn[1]
        self.optimizer.step()
        self.optimizer.zero_grad()
        with self.mesh.fork_rng("tp"):
            return loss.item(), drawn[0] + torch.rand(()).item()

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(), "rng": self.mesh.rng}


def train(mesh: WeightMesh) -> dict[str, torch.Tensor]:
    """Every place draws its data and its dropout from numbers of its own; all parameters and gradients at the end."""
    with mesh.fork_rng("params"):
        model = Net(dropout=0.3)
    gtp_shard(tensor_parallel(model, mesh), mesh.weights, schedule=ALL)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for step in range(3):
        tokens = make_tokens(torch.Generator().manual_seed(10 * step + mesh.batch.get_local_rank()))
        tokens = tokens.to(mesh.dense.device_type)
        optimizer.zero_grad()
        loss_fn(model, tokens).backward()
        optimizer.step()
    params = {name: full(param.detach()) for name, param in model.named_parameters()}
    return params | {f"{name}.grad": full(param.grad) for name, param in model.named_parameters()}


def test_permuted_ranks_give_the_same_bits(tmp_path: Path) -> None:
    """In a job, where ``init_weight_mesh`` initializes the process group."""
    # of the second one, place 0 is taken by the process with RANK 2, and so on
    result = run_forked([__file__, tmp_path, "cpu", "0123", "2031"], 4)
    assert result.status == 0, result.output
    first, *others = (torch.load(path) for path in tmp_path.iterdir())
    assert len(others) == 7
    for actual in others:
        assert actual.keys() == first.keys()
        for name, value in first.items():
            torch.testing.assert_close(actual[name], value, rtol=0, atol=0, msg=name)


def permuted_job(folder: Path, device_type: str, order: Sequence[int]) -> None:
    """One process of a job: no process group yet, and the places are in another order."""
    torch.set_num_threads(1)
    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    sizes = {"gtp": 2, "tp": world_size // 2}
    mesh = init_weight_mesh(device_type, **sizes, rank_order=order, timeout=timedelta(seconds=HANG_S))
    place = order.index(rank)
    assert dist.get_backend() == ("gloo" if device_type == "cpu" else "nccl")
    assert dist.get_rank() == place
    assert mesh.dense.get_coordinate() == (0, 0, 0, 0, *divmod(place, sizes["tp"]))
    first = place % sizes["tp"]
    assert dist.get_process_group_ranks(mesh["gtp"].get_group()) == [first, first + sizes["tp"]]
    assert device_type == "cpu" or torch.cuda.current_device() == int(os.environ["LOCAL_RANK"])
    torch.save(train(mesh), folder / f"{''.join(map(str, order))}_{rank}.pt")
    dist.barrier()


def run_job(folder: Path, world_size: int) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(world_size)]
    variables = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    return subprocess.run(
        [*torchrun, __file__, str(folder), "cuda", "".join(map(str, reversed(range(world_size))))],
        timeout=HANG_S,
        env=os.environ | variables,
        capture_output=True,
        text=True,
    )


@unittest.skipIf(NUM_RANKS < 2, "needs at least 2 GPUs")
class TestCuda(CudaTest):
    world_size = NUM_RANKS // 2 * 2

    def mesh(self, **arguments: int) -> WeightMesh:
        place = self.rank % torch.cuda.device_count()
        with environment(LOCAL_RANK=str(place)):
            mesh = init_weight_mesh("cuda", gtp=2, tp=self.world_size // 2, **arguments)
        self.assertEqual(torch.cuda.current_device(), place)
        return mesh

    def check_alike(self, mesh: WeightMesh, drawn: torch.Tensor, *unlike: str) -> None:
        """Equal on exactly those ranks whose coordinates on the axes ``unlike`` are equal."""
        values = [torch.empty_like(drawn) for _ in range(self.world_size)]
        dist.all_gather(values, drawn)
        names, places = DENSE_AXES, [(m == mesh.dense.mesh).nonzero()[0] for m in range(self.world_size)]
        keys = [tuple(int(place[names.index(axis)]) for axis in unlike) for place in places]
        for a, b in itertools.combinations(range(self.world_size), 2):
            self.assertEqual(torch.equal(values[a], values[b]), keys[a] == keys[b], f"{a} {b} {unlike}")

    def test_tp_trains_like_one_process(self) -> None:
        mesh = self.mesh()
        torch.manual_seed(0)
        check_training(
            Net().cuda(),
            lambda model: gtp_shard(tensor_parallel(model, mesh), mesh.weights, schedule=ALL),
            mesh.data,
            lambda generator: make_tokens(generator).cuda(),
            loss_fn,
            tolerance={"rtol": 1e-4, "atol": 1e-5},
        )

    def test_draws(self) -> None:
        """Also after random ops on DTensors, whose tracker would make all ranks alike if it were made by the first."""
        mesh = self.mesh()
        for _ in range(2):
            for device in ("cuda", "cpu"):
                self.check_alike(mesh, torch.rand(8, device=device).cuda(), "gtp")
                for region, unlike in (("params", ()), ("sequence_parallel", ("gtp", "tp")), ("tp", ("tp",))):
                    with mesh.fork_rng(region):
                        self.check_alike(mesh, torch.rand(8, device=device).cuda(), *unlike)
            self.check_alike(mesh, F.dropout(torch.ones(64, device="cuda"), 0.5), "gtp")
            activations = distribute_tensor(torch.ones(64, 4, device="cuda"), mesh["tp"], [Shard(0)])
            dropped = F.dropout(activations, 0.5)
            self.check_alike(mesh, dropped.full_tensor(), "gtp")
            self.check_alike(mesh, dropped.to_local(), "gtp", "tp")

    def test_shards_of_a_meta_model_are_those_of_the_whole_model(self) -> None:
        check_meta_model(self.mesh())

    def test_recomputation_draws_the_same_numbers(self) -> None:
        mesh = self.mesh()
        masks = []

        def forward(x: torch.Tensor) -> torch.Tensor:
            x = F.dropout(x.sin(), 0.5)
            with mesh.fork_rng("sequence_parallel"):
                x = F.dropout(x.cos(), 0.5)
            x = F.dropout(x, 0.5)
            masks.append(x.detach() != 0)
            return x.sin()

        for use_reentrant in (False, True):
            masks.clear()
            x = torch.rand(256, device="cuda", requires_grad=True)
            y = checkpoint(forward, x, use_reentrant=use_reentrant)
            torch.rand(7, device="cuda")
            y.sum().backward()
            self.assertEqual(masks[0], masks[1])

    def test_states_restore_exactly(self) -> None:
        def draw(mesh: WeightMesh) -> list[torch.Tensor]:
            values = [torch.rand(8, device="cuda"), torch.rand(8)]
            for region in ("params", "sequence_parallel", "gtp"):
                with mesh.fork_rng(region):
                    values += [torch.randn(8, device="cuda"), torch.randn(8)]
            return values

        mesh = self.mesh()
        draw(mesh)
        with shared_directory() as directory:
            dcp.save({"rng": mesh.rng}, checkpoint_id=directory)
            expected = draw(mesh)
            again = self.mesh(seed=5)
            dcp.load({"rng": again.rng}, checkpoint_id=directory)
            for value, want in zip(draw(again), expected, strict=True):
                self.assertEqual(value, want, rtol=0, atol=0)

    def test_a_region_is_refused_in_a_capture(self) -> None:
        mesh = self.mesh()
        x = torch.ones(8, device="cuda")
        with self.assertRaisesRegex(RuntimeError, "fork_rng cannot be entered while a CUDA graph is captured"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                x.mul_(2)
                with mesh.fork_rng("sequence_parallel"):
                    x.mul_(2)
        self.check_alike(mesh, torch.rand(8, device="cuda"), "gtp")

    @unittest.skipIf(RANKS_PER_GPU > 1, "torchrun gives each process a GPU of its own")
    def test_job_in_another_order(self) -> None:
        with shared_directory() as directory:
            if self.rank == 0:
                job = run_job(directory, self.world_size)
                self.assertEqual(job.returncode, 0, job.stderr)
                self.assertEqual(len(list(directory.iterdir())), self.world_size)


if __name__ == "__main__":
    for attempt, order in enumerate(sys.argv[3:]):
        if attempt:
            compat.leave_process_groups()  # with what DTensor remembers of them
            os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)  # names other keys of the store
        permuted_job(Path(sys.argv[1]), sys.argv[2], [int(rank) for rank in order])
    dist.destroy_process_group()
