"""What casts of low precision take, and what they leave of a float8 linear layer's gain: one process, one GPU.

    python examples/benchmarks/cast_speed.py

First table: each recipe's casts of an activation, of a gradient for wgrad, of a shard and of a gathered weight, by the
reference (op by op), fused (what runs outside of compiled code) and, with ``--compiled all``, by ``torch.compile``.
Second table: forward and backward of one linear layer with a gathered weight, bf16 and float8, with each of these
casts. What is compiled here are casts alone, not fused with what is before them as in compiled blocks.

``ms`` is the GPU's time: calls are recorded in a CUDA graph and replayed, on inputs that together exceed the caches.
``host us`` is the time that Python takes to launch one call. On a CPU, where casts are always the reference and nothing
is to be learned from times, both are those of a call; ``--tiny`` makes that quick.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from dtensor_gtp.quant import RECIPES, Direction, Recipe
from dtensor_gtp.quant.casts import describe_casts
from harness import median
from report import markdown_table

_ENV = "DTENSOR_GTP_CASTS"
WAYS = ("reference", "fused", "compiled")  # to cast
# More than the second-level cache of an H200, 50 MB, holds.
_TOTAL_BYTES = 200e6


class Sizes(NamedTuple):
    """Of the measured matrices: a linear layer of Llama 3 8B's feed-forward, sharded over eight ranks."""

    tokens: tuple[int, ...] = (2048, 8192)
    in_features: int = 4096
    out_features: int = 14336
    num_ranks: int = 8


TINY = Sizes(tokens=(32, 64), in_features=128, out_features=256, num_ranks=2)


class Cast(NamedTuple):
    """One row of the first table.

    Args:
        make: an input, a new one for each call.
        call: from an input to tensors.
    """

    recipe: str
    name: str
    make: Callable[[], Any]
    call: Callable[[Any], Any]


class Times(NamedTuple):
    """Of one call."""

    ms: float
    host_us: float


@contextmanager
def cast_by(way: str) -> Iterator[None]:
    """Chooses the casts of what runs inside."""
    before = os.environ.get(_ENV)
    os.environ[_ENV] = "reference" if way == "reference" else "auto"
    try:
        yield
    finally:
        os.environ.pop(_ENV)
        if before is not None:
            os.environ[_ENV] = before


def compiled(call: Callable[..., Any]) -> Callable[..., Any]:
    """``call`` by itself as compiled code."""
    return torch.compile(lambda *inputs: call(*inputs), fullgraph=True, dynamic=False)


def tensors_in(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [] if value is None else [tensor for part in value for tensor in tensors_in(part)]


def num_bytes(value: Any) -> int:
    return sum(tensor.numel() * tensor.itemsize for tensor in tensors_in(value))


def measure(
    way: str, make_call: Callable[[], Callable[[Any], Any]], inputs: list[Any], device: torch.device, repeats: int
) -> Times | None:
    """Medians over ``repeats`` passes over all inputs, cast in one way; None if it fails, and stderr says why."""
    torch._dynamo.reset()  # what else has been compiled counts towards its limit
    try:
        with cast_by(way):
            return time_call(make_call(), inputs, device, repeats)
    except Exception as error:
        print(f"{way}: {type(error).__name__}: {error}", file=sys.stderr)
        return None


def time_call(call: Callable[[Any], Any], inputs: list[Any], device: torch.device, repeats: int) -> Times:
    """Medians over ``repeats`` passes over all inputs."""

    def run() -> None:
        for value in inputs:
            call(value)

    for _ in range(3):
        run()
    if device.type != "cuda":
        host = [_wall(run) for _ in range(repeats)]
        return Times(median(host) / len(inputs) * 1e3, median(host) / len(inputs) * 1e6)
    host = []
    for _ in range(repeats):
        torch.cuda.synchronize(device)
        host.append(_wall(run))
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    graph.replay()
    elapsed = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        elapsed.append(start.elapsed_time(end))
    graph.reset()
    return Times(median(elapsed) / len(inputs), median(host) / len(inputs) * 1e6)


def _wall(run: Callable[[], None]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def casts_of(recipe: Recipe, sizes: Sizes, device: torch.device) -> list[Cast]:
    """The casts of one recipe."""
    draw = partial(torch.randn, device=device)
    tokens, shape = sizes.tokens[-1], torch.Size((sizes.out_features, sizes.in_features))

    def shard() -> torch.Tensor:
        return draw(sizes.out_features // sizes.num_ranks, sizes.in_features)

    casts = []
    if recipe.amax_dims:
        casts.append(Cast(recipe.name, "shard: amax", shard, recipe.amax))
    for direction in Direction if recipe.has_columnwise else (Direction.ROWWISE,):
        which = f", {direction.name.lower()}" if recipe.has_columnwise else ""

        def quantize(values: Any, direction: Direction = direction) -> Any:
            return recipe.quantize(values[0], direction, values[1]).planes

        def gathered(direction: Direction = direction) -> Any:
            return recipe.quantize(draw(*shape), direction)

        def dequantize(quantized: Any, direction: Direction = direction) -> torch.Tensor:
            return recipe.dequantize(quantized, shape, direction, torch.bfloat16)

        def shard_and_amax() -> Any:
            values = shard()
            return values, recipe.amax(values)

        casts.append(Cast(recipe.name, f"shard: quantize{which}", shard_and_amax, quantize))
        casts.append(Cast(recipe.name, f"weight: dequantize{which}", gathered, dequantize))
    if recipe.has_gemms:
        gemms = recipe.gemms(on_hardware=device.type == "cuda")

        def activation() -> torch.Tensor:
            return draw(tokens, sizes.in_features).bfloat16()

        def both() -> Any:
            grad = activation()
            return grad, activation(), gemms.cast_grad(grad)

        casts.append(Cast(recipe.name, "activation", activation, gemms.cast_input))
        if recipe.name != "float8_rowwise":
            casts.append(Cast(recipe.name, "gradient", activation, gemms.cast_grad))
            casts.append(Cast(recipe.name, "both for wgrad", both, lambda values: gemms.cast_wgrad(*values)))
    return casts


def time_casts(
    names: list[str], ways: list[str], sizes: Sizes, device: torch.device, repeats: int
) -> list[dict[str, Any]]:
    """Records of the first table."""
    records = []
    for cast in [cast for name in names for cast in casts_of(RECIPES[name](), sizes, device)]:
        first = cast.make()
        moved = num_bytes(first) + num_bytes(cast.call(first))
        copies = max(min(int(_TOTAL_BYTES / max(num_bytes(first), 1)), 16), 2) if device.type == "cuda" else 1
        inputs = [first, *(cast.make() for _ in range(copies - 1))]
        record: dict[str, Any] = {"recipe": cast.recipe, "cast": cast.name, "bytes": moved}
        for way in ways:
            make_call = partial(compiled if way == "compiled" else lambda call: call, cast.call)
            times = measure(way, make_call, inputs, device, repeats)
            record[way] = times and times._asdict()
        records.append(record)
    return records


def linear_step(recipe: Recipe | None, way: str, sizes: Sizes, device: torch.device) -> Callable[[Any], Any]:
    """Forward and backward of a linear layer whose weight is gathered; from an input and the output's gradient."""
    weight_NK = torch.randn(sizes.out_features, sizes.in_features, device=device) / sizes.in_features**0.5
    if recipe is None:
        plain = weight_NK.bfloat16()
        return lambda values: (values[0] @ plain.t(), values[1] @ plain, values[1].t() @ values[0])
    gemms = recipe.gemms(on_hardware=device.type == "cuda")
    quantized = recipe.quantize(weight_NK, Direction.ROWWISE)
    wrap = compiled if way == "compiled" else lambda call: call
    cast_input, cast_grad, cast_wgrad = map(wrap, (gemms.cast_input, gemms.cast_grad, gemms.cast_wgrad))

    def step(values: Any) -> Any:
        x_MK, g_MN = values
        output = gemms.output(cast_input(x_MK), quantized, torch.bfloat16)
        grad = cast_grad(g_MN)
        if gemms.high_precision_wgrad:
            grad_weight = g_MN.t().mm(x_MK)
        else:
            grad_weight = gemms.grad_weight(cast_wgrad(g_MN, x_MK, grad), torch.bfloat16)
        return output, grad_weight, gemms.grad_input(grad, quantized, torch.bfloat16)

    return step


def time_layers(
    names: list[str], ways: list[str], sizes: Sizes, device: torch.device, repeats: int
) -> list[dict[str, Any]]:
    """Records of the second table."""
    records = []
    for tokens in sizes.tokens:
        values = (
            torch.randn(tokens, sizes.in_features, device=device).bfloat16(),
            torch.randn(tokens, sizes.out_features, device=device).bfloat16(),
        )
        plain = measure("fused", partial(linear_step, None, "", sizes, device), [values], device, repeats)
        assert plain is not None
        records.append({"tokens": tokens, "recipe": "bf16", "way": "", **plain._asdict(), "ratio": 1.0})
        for name in names:
            recipe = RECIPES[name]()
            if not recipe.has_gemms:
                continue
            if device.type == "cuda" and not recipe.is_capable(torch.cuda.get_device_capability(device)):
                continue
            for way in ways:
                times = measure(way, partial(linear_step, recipe, way, sizes, device), [values], device, repeats)
                if times is not None:
                    ratio = times.ms / plain.ms
                    records.append({"tokens": tokens, "recipe": name, "way": way, **times._asdict(), "ratio": ratio})
    return records


def cast_table(records: list[dict[str, Any]]) -> str:
    header = ["recipe", "cast", "MB"]
    ways = [way for way in WAYS if way in records[0]]
    for way in ways:
        header += [f"{way} ms", "GB/s", "host us"]
    lines = []
    for record in records:
        line = [record["recipe"], record["cast"], f"{record['bytes'] / 1e6:.0f}"]
        for way in ways:
            if record[way] is None:
                line += ["failed", "", ""]
                continue
            ms, host_us = record[way]["ms"], record[way]["host_us"]
            line += [f"{ms:.3f}", f"{record['bytes'] / ms / 1e6:.0f}", f"{host_us:.0f}"]
        lines.append(line)
    return markdown_table(header, lines)


def layer_table(records: list[dict[str, Any]]) -> str:
    header = ["tokens", "recipe", "casts", "ms", "x bf16", "host us"]
    lines = [
        [str(r["tokens"]), r["recipe"], r["way"], f"{r['ms']:.3f}", f"{r['ratio']:.3f}", f"{r['host_us']:.0f}"]
        for r in records
    ]
    return markdown_table(header, lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--recipes", nargs="+", choices=tuple(RECIPES), default=list(RECIPES))
    parser.add_argument("--repeats", type=int, default=10)
    parser.add_argument(
        "--compiled", choices=("none", "layers", "all"), default="layers", help="what to compile: takes seconds each"
    )
    parser.add_argument("--tiny", action="store_true", help="small matrices, to see that it runs")
    parser.add_argument("--json", type=Path, help="write all times to this file")
    options = parser.parse_args()
    device = torch.device(options.device)
    torch.manual_seed(0)
    sizes = TINY if options.tiny else Sizes()
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}, {describe_casts(device) or 'reference casts'}\n")
    with torch.no_grad():
        ways = ["reference", "fused"] if device.type == "cuda" else ["reference"]
        of_casts = [*ways, "compiled"] if options.compiled == "all" else ways
        casts = time_casts(options.recipes, of_casts, sizes, device, options.repeats)
        print(cast_table(casts), "\n", flush=True)
        of_layers = [*ways, "compiled"] if options.compiled != "none" else ways
        layers = time_layers(options.recipes, of_layers, sizes, device, options.repeats)
        print(layer_table(layers))
    if options.json is not None:
        options.json.write_text(json.dumps({"device": name, "casts": casts, "layers": layers}, indent=1))


if __name__ == "__main__":
    main()
