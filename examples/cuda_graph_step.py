"""Trains a byte-level language model with the whole step as one CUDA graph; two microbatches in each.

torchrun --nproc-per-node 2 examples/cuda_graph_step.py

Forward, backward, clipping and the optimizer are recorded once and replayed: the host launches one graph in place of
thousands of kernels, which is what short steps wait for. On a CPU the same function runs as it is.
"""

from argparse import ArgumentParser
from time import perf_counter

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh

from dtensor_gtp import capture_step, gtp_shard
from launch import run, start
from llama import Llama, LlamaConfig
from text_data import VOCAB_SIZE, TextBatches, load_corpus


def main() -> None:
    parser = ArgumentParser(description="Train with gtp_shard in a CUDA graph.")
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--eager", action="store_true", help="the same steps without the graph")
    options, place = parser.parse_args(), start()
    torch.manual_seed(0)  # all ranks build the same model, of which each will keep its part
    sizes = {"dim": 128, "num_layers": 4, "num_heads": 4, "num_kv_heads": 2, "hidden_dim": 352, "max_seq_len": 64}
    model = Llama(LlamaConfig(VOCAB_SIZE, **sizes))
    gtp_shard(model, init_device_mesh(place.device.type, (place.world_size,), mesh_dim_names=("gtp",)))
    is_captured = place.device.type == "cuda" and not options.eager
    # A number would be baked into the graph: a learning rate that changes is a tensor on the GPU.
    lr = torch.tensor(3e-3, device=place.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, fused=True, capturable=is_captured)

    def train_step(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        total = torch.zeros((), device=inputs.device)
        for micro_inputs, micro_targets in zip(inputs.chunk(2), targets.chunk(2), strict=True):
            loss = F.cross_entropy(model(micro_inputs).flatten(0, 1), micro_targets.flatten()) / 2
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        return total

    step = capture_step(train_step, model, optimizer) if is_captured else train_step
    shape = {"seq_len": 64, "batch_size": 8, "seed": 0, "rank": place.rank, "world_size": place.world_size}
    batches = TextBatches(load_corpus()[0].to(place.device), **shape)
    begin = perf_counter()
    for index in range(options.steps):
        lr.fill_(3e-3 * min(1.0, (index + 1) / 10))
        batch = batches(index)
        loss = step(batch.inputs, batch.targets)
        if index in (0, options.steps - 1):
            place.print_once(f"step {index + 1}: loss {place.mean_over_ranks(loss):.4f}")
    how = "in a CUDA graph" if is_captured else "eager"
    place.print_once(f"{options.steps} steps, {how}: {(perf_counter() - begin) / options.steps * 1e3:.1f} ms each")


if __name__ == "__main__":
    run(main)
