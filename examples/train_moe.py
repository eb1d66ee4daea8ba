"""Trains a byte-level mixture of experts with ``gtp_shard``: experts on a mesh of their own, tokens sent over ``ep``.

    torchrun --nproc-per-node 4 examples/train_moe.py

needs no argument, no download and no GPU, as ``train_llama.py``, whose loop, text and checkpoints it shares. Dense
layers are sharded over all processes (gtp), which see different text; experts are distributed over ``--ep`` and the
weights of each over ``--expert-gtp``; what is left holds copies (expert_dp). ``--resume`` continues on any number of
processes and any such split. ``--dispatch all_gather`` sends tokens without asking the host for sizes. ``--dense``
trains the dense model with as many active parameters, to compare.
"""

import argparse
import math
import sys

import torch

import training
from dtensor_gtp import SchedulePolicy, WeightMesh, gtp_shard, init_weight_mesh
from dtensor_gtp.nn import DispatchMethod, parallelize_experts
from launch import Place, UsageError, run, start
from llama import Llama
from moe import MoEConfig, MoELlama
from text_data import VOCAB_SIZE, Corpus, load_corpus
from training import Preset, add_options, mixed_precision, use_deterministic_kernels

PRESETS = {
    "tiny": Preset(
        MoEConfig(
            VOCAB_SIZE, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=80, max_seq_len=32,
            num_experts=4, top_k=2, shared_dim=16,
        ),
        steps=10, batch_size=12, lr=1e-2, checkpoint_every=5, log_every=1, warmup_steps=2, eval_batches=2,
    ),
    "cpu": Preset(
        MoEConfig(
            VOCAB_SIZE, dim=128, num_layers=4, num_heads=4, num_kv_heads=2, hidden_dim=352, max_seq_len=128,
            num_experts=8, top_k=2, shared_dim=96,
        ),
        steps=150, batch_size=24, lr=4e-3, checkpoint_every=50, log_every=10, warmup_steps=20, eval_batches=4,
    ),
    "gpu": Preset(
        MoEConfig(
            VOCAB_SIZE, dim=1024, num_layers=16, num_heads=16, num_kv_heads=4, hidden_dim=2816, max_seq_len=1024,
            num_experts=32, top_k=4, shared_dim=768,
        ),
        steps=600, batch_size=24, lr=1e-3, checkpoint_every=200, log_every=10, warmup_steps=50, eval_batches=8,
    ),
}  # fmt: skip


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level mixture of experts with gtp_shard.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--preset", choices=PRESETS, help="model and defaults; gpu where each process has a GPU, else cpu")
    add("--ep", type=int, help="processes over which experts are distributed (default: 2 if that divides them)")
    add("--expert-gtp", type=int, help="processes over which each expert is sharded (default: all that are left)")
    add("--dispatch", choices=[m.value for m in DispatchMethod], default="all_to_all", help="how tokens travel")
    add("--dense", action="store_true", help="train the dense model with as many active parameters instead")
    add_options(parser, "checkpoints/train_moe")
    return parser.parse_args(arguments)


def build_mesh(place: Place, options: argparse.Namespace, num_experts: int) -> WeightMesh:
    """Dense layers over all processes; for experts, ep by expert_gtp, and copies of both on what is left."""
    ep = options.ep or math.gcd(2, place.world_size, num_experts)
    expert_gtp = options.expert_gtp or max(1, place.world_size // ep)
    if num_experts % ep:
        raise UsageError(f"--ep {ep} does not divide the {num_experts} experts of this preset.")
    try:
        return init_weight_mesh(
            place.device.type, gtp=place.world_size, ep=ep, expert_gtp=expert_gtp, seed=options.seed
        )
    except ValueError as error:
        raise UsageError(f"--ep {ep} --expert-gtp {expert_gtp}: {error}") from None


def build_model(config: MoEConfig, mesh: WeightMesh, place: Place, options: argparse.Namespace) -> Llama:
    """Builds the model without memory, shards the experts, then everything else, and initializes each process's shards
    with the numbers that the whole model would have drawn."""
    with torch.device("meta"):
        model = Llama(config) if options.dense else MoELlama(config)
    policy, schedule = mixed_precision(place), SchedulePolicy(memory=options.memory)
    for moe in model.moes if isinstance(model, MoELlama) else ():
        if mesh["ep"].size() > 1:
            parallelize_experts(moe.experts, mesh["ep"], method=options.dispatch)
        if mesh.data.size() > 1:
            moe.data_mesh = mesh.data
        # The MLP alone: inputs of what is sharded are cast, and the routers' weights shall not be.
        gtp_shard(moe.experts.mlp, mesh.expert_weights, mp_policy=policy, schedule=schedule)
        # An expert's gradient is the sum over the tokens of all processes, the loss is their mean.
        moe.experts.mlp.set_gradient_divide_factor(mesh.data.size())
    gtp_shard(model, mesh.weights, mp_policy=policy, schedule=schedule)
    model.to_empty(device=place.device)
    torch.manual_seed(options.seed)
    model.init_weights()
    torch.manual_seed(options.seed + 1 + place.rank)
    return model


class Trainer(training.Trainer):
    """The shared loop on a model with experts."""

    def __init__(self, options: argparse.Namespace, preset: Preset[MoEConfig], place: Place, corpus: Corpus) -> None:
        mesh = build_mesh(place, options, preset.model.num_experts)
        place.print_once(mesh)
        super().__init__(options, preset, place, corpus, build_model(preset.model, mesh, place, options))

    def extra_loss(self) -> torch.Tensor | float:
        return self.model.balance_loss() if isinstance(self.model, MoELlama) else 0.0


def main() -> None:
    options = parse_options(sys.argv[1:])
    if options.deterministic:
        use_deterministic_kernels()
    place = start()
    preset = training.resolve_preset(PRESETS, options, place)
    Trainer(options, preset, place, load_corpus()).run(options.json)


if __name__ == "__main__":
    run(main)
