"""TRL's trainers on a sharded model, alone or with adapters, beside the stock ones.

These run in one process. Where completions are sampled, which depends on the number of processes, they run with
``fully_shard`` on as many: its ranks draw the same numbers.
"""

import json
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from common import GROUPS, GlooTest, assert_same_params, full, shared_directory
from integration_common import needs, process
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from dtensor_gtp import gtp_shard

WORDS = ["<pad>", "<eos>", "<unk>", *(f"w{number}" for number in range(29))]
SHAPE = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
BF16 = torch.bfloat16
SAMPLED = {"num_generations": 4, "generation_batch_size": 8, "max_completion_length": 6}
DISTILLED = {"max_completion_length": 6}
Make = Callable[[nn.Module], nn.Module]  # what shards a model, or leaves it as it is
Models = Callable[[Make], dict[str, Any]]  # arguments of a trainer


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


def rows_of(kind: str) -> list[dict[str, Any]]:
    if kind == "SFT":
        return [{"text": sentence(index, 10)} for index in range(16)]
    if kind == "GKD":
        talks = [{"user": sentence(index, 5), "assistant": sentence(100 + index, 5)} for index in range(16)]
        return [{"messages": [{"role": role, "content": said} for role, said in talk.items()]} for talk in talks]
    rows = [{"prompt": sentence(index, 5)} for index in range(16)]
    if kind in ("DPO", "Reward"):
        for index, row in enumerate(rows):
            row |= {"chosen": f" {sentence(100 + index, 5)}", "rejected": f" {sentence(200 + index, 5)}"}
    return rows


def make_model(kind: str, dtype: torch.dtype = torch.float32, has_adapters: bool = False) -> nn.Module:
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


def teacher(is_frozen: bool = True) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    shape = {**SHAPE, "hidden_size": 48, "intermediate_size": 64}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, eos_token_id=1, **shape))
    return model.requires_grad_(not is_frozen)


def num_words(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def by_torch(model: Any, mesh: DeviceMesh) -> nn.Module:
    """For the stock trainer, which would put it into DDP."""
    for module in list(model.modules()):
        if type(module).__name__ == "LlamaDecoderLayer":
            fully_shard(module, mesh=mesh)
    fully_shard(model, mesh=mesh)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_force_sum_reduction_for_comms(True)  # gloo's reduce-scatter knows no average
    model._is_accelerate_prepared = True
    return model


def logged_losses(trainer: Any) -> list[float]:
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@needs("trl", "peft", "datasets", "transformers", "accelerate", extra="transformers")
class TestTrl(GlooTest):
    world_size = 2

    def train(self, name: str, folder: Path, how: str, config: dict[str, Any], models: Models) -> Any:
        """A trainer after three steps.

        Args:
            name: Of the module below ``trl`` and of the class.
            how: ``ours``, ``torch`` with ``fully_shard``, or ``alone`` in one process.
        """
        import datasets

        from dtensor_gtp.integrations.transformers import GTPTrainer

        module_name, _, kind = f"trl.{name}".rpartition(".")
        module, mesh, is_alone = import_module(module_name), self.gtp_mesh(), how == "alone"
        cls = getattr(module, f"{kind}Trainer")
        shards: dict[str, Make] = {"alone": lambda model: model, "torch": lambda model: by_torch(model, mesh)}
        if how == "ours":
            cls = type(f"GTP{kind}Trainer", (GTPTrainer, cls), {})
            shards["ours"] = lambda model: gtp_shard(model, mesh, schedule=GROUPS)
        options = {
            **{"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "save_strategy": "no"},
            **{"max_steps": 3, "per_device_train_batch_size": 4 if is_alone else 2, "learning_rate": 1e-2},
            **{"dataloader_pin_memory": False, "gradient_checkpointing": False, "logging_steps": 1, **config},
        }
        path = folder / f"rows_{self.rank if is_alone else 'all'}.jsonl"  # TRL keeps a cache beside a file
        if is_alone or (self.rank == 0 and not path.exists()):
            path.write_text("\n".join(map(json.dumps, rows_of(kind))))
        if not is_alone:
            dist.barrier()
        tokenizer = make_tokenizer()
        tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
        trainer = cls(
            args=getattr(module, f"{kind}Config")(str(folder), **options),
            train_dataset=datasets.load_dataset(
                "json", data_files=str(path), split="train", cache_dir=str(path.with_suffix(""))
            ),
            processing_class=tokenizer,
            **models(shards[how]),
        )
        trainer.train()
        self.assertEqual(len(logged_losses(trainer)), 3)
        return trainer

    def check_alone(self, kind: str, *cases: dict[str, Any]) -> None:
        """Beside one process."""
        for case in cases:
            config = {"max_length": 32, **case}
            dtype, has_adapters = config.pop("dtype", torch.float32), config.pop("has_adapters", False)
            if dtype is BF16:
                config |= {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
            names = ["model", "ref_model"] if kind == "DPO" and not has_adapters else ["model"]

            def models(shard: Make, names: Any = names, options: Any = (kind, dtype, has_adapters)) -> dict[str, Any]:
                return {name: shard(make_model(*options)) for name in names}

            with self.subTest(kind=kind, **case), shared_directory() as folder:
                with process(1):
                    reference = self.train(kind, folder, "alone", config, models)
                with process(2):
                    trainer = self.train(kind, folder, "ours", config, models)
                    trainer.save_model(str(folder / "saved"))
                    dist.barrier()
                assert_same_params(trainer.model, reference.model, atol=5e-2 if dtype is BF16 else 2e-4, rtol=0.0)
                name = "adapter_model.safetensors" if has_adapters else "model.safetensors"
                self.assertTrue((folder / "saved" / name).exists())

    def check_beside_torch(self, name: str, config: dict[str, Any], models: Models) -> None:
        with self.subTest(name=name, **config), shared_directory() as folder, process(2):
            ours, reference = (self.train(name, folder, how, config, models) for how in ("ours", "torch"))
            self.assertEqual(logged_losses(ours), logged_losses(reference), atol=2e-4, rtol=2e-3)
            expected = {key: full(param) for key, param in reference.model.named_parameters()}
            for key, param in ours.model.named_parameters():
                self.assertEqual(full(param), expected[key], atol=2e-4, rtol=0.0, msg=key)
            dist.barrier()

    def test_sft(self) -> None:
        self.check_alone("SFT", {}, {"has_adapters": True}, {"dtype": BF16}, {"dtype": BF16, "has_adapters": True})

    def test_dpo(self) -> None:
        stored = {"precompute_ref_log_probs": True}
        self.check_alone("DPO", {}, {"has_adapters": True}, {"dtype": BF16}, stored, {**stored, "has_adapters": True})

    def test_reward(self) -> None:
        self.check_alone("Reward", {}, {"has_adapters": True}, {"dtype": BF16})

    def test_rewards(self) -> None:
        models: Models = lambda shard: {"model": shard(make_model("")), "reward_funcs": num_words}  # noqa: E731
        for kind in ("GRPO", "RLOO"):
            self.check_beside_torch(kind, {**SAMPLED, "beta": 0.0}, models)

    def test_weights_that_move(self) -> None:
        """Of adapters, or in bfloat16. With ``fully_shard`` adapters fail: TRL copies one, for the reference, to one
        that is not sharded, and calls the model within without its root."""
        rewards: Models = lambda shard: {"reward_funcs": num_words}  # noqa: E731
        checkpointed = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": False}}
        for kind, config, dtype, others in (
            ("GRPO", {**SAMPLED, "beta": 0.1}, torch.float32, rewards),
            ("GRPO", {**SAMPLED, **checkpointed}, BF16, rewards),
            ("RLOO", {**SAMPLED, "beta": 0.1}, torch.float32, rewards),
            ("Distillation", DISTILLED, torch.float32, lambda shard: {"teacher_model": shard(teacher())}),
        ):
            with self.subTest(kind=kind, dtype=dtype), shared_directory() as folder, process(2):
                options = ("", dtype, dtype is not BF16)
                before = {name: param.detach().clone() for name, param in make_model(*options).named_parameters()}

                def models(shard: Make, options: Any = options, others: Models = others) -> dict[str, Any]:
                    return {"model": shard(make_model(*options)), **others(shard)}

                after = dict(self.train(kind, folder, "ours", config, models).model.named_parameters())
                moved = {name for name, value in before.items() if not torch.equal(full(after[name]), value)}
                self.assertTrue(moved)
                self.assertTrue(dtype is BF16 or all("lora" in name for name in moved), moved)

    def test_online_dpo(self) -> None:
        def models(shard: Make) -> dict[str, Any]:
            models: dict[str, Any] = {name: shard(make_model("")) for name in ("model", "ref_model")}
            rewards = {"reward_funcs": shard(make_model("Reward")), "reward_processing_classes": make_tokenizer()}
            return models | rewards

        self.check_beside_torch("experimental.online_dpo.OnlineDPO", {"max_new_tokens": 5, "max_length": 32}, models)

    def test_distillation(self) -> None:
        """Also from a teacher that was not frozen, whose head's gradient is undefined."""
        for is_frozen in (True, False):

            def models(shard: Make, is_frozen: bool = is_frozen) -> dict[str, Any]:
                return {"model": shard(make_model("")), "teacher_model": shard(teacher(is_frozen))}

            self.check_beside_torch("Distillation", DISTILLED, models)
            for own in ({"lmbda": 0.0}, {"lmbda": 1.0}, {"lmbda": 0.0, "seq_kd": True}):
                config = {"max_length": 32, "max_new_tokens": 5, **own}
                self.check_beside_torch("experimental.gkd.GKD", config, models)
