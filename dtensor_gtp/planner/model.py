"""Models of the planner: sizes of decoders, presets, and what is loaded from configurations and code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import PlanError, expect, printable
from .machine import read_json


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


# model_type of config.json, whose blocks are those of ``reference``: attention and SwiGLU without biases that matter.
_KNOWN_TYPES = {"llama", "mistral", "qwen2", "qwen3", "mixtral", "deepseek_v3"}
# More would take minutes, or more memory than the host has, and is a mistake.
MAX_LAYERS, _MAX_SIZE = 10_000, 1 << 31
_LAYER_KEYS = {"num_hidden_layers", "num_layers", "n_layer", "n_layers"}
_NEEDED = {
    "dim": "hidden_size",
    "layers": "num_hidden_layers",
    "heads": "num_attention_heads",
    "hidden_dim": "intermediate_size",
    "vocab_size": "vocab_size",
}
_OPTIONAL = {
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("qk_nope_head_dim", "head_dim"),
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
    """The sizes in a ``config.json`` of transformers; None for a type that only transformers can build."""
    content = read_json(path, "model expects a config.json", "Name another.")
    has_type = isinstance(content, dict) and "model_type" in content
    expect(has_type, "model expects a config.json with a model_type", f"{path} has none. Name another.")
    for key in ("model_type", "_name_or_path"):
        is_text = isinstance(content.get(key) or "", str)
        expect(is_text, f"model expects a text as {key}", f"{path} has another value. Mend it.")
    for key in content.keys() & _LAYER_KEYS:
        if isinstance(content[key], int) and content[key] > MAX_LAYERS:
            raise PlanError(f"model expects at most {MAX_LAYERS} as {key}, but {path} has more. Mend it.")
    kind = content["model_type"]
    if kind not in _KNOWN_TYPES:
        return None
    values: dict[str, Any] = {"name": printable(content.get("_name_or_path") or path.parent.name or path.stem)}
    for name, key in _NEEDED.items():
        expect(key in content, f"model expects {key} in {path}", "there is none. Add it.")
        values[name] = content[key]
    # What a file does not say. These types alone have windows then.
    has_window = content.get("use_sliding_window", kind in ("mistral", "mixtral"))
    heads = _checked("heads", values["heads"], str(path))
    defaults = {"kv_heads": heads, "head_dim": _checked("dim", values["dim"], str(path)) // heads}
    for name, keys in _OPTIONAL.items():
        values[name] = next((content[key] for key in keys if content.get(key)), defaults.get(name, 0))
    if values["experts"] and not values["expert_hidden_dim"]:
        values["expert_hidden_dim"] = values["hidden_dim"]
    values["is_tied"] = bool(content.get("tie_word_embeddings"))
    values["window"] = (content.get("sliding_window") or 0) if has_window else 0
    config, has = ModelConfig(**values), f"{path} has"
    for name, value in vars(config).items():
        if name not in ("name", "is_tied"):
            _checked(name, value, str(path))
    wrong = f"{has} {config.kv_heads} and {config.heads}. Mend it."
    expect(config.heads % config.kv_heads == 0, "model expects kv_heads to divide heads", wrong)
    is_fine, wrong = 0 < config.experts_per_token <= config.experts, f"{has} {config.experts_per_token}. Mend it."
    expect(is_fine or not config.experts, f"model expects experts_per_token from 1 to {config.experts}", wrong)
    return config


_LEAST = {"dim": 1, "layers": 1, "heads": 1, "kv_heads": 1, "head_dim": 1, "hidden_dim": 1, "vocab_size": 2}


def _checked(name: str, value: Any, where: str) -> int:
    """A size, or PlanError that names it."""
    least, most = _LEAST.get(name, 0), MAX_LAYERS if name == "layers" else _MAX_SIZE
    is_fine, wrong = type(value) is int and value >= least, f"{where} has {value!r}. Mend it."
    expect(is_fine, f"model expects an integer of at least {least} as {name}", wrong)
    expect(value <= most, f"model expects at most {most} as {name}", f"{where} has more. Mend it.")
    return int(value)


_FILES = sorted((Path(__file__).parent / "models").glob("*.json"))
PRESETS: Mapping[str, ModelConfig] = {
    path.stem: config for path in _FILES if (config := config_of_json(path)) is not None
}


def known_model(text: str) -> ModelConfig | None:
    """The preset of that name, or the sizes of a ``config.json``; None if the text is something else."""
    if text.lower() in PRESETS:
        return PRESETS[text.lower()]
    path = Path(text)
    if os.path.isdir(text):  # false, too, of a name that no file can have
        path /= "config.json"
    return config_of_json(path) if path.suffix == ".json" else None
