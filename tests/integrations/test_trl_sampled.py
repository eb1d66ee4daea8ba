"""TRL's trainers that sample completions. What is sampled depends on the number of processes, so the reference is the
stock trainer with ``fully_shard`` on as many: its ranks draw the same numbers."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from common import ALL, GlooTest, full, shared_directory
from integration_common import needs, process
from test_integration_trl import WORDS, make_model, make_tokenizer, rows_of, sentence
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, fully_shard

from dtensor_gtp import gtp_shard

SAMPLED = {"num_generations": 4, "generation_batch_size": 8, "max_completion_length": 6}
Make = Callable[[nn.Module], nn.Module]


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


def policy(has_adapters: bool = False) -> nn.Module:
    return make_model("GRPO", torch.float32, has_adapters)


def teacher(is_frozen: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    shape = {"hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    model: nn.Module = LlamaForCausalLM(LlamaConfig(vocab_size=len(WORDS), pad_token_id=0, eos_token_id=1, **shape))
    return model.requires_grad_(not is_frozen)


def num_words(completions: list[str], **_: Any) -> list[float]:
    return [float(len(set(text.split()))) for text in completions]


def conversations() -> list[dict[str, Any]]:
    answers = ((sentence(index, 5), sentence(100 + index, 5)) for index in range(16))
    return [
        {"messages": [{"role": "user", "content": asked}, {"role": "assistant", "content": said}]}
        for asked, said in answers
    ]


@needs("trl", "peft", "datasets", "transformers", "accelerate", extra="transformers")
class TestTrlSampled(GlooTest):
    world_size = 2

    def train(self, name: str, folder: Path, is_ours: bool, config: dict[str, Any], make: Callable[[Make], Any]) -> Any:
        """``name`` is that of the module below ``trl`` and of the class; ``make`` gets what shards a model."""
        import datasets

        from dtensor_gtp.integrations.transformers import GTPTrainer

        module_name, _, kind = name.rpartition(".")
        module = import_module(f"trl.{module_name}" if module_name else "trl")
        mesh = self.gtp_mesh()
        stock = getattr(module, f"{kind}Trainer")
        cls = type(f"GTP{kind}Trainer", (GTPTrainer, stock), {}) if is_ours else stock
        options = {
            **{"use_cpu": True, "bf16": False, "report_to": [], "disable_tqdm": True, "save_strategy": "no"},
            **{"max_steps": 3, "per_device_train_batch_size": 2, "learning_rate": 1e-2, "logging_steps": 1},
            **{"dataloader_pin_memory": False, "gradient_checkpointing": False, **config},
        }
        tokenizer = make_tokenizer()
        tokenizer.chat_template = "{% for message in messages %}{{ message['content'] }} {% endfor %}"
        rows = conversations() if kind == "GKD" else rows_of("GRPO")
        trainer = cls(
            args=getattr(module, f"{kind}Config")(str(folder), **options),
            train_dataset=datasets.Dataset.from_list(rows),
            processing_class=tokenizer,
            **make((lambda m: gtp_shard(m, mesh, schedule=ALL)) if is_ours else (lambda m: by_torch(m, mesh))),
        )
        trainer.train()
        return trainer

    def check(self, name: str, config: dict[str, Any], make: Callable[[Make], Any]) -> None:
        with self.subTest(name=name, **config), shared_directory() as folder, process(2):
            ours, reference = (self.train(name, folder, is_ours, config, make) for is_ours in (True, False))
            losses = [
                [entry["loss"] for entry in each.state.log_history if "loss" in entry] for each in (ours, reference)
            ]
            self.assertEqual(len(losses[0]), 3)
            self.assertEqual(*losses, atol=2e-4, rtol=2e-3)
            expected = {key: full(param) for key, param in reference.model.named_parameters()}
            for key, param in ours.model.named_parameters():
                self.assertEqual(full(param), expected[key], atol=2e-4, rtol=0.0, msg=key)
            dist.barrier()

    def test_rewards(self) -> None:
        for kind in ("GRPO", "RLOO"):
            self.check(
                kind, {**SAMPLED, "beta": 0.0}, lambda shard: {"model": shard(policy()), "reward_funcs": num_words}
            )

    def test_adapters(self) -> None:
        """With ``fully_shard`` they fail: TRL copies an adapter, for the reference, to one that is not sharded, and
        calls the model within without its root."""
        cases = {
            "RLOO": ({**SAMPLED, "beta": 0.1}, lambda shard: {"reward_funcs": num_words}),
            "Distillation": ({"max_completion_length": 6}, lambda shard: {"teacher_model": shard(teacher(True))}),
        }
        for kind, (config, others) in cases.items():
            with self.subTest(kind=kind), shared_directory() as folder, process(2):
                before = {name: param.detach().clone() for name, param in policy(has_adapters=True).named_parameters()}

                def make(shard: Make, others: Any = others) -> dict[str, Any]:
                    return {"model": shard(policy(has_adapters=True)), **others(shard)}

                after = dict(self.train(kind, folder, True, config, make).model.named_parameters())
                moved = {name for name, value in before.items() if not torch.equal(full(after[name]), value)}
                self.assertTrue(moved and all("lora" in name for name in moved), moved)

    def test_online_dpo(self) -> None:
        def make(shard: Make) -> dict[str, Any]:
            reward = shard(make_model("Reward", torch.float32, has_adapters=False))
            models = {"model": shard(policy()), "ref_model": shard(policy()), "reward_funcs": reward}
            return {**models, "reward_processing_classes": make_tokenizer()}

        self.check("experimental.online_dpo.OnlineDPO", {"max_new_tokens": 5, "max_length": 32}, make)

    def test_distillation(self) -> None:
        """Also from a teacher that was not frozen, whose head's gradient is undefined."""
        for is_frozen in (True, False):

            def models(shard: Make, is_frozen: bool = is_frozen) -> dict[str, Any]:
                return {"model": shard(policy()), "teacher_model": shard(teacher(is_frozen))}

            self.check("Distillation", {"max_completion_length": 6}, models)
            for own in ({"lmbda": 0.0}, {"lmbda": 1.0}, {"lmbda": 0.0, "seq_kd": True}):
                self.check("experimental.gkd.GKD", {"max_length": 32, "max_new_tokens": 5, **own}, models)
