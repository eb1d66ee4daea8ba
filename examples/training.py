"""What the training scripts share: presets, optimizer, speed, and the loop with its checkpoints.

A script gives :class:`Trainer` a model that is sharded already and says what its loss is; the loop, the order of the
data, the learning rate, validation and resuming are the same for all of them.
"""

import argparse
import json
import math
import os
import resource
import sys
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Generic, TypeVar, get_args

import torch
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR

from checkpoints import CheckpointDir, TrainState, check_requirements, check_same_run
from dtensor_gtp import MixedPrecisionPolicy, sharding_report
from dtensor_gtp.metrics import StepMetrics, progress_line
from dtensor_gtp.policy import Memory
from launch import Place, UsageError
from llama import LlamaConfig
from text_data import Batch, Corpus, TextBatches

MAX_GRAD_NORM = 1.0
_MIN_LR_RATIO = 0.1

Config = TypeVar("Config", bound=LlamaConfig)


@dataclass(frozen=True)
class Preset(Generic[Config]):
    """A model and how long to train it; each value but the model's sizes has a command-line option."""

    model: Config
    steps: int
    batch_size: int
    lr: float
    checkpoint_every: int
    log_every: int
    warmup_steps: int
    eval_batches: int


def add_options(parser: argparse.ArgumentParser, checkpoint_dir: str) -> None:
    """The command-line options of every training script.

    Args:
        checkpoint_dir: where checkpoints go by default.
    """
    add = parser.add_argument
    add("--steps", type=int, help="optimizer steps, those before a resume included (default: the preset's)")
    add("--batch-size", type=int, help="sequences in a step, over all processes (default: the preset's)")
    add("--seq-len", type=int, help="tokens in a sequence (default: the preset's)")
    add("--lr", type=float, help="peak learning rate (default: the preset's)")
    add("--memory", choices=get_args(Memory), default="balanced", help="what may be spent on speed, see SchedulePolicy")
    add("--checkpoint-dir", type=Path, default=Path(checkpoint_dir), help="shared by all hosts")
    add("--checkpoint-every", type=int, help="steps between checkpoints, 0 for none (default: the preset's)")
    add("--resume", action="store_true", help="continue from the last complete checkpoint in --checkpoint-dir")
    add("--seed", type=int, default=0, help="of the initial weights and the data order")
    add("--log-every", type=int, help="steps between progress lines (default: the preset's)")
    add("--deterministic", action="store_true", help="deterministic kernels, so that a resume on GPUs is bit-equal")
    add("--json", type=Path, metavar="FILE", help="write the final metrics to FILE")


def resolve_preset(presets: Mapping[str, Preset[Config]], options: argparse.Namespace, place: Place) -> Preset[Config]:
    """The chosen preset with the options of the command line in place of its defaults."""
    preset = presets[options.preset or ("gpu" if place.device.type == "cuda" else "cpu")]
    given: dict[str, Any] = {
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


def mixed_precision(place: Place) -> MixedPrecisionPolicy:
    """bf16 with gradients reduced in fp32 on GPUs, fp32 on a CPU."""
    if place.device.type == "cuda":
        return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    return MixedPrecisionPolicy()


def build_optimizer(model: nn.Module, preset: Preset[Any], place: Place) -> tuple[torch.optim.AdamW, LambdaLR]:
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
    text: torch.Tensor, preset: Preset[Any], place: Place, seed: int, rows: slice | None = None
) -> TextBatches:
    """Batches of ``text``, which moves to the device, so that no step waits for a copy.

    Args:
        rows: this rank's rows of a global batch where ranks have unequal numbers of them.
    """
    try:
        return TextBatches(
            text.to(place.device),
            seq_len=preset.model.max_seq_len,
            batch_size=preset.batch_size,
            seed=seed,
            rank=place.rank,
            world_size=place.world_size,
            rows=rows,
        )
    except ValueError as error:
        raise UsageError(f"--batch-size {preset.batch_size}: {error}") from None


def peak_memory_bytes(device: torch.device) -> int:
    """Most memory held so far: of the CUDA allocator, or of this process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    max_rss = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return max_rss if sys.platform == "darwin" else max_rss * 1024


class Trainer:
    """The training loop and what it keeps between steps.

    Args:
        options: the command line, as :func:`add_options` describes it.
        preset: the model's sizes and the length of the run.
        place: this process.
        corpus: the text.
        model: sharded and initialized.
        rows: this rank's rows of a global batch where ranks have unequal numbers of them.
        weight: what the mean over this rank's rows counts in the mean over ranks.
    """

    def __init__(
        self,
        options: argparse.Namespace,
        preset: Preset[Any],
        place: Place,
        corpus: Corpus,
        model: nn.Module,
        *,
        rows: slice | None = None,
        weight: float = 1.0,
    ) -> None:
        self.preset = preset
        self.place = place
        self.weight = weight
        self.train_batches = build_batches(corpus.train, preset, place, options.seed, rows)
        self.held_out_batches = build_batches(corpus.held_out, preset, place, 0, rows)
        self.model = model
        self.optimizer, self.scheduler = build_optimizer(self.model, preset, place)
        self.checkpoints = CheckpointDir(options.checkpoint_dir, place)
        self.is_resuming: bool = options.resume
        # What a resumed run must have in common with the saved one to be the same run.
        self.facts = {
            "model": asdict(preset.model),
            "data": {"batch_size": preset.batch_size, "seed": options.seed, "text_checksum": corpus.checksum},
        }
        self.place_facts = {"world_size": place.world_size, "device": place.device.type}
        self.step = 0
        self.losses: list[tuple[int, float]] = []
        self.validation_losses: list[tuple[int, float]] = []
        self.step_metrics = StepMetrics(model)
        self.values: dict[str, float] = {}
        self.first_step, self.started = 0, time.perf_counter()

    def train(self) -> None:
        """Runs the remaining steps, with validation at both ends and at each checkpoint."""
        self.place.print_once(sharding_report(self.model))
        self.validate()
        self.first_step, self.started = self.step, time.perf_counter()
        while self.step < self.preset.steps:
            loss, grad_norm = self.train_step()
            if self.step == self.first_step + 1:
                self.place.print_once(sharding_report(self.model))
            if self.step % self.preset.log_every == 0 or self.step == self.preset.steps:
                self.log(loss, grad_norm)
            is_last = self.step == self.preset.steps
            is_due = self.preset.checkpoint_every and self.step % self.preset.checkpoint_every == 0
            if is_due or is_last:
                self.validate()
                if self.preset.checkpoint_every:
                    self.save()
                self.step_metrics.skip()  # neither is part of a step

    def train_step(self) -> tuple[torch.Tensor, torch.Tensor]:
        """One optimizer step; returns this rank's loss and the norm of the averaged gradient, both scalars."""
        batch = self.train_batches(self.step)
        loss = self.loss(batch)
        (loss + self.extra_loss()).backward()
        grad_norm = self.clip_grad_norm()
        self.update()
        self.optimizer.zero_grad()
        self.step_metrics.count(self.preset.batch_size * self.preset.model.max_seq_len)
        return loss.detach(), grad_norm

    def update(self) -> None:
        """From the gradients to the state after one more step."""
        self.optimizer.step()
        self.scheduler.step()
        self.step += 1

    def extra_loss(self) -> torch.Tensor | float:
        """What training minimizes beside the loss that is reported, of the forward that has just run."""
        return 0.0

    def clip_grad_norm(self) -> torch.Tensor:
        return torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)

    def loss(self, batch: Batch) -> torch.Tensor:
        logits = self.model(batch.inputs)
        return F.cross_entropy(logits.float().flatten(0, 1), batch.targets.flatten())

    def log(self, loss: torch.Tensor, grad_norm: torch.Tensor) -> None:
        mean_loss = self.place.mean_over_ranks(loss * self.weight)
        if not math.isfinite(mean_loss):
            raise FloatingPointError(f"the loss of step {self.step} is {mean_loss}; try a smaller --lr.")
        self.losses.append((self.step, mean_loss))
        self.values = self.step_metrics.read(loss=mean_loss, grad_norm=grad_norm)
        seconds = time.perf_counter() - self.started
        self.place.print_once(progress_line(self.step, self.preset.steps, self.values, seconds, self.first_step))

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
        self.checkpoints.save(self.step, state, {"place": self.place_facts, **self.facts}, self.save_planner())

    def save_planner(self) -> dcp.SavePlanner | None:
        """Says which rank writes what; None for DCP's own."""
        return None

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
            "tokens_per_s": self.values.get("tokens_per_s", 0.0),
            "peak_memory_bytes": peak_memory_bytes(self.place.device),
        }

    def run(self, json_file: Path | None) -> None:
        """Resumes if it is to, trains, and writes the metrics to ``json_file``."""
        if self.preset.checkpoint_every or self.is_resuming:
            check_requirements(self.place)
        if self.is_resuming:
            self.resume()
        self.train()
        if json_file is not None and self.place.rank == 0:
            json_file.write_text(json.dumps(self.metrics(), indent=2) + "\n")


def use_deterministic_kernels() -> None:
    """Must come before the first use of a GPU."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS starts
    torch.use_deterministic_algorithms(True)
