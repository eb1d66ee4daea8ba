"""Training steps of stock models of transformers and timm: ``gtp_shard`` beside ``fully_shard`` and the plain model.

    torchrun --nproc-per-node 2 examples/benchmarks/real_models.py bert:4096 llama:2048 --modes plain fsdp2 gtp

A case is MODEL:TOKENS, the tokens of one rank (clip, wav2vec2: samples), or NAME:IMAGES of any model of timm. All modes
have the same weights and the same data, in one job:

    plain    the model in bf16 on each GPU, without sharding and without communication
    fsdp2    ``fully_shard`` on each block and on the root, as its documentation shows
    gtp      ``gtp_shard(model, mesh, mp_policy=...)`` and nothing else
    MODE-c   the same with each block compiled

    gtp@RECIPE, gtp@RECIPE-c   blocks in that recipe of ``quantize_``, e.g. gtp@float8_tensorwise
    MODE+recompute             blocks of transformers are checkpointed; +save, +offload: products of weights are not
                               recomputed but saved on the device, or on the host by ``SelectiveOffload``

Prints one line of JSON for each case and mode, of the slowest rank: medians in ms of forward and backward (``fb_ms``),
of the host until ``backward()`` has returned (``host_ms``) and of the step with AdamW (``step_ms``); the first step in
ms; peak memory in GiB, allocated and reserved; the mean loss of the first and of the last step. With ``--rounds N`` the
modes of a case take turns N times, and numbers are medians of the rounds, because a host's speed drifts within a job.
With ``--table``, a table of ratios follows.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.checkpoint import create_selective_checkpoint_contexts, noop_context_fn

from dtensor_gtp import SelectiveOffload, gtp_shard, quantize_
from dtensor_gtp.quant import RECIPES
from models import MODELS, Batch, model_of

WARMUP_STEPS = 5
MODES = ("plain", "fsdp2", "gtp")
PRODUCTS = [torch.ops.aten.mm.default, torch.ops.aten.addmm.default]
CONTEXTS: dict[str, Callable[[], Any]] = {
    "recompute": noop_context_fn,
    "save": partial(create_selective_checkpoint_contexts, PRODUCTS),
    "offload": SelectiveOffload(PRODUCTS),
}


def prepare(mode: str, model: nn.Module, blocks: list[nn.Module], mesh: DeviceMesh) -> None:
    """Checkpoint, compile and shard ``model`` as ``mode`` says, in place."""
    mode, _, what = mode.partition("+")
    if what:
        model.gradient_checkpointing_enable({"use_reentrant": False, "context_fn": CONTEXTS[what]})
    if mode.endswith("-c"):
        torch._dynamo.reset()
        for block in blocks:
            block.compile()
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    base, _, recipe = mode.removesuffix("-c").partition("@")
    if base == "plain":
        model.to(torch.bfloat16)
    elif base == "fsdp2":
        for block in blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy)
        fully_shard(model, mesh=mesh, mp_policy=policy)
    else:
        for block in blocks if recipe else ():
            quantize_(block, recipe)
        gtp_shard(model, mesh, mp_policy=policy)


def _cast_floats(batch: Batch, mode: str) -> Batch:
    if not mode.startswith("plain"):
        return batch  # the policy casts inputs
    return {name: value.bfloat16() if value.is_floating_point() else value for name, value in batch.items()}


def measure(case: str, mode: str, mesh: DeviceMesh, device: torch.device, num_steps: int) -> dict[str, Any]:
    """One row: a case in a mode."""
    name, tokens = case.split(":")
    torch.manual_seed(0)
    with torch.device(device):
        model, blocks, make_batch = model_of(name)(int(tokens))
    num_params = sum(param.numel() for param in model.parameters())
    prepare(mode, model, blocks, mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    generator = torch.Generator(device=device).manual_seed(1000 + dist.get_rank())
    times: dict[str, list[float]] = {"host_ms": [], "fb_ms": [], "step_ms": []}
    losses = []
    torch.cuda.reset_peak_memory_stats()
    for _ in range(WARMUP_STEPS + num_steps):
        batch = _cast_floats(make_batch(device, generator), mode)
        dist.barrier()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        loss = model(**batch).loss
        loss.backward()
        times["host_ms"].append(time.perf_counter() - begin)
        torch.cuda.synchronize()
        times["fb_ms"].append(time.perf_counter() - begin)
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()
        times["step_ms"].append(time.perf_counter() - begin)
        losses.append(float(loss.detach()))
    found = {key: statistics.median(values[WARMUP_STEPS:]) * 1e3 for key, values in times.items()}
    found["first_ms"] = times["step_ms"][0] * 1e3
    found["peak_gib"] = torch.cuda.max_memory_allocated() / 2**30
    found["reserved_gib"] = torch.cuda.max_memory_reserved() / 2**30
    slowest = torch.tensor([*found.values()], device=device, dtype=torch.float64)
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    mean = torch.tensor([losses[0], losses[-1]], device=device, dtype=torch.float64)
    dist.all_reduce(mean, dist.ReduceOp.AVG)
    values = {key: round(value, 2) for key, value in zip(found, slowest.tolist(), strict=True)}
    return {"case": case, "mode": mode, "params": num_params, **values, "losses": mean.tolist()}


def median_row(rounds: list[dict[str, Any]]) -> dict[str, Any]:
    """The rows of one case and mode as one."""
    names = [name for name, value in rounds[0].items() if isinstance(value, float)]
    medians = {name: round(statistics.median(row[name] for row in rounds), 2) for name in names}
    spread = [row["fb_ms"] for row in rounds]
    return {**rounds[0], **medians, **({"rounds_fb_ms": spread} if len(rounds) > 1 else {})}


def table(rows: list[dict[str, Any]]) -> str:
    """Forward and backward of each case beside ``fully_shard``, and the host's time beside the plain model's."""
    lines = [
        "|model, tokens|mode|ms|times as fast|host beside plain|peak GiB|first step ms|",
        "|---|---|---|---|---|---|---|",
    ]
    by_case: dict[str, dict[str, dict[str, Any]]] = {}
    for row in rows:
        by_case.setdefault(row["case"], {})[row["mode"]] = row
    for case, modes in by_case.items():
        for mode, row in modes.items():
            _, plus, what = mode.partition("+")
            suffix = plus + what or ("-c" if mode.endswith("-c") else "")
            peer, plain = modes.get("fsdp2" + suffix), modes.get("plain" + suffix)
            ratio = f"{peer['fb_ms'] / row['fb_ms']:.2f}" if peer else ""
            host = f"{row['host_ms'] / plain['host_ms']:.1f}" if plain else ""
            numbers = f"{row['fb_ms']:.1f}|{ratio}|{host}|{row['peak_gib']:.2f}|{row['first_ms']:.0f}"
            lines.append(f"|{case.replace(':', ', ')}|{mode}|{numbers}|")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="+", metavar="MODEL:TOKENS", help=", ".join(MODELS) + ", models of timm")
    eager = [*MODES, *(f"gtp@{recipe}" for recipe in RECIPES)]
    choices = [*eager, *(mode + "-c" for mode in eager), *(f"{mode}+{what}" for mode in MODES for what in CONTEXTS)]
    parser.add_argument("--modes", nargs="+", default=list(MODES), choices=choices)
    parser.add_argument("--steps", type=int, default=8, help="measured steps, after the warm-up")
    parser.add_argument("--rounds", type=int, default=1, help="in which the modes of a case take turns")
    parser.add_argument("--table", action="store_true", help="print a table of ratios at the end")
    options = parser.parse_args()
    warnings.filterwarnings("ignore")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    mesh = init_device_mesh("cuda", (dist.get_world_size(),), mesh_dim_names=("gtp",))
    rows = []
    for case in options.cases:
        by_mode: dict[str, list[dict[str, Any]]] = {mode: [] for mode in options.modes}
        for _ in range(options.rounds):
            for mode, rounds in by_mode.items():
                rounds.append(measure(case, mode, mesh, device, options.steps))
                gc.collect()
                torch.cuda.empty_cache()
                dist.barrier()
        for rounds in by_mode.values():
            rows.append(median_row(rounds))
            if dist.get_rank() == 0:
                print(json.dumps(rows[-1]), flush=True)
    if options.table and dist.get_rank() == 0:
        print(table(rows))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
