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
from common import ALL, GlooTest, check_update
from runtime_common import Raw, assert_idle
from torch.distributed._functional_collectives import all_gather_tensor_autograd
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from dtensor_gtp import WeightMesh, gtp_shard, init_weight_mesh

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
        return self.out(mixed.transpose(1, 2).flatten(2))


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
        return raw(x + attention(norm(x), positions))

    def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        x = self.embedding(tokens) + self.positions(positions)
        for index in range(len(self.blocks)):
            if self.is_checkpointed:
                x = checkpoint(self.block, index, x, positions, use_reentrant=False)
            else:
                x = self.block(index, x, positions)
        return self.head(x)


def make_model(seed: int = 0) -> Model:
    torch.manual_seed(seed)
    return Model()


def sum_loss(model: nn.Module, tokens: torch.Tensor, targets: torch.Tensor, positions: Any = None) -> torch.Tensor:
    positions = torch.arange(LENGTH) if positions is None else positions
    return F.cross_entropy(model(tokens, positions).flatten(0, 1), targets.flatten(), reduction="sum")


def make_batch(step: int, rows: int = 8) -> tuple[torch.Tensor, torch.Tensor]:
    tokens = torch.randint(0, VOCABULARY, (rows, LENGTH + 1), generator=torch.Generator().manual_seed(step))
    return tokens[:, :-1], tokens[:, 1:].clone()


def along(model: Any, cp: DeviceMesh) -> Any:
    for module in model.modules():
        if isinstance(module, Attention):
            module.cp = cp.get_group()
    return model


Part = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def part_of(batch: Any, mesh: WeightMesh, rows: list[int]) -> Part:
    """Tokens and targets of this rank's samples and positions, and these. ``rows`` has the samples of each rank. A rank
    holds a part of the front and one of the back, as causal masks ask for."""
    num, rank = mesh["cp"].size(), mesh["cp"].get_local_rank()
    parts = torch.arange(LENGTH).chunk(2 * num)
    positions = torch.cat([parts[rank], parts[-1 - rank]])
    tokens, targets = (part.split(rows)[mesh.batch.get_local_rank()][:, positions] for part in batch)
    return tokens, targets, positions


def over_weights(model: Model, mesh: WeightMesh) -> Any:
    return gtp_shard(model, mesh.weights, schedule=ALL)


def over_cp_and_gtp(model: Model, mesh: WeightMesh) -> Any:
    """Weights are split over the ranks along cp, too."""
    return gtp_shard(model, mesh.flatten("cp", "gtp"), schedule=ALL)


def under_fully_shard(model: Model, mesh: WeightMesh) -> Any:
    """``fully_shard`` averages over cp."""
    return fully_shard(gtp_shard(model, mesh["gtp"], schedule=ALL), mesh=mesh.flatten("dp", "cp"))


class TestDataAxes(GlooTest):
    def check(
        self,
        mesh: WeightMesh,
        shard: Callable[[Any, WeightMesh], Any],
        rows: list[int],
        *,
        num_microbatches: int = 1,
        is_checkpointed: bool = False,
        is_summed: bool = False,
    ) -> None:
        """A rank's loss is its share of the mean over all targets that count, times the number of ranks: this undoes
        the average of gradients. If these ``is_summed``, there is none."""
        reference = make_model()
        model = copy.deepcopy(reference)
        model.is_checkpointed = is_checkpointed
        model = shard(along(model, mesh["cp"]), mesh)
        if is_summed:
            model.set_gradient_divide_factor(1.0)
        factor = 1 if is_summed else self.world_size
        optimizers = [torch.optim.SGD(each.parameters(), lr=0.3, momentum=0.9) for each in (model, reference)]
        for step in range(2):
            batches = [make_batch(step * 10 + index, sum(rows)) for index in range(num_microbatches)]
            for _, targets in batches:
                targets[: sum(rows) // 2, 3:] = -100  # as padding behind shorter samples
            num_tokens = sum(int((targets != -100).sum()) for _, targets in batches)
            for batch in batches:
                (sum_loss(reference, *batch) / num_tokens).backward()
                (sum_loss(model, *part_of(batch, mesh, rows)) / num_tokens * factor).backward()
            check_update(model, reference, optimizers)
            if not is_checkpointed:
                assert_idle(model)

    def test_context_parallel(self) -> None:
        """Ranks along cp hold copies of a shard, or a shard each, with gtp or without; ranks differ in samples."""
        mesh = init_weight_mesh("cpu", cp=2, gtp=2)
        self.check(mesh, over_weights, [4, 4], is_checkpointed=True)
        self.check(mesh, over_weights, [5, 3])
        self.check(mesh, over_cp_and_gtp, [5, 3])
        self.check(mesh, under_fully_shard, [4, 4])
        self.check(init_weight_mesh("cpu", cp=4), over_cp_and_gtp, [8])
        self.check(init_weight_mesh("cpu", cp=2, dp=2), over_weights, [4, 4])

    def test_uneven_batches(self) -> None:
        """Ranks without samples run on an empty batch, since every use of a weight is a collective."""
        gtp, hsdp = init_weight_mesh("cpu", gtp=4), init_weight_mesh("cpu", replicate=2, gtp=2)
        self.check(gtp, over_weights, [3, 1, 2, 5])
        self.check(hsdp, over_weights, [3, 1, 2, 5], is_summed=True, num_microbatches=2)
        self.check(gtp, over_weights, [0, 0, 4, 0], num_microbatches=2)
        self.check(hsdp, over_weights, [2, 0, 3, 1], num_microbatches=2)
        self.check(gtp, over_weights, [2, 0, 3, 0], is_checkpointed=True)
