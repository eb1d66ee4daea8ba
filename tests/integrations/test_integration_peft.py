"""Methods of PEFT on a sharded model: gradients and parameters of one process, saved adapters, merges."""

import copy
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from common import assert_same_params, full, rows_of_rank, shared_directory
from integration_common import VOCABULARY, LibraryTest, make_llama, needs, process
from test_integration_transformers import STEPS, arguments, logged, stock_trainer, trained, trained_alone, trainer_of
from torch.distributed.tensor import DTensor

from dtensor_gtp import shard_added, whole_weights

ATTENTION = {"target_modules": ["q_proj", "v_proj"]}
LORA: dict[str, Any] = {"r": 4, **ATTENTION}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "LoRA": ("LoraConfig", LORA),
    "DoRA": ("LoraConfig", {**LORA, "use_dora": True}),
    "all layers": ("LoraConfig", {"r": 4, "target_modules": "all-linear"}),
    "embedding": ("LoraConfig", {"r": 4, "target_modules": ["embed_tokens", "q_proj"]}),
    "head": ("LoraConfig", {**LORA, "modules_to_save": ["lm_head"]}),
    "tokens": ("LoraConfig", {**LORA, "trainable_token_indices": [1, 2, 3]}),
    "experts": ("LoraConfig", {"r": 4, "target_modules": [], "target_parameters": ["experts.gate_up_proj"]}),
    "weights": ("LoraConfig", {"r": 4, "target_modules": [], "target_parameters": ["q_proj.weight"]}),
    "IA3": ("IA3Config", {"target_modules": ["k_proj", "down_proj"], "feedforward_modules": ["down_proj"]}),
    "prompt": ("PromptTuningConfig", {"num_virtual_tokens": 4}),
    "p-tuning": ("PromptEncoderConfig", {"num_virtual_tokens": 4, "encoder_hidden_size": 16}),
    "prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 4}),
    "projected prefix": ("PrefixTuningConfig", {"num_virtual_tokens": 4, "prefix_projection": True}),
    "norms": ("LNTuningConfig", {"target_modules": ["input_layernorm", "norm"]}),
    "LoHa": ("LoHaConfig", LORA),
    "LoKr": ("LoKrConfig", LORA),
    "OFT": ("OFTConfig", {"oft_block_size": 4, "r": 0, **ATTENTION}),
    "BOFT": ("BOFTConfig", {"boft_block_size": 4, **ATTENTION}),
    "VeRA": ("VeraConfig", LORA),
    "FourierFT": ("FourierFTConfig", {"n_frequency": 8, **ATTENTION}),
    "HRA": ("HRAConfig", LORA),
    "VB-LoRA": ("VBLoRAConfig", {"num_vectors": 16, "vector_length": 4, "topk": 2, **LORA}),
    "SHiRA": ("ShiraConfig", LORA),
    "AdaLoRA": (
        "AdaLoraConfig",
        {"init_r": 4, "target_r": 2, "tinit": 1, "tfinal": 1, "total_step": 10, "deltaT": 1, **ATTENTION},
    ),
}


def make_mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    experts = {"num_key_value_heads": 2, "num_local_experts": 4, "num_experts_per_tok": 2}
    return MixtralForCausalLM(MixtralConfig(vocab_size=VOCABULARY, pad_token_id=0, **shape, **experts))


def adapted(method: str) -> nn.Module:
    import peft

    name, options = METHODS[method]
    config = getattr(peft, name)(task_type="CAUSAL_LM", **options)
    model: nn.Module = peft.get_peft_model(make_mixtral() if method == "experts" else make_llama(), config)
    torch.manual_seed(1)
    with torch.no_grad():
        for param in model.parameters():
            if param.requires_grad:
                param.add_(torch.randn_like(param) * 0.02)  # many adapters begin with zeros
    return model


def two_adapters() -> nn.Module:
    import peft

    model: Any = adapted("LoRA")
    model.add_adapter("other", peft.LoraConfig(r=2, target_modules=["q_proj"], task_type="CAUSAL_LM"))
    return model


def batch() -> torch.Tensor:
    return torch.randint(1, VOCABULARY, (4, 8), generator=torch.Generator().manual_seed(2))


@needs("transformers", "accelerate", "peft", extra="peft")
class TestPeft(LibraryTest):
    def train(self, models: tuple[nn.Module, nn.Module], after: Callable[[nn.Module, int], None] | None = None) -> None:
        """The first on the whole batch, the second, which is sharded, on this rank's rows."""
        for model, rows in zip(models, (batch(), rows_of_rank(batch(), self.gtp_mesh())), strict=True):
            model.train()
            optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.05)
            for step in range(3):
                optimizer.zero_grad()
                model(input_ids=rows, labels=rows).loss.backward()
                optimizer.step()
                if after is not None:
                    after(model, step)

    def take_turns(self, reference: Any, model: Any, *adapters: str) -> None:
        for adapter in adapters:
            reference.set_adapter(adapter)
            model.set_adapter(adapter)
            self.train((reference, model))
        assert_same_params(model, reference, atol=1e-5, rtol=1e-3)

    def test_methods_train_as_in_one_process(self) -> None:
        for method in METHODS:
            with self.subTest(method=method):
                reference = adapted(method)
                model = self.shard(copy.deepcopy(reference))
                self.train((reference, model))
                assert_same_params(model, reference, "grad", atol=1e-5, rtol=1e-3)
                assert_same_params(model, reference, atol=1e-5, rtol=1e-3)

    def test_ranks_that_are_allocated_between_steps(self) -> None:
        reference = adapted("AdaLoRA")
        model = self.shard(copy.deepcopy(reference))

        def allocate(each: nn.Module, step: int) -> None:
            with whole_weights(each, trained_only=True) if each is model else nullcontext():
                each.base_model.update_and_allocate(step)

        self.train((reference, model), allocate)
        assert_same_params(model, reference, atol=1e-5, rtol=1e-3)

    def test_adapters_take_turns(self) -> None:
        reference: Any = two_adapters()
        model = self.shard(copy.deepcopy(reference))
        self.take_turns(reference, model, "default", "other", "default")
        with reference.disable_adapter(), model.disable_adapter(), torch.no_grad():
            self.assertEqual(model(batch()).logits, reference(batch()).logits)

    def test_adapters_that_come_after_sharding(self) -> None:
        """Loaded from a file or new, they are sharded at once, and train."""
        import peft

        reference = adapted("LoRA")
        model = self.shard(copy.deepcopy(reference))
        with shared_directory() as folder:
            if self.rank == 0:
                adapted("LoRA").save_pretrained(str(folder))
            dist.barrier()
            for each in (reference, model):
                each.load_adapter(str(folder), "loaded", is_trainable=True)
                torch.manual_seed(3)
                each.add_adapter("new", peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False, **LORA))
        added = [param for name, param in model.named_parameters() if ".loaded." in name or ".new." in name]
        self.assertTrue(added and all(isinstance(param, DTensor) for param in added))
        self.take_turns(reference, model, "loaded", "new", "default")

    def test_adapters_of_layers_that_had_none(self) -> None:
        """Where the model was sharded before PEFT has wrapped it, and where its adapters were merged."""
        import peft

        config = peft.LoraConfig(task_type="CAUSAL_LM", **LORA)
        wrong = peft.get_peft_model(self.shard(make_llama()), config)
        with self.assertRaisesRegex(NotImplementedError, "for whole layers, but .* within whole_weights"):
            shard_added(wrong)
        for is_merged in (False, True):
            models: list[Any] = []
            for is_sharded in (False, True):
                base: Any = adapted("LoRA") if is_merged else make_llama()
                if is_sharded:
                    self.shard(base)
                if is_merged:
                    base = base.merge_and_unload()
                torch.manual_seed(5)
                with whole_weights(base) if is_sharded else nullcontext():
                    models.append(peft.get_peft_model(base, config))
            reference, model = models
            shard_added(model)
            self.train((reference, model))
            assert_same_params(model, reference, atol=1e-5, rtol=1e-3)

    def test_label_smoothing_shifts_labels_of_causal_models(self) -> None:
        """The stock trainer goes by ``model._get_name()``, of a PEFT model by that of the model within."""
        options = {"label_smoothing_factor": 0.1}
        for make in (make_llama, partial(adapted, "LoRA")):
            with shared_directory() as folder:
                reference = trained_alone(folder, make(), **options)
                trainer = trained(folder, make(), **options)
            for key in ("loss", "eval_loss"):
                self.assertEqual(logged(trainer, key), logged(reference, key), atol=2e-4, rtol=2e-4)
            assert_same_params(trainer.model, reference.model, atol=1e-4, rtol=1e-3)

    def test_merges(self) -> None:
        """Those of LoRA on shards; all on whole weights."""
        on_shards = ("LoRA", "DoRA", "experts", "IA3", "LoHa", "LoKr")
        cases = [(method, False) for method in on_shards]
        cases += [(method, True) for method in (*on_shards, "tokens", "OFT", "BOFT", "VeRA", "HRA", "FourierFT")]
        cases += [(method, True) for method in ("SHiRA", "VB-LoRA")]
        for method, is_whole in cases:
            with self.subTest(method=method, is_whole=is_whole):
                reference = adapted(method)
                model = self.shard(copy.deepcopy(reference))
                with whole_weights(model) if is_whole else nullcontext():
                    merged = model.merge_and_unload()
                expected = reference.merge_and_unload()
                assert_same_params(merged, expected)
                with torch.no_grad():
                    self.assertEqual(merged(batch()).logits, expected(batch()).logits)

    def test_trainers_write_all_that_stock_ones_write(self) -> None:
        """Adapters that are inactive, what is frozen of an adapter, embeddings."""
        from safetensors.torch import load_file

        def frozen_part() -> nn.Module:
            model = adapted("LoRA")
            for name, param in model.named_parameters():
                if "lora_A" in name:
                    param.requires_grad_(False)
            return model

        for make in (two_adapters, frozen_part, partial(adapted, "embedding"), partial(adapted, "head")):
            with self.subTest(make=make), shared_directory() as folder:
                alone = folder / f"stock_{self.rank}"
                with process(1):
                    stock = stock_trainer(arguments(alone, 1), make())
                    stock.train()
                    stock.save_model()
                with process(2):
                    trainer = trainer_of(make(), arguments(folder, 2), 2)
                    trainer.train()
                    trainer.save_model(str(folder / "sharded"))
                    dist.barrier()
                paths = sorted(path.relative_to(alone) for path in alone.rglob("*.safetensors"))
                self.assertEqual(len(paths), 1 + (make is two_adapters))
                for path in paths:
                    written = load_file(folder / "sharded" / path)
                    self.assertEqual(written, load_file(alone / path), atol=1e-4, rtol=1e-3)

    def test_inactive_adapters_resume(self) -> None:
        """Their weights and the optimizer's state of them, in a model where another adapter is active."""
        from dtensor_gtp.integrations.accelerate import GTPAccelerator

        def job(active: str) -> tuple[Any, Any, Any]:
            accelerator, model = GTPAccelerator(cpu=True), self.shard(two_adapters())
            optimizer = torch.optim.AdamW([param for name, param in model.named_parameters() if "lora_" in name])
            model.set_adapter(active)
            return accelerator, *accelerator.prepare(model, optimizer)

        with shared_directory() as folder, process(2):
            accelerator, model, optimizer = job("default")
            for adapter in ("other", "default"):
                model.set_adapter(adapter)
                accelerator.backward(model(input_ids=batch(), labels=batch()).loss)
                optimizer.step()
                optimizer.zero_grad()
            accelerator.save_state(str(folder))
            dist.barrier()
            other_accelerator, other, other_optimizer = job("other")
            other_accelerator.load_state(str(folder))
            params = dict(model.named_parameters())
            trained = [name for name in params if "lora_" in name]
            for name, param in other.named_parameters():
                self.assertEqual(full(param.detach()), full(params[name].detach()))
            for name in trained:
                state = optimizer.optimizer.state[params[name]]
                found = other_optimizer.optimizer.state[dict(other.named_parameters())[name]]
                self.assertEqual(
                    {key: full(value) for key, value in found.items()}, {k: full(v) for k, v in state.items()}
                )
            self.assertEqual(len(trained), 12)

    def test_trainers_save_and_resume(self) -> None:
        """The adapters alone."""
        from peft import PeftModel
        from safetensors.torch import load_file

        for method in ("LoRA", "prompt", "p-tuning", "projected prefix", "norms", "experts"):
            with self.subTest(method=method), shared_directory() as folder:
                reference = trained_alone(folder, adapted(method))
                with process(2):
                    options = {"save_strategy": "steps", "save_steps": STEPS // 2}
                    trainer = trainer_of(adapted(method), arguments(folder, 2, **options), 2)
                    trainer.train()
                    assert_same_params(trainer.model, reference.model, atol=1e-4, rtol=1e-3)
                    trainer.save_model(str(folder / "adapters"))
                    dist.barrier()
                    saved = load_file(folder / "adapters" / "adapter_model.safetensors")
                    self.assertLess(len(saved), 9)  # not those of the model, which has 21
                    base = make_mixtral() if method == "experts" else make_llama()
                    loaded = PeftModel.from_pretrained(base, str(folder / "adapters")).eval()
                    with torch.no_grad():
                        logits = trainer.model.eval()(batch()).logits
                        self.assertEqual(loaded(batch()).logits, logits, atol=1e-5, rtol=1e-4)
                resumed = trained(folder / "resumed", adapted(method), folder / f"checkpoint-{STEPS // 2}")
                assert_same_params(resumed.model, reference.model, atol=1e-4, rtol=1e-3)
