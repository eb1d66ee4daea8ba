"""Models of the planner: sizes of decoders, presets, and what is loaded from configurations and code."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields
from pathlib import Path
from typing import Any

from .._howto import printable
from .errors import PlanError, expect
from .machine import read_json

# More would take minutes, or more memory than the host has, and is a mistake.
MAX_LAYERS, _MAX_SIZE = 10_000, 1 << 31


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
    # of a head; with latent attention, of its part without rotary embedding
    head_dim: int = _size("qk_nope_head_dim", "head_dim", least=1)
    hidden_dim: int = _size("intermediate_size", least=1)  # of a dense feed-forward
    vocab_size: int = _size("vocab_size", least=2)  # rows of the embedding and of the head
    experts: int = _size("num_local_experts", "num_experts", "n_routed_experts")  # of a mixture; 0 for a dense model
    experts_per_token: int = _size("num_experts_per_tok")  # that each token is sent to
    expert_hidden_dim: int = _size("moe_intermediate_size")  # of one expert
    shared_experts: int = _size("n_shared_experts")  # that see all tokens
    dense_layers: int = _size("first_k_dense_replace")  # blocks before the first mixture
    q_rank: int = _size("q_lora_rank")  # of latent queries; 0 without latent attention
    kv_rank: int = _size("kv_lora_rank")  # of latent keys and values
    rope_head_dim: int = _size("qk_rope_head_dim")  # of the rotary part of a head, with latent attention
    value_head_dim: int = _size("v_head_dim")  # of values, with latent attention
    is_tied: bool = False  # whether embedding and head are one matrix
    window: int = _size("sliding_window")  # tokens that attention looks back at; 0 for all
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
_LAYER_KEYS = {"num_hidden_layers", "num_layers", "n_layer", "n_layers"}


def config_of_json(path: Path) -> ModelConfig | None:
    """The sizes in a ``config.json`` of transformers; None for a type that only transformers can build."""
    content = read_json(path, "model expects a config.json", "Name another.")
    has_type = isinstance(content, dict) and "model_type" in content
    expect(has_type, "model expects a config.json with a model_type", f"{path} has none. Name another.")
    for key in ("model_type", "_name_or_path"):
        is_text = isinstance(content.get(key), str | None)
        expect(is_text, f"model expects a text as {key}", f"{path} has another value. Mend it.")
    for key in ("tie_word_embeddings", "use_sliding_window"):
        is_fine = isinstance(content.get(key), bool | None)
        expect(is_fine, f"model expects true or false as {key}", f"{path} has {content.get(key)!r}. Mend it.")
    for key in content.keys() & _LAYER_KEYS:
        if isinstance(content[key], int) and content[key] > MAX_LAYERS:
            raise PlanError(f"model expects at most {MAX_LAYERS} as {key}, but {path} has more. Mend it.")
    kind = content["model_type"]
    if kind not in _KNOWN_TYPES:
        return None
    if not content.get("use_sliding_window", kind in ("mistral", "mixtral")):  # these two need not say it
        content["sliding_window"] = 0
    values: dict[str, Any] = {"name": printable(content.get("_name_or_path") or path.parent.name or path.stem)}
    for item in fields(ModelConfig):
        if item.metadata:
            values[item.name] = _size_of(item, content, values, str(path))
    if values["experts"] and not values["expert_hidden_dim"]:
        values["expert_hidden_dim"] = values["hidden_dim"]
    values["is_tied"] = bool(content.get("tie_word_embeddings"))
    config, has = ModelConfig(**values), f"{path} has"
    wrong = f"{has} {config.kv_heads} and {config.heads}. Mend it."
    expect(config.heads % config.kv_heads == 0, "model expects kv_heads to divide heads", wrong)
    is_fine, wrong = 0 < config.experts_per_token <= config.experts, f"{has} {config.experts_per_token}. Mend it."
    expect(is_fine or not config.experts, f"model expects experts_per_token from 1 to {config.experts}", wrong)
    return config


def _size_of(item: Field[int], content: Mapping[str, Any], before: Mapping[str, int], where: str) -> int:
    """A size in a file that has those ``before``; PlanError names one that is missing or wrong."""
    keys, least = item.metadata["keys"], item.metadata["least"]
    value = next((content[key] for key in keys if content.get(key) is not None), None)
    if value is None and item.name in ("kv_heads", "head_dim"):  # what a file may leave out
        value = before["heads"] if item.name == "kv_heads" else before["dim"] // before["heads"]
    elif value is None:
        expect(not least, f"model expects {keys[0]} in {where}", "there is none. Add it.")
        value = 0
    is_fine, wrong = type(value) is int and value >= least, f"{where} has {value!r}. Mend it."
    expect(is_fine, f"model expects an integer of at least {least} as {item.name}", wrong)
    most = MAX_LAYERS if item.name == "layers" else _MAX_SIZE
    expect(value <= most, f"model expects at most {most} as {item.name}", f"{where} has more. Mend it.")
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
