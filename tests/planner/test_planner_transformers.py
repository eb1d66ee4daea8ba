"""Models of transformers, by their configurations, their classes, and functions."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from test_planner_model import TINY

from dtensor_gtp import plan
from dtensor_gtp.planner.errors import PlanError
from dtensor_gtp.planner.trace import Part, record_reference, repeated
from dtensor_gtp.planner.user_model import UserModel, step_of

pytestmark = pytest.mark.library

_CODED = {"layers": 2, "attention_heads": 4, "ffn_dim": 128}
_MAMBA = {"n_heads": 8, "d_head": 16, "d_state": 16, "chunk_size": 16}


def _small_configs() -> dict[str, Any]:
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128}
    text = sizes | {"vocab_size": 256, "num_key_value_heads": 2, "head_dim": 16}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    coded = {f"{part}_{name}": value for part in ("encoder", "decoder") for name, value in _CODED.items()}
    return {
        "mamba2": sizes
        | {"vocab_size": 256, "num_heads": 8, "head_dim": 16, "state_size": 16}
        | {"n_groups": 1, "chunk_size": 16},
        "bamba": text | {"attn_layer_indices": [1]} | {f"mamba_{k}": v for k, v in _MAMBA.items()},
        "whisper": ends
        | coded
        | {"d_model": 64, "vocab_size": 256, "num_mel_bins": 16}
        | {"max_source_positions": 32, "max_target_positions": 64, "decoder_start_token_id": 1},
        "modernbert": sizes | ends | {"vocab_size": 256, "cls_token_id": 1, "sep_token_id": 2},
        "llama4_text": text | {"num_local_experts": 4, "intermediate_size_mlp": 128},
        "qwen2_vl": {
            "text_config": text | {"rope_parameters": {"rope_type": "default", "mrope_section": [2, 3, 3]}},
            "vision_config": {"depth": 2, "embed_dim": 64, "num_heads": 4, "hidden_size": 64, "patch_size": 8},
        },
        "gpt2": {"n_embd": 64, "n_layer": 2, "n_head": 4, "vocab_size": 256},
        "opt": sizes | {"ffn_dim": 128, "vocab_size": 256, "word_embed_proj_dim": 64},
        "bert": sizes | {"vocab_size": 256},
        "vit": sizes | {"image_size": 32, "patch_size": 8},
        "t5": {"d_model": 64, "num_layers": 2, "d_ff": 128, "vocab_size": 256},
        "gemma3_text": text,
        "qwen3_moe": text | {"num_experts": 4, "moe_intermediate_size": 32, "num_experts_per_tok": 2},
        "gpt_oss": text | {"num_local_experts": 4},
        "deepseek_v2": text
        | {"num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"q_lora_rank": 32, "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16},
    }


@pytest.mark.parametrize("kind", sorted(_small_configs()))
def test_configurations_of_transformers(kind: str, transformers: Any, tmp_path: Path) -> None:
    """Each is planned over gtp and replicate; its parameters are those that transformers counts."""
    config = transformers.AutoConfig.for_model(kind, **_small_configs()[kind])
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    result = plan(str(tmp_path / "config.json"), "h100", gpus=2, seq_len=64, fixed={"tp": 1})
    names = {"vit": "ImageClassification", "t5": "Seq2SeqLM", "whisper": "SpeechSeq2Seq", "modernbert": "MaskedLM"}
    names |= {"qwen2_vl": "ImageTextToText"}
    with torch.device("meta"):
        model = getattr(transformers, f"AutoModelFor{names.get(kind, 'CausalLM')}").from_config(config)
    whole = result.problem.whole
    assert result.answers
    assert whole.numel + whole.unused_numel == pytest.approx(sum(p.numel() for p in model.parameters()), rel=0.02)
    # Text alone uses no weights of pictures.
    assert (whole.unused_numel > 0.02 * whole.numel) == ("Not counted:" in str(result)) == (kind == "qwen2_vl")


def test_a_model_of_transformers_by_function_and_by_configuration(
    users_models: Any, transformers: Any, tmp_path: Path
) -> None:
    """Without a mask of ours, its code asks whether positions are packed; tied matrices count once."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    sizes |= {"intermediate_size": 128, "vocab_size": 256, "head_dim": 16, "tie_word_embeddings": True}
    config = transformers.Qwen3Config(**sizes, use_cache=False)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))

    users_models.define(lambda: (transformers.Qwen3ForCausalLM(config), torch.zeros(1, 64).long()))
    job: dict[str, Any] = {"gpus": 2, "fixed": {"tp": 2}}
    first, second = plan("users_models:build", **job), plan(str(tmp_path / "config.json"), seq_len=64, **job)
    assert first.answers
    assert second.answers
    assert first.problem.whole.numel == pytest.approx(second.problem.whole.numel, rel=0.02)  # the latter has no norms


def test_a_loop_over_experts_is_planned_as_grouped(users_models: Any, transformers: Any) -> None:
    """Fake tensors do not say which experts tokens have chosen."""
    sizes = _small_configs()["qwen3_moe"]

    def build_as(implementation: str) -> Any:
        config = transformers.Qwen3MoeConfig(**sizes, use_cache=False)
        config._experts_implementation = implementation
        return transformers.Qwen3MoeForCausalLM(config), torch.zeros(1, 64).long()

    names = ("eager", "grouped_mm")
    traces = [users_models.load(partial(build_as, name), 64).trace(1) for name in names]
    first, second = (vars(trace) for trace in traces)
    assert first == second
    experts = next(weight for weight in traces[0].weights if weight.name.endswith("experts.weight"))
    assert experts.flops == 2 * 64 * 2 * 3 * 64 * 32  # two of four experts for each of 64 tokens


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        ("deepseek_v2", "it has no num_experts_per_tok: take the config.json of a trained model"),
        ("clip_text_model", "no model for CLIPTextConfig has a loss. Name another"),
    ],
)
def test_configurations_that_cannot_train(kind: str, message: str, transformers: Any, tmp_path: Path) -> None:
    config = transformers.AutoConfig.for_model(kind)
    (tmp_path / "config.json").write_text(json.dumps(config.to_dict()))
    with pytest.raises(PlanError, match=f"transformers cannot build .*config.json: ValueError: {message}"):
        plan(str(tmp_path / "config.json"), "h100", gpus=2)


def test_a_model_whose_inputs_have_no_known_sizes_is_one_line(transformers: Any) -> None:
    message = "expects a configuration with the sizes of its inputs, but ResNetForImageClassification raised Attribute"
    with pytest.raises(PlanError, match=f"{message}.*Pass module:function instead.") as caught:
        plan("ResNetForImageClassification", "h100", gpus=2)
    assert "\n" not in str(caught.value)


@pytest.mark.long
def test_a_class_of_transformers(transformers: Any) -> None:
    """With rotary embeddings and masks of its own; the reference computes as much."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 5, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = transformers.LlamaConfig(**sizes, intermediate_size=128, vocab_size=256)

    def build() -> Any:
        with torch.device("meta"):
            model = transformers.LlamaForCausalLM(config)
        return step_of(model, 32)

    user = UserModel(build, "llama", "Mend it.")
    for tp in (1, 2):
        expected = repeated(record_reference(TINY, 32, tp), TINY, Part(tuple(TINY.kinds)))
        blocks = [weight for weight in user.trace(tp).weights if weight.block >= 0]
        assert [(weight.shape, weight.flops) for weight in blocks] == [
            (weight.shape, weight.flops) for weight in expected.weights if weight.block >= 0
        ]
    assert user.trace(2).weights[-1].shape == (256, 64)  # the head stays whole
