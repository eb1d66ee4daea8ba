"""Models of ``transformers``, built from tiny configs, evaluate, generate, compile and export as in one process.

They know nothing of sharding: Conv1D with transposed weights (GPT-2), weights tied between embedding and head, relative
position tables that one layer lends to the others (T5), stacked experts as 3-D parameters (Mixtral), convolutions and
raw position parameters (ViT), a layer class that wraps ``forward`` of its subclasses, ours included, in a checkpoint.
"""

from __future__ import annotations

import copy
import functools
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from checkpoint_common import PLAIN, check_reload, topology
from common import ALL, GlooTest, assert_same_params, check_training
from integration_common import needs
from runtime_common import assert_idle, num_gathers
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.testing._internal.common_utils import instantiate_parametrized_tests, parametrize

from dtensor_gtp import GTPShard, gtp_shard

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


def make_llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**COMMON, **LLAMA, **options))


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
    "llama_tied": lambda: make_llama(tie_word_embeddings=True),
    "mixtral": make_mixtral,
    "mixtral_grouped_mm": lambda: make_mixtral("grouped_mm"),
    "t5": make_t5,
    "vit": make_vit,
}
TEXT_MODELS = ["bert", "gpt2", "llama", "mixtral", "t5"]


def make(name: str, seed: int = 0) -> nn.Module:
    """The model in train mode, with every parameter away from its all-zeros or all-ones start.

    In float64, but for the one whose kernel does not take it.
    """
    torch.manual_seed(seed)
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
        tokens[:4] = 7  # rank 0 of two sees one token alone, so that most experts get nothing to do there
    labels = torch.randint(2, VOCABULARY, (8, NUM_TOKENS), generator=generator) if name in ("bert", "t5") else tokens
    return {"input_ids": tokens, "attention_mask": torch.ones_like(tokens), "labels": labels}


def model_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    loss: torch.Tensor = model(**batch).loss
    return loss


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.2, momentum=0.9)


def logits_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(**batch).logits
    return logits


@contextmanager
def compiled_in_one_graph() -> Iterator[None]:
    """What is compiled inside of the block is one graph without a break, for layers of one kind share it."""
    torch._dynamo.reset()
    counters.clear()
    yield
    graphs, breaks = counters["stats"]["unique_graphs"], counters["graph_break"]
    assert graphs == 1, f"{graphs} graphs"
    assert not breaks, breaks


@needs("transformers", extra="transformers", tier="default")
class TestTransformers(GlooTest):
    world_size = 2

    def _check_training(
        self,
        name: str,
        prepare: Callable[[Any], object] = lambda model: None,
        *,
        reference: nn.Module | None = None,
        **options: Any,
    ) -> Any:
        """Compare with one process; ``prepare`` is done to the sharded model only, before it is sharded."""
        mesh = self.gtp_mesh()

        def shard(model: nn.Module) -> nn.Module:
            prepare(model)
            return gtp_shard(model, mesh, schedule=ALL)

        reference = make(name) if reference is None else reference
        batch = functools.partial(make_batch, name)
        return check_training(
            reference, shard, mesh, batch, model_loss, **{"make_optimizer": sgd, "steps": 2, **options}
        )

    def test_gradient_checkpointing_gathers_each_layer_three_times(self) -> None:
        """Forward, recomputation, backward: of the layers, but not of the embedding and the head around them."""
        for use_reentrant in (False, True):
            model: Any = gtp_shard(make("llama"), self.gtp_mesh(), schedule=ALL)
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            batch = make_batch("llama", torch.Generator().manual_seed(self.rank))
            for _ in range(2):
                before = num_gathers(model)
                model_loss(model, batch).backward()
            counts = {name: count - before[name] for name, count in num_gathers(model).items()}
            self.assertEqual(counts.pop("model.embed_tokens.weight"), 1)
            self.assertEqual(counts.pop("lm_head.weight"), 1)  # kept at the turning point
            self.assertEqual(set(counts.values()), {3}, counts)

    def test_dropout_draws_what_one_process_draws(self) -> None:
        """Also in the recomputation: with one seed and one batch the masks are the same."""
        from transformers import GPT2Config, GPT2LMHeadModel

        torch.manual_seed(0)
        reference: Any = GPT2LMHeadModel(GPT2Config(**COMMON, n_positions=32, n_embd=16, n_layer=2, n_head=2))
        reference.double().train()
        model: Any = gtp_shard(copy.deepcopy(reference), self.gtp_mesh(), schedule=ALL)
        model.gradient_checkpointing_enable({"use_reentrant": False})
        batch = make_batch("gpt2", torch.Generator().manual_seed(0))
        for module in (reference, model):
            torch.manual_seed(1)
            model_loss(module, batch).backward()
        assert_same_params(model, reference, "grad")

    def test_trains_with_padding(self) -> None:
        """With ``num_items_in_batch`` the loss is a sum over tokens, of which ranks may have unequally many."""
        mesh = self.gtp_mesh()

        def batch(generator: torch.Generator) -> dict[str, torch.Tensor]:
            tokens = make_batch("llama", generator)
            lengths = torch.tensor([6, 6, 5, 2, 3, 4, 6, 2])
            is_padding = torch.arange(NUM_TOKENS) >= lengths[:, None]
            tokens["attention_mask"] = (~is_padding).long()
            tokens["labels"] = tokens["labels"].masked_fill(is_padding, -100)
            return {**tokens, "items_per_row": (lengths - 1).sum().div(8).repeat(8)}

        def loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
            items = batch["items_per_row"].sum()  # gradients are averaged: a rank's share of all items
            rest = {name: value for name, value in batch.items() if name != "items_per_row"}
            result: torch.Tensor = model(**rest, num_items_in_batch=items).loss
            return result

        shard = functools.partial(gtp_shard, mesh=mesh, schedule=ALL)
        check_training(make("llama"), shard, mesh, batch, loss, make_optimizer=sgd, steps=2)

    def test_compiled_layers(self) -> None:
        def prepare(model: Any) -> None:
            model.config.use_cache = False  # else each layer writes to a cache, at its own index: one graph a layer
            for layer in model.model.layers:
                layer.compile(backend="aot_eager", fullgraph=True)

        with compiled_in_one_graph():
            self._check_training("llama", prepare)

    @parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
    def test_experts_without_tokens(self, implementation: str) -> None:
        """The weights of all experts of a layer are two parameters: a rank that has tokens for two experts gathers
        them as often, and in the same order, as one that has tokens for all. So no empty input is needed to keep the
        ranks in step, unlike with a list of modules of which each rank calls those that it has tokens for."""
        model: Any = make_mixtral(implementation)
        reference = copy.deepcopy(model)
        gtp_shard(model, self.gtp_mesh(), schedule=ALL)
        batch = make_batch("mixtral", torch.Generator().manual_seed(0))
        rows = slice(4 * self.rank, 4 * self.rank + 4)
        chosen: set[int] = set()
        routers = [layer.mlp.gate for layer in model.model.layers]
        for router in routers:
            router.register_forward_hook(lambda module, args, output: chosen.update(output[2].flatten().tolist()))
        model_loss(reference, batch).backward()
        model_loss(model, {name: value[rows] for name, value in batch.items()}).backward()
        assert_same_params(model, reference, "grad", rtol=1e-4, atol=1e-5)
        experts: list[Any] = [None] * self.world_size
        dist.all_gather_object(experts, (len(chosen), num_gathers(model)))
        self.assertEqual(len({str(gathers) for _, gathers in experts}), 1, experts)
        self.assertGreater(len({num_chosen for num_chosen, _ in experts}), 1, experts)

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

    @parametrize("name", ["gpt2", "llama", "llama_tied", "mixtral", "t5"])
    def test_generates(self, name: str) -> None:
        """Greedily and by beam search, from a cache. Ranks have prompts of their own, but take equally many steps: each
        step is collective."""
        reference: Any = make(name).eval()
        model: Any = gtp_shard(copy.deepcopy(reference), self.gtp_mesh(), schedule=ALL)
        tokens = make_batch(name, torch.Generator().manual_seed(self.rank))["input_ids"][:2]
        options: dict[str, Any] = {"attention_mask": torch.ones_like(tokens), "do_sample": False}
        for beams in (1, 2):
            steps = {"max_new_tokens": 7, "min_new_tokens": 7, "num_beams": beams}
            self.assertEqual(model.generate(tokens, **options, **steps), reference.generate(tokens, **options, **steps))
        assert_idle(model)

    def test_generates_from_a_static_cache_with_sdpa(self) -> None:
        reference: Any = make("llama").eval()
        reference.set_attn_implementation("sdpa")
        model: Any = gtp_shard(copy.deepcopy(reference), self.gtp_mesh(), schedule=ALL)
        tokens = make_batch("llama", torch.Generator().manual_seed(self.rank))["input_ids"][:2]
        options: dict[str, Any] = {"attention_mask": torch.ones_like(tokens), "do_sample": False}
        steps = {"max_new_tokens": 5, "min_new_tokens": 5, "cache_implementation": "static"}
        self.assertEqual(model.generate(tokens, **options, **steps), reference.generate(tokens, **options, **steps))

    def test_generates_between_training_steps(self) -> None:
        """With the weights of the last step, and without trace in the next one."""
        reference: Any = make("gpt2")
        tokens = make_batch("gpt2", torch.Generator().manual_seed(7))["input_ids"][:2]
        options: dict[str, Any] = {"attention_mask": torch.ones_like(tokens), "do_sample": False}

        def generate(model: Any, step: int) -> None:
            sequences = [module.eval().generate(tokens, **options, max_new_tokens=5) for module in (reference, model)]
            self.assertEqual(*sequences)
            for module in (reference, model):
                module.train()

        self._check_training("gpt2", reference=reference, steps=3, between=generate)

    def test_generates_until_all_ranks_have_ended(self) -> None:
        """``synced_gpus`` is how transformers lets ranks that are done go on with the others."""
        reference: Any = make("llama").eval()
        model: Any = gtp_shard(copy.deepcopy(reference), self.gtp_mesh(), schedule=ALL)
        tokens = make_batch("llama", torch.Generator().manual_seed(self.rank))["input_ids"][:1]
        options: dict[str, Any] = {"attention_mask": torch.ones_like(tokens), "do_sample": False, "max_new_tokens": 9}
        free = reference.generate(tokens, **options, min_new_tokens=9)
        end = int(free[0, NUM_TOKENS + 2 * self.rank])  # the token that ends this rank's sequence, early on rank 0
        expected = reference.generate(tokens, **options, eos_token_id=end)
        self.assertEqual(model.generate(tokens, **options, eos_token_id=end, synced_gpus=True), expected)

    def test_reloads(self) -> None:
        """From a distributed checkpoint, sharded and in one process; both train on."""
        mesh = self.gtp_mesh()
        for name in ("gpt2", "llama_tied", "mixtral", "t5"):
            check_reload(
                functools.partial(make, name),
                lambda step, name=name: make_batch(name, torch.Generator().manual_seed(step)),
                model_loss,
                [topology(lambda model: gtp_shard(model, mesh, schedule=ALL), mesh), PLAIN],
            )

    @parametrize("name", TEXT_MODELS)
    def test_exports(self, name: str) -> None:
        """After a step, to an unsharded model: by a full state dict, and by the folder that ``save_pretrained`` makes
        of it."""
        model: Any = gtp_shard(make(name), self.gtp_mesh(), schedule=ALL)
        batch = make_batch(name, torch.Generator().manual_seed(0))
        model_loss(model, batch).backward()
        sgd(list(model.parameters())).step()
        expected = logits_of(model, batch)
        state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
        if self.rank > 0:  # only rank 0 has it
            self.assertEqual(state, {})
            return
        whole = make(name)
        self.assertNotEqual(logits_of(whole, batch), expected)
        whole.load_state_dict(state)
        self.assertEqual(logits_of(whole, batch), expected)
        with tempfile.TemporaryDirectory() as folder:
            model.save_pretrained(folder, state_dict=state)
            loaded = type(whole).from_pretrained(folder, attn_implementation="eager")
        self.assertEqual(loaded.config.architectures, [type(whole).__name__])
        if name == "mixtral":
            loaded.set_experts_implementation("eager")  # the default takes no float64
        self.assertEqual(logits_of(loaded, batch), expected)

    @parametrize("name", ["gpt2", "llama"])
    def test_starts_on_the_meta_device(self, name: str) -> None:
        """Initialized by transformers after sharding, to the bits that an unsharded model gets; then it loads what
        rank 0 has."""
        models: list[Any] = []
        for is_sharded in (False, True):
            with torch.device("meta"):
                models.append(MODELS[name]())
            if is_sharded:
                gtp_shard(models[-1], self.gtp_mesh(), schedule=ALL)
            models[-1].to_empty(device="cpu")
            models[-1].tie_weights()
            torch.manual_seed(0)
            models[-1].initialize_weights()
        reference, model = models
        # transformers zeros the row of padding by writing to weight[padding_idx], which of a DTensor is a copy.
        model.get_input_embeddings()._fill_padding_idx_with_zero()
        assert_same_params(model, reference, rtol=0.0, atol=0.0)
        self.assertEqual(dict(model.named_buffers()), dict(reference.named_buffers()))
        trained = make(name).float()
        state = trained.state_dict() if self.rank == 0 else {}
        set_model_state_dict(model, state, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
        batch = make_batch(name, torch.Generator().manual_seed(self.rank))
        self.assertEqual(logits_of(model, batch), logits_of(trained, batch))


@needs("transformers", extra="transformers")
class TestTensorParallel(GlooTest):
    def test_plan_of_the_config(self) -> None:
        """Heads and the hidden dim of the MLP are cut by tp, then again by gtp."""
        root = init_device_mesh("cpu", (2, 2), mesh_dim_names=("gtp", "tp"))
        styles = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}

        def shard(model: Any) -> nn.Module:
            plan = {f"model.{name}": styles[style]() for name, style in model.config.base_model_tp_plan.items()}
            parallelize_module(model, root["tp"], plan)
            return gtp_shard(model, root["gtp"], schedule=ALL)

        for name in ("llama", "llama_tied"):
            batch = functools.partial(make_batch, name)
            model: Any = check_training(make(name), shard, root["gtp"], batch, model_loss, make_optimizer=sgd, steps=2)
            attention = model.model.layers[0].self_attn
            self.assertEqual(attention.q_proj.weight.placements, (Shard(0), GTPShard(0)))
            self.assertEqual(attention.o_proj.weight.placements, (Shard(1), GTPShard(0)))
            self.assertEqual(model.model.embed_tokens.weight.device_mesh.mesh_dim_names, ("gtp",))


instantiate_parametrized_tests(TestTransformers)
