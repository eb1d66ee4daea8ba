"""A stand-in for ``deep_ep``: the calls of its buffers that the examples make, by gloo's all-to-all."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from common import imports_as
from torch import Tensor

sys.path.append(str(Path(__file__).parents[2] / "examples"))


class Buffer:
    def __init__(self, group: dist.ProcessGroup, *, num_nvl_bytes: int, num_rdma_bytes: int) -> None:
        self.group, self.size = group, group.size()

    def get_dispatch_layout(self, experts: Tensor, num_experts: int) -> tuple[Any, ...]:
        is_chosen = torch.zeros(len(experts), num_experts + 1, dtype=torch.bool)
        is_chosen = is_chosen.scatter(1, experts.remainder(num_experts + 1), True)[:, :-1]  # without -1, no expert
        is_in_rank = is_chosen.unflatten(1, (self.size, -1)).any(2)
        return is_in_rank.sum(0).int(), None, is_chosen.sum(0).int(), is_in_rank, None

    def dispatch(self, x: Tensor, handle: Any = None, **new: Any) -> tuple[Any, ...]:
        if handle is not None:
            rows, counts = handle[:2]
            return self._exchange(x[rows], *counts), None, None, None, None, None
        is_in_rank, num_local = new["is_token_in_rank"], len(new["num_tokens_per_expert"]) // self.size
        sent = new["num_tokens_per_rank"].tolist()
        received = torch.empty(self.size, dtype=torch.int32)
        dist.all_to_all_single(received, new["num_tokens_per_rank"], group=self.group)
        counts = sent, received.tolist()
        rows = is_in_rank.t().nonzero()[:, 1]
        chosen = self._exchange(new["topk_idx"][rows], *counts) - self.group.rank() * num_local
        chosen = chosen.where((chosen >= 0) & (chosen < num_local), -1)
        shares = self._exchange(new["topk_weights"][rows], *counts)
        handle = rows, counts, len(x)
        return self._exchange(x[rows], *counts), chosen, shares.where(chosen >= 0, 0), None, handle, None

    def combine(self, x: Tensor, handle: Any, topk_weights: Tensor | None = None) -> tuple[Tensor, Tensor | None, None]:
        rows, (sent, received), num_tokens = handle

        def back(value: Tensor) -> Tensor:
            returned = self._exchange(value, received, sent)
            return value.new_zeros(num_tokens, value.shape[1]).index_add(0, rows, returned)

        return back(x), None if topk_weights is None else back(topk_weights), None

    def _exchange(self, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
        return exchange(self.group, rows, sent, received)


class HybridEPBuffer:
    def __init__(
        self, *, group: dist.ProcessGroup, hidden_dim: int, max_num_of_tokens_per_rank: int, num_local_experts: int
    ) -> None:
        self.group, self.num_local = group, num_local_experts

    def dispatch_with_permute(self, *, hidden: Tensor, handle: Any = None, **new: Any) -> tuple[Any, ...]:
        if handle is not None:
            return self._there(hidden, handle), None, None, None, None
        assert new["num_of_experts_per_rank"] == self.num_local
        expert, token = new["routing_map"].t().nonzero().unbind(1)
        sent = torch.bincount(expert // self.num_local, minlength=self.group.size())
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        counts = sent.tolist(), received.tolist()
        local, order = exchange(self.group, expert % self.num_local, *counts).sort(stable=True)
        handle = expert, token, counts, order, new["routing_map"].shape
        shares = exchange(self.group, new["probs"][token, expert], *counts)[order]
        return self._there(hidden, handle), shares, None, local.bincount(minlength=self.num_local), handle

    def combine_with_unpermute(
        self, *, hidden: Tensor, probs: Tensor | None, handle: Any
    ) -> tuple[Tensor, Tensor | None]:
        expert, token, (sent, received), order, shape = handle

        def back(rows: Tensor) -> Tensor:
            return exchange(self.group, torch.empty_like(rows).index_copy(0, order, rows), received, sent)

        tokens = hidden.new_zeros(shape[0], hidden.shape[1]).index_add(0, token, back(hidden))
        if probs is None:
            return tokens, None
        return tokens, probs.new_zeros(shape).index_put((token, expert), back(probs))

    def _there(self, hidden: Tensor, handle: Any) -> Tensor:
        _, token, counts, order, _ = handle
        return exchange(self.group, hidden[token], *counts)[order]


def exchange(group: dist.ProcessGroup, rows: Tensor, sent: list[int], received: list[int]) -> Tensor:
    output = rows.new_empty(sum(received), *rows.shape[1:])
    dist.all_to_all_single(output, rows.contiguous(), received, sent, group=group)
    return output


@contextmanager
def deep_ep() -> Iterator[None]:
    """``import deep_ep`` finds the stand-in."""
    with imports_as("deep_ep", SimpleNamespace(Buffer=Buffer, HybridEPBuffer=HybridEPBuffer)):
        yield
