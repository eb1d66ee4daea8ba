"""A Llama-style decoder whose feed-forwards are mixtures of experts.

Each token goes to the ``top_k`` experts that a linear router prefers, beside a shared expert that sees all tokens. No
token is dropped: experts are grouped layers, which take as many rows as come. The model trains on one process as it is,
and over many by ``parallelize_experts`` and ``gtp_shard``, which change where weights are and how tokens travel.

A loss keeps the load of the experts even: for expert ``e`` the share of tokens that chose it times its mean
probability, summed over experts, times their number; it is 1 where both are uniform. Shares are taken over the tokens
of all ranks, so that the loss does not depend on their number.

Source: Dai et al., "DeepSeekMoE", arXiv:2401.06066 (shared experts); Fedus et al., "Switch Transformers",
arXiv:2101.03961 (the load-balancing loss); Gale et al., "MegaBlocks", arXiv:2211.15841 (no dropped tokens).
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh

from dtensor_gtp.nn import GroupedExperts, GroupedLinear, GroupedMLP
from llama import INIT_STD, FeedForward, Llama, LlamaConfig


@dataclass(frozen=True)
class MoEConfig(LlamaConfig):
    """Sizes of a :class:`MoELlama`.

    ``hidden_dim`` is the inner width that a token passes: the shared expert's and that of its ``top_k`` experts. So a
    :class:`Llama` of the same sizes has as many active parameters, apart from the routers.

    Args:
        num_experts: experts of a layer, beside the shared one.
        top_k: experts of a token.
        shared_dim: inner width of the shared expert.
        balance: weight of the load-balancing loss.

    Raises:
        ValueError: if ``top_k`` experts do not share what is left of ``hidden_dim`` evenly, or there are too few.
    """

    num_experts: int = 8
    top_k: int = 2
    shared_dim: int = 0
    balance: float = 0.01

    def __post_init__(self) -> None:
        super().__post_init__()
        routed = self.hidden_dim - self.shared_dim
        if not 1 <= self.top_k <= self.num_experts or routed <= 0 or routed % self.top_k:
            raise ValueError(
                f"MoEConfig expects top_k={self.top_k} of num_experts={self.num_experts} that divides hidden_dim - "
                f"shared_dim = {self.hidden_dim} - {self.shared_dim}."
            )

    @property
    def expert_dim(self) -> int:
        """Inner width of each expert."""
        return (self.hidden_dim - self.shared_dim) // self.top_k


class MoE(nn.Module):
    """A shared expert and the chosen ones of each token."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.top_k = config.top_k
        self.router = nn.Linear(config.dim, config.num_experts, bias=False)
        self.experts = GroupedExperts(GroupedMLP(config.num_experts, config.dim, config.expert_dim))
        self.shared = FeedForward(config.dim, config.shared_dim) if config.shared_dim else None
        # The ranks that see different tokens; None where there is one.
        self.data_mesh: DeviceMesh | None = None
        # Of the last forward.
        self.balance_loss: torch.Tensor | None = None

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        x_NC = x_BTC.flatten(0, 1)
        probs_NE = self.router(x_NC).float().softmax(-1)
        weights_NK, chosen_NK = probs_NE.topk(self.top_k)
        weights_NK = weights_NK / weights_NK.sum(-1, keepdim=True)
        self.balance_loss = self._balance(probs_NE, chosen_NK) if self.training else None
        y_NC = self.experts(x_NC, chosen_NK, weights_NK)
        if self.shared is not None:
            y_NC = y_NC + self.shared(x_NC)
        return y_NC.view_as(x_BTC)

    def _balance(self, probs_NE: torch.Tensor, chosen_NK: torch.Tensor) -> torch.Tensor:
        num_experts = probs_NE.size(1)
        experts = torch.arange(num_experts, device=chosen_NK.device)
        counts_E = (chosen_NK.unsqueeze(-1) == experts).sum((0, 1)).float()
        if self.data_mesh is not None:
            dist.all_reduce(counts_E, group=self.data_mesh.get_group())
        return num_experts * (counts_E / counts_E.sum() * probs_NE.mean(0)).sum()


class MoELlama(Llama):
    """:class:`Llama` with a :class:`MoE` in each block.

    Args:
        config: the sizes.
    """

    config: MoEConfig

    def make_ffn(self, layer: int) -> nn.Module:
        return MoE(self.config)

    @property
    def moes(self) -> list[MoE]:
        return [layer.ffn for layer in self.layers]

    def init_weights(self) -> None:
        """Initializes the experts as :meth:`Llama.init_weights` does the feed-forwards."""
        super().init_weights()
        for name, module in self.named_modules():
            if isinstance(module, GroupedLinear):
                nn.init.normal_(module.weight, std=self.residual_std if name.endswith(".down") else INIT_STD)

    def balance_loss(self) -> torch.Tensor | float:
        """The mean of the layers' load-balancing losses, weighted; of the last forward in training mode."""
        losses = [moe.balance_loss for moe in self.moes if moe.balance_loss is not None]
        return self.config.balance * torch.stack(losses).mean() if losses else 0.0
