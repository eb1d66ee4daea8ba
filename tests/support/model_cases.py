"""Models of transformers, timm and diffusers from tiny configs, with a batch and a loss for each.

No dropout and no loss over the whole batch: ranks must find on their rows what one process finds on all.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

VOCABULARY = 35  # not a multiple of the number of ranks
NUM_ROWS = 4
Batch = dict[str, torch.Tensor]


class Case(NamedTuple):
    """A model."""

    library: str
    make: Callable[..., nn.Module]  # makes it; takes options of its config
    batch: Callable[[torch.Generator], Batch]  # a global batch
    loss: Callable[[nn.Module, Batch], torch.Tensor]  # a mean over rows
    # the default of transformers' ``tie_word_embeddings``; None where the model has no such thing
    is_tied: bool | None = None
    dtype: torch.dtype = torch.float64  # float32 where a kernel takes no float64
    lora: str | list[str] = "all-linear"  # names of the layers that adapters are put around


def _transformers(name: str, **config: Any) -> Callable[..., nn.Module]:
    """``name`` is that of the class, whose config class has the same beginning."""

    def make(**options: Any) -> nn.Module:
        import transformers

        cls = getattr(transformers, name)
        return cls(cls.config_class(**{**config, **options}))

    return make


def _drops(*names: str) -> dict[str, float]:
    return dict.fromkeys(names, 0.0)


def randn(generator: torch.Generator, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def _tokens(generator: torch.Generator, num: int = 6) -> torch.Tensor:
    return torch.randint(3, VOCABULARY, (NUM_ROWS, num), generator=generator)


def _text(generator: torch.Generator) -> Batch:
    tokens = _tokens(generator)
    return {"input_ids": tokens, "labels": tokens}


def _to_text(name: str, shape: tuple[int, ...], generator: torch.Generator) -> Batch:
    """Labels that are texts, for inputs that are none."""
    return {name: randn(generator, NUM_ROWS, *shape), "labels": _tokens(generator, 4)}


def _images(name: str, size: int, generator: torch.Generator) -> Batch:
    labels = torch.randint(5, (NUM_ROWS,), generator=generator)
    return {name: randn(generator, NUM_ROWS, 3, size, size), "labels": labels}


def _same_images(generator: torch.Generator) -> Batch:
    """For BatchNorm: each of two ranks has the same images, and so the statistics of all, with labels of its own."""
    images, labels = _images("x", 64, generator).values()
    return {"x": images.repeat(2, 1, 1, 1), "labels": torch.cat([labels, labels.flip(0)])}


def _captions(generator: torch.Generator) -> Batch:
    return {"pixel_values": randn(generator, NUM_ROWS, 3, 8, 8), "input_ids": _tokens(generator)}


def _text_of_images(generator: torch.Generator) -> Batch:
    """Four tokens stand for the patches of an image."""
    text = _text(generator)["input_ids"].clamp(max=VOCABULARY - 2)
    tokens = torch.cat([torch.full((NUM_ROWS, 4), VOCABULARY - 1), text], 1)
    return {"pixel_values": randn(generator, NUM_ROWS, 3, 8, 8), "input_ids": tokens, "labels": tokens}


def _noise(name: str, generator: torch.Generator) -> Batch:
    times = torch.randint(20, (NUM_ROWS,), generator=generator)
    batch = {name: randn(generator, NUM_ROWS, 3, 16, 16), "noise": randn(generator, NUM_ROWS, 3, 16, 16)}
    return batch | {
        "timestep": times,
        "class_labels": times % 5,
        "encoder_hidden_states": randn(generator, NUM_ROWS, 3, 8),
    }


def _own_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return model(**batch).loss


def _pair_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    """Each image with its own text; CLIP's loss compares with those of other ranks."""
    logits: torch.Tensor = model(**batch).logits_per_image
    return -logits.diagonal().mean()


def _class_loss(model: nn.Module, batch: Batch) -> torch.Tensor:
    return F.cross_entropy(model(batch["x"]), batch["labels"])


def _denoising_loss(names: tuple[str, ...], model: nn.Module, batch: Batch) -> torch.Tensor:
    inputs = {name: batch[name] for name in names}
    return F.mse_loss(model(**inputs, return_dict=False)[0], batch["noise"])


def _timm(name: str, memory_format: torch.memory_format = torch.contiguous_format, **options: Any) -> Any:
    def make() -> nn.Module:
        import timm

        model: nn.Module = timm.create_model(name, num_classes=5, **options)
        return model.to(memory_format=memory_format)

    return make


def _diffusers(name: str, **config: Any) -> Callable[..., nn.Module]:
    def make() -> nn.Module:
        import diffusers

        model = getattr(diffusers, name)(**config)
        for module in model.modules():
            if hasattr(module, "dropout_prob"):
                module.dropout_prob = 0.0  # each rank would drop other labels
        return model

    return make


_TEXT = {"vocab_size": VOCABULARY, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
SHAPE = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
_LLM = {**_TEXT, **SHAPE, "num_key_value_heads": 1, "max_position_embeddings": 32, "head_dim": 8}
_EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 12, "experts_implementation": "grouped_mm"}
_LATENT = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
_DEEPSEEK = {"n_routed_experts": 4, "n_group": 1, "topk_group": 1, "first_k_dense_replace": 1, "num_key_value_heads": 2}
_ENCODER = {**SHAPE, **_drops("hidden_dropout_prob", "attention_probs_dropout_prob")}
_WHISPER = {
    **{f"{part}_{name}": 2 for part in ("encoder", "decoder") for name in ("layers", "attention_heads")},
    **{"encoder_ffn_dim": 24, "decoder_ffn_dim": 24, "d_model": 16, "num_mel_bins": 4, "decoder_start_token_id": 1},
    **{"max_source_positions": 8, "max_target_positions": 8},
}
SPEECH = {
    **{"conv_dim": (8, 8), "conv_stride": (4, 2), "conv_kernel": (4, 2), "apply_spec_augment": False},
    **{"num_conv_pos_embeddings": 4, "num_conv_pos_embedding_groups": 2, "ctc_loss_reduction": "mean"},
    **_drops("hidden_dropout", "attention_dropout", "activation_dropout", "feat_proj_dropout", "final_dropout"),
    **_drops("layerdrop"),
}
_CLIP = {"text_config": {**_TEXT, **SHAPE}, "vision_config": {**SHAPE, "image_size": 8, "patch_size": 4}}
_LINEAR = {
    **{"linear_key_head_dim": 4, "linear_value_head_dim": 4, "linear_num_key_heads": 2, "linear_num_value_heads": 4},
    **{"num_experts": 4, "shared_expert_intermediate_size": 12, "layer_types": ["linear_attention", "full_attention"]},
}
_HYBRID = {  # two layers use one attention block, each with an adapter of its own
    **{"layers_block_type": ["mamba", "hybrid", "mamba", "hybrid"], "num_hidden_layers": 4, "num_mem_blocks": 1},
    **{"use_shared_attention_adapter": True, "adapter_rank": 4, "head_dim": 16, "num_key_value_heads": 2},
    **{"mamba_d_state": 4, "mamba_ngroups": 1, "n_mamba_heads": 4, "mamba_headdim": 8, "chunk_size": 4},
}
_RWKV = {**_TEXT, "hidden_size": 16, "attention_hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2}
_LLAVA = {
    "text_config": {**_LLM, "model_type": "llama"},
    "vision_config": {**SHAPE, "image_size": 8, "patch_size": 4, "model_type": "clip_vision_model"},
    **{"image_token_index": VOCABULARY - 1, "vision_feature_layer": -1},
}
_UNET = {"sample_size": 16, "in_channels": 3, "out_channels": 3, "layers_per_block": 1, "norm_num_groups": 8}
_BLOCKS = {"down_block_types": ("DownBlock2D", "AttnDownBlock2D"), "up_block_types": ("AttnUpBlock2D", "UpBlock2D")}
_CROSS = {"down_block_types": ("CrossAttnDownBlock2D",), "up_block_types": ("CrossAttnUpBlock2D",)}
_DIT = {"num_layers": 2, "num_attention_heads": 2, "attention_head_dim": 8, "num_embeds_ada_norm": 20, "patch_size": 4}

_image_model = partial(Case, "timm", loss=_class_loss)
_denoiser = partial(Case, "diffusers", batch=partial(_noise, "sample"))


def _hf(
    name: str,
    *configs: dict[str, Any],
    batch: Callable[[torch.Generator], Batch] = _text,
    loss: Callable[[nn.Module, Batch], torch.Tensor] = _own_loss,
    is_tied: bool | None = None,
    dtype: torch.dtype = torch.float64,
    lora: str | list[str] = "all-linear",
    **config: Any,
) -> Case:
    """A model of transformers. Of what several configs say, the last counts."""
    for each in reversed(configs):
        config = {**each, **config}
    return Case("transformers", _transformers(name, **config), batch, loss, is_tied, dtype, lora)


# Language models with untied heads; some kernels take no float64.
_llm = partial(_hf, is_tied=False)
_llm32 = partial(_hf, is_tied=False, dtype=torch.float32)

CASES: dict[str, Case] = {
    "llama": _llm("LlamaForCausalLM", _LLM),
    "qwen3": _llm("Qwen3ForCausalLM", _LLM),
    "qwen3_moe": _llm32("Qwen3MoeForCausalLM", _LLM, _EXPERTS, num_experts=4),
    "mixtral": _llm32("MixtralForCausalLM", _LLM, _EXPERTS, num_local_experts=4),
    "gpt_oss": _llm32("GptOssForCausalLM", _LLM, _EXPERTS, num_local_experts=4, sliding_window=4),
    "gemma3": _hf("Gemma3ForCausalLM", _LLM, sliding_window=4, is_tied=True),
    "mistral": _llm("MistralForCausalLM", _LLM, sliding_window=4),
    "gpt2": _hf(
        *("GPT2LMHeadModel", _TEXT, {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}),
        *(_drops("resid_pdrop", "embd_pdrop", "attn_pdrop"),),
        is_tied=True,
    ),
    "bert": _hf("BertForMaskedLM", _TEXT, _ENCODER, max_position_embeddings=16, is_tied=True),
    "modernbert": _hf(
        "ModernBertForMaskedLM", _TEXT, SHAPE, local_attention=4, cls_token_id=1, sep_token_id=2, is_tied=True
    ),
    "t5": _hf(
        *("T5ForConditionalGeneration", _TEXT, {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_heads": 2}),
        **{"num_layers": 2, "num_decoder_layers": 2, "dropout_rate": 0.0, "decoder_start_token_id": 1},
        is_tied=True,
    ),
    "whisper": _hf(
        *("WhisperForConditionalGeneration", _TEXT, _WHISPER),
        batch=partial(_to_text, "input_features", (4, 16)),
        dropout=0.0,
        is_tied=True,
    ),
    "vit": _hf(
        *("ViTForImageClassification", _ENCODER, {"image_size": 8, "patch_size": 4, "num_labels": 5}),
        batch=partial(_images, "pixel_values", 8),
    ),
    "clip": _hf("CLIPModel", _CLIP, projection_dim=16, batch=_captions, loss=_pair_loss),
    "wav2vec2": _hf("Wav2Vec2ForCTC", _TEXT, SHAPE, SPEECH, batch=partial(_to_text, "input_values", (160,))),
    "mamba2": _llm32(
        *("Mamba2ForCausalLM", _TEXT, {"hidden_size": 16, "num_hidden_layers": 2, "num_heads": 4, "head_dim": 8}),
        **{"state_size": 8, "n_groups": 1, "chunk_size": 4},
        lora=["in_proj"],  # PEFT refuses the others
    ),
    "deepseek_v3": _llm32("DeepseekV3ForCausalLM", _LLM, _EXPERTS, _LATENT, _DEEPSEEK, head_dim=4),
    "qwen3_next": _llm32(
        *("Qwen3NextForCausalLM", _LLM, _EXPERTS, _LINEAR), lora=["q_proj", "in_proj_qkvz", "shared_expert_gate"]
    ),
    "zamba2": _hf("Zamba2ForCausalLM", _LLM, _HYBRID, is_tied=True, dtype=torch.float32),
    "rwkv": _llm("RwkvForCausalLM", _RWKV, context_length=16),
    "llava": _hf("LlavaForConditionalGeneration", _LLAVA, batch=_text_of_images),
    "timm_convnext": _image_model(_timm("test_convnext", torch.channels_last), partial(_images, "x", 32)),
    "timm_efficientnet": _image_model(_timm("test_efficientnet"), _same_images),
    "timm_resnet": _image_model(
        _timm("test_resnet", torch.channels_last), _same_images, lora=["conv3", "downsample.1"]
    ),
    "timm_swin": _image_model(
        _timm(
            *("swin_tiny_patch4_window7_224",),
            **{"img_size": 32, "window_size": 4, "embed_dim": 8, "depths": (2, 2), "num_heads": (2, 4)},
            drop_path_rate=0.0,
        ),
        partial(_images, "x", 32),
    ),
    "timm_vit": _image_model(_timm("test_vit", img_size=32), partial(_images, "x", 32)),
    "unet2d": _denoiser(
        _diffusers("UNet2DModel", **_UNET, **_BLOCKS, block_out_channels=(16, 32)),
        loss=partial(_denoising_loss, ("sample", "timestep")),
        lora=["to_q", "to_v", "conv1"],
    ),
    "unet2d_condition": _denoiser(
        _diffusers(
            *("UNet2DConditionModel",),
            **{**_UNET, **_CROSS, "block_out_channels": (16,), "cross_attention_dim": 8, "attention_head_dim": 8},
        ),
        loss=partial(_denoising_loss, ("sample", "timestep", "encoder_hidden_states")),
        lora=["to_q", "to_v"],
    ),
    "dit": Case(
        "diffusers",
        _diffusers("DiTTransformer2DModel", **_DIT, sample_size=16, in_channels=3, out_channels=3, norm_num_groups=1),
        partial(_noise, "hidden_states"),
        partial(_denoising_loss, ("hidden_states", "timestep", "class_labels")),
        lora=["to_q", "to_v", "proj"],
    ),
}
