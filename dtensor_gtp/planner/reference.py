"""The decoder that the planner records for presets and known configurations: what one rank computes of it.

It has the sizes of one rank: heads, columns and experts are divided by ``tp`` and ``ep``, activations between layers by
``tp`` (sequence parallelism) and ``cp``. All of it is plain ``nn`` code as in ``examples/llama.py``, with rotary
embeddings in float32 and grouped-query or multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .model import ModelConfig
from .stand_ins import Collectives, Experts, VocabularyLoss


class _Rotary(nn.Module):
    cos: Tensor
    sin: Tensor

    def __init__(self, head_dim: int, num_tokens: int) -> None:
        super().__init__()
        self.register_buffer("cos", torch.empty(num_tokens, head_dim))
        self.register_buffer("sin", torch.empty(num_tokens, head_dim))

    def forward(self, x_BHTD: Tensor) -> Tensor:
        x = x_BHTD.float()
        first, second = x.chunk(2, dim=-1)
        rotated = torch.cat((-second, first), dim=-1)
        return (x * self.cos + rotated * self.sin).type_as(x_BHTD)


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig, tp: int, rope: _Rotary) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        heads, kv_heads = config.heads // tp, max(config.kv_heads // tp, 1)
        self.wq = nn.Linear(config.dim, heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(heads * config.head_dim, config.dim, bias=False)
        self.rope = rope

    def forward(self, x_BTC: Tensor, collectives: Collectives) -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = (
            w(x_BTC).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        y_BHTD = F.scaled_dot_product_attention(
            self.rope(q_BHTD),
            collectives.gather_keys(self.rope(k_BHTD)),
            collectives.gather_keys(v_BHTD),
            is_causal=True,
            enable_gqa=q_BHTD.size(1) != k_BHTD.size(1),
        )
        return self.wo(y_BHTD.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class _LatentAttention(nn.Module):
    """Multi-head latent attention on this rank's heads; the narrow projections are whole on each rank."""

    def __init__(self, config: ModelConfig, tp: int, rope: _Rotary) -> None:
        super().__init__()
        self.heads, self.rope_dim, self.nope_dim = config.heads // tp, config.rope_head_dim, config.head_dim
        self.value_dim = config.value_head_dim
        self.wq_a = nn.Linear(config.dim, config.q_rank, bias=False)
        self.q_norm = nn.RMSNorm(config.q_rank)
        self.wq_b = nn.Linear(config.q_rank, self.heads * (self.nope_dim + self.rope_dim), bias=False)
        self.wkv_a = nn.Linear(config.dim, config.kv_rank + self.rope_dim, bias=False)
        self.kv_norm = nn.RMSNorm(config.kv_rank)
        self.wkv_b = nn.Linear(config.kv_rank, self.heads * (self.nope_dim + self.value_dim), bias=False)
        self.wo = nn.Linear(self.heads * self.value_dim, config.dim, bias=False)
        self.rope = rope

    def forward(self, x_BTC: Tensor, collectives: Collectives) -> Tensor:
        q_BHTD = self.wq_b(self.q_norm(self.wq_a(x_BTC))).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q_nope, q_rope = q_BHTD.split([self.nope_dim, self.rope_dim], dim=-1)
        latent_BTC, k_rope = self.wkv_a(x_BTC).split([self.kv_norm.normalized_shape[0], self.rope_dim], dim=-1)
        kv_BHTD = self.wkv_b(self.kv_norm(latent_BTC)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k_nope, v_BHTD = kv_BHTD.split([self.nope_dim, self.value_dim], dim=-1)
        q_BHTD = torch.cat([q_nope, self.rope(q_rope)], dim=-1)
        k_rope = self.rope(k_rope.unsqueeze(1)).expand(-1, self.heads, -1, -1)
        k_BHTD = collectives.gather_keys(torch.cat([k_nope, k_rope], dim=-1))
        v_BHTD = collectives.gather_keys(v_BHTD)
        y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True)
        return self.wo(y_BHTD.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class _FeedForward(nn.Module):
    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x_BTC: Tensor) -> Tensor:
        return self.w2(F.silu(self.w1(x_BTC)) * self.w3(x_BTC))  # type: ignore[no-any-return]


class _Mixture(nn.Module):
    """Routed experts, all equally loaded, and shared ones."""

    def __init__(self, config: ModelConfig, tp: int, ep: int) -> None:
        super().__init__()
        self.num_local, self.per_token = config.experts // ep, config.experts_per_token
        self.router = nn.Linear(config.dim, config.experts, bias=False)
        self.w1 = Experts(self.num_local, config.dim, config.expert_hidden_dim)
        self.w3 = Experts(self.num_local, config.dim, config.expert_hidden_dim)
        self.w2 = Experts(self.num_local, config.expert_hidden_dim, config.dim)
        shared = config.shared_experts * config.expert_hidden_dim // tp
        self.shared = _FeedForward(config.dim, shared) if shared else None

    def forward(self, x_BTC: Tensor, collectives: Collectives) -> Tensor:
        scores_BTK = self.router(x_BTC).softmax(-1)[..., : self.per_token]
        x_RC = x_BTC.flatten(0, 1).repeat_interleave(self.per_token, 0)  # a row for each token and expert
        rows = max(x_RC.shape[0] // self.num_local, 1)
        x_ERC = collectives.exchange_tokens(x_RC)[: rows * self.num_local].unflatten(0, (self.num_local, rows))
        y_ERC = self.w2(F.silu(self.w1(x_ERC)) * self.w3(x_ERC))
        y_RC = collectives.exchange_tokens(y_ERC.flatten(0, 1))
        y_RC = F.pad(y_RC, (0, 0, 0, x_RC.shape[0] - y_RC.shape[0])) if y_RC.shape[0] < x_RC.shape[0] else y_RC
        y_BTKC = y_RC.view(*x_BTC.shape[:2], self.per_token, -1) * scores_BTK.unsqueeze(-1)
        y_BTC: Tensor = y_BTKC.sum(2)
        return y_BTC if self.shared is None else y_BTC + self.shared(x_BTC)


class _Block(nn.Module):
    def __init__(self, config: ModelConfig, rope: _Rotary, tp: int, ep: int, *, is_mixture: bool) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim)
        self.attention = (_LatentAttention if config.kv_rank else _Attention)(config, tp, rope)
        self.ffn_norm = nn.RMSNorm(config.dim)
        self.ffn = _Mixture(config, tp, ep) if is_mixture else _FeedForward(config.dim, config.hidden_dim // tp)

    def forward(self, x_BTC: Tensor, collectives: Collectives) -> Tensor:
        h_BTC = collectives.gather_sequence(self.attention_norm(x_BTC))
        x_BTC = x_BTC + collectives.scatter_sequence(self.attention(h_BTC, collectives))
        h_BTC = self.ffn_norm(x_BTC)
        if isinstance(self.ffn, _Mixture):  # tokens stay divided over tp: each rank routes its own
            return x_BTC + self.ffn(h_BTC, collectives)  # type: ignore[no-any-return]
        return x_BTC + collectives.scatter_sequence(self.ffn(collectives.gather_sequence(h_BTC)))


class Reference(nn.Module):
    """What one rank has of a decoder. ``kinds`` says of each block whether it is a mixture. A rank along cp has
    ``num_tokens``, together with those along tp."""

    def __init__(self, config: ModelConfig, kinds: list[bool], num_tokens: int, tp: int = 1, ep: int = 1) -> None:
        super().__init__()
        rope = _Rotary(config.rope_head_dim or config.head_dim, num_tokens)
        self.tp = tp
        self.embedding = nn.Embedding(config.vocab_size, config.dim // tp)
        self.layers = nn.ModuleList(_Block(config, rope, tp, ep, is_mixture=kind) for kind in kinds)
        self.norm = nn.RMSNorm(config.dim)
        self.output = nn.Linear(config.dim, config.vocab_size // tp, bias=False)

    def loss(self, tokens_BT: Tensor, targets_BT: Tensor, collectives: Collectives, kind: str = "bf16") -> Tensor:
        """Next-token loss on logits of this rank's part of the vocabulary. All kinds but "bf16" compute it in fp32."""
        x_BTC = self.embedding(tokens_BT)
        if self.tp > 1:  # columns of the table are divided: exchanged for rows of the sequence
            x_BTC = collectives.scatter_sequence(torch.cat([x_BTC] * self.tp, dim=-1))
        for layer in self.layers:
            x_BTC = layer(x_BTC, collectives)
        x_BTC = collectives.gather_sequence(self.norm(x_BTC))
        logits_BTV = self.output(x_BTC)
        logits_BTV = logits_BTV if kind == "bf16" else logits_BTV.float()
        loss: Any = VocabularyLoss.apply if self.tp > 1 else F.cross_entropy
        return loss(logits_BTV.flatten(0, 1), targets_BT.flatten())  # type: ignore[no-any-return]
