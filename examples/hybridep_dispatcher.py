"""Sends tokens to their experts with HybridEP (branch hybrid-ep of DeepEP): a ``Dispatcher`` of ``GroupedExperts``.

    from hybridep_dispatcher import HybridEPDispatcher

    parallelize_experts(model, mesh["ep"])
    for module in model.modules():
        if isinstance(module, GroupedExperts):
            module.dispatcher = HybridEPDispatcher(mesh["ep"], module.num_experts, dim=4096, max_tokens=8192)

HybridEP brings rows in the order of the experts, a row for each token and expert, and each row's weight beside it.
Results are multiplied by the weights here, and summed up on the way back. It takes tokens in bf16 and weights in
float32. The calls are those of ``deep_ep.HybridEPBuffer`` as Megatron-LM makes them; they ran with a stand-in over
gloo, never with HybridEP's own kernels.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from deepep_dispatcher import Back, There


class HybridEPDispatcher:
    """Brings tokens to the experts of all ranks of ``mesh``, and the weighted sums back.

    Args:
        mesh: 1-D, the axis over which experts are distributed.
        num_experts: Experts over all ranks of it.
        dim: Width of tokens.
        max_tokens: Most tokens of a rank in one call.
    """

    def __init__(self, mesh: DeviceMesh, num_experts: int, dim: int, max_tokens: int) -> None:
        from deep_ep import HybridEPBuffer

        self._num_experts, self._num_local = num_experts, num_experts // mesh.size()
        self._buffer = HybridEPBuffer(
            group=mesh.get_group(),
            hidden_dim=dim,
            max_num_of_tokens_per_rank=max_tokens,
            num_local_experts=self._num_local,
        )

    def __call__(
        self, run_experts: Callable[[Tensor, Tensor], Tensor], tokens: Tensor, experts: Tensor, weights: Tensor
    ) -> Tensor:
        # The last column is for -1, which is no expert.
        shape = (len(tokens), self._num_experts + 1)
        experts = experts.remainder(self._num_experts + 1)
        chosen = torch.zeros(shape, dtype=torch.bool, device=tokens.device).scatter(1, experts, True)
        shares = torch.zeros(shape, device=tokens.device).scatter(1, experts, weights.float())
        chosen = chosen[:, :-1].contiguous()
        shares = shares[:, :-1].contiguous()
        trip = _Trip(self._buffer, self._num_local)
        rows, row_shares, split_sizes = There.apply(tokens, shares, chosen, trip)
        results = run_experts(rows, split_sizes)
        return Back.apply(results * row_shares.unsqueeze(1).to(results.dtype), trip)


class _Trip:
    """One dispatch: the way there, and with its handle the ways back, in forward and backward."""

    def __init__(self, buffer: Any, num_local: int) -> None:
        self._buffer, self._num_local = buffer, num_local
        self._handle: Any = None

    def there(self, tokens: Tensor, shares: Tensor, chosen: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows, row_shares, _, split_sizes, self._handle = self._buffer.dispatch_with_permute(
            hidden=tokens, routing_map=chosen, probs=shares, num_of_experts_per_rank=self._num_local
        )
        return rows, row_shares, split_sizes.to(tokens.device, torch.int64)

    def there_again(self, tokens: Tensor) -> Tensor:
        rows: Tensor = self._buffer.dispatch_with_permute(hidden=tokens, handle=self._handle)[0]
        return rows

    def back(self, rows: Tensor, row_shares: Tensor | None = None) -> tuple[Tensor, Tensor | None]:
        tokens, shares = self._buffer.combine_with_unpermute(hidden=rows, probs=row_shares, handle=self._handle)
        return tokens, shares
