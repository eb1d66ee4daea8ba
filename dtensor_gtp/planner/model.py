"""Models of the planner: sizes of decoders, presets, and what is loaded from configurations and code."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from .errors import PlanError, printable


@dataclass(frozen=True)
class ModelConfig:
    """The sizes of a decoder with RMSNorm, rotary embeddings and SwiGLU."""

    name: str  # for people
    dim: int  # of the residual stream
    layers: int  # number of blocks
    heads: int  # of queries
    kv_heads: int  # of keys and values
    head_dim: int  # of a head; with latent attention, of its part without rotary embedding
    hidden_dim: int  # of a dense feed-forward
    vocab_size: int  # rows of the embedding and of the head
    experts: int = 0  # of a mixture; 0 for a dense model
    experts_per_token: int = 0  # that each token is sent to
    expert_hidden_dim: int = 0  # of one expert
    shared_experts: int = 0  # that see all tokens
    dense_layers: int = 0  # blocks before the first mixture
    q_rank: int = 0  # of latent queries; 0 without latent attention
    kv_rank: int = 0  # of latent keys and values
    rope_head_dim: int = 0  # of the rotary part of a head, with latent attention
    value_head_dim: int = 0  # of values, with latent attention
    is_tied: bool = False  # whether embedding and head are one matrix
    window: int = 0  # tokens that attention looks back at; 0 for all
    window_every: int = 0  # of so many blocks one looks at all tokens; 0 if all blocks have the window

    def looked_at(self, seq_len: int) -> float:
        """Of all pairs of tokens, the share that a block computes on average: half under a causal mask, less with a
        window."""
        if not 0 < self.window < seq_len:
            return 0.5
        part = self.window / seq_len
        whole = 1 / self.window_every if self.window_every else 0.0
        return (part - part * part / 2) * (1 - whole) + 0.5 * whole

    @property
    def kinds(self) -> list[bool]:
        """Of each block, whether it is a mixture."""
        return [bool(self.experts) and number >= self.dense_layers for number in range(self.layers)]

    @property
    def attention_numel(self) -> int:
        """Parameters of the matrices of one attention."""
        if not self.kv_rank:
            return self.dim * self.head_dim * 2 * (self.heads + self.kv_heads)
        head = self.head_dim + self.rope_head_dim
        query = self.dim * self.q_rank + self.q_rank * self.heads * head
        keys = self.dim * (self.kv_rank + self.rope_head_dim)
        keys += self.kv_rank * self.heads * (self.head_dim + self.value_head_dim)
        return query + keys + self.heads * self.value_head_dim * self.dim

    def ffn_numel(self, *, is_mixture: bool, is_active: bool = False) -> int:
        """Parameters of the matrices of one feed-forward; ``is_active``: of those that one token uses."""
        if not is_mixture:
            return 3 * self.dim * self.hidden_dim
        experts = (self.experts_per_token if is_active else self.experts) + self.shared_experts
        return self.dim * self.experts + 3 * self.dim * self.expert_hidden_dim * experts

    @property
    def numel(self) -> int:
        """Parameters of all matrices."""
        blocks = sum(self.attention_numel + self.ffn_numel(is_mixture=kind) for kind in self.kinds)
        return blocks + (1 if self.is_tied else 2) * self.dim * self.vocab_size

    def flops_per_token(self, seq_len: int) -> float:
        """Operations of a forward and backward for one token: six for each active parameter but those of the table, and
        those of causal attention, without the half that the mask leaves out and without what is computed again."""
        matrices = sum(self.attention_numel + self.ffn_numel(is_mixture=kind, is_active=True) for kind in self.kinds)
        value_dim = self.value_head_dim or self.head_dim
        width = self.heads * (self.head_dim + self.rope_head_dim + value_dim)
        return 6 * (matrices + self.dim * self.vocab_size) + 6 * self.layers * width * seq_len * self.looked_at(seq_len)


_LLAMA3 = ModelConfig("llama3-8b", 4096, 32, 32, 8, 128, 14336, 128256)
# Sizes from the config.json of each model on huggingface.co, as the Llama 3 paper (arXiv 2407.21783, table 3) and the
# DeepSeek-V3 paper (arXiv 2412.19437, section 4.2) have them too.
PRESETS: Mapping[str, ModelConfig] = {
    "llama3-8b": _LLAMA3,
    "llama3-70b": replace(_LLAMA3, name="llama3-70b", dim=8192, layers=80, heads=64, hidden_dim=28672),
    "llama3-405b": replace(_LLAMA3, name="llama3-405b", dim=16384, layers=126, heads=128, hidden_dim=53248),
    "mixtral-8x7b": ModelConfig(
        "mixtral-8x7b", 4096, 32, 32, 8, 128, 14336, 32000, experts=8, experts_per_token=2, expert_hidden_dim=14336
    ),
    "deepseek-v3": ModelConfig(
        "deepseek-v3",
        7168,
        61,
        128,
        128,
        128,
        18432,
        129280,
        experts=256,
        experts_per_token=8,
        expert_hidden_dim=2048,
        shared_experts=1,
        dense_layers=3,
        q_rank=1536,
        kv_rank=512,
        rope_head_dim=64,
        value_head_dim=128,
    ),
}

# model_type of config.json, whose blocks are those of ``reference``: attention and SwiGLU without biases that matter.
_KNOWN_TYPES = {"llama", "mistral", "qwen2", "qwen3", "mixtral", "deepseek_v3"}
# More would take minutes, or more memory than the host has, and is a mistake.
MAX_LAYERS, _MAX_SIZE = 10_000, 1 << 31
_LAYER_KEYS = {"num_hidden_layers", "num_layers", "n_layer", "n_layers"}
_OPTIONAL = {
    "experts": ("num_local_experts", "num_experts", "n_routed_experts"),
    "experts_per_token": ("num_experts_per_tok",),
    "expert_hidden_dim": ("moe_intermediate_size",),
    "shared_experts": ("n_shared_experts",),
    "dense_layers": ("first_k_dense_replace",),
    "q_rank": ("q_lora_rank",),
    "kv_rank": ("kv_lora_rank",),
    "rope_head_dim": ("qk_rope_head_dim",),
    "value_head_dim": ("v_head_dim",),
}


def config_of_json(path: Path) -> ModelConfig | None:
    """The sizes in a ``config.json`` of transformers; None for a type that only transformers can build.

    Raises:
        PlanError: The file cannot be read, or a size is missing or makes no sense.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError, RecursionError) as error:
        raise PlanError(f"model expects a config.json, but {path} cannot be read ({error}). Name another.") from None
    if not isinstance(content, dict) or "model_type" not in content:
        raise PlanError(f"model expects a config.json with a model_type, but {path} has none. Name another.")
    for key in ("model_type", "_name_or_path"):
        if not isinstance(content.get(key) or "", str):
            raise PlanError(f"model expects a text as {key}, but {path} has another value. Mend it.")
    for key in content.keys() & _LAYER_KEYS:
        if isinstance(content[key], int) and content[key] > MAX_LAYERS:
            raise PlanError(f"model expects at most {MAX_LAYERS} as {key}, but {path} has more. Mend it.")
    if content["model_type"] not in _KNOWN_TYPES:
        return None
    values: dict[str, Any] = {"name": printable(content.get("_name_or_path") or path.parent.name or path.stem)}
    names = {
        "dim": "hidden_size",
        "layers": "num_hidden_layers",
        "heads": "num_attention_heads",
        "hidden_dim": "intermediate_size",
        "vocab_size": "vocab_size",
    }
    for name, key in names.items():
        if key not in content:
            raise PlanError(f"model expects {key} in {path}, but there is none. Add it.")
        values[name] = content[key]
    values["kv_heads"] = content.get("num_key_value_heads") or values["heads"]
    for name, keys in _OPTIONAL.items():
        values[name] = next((content[key] for key in keys if content.get(key)), 0)
    if values["experts"] and not values["expert_hidden_dim"]:
        values["expert_hidden_dim"] = values["hidden_dim"]
    dim, heads = values["dim"], values["heads"]
    default = dim // heads if isinstance(dim, int) and isinstance(heads, int) and heads > 0 else 0
    values["head_dim"] = content.get("qk_nope_head_dim") or content.get("head_dim") or default
    # Both are false in transformers where a file does not say so, but for these types.
    values["is_tied"] = bool(content.get("tie_word_embeddings", False))
    if content.get("use_sliding_window", content["model_type"] in ("mistral", "mixtral")):
        values["window"] = content.get("sliding_window") or 0
    return checked(ModelConfig(**values), str(path))


def checked(config: ModelConfig, where: str) -> ModelConfig:
    """The configuration, or PlanError that names a size which makes no sense."""
    least = {"dim": 1, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 1, "hidden_dim": 1, "vocab_size": 2}
    for item in fields(config):
        value = getattr(config, item.name)
        if item.name in ("name", "is_tied"):
            continue
        most = MAX_LAYERS if item.name == "layers" else _MAX_SIZE
        if isinstance(value, int) and value > most:
            raise PlanError(f"model expects at most {most} as {item.name}, but {where} has more. Mend it.")
        if not isinstance(value, int) or isinstance(value, bool) or value < least.get(item.name, 0):
            raise PlanError(
                f"model expects an integer of at least {least.get(item.name, 0)} as {item.name}, but {where} has "
                f"{value!r}. Mend it."
            )
    if config.heads % config.kv_heads:
        raise PlanError(
            f"model expects kv_heads to divide heads, but {where} has {config.kv_heads} and {config.heads}. Mend it."
        )
    if config.experts and not 0 < config.experts_per_token <= config.experts:
        raise PlanError(
            f"model expects experts_per_token from 1 to {config.experts}, but {where} has {config.experts_per_token}. "
            "Mend it."
        )
    return config


def known_model(text: str) -> ModelConfig | None:
    """The preset of that name, or the sizes of a ``config.json``; None if the text is something else."""
    if text.lower() in PRESETS:
        return PRESETS[text.lower()]
    path = Path(text)
    if path.is_dir():
        path /= "config.json"
    return config_of_json(path) if path.suffix == ".json" else None
