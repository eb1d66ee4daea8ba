"""Stock models of transformers and timm, with random weights, for ``real_models``."""

from __future__ import annotations

import argparse
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn as nn

Batch = dict[str, torch.Tensor]
MakeBatch = Callable[[torch.device, torch.Generator], Batch]
Case = tuple[nn.Module, list[nn.Module], MakeBatch]  # the model, its blocks, and what makes a batch


def _text(vocab_size: int, tokens: int, longest: int) -> MakeBatch:
    shape = (max(tokens // longest, 1), min(tokens, longest))

    def make(device: torch.device, generator: torch.Generator) -> Batch:
        ids = torch.randint(0, vocab_size, shape, device=device, generator=generator)
        return {"input_ids": ids, "labels": ids}

    return make


def llama(tokens: int) -> Case:
    """8 layers of the 8B model."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=4096,
        intermediate_size=14336,
        num_hidden_layers=8,
        num_attention_heads=32,
        num_key_value_heads=8,
        vocab_size=32000,
        max_position_embeddings=tokens,
        use_cache=False,
    )
    model = LlamaForCausalLM(config)
    return model, list(model.model.layers), _text(32000, tokens, tokens)


def qwen3moe(tokens: int) -> Case:
    """6 layers with 64 experts, 8 of them for each token."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    config = Qwen3MoeConfig(
        hidden_size=2048,
        intermediate_size=6144,
        moe_intermediate_size=768,
        num_hidden_layers=6,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=128,
        num_experts=64,
        num_experts_per_tok=8,
        vocab_size=32000,
        use_cache=False,
    )
    model = Qwen3MoeForCausalLM(config)
    return model, list(model.model.layers), _text(32000, tokens, tokens)


def t5(tokens: int) -> Case:
    """T5-large."""
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        d_model=1024,
        d_ff=2816,
        num_layers=24,
        num_heads=16,
        d_kv=64,
        feed_forward_proj="gated-gelu",
        use_cache=False,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    model = T5ForConditionalGeneration(config)
    return model, [*model.encoder.block, *model.decoder.block], _text(32000, tokens, 512)


def whisper(tokens: int) -> Case:
    """Whisper-large: 1500 frames a sample in the encoder, and the rest of the tokens in the decoder."""
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        d_model=1280,
        encoder_layers=32,
        decoder_layers=32,
        encoder_attention_heads=20,
        decoder_attention_heads=20,
        encoder_ffn_dim=5120,
        decoder_ffn_dim=5120,
        num_mel_bins=128,
        use_cache=False,
    )
    model = WhisperForConditionalGeneration(config)
    num_samples = max(tokens // 2048, 1)

    def make(device: torch.device, generator: torch.Generator) -> Batch:
        sound = torch.randn(num_samples, 128, 3000, device=device, generator=generator)
        labels = torch.randint(0, 50000, (num_samples, 448), device=device, generator=generator)
        return {"input_features": sound, "labels": labels}

    return model, [*model.model.encoder.layers, *model.model.decoder.layers], make


class _Classifier(nn.Module):
    """A model of timm with its loss, called as one of transformers."""

    def __init__(self, name: str) -> None:
        super().__init__()
        import timm

        self.model = timm.create_model(name, num_classes=1000)

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Any:
        loss = nn.functional.cross_entropy(self.model(pixel_values).float(), labels)
        return argparse.Namespace(loss=loss)


def _images(model: _Classifier, num_images: int) -> MakeBatch:
    size = model.model.default_cfg["input_size"][-1]

    def make(device: torch.device, generator: torch.Generator) -> Batch:
        images = torch.randn(num_images, 3, size, size, device=device, generator=generator)
        return {
            "pixel_values": images,
            "labels": torch.randint(0, 1000, (num_images,), device=device, generator=generator),
        }

    return make


def vit(tokens: int) -> Case:
    """ViT-giant of timm; 257 tokens an image."""
    model = _Classifier("vit_giant_patch14_224")
    return model, list(model.model.blocks), _images(model, max(tokens // 257, 1))


def convnext(tokens: int) -> Case:
    """ConvNeXt-large of timm; 49 tokens an image at its end."""
    model = _Classifier("convnext_large")
    blocks = [block for stage in model.model.stages for block in stage.blocks]
    return model, blocks, _images(model, max(tokens // 49, 1))


def swin(tokens: int) -> Case:
    """Swin-large of timm; 49 tokens an image at its end."""
    model = _Classifier("swin_large_patch4_window7_224")
    blocks = [block for stage in model.model.layers for block in stage.blocks]
    return model, blocks, _images(model, max(tokens // 49, 1))


def clip(num_samples: int) -> Case:
    """CLIP with the image tower of ViT-L/14 and 77 tokens a text."""
    from transformers import CLIPConfig, CLIPModel

    vision = {**_sizes(1024, 4096, 24, 16), "patch_size": 14}
    model = CLIPModel(CLIPConfig(vision_config=vision, text_config=_sizes(768, 3072, 12, 12)))

    def make(device: torch.device, generator: torch.Generator) -> Batch:
        return {
            "pixel_values": torch.randn(num_samples, 3, 224, 224, device=device, generator=generator),
            "input_ids": torch.randint(0, 49000, (num_samples, 77), device=device, generator=generator),
            "return_loss": torch.tensor(True),
        }

    return model, [*model.vision_model.encoder.layers, *model.text_model.encoder.layers], make


def wav2vec2(num_samples: int) -> Case:
    """wav2vec2-large with CTC; 4 seconds of sound a sample."""
    from transformers import Wav2Vec2Config, Wav2Vec2ForCTC

    config = Wav2Vec2Config(
        do_stable_layer_norm=True,
        feat_extract_norm="layer",
        conv_bias=True,
        mask_time_prob=0.0,
        **_sizes(1024, 4096, 24, 16),
    )
    model = Wav2Vec2ForCTC(config)

    def make(device: torch.device, generator: torch.Generator) -> Batch:
        sound = torch.randn(num_samples, 64000, device=device, generator=generator)
        labels = torch.randint(1, 30, (num_samples, 40), device=device, generator=generator)
        return {"input_values": sound, "labels": labels}

    return model, list(model.wav2vec2.encoder.layers), make


def _sizes(width: int, inner: int, num_layers: int, num_heads: int) -> dict[str, Any]:
    """Of a configuration of transformers, by the names that most have."""
    return {
        "hidden_size": width,
        "intermediate_size": inner,
        "num_hidden_layers": num_layers,
        "num_attention_heads": num_heads,
    }


# Language models: the class, where the blocks are, and what of the configuration is no default.
_LANGUAGE_MODELS: dict[str, tuple[str, str, dict[str, Any]]] = {
    "albert": ("AlbertForMaskedLM", "albert.encoder.albert_layer_groups.0.albert_layers", {}),
    "bart": ("BartForConditionalGeneration", "model.encoder.layers model.decoder.layers", {}),
    "bert": ("BertForMaskedLM", "bert.encoder.layer", _sizes(1024, 4096, 24, 16)),
    "bloom": ("BloomForCausalLM", "transformer.h", {"hidden_size": 2048, "n_layer": 24, "n_head": 16}),
    "deberta": (
        "DebertaV2ForMaskedLM",
        "deberta.encoder.layer",
        {
            **_sizes(1536, 6144, 24, 24),
            "relative_attention": True,
            "position_buckets": 256,
            "pos_att_type": ["p2c", "c2p"],
            "share_att_key": True,
            "norm_rel_ebd": "layer_norm",
            "position_biased_input": False,
        },
    ),
    "deepseek": (
        "DeepseekV2ForCausalLM",
        "model.layers",
        {
            **_sizes(2048, 10944, 5, 16),
            "num_key_value_heads": 16,
            "moe_intermediate_size": 1408,
            "n_routed_experts": 64,
            "n_shared_experts": 2,
            "num_experts_per_tok": 6,
            "first_k_dense_replace": 1,
            "q_lora_rank": None,
        },
    ),
    "distilbert": ("DistilBertForMaskedLM", "distilbert.transformer.layer", {}),
    "falcon": ("FalconForCausalLM", "transformer.h", {"num_hidden_layers": 8}),
    "gemma2": ("Gemma2ForCausalLM", "model.layers", {"num_hidden_layers": 12}),
    "gemma3": (
        "Gemma3ForCausalLM",
        "model.layers",
        {**_sizes(1152, 6912, 26, 4), "num_key_value_heads": 1, "head_dim": 256},
    ),
    # whose layers are ``Conv1D`` of transformers
    "gpt2": ("GPT2LMHeadModel", "transformer.h", {"n_embd": 1280, "n_layer": 36, "n_head": 20}),
    "gptoss": ("GptOssForCausalLM", "model.layers", {"num_hidden_layers": 4, "num_local_experts": 16}),
    "mixtral": ("MixtralForCausalLM", "model.layers", {**_sizes(2048, 7168, 6, 16), "num_key_value_heads": 4}),
    "modernbert": ("ModernBertForMaskedLM", "model.layers", {**_sizes(1024, 2624, 28, 16), "vocab_size": 50368}),
    "neox": ("GPTNeoXForCausalLM", "gpt_neox.layers", _sizes(2048, 8192, 24, 16)),
    "opt": (
        "OPTForCausalLM",
        "model.decoder.layers",
        {
            "hidden_size": 2048,
            "word_embed_proj_dim": 2048,
            "ffn_dim": 8192,
            "num_hidden_layers": 24,
            "num_attention_heads": 32,
            "vocab_size": 50272,
        },
    ),
    "phi3": ("Phi3ForCausalLM", "model.layers", {**_sizes(3072, 8192, 12, 32), "pad_token_id": 0}),
    "qwen3": (
        "Qwen3ForCausalLM",
        "model.layers",
        {**_sizes(2048, 6144, 28, 16), "num_key_value_heads": 8, "head_dim": 128},
    ),
}
_OWN_VOCABULARY = (
    "albert",
    "bart",
    "bert",
    "distilbert",
    "gpt2",
)  # the rest has 32,000 tokens, unless the table says otherwise


def _language_model(name: str, tokens: int) -> Case:
    import transformers

    cls_name, where, given = _LANGUAGE_MODELS[name]
    cls = getattr(transformers, cls_name)
    if name not in _OWN_VOCABULARY:
        given = {"vocab_size": 32000, **given}
    config = cls.config_class(**given)
    config.use_cache = False
    model = cls(config)
    blocks = [block for path in where.split() for block in model.get_submodule(path)]
    longest = min(getattr(config, "max_position_embeddings", 1024), 1024)
    return model, blocks, _text(config.vocab_size, tokens, longest)


def _model_of_timm(name: str, num_images: int) -> Case:
    """Any model of timm that keeps its blocks in ``blocks``, its own or those of its stages."""
    model = _Classifier(name)
    parts = [model.model, *getattr(model.model, "stages", ())]
    blocks = [block for part in parts for block in getattr(part, "blocks", ())]
    return model, blocks, _images(model, num_images)


_CASES = (llama, qwen3moe, t5, whisper, vit, convnext, swin, clip, wav2vec2)
# A name is what the command takes.
MODELS: dict[str, Callable[[int], Case]] = {case.__name__: case for case in _CASES}
MODELS |= {name: partial(_language_model, name) for name in _LANGUAGE_MODELS}


def model_of(name: str) -> Callable[[int], Case]:
    """What makes the model of this name with so many tokens, images or samples: one of ``MODELS``, or of timm."""
    if name in MODELS:
        return MODELS[name]
    return partial(_model_of_timm, name)
