"""Exchanges of activations on GPUs with NCCL: results, races, host synchronization, CUDA graphs, unequal ranks.

Needs 2 to 8 GPUs of one host; uses as many as there are.
"""

import copy
import unittest
from typing import Any

import torch
import torch.nn as nn
from common import assert_same_params, environment, rows_of_rank
from cuda_common import BF16, NUM_RANKS, CudaTest, assert_same, assert_same_grads, captured, no_waits
from schedules import explicit
from torch.distributed.device_mesh import DeviceMesh

from dtensor_gtp import MixedPrecisionPolicy, gtp_shard, sharding_report
from dtensor_gtp.nn.functional import linear_cross_entropy

VOCABULARY = 8191
WIDTH = 256
LENGTH = 257


class LM(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, WIDTH)
        self.body = nn.Linear(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.body(self.embedding(tokens[:, :-1])))
        return linear_cross_entropy(hidden, self.head, tokens[:, 1:])


def make_tokens(seed: int, rows: int) -> torch.Tensor:
    generator = torch.Generator(device="cuda").manual_seed(seed)
    return torch.randint(0, VOCABULARY, (rows, LENGTH), device="cuda", generator=generator)


@unittest.skipIf(NUM_RANKS < 2, "needs at least 2 GPUs")
class TestCudaExchange(CudaTest):
    def sharded(
        self, reference: nn.Module, mesh: DeviceMesh, policy: Any = BF16, depth: int = 2, **options: Any
    ) -> nn.Module:
        schedule = explicit(prefetch_depth=depth, **({"embedding": "exchange"} | options))
        return gtp_shard(copy.deepcopy(reference), mesh, mp_policy=policy, schedule=schedule)

    def test_equals_one_process(self) -> None:
        mesh = self.gtp_mesh()
        torch.manual_seed(0)
        reference = LM().cuda()
        model = self.sharded(reference, mesh, MixedPrecisionPolicy())
        for step in range(2):
            tokens = make_tokens(step, 2 * self.world_size)
            reference(tokens).backward()
            model(rows_of_rank(tokens, mesh)).backward()
        assert_same_params(model, reference, "grad", rtol=1e-4, atol=1e-6)

    def _trained(self, mesh: DeviceMesh, depth: int, num_rows: int = 4, **options: Any) -> nn.Module:
        torch.manual_seed(0)
        model = self.sharded(LM().cuda(), mesh, depth=depth, **options)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
        for step in range(3):
            model(make_tokens(step * 100 + self.rank, num_rows)).backward()
            optimizer.step()
            optimizer.zero_grad()
        return model

    def test_delays_and_poison_change_no_bit(self) -> None:
        mesh = self.gtp_mesh()
        expected = self._trained(mesh, 0)
        for seed in range(4):
            with environment(DTENSOR_GTP_DEBUG=f"poison,delay={seed}"):
                assert_same(self._trained(mesh, seed).parameters(), expected.parameters(), f"seed {seed}")

    def test_auto_takes_what_moves_fewer_bytes(self) -> None:
        """One row of tokens is less than the table and the head, 32 rows on each of two ranks are more. What is taken
        has the bits of what is asked for by name, also with delays and poison."""
        mesh = self.gtp_mesh()
        auto = {"embedding": "auto", "head": "auto"}
        for num_rows, kind, said in ((1, "exchange", "exchange of up to 256 tokens"), (32, "gather", "gathered")):
            expected = self._trained(mesh, 0, num_rows, embedding=kind, head=kind)
            for debug in ("", "poison,delay=0"):
                with environment(DTENSOR_GTP_DEBUG=debug):
                    actual = self._trained(mesh, 2, num_rows, exchange_tokens=256 * num_rows, **auto)
                report = str(sharding_report(actual, verbose=True))
                for use in ("lookup", "loss"):
                    self.assertIn(f"{use}: {said}", report)
                assert_same(actual.parameters(), expected.parameters(), f"{num_rows} rows, {debug}")

    def test_no_wait_of_the_host_and_cuda_graphs(self) -> None:
        """Also with fewer tokens than were agreed on; a captured step replays to the bits of an eager one."""
        mesh = self.gtp_mesh()
        torch.manual_seed(0)
        reference = LM().cuda()
        model, eager = self.sharded(reference, mesh), self.sharded(reference, mesh)
        tokens = make_tokens(self.rank, 4)
        for _ in range(3):
            eager(tokens).backward()
            eager.zero_grad()
        with no_waits():
            eager(tokens[: 1 + self.rank % 3]).backward()
            eager.zero_grad()
        graph, _ = captured(model, lambda: model(tokens).backward())
        for replay in range(3):
            tokens.copy_(make_tokens(100 * replay + self.rank, 4))
            graph.replay()
            eager.zero_grad()
            eager(tokens).backward()
            assert_same_grads(model, eager, f"replay {replay}")

    def test_all_ranks_may_have_more_tokens(self) -> None:
        mesh = self.gtp_mesh()
        torch.manual_seed(0)
        reference = LM().cuda()
        model = self.sharded(reference, mesh, MixedPrecisionPolicy())
        for step, rows in enumerate((1, 2 + self.rank % 2, 3)):
            for rank in range(self.world_size):
                num_rows = (1, 2 + rank % 2, 3)[step]
                (reference(make_tokens(rank, num_rows)) / self.world_size).backward()
            model(make_tokens(self.rank, rows)).backward()
        assert_same_params(model, reference, "grad", rtol=1e-4, atol=1e-6)
