"""Trains a byte-level Llama by Lightning with ``gtp_shard``, on GPUs or on CPU.

torchrun --nproc-per-node 2 examples/train_lightning.py  # [--epochs 6 --folder FOLDER --resume]
"""

import os
from argparse import ArgumentParser
from pathlib import Path

import torch
import torch.nn.functional as F
from lightning import LightningModule, Trainer
from lightning.pytorch.utilities import rank_zero_only
from torch.utils.data import DataLoader, DistributedSampler

from dtensor_gtp import gtp_shard
from dtensor_gtp.integrations.lightning import GTPStrategy
from llama import Llama, LlamaConfig
from text_data import VOCAB_SIZE, load_corpus

SEQ_LEN, BATCH_SIZE = 96, 16


class LanguageModel(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.net: torch.nn.Module | None = None

    def configure_model(self) -> None:
        if self.net is None:  # Lightning calls this several times
            torch.manual_seed(0)  # all ranks build the same model, of which each will keep its part
            sizes = {"num_layers": 3, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 320, "max_seq_len": SEQ_LEN}
            self.net = Llama(LlamaConfig(VOCAB_SIZE, 128, **sizes))
            self.net.init_weights()
            gtp_shard(self.net.to(self.device), self.device_mesh["data_parallel"])

    def training_step(self, rows: torch.Tensor, index: int) -> torch.Tensor:
        return F.cross_entropy(self.net(rows[:, :-1].long()).flatten(0, 1), rows[:, 1:].long().flatten())

    def validation_step(self, rows: torch.Tensor, index: int) -> None:
        self.log("validation_loss", self.training_step(rows, index), sync_dist=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def windows(text: torch.Tensor, *, shuffle: bool) -> DataLoader[torch.Tensor]:
    """Batches of ``SEQ_LEN + 1`` bytes; the processes take the samples of a step in turns."""
    rank, world_size = int(os.environ.get("RANK", 0)), int(os.environ.get("WORLD_SIZE", 1))
    rows = text[: len(text) // (SEQ_LEN + 1) * (SEQ_LEN + 1)].view(-1, SEQ_LEN + 1)
    sampler = DistributedSampler(rows, world_size, rank, shuffle=shuffle, drop_last=True)
    return DataLoader(rows, BATCH_SIZE // world_size, sampler=sampler, drop_last=True)


def main() -> None:
    parser = ArgumentParser(description="Train by Lightning with gtp_shard.")
    parser.add_argument("--epochs", type=int, default=6, help="of ten optimizer steps, those before a resume included")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints/train_lightning"), help="for the results")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint, on any number of processes")
    options = parser.parse_args()
    trainer = Trainer(
        accelerator="auto" if torch.cuda.is_available() else "cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", 1)),
        strategy=GTPStrategy(),
        max_epochs=options.epochs,
        limit_train_batches=20,
        limit_val_batches=20,
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        **dict.fromkeys(("use_distributed_sampler", "enable_checkpointing", "enable_progress_bar", "logger"), False),
    )
    path, corpus = options.folder / "last.ckpt", load_corpus()
    loaders = windows(corpus.train, shuffle=True), windows(corpus.held_out, shuffle=False)
    trainer.fit(LanguageModel(), *loaders, ckpt_path=path if options.resume else None, weights_only=False)
    rank_zero_only(print)(f"validation loss {trainer.callback_metrics['validation_loss']:.4f}")
    trainer.save_checkpoint(path)  # a folder, of which each process writes its part


if __name__ == "__main__":
    main()
