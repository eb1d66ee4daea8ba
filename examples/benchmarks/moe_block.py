"""Times the experts of a mixture of experts under ``gtp_shard`` beside their peers, forward and backward.

    torchrun --nproc-per-node 8 examples/benchmarks/moe_block.py --json moe.json
    torchrun --nproc-per-node 2 examples/benchmarks/moe_block.py --preset tiny       # also on a CPU, in seconds

Several blocks of experts, one after the other, on rows that are sorted by expert already: grouped GEMMs and the
exchange of weights and gradients, without routing. The modes:

- ``compute``: ``grouped_mm`` on whole bf16 weights, no communication: the bound;
- ``gtp``: ``gtp_shard``, each expert's weights over all processes;
- ``fsdp2``: ``fully_shard`` on each block, cut along the same dim.

Every process has its own tokens and its own counts, drawn once from a skewed distribution of experts. All modes have
the same initial weights; the mean square of the output is recorded, on which they agree.
"""

import argparse
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn as nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard

from harness import World, init_world, median, release_memory, time_steps  # first: it makes examples/ importable
from launch import run
from report import describe, environment, markdown_table, write_json

MODES = ("compute", "gtp", "fsdp2")
# Of each row: a product in forward and two in backward, of two operations for each element of a weight.
_FLOPS_PER_WEIGHT = 2 * 3


@dataclasses.dataclass(frozen=True)
class Preset:
    """Sizes of one block and what it is measured at by default.

    Args:
        dim: width of tokens.
        hidden_dim: inner width of each expert.
        num_experts: experts of a block.
        top_k: experts of a token.
        blocks: blocks, one after the other.
        tokens: tokens of each process.
    """

    dim: int
    hidden_dim: int
    num_experts: int
    top_k: int
    blocks: int
    tokens: tuple[int, ...]


PRESETS = {
    "deepseek-v2-lite": Preset(2048, 1408, num_experts=64, top_k=6, blocks=4, tokens=(8192, 32768)),
    "mixtral": Preset(4096, 14336, num_experts=8, top_k=2, blocks=3, tokens=(8192, 32768)),
    "tiny": Preset(32, 48, num_experts=4, top_k=2, blocks=2, tokens=(16, 64)),
}


class Blocks(nn.Module):
    """Blocks of experts with residual connections, all on the same counts."""

    def __init__(self, preset: Preset) -> None:
        super().__init__()
        from dtensor_gtp.nn import GroupedMLP

        sizes = (preset.num_experts, preset.dim, preset.hidden_dim)
        self.blocks = nn.ModuleList(GroupedMLP(*sizes) for _ in range(preset.blocks))

    def forward(self, rows: torch.Tensor, split_sizes: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            rows = rows + block(rows, split_sizes)
        return rows


def build(mode: str, preset: Preset, world: World, seed: int) -> Blocks:
    """The blocks with the same fp32 weights in each mode, prepared for ``mode``; they compute in bf16."""
    with torch.device("meta"):
        model = Blocks(preset)
    model.to_empty(device=world.device)
    torch.manual_seed(seed)
    for param in model.parameters():
        nn.init.normal_(param, std=param.shape[-1] ** -0.5)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    if mode == "compute":
        return model.bfloat16()
    mesh = init_device_mesh(world.device.type, (world.size,), mesh_dim_names=("gtp",))
    if mode == "fsdp2":
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, shard_placement_fn=lambda param: Shard(1))
        return fully_shard(model, mesh=mesh, mp_policy=policy)

    from dtensor_gtp import gtp_shard

    return gtp_shard(model, mesh, mp_policy=policy)


def make_step(model: nn.Module, preset: Preset, tokens: int, world: World, seed: int) -> Callable[[], torch.Tensor]:
    """Forward and backward on fixed rows; returns the mean square of the output."""
    generator = torch.Generator().manual_seed(seed * 1000 + world.rank)
    popularity = torch.rand(preset.num_experts, generator=generator).square() + 0.05
    chosen = torch.multinomial(popularity.expand(tokens, -1), preset.top_k, generator=generator)
    splits = torch.bincount(chosen.flatten(), minlength=preset.num_experts).to(world.device)
    rows = torch.randn(tokens * preset.top_k, preset.dim, generator=generator).to(world.device, torch.bfloat16)
    rows.requires_grad_()

    def step() -> torch.Tensor:
        output = model(rows, splits)
        loss = output.float().square().mean()
        loss.backward()
        rows.grad = None
        for param in model.parameters():
            param.grad = None
        return loss.detach()

    return step


def measure(mode: str, preset: Preset, tokens: list[int], world: World, options: Any) -> list[dict[str, Any]]:
    model = build(mode, preset, world, options.seed)
    results = []
    for count in tokens:
        step = make_step(model, preset, count, world, options.seed)
        loss = world.mean(step().item())
        for _ in range(options.warmup - 1):
            step()
        samples = time_steps(step, world, options.steps, free_running=False)
        ms = median(samples)
        weights = 3 * preset.dim * preset.hidden_dim * preset.blocks
        tflops = _FLOPS_PER_WEIGHT * weights * count * preset.top_k / ms / 1e9
        results.append({"mode": mode, "tokens": count, "ms": ms, "samples_ms": samples, "tflops": tflops, "loss": loss})
        world.say(f"{mode}, {count} tokens: {ms:.2f} ms")
    return results


def table(results: list[dict[str, Any]]) -> str:
    """The last column is the bound's time over the mode's."""
    bound = {r["tokens"]: r["ms"] for r in results if r["mode"] == "compute"}
    lines = [
        [
            r["mode"],
            str(r["tokens"]),
            f"{r['ms']:.2f}",
            f"{r['tflops']:.1f}",
            f"{bound[r['tokens']] / r['ms']:.2f}" if r["tokens"] in bound else "n/a",
        ]
        for r in results
    ]
    return markdown_table(["mode", "tokens/GPU", "ms", "TFLOP/s/GPU", "of compute"], lines)


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--preset", choices=PRESETS, default="deepseek-v2-lite")
    add("--modes", nargs="+", choices=MODES, default=list(MODES))
    add("--tokens", nargs="+", type=int, metavar="T", help="tokens of each process; default: the preset's")
    add("--steps", type=int, default=10, help="timed steps; their median is reported")
    add("--warmup", type=int, default=4, help="steps before them")
    add("--device", choices=("auto", "cpu", "cuda"), default="auto")
    add("--seed", type=int, default=0)
    add("--json", type=Path, metavar="FILE", help="write everything measured")
    return parser.parse_args()


def main() -> None:
    options = parse_arguments()
    world = init_world(options.device)
    preset = PRESETS[options.preset]
    about = environment(world)
    world.say(describe(about))
    results: list[dict[str, Any]] = []
    errors: dict[str, str] = {}
    for mode in options.modes:
        release_memory(world)
        tokens = options.tokens or list(preset.tokens)
        measured, error = world.guarded(mode, lambda m=mode, t=tokens: measure(m, preset, t, world, options))
        results += measured or []
        if error is not None:
            errors[mode] = error
    world.say("\n" + table(results))
    if options.json is not None and world.rank == 0:
        settings = {"preset": options.preset, "steps": options.steps, "warmup": options.warmup}
        content = {"environment": about, "workload": dataclasses.asdict(preset), "settings": settings}
        write_json(options.json, {**content, "results": results, "errors": errors})
    world.barrier()
    if errors:
        raise RuntimeError(f"failed: {errors}")


if __name__ == "__main__":
    run(main)
