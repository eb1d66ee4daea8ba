"""A Llama-style decoder in plain ``torch.nn`` modules.

Token embedding, then blocks of grouped-query attention with rotary positions and a SwiGLU feed-forward, each behind an
RMSNorm with a residual connection, then a norm and an output projection. The model knows nothing of sharding: every
weight is an ordinary parameter of an ordinary module, and the same class trains on one process, under ``gtp_shard``
and under ``fully_shard``.

Source: Touvron et al., "LLaMA: Open and Efficient Foundation Language Models", arXiv:2302.13971; Ainslie et al.,
"GQA", arXiv:2305.13245; Su et al., "RoFormer", arXiv:2104.09864; Shazeer, "GLU Variants Improve Transformer",
arXiv:2002.05202.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F

INIT_STD = 0.02

Head = Callable[[torch.Tensor, nn.Linear], torch.Tensor]


@dataclass(frozen=True)
class LlamaConfig:
    """Sizes of a :class:`Llama`.

    Args:
        vocab_size: number of token ids.
        dim: width of the residual stream.
        num_layers: number of blocks.
        num_heads: number of query heads; divides ``dim``, and ``dim / num_heads`` must be even.
        num_kv_heads: number of key and value heads; divides ``num_heads``.
        hidden_dim: inner width of the feed-forward.
        max_seq_len: longest sequence, in tokens, that the rotary table covers.
        rope_theta: base of the rotary frequencies.
        norm_eps: epsilon of the RMSNorms.

    Raises:
        ValueError: if the head counts do not divide as stated.
    """

    vocab_size: int
    dim: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    hidden_dim: int
    max_seq_len: int
    rope_theta: float = 10000.0
    norm_eps: float = 1e-5

    def __post_init__(self) -> None:
        if self.dim % self.num_heads or self.head_dim % 2:
            raise ValueError(
                f"LlamaConfig expects num_heads to divide dim into heads of even width, but got dim={self.dim}, "
                f"num_heads={self.num_heads}."
            )
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"LlamaConfig expects num_kv_heads to divide num_heads, but got num_heads={self.num_heads}, "
                f"num_kv_heads={self.num_kv_heads}."
            )

    @property
    def head_dim(self) -> int:
        return self.dim // self.num_heads


class RotaryEmbedding(nn.Module):
    """Rotates pairs of head features by an angle that grows with the position.

    One instance is shared by all attention layers. The table stays in fp32 whatever the parameters' precision.
    """

    cos: torch.Tensor
    sin: torch.Tensor

    def __init__(self, head_dim: int, max_seq_len: int, theta: float) -> None:
        super().__init__()
        self.head_dim = head_dim
        self.theta = theta
        for name in ("cos", "sin"):
            self.register_buffer(name, torch.empty(max_seq_len, head_dim), persistent=False)
        self.reset_buffers()

    @torch.no_grad()
    def reset_buffers(self) -> None:
        """Fills the table; needed again after ``to_empty``."""
        exponents = torch.arange(0, self.head_dim, 2, device=self.cos.device, dtype=torch.float32) / self.head_dim
        positions = torch.arange(self.cos.size(0), device=self.cos.device, dtype=torch.float32)
        angles_TD = torch.outer(positions, self.theta**-exponents).repeat(1, 2)
        self.cos.copy_(angles_TD.cos())
        self.sin.copy_(angles_TD.sin())

    def forward(self, x_BHTD: torch.Tensor) -> torch.Tensor:
        cos_TD, sin_TD = self.cos[: x_BHTD.size(-2)], self.sin[: x_BHTD.size(-2)]
        x = x_BHTD.float()
        first, second = x.chunk(2, dim=-1)
        rotated = torch.cat((-second, first), dim=-1)
        return (x * cos_TD + rotated * sin_TD).type_as(x_BHTD)


class Attention(nn.Module):
    """Causal grouped-query attention."""

    def __init__(self, config: LlamaConfig, rope: RotaryEmbedding) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        kv_dim = config.num_kv_heads * config.head_dim
        self.wq = nn.Linear(config.dim, config.dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_dim, bias=False)
        self.wo = nn.Linear(config.dim, config.dim, bias=False)
        self.rope = rope

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        q_BHTD, k_BHTD, v_BHTD = (
            w(x_BTC).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        y_BHTD = F.scaled_dot_product_attention(
            self.rope(q_BHTD), self.rope(k_BHTD), v_BHTD, is_causal=True, enable_gqa=q_BHTD.size(1) != k_BHTD.size(1)
        )
        return self.wo(y_BHTD.transpose(1, 2).flatten(-2))


class FeedForward(nn.Module):
    """SwiGLU: ``w2(silu(w1(x)) * w3(x))``."""

    def __init__(self, dim: int, hidden_dim: int) -> None:
        super().__init__()
        self.w1 = nn.Linear(dim, hidden_dim, bias=False)
        self.w3 = nn.Linear(dim, hidden_dim, bias=False)
        self.w2 = nn.Linear(hidden_dim, dim, bias=False)

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        return self.w2(F.silu(self.w1(x_BTC)) * self.w3(x_BTC))


class Block(nn.Module):
    """Attention and feed-forward, each on the normalized residual stream."""

    def __init__(self, config: LlamaConfig, rope: RotaryEmbedding, ffn: nn.Module) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.attention = Attention(config, rope)
        self.ffn_norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.ffn = ffn

    def forward(self, x_BTC: torch.Tensor) -> torch.Tensor:
        x_BTC = x_BTC + self.attention(self.attention_norm(x_BTC))
        return x_BTC + self.ffn(self.ffn_norm(x_BTC))


class Llama(nn.Module):
    """Decoder-only language model.

    Args:
        config: the sizes.

    The constructor leaves PyTorch's default initialization; call :meth:`init_weights` once the parameters are on their
    final device (directly, or after ``gtp_shard`` and ``to_empty`` of a meta-device model).
    """

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.config = config
        self.rope = RotaryEmbedding(config.head_dim, config.max_seq_len, config.rope_theta)
        self.embedding = nn.Embedding(config.vocab_size, config.dim)
        self.layers = nn.ModuleList(
            Block(config, self.rope, self.make_ffn(layer)) for layer in range(config.num_layers)
        )
        self.norm = nn.RMSNorm(config.dim, eps=config.norm_eps)
        self.output = nn.Linear(config.dim, config.vocab_size, bias=False)

    def make_ffn(self, layer: int) -> nn.Module:
        """The feed-forward of a layer, which the constructor builds."""
        return FeedForward(self.config.dim, self.config.hidden_dim)

    @property
    def residual_std(self) -> float:
        """Initial standard deviation of the projections that write to the residual stream."""
        return INIT_STD / math.sqrt(2 * self.config.num_layers)

    def init_weights(self) -> None:
        """Initializes parameters and buffers in place, drawing from torch's default generator.

        Matrices are normal with standard deviation 0.02; the two projections that write to the residual stream are
        scaled by ``1 / sqrt(2 * num_layers)``, so that its variance does not grow with depth. Norm weights are one.
        """
        for name, module in self.named_modules():
            if isinstance(module, nn.Linear | nn.Embedding):
                nn.init.normal_(module.weight, std=self.residual_std if name.endswith((".wo", ".w2")) else INIT_STD)
            elif isinstance(module, nn.RMSNorm):
                nn.init.ones_(module.weight)
            elif isinstance(module, RotaryEmbedding):
                module.reset_buffers()

    def forward(self, tokens: torch.Tensor, head: Head | None = None) -> torch.Tensor:
        """Predicts the next token at every position.

        Args:
            tokens: ids of shape (batch, sequence), an integer dtype; the sequence is at most ``max_seq_len`` long.
            head: called with the last hidden states, of shape (batch, sequence, dim), and the output projection, in
                the place of the latter: a loss that needs no logits, for example.

        Returns:
            Logits of shape (batch, sequence, vocab_size), or what ``head`` returns.

        Raises:
            ValueError: if the sequence is longer than ``max_seq_len``.
        """
        if tokens.size(-1) > self.config.max_seq_len:
            raise ValueError(f"Llama expects at most {self.config.max_seq_len} positions, but got {tokens.size(-1)}.")
        x_BTC = self.embedding(tokens)
        for layer in self.layers:
            x_BTC = layer(x_BTC)
        x_BTC = self.norm(x_BTC)
        return self.output(x_BTC) if head is None else head(x_BTC, self.output)
