"""Times a Llama over several mesh axes: ``gtp_shard`` beside ``fully_shard`` on the same axes.

    torchrun --nproc-per-node 4 examples/benchmarks/mesh_axes.py --json axes.json

Each mode trains the same model; N is the number of processes:

    fsdp2, gtp            sharded over all N
    hsdp, replicate       two replicas, each sharded over N / 2
    shard_optimizer       as replicate, each replica with its part of the optimizer's states
    fsdp2-tp, tp          tensor-parallel pairs, sharded over N / 2; a pair has the same tokens

and of a mixture of experts of the same depth:

    fsdp2-moe, gtp-moe    sharded over all N
    ep                    two ranks have different experts, each sharded over N / 2; all else over all N

Prints one line of JSON for each mode, of the slowest process: medians in ms of forward and backward (``ms``) and of the
whole step with AdamW (``step_ms``), peak memory in GiB with symmetric memory, and the mean loss.
"""

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from dtensor_gtp import gtp_shard, init_weight_mesh, sharding_report
from dtensor_gtp.nn import parallelize_experts
from harness import MemoryMeter, World, allocate_workspaces, init_world, median, release_memory, time_steps
from launch import UsageError, run
from llama import Llama, LlamaConfig
from moe import MoEConfig, MoELlama
from peers import shard_blocks
from report import environment, write_json

FSDP2 = ("fsdp2", "hsdp", "fsdp2-tp", "fsdp2-moe")
MOE = ("fsdp2-moe", "gtp-moe", "ep")
MODES = ("fsdp2", "gtp", "hsdp", "replicate", "shard_optimizer", "fsdp2-tp", "tp", *MOE)
PRESETS = {
    "llama8b-width": LlamaConfig(
        128256, dim=4096, num_layers=8, num_heads=32, num_kv_heads=8, hidden_dim=14336, max_seq_len=8192
    ),
    "tiny": LlamaConfig(512, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=160, max_seq_len=64),
}
# Experts of DeepSeek-V2-Lite.
MOE_PRESETS = {
    "llama8b-width": MoEConfig(
        32000,
        dim=2048,
        num_layers=8,
        num_heads=16,
        num_kv_heads=16,
        hidden_dim=6 * 1408,
        max_seq_len=8192,
        num_experts=64,
        top_k=6,
    ),
    "tiny": MoEConfig(
        512, dim=64, num_layers=2, num_heads=4, num_kv_heads=2, hidden_dim=64, max_seq_len=64, num_experts=4, top_k=2
    ),
}


def to_tensor_parallel(model: Llama, tp: DeviceMesh) -> None:
    """Without sequence parallelism: activations are whole between the halves of a block."""
    plan: dict[str, Any] = {
        f"layers.*.{name}": ColwiseParallel()
        for name in ("attention.wq", "attention.wk", "attention.wv", "ffn.w1", "ffn.w3")
    }
    plan |= {f"layers.*.{name}": RowwiseParallel() for name in ("attention.wo", "ffn.w2")}
    plan["embedding"] = RowwiseParallel(input_layouts=Replicate())
    plan["output"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(model, tp, plan)


def build(mode: str, preset: str, world: World) -> Llama:
    """The sharded model with the same initial values in all modes of a model."""
    with torch.device("meta"):
        model = MoELlama(MOE_PRESETS[preset]) if mode in MOE else Llama(PRESETS[preset])
    model.to_empty(device=world.device)
    torch.manual_seed(0)
    model.init_weights()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    half = world.size // 2
    kind = world.device.type
    if mode in FSDP2:
        shape, names = {
            "fsdp2": ((world.size,), ("dp",)),
            "fsdp2-moe": ((world.size,), ("dp",)),
            "hsdp": ((2, half), ("replicate", "dp")),
            "fsdp2-tp": ((half, 2), ("dp", "tp")),
        }[mode]
        mesh = init_device_mesh(kind, shape, mesh_dim_names=names)
        if mode == "fsdp2-tp":
            to_tensor_parallel(model, mesh["tp"])
            mesh = mesh["dp"]
        shard_blocks(model, mesh, policy)
        return model
    axes = {
        "gtp": {"gtp": world.size},
        "gtp-moe": {"gtp": world.size},
        "ep": {"gtp": world.size, "ep": 2, "expert_gtp": half},
        "tp": {"gtp": half, "tp": 2},
    }
    weight_mesh = init_weight_mesh(kind, **axes.get(mode, {"replicate": 2, "gtp": half}))
    if mode == "tp":
        to_tensor_parallel(model, weight_mesh["tp"])
    for moe in model.moes if mode == "ep" and isinstance(model, MoELlama) else ():
        parallelize_experts(moe.experts, weight_mesh["ep"])
        gtp_shard(moe.experts.mlp, weight_mesh.expert_weights, mp_policy=policy)
        moe.experts.mlp.set_gradient_divide_factor(world.size)
    gtp_shard(model, weight_mesh.weights, mp_policy=policy, shard_optimizer=mode == "shard_optimizer")
    return model


def measure(mode: str, options: argparse.Namespace, world: World) -> dict[str, Any]:
    leftover = release_memory(world)
    model = build(mode, options.preset, world)
    vocab_size = model.config.vocab_size
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    sequence = world.rank // 2 if mode in ("tp", "fsdp2-tp") else world.rank
    generator = torch.Generator(world.device).manual_seed(1000 + sequence)
    tokens = torch.randint(vocab_size, (1, options.seq_len + 1), device=world.device, generator=generator)
    losses = []

    def backward() -> None:
        optimizer.zero_grad()
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1).float(), tokens[:, 1:].flatten())
        losses.append(loss.detach())
        loss.backward()

    def step() -> None:
        backward()
        optimizer.step()

    time_steps(step, world, options.warmup, free_running=False)
    meter = MemoryMeter(world, model, optimizer, leftover)
    step_ms = median(time_steps(step, world, options.steps, free_running=False))
    symmetric = 0 if mode in FSDP2 else sharding_report(model).symmetric_nbytes
    memory = meter.read(step, symmetric, is_graph=False)
    ms = median(time_steps(backward, world, options.steps, free_running=False))
    first = world.mean(losses[0].item())
    peak = None if memory is None or memory.peak is None else round(memory.peak / 2**30, 2)
    return {"mode": mode, "ms": round(ms, 2), "step_ms": round(step_ms, 2), "peak_gib": peak, "loss": first}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--modes", nargs="+", choices=MODES, default=list(MODES))
    add("--preset", choices=PRESETS, default="llama8b-width")
    add("--seq-len", type=int, default=2048, metavar="T", help="tokens of one process")
    add("--steps", type=int, default=10, help="timed steps; their median is reported")
    add("--warmup", type=int, default=5, help="steps before them")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--json", type=Path, metavar="FILE", help="write everything measured")
    options = parser.parse_args()
    world = init_world(options.device)
    if world.size % 2:
        raise UsageError(f"mesh_axes expects an even number of processes, but got {world.size}.")
    if world.is_cuda:
        allocate_workspaces(world)
    results = []
    for mode in options.modes:
        results.append(measure(mode, options, world))
        world.say(json.dumps(results[-1]))
    if options.json and world.rank == 0:
        write_json(options.json, {"environment": environment(world), "results": results})


if __name__ == "__main__":
    run(main)
