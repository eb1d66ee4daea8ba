"""Sends tokens to their experts with DeepEP (github.com/deepseek-ai/DeepEP): a ``Dispatcher`` of ``GroupedExperts``.

    from deepep_dispatcher import DeepEPDispatcher

    parallelize_experts(model, mesh["ep"])
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            module.dispatcher = DeepEPDispatcher(mesh["ep"], module.num_experts)

A token travels once to each rank that has experts of it, with its choices and weights. Results are multiplied by the
weights there, and DeepEP sums them up on the way back. Its kernels take tokens in bf16 and weights in float32, and the
host waits for the counts of each dispatch. The calls are those of ``deep_ep.Buffer`` of release 1; they ran with a
stand-in over gloo, never with DeepEP's own kernels. ``hybridep_dispatcher.py`` does the same with HybridEP.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh


class DeepEPDispatcher:
    """Brings tokens to the experts of all ranks of ``mesh``, and the weighted sums back.

    Args:
        mesh: 1-D, the axis over which experts are distributed.
        num_experts: Experts over all ranks of it.
        nvl_nbytes: Of the buffer that tokens pass between GPUs of one host.
        rdma_nbytes: Of the one between hosts; 0 on one host.
    """

    def __init__(self, mesh: DeviceMesh, num_experts: int, nvl_nbytes: int = 1 << 30, rdma_nbytes: int = 0) -> None:
        from deep_ep import Buffer

        self._buffer = Buffer(mesh.get_group(), num_nvl_bytes=nvl_nbytes, num_rdma_bytes=rdma_nbytes)
        self._num_experts, self._num_local = num_experts, num_experts // mesh.size()

    def __call__(
        self, run_experts: Callable[[Tensor, Tensor], Tensor], tokens: Tensor, experts: Tensor, weights: Tensor
    ) -> Tensor:
        trip = _Trip(self._buffer, self._num_experts)
        received, shares, chosen = There.apply(tokens, weights.float(), experts, trip)
        # A row for each token and expert of this rank; -1 stands for an expert of another one.
        token, slot = (chosen >= 0).nonzero(as_tuple=True)
        expert, order = chosen[token, slot].sort(stable=True)
        token, slot = token[order], slot[order]
        results = run_experts(received[token], expert.bincount(minlength=self._num_local))
        weighted = results * shares[token, slot, None].to(results.dtype)
        return Back.apply(torch.zeros_like(received, dtype=weighted.dtype).index_add(0, token, weighted), trip)


class _Trip:
    """One dispatch: the way there, and with its handle the ways back, in forward and backward."""

    def __init__(self, buffer: Any, num_experts: int) -> None:
        self._buffer, self._num_experts = buffer, num_experts
        self._handle: Any = None

    def there(self, tokens: Tensor, weights: Tensor, experts: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        of_rank, of_host, of_expert, is_in_rank, _ = self._buffer.get_dispatch_layout(experts, self._num_experts)
        received, chosen, shares, _, self._handle, _ = self._buffer.dispatch(
            tokens,
            topk_idx=experts,
            topk_weights=weights,
            num_tokens_per_rank=of_rank,
            num_tokens_per_rdma_rank=of_host,
            is_token_in_rank=is_in_rank,
            num_tokens_per_expert=of_expert,
        )
        return received, shares, chosen

    def there_again(self, tokens: Tensor) -> Tensor:
        received: Tensor = self._buffer.dispatch(tokens, handle=self._handle)[0]
        return received

    def back(self, received: Tensor, shares: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        tokens, weights, _ = self._buffer.combine(received, self._handle, topk_weights=shares)
        return tokens, weights


class There(torch.autograd.Function):
    """``trip.there``; in backward, ``trip.back`` brings gradients of rows and of their weights, in float32.

    ``experts`` says where tokens go, and the last result where rows have come, so neither has a gradient.
    """

    @staticmethod
    def forward(ctx: Any, tokens: Tensor, weights: Tensor, experts: Tensor, trip: Any) -> tuple[Tensor, Tensor, Tensor]:
        ctx.trip = trip
        received, shares, places = trip.there(tokens, weights, experts)
        ctx.mark_non_differentiable(places)
        return received, shares, places

    @staticmethod
    def backward(ctx: Any, received: Tensor, shares: Tensor, places: Tensor) -> tuple[Tensor | None, ...]:
        return *ctx.trip.back(received.contiguous(), shares.contiguous()), None, None


class Back(torch.autograd.Function):
    """``trip.back``; in backward, gradients take the way of the tokens with ``trip.there_again``."""

    @staticmethod
    def forward(ctx: Any, received: Tensor, trip: Any) -> Tensor:
        ctx.trip = trip
        return trip.back(received)[0]

    @staticmethod
    def backward(ctx: Any, tokens: Tensor) -> tuple[Tensor, None]:
        return ctx.trip.there_again(tokens.contiguous()), None
