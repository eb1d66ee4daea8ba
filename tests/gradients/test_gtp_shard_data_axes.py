"""Data axes beside batches of one size: sequences split over ranks (context parallel), and uneven batches.

Every rank of the weight mesh sees other data, whichever axis it lies on: other samples, or another part of the same
sequences. ``gtp_shard`` averages gradients over all of them alike; what makes the average right is the loss.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from checkpoint_common import PLAIN, Topology, check_reload
from common import ALL, GlooTest, _mesh, assert_same_params
from runtime_common import Raw, assert_idle
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from dtensor_gtp import gtp_shard, init_weight_mesh

VOCABULARY = 31
WIDTH = 8
LENGTH = 8
NUM_HEADS = 2


class Attention(nn.Module):
    """Causal attention; under context parallelism this rank's queries see the keys of all ranks along ``cp``."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.cp: dist.ProcessGroup | None = None

    def forward(self, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        key_positions = positions
        q, k, v = self.qkv(x).chunk(3, -1)
        if self.cp is not None:
            k, v = (all_gather_tensor_autograd(t.contiguous(), 1, self.cp) for t in (k, v))
            key_positions = all_gather_tensor_autograd(positions, 0, self.cp)
        mask = positions[:, None] >= key_positions
        q, k, v = (t.unflatten(-1, (NUM_HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        mixed = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        y: torch.Tensor = self.out(mixed.transpose(1, 2).flatten(2))
        return y


class Model(nn.Module):
    """Fused, generic and whole parameters, and a tied head of uneven rows."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.positions = nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList([nn.ModuleList([nn.LayerNorm(WIDTH), Attention(), Raw(WIDTH)]) for _ in range(2)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.is_checkpointed = False

    def block(self, index: int, x: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        norm, attention, raw = self.blocks[index]  # type: ignore[misc]
        y: torch.Tensor = raw(x + attention(norm(x), positions))
        return y

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions(positions)
        for index in range(len(self.blocks)):
            if self.is_checkpointed:
                x = checkpoint(self.block, index, x, positions, use_reentrant=False)
            else:
                x = self.block(index, x, positions)
        logits: torch.Tensor = self.head(x)
        return logits


def make_model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def sum_loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor, positions: Any = None) -> torch.Tensor:
    positions = torch.arange(LENGTH) if positions is None else positions
    return F.cross_entropy(model(tokens, positions).flatten(0, 1), targets.flatten(), reduction="sum")


def make_batch(step: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:].clone()


def along(model: nn.Module, cp: DeviceMesh) -> nn.Module:
    for module in model.modules():
        if isinstance(module, Attention):
            module.cp = cp.get_group()
    return model


def part_of(batch: Any, cp: DeviceMesh, samples: DeviceMesh, is_balanced: bool = False, rows: Any = None) -> Any:
    """This rank's tokens and targets, of its samples and its positions; and these.

    Args:
        is_balanced: A rank holds a part of the front and one of the back, as causal masks ask for.
        rows: How many samples each rank of ``samples`` has; None for equally many.
    """
    num, rank = cp.size(), cp.get_local_rank()
    mine = torch.arange(LENGTH).chunk(num)[rank]
    if is_balanced:
        parts = torch.arange(LENGTH).chunk(2 * num)
        mine = torch.cat([parts[rank], parts[-1 - rank]])
    rows = rows or batch[0].shape[0] // samples.size()
    return (*(t.split(rows)[samples.get_local_rank()][:, mine] for t in batch), mine)


class Trainers:
    """A model of this rank and the reference, each with its optimizer."""

    def __init__(self, model: nn.Module, reference: nn.Module) -> None:
        self.models = (model, reference)
        self.optimizers = [torch.optim.SGD(m.parameters(), lr=0.3, momentum=0.9) for m in self.models]

    def compare_and_step(self) -> None:
        assert_same_params(*self.models, "grad")
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()
        assert_same_params(*self.models, "param")


class TestDataAxes(GlooTest):
    # --- context parallel ---------------------------------------------------------------------------------------------

    def check_cp(
        self,
        cp: DeviceMesh,
        samples: DeviceMesh,
        shard: Callable[[nn.Module], Any],
        *,
        is_balanced: bool = False,
        is_checkpointed: bool = False,
        rows: list[int] | None = None,
    ) -> None:
        """Each rank's loss is the mean over its tokens, of which all ranks have as many, unless ``rows`` says how many
        samples each has: then some targets do not count either, and the loss is a share of the mean over all ranks.

        Args:
            cp: Ranks that hold parts of the same sequences.
            samples: Ranks that hold different samples.
        """
        reference = make_model()
        model = copy.deepcopy(reference)
        model.is_checkpointed = is_checkpointed
        shard(along(model, cp))
        trainers = Trainers(model, reference)
        for step in range(3):
            batch = make_batch(step)
            if rows is not None:
                batch[1][:3, 3:] = -100  # as padding behind shorter samples
            tokens, targets, positions = part_of(batch, cp, samples, is_balanced, rows)
            num_tokens = (targets != -100).sum()
            if rows is not None:
                dist.all_reduce(num_tokens)
            share = sum_loss(model, tokens, targets, positions) / num_tokens
            (share if rows is None else share * self.world_size).backward()
            (sum_loss(reference, *batch) / (batch[1] != -100).sum()).backward()
            trainers.compare_and_step()
            if not is_checkpointed:
                assert_idle(model)

    def test_cp_as_copies(self) -> None:
        """``mesh.weights``: the ranks along cp hold copies of a shard."""
        mesh = init_weight_mesh("cpu", cp=2, gtp=2)
        self.assertEqual(mesh.weights.mesh_dim_names, ("cp", "gtp"))
        for options in ({}, {"is_balanced": True}, {"is_checkpointed": True}):
            self.check_cp(mesh["cp"], mesh.batch, lambda m: gtp_shard(m, mesh.weights, schedule=ALL), **options)

    def test_cp_folded_into_gtp(self) -> None:
        """Weights are split over the ranks along cp, too."""
        mesh = init_weight_mesh("cpu", cp=2, gtp=2)
        for weights in (mesh.flatten("cp", "gtp"), _mesh((2, 2), ("cp", "gtp"))._flatten("cp_gtp")):
            self.assertEqual(weights.size(), 4)
            self.check_cp(mesh["cp"], mesh.batch, lambda m, on=weights: gtp_shard(m, on, schedule=ALL))

    def test_cp_is_gtp(self) -> None:
        """One axis for both: all ranks share each sequence, and each weight."""
        mesh = init_weight_mesh("cpu", cp=4)
        self.check_cp(mesh["cp"], mesh.batch, lambda m: gtp_shard(m, mesh["cp"], schedule=ALL))

    def test_cp_without_gtp(self) -> None:
        mesh = init_weight_mesh("cpu", cp=2, dp=2)
        self.assertEqual(mesh.weights.shape, (4, 1))
        self.check_cp(mesh["cp"], mesh.batch, lambda m: gtp_shard(m, mesh.weights, schedule=ALL))

    def test_cp_under_fully_shard(self) -> None:
        """``fully_shard`` outside averages over cp."""
        mesh = init_weight_mesh("cpu", cp=2, gtp=2)

        def shard(model: nn.Module) -> None:
            gtp_shard(model, mesh["gtp"], schedule=ALL)
            fully_shard(model, mesh=mesh.flatten("dp", "cp"))

        self.check_cp(mesh["cp"], mesh.batch, shard)

    def test_cp_with_uneven_batches(self) -> None:
        """Ranks differ in samples, and, along cp, in targets that count."""
        mesh = init_weight_mesh("cpu", cp=2, gtp=2)
        for weights in (mesh.weights, mesh.flatten("cp", "gtp")):
            for is_balanced in (False, True):
                self.check_cp(
                    mesh["cp"],
                    mesh.batch,
                    lambda m, on=weights: gtp_shard(m, on, schedule=ALL),
                    is_balanced=is_balanced,
                    rows=[5, 3],
                )

    def test_cp_checkpoints(self) -> None:
        """Loaded on the same axes, and in one process."""
        mesh = init_weight_mesh("cpu", cp=2, gtp=2)

        def under_fully_shard(model: nn.Module) -> nn.Module:
            gtp_shard(along(model, mesh["cp"]), mesh["gtp"], schedule=ALL)
            return fully_shard(model, mesh=mesh.flatten("dp", "cp"))

        for shard in (lambda m: gtp_shard(along(m, mesh["cp"]), mesh.weights, schedule=ALL), under_fully_shard):
            check_reload(
                make_model,
                lambda step: (*make_batch(step), torch.arange(LENGTH)),
                lambda model, part: sum_loss(model, *part) / part[1].numel(),
                [Topology(shard, lambda batch: part_of(batch[:2], mesh["cp"], mesh.batch)), PLAIN],
            )

    # --- uneven batches -----------------------------------------------------------------------------------------------

    def check_uneven(
        self,
        rows: list[int],
        mesh: DeviceMesh,
        scale: Callable[[nn.Module], float],
        *,
        num_microbatches: int = 1,
        is_checkpointed: bool = False,
    ) -> None:
        """The rank with index ``i`` on the mesh has ``rows[i]`` samples, some of whose targets do not count.

        Args:
            scale: Called with the sharded model; returns what this rank's share of the mean is multiplied with.
        """
        reference = make_model()
        model = gtp_shard(copy.deepcopy(reference), mesh, schedule=ALL)
        model.is_checkpointed = is_checkpointed
        factor = scale(model)
        trainers = Trainers(model, reference)
        rank = mesh.mesh.flatten().tolist().index(dist.get_rank())
        for step in range(2):
            batches = [make_batch(step * 10 + i, sum(rows)) for i in range(num_microbatches)]
            for _, targets in batches:
                targets[: sum(rows) // 2, 5:] = -100  # as padding behind shorter samples
            mine = [tuple(t.split(rows)[rank] for t in batch) for batch in batches]
            # The number of tokens that count, over all ranks and microbatches.
            num_tokens = torch.tensor(sum(int((targets != -100).sum()) for _, targets in mine))
            dist.all_reduce(num_tokens)
            for batch, part in zip(batches, mine, strict=True):
                (sum_loss(reference, *batch) / num_tokens).backward()
                (sum_loss(model, *part) / num_tokens * factor).backward()
            trainers.compare_and_step()
            if not is_checkpointed:
                assert_idle(model)

    def meshes(self) -> list[DeviceMesh]:
        return [self.gtp_mesh(), self.hsdp_mesh()]

    def test_uneven_batches(self) -> None:
        """The average over ranks is undone by the number of ranks."""
        for mesh in self.meshes():
            self.check_uneven([3, 1, 2, 5], mesh, lambda model, mesh=mesh: mesh.size())

    def test_uneven_batches_with_summed_gradients(self) -> None:
        """Or there is no average: gradients are summed."""

        def scale(model: Any) -> float:
            model.set_gradient_divide_factor(1.0)
            return 1.0

        for mesh in self.meshes():
            self.check_uneven([3, 1, 2, 5], mesh, scale, num_microbatches=2)

    def test_ranks_without_samples(self) -> None:
        """They run on an empty batch, since every use of a weight is a collective."""
        for mesh in self.meshes():
            for rows in ([2, 0, 3, 1], [0, 0, 4, 0]):
                self.check_uneven(rows, mesh, lambda model, mesh=mesh: mesh.size(), num_microbatches=2)

    def test_ranks_without_samples_with_activation_checkpointing(self) -> None:
        mesh = self.gtp_mesh()
        self.check_uneven([2, 0, 3, 0], mesh, lambda model: mesh.size(), is_checkpointed=True)

    def test_mean_of_local_means_is_not_the_mean(self) -> None:
        """What the above would not notice if it were."""
        mesh = self.gtp_mesh()
        reference, rows = make_model(), [3, 1, 2, 5]
        model = gtp_shard(copy.deepcopy(reference), mesh, schedule=ALL)
        batch = make_batch(0, sum(rows))
        tokens, targets = (t.split(rows)[mesh.get_local_rank()] for t in batch)
        (sum_loss(reference, *batch) / batch[1].numel()).backward()
        (sum_loss(model, tokens, targets) / targets.numel()).backward()
        grads = [m.blocks[0][1].qkv.weight.grad for m in (model, reference)]
        self.assertNotEqual(grads[0].full_tensor(), grads[1])
