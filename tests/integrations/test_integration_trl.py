"""TRL's trainers on a sharded model, alone or with adapters, beside the stock ones in one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from common import ALL, GlooTest, assert_same_params, shared_directory
from integration_common import needs, process

from dtensor_gtp import gtp_shard

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(29))]
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
BF16 = torch.bfloat16


def make_tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(models.WordLevel({word: index for index, word in enumerate(WORDS)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    special = {"pad_token": "<pad>", "eos_token": "<eos>", "unk_token": "<unk>"}
    return PreTrainedTokenizerFast(tokenizer_object=words, padding_side="left", **special)


def sentence(seed: int, length: int) -> str:
    numbers = torch.randint(0, 29, (length,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{int(number)}" for number in numbers)


def rows_of(kind: str) -> list[dict[str, str]]:
    if kind == "SFT":
        return [{"text": sentence(index, 10)} for index in range(16)]
    rows = [{"prompt": sentence(index, 5)} for index in range(16)]
    if kind == "GRPO":
        return rows
    answers = {"chosen": 100, "rejected": 200}
    return [
        {**row, **{name: f" {sentence(seed + index, 5)}" for name, seed in answers.items()}}
        for index, row in enumerate(rows)
    ]


def make_model(kind: str, dtype: torch.dtype, has_adapters: bool) -> nn.Module:
    import peft
    from transformers import LlamaConfig, LlamaForCausalLM, LlamaForSequenceClassification

    torch.manual_seed(0)
    is_reward = kind == "Reward"
    labels = {"num_labels": 1} if is_reward else {}
    config = LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, eos_token_id=1, **SHAPE, **labels)
    model: nn.Module = (LlamaForSequenceClassification if is_reward else LlamaForCausalLM)(config).to(dtype)
    if not has_adapters:
        return model
    torch.manual_seed(1)
    adapters = {"r": 4, "target_modules": ["q_proj", "v_proj"], "init_lora_weights": "gaussian"}
    adapted: nn.Module = peft.get_peft_model(
        model, peft.LoraConfig(task_type="SEQ_CLS" if is_reward else "CAUSAL_LM", **adapters)
    )
    return adapted


@needs("trl", "peft", "datasets", "transformers", "accelerate", extra="transformers")
class TestTrl(GlooTest):
    world_size = 2

    def train(self, kind: str, folder: Path, num_processes: int, case: dict[str, Any]) -> Any:
        import datasets
        import trl

        from dtensor_gtp.integrations.transformers import GTPTrainer

        case = dict(case)
        dtype, has_adapters = case.pop("dtype", torch.float32), case.pop("has_adapters", False)
        options = {
            **{"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "save_strategy": "no"},
            **{"max_steps": 3, "per_device_train_batch_size": 4 // num_processes, "learning_rate": 1e-2},
            **{"dataloader_pin_memory": False, "gradient_checkpointing": dtype is BF16, "logging_steps": 1, **case},
        }
        if dtype is BF16:
            options["gradient_checkpointing_kwargs"] = {"use_reentrant": False}
        options |= {"max_length": 32} if kind != "GRPO" else {"num_generations": 4, "generation_batch_size": 8}
        options |= {"max_completion_length": 6} if kind == "GRPO" else {}
        models = {"model": make_model(kind, dtype, has_adapters)}
        if kind == "DPO" and not has_adapters:
            models["ref_model"] = make_model(kind, dtype, has_adapters)
        stock = getattr(trl, f"{kind}Trainer")
        cls = type(f"GTP{kind}Trainer", (GTPTrainer, stock), {}) if num_processes > 1 else stock
        if num_processes > 1:
            models = {name: gtp_shard(model, self.gtp_mesh(), schedule=ALL) for name, model in models.items()}
        if kind == "GRPO":
            models["reward_funcs"] = lambda completions, **_: [float(len(set(text.split()))) for text in completions]
        path = folder / f"rows_{self.rank if num_processes == 1 else 'all'}.jsonl"  # TRL keeps a cache beside a file
        if num_processes == 1 or self.rank == 0:
            path.write_text("\n".join(json.dumps(row) for row in rows_of(kind)))
        if num_processes > 1:
            dist.barrier()
        dataset = datasets.load_dataset(
            "json", data_files=str(path), split="train", cache_dir=str(path.with_suffix(""))
        )
        args = getattr(trl, f"{kind}Config")(str(folder), **options)
        trainer = cls(args=args, train_dataset=dataset, processing_class=make_tokenizer(), **models)
        trainer.train()
        return trainer

    def check(self, kind: str, *cases: dict[str, Any]) -> None:
        for case in cases:
            with self.subTest(kind=kind, **case), shared_directory() as folder:
                with process(1):
                    reference = self.train(kind, folder, 1, case)
                with process(2):
                    trainer = self.train(kind, folder, 2, case)
                    trainer.save_model(str(folder / "saved"))
                    dist.barrier()
                tolerance = {"atol": 5e-2 if case.get("dtype") is BF16 else 2e-4, "rtol": 0.0}
                assert_same_params(trainer.model, reference.model, **tolerance)
                name = "adapter_model.safetensors" if case.get("has_adapters") else "model.safetensors"
                self.assertTrue((folder / "saved" / name).exists())

    def test_sft(self) -> None:
        self.check("SFT", {}, {"has_adapters": True}, {"dtype": BF16}, {"dtype": BF16, "has_adapters": True})

    def test_dpo(self) -> None:
        stored = {"precompute_ref_log_probs": True}
        self.check("DPO", {}, {"has_adapters": True}, {"dtype": BF16}, stored, {**stored, "has_adapters": True})

    def test_reward(self) -> None:
        self.check("Reward", {}, {"has_adapters": True}, {"dtype": BF16})

    def test_grpo(self) -> None:
        """What is sampled depends on the number of processes, so one process is no reference: weights move alike."""
        for case in ({}, {"has_adapters": True, "beta": 0.1}, {"dtype": BF16}):
            with self.subTest(**case), shared_directory() as folder, process(2):
                trainer = self.train("GRPO", folder, 2, case)
                losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
                self.assertEqual(len(losses), 3)
                begun = make_model("GRPO", case.get("dtype", torch.float32), "has_adapters" in case)
                before, after = dict(begun.named_parameters()), dict(trainer.model.named_parameters())
                moved = {name for name, param in before.items() if not torch.equal(after[name].full_tensor(), param)}
                self.assertTrue(moved)
                self.assertTrue(all("lora" in name for name in moved) or "has_adapters" not in case, moved)
