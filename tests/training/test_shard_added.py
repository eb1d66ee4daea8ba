"""``shard_added``: modules that come after ``gtp_shard`` train as in one process."""

from __future__ import annotations

import copy

import torch
import torch.nn as nn
from common import ALL, GlooTest, assert_same_params, rows_of_rank
from runtime_common import WIDTH, Raw, make_rows, small_model, square_loss

from dtensor_gtp import gtp_shard, shard_added


class TestShardAdded(GlooTest):
    def test_before_and_after_steps(self) -> None:
        mesh, rows = self.gtp_mesh(), make_rows(0)
        reference = small_model()
        wrapped = nn.Sequential(gtp_shard(copy.deepcopy(reference), mesh, schedule=ALL))  # as PEFT wraps
        model = wrapped[0]

        def train(num_steps: int) -> None:
            for trained, batch in ((reference, rows), (model, rows_of_rank(rows, mesh))):
                optimizer = torch.optim.AdamW(trained.parameters(), lr=0.01)
                for _ in range(num_steps):
                    optimizer.zero_grad()
                    square_loss(trained, batch).backward()
                    optimizer.step()
            assert_same_params(model, reference, "grad")
            assert_same_params(model, reference)

        for is_trained in (False, True):
            if is_trained:
                train(2)
            added = nn.Sequential(nn.Linear(WIDTH, WIDTH), Raw())
            added[0].bias.requires_grad_(False)
            reference.append(copy.deepcopy(added))
            model.append(added)
            self.assertIs(shard_added(wrapped), wrapped)
            train(2)
        self.assertIs(shard_added(model), model)  # nothing was added
        train(1)

    def test_what_it_refuses(self) -> None:
        with self.assertRaisesRegex(ValueError, "shard_added expects a module after gtp_shard, but got a Linear"):
            shard_added(nn.Linear(2, 2))
        model = gtp_shard(small_model(), self.gtp_mesh(), schedule=ALL)
        model[0].extra = nn.Parameter(torch.ones(2, 2))
        with self.assertRaisesRegex(NotImplementedError, "'0.extra' was added to a Linear that gtp_shard has sharded"):
            shard_added(model)
