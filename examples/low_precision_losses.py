"""Trains one small model with each recipe of ``quantize_`` and compares their losses on held-out text.

    python examples/low_precision_losses.py --plot docs/images/low_precision_losses.svg

One process, on the CPU: under ``gtp_shard`` the arithmetic is the same. ``NAME`` dequantizes the weights for ordinary
GEMMs; ``NAME:float8`` multiplies in float8, too, by the reference arithmetic, and scales the activations of the whole
batch together. Each run starts from the same parameters and sees the same batches; the linear layers of all blocks are
quantized, embedding and head are not. ``bf16`` quantizes nothing and computes in bfloat16, by autocast. Prints a table
in Markdown; with ``--plot`` writes the curves as an SVG, for which nothing has to be installed. Exits with 1 if a loss
is further from that without a recipe, or from that of ``bf16``, than the margins below.
"""

import argparse
import sys
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn as nn
import torch.nn.functional as F

from dtensor_gtp import quantize_
from dtensor_gtp.quant import RECIPES, Recipe, resolve_recipe
from llama import Llama, LlamaConfig
from text_data import VOCAB_SIZE, TextBatches, load_corpus

CONFIG = LlamaConfig(
    vocab_size=VOCAB_SIZE, dim=96, num_layers=3, num_heads=4, num_kv_heads=2, hidden_dim=256, max_seq_len=128
)
COLORS = ("#000000", "#1f77b4", "#2ca02c", "#9467bd", "#ff7f0e", "#d62728", "#8c564b", "#e377c2", "#17becf", "#7f7f7f")
ALL = ("bf16", *RECIPES, *(f"{name}:float8" for name in RECIPES if name.startswith("float8")))
WIDTH, HEIGHT, MARGIN = 640, 360, 48
# How far a loss may be from that of the run without a recipe, on either side, of the latter.
MARGIN_DEQUANTIZED, MARGIN_FLOAT8 = 0.003, 0.005
# And from that of bf16.
MARGIN_BF16 = 0.005


class Curve(NamedTuple):
    """Held-out losses of one run: pairs of step and mean loss per byte in nats."""

    name: str
    points: list[tuple[int, float]]


def recipe_of(name: str) -> Recipe:
    """The recipe of NAME or NAME:COMPUTE."""
    plain, _, compute = name.partition(":")
    recipe = resolve_recipe(plain)
    return replace(recipe, compute=compute) if compute else recipe


def run(recipe: str | None, steps: int, every: int, lr: float) -> Curve:
    """Train from the same start as every other run."""
    corpus = load_corpus()
    batches = TextBatches(corpus.train, seq_len=CONFIG.max_seq_len, batch_size=8, seed=0, rank=0, world_size=1)
    held_out = TextBatches(corpus.held_out, seq_len=CONFIG.max_seq_len, batch_size=64, seed=0, rank=0, world_size=1)
    torch.manual_seed(0)
    model = Llama(CONFIG)
    if recipe is not None and recipe != "bf16":
        quantize_(
            model, recipe_of(recipe), filter_fn=lambda module, name: isinstance(module, nn.Linear) and "layers" in name
        )
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    curve = Curve(recipe or "not quantized", [])
    for step in range(steps + 1):
        if step % every == 0:
            with torch.no_grad():
                curve.points.append((step, loss_of(model, held_out, 0, recipe).item()))
        if step == steps:
            break
        for group in optimizer.param_groups:
            group["lr"] = lr * min(1.0, (step + 1) / 20)
        loss_of(model, batches, step, recipe).backward()
        optimizer.step()
        optimizer.zero_grad()
    return curve


def loss_of(model: nn.Module, batches: TextBatches, step: int, recipe: str | None) -> torch.Tensor:
    inputs, targets = batches(step)
    with torch.autocast("cpu", torch.bfloat16, enabled=recipe == "bf16"):
        return F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())


def table(curves: list[Curve]) -> str:
    """The last loss of each run, and how far it is from the first run's."""
    base = curves[0].points[-1][1]
    lines = ["| recipe | held-out loss | difference |", "|---|---|---|"]
    for name, points in curves:
        loss = points[-1][1]
        lines.append(f"| {name} | {loss:.4f} | {loss - base:+.4f} ({(loss / base - 1) * 100:+.2f}%) |")
    return "\n".join(lines)


def beyond_margins(curves: list[Curve]) -> list[str]:
    """Names of the runs whose last loss is too far from the first run's, or from that of bf16 if it is among them."""
    last = {name: points[-1][1] for name, points in curves}
    base = last[curves[0].name]
    beyond = []
    for name, loss in last.items():
        margin = MARGIN_FLOAT8 if ":" in name else MARGIN_DEQUANTIZED
        is_near = abs(loss / base - 1) <= margin and abs(loss / last.get("bf16", loss) - 1) <= MARGIN_BF16
        if not is_near:
            beyond.append(name)
    return beyond


def svg(curves: list[Curve]) -> str:
    """All curves in one picture."""
    losses = [loss for curve in curves for _, loss in curve.points]
    last, low, high = curves[0].points[-1][0], min(losses), max(losses)

    def place(step: int, loss: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * step / last
        y = MARGIN + (HEIGHT - 2 * MARGIN) * (high - loss) / (high - low)
        return f"{x:.1f},{y:.1f}"

    parts = [f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif">']
    parts.append(f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>')
    for loss in (low, high):
        x, y = place(0, loss).split(",")
        parts.append(f'<text x="{float(x) - 40}" y="{y}" font-size="12">{loss:.2f}</text>')
    parts.append(f'<text x="{WIDTH / 2}" y="{HEIGHT - 12}" font-size="12">step (0 to {last})</text>')
    for index, (curve, color) in enumerate(zip(curves, COLORS, strict=False)):
        points = " ".join(place(*point) for point in curve.points)
        parts.append(f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        y = MARGIN + 16 * index
        parts.append(f'<text x="{WIDTH - 200}" y="{y}" font-size="12" fill="{color}">{curve.name}</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--every", type=int, default=20, help="steps between evaluations; divides --steps")
    parser.add_argument("--lr", type=float, default=3e-3)
    parser.add_argument("--recipes", nargs="*", default=list(ALL), help="of " + ", ".join(ALL))
    parser.add_argument("--plot", type=Path, help="write the curves to this SVG file")
    options = parser.parse_args()
    if options.every < 1 or options.steps % options.every:
        parser.error(f"--every {options.every} does not divide --steps {options.steps}")
    curves = [run(recipe, options.steps, options.every, options.lr) for recipe in (None, *options.recipes)]
    print(table(curves))
    if options.plot is not None:
        options.plot.write_text(svg(curves))
    beyond = beyond_margins(curves)
    if beyond:
        sys.exit(f"beyond the margins: {', '.join(beyond)}")


if __name__ == "__main__":
    main()
