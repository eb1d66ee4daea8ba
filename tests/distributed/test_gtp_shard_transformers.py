"""Models of ``transformers``, built from tiny configs, train, evaluate and generate as in one process.

They know nothing of sharding: Conv1D with transposed weights (GPT-2), weights tied between embedding and head, relative
position tables that one layer lends to the others (T5), stacked experts as 3-D parameters (Mixtral), convolutions and
raw position parameters (ViT).
"""

from __future__ import annotations

import copy
import functools
import unittest
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import torch
import torch.nn as nn
from common import ALL, GlooTest, check_training
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize, run_tests

from dtensor_gtp import gtp_shard

VOCABULARY = 35  # not a multiple of the number of ranks
NUM_TOKENS = 6
COMMON = {"vocab_size": VOCABULARY, "attn_implementation": "eager", "pad_token_id": 0}
LLAMA = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 32,
}
ENCODER = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def make_bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    return BertForMaskedLM(BertConfig(**COMMON, **ENCODER, max_position_embeddings=16))


def make_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = {"n_positions": 32, "n_embd": 16, "n_layer": 2, "n_head": 2}
    return GPT2LMHeadModel(GPT2Config(**COMMON, **shape, resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def make_llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**COMMON, **LLAMA))


def make_mixtral(implementation: str = "eager") -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "experts_implementation": implementation}
    return MixtralForCausalLM(MixtralConfig(**COMMON, **LLAMA, **experts))


def make_t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    shape = {"d_model": 16, "d_kv": 8, "d_ff": 24, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 2}
    return T5ForConditionalGeneration(T5Config(**COMMON, **shape, dropout_rate=0.0, decoder_start_token_id=1))


def make_vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(**ENCODER, image_size=8, patch_size=4, num_labels=5, attn_implementation="eager")
    return ViTForImageClassification(config)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "bert": make_bert,
    "gpt2": make_gpt2,
    "llama": make_llama,
    "mixtral": make_mixtral,
    "mixtral_grouped_mm": lambda: make_mixtral("grouped_mm"),
    "t5": make_t5,
    "vit": make_vit,
}


def make(name: str) -> nn.Module:
    """The model in train mode, with every parameter away from its all-zeros or all-ones start.

    In float64, but for the one whose kernel does not take it.
    """
    torch.manual_seed(0)
    model = MODELS[name]().train()
    if name != "mixtral_grouped_mm":
        model.double()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.05)
    return model


def make_batch(name: str, generator: torch.Generator) -> dict[str, torch.Tensor]:
    """Eight examples; no label is padding, so that each rank's mean is over equally many tokens."""
    if name == "vit":
        pixels = torch.randn(8, 3, 8, 8, generator=generator, dtype=torch.float64)
        return {"pixel_values": pixels, "labels": torch.randint(0, 5, (8,), generator=generator)}
    tokens = torch.randint(2, VOCABULARY, (8, NUM_TOKENS), generator=generator)
    if name.startswith("mixtral"):
        tokens[:2] = 7  # rank 0 sees one token alone, so that most experts get nothing to do there
    labels = torch.randint(2, VOCABULARY, (8, NUM_TOKENS), generator=generator) if name in ("bert", "t5") else tokens
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def model_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.2, momentum=0.9)


@unittest.skipIf(find_spec("transformers") is None, "needs transformers: pip install 'dtensor-gtp[transformers]'")
class TestTransformers(GlooTest):
    @parametrize("name", sorted(MODELS))
    def test_trains(self, name: str) -> None:
        mesh = self.gtp_mesh()
        check_training(
            make(name),
            lambda model: gtp_shard(model, mesh, schedule=ALL),
            mesh,
            lambda generator: make_batch(name, generator),
            model_loss,
            make_optimizer=sgd,
            steps=2,
            tolerance={"rtol": 1e-4, "atol": 1e-5} if name == "mixtral_grouped_mm" else None,
        )

    @parametrize("name", sorted(MODELS))
    def test_evaluates(self, name: str) -> None:
        reference = make(name).eval()
        model = gtp_shard(copy.deepcopy(reference), self.gtp_mesh(), schedule=ALL)
        batch = make_batch(name, torch.Generator().manual_seed(self.rank))
        with torch.no_grad():
            result, expected = model(**batch), reference(**batch)
        self.assertEqual(result.logits, expected.logits)
        self.assertEqual(result.loss, expected.loss)
        self.assertEqual(type(result), type(expected))

    @parametrize("name", ["gpt2", "llama", "t5"])
    def test_generates(self, name: str) -> None:
        """Ranks have prompts of their own, but take equally many steps: each step is collective."""
        reference = make(name).eval()
        model = gtp_shard(copy.deepcopy(reference), self.gtp_mesh(), schedule=ALL)
        tokens = make_batch(name, torch.Generator().manual_seed(self.rank))["input_ids"][:2]
        options: dict[str, Any] = {"attention_mask": torch.ones_like(tokens), "do_sample": False}
        for beams in (1, 2):
            steps = {"max_new_tokens": 7, "min_new_tokens": 7, "num_beams": beams}
            self.assertEqual(model.generate(tokens, **options, **steps), reference.generate(tokens, **options, **steps))

    def test_generates_until_all_ranks_have_ended(self) -> None:
        """``synced_gpus`` is how transformers lets ranks that are done go on with the others."""
        reference = make("llama").eval()
        model = gtp_shard(copy.deepcopy(reference), self.gtp_mesh(), schedule=ALL)
        tokens = make_batch("llama", torch.Generator().manual_seed(self.rank))["input_ids"][:1]
        options: dict[str, Any] = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "max_new_tokens": 9}
        free = reference.generate(tokens, **options, min_new_tokens=9)
        end = int(free[0, NUM_TOKENS + 2 * self.rank])  # the token that ends this rank's sequence, early on rank 0
        expected = reference.generate(tokens, **options, eos_token_id=end)
        self.assertEqual(model.generate(tokens, **options, eos_token_id=end, synced_gpus=True), expected)

    def test_gradient_checkpointing(self) -> None:
        mesh = self.gtp_mesh()
        for use_reentrant in (False, True):

            def shard(model: nn.Module, use_reentrant: bool = use_reentrant) -> nn.Module:
                model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
                return gtp_shard(model, mesh, schedule=ALL)

            batch = functools.partial(make_batch, "llama")
            check_training(make("llama"), shard, mesh, batch, model_loss, make_optimizer=sgd, steps=2)


instantiate_parametrized_tests(TestTransformers)

if __name__ == "__main__":
    run_tests()
