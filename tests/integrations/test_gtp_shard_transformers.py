"""Models of ``transformers``, built from tiny configs, evaluate, generate, compile and export as in one process.

They know nothing of sharding: Conv1D with transposed weights (GPT-2), weights tied between embedding and head, relative
position tables that one layer lends to the others (T5), stacked experts as 3-D parameters (Mixtral), convolutions and
raw position parameters (ViT), a layer class that wraps ``forward`` of its subclasses, ours included, in a checkpoint.
"""

import copy
import tempfile
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from checkpoint_common import PLAIN, check_reload, topology
from common import ALL, GlooTest, assert_same_params, check_training, rows_of_rank
from integration_common import LibraryTest, needs
from model_cases import CASES, Batch
from runtime_common import assert_idle, num_gathers
from torch._dynamo.utils import counters
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_gtp import GTPShard, gtp_shard


def make(name: str, seed: int = 0, **options: Any) -> nn.Module:
    """The model in train mode, in float64, with every parameter away from its all-zeros or all-ones start."""
    torch.manual_seed(seed)
    if name == "mixtral":
        options = {"experts_implementation": "eager", **options}  # the default takes no float64
    model = CASES[name].make(**options).double().train()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) * 0.05)
    return model


def make_batch(name: str, seed: int = 0) -> Batch:
    return CASES[name].batch(torch.Generator().manual_seed(seed))


def note_experts(chosen: set[tuple[nn.Module, int]], router: nn.Module, args: Any, output: Any) -> None:
    chosen.update((router, expert) for expert in output[2].flatten().tolist())


def greedy(tokens: torch.Tensor, num_tokens: int, **options: Any) -> dict[str, Any]:
    """Options of ``generate`` for so many new tokens."""
    steps = {"max_new_tokens": num_tokens, "min_new_tokens": num_tokens}
    return {"attention_mask": torch.ones_like(tokens), "do_sample": False, **steps, **options}


def model_loss(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return model(**batch).loss


def sgd(params: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.2, momentum=0.9)


def logits_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        logits: torch.Tensor = model.eval()(**batch).logits
    return logits


@needs("transformers", extra="transformers", tier="default")
class TestTransformers(LibraryTest):
    def pair(self, name: str, **options: Any) -> tuple[Any, Any]:
        """A model for evaluation in one process, and sharded."""
        reference = make(name, **options).eval()
        return reference, self.shard(copy.deepcopy(reference))

    def test_gradient_checkpointing_gathers_each_layer_twice(self) -> None:
        """What is recomputed stays for its gradients. The embedding and the head around the layers need one gather."""
        for use_reentrant in (False, True):
            model: Any = self.shard(make("llama"))
            model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
            batch = make_batch("llama", self.rank)
            for _ in range(2):
                before = num_gathers(model)
                model_loss(model, batch).backward()
            counts = {name: count - before[name] for name, count in num_gathers(model).items()}
            self.assertEqual(counts.pop("model.embed_tokens.weight"), 1)
            self.assertEqual(counts.pop("lm_head.weight"), 1)  # kept at the turning point
            self.assertEqual(set(counts.values()), {2}, counts)

    def test_trains_with_padding(self) -> None:
        """With ``num_items_in_batch`` the loss is a sum over tokens, of which ranks may have unequally many."""
        lengths = torch.tensor([6, 5, 2, 3])

        def batch(generator: torch.Generator) -> Batch:
            tokens = CASES["llama"].batch(generator)
            is_padding = torch.arange(6) >= lengths[:, None]
            labels = tokens["labels"].masked_fill(is_padding, -100)
            items = (lengths - 1).sum().div(4).repeat(4)
            return {**tokens, "attention_mask": (~is_padding).long(), "labels": labels, "items_per_row": items}

        def loss(model: nn.Module, batch: Batch) -> torch.Tensor:
            rest = dict(batch)
            items = rest.pop("items_per_row").sum()  # gradients are averaged: a rank's share of all items
            return model(**rest, num_items_in_batch=items).loss

        check_training(make("llama"), self.shard, self.gtp_mesh(), batch, loss, make_optimizer=sgd)

    def test_compiled_layers(self) -> None:
        """Into one graph without a break, which layers of one kind share."""

        def shard(model: Any) -> nn.Module:
            model.config.use_cache = False  # else each layer writes to a cache, at its own index: one graph a layer
            for layer in model.model.layers:
                layer.compile(backend="aot_eager", fullgraph=True)
            return self.shard(model)

        torch._dynamo.reset()
        counters.clear()
        case = CASES["llama"]
        check_training(make("llama"), shard, self.gtp_mesh(), case.batch, case.loss, make_optimizer=sgd, steps=1)
        self.assertEqual((counters["stats"]["unique_graphs"], dict(counters["graph_break"])), (1, {}))

    def test_experts_without_tokens(self) -> None:
        """The weights of all experts of a layer are two parameters: a rank that has tokens for two experts gathers
        them as often, and in the same order, as one that has tokens for all. So no empty input is needed to keep the
        ranks in step, unlike with a list of modules of which each rank calls those that it has tokens for."""
        batch = make_batch("mixtral")
        batch["input_ids"][:2] = 7  # rank 0 sees one token alone
        for implementation in ("eager", "batched_mm", "grouped_mm"):
            reference: Any = make("mixtral", experts_implementation=implementation).float()
            model = self.shard(copy.deepcopy(reference))
            chosen: set[tuple[nn.Module, int]] = set()
            for layer in model.model.layers:
                layer.mlp.gate.register_forward_hook(partial(note_experts, chosen))
            model_loss(reference, batch).backward()
            model_loss(model, rows_of_rank(batch, self.gtp_mesh())).backward()
            assert_same_params(model, reference, "grad", rtol=1e-4, atol=1e-5)
            experts: list[Any] = [None] * self.world_size
            dist.all_gather_object(experts, (len(chosen), num_gathers(model)))
            self.assertEqual(len({str(gathers) for _, gathers in experts}), 1, experts)
            self.assertGreater(len({num_chosen for num_chosen, _ in experts}), 1, experts)

    def test_generates(self) -> None:
        """From a cache. Ranks have prompts of their own, but take equally many steps: each step is collective."""
        for name, options in (
            ("gpt2", {"num_beams": 2}),
            ("llama", {"cache_implementation": "static"}),
            ("mixtral", {}),
            ("t5", {"num_beams": 2}),
        ):
            reference, model = self.pair(name)
            tokens = make_batch(name, self.rank)["input_ids"][:2]
            options = greedy(tokens, 5, **options)
            self.assertEqual(model.generate(tokens, **options), reference.generate(tokens, **options), msg=name)
            assert_idle(model)

    def test_generates_between_training_steps(self) -> None:
        """With the weights of the last step, and without trace in the next one."""
        reference: Any = make("gpt2")
        tokens = make_batch("gpt2", 7)["input_ids"][:2]

        def generate(model: Any, step: int) -> None:
            sequences = [module.eval().generate(tokens, **greedy(tokens, 5)) for module in (reference, model)]
            self.assertEqual(*sequences)
            for module in (reference, model):
                module.train()

        batch = CASES["gpt2"].batch
        check_training(
            *(reference, self.shard, self.gtp_mesh(), batch, model_loss), make_optimizer=sgd, between=generate
        )

    def test_generates_until_all_ranks_have_ended(self) -> None:
        """``synced_gpus`` is how transformers lets ranks that are done go on with the others."""
        reference, model = self.pair("llama")
        tokens = make_batch("llama", self.rank)["input_ids"][:1]
        free = reference.generate(tokens, **greedy(tokens, 9))
        end = int(free[0, tokens.shape[1] + 2 * self.rank])  # what ends this rank's sequence, early on rank 0
        options = greedy(tokens, 9, min_new_tokens=0, eos_token_id=end)
        expected = reference.generate(tokens, **options)
        self.assertEqual(model.generate(tokens, **options, synced_gpus=True), expected)

    def test_reloads(self) -> None:
        """From a distributed checkpoint, sharded and in one process; both train on."""
        topologies = [topology(self.shard, self.gtp_mesh()), PLAIN]
        for name in ("mixtral", "t5"):
            check_reload(partial(make, name), partial(make_batch, name), model_loss, topologies)

    def test_exports(self) -> None:
        """After a step, to an unsharded model: by a full state dict, and by the folder that ``save_pretrained`` makes
        of it."""
        for name in ("gpt2", "mixtral", "t5"):
            model = self.shard(make(name))
            batch = make_batch(name)
            model_loss(model, batch).backward()
            sgd(list(model.parameters())).step()
            expected = logits_of(model, batch)
            state = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
            if self.rank > 0:  # only rank 0 has it
                self.assertEqual(state, {})
                continue
            whole = make(name)
            self.assertNotEqual(logits_of(whole, batch), expected)
            whole.load_state_dict(state)
            self.assertEqual(logits_of(whole, batch), expected)
            with tempfile.TemporaryDirectory() as folder:
                model.save_pretrained(folder, state_dict=state)
                loaded = type(whole).from_pretrained(folder)
            self.assertEqual(loaded.config.architectures, [type(whole).__name__])
            if name == "mixtral":
                loaded.set_experts_implementation("eager")
            self.assertEqual(logits_of(loaded, batch), expected)

    def test_starts_on_the_meta_device(self) -> None:
        """Initialized by transformers after sharding, to the bits that an unsharded model gets; then it loads what
        rank 0 has."""
        for name in ("gpt2", "llama"):
            models: list[Any] = []
            for shard in (lambda model: model, self.shard):
                with torch.device("meta"):
                    models.append(CASES[name].make())
                model = shard(models[-1])
                model.to_empty(device="cpu")
                model.tie_weights()
                torch.manual_seed(0)
                model.initialize_weights()
            reference, model = models
            assert_same_params(model, reference, rtol=0.0, atol=0.0)
            self.assertEqual(dict(model.named_buffers()), dict(reference.named_buffers()))
            trained = make(name).float()
            state = trained.state_dict() if self.rank == 0 else {}
            options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            set_model_state_dict(model, state, options=options)
            batch = make_batch(name, self.rank)
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

        case = CASES["llama"]
        for is_tied in (False, True):
            reference = make("llama", num_key_value_heads=2, tie_word_embeddings=is_tied)
            model: Any = check_training(reference, shard, root["gtp"], case.batch, case.loss, make_optimizer=sgd)
            attention = model.model.layers[0].self_attn
            self.assertEqual(attention.q_proj.weight.placements, (Shard(0), GTPShard(0)))
            self.assertEqual(attention.o_proj.weight.placements, (Shard(1), GTPShard(0)))
            self.assertEqual(model.model.embed_tokens.weight.device_mesh.mesh_dim_names, ("gtp",))
