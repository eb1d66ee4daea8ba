"""The feed-forward networks of a mixture of experts: all experts in two or three grouped layers."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate

from .dispatch import TokenDispatcher
from .grouped_linear import GroupedLinear

Activation = Callable[[Tensor], Tensor]


class GroupedMLP(nn.Module):
    """``down(activation(gate(x)) * up(x))`` of each group's rows with the group's weights.

    ``gate`` and ``up`` are one layer ``gate_up`` of twice the width, the rows of ``gate`` first, hence one grouped GEMM
    for both. Under ``gtp_shard`` the gather of ``down`` is launched before that GEMM and hides behind it.

    Args:
        num_groups: Groups (experts).
        dim: Size of input and output rows.
        hidden_dim: Inner width of each expert.
        activation: Elementwise, applied to ``gate``.
        is_fused: False makes two layers ``gate`` and ``up``, as tensor parallelism inside of experts needs them.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Raises:
        ValueError: A size is below 1.
    """

    def __init__(
        self,
        num_groups: int,
        dim: int,
        hidden_dim: int,
        *,
        activation: Activation = F.silu,
        is_fused: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()

        def layer(in_features: int, out_features: int) -> GroupedLinear:
            return GroupedLinear(num_groups, in_features, out_features, bias=False, device=device, dtype=dtype)

        self.num_groups, self.dim, self.hidden_dim, self.is_fused = num_groups, dim, hidden_dim, is_fused
        self.activation = activation
        if is_fused:
            self.gate_up = layer(dim, 2 * hidden_dim)
        else:
            self.gate, self.up = layer(dim, hidden_dim), layer(dim, hidden_dim)
        self.down = layer(hidden_dim, dim)
        # The axis that cuts the inner width, set by parallelize_experts.
        self.tp_mesh: DeviceMesh | None = None

    def forward(self, x: Tensor, split_sizes: Tensor) -> Tensor:
        """
        Args:
            x: Shape ``(num_rows, dim)``, sorted by group.
            split_sizes: As for :meth:`GroupedLinear.forward`.

        Returns:
            Shape ``(num_rows, dim)``; rows that belong to no group are zero.
        """
        if self.tp_mesh is not None:
            # Each rank has a part of the width, so the gradients of x are terms of a sum.
            x = DTensor.from_local(x, self.tp_mesh, [Replicate()], run_check=False).to_local(
                grad_placements=[Partial()]
            )
        if self.is_fused:
            gate, up = self.gate_up(x, split_sizes).chunk(2, -1)
        else:
            gate, up = self.gate(x, split_sizes), self.up(x, split_sizes)
        y: Tensor = self.down(self.activation(gate) * up, split_sizes)
        if self.tp_mesh is not None:
            y = DTensor.from_local(y, self.tp_mesh, [Partial()], run_check=False).full_tensor()
        return y

    def extra_repr(self) -> str:
        return f"activation={getattr(self.activation, '__name__', self.activation)}"


class GroupedExperts(nn.Module):
    """Routed experts: tokens go to their experts, wherever these are, and come back as a weighted sum.

    Takes what a router returns, in the order of arguments that the experts of ``transformers`` have.

    Args:
        mlp: The experts.
        dispatcher: Brings tokens to them; by default for experts that are all on this rank.
    """

    def __init__(self, mlp: GroupedMLP, dispatcher: TokenDispatcher | None = None) -> None:
        super().__init__()
        self.mlp = mlp
        self.dispatcher = TokenDispatcher(mlp.num_groups) if dispatcher is None else dispatcher

    @property
    def num_experts(self) -> int:
        return self.mlp.num_groups

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """
        Args:
            hidden_states: Tokens, shape ``(num_tokens, dim)``.
            top_k_index: Experts of each token, shape ``(num_tokens, k)``, int64; none twice for a token.
            top_k_weights: Their weights, same shape, floating point.

        Returns:
            Shape ``(num_tokens, dim)``.
        """
        dispatched = self.dispatcher.dispatch(hidden_states, top_k_index)
        rows = self.mlp(dispatched.rows, dispatched.split_sizes)
        return self.dispatcher.combine(rows, dispatched, top_k_weights)
