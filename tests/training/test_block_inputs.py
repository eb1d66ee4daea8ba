"""Inputs of blocks under a policy with ``param_dtype``, where a model does not pass them in that dtype."""

from __future__ import annotations

import copy
import itertools
from typing import Any

import torch
import torch.nn as nn
from common import ALL, GlooTest, full, rows_of_rank
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from dtensor_gtp import SchedulePolicy, gtp_shard

WIDTH = 16
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
CHOSEN = SchedulePolicy(min_shard_numel=0)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up = nn.Linear(WIDTH, 2 * WIDTH)
        self.down = nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return hidden + self.down(self.up(self.norm(hidden)).relu()) * mask


class WithPositions(nn.Module):
    """Adds float32 positions to embeddings, as M2M100 does. Its mask has the dtype of the sum."""

    num_skipped = 0  # blocks

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.register_buffer("positions", torch.linspace(0, 1, 4 * WIDTH).view(4, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, 3)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids) + self.positions
        mask = torch.ones_like(hidden)
        for block in self.blocks[self.num_skipped :]:
            hidden = block(hidden, mask)
        return self.head(hidden)


class WideBlock(Block):
    """Carries a float32 sum to the next block, as Mamba does."""

    def forward(self, hidden: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        seen.append((hidden.dtype, mask.dtype))
        narrow = self.norm(hidden.to(self.norm.weight.dtype))
        return hidden.float() + self.down(self.up(narrow).relu())


seen: list[tuple[torch.dtype, torch.dtype]] = []


class WithWideSum(nn.Module):
    """Runs its blocks twice."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(20, WIDTH)
        self.blocks = nn.ModuleList(WideBlock() for _ in range(3))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(ids)
        mask = torch.ones(WIDTH)
        for block in (*self.blocks, *self.blocks):
            hidden = block(hidden, mask)
        return hidden


def in_units(model: Any, mesh: Any) -> Any:
    for block in model.blocks:
        fully_shard(block, mesh=mesh, mp_policy=BF16)
    return fully_shard(model, mesh=mesh, mp_policy=BF16)


class TestBlockInputs(GlooTest):
    world_size = 2

    def rows(self) -> torch.Tensor:
        return rows_of_rank(torch.arange(16).view(4, 4), self.gtp_mesh())

    def step(self, model: nn.Module) -> None:
        loss: torch.Tensor = model(self.rows()).float().square().mean()
        loss.backward()

    def test_they_are_cast_as_in_fully_shard(self) -> None:
        """Of single weights, of groups, of compiled blocks and of a compiled model."""
        plain = WithPositions()
        fsdp = in_units(copy.deepcopy(plain), self.gtp_mesh())
        self.step(fsdp)
        expected = [full(param.grad) for param in fsdp.parameters()]
        for schedule, compiled in itertools.product((ALL, CHOSEN), ("nothing", "blocks", "model")):
            model: Any = copy.deepcopy(plain)
            parts = {"nothing": (), "blocks": model.blocks, "model": (model,)}
            for part in parts[compiled]:
                part.compile(backend="aot_eager")
            gtp_shard(model, self.gtp_mesh(), mp_policy=BF16, schedule=schedule)
            for _ in range(2):
                self.step(model)
                grads = [full(param.grad) for param in model.parameters()]
                torch.testing.assert_close(grads, expected, rtol=0.02, atol=1e-3)
                model.zero_grad()

    def test_the_first_block_may_be_left_out(self) -> None:
        """As with LayerDrop, in the first pass and later."""
        for numbers in ((1, 0, 2), (0, 1, 0)):
            model = gtp_shard(WithPositions(), self.gtp_mesh(), mp_policy=BF16, schedule=CHOSEN)
            for num_skipped in numbers:
                model.num_skipped = num_skipped
                self.step(model)

    def test_a_wide_sum_from_block_to_block_stays_wide(self) -> None:
        for schedule in (ALL, CHOSEN):
            model = gtp_shard(WithWideSum(), self.gtp_mesh(), mp_policy=BF16, schedule=schedule)
            for _ in range(2):
                seen.clear()
                self.step(model)
                wide = (torch.float32, torch.float32)
                self.assertEqual(seen, [(torch.bfloat16, torch.float32), *[wide] * 5])

    def test_where_another_module_gets_them_an_error_says_what_to_write(self) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False)
        model = gtp_shard(WithPositions(), self.gtp_mesh(), mp_policy=policy, schedule=CHOSEN)
        with self.assertRaises(RuntimeError) as raised:
            self.step(model)
        self.assertIn("call gtp_shard on that module", "".join(raised.exception.__notes__))
