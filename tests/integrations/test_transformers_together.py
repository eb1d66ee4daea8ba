"""Where ranks of one job would part in ``transformers``, it keeps them together, as with ``fully_shard``: layers that a
rank alone would skip, and ``generate`` after the last token of a rank."""

import copy
from functools import partial
from typing import Any

import torch
import torch.nn as nn
from common import check_training, full, shared_directory
from integration_common import VOCABULARY, LibraryTest, make_llama, needs, process
from model_cases import CASES, SHAPE, SPEECH
from test_integration_transformers import arguments

TRANSLATION = {
    **{f"{part}_{name}": size for part in ("encoder", "decoder") for name, size in (("layers", 3), ("ffn_dim", 24))},
    **dict.fromkeys(("encoder_attention_heads", "decoder_attention_heads"), 2),
    **dict.fromkeys(("dropout", "attention_dropout", "activation_dropout"), 0.0),
    **{"bos_token_id": 0, "pad_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 2},
    **{"vocab_size": VOCABULARY, "d_model": 16, "max_position_embeddings": 32},
}


def make_speech(kind: str, layerdrop: float, **options: Any) -> nn.Module:
    import transformers

    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(
        **{**SHAPE, "num_hidden_layers": 4, **SPEECH, "layerdrop": layerdrop, **options}
    )
    return getattr(transformers, f"{kind}Model")(config)


def make_translation(layerdrop: float) -> nn.Module:
    from transformers import M2M100Config, M2M100ForConditionalGeneration

    torch.manual_seed(0)
    drops = dict.fromkeys(("encoder_layerdrop", "decoder_layerdrop"), layerdrop)
    return M2M100ForConditionalGeneration(M2M100Config(**TRANSLATION, **drops))


def speech_loss(model: nn.Module, wave: torch.Tensor) -> torch.Tensor:
    return model(wave).last_hidden_state.square().mean()


def translation_loss(model: nn.Module, tokens: torch.Tensor) -> torch.Tensor:
    return model(input_ids=tokens, labels=tokens).loss


@needs("transformers", "accelerate", "peft", extra="transformers")
class TestTogether(LibraryTest):
    def check_layerdrop(self, model: nn.Module, reference: nn.Module, batch: torch.Tensor, loss_of: Any) -> None:
        """All ranks run all layers, whatever numbers each draws."""
        sharded, sgd = self.shard(model).train(), partial(torch.optim.SGD, lr=0.1)
        torch.manual_seed(self.rank)
        check_training(
            reference.train(),
            lambda _: sharded,
            self.gtp_mesh(),
            lambda _: batch,
            loss_of,
            make_optimizer=sgd,
            steps=3,
            tolerance={"atol": 1e-5, "rtol": 1e-3},
        )

    def test_layerdrop(self) -> None:
        waves = torch.randn(4, 160, generator=torch.Generator().manual_seed(1))
        for kind, options in (
            ("Wav2Vec2", {}),
            ("Wav2Vec2", {"do_stable_layer_norm": True}),
            ("Hubert", {}),
            ("WavLM", {}),
            ("UniSpeech", {}),
            ("Data2VecAudio", {"num_conv_pos_embeddings": 2}),
            ("SEW", {"squeeze_factor": 2}),
        ):
            with self.subTest(kind=kind, **options):
                model, reference = make_speech(kind, 0.5, **options), make_speech(kind, 0.0, **options)
                self.check_layerdrop(model, reference, waves, speech_loss)

    def test_layerdrop_of_models_that_do_not_ask(self) -> None:
        tokens = torch.randint(3, VOCABULARY, (4, 6), generator=torch.Generator().manual_seed(1))
        model, reference = make_translation(0.5), make_translation(0.0)
        with self.assertLogs("dtensor_gtp", "WARNING") as logs:
            self.check_layerdrop(model, reference, tokens, translation_loss)
        self.assertEqual(len([line for line in logs.output if "layerdrop" in line]), 1, logs.output)
        self.assertEqual(model.config.encoder_layerdrop, 0.5)  # what is saved

    def test_generate_until_all_ranks_have_stopped(self) -> None:
        import peft

        lora = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
        prompt = torch.arange(1, 5)[None] + 3 * self.rank
        sampled = {"do_sample": True, "top_k": 5}
        for has_adapters, options in ((False, {}), (False, {"num_beams": 2}), (False, sampled), (True, {})):
            torch.manual_seed(0)
            reference = (peft.get_peft_model(make_llama(), lora) if has_adapters else make_llama()).eval()
            options = {**options, "max_new_tokens": 3 + 4 * self.rank, "pad_token_id": 0}
            outputs = []
            for one in (reference, self.shard(copy.deepcopy(reference))):
                torch.manual_seed(self.rank)
                with torch.no_grad():
                    outputs.append(one.generate(prompt, **options))
            self.assertEqual(*outputs, msg=str(options))

    def test_generate_of_a_model_that_does_not_ask(self) -> None:
        """Whisper's own ``generate`` hands ``synced_gpus=False`` on."""
        torch.manual_seed(0)
        reference = CASES["whisper"].make().eval()
        model = self.shard(copy.deepcopy(reference))
        sound = torch.randn(1, 4, 16, generator=torch.Generator().manual_seed(self.rank))
        options = {"max_new_tokens": 2 + 2 * self.rank}
        self.assertEqual(model.generate(sound, **options), reference.generate(sound, **options))

    def test_assisted_generation_on_whole_weights(self) -> None:
        """It goes on wrongly after the end of a rank: transformers counts down to -1 tokens, or adds some after the
        last. On whole weights ranks need not stay together."""
        reference, assistant = make_llama().eval(), make_llama().eval()
        model = self.shard(copy.deepcopy(reference))
        prompt = torch.arange(1, 5)[None] + 3 * self.rank
        options = {"max_new_tokens": 3 + 4 * self.rank, "pad_token_id": 0, "do_sample": False}
        for extra in ({"assistant_model": assistant}, {"prompt_lookup_num_tokens": 2}):
            model.unshard()
            found = model.generate(prompt, synced_gpus=False, **options, **extra)
            model.reshard()
            self.assertEqual(found, reference.generate(prompt, **options, **extra), msg=str(extra))

    def test_seq2seq_trainer_predicts_with_generate(self) -> None:
        from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments

        from dtensor_gtp.integrations.transformers import GTPTrainer

        class GTPSeq2SeqTrainer(GTPTrainer, Seq2SeqTrainer): ...

        tokens = torch.randint(3, VOCABULARY, (8, 6), generator=torch.Generator().manual_seed(1))
        rows = [{"input_ids": row, "labels": row} for row in tokens]
        found = []
        for num_processes, cls in ((1, Seq2SeqTrainer), (2, GTPSeq2SeqTrainer)):
            with shared_directory() as folder, process(num_processes):
                defaults = vars(arguments(folder, num_processes))
                names = ("use_cpu", "report_to", "disable_tqdm", "dataloader_pin_memory", "per_device_eval_batch_size")
                args = Seq2SeqTrainingArguments(
                    str(folder),
                    predict_with_generate=True,
                    # transformers multiplies by the number of processes what this model averages over its own tokens
                    average_tokens_across_devices=False,
                    generation_max_length=9,
                    eval_strategy="steps",
                    eval_steps=1,
                    max_steps=2,
                    per_device_train_batch_size=8 // num_processes,
                    save_strategy="no",
                    **{name: defaults[name] for name in names},
                )
                model = make_translation(0.0)
                model = self.shard(model) if num_processes > 1 else model
                trainer = cls(model=model, args=args, train_dataset=rows, eval_dataset=rows)
                trainer.train()
                prediction = trainer.predict(rows)
                losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
                found.append((prediction.predictions.tolist(), losses, prediction.metrics["test_loss"]))
        self.assertEqual(found[1], found[0], atol=1e-4, rtol=1e-4)

    def test_vocabularies_change_before(self) -> None:
        model = self.shard(make_llama())
        self.assertIs(model.resize_token_embeddings(VOCABULARY), model.get_input_embeddings())
        with self.assertRaisesRegex(RuntimeError, f"{VOCABULARY} rows to 40 after gtp_shard.*Call it before gtp_shard"):
            model.resize_token_embeddings(VOCABULARY, pad_to_multiple_of=8)

    def test_compiled_code_asks_as_transformers_and_torch_sees_no_fully_shard(self) -> None:
        from transformers.integrations.fsdp import is_fsdp_managed_module

        class Asks(nn.Linear):
            def forward(self, x: torch.Tensor) -> torch.Tensor:
                return super().forward(x) if is_fsdp_managed_module(self) else x

        torch.manual_seed(0)
        reference = nn.Sequential(Asks(8, 8), nn.ReLU(), Asks(8, 8))
        model = self.shard(copy.deepcopy(reference))
        model.compile(backend="eager", fullgraph=True)
        x = torch.randn(2, 8)
        expected = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        expected.load_state_dict(reference.state_dict())
        self.assertEqual(model(x), expected(x))
        model(x).sum().backward()
        expected(x).sum().backward()
        for actual, want in zip(model.parameters(), expected.parameters(), strict=True):
            self.assertEqual(full(actual.grad), want.grad)
