"""Trains a byte-level Llama by a loop of accelerate with ``gtp_shard``, on GPUs or on CPU.

torchrun --nproc-per-node 2 examples/train_accelerate.py  # [--steps 60 --folder FOLDER --resume]
"""

from argparse import ArgumentParser
from pathlib import Path

import torch
import torch.nn.functional as F
from accelerate import DataLoaderConfiguration
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader

from dtensor_gtp import gtp_shard
from dtensor_gtp.integrations.accelerate import GTPAccelerator
from llama import Llama, LlamaConfig
from text_data import VOCAB_SIZE, load_corpus

SEQ_LEN, BATCH_SIZE, MICROBATCHES = 96, 16, 2


def windows(text: torch.Tensor, shuffle: bool = False) -> DataLoader[torch.Tensor]:
    """Batches of ``SEQ_LEN + 1`` bytes; a batch is that of all processes."""
    rows = text[: len(text) // (SEQ_LEN + 1) * (SEQ_LEN + 1)].view(-1, SEQ_LEN + 1)
    return DataLoader(rows, batch_size=BATCH_SIZE, shuffle=shuffle, drop_last=True)


def loss_of(model: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(model(rows[:, :-1].long()).flatten(0, 1), rows[:, 1:].long().flatten())


def main() -> None:
    parser = ArgumentParser(description="Train by a loop of accelerate with gtp_shard.")
    parser.add_argument("--steps", type=int, default=60, help="optimizer steps, those before a resume included")
    parser.add_argument("--folder", type=Path, default=Path("checkpoints/train_accelerate"), help="for the results")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint, on any number of processes")
    options = parser.parse_args()
    config = DataLoaderConfiguration(split_batches=True, use_seedable_sampler=True)
    accelerator = GTPAccelerator(
        cpu=not torch.cuda.is_available(), gradient_accumulation_steps=MICROBATCHES, dataloader_config=config
    )
    torch.manual_seed(0)  # all ranks build the same model, of which each will keep its part
    model = Llama(
        LlamaConfig(VOCAB_SIZE, 128, num_layers=3, num_heads=4, num_kv_heads=2, hidden_dim=320, max_seq_len=SEQ_LEN)
    )
    model.init_weights()
    gtp_shard(model.to(accelerator.device), init_device_mesh(accelerator.device.type, (accelerator.num_processes,)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    scheduler = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)  # warms up
    corpus = load_corpus()
    model, optimizer, scheduler, train, held_out = accelerator.prepare(
        model, optimizer, scheduler, windows(corpus.train, shuffle=True), windows(corpus.held_out[: 2**14])
    )
    first = 0
    if options.resume:
        accelerator.load_state(str(options.folder / "checkpoint"))
        first = accelerator.step // MICROBATCHES
    for rows in accelerator.skip_first_batches(train, first * MICROBATCHES):
        if accelerator.step // MICROBATCHES == options.steps:
            break
        with accelerator.accumulate(model):
            accelerator.backward(loss_of(model.train(), rows))
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    with torch.no_grad():
        losses = [accelerator.gather_for_metrics(loss_of(model.eval(), rows)[None]) for rows in held_out]
    accelerator.print(f"validation loss {torch.cat(losses).mean():.4f} after {options.steps} steps")
    accelerator.save_state(str(options.folder / "checkpoint"))
    accelerator.save_model(model, str(options.folder / "model"))
    accelerator.end_training()


if __name__ == "__main__":
    main()
