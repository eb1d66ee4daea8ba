"""Trains a Llama-style byte-level language model with ``gtp_shard``.

    torchrun --nproc-per-node 4 examples/train_llama.py

needs no argument, no download and no GPU: the text is the source code of Python's standard library. Without GPUs a
small model trains for about a minute on gloo; with one GPU per process a larger one trains in bf16 on NCCL, by the same
code. ``python examples/train_llama.py`` runs it in a single process. ``--resume`` continues from the last complete
checkpoint on any number of processes, with the same data order; on as many processes as before, bit for bit.

    torchrun --max-restarts 3 --nproc-per-node 7 examples/train_llama.py --elastic 4

trains replicas of four processes, the last of which has three, and resumes by itself where there is a checkpoint: when
torchrun starts the job again after a failure, on as many processes as are left, it goes on.
"""

import argparse
import json
import math
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.optim.lr_scheduler import LambdaLR

from checkpoints import CheckpointDir, TrainState, check_requirements, check_same_run
from dtensor_gtp import MixedPrecisionPolicy, SchedulePolicy, elastic, gtp_shard, sharding_report
from launch import Place, UsageError, run, start
from llama import Llama, LlamaConfig
from text_data import VOCAB_SIZE, Batch, Corpus, TextBatches, load_corpus

_MAX_GRAD_NORM = 1.0
_MIN_LR_RATIO = 0.1


@dataclass(frozen=True)
class Preset:
    """A model and how long to train it; each value but the model's sizes has a command-line option."""

    model: LlamaConfig
    steps: int
    batch_size: int
    lr: float
    checkpoint_every: int
    log_every: int
    warmup_steps: int
    eval_batches: int


PRESETS = {
    "tiny": Preset(
        LlamaConfig(VOCAB_SIZE, dim=32, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=80, max_seq_len=32),
        steps=10, batch_size=12, lr=1e-2, checkpoint_every=5, log_every=1, warmup_steps=2, eval_batches=2,
    ),
    "cpu": Preset(
        LlamaConfig(VOCAB_SIZE, dim=128, num_layers=4, num_heads=4, num_kv_heads=2, hidden_dim=352, max_seq_len=128),
        steps=150, batch_size=24, lr=4e-3, checkpoint_every=50, log_every=10, warmup_steps=20, eval_batches=4,
    ),
    "gpu": Preset(
        LlamaConfig(
            VOCAB_SIZE, dim=1024, num_layers=16, num_heads=16, num_kv_heads=4, hidden_dim=2816, max_seq_len=1024
        ),
        steps=600, batch_size=24, lr=1e-3, checkpoint_every=200, log_every=10, warmup_steps=50, eval_batches=8,
    ),
}  # fmt: skip


def parse_options(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a byte-level Llama-style model with gtp_shard.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("--preset", choices=PRESETS, help="model and defaults; gpu where each process has a GPU, else cpu")
    add("--steps", type=int, help="optimizer steps, those before a resume included (default: the preset's)")
    add("--batch-size", type=int, help="sequences in a step, over all processes (default: the preset's)")
    add("--seq-len", type=int, help="tokens in a sequence (default: the preset's)")
    add("--lr", type=float, help="peak learning rate (default: the preset's)")
    add("--prefetch-depth", type=int, default=2, help="weights gathered ahead of use")
    add("--replicate", type=int, default=1, help="copies of the sharded model: the mesh becomes (replicate, gtp)")
    add("--elastic", type=int, metavar="N", help="replicas of N processes, the last one of what is left; auto-resume")
    add("--checkpoint-dir", type=Path, default=Path("checkpoints/train_llama"), help="shared by all hosts")
    add("--checkpoint-every", type=int, help="steps between checkpoints, 0 for none (default: the preset's)")
    add("--resume", action="store_true", help="continue from the last complete checkpoint in --checkpoint-dir")
    add("--seed", type=int, default=0, help="of the initial weights and the data order")
    add("--log-every", type=int, help="steps between progress lines (default: the preset's)")
    add("--deterministic", action="store_true", help="deterministic kernels, so that a resume on GPUs is bit-equal")
    add("--json", type=Path, metavar="FILE", help="write the final metrics to FILE")
    return parser.parse_args(arguments)


def resolve_preset(options: argparse.Namespace, place: Place) -> Preset:
    """The chosen preset with the options of the command line in place of its defaults."""
    preset = PRESETS[options.preset or ("gpu" if place.device.type == "cuda" else "cpu")]
    given = {
        name: getattr(options, name)
        for name in ("steps", "batch_size", "lr", "checkpoint_every", "log_every")
        if getattr(options, name) is not None
    }
    for name, least in (("steps", 1), ("batch_size", 1), ("checkpoint_every", 0), ("log_every", 1)):
        if given.get(name, least) < least:
            raise UsageError(f"expected --{name.replace('_', '-')} of at least {least}, but got {given[name]}.")
    if options.seq_len is not None:
        if options.seq_len < 1:
            raise UsageError(f"expected --seq-len of at least 1, but got {options.seq_len}.")
        given["model"] = replace(preset.model, max_seq_len=options.seq_len)
    return replace(preset, **given)


def build_mesh(place: Place, replicate: int) -> DeviceMesh:
    """A (gtp) mesh over all processes, or (replicate, gtp) with several copies of the sharded model."""
    if replicate < 1 or place.world_size % replicate:
        raise UsageError(f"--replicate {replicate} does not divide the {place.world_size} processes of this job.")
    if replicate == 1:
        return init_device_mesh(place.device.type, (place.world_size,), mesh_dim_names=("gtp",))
    shape = (replicate, place.world_size // replicate)
    return init_device_mesh(place.device.type, shape, mesh_dim_names=("replicate", "gtp"))


def build_replicas(place: Place, size: int, replicate: int) -> elastic.ElasticMesh:
    """Replicas of ``size`` consecutive processes; the last one has those that are left."""
    if size < 1 or replicate != 1:
        raise UsageError(f"expected --elastic of at least 1 and no --replicate, but got {size} and {replicate}.")
    ranks = range(place.world_size)
    replicas = [ranks[first : first + size] for first in range(0, place.world_size, size)]
    return elastic.nonuniform_mesh(place.device.type, replicas=replicas)


def build_model(config: LlamaConfig, mesh: DeviceMesh, place: Place, options: argparse.Namespace) -> Llama:
    """Builds the model without memory, shards it, and only then initializes each process's shards.

    Each process draws the numbers that the whole model would have drawn and keeps its own, so a seed means the same
    initial model on any number of processes, and no process ever holds all of it.
    """
    with torch.device("meta"):
        model = Llama(config)
    mixed_precision = MixedPrecisionPolicy()
    if place.device.type == "cuda":
        mixed_precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    schedule = SchedulePolicy(prefetch_depth=options.prefetch_depth)
    gtp_shard(model, mesh, mp_policy=mixed_precision, schedule=schedule)
    model.to_empty(device=place.device)
    torch.manual_seed(options.seed)
    model.init_weights()
    # From here on every process draws its own numbers, as its data are its own.
    torch.manual_seed(options.seed + 1 + place.rank)
    return model


def build_optimizer(model: Llama, preset: Preset, place: Place) -> tuple[torch.optim.AdamW, LambdaLR]:
    """AdamW without weight decay on the norms; the learning rate warms up linearly and decays along a cosine."""
    matrices = [param for param in model.parameters() if param.ndim >= 2]
    vectors = [param for param in model.parameters() if param.ndim < 2]
    is_cuda = place.device.type == "cuda"
    optimizer = torch.optim.AdamW(
        [{"params": matrices}, {"params": vectors, "weight_decay": 0.0}],
        lr=preset.lr,
        betas=(0.9, 0.95),
        weight_decay=0.1,
        fused=is_cuda,
        foreach=not is_cuda,
    )

    def lr_ratio(step: int) -> float:
        if step < preset.warmup_steps:
            return (step + 1) / preset.warmup_steps
        progress = min(1.0, (step - preset.warmup_steps) / max(1, preset.steps - preset.warmup_steps))
        return _MIN_LR_RATIO + (1 - _MIN_LR_RATIO) * 0.5 * (1 + math.cos(math.pi * progress))

    return optimizer, LambdaLR(optimizer, lr_ratio)


def build_batches(
    text: torch.Tensor, preset: Preset, place: Place, seed: int, share: elastic.BatchShare | None
) -> TextBatches:
    """Batches of ``text``, which moves to the device, so that no step waits for a copy.

    Args:
        share: This rank's rows where replicas are unequal; None for as many on each rank.
    """
    try:
        return TextBatches(
            text.to(place.device),
            seq_len=preset.model.max_seq_len,
            batch_size=preset.batch_size,
            seed=seed,
            rank=place.rank,
            world_size=place.world_size,
            rows=None if share is None else share.rows,
        )
    except ValueError as error:
        raise UsageError(f"--batch-size {preset.batch_size}: {error}") from None


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held so far: of the CUDA allocator, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max_rss if sys.platform == "darwin" else max_rss * 1024


class Speed:
    """Tokens per second over the training steps since the last reading; pauses do not count."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._tokens = 0
        self._started = time.perf_counter()

    def count(self, tokens: int) -> None:
        self._tokens += tokens

    def read(self) -> float:
        now = time.perf_counter()
        tokens_per_s = self._tokens / (now - self._started)
        self._tokens, self._started = 0, now
        return tokens_per_s

    @contextmanager
    def paused(self) -> Iterator[None]:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)  # steps still in the queue belong before the pause
        begun = time.perf_counter()
        yield
        self._started += time.perf_counter() - begun


class Trainer:
    """The training loop and what it keeps between steps."""

    def __init__(self, options: argparse.Namespace, preset: Preset, place: Place, corpus: Corpus) -> None:
        self.preset = preset
        self.place = place
        self.replicas: elastic.ElasticMesh | None = None
        share = None
        if options.elastic is None:
            mesh = build_mesh(place, options.replicate)
        else:
            self.replicas = build_replicas(place, options.elastic, options.replicate)
            mesh, share = self.replicas.weights, self.share_of(self.replicas)
            place.print_once(self.replicas.layout)
        # What the mean of this rank's rows counts in the mean over ranks.
        self.weight = 1.0 if share is None else share.num_samples * place.world_size / preset.batch_size
        self.train_batches = build_batches(corpus.train, preset, place, options.seed, share)
        self.held_out_batches = build_batches(corpus.held_out, preset, place, 0, share)
        self.model = build_model(preset.model, mesh, place, options)
        if self.replicas is not None and share is not None:
            elastic.synchronize_replicas(self.model, self.replicas).set_batch(share)
        self.optimizer, self.scheduler = build_optimizer(self.model, preset, place)
        self.checkpoints = CheckpointDir(options.checkpoint_dir, place)
        if preset.checkpoint_every or options.resume or options.elastic is not None:
            check_requirements(place)
        # What a resumed run must have in common with the saved one to be the same run.
        self.facts = {
            "model": asdict(preset.model),
            "data": {"batch_size": preset.batch_size, "seed": options.seed, "text_checksum": corpus.checksum},
        }
        self.place_facts = {"world_size": place.world_size, "device": place.device.type}
        self.step = 0
        self.losses: list[tuple[int, float]] = []
        self.validation_losses: list[tuple[int, float]] = []
        self.speed = Speed(place.device)
        self.tokens_per_s = 0.0

    def share_of(self, replicas: elastic.ElasticMesh) -> elastic.BatchShare:
        try:
            return replicas.rebalance_batch(self.preset.batch_size)
        except ValueError as error:
            raise UsageError(f"--batch-size {self.preset.batch_size}: {error}") from None

    def train(self) -> None:
        """Runs the remaining steps, with validation at both ends and at each checkpoint."""
        self.place.print_once(sharding_report(self.model))
        self.validate()
        first_step = self.step + 1
        while self.step < self.preset.steps:
            loss, grad_norm = self.train_step()
            if self.step == first_step:
                self.place.print_once(sharding_report(self.model).schedule)
            if self.step % self.preset.log_every == 0 or self.step == self.preset.steps:
                self.log(loss, grad_norm)
            is_last = self.step == self.preset.steps
            is_due = self.preset.checkpoint_every and self.step % self.preset.checkpoint_every == 0
            with self.speed.paused():
                if is_due or is_last:
                    self.validate()
                if self.preset.checkpoint_every and (is_due or is_last):
                    self.save()

    def train_step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One optimizer step; returns this rank's loss and the norm of the averaged gradient, both scalars."""
        batch = self.train_batches(self.step)
        loss = self.loss(batch)
        loss.backward()
        grad_norm = self.clip_grad_norm()
        self.optimizer.step()
        self.scheduler.step()
        self.optimizer.zero_grad()
        self.step += 1
        self.speed.count(self.preset.batch_size * self.preset.model.max_seq_len)
        return loss.detach(), grad_norm

    def clip_grad_norm(self) -> torch.Tensor:
        if self.replicas is not None:
            return elastic.clip_grad_norm_(self.model.parameters(), _MAX_GRAD_NORM, self.replicas)
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), _MAX_GRAD_NORM)

    def loss(self, batch: Batch) -> torch.Tensor:
        logits = self.model(batch.inputs)
        return F.cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten())

    def log(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        mean_loss = self.place.mean_over_ranks(loss * self.weight)
        if not math.isfinite(mean_loss):
            raise FloatingPointError(f"the loss of step {self.step} is {mean_loss}; try a smaller --lr.")
        if isinstance(grad_norm, DTensor):
            grad_norm = grad_norm.full_tensor()
        self.losses.append((self.step, mean_loss))
        self.tokens_per_s = self.speed.read()
        self.place.print_once(
            f"step {self.step:>4}/{self.preset.steps}  loss {mean_loss:.4f}  {self.tokens_per_s:,.0f} tokens/s  "
            f"peak memory {peak_memory_bytes(self.place.device) / 2**20:,.0f} MiB  "
            f"gradient norm {grad_norm.item():.3f}"
        )

    @torch.no_grad()
    def validate(self) -> None:
        self.model.eval()
        losses = [self.loss(self.held_out_batches(index)) for index in range(self.preset.eval_batches)]
        self.model.train()
        self.validation_losses.append((self.step, self.place.mean_over_ranks(torch.stack(losses).mean() * self.weight)))
        self.place.print_once(
            f"step {self.step:>4}/{self.preset.steps}  validation loss {self.validation_losses[-1][1]:.4f}"
        )

    def save(self) -> None:
        state = TrainState(self.model, self.optimizer, self.scheduler, self.place)
        # Unequal replicas hold overlapping chunks: one of them writes.
        planner = None if self.replicas is None else elastic.ReplicaSavePlanner(self.replicas)
        self.checkpoints.save(self.step, state, {"place": self.place_facts, **self.facts}, planner)

    def resume(self) -> None:
        """Continues from the last complete checkpoint; nothing has changed when it raises."""
        checkpoint = self.checkpoints.latest()
        if checkpoint is None:
            raise UsageError(f"--resume found no complete checkpoint in {self.checkpoints.path}; start without it.")
        saved = self.checkpoints.read_run(checkpoint)
        check_same_run(saved, self.facts)
        is_same_place = saved["place"] == self.place_facts
        state = TrainState(self.model, self.optimizer, self.scheduler, self.place, with_rng=is_same_place)
        self.checkpoints.load(checkpoint, state)
        self.step = saved["step"]
        self.place.print_once(f"resumed from {checkpoint}, saved by {saved['place']['world_size']} processes")

    def metrics(self) -> dict[str, Any]:
        return {
            **self.place_facts,
            "step": self.step,
            "losses": self.losses,
            "validation_losses": self.validation_losses,
            "tokens_per_s": self.tokens_per_s,
            "peak_memory_bytes": peak_memory_bytes(self.place.device),
        }


def main() -> None:
    options = parse_options(sys.argv[1:])
    if options.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
        torch.use_deterministic_algorithms(True)
    place = start()
    trainer = Trainer(options, resolve_preset(options, place), place, load_corpus())
    if options.resume or (options.elastic is not None and trainer.checkpoints.latest() is not None):
        trainer.resume()
    trainer.train()
    if options.json is not None and place.rank == 0:
        options.json.write_text(json.dumps(trainer.metrics(), indent=2) + "\n")


if __name__ == "__main__":
    run(main)
