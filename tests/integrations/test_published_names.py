"""Models that ``transformers`` stores under other names than it has in memory, or in other tensors: the folder of its
``save_pretrained`` is what ``load_pretrained`` reads, and what ours writes."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
import torch.nn as nn
from common import assert_same_params, full, shared_directory
from integration_common import LibraryTest, make_llama, needs

from dtensor_gtp import _published, pretrained, quantize_
from dtensor_gtp._safetensors import stored_in
from dtensor_gtp.pretrained import load_pretrained, save_pretrained

TEXT = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 2}
VISION = {key: value for key, value in TEXT.items() if key != "vocab_size"} | {"image_size": 8, "patch_size": 4}


def make_llava() -> nn.Module:
    """Its text and vision models have other prefixes in memory."""
    from transformers import LlavaConfig, LlavaForConditionalGeneration

    text, vision = {"model_type": "llama", **TEXT}, {"model_type": "clip_vision_model", **VISION}
    return LlavaForConditionalGeneration(LlavaConfig(text_config=text, vision_config=vision, image_token_index=60))


def make_mixtral() -> nn.Module:
    """Its files have three matrices for each expert, its memory two tensors for all."""
    from transformers import MixtralConfig, MixtralForCausalLM

    return MixtralForCausalLM(MixtralConfig(**TEXT, num_key_value_heads=1, num_local_experts=4))


def make_blip2() -> nn.Module:
    """Its own ``generate`` reads the queries outside of a forward."""
    from transformers import Blip2Config, Blip2ForConditionalGeneration

    text = {"model_type": "opt", **TEXT, "ffn_dim": 24, "max_position_embeddings": 64, "word_embed_proj_dim": 16}
    text |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    queries = {**TEXT, "encoder_hidden_size": 16, "cross_attention_frequency": 1}
    parts = {"text_config": text, "vision_config": VISION, "qformer_config": queries}
    return Blip2ForConditionalGeneration(Blip2Config(**parts, num_query_tokens=3, image_token_index=60))


def make_dinov2() -> nn.Module:
    """One matrix of its files is two in memory, which no conversion makes of one of them."""
    from transformers import Dinov2Config, Dinov2Model

    return Dinov2Model(Dinov2Config(**VISION, use_swiglu_ffn=True))


def seeded(make: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return make().eval()


@contextmanager
def noted_reads() -> Iterator[list[str]]:
    """Names of stored tensors that this rank reads to convert them."""
    names: list[str] = []
    stock = _published.Converted.region

    def region(self: _published.Converted, *args: Any) -> torch.Tensor:
        def convert(tensors: Any) -> torch.Tensor:
            found = list(tensors)
            names.extend(part.name for part, _ in found)
            return self.convert(found)

        return stock(self._replace(convert=convert), *args)

    with mock.patch.object(_published.Converted, "region", region):
        yield names


@needs("transformers", extra="transformers")
class TestPublishedNames(LibraryTest):
    def theirs(self, folder: Path, model: Any) -> Path:
        if self.rank == 0:
            model.save_pretrained(folder)
        dist.barrier()
        return folder

    def test_files_of_transformers_are_read_and_written(self) -> None:
        for make in (make_llava, make_mixtral):
            with self.subTest(make.__name__), shared_directory() as folder:
                reference = seeded(make)
                theirs = self.theirs(folder / "theirs", reference)
                with torch.device("meta"):
                    model = seeded(make, 1)
                self.shard(model)
                self.assertEqual(load_pretrained(model, theirs), ())
                assert_same_params(model, reference, rtol=0.0, atol=0.0)
                self.assertEqual(dict(model.named_buffers()), dict(reference.named_buffers()))  # in no file
                save_pretrained(model, folder / "ours", max_file_nbytes=16 << 10)
                shapes = [
                    {name: (stored.dtype, stored.shape) for name, stored in stored_in(folder / name).items()}
                    for name in ("ours", "theirs")
                ]
                self.assertEqual(*shapes)
                self.assertNotEqual(set(shapes[0]), set(model.state_dict()))
                again = self.shard(seeded(make, 2))
                load_pretrained(again, folder / "ours")
                assert_same_params(again, reference, rtol=0.0, atol=0.0)

    def test_what_is_converted_together_is_written_as_in_memory(self) -> None:
        """The rest has its published names. transformers reads both."""
        reference = seeded(make_dinov2)
        with shared_directory() as folder:
            model = self.shard(seeded(make_dinov2, 1))
            load_pretrained(model, self.theirs(folder / "theirs", reference))
            assert_same_params(model, reference, rtol=0.0, atol=0.0)
            save_pretrained(model, folder / "ours")
            names, published = (set(stored_in(folder / name)) for name in ("ours", "theirs"))
            self.assertLessEqual(names - published, set(reference.state_dict()))  # none before transformers 5.24
            if self.rank == 0:
                reference.config.save_pretrained(folder / "ours")
                again = type(reference).from_pretrained(folder / "ours")
                assert_same_params(again, reference, rtol=0.0, atol=0.0)

    def test_a_missing_expert_is_said(self) -> None:
        with shared_directory() as folder:
            theirs = self.theirs(folder, seeded(make_mixtral))
            stored = stored_in(theirs)
            del stored["model.layers.1.block_sparse_moe.experts.3.w3.weight"]
            model = self.shard(seeded(make_mixtral, 1))
            with mock.patch("dtensor_gtp.pretrained.stored_in", return_value=stored):
                self.assertRaisesRegex(ValueError, "perhaps because some are missing", load_pretrained, model, theirs)

    def test_native_weights_are_made_of_published_ones(self) -> None:
        wide = {"hidden_size": 32, "intermediate_size": 64}
        with shared_directory() as folder, mock.patch.dict(TEXT, wide), mock.patch.dict(VISION, wide):
            reference = seeded(make_llava)
            native = quantize_(seeded(make_llava, 1).requires_grad_(False), "mxfp8", storage="native")
            self.shard(native)
            self.assertEqual(load_pretrained(native, self.theirs(folder, reference)), ())
            expected = self.shard(quantize_(reference.requires_grad_(False), "mxfp8", storage="native"))
            found = {key: full(value) for key, value in native.state_dict().items()}
            self.assertEqual(found, {key: full(value) for key, value in expected.state_dict().items()})

    def test_buffers_that_nobody_computes_are_refused(self) -> None:
        """Those of transformers are computed."""
        for is_known in (True, False):
            with shared_directory() as folder:
                with torch.device("meta"):
                    model = nn.Sequential(seeded(make_mixtral))
                    if not is_known:
                        model[0].model.norm.register_buffer("table", torch.empty(4), persistent=False)
                self.shard(model)
                theirs = self.theirs(folder, seeded(make_mixtral))
                if is_known:
                    load_pretrained(model[0], theirs)
                    tables = [dict(each.named_buffers()) for each in (model[0], seeded(make_mixtral))]
                    self.assertEqual(*tables)
                else:
                    self.assertRaisesRegex(ValueError, "are in no file: 'table'", load_pretrained, model[0], theirs)

    def test_buffers_of_a_model_within_another_one(self) -> None:
        reference = make_llama()
        with shared_directory() as folder:
            with torch.device("meta"):
                model = nn.Sequential(make_llama())
            self.shard(model)
            load_pretrained(model, self.theirs(folder, reference), rename=lambda name: name.removeprefix("0."))
            self.assertEqual(dict(model[0].named_buffers()), dict(reference.named_buffers()))

    def test_tied_native_weights(self) -> None:
        from transformers import LlamaConfig, LlamaForCausalLM

        sizes = TEXT | {"hidden_size": 32, "intermediate_size": 64, "tie_word_embeddings": True}
        with shared_directory() as folder:
            models = [seeded(lambda: LlamaForCausalLM(LlamaConfig(**sizes)), seed) for seed in (0, 1, 2)]
            theirs = self.theirs(folder / "theirs", models[0])
            for model in models:
                quantize_(model.requires_grad_(False), "mxfp8", filter_fn=lambda *_: True, storage="native")
                self.shard(model)
            load_pretrained(models[1], theirs)
            save_pretrained(models[1], folder / "ours")
            load_pretrained(models[2], folder / "ours")
            states = [{key: full(value) for key, value in model.state_dict().items()} for model in models]
            self.assertEqual(states[1], states[0])
            self.assertEqual(states[2], states[0])

    def test_names_of_memory_are_read(self) -> None:
        """As files of before have them."""
        stock = {"has_conversions": lambda model: False}
        with (
            shared_directory() as folder,
            mock.patch.multiple(pretrained, **stock),
            mock.patch.multiple(_published, **stock),
        ):
            reference = seeded(make_llava)
            save_pretrained(self.shard(seeded(make_llava)), folder)
            self.assertIn("model.language_model.norm.weight", stored_in(folder))
            model = self.shard(seeded(make_llava, 1))
            load_pretrained(model, folder)
            assert_same_params(model, reference, rtol=0.0, atol=0.0)
            self.theirs(folder / "theirs", reference)
            self.assertRaisesRegex(ValueError, "does not find .* tensors", load_pretrained, model, folder / "theirs")

    def test_a_rank_reads_its_experts_alone(self) -> None:
        with shared_directory() as folder:
            theirs = self.theirs(folder, seeded(make_mixtral))
            model = self.shard(seeded(make_mixtral, 1))
            with noted_reads() as names:
                load_pretrained(model, theirs)
            experts = {int(name.split(".experts.")[1].split(".")[0]) for name in names}
            self.assertEqual(experts, {2 * self.rank, 2 * self.rank + 1})
            self.assertEqual(len(names), 2 * 2 * 3)  # of two layers, for two experts

    def test_what_no_file_has_is_named(self) -> None:
        with shared_directory() as folder:
            theirs = self.theirs(folder, seeded(make_mixtral))
            model = self.shard(seeded(make_llava))
            self.assertRaisesRegex(ValueError, "does not find .* tensors of Llava", load_pretrained, model, theirs)

    def test_generate_that_reads_parameters_of_the_model(self) -> None:
        reference = seeded(make_blip2)
        ids = torch.cat([torch.full((2, 3), 60), torch.arange(3, 15).view(2, 6)], 1)
        batch = {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": torch.randn(2, 3, 8, 8)}
        options = {"max_new_tokens": 4, "do_sample": False}
        model = self.shard(seeded(make_blip2))
        self.assertEqual(model.generate(**batch, **options), reference.generate(**batch, **options))

    def test_generate_of_the_user_stays(self) -> None:
        model = seeded(make_blip2)
        model.generate = lambda: "mine"
        self.assertEqual(self.shard(model).generate(), "mine")
        self.assertNotIn("generate", vars(self.shard(seeded(make_llava))), "that of the class will do")
