"""Models of the planner: sizes of decoders, from presets and configurations, and the module that is recorded for them.

It has the sizes of one rank: heads, columns and experts are divided by ``tp`` and ``ep``, activations between layers by
``tp`` (sequence parallelism) and ``cp``. All of it is plain ``nn`` code as in ``examples/llama.py``, with rotary
embeddings in float32 and grouped-query or multi-head latent attention (DeepSeek-V2, arXiv 2405.04434, section 2.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch import Tensor

from .._howto import printable
from .errors import PlanError, expect
from .machine import read_json
from .recorder import Experts, Kind, Op, Recorder

# More would take minutes, or more memory than the host has, and is a mistake.
MAX_LAYERS = 10_000
_MAX_SIZE = 1 << 31


def _size(*keys: str, least: int = 0) -> Any:
    """A size, its names in a ``config.json``, and the least that it may be: 0 of what a model may lack."""
    return field(default=0 if least == 0 else MISSING, metadata={"keys": keys, "least": least})


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a decoder with RMSNorm, rotary embeddings and SwiGLU."""

    name: str  # for people
    dim: int = _size("hidden_size", least=1)  # of the residual stream
    layers: int = _size("num_hidden_layers", least=1)  # number of blocks
    heads: int = _size("num_attention_heads", least=1)  # of queries
    kv_heads: int = _size("num_key_value_heads", least=1)  # of keys and values
    head_dim: int = _size("qk_nope_head_dim", "head_dim", least=1)  # of a head; if latent, of its part without rotation
    hidden_dim: int = _size("intermediate_size", least=1)  # of a dense feed-forward
    vocab_size: int = _size("vocab_size", least=2)  # rows of the embedding and of the head
    experts: int = _size("num_local_experts", "num_experts", "n_routed_experts")  # of a mixture; 0 for a dense model
    experts_per_token: int = _size("num_experts_per_tok")  # that each token is sent to
    expert_hidden_dim: int = _size("moe_intermediate_size")  # of one expert
    shared_experts: int = _size("n_shared_experts")  # that see all tokens
    dense_layers: int = _size("first_k_dense_replace")  # blocks before the first mixture
    q_rank: int = _size("q_lora_rank")  # of latent queries; 0 for queries of one projection
    kv_rank: int = _size("kv_lora_rank")  # of latent keys and values; 0 without latent attention
    rope_head_dim: int = _size("qk_rope_head_dim")  # of the rotary part of a head, with latent attention
    value_head_dim: int = _size("v_head_dim")  # of values, with latent attention
    is_tied: bool = False  # whether embedding and head are one matrix
    window: int = _size("sliding_window")  # tokens that attention looks back at; 0 for all
    full_layers: int = _size("max_window_layers")  # blocks whose attention has no window

    def looked_at(self, seq_len: int) -> float:
        """Of all pairs of tokens, the share that a block computes on average: half under a causal mask, less with a
        window."""
        if not 0 < self.window < seq_len:
            return 0.5
        part = self.window / seq_len
        full = min(self.full_layers / self.layers, 1)
        return full * 0.5 + (1 - full) * (part - part * part / 2)

    @property
    def kinds(self) -> list[bool]:
        """Of each block, whether it is a mixture."""
        return [bool(self.experts) and number >= self.dense_layers for number in range(self.layers)]


# model_type of config.json, whose blocks are those of ``Reference``: attention and SwiGLU without biases that matter.
_KNOWN_TYPES = {"llama", "mistral", "qwen2", "qwen3", "mixtral", "deepseek_v3"}
_TEXT = (str, "a text")
_FLAG = (bool, "true or false")
_TYPES = {
    **{"model_type": _TEXT, "_name_or_path": _TEXT, "layer_types": (list, "a list")},
    **{"tie_word_embeddings": _FLAG, "use_sliding_window": _FLAG},
}
# Of transformers, for keys that files may leave out.
_QWEN = {"sliding_window": 4096, "max_window_layers": 28}
_DEFAULTS = {"qwen2": _QWEN, "qwen3": _QWEN, "mistral": {"sliding_window": 4096}, "deepseek_v3": {"q_lora_rank": 1536}}
_LAYER_KEYS = {"num_hidden_layers", "num_layers", "n_layer", "n_layers"}


def config_of_json(path: Path) -> ModelConfig | None:
    """The sizes in a ``config.json`` of transformers; None for a type that only transformers can build."""
    content = read_json(path, "model expects a config.json", "Name another.")
    has_type = isinstance(content, dict) and "model_type" in content
    expect(has_type, "model expects a config.json with a model_type", f"{path} has none. Name another.")
    for key, (kind, expected) in _TYPES.items():
        is_fine = isinstance(content.get(key), kind | None)
        wrong = f"{path} has {content.get(key)!r}. Mend it."
        expect(is_fine, f"model expects {expected} as {key}", wrong)
    for key in content.keys() & _LAYER_KEYS:
        if isinstance(content[key], int) and content[key] > MAX_LAYERS:
            raise PlanError(f"model expects at most {MAX_LAYERS} as {key}, but {path} has more. Mend it.")
    kind = content["model_type"]
    if kind not in _KNOWN_TYPES:
        return None
    content = _DEFAULTS.get(kind, {}) | content
    if not content.get("use_sliding_window", kind in ("mistral", "mixtral")):  # these two need not say it
        content["sliding_window"] = 0
    if content.get("layer_types") is not None:
        content["max_window_layers"] = len(content["layer_types"]) - content["layer_types"].count("sliding_attention")
    values: dict[str, Any] = {"name": printable(content.get("_name_or_path") or path.parent.name or path.stem)}
    for item in fields(ModelConfig):
        if item.metadata:
            values[item.name] = _size_of(item, content, values, str(path))
    if values["experts"] and not values["expert_hidden_dim"]:
        values["expert_hidden_dim"] = values["hidden_dim"]
    values["is_tied"] = bool(content.get("tie_word_embeddings"))
    config = ModelConfig(**values)
    has = f"{path} has"
    wrong = f"{has} {config.kv_heads} and {config.heads}. Mend it."
    expect(config.heads % config.kv_heads == 0, "model expects kv_heads to divide heads", wrong)
    is_fine = 0 < config.experts_per_token <= config.experts
    wrong = f"{has} {config.experts_per_token}. Mend it."
    expect(is_fine or not config.experts, f"model expects experts_per_token from 1 to {config.experts}", wrong)
    return config


def _size_of(item: Field[int], content: Mapping[str, Any], before: Mapping[str, int], where: str) -> int:
    """A size in a file that has those ``before``; PlanError names one that is missing or wrong."""
    keys = item.metadata["keys"]
    least = item.metadata["least"]
    value = next((content[key] for key in keys if content.get(key) is not None), None)
    if value is None and item.name in ("kv_heads", "head_dim"):  # what a file may leave out
        if item.name == "kv_heads":
            value = before["heads"]
        else:
            value = before["dim"] // before["heads"]
    elif value is None:
        expect(not least, f"model expects {keys[0]} in {where}", "there is none. Add it.")
        value = 0
    is_fine = type(value) is int and value >= least
    wrong = f"{where} has {value!r}. Mend it."
    expect(is_fine, f"model expects an integer of at least {least} as {item.name}", wrong)
    expect(value <= _MAX_SIZE, f"model expects at most {_MAX_SIZE} as {item.name}", f"{where} has more. Mend it.")
    return int(value)


_FILES = sorted((Path(__file__).parent / "models").glob("*.json"))
PRESETS: Mapping[str, ModelConfig] = {
    path.stem: config for path in _FILES if (config := config_of_json(path)) is not None
}


class VocabularyLoss(torch.autograd.Function):
    """torch's ``loss_parallel`` on this rank's logits. It is not fused, so backward holds four tensors of that size."""

    @staticmethod
    def forward(ctx: Any, logits_TV: Tensor, targets_T: Tensor) -> Tensor:
        shifted = logits_TV - logits_TV.amax(-1, keepdim=True)
        result = shifted - shifted.exp().sum(-1, keepdim=True).log()
        ctx.save_for_backward(result)
        return -result.gather(-1, targets_T.unsqueeze(-1)).mean()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        (result,) = ctx.saved_tensors
        of_targets = torch.zeros_like(result)
        return (of_targets + result.exp()) * grad, None


class _Exchange(torch.autograd.Function):
    """A collective that makes ``new`` rows of each ``old`` ones along ``dim``; backward does the opposite."""

    @staticmethod
    def forward(ctx: Any, input: Tensor, recorder: Recorder, kind: Kind, dim: int, new: int, old: int) -> Tensor:
        ctx.others = recorder, kind, dim, old, new
        shape = list(input.shape)
        shape[dim] = shape[dim] * new // old
        output = input.new_empty(shape)
        recorder.note(Op(kind, nbytes=max(input.nbytes, output.nbytes)))
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _Exchange.forward(ctx, grad, *ctx.others), None, None, None, None, None


class Collectives:
    """The collectives of a layer; an axis of one rank does nothing. In backward a gather is a scatter."""

    def __init__(self, recorder: Recorder, tp: int, cp: int, ep: int) -> None:
        self._recorder = recorder
        self._sizes = {Kind.TP: tp, Kind.CP: cp, Kind.EP: ep}

    def gather(self, input: Tensor, kind: Kind, dim: int = 1) -> Tensor:
        return self._exchange(input, kind, dim, self._sizes[kind], 1)

    def scatter(self, input: Tensor, kind: Kind) -> Tensor:
        return self._exchange(input, kind, 1, 1, self._sizes[kind])

    def exchange(self, input: Tensor, kind: Kind) -> Tensor:
        """All-to-all of rows."""
        return self._exchange(input, kind, 0, self._sizes[kind], self._sizes[kind])

    def _exchange(self, input: Tensor, kind: Kind, dim: int, new: int, old: int) -> Tensor:
        if new == old == 1:
            return input
        return _Exchange.apply(input, self._recorder, kind, dim, new, old)  # type: ignore[no-any-return,no-untyped-call]


class _Rotary(nn.Module):
    def __init__(self, head_dim: int, num_tokens: int) -> None:
        super().__init__()
        self.cos, self.sin = (nn.Buffer(torch.empty(num_tokens, head_dim)) for _ in range(2))

    def forward(self, x_BHTD: Tensor) -> Tensor:
        x = x_BHTD.float()
        first, second = x.chunk(2, dim=-1)
        rotated = torch.cat((-second, first), dim=-1)
        return (x * self.cos + rotated * self.sin).type_as(x_BHTD)


def _attend(q_BHTD: Tensor, k_BHTD: Tensor, v_BHTD: Tensor, collectives: Collectives) -> Tensor:
    """Of the queries of this rank to the keys of all ranks of cp."""
    k_BHTD, v_BHTD = (collectives.gather(x_BHTD, Kind.CP, 2) for x_BHTD in (k_BHTD, v_BHTD))
    has_groups = q_BHTD.size(1) != k_BHTD.size(1)
    y_BHTD = F.scaled_dot_product_attention(q_BHTD, k_BHTD, v_BHTD, is_causal=True, enable_gqa=has_groups)
    return y_BHTD.transpose(1, 2).flatten(-2)


class _Attention(nn.Module):
    def __init__(self, config: ModelConfig, tp: int, rope: _Rotary) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        heads = config.heads // tp
        kv_heads = max(config.kv_heads // tp, 1)
        self.wq = nn.Linear(config.dim, heads * config.head_dim, bias=False)
        self.wk = nn.Linear(config.dim, kv_heads * config.head_dim, bias=False)
        self.wv = nn.Linear(config.dim, kv_heads * config.head_dim, bias=False)
        self.wo = nn.Linear(heads * config.head_dim, config.dim, bias=False)
        self.rope = rope

    def forward(self, x_BTC: Tensor, collectives: Collectives) -> Tensor:
        q_BHTD, k_BHTD, v_BHTD = (
            w(x_BTC).unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        return self.wo(_attend(self.rope(q_BHTD), self.rope(k_BHTD), v_BHTD, collectives))  # type: ignore[no-any-return]


class _LatentAttention(nn.Module):
    """Multi-head latent attention on this rank's heads; the narrow projections are whole on each rank."""

    def __init__(self, config: ModelConfig, tp: int, rope: _Rotary) -> None:
        super().__init__()
        self.heads = config.heads // tp
        self.rope_dim = config.rope_head_dim
        self.nope_dim = config.head_dim
        self.value_dim = config.value_head_dim
        self.has_q_rank = config.q_rank > 0
        if self.has_q_rank:
            self.wq_a = nn.Linear(config.dim, config.q_rank, bias=False)
            self.q_norm = nn.RMSNorm(config.q_rank)
        self.wq_b = nn.Linear(config.q_rank or config.dim, self.heads * (self.nope_dim + self.rope_dim), bias=False)
        self.wkv_a = nn.Linear(config.dim, config.kv_rank + self.rope_dim, bias=False)
        self.kv_norm = nn.RMSNorm(config.kv_rank)
        self.wkv_b = nn.Linear(config.kv_rank, self.heads * (self.nope_dim + self.value_dim), bias=False)
        self.wo = nn.Linear(self.heads * self.value_dim, config.dim, bias=False)
        self.rope = rope

    def forward(self, x_BTC: Tensor, collectives: Collectives) -> Tensor:
        q_BTC = x_BTC
        if self.has_q_rank:
            q_BTC = self.q_norm(self.wq_a(x_BTC))
        q_BHTD = self.wq_b(q_BTC).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        q_nope, q_rope = q_BHTD.split([self.nope_dim, self.rope_dim], dim=-1)
        latent_BTC, k_rope = self.wkv_a(x_BTC).split([self.kv_norm.normalized_shape[0], self.rope_dim], dim=-1)
        kv_BHTD = self.wkv_b(self.kv_norm(latent_BTC)).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        k_nope, v_BHTD = kv_BHTD.split([self.nope_dim, self.value_dim], dim=-1)
        q_BHTD = torch.cat([q_nope, self.rope(q_rope)], dim=-1)
        k_rope = self.rope(k_rope.unsqueeze(1)).expand(-1, self.heads, -1, -1)
        k_BHTD = torch.cat([k_nope, k_rope], dim=-1)
        return self.wo(_attend(q_BHTD, k_BHTD, v_BHTD, collectives))  # type: ignore[no-any-return]


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
        self.num_local = config.experts // ep
        self.per_token = config.experts_per_token
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
        x_ERC = collectives.exchange(x_RC, Kind.EP)[: rows * self.num_local].unflatten(0, (self.num_local, rows))
        y_ERC = self.w2(F.silu(self.w1(x_ERC)) * self.w3(x_ERC))
        y_RC = collectives.exchange(y_ERC.flatten(0, 1), Kind.EP)
        if y_RC.shape[0] < x_RC.shape[0]:
            y_RC = F.pad(y_RC, (0, 0, 0, x_RC.shape[0] - y_RC.shape[0]))
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
        h_BTC = collectives.gather(self.attention_norm(x_BTC), Kind.TP)
        x_BTC = x_BTC + collectives.scatter(self.attention(h_BTC, collectives), Kind.TP)
        h_BTC = self.ffn_norm(x_BTC)
        if isinstance(self.ffn, _Mixture):  # tokens stay divided over tp: each rank routes its own
            return x_BTC + self.ffn(h_BTC, collectives)  # type: ignore[no-any-return]
        return x_BTC + collectives.scatter(self.ffn(collectives.gather(h_BTC, Kind.TP)), Kind.TP)


class Reference(nn.Module):
    """What one rank has of a decoder. ``kinds`` says which blocks are mixtures. Ranks of tp share ``num_tokens``."""

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
            x_BTC = collectives.scatter(torch.cat([x_BTC] * self.tp, dim=-1), Kind.TP)
        for layer in self.layers:
            x_BTC = layer(x_BTC, collectives)
        x_BTC = collectives.gather(self.norm(x_BTC), Kind.TP)
        logits_BTV = self.output(x_BTC)
        if kind != "bf16":
            logits_BTV = logits_BTV.float()
        loss: Any = VocabularyLoss.apply if self.tp > 1 else F.cross_entropy
        return loss(logits_BTV.flatten(0, 1), targets_BT.flatten())  # type: ignore[no-any-return]
